"""Memory as address ranges with lifetimes: who wrote a range last, and who has read it since.

An allocation in the record begins a lifetime and its free ends it; the next allocation of the same addresses is
other memory. Everything else (host memory, and what was allocated before the record began) is one region without a
beginning or an end, of which nothing is said before it is first touched.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from .clocks import Point
from .log import Entry, Touch

__all__ = ["Cell", "Lifetime", "Memory", "Use"]


class Use:
    """One operation that touches one range."""

    __slots__ = ("entry", "point", "touch")

    def __init__(self, entry: Entry, point: Point | None, touch: Touch) -> None:
        self.entry = entry
        self.point = point
        self.touch = touch


class Cell:
    """A range whose bytes had the same history. ``writer``: the last one, unless the host knows it done.
    ``readers``: since then, the last one of each place that orders its own. ``fresh``: nothing wrote it since it
    was allocated."""

    __slots__ = ("fresh", "readers", "writer")

    def __init__(self, writer: Use | None = None, fresh: bool = False) -> None:
        self.writer = writer
        self.readers: dict[tuple[int, int], Use] = {}
        self.fresh = fresh

    def copy(self) -> Cell:
        other = Cell(self.writer, self.fresh)
        other.readers = dict(self.readers)
        return other


@dataclass
class Lifetime:
    """One allocation, from its allocation to its free."""

    base: int
    nbytes: int
    began: Use | None = None
    ended: Use | None = None
    number: int = 0
    starts: list[int] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts = [self.base]
        self.cells = [Cell(self.began, fresh=self.began is not None)]

    def range(self, begin: int, end: int) -> list[Cell]:
        """The cells of exactly these bytes, cut where they are not cut yet."""
        first = self._cut(begin)
        last = self._cut(end) if end < self.base + self.nbytes else len(self.starts)
        return self.cells[first:last]

    def _cut(self, at: int) -> int:
        place = bisect.bisect_left(self.starts, at)
        if place == len(self.starts) or self.starts[place] != at:
            self.starts.insert(place, at)
            self.cells.insert(place, self.cells[place - 1].copy())
        return place


class Memory:
    """All lifetimes, by address."""

    def __init__(self) -> None:
        self._bases: list[
            int
        ] = []  # of allocations that live, or ended and whose addresses are not used again
        self._lifetimes: list[Lifetime] = []
        self._rest = Lifetime(0, 1 << 64)
        self._count = 0

    def allocate(self, use: Use) -> None:
        begin, end = use.touch.address, use.touch.address + use.touch.nbytes
        first = bisect.bisect_left(self._bases, begin)
        if first and self._end(first - 1) > begin:
            first -= 1
        last = bisect.bisect_left(self._bases, end)
        self._count += 1
        self._bases[first:last] = [begin]
        self._lifetimes[first:last] = [Lifetime(begin, use.touch.nbytes, began=use, number=self._count)]

    def free(self, use: Use) -> Lifetime | None:
        """Ends the lifetime that begins there. None: it began before the record, and is only known from now on."""
        at = bisect.bisect_left(self._bases, use.touch.address)
        if at == len(self._bases) or self._bases[at] != use.touch.address or self._lifetimes[at].ended:
            return None
        self._lifetimes[at].ended = use
        return self._lifetimes[at]

    def gone(self, touch: Touch) -> None:
        """The addresses belong to no device any more. On a simulated one the host may get them next."""
        begin, end = touch.address, touch.address + touch.nbytes
        first, last = bisect.bisect_left(self._bases, begin), bisect.bisect_left(self._bases, end)
        del self._bases[first:last], self._lifetimes[first:last]
        for cell in self._rest.range(begin, end):
            cell.writer = None
            cell.readers.clear()

    def pieces(self, touch: Touch) -> Iterator[tuple[Lifetime, int, int]]:
        """The lifetimes that a range lies in, with the bytes of it that do."""
        begin, end = touch.address, touch.address + touch.nbytes
        at = bisect.bisect_right(self._bases, begin) - 1
        if at < 0 or self._end(at) <= begin:
            at += 1
        while begin < end:
            if at == len(self._bases) or self._bases[at] >= end:
                yield self._rest, begin, end
                return
            if begin < self._bases[at]:
                yield self._rest, begin, self._bases[at]
                begin = self._bases[at]
            stop = min(end, self._end(at))
            yield self._lifetimes[at], begin, stop
            begin = stop
            at += 1

    def _end(self, at: int) -> int:
        return self._bases[at] + self._lifetimes[at].nbytes
