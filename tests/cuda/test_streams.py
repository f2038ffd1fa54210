"""The 100-island program on streams of every kind, with kernels that take their time before every hand-over."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

import headrace
from tests.contract.conftest import Golden

from . import kernels

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]

REPEATS = 1000


def bits(results: Any) -> bytes:
    return b"".join(
        np.ascontiguousarray(r.numpy() if isinstance(r, headrace.Buffer) else r).tobytes() for r in results
    )


def test_a_thousand_runs_on_a_stream_of_every_kind_are_equal(chain: Golden, gpu: Any, stream: Any) -> None:
    """OR2, OR4, CS5: equal to eager at first, bit-equal ever after."""
    with chain.load(gpu) as program:
        method = program["forward"]
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        first = method(*inputs, stream=stream)
        assert chain.right(first)
        want = bits(first)
        wrong = sum(bits(method(*inputs, stream=stream)) != want for _ in range(REPEATS))
        assert wrong == 0


def test_slow_kernels_before_every_hand_over_change_nothing(chain: Golden, gpu: Any, stream: Any) -> None:
    """OR2, a1: every island's result is late by 0.2 ms; loaded here, run there too."""
    kernels.install(delay_ms=0.2)
    with chain.load(gpu) as program:
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        results: list[Any] = []

        def run() -> None:
            results.extend(program["forward"](*inputs, stream=stream) for _ in range(3))

        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(results) == 6 and all(chain.right(r) for r in results)


def test_host_arrays_in_and_out_on_a_stream_of_every_kind(two: Golden, gpu: Any, stream: Any) -> None:
    """SY1: staged in and out, so complete when the call returns, without any wait of the caller's."""
    kernels.install(delay_ms=1)
    with two.load(gpu) as program:
        for k in range(5):
            assert two.right(program["forward"](*two.inputs(k), stream=stream), k)
            with headrace.caller_stream(stream, gpu):
                assert two.right(program["forward"](*two.inputs(k)), k)
            assert two.right(program["forward"](*two.inputs(k)), k)


def test_a_stream_of_each_delegate_s_own_is_wrong(chain: Golden, gpu: Any) -> None:
    """OR2, OR6: the fault put back on purpose shows, so the tests above can fail."""
    kernels.install(kernels.OwnStream, delay_ms=2)
    # Memory that still holds the right values of the call before would hide it: the inputs change.
    assert not np.allclose(chain.calls[0][1][0], chain.calls[1][1][0])
    with chain.load(gpu) as program:
        inputs = [[gpu.to_device(x) for x in chain.inputs(k)] for k in range(2)]
        stream = gpu.stream()
        right = []
        for k in range(10):
            results = program["forward"](*inputs[k % 2], stream=stream)
            right.append(chain.right(results, k % 2))
            gpu.synchronize()
        assert not all(right)


@pytest.mark.parametrize("way", [kernels.Launched, kernels.OwnStream])
def test_the_record_tells_a_stream_of_a_delegate_s_own(two: Golden, gpu: Any, way: Any) -> None:
    """OR5: from what the delegates declare; on the call's stream there is nothing to tell."""
    kernels.install(way, declares=True)
    with two.load(gpu) as program:
        stream = gpu.stream()
        inputs = [gpu.to_device(x) for x in two.inputs()]
        with headrace.record() as record:
            program["forward"](*inputs, stream=stream)
        gpu.synchronize()
        conflicts = record.findings().conflicts
        if way is kernels.Launched:
            assert conflicts == () and two.right(program["forward"](*inputs, stream=stream))
            return
        told = "\n".join(map(str, conflicts))
        for word in ("kernels of CuPy", "'TestA'", "'TestB'", "Stream.wait"):
            assert word in told, told


def test_a_call_returns_before_its_work_is_done(chain: Golden, gpu: Any) -> None:
    """SY1, SY3: asynchronous on a selected stream; a read waits for the writer alone."""
    kernels.install(delay_ms=1)
    with chain.load(gpu) as program:
        stream, other = gpu.stream(), gpu.stream()
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        program["forward"](*inputs, stream=stream)
        gpu.synchronize()
        kernels.slow(other, 2000)
        result = program["forward"](*inputs, stream=stream)
        assert not stream.query(), "100 islands of 1 ms each are done at once"
        assert program["forward"].stats.last.synchronizations == 0
        assert chain.right(result)
        assert not other.query(), "reading waited for another stream"


def test_a_steady_call_asks_nothing_of_the_driver(chain: Golden, gpu: Any, stream: Any) -> None:
    """SY4, j1, f4: no allocation, no free, no wait, no staged byte, whatever the number of islands."""
    with chain.load(gpu) as program:
        method = program["forward"]
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        out = [gpu.empty(o.shape, o.dtype) for o in chain.calls[0][1]]
        for _ in range(3):
            method(*inputs, stream=stream, out=out)
        before = gpu.memory()
        for _ in range(50):
            method(*inputs, stream=stream, out=out, strict=True)
            assert set(vars(method.stats.last).values()) == {0}
        assert gpu.memory() == before
        gpu.synchronize()
        assert chain.right(out)


def context() -> int | None:
    driver = ctypes.CDLL("libcuda.so.1")
    current = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
    return current.value


def test_the_current_context_is_what_it_was(two: Golden, gpu: Any) -> None:
    """LT4, b10: on a thread that has none, after every kind of call and after a refusal."""
    seen: list[Any] = []

    def work() -> None:
        # Delegates make a context current themselves; here none runs.
        seen.append(context())
        stream = gpu.stream()
        buffer = gpu.to_device(np.ones(8, "f4"), stream=stream)
        seen.append(context())
        buffer.numpy()
        stream.record().synchronize()
        with pytest.raises(headrace.InputError):
            gpu.to_device(np.ones(4, "f4"), out=buffer)
        with pytest.raises(headrace.InputError):
            buffer.__dlpack__(stream=0)
        stream.close()
        del buffer
        gpu.trim()
        seen.append(context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, None, None]
    there = context()
    with two.load(gpu) as program:
        program["forward"](*two.inputs())
    assert context() == there


def test_streams_that_are_none_are_refused(two: Golden, gpu: Any) -> None:
    """CS6, CS7, d8: a closed stream, an address that is no stream, a number that is none."""
    with two.load(gpu) as program:
        closed = gpu.stream()
        handle = closed.handle
        closed.close()
        for bad in (closed, 3, 0xDEAD0000BEE0):
            with pytest.raises(headrace.InputError):
                program["forward"](*two.inputs(), stream=bad)
        # The driver may use the address again: then it is somebody's live stream.
        again = [gpu.stream() for _ in range(4)]
        for stream in again:
            assert two.right(program["forward"](*two.inputs(), stream=stream))
        if handle not in [s.handle for s in again]:
            with pytest.raises(headrace.InputError, match="destroyed"):
                program["forward"](*two.inputs(), stream=handle)
        sim = headrace.device("sim")
        with pytest.raises(headrace.DeviceError, match=r"cuda:0.*sim:0"):
            program["forward"](*two.inputs(), stream=sim.stream())
        assert two.right(program["forward"](*two.inputs()))


def test_python_functions_do_not_run_in_a_gpu_s_stream(gpu: Any) -> None:
    """DE3: host functions that need the interpreter would deadlock; the answer says what to do instead."""
    with pytest.raises(headrace.NotSupported, match="CuPy"):
        gpu.stream().call(lambda: None)


def test_what_does_not_fit_is_told_by_type(gpu: Any) -> None:
    """OP4: out of memory names the device and what is free; the next allocation works."""
    with pytest.raises(headrace.OutOfDeviceMemory, match=r"cuda:0.*are free") as caught:
        gpu.empty((1 << 20, 1 << 20), "float64")
    assert caught.value.device == "cuda:0"
    assert gpu.empty((4,)).numpy().shape == (4,)


def test_events_tell_time(gpu: Any) -> None:
    stream = gpu.stream()
    begin = stream.record()
    kernels.slow(stream, 5)
    end = stream.record()
    assert not end.query()
    with pytest.raises(headrace.DeviceError, match="complete"):
        end.elapsed_ms(begin)
    end.synchronize()
    assert 4.9 < end.elapsed_ms(begin) < 100
