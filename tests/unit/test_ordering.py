"""The happens-before check on recorded runs: faults that it finds, right programs that it leaves alone."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import ordering
from tests import programs
from tests.conftest import run_python, succeeded
from tests.unit.ordering_plants import FAULTS, RIGHT, chain, own_streams, put, zeros

# HEADRACE_SEEDS=1000 asks for all that the project promises.
SEEDS = int(os.environ.get("HEADRACE_SEEDS", "100"))


def recorded(plant: Any, schedule: str | int) -> ordering.Record:
    device = headrace.device("sim", schedule=schedule)
    with headrace.record() as record:
        plant(device)
    return record


@pytest.mark.parametrize("schedule", ["eager", "late", 5])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_from_the_record_alone(name: str, schedule: str | int) -> None:
    """OR5: under every schedule, also where every value came out right."""
    record = recorded(FAULTS[name], schedule)
    with pytest.raises(headrace.OrderingError) as e:
        record.check()
    assert e.value.conflicts
    for conflict in e.value.conflicts:
        assert conflict.first.number < conflict.second.number
        assert (conflict.first.stream, conflict.first.thread) != (
            conflict.second.stream,
            conflict.second.thread,
        )
        for part in (conflict.buffer, conflict.remedy, conflict.first.stream, conflict.second.stream):
            assert part and part in str(conflict)
    assert str(e.value.conflicts[0]) in str(e.value)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_shows_as_a_wrong_value_under_some_seed(name: str) -> None:
    """OR6: every legal interleaving can be asked for, and one of them shows the fault."""
    for seed in range(1000):
        got, want = FAULTS[name](headrace.device("sim", schedule=seed))
        if not np.array_equal(got, want):
            break
    else:
        pytest.fail(f"{name}: 1,000 seeds and no wrong value")
    again, _ = FAULTS[name](headrace.device("sim", schedule=seed))
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("name", RIGHT)
def test_right_program_is_not_reported(name: str) -> None:
    for schedule in ("eager", "late", *range(8)):
        record = recorded(RIGHT[name], schedule)
        assert record.check().conflicts == ()


@pytest.mark.parametrize("name", RIGHT)
def test_right_program_is_right_under_every_schedule(name: str) -> None:
    for schedule in ("eager", "late", *range(SEEDS // 4)):
        got, want = RIGHT[name](headrace.device("sim", schedule=schedule))
        np.testing.assert_array_equal(got, want)


def test_there_are_as_many_plants_as_promised() -> None:
    assert len(FAULTS) == 10 and len(RIGHT) >= 10


# ---------------------------------------------------------------- what is told


def conflicts(name: str) -> tuple[ordering.Conflict, ...]:
    return recorded(FAULTS[name], "eager").findings().conflicts


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("a_missing_wait_between_two_streams", {"read-write"}),
        ("a_host_read_before_its_copy_ended", {"host touch before the wait"}),
        ("a_buffer_freed_while_in_use", {"use after free"}),
        ("an_input_overwritten_by_the_next_frame", {"read-write"}),
        ("two_threads_on_one_buffer", {"read-write", "write-write"}),
    ],
)
def test_kind_of_conflict(name: str, kinds: set[str]) -> None:
    assert {c.kind for c in conflicts(name)} == kinds


def test_conflict_names_islands_buffer_streams_and_the_wait() -> None:
    """OR5: which island, which buffer, which streams, what would order them."""
    found = conflicts("a_stream_per_delegate")
    names = sorted(programs.load("chain25_cuda").delegates)
    between = [c for c in found if c.first.delegate and c.second.delegate]
    assert len(between) >= 24
    first = between[0]
    assert [first.first.delegate, first.second.delegate] == names
    assert first.first.method == first.second.method == "forward"
    assert first.first.instruction is not None and first.second.instruction == first.first.instruction + 1
    assert first.first.stream != first.second.stream
    assert "planned buffer" in first.buffer and "of forward" in first.buffer
    assert f"record an event on {first.first.stream} behind operation {first.first.number}" in first.remedy
    assert f"let {first.second.stream} wait for it" in first.remedy


def test_wait_before_its_record_is_told() -> None:
    (conflict,) = conflicts("a_wait_enqueued_before_its_record")
    assert "came before its event was recorded, and is no wait" in conflict.remedy


def test_threads_are_told() -> None:
    conflict = conflicts("two_threads_on_one_buffer")[0]
    assert conflict.first.thread != conflict.second.thread


def test_the_same_places_are_one_conflict() -> None:
    device = headrace.device("sim")
    program, x, _ = chain(device, first=own_streams, second=own_streams)
    with headrace.record() as once:
        program["forward"](x)
    device.synchronize()
    with headrace.record() as often:
        for _ in range(10):
            program["forward"](x)
    device.synchronize()
    # A later call adds the pairs with the call before it; ten calls add nothing to two.
    assert len(often.findings().conflicts) <= 4 * len(once.findings().conflicts)
    assert max(c.times for c in often.findings().conflicts) == 10


def test_fresh_memory_read_before_any_write() -> None:
    device = headrace.device("sim")
    stream = device.stream()
    with headrace.record() as record:
        buffer = device.empty([4], stream=stream)
        stream.call(lambda: None, reads=[buffer])
        put(stream, buffer, 1)
        stream.call(lambda: None, reads=[buffer])
    (conflict,) = record.findings().conflicts
    assert conflict.kind == "read before any write"


def test_memory_used_on_a_stream_that_its_allocation_does_not_order() -> None:
    device = headrace.device("sim")
    one, two = device.stream(), device.stream()
    with headrace.record() as record:
        buffer = device.empty([4], stream=one)
        put(two, buffer, 1)
    assert "use before allocation" in {c.kind for c in record.findings().conflicts}


# ------------------------------------------------------------------ the record


def test_a_check_that_looked_at_nothing_fails() -> None:
    with headrace.record() as record:
        pass
    with pytest.raises(headrace.OrderingError, match="expected work of a device") as e:
        record.check()
    assert e.value.conflicts == ()
    with headrace.record() as record:
        headrace.device("sim").stream().synchronize()
    with pytest.raises(headrace.OrderingError, match="expected work of a device"):
        record.check()


def test_nothing_is_written_down_outside_a_record() -> None:
    device = headrace.device("sim")
    stream, buffer = device.stream(), zeros(device)
    put(stream, buffer, 1)
    with headrace.record() as outer:
        put(stream, buffer, 2)
        with headrace.record() as inner:
            put(stream, buffer, 3)
        put(stream, buffer, 4)
    put(stream, buffer, 5)
    calls = [sum(e.kind == ordering.Kind.CALL for e in r.log.entries) for r in (outer, inner)]
    assert calls == [3, 1]


def test_record_is_used_once_and_read_when_closed() -> None:
    with headrace.record() as record, pytest.raises(headrace.HeadraceError, match="closed"):
        record.check()
    with pytest.raises(headrace.HeadraceError, match="call record\\(\\) again"), record:
        pass


def test_refused_operations_order_and_touch_nothing() -> None:
    device = headrace.device("sim")
    stream, other, buffer = device.stream(), device.stream(), zeros(device)
    with headrace.record() as record:
        put(stream, buffer, 1)
        device.fail("wait")
        with pytest.raises(headrace.DeviceError):
            other.wait(stream.record())
        device.fail("call")
        with pytest.raises(headrace.DeviceError):
            put(other, buffer, 3)
        device.fail("synchronize_stream")
        with pytest.raises(headrace.DeviceError):
            stream.synchronize()
        put(other, buffer, 2)
    (conflict,) = record.findings().conflicts
    assert conflict.kind == "write-write" and conflict.times == 1


def test_streams_are_told_apart_where_handles_are_not() -> None:
    """d8 of the field's reports: handle 2 is another stream on every thread."""
    device = headrace.device("sim")
    buffer = zeros(device)
    from tests.unit.ordering_plants import in_thread

    with headrace.record() as record:
        in_thread(lambda: put(device.per_thread_stream(), buffer, 1))
        in_thread(lambda: put(device.per_thread_stream(), buffer, 2))
    (conflict,) = record.findings().conflicts
    assert conflict.first.stream != conflict.second.stream
    assert "per-thread stream of thread" in conflict.first.stream


def test_call_that_failed_leaves_the_next_one_right() -> None:
    """A recorded call walks the instructions; one that fails in the middle does not stay there."""
    device = headrace.device("sim")
    fails = [True]

    def sometimes(self: Any, work: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        if fails.pop() if fails else False:
            raise ValueError("planted")
        stream.call(work, reads=inputs, writes=outputs)

    program, x, want = chain(device, second=sometimes)
    with headrace.record() as record:
        with pytest.raises(headrace.DelegateError, match="planted"):
            program["forward"](x)
        for _ in range(3):
            (y,) = program["forward"](x)
            np.testing.assert_array_equal(y, want)
    assert record.check().unseen == ()
    assert len(record.log.islands) == 2 + 3 * 25


def test_what_lies_behind_a_jump_is_told_as_unseen() -> None:
    """OR5: the record says what it could not see; the answers and the bound on a loop's length stay."""
    program = programs.load("loop")
    call = program.calls[0]
    inputs = [value.data for value in call.inputs]
    with headrace.load(program.path) as loaded:
        with headrace.record() as record:
            (result,) = loaded["forward"](*inputs)
            np.testing.assert_array_equal(result, call.outputs[0].data)
        (unseen,) = record.findings().unseen
        assert re.match(r"forward: CPU kernels .* behind the jump at instruction \d+", unseen)
    with headrace.load(program.path, max_steps=3) as loaded, headrace.record():
        with pytest.raises(headrace.DelegateError, match="within 3 instructions"):
            loaded["forward"](*inputs)
        with pytest.raises(headrace.DelegateError, match="within 3 instructions"):
            loaded["forward"](*inputs)


# -------------------------------------------------------- the ordering test


@pytest.mark.parametrize("number", range(5))
def test_25_islands_over_two_delegates_in_a_fresh_process(number: int) -> None:
    """OR2, OR4, OR6: equal to eager PyTorch, then 1,000 bit-equal runs, loaded on one thread and run on another,
    under seeds of this process's own, the record clean; the one-delegate control 500 times."""
    seeds = range(number * SEEDS // 5, (number + 1) * SEEDS // 5)
    code = """
        import sys
        from tests.unit.ordering_child import main
        main(int(sys.argv[1]), int(sys.argv[2]))
    """
    done = succeeded(run_python(code, seeds.start, seeds.stop, timeout_s=600))
    assert json.loads(done) == {
        "seeds": len(seeds),
        "chain25_cuda": 1000,
        "chain25_cuda_resident": 1000,
        "chain25_single": 500,
        "conflicts": 0,
    }


# --------------------------------------------------------------------- trace


def test_trace_is_one_row_a_stream_with_islands_and_conflicts(tmp_path: Path) -> None:
    """BY1: the run as a file that Perfetto opens."""
    record = recorded(FAULTS["a_stream_per_delegate"], "eager")
    record.trace(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    events = trace["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= e.keys() for e in events)
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= rows.keys() and len(set(rows.values())) == len(rows)
    assert sum("stream" in name for name in rows.values()) >= 26  # the call's, and one of each island
    islands = [e["name"] for e in events if e["ph"] == "X" and e["name"].startswith("island ")]
    assert len(islands) == 25
    marks = [e for e in events if e["ph"] == "i" and e["name"].startswith("CONFLICT")]
    assert len(marks) == 2 * len(record.findings().conflicts) > 0
    flows = [e for e in events if e["ph"] in "sf"]
    assert {e["id"] for e in flows if e["ph"] == "s"} == {e["id"] for e in flows if e["ph"] == "f"}
    assert any(e["name"] == "forward" for e in events)


def test_trace_to_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    record = recorded(RIGHT["one_stream"], "eager")
    with pytest.raises(headrace.InputError, match="expected a file that can be written"):
        record.trace(tmp_path / "no" / "run.json")
