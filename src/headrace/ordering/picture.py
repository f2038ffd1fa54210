"""A record as a picture: SVG that any browser shows.

Threads and streams are rows, the order in which things were asked for goes along x. Widths are no durations: a record
knows when the host asked for an operation and not when a device ran it, on the simulated device as on a GPU.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from .check import Conflict
from .log import Entry, Kind, Log, Stream

__all__ = ["svg"]

# Pixels. WIDEST is what the columns of a record may take together, however many it has.
CHARACTER, LEVEL, BOX, PAD, LEFT, NARROW, WIDEST, TICK = 6.3, 19, 16, 10, 190, 5, 4000, 130
# Characters of a label, and of what is left of it where a box is narrow; the tooltip has all of it.
LONGEST, FEWEST = 28, 4
DELEGATES = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6")
OTHERS = "#8a8f94"  # delegates behind those
CONFLICT = "#d62728"
# Classes of boxes, as the legend names them, with their colours.
CLASSES = {
    "method": ("call of a method", "#9aa5b1"),
    "hostwait": ("host waits or asks", "#d67195"),
    "touch": ("host reads or writes", "#79b8e0"),
    "capture": ("capture", "#a3d9a5"),
    "island": ("", ""),  # by delegate
    "copy": ("copy", "#d4a017"),
    "fill": ("fill", "#c9b458"),
    # A record does not tell Stream.call from Stream.declare.
    "function": ("host function, declared work", "#7b5ea7"),
    "launch": ("graph launch", "#1b9e77"),
    "event": ("event: record, wait", "#5f6368"),
    "memory": ("allocation, free", "#b8bec4"),
    "unseen": ("out of the record's sight", "#000000"),
}
OF_KIND = {
    Kind.ALLOCATE: ("memory", "alloc"),
    Kind.FREE: ("memory", "free"),
    Kind.COPY: ("copy", "copy"),
    Kind.FILL: ("fill", "fill"),
    Kind.CALL: ("function", "call"),
    Kind.RECORD: ("event", "record"),
    Kind.WAIT: ("event", "wait"),
    Kind.LAUNCH: ("launch", "launch"),
    Kind.INSTANTIATE: ("launch", "instantiate"),
    Kind.SYNCHRONIZE_STREAM: ("hostwait", "wait for stream"),
    Kind.SYNCHRONIZE_EVENT: ("hostwait", "wait for event"),
    Kind.SYNCHRONIZE_DEVICE: ("hostwait", "wait for device"),
    Kind.QUERY_STREAM: ("hostwait", "query stream"),
    Kind.QUERY_EVENT: ("hostwait", "query event"),
    Kind.TOUCH: ("touch", "host access"),
    Kind.UNSEEN: ("unseen", "unseen"),
}
# Named by delegates and programs.
NAMED = {Kind.CALL, Kind.TOUCH, Kind.UNSEEN}
# The thread's, though they name a stream or come with the legacy one.
OF_THREADS = {k for k, (kind, _) in OF_KIND.items() if kind == "hostwait"} | {Kind.INSTANTIATE, Kind.UNSEEN}
EVENTS = {Kind.RECORD, Kind.WAIT, Kind.SYNCHRONIZE_EVENT, Kind.QUERY_EVENT}
# What lies above what in a row.
LAYERS = ("method", "capture", "island", "operation")
BEGINS = {Kind.BEGIN_CALL: "method", Kind.BEGIN_CAPTURE: "capture", Kind.BEGIN_ISLAND: "island"}
ENDS = {Kind.END_CALL: "method", Kind.END_CAPTURE: "capture", Kind.END_ISLAND: "island"}
STYLE = f"""
  text {{ font: 10.5px ui-monospace, monospace; fill: #222 }} .title {{ font-weight: bold; font-size: 12px }}
  .faint {{ fill: #6b7075 }} .box {{ fill-opacity: 0.45; stroke-width: 1 }}
  .refused {{ stroke-dasharray: 2 2; fill-opacity: 0.1 }} .tick {{ stroke: #e3e6e9 }}
  .arrow {{ fill: none; stroke: #333; stroke-width: 1.3 }}
  .conflict {{ fill: none; stroke: {CONFLICT}; stroke-width: 2 }} path.conflict {{ stroke-dasharray: 5 3 }}
""" + "".join(
    f"  .{name} {{ fill: {colour}; stroke: {colour} }}\n" for name, (_, colour) in CLASSES.items() if colour
)
# What XML 1.0 has no way to write (section 2.2); names come from programs.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Row = tuple[str, int]  # "thread" or "stream", and its number


@dataclass
class _Box:
    """A box in a row, from one column to another, both included."""

    number: int  # of the entry that it stands for, or that began it
    layer: str
    kind: str  # a key of CLASSES
    label: str
    row: Row
    begin: int
    end: int
    lines: list[str]  # of the tooltip
    colour: str = ""
    refused: bool = False
    level: int = 0


@dataclass
class _Place:
    """Where the rows and columns are, in pixels."""

    columns: list[float]  # left edges, and the right edge of the last
    rows: dict[Row, tuple[float, float]] = field(default_factory=dict)  # upper edge and height
    headings: list[tuple[str, float]] = field(default_factory=list)
    below: float = 0

    def box(self, box: _Box) -> tuple[float, float, float]:
        """Left edge, upper edge, width."""
        x, right = self.columns[box.begin], self.columns[box.end + 1]
        width = right - x
        return x, self.rows[box.row][0] + PAD / 2 + box.level * LEVEL, width - (1 if width > 4 else width / 4)


def svg(log: Log, conflicts: Sequence[Conflict]) -> str:
    """The picture of a log, with the conflicts that a check of it found. Its width is bounded; labels without room are
    cut or left out, and tooltips have what they would say."""
    drawing = _Drawing(log)
    drawing.read()
    return drawing.draw(conflicts)


class _Drawing:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.began_ns = log.entries[0].at_ns if log.entries else 0
        self.refused = {e.object for e in log.entries if e.kind == Kind.REFUSED}
        self.boxes: list[_Box] = []
        self.of: dict[int, _Box] = {}  # by the number of every entry that has to do with the box
        self.arrows: list[tuple[_Box, _Box, int]] = []  # from, to, event
        self.wanted: list[float] = []  # of each column
        self.upto: list[float] = [0]  # the sums of those before
        self.entries: list[Entry] = []  # whose the columns are
        self.colours: dict[str, str] = {}  # of delegates
        self.open: dict[tuple[str, int], _Box] = {}
        self.seen: set[tuple[str, int]] = set()
        self.recorded: dict[int, _Box] = {}  # by event

    # ---- reading

    def read(self) -> None:
        for entry in self.log.entries:
            kind = Kind(entry.kind)
            if kind in BEGINS:
                # An island begins twice where its delegate knows its arguments better than the plan does.
                key = (BEGINS[kind], self._which(entry, BEGINS[kind]))
                if key in self.open:
                    self.of[entry.number] = self.open[key]
                    continue
                box = self._span(entry, BEGINS[kind], self._column(entry, NARROW))
                if not self._refused(box):
                    self.open[key] = box
                    self.seen.add(key)
            elif kind in ENDS:
                key = (ENDS[kind], self._which(entry, ENDS[kind]))
                if key not in self.open and key in self.seen and kind != Kind.END_CAPTURE:
                    continue
                column = self._column(entry, NARROW)
                ended = self.open.pop(key, None)
                if ended is None:
                    ended = self._span(entry, ENDS[kind], 0)
                    ended.lines.append("began before the record")
                self._end(ended, column)
                self.of[entry.number] = ended
            elif kind in (Kind.DONE, Kind.REFUSED):
                waited = self.open.pop(("hostwait", entry.object), None)
                if waited is not None:
                    self._end(waited, self._column(entry, NARROW))
            elif kind in OF_KIND:
                self._operation(entry, kind)
        last = len(self.wanted) - 1
        for (what, _), box in self.open.items():
            # A question that was not answered with yes has no second entry.
            if what != "hostwait" or not box.label.startswith("query"):
                box.lines.append("was not over when the record ended")
                box.end = last

    def _which(self, entry: Entry, span: str) -> int:
        return {"method": entry.call, "capture": entry.stream, "island": entry.island}[span]

    def _column(self, entry: Entry, width: float) -> int:
        self.wanted.append(width)
        self.upto.append(self.upto[-1] + width)
        self.entries.append(entry)
        return len(self.wanted) - 1

    def _end(self, box: _Box, column: int) -> None:
        """Its last column is as wide as the label still needs."""
        box.end = column
        more = _width(box.label) - (self.upto[column + 1] - self.upto[box.begin])
        if more > 0:
            self.wanted[column] += more
            self.upto[column + 1] += more

    def _span(self, entry: Entry, span: str, begin: int) -> _Box:
        island, call = self.log.islands.get(entry.island), self.log.calls.get(entry.call)
        row = self._row(entry)
        label, colour = span, ""
        if span == "method":
            label, row = call.method if call else "call", ("thread", entry.thread)
        elif span == "island":
            name = island.delegate if island else "island"
            label = f"{island.instruction} · {name}" if island and island.instruction >= 0 else name
            colour = self.colours.setdefault(
                name, DELEGATES[len(self.colours)] if len(self.colours) < len(DELEGATES) else OTHERS
            )
        return self._add(_Box(entry.number, span, span, label, row, begin, begin, [], colour), entry)

    def _operation(self, entry: Entry, kind: Kind) -> None:
        what, label = OF_KIND[kind]
        if kind in NAMED:
            label = entry.name or label
        column = self._column(entry, NARROW if what == "event" else _width(label))
        row: Row = ("thread", entry.thread) if kind in OF_THREADS else self._row(entry)
        box = self._add(_Box(entry.number, "operation", what, label, row, column, column, []), entry)
        if what == "hostwait":
            self.open[what, entry.number] = box
            stream = self.log.streams.get(entry.stream)
            if stream is not None and kind != Kind.SYNCHRONIZE_EVENT and kind != Kind.QUERY_EVENT:
                whole = kind == Kind.SYNCHRONIZE_DEVICE
                box.lines.append(f"for {stream.device if whole else stream}")
        if kind in EVENTS:
            box.lines.append(f"event {entry.object}")
        if self._refused(box):
            return
        if kind == Kind.RECORD:
            self.recorded[entry.object] = box
        elif kind in EVENTS:
            if entry.object in self.recorded:
                self.arrows.append((self.recorded[entry.object], box, entry.object))
            else:
                box.lines.append("nothing in this record recorded the event before")

    def _refused(self, box: _Box) -> bool:
        box.refused = box.number in self.refused
        if box.refused:
            box.lines.append("refused: it was not done")
        return box.refused

    def _row(self, entry: Entry) -> Row:
        stream = self.log.streams.get(entry.stream)
        on_device = stream is not None and not stream.host
        return ("stream", entry.stream) if on_device else ("thread", entry.thread)

    def _add(self, box: _Box, entry: Entry) -> _Box:
        where = str(self.log.streams[entry.stream]) if box.row[0] == "stream" else "the host"
        box.lines = [
            f"operation {entry.number}: {self.log.describe(entry)}",
            f"on {where}; thread {entry.thread}, after {_time(entry.at_ns - self.began_ns)}",
        ]
        for touch in entry.touches:
            name = self.log.label(entry, touch)
            box.lines.append(
                f"{'writes' if touch.write else 'reads'} {touch.nbytes} bytes at {touch.address:#x}"
                f"{f', {name}' if name else ''}"
            )
        self.boxes.append(box)
        self.of[entry.number] = box
        return box

    # ---- drawing

    def draw(self, conflicts: Sequence[Conflict]) -> str:
        place = _Place([LEFT + x for x in _edges(self.wanted)])
        width = max(place.columns[-1] + 2 * PAD, 760)
        legend, y = self._legend(width, bool(conflicts))
        self._place(place, y + 24)
        count = len(self.log.entries)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{place.below:.0f}" '
            f'viewBox="0 0 {width:.0f} {place.below:.0f}">',
            f"<title>a record of {count} entries</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>',
            f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
            f'<text class="title" x="{PAD}" y="18">{count} entries, in the order in which the host asked for them</text>',
            f'<text class="faint" x="{PAD}" y="34">at the ticks: operation, and the host\'s time since the record\'s '
            "first; widths are no durations</text>",
            *legend,
            *self._ticks(place, y + 14),
        ]
        for heading, at in place.headings:
            parts.append(f'<text class="title" x="{PAD}" y="{at:.1f}">{_text(heading)}</text>')
        for row, (top, height) in place.rows.items():
            name, tip = self._name(row)
            shape = f'x="{PAD}" y="{top:.1f}" width="{width - 2 * PAD:.1f}" height="{height:.1f}"'
            parts.append(
                f'<g class="row"><title>{_text(tip)}</title><rect {shape} fill="#8a8f94" fill-opacity="0.08"/>'
                f'<text x="{PAD + 6}" y="{top + PAD / 2 + 12:.1f}">{_text(name)}</text></g>'
            )
        # Lines first, so that they cross no label.
        parts += [s for conflict in conflicts for s in self._conflict(conflict, place)]
        parts += [_arrow(begin, end, event, place) for begin, end, event in self.arrows]
        parts += [s for box in self.boxes for s in _drawn(box, place)]
        if not self.boxes:
            parts.append(f'<text x="{PAD}" y="{place.below - 12:.0f}">nothing to draw</text>')
        return "\n".join([*parts, "</svg>\n"])

    def _place(self, place: _Place, top: float) -> None:
        """Rows under each other, by device and lane, each as high as what overlaps in it needs."""
        rows: dict[Row, list[_Box]] = {}
        for box in self.boxes:
            rows.setdefault(box.row, []).append(box)
        groups: dict[str, list[Row]] = {}
        devices: dict[int, int] = {}  # in the order in which they were used
        for row in rows:
            if row[0] == "stream":
                devices.setdefault(self.log.streams[row[1]].device_id, len(devices))

        def rank(row: Row) -> tuple[int, int, int]:
            if row[0] == "thread":
                return (-1, 0, row[1])
            stream = self.log.streams[row[1]]
            return devices[stream.device_id], stream.sm_count, stream.number

        for row in sorted(rows, key=rank):
            groups.setdefault(self._group(row), []).append(row)
        y = top
        for heading, members in groups.items():
            place.headings.append((heading, y + 14))
            y += 22
            for row in members:
                levels = _levels(rows[row])
                height = levels * LEVEL + PAD - (LEVEL - BOX)
                place.rows[row] = (y, height)
                y += height + 4
            y += 10
        place.below = y + (20 if not groups else 0)

    def _group(self, row: Row) -> str:
        if row[0] == "thread":
            return "host"
        stream = self.log.streams[row[1]]
        return f"{stream.device}, in a lane of {stream.sm_count} SMs" if stream.sm_count else stream.device

    def _name(self, row: Row) -> tuple[str, str]:
        """Of a row, and its tooltip; the heading says where a stream is."""
        if row[0] == "thread":
            return f"thread {row[1]}", f"thread {row[1]}: what the host did itself"
        stream: Stream = self.log.streams[row[1]]
        if stream.legacy:
            return "legacy stream", str(stream)
        if stream.thread >= 0:
            return f"stream of thread {stream.thread}", str(stream)
        return f"{'blocking ' if stream.blocking else ''}stream {stream.handle:#x}", str(stream)

    def _legend(self, width: float, conflicts: bool) -> tuple[list[str], float]:
        """What is in the picture, and the lower edge."""
        known = {box.kind for box in self.boxes}
        shown = [(f"island of {name}", colour) for name, colour in self.colours.items() if colour != OTHERS]
        if OTHERS in self.colours.values():
            shown.append(("island of another delegate", OTHERS))
        shown += [(name, colour) for kind, (name, colour) in CLASSES.items() if name and kind in known]
        lines = [("from record to wait", "arrow")] if self.arrows else []
        lines += [("conflict", "conflict")] if conflicts else []
        parts, x, y = [], float(PAD), 56.0
        for name, colour in [*shown, *lines]:
            name = _short(name, 2 * LONGEST)
            step = 34 + len(name) * CHARACTER
            if x > PAD and x + step > width:
                x, y = float(PAD), y + 20
            if colour == "arrow":
                mark = f'<path class="arrow" marker-end="url(#head)" d="M{x:.0f},{y - 4:.0f} h13"/>'
            elif colour == "conflict":
                mark = f'<path class="conflict" d="M{x:.0f},{y - 4:.0f} h13"/>'
            else:
                mark = (
                    f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}" '
                    f'fill-opacity="0.45" stroke="{colour}"/>'
                )
            parts.append(
                f'<g class="legend">{mark}<text x="{x + 17:.0f}" y="{y:.0f}">{_text(name)}</text></g>'
            )
            x += step
        return parts, y + 8

    def _ticks(self, place: _Place, y: float) -> list[str]:
        parts, x = [], 0.0
        while self.entries:
            column = bisect_left(place.columns, x, 0, len(self.entries))
            if column == len(self.entries):
                break
            entry, x = self.entries[column], place.columns[column]
            parts.append(f'<path class="tick" d="M{x:.1f},{y + 4:.1f} V{place.below - 10:.1f}"/>')
            parts.append(
                f'<text class="faint" x="{x:.1f}" y="{y:.1f}">{entry.number}, '
                f"{_time(entry.at_ns - self.began_ns)}</text>"
            )
            x += TICK
        return parts

    def _conflict(self, conflict: Conflict, place: _Place) -> list[str]:
        """A ring around each side, and a line between them."""
        parts, middles = [], []
        for side in (conflict.first, conflict.second):
            box = self.of.get(side.number)
            if box is None:
                continue
            x, y, width = place.box(box)
            middles.append((x + width / 2, y + BOX / 2))
            parts.append(
                f'<rect class="conflict" x="{x - 2:.1f}" y="{y - 2:.1f}" width="{width + 4:.1f}" '
                f'height="{BOX + 4}" rx="4"/>'
            )
        if len(middles) == 2:
            (ax, ay), (bx, by) = middles
            parts.append(f'<path class="conflict" d="M{ax:.1f},{ay:.1f} L{bx:.1f},{by:.1f}"/>')
        return [f'<g class="conflict-pair"><title>{_text(str(conflict))}</title>', *parts, "</g>"]


def _edges(wanted: Sequence[float]) -> list[float]:
    """The columns' edges from 0: as wide as wanted, or, where that is more than WIDEST, none wider than what
    makes it WIDEST."""
    most, rest = max(wanted, default=0.0), float(WIDEST)
    if sum(wanted) > WIDEST:
        for done, width in enumerate(sorted(wanted)):
            most = rest / (len(wanted) - done)
            if width > most:
                break
            rest -= width
    edges = [0.0]
    for width in wanted:
        edges.append(edges[-1] + min(width, most))
    return edges


def _levels(boxes: Sequence[_Box]) -> int:
    """Give each box of a row a level, so that none overlaps another; how many there are."""
    levels = 0
    for layer in LAYERS:
        ends: list[int] = []  # of the last box in each level of this layer
        for box in sorted((b for b in boxes if b.layer == layer), key=lambda b: (b.begin, -b.end)):
            free = next((i for i, end in enumerate(ends) if end < box.begin), len(ends))
            ends[free : free + 1] = [box.end]
            box.level = levels + free
        levels += len(ends)
    return levels


def _drawn(box: _Box, place: _Place) -> list[str]:
    x, y, width = place.box(box)
    colour = f' fill="{box.colour}" stroke="{box.colour}"' if box.colour else ""
    refused = " refused" if box.refused else ""
    parts = [
        f'<g id="operation-{box.number}" class="{box.kind}-box"><title>{_text(chr(10).join(box.lines))}</title>',
        f'<rect class="box {box.kind}{refused}"{colour} x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{BOX}" rx="{min(3, width / 2):.2g}"/>',
    ]
    room = int((width - 4) / CHARACTER)
    label = _short(box.label, min(room, LONGEST))
    if label and (room >= FEWEST or len(box.label) <= room):
        parts.append(f'<text x="{x + 4:.1f}" y="{y + 12:.1f}">{_text(label)}</text>')
    return [*parts, "</g>"]


def _arrow(begin: _Box, end: _Box, event: int, place: _Place) -> str:
    (ax, ay, width), (bx, by, _) = place.box(begin), place.box(end)
    ax, ay, by = ax + width, ay + BOX / 2, by + BOX / 2
    bend = max(14.0, (bx - ax) / 3)
    path = f"M{ax:.1f},{ay:.1f} C{ax + bend:.1f},{ay:.1f} {bx - bend:.1f},{by:.1f} {bx:.1f},{by:.1f}"
    tip = f"operation {end.number} waits for event {event}, which operation {begin.number} recorded"
    return (
        f'<path id="wait-{begin.number}-{end.number}" class="arrow" marker-end="url(#head)" d="{path}">'
        f"<title>{tip}</title></path>"
    )


def _width(label: str) -> float:
    return len(_short(label)) * CHARACTER + 9


def _short(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…" if longest > 1 else ""


def _text(text: str) -> str:
    return escape(NOT_XML.sub("\ufffd", text))


def _time(ns: int) -> str:
    return f"{ns / 1e3:,.1f} µs" if ns < 1e7 else f"{ns / 1e6:,.1f} ms"
