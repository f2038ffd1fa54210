"""DE3: a delegate in Python: what it is told, what it may refuse, and what it may do."""

from __future__ import annotations

import threading
import types
from typing import Any

import numpy as np
import pytest

import headrace
from tests import programs

from . import delegates
from .conftest import Devices, golden


def test_load_is_told_whose_it_is(devices: Devices) -> None:
    """DE3: method, island, number of inputs, compile specs, options, device; the payload as bytes."""
    told: list[Any] = []

    class Told(delegates.OneCall, name="TestA"):
        def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
            super().load(payload, context)
            told.append((type(payload), context))

    program = golden("two_islands")
    for device in devices:
        options: Any = {"TestA": {"speed": 3, "fast": True, "mode": "warm"}}
        with program.load(device, options=options, instances=2) as loaded:
            islands = loaded["forward"].islands
            assert len(told) == 2
            for kind, context in told:
                assert kind is bytes and context.method == "forward"
                assert context.island == islands[0].instruction and context.num_inputs == 2
                assert context.device is device
                assert dict(context.options) == {"speed": 3, "fast": True, "mode": "warm"}
                assert context.options["fast"] is True
                assert (
                    context.specs["target_device"] == b"cuda:0" and context.specs["headrace.inputs"] == b"2"
                )
                with pytest.raises(
                    ValueError,
                    match=r"named data: expected to be read in load\(\), got a read after it; keep what load\(\) reads",
                ):
                    context.named_data("x")
            assert program.right(loaded["forward"](*program.inputs()))
        told.clear()


def test_named_data_is_there_no_longer_where_loading_failed() -> None:
    """DE3, LT3: the engine's map of it is gone by then, also for who kept the context."""
    kept: list[Any] = []

    class Fails(delegates.OneCall, name="TestA"):
        def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
            kept.append(context)
            raise RuntimeError("on purpose")

    with pytest.raises(headrace.DelegateError, match="on purpose"):
        golden("two_islands").load(headrace.device("sim"))
    (context,) = kept
    with pytest.raises(
        ValueError,
        match=r"named data: expected to be read in load\(\), got a read after it; keep what load\(\) reads",
    ):
        context.named_data("x")


def test_named_data_is_there_while_it_loads() -> None:
    """DE3: KeyError for a key that neither the program nor its data files have."""
    found: list[Any] = []

    class Asks(delegates.OneCall, name="TestA"):
        def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
            super().load(payload, context)
            with pytest.raises(KeyError, match="not there"):
                context.named_data("not there")
            found.append(1)

    program = golden("two_islands")
    with program.load("sim") as loaded:
        assert found == [1] and program.right(loaded["forward"](*program.inputs()))


def test_a_delegate_may_refuse_its_payload(devices: Devices) -> None:
    """DE3, OP3: DelegateError with the exception as its cause; KeyboardInterrupt passes; nothing is left."""
    error: list[BaseException] = [ValueError("of another version")]

    class Refuses(headrace.Delegate, name="TestB"):
        def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
            raise error[0]

    program = golden("split_cuda")
    for device in devices:
        before = device.memory()["current_nbytes"]
        error[0] = ValueError("of another version")
        with pytest.raises(
            headrace.DelegateError, match=r"'TestB': load\(\) raised ValueError: of another"
        ) as caught:
            program.load(device)
        assert caught.value.__cause__ is error[0] and caught.value.delegate == "TestB"
        error[0] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            program.load(device)
        del caught
        assert device.memory()["current_nbytes"] == before


def test_the_class_defined_last_is_the_one_that_loads(late: Any) -> None:
    """DE3: a name defined anew; programs that are loaded keep the class they have."""
    program = golden("chain1")
    x = program.inputs()[0]
    old = program.load(late)

    class Zero(headrace.Delegate, name="TestA"):
        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            stream.call(lambda: outputs[0].numpy().fill(0), writes=outputs)

    with old, program.load(late) as new:
        assert program.right(old["forward"](x))
        assert not new["forward"](x)[0].numpy().any()


def test_a_name_is_checked() -> None:
    """DE3: OptionError for what is no name; EngineError for a native delegate's."""
    for bad in ("", "x" * 64, 5):
        with pytest.raises(headrace.OptionError, match="a name of 1 to 63 bytes"):
            type("Bad", (headrace.Delegate,), {}, name=bad)
    with pytest.raises(headrace.EngineError, match="native delegate"):
        type("Bad", (headrace.Delegate,), {}, name="XnnpackBackend")


def test_a_delegate_without_run_fails_at_the_call(late: Any) -> None:
    """DE3: NotImplementedError is the cause."""

    class Empty(headrace.Delegate, name="TestA"):
        pass

    with golden("chain1").load(late) as loaded:
        with pytest.raises(headrace.DelegateError) as caught:
            loaded["forward"](*golden("chain1").inputs())
        assert isinstance(caught.value.__cause__, NotImplementedError)


def test_where_inputs_end_must_be_known(late: Any) -> None:
    """DE3: by the compile spec, else by the plan; a program whose spec says nonsense and whose plan says nothing is
    refused; one whose plan says it runs without the spec."""
    path = golden("two_islands").path
    raw = path.read_bytes()
    assert raw.count(b"headrace.inputs") >= 1
    without = raw.replace(b"headrace.inputs", b"headrace.unputs")
    with headrace.load(without, device=late) as loaded:
        assert golden("two_islands").right(loaded["forward"](*golden("two_islands").inputs()))


def test_a_delegate_may_not_call_its_own_method(
    devices: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """OR7, DE3: InputError, not a deadlock; with instances to spare it ends at the last one."""
    program = golden("split_cuda")
    for device in devices:
        for instances in (1, 2):
            with program.load(device, instances=instances) as loaded:
                depth: list[int] = []

                def again(stream: Any, loaded: Any = loaded, depth: list[int] = depth) -> None:
                    depth.append(1)
                    loaded["forward"](*program.inputs())

                classes["TestA"].on_run = staticmethod(again)
                with pytest.raises(headrace.DelegateError, match="from inside a running call") as caught:
                    loaded["forward"](*program.inputs())
                causes = [caught.value.__cause__]
                while causes[-1] is not None:
                    causes.append(causes[-1].__cause__)
                assert isinstance(causes[-2], headrace.InputError) and len(depth) == instances

                classes["TestA"].on_run = staticmethod(lambda stream, loaded=loaded: loaded.close())
                with pytest.raises(headrace.DelegateError, match="close\\(\\) from outside"):
                    loaded["forward"](*program.inputs())
                classes["TestA"].on_run = None
                assert program.right(loaded["forward"](*program.inputs()))


def test_a_delegate_may_call_another_program(
    devices: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """DE3, SY2: it inherits the stream of the call, so the inner call is ordered and does not wait."""
    outer, inner = golden("split_cuda"), golden("chain10")
    for device in devices:
        with outer.load(device) as one, inner.load(device) as two:
            x = device.to_device(inner.inputs()[0])
            found: list[Any] = []

            def call(stream: Any, two: Any = two, x: Any = x, found: list[Any] = found) -> None:
                found.append((two["forward"](x), two["forward"].stats.last.synchronizations))

            classes["TestB"].on_run = staticmethod(call)
            # The inner program's islands are of the same classes.
            calls = 0
            original = call

            def once(stream: Any, original: Any = original) -> None:
                nonlocal calls
                calls += 1
                if calls == 1:
                    original(stream)

            classes["TestB"].on_run = staticmethod(once)
            assert outer.right(one["forward"](*outer.inputs(), stream=device.stream()))
            classes["TestB"].on_run = None
            ((results, waits),) = found
            assert inner.right(results) and (waits == 0 or device.name == "cpu")


def test_a_delegate_may_use_threads_of_its_own(
    devices: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """DE3: the interpreter's lock is the delegate's while run() runs, and can be given up in it."""
    program = golden("split_cuda")
    seen: list[int] = []

    def threads(stream: Any) -> None:
        workers = [threading.Thread(target=lambda: seen.append(threading.get_ident())) for _ in range(3)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()

    for device in devices:
        classes["TestA"].on_run = staticmethod(threads)
        with program.load(device) as loaded:
            assert program.right(loaded["forward"](*program.inputs()))
        assert len(seen) == 3
        seen.clear()
        classes["TestA"].on_run = None


def test_lent_memory_is_touched_in_stream_order_alone(sims: Devices) -> None:
    """DE3: numpy() of what a call lent, outside a host function, is refused: the work before may not be done."""

    class Early(delegates.OneCall, name="TestA"):
        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            for buffer in (*inputs, *outputs):
                with pytest.raises(headrace.InputError, match=r"inside stream\.call"):
                    buffer.numpy()
                with pytest.raises(headrace.InputError, match="lent for a call"):
                    buffer.__dlpack__()
            with pytest.raises(headrace.InputError, match="at most"):
                outputs[0].resize((1000, 1000))
            with pytest.raises(headrace.InputError, match="a dense output"):
                inputs[0].resize((1,))
            super().enqueue(inputs, outputs, stream)

    program = golden("chain1")
    for device in sims:
        with program.load(device) as loaded:
            assert program.right(
                loaded["forward"](device.to_device(program.inputs()[0]), stream=device.stream())
            )


def test_lent_memory_may_be_passed_on_while_its_call_runs(sims: Devices) -> None:
    """DE3: to another program on the same stream, as input and as out=, and to a copy; on another stream it is
    refused, since no event says when it is written."""
    from examples.scale import PROGRAM, Scale

    x = np.arange(4, dtype=np.float32)
    how, kept = ["call"], list[Any]()

    class Passes(headrace.Delegate, name="Scale"):
        load = Scale.load

        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            kept.extend((*inputs, *outputs))
            if how[0] == "call":
                self.inner["forward"](*inputs, out=list(outputs))
            elif how[0] == "copy":
                (copied,), (y,) = [stream.device.to_device(b, stream) for b in inputs], outputs
                Scale.run(self, (copied,), (y,), stream)  # type: ignore[arg-type]
            else:
                self.inner["forward"](*inputs, stream=stream.device.stream())

    def define(cls: Any) -> None:
        members = {"load": cls.load, "run": cls.run}
        types.new_class("Scale", (headrace.Delegate,), {"name": "Scale"}, lambda body: body.update(members))

    for device in sims:
        define(Scale)
        with headrace.load(PROGRAM, device=device) as inner:
            Passes.inner = inner  # type: ignore[attr-defined]
            types.new_class("Scale", (Passes,), {"name": "Scale"})
            with headrace.load(PROGRAM, device=device) as outer:
                for how[0], factor in (("call", 36), ("copy", 6)):
                    with headrace.caller_stream(device.stream()):
                        (y,) = outer["forward"](device.to_device(x))
                    np.testing.assert_array_equal(y.numpy(), factor * x)
                how[0] = "another stream"
                with pytest.raises(headrace.DelegateError, match="stream of the call that lent it"):
                    outer["forward"](device.to_device(x), stream=device.stream())
                # When the call is over, the memory is the method's again.
                given, result = kept[:2]
                stream, method = device.stream(), outer["forward"]
                for use, arguments, named in (
                    (method, (given,), {}),
                    (method, (x,), {"out": [result]}),
                    (result.resize, ((1,),), {}),
                    (stream.call, (print,), {"reads": [given]}),
                    (stream.declare, (), {"writes": [result]}),
                    (device.to_device, (given,), {}),
                    (given.numpy, (), {}),
                    (np.asarray, (given,), {}),
                    (given.float32, (), {}),
                    (given.__dlpack__, (), {}),
                ):
                    with pytest.raises(headrace.InputError, match="a call which has ended"):
                        use(*arguments, **named)
                with pytest.raises(headrace.InputError, match="memory lent for a call"):
                    device.to_device(x, out=result)
                # Nor may work that was given to a stream later look at it.
                failures = list[BaseException]()

                def late(failures: list[BaseException] = failures) -> None:
                    for buffer in kept[:2]:
                        with pytest.raises(headrace.InputError, match="a call which has ended") as failure:
                            buffer.numpy()
                        failures.append(failure.value)

                stream.call(late)
                stream.synchronize()
                assert len(failures) == 2
        kept.clear()
    define(Scale)


def test_the_shape_of_an_output_is_said_before_run_returns() -> None:
    """DE3: the engine reads it then."""

    class Late(delegates.OneCall, name="TestA"):
        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            super().enqueue(inputs, outputs, stream)
            stream.call(lambda: outputs[0].resize(outputs[0].shape))

    program = golden("chain1")
    device = headrace.device("sim", schedule="late")
    with program.load(device) as loaded, pytest.raises(headrace.DelegateError, match=r"when run\(\) returns"):
        loaded["forward"](program.inputs()[0])


@pytest.mark.parametrize("how", ["argument", "selection"])
def test_a_program_on_the_host_reads_lent_memory_in_order(how: str, sims: Devices) -> None:
    """SY2, SY3: a host-planned program that a delegate calls reads what the stream of the call has yet to write."""
    inner_program, outer_program = golden("dynamic_batch"), golden("split_cuda_resident_dynamic")
    results: list[Any] = []

    class Calls(delegates.OneCall):
        dynamic = True

        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            if self.context.island == 0:
                results.append(self.inner["forward"](inputs[0]))
            super().enqueue(inputs, outputs, stream)

    delegates.install(Calls)
    (x,) = inner_program.inputs()
    for device in sims:
        stream, source = device.stream(), device.empty(x.shape)
        with inner_program.load(device) as inner, outer_program.load(device) as outer:
            Calls.inner = inner  # type: ignore[attr-defined]
            stream.wait(device.per_thread_stream().record())  # behind the allocation
            stream.call(lambda to=source: np.copyto(to.numpy(), x), writes=[source])
            if how == "argument":
                outer["forward"](source, stream=stream)
            else:
                with headrace.caller_stream(stream):
                    outer["forward"](source)
            assert inner_program.right(results.pop())


def test_host_functions_may_not_call_the_device(sims: Devices) -> None:
    """DE3: CUDA's rule for cuLaunchHostFunc; the error is raised by the next wait."""
    for device in sims:
        stream, other = device.stream(), device.stream()
        for forbidden in (
            lambda other=other: other.call(lambda: None),
            lambda other=other: other.synchronize(),
            lambda device=device: device.empty(3),
            lambda other=other: other.record(),
        ):
            stream.call(forbidden)
            with pytest.raises(headrace.DelegateError, match="from inside a host function"):
                stream.synchronize()
        with golden("split_cuda").load(device) as loaded:
            for call in (lambda: loaded["forward"](*golden("split_cuda").inputs()), loaded.close):
                stream.call(call)
                with pytest.raises(headrace.DelegateError, match="host function"):
                    stream.synchronize()
            assert golden("split_cuda").right(loaded["forward"](*golden("split_cuda").inputs()))


def test_objects_may_be_dropped_inside_a_host_function(sims: Devices) -> None:
    """LT3: Python's collector runs where it likes: streams, buffers and programs that go there are ended later."""
    program = golden("split_cuda_resident")
    for device in sims:
        start = device.memory()["current_nbytes"]
        box: list[Any] = []
        loaded = program.load(device)
        x = [device.to_device(v) for v in program.inputs()]
        box += [loaded, *x, *(device.empty(5) for _ in range(20)), *(device.stream() for _ in range(3))]
        loaded["forward"](*x, stream=box[-1])
        ended = device.calls("destroy_stream")
        del loaded, x
        stream = device.stream()
        stream.call(box.clear)
        stream.synchronize()
        device.synchronize()
        device.trim()
        device.synchronize()
        assert device.calls("destroy_stream") == ended + 3
        assert device.memory()["current_nbytes"] == start


def test_host_memory_islands_run_in_line(devices: Devices) -> None:
    """DE3: a program that is all host memory: the delegates' stream is the cpu's and its work is done at once."""
    for name in (
        "split_host",
        "split_host_unplanned",
        "chain25_host",
        "split_many_arguments",
        "split_xnnpack",
    ):
        program = golden(name)
        for device in devices:
            with program.load(device) as loaded:
                for k in range(2):
                    with headrace.caller_stream(device.stream()):
                        assert program.right(loaded["forward"](*program.inputs(k)), k)
            if "seeds" in devices.name:
                break


def test_the_corpus_is_what_these_tests_think(late: Any) -> None:
    """The programs named here exist, and are split over TestA and TestB."""
    for name in ("split_cuda", "split_cuda_resident", "chain25_cuda", "chain25_cuda_resident"):
        assert set(programs.load(name).delegates) == {"TestA", "TestB"}
        assert len(golden(name).calls) >= 3
    for name, count in (("chain1", 1), ("chain10", 10), ("chain100", 100)):
        with golden(name).load(late) as loaded:
            assert len(loaded["forward"].islands) == count
            assert golden(name).right(loaded["forward"](late.to_device(golden(name).inputs()[0])))
    assert np.abs(golden("chain100").calls[0][1][0]).max() < 1e6
