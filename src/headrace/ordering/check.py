"""The check: every two accesses to the same bytes, one of them a write, that nothing orders."""

from __future__ import annotations

from dataclasses import dataclass

from .clocks import Clocks, Point
from .log import Entry, Kind, Log, Touch
from .memory import Cell, Lifetime, Memory, Use

__all__ = ["Access", "Conflict", "Findings", "check"]


@dataclass(frozen=True)
class Access:
    """One side of a conflict: operation ``number`` of the record, which reads or writes (``verb``).

    ``what`` describes it; ``method``, ``instruction`` and ``delegate`` say to which island it belongs, where it
    belongs to one. ``stream`` is in words (``"the host"`` for a thread's own access), ``thread`` a number."""

    number: int
    what: str
    verb: str
    method: str | None
    instruction: int | None
    delegate: str | None
    stream: str
    thread: int

    def __str__(self) -> str:
        return f"{self.what} {self.verb} it on {self.stream} (operation {self.number}, thread {self.thread})"


@dataclass(frozen=True)
class Conflict:
    """Two accesses to the same memory that nothing orders.

    ``kind`` is ``"write-write"``, ``"read-write"`` (in either order), ``"read before any write"``, ``"use before
    allocation"``, ``"use after free"`` or ``"host touch before the wait"``. ``buffer`` names the memory,
    ``address`` and ``nbytes`` are the bytes that both touch. ``remedy`` is the wait that would order them. ``times``
    counts the same pair of program places; ``first`` and ``second`` are of its first time, in the record's order.
    """

    kind: str
    buffer: str
    address: int
    nbytes: int
    first: Access
    second: Access
    remedy: str
    times: int = 1

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.kind}{times}: {self.buffer}\n  {self.first}\n  {self.second}\n  {self.remedy}"


@dataclass(frozen=True)
class Findings:
    """What a check looked at and what it found. ``accesses``: of work on a device, so that 0 means that there was
    nothing to see. ``unseen`` says what was out of the record's sight."""

    operations: int
    accesses: int
    conflicts: tuple[Conflict, ...]
    unseen: tuple[str, ...]


def check(log: Log) -> Findings:
    """Judge a log."""
    return _Check(log).run()


def _overlaps(touch: Touch, others: list[Touch]) -> bool:
    begin, end = touch.address, touch.address + touch.nbytes
    return any(o.write == touch.write and o.address < end and begin < o.address + o.nbytes for o in others)


def island_touches(log: Log) -> tuple[dict[int, tuple[Touch, ...]], dict[int, tuple[Touch, ...]]]:
    """The arguments of each island, and what islands touch beyond what their own operations declare, by the number of the entry that does it.

    An island is one operation at its end, on the stream of the call, that reads its inputs and writes its
    outputs. What its delegate declares within it is finer and counts instead. Calls without any declaration that
    it enqueued on other streams may do the island's work: they count as touching what nobody declared."""
    arguments: dict[int, tuple[Touch, ...]] = {}
    declared: dict[int, list[Touch]] = {}
    silent: dict[int, list[Entry]] = {}
    ends: dict[int, Entry] = {}
    for entry in log.entries:
        if not entry.island:
            continue
        if entry.kind == Kind.BEGIN_ISLAND:
            known = arguments.get(entry.island, ())
            given = entry.touches
            if len(known) == len(given):
                # A delegate knows its arguments' sizes, the plan knows their names.
                given = tuple(g._replace(value=k.value) for g, k in zip(given, known, strict=True))
            arguments[entry.island] = given
        elif entry.kind == Kind.END_ISLAND:
            ends[entry.island] = entry
        elif entry.touches and entry.kind in (Kind.CALL, Kind.COPY, Kind.FILL):
            declared.setdefault(entry.island, []).extend(entry.touches)
        elif entry.kind == Kind.CALL:
            silent.setdefault(entry.island, []).append(entry)
    out: dict[int, tuple[Touch, ...]] = {}
    for island, end in ends.items():
        finer = declared.get(island, [])
        rest = tuple(t for t in arguments.get(island, ()) if not finer or not _overlaps(t, finer))
        if not rest:
            continue
        elsewhere = [e for e in silent.get(island, ()) if e.stream != end.stream]
        for entry in elsewhere or [end]:
            out[entry.number] = rest
    return arguments, out


class _Check:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.clocks = Clocks(log)
        self.memory = Memory()
        self.accesses = 0
        self.arguments, self.of_islands = island_touches(log)
        self.found: dict[tuple[object, ...], Conflict] = {}

    def run(self) -> Findings:
        of_islands = self.of_islands
        for entry, point in self.clocks.operations():
            touches = entry.touches + of_islands.get(entry.number, ())
            if point is not None:
                self.accesses += len(touches)
            if entry.kind == Kind.ALLOCATE:
                # The host's own memory has no stream to be ordered behind.
                if point is not None and touches:
                    self.memory.allocate(Use(entry, point, touches[0]))
                continue
            if entry.kind == Kind.GONE:
                self.memory.gone(*entry.touches)
                continue
            if entry.kind == Kind.FREE:
                if point is not None and touches:
                    self._free(Use(entry, point, touches[0]))
                continue
            for write in (False, True):
                for touch in touches:
                    if touch.write is write:
                        self._touch(Use(entry, point, touch))
        return Findings(
            len(self.log.entries), self.accesses, tuple(self.found.values()), tuple(self.clocks.unseen)
        )

    # ---- rules

    def _ordered(self, former: Use, use: Use) -> bool:
        if former.point is None or former.point is use.point:
            return True
        if use.point is None:
            return self.clocks.host_knows(former.point)
        return former.point.before(use.point)

    def _touch(self, use: Use) -> None:
        touch = use.touch
        for lifetime, begin, end in self.memory.pieces(touch):
            if lifetime.ended is not None:
                self._report("use after free", lifetime, begin, end, lifetime.ended, use)
                continue
            cells = lifetime.range(begin, end)
            if touch.write:
                self._write(use, lifetime, begin, end, cells)
            else:
                self._read(use, lifetime, begin, end, cells)

    def _read(self, use: Use, lifetime: Lifetime, begin: int, end: int, cells: list[Cell]) -> None:
        began = lifetime.began
        if began is not None and all(cell.fresh for cell in cells):
            self._report("read before any write", lifetime, begin, end, began, use)
        for cell in cells:
            writer = cell.writer
            if writer is not None and not self._ordered(writer, use):
                self._report(_kind(writer, use, cell.fresh), lifetime, begin, end, writer, use)
            if use.point is not None:
                cell.readers[_place(use.point)] = use

    def _write(self, use: Use, lifetime: Lifetime, begin: int, end: int, cells: list[Cell]) -> None:
        for cell in cells:
            writer = cell.writer
            if writer is not None and not self._ordered(writer, use):
                self._report(_kind(writer, use, cell.fresh), lifetime, begin, end, writer, use)
            for reader in cell.readers.values():
                if not self._ordered(reader, use):
                    self._report(_kind(reader, use, False), lifetime, begin, end, reader, use)
            cell.readers.clear()
            cell.fresh = False
            # What the host did itself is before everything that comes.
            cell.writer = use if use.point is not None else None

    def _free(self, use: Use) -> None:
        lifetime = self.memory.free(use)
        if lifetime is None:
            # Allocated before the record began: its uses are in the region of such memory.
            for rest, begin, end in self.memory.pieces(use.touch):
                if rest.ended is None:
                    self._end_of(rest, begin, end, use)
            self.memory.allocate(use)
            lifetime = self.memory.free(use)
            return
        self._end_of(lifetime, lifetime.base, lifetime.base + lifetime.nbytes, use)

    def _end_of(self, lifetime: Lifetime, begin: int, end: int, use: Use) -> None:
        for cell in lifetime.range(begin, end):
            for former in (cell.writer, *cell.readers.values()):
                if former is not None and not self._ordered(former, use):
                    self._report("use after free", lifetime, begin, end, former, use)

    # ---- telling

    def _report(self, kind: str, lifetime: Lifetime, begin: int, end: int, former: Use, use: Use) -> None:
        at = use.touch.address - lifetime.base
        key = (kind, lifetime.number, at, self._signature(former), self._signature(use))
        known = self.found.get(key)
        if known is not None:
            if known.second.number != use.entry.number:
                self.found[key] = Conflict(**{**vars(known), "times": known.times + 1})
            return
        low = max(begin, former.touch.address)
        high = min(end, former.touch.address + former.touch.nbytes)
        self.found[key] = Conflict(
            kind,
            self._buffer(lifetime, former, use),
            low,
            max(high - low, 0),
            self._access(former),
            self._access(use),
            self._remedy(kind, former, use),
        )

    def _signature(self, use: Use) -> tuple[object, ...]:
        """The same place of the program in every call."""
        island, call = self.log.islands.get(use.entry.island), self.log.calls.get(use.entry.call)
        return (
            use.entry.kind,
            use.entry.name,
            use.touch.write,
            use.entry.stream,
            call and (call.method, call.instance),
            island and (island.delegate, island.instruction),
        )

    def _stream(self, use: Use) -> str:
        return "the host" if use.point is None else str(self.log.streams[use.entry.stream])

    def _access(self, use: Use) -> Access:
        entry = use.entry
        island, call = self.log.islands.get(entry.island), self.log.calls.get(entry.call)
        verb = {Kind.ALLOCATE: "allocates", Kind.FREE: "frees"}.get(
            Kind(entry.kind), "writes" if use.touch.write else "reads"
        )
        return Access(
            entry.number,
            self.log.describe(entry),
            verb,
            call.method if call else None,
            island.instruction if island else None,
            island.delegate if island else None,
            self._stream(use),
            entry.thread,
        )

    def _buffer(self, lifetime: Lifetime, former: Use, use: Use) -> str:
        touch = use.touch
        name = self._name(use) or self._name(former)
        where = f"{touch.nbytes} bytes at {touch.address:#x}"
        if lifetime.began is not None:
            device = self.log.streams[lifetime.began.entry.stream].device
            where += (
                f", byte {touch.address - lifetime.base} of the {lifetime.nbytes} bytes allocated on {device}"
            )
        return f"{name} ({where})" if name else where

    def _name(self, use: Use) -> str:
        """What the method calls the memory: the touch says it itself, or lies in an argument of its island."""
        begin, end = use.touch.address, use.touch.address + use.touch.nbytes
        for t in (use.touch, *self.arguments.get(use.entry.island, ())):
            if t.address < end and begin < t.address + t.nbytes:
                label = self.log.label(use.entry, t)
                if label:
                    return f"{label} of {self.log.calls[use.entry.call].method}"
        return ""

    def _remedy(self, kind: str, former: Use, use: Use) -> str:
        first, second = self._stream(former), self._stream(use)
        earlier = f"operation {former.entry.number}"
        if kind == "read before any write":
            text = "write it first, or order this read behind the operation that does"
        elif former.entry.kind == Kind.FREE:
            text = f"free it behind operation {use.entry.number}"
        elif use.point is None:
            text = (
                f"wait on the host for an event recorded on {first} behind {earlier} (Event.synchronize), or for "
                f"that stream (Stream.synchronize), before the host touches it"
            )
        else:
            text = (
                f"record an event on {first} behind {earlier} and let {second} wait for it before operation "
                f"{use.entry.number} (Stream.record, Stream.wait)"
            )
        for side in (former, use):
            for wait in self.clocks.void_waits.get(side.entry.stream, ()):
                if side.point is not None and wait.number < use.entry.number:
                    text += (
                        f"; the wait of {self._stream(side)} that is operation {wait.number} came before its event "
                        "was recorded, and is no wait"
                    )
                    return text
        return text


def _place(point: Point) -> tuple[int, int]:
    return point.stream, point.inner.stream if point.inner else 0


def _kind(former: Use, use: Use, fresh: bool) -> str:
    if use.point is None:
        return "host touch before the wait"
    if fresh:
        return "use before allocation"
    return "write-write" if former.touch.write and use.touch.write else "read-write"
