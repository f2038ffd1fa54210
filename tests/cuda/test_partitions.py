"""SM partitions: what is granted, and where kernels ran."""

from __future__ import annotations

from typing import Any

import pytest

import headrace
from tests.contract.conftest import Golden

from . import kernels
from .kernels import cupy

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::headrace.LaneWarning")]


def test_kernels_stay_on_the_partition_s_sms(gpu: Any) -> None:
    """GC1, GC2, d9: unequal lanes in one split, disjoint, as large as they say."""
    small, large = gpu.split([8, 64])
    assert (small.sm_count, large.sm_count) == (8, 64)
    first, second = kernels.sms_seen(small.stream()), kernels.sms_seen(large.stream())
    assert len(first) == 8 and len(second) == 64 and not first & second
    whole = kernels.sms_seen(gpu.stream())
    assert len(whole) == gpu.sm_count and first | second < whole
    # Another stream of the same lane, and the lane's own streams again: the same SMs.
    assert kernels.sms_seen(small.stream()) == first


def test_a_later_split_is_disjoint_from_those_that_live(gpu: Any) -> None:
    """GC1: SMs are given once, and come back with the last reference."""
    a = gpu.partition(sms=16)
    b = gpu.partition(sms=1)
    assert (a.sm_count, b.sm_count) == (16, 8)
    stream = a.stream()
    seen = kernels.sms_seen(stream)
    assert not seen & kernels.sms_seen(b.stream())
    del a  # its stream keeps it
    left = gpu.sm_count - 16 - 8
    with pytest.raises(headrace.DeviceError, match=f"at most {left} SMs"):
        gpu.split([left + 1])
    kernels.slow(stream, 50)
    stream.close()
    rest = gpu.partition(sms=left + 16)
    assert rest.sm_count >= left + 16
    assert not kernels.sms_seen(b.stream()) & kernels.sms_seen(rest.stream())


def test_the_whole_device_and_more(gpu: Any) -> None:
    """GC1: what the driver's groups leave over is lent too; more than there is names what there is."""
    whole = gpu.partition(sms=gpu.sm_count)
    assert whole.sm_count == gpu.sm_count
    assert len(kernels.sms_seen(whole.stream(), blocks=4000)) == gpu.sm_count
    with pytest.raises(headrace.DeviceError, match="at most 0 SMs"):
        gpu.partition(sms=1)
    del whole
    with pytest.raises(headrace.DeviceError, match=f"at most {gpu.sm_count} SMs"):
        gpu.partition(sms=gpu.sm_count + 1)


def test_a_closed_partition_gives_no_streams(gpu: Any) -> None:
    lane = gpu.partition(sms=8)
    stream = lane.stream()
    lane.close()
    with pytest.raises(headrace.InputError, match="closed"):
        lane.stream()
    assert len(kernels.sms_seen(stream)) == 8


def test_a_program_in_a_lane_is_right_and_stays_there(chain: Golden, gpu: Any) -> None:
    """GC2, GC5: on the asynchronous path, with events across lanes and the whole device."""
    kernels.install(delay_ms=0.1)
    lanes = gpu.split([8, 16])
    streams = [lane.stream() for lane in lanes] + [gpu.stream()]
    with chain.load(gpu) as program:
        inputs = [gpu.to_device(x) for x in chain.inputs()]
        results = [program["forward"](*inputs, stream=streams[k % 3]) for k in range(9)]
        assert all(chain.right(r) for r in results)
    assert len(kernels.sms_seen(streams[0])) == 8


def test_a_call_works_while_a_green_context_is_current(chain: Golden, gpu: Any) -> None:
    """SY2: handle 2 is invalid there; for the call the primary context is put in place, and then taken away."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    lane = gpu.partition(sms=8)
    handle = ctypes.c_void_p(lane.stream().handle)
    green = ctypes.c_void_p()
    stream = lane.stream()
    handle = ctypes.c_void_p(stream.handle)
    assert driver.cuStreamGetCtx(handle, ctypes.byref(green)) == 0
    primary = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(primary)) == 0
    with chain.load(gpu) as program:
        buffers = [gpu.to_device(x) for x in chain.inputs()]
        result = program["forward"](*buffers, stream=gpu.stream())
        assert driver.cuCtxPushCurrent_v2(green) == 0
        try:
            current = ctypes.c_void_p()
            array = gpu.to_device(chain.inputs()[0]).numpy()  # on handle 2
            assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value == green.value
            got = result[0].numpy()
        finally:
            assert driver.cuCtxPopCurrent_v2(ctypes.byref(green)) == 0
        assert array.tobytes() == chain.inputs()[0].tobytes()
        assert chain.right([got])
    cupy.cuda.runtime.deviceSynchronize()
