"""What a record holds, as data: entries in the order in which they were asked for, and who they belong to."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Call", "Entry", "Island", "Kind", "Log", "Stream", "Touch"]


class Kind(enum.IntEnum):
    """What an entry says. The numbers are those of native/device/record.h."""

    ALLOCATE = 0
    FREE = 1
    COPY = 2
    FILL = 3
    CALL = 4
    RECORD = 5
    WAIT = 6
    LAUNCH = 7
    BEGIN_CAPTURE = 8
    END_CAPTURE = 9
    INSTANTIATE = 10
    SYNCHRONIZE_STREAM = 11
    SYNCHRONIZE_EVENT = 12
    SYNCHRONIZE_DEVICE = 13
    QUERY_STREAM = 14
    QUERY_EVENT = 15
    DONE = 16
    REFUSED = 17
    TOUCH = 18
    BEGIN_CALL = 19
    END_CALL = 20
    BEGIN_ISLAND = 21
    END_ISLAND = 22
    UNSEEN = 23
    GONE = 24


class Touch(NamedTuple):
    """A stretch of memory that is read or written. ``value`` is the method's value there, -1 for none."""

    address: int
    nbytes: int
    write: bool
    value: int = -1


class Entry(NamedTuple):
    """One line of the record. ``stream``, ``call`` and ``island`` are numbers, 0 for none."""

    number: int
    kind: int
    at_ns: int
    thread: int
    stream: int
    call: int
    island: int
    object: int
    other: int
    name: str
    touches: tuple[Touch, ...]


@dataclass(frozen=True)
class Stream:
    """A stream, by a number that is never used again, as handles are."""

    number: int
    device_id: int
    device: str
    backend: str
    handle: int
    blocking: bool
    thread: int
    sm_count: int

    @property
    def legacy(self) -> bool:
        return self.handle == 1

    @property
    def host(self) -> bool:
        """Whether its work is done when it was asked for: that of the cpu device."""
        return self.backend == "cpu"

    def __str__(self) -> str:
        if self.host:
            return "the host"
        if self.legacy:
            return f"the legacy stream of {self.device}"
        if self.thread >= 0:
            return f"the per-thread stream of thread {self.thread} on {self.device}"
        kind = "blocking " if self.blocking else ""
        where = f", {self.sm_count} SMs" if self.sm_count else ""
        return f"{kind}stream {self.handle:#x} of {self.device}{where}"


@dataclass(frozen=True)
class Call:
    """One call of a method. ``instance`` tells copies of a method apart: each has memory of its own."""

    number: int
    method: str
    instance: int


@dataclass(frozen=True)
class Island:
    """One delegate call in one call of a method."""

    number: int
    delegate: str
    instruction: int


@dataclass(frozen=True)
class Log:
    """Everything that was written down, and nothing else: what is judged, is judged from this alone."""

    entries: Sequence[Entry]
    streams: Mapping[int, Stream]
    calls: Mapping[int, Call]
    islands: Mapping[int, Island]
    labels: Mapping[int, Sequence[str]]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Log:
        """From what the native recorder hands out."""
        make, touch = Entry._make, Touch._make
        entries = [make((*e[:10], tuple([touch(t) for t in e[10]]))) for e in raw["entries"]]
        return cls(
            entries,
            {number: Stream(*fields) for number, fields in raw["streams"].items()},
            {number: Call(*fields) for number, fields in raw["calls"].items()},
            {number: Island(*fields) for number, fields in raw["islands"].items()},
            raw["labels"],
        )

    def label(self, entry: Entry, touch: Touch) -> str:
        """What a method calls the memory, or nothing."""
        call = self.calls.get(entry.call)
        if call is None or touch.value < 0:
            return ""
        values = self.labels.get(call.instance, ())
        return values[touch.value] if touch.value < len(values) else ""

    def describe(self, entry: Entry) -> str:
        """An operation, as a report names it."""
        kind = Kind(entry.kind)
        island, call = self.islands.get(entry.island), self.calls.get(entry.call)
        where = (
            f"{call.method}, instruction {island.instruction}, delegate '{island.delegate}'"
            if (call and island)
            else f"delegate '{island.delegate}'"
            if island
            else call.method
            if call
            else ""
        )
        if kind in (Kind.BEGIN_ISLAND, Kind.END_ISLAND):
            return f"island ({where})"
        what = {
            Kind.ALLOCATE: "allocation",
            Kind.FREE: "free",
            Kind.COPY: "copy",
            Kind.FILL: "fill",
            Kind.CALL: entry.name or "call",
            Kind.TOUCH: entry.name or "host access",
        }.get(kind, kind.name.lower())
        return f"{what} ({where})" if where else what
