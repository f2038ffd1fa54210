"""SY2, GC1, GC2, GC6, GR3: programs that are bound to a lane, a partition of the device's multiprocessors."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from typing import Any

import pytest

import headrace
from headrace import lanes

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


def test_work_says_on_which_multiprocessors_it_runs(sims: Devices) -> None:
    """GC2: those of the stream's partition, in a call and in a graph; all of them in no lane; nothing is left of it."""
    for device in sims:
        small, large = device.split([8, 16])
        streams = [small.stream(), large.stream(), device.stream()]
        for replayed in (False, True):
            seen = [lanes.sms_seen(stream, replayed=replayed) for stream in streams]
            assert seen == [frozenset(range(8)), frozenset(range(8, 24)), frozenset(range(132))]
        assert device.pending == 0 and device.memory()["current_nbytes"] == 0
        if "seeds" in sims.name:
            break
    with pytest.raises(headrace.OptionError, match=r"expected a Stream.*got int"):
        lanes.sms_seen(streams[0].handle)
    with pytest.raises(headrace.DeviceError, match="multiprocessors"):
        lanes.sms_seen(headrace.device("cpu").stream())


def test_a_program_is_looked_at_whatever_way_its_delegates_work(
    way: type[delegates.Base], sims: Devices
) -> None:
    """GC2, GR3: calls, capture and replay stay in the lane, or what left it is named: a side stream that is no lane's, though
    it is joined as it should be, is found in the graph and in the calls."""
    program = golden("two_islands")
    for device in sims:
        lane = device.split([8, 16])[1]
        seen = lanes.confinement(lanes.Tenant(program.path, program.inputs(), name="two"), lane)
        assert (seen.tenant, seen.method, seen.device) == ("two", "forward", "sim:0")
        assert seen.granted == 16 and seen.not_looked == "" and seen.kernels >= 2
        # The stream itself is the lane's, whatever a delegate does beside it.
        assert seen.sms == seen.replayed == frozenset(range(8, 24)) and len(seen.eager) == 4
        if way is delegates.SideStream:
            assert not seen.confined
            text = str(seen)
            assert "leaves its lane of 16 SMs" in text and "in its graph: call runs outside the lane" in text
            for name in delegates.NAMES:
                assert re.search(f"delegate '{name}': call on stream 0x.* of sim:0, outside the lane", text)
        else:
            assert seen.confined, str(seen)
            assert re.fullmatch(
                "two, forward: stays in its lane: 16 SMs seen of 16 granted, in calls and replayed; [0-9]+ kernels of its "
                "graph are in the lane",
                str(seen),
            )
        if "seeds" in sims.name and device.calls("launch"):
            break


@pytest.mark.parametrize("wrong", list(delegates.WRONG))
def test_what_leaves_a_lane_and_no_graph_holds_is_found_in_the_calls(wrong: str, late: Any) -> None:
    """GC2, OR7: streams of a delegate's own that nothing orders, and that are gone by the time they are looked at."""
    delegates.install(delegates.WRONG[wrong])
    program = golden("two_islands")
    seen = lanes.confinement(program.path, late.partition(sms=8), program.inputs())
    assert not seen.confined and len(seen.sms) == 8
    assert any("delegate 'TestA': call on stream" in line for line in seen.escaped), str(seen)
    late.synchronize()


def test_a_lane_s_other_stream_is_no_escape(late: Any) -> None:
    """GC2: nor is what other threads do meanwhile, or this thread outside the program."""
    lane = late.partition(sms=8)

    class InLane(delegates.Base):
        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            side = lane.stream()
            side.wait(stream.record())
            self.put(inputs, outputs, side)
            stream.wait(side.record())

    delegates.install(InLane)
    program = golden("two_islands")
    stop, busy = threading.Event(), late.stream()

    def elsewhere() -> None:
        while not stop.is_set():
            busy.call(lambda: None)
            busy.synchronize()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        seen = lanes.confinement(program.path, lane, program.inputs())
    finally:
        stop.set()
        thread.join()
    assert seen.confined, str(seen)


def test_what_cannot_be_captured_is_looked_at_in_calls_alone(late: Any, seen: type[Seen]) -> None:
    """GC2, GR7: and says so, with the reason."""

    class Refusing(delegates.OneCall):
        def capturable(self) -> str:
            return "it counts its calls"

    program = golden("two_islands")
    for way, confined in ((Refusing, True), (type("Aside", (Refusing, delegates.SideStream), {}), False)):
        delegates.install(way)
        looked = lanes.confinement(program.path, late.partition(sms=8), program.inputs())
        assert (looked.confined, looked.kernels) == (confined, 0)
        assert "it counts its calls" in looked.not_looked
        assert "calls alone were checked: forward, capture: " in str(looked)
        assert looked.replayed == frozenset(range(8))


def test_looking_gives_everything_back_and_refuses_what_it_cannot_look_at(late: Any) -> None:
    """GC2, LT3, OP3: SMs, memory and streams, also where the capture fails."""
    program = golden("two_islands")
    lane = late.partition(sms=8)
    before = late.memory()["current_nbytes"]

    def unchanged() -> None:
        gc.collect()
        late.synchronize()
        late.trim()
        assert late.memory()["current_nbytes"] == before and late.pending == 0

    lanes.confinement(program.path, lane, program.inputs(), calls=1)
    unchanged()
    for operation in ("sms_seen", "work_of", "begin_capture", "split"):
        late.fail(operation)
        if operation == "split":
            with pytest.raises(headrace.DeviceError):
                late.partition(sms=8)
        else:
            with pytest.raises((headrace.DeviceError, headrace.CaptureError)):
                lanes.confinement(program.path, lane, program.inputs())
        unchanged()
    for wrong, words, arguments in (
        (headrace.OptionError, "expected a Partition.*got int", (program.path, 8)),
        (headrace.OptionError, "expected a Partition.*got Stream", (program.path, lane.stream())),
        (headrace.OptionError, "work for a device", (golden("add").path, lane, golden("add").inputs())),
        (
            headrace.InputError,
            "expected one of forward, got 'none'",
            (lanes.Tenant(program.path, (), method="none"), lane),
        ),
        (headrace.InputError, "2 inputs", (program.path, lane)),
    ):
        with pytest.raises(wrong, match=words):
            lanes.confinement(*arguments)
    with pytest.raises(headrace.OptionError, match="calls: expected 1 or more, got 0"):
        lanes.confinement(program.path, lane, program.inputs(), calls=0)
    with (
        headrace.caller_stream(lane.stream()),
        pytest.raises(headrace.OptionError, match="no selected stream"),
    ):
        lanes.confinement(program.path, lane, program.inputs())
    del lane, arguments
    unchanged()
    assert late.partition(sms=128).sm_count == 128
