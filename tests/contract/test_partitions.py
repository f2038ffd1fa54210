"""GC1: parts of a device's multiprocessors."""

from __future__ import annotations

import operator
from typing import Any

import pytest

import headrace

from .conftest import Devices, golden

# Asked for and granted, as measured on an H200 with 132.
GRANTED = {1: 8, 2: 8, 4: 8, 8: 8, 9: 16, 12: 16, 16: 16, 64: 64, 100: 104, 128: 128}


@pytest.mark.parametrize(("asked", "granted"), GRANTED.items())
def test_the_granted_count_is_rounded_up_and_reported(asked: int, granted: int, sims: Devices) -> None:
    """GC1: read back from the partition; the rest stays available."""
    for device in sims:
        partition = device.partition(sms=asked)
        assert partition.sm_count == granted and partition.device is device
        assert device.sm_count == 132
        with pytest.raises(headrace.DeviceError, match=str(132 - granted)):
            device.partition(sms=132 - granted + 1 if granted < 128 else 5)
        if "seeds" in sims.name:
            break


def test_one_split_makes_disjoint_partitions_of_unequal_sizes(sims: Devices) -> None:
    """GC1: in one call; what is asked beyond what there is raises with what is left, and takes nothing."""
    for device in sims:
        lanes = device.split([8, 64])
        assert [p.sm_count for p in lanes] == [8, 64]
        for bad in ([64, 8], [1000], [48, 1, 1, 1, 1]):
            with pytest.raises(headrace.DeviceError, match=r"60|56"):
                device.split(bad)
        rest = device.split([33, 3])
        assert [p.sm_count for p in rest] == [40, 8]
        assert sum(p.sm_count for p in (*lanes, *rest)) <= 132
        with pytest.raises(headrace.InputError):
            device.split([8, 0])
        with pytest.raises(headrace.InputError):
            device.split([])
        with pytest.raises(headrace.InputError):
            device.partition(sms=-8)
        # What is dropped comes back.
        del lanes, rest
        assert device.partition(sms=128).sm_count == 128


def test_a_workqueue_concurrency_limit_is_reported_as_granted(sims: Devices) -> None:
    """GC1: of each partition of a split; None where none was asked for; work in it is right."""
    program = golden("split_cuda")
    for device in sims:
        lanes = [*device.split([8, 16], workqueue_concurrency_limit=2)]
        lanes.append(device.partition(sms=8, workqueue_concurrency_limit=5))
        lanes.append(device.partition(sms=8))
        assert [lane.workqueue_concurrency_limit for lane in lanes] == [2, 2, 5, None]
        assert [lane.sm_count for lane in lanes] == [8, 16, 8, 8]
        for bad in (0, -3):
            with pytest.raises(headrace.InputError, match=rf"limit of at least 1, or none, got {bad};"):
                device.partition(sms=8, workqueue_concurrency_limit=bad)
            with pytest.raises(headrace.InputError, match=f"got {bad};"):
                device.split([8], workqueue_concurrency_limit=bad)
        with program.load(device) as loaded:
            assert program.right(loaded["forward"](*program.inputs(), stream=lanes[2].stream()))
        lanes.clear()
        assert device.partition(sms=132).sm_count == 132


def test_work_of_a_lane_s_stream_is_right_and_streams_outlive_close(sims: Devices) -> None:
    """GC1: a program runs on a lane's stream; a closed partition makes no more streams, those that exist go on."""
    program = golden("split_cuda")
    for device in sims:
        lane = device.partition(sms=8)
        stream = lane.stream()
        assert stream.partition == lane and not operator.eq(lane, None) and not operator.eq(stream, None)
        with program.load(device) as loaded:
            assert program.right(loaded["forward"](*program.inputs(), stream=stream))
            lane.close()
            lane.close()
            with pytest.raises(headrace.InputError, match="closed"):
                lane.stream()
            assert program.right(loaded["forward"](*program.inputs(), stream=stream))
            # The stream holds the multiprocessors.
            del lane
            with pytest.raises(headrace.DeviceError):
                device.partition(sms=128)
            stream.close()  # whoever keeps the object
            assert device.partition(sms=128).sm_count == 128


def test_the_cpu_has_no_partitions() -> None:
    """GC1: nothing falls back silently."""
    device: Any = headrace.device("cpu")
    assert device.sm_count == 0
    with pytest.raises(headrace.DeviceError, match=r"partition|multiprocessor"):
        device.partition(sms=8)
    with pytest.raises(headrace.DeviceError, match="partition"):
        device.partition(sms=8, workqueue_concurrency_limit=2)
