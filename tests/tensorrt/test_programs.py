"""DE2: programs split over TensorRT (by its stand-in) and AOTInductor, on every device, in graphs and in lanes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.testing.tensorrt import StandIn, stand_in
from tests import programs
from tests.conftest import array_of, assert_close, run_python, succeeded
from tests.contract.conftest import SEEDS

SCHEDULES: dict[str, list[Any]] = {
    "cpu": [None],
    "sim-eager": ["eager"],
    "sim-late": ["late"],
    "sim-seeds": list(range(SEEDS)),
}


def right(results: Any, call: Any, program: programs.Program) -> None:
    assert len(results) == len(call.outputs) > 0
    for got, want in zip(results, call.outputs, strict=True):
        assert_close(
            got.numpy() if isinstance(got, headrace.Buffer) else got, want, program.rtol, program.atol
        )


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("name", programs.TENSORRT.names())
def test_answers_are_those_of_eager(name: str, kind: str) -> None:
    """DE2, OR2, OR5, DM1: on cpu and under every kind of schedule, in order; shapes that change, host memory staged."""
    program = programs.TENSORRT.load(name)
    for schedule in SCHEDULES[kind]:
        device = headrace.device("cpu") if schedule is None else headrace.device("sim", schedule=schedule)
        with stand_in() as module, headrace.record() as record, program.open(device=device) as loaded:
            for call in program.calls:
                right(loaded["forward"](*given(call, device, program)), call, program)
            assert module.contexts == len(tensorrt_islands(program))
        assert (module.contexts, module.dropped_early) == (0, 0)
        if schedule is not None:
            assert record.check().accesses > 0


def given(call: Any, device: Any, program: programs.Program) -> list[Any]:
    """The inputs of a call where the program has them."""
    arrays = [array_of(v) for v in call.inputs]
    return [device.to_device(x) for x in arrays] if program.name in ("sizes", "chain") else arrays


def tensorrt_islands(program: programs.Program) -> list[Any]:
    islands = headrace.pte.read(program.path)["forward"].islands
    found = [i for i in islands if i.delegate == "TensorRTBackend"]
    assert found
    return found


def test_twenty_six_islands_alternate_between_two_delegates() -> None:
    """OR4: the program that the order is shown on is what it is said to be."""
    islands = headrace.pte.read(programs.TENSORRT.load("chain").path)["forward"].islands
    assert [i.delegate for i in islands] == ["TensorRTBackend", "CudaBackend"] * 13
    assert all(i.payload_head[:4] == b"TR01" for i in islands[::2])


@pytest.mark.parametrize("schedule", ["eager", "late", 3, 7])
def test_call_without_staging_returns_with_its_work_in_flight(schedule: Any) -> None:
    """SY1, SY4, CS1, LT1: on the caller's stream, no wait and no allocation once it is warm, 26 islands long."""
    program = programs.TENSORRT.load("chain")
    sim = headrace.device("sim", schedule=schedule)
    stream = sim.stream()
    with stand_in(), program.open(device=sim) as loaded:
        method = loaded["forward"]
        calls = [(sim.to_device(array_of(c.inputs[0])), c) for c in program.calls]
        out = sim.empty(calls[0][0].shape)
        for x, _ in (calls * 2)[:4]:
            method(x, stream=stream, out=[out])
        stream.synchronize()
        waits = ("synchronize_stream", "synchronize_event", "synchronize_device")
        before = [sim.calls(wait) for wait in waits]
        method(calls[0][0], stream=stream, out=[out])
        assert [sim.calls(wait) for wait in waits] == before
        assert schedule != "late" or sim.pending > 26
        last = method.stats.last
        assert (last.synchronizations, last.driver_allocations, last.bytes_to_device) == (0, 0, 0)
        right([out], calls[0][1], program)


@pytest.mark.parametrize("name", ["alone", "sizes", "chain"])
@pytest.mark.parametrize("schedule", ["eager", "late", 1])
def test_one_graph_over_all_islands_replays_right(name: str, schedule: Any) -> None:
    """GR1, GR2: captured as the first call; new inputs, also of other shapes; calls between replays are right too."""
    program = programs.TENSORRT.load(name)
    sim = headrace.device("sim", schedule=schedule)
    with stand_in() as module, program.open(device=sim) as loaded:
        method = loaded["forward"]
        inputs = [given(c, sim, program) for c in program.calls]
        graph = method.capture(*inputs[0])
        right(graph.outputs, program.calls[0], program)
        for call, arrays in zip(program.calls * 2, inputs * 2, strict=True):
            right(graph.replay(*arrays), call, program)
            right(method(*arrays), call, program)
        # One context for calls and one for each graph, in each island: a recorded one is not set up again.
        shapes = {arrays[0].shape for arrays in inputs}
        assert module.contexts == len(tensorrt_islands(program)) * (1 + len(shapes))
        assert graph.stats.captures == len(shapes)
        graph.close()
        # What a graph used goes with the next call after its last launch.
        right(method(*inputs[0]), program.calls[0], program)
        assert module.contexts == len(tensorrt_islands(program))
    assert (module.contexts, module.dropped_early) == (0, 0)


def test_graph_keeps_its_contexts_after_the_program_is_gone() -> None:
    """LT4: what a graph's work uses goes when the graph does, with a replay in flight."""
    program = programs.TENSORRT.load("chain")
    sim = headrace.device("sim", schedule="late")
    with stand_in() as module:
        loaded = program.open(device=sim)
        graph = loaded["forward"].capture(*given(program.calls[0], sim, program))
        (x,) = given(program.calls[1], sim, program)
        with headrace.caller_stream(sim.stream()):
            results = graph.replay(x)
        assert sim.pending and module.contexts >= 13
        del graph
        loaded.close()
        del loaded
        right(results, program.calls[1], program)
        del results
        sim.trim()
        assert (module.contexts, module.dropped_early) == (0, 0)


def test_host_memory_is_staged_and_cannot_be_captured() -> None:
    """SY1, GR7: a program planned for the host runs on a device, waits, and says why it is no graph."""
    program = programs.TENSORRT.load("staged")
    sim = headrace.device("sim", schedule="late")
    stream = sim.stream()
    with stand_in(), program.open(device=sim) as loaded:
        for call in program.calls:
            right(loaded["forward"](*map(array_of, call.inputs), stream=stream), call, program)
            assert sim.pending == 0
        with pytest.raises(headrace.CaptureError):
            loaded["forward"].capture(*map(array_of, program.calls[0].inputs))


@pytest.mark.parametrize("graphs", [False, True])
def test_every_stream_of_an_engine_is_in_the_lane(graphs: bool) -> None:
    """GC1, GR3: the engine's own stream beside the call's too, eagerly and in replays; a change of lane is followed."""
    program = programs.TENSORRT.load("chain")
    sim = headrace.device("sim")
    lanes = sim.split([8, 16])
    seen: set[int] = set()
    with stand_in() as module, program.open(device=sim) as loaded:
        module.on_work = lambda: seen.add(sim._running_sms)
        arrays = given(program.calls[0], sim, program)
        for lane in (*lanes, lanes[0]):
            with headrace.caller_stream(lane.stream()):
                if graphs:
                    graph = loaded["forward"].capture(*arrays)
                    seen.clear()
                    results = graph.replay(*arrays)
                    sim.synchronize()
                else:
                    seen.clear()
                    results = loaded["forward"](*arrays)
            right(results, program.calls[0], program)
            assert seen == {lane.sm_count}


def test_loaded_into_a_lane_it_stays_there() -> None:
    """GC1, SY2: with nothing selected, the lane of the program is where its engines work."""
    program = programs.TENSORRT.load("alone")
    sim = headrace.device("sim")
    lane = sim.partition(sms=8)
    seen: set[int] = set()
    with stand_in() as module, program.open(lane=lane) as loaded:
        module.on_work = lambda: seen.add(sim._running_sms)
        right(loaded["forward"](*map(array_of, program.calls[0].inputs)), program.calls[0], program)
    assert seen == {lane.sm_count}


def test_one_thread_loads_and_others_run() -> None:
    """OR4, OR7: calls of one method from several threads and streams take turns; every answer is right."""
    code = """
        import threading
        import headrace
        from headrace.testing.tensorrt import stand_in
        from tests import programs
        from tests.tensorrt.test_programs import given, right

        program = programs.TENSORRT.load("chain")
        sim = headrace.device("sim", schedule=5)
        failed = []

        def work():
            try:
                stream = sim.stream()
                for _ in range(4):
                    for call in program.calls:
                        right(method(*given(call, sim, program), stream=stream), call, program)
            except BaseException as e:
                failed.append(e)

        with stand_in(), program.open(device=sim) as loaded:
            method = loaded["forward"]
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failed, failed
        print("right")
    """
    assert succeeded(run_python(code)) == "right\n"


def test_it_is_there_by_default_and_imports_nothing_before() -> None:
    """DE2, PK1: the name alone brings the delegate; neither TensorRT nor the delegate is imported before."""
    code = """
        import sys
        import headrace
        from tests import programs

        def imported():
            return sorted(m for m in sys.modules if "tensorrt" in m and not m.startswith("tests."))

        assert imported() == [], imported()
        assert "TensorRTBackend" not in headrace.engine.core.delegates()
        program = programs.TENSORRT.load("alone")
        assert imported() == [], imported()
        for attempt in range(2):
            try:
                program.open(device="cpu")
            except headrace.DelegateUnavailable as e:
                assert e.delegate == "TensorRTBackend" and "expected a GPU" in str(e), e
            assert "TensorRTBackend" in headrace.engine.core.delegates()
        assert not [m for m in imported() if not m.startswith("headrace.")], imported()
        print("light")
    """
    assert succeeded(run_python(code)) == "light\n"


def test_somebody_else_s_delegate_of_that_name_is_kept() -> None:
    """DE3: a class defined under the name before is not replaced."""
    code = """
        import headrace
        from tests import programs

        class Other(headrace.Delegate, name="TensorRTBackend"):
            def load(self, payload, context):
                raise RuntimeError("it is mine")

        try:
            programs.TENSORRT.load("alone").open(device="cpu")
        except headrace.DelegateError as e:
            assert "it is mine" in str(e), e
            print("kept")
    """
    assert succeeded(run_python(code)) == "kept\n"


def test_native_code_can_be_refused() -> None:
    """OP3: an engine is code; a program with one is refused where code is not allowed."""
    program = programs.TENSORRT.load("alone")
    with stand_in(), pytest.raises(headrace.DelegateUnavailable, match="expected no native code"):
        program.open(device="sim", allow_native_code=False)


def test_errors_of_load_keep_their_class() -> None:
    """OP1, OP2, OP4: options, payloads and engines that do not fit are told by type, with the island."""
    program = programs.TENSORRT.load("alone")
    sim = headrace.device("sim")

    def open_with(module: StandIn | None = None, **options: Any) -> None:
        with stand_in(module=module):
            program.open(device=sim, options={"TensorRTBackend": options})

    open_with(use_shared_cuda_stream=False, weight_streaming_budget="")
    for options, error, says in (
        ({"use_shared_cuda_stream": True}, headrace.NotSupported, "expected false, got true"),
        ({"use_shared_cuda_stream": 1}, headrace.OptionError, "expected a bool, got int"),
        ({"weight_streaming_buget": 1}, headrace.OptionError, "the nearest is 'weight_streaming_budget'"),
        ({"weight_streaming_budget": "1e9"}, headrace.OptionError, "expected bytes as a decimal number"),
        ({"weight_streaming_budget": -1}, headrace.OptionError, "expected bytes as a decimal number"),
        ({"weight_streaming_budget": True}, headrace.OptionError, "expected bytes as a decimal number"),
        ({"runtime": "trt"}, headrace.OptionError, "expected one of tensorrt, tensorrt_lean, tensorrt_rtx"),
        ({"runtime_cache": "relative"}, headrace.OptionError, "the absolute path of a folder"),
    ):
        with pytest.raises(error, match=says) as e:
            open_with(**options)
        assert "forward, instruction 1, delegate 'TensorRTBackend': " in str(e.value)
    with pytest.raises(
        headrace.DelegateUnavailable, match="got one built for tensorrt 1\\.0\\.0\\.0, running"
    ) as e:
        open_with(StandIn(version="2.0.0.0"))
    assert e.value.delegate == "TensorRTBackend" and e.value.island == 1


def test_the_stand_in_finds_a_context_that_is_set_up_too_early() -> None:
    """LT1: the check of these tests can fail: it sees what the delegate has to wait for."""
    from headrace.delegate.tensorrt import _Execution

    program = programs.TENSORRT.load("sizes")
    sim = headrace.device("sim", schedule="late")
    stream = sim.stream()
    inputs = [sim.to_device(array_of(c.inputs[0])) for c in program.calls[:2]]
    settle = _Execution.settle
    with stand_in(), program.open(device=sim) as loaded, headrace.caller_stream(stream):
        loaded["forward"](inputs[0])
        _Execution.settle = lambda self: None  # type: ignore[method-assign]
        try:
            with pytest.raises(headrace.DelegateError, match="set up while its work is under way"):
                loaded["forward"](inputs[1])
        finally:
            _Execution.settle = settle  # type: ignore[method-assign]
        (got,) = loaded["forward"](inputs[1])
        right([got], program.calls[1], program)
    assert np.isfinite(got.numpy()).all()


def test_the_page_runs_and_says_what_was_not_run() -> None:
    """DE2: docs/tensorrt.md: its program, its options, and plainly what has met no real engine."""
    from headrace.delegate.tensorrt import OPTIONS

    page = (programs.ROOT / "docs/tensorrt.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert succeeded(run_python(block)) == "9 checks\n"
    assert set(
        re.findall(r"^\| `(\w+)` \|", page.split("## Options")[1].split("## What")[0], re.MULTILINE)
    ) == set(OPTIONS)
    assert "Not run: a real engine on a GPU" in page
