"""SY2, GC1, GC6, GR3: programs that are bound to a lane, a partition of the device's multiprocessors."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest

import headrace

from . import delegates
from .conftest import Devices, golden


class Seen(delegates.OneCall):
    """Notes on how many multiprocessors its work ran (0: on all), and the stream of each call."""

    sms: list[int] = []  # noqa: RUF012
    streams: list[int] = []  # noqa: RUF012

    def body(self, inputs: Any, outputs: Any) -> Any:
        work = super().body(inputs, outputs)
        device = inputs[0].device

        def noting() -> None:
            self.sms.append(device._running_sms)
            work()

        return noting

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        self.streams.append(stream.handle)
        super().run(inputs, outputs, stream)


@pytest.fixture(autouse=True)
def seen(classes: Any) -> type[Seen]:
    delegates.install(Seen)
    Seen.sms.clear()
    Seen.streams.clear()
    return Seen


def test_calls_without_a_stream_run_in_the_program_s_lane(sims: Devices, seen: type[Seen]) -> None:
    """SY2, SY1: every island, on the lane's stream, and the call waits; threads share it; a chosen stream wins."""
    program = golden("split_cuda")
    for device in sims:
        lane, other = device.split([16, 40])
        with program.load(None, lane=lane) as loaded:
            assert loaded.device is device
            seen.sms.clear()
            seen.streams.clear()
            assert program.right(loaded["forward"](*program.inputs()))
            assert set(seen.sms) == {16} and len(set(seen.streams)) == 1 and seen.streams[0] > 2
            assert device.pending == 0
            assert loaded["forward"].stats.last.synchronizations == 1
            with headrace.caller_stream(other.stream()):
                assert program.right(loaded["forward"](*program.inputs()))
            assert set(seen.sms) == {16, 40}
            seen.sms.clear()
            with pytest.warns(headrace.LaneWarning):
                loaded["forward"](*program.inputs(), stream=device.stream())
            assert set(seen.sms) == {0}
        seen.streams.clear()


def test_a_graph_without_a_stream_stays_in_the_program_s_lane(late: Any, seen: type[Seen]) -> None:
    """GR3, SY2: captured in the lane, replayed there; a replay elsewhere captures anew."""
    program = golden("split_cuda_resident")
    lane, other = late.split([8, 16])
    with program.load(late, lane=lane) as loaded:
        graph = loaded["forward"].capture(*program.inputs())
        seen.sms.clear()
        inputs = [late.to_device(x) for x in program.inputs()]
        assert program.right(graph.replay(*inputs))
        assert set(seen.sms) == {8} and graph.stats.recaptures == {}
        seen.sms.clear()
        assert program.right(graph.replay(*inputs, stream=other.stream()))
        late.synchronize()
        assert seen.sms[-1] == 16 and graph.stats.recaptures == {"partition": 1}


def test_a_lane_holds_its_sms_until_the_program_is_gone(late: Any) -> None:
    """LT3, GC1: the partition may be dropped or closed before; work in flight goes on; then the SMs are back."""
    program = golden("split_cuda_resident")
    inputs = [late.to_device(x) for x in program.inputs()]
    lane = late.partition(sms=128)
    loaded = program.load(late, lane=lane)
    lane.close()
    del lane
    for _ in range(2):
        assert program.right(loaded["forward"](*inputs))
    with pytest.raises(headrace.DeviceError):
        late.partition(sms=8)
    loaded.close()
    del loaded
    gc.collect()
    late.synchronize()
    assert late.partition(sms=128).sm_count == 128
    inputs.clear()


def test_what_cannot_be_a_lane_is_refused(late: Any) -> None:
    """OP3, OP5, CS6: another device's, a closed one, something else, and a program that has no use for it."""
    program = golden("split_cuda")
    sim = headrace.device("sim:1")
    with pytest.raises(
        headrace.DeviceError, match="partition of the program's device, sim:0, got one of sim:1"
    ):
        program.load(late, lane=sim.partition(sms=8))
    # Another device of the same name.
    with pytest.raises(headrace.DeviceError, match="got one of sim:0, another device of that name"):
        program.load(late, lane=headrace.device("sim").partition(sms=8))
    lane = late.partition(sms=8)
    for wrong in (8, "8", lane.stream(), late):
        with pytest.raises(headrace.OptionError, match=r"Partition, as Device.partition\(\) gives it"):
            program.load(late, lane=wrong)
    with pytest.raises(headrace.OptionError, match="work for a device, got one that runs on the host"):
        golden("add").load(late, lane=lane)
    lane.close()
    with pytest.raises(headrace.InputError, match="closed"):
        program.load(late, lane=lane)
    del lane, wrong
    gc.collect()
    assert late.partition(sms=128).sm_count == 128  # nothing refused holds any


def test_a_call_outside_every_lane_beside_lanes_is_warned_of_once(late: Any) -> None:
    """GC6: nothing keeps it off their SMs. None where there is no lane, or where the call is in one."""
    program = golden("split_cuda")
    with program.load(late) as outside, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program.right(outside["forward"](*program.inputs()))
        lane = late.partition(sms=8)
        assert program.right(outside["forward"](*program.inputs(), stream=lane.stream()))
        with program.load(late, lane=lane) as inside:
            assert program.right(inside["forward"](*program.inputs()))
        with pytest.raises(headrace.LaneWarning, match=r"forward: runs outside every lane of sim:0.*lane="):
            outside["forward"](*program.inputs())
        assert program.right(outside["forward"](*program.inputs()))
