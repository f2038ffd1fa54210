"""A file of untrusted bytes: a header, a FlatBuffers table and segments, every step checked."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import ProgramError

from .facts import Segment

__all__ = ["File", "Source", "Table", "malformed", "opened"]

Source = str | os.PathLike[str] | bytes | bytearray | memoryview

# The tables (values, instructions, …) that one file may hold. Large language models need tens of thousands;
# a file beyond this is refused rather than read for minutes.
_MAX_TABLES = 1_000_000


class File:
    """Bytes by offset, never beyond the end. Not a mapping: a file that shrinks while it is read must end in
    an exception, not a signal."""

    def __init__(self, name: str, stream: io.BufferedIOBase, nbytes: int) -> None:
        self.name = name
        self.stream = stream
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """At most ``nbytes`` bytes from ``offset``; fewer only at the end of the file."""
        self.stream.seek(min(offset, self.nbytes))
        return self.stream.read(max(0, min(nbytes, self.nbytes - offset)))

    def error(self, where: str, expected: str, got: str, do: str = "") -> ProgramError:
        """The exception for something wrong at ``where``; what comes from the file is cut to a readable length."""
        got = got if len(got) <= 200 else f"{got[:200]}…"
        do = do or "the file is damaged or was not written by ExecuTorch 1.x; copy or export it again"
        return ProgramError(f"{self.name}, {where}: expected {expected}, got {got}; {do}")


@contextlib.contextmanager
def opened(source: Source) -> Iterator[File]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        yield File("<bytes>", io.BytesIO(data), len(data))
        return
    if not isinstance(source, str | os.PathLike):
        raise ProgramError(
            f"read: expected a path or the bytes of a file, got {type(source).__name__}; pass one of these"
        )
    name = os.fspath(source)
    if not isinstance(name, str):
        raise ProgramError(f"read: expected a path that is text, got {name!r}; decode it with os.fsdecode()")
    try:
        # Not blocking: opening a pipe would wait for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProgramError(f"{name}: expected a readable file, got '{reason}'; check the path") from error
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        os.close(descriptor)
        raise ProgramError(f"{name}: expected a file, got a folder; name a file in it")
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ProgramError(
            f"{name}: expected a regular file, got mode {stat.filemode(status.st_mode)}; "
            "read it into bytes and pass those"
        )
    with open(descriptor, "rb") as stream:
        file = File(name, stream, status.st_size)
        try:
            yield file
        except OSError as error:
            raise ProgramError(f"{name}: expected to read the file, got '{error}'; copy it again") from error


@contextlib.contextmanager
def malformed(file: File) -> Iterator[None]:
    """The generated classes check nothing themselves: an offset beyond the table makes them raise one of
    these. What is ours to check is checked before."""
    try:
        yield
    except (struct.error, ValueError, TypeError, IndexError, OverflowError, AssertionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise file.error(
            "table", "offsets and lengths inside the table", f"'{text}' on following one"
        ) from error


class Table:
    """The table of one file, and what is needed to read vectors, strings and indices from it safely.

    ``schema`` is the module of generated classes. They check nothing, not even that a list is no longer than
    the file; so what a subclass reads goes through the methods here.
    """

    def __init__(self, file: File, schema: Any) -> None:
        self.file = file
        self.schema = schema
        self.tables_left = _MAX_TABLES
        # Items of vectors and characters of strings. A table may be shared, so that a small file could
        # stand for an enormous one; without sharing the table's own size is the most there can be.
        self.items_left = 0
        self.table = memoryview(b"")
        self.segments: tuple[Segment, ...] = ()

    # -------------------- vectors, strings

    def take(self, count: int, where: str) -> int:
        """``count`` items more are going to be read."""
        self.items_left -= count
        if self.items_left < 0:
            raise self.file.error(
                where, f"at most {8 * len(self.table)} items in a table of {len(self.table)} bytes", "more"
            )
        return count

    def tables(self, count: int, get: Any, where: str) -> Iterator[tuple[int, Any]]:
        """The ``count`` tables of a vector with their numbers."""
        self.tables_left -= self.take(count, where)
        if self.tables_left < 0:
            raise self.file.error(where, f"at most {_MAX_TABLES} tables in a file", "more")
        for i in range(count):
            item = get(i)
            if item is None:
                raise self.file.error(f"{where} {i}", "an entry", "none")
            yield i, item

    def numbers(self, vector: Any, where: str) -> tuple[Any, ...]:
        """A vector of numbers; an absent one (which the generated classes give as 0) is empty."""
        if isinstance(vector, int):
            return ()
        self.take(len(vector), where)
        return tuple(vector.tolist())

    def text(self, value: bytes | None, where: str) -> str:
        """A string, which must be there."""
        if value is None:
            raise self.file.error(where, "a string", "none")
        self.take(len(value), where)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise self.file.error(where, "UTF-8", f"{value[:40]!r}") from error

    def name(self, names: Sequence[str], code: int, where: str) -> str:
        if not 0 <= code < len(names):
            raise self.file.error(where, f"a code from 0 to {len(names) - 1}", str(code))
        return names[code]

    def indices(self, vector: Any, count: int, what: str, where: str, least: int = 0) -> tuple[int, ...]:
        """A vector of indices into a list of ``count``; ``least`` is -1 where "absent" is allowed."""
        found: tuple[int, ...] = self.numbers(vector, where)
        for index in found:
            if not least <= index < count:
                raise self.file.error(where, f"{what} from {least} to {count - 1}", str(index))
        return found

    def index(self, value: int, count: int, what: str, where: str) -> int:
        if not 0 <= value < count:
            expected = f"{what} from 0 to {count - 1}" if count else f"no {what}, for there is none"
            raise self.file.error(where, expected, str(value))
        return value

    # -------------------- header, segments

    def locate(self, identifier: bytes, magic: bytes, fields: str, what: str) -> tuple[int, int, int] | None:
        """Read the file's first bytes and the table, which starts with them.

        Returns (table size, segment base, size of all segments; -1 where the header has no such field), or
        None for a file without header, which is all table.
        """
        file = self.file
        head = file.read(0, 64)
        if head[4:8] != identifier:
            got = "an empty file" if not head else f"{head[4:8]!r} in {file.nbytes} bytes"
            raise file.error(
                "bytes 4 to 7",
                f"{identifier!r}",
                got,
                f"this is no {what} of a version that headrace reads; export it with executorch 1.x",
            )
        located: tuple[int, int, int] | None = None
        if head[8:12] == magic:
            nbytes = 8 + struct.calcsize(fields)
            (length,) = struct.unpack_from("<I", head.ljust(64, b"\0"), 12)
            # The last field, the size of all segments, came later to programs: their header may lack it.
            least = nbytes - 8 if magic == b"eh00" else nbytes
            if length < least:
                raise file.error("header, length", f"{least} or more", str(length))
            if file.nbytes < 8 + length:
                raise file.error(
                    "header", f"{length} bytes", f"{max(0, file.nbytes - 8)}, the file ends before"
                )
            found = list(struct.unpack_from(fields, head.ljust(64, b"\0"), 16))
            if length < nbytes:
                found[-1] = -1
            if magic == b"eh00":
                located = found[0], found[1], found[2]
            else:
                # A data file's header stands inside the table, whose offsets count from the file's start.
                located = found[0] + found[1], found[2], found[3]
        nbytes, base, data = located or (file.nbytes, 0, -1)
        if not 8 <= nbytes <= file.nbytes:
            raise file.error(
                "header, table",
                f"8 or more bytes that end within the file's {file.nbytes}",
                f"{nbytes} bytes",
                "the file is truncated; copy or export it again",
            )
        if base and not nbytes <= base <= file.nbytes:
            raise file.error(
                "header, segment base", f"from {nbytes} (the table's end) to {file.nbytes}", str(base)
            )
        if data > 0 and (not base or base + data > file.nbytes):
            raise file.error(
                "header, segment data",
                f"bytes that end within the file's {file.nbytes}",
                f"{data} bytes from {base}",
                "the file is truncated; copy or export it again",
            )
        table = file.read(0, nbytes)
        if len(table) != nbytes:
            raise file.error(
                "table", f"{nbytes} bytes", f"{len(table)}", "the file changed while it was read"
            )
        self.table = memoryview(table)
        self.items_left = 8 * nbytes
        return located

    def read_segments(self, root: Any, located: tuple[int, int, int] | None) -> None:
        _, base, data = located or (0, 0, -1)
        found = []
        for i, segment in self.tables(root.SegmentsLength(), root.Segments, "segment"):
            offset, nbytes = segment.Offset(), segment.Size()
            # The exporter lists an empty segment of constants in a program that has none, and gives no base.
            if not base and nbytes:
                raise self.file.error(
                    f"segment {i}", "no segment, for the header gives no base", f"{nbytes} bytes"
                )
            end = base + offset + nbytes
            # As the engine has it, 0 means that the header does not say.
            limit = base + data if data > 0 else self.file.nbytes
            if end > limit:
                raise self.file.error(
                    f"segment {i}",
                    f"an end within byte {limit}",
                    f"{nbytes} bytes from {base + offset}",
                    "the file is truncated or damaged; copy or export it again",
                )
            found.append(Segment(base + offset, nbytes))
        self.segments = tuple(found)
