"""What a ``.pte`` or ``.ptd`` file says, read without the engine and without torch.

::

    file = headrace.pte.read("m.pte")
    file["forward"].inputs[0]             # float32[≤8, 64] on cpu, …
    [island.delegate for island in file["forward"].islands]

The formats are ExecuTorch 1.5's: a FlatBuffers table (``schema/program.fbs``), then segments of raw bytes,
found through a header in the first 64 bytes. The classes that read the table are generated at build time.

A file is untrusted: every offset, length and index is checked before it is used, and whatever is wrong
ends in :class:`~headrace.errors.ProgramError`. Reading takes time and memory in proportion to the table
alone; constants and payloads stay in the file, of which only sizes and first bytes are taken.

This describes, it does not license: the native verifier decides whether a program may be run.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ProgramError

__all__ = [
    "DTYPES",
    "INPUTS_SPEC",
    "PAYLOAD_HEAD_NBYTES",
    "Chain",
    "DataEntry",
    "DataFile",
    "Dtype",
    "ExternalTensor",
    "Instruction",
    "Island",
    "MethodInfo",
    "NamedData",
    "Operator",
    "PlannedBuffer",
    "ProgramFile",
    "Segment",
    "ValueInfo",
    "read",
    "read_data",
]

# How much of each delegate's payload is kept: enough for the magic bytes and the header of any known format.
PAYLOAD_HEAD_NBYTES = 64
# The compile spec that says how many of an island's arguments are inputs, in decimal ASCII. The format itself
# does not say it.
INPUTS_SPEC = "headrace.inputs"


@dataclass(frozen=True)
class Dtype:
    """An element type: ``code`` in the file, ``name``, and ``itemsize`` in bytes."""

    code: int
    name: str
    itemsize: int


# ScalarType of schema/scalar_type.fbs; sizes from runtime/core/portable_type/scalar_type.h. Names are
# PyTorch's. The packed types (quint4x2, quint2x4) hold several elements in each one-byte item.
DTYPES: dict[int, Dtype] = {
    code: Dtype(code, name, itemsize)
    for code, name, itemsize in (
        (0, "uint8", 1),
        (1, "int8", 1),
        (2, "int16", 2),
        (3, "int32", 4),
        (4, "int64", 8),
        (5, "float16", 2),
        (6, "float32", 4),
        (7, "float64", 8),
        (11, "bool", 1),
        (12, "qint8", 1),
        (13, "quint8", 1),
        (14, "qint32", 4),
        (15, "bfloat16", 2),
        (16, "quint4x2", 1),
        (17, "quint2x4", 1),
        (22, "bits16", 2),
        (23, "float8_e5m2", 1),
        (24, "float8_e4m3fn", 1),
        (25, "float8_e5m2fnuz", 1),
        (26, "float8_e4m3fnuz", 1),
        (27, "uint16", 2),
        (28, "uint32", 4),
        (29, "uint64", 8),
    )
}

_DEVICE_TYPES = ("cpu", "cuda")
_DYNAMISM = ("static", "bounded", "unbounded")
# runtime/core/exec_aten/util/tensor_dimension_limit.h
_MAX_RANK = 16
# The tables (values, instructions, …) that one file may hold. Large language models need tens of thousands;
# a file beyond this is refused rather than read for minutes.
_MAX_TABLES = 1_000_000


@dataclass(frozen=True)
class ValueInfo:
    """One slot of a method's value table.

    ``kind`` is ``tensor``, ``int``, ``float``, ``bool``, ``none``, ``string`` or ``list``. ``value`` is what
    the file holds for the kinds that are not tensors (None for ``none``); for a list it is a tuple: numbers
    for lists of floats and bools, indices of values for lists of ints and tensors (-1: an absent tensor).

    For tensors:

    ``name``      the fully qualified name, where the file keeps one (parameters and buffers; never the names
                  of a method's arguments)
    ``dtype``     "float32", "bfloat16", …: ``DTYPES``
    ``shape``     the sizes in the file: exact if ``dynamism`` is ``static``, upper bounds if ``bounded``,
                  without meaning if ``unbounded``. The file does not say which dimensions vary, nor
                  their least sizes.
    ``dim_order`` the dimensions from outermost to innermost in memory
    ``nbytes``    of the tensor at its largest; None if ``unbounded``
    ``device``    "cpu", "cuda:0", …
    ``location``  where the bytes come from. ``constant``: the file; ``mutable``: the planned memory, with
                  an initial state in the file; ``external``: a data file, under ``name``; ``planned``: the
                  planned memory; ``unplanned``: whoever binds it
    ``planned``   (memory id, offset in bytes) into ``MethodInfo.buffers``, or None
    """

    index: int
    kind: str
    value: Any = None
    name: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    dynamism: str = "static"
    dim_order: tuple[int, ...] = ()
    nbytes: int | None = None
    device: str = "cpu"
    location: str | None = None
    planned: tuple[int, int] | None = None

    @property
    def bounds(self) -> tuple[int | None, ...]:
        """The greatest size of each dimension; None where there is none."""
        return (None,) * len(self.shape) if self.dynamism == "unbounded" else self.shape

    def __str__(self) -> str:
        if self.kind != "tensor":
            return self.kind if self.kind == "none" else f"{self.kind} {self.value!r}"
        mark = {"static": "{}", "bounded": "≤{}", "unbounded": "?"}[self.dynamism]
        return f"{self.dtype}[{', '.join(mark.format(size) for size in self.shape)}] on {self.device}"


@dataclass(frozen=True)
class Operator:
    """A kernel that a method calls: ``name`` with overload ("aten::add.out"), and from how many
    instructions."""

    name: str
    calls: int


@dataclass(frozen=True)
class Instruction:
    """One step. ``kind`` is ``kernel``, ``delegate``, ``move``, ``jump`` or ``free``; ``target`` names the
    operator or delegate; ``args`` are value indices (for ``move``: from, to; for ``jump``: the condition);
    ``destination`` is the instruction that a ``jump`` goes to when the condition is false."""

    index: int
    kind: str
    target: str | None
    args: tuple[int, ...]
    destination: int | None = None


@dataclass(frozen=True)
class Chain:
    """A list of instructions that run in order; ``inputs`` and ``outputs`` are value indices. Every known
    program has one chain."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Island:
    """One delegate call.

    ``index`` counts the method's delegate calls in instruction order; ``chain`` and ``instruction`` say
    where it stands. ``args`` are value indices, inputs before outputs. ``inputs`` and ``outputs`` say how
    many of each: from the compile spec ``headrace.inputs``, else derived from the plan (what was there
    before the call is an input), else None.

    ``payload_nbytes`` is the size of the delegate's payload, ``payload_offset`` its place in the file,
    ``payload_head`` its first ``PAYLOAD_HEAD_NBYTES`` bytes.
    """

    index: int
    chain: int
    instruction: int
    delegate: str
    specs: tuple[tuple[str, bytes], ...]
    args: tuple[int, ...]
    inputs: int | None
    outputs: int | None
    payload_nbytes: int
    payload_offset: int
    payload_head: bytes

    def spec(self, key: str) -> bytes | None:
        """The value of the compile spec ``key``, or None."""
        return next((value for name, value in self.specs if name == key), None)


@dataclass(frozen=True)
class PlannedBuffer:
    """A block of memory that the method's plan lays tensors into: the id that ``ValueInfo.planned`` refers to
    (from 1; the format reserves 0), its size, and the device that it belongs to."""

    memory_id: int
    nbytes: int
    device: str


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor whose bytes a ``.ptd`` file must hold under ``key``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class MethodInfo:
    """One entry point."""

    name: str
    values: tuple[ValueInfo, ...]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    chains: tuple[Chain, ...]
    islands: tuple[Island, ...]
    operators: tuple[Operator, ...]
    buffers: tuple[PlannedBuffer, ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Every instruction, chain after chain."""
        return tuple(step for chain in self.chains for step in chain.instructions)

    @property
    def delegates(self) -> tuple[str, ...]:
        """The names of the delegates it calls, each once, in order of the first call."""
        return tuple(dict.fromkeys(island.delegate for island in self.islands))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its tensors and buffers, each once, sorted."""
        tensors = {value.device for value in self.values if value.kind == "tensor"}
        return tuple(sorted(tensors | {buffer.device for buffer in self.buffers}))


@dataclass(frozen=True)
class Segment:
    """Raw bytes behind the table: ``offset`` from the start of the file, and size."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class NamedData:
    """Bytes that a delegate may ask for by ``key``."""

    key: str
    segment: int
    nbytes: int


@dataclass(frozen=True)
class ProgramFile:
    """A whole ``.pte``. ``source`` is its path, or "<bytes>"; ``table_nbytes`` the size of the table.

    ``external`` are the tensors that data files must hold. What delegates look up by name in a data file is
    known to them alone and not listed here.
    """

    source: str
    version: int
    nbytes: int
    table_nbytes: int
    methods: tuple[MethodInfo, ...]
    segments: tuple[Segment, ...]
    named_data: tuple[NamedData, ...]
    external: tuple[ExternalTensor, ...]

    def __getitem__(self, name: str) -> MethodInfo:
        """The method called ``name``; raises KeyError."""
        for method in self.methods:
            if method.name == name:
                return method
        raise KeyError(name)

    @property
    def delegates(self) -> tuple[str, ...]:
        """The names of the delegates that its methods call, each once."""
        return tuple(dict.fromkeys(name for method in self.methods for name in method.delegates))


@dataclass(frozen=True)
class DataEntry:
    """Bytes of a data file: ``key``, place in the file, size; and the tensor they are, where the file says
    so (else ``dtype`` is None)."""

    key: str
    offset: int
    nbytes: int
    dtype: str | None
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]


@dataclass(frozen=True)
class DataFile:
    """A whole ``.ptd``."""

    source: str
    version: int
    nbytes: int
    entries: tuple[DataEntry, ...]

    def __getitem__(self, key: str) -> DataEntry:
        """The entry under ``key``; raises KeyError."""
        for entry in self.entries:
            if entry.key == key:
                return entry
        raise KeyError(key)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(entry.key for entry in self.entries)


def read(source: str | os.PathLike[str] | bytes) -> ProgramFile:
    """What the program at the path ``source``, or in the bytes ``source``, holds.

    Raises ProgramError if it cannot be read, is no program, or contradicts itself.
    """
    with _open(source) as file, _malformed(file):
        return _Reader(file, _schema("program")).program()


def read_data(source: str | os.PathLike[str] | bytes) -> DataFile:
    """What the data file (``.ptd``) at the path ``source``, or in the bytes ``source``, holds.

    Raises ProgramError if it cannot be read, is no data file, or contradicts itself.
    """
    with _open(source) as file, _malformed(file):
        return _Reader(file, _schema("flat_tensor")).data()


def _schema(name: str) -> Any:
    # Here and not at the top: NumPy and flatbuffers take longer to import than most programs to read.
    return importlib.import_module(f"._schema.{name}", __package__)


class _File:
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
        do = do or "the file is damaged or was not written by ExecuTorch 1.x; copy or export it again"
        return ProgramError(f"{self.name}, {where}: expected {expected}, got {got}; {do}")


@contextlib.contextmanager
def _open(source: str | os.PathLike[str] | bytes) -> Iterator[_File]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        yield _File("<bytes>", io.BytesIO(data), len(data))
        return
    name = os.fspath(source)
    if not isinstance(name, str):
        raise TypeError(
            f"headrace.pte: expected a path or the bytes of a file, got a path of {type(name).__name__}"
        )
    try:
        # Not blocking: opening a pipe would wait for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProgramError(f"{name}: expected a readable file, got '{reason}'; check the path") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ProgramError(
            f"{name}: expected a regular file, got mode {stat.filemode(status.st_mode)}; "
            "read it into bytes and pass those"
        )
    with open(descriptor, "rb") as stream:
        file = _File(name, stream, status.st_size)
        try:
            yield file
        except OSError as error:
            raise ProgramError(f"{name}: expected to read the file, got '{error}'; copy it again") from error


@contextlib.contextmanager
def _malformed(file: _File) -> Iterator[None]:
    """The generated classes check nothing themselves: an offset beyond the table makes them raise one of
    these. What is ours to check is checked before."""
    try:
        yield
    except (struct.error, ValueError, TypeError, IndexError, OverflowError, AssertionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise file.error(
            "table", "offsets and lengths inside the table", f"'{text}' on following one"
        ) from error


class _Reader:
    """Reads one file; ``schema`` is the module of generated classes."""

    def __init__(self, file: _File, schema: Any) -> None:
        self.file = file
        self.schema = schema
        self.tables_left = _MAX_TABLES
        # Items of vectors and characters of strings. A table may be shared, so that a small file could
        # stand for an enormous one; without sharing the table's own size is the most there can be.
        self.items_left = 0
        self.table = memoryview(b"")
        self.segments: tuple[Segment, ...] = ()
        # Of each constant and each mutable value: the bytes from its start to the end of its segment.
        self.constants: list[int] = []
        self.mutables: list[list[int]] = []
        self.inline: tuple[int, Any] = (0, None)
        # Lists whose members are still to be looked at: value, members, the kinds that these may have.
        self.lists: list[tuple[int, tuple[int, ...], list[str]]] = []

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

    def device(self, holder: Any, where: str) -> str:
        kind = self.name(_DEVICE_TYPES, holder.DeviceType(), f"{where}, device type")
        index = holder.DeviceIndex()
        if index < 0:
            raise self.file.error(f"{where}, device index", "0 or greater", str(index))
        return kind if kind == "cpu" else f"{kind}:{index}"

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
            limit = base + data if data >= 0 else self.file.nbytes
            if end > limit:
                raise self.file.error(
                    f"segment {i}",
                    f"an end within byte {limit}",
                    f"{nbytes} bytes from {base + offset}",
                    "the file is truncated or damaged; copy or export it again",
                )
            found.append(Segment(base + offset, nbytes))
        self.segments = tuple(found)

    # -------------------- a program

    def program(self) -> ProgramFile:
        located = self.locate(b"ET12", b"eh00", "<QQQ", "program (.pte)")
        root = self.schema.Program.GetRootAs(self.table, 0)
        self.read_segments(root, located)
        self.constants = self.constant_sizes(root)
        self.mutables = [
            self.subsegments(entry, f"mutable data {i}")
            for i, entry in self.tables(
                root.MutableDataSegmentsLength(), root.MutableDataSegments, "mutable data"
            )
        ]
        self.inline = root.BackendDelegateDataLength(), root.BackendDelegateData
        named = []
        for i, entry in self.tables(root.NamedDataLength(), root.NamedData, "named data"):
            segment = self.index(
                entry.SegmentIndex(), len(self.segments), "a segment", f"named data {i}, segment"
            )
            key = self.text(entry.Key(), f"named data {i}, key")
            named.append(NamedData(key, segment, self.segments[segment].nbytes))
        methods = tuple(
            self.method(plan, i)
            for i, plan in self.tables(root.ExecutionPlanLength(), root.ExecutionPlan, "method")
        )
        names = [method.name for method in methods]
        if not methods or len(set(names)) != len(names):
            raise self.file.error("methods", "one or more, of different names", str(names))
        return ProgramFile(
            source=self.file.name,
            version=root.Version(),
            nbytes=self.file.nbytes,
            table_nbytes=len(self.table),
            methods=methods,
            segments=self.segments,
            named_data=tuple(named),
            external=self.external(methods),
        )

    def external(self, methods: Sequence[MethodInfo]) -> tuple[ExternalTensor, ...]:
        found: dict[str, ExternalTensor] = {}
        for method in methods:
            for value in method.values:
                if value.location != "external":
                    continue
                where = f"{method.name}, value {value.index}"
                if not value.name or value.dtype is None or value.nbytes is None:
                    raise self.file.error(
                        where, "a named, bounded tensor, for its data is external", str(value)
                    )
                tensor = ExternalTensor(value.name, value.dtype, value.shape, value.nbytes)
                if found.setdefault(value.name, tensor) != tensor:
                    raise self.file.error(where, f"{found[value.name]}, as elsewhere", str(tensor))
        return tuple(found.values())

    def constant_sizes(self, root: Any) -> list[int]:
        """How many bytes there are from the start of each constant; the first entry is reserved."""
        segment = root.ConstantSegment()
        if segment is not None:
            found = self.subsegments(segment, "constants")
            if found:
                if root.ConstantBufferLength():
                    raise self.file.error("constants", "a segment or inline buffers", "both")
                return found
        return [
            buffer.StorageLength()
            for _, buffer in self.tables(root.ConstantBufferLength(), root.ConstantBuffer, "constant")
        ]

    def subsegments(self, entry: Any, where: str) -> list[int]:
        offsets = self.numbers(entry.OffsetsAsNumpy(), f"{where}, offsets")
        if not offsets:
            return []
        nbytes = self.segments[
            self.index(entry.SegmentIndex(), len(self.segments), "a segment", f"{where}, segment")
        ].nbytes
        for offset in offsets:
            if offset > nbytes:
                raise self.file.error(
                    f"{where}, offset", f"at most {nbytes}, the segment's size", str(offset)
                )
        return [nbytes - offset for offset in offsets]

    # -------------------- a method

    def method(self, plan: Any, number: int) -> MethodInfo:
        name = self.text(plan.Name(), f"method {number}, name")
        buffers = self.buffers(plan, name)
        count = plan.ValuesLength()
        values = tuple(
            self.value(entry, i, count, buffers, f"{name}, value {i}")
            for i, entry in self.tables(count, plan.Values, f"{name}, values")
        )
        self.check_lists(values, name)
        inputs = self.indices(plan.InputsAsNumpy(), count, "a value", f"{name}, inputs")
        outputs = self.indices(plan.OutputsAsNumpy(), count, "a value", f"{name}, outputs")
        operators = []
        for i, entry in self.tables(plan.OperatorsLength(), plan.Operators, f"{name}, operators"):
            operator = self.text(entry.Name(), f"{name}, operator {i}, name")
            # As the engine's registry spells it: the overload may be absent or empty.
            overload = self.text(entry.Overload() or b"", f"{name}, operator {i}, overload")
            operators.append(f"{operator}.{overload}" if overload else operator)
        delegates = [
            self.delegate(entry, f"{name}, delegate {i}")
            for i, entry in self.tables(plan.DelegatesLength(), plan.Delegates, f"{name}, delegates")
        ]

        calls = [0] * len(operators)
        islands: list[Island] = []
        # The values that hold something when the walk comes to an instruction.
        held = set(inputs)
        held.update(v.index for v in values if v.location in ("constant", "mutable", "external"))
        chains = []
        for c, chain in self.tables(plan.ChainsLength(), plan.Chains, f"{name}, chains"):
            length = chain.InstructionsLength()
            steps = []
            for i, entry in self.tables(length, chain.Instructions, f"{name}, chain {c}, instructions"):
                step, used = self.instruction(
                    entry, i, length, values, operators, delegates, f"{name}, chain {c}, instruction {i}"
                )
                if step.kind == "kernel":
                    calls[used] += 1
                elif step.kind == "delegate":
                    islands.append(
                        self.island(
                            delegates[used],
                            len(islands),
                            c,
                            step,
                            values,
                            held,
                            f"{name}, island {len(islands)}",
                        )
                    )
                held.update(step.args)
                steps.append(step)
            chains.append(
                Chain(
                    self.indices(chain.InputsAsNumpy(), count, "a value", f"{name}, chain {c}, inputs"),
                    self.indices(chain.OutputsAsNumpy(), count, "a value", f"{name}, chain {c}, outputs"),
                    tuple(steps),
                )
            )
        return MethodInfo(
            name=name,
            values=values,
            inputs=tuple(values[i] for i in inputs),
            outputs=tuple(values[i] for i in outputs),
            chains=tuple(chains),
            islands=tuple(islands),
            operators=tuple(map(Operator, operators, calls)),
            buffers=buffers,
        )

    def buffers(self, plan: Any, name: str) -> tuple[PlannedBuffer, ...]:
        sizes = self.numbers(plan.NonConstBufferSizesAsNumpy(), f"{name}, planned buffers")
        devices = ["cpu"] * len(sizes)
        for i, entry in self.tables(
            plan.NonConstBufferDeviceLength(), plan.NonConstBufferDevice, f"{name}, buffer devices"
        ):
            where = f"{name}, buffer device {i}"
            which = self.index(entry.BufferIdx(), len(sizes), "a buffer", where)
            devices[which] = self.device(entry, where)
        for i, nbytes in enumerate(sizes):
            if nbytes < 0:
                raise self.file.error(f"{name}, planned buffer {i}", "a size of 0 or greater", str(nbytes))
        return tuple(PlannedBuffer(i, sizes[i], devices[i]) for i in range(1, len(sizes)))

    def value(
        self, entry: Any, index: int, count: int, buffers: Sequence[PlannedBuffer], where: str
    ) -> ValueInfo:
        types = self.schema.KernelTypes
        kind = entry.ValType()
        union = entry.Val()
        if union is None:
            raise self.file.error(where, "a value", "none")

        def as_(name: str) -> Any:
            found = getattr(self.schema, name)()
            found.Init(union.Bytes, union.Pos)
            return found

        if kind == types.Tensor:
            return self.tensor(as_("Tensor"), index, buffers, where)
        if kind == types.Null:
            return ValueInfo(index, "none")
        if kind == types.Int:
            return ValueInfo(index, "int", as_("Int").IntVal())
        if kind == types.Bool:
            return ValueInfo(index, "bool", bool(as_("Bool").BoolVal()))
        if kind == types.Double:
            return ValueInfo(index, "float", as_("Double").DoubleVal())
        if kind == types.String:
            return ValueInfo(index, "string", self.text(as_("String").StringVal(), where))
        if kind == types.DoubleList:
            return ValueInfo(index, "list", self.numbers(as_("DoubleList").ItemsAsNumpy(), where))
        if kind == types.BoolList:
            return ValueInfo(index, "list", self.numbers(as_("BoolList").ItemsAsNumpy(), where))
        # The runtime keeps these as indices, so that a list sees what later happens to its members.
        for name, least, members in (
            ("IntList", 0, "int"),
            ("TensorList", 0, "tensor"),
            ("OptionalTensorList", -1, "tensor or none"),
        ):
            if kind == getattr(types, name):
                items = self.indices(as_(name).ItemsAsNumpy(), count, "a value", where, least)
                self.lists.append((index, items, members.split(" or ")))
                return ValueInfo(index, "list", items)
        raise self.file.error(
            f"{where}, type", f"a code from {types.Null} to {types.OptionalTensorList}", str(kind)
        )

    def check_lists(self, values: Sequence[ValueInfo], name: str) -> None:
        """Members may stand behind the list that refers to them: they are looked at when all are there."""
        for index, items, members in self.lists:
            for item in items:
                if item >= 0 and values[item].kind not in members:
                    raise self.file.error(
                        f"{name}, value {index}, a list",
                        f"members of kind {' or '.join(members)}",
                        f"value {item} of kind {values[item].kind}",
                    )
        self.lists.clear()

    def tensor(self, tensor: Any, index: int, buffers: Sequence[PlannedBuffer], where: str) -> ValueInfo:
        dtype = self.dtype(tensor.ScalarType(), where)
        dynamism = self.name(_DYNAMISM, tensor.ShapeDynamism(), f"{where}, dynamism")
        shape, dim_order, nbytes = self.layout(tensor, dtype, dynamism, where)
        name, device, external, segment = None, "cpu", False, 0
        extra = tensor.ExtraTensorInfo()
        if extra is not None:
            raw = extra.FullyQualifiedName()
            name = self.text(raw, f"{where}, name") if raw else None
            device = self.device(extra, where)
            external = (
                self.name(("segment", "external"), extra.Location(), f"{where}, location") == "external"
            )
            segment = extra.MutableDataSegmentsIdx()

        planned = None
        allocation = tensor.AllocationInfo()
        if allocation is not None:
            planned = (
                allocation.MemoryId(),
                allocation.MemoryOffsetHigh() << 32 | allocation.MemoryOffsetLow(),
            )
            if not 1 <= planned[0] <= len(buffers):
                raise self.file.error(f"{where}, memory id", f"from 1 to {len(buffers)}", str(planned[0]))
            room = buffers[planned[0] - 1].nbytes
            if planned[1] + (nbytes or 0) > room:
                raise self.file.error(
                    f"{where}, memory",
                    f"within the buffer's {room} bytes",
                    f"{nbytes} bytes from {planned[1]}",
                )
        data = tensor.DataBufferIdx()
        if external:
            location = "external"
        elif data:
            location = "mutable" if planned else "constant"
            known = self.constants
            if planned:
                self.index(segment, len(self.mutables), "mutable data", f"{where}, mutable data")
                known = self.mutables[segment]
            room = known[self.index(data, len(known), "data", f"{where}, data")]
            if nbytes is None or nbytes > room:
                raise self.file.error(
                    f"{where}, data", f"at most {room} bytes, the segment ends there", f"{nbytes}"
                )
        else:
            location = "planned" if planned else "unplanned"
        return ValueInfo(
            index,
            "tensor",
            None,
            name,
            dtype.name,
            shape,
            dynamism,
            dim_order,
            nbytes,
            device,
            location,
            planned,
        )

    def dtype(self, code: int, where: str) -> Dtype:
        if code not in DTYPES:
            raise self.file.error(f"{where}, scalar type", f"one of {sorted(DTYPES)}", str(code))
        return DTYPES[code]

    def layout(
        self, holder: Any, dtype: Dtype, dynamism: str, where: str
    ) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
        """Shape, dimension order and size in bytes of a tensor."""
        shape = self.numbers(holder.SizesAsNumpy(), f"{where}, sizes")
        dim_order = self.numbers(holder.DimOrderAsNumpy(), f"{where}, dim_order")
        if len(shape) > _MAX_RANK:
            raise self.file.error(f"{where}, rank", f"at most {_MAX_RANK}", str(len(shape)))
        if sorted(dim_order) != list(range(len(shape))):
            raise self.file.error(
                f"{where}, dim_order", f"each of {len(shape)} dimensions once", str(list(dim_order))
            )
        if dynamism == "unbounded":
            return shape, dim_order, None
        nbytes = dtype.itemsize
        for size in shape:
            if size < 0:
                raise self.file.error(f"{where}, sizes", "0 or greater", str(list(shape)))
            nbytes *= size
        if nbytes >= 1 << 63:
            raise self.file.error(f"{where}, sizes", "less than 2^63 bytes", str(list(shape)))
        return shape, dim_order, nbytes

    # -------------------- what a method runs

    def delegate(self, entry: Any, where: str) -> tuple[str, tuple[tuple[str, bytes], ...], int, int, bytes]:
        """Name, compile specs, and the payload's size, offset in the file and head."""
        name = self.text(entry.Id(), f"{where}, name")
        specs = []
        for i, spec in self.tables(entry.CompileSpecsLength(), entry.CompileSpecs, f"{where}, compile specs"):
            key = self.text(spec.Key(), f"{where}, compile spec {i}, key")
            value = spec.ValueAsNumpy()
            if isinstance(value, int):
                specs.append((key, b""))
            else:
                self.take(len(value), f"{where}, compile spec {i}, value")
                specs.append((key, value.tobytes()))
        processed = entry.Processed()
        if processed is None:
            raise self.file.error(f"{where}, payload", "a reference", "none")
        place = self.name(("inline", "segment"), processed.Location(), f"{where}, payload, location")
        if place == "segment":
            segment = self.segments[
                self.index(processed.Index(), len(self.segments), "a segment", f"{where}, payload")
            ]
            offset, nbytes = segment.offset, segment.nbytes
        else:
            count, get = self.inline
            data = get(self.index(processed.Index(), count, "inline data", f"{where}, payload"))
            nbytes = data.DataLength()
            # No accessor tells where a vector lies; 4 is the table's only field.
            offset = data._tab.Vector(data._tab.Offset(4)) if nbytes else 0
            if offset + nbytes > len(self.table):
                raise self.file.error(
                    f"{where}, payload", "an end within the table", f"{nbytes} bytes from {offset}"
                )
        return name, tuple(specs), nbytes, offset, self.file.read(offset, min(nbytes, PAYLOAD_HEAD_NBYTES))

    def instruction(
        self,
        entry: Any,
        index: int,
        length: int,
        values: Sequence[ValueInfo],
        operators: Sequence[str],
        delegates: Sequence[tuple[str, Any, int, int, bytes]],
        where: str,
    ) -> tuple[Instruction, int]:
        """The instruction, and the index of the operator or delegate it calls (else -1)."""
        kinds = self.schema.InstructionArguments
        kind = entry.InstrArgsType()
        union = entry.InstrArgs()
        if union is None:
            raise self.file.error(where, "an instruction", "none")

        def as_(name: str) -> Any:
            found = getattr(self.schema, name)()
            found.Init(union.Bytes, union.Pos)
            return found

        count = len(values)
        if kind == kinds.KernelCall:
            call = as_("KernelCall")
            used = self.index(call.OpIndex(), len(operators), "an operator", f"{where}, operator")
            args = self.indices(call.ArgsAsNumpy(), count, "a value", f"{where}, arguments")
            return Instruction(index, "kernel", operators[used], args), used
        if kind == kinds.DelegateCall:
            call = as_("DelegateCall")
            used = self.index(call.DelegateIndex(), len(delegates), "a delegate", f"{where}, delegate")
            args = self.indices(call.ArgsAsNumpy(), count, "a value", f"{where}, arguments")
            return Instruction(index, "delegate", delegates[used][0], args), used
        if kind == kinds.MoveCall:
            call = as_("MoveCall")
            args = tuple(self.index(v, count, "a value", where) for v in (call.MoveFrom(), call.MoveTo()))
            return Instruction(index, "move", None, args), -1
        if kind == kinds.JumpFalseCall:
            call = as_("JumpFalseCall")
            condition = self.index(call.CondValueIndex(), count, "a value", f"{where}, condition")
            if values[condition].kind not in ("bool", "tensor"):
                raise self.file.error(f"{where}, condition", "a bool or a tensor", values[condition].kind)
            # One past the last instruction ends the chain.
            destination = self.index(
                call.DestinationInstruction(), length + 1, "an instruction", f"{where}, destination"
            )
            return Instruction(index, "jump", None, (condition,), destination), -1
        if kind == kinds.FreeCall:
            freed = self.index(as_("FreeCall").ValueIndex(), count, "a value", where)
            if values[freed].kind != "tensor":
                raise self.file.error(where, "a tensor to free", values[freed].kind)
            return Instruction(index, "free", None, (freed,)), -1
        raise self.file.error(
            f"{where}, type", f"a code from {kinds.KernelCall} to {kinds.FreeCall}", str(kind)
        )

    def island(
        self,
        delegate: tuple[str, tuple[tuple[str, bytes], ...], int, int, bytes],
        index: int,
        chain: int,
        step: Instruction,
        values: Sequence[ValueInfo],
        held: set[int],
        where: str,
    ) -> Island:
        name, specs, nbytes, offset, head = delegate
        inputs = _derived_inputs([values[arg] for arg in step.args], held)
        for key, value in specs:
            if key == INPUTS_SPEC:
                if not value.isdigit() or len(value) > 9 or int(value) > len(step.args):
                    raise self.file.error(
                        f"{where}, compile spec {INPUTS_SPEC}",
                        f"a number up to {len(step.args)}, the island's arguments, in decimal ASCII",
                        f"{value[:40]!r}",
                        "correct the exporter that wrote it",
                    )
                inputs = int(value)
        return Island(
            index=index,
            chain=chain,
            instruction=step.index,
            delegate=name,
            specs=specs,
            args=step.args,
            inputs=inputs,
            outputs=None if inputs is None else len(step.args) - inputs,
            payload_nbytes=nbytes,
            payload_offset=offset,
            payload_head=head,
        )

    # -------------------- a data file

    def data(self) -> DataFile:
        located = self.locate(b"FT01", b"FH01", "<QQQQ", "data file (.ptd)")
        if located is None:
            raise self.file.error("bytes 8 to 11", "b'FH01', a header", "none")
        root = self.schema.FlatTensor.GetRootAs(self.table, 0)
        self.read_segments(root, located)
        entries: dict[str, DataEntry] = {}
        for i, entry in self.tables(root.NamedDataLength(), root.NamedData, "entry"):
            key = self.text(entry.Key(), f"entry {i}, key")
            where = f"entry '{key[:80]}'"
            if key in entries:
                raise self.file.error(where, "each key once", "it twice")
            segment = self.segments[
                self.index(entry.SegmentIndex(), len(self.segments), "a segment", f"{where}, segment")
            ]
            layout = entry.TensorLayout()
            name: str | None = None
            shape: tuple[int, ...] = ()
            dim_order: tuple[int, ...] = ()
            if layout is not None:
                dtype = self.dtype(layout.ScalarType(), where)
                name = dtype.name
                shape, dim_order, nbytes = self.layout(layout, dtype, "static", where)
                if nbytes != segment.nbytes:
                    raise self.file.error(
                        where, f"{nbytes} bytes for {name}{list(shape)}", f"a segment of {segment.nbytes}"
                    )
            entries[key] = DataEntry(key, segment.offset, segment.nbytes, name, shape, dim_order)
        return DataFile(self.file.name, root.Version(), self.file.nbytes, tuple(entries.values()))


def _derived_inputs(args: Sequence[ValueInfo], held: set[int]) -> int | None:
    """How many of an island's arguments are inputs: those that held something before it.

    None where that does not settle it: unless inputs stand before all others, only tensors are left to be
    written, at least one, and no value comes twice (one that is written in place would be both).
    """
    known = [arg.index in held for arg in args]
    inputs = sum(known)
    settled = (
        inputs < len(args)
        and all(known[:inputs])
        and all(arg.kind == "tensor" for arg in args[inputs:])
        and len({arg.index for arg in args}) == len(args)
    )
    return inputs if settled else None
