"""GR on a GPU: one CUDA graph over every delegate, with CuPy's kernels in it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import headrace
from tests.contract.conftest import Golden, golden
from tests.contract.test_graph_faults import a_fault_at_every_step

from . import kernels
from .test_streams import bits

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]


def held(gpu: Any) -> int:
    gc.collect()
    gpu.synchronize()
    gpu.trim()
    return int(gpu.memory()["current_nbytes"])


@pytest.fixture(autouse=True)
def captured_delegates(settled: None) -> None:
    kernels.install(kernels.Captured)


def test_a_graph_from_a_stream_of_every_kind_replays_bit_equal(chain: Golden, gpu: Any, stream: Any) -> None:
    """GR1, GR2, GR3, OR4: 100 islands of two delegates; equal to eager PyTorch at first, to calls ever after."""
    with chain.load(gpu) as program:
        method = program["forward"]
        inputs = [[gpu.to_device(x) for x in chain.inputs(k)] for k in range(2)]
        graph = method.capture(*inputs[0], stream=stream)
        assert chain.right(graph.outputs, 0)
        want = [bits(method(*x, stream=stream)) for x in inputs]
        wrong = sum(bits(graph.replay(*inputs[k % 2], stream=stream)) != want[k % 2] for k in range(200))
        assert wrong == 0 and graph.stats.captures == 1


def test_slow_kernels_before_every_hand_over_change_nothing(two: Golden, gpu: Any) -> None:
    """GR2, SY1: every result in the graph is late; a replay returns before it is there, and waits for it where it
    has to."""
    kernels.install(kernels.Captured, delay_ms=5)
    with two.load(gpu) as program:
        graph = program["forward"].capture(*two.inputs(0))
        for k in range(5):
            assert two.right(graph.replay(*two.inputs(k)), k)
    resident = golden("chain10")
    with resident.load(gpu) as program:
        stream = gpu.stream()
        graph = program["forward"].capture(*resident.inputs(0), stream=stream)
        inputs = [[gpu.to_device(x) for x in resident.inputs(k)] for k in range(len(resident.calls))]
        results = [graph.replay(*x, stream=stream) for x in inputs]
        assert not stream.query() and graph.stats.last.synchronizations == 0
        for k, result in enumerate(results):
            assert resident.right(result, k)


def test_arrays_of_other_libraries_that_change_in_place_are_seen(two: Golden, gpu: Any) -> None:
    """GR2, SY5: CuPy's and PyTorch's, written late on streams of their own."""
    with two.load(gpu) as program:
        graph = program["forward"].capture(*two.inputs(0))
        theirs = kernels.cupy.cuda.Stream(non_blocking=True)
        arrays = [kernels.cupy.zeros(x.shape, x.dtype) for x in two.inputs(0)]
        tensors = [kernels.torch.zeros(x.shape, device="cuda") for x in two.inputs(0)]
        kernels.cupy.cuda.Device().synchronize()
        for k in range(len(two.calls)):
            new = [kernels.cupy.asarray(x) for x in two.inputs(k)]
            kernels.cupy.cuda.get_current_stream().synchronize()
            kernels.slow(theirs, 20)
            with theirs:
                for array, value in zip(arrays, new, strict=True):
                    array[...] = value
                assert two.right(graph.replay(*arrays), k)
            for tensor, value in zip(tensors, two.inputs(k), strict=True):
                tensor.copy_(kernels.torch.from_numpy(value))
            assert two.right(graph.replay(*tensors, stream=kernels.torch.cuda.current_stream()), k)


def test_a_steady_replay_costs_nothing_at_the_driver(chain: Golden, gpu: Any) -> None:
    """SY4: no allocation, no free, no byte staged, no wait."""
    with chain.load(gpu) as program, headrace.caller_stream(gpu.stream()):
        graph = program["forward"].capture(*chain.inputs())
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        for borrow in (False, True):
            for _ in range(3):
                results = graph.replay(*inputs, borrow=borrow)
            for _ in range(20):
                results = graph.replay(*inputs, borrow=borrow)
                assert set(vars(graph.stats.last).values()) == {0}
            assert chain.right(results)


def test_a_graph_stays_in_the_lane_of_the_stream(two: Golden, gpu: Any) -> None:
    """GR3: the kernels of a replay say on which SMs they ran: those of the lane, or more; never another lane's."""
    kernels.install(kernels.Placed)
    with two.load(gpu) as program:
        lanes = gpu.split([8, 32])
        streams = [lane.stream() for lane in lanes] + [gpu.stream()]
        graph = program["forward"].capture(*two.inputs(0), stream=streams[0])
        seen: list[set[int]] = []
        for _ in range(2):
            for stream in streams:
                for one in kernels.Placed.loaded:
                    one.seen.fill(0xFFFFFFFF)
                kernels.cupy.cuda.get_current_stream().synchronize()
                assert two.right(graph.replay(*two.inputs(1), stream=stream), 1)
                assert two.right(graph.replay(*two.inputs(1), stream=stream), 1)
                seen.append(set(kernels.cupy.asnumpy(kernels.Placed.loaded[-1].seen).tolist()))
        assert graph.stats.recaptures == {"partition": 2}
        for first, second in zip(seen[:3], seen[3:], strict=True):
            assert 0xFFFFFFFF not in first | second
        assert len(seen[0]) <= 8 and len(seen[1]) <= 32 and not seen[0] & seen[1]
        assert len(seen[2]) > 32 and seen[3] <= seen[0] and seen[4] <= seen[1]


def test_captures_are_not_disturbed_by_legacy_work_of_other_threads(two: Golden, gpu: Any) -> None:
    """GR8, b4: 200 captures beside a thread that works on the legacy stream, allocates and frees: no error on either
    side."""
    done, errors = threading.Event(), []
    rounds = 0

    def hammer() -> None:
        nonlocal rounds
        legacy = kernels.cupy.cuda.Stream.null
        try:
            while not done.is_set():
                with legacy:
                    memory = kernels.cupy.cuda.Memory(1 << 20)
                    a = kernels.cupy.arange(1000)
                    (a + a).sum()
                legacy.synchronize()
                del memory
                rounds += 1
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        for k in range(200):
            with two.load(gpu) as program:
                graph = program["forward"].capture(*two.inputs(k % 3))
                assert two.right(graph.replay(*two.inputs(1)), 1)
    finally:
        done.set()
        thread.join()
    assert errors == [] and rounds > 50


def test_threads_may_replay_one_graph(chain: Golden, gpu: Any) -> None:
    """GR9: four of them, a stream each; every answer is its own inputs'."""
    with chain.load(gpu) as program:
        graph = program["forward"].capture(*chain.inputs(0))
        wrong = []

        def work(k: int) -> None:
            stream = gpu.stream()
            inputs = [[gpu.to_device(x) for x in chain.inputs(i)] for i in range(2)]
            for i in range(50):
                if not chain.right(graph.replay(*inputs[(i + k) % 2], stream=stream), (i + k) % 2):
                    wrong.append((k, i))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wrong == []


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_inside_another_library_s_capture_it_is_refused_and_the_capture_goes_on(
    library: str, two: Golden, gpu: Any
) -> None:
    """GR8: before anything is enqueued; what that library captured replays. Elsewhere on that thread calls go on."""
    resident = golden("chain10")
    with resident.load(gpu) as program:
        method = program["forward"]
        inputs = [gpu.to_device(x) for x in resident.inputs(0)]
        graph = method.capture(*inputs)
        other = gpu.stream()
        if library == "cupy":
            theirs = kernels.cupy.cuda.Stream(non_blocking=True)
            a = kernels.cupy.zeros(10)
            kernels.cupy.cuda.Device().synchronize()
            with theirs:
                theirs.begin_capture()
                a += 1
                for run in (method, graph.replay, method.capture):
                    with pytest.raises(headrace.CaptureError, match="does not capture"):
                        run(*inputs, stream=theirs)
                assert resident.right(method(*inputs, stream=other))
                captured = theirs.end_capture()
                captured.launch()
                captured.launch()
            theirs.synchronize()
            assert float(a.sum()) == 20
            return
        a = kernels.torch.zeros(10, device="cuda")
        captured = kernels.torch.cuda.CUDAGraph()
        with kernels.torch.cuda.graph(captured, capture_error_mode="thread_local"):
            a += 1
            with pytest.raises(headrace.CaptureError, match="does not capture"):
                method(*inputs, stream=kernels.torch.cuda.current_stream())
            results = method(*inputs, stream=other)
        captured.replay()
        captured.replay()
        kernels.torch.cuda.synchronize()
        assert float(a.sum()) == 20 and resident.right(results)


@pytest.mark.parametrize(
    ("how", "stage"),
    [("raises", "warm-up"), ("raises", "capture"), ("waits", "capture"), ("allocates", "capture")],
)
def test_captures_that_fail_leave_everything_as_it_was(how: str, stage: str, two: Golden, gpu: Any) -> None:
    """GR4, GR6, GR10: 20 times; typed, a clean stream, right calls, and memory flat after the first."""
    kernels.install(kernels.Failing, how=how, stage_of_failure=stage)
    stream = gpu.stream()
    held = []
    for _ in range(20):
        with two.load(gpu) as program:
            method = program["forward"]
            with pytest.raises(headrace.CaptureError) as caught:
                method.capture(*two.inputs(0), stream=stream)
            assert caught.value.step == {"warm-up": "warm-up", "capture": "record"}[stage]
            for k in range(3):
                assert two.right(method(*two.inputs(k), stream=stream), k)
        del program, method, caught
        gc.collect()
        gpu.synchronize()
        gpu.trim()
        held.append(gpu.memory()["current_nbytes"])
        # The runtime has no error pending that the next one to ask would be given.
        kernels.cupy.cuda.runtime.deviceSynchronize()
        assert kernels.torch.ones(3, device="cuda").sum().item() == 3
    assert len(set(held)) == 1


@pytest.mark.parametrize(("name", "resident"), [("chain10", True), ("two_islands", False)])
def test_a_fault_at_every_step_leaves_everything_as_it_was(name: str, resident: bool, gpu: Any) -> None:
    """GR4, GR5, GR6: as on the simulated device, each call that a capture and its first replay make fails once."""
    try:
        a_fault_at_every_step(golden(name), lambda: gpu, resident, least=held(gpu))
    finally:
        gpu.clear_faults()


def test_a_stateful_model_s_steps_are_a_capture_and_replays(two: Golden, gpu: Any) -> None:
    """GR1: state in device memory of the delegate's advances once for each, and is put back by a capture that fails."""
    kernels.install(kernels.Accumulating)
    with two.load(gpu) as eager, two.load(gpu) as program:
        want = [eager["forward"](*two.inputs(k))[0] for k in range(4)]
        graph = program["forward"].capture(*two.inputs(0))
        got = [graph.outputs[0]] + [graph.replay(*two.inputs(k))[0] for k in (1, 2)]
        got.append(program["forward"](*two.inputs(3))[0])
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not two.right([want[1]], 1)
