"""The payload of a TensorRT island: an engine, and what its bindings are called.

::

    32 bytes     magic "TR01" ("TR02" where outputs are written over inputs), offset and size of the metadata,
                 offset of the engine (u32 each), size of the engine (u64), 8 reserved bytes; little-endian
    metadata     JSON, UTF-8
    0 …          up to a multiple of 16
    engine

The format is Torch-TensorRT's (``torch_tensorrt/executorch/serialization.py``). Ours is the key ``headrace`` in the
metadata, which other readers skip: what the engine was built with.

The bytes are untrusted: every number is checked before it is used, and whatever is wrong ends in
:class:`~headrace.errors.ProgramError`. What an engine says of itself only TensorRT can read.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, cast

from ..errors import ProgramError
from . import read as read_program
from .table import Source, opened

__all__ = [
    "DELEGATE",
    "DTYPES",
    "KINDS",
    "MAGIC",
    "MAGIC_ALIASED",
    "Aliased",
    "Binding",
    "Blob",
    "Built",
    "Engine",
    "islands",
    "read",
    "write",
]

DELEGATE = "TensorRTBackend"
MAGIC = b"TR01"
MAGIC_ALIASED = b"TR02"
KINDS = ("kv_cache_update", "user")
"""Who wants an output written over an input: TensorRT, for a cache of keys and values, or the model's author."""
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""TensorRT's ``DataType`` by name, and PyTorch's names of those that an island's tensors can have."""

_HEADER = struct.Struct("<4sIIIQ8s")
_ALIGNMENT = 16
# Byte 0: the version of the layout. Torch-TensorRT writes 1 and reads anything; its C++ tests write 0.
_RESERVED = (b"\1" + bytes(7), bytes(8))
_MAX_METADATA_NBYTES = 1 << 24
# The deepest that is written has 4 levels. Python's own limit depends on how deep the caller stands.
_MAX_DEPTH = 32
_MAX_DIGITS = 19
_MAX_NAME_NBYTES = 4096
# nvinfer1::Dims::MAX_DIMS
_MAX_RANK = 8
_JOINED = "%"
_NUMBERED = re.compile(r"outputs?[_.]?(0|[1-9][0-9]*)")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_SURROGATES = re.compile("[\ud800-\udfff]")
_AGAIN = "export it again"


@dataclass(frozen=True)
class Binding:
    """One tensor of the engine. ``dtype`` (of the values of `DTYPES`) may be empty, and ``shape`` too: unknown, or a scalar. In a shape
    -1 is a size that varies."""

    name: str
    is_input: bool
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Aliased:
    """The engine writes ``output`` over ``input``: they have one address. ``kind`` is one of `KINDS`."""

    output: str
    input: str
    kind: str = "kv_cache_update"


@dataclass(frozen=True)
class Built:
    """What built an engine. ``runtime``: the Python module, ``"tensorrt"`` or ``"tensorrt_rtx"``; ``version``: its
    version, such as ``"1.7.1.116"``; ``capabilities``: the compute capabilities that it was built for, such as
    ``"8.6"``, none where it was built for all that the runtime has; ``version_compatible``: whether it was built to be
    loaded by other versions too, the lean runtime among them."""

    runtime: str
    version: str
    capabilities: tuple[str, ...] = ()
    version_compatible: bool = False


@dataclass(frozen=True)
class Blob:
    """A payload. ``engine`` is a view into the bytes that were read.

    ``bindings`` has the inputs in the order of the island's arguments, and the outputs in theirs, which come after; it
    is empty where the engine's own order is meant. ``built`` is None where the writer did not say. ``extra`` has the
    metadata's other keys.
    """

    bindings: tuple[Binding, ...]
    engine: memoryview = field(repr=False)
    aliased: tuple[Aliased, ...] = ()
    hardware_compatible: bool = False
    device_id: int = 0
    serialized_metadata: str = ""
    target_platform: str = ""
    built: Built | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Binding, ...]:
        return tuple(b for b in self.bindings if b.is_input)

    @property
    def outputs(self) -> tuple[Binding, ...]:
        return tuple(b for b in self.bindings if not b.is_input)


def read(data: bytes | bytearray | memoryview) -> Blob:
    """The payload ``data``, checked.

    Unknown keys of the metadata are kept in `Blob.extra`; in a binding or an alias they are refused, for they could
    change what is computed. A name such as ``"a%b"`` is two bindings. Aliases are read under either magic.

    Raises ProgramError: what is wrong, and where.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        _fail("bytes", type(data).__name__, "pass the payload of an island")
    view = memoryview(data).cast("B")
    nbytes = len(view)
    if nbytes < _HEADER.size:
        _fail(f"a header of {_HEADER.size} bytes", f"{nbytes} bytes", "the file is truncated; copy it again")
    magic, metadata, metadata_nbytes, engine, engine_nbytes, reserved = _HEADER.unpack_from(view)
    if magic not in (MAGIC, MAGIC_ALIASED):
        _fail(
            f"the magic {MAGIC!r} or {MAGIC_ALIASED!r}",
            repr(magic),
            "the payload is no engine of Torch-TensorRT or headrace, or of a newer format; export it for this version",
        )
    if reserved not in _RESERVED:
        _fail("reserved bytes 01 00 … or 00 …", reserved.hex(" "), "it is damaged, or of a newer format")
    if metadata < _HEADER.size or metadata + metadata_nbytes > nbytes:
        _fail(
            f"metadata between byte {_HEADER.size} and the end, {nbytes}",
            f"{metadata_nbytes} bytes from {metadata}",
        )
    if metadata_nbytes > _MAX_METADATA_NBYTES:
        _fail(f"at most {_MAX_METADATA_NBYTES} bytes of metadata", str(metadata_nbytes))
    if engine % _ALIGNMENT:
        _fail(f"an engine at a multiple of {_ALIGNMENT}", f"one at byte {engine}")
    if engine < metadata + metadata_nbytes or engine + engine_nbytes > nbytes:
        _fail(
            f"an engine between byte {metadata + metadata_nbytes}, where the metadata ends, and {nbytes}",
            f"{engine_nbytes} bytes from {engine}",
            "the file is truncated or damaged; copy it again",
        )
    if not engine_nbytes:
        _fail("an engine", "none: its size is 0")
    for start, end in (
        (_HEADER.size, metadata),
        (metadata + metadata_nbytes, engine),
        (engine + engine_nbytes, nbytes),
    ):
        if view[start:end].tobytes().strip(b"\0"):
            _fail("zeros around metadata and engine", f"other bytes between {start} and {end}")
    found = _metadata(view[metadata : metadata + metadata_nbytes].tobytes())
    blob = _blob(found, view[engine : engine + engine_nbytes])
    if magic == MAGIC_ALIASED and not blob.aliased:
        _fail(f"aliases, for the magic is {magic!r}", "none")
    return blob


@dataclass(frozen=True)
class Engine:
    """An island of a program: the method, the position of its call in the instructions, its payload."""

    method: str
    instruction: int
    blob: Blob


def islands(source: Source) -> tuple[Engine, ...]:
    """TensorRT's islands in the program at the path ``source``, or in the bytes ``source``, in order.

    Raises ProgramError if the program cannot be read, or a payload in it is not understood.
    """
    file = read_program(source)
    found = []
    for method in file.methods:
        for island in method.islands:
            if island.delegate != DELEGATE:
                continue
            with opened(source) as stream:
                payload = stream.read(island.payload_offset, island.payload_nbytes)
            try:
                found.append(Engine(method.name, island.instruction, read(payload)))
            except ProgramError as error:
                where = f"{file.source}, method {method.name!r}, instruction {island.instruction}"
                raise ProgramError(f"{where}, delegate '{DELEGATE}': {error}") from None
    return tuple(found)


def write(
    engine: bytes | bytearray | memoryview,
    bindings: Iterable[Binding],
    aliased: Iterable[Aliased] = (),
    *,
    hardware_compatible: bool = False,
    device_id: int = 0,
    serialized_metadata: str = "",
    target_platform: str = "",
    built: Built | None = None,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """A payload: ``TR02`` if there are aliases, else ``TR01``. `read` gives back what it was made of.

    Raises ProgramError where `read` would refuse it.
    """
    aliased = tuple(aliased)
    known: dict[str, Any] = {
        # Torch-TensorRT's reader in C++ wants the two lists before everything else.
        "io_bindings": [
            {"name": b.name, "dtype": b.dtype, "shape": list(b.shape), "is_input": b.is_input}
            for b in bindings
        ],
        "aliased_io": [asdict(a) for a in aliased],
        "hardware_compatible": hardware_compatible,
        "device_id": device_id,
        "serialized_metadata": serialized_metadata,
        "target_platform": target_platform,
    }
    if built is not None:
        known["headrace"] = asdict(built)
    for key, value in (extra or {}).items():
        if key in known or key == "headrace":
            _fail("keys of one's own", f"extra {key!r}", "rename it")
        known[key] = value
    try:
        metadata = json.dumps(known, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        _fail("what JSON can say", f"'{error}'")
    start = (_HEADER.size + len(metadata) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    magic = MAGIC_ALIASED if aliased else MAGIC
    header = _HEADER.pack(magic, _HEADER.size, len(metadata), start, len(engine), _RESERVED[0])
    data = (header + metadata).ljust(start, b"\0") + engine
    read(data)
    return data


def _fail(expected: str, got: str, do: str = _AGAIN, where: str = "header") -> NoReturn:
    got = got if len(got) <= 200 else f"{got[:200]}…"
    raise ProgramError(f"TensorRT payload, {where}: expected {expected}, got {got}; {do}")


# -------------------- the metadata


def _metadata(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``: of bounded depth, every key once, no number that is none."""

    def refuse(expected: str, got: str) -> NoReturn:
        _fail(expected, got, where="metadata")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            names = [key for key, _ in items]
            refuse("each key once", f"{next(n for n in names if names.count(n) > 1)!r} twice")
        return made

    def integer(digits: str) -> int:
        if len(digits.lstrip("-")) > _MAX_DIGITS:
            refuse(f"numbers of at most {_MAX_DIGITS} digits", digits)
        return int(digits)

    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        refuse("UTF-8", f"'{error.reason}' at byte {error.start}")
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0)
        if depth > _MAX_DEPTH:
            refuse(f"at most {_MAX_DEPTH} lists and objects in each other", "more")
    try:
        found = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_constant=lambda name: refuse("numbers", name),
        )
    except (ValueError, RecursionError) as error:
        refuse("JSON", f"'{error}'")
    if not isinstance(found, dict):
        refuse("a JSON object", type(found).__name__)
    return found


def _take(found: dict[str, Any], key: str, kind: type, default: Any, where: str = "metadata") -> Any:
    """The value under ``key``, removed. Without a default it has to be there."""
    if key not in found:
        if default is None:
            _fail(f"the key '{key}'", "none", where=where)
        return default
    value = found.pop(key)
    # bool is an int in Python, not here.
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        names = {str: "a string", bool: "true or false", int: "an integer", list: "a list", dict: "an object"}
        _fail(names[kind], repr(value), where=f"{where}, '{key}'")
    if isinstance(value, str):
        _text(value, f"{where}, '{key}'")
    return value


def _text(value: str, where: str) -> None:
    if _SURROGATES.search(value):
        _fail("text that can be encoded", repr(value), where=where)


def _entries(found: dict[str, Any], key: str, default: Any) -> Iterable[tuple[dict[str, Any], str]]:
    for i, entry in enumerate(_take(found, key, list, default)):
        where = f"metadata, {key} {i}"
        if not isinstance(entry, dict):
            _fail("an object", repr(entry), where=where)
        entry = dict(entry)
        yield entry, where
        if entry:
            _fail("known keys alone", repr(next(iter(entry))), where=where)


def _names(name: str, where: str) -> list[str]:
    """The names that ``name`` stands for: some versions join them."""
    names = [part for part in name.split(_JOINED) if part]
    if not names:
        _fail("a name", repr(name), where=where)
    for each in names:
        if len(each.encode()) > _MAX_NAME_NBYTES or "\0" in each:
            _fail(f"a name of at most {_MAX_NAME_NBYTES} bytes, none of them 0", repr(each), where=where)
    return names


def _binding(entry: dict[str, Any], where: str) -> list[Binding]:
    name = _take(entry, "name", str, None, where)
    is_input = _take(entry, "is_input", bool, None, where)
    dtype = _take(entry, "dtype", str, "", where).removeprefix("torch.")
    shape = _take(entry, "shape", list, [], where)
    names = _names(name, f"{where}, name")
    where = f"{where} '{names[0][:80]}'"
    if dtype and dtype not in DTYPES.values():
        _fail(f"a dtype of {', '.join(DTYPES.values())}", repr(dtype), where=where)
    if len(shape) > _MAX_RANK:
        _fail(f"at most {_MAX_RANK} dimensions", str(len(shape)), where=where)
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not -1 <= size < 1 << 31:
            _fail("sizes from 0 to 2^31 - 1, or -1 for one that varies", repr(shape), where=where)
    if len(names) > 1 and (dtype or shape):
        _fail("no dtype and no shape for joined names", f"{dtype} {shape}", where=where)
    return [Binding(each, is_input, dtype, tuple(shape)) for each in names]


def _check_bindings(bindings: Sequence[Binding]) -> None:
    seen = set()
    for binding in bindings:
        if binding.name in seen:
            _fail("each name once", f"{binding.name!r} twice", where="metadata, io_bindings")
        seen.add(binding.name)
    outputs = [b.name for b in bindings if not b.is_input]
    if bindings and not outputs:
        _fail("an output", "none", where="metadata, io_bindings")
    # Torch-TensorRT numbers outputs by the arguments that they are; out of turn they would be exchanged.
    numbers = [_NUMBERED.fullmatch(name) for name in outputs]
    if all(numbers):
        order = [int(cast("re.Match[str]", number)[1][:_MAX_DIGITS]) for number in numbers]
        if order != list(range(len(order))):
            _fail(
                f"outputs numbered 0 to {len(order) - 1} in order",
                ", ".join(outputs),
                where="metadata, io_bindings",
            )


def _alias(entry: dict[str, Any], where: str, names: Mapping[str, bool]) -> Aliased:
    output = _take(entry, "output", str, None, where)
    source = _take(entry, "input", str, None, where)
    kind = _take(entry, "kind", str, KINDS[0], where)
    if kind not in KINDS:
        _fail(
            f"a kind of {', '.join(KINDS)}",
            repr(kind),
            "it is of a newer format; export it for this version",
            where,
        )
    for name, is_input in ((output, False), (source, True)):
        if names.get(name) is not is_input:
            _fail(
                f"the name of an {'input' if is_input else 'output'} of io_bindings", repr(name), where=where
            )
    return Aliased(output, source, kind)


def _built(found: dict[str, Any]) -> Built | None:
    entry = _take(found, "headrace", dict, {})
    if not entry:
        return None
    where = "metadata, headrace"
    entry = dict(entry)
    built = Built(
        _take(entry, "runtime", str, None, where),
        _take(entry, "version", str, None, where),
        tuple(_take(entry, "capabilities", list, [], where)),
        _take(entry, "version_compatible", bool, False, where),
    )
    for text in (built.runtime, built.version, *built.capabilities):
        if not isinstance(text, str) or not re.fullmatch(r"[0-9A-Za-z_.+-]{1,80}", text):
            _fail("short names and versions", repr(text), where=where)
    if entry:
        _fail("known keys alone", repr(next(iter(entry))), where=where)
    return built


def _blob(found: dict[str, Any], engine: memoryview) -> Blob:
    bindings: list[Binding] = []
    for entry, where in _entries(found, "io_bindings", None):
        bindings += _binding(entry, where)
    _check_bindings(bindings)
    names = {b.name: b.is_input for b in bindings}
    aliased = [_alias(entry, where, names) for entry, where in _entries(found, "aliased_io", [])]
    for side in ("output", "input"):
        given = [getattr(a, side) for a in aliased]
        if len(set(given)) != len(given):
            # Two writers of one address: the later one wins and nobody hears of it.
            _fail(f"each {side} in one alias", str(given), where="metadata, aliased_io")
    device_id = _take(found, "device_id", int, 0)
    if not 0 <= device_id < 1 << 16:
        _fail("a GPU's number", str(device_id), where="metadata, 'device_id'")
    return Blob(
        tuple(bindings),
        engine,
        tuple(aliased),
        _take(found, "hardware_compatible", bool, False),
        device_id,
        _take(found, "serialized_metadata", str, ""),
        _take(found, "target_platform", str, ""),
        _built(found),
        found,
    )
