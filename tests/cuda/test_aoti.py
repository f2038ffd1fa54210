"""AOTInductor's CUDA libraries on a GPU: programs exported where there is none, by headrace and by stock ExecuTorch."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import aoti
from tests import programs
from tests.conftest import run_python, succeeded

from . import kernels
from .test_streams import bits

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]

REPEATS = 1000
NAMES = programs.CUDA.names()
# What keeps state from call to call.
STATEFUL = {"kv_cache", "kept_state"}
STATELESS = [name for name in NAMES if name not in STATEFUL]
# 13 cosines of twice the one before: where the GPU's differs from the CPU's in the last bit, that grows.
ATOL = {"chain25": 5e-4}
# Many kernels; many islands, on device memory of the caller's; stock's own.
SOME = ["transformer", "chain25", "stock_mlp"]
RESIDENT = ["chain25", "mlp_resident", "chain_resident"]


@pytest.fixture(autouse=True)
def python_delegate(settled: None) -> None:
    """CuPy's kernels, of those that a graph may hold, behind the split programs' names."""
    kernels.install(kernels.Captured)


def given(value: programs.Value) -> Any:
    """A recorded argument as a host array; NumPy has no bfloat16."""
    if value.dtype == "bfloat16":
        return kernels.torch.from_numpy(value.data.view(np.int16)).view(kernels.torch.bfloat16)
    return value.data


def inputs_of(program: programs.Program, gpu: Any, call: int, where: str = "device") -> list[Any]:
    """The inputs of a call; those that the plan wants in device memory are there in any case."""
    values = [given(v) for v in program.calls[call % len(program.calls)].inputs]
    if where == "host":
        return values
    return [
        x.cuda() if isinstance(x, kernels.torch.Tensor) else gpu.to_device(x) if np.ndim(x) else x
        for x in values
    ]


def numbers(result: Any) -> Any:
    if isinstance(result, headrace.Buffer):
        return result.float32() if result.dtype == "bfloat16" else result.numpy()
    return result


def check(results: Any, program: programs.Program, call: int) -> None:
    wanted = program.calls[call % len(program.calls)].outputs
    assert len(results) == len(wanted) > 0
    for got, want in zip(results, wanted, strict=True):
        got = numbers(got)
        if want.kind != "tensor":
            assert got == want.data
            continue
        assert got.shape == want.data.shape and (want.dtype == "bfloat16" or got.dtype == want.dtype)
        np.testing.assert_allclose(
            np.asarray(got).astype(np.float64),
            want.float64(),
            rtol=program.rtol,
            atol=ATOL.get(program.name, program.atol),
        )


def raw(results: Any) -> bytes:
    return b"".join(
        np.ascontiguousarray(numbers(r)).tobytes() if isinstance(r, headrace.Buffer) else bits([r])
        for r in results
    )


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_eager(name: str, where: str, gpu: Any) -> None:
    """DE1, EX2, DM1: every program, its inputs on the host and on the device, in order; state advances once a call."""
    program = programs.CUDA.load(name)
    assert program.stateful == (name in STATEFUL)
    with program.open(gpu) as loaded, headrace.record() as record:
        for k, call in enumerate(program.calls):
            check(loaded[call.method](*inputs_of(program, gpu, k, where), stream=gpu.stream()), program, k)
    record.check()


@pytest.mark.parametrize("name", STATELESS)
def test_a_thousand_runs_are_bit_equal(name: str, gpu: Any) -> None:
    """OR4: to the first, which equals eager PyTorch; on streams that change."""
    program = programs.CUDA.load(name)
    with program.open(gpu) as loaded:
        call = program.calls[0]
        method, inputs = loaded[call.method], inputs_of(program, gpu, 0)
        first = method(*inputs)
        check(first, program, 0)
        want = raw(first)
        streams = [gpu.stream(), gpu.stream(-1), gpu.stream(blocking=True)]
        wrong = sum(raw(method(*inputs, stream=streams[k % 3])) != want for k in range(REPEATS))
        assert wrong == 0


@pytest.mark.parametrize("name", SOME)
def test_on_a_stream_of_every_kind(name: str, gpu: Any, stream: Any) -> None:
    """CS5, SY2, GC5: ours, a lane's, and other libraries'; the thread's context is what it was."""
    program = programs.CUDA.load(name)
    current = kernels.cupy.cuda.runtime.getDevice()
    with program.open(gpu) as loaded:
        for k, call in enumerate(program.calls):
            check(loaded[call.method](*inputs_of(program, gpu, k), stream=stream), program, k)
            assert kernels.cupy.cuda.runtime.getDevice() == current
            kernels.cupy.arange(3).sum()  # which needs a context that it knows


@pytest.mark.parametrize("name", RESIDENT)
def test_a_steady_call_costs_nothing_at_the_driver(name: str, gpu: Any) -> None:
    """SY4: no allocation, no free, no byte staged, no wait, whatever the number of islands."""
    program = programs.CUDA.load(name)
    with program.open(gpu) as loaded, headrace.caller_stream(gpu.stream()):
        method, inputs = loaded[program.calls[0].method], inputs_of(program, gpu, 0)
        for _ in range(3):
            results = method(*inputs)
        for _ in range(20):
            results = method(*inputs)
            assert set(vars(method.stats.last).values()) == {0}
        check(results, program, 0)


def test_a_second_asynchronous_call_does_not_block_the_host(gpu: Any) -> None:
    """SY1: AOTInductor's own entry point waits for the call before; ours returns, with both in flight."""
    program = programs.CUDA.load("chain25")
    with program.open(gpu) as loaded:
        stream, inputs = gpu.stream(), inputs_of(program, gpu, 0)
        method = loaded["forward"]
        kernels.slow(stream, 200)
        results = [method(*inputs, stream=stream) for _ in range(3)]
        assert not stream.query(), "the calls waited for the slow kernel before them"
        for result in results:
            check(result, program, 0)


def test_the_first_call_is_like_every_other(gpu: Any) -> None:
    """SY1, SY4: kernels and memory were had while the program loaded."""
    program = programs.CUDA.load("chain25")
    with program.open(gpu) as loaded:
        stream, inputs = gpu.stream(), inputs_of(program, gpu, 0)
        kernels.slow(stream, 200)
        result = loaded["forward"](*inputs, stream=stream)
        assert not stream.query() and loaded["forward"].stats.last.synchronizations == 0
        check(result, program, 0)


# What a graph would do once, at capture, and never at a replay.
ON_HOST = {
    "kv_cache": "copies between host and device at the method's ends",  # state that the plan keeps there
    "embeddings": "output 6, which lies on the host and that no island writes",  # an input that is passed on
}


@pytest.mark.parametrize("name", ON_HOST)
def test_what_is_done_on_the_host_is_not_captured(name: str, gpu: Any) -> None:
    """GR7: refused by name, and calls go on."""
    program = programs.CUDA.load(name)
    with program.open(gpu) as loaded:
        call = program.calls[0]
        with pytest.raises(headrace.CaptureError, match=ON_HOST[name]):
            loaded[call.method].capture(*inputs_of(program, gpu, 0))
        for k, call in enumerate(program.calls):
            check(loaded[call.method](*inputs_of(program, gpu, k)), program, k)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_HOST])
def test_captured_and_replayed(name: str, gpu: Any) -> None:
    """GR1, GR2: one graph of every island; each replay sees its inputs, and equals the calls."""
    program = programs.CUDA.load(name)
    with program.open(gpu) as loaded, program.open(gpu) as eager:
        by_method: dict[str, Any] = {}
        stream = gpu.stream()
        for k, call in enumerate(program.calls):
            inputs = inputs_of(program, gpu, k)
            want = raw(eager[call.method](*inputs))
            if call.method not in by_method:
                by_method[call.method] = loaded[call.method].capture(*inputs, stream=stream)
                results = by_method[call.method].outputs
            else:
                results = by_method[call.method].replay(*inputs, stream=stream)
            check(results, program, k)
            assert raw(results) == want
        if not program.stateful:
            graph, inputs = by_method[program.calls[0].method], inputs_of(program, gpu, 0)
            want = raw(graph.replay(*inputs, stream=stream))
            wrong = sum(raw(graph.replay(*inputs, stream=stream)) != want for _ in range(200))
            assert wrong == 0


def test_a_graph_outlives_the_program_that_it_was_captured_from(gpu: Any) -> None:
    """LT3, LT4: kernels, weights and temporaries are the graph's too."""
    program = programs.CUDA.load("transformer")
    loaded = program.open(gpu)
    inputs = inputs_of(program, gpu, 0)
    graph = loaded["forward"].capture(*inputs)
    stream = gpu.stream()
    kernels.slow(stream, 20)
    results = graph.replay(*inputs, stream=stream)
    del loaded, graph, stream
    gc.collect()
    check(results, program, 0)


def test_calls_and_replays_take_turns_over_the_same_temporaries(gpu: Any) -> None:
    """OR7, GR2: on streams and threads of their own."""
    program = programs.CUDA.load("transformer")
    with program.open(gpu) as loaded:
        method = loaded["forward"]
        graph = method.capture(*inputs_of(program, gpu, 0))
        wants = [raw(method(*inputs_of(program, gpu, k))) for k in range(len(program.calls))]
        wrong: list[int] = []

        def work(k: int, run: Any) -> None:
            stream, inputs = gpu.stream(), inputs_of(program, gpu, k)
            for _ in range(100):
                if raw(run(*inputs, stream=stream)) != wants[k]:
                    wrong.append(k)

        threads = [
            threading.Thread(target=work, args=(k, run))
            for k in range(len(program.calls))
            for run in (method, graph.replay)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_several_instances_share_the_weights(gpu: Any) -> None:
    """DE1, OR7: one copy on the device, whatever number of instances; and they run side by side."""
    program = programs.CUDA.load("transformer")
    used = []
    for instances in (1, 2, 3):
        gc.collect()
        gpu.synchronize()
        gpu.trim()
        before = gpu.memory()["current_nbytes"]
        with program.open(gpu, instances=instances) as loaded:
            used.append(gpu.memory()["current_nbytes"] - before)
            inputs = inputs_of(program, gpu, 0)
            results = [loaded["forward"](*inputs, stream=gpu.stream()) for _ in range(6)]
            for result in results:
                check(result, program, 0)
            del results, inputs
    weights = sum(c.nbytes for i in aoti.read(program.path) for c in i.constants)
    assert weights > 0 and used[2] - used[1] == used[1] - used[0] < used[0] - weights // 2


def test_a_lane_of_eight_sms(gpu: Any) -> None:
    """GC1, GR3: kernels of libraries that were loaded outside it; eagerly, and in a graph."""
    program = programs.CUDA.load("chain25")
    kernels.install(kernels.Placed)
    lane = gpu.partition(sms=8)
    with program.open(gpu) as loaded:
        stream, inputs = lane.stream(), inputs_of(program, gpu, 0)
        check(loaded["forward"](*inputs, stream=stream), program, 0)
        graph = loaded["forward"].capture(*inputs, stream=stream)
        check(graph.replay(*inputs, stream=stream), program, 0)
        stream.synchronize()
        seen = set(kernels.cupy.asnumpy(kernels.Placed.loaded[-1].seen).tolist())
        assert len(seen) <= 8


def test_two_hundred_cycles_are_flat_in_device_memory(gpu: Any) -> None:
    """LT3: load, call, capture, close; the driver's own count after the first few."""
    program = programs.CUDA.load("stock_mlp")
    inputs = inputs_of(program, gpu, 0)

    def cycle() -> None:
        with program.open(gpu) as loaded:
            check(loaded["forward"](*inputs), program, 0)
            graph = loaded["forward"].capture(*inputs)
            check(graph.replay(*inputs), program, 0)
            graph.close()
        gc.collect()
        gpu.trim()

    def used() -> int:
        gpu.synchronize()
        free, total = kernels.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    for _ in range(5):
        cycle()
    held, before = gpu.memory()["current_nbytes"], used()
    for _ in range(195):
        cycle()
    assert gpu.memory()["current_nbytes"] == held
    assert used() - before < 4 << 20


@pytest.mark.parametrize("order", ["program", "stream", "lane", "result"])
def test_dropped_with_work_in_flight(order: str, gpu: Any) -> None:
    """LT3: whatever goes first, what was asked for comes."""
    program = programs.CUDA.load("chain25")
    want = program.calls[0]
    held: dict[str, Any] = {"program": program.open(gpu), "lane": gpu.partition(sms=8)}
    held["stream"] = held["lane"].stream()
    kernels.slow(held["stream"], 20)
    held["result"] = held["program"][want.method](*inputs_of(program, gpu, 0), stream=held["stream"])
    result = held["result"]
    for name in [order, *(n for n in held if n != order)]:
        held.pop(name)
        gc.collect()
    check(result, program, 0)


def test_the_end_of_the_process_with_work_in_flight() -> None:
    """LT3: exit status 0 and nothing on stderr, with program, graph and results in globals; no torch anywhere."""
    code = """
        import sys
        import headrace
        from tests import programs

        gpu = headrace.device("cuda:0")
        program = programs.CUDA.load("stock_mlp")
        loaded = program.open(gpu)
        inputs = [gpu.to_device(v.data) for v in program.calls[0].inputs]
        stream = gpu.stream()
        graph = loaded["forward"].capture(*inputs)
        results = [loaded["forward"](*inputs, stream=stream) for _ in range(10)]
        results += [graph.replay(*inputs, stream=stream) for _ in range(10)]
        assert not [m for m in sys.modules if m.split(".")[0] in {"torch", "executorch"}]
        maps = open("/proc/self/maps").read()
        assert "libtorch" not in maps and "libcudart" not in maps
        print("right")
    """
    assert succeeded(run_python(code)) == "right\n"


def test_fresh_processes_give_the_same_bits() -> None:
    """OR4: loaded on one thread, run on another; five processes."""
    code = """
        import hashlib, threading
        import numpy as np
        import headrace
        from tests import programs
        from tests.cuda import kernels

        kernels.install(kernels.Captured)
        gpu = headrace.device("cuda:0")
        program = programs.CUDA.load("chain25")
        loaded = program.open(gpu)
        found = set()

        def run():
            stream = gpu.stream()
            inputs = [gpu.to_device(v.data) for v in program.calls[0].inputs]
            for _ in range(200):
                (result,) = loaded["forward"](*inputs, stream=stream)
                found.add(hashlib.sha256(np.ascontiguousarray(result.numpy()).tobytes()).hexdigest())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        (only,) = found
        print(only)
    """
    assert len({succeeded(run_python(code)) for _ in range(5)}) == 1
