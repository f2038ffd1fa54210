"""cuda:0 from Python, on the fake driver: run in a process whose libcuda.so.1 is the fake.

The fake's memory is the host's, so a "kernel" here is a function that the driver calls in stream order, and nothing
runs before something waits for it: what is not ordered is read too early.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.doctor import diagnose
from headrace.engine import core
from tests import programs
from tests.native.stream.binding import Upstream
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
    try:
        assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None) == 0
    finally:
        assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert gpu.name == "cuda:0"


def current_context() -> int | None:
    context = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


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
        context = ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
        assert current_context() == context.value, "libraries in a call find its device selected"
        views = [memory_of(b) for b in inputs], [memory_of(b) for b in outputs]
        for buffer in (*inputs, *outputs):  # lent memory goes out to libraries too
            assert buffer.__dlpack_device__() == (2, 0)
            assert buffer.__cuda_array_interface__["stream"] == stream.handle
            buffer.__dlpack__(stream=stream.handle)
            if self.stage() != "capture":  # which the legacy stream would break
                buffer.__dlpack__(stream=1)  # a consumer on another stream
        refused(headrace.NotSupported, "cuda:0|CuPy", lambda: stream.call(lambda: None))

        def work() -> None:
            for target, value in zip(views[1], self.compute(views[0]), strict=True):
                np.copyto(target, value)

        launch(stream.handle, work)


class TestA(Launched, name="TestA"):
    pass


class TestB(Launched, name="TestB"):
    pass


class Foreign:
    """Another library's array, by DLPack: its own stream is `stream`, and it makes the consumer's wait for that."""

    def __init__(self, buffer: Any, stream: Any, per_thread: bool = True, ordinal: int = 0) -> None:
        self.buffer, self.stream, self.per_thread, self.ordinal = buffer, stream, per_thread, ordinal
        self.asked: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.ordinal

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked.append(stream)
        if stream == 2 and not self.per_thread:
            raise BufferError("per-thread default stream is not supported")
        core.stream_on(self.buffer.device, stream).wait(self.stream.record())
        return self.buffer.__dlpack__(stream=-1)


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
    with pytest.raises(kind) as caught:
        call()
    for word in words.split("|"):
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


ROOT = programs.Path(committed).parent
TWO = ROOT / "two_islands.pte"


def check(result: Any, want: Any) -> None:
    got = result.numpy() if isinstance(result, headrace.Buffer) else result
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def looking_makes_no_context() -> None:
    found = diagnose().cuda
    assert found.driver == "13.0" and found.missing == "" and found.partitions == ""
    assert "CUDA 13.1" in found.workqueues and all(g.partitions == "" for g in found.gpus)
    assert [g.device for g in found.gpus] == ["cuda:0", "cuda:1"] and found.gpus[0].capability == "9.0"
    assert driver.fake_calls(b"cuDevicePrimaryCtxRetain") == 0


def every_stream_and_every_array(gpu: Any, method: Any, calls: Any) -> None:
    """Host arrays, Buffers and other libraries' arrays, the latter written late on another stream."""
    other, lane = gpu.stream(), gpu.partition(sms=8)
    streams = [gpu.stream(), gpu.stream(blocking=True), gpu.legacy_stream(), gpu.per_thread_stream()]
    streams += [gpu.stream(-1), lane.stream()]
    assert len({s.handle for s in streams}) == len(streams)
    for inputs, want in calls:
        check(method(*inputs)[0], want)
        for stream in streams:
            check(method(*inputs, stream=stream)[0], want)
            check(method(*[gpu.to_device(x) for x in inputs], stream=stream)[0], want)
            foreign = [Foreign(late(gpu, x, other), other) for x in inputs]
            check(method(*foreign, stream=stream)[0], want)
            assert {s for f in foreign for s in f.asked} == {stream.handle}
            faced = [Faced(late(gpu, x, other), stream=other.handle) for x in inputs]
            check(method(*faced, stream=stream)[0], want)
    # Nothing selected: the thread's own stream, which not every library knows.
    inputs, want = calls[0]
    for per_thread in (True, False):
        foreign = [Foreign(late(gpu, x, other), other, per_thread) for x in inputs]
        check(method(*foreign)[0], want)
        assert foreign[0].asked == ([2] if per_thread else [2, 1])


def refusals(gpu: Any, method: Any, inputs: Any) -> None:
    """Before anything is enqueued; memory and streams of another GPU are told."""
    x, y = buffers = [gpu.to_device(value) for value in inputs]
    host = np.zeros((4, 8), "f4")
    elsewhere = driver.fake_memory(4096, 1, 0, 0)
    sim = headrace.device("sim")
    closed, none = gpu.stream(), gpu.stream()
    handle = closed.handle
    closed.close()
    launches = driver.fake_calls(b"cuLaunchHostFunc")
    own, device = headrace.InputError, headrace.DeviceError
    refused(device, "cuda:1|cuda:0|copy it first", lambda: method(Foreign(x, none, ordinal=1), y))
    refused(own, "version 3", lambda: method(Faced(x, version=2), y))
    refused(own, "forbids 0", lambda: method(Faced(x, stream=0), y))
    for wrong in (
        {"version": "3"}, {"typestr": 4}, {"shape": 8}, {"shape": ("a",)}, {"strides": (4,)}, {"strides": 4},
        {"data": (x.address,)}, {"data": x.address}, {"stream": "one"},
    ):  # fmt: skip
        refused(
            own, f"input 0|expected|{next(iter(wrong))}", lambda wrong=wrong: method(Faced(x, **wrong), y)
        )
    refused(own, "dtype", lambda: method(Faced(x, typestr="<f8", strides=None, shape=(1, 1)), y))
    refused(own, "leaves", lambda: method(Faced(x, shape=(4, 4000), strides=None), y))
    refused(own, "does not", lambda: method(Faced(x, data=(host.ctypes.data, False)), y))
    refused(device, "cuda:1", lambda: method(Faced(x, data=(elsewhere, False)), y))
    refused(own, "no stream", lambda: method(x, y, stream=0xDEAD))
    refused(own, "destroyed", lambda: method(x, y, stream=handle))
    refused(own, "closed", lambda: method(x, y, stream=closed))
    refused(own, "read-only", lambda: method(x, y, out=[Faced(x, data=(x.address, True))]))
    refused(device, "sim:0|cuda:0", lambda: method(x, y, stream=sim.stream()))
    refused(own, "expected", lambda: sim.to_device(Foreign(x, none)))
    refused(own, "forbids 0", lambda: x.__dlpack__(stream=0))
    with headrace.load(TWO, device="sim") as pretended:
        refused(own, "input 0: expected", lambda: pretended["forward"](*[Foreign(b, none) for b in buffers]))
    assert driver.fake_calls(b"cuLaunchHostFunc") == launches


def copies(gpu: Any, value: Any) -> None:
    """From other libraries' arrays: in order, and kept until the copy is done; and out to others."""
    other, stream = gpu.stream(), gpu.stream()
    source = late(gpu, value, other)
    copied = gpu.to_device(Foreign(source, other), stream=stream)
    del source
    gc.collect()
    np.testing.assert_array_equal(copied.numpy(), value)
    face = copied.__cuda_array_interface__
    assert (face["version"], face["shape"], face["typestr"], face["stream"]) == (3, value.shape, "<f4", 2)
    assert not hasattr(headrace.Buffer.from_float32(value), "__cuda_array_interface__")


def selections(gpu: Any, method: Any, inputs: Any, want: Any) -> None:
    stream = gpu.stream()

    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    buffers = [gpu.to_device(x) for x in inputs]
    with headrace.caller_stream(Theirs()):
        check(method(*buffers)[0], want)
    with headrace.caller_stream(stream.handle, gpu):
        assert headrace.current_stream().handle == stream.handle


def mirrored(gpu: Any, program: Any, inputs: Any, want: Any, library: str) -> None:
    """CS3: delegates of others read ExecuTorch's own caller stream; the library came after everything of ours."""
    theirs, seen = Upstream(library), []
    method = program["forward"]

    def look(self: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        seen.append(theirs.get())
        plain(self, inputs, outputs, stream)
        if fails:
            raise RuntimeError("after the work")

    plain, fails = TestA.run, []
    buffers = [gpu.to_device(x) for x in inputs]
    stream = gpu.stream()
    theirs.select(0x77)  # somebody's, who is not to lose it
    TestA.run = look  # type: ignore[method-assign]
    check(method(*buffers, stream=stream)[0], want)
    with headrace.caller_stream(stream):
        check(method(*buffers)[0], want)
    check(method(*buffers)[0], want)
    fails.append(True)
    refused(headrace.DelegateError, "after the work", lambda: method(*buffers, stream=stream))
    fails.clear()
    TestA.run = plain  # type: ignore[method-assign]
    assert seen == [stream.handle, stream.handle, 2, stream.handle], seen
    assert theirs.get() == 0x77


def an_unknown_library_is_named(inputs: Any, library: str) -> None:
    """CS3: one that a stream cannot be selected in is no reason to run without it. It stays: this comes last."""
    Upstream(library)
    launches = driver.fake_calls(b"cuLaunchHostFunc")
    with headrace.load(TWO) as program:
        refused(headrace.EngineError, library, lambda: program["forward"](*inputs))
    assert driver.fake_calls(b"cuLaunchHostFunc") == launches


def a_steady_call(gpu: Any, method: Any, inputs: Any) -> None:
    """Two arguments are staged by the plan of this program; memory is allocated for neither."""
    stream = gpu.stream()
    for _ in range(4):
        method(*inputs, stream=stream)
    last = method.stats.last
    assert (last.driver_allocations, last.driver_frees, last.synchronizations) == (0, 0, 1), last
    assert last.bytes_to_device == sum(x.nbytes for x in inputs), last


def dropped_in_the_wrong_order(gpu: Any, inputs: Any, want: Any) -> Any:
    program = headrace.load(TWO)
    lane = gpu.partition(sms=8)
    stream = lane.stream()
    arrays = [gpu.to_device(x) for x in inputs]
    result = program["forward"](*arrays, stream=stream)[0]
    lane.close()
    del lane, stream, arrays
    program.close()
    del program
    check(result, want)


def main(right: str, wrong: str) -> None:
    warnings.simplefilter("ignore", headrace.LaneWarning)
    looking_makes_no_context()
    gpu = headrace.device("cuda:0")
    calls = [
        ([v.data for v in c.inputs], c.outputs[0].data) for c in programs.read_calls(TWO.with_suffix(".npz"))
    ]
    with headrace.load(TWO) as program:
        assert program.device is gpu
        method = program["forward"]
        every_stream_and_every_array(gpu, method, calls)
        refusals(gpu, method, calls[0][0])
        copies(gpu, calls[0][0][0])
        selections(gpu, method, *calls[0])
        a_steady_call(gpu, method, calls[0][0])
        mirrored(gpu, program, *calls[0], right)
        a_steady_call(gpu, method, calls[0][0])
    dropped_in_the_wrong_order(gpu, *calls[0])
    an_unknown_library_is_named(calls[0][0], wrong)
    del method, program
    gc.collect()
    gpu.trim()
    gpu.synchronize()
    assert gpu.memory()["current_nbytes"] == 0, gpu.memory()
    del gpu  # it keeps events for its next use
    gc.collect()
    driver.fake_run_all()
    headrace.device("cuda:0").synchronize()
    left = driver.fake_left().decode()
    assert left == "", left
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
