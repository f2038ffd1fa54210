"""A record as an SVG picture: what is in it, where it stands, and that any record can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import headrace
from headrace import ordering
from headrace.ordering import Call, Entry, Island, Kind, Log, Stream, Touch, picture
from tests.unit.ordering_plants import FAULTS, RIGHT, add, chain, put, zeros

SVG = "{http://www.w3.org/2000/svg}"
# Without programs, and with: threads, host waits, frees, forks, islands.
PLANTS = {
    **{name: FAULTS[name] for name in ("a_wait_enqueued_before_its_record", "two_threads_on_one_buffer")},
    **{
        name: RIGHT[name]
        for name in (
            "an_event_between_two_streams",
            "a_query_that_said_yes",
            "per_thread_streams_ordered_by_the_legacy_stream",
            "memory_freed_and_used_again",
            "islands_that_declare_nothing",
            "a_delegate_that_forks_and_joins",
            "calls_in_flight_from_two_streams_and_threads",
        )
    },
}


@dataclass
class Box:
    number: int
    kind: str
    tip: str
    label: str | None
    x: float
    y: float
    width: float
    height: float
    look: str

    @property
    def right(self) -> float:
        return self.x + self.width


class Picture:
    """What a browser would show, read back."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.width, self.height = float(self.root.get("width", 0)), float(self.root.get("height", 0))
        self.boxes: dict[int, Box] = {}
        self.rows: list[tuple[str, float, float, str]] = []  # name, upper edge, lower edge, tooltip
        for group in self.root.iter(f"{SVG}g"):
            kind, label, tip = group.get("class", ""), group.find(f"{SVG}text"), group.findtext(f"{SVG}title")
            shape = group.find(f"{SVG}rect")
            if kind.endswith("-box"):
                assert shape is not None and tip
                number = int(group.get("id", "").removeprefix("operation-"))
                assert number not in self.boxes
                self.boxes[number] = Box(
                    number,
                    kind.removesuffix("-box"),
                    tip,
                    None if label is None else label.text,
                    *(float(shape.get(name, "nan")) for name in ("x", "y", "width", "height")),
                    look=shape.get("class", ""),
                )
            elif kind == "row":
                assert shape is not None and label is not None and label.text and tip
                top = float(shape.get("y", 0))
                self.rows.append((label.text, top, top + float(shape.get("height", 0)), tip))
        self.headings = [
            (e.text or "", float(e.get("y", 0)))
            for e in self.root.iter(f"{SVG}text")
            if e.get("class") == "title"
        ][1:]
        self.arrows: dict[tuple[int, int], list[float]] = {}
        for path in self.root.iter(f"{SVG}path"):
            if path.get("id", "").startswith("wait-"):
                begin, end = map(int, path.get("id", "").split("-")[1:])
                self.arrows[begin, end] = [
                    float(v)
                    for v in path.get("d", "").replace("M", "").replace("C", "").replace(",", " ").split()
                ]
        self.legend = [
            e.findtext(f"{SVG}text") for e in self.root.iter(f"{SVG}g") if e.get("class") == "legend"
        ]

    def of(self, kind: str) -> list[Box]:
        return [box for box in self.boxes.values() if box.kind == kind]

    def row(self, box: Box) -> tuple[str, str]:
        """Name and tooltip of the row that the box is in."""
        ((name, tip),) = [
            (n, tip) for n, top, below, tip in self.rows if top <= box.y and box.y + box.height <= below
        ]
        return name, tip

    def heading(self, box: Box) -> str:
        return [text for text, y in self.headings if y < box.y][-1]


def drawn(record: ordering.Record, folder: Path) -> Picture:
    record.plot(folder / "run.svg")
    return Picture((folder / "run.svg").read_text(encoding="utf-8"))


def waits(log: Log) -> set[tuple[int, int]]:
    """(record, wait), for each wait that has one."""
    last: dict[int, int] = {}
    found = set()
    for entry in log.entries:
        if entry.kind == Kind.RECORD:
            last[entry.object] = entry.number
        elif entry.kind in (Kind.WAIT, Kind.SYNCHRONIZE_EVENT, Kind.QUERY_EVENT) and entry.object in last:
            found.add((last[entry.object], entry.number))
    return found


# ------------------------------------------------------------------- contents


@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_every_island_copy_function_and_wait_of_a_run_is_drawn(schedule: str, tmp_path: Path) -> None:
    """BY1: 25 islands of two delegates, one of which works on streams of its own that fork and join."""
    device = headrace.device("sim", schedule=schedule)
    with headrace.record() as record:
        RIGHT["a_delegate_that_forks_and_joins"](device)
    log, seen = record.log, drawn(record, tmp_path)
    islands = seen.of("island")
    assert len(islands) == len(log.islands) == 25
    assert {b.label for b in islands} == {f"{i.instruction} · {i.delegate}" for i in log.islands.values()}
    assert {f"island of {i.delegate}" for i in log.islands.values()} <= set(seen.legend)
    kinds = {"copy": Kind.COPY, "function": Kind.CALL, "method": Kind.BEGIN_CALL}
    for name, kind in kinds.items():
        entries = [e for e in log.entries if e.kind == kind]
        assert {e.number for e in entries} == {b.number for b in seen.of(name)} and entries
        for entry in entries:
            row, tip = seen.row(seen.boxes[entry.number])
            assert row == "thread 1" if name == "method" else tip == str(log.streams[entry.stream])
    assert seen.arrows.keys() == waits(log) and len(waits(log)) >= 26
    for (begin, end), (ax, ay, *_, bx, by) in seen.arrows.items():
        first, second = seen.boxes[begin], seen.boxes[end]
        assert ax == pytest.approx(first.right, abs=0.2) and bx == pytest.approx(second.x, abs=0.2)
        assert first.y < ay < first.y + first.height and second.y < by < second.y + second.height
    (method,) = seen.of("method")
    assert all(method.x < b.x and b.right < method.right for b in islands)
    # A function that an island enqueued lies within it, whatever the row.
    for box in seen.of("function"):
        entry = next(e for e in log.entries if e.number == box.number)
        of = log.islands[entry.island]
        (island,) = [b for b in islands if b.label == f"{of.instruction} · {of.delegate}"]
        assert island.x < box.x and box.right < island.right


@pytest.mark.parametrize("name", PLANTS)
def test_boxes_stand_in_the_records_order_and_never_on_each_other(name: str, tmp_path: Path) -> None:
    """BY1: left edges follow the order in which things were asked for; a row is as high as what overlaps in it."""
    with headrace.record() as record:
        PLANTS[name](headrace.device("sim"))
    seen = drawn(record, tmp_path)
    boxes = [seen.boxes[number] for number in sorted(seen.boxes)]
    assert len(boxes) > 5 and all(a.x < b.x for a, b in pairwise(boxes))
    assert all(b.width > 0 and b.x > 0 and b.right <= seen.width for b in boxes)
    assert all(b.label for b in boxes if b.width > 30)
    rows: dict[float, list[Box]] = {}
    for box in boxes:
        seen.row(box)
        rows.setdefault(box.y, []).append(box)
    for row in rows.values():
        row.sort(key=lambda b: b.x)
        assert all(a.right <= b.x + 0.11 for a, b in pairwise(row))
    assert all(a[2] <= b[1] for a, b in pairwise(seen.rows))
    assert seen.rows[-1][2] <= seen.height
    assert seen.arrows.keys() == waits(record.log)


def test_two_lanes_are_two_groups_behind_the_host(tmp_path: Path) -> None:
    """BY1: streams by device and lane; the whole device's are a group of their own."""
    device = headrace.device("sim")
    buffer = zeros(device)
    streams = [device.partition(sms=8).stream(), device.stream(), device.partition(sms=64).stream()]
    with headrace.record() as record:
        for stream in streams:
            put(stream, buffer, 1)
            stream.synchronize()
    seen = drawn(record, tmp_path)
    (name,) = {stream.device for stream in record.log.streams.values() if not stream.host}
    groups = [f"{name}, in a lane of 8 SMs", name, f"{name}, in a lane of 64 SMs"]
    functions = sorted(seen.of("function"), key=lambda b: b.x)
    assert [seen.heading(b) for b in functions] == groups
    assert [seen.row(b)[0] for b in functions] == [f"stream {stream.handle:#x}" for stream in streams]
    assert [text for text, _ in seen.headings] == ["host", groups[1], groups[0], groups[2]]
    assert {seen.heading(b) for b in seen.of("hostwait")} == {"host"}


def test_conflicts_are_ringed_and_say_what_would_order_them(tmp_path: Path) -> None:
    """BY1, OR5: both sides, with the words of the check."""
    with headrace.record() as record:
        FAULTS["a_missing_wait_between_two_streams"](headrace.device("sim"))
    (conflict,) = record.findings().conflicts
    seen = drawn(record, tmp_path)
    (pair,) = [g for g in seen.root.iter(f"{SVG}g") if g.get("class") == "conflict-pair"]
    assert pair.findtext(f"{SVG}title") == str(conflict) and "conflict" in seen.legend
    rings = [
        tuple(float(r.get(name, 0)) for name in ("x", "y", "width", "height"))
        for r in pair.iter(f"{SVG}rect")
    ]
    assert len(rings) == 2
    for side, (x, y, width, height) in zip((conflict.first, conflict.second), rings, strict=True):
        box = seen.boxes[side.number]
        assert x < box.x and box.right < x + width and y < box.y and box.y + box.height < y + height
    with headrace.record() as record:
        RIGHT["an_event_between_two_streams"](headrace.device("sim"))
    assert "conflict" not in drawn(record, tmp_path).legend


def test_capture_and_launch_of_a_graph_are_drawn(tmp_path: Path) -> None:
    """BY1, GR1: what a capture took in lies in it; a replay is one launch."""
    device = headrace.device("sim")
    program, x, want = chain(device)
    with headrace.record() as record:
        graph = program["forward"].capture(x)
        (y,) = graph.replay(x)
    np.testing.assert_array_equal(y, want)
    seen = drawn(record, tmp_path)
    (capture,) = seen.of("capture")
    inside = [b for b in seen.of("function") if capture.x < b.x < capture.right]
    assert len(inside) == 25 and all(seen.row(b) == seen.row(capture) for b in inside)
    launches = [e.number for e in record.log.entries if e.kind == Kind.LAUNCH]
    assert len(launches) == 1 and seen.boxes[launches[0]].kind == "launch"
    assert seen.boxes[launches[0]].x > capture.right


def test_work_that_a_delegate_declares_bears_its_name(tmp_path: Path) -> None:
    """BY1: under the name that was given, as text, and with the memory that it touches."""
    device = headrace.device("sim")
    buffer, stream = zeros(device), device.stream()
    with headrace.record() as record:
        stream.declare(reads=[buffer], writes=[buffer], name="gemm<float&, 4>")
    seen = drawn(record, tmp_path)
    (box,) = seen.of("function")
    assert box.label == "gemm<float&, 4>" and "reads 16 bytes" in box.tip and "writes 16 bytes" in box.tip
    assert "host function, declared work" in seen.legend


# ----------------------------------------------------------- sizes and records


def test_few_entries_have_all_labels_and_thousands_stay_in_a_bounded_width(tmp_path: Path) -> None:
    """BY1: every box is there, with its tooltip; labels only where they have room."""
    device = headrace.device("sim")
    buffer, stream = zeros(device), device.stream()

    def some(count: int) -> tuple[ordering.Record, Picture]:
        with headrace.record() as record:
            for _ in range(count):
                add(stream, buffer, 1)
        return record, drawn(record, tmp_path)

    record, few = some(5)
    assert [b.label for b in few.of("function")] == ["call"] * 5 and few.width < 1000
    record, many = some(1000)
    assert {e.number for e in record.log.entries} == many.boxes.keys() and len(many.boxes) >= 2000
    assert len(many.of("function")) == 1000
    assert 3000 < many.width < 4300
    assert not any(b.label for b in many.boxes.values())
    assert all(b.width > 0.5 for b in many.boxes.values())
    assert all("writes 16 bytes" in b.tip for b in many.of("function"))


def test_an_empty_record_is_a_picture_too(tmp_path: Path) -> None:
    with headrace.record() as record:
        pass
    seen = drawn(record, tmp_path)
    assert (seen.boxes, seen.rows, seen.arrows, seen.legend) == ({}, [], {}, [])
    assert "nothing to draw" in [e.text for e in seen.root.iter(f"{SVG}text")]


def test_a_picture_needs_a_record_that_is_closed_and_a_place(tmp_path: Path) -> None:
    """OP3: as for a trace."""
    with headrace.record() as record, pytest.raises(headrace.HeadraceError, match="a record that is closed"):
        record.plot(tmp_path / "run.svg")
    assert not (tmp_path / "run.svg").exists()
    nowhere: Any = None
    for path in (tmp_path / "no" / "run.svg", tmp_path, "a\0b", nowhere):
        with pytest.raises(
            headrace.InputError, match=r"^plot: expected a file that can be written, got: .*; choose"
        ):
            record.plot(path)
        with pytest.raises(headrace.InputError, match=r"^trace: expected a file that can be written"):
            record.trace(path)
    (tmp_path / "run.svg").write_text("of before" * 1000)
    assert drawn(record, tmp_path).boxes == {}
    record.plot(str(tmp_path / "other"))
    assert (tmp_path / "other").read_bytes() == (tmp_path / "run.svg").read_bytes()


# ------------------------------------------------------- records made by hand


def scripted(
    *lines: tuple[Kind, int, int],
    island: int | Sequence[int] = 0,
    call: int = 0,
    name: str = "",
    delegate: str = "D",
    method: str = "m",
) -> Picture:
    """Of (kind, stream, object), numbered from 1, all in one call and in one island, or each in its own."""
    of = [island] * len(lines) if isinstance(island, int) else island
    entries = [
        Entry(i + 1, kind, i * 1000, 1, stream, call, of[i], obj, 0, name, (Touch(16, 4, True, 0),))
        for i, (kind, stream, obj) in enumerate(lines)
    ]
    streams = {n: Stream(n, 0, "sim:0", "sim", 100 + n, False, -1, 0) for n in (1, 2)}
    streams[3] = Stream(3, 1, "cpu", "cpu", 2, True, -1, 0)
    log = Log(
        entries,
        streams,
        {1: Call(1, method, 1)},
        {1: Island(1, delegate, 4), 2: Island(2, delegate, 5)},
        {1: [name]},
    )
    return Picture(picture.svg(log, ordering.check(log).conflicts))


@pytest.mark.parametrize("name", ["<b>&\"']]>--", "a\0b\x1b[0m\x7f\ud800\ufffe", "ä→😀\n\t", "n" * 5000, ""])
def test_names_are_text_whatever_is_in_them(name: str) -> None:
    """BY1: they come from programs and delegates; what XML cannot say is replaced."""
    want = "".join("\ufffd" if c in "\0\x1b\ud800\ufffe" else c for c in name)
    lines = [(Kind.BEGIN_CALL, 1, 0), (Kind.BEGIN_ISLAND, 1, 0), (Kind.CALL, 1, 0), (Kind.TOUCH, 0, 0)]
    lines += [(Kind.END_ISLAND, 1, 0), (Kind.UNSEEN, 0, 0), (Kind.END_CALL, 1, 0)]
    seen = scripted(*lines, island=1, call=1, name=name, delegate=name, method=name)
    assert [b.kind for b in seen.boxes.values()] and len(seen.boxes) == 5
    for box in seen.boxes.values():
        assert want in box.tip
        assert box.label is None or len(box.label) <= 28
    if 0 < len(want) < 15:
        assert {b.label for b in seen.boxes.values()} == {want, f"4 · {want}"}
    assert f"island of {want}"[:56] in seen.legend or seen.legend[0] == f"island of {want}"[:55] + "…"


@pytest.mark.parametrize(
    ("lines", "kind", "says"),
    [
        ([(Kind.BEGIN_ISLAND, 1, 0), (Kind.COPY, 1, 0)], "island", "was not over when the record ended"),
        ([(Kind.COPY, 1, 0), (Kind.END_ISLAND, 1, 0)], "island", "began before the record"),
        ([(Kind.BEGIN_CALL, 1, 0), (Kind.COPY, 1, 0)], "method", "was not over when the record ended"),
        ([(Kind.COPY, 1, 0), (Kind.END_CALL, 1, 0)], "method", "began before the record"),
        ([(Kind.BEGIN_CAPTURE, 1, 0), (Kind.COPY, 1, 0)], "capture", "was not over when the record ended"),
        ([(Kind.COPY, 1, 0), (Kind.END_CAPTURE, 1, 7)], "capture", "began before the record"),
        (
            [(Kind.SYNCHRONIZE_STREAM, 1, 0), (Kind.COPY, 1, 0)],
            "hostwait",
            "was not over when the record ended",
        ),
    ],
)
def test_what_a_record_holds_half_of_reaches_to_its_edge(
    lines: Sequence[tuple[Kind, int, int]], kind: str, says: str
) -> None:
    """BY1: a record may begin and end while other threads work."""
    seen = scripted(*lines, island=1, call=1)
    (box,), (copy,) = seen.of(kind), seen.of("copy")
    assert says in box.tip
    assert box.x <= copy.x and copy.right <= box.right + 0.1


def test_waits_without_a_record_have_no_arrow_and_say_so() -> None:
    """OR5: a wait before any record is no wait, nor is one for a record that was refused."""
    lines = [(Kind.WAIT, 2, 9), (Kind.RECORD, 1, 9), (Kind.REFUSED, 0, 2), (Kind.WAIT, 2, 9)]
    lines += [(Kind.RECORD, 1, 9), (Kind.WAIT, 2, 9), (Kind.QUERY_EVENT, 0, 9), (Kind.QUERY_EVENT, 0, 9)]
    lines += [(Kind.DONE, 0, 8), (Kind.SYNCHRONIZE_EVENT, 0, 9), (Kind.DONE, 0, 10)]
    seen = scripted(*lines)
    assert seen.arrows.keys() == {(5, 6), (5, 7), (5, 8), (5, 10)}
    lonely = [n for n, b in seen.boxes.items() if "nothing in this record recorded the event before" in b.tip]
    assert lonely == [1, 4]
    assert "refused" in seen.boxes[2].look and "not over" not in seen.boxes[7].tip


def test_what_was_refused_is_marked() -> None:
    """BY1: it is in the record, and was not done; a capture that did not begin has no end."""
    lines = [(Kind.COPY, 1, 0), (Kind.COPY, 1, 0), (Kind.REFUSED, 0, 2), (Kind.BEGIN_CAPTURE, 1, 0)]
    lines += [(Kind.REFUSED, 0, 4), (Kind.SYNCHRONIZE_STREAM, 1, 0), (Kind.REFUSED, 0, 6), (Kind.COPY, 1, 0)]
    seen = scripted(*lines)
    refused = [n for n, b in seen.boxes.items() if "refused: it was not done" in b.tip]
    assert sorted(refused) == [2, 4, 6] and len(seen.boxes) == 5
    assert sorted(refused) == sorted(n for n, b in seen.boxes.items() if "refused" in b.look)
    assert not any("not over" in b.tip for b in seen.boxes.values())


def test_islands_that_overlap_on_a_stream_are_drawn_over_each_other() -> None:
    """BY1: one that runs within another, and one of another thread that ends later."""
    b, e = Kind.BEGIN_ISLAND, Kind.END_ISLAND
    for inner_last in (False, True):
        ends = [1, 2] if inner_last else [2, 1]
        lines = [(b, 1, 0), (b, 1, 0), (Kind.COPY, 1, 0), (e, 1, 0), (e, 1, 0), (b, 1, 0), (e, 1, 0)]
        seen = scripted(*lines, island=[1, 2, 2, *ends, 3, 3], call=1)
        first, second, third = sorted(seen.of("island"), key=lambda box: box.x)
        (copy,) = seen.of("copy")
        assert second.x < first.right and (second.right > first.right) is inner_last
        assert first.y + first.height <= second.y and second.y + second.height <= copy.y
        assert third.y == first.y
        assert len({seen.row(box) for box in seen.boxes.values()}) == 1


def test_work_of_the_host_is_in_its_threads_row() -> None:
    """BY1: the cpu device has no streams of its own."""
    seen = scripted((Kind.BEGIN_ISLAND, 3, 0), (Kind.COPY, 3, 0), (Kind.END_ISLAND, 3, 0), island=1, call=1)
    assert {seen.row(b)[0] for b in seen.boxes.values()} == {"thread 1"} and len(seen.boxes) == 2
    assert [text for text, _ in seen.headings] == ["host"]
