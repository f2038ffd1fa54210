"""Happens-before: which operations are done before which, whatever a device makes of its freedom.

Rules, by the driver API's reference where it says so:

- Operations of a stream run in the order in which they were enqueued.
- A wait puts later work of its stream behind the event's latest record, as it was when the wait was enqueued. An
  event that was not recorded is no wait (cuStreamWaitEvent).
- The legacy stream's work runs behind the work of all blocking streams of its device, per-thread ones included,
  and their later work runs behind its ("Stream synchronization behavior"). Non-blocking streams and it do not
  order each other.
- What a wait on the host saw done, or a query that said yes, is done for every call that began after it
  returned: of every thread. Threads have no other order here than time: work that nobody waited for is ordered
  by streams and events alone, whatever the threads agreed on among themselves.
- A capture runs nothing. Each launch of its graph runs all of it, between the work before and the work behind the
  launch on that stream, in the order that the capture's streams and events gave. Launches of one executable
  graph follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .log import Entry, Kind, Log, Stream

__all__ = ["Clocks", "Point"]

Clock = Mapping[int, int]
NOTHING: Clock = {}


class Point:
    """Where an operation stands: the ``index``-th on its stream, behind everything in ``clock`` (for each other
    stream, how many of its operations). A node of a graph stands at its launch, and ``inner`` tells where in
    it."""

    __slots__ = ("clock", "index", "inner", "launch", "stream")

    def __init__(
        self, stream: int, index: int, clock: Clock, launch: int = 0, inner: Point | None = None
    ) -> None:
        self.stream = stream
        self.index = index
        self.clock = clock
        self.launch = launch
        self.inner = inner

    def before(self, later: Point) -> bool:
        """Whether this operation, which was enqueued before ``later``, is done before that one runs."""
        if self.launch and self.launch == later.launch and self.inner and later.inner:
            return self.inner.before(later.inner)
        return self.stream == later.stream or later.clock.get(self.stream, 0) >= self.index


class _Lane:
    """A stream while the record is read."""

    __slots__ = ("capture", "clock", "count", "heard", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.count = 0
        self.clock: Clock = NOTHING
        self.heard = 0  # how much of what the host knows
        self.capture: _Capture | None = None

    @property
    def last(self) -> Point:
        return Point(self.stream.number, self.count, self.clock)

    def join(self, point: Point) -> None:
        number = self.stream.number
        if point.stream == number or point.index == 0:
            return
        if self.clock.get(point.stream, 0) >= point.index:
            return  # and behind whatever that one was behind
        self.absorb(point.clock, point.stream, point.index)

    def absorb(self, clock: Clock, stream: int = 0, index: int = 0) -> None:
        # A new one: points keep the old.
        merged = dict(self.clock)
        for other, known in clock.items():
            if merged.get(other, 0) < known:
                merged[other] = known
        if stream and merged.get(stream, 0) < index:
            merged[stream] = index
        merged.pop(self.stream.number, None)
        self.clock = merged


class _Capture:
    """A capture: streams of its own, whose points are places in the graph."""

    def __init__(self) -> None:
        self.lanes: dict[int, _Lane] = {}
        self.nodes: list[tuple[Entry, Point]] = []

    def lane(self, stream: Stream) -> _Lane:
        return self.lanes.setdefault(stream.number, _Lane(stream))


class Clocks:
    """Reads a log's entries in order and says where each operation stands, and what the host knows by then."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.void_waits: dict[int, list[Entry]] = {}  # by stream: waits for events without a record
        self.unseen: list[str] = []
        self._lanes: dict[int, _Lane] = {}
        self._legacy: dict[int, _Lane] = {}  # by device
        self._events: dict[int, tuple[Point, _Capture | None]] = {}
        self._host: dict[int, int] = {}
        self._host_version = 0
        self._waits: dict[int, list[Point]] = {}
        self._graphs: dict[int, _Capture] = {}
        self._execs: dict[int, tuple[_Capture | None, Point | None]] = {}
        self._launches = 0

    def host_knows(self, point: Point) -> bool:
        """Whether a wait on the host has seen the operation done."""
        return self._host.get(point.stream, 0) >= point.index

    def operations(self) -> Iterator[tuple[Entry, Point | None]]:
        """Every entry that may touch memory, with its point; None for what the host does itself."""
        refused = {e.object for e in self.log.entries if e.kind == Kind.REFUSED}
        for entry in self.log.entries:
            if entry.number in refused:
                continue
            kind = entry.kind
            if kind in _ON_STREAM:
                yield from self._enqueue(entry)
            elif kind in (Kind.TOUCH, Kind.GONE):
                yield entry, None
            elif kind == Kind.DONE:
                self._hear(self._waits.pop(entry.object, []))
            elif kind in _WAITS:
                self._waits[entry.number] = self._awaited(entry)
            elif kind == Kind.BEGIN_CAPTURE:
                lane = self._lane(entry.stream)
                lane.capture = _Capture()
                lane.capture.lane(lane.stream)
            elif kind == Kind.END_CAPTURE:
                self._end_capture(entry)
            elif kind == Kind.INSTANTIATE:
                self._execs[entry.object] = (self._graphs.get(entry.other), None)
            elif kind == Kind.UNSEEN and entry.name not in self.unseen:
                self.unseen.append(entry.name)

    # ---- streams

    def _lane(self, number: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane(self.log.streams[number])
            if lane.stream.legacy:
                self._legacy[lane.stream.device_id] = lane
        return lane

    def _neighbours(self, stream: Stream) -> list[_Lane]:
        """Whose work the stream's next operation runs behind beside its own."""
        if stream.legacy:
            return [
                lane
                for lane in self._lanes.values()
                if lane.stream.device_id == stream.device_id and lane.stream.blocking
            ]
        legacy = self._legacy.get(stream.device_id)
        return [legacy] if stream.blocking and legacy is not None else []

    def _next(self, lane: _Lane) -> Point:
        """The place of one more operation on the stream."""
        if lane.heard != self._host_version:
            lane.heard = self._host_version
            lane.absorb(self._host)
        if lane.stream.legacy or lane.stream.blocking:
            for neighbour in self._neighbours(lane.stream):
                lane.join(neighbour.last)
        lane.count += 1
        return lane.last

    def _enqueue(self, entry: Entry) -> Iterator[tuple[Entry, Point | None]]:
        lane = self._lane(entry.stream)
        if lane.stream.host:
            # Done when it returns, like everything of the cpu device; its events are complete.
            yield entry, None
            return
        kind = entry.kind
        if kind == Kind.WAIT:
            self._wait(entry, lane)
            return
        if lane.capture is not None:
            inner = lane.capture.lane(lane.stream)
            inner.count += 1
            if kind == Kind.RECORD:
                self._events[entry.object] = (inner.last, lane.capture)
            else:
                lane.capture.nodes.append((entry, inner.last))
            return
        if kind == Kind.LAUNCH:
            yield from self._launch(entry, lane)
            return
        point = self._next(lane)
        if kind == Kind.RECORD:
            self._events[entry.object] = (point, None)
        else:
            yield entry, point

    def _wait(self, entry: Entry, lane: _Lane) -> None:
        found = self._events.get(entry.object)
        if found is None:
            # It may have been recorded before this record began; then its work is not in it either.
            self.void_waits.setdefault(entry.stream, []).append(entry)
            return
        point, capture = found
        if capture is not None:
            # The stream becomes part of the capture, if it was not.
            lane.capture = capture
            capture.lane(lane.stream).join(point)
        elif lane.capture is None:
            lane.join(point)
            self._next(lane)

    # ---- captures

    def _end_capture(self, entry: Entry) -> None:
        capture = self._lane(entry.stream).capture
        if capture is None:
            return
        if entry.object:
            self._graphs[entry.object] = capture
        for lane in self._lanes.values():
            if lane.capture is capture:
                lane.capture = None

    def _launch(self, entry: Entry, lane: _Lane) -> Iterator[tuple[Entry, Point | None]]:
        capture, former = self._execs.get(entry.object, (None, None))
        if former is not None:
            lane.join(former)
        begin = self._next(lane)
        if capture is None:
            what = "nodes of a graph that was captured before the record began"
            if what not in self.unseen:
                self.unseen.append(what)
        else:
            self._launches += 1
            for node, inner in capture.nodes:
                yield node, Point(begin.stream, begin.index, begin.clock, self._launches, inner)
        self._execs[entry.object] = (capture, begin)

    # ---- the host

    def _awaited(self, entry: Entry) -> list[Point]:
        if entry.kind in (Kind.SYNCHRONIZE_EVENT, Kind.QUERY_EVENT):
            point, capture = self._events.get(entry.object, (None, None))
            return [point] if point is not None and capture is None else []
        stream = self.log.streams[entry.stream]
        if entry.kind == Kind.SYNCHRONIZE_DEVICE:
            lanes = [v for v in self._lanes.values() if v.stream.device_id == stream.device_id]
            return [lane.last for lane in lanes]
        lanes = [self._lane(entry.stream)]
        if stream.legacy:
            lanes += self._neighbours(stream)
        return [lane.last for lane in lanes]

    def _hear(self, points: list[Point]) -> None:
        host = self._host
        for point in points:
            if host.get(point.stream, 0) >= point.index:
                continue
            self._host_version += 1
            host[point.stream] = point.index
            for stream, known in point.clock.items():
                if host.get(stream, 0) < known:
                    host[stream] = known


_ON_STREAM = frozenset(
    {
        Kind.ALLOCATE,
        Kind.FREE,
        Kind.COPY,
        Kind.FILL,
        Kind.CALL,
        Kind.RECORD,
        Kind.WAIT,
        Kind.LAUNCH,
        Kind.END_ISLAND,
    }
)
_WAITS = frozenset(
    {
        Kind.SYNCHRONIZE_STREAM,
        Kind.SYNCHRONIZE_EVENT,
        Kind.SYNCHRONIZE_DEVICE,
        Kind.QUERY_STREAM,
        Kind.QUERY_EVENT,
    }
)
