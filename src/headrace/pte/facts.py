"""What a file says, as frozen dataclasses; and the element types that both formats know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
