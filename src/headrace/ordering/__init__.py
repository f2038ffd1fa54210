"""Order is checked, not hoped for.

    with headrace.record() as r:
        method(x, stream=s)
    r.check()                        # OrderingError where two accesses to one buffer are ordered by nothing
    r.trace("run.json")              # opens in Perfetto, one row a stream
    r.plot("run.svg")                # the same as a picture

A record is process-wide: every operation of every device with its stream, event, thread and what it reads and
writes. The check works from that alone, so what it finds does not depend on how the work happened to run, and it
works on every device. What a delegate launches on a GPU without declaring it is out of its sight; the island then
counts as one operation, on the stream of the call.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from .. import timeline
from ..engine import core
from ..errors import HeadraceError, OrderingError
from . import picture
from .check import Access, Conflict, Findings, check
from .log import Call, Entry, Island, Kind, Log, Stream, Touch

__all__ = [
    "Access",
    "Call",
    "Conflict",
    "Entry",
    "Findings",
    "Island",
    "Kind",
    "Log",
    "Record",
    "Stream",
    "Touch",
    "check",
    "record",
]


class Record:
    """What was asked of every device of the process while it was open; made by `record`.

    Work from before it began is not in it. It is kept in memory, about 200 bytes an operation, until it is closed
    and then for as long as the object lives.
    """

    def __init__(self) -> None:
        self._began: int | None = None
        self._raw: dict[str, Any] | None = None
        self._log: Log | None = None
        self._findings: Findings | None = None

    def __enter__(self) -> Record:
        if self._began is not None:
            raise HeadraceError(
                "record: expected a new one, got one that was used before; call record() again"
            )
        self._began = core.record_start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._began is not None  # entered
        self._raw = core.record_stop(self._began)

    @property
    def log(self) -> Log:
        """The entries as data. Raises HeadraceError while the record is open."""
        if self._log is None:
            if self._raw is None:
                raise HeadraceError(
                    "record: expected a record that is closed, got one that is not; leave its with block first"
                )
            self._log, self._raw = Log.of(self._raw), None
        return self._log

    def findings(self) -> Findings:
        """What the check looked at and found; raises nothing for conflicts."""
        if self._findings is None:
            self._findings = check(self.log)
        return self._findings

    def check(self) -> Findings:
        """Check that every two accesses to the same bytes, one of them a write, are ordered.

        Raises:
            OrderingError: some are not: see ``.conflicts``. Also, with no conflicts, where the record holds no
                access by work of a device: a check that looked at nothing fails.
        """
        found = self.findings()
        if found.accesses == 0:
            raise OrderingError(
                f"record: expected work of a device that reads or writes memory, got {found.operations} entries with "
                "none; run a program on a device while the record is open, and let delegates declare what they touch"
            )
        if found.conflicts:
            count = len(found.conflicts)
            lines = [
                f"expected every access to be ordered, got {count} conflict{'s' * (count > 1)}; order each as it says"
            ]
            lines += [str(conflict) for conflict in found.conflicts[:20]]
            if count > 20:
                lines.append(f"… and {count - 20} more in .conflicts")
            raise OrderingError("\n".join(lines), conflicts=found.conflicts)
        return found

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the record as a Chrome trace (JSON), which Perfetto and chrome://tracing open.

        One row a stream and one a thread, islands and calls by name, waits as arrows, conflicts marked. Times are
        the host's: when an operation was asked for, not when the device ran it.

        Raises:
            InputError: the file cannot be written.
            HeadraceError: the record is open.
        """
        timeline.write(self.log, self.findings().conflicts, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write the record as a picture: SVG in UTF-8, which every browser shows; a file that is there is replaced.

        One row a thread and one a stream, streams by device and lane (those of lanes with as many SMs together, for
        a record does not tell them apart). What a thread or stream was asked for goes along x in the record's order,
        with the host's time at the ticks; a width is no duration. Islands are boxes with instruction and delegate, in
        the delegate's colour; copies, host functions, declared work, allocations, calls of methods and what the host
        itself did are boxes too, waits for events arrows, conflicts red. Each box and arrow has a tooltip that says
        all of it. At most about 4,200 pixels wide: labels that have no room are cut or left out, tooltips are not.

        It waits for nothing and asks nothing of a device.

        Raises:
            InputError: the file cannot be written.
            HeadraceError: the record is open.
        """
        timeline.save("plot", picture.svg(self.log, self.findings().conflicts), path)


def record() -> Record:
    """A context manager that records all devices of the process; see `Record`. Records may nest."""
    return Record()
