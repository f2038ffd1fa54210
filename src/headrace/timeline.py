"""A record as a trace: the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format is "Trace Event Format" (Google): complete events ``X``, flow events ``s`` and ``f``, instant events
``i``, metadata ``M``; times in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from .ordering.check import Conflict
    from .ordering.log import Entry, Log

__all__ = ["events", "save", "write"]

HOST = 1  # the process id of the rows of threads; devices come behind it
# Kinds of ordering.log, by name, that are a box on their stream's row.
BOXES = {
    "ALLOCATE",
    "FREE",
    "COPY",
    "FILL",
    "CALL",
    "RECORD",
    "WAIT",
    "LAUNCH",
    "BEGIN_CAPTURE",
    "END_CAPTURE",
}
WAITS = {"SYNCHRONIZE_STREAM", "SYNCHRONIZE_EVENT", "SYNCHRONIZE_DEVICE", "QUERY_STREAM", "QUERY_EVENT"}


def events(log: Log, conflicts: Sequence[Conflict]) -> list[dict[str, Any]]:
    """The trace's events, in the order of the record."""
    return _Trace(log).run(conflicts)


def write(log: Log, conflicts: Sequence[Conflict], path: str | os.PathLike[str]) -> None:
    """Write the trace to ``path``. Raises InputError where it cannot be written."""
    save("trace", json.dumps({"displayTimeUnit": "ns", "traceEvents": events(log, conflicts)}), path)


def save(what: str, text: str, path: str | os.PathLike[str]) -> None:
    """Write ``text`` to ``path`` as UTF-8. Raises InputError, which names ``what``, where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError, TypeError) as e:
        raise InputError(
            f"{what}: expected a file that can be written, got: {e}; choose another path"
        ) from None


class _Trace:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.out: list[dict[str, Any]] = []
        self.began_ns = log.entries[0].at_ns if log.entries else 0
        self.places: dict[int, tuple[int, int, float]] = {}  # of each entry: process, row, time
        # How long the host took: until the same thread's next entry.
        self.until: dict[int, int] = {}
        last: dict[int, Entry] = {}
        for entry in log.entries:
            if entry.thread in last:
                self.until[last[entry.thread].number] = entry.at_ns
            last[entry.thread] = entry

    def run(self, conflicts: Sequence[Conflict]) -> list[dict[str, Any]]:
        devices: dict[int, int] = {}
        rows: set[tuple[int, int]] = set()
        for known in self.log.streams.values():
            if not known.host:
                devices.setdefault(known.device_id, HOST + 1 + len(devices))
        opened: dict[tuple[str, int], Entry] = {}
        recorded: dict[int, int] = {}  # event -> the entry that recorded it last
        self._name(HOST, None, "host")
        for entry in self.log.entries:
            kind = _kind(entry)
            stream = self.log.streams.get(entry.stream)
            on_device = stream is not None and not stream.host
            process, row = (
                (devices[stream.device_id], stream.number) if stream and on_device else (HOST, entry.thread)
            )
            if kind in WAITS or kind == "BEGIN_CALL":
                process, row = HOST, entry.thread
            self.places[entry.number] = (process, row, self._us(entry.at_ns))
            if (process, row) not in rows:
                rows.add((process, row))
                if process == HOST:
                    self._name(process, row, f"thread {row}")
                elif stream is not None:
                    if not any(p == process for p, _ in rows - {(process, row)}):
                        self._name(process, None, stream.device)
                    self._name(process, row, str(stream))
            if kind in BOXES or kind == "TOUCH":
                self._box(
                    self.log.describe(entry), entry, process, row, self.until.get(entry.number, entry.at_ns)
                )
            elif kind == "BEGIN_ISLAND":
                opened.setdefault(("island", entry.island), entry)
            elif kind == "BEGIN_CALL":
                opened["call", entry.call] = entry
            elif kind in WAITS:
                opened["wait", entry.number] = entry
            elif kind == "END_ISLAND" and (begin := opened.pop(("island", entry.island), None)):
                island = self.log.islands[entry.island]
                self._box(f"island {island.instruction}: {island.delegate}", begin, process, row, entry.at_ns)
            elif kind == "END_CALL" and (begin := opened.pop(("call", entry.call), None)):
                self._box(self.log.calls[entry.call].method, begin, HOST, entry.thread, entry.at_ns)
            elif kind in ("DONE", "REFUSED") and (begin := opened.pop(("wait", entry.object), None)):
                self._box(_kind(begin).lower(), begin, HOST, begin.thread, entry.at_ns)
            if kind == "RECORD":
                recorded[entry.object] = entry.number
            elif kind in ("WAIT", "SYNCHRONIZE_EVENT") and entry.object in recorded:
                self._flow("event", recorded[entry.object], entry.number)
        for conflict in conflicts:
            for side in (conflict.first, conflict.second):
                process, row, at = self.places[side.number]
                self.out.append(
                    {
                        "name": f"CONFLICT {conflict.kind}",
                        "cat": "conflict",
                        "ph": "i",
                        "s": "t",
                        "pid": process,
                        "tid": row,
                        "ts": at,
                        "cname": "terrible",
                        "args": {"conflict": str(conflict)},
                    }
                )
            self._flow("conflict", conflict.first.number, conflict.second.number)
        return self.out

    def _us(self, at_ns: int) -> float:
        return (at_ns - self.began_ns) / 1000

    def _name(self, process: int, row: int | None, name: str) -> None:
        what = "process_name" if row is None else "thread_name"
        self.out.append({"name": what, "ph": "M", "pid": process, "tid": row or 0, "args": {"name": name}})

    def _box(self, name: str, entry: Entry, process: int, row: int, until_ns: int) -> None:
        arguments: dict[str, Any] = {"operation": entry.number, "thread": entry.thread}
        if entry.touches:
            arguments["touches"] = [
                f"{'writes' if t.write else 'reads'} {t.nbytes} bytes at {t.address:#x}"
                for t in entry.touches
            ]
        self.out.append(
            {
                "name": name,
                "cat": _kind(entry).lower(),
                "ph": "X",
                "pid": process,
                "tid": row,
                "ts": self._us(entry.at_ns),
                "dur": max((until_ns - entry.at_ns) / 1000, 0.001),
                "args": arguments,
            }
        )

    def _flow(self, category: str, begin: int, end: int) -> None:
        for phase, number in (("s", begin), ("f", end)):
            process, row, at = self.places[number]
            event: dict[str, Any] = {
                "name": category,
                "cat": category,
                "ph": phase,
                "id": f"{category}-{begin}-{end}",
                "pid": process,
                "tid": row,
                "ts": at,
            }
            if phase == "f":
                event["bp"] = "e"
            self.out.append(event)


def _kind(entry: Entry) -> str:
    from .ordering.log import Kind

    return Kind(entry.kind).name
