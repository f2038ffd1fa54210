"""cuda:0 from Python, on the fake driver: run in a process whose libcuda.so.1 is the fake.

The fake's memory is the host's, so a "kernel" here is a function that the driver calls in stream order, and nothing
runs before something waits for it: what is not ordered is read too early.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace
from headrace.doctor import diagnose
from headrace.engine import core
from tests import programs
from tests.programs import graph
from tests.programs.committed import __file__ as committed

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_left.restype = ctypes.c_char_p
driver.fake_memory.restype = ctypes.c_void_p
driver.fake_calls.restype = ctypes.c_int64
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
launched: list[Any] = []


def launch(stream: int, work: Callable[[], None]) -> None:
    """As a kernel: `work` runs when the stream reaches it."""
    function = HostFunction(lambda _: work())
    launched.append(function)
    gpu = headrace.device("cuda:0")
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert gpu.name == "cuda:0"


def memory_of(buffer: Any) -> np.ndarray[Any, Any]:
    """The memory itself."""
    nbytes = max(buffer.nbytes, 1)
    raw = (ctypes.c_char * nbytes).from_address(buffer.address)
    return np.frombuffer(raw, buffer.dtype, count=buffer.nbytes // np.dtype(buffer.dtype).itemsize).reshape(
        buffer.shape
    )


class Launched(headrace.Delegate):
    def load(self, payload: bytes, context: Any) -> None:
        self.compute = graph.compile(payload)

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        views = [memory_of(b) for b in inputs], [memory_of(b) for b in outputs]
        for buffer in (*inputs, *outputs):  # lent memory goes out to libraries too
            assert buffer.__dlpack_device__() == (2, 0)
            assert buffer.__cuda_array_interface__["stream"] == stream.handle
        try:
            stream.call(lambda: None)
            raise AssertionError
        except headrace.NotSupported as error:
            assert "cuda:0" in str(error) and "CuPy" in str(error)

        def work() -> None:
            for target, value in zip(views[1], self.compute(views[0]), strict=True):
                np.copyto(target, value)

        launch(stream.handle, work)


class TestA(Launched, name="TestA"):
    pass


class TestB(Launched, name="TestB"):
    pass


class Foreign:
    """Another library's array, by DLPack."""

    def __init__(self, buffer: Any, per_thread: bool = True, ordinal: int = 0) -> None:
        self.buffer, self.per_thread, self.ordinal = buffer, per_thread, ordinal
        self.asked: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.ordinal

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked.append(stream)
        if stream == 2 and not self.per_thread:
            raise BufferError("per-thread default stream is not supported")
        return self.buffer.__dlpack__(stream=stream)


class Faced:
    """Another library's array, by __cuda_array_interface__."""

    def __init__(self, buffer: Any, **changes: Any) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {**buffer.__cuda_array_interface__, **changes}


def late(gpu: Any, value: np.ndarray[Any, Any], stream: Any) -> Any:
    """A buffer that a kernel on `stream` has yet to write; nobody but that stream knows."""
    buffer = gpu.empty(value.shape, value.dtype, stream=stream)
    target = memory_of(buffer)
    launch(stream.handle, lambda: np.copyto(target, value))
    return buffer


def refused(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        for word in words.split("|"):
            assert word in str(error), f"{word!r} is not in {error}"
    else:
        raise AssertionError(f"expected {kind.__name__}")


def main() -> None:
    found = diagnose().cuda
    assert found.driver == "13.0" and found.missing == "" and found.partitions == ""
    assert [g.device for g in found.gpus] == ["cuda:0", "cuda:1"] and found.gpus[0].capability == "9.0"
    assert driver.fake_calls(b"cuDevicePrimaryCtxRetain") == 0, "looking makes no context"
    gpu = headrace.device("cuda:0")
    path = programs.Path(committed).parent / "two_islands.pte"
    calls = programs.read_calls(path.with_suffix(".npz"))
    program = headrace.load(path)
    assert program.device is gpu
    method = program["forward"]
    arrays = [([v.data for v in c.inputs], c.outputs[0].data) for c in calls]

    def check(result: Any, want: Any) -> None:
        got = result.numpy() if isinstance(result, headrace.Buffer) else result
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    other, stream = gpu.stream(), gpu.stream()
    streams = [stream, gpu.stream(blocking=True), gpu.legacy_stream(), gpu.per_thread_stream(), gpu.stream(-1)]
    lane = gpu.partition(sms=8)
    streams.append(lane.stream())
    for inputs, want in arrays:
        check(method(*inputs)[0], want)
        for chosen in streams:
            check(method(*inputs, stream=chosen)[0], want)
            check(method(*[gpu.to_device(x) for x in inputs], stream=chosen)[0], want)
            # Written late on another stream: the handshake orders it.
            foreign = [Foreign(b) for b in ready(gpu, inputs, other)]
            check(method(*foreign, stream=chosen)[0], want)
            assert {s for f in foreign for s in f.asked} == {chosen.handle}
            faced = [Faced(late(gpu, x, other), stream=other.handle) for x in inputs]
            check(method(*faced, stream=chosen)[0], want)
    (inputs, want), handles = arrays[0], [s.handle for s in streams]
    assert len(set(handles)) == len(handles)

    # Nothing selected: the thread's own stream, which not every library knows.
    for per_thread in (True, False):
        foreign = [Foreign(b, per_thread) for b in ready(gpu, inputs, other)]
        check(method(*foreign)[0], want)
        assert foreign[0].asked == ([2] if per_thread else [2, 1])

    # Refused before anything is enqueued, and what is another GPU's is told.
    buffers = [gpu.to_device(x) for x in inputs]
    refused(headrace.DeviceError, "cuda:1|cuda:0|copy it first", lambda: method(Foreign(buffers[0], ordinal=1), buffers[1]))
    refused(headrace.InputError, "version 3", lambda: method(Faced(buffers[0], version=2), buffers[1]))
    refused(headrace.InputError, "forbids 0", lambda: method(Faced(buffers[0], stream=0), buffers[1]))
    refused(headrace.InputError, "dtype", lambda: method(Faced(buffers[0], typestr="<f8", strides=None, shape=(1, 1)), buffers[1]))
    refused(
        headrace.InputError,
        "leaves",
        lambda: method(Faced(buffers[0], shape=(4, 4000), strides=None), buffers[1]),
    )
    host = np.zeros((4, 8), "f4")
    refused(
        headrace.InputError,
        "does not",
        lambda: method(Faced(buffers[0], data=(host.ctypes.data, False)), buffers[1]),
    )
    elsewhere = driver.fake_memory(4096, 1, 0, 0)
    refused(headrace.DeviceError, "cuda:1", lambda: method(Faced(buffers[0], data=(elsewhere, False)), buffers[1]))
    refused(headrace.InputError, "no stream", lambda: method(*buffers, stream=0xDEAD))
    refused(headrace.InputError, "read-only", lambda: method(*buffers, out=[Faced(buffers[0], data=(buffers[0].address, True))]))
    sim = headrace.device("sim")
    refused(headrace.DeviceError, "sim:0|cuda:0", lambda: method(*buffers, stream=sim.stream()))
    refused(headrace.DeviceError, "cuda:0", lambda: sim.to_device(Foreign(buffers[0])))
    with headrace.load(path, device="sim") as pretended:
        refused(headrace.DeviceError, "memory of sim:0", lambda: pretended["forward"](*[Foreign(b) for b in buffers]))
    closed = gpu.stream()
    handle = closed.handle
    closed.close()
    refused(headrace.InputError, "destroyed", lambda: method(*buffers, stream=handle))

    # Copies between GPUs' arrays; what is copied stays until the copy is done.
    source = late(gpu, inputs[0], other)
    copied = gpu.to_device(Foreign_after(source, other), stream=stream)
    del source
    gc.collect()
    np.testing.assert_array_equal(copied.numpy(), inputs[0])
    # Out to others: an array that is being written, read behind its event.
    target = memory_of(copied)
    np.testing.assert_array_equal(target, inputs[0])
    face = copied.__cuda_array_interface__
    assert face["version"] == 3 and face["shape"] == (4, 8) and face["typestr"] == "<f4" and face["stream"] == 2
    assert not hasattr(headrace.Buffer.from_float32(inputs[0]), "__cuda_array_interface__")
    refused(headrace.InputError, "forbids 0", lambda: copied.__dlpack__(stream=0))

    # The stream that others selected, and a selection that this thread made.
    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    with headrace.caller_stream(Theirs()):
        check(method(*buffers)[0], want)
    with headrace.caller_stream(stream.handle, gpu):
        assert headrace.current_stream().handle == stream.handle

    # A steady call on device memory: no driver allocation, no wait, nothing staged.
    resident = [gpu.to_device(x) for x in inputs]
    for _ in range(4):
        result = method(*resident, stream=stream)[0]
        del result
    last = method.stats.last
    assert (last.driver_allocations, last.driver_frees) == (0, 0), last
    gpu.synchronize()

    # Drop everything in the wrong order, with work in flight.
    result = method(*resident, stream=stream)[0]
    lane.close()
    del lane, streams, stream, other, foreign, faced, resident, buffers, chosen
    program.close()
    del method, program
    check(result, want)
    del result, copied, target, face
    gc.collect()
    gpu.trim()
    gpu.synchronize()
    assert gpu.memory()["current_nbytes"] == 0, gpu.memory()
    del gpu
    gc.collect()
    driver.fake_run_all()
    headrace.device("cuda:0").synchronize()
    left = driver.fake_left().decode()
    assert left == "", left
    print("done")


def ready(gpu: Any, inputs: Any, stream: Any) -> list[Any]:
    """Buffers whose writer is late on `stream`, and known to the buffer: as an array of a library that tracks it."""
    pinned = [late(gpu, x, stream) for x in inputs]
    return [Foreign_after(b, stream) for b in pinned]


class Foreign_after:
    """A producer whose own stream is `stream`: makes the consumer wait for it, as libraries do."""

    def __init__(self, buffer: Any, stream: Any) -> None:
        self.buffer, self.stream = buffer, stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        event = self.stream.record()
        core.stream_on(self.buffer.device, stream).wait(event)
        return self.buffer.__dlpack__(stream=-1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
