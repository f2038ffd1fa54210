"""GR: a method captured as one graph over every delegate, and replayed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, Golden, golden
from .test_order import in_threads

PROGRAMS = ["split_cuda_resident", "split_cuda", "chain25_cuda_resident", "chain25_cuda", "fork", "to_host"]


def placed(device: Any, program: Golden, call: int = 0) -> list[Any]:
    return [device.to_device(x) for x in program.inputs(call)]


def arrays(outputs: Any) -> list[Any]:
    return [y.numpy() if isinstance(y, headrace.Buffer) else y for y in outputs]


# -------------------- capture and replay


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_answers_as_eager_pytorch_does(name: str, sims: Devices) -> None:
    """GR1, GR2: as the very first call; each replay sees its inputs, on the device or on the host."""
    program = golden(name)
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            assert program.right(captured.outputs, 0)
            for k in range(1, 4):
                inputs: Any = placed(device, program, k) if k % 2 else program.inputs(k)
                assert program.right(captured.replay(*inputs), k)
            stats = captured.stats
            assert (stats.captures, stats.replays, stats.eager) == (1, 3, 0) and stats.recaptures == {}
            assert loaded["forward"].stats.calls == 0


def test_a_graph_holds_the_work_of_every_way_to_work_on_a_stream(
    sims: Devices, way: type[delegates.Base]
) -> None:
    """GR1: one call, many, a side stream that is joined, the thread's selection; captured from a lane as well."""
    program = golden("chain10")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*placed(device, program), stream=device.stream())
            for k in range(3):
                results = captured.replay(*placed(device, program, k), stream=device.stream())
                assert program.right(results, k)


def test_a_replay_enqueues_copies_and_one_launch(late: Any) -> None:
    """GR1: 25 islands of two delegates are one launch, and no delegate is called."""
    program = golden("chain25_cuda_resident")
    with program.load(late) as loaded:
        stream = late.stream()
        captured = loaded["forward"].capture(*program.inputs(), stream=stream)
        inputs = placed(late, program, 1)
        before = {op: late.calls(op) for op in ("call", "launch", "copy")}
        (y,) = captured.replay(*inputs, stream=stream)
        after = {op: late.calls(op) - count for op, count in before.items()}
        assert after == {"call": 0, "launch": 1, "copy": 2}
        assert program.right([y], 1)


class Accumulating(delegates.Base):
    """Adds the sum of all its results so far to each result: state on the device that steps advance."""

    loaded: list[Any] = []  # noqa: RUF012

    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        super().load(payload, context)
        self.total = context.device.to_device(np.zeros(1, np.float32))
        self.loaded.append(self)

    def state(self) -> tuple[Any, ...]:
        return (self.total,)

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        def work() -> None:
            total = self.total.numpy()
            for buffer, result in zip(outputs, self.compute([b.numpy() for b in inputs]), strict=True):
                total += np.float32(result.sum())
                buffer.numpy()[...] = result + total

        stream.call(work, reads=[*inputs, self.total], writes=[*outputs, self.total])


def test_capture_is_one_step_of_a_stateful_model(sims: Devices) -> None:
    """GR1: N steps equal capture and N - 1 replays, and calls and replays advance one state."""
    delegates.install(Accumulating)
    program = golden("two_islands")
    for device in sims:
        with program.load(device) as eager, program.load(device) as loaded:
            steps = [arrays(eager["forward"](*program.inputs(k))) for k in range(5)]
            captured = loaded["forward"].capture(*program.inputs(0))
            got = [arrays(captured.outputs)]
            got += [arrays(captured.replay(*program.inputs(k))) for k in (1, 2)]
            got.append(arrays(loaded["forward"](*program.inputs(3))))
            got.append(arrays(captured.replay(*program.inputs(4))))
            for step, (want, have) in enumerate(zip(steps, got, strict=True)):
                np.testing.assert_array_equal(have[0], want[0], err_msg=f"step {step}")
            assert not np.array_equal(steps[0][0], arrays(loaded["forward"](*program.inputs(0)))[0])


def test_inputs_changed_in_place_are_seen(sims: Devices) -> None:
    """GR2: host arrays and device buffers that are written between replays."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            host = [np.array(x) for x in program.inputs(0)]
            there = placed(device, program, 0)
            captured = loaded["forward"].capture(*host)
            for k in range(len(program.calls)):
                for x, buffer, new in zip(host, there, program.inputs(k), strict=True):
                    x[...] = new
                    device.to_device(new, out=buffer)
                assert program.right(captured.replay(*host), k)
                assert program.right(captured.replay(*there, stream=device.stream()), k)


def test_host_inputs_of_any_layout_are_repacked(sims: Devices) -> None:
    """GR2: strided, reversed, transposed arrays; the count says so."""
    program = golden("split_cuda")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs())
            strided = [np.asarray(x.T.copy()).T for x in program.inputs(1)]
            assert program.right(captured.replay(*strided), 1)
            assert captured.stats.last.repacked_bytes == sum(x.nbytes for x in strided)


# -------------------- when a replay returns, and what it costs


@pytest.mark.parametrize("how", ["argument", "selection", "nothing"])
@pytest.mark.parametrize("given", ["device", "host"])
def test_a_replay_waits_by_the_rule_of_calls(how: str, given: str, sims: Devices) -> None:
    """GR2, SY1: if an input lies on the host, or no stream was given or selected; else it does not."""
    program = golden("chain25_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()
            captured = loaded["forward"].capture(*program.inputs(), stream=stream)
            inputs: Any = placed(device, program, 1) if given == "device" else program.inputs(1)
            waits = how == "nothing" or given == "host"
            for _ in range(3):
                if how == "selection":
                    with headrace.caller_stream(stream):
                        results = captured.replay(*inputs)
                else:
                    results = captured.replay(*inputs, stream=stream if how == "argument" else None)
                assert captured.stats.last.synchronizations == (1 if waits else 0)
                if sims.late and not waits:
                    assert device.pending > 20 and not stream.query()
                assert program.right(results, 1)


def test_host_outputs_are_there_when_a_replay_returns(sims: Devices) -> None:
    """GR2, SY1: with one wait, whatever stream was chosen."""
    program = golden("to_host")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs())
            for k in range(3):
                results = captured.replay(*placed(device, program, k), stream=device.stream())
                assert captured.stats.last.synchronizations == 1
                assert program.right(results, k)


def test_a_steady_replay_costs_nothing_at_the_driver(sims: Devices) -> None:
    """SY4, GR2: no allocation, no free, no byte staged, no wait; borrowed or fresh."""
    program = golden("chain25_cuda_resident")
    for device in sims:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            captured = loaded["forward"].capture(*program.inputs())
            inputs = placed(device, program)
            for borrow in (False, True):
                for _ in range(3):
                    results = captured.replay(*inputs, borrow=borrow)
                for _ in range(3):
                    results = captured.replay(*inputs, borrow=borrow)
                    assert set(vars(captured.stats.last).values()) == {0}
                assert program.right(results)


# -------------------- outputs


def test_fresh_outputs_stay_right(sims: Devices) -> None:
    """GR2: after later replays, calls, close() of the graph and of the program."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()
            captured = loaded["forward"].capture(*program.inputs(0), stream=stream)
            kept = [captured.outputs]
            kept += [captured.replay(*placed(device, program, k), stream=stream) for k in (1, 2)]
            loaded["forward"](*program.inputs(0), stream=stream)
            captured.close()
        for k, outputs in enumerate(kept):
            assert program.right(outputs, k)


def test_a_borrowed_output_is_refused_once_a_replay_wrote_over_it(sims: Devices) -> None:
    """GR2: a stale read is an error by name, by every way to read it; a borrowed output is no copy."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()
            captured = loaded["forward"].capture(*program.inputs(0), stream=stream)
            (first,) = captured.replay(*placed(device, program, 0), stream=stream, borrow=True)
            assert program.right([first], 0)
            copies = device.calls("copy")
            (second,) = captured.replay(*placed(device, program, 1), stream=stream, borrow=True)
            assert device.calls("copy") - copies == 2 * len(program.inputs())
            assert first.address == second.address and program.right([second], 1)
            reads: list[Callable[[], Any]] = [
                first.numpy,
                first.float32,
                first.__dlpack__,
                lambda device=device, first=first: device.to_device(first),
            ]
            for read in reads:
                with pytest.raises(headrace.InputError, match=r"borrowed from replay 1 .*written over"):
                    read()
            assert program.right([second], 1)


def test_a_borrowed_output_may_be_the_next_input(sims: Devices) -> None:
    """GR2: read before it is written over, though both happen in one replay."""
    program = golden("chain1")
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()
            (x,) = placed(device, program)
            want = x
            for _ in range(3):
                (want,) = loaded["forward"](want)
            captured = loaded["forward"].capture(x, stream=stream)
            (y,) = captured.outputs
            for _ in range(2):
                (y,) = captured.replay(y, stream=stream, borrow=True)
            np.testing.assert_array_equal(y.numpy(), want.numpy())
            (stale,) = captured.replay(x, stream=stream, borrow=True)
            captured.replay(x, stream=stream)
            with pytest.raises(headrace.InputError, match="written over"):
                captured.replay(stale, stream=stream)


def test_a_replay_is_behind_readers_of_what_it_lent(late: Any) -> None:
    """GR2: work that reads a borrowed output on another stream is done before the next replay writes there."""
    program = golden("split_cuda_resident")
    with program.load(late) as loaded:
        stream, other = late.stream(), late.stream()
        captured = loaded["forward"].capture(*program.inputs(0), stream=stream)
        (lent,) = captured.replay(*placed(late, program, 0), stream=stream, borrow=True)
        copy = late.empty(lent.shape)
        late.to_device(lent, stream=other, out=copy)
        (fresh,) = captured.replay(*placed(late, program, 1), stream=stream)
        assert program.right([fresh], 1)
        assert program.right([copy], 0)


@pytest.mark.parametrize("name", ["split_cuda_resident", "split_cuda"])
def test_outputs_go_where_the_caller_says(name: str, sims: Devices) -> None:
    """GR2: `out=` on the device or on the host; wrong ones are refused before anything is enqueued."""
    program = golden(name)
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()
            captured = loaded["forward"].capture(*program.inputs(0), stream=stream)
            (like,) = program.calls[1][1]
            on_host = name == "split_cuda"
            out = np.full((2 * like.shape[0], like.shape[1]), 7, like.dtype)[::2] if on_host else None
            target = out if on_host else device.empty(like.shape)
            results = captured.replay(*program.inputs(1), stream=stream, out=[target])
            assert results[0] is target and program.right(results, 1)
            launches = device.calls("launch")
            wrong = device.empty(like.shape) if on_host else np.empty_like(like)
            with pytest.raises(headrace.InputError, match="out 0: expected memory of"):
                captured.replay(*program.inputs(0), stream=stream, out=[wrong])
            with pytest.raises(headrace.InputError, match="forward, input 0"):
                captured.replay(np.zeros(3, np.float32), *program.inputs(0)[1:], stream=stream)
            with pytest.raises(headrace.OptionError, match="borrow: expected a bool"):
                captured.replay(*program.inputs(0), borrow=1)
            assert device.calls("launch") == launches


# -------------------- the key


def dynamic(classes: dict[str, type[delegates.Base]]) -> Golden:
    for cls in classes.values():
        cls.dynamic = True
    return golden("split_cuda_dynamic")


def test_other_shapes_are_captured_when_they_come_and_kept(
    sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """GR2: counted with their reason; a graph that is there is used again; never one of another shape."""
    program = dynamic(classes)
    shapes = {tuple(program.inputs(k)[0].shape) for k in range(len(program.calls))}
    assert len(shapes) >= 2
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0), keep=len(shapes))
            for _ in range(2):
                for k in range(len(program.calls)):
                    assert program.right(captured.replay(*program.inputs(k)), k)
            stats = captured.stats
            assert (stats.captures, stats.kept, stats.evicted) == (len(shapes), len(shapes), 0)
            assert stats.recaptures == {"shapes": len(shapes) - 1}
            assert stats.replays + stats.captures - 1 == 2 * len(program.calls)


def test_graphs_are_kept_with_a_bound(sims: Devices, classes: dict[str, type[delegates.Base]]) -> None:
    """GR2: the least recently used one goes, its memory with it; what it gave stays right."""
    program = dynamic(classes)
    calls = {tuple(program.inputs(k)[0].shape): k for k in range(len(program.calls))}
    first, second = list(calls.values())[:2]
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(first), keep=1)
            results = [(first, captured.outputs)]
            held = set()
            for k in (second, first, second, first):
                results.append((k, captured.replay(*program.inputs(k))))
                held.add((captured.stats.kept, captured.stats.memory_nbytes > 0))
            assert held == {(1, True)}
            assert captured.stats.recaptures == {"shapes": 4} and captured.stats.evicted == 4
            assert all(program.right(outputs, k) for k, outputs in results)
    with pytest.raises(headrace.OptionError, match="keep: expected a count"):
        loaded["forward"].capture(*program.inputs(0), keep=0)


class Placed(delegates.Base):
    """Notes on how many SMs its work runs."""

    seen: list[int] = []  # noqa: RUF012

    def body(self, inputs: Any, outputs: Any) -> Callable[[], None]:
        work = super().body(inputs, outputs)
        device = self.context.device

        def noted() -> None:
            self.seen.append(device._running_sms)
            work()

        return noted


@pytest.mark.filterwarnings("ignore::headrace.LaneWarning")
def test_a_graph_stays_in_the_lane_of_the_stream(sims: Devices) -> None:
    """GR3: captured for the lane of the stream, anew for another one and for none; launched nowhere else."""
    delegates.install(Placed)
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            lanes = device.split([8, 64])
            streams = [lane.stream() for lane in lanes] + [device.stream()]
            captured = loaded["forward"].capture(*program.inputs(0), stream=streams[0])
            for _ in range(2):
                for stream, sms in zip(streams, (8, 64, 0), strict=True):
                    Placed.seen.clear()
                    with headrace.caller_stream(stream):
                        assert program.right(captured.replay(*placed(device, program, 1)), 1)
                    assert len(Placed.seen) >= 2 and set(Placed.seen) == {sms}
            assert captured.stats.recaptures == {"partition": 2} and captured.stats.kept == 3
            del lanes, streams, stream
            assert program.right(captured.replay(*program.inputs(2)), 2)


def test_state_that_lies_elsewhere_is_captured_anew(sims: Devices) -> None:
    """GR2: the addresses of state are part of the key; the old graph is never launched again."""
    delegates.install(Accumulating)
    program = golden("two_islands")
    for device in sims:
        Accumulating.loaded.clear()
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            for one in Accumulating.loaded:
                one.total = device.to_device(np.zeros(1, np.float32))
            again = arrays(captured.replay(*program.inputs(0)))
            np.testing.assert_array_equal(again[0], arrays(captured.outputs)[0])
            stats = captured.stats
            assert stats.recaptures == {"state": 1} and (stats.kept, stats.evicted) == (1, 1)


def test_delegates_loaded_anew_are_captured_anew(
    sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """GR2: a recorded call that fails in its middle loads the method again; graphs of what was there before go."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))

            def refuse(stream: Any) -> None:
                raise RuntimeError("on purpose")

            classes["TestB"].on_run = staticmethod(refuse)
            with headrace.record(), pytest.raises(headrace.DelegateError, match="on purpose"):
                loaded["forward"](*program.inputs(0))
            classes["TestB"].on_run = None
            assert program.right(loaded["forward"](*program.inputs(1)), 1)
            for k in range(3):
                assert program.right(captured.replay(*program.inputs(k)), k)
            assert captured.stats.recaptures == {"delegates": 1} and captured.stats.kept == 1


# -------------------- what is refused


class SaysNo(delegates.Base):
    answer: Any = "it records a graph of its own"

    def capturable(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Allocating(delegates.Base):
    """Takes device memory at every run and keeps it."""

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        self.__dict__.setdefault("kept", []).append(stream.device.empty((1000,), stream=stream))
        super().enqueue(inputs, outputs, stream)


REFUSED = {
    "split_cuda_host_between": "kernel 'et_copy::_d2h_copy.out', in its middle",
    "host_first": r"kernel 'aten::add.out', on the cpu: it would run once",
    "split_host": "delegate 'TestA', which works on host memory",
    "mlp_portable": "kernel 'aten::.*', on the cpu",
    "loop": "got (a branch at|.*on the cpu)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name_before_anything_runs(name: str, late: Any) -> None:
    """GR7: by reading the plan; nothing was run, and the method goes on as before."""
    program = golden(name)
    with program.load(late) as loaded:
        before = late.calls("call"), late.calls("begin_capture"), late.calls("create_stream")
        for _ in range(2):  # a refusal is no failed capture
            with pytest.raises(headrace.CaptureError, match=REFUSED[name]) as caught:
                loaded["forward"].capture(*program.inputs())
            assert caught.value.step == "check"
        assert before == (late.calls("call"), late.calls("begin_capture"), late.calls("create_stream"))
        assert program.right(loaded["forward"](*program.inputs()))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("it records a graph of its own", "it records a graph of its own"),
        (False, r"capturable\(\) gave False"),
        (1, r"capturable\(\) gave 1"),
        ("", "an empty reason"),
        (RuntimeError("hm"), r"capturable\(\) raised RuntimeError: hm"),
    ],
)
def test_a_delegate_may_say_no(answer: Any, message: str, late: Any) -> None:
    """GR7: with its reason, by island and delegate; an answer that is none is no consent."""
    program = golden("split_cuda_resident")
    delegates.install(SaysNo, ["TestB"])
    SaysNo.answer = answer
    with program.load(late) as loaded:
        with pytest.raises(
            headrace.CaptureError, match=f"delegate 'TestB', which cannot: .*{message}"
        ) as caught:
            loaded["forward"].capture(*program.inputs())
        assert caught.value.step == "check" and late.calls("call") == 0
        SaysNo.answer = True
        assert program.right(loaded["forward"].capture(*program.inputs()).outputs)


def test_an_allocation_that_no_cache_serves_is_refused_by_name(sims: Devices) -> None:
    """GR7: after warm-ups that did not help; nothing was captured, no capture has failed."""
    program = golden("split_cuda_resident")
    delegates.install(Allocating, ["TestB"])
    for device in sims:
        with program.load(device) as loaded:
            with pytest.raises(
                headrace.CaptureError, match=r"1 allocations in run 3 by instruction 1 \(delegate 'TestB'\)"
            ) as caught:
                loaded["forward"].capture(*program.inputs())
            assert caught.value.step == "check" and device.calls("begin_capture") == 0
            assert program.right(loaded["forward"](*program.inputs()))


def test_a_warm_up_fills_caches_and_starts_from_the_same_state(sims: Devices) -> None:
    """GR1, GR7: a delegate that allocates in its first run alone is run twice, and its state advances by one step."""

    class Lazy(Accumulating):
        def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
            stages.append(self.stage())
            if not hasattr(self, "scratch"):
                self.scratch = stream.device.empty((100_000,), stream=stream)
            super().enqueue(inputs, outputs, stream)

    stages: list[str] = []
    program = golden("two_islands")
    for device in sims:
        delegates.install(Accumulating)
        with program.load(device) as eager:
            want = [arrays(eager["forward"](*program.inputs(k))) for k in range(2)]
        delegates.install(Lazy)
        stages.clear()
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            assert stages == ["warm-up"] * 4 + ["capture"] * 2
            np.testing.assert_array_equal(arrays(captured.outputs)[0], want[0][0])
            np.testing.assert_array_equal(arrays(captured.replay(*program.inputs(1)))[0], want[1][0])
            loaded["forward"](*program.inputs(0))
            assert stages[-1] == "call"


def test_memory_from_a_cache_may_be_taken_in_a_capture(sims: Devices) -> None:
    """GR7, GR8: a temporary Buffer of each run is served by the device's cache, and kept by the graph."""

    class Temporary(delegates.Base):
        def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
            values = self.compute([np.ones(b.shape, b.dtype) for b in inputs])
            between = [stream.device.empty(v.shape, v.dtype, stream=stream) for v in values]

            def first() -> None:
                for buffer, result in zip(between, self.compute([b.numpy() for b in inputs]), strict=True):
                    buffer.numpy()[...] = result

            def second() -> None:
                for to, buffer in zip(outputs, between, strict=True):
                    to.numpy()[...] = buffer.numpy()

            stream.call(first, reads=inputs, writes=between)
            stream.call(second, reads=between, writes=outputs)

    delegates.install(Temporary)
    program = golden("chain10")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            junk = [
                device.empty((1, 4)) for _ in range(30)
            ]  # whoever wants the cache's memory gets other memory
            for k in range(3):
                for buffer in junk:
                    device.to_device(np.full((1, 4), np.nan, np.float32), out=buffer)
                assert program.right(captured.replay(*program.inputs(k)), k)


def test_on_the_cpu_there_are_no_graphs() -> None:
    """GR7: said by type; the method is there."""
    program = golden("split_cuda")
    with program.load("cpu") as loaded:
        with pytest.raises(headrace.CaptureError, match="on cpu, which has no graphs; call the method"):
            loaded["forward"].capture(*program.inputs())
        assert program.right(loaded["forward"](*program.inputs()))


# -------------------- other threads, other captures, the collector


def test_threads_may_replay_one_graph(sims: Devices) -> None:
    """GR9, OR7: four of them, a stream each, with calls among the replays; every answer is its own inputs'."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            inputs = [placed(device, program, k) for k in range(len(program.calls))]

            def work(
                k: int,
                device: Any = device,
                loaded: Any = loaded,
                captured: Any = captured,
                inputs: Any = inputs,
            ) -> None:
                stream = device.stream()
                for i in range(3):
                    call = (i + k) % len(inputs)
                    run = loaded["forward"] if (i + k) % 3 == 0 else captured.replay
                    assert program.right(run(*inputs[call], stream=stream if k % 2 else None), call)

            in_threads(4, work)


def test_replays_and_calls_are_in_order_whatever_streams_they_come_on(sims: Devices) -> None:
    """GR9, OR7: they share planned memory: none waits on the host, and every answer is right."""
    program = golden("chain25_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            inputs = [placed(device, program, k) for k in range(3)]
            results = []
            for k in range(9):
                run = loaded["forward"] if k % 3 == 2 else captured.replay
                results.append((k, run(*inputs[k % 3], stream=device.stream())))
            assert captured.stats.last.synchronizations == 0
            for k, result in reversed(results):
                assert program.right(result, k % 3)


def test_captures_are_not_disturbed_by_legacy_work_of_other_threads() -> None:
    """GR8: 200 captures beside a thread that hammers the legacy stream, allocates and frees: no error anywhere."""
    program = golden("split_cuda_resident")
    device = headrace.device("sim")
    done = threading.Event()
    rounds = 0

    def hammer() -> None:
        nonlocal rounds
        legacy = device.legacy_stream()
        while not done.is_set():
            x = device.to_device(np.ones(10, np.float32), stream=legacy)
            legacy.call(lambda: None, reads=[x])
            legacy.synchronize()
            device.trim()
            rounds += 1

    def capture() -> None:
        try:
            for k in range(200):
                with program.load(device) as loaded:
                    captured = loaded["forward"].capture(*program.inputs(k % 3))
                    assert program.right(captured.replay(*program.inputs(1)), 1)
        finally:
            done.set()

    in_threads(2, lambda k: (hammer, capture)[k]())
    assert rounds > 10


def test_the_collector_may_run_in_a_capture(sims: Devices, classes: dict[str, type[delegates.Base]]) -> None:
    """GR8: Buffers, streams, graphs and programs that it drops there are given back afterwards."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            collected: list[str] = []
            kept: list[Any] = []

            def litter(stream: Any, kept: list[Any] = kept, collected: list[str] = collected) -> None:
                stage = delegates.Base.stage()
                if stage != "capture" or not kept:
                    return
                ring: list[Any] = [kept.pop()]
                ring.append(ring)
                del ring
                assert gc.collect() > 0
                collected.append(stage)

            other = program.load(device)
            kept.append(device.to_device(np.ones(100_000, np.float32)))
            kept.append((device.stream(), other, other["forward"].capture(*program.inputs(0))))
            del other
            for cls in classes.values():
                cls.on_run = staticmethod(litter)
            before = device.memory()["current_nbytes"]
            captured = loaded["forward"].capture(*program.inputs(0))
            assert collected == ["capture", "capture"]
            for k in range(3):
                assert program.right(captured.replay(*program.inputs(k)), k)
            device.trim()
            assert device.memory()["current_nbytes"] <= before - 400_000
            for cls in classes.values():
                cls.on_run = None


@pytest.mark.parametrize("what", ["call", "replay", "capture"])
def test_inside_the_caller_s_own_capture_it_is_refused_before_anything_is_enqueued(
    what: str, sims: Devices
) -> None:
    """GR8: by type; the capture stays intact and holds what the caller put there, and nothing else."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            captured = loaded["forward"].capture(*program.inputs(0))
            inputs = placed(device, program, 1)
            stream, ran = device.stream(), []
            stream._begin_capture()
            stream.call(lambda ran=ran: ran.append(1))
            run = {"call": loaded["forward"], "replay": captured.replay, "capture": loaded["forward"].capture}
            calls = device.calls("call"), device.calls("copy"), device.calls("launch")
            with pytest.raises(headrace.CaptureError, match="a stream that does not capture") as caught:
                run[what](*inputs, stream=stream)
            assert caught.value.step == "stream"
            assert calls == (device.calls("call"), device.calls("copy"), device.calls("launch"))
            assert stream._capture_status() == 1
            stream._end_capture()(device.stream())
            assert ran == [1]
            assert program.right(captured.replay(*inputs, stream=stream), 1)


def test_a_call_on_another_stream_does_not_break_the_caller_s_capture(sims: Devices) -> None:
    """GR8: calls, replays, captures, frees and drops on the thread that captures elsewhere: what CUDA forbids there
    is done under the thread's relaxed mode."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            stream, other, ran = device.stream(), device.stream(), []
            stream._begin_capture()
            stream.call(lambda ran=ran: ran.append(1))
            results = [loaded["forward"](*program.inputs(0), stream=other)]
            captured = loaded["forward"].capture(*program.inputs(1), stream=other)
            results += [captured.outputs, captured.replay(*program.inputs(2), stream=other)]
            captured.close()
            del captured
            gc.collect()
            assert stream._capture_status() == 1
            stream._end_capture()(other)
            assert ran == [1]
            for k, outputs in enumerate(results):
                assert program.right(outputs, k)


# -------------------- lifetime


def test_a_graph_keeps_what_it_needs(sims: Devices) -> None:
    """LT3, LT4: program, method, inputs, stream and device are dropped; it answers."""
    program = golden("split_cuda_resident")
    for device in sims:
        loaded: Any = program.load(device)
        method = loaded["forward"]
        stream = device.stream()
        captured = method.capture(*program.inputs(0), stream=stream)
        outputs = captured.replay(*placed(device, program, 1), stream=stream)
        stream.close()
        del loaded, method, stream
        gc.collect()
        assert program.right(outputs, 1) and program.right(captured.outputs, 0)
        assert program.right(captured.replay(*program.inputs(2)), 2)


def test_a_graph_of_a_closed_program_or_a_closed_graph_says_so(sims: Devices) -> None:
    """LT3, GR2: by type, with replays in flight; closing twice is fine, and the memory is back."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()
            with loaded["forward"].capture(*program.inputs(0), stream=stream) as captured:
                outputs = captured.replay(*placed(device, program, 1), stream=stream)
                (use,) = (u for u in loaded.memory().uses if u.what == "graphs")
                assert use.nbytes == captured.stats.memory_nbytes > 0
            captured.close()
            with pytest.raises(headrace.CaptureError, match="an open graph, got one that was closed"):
                captured.replay(*program.inputs(0))
            assert captured.stats.kept == captured.stats.memory_nbytes == 0
            assert program.right(outputs, 1)
            second = loaded["forward"].capture(*program.inputs(0), stream=stream)
            outputs = second.replay(*placed(device, program, 2), stream=stream)
        with pytest.raises(headrace.ProgramError, match="closed"):
            second.replay(*program.inputs(0))
        second.close()
        assert program.right(outputs, 2)
        del loaded, captured, second, outputs, stream
        gc.collect()
        device.trim()
        device.synchronize()
        assert device.memory()["current_nbytes"] == 0


def test_a_graph_takes_one_instance_and_leaves_the_others(sims: Devices) -> None:
    """OR7, GR9: with two instances, two graphs and calls each have the memory of their own."""
    program = golden("chain25_cuda_resident")
    for device in sims:
        with program.load(device, instances=2) as loaded:
            graphs = [loaded["forward"].capture(*program.inputs(k)) for k in range(2)]
            inputs = [placed(device, program, k) for k in range(3)]
            results = []
            for k in range(6):
                run = (graphs[0].replay, graphs[1].replay, loaded["forward"])[k % 3]
                results.append((k % 3, run(*inputs[k % 3], stream=device.stream())))
            for k, outputs in reversed(results):
                assert program.right(outputs, k)


# -------------------- the record


def test_a_record_of_replays_is_in_order(sims: Devices, way: type[delegates.Base]) -> None:
    """OR5, GR2: capture and replays on several streams, between calls: nothing conflicts, and something was seen."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            with headrace.record() as record:
                captured = loaded["forward"].capture(*program.inputs(0))
                inputs = placed(device, program, 1)
                for k in range(3):
                    results = captured.replay(*inputs, stream=device.stream(), borrow=k == 1)
                    assert program.right(results, 1)
                assert program.right(loaded["forward"](*inputs, stream=device.stream()), 1)
            checked = record.check()
            assert checked.accesses > 10


def test_the_accumulating_delegate_tells_steps_apart(late: Any) -> None:
    """GR1: the control: without state two steps on the same inputs are equal, with it they are not."""
    program = golden("two_islands")
    for way, equal in ((delegates.OneCall, True), (Accumulating, False)):
        delegates.install(way)
        with program.load(late) as loaded:
            a, b = (arrays(loaded["forward"](*program.inputs(0)))[0] for _ in range(2))
            assert np.array_equal(a, b) == equal
