"""The check's rules one by one, on records written by hand: it needs no device, and works for every one."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ordering import Call, Entry, Findings, Island, Kind, Log, Stream, Touch, check

HOST = 1 << 20  # an address of the host's


class Script:
    """A record, line by line. Streams 1 and 2 are non-blocking, 3 and 4 blocking, 5 is the legacy stream; 6 is the
    first of another device, 7 is the cpu device's."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.thread = 1
        self.island = self.call = 0
        self.streams = {
            number: Stream(number, device, f"sim:{device}", backend, handle, blocking, -1, 0)
            for number, device, backend, handle, blocking in [
                (1, 0, "cuda", 101, False),
                (2, 0, "cuda", 102, False),
                (3, 0, "cuda", 103, True),
                (4, 0, "cuda", 104, True),
                (5, 0, "cuda", 1, False),
                (6, 1, "cuda", 106, False),
                (7, 2, "cpu", 2, True),
            ]
        }

    def add(self, kind: Kind, stream: int = 0, *touches: Touch, object: int = 0, other: int = 0) -> int:
        number = len(self.entries) + 1
        self.entries.append(
            Entry(
                number, kind, number, self.thread, stream, self.call, self.island, object, other, "", touches
            )
        )
        return number

    def write(self, stream: int, address: int = 1000, nbytes: int = 16) -> int:
        return self.add(Kind.CALL, stream, Touch(address, nbytes, True))

    def read(self, stream: int, address: int = 1000, nbytes: int = 16) -> int:
        return self.add(Kind.CALL, stream, Touch(address, nbytes, False))

    def record(self, event: int, stream: int) -> None:
        self.add(Kind.RECORD, stream, object=event)

    def wait(self, stream: int, event: int) -> None:
        self.add(Kind.WAIT, stream, object=event)

    def host(self, kind: Kind, stream: int = 5, event: int = 0, done: bool = True) -> int:
        number = self.add(kind, stream, object=event)
        if done:
            self.add(Kind.DONE, object=number)
        return number

    def touch(self, write: bool, address: int = 1000, nbytes: int = 16) -> None:
        self.add(Kind.TOUCH, 0, Touch(address, nbytes, write))

    def check(self) -> Findings:
        islands = {n: Island(n, "D", n) for n in range(1, 9)}
        return check(Log(self.entries, self.streams, {1: Call(1, "forward", 1)}, islands, {1: ["x"]}))

    def kinds(self) -> list[str]:
        return [c.kind for c in self.check().conflicts]


@pytest.fixture
def s() -> Script:
    return Script()


def test_streams_order_their_own_work(s: Script) -> None:
    s.write(1)
    s.read(1)
    s.write(1)
    assert s.kinds() == []


@pytest.mark.parametrize("other", [2, 3, 4, 5, 6])
def test_two_streams_are_not_ordered(s: Script, other: int) -> None:
    s.write(1)
    s.read(other)
    assert s.kinds() == ["read-write"]


def test_every_pair_with_a_write_conflicts_and_two_reads_do_not(s: Script) -> None:
    s.read(1)
    s.read(2)
    assert s.kinds() == []
    s.write(2)
    assert s.kinds() == ["read-write"]
    s.write(1)
    assert s.kinds() == ["read-write", "write-write"]


def test_ranges_that_do_not_meet_do_not_conflict(s: Script) -> None:
    s.write(1, 1000, 16)
    s.write(2, 1016, 16)
    s.read(6, 984, 16)
    assert s.kinds() == []
    s.read(6, 1015, 2)
    (left, right) = s.check().conflicts
    assert [(left.address, left.nbytes), (right.address, right.nbytes)] == [(1015, 1), (1016, 1)]


def test_a_later_read_of_one_stream_does_not_hide_that_of_another(s: Script) -> None:
    s.read(1)
    s.read(2)
    s.read(2)
    s.record(9, 2)
    s.wait(6, 9)
    s.write(6)
    assert len(s.check().conflicts) == 1


# ---------------------------------------------------------------------- events


def test_wait_orders_later_work_behind_what_was_recorded(s: Script) -> None:
    s.write(1)
    s.record(9, 1)
    s.wait(2, 9)
    s.read(2)
    assert s.kinds() == []


def test_work_before_the_wait_and_behind_the_record_is_not_ordered(s: Script) -> None:
    s.write(1, 1000)
    s.record(9, 1)
    s.write(1, 2000)
    s.read(2, 1000)
    s.wait(2, 9)
    s.read(2, 2000)
    assert [c.address for c in s.check().conflicts] == [1000, 2000]


def test_wait_takes_the_latest_record_as_it_is_then(s: Script) -> None:
    s.record(9, 1)
    s.write(1)
    s.wait(2, 9)  # the record before the write
    s.record(9, 1)
    s.read(2)
    assert s.kinds() == ["read-write"]
    s.wait(2, 9)
    s.read(2)
    assert len(s.check().conflicts) == 1


def test_wait_before_any_record_is_no_wait(s: Script) -> None:
    s.wait(2, 9)
    s.write(1)
    s.record(9, 1)
    s.read(2)
    assert s.kinds() == ["read-write"]


def test_order_passes_through_several_streams_and_devices(s: Script) -> None:
    s.write(1)
    s.record(9, 1)
    s.wait(6, 9)
    s.record(8, 6)
    s.wait(2, 8)
    s.read(2)
    assert s.kinds() == []


def test_refused_wait_orders_nothing(s: Script) -> None:
    s.write(1)
    s.record(9, 1)
    s.wait(2, 9)
    s.add(Kind.REFUSED, object=len(s.entries))
    s.read(2)
    assert s.kinds() == ["read-write"]


# ---------------------------------------------------------------- legacy stream


@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3)])
def test_legacy_and_blocking_streams_order_each_other(s: Script, first: int, second: int) -> None:
    s.write(first)
    s.read(second)
    assert s.kinds() == []


def test_legacy_stream_orders_blocking_streams_among_each_other(s: Script) -> None:
    s.write(3)
    s.read(4)
    assert s.kinds() == ["read-write"]
    s.write(3, 2000)
    s.write(5, 5000)
    s.read(4, 2000)
    assert len(s.check().conflicts) == 1


def test_legacy_stream_of_one_device_is_not_that_of_another(s: Script) -> None:
    s.streams[8] = Stream(8, 1, "sim:1", "cuda", 1, False, -1, 0)
    s.write(8)
    s.read(3)
    assert s.kinds() == ["read-write"]
    s.write(8, 2000)
    s.write(5, 5000)
    s.read(3, 2000)
    assert s.kinds() == ["read-write"] * 2
    s.write(3, 3000)
    s.read(8, 3000)
    assert s.kinds() == ["read-write"] * 3


# ------------------------------------------------------------------- the host


@pytest.mark.parametrize(
    "wait",
    [
        lambda s: s.host(Kind.SYNCHRONIZE_EVENT, event=9),
        lambda s: s.host(Kind.QUERY_EVENT, event=9),
        lambda s: s.host(Kind.SYNCHRONIZE_STREAM, 1),
        lambda s: s.host(Kind.QUERY_STREAM, 1),
        lambda s: s.host(Kind.SYNCHRONIZE_DEVICE),
    ],
)
def test_wait_on_the_host_orders_the_host_and_all_that_comes(s: Script, wait: Any) -> None:
    s.write(1)
    s.record(9, 1)
    wait(s)
    s.touch(False)
    s.thread = 2
    s.read(2)
    s.write(6)
    assert s.kinds() == ["read-write"]  # of 2 and 6, and nothing with 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda s: s.host(Kind.SYNCHRONIZE_EVENT, event=9, done=False),
        lambda s: s.host(Kind.QUERY_EVENT, event=9, done=False),
        lambda s: s.host(Kind.SYNCHRONIZE_STREAM, 2),
        lambda s: s.host(Kind.SYNCHRONIZE_EVENT, event=8),
        lambda s: s.host(Kind.SYNCHRONIZE_DEVICE, 6),
    ],
)
def test_wait_for_something_else_or_without_an_end_orders_nothing(s: Script, wait: Any) -> None:
    s.write(1)
    s.record(9, 1)
    wait(s)
    s.touch(False)
    assert s.kinds() == ["host touch before the wait"]


def test_wait_on_the_host_covers_what_was_there_when_it_began(s: Script) -> None:
    s.write(1, 1000)
    number = s.add(Kind.SYNCHRONIZE_STREAM, 1)
    s.thread = 2
    s.write(1, 2000)
    s.thread = 1
    s.add(Kind.DONE, object=number)
    s.touch(False, 1000)
    s.touch(False, 2000)
    assert [c.address for c in s.check().conflicts] == [2000]


def test_wait_for_the_legacy_stream_waits_for_blocking_streams(s: Script) -> None:
    s.write(3, 1000)
    s.write(1, 2000)
    s.host(Kind.SYNCHRONIZE_STREAM, 5)
    s.touch(False, 1000)
    s.touch(False, 2000)
    assert [c.address for c in s.check().conflicts] == [2000]


def test_host_write_conflicts_with_a_read_in_flight_and_a_host_read_does_not(s: Script) -> None:
    s.read(1)
    s.touch(False)
    assert s.kinds() == []
    s.touch(True)
    assert s.kinds() == ["host touch before the wait"]
    s.write(2)
    # The read in flight is reported once; the host's own write is over.
    assert len(s.check().conflicts) == 1


def test_cpu_device_works_as_the_host(s: Script) -> None:
    s.write(7)
    s.read(1)
    assert s.kinds() == []
    s.write(7)
    assert s.kinds() == ["host touch before the wait"]


# -------------------------------------------------------------------- memory


def test_lifetimes_of_one_address_are_different_memory(s: Script) -> None:
    s.add(Kind.ALLOCATE, 1, Touch(1000, 16, True))
    s.write(1)
    s.add(Kind.FREE, 1, Touch(1000, 16, True))
    s.add(Kind.ALLOCATE, 2, Touch(1000, 16, True))
    s.write(2)
    assert s.kinds() == []


@pytest.mark.parametrize("allocated", [True, False], ids=["in the record", "before it"])
def test_free_must_come_behind_every_use(s: Script, allocated: bool) -> None:
    if allocated:
        s.add(Kind.ALLOCATE, 1, Touch(1000, 64, True))
    s.write(1, 1000, 64)
    s.record(9, 1)
    s.wait(2, 9)
    s.read(2, 1032)
    s.add(Kind.FREE, 1, Touch(1000, 64, True))
    (conflict,) = s.check().conflicts
    assert (conflict.kind, conflict.first.verb, conflict.second.verb) == ("use after free", "reads", "frees")


@pytest.mark.parametrize("allocated", [True, False], ids=["in the record", "before it"])
def test_use_behind_the_free_is_found_also_on_its_stream(s: Script, allocated: bool) -> None:
    if allocated:
        s.add(Kind.ALLOCATE, 1, Touch(1000, 64, True))
    s.write(1, 1000, 64)
    s.add(Kind.FREE, 1, Touch(1000, 64, True))
    s.read(1, 1032)
    assert s.kinds() == ["use after free"]


def test_free_must_come_behind_a_writer_too(s: Script) -> None:
    s.write(1, 1000, 64)
    s.add(Kind.FREE, 2, Touch(1000, 64, True))
    (conflict,) = s.check().conflicts
    assert (conflict.kind, conflict.first.verb) == ("use after free", "writes")


@pytest.mark.parametrize("allocated", [True, False], ids=["in the record", "before it"])
def test_addresses_that_are_gone_may_be_the_hosts(s: Script, allocated: bool) -> None:
    """A simulated device's memory is the host's: once it is given back, NumPy may have it."""
    if allocated:
        s.add(Kind.ALLOCATE, 1, Touch(1000, 64, True))
    s.write(1, 1000, 64)
    if allocated:
        s.add(Kind.FREE, 1, Touch(1000, 64, True))
    s.add(Kind.GONE, 0, Touch(1000, 64, True))
    s.touch(True)
    s.read(2)
    assert s.kinds() == []
    s.touch(True)
    assert s.kinds() == ["host touch before the wait"]


def test_cut_ranges_keep_their_readers(s: Script) -> None:
    s.read(1, 1000, 64)
    s.read(2, 1032, 8)
    s.write(2, 1032, 8)
    (conflict,) = s.check().conflicts
    assert (conflict.address, conflict.nbytes, conflict.times) == (1032, 8, 1)


def test_one_pair_of_operations_counts_once_however_the_range_is_cut(s: Script) -> None:
    for at in range(1000, 1064, 8):
        s.read(2, at, 8)
    s.write(1, 1000, 64)
    (conflict,) = s.check().conflicts
    assert conflict.times == 1


def test_memory_is_used_behind_its_allocation(s: Script) -> None:
    s.add(Kind.ALLOCATE, 1, Touch(1000, 16, True))
    s.write(2)
    assert s.kinds() == ["use before allocation"]


def test_read_of_memory_that_nothing_wrote(s: Script) -> None:
    s.add(Kind.ALLOCATE, 1, Touch(1000, 64, True))
    s.read(1, 1000, 16)
    s.write(1, 1032, 16)
    s.read(1, 1032, 32)  # in part: sizes may be bounds
    assert s.kinds() == ["read before any write"]


# -------------------------------------------------------------------- islands


def island(s: Script, number: int, stream: int, *touches: Touch) -> None:
    s.island, s.call = number, 1
    s.add(Kind.BEGIN_ISLAND, stream, *touches)


def end(s: Script, stream: int) -> None:
    s.add(Kind.END_ISLAND, stream, object=s.island)
    s.island = 0


def test_island_that_declares_nothing_is_one_operation_on_the_stream_of_the_call(s: Script) -> None:
    island(s, 1, 1, Touch(1000, 16, False, 0), Touch(2000, 16, True))
    end(s, 1)
    s.read(2, 2000)
    (conflict,) = s.check().conflicts
    assert (conflict.first.instruction, conflict.first.delegate, conflict.first.method) == (1, "D", "forward")
    assert s.check().accesses == 3


def test_declarations_are_finer_than_the_island(s: Script) -> None:
    island(s, 1, 1, Touch(1000, 16, False), Touch(2000, 16, True), Touch(3000, 16, True))
    s.write(2, 2000)
    end(s, 1)
    # 2000 is written on stream 2 alone; 3000, of which nobody spoke, by the island.
    s.read(2, 2000)
    s.read(2, 3000)
    assert [c.address for c in s.check().conflicts] == [3000]


def test_declaring_a_read_does_not_declare_the_write(s: Script) -> None:
    island(s, 1, 1, Touch(1000, 16, False), Touch(2000, 16, True))
    s.read(1, 2000)
    end(s, 1)
    s.read(2, 2000)
    assert s.kinds() == ["read-write"]


def test_silent_work_on_another_stream_counts_as_the_islands(s: Script) -> None:
    s.write(1, 1000)
    island(s, 1, 1, Touch(1000, 16, False), Touch(2000, 16, True))
    s.add(Kind.CALL, 2)
    end(s, 1)
    assert s.kinds() == ["read-write"]


def test_labels_name_the_buffer(s: Script) -> None:
    island(s, 1, 1, Touch(1000, 16, True, 0))
    end(s, 1)
    s.read(2)
    assert s.check().conflicts[0].buffer.startswith("x of forward (16 bytes at 0x3e8")


def test_what_a_delegate_says_itself_counts_under_the_names_of_the_plan(s: Script) -> None:
    """The plan knows bounds and names, the delegate what came."""
    island(s, 1, 1, Touch(1000, 64, True, 0))
    s.add(Kind.BEGIN_ISLAND, 1, Touch(1000, 16, True))
    end(s, 1)
    s.read(2, 1000, 64)
    (conflict,) = s.check().conflicts
    assert conflict.nbytes == 16 and conflict.buffer.startswith("x of forward (")


# -------------------------------------------------------------------- captures


def captured(s: Script, fork: bool, join: bool = True) -> None:
    """One graph: a write on stream 1, and a read of it on stream 2, behind it if ``fork``."""
    s.add(Kind.BEGIN_CAPTURE, 1)
    s.record(7, 1)
    s.wait(2, 7)
    s.write(1)
    if fork:
        s.record(7, 1)
        s.wait(2, 7)
    s.read(2)
    s.record(8, 2)
    s.wait(1, 8)
    s.add(Kind.END_CAPTURE, 1, object=50)
    s.add(Kind.INSTANTIATE, 5, object=60, other=50)


def test_capture_runs_nothing(s: Script) -> None:
    captured(s, fork=False)
    s.read(6)
    assert s.kinds() == []


def test_each_launch_runs_the_graph_in_the_order_of_its_capture(s: Script) -> None:
    captured(s, fork=True)
    s.add(Kind.LAUNCH, 1, object=60)
    s.add(Kind.LAUNCH, 1, object=60)
    assert s.check().accesses == 4 and s.kinds() == []


def test_conflict_inside_a_graph(s: Script) -> None:
    captured(s, fork=False)
    assert s.kinds() == []
    s.add(Kind.LAUNCH, 6, object=60)
    assert s.kinds() == ["read-write"]


@pytest.mark.parametrize("stream", [1, 2, 6])
def test_launch_is_ordered_on_its_stream_wherever_it_was_captured(s: Script, stream: int) -> None:
    captured(s, fork=True)
    s.write(stream)
    s.add(Kind.LAUNCH, stream, object=60)
    s.write(stream)
    assert s.kinds() == []
    s.write(3)
    assert "write-write" in s.kinds()


def test_launch_is_not_ordered_with_other_streams(s: Script) -> None:
    captured(s, fork=True)
    s.write(2)
    s.add(Kind.LAUNCH, 1, object=60)
    assert set(s.kinds()) == {"write-write"}


def test_event_behind_a_launch_orders_all_of_it(s: Script) -> None:
    captured(s, fork=True)
    s.add(Kind.LAUNCH, 1, object=60)
    s.record(9, 1)
    s.wait(6, 9)
    s.write(6)
    assert s.kinds() == []


def test_launches_of_one_executable_graph_follow_each_other(s: Script) -> None:
    captured(s, fork=True)
    s.add(Kind.LAUNCH, 1, object=60)
    s.add(Kind.LAUNCH, 6, object=60)
    assert s.kinds() == []
    s.add(Kind.INSTANTIATE, 5, object=61, other=50)
    s.add(Kind.LAUNCH, 2, object=61)
    assert s.kinds() != []


def test_capture_that_failed_leaves_its_streams_free(s: Script) -> None:
    s.add(Kind.BEGIN_CAPTURE, 1)
    s.write(1)
    s.add(Kind.END_CAPTURE, 1, object=0)
    s.write(1, 2000)
    s.read(2, 2000)
    s.read(2, 1000)
    assert [c.address for c in s.check().conflicts] == [2000]


def test_graph_from_before_the_record_is_told_as_unseen(s: Script) -> None:
    s.add(Kind.LAUNCH, 1, object=99)
    assert s.check().unseen == ("nodes of a graph that was captured before the record began",)
