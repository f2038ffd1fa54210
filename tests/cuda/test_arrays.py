"""Arrays of CuPy and PyTorch in and out: no copy, and ordered by the hand-shake however late their writers are."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import headrace
from tests.contract.conftest import Golden, golden

from . import kernels
from .kernels import cupy, torch

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]

LIBRARIES = ("cupy", "torch", "cuda array interface")


class Faced:
    """Only __cuda_array_interface__, on the stream it was written on."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def made_late(library: str, value: Any, keep: list[Any]) -> tuple[Any, int]:
    """An array whose values come after a kernel of 20 ms on a stream of the library's; and its address."""
    if library == "torch":
        stream = torch.cuda.Stream()
        source = torch.from_numpy(np.ascontiguousarray(value)).cuda()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)
            made = torch.empty_like(source)
            made.copy_(source)
        keep += [source, stream]
        torch.cuda.set_stream(stream)  # what __dlpack__ asks for as the producer's
        return made, made.data_ptr()
    stream = cupy.cuda.Stream(non_blocking=True)
    source = cupy.asarray(value)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        kernels._kernel("slow")((1,), (1,), (np.int64(20e6),))
        made = cupy.empty_like(source)
        cupy.copyto(made, source)
        keep += [source, stream]
        if library == "cuda array interface":
            return Faced(made), made.data.ptr
    stream.use()
    return made, made.data.ptr


@pytest.fixture(autouse=True)
def default_streams() -> Any:
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())
    cupy.cuda.Stream.null.use()
    cupy.cuda.runtime.deviceSynchronize()


@pytest.mark.parametrize("library", LIBRARIES)
def test_late_arrays_come_in_without_a_copy_and_in_order(library: str, gpu: Any, stream: Any) -> None:
    """SY5, DM3, a7, h4: no wait on the host, no staged byte, the writer's values."""
    program = golden("chain10")
    with program.load(gpu) as loaded:
        method = loaded["forward"]
        method(*[gpu.to_device(x) for x in program.inputs()], stream=stream)
        for k in range(4):
            keep: list[Any] = []
            inputs = [made_late(library, x, keep)[0] for x in program.inputs(k)]
            result = method(*inputs, stream=stream, strict=True)
            last = method.stats.last
            assert (last.synchronizations, last.bytes_to_device, last.bytes_to_host) == (0, 0, 0)
            assert program.right(result, k)
            # Nothing selected: the thread's own stream, which PyTorch does not know.
            inputs = [made_late(library, x, keep)[0] for x in program.inputs(k)]
            assert program.right(method(*inputs, strict=True), k)


@pytest.mark.parametrize("library", LIBRARIES)
def test_inputs_are_kept_until_the_work_is_done(library: str, gpu: Any) -> None:
    """LT3: dropped by the caller at once; memory that the library hands out again does not reach the program."""
    kernels.install(delay_ms=2)
    program = golden("chain10")
    with program.load(gpu) as loaded:
        stream = gpu.stream()
        for k in range(5):
            keep: list[Any] = []
            inputs = [made_late(library, x, keep)[0] for x in program.inputs(k)]
            result = loaded["forward"](*inputs, stream=stream)
            shapes = [x.shape for x in program.inputs(k)]
            del inputs
            gc.collect()
            junk = [cupy.full(s, np.nan, "f4") for s in shapes] + [
                torch.full(s, np.nan, device="cuda") for s in shapes
            ]
            assert program.right(result, k)
            del junk


def test_outputs_go_out_without_a_copy_and_in_order(gpu: Any) -> None:
    """DM3, h4, a2: by DLPack to CuPy and PyTorch and by the array interface, read on other streams while the work
    is in flight."""
    kernels.install(delay_ms=2)
    program = golden("chain10")
    with program.load(gpu) as loaded:
        stream = gpu.stream()
        inputs = [gpu.to_device(x) for x in program.inputs()]
        want = program.calls[0][1][0]
        for reader in ("cupy", "torch", "face"):
            (result,) = loaded["forward"](*inputs, stream=stream)
            assert not stream.query()
            if reader == "torch":
                other = torch.cuda.Stream()
                with torch.cuda.stream(other):
                    seen = torch.from_dlpack(result)
                    assert seen.data_ptr() == result.address and seen.is_cuda
                    got = (seen + 0).cpu().numpy()
            elif reader == "cupy":
                with cupy.cuda.Stream(non_blocking=True) as other:
                    view = cupy.from_dlpack(result)
                    assert view.data.ptr == result.address
                    got = cupy.asnumpy(view + 0)
                    other.synchronize()
            else:
                view = cupy.asarray(Faced(result))
                assert view.data.ptr == result.address
                got = cupy.asnumpy(view + 0)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            # It outlives the Buffer and the program's next calls.
            address = result.address
            if reader == "cupy":
                kept = view
                del result, view
                for k in range(3):
                    loaded["forward"](*[gpu.to_device(x * 0 + k) for x in program.inputs()], stream=stream)
                gpu.synchronize()
                assert kept.data.ptr == address
                np.testing.assert_allclose(cupy.asnumpy(kept), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_out_may_be_another_library_s_array(library: str, gpu: Any) -> None:
    """DM3: written in place, on the stream of the call."""
    program = golden("chain10")
    want = program.calls[0][1][0]
    with program.load(gpu) as loaded:
        stream = gpu.stream()
        out = (
            cupy.zeros(want.shape, want.dtype)
            if library == "cupy"
            else torch.zeros(want.shape, device="cuda")
        )
        cupy.cuda.runtime.deviceSynchronize()
        inputs = [gpu.to_device(x) for x in program.inputs()]
        (result,) = loaded["forward"](*inputs, stream=stream, out=[out])
        assert result is out
        stream.synchronize()
        got = cupy.asnumpy(out) if library == "cupy" else out.cpu().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_delegates_may_use_dlpack_inside_a_call(two: Golden, gpu: Any, stream: Any) -> None:
    """DE3: memory lent for a call goes to CuPy by DLPack too."""
    kernels.install(by_dlpack=True, delay_ms=0.5)
    with two.load(gpu) as program:
        for k in range(5):
            assert two.right(program["forward"](*two.inputs(k), stream=stream), k)


def test_addresses_are_believed_as_far_as_the_driver_confirms(two: Golden, gpu: Any) -> None:
    """DM3: pinned memory is the host's, managed memory the device's, and a wrong address is refused."""
    program = golden("chain10")
    x = program.inputs()[0]
    with program.load(gpu) as loaded:

        class Lies:
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": x.shape, "typestr": "<f4", "version": 3, "stream": 1, "data": (x.ctypes.data, False)
            }  # fmt: skip

        with pytest.raises(headrace.InputError, match="does not"):
            loaded["forward"](Lies(), stream=gpu.stream())
        small = cupy.zeros(1, "f4")

        class Long:
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": x.shape, "typestr": "<f4", "version": 3, "stream": 1, "data": (0x10, False)
            }  # fmt: skip

        with pytest.raises(headrace.InputError):
            loaded["forward"](Long(), stream=gpu.stream())
        del small
        managed = cupy.ndarray(x.shape, x.dtype, cupy.cuda.malloc_managed(x.nbytes))
        managed[...] = cupy.asarray(x)
        cupy.cuda.runtime.deviceSynchronize()
        assert program.right(loaded["forward"](managed, stream=gpu.stream()))
        pinned = cupy.cuda.alloc_pinned_memory(x.nbytes)
        host = np.frombuffer(pinned, x.dtype, x.size).reshape(x.shape)
        host[...] = x
        assert program.right(loaded["forward"](host, stream=gpu.stream()))
        assert loaded["forward"].stats.last.bytes_to_device == x.nbytes


def test_copies_between_libraries(gpu: Any) -> None:
    """SY5: to_device takes what the others make, late, and keeps it until it is copied."""
    value = np.arange(1 << 16, dtype="f4")
    stream = gpu.stream()
    for library in LIBRARIES:
        keep: list[Any] = []
        array = made_late(library, value, keep)[0]
        buffer = gpu.to_device(array, stream=stream)
        del array, keep
        gc.collect()
        np.testing.assert_array_equal(buffer.numpy(), value)
