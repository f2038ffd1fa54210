"""Threads, drop orders and cycles, with work in flight."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest

import headrace
from tests.contract.conftest import Golden, golden

from . import kernels
from .kernels import cupy

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]

CALLS = 100_000
THREADS = 8


def test_a_hundred_thousand_calls_from_eight_threads_are_right(gpu: Any) -> None:
    """OR3, OR7, d1: each thread on a stream of its own, its own inputs and answers, one method."""
    program = golden("chain1")
    with program.load(gpu, instances=THREADS) as loaded:
        method = loaded["forward"]
        scales = np.arange(1, THREADS + 1, dtype="f4")
        inputs = [[gpu.to_device(x * s) for x in program.inputs()] for s in scales]
        wants = []
        for arrays in inputs:
            (result,) = method(*arrays)
            wants.append(result.numpy().tobytes())
        assert len(set(wants)) == THREADS
        wrong, done = [0] * THREADS, [0] * THREADS
        errors: list[BaseException] = []

        def work(k: int) -> None:
            try:
                stream = gpu.stream()
                want = cupy.asarray(np.frombuffer(wants[k], "f4"))
                cupy.cuda.runtime.deviceSynchronize()
                with kernels.on(stream):
                    bad = cupy.zeros(1, "i4")
                    for _ in range(CALLS // THREADS):
                        (result,) = method(*inputs[k], stream=stream)
                        # Compared on the device, in order: nothing waits in between.
                        bad += (cupy.from_dlpack(result).ravel() != want).any().astype("i4")
                        done[k] += 1
                    wrong[k] = int(cupy.asnumpy(bad)[0])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        assert sum(done) == CALLS // THREADS * THREADS and wrong == [0] * THREADS


def test_dropped_in_any_order_with_work_in_flight(chain: Golden, gpu: Any) -> None:
    """LT3, c4, c6: every order of program, stream, lane, inputs, result and event."""
    kernels.install(delay_ms=0.05)
    names = ("program", "stream", "lane", "inputs", "result", "event")
    for order in itertools.permutations(names):
        held: dict[str, Any] = {}
        held["program"] = chain.load(gpu)
        held["lane"] = gpu.partition(sms=8)
        held["stream"] = held["lane"].stream()
        held["inputs"] = [gpu.to_device(x) for x in chain.inputs()]
        held["result"] = held["program"]["forward"](*held["inputs"], stream=held["stream"])
        held["event"] = held["stream"].record()
        last = held["result"] if order[-1] == "result" else None
        for name in order:
            del held[name]
        if last is not None:
            assert chain.right(last)
        del last
    gpu.synchronize()
    assert len(gpu.split([8] * 15)) == 15, "an SM was not given back"


def test_two_hundred_loads_and_closes_leave_memory_flat(gpu: Any) -> None:
    """LT3, c3, f8: in the device's own count, and as the driver sees the whole GPU."""
    names = ("two_islands", "chain10", "fork")

    def cycle() -> None:
        for name in names:
            program = golden(name)
            with program.load(gpu) as loaded:
                assert program.right(loaded["forward"](*program.inputs(), stream=gpu.stream()))

    cycle()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    gpu.trim()
    ours, theirs = gpu.memory()["current_nbytes"], cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(200):
        cycle()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    gpu.trim()
    assert gpu.memory()["current_nbytes"] == ours
    assert theirs - cupy.cuda.runtime.memGetInfo()[0] <= 4 << 20


def test_a_stream_may_go_before_its_work(chain: Golden, gpu: Any) -> None:
    """LT1, c7: a foreign stream is never used after the call that it was given to."""
    kernels.install(delay_ms=0.2)
    with chain.load(gpu) as program:
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        for _ in range(20):
            stream = cupy.cuda.Stream(non_blocking=True)
            result = program["forward"](*inputs, stream=stream)
            del stream
            assert chain.right(result)
            del result
        assert chain.right(program["forward"](*inputs))


def test_a_process_that_ends_with_work_in_flight_ends_well(gpu: Any) -> None:
    """LT3, c5: handles in globals, a daemon thread in a call: exit status 0 and nothing on stderr."""
    from tests.conftest import run_python, succeeded

    out = succeeded(
        run_python(
            """
            import threading
            import warnings
            import headrace
            from tests.contract.conftest import golden
            from tests.cuda import kernels

            warnings.simplefilter("ignore", headrace.LaneWarning)
            kernels.install(delay_ms=1)
            gpu = headrace.device("cuda:0")
            program = golden("chain10").load(gpu)
            lane = gpu.partition(sms=8)
            stream = lane.stream()
            inputs = [gpu.to_device(x) for x in golden("chain10").inputs()]
            event = gpu.stream().record()

            def forever():
                other = gpu.stream()
                while True:
                    program["forward"](*inputs, stream=other)

            threading.Thread(target=forever, daemon=True).start()
            results = [program["forward"](*inputs, stream=stream) for _ in range(5)]
            print("in flight", not stream.query())
            """
        )
    )
    assert out == "in flight True\n"


def test_no_program_names_a_gpu_and_one_is_chosen(two: Golden, gpu: Any) -> None:
    """Without device= a program with device memory goes to cuda:0, another one to the cpu."""
    with headrace.load(two.path) as program:
        assert program.device is gpu
        assert two.right(program["forward"](*two.inputs()))
    other = golden("two_on_cuda1")
    with headrace.load(other.path, device=gpu) as program:  # planned for cuda:1
        assert other.right(program["forward"](*other.inputs()))
