"""GPU code inside host files: which architectures, SASS or PTX, compressed or not; and written. No CUDA tool is used.

nvcc puts *fat binaries* into the sections ``.nv_fatbin`` and ``__nv_relfatbin`` (the toolkit's header
``fatbinary_section.h`` names both). NVIDIA documents neither container nor entry. What is relied on here
agrees between the public descriptions of n-eiling/cuda-fatbin-decompression and GrigoryEvko/nvopen-tools,
and was compared with what nvcc 13.0 wrote for known ``-gencode`` and ``--compress-mode`` options
(tests/audit/fatbins holds those files and the script that made them)::

    container   u32 0xBA55ED50, u16 version 1, u16 header bytes (16), u64 bytes of all entries
    entry       u16 kind (1 PTX, 2 SASS as an ELF file, 8 LTO-IR, 16 SASS), u16,
                u32 header bytes (64 or more), u64 stored bytes (padded to 8), u32 compressed bytes, u32,
                u16 minor, u16 major, u32 architecture, u32, u32, u64 flags, u64, u64 bytes uncompressed
    flags       0x2000 LZ4 block, 0x8000 zstd, 0x100000 architecture suffix 'a', 0x200000 suffix 'f'

Containers follow each other, zero bytes between them. Every length comes from the file and is checked
against what is left of it before it is used.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["FATBIN_SECTIONS", "FatBinaries", "GpuCode", "embedded", "read", "unpack_lz4", "write"]

FATBIN_SECTIONS: Final = (".nv_fatbin", "__nv_relfatbin", ".nv_relfatbin")
MAGIC: Final = b"\x50\xed\x55\xba"
_CONTAINER: Final = struct.Struct("<4sHHQ")
_ENTRY: Final = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS: Final = {1: "ptx", 2: "sass", 8: "ltoir", 16: "sass"}
_LZ4, _ZSTD, _SPECIFIC, _FAMILY = 0x2000, 0x8000, 0x100000, 0x200000
# For 64 bits, for Linux.
_WRITTEN: Final = 0x11
#: More uncompressed bytes than one entry of any known library; a larger claim is not unpacked.
_UNPACK_LIMIT: Final = 64 << 20


@dataclass(frozen=True, order=True)
class GpuCode:
    """All entries of one sort in one file.

    ``arch`` is ``sm_90a`` for SASS and ``compute_90`` for PTX and LTO-IR; ``compression`` is ``none``,
    ``lz4`` or ``zstd``; ``count`` is how many entries, ``nbytes`` how many bytes they take in the file.
    """

    kind: str
    arch: str
    compression: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class FatBinaries:
    """What was read: the code, why reading stopped early (empty when it did not), the kernels that were
    asked for and seen, and how many entries could not be looked into for kernels."""

    code: tuple[GpuCode, ...]
    faults: tuple[str, ...]
    kernels: frozenset[str] = frozenset()
    opaque: int = 0


@dataclass(frozen=True)
class _Entry:
    kind: str
    arch: str
    compression: str
    stored: memoryview
    nbytes: int
    unpacked_nbytes: int


def read(data: memoryview, kernels: frozenset[str] = frozenset()) -> FatBinaries:
    """Every container of one section. A fault ends the reading and is told; it does not raise.

    ``kernels`` are mangled names to look for in the code itself.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    found: set[str] = set()
    opaque = 0
    faults: list[str] = []
    try:
        for entry in _entries(data):
            sort = (entry.kind, entry.arch, entry.compression)
            counts[sort] += 1
            sizes[sort] += entry.nbytes
            if kernels - found:
                payload = _unpacked(entry)
                if payload is None:
                    opaque += 1
                else:
                    found |= _kernels_in(entry.kind, payload, kernels - found)
    except _Malformed as fault:
        faults.append(str(fault))
    if not counts and not faults:
        faults.append("no GPU code in it")
    code = tuple(sorted(GpuCode(*sort, count=counts[sort], nbytes=sizes[sort]) for sort in counts))
    return FatBinaries(code, tuple(faults), frozenset(found), opaque)


def embedded(data: memoryview) -> Iterator[memoryview]:
    """Whole containers in data that is no fat binary section, such as an array in ``.rodata``. Only a
    container that fits and whose entries all read is taken, so that a chance magic number is not."""
    # A regular expression searches a view without copying it.
    for match in re.finditer(re.escape(MAGIC), data):
        start = match.start()
        if len(data) - start < _CONTAINER.size:
            continue
        _, version, header, nbytes = _CONTAINER.unpack_from(data, start)
        if version != 1 or header != _CONTAINER.size or nbytes > len(data) - start - header:
            continue
        container = data[start : start + header + nbytes]
        if not read(container).faults:
            yield container


def write(machine: Sequence[tuple[str, bytes]], ptx: tuple[str, bytes] | None = None) -> bytes:
    """A fat binary of machine code (``("sm_90a", an ELF file)``, each for another architecture) and PTX
    (``("compute_80", text)``), uncompressed: what NVIDIA's ``fatbinary`` writes of the same files with
    ``--compress=false``, byte for byte.

    Raises ValueError for what is no such file or no such name.
    """
    entries = b"".join(_written(name, code) for name, code in [*machine, *([ptx] if ptx else [])])
    return _CONTAINER.pack(MAGIC, 1, _CONTAINER.size, len(entries)) + entries


def _written(name: str, code: bytes) -> bytes:
    found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name)
    if found is None:
        raise ValueError(f"fat binary: expected a name such as sm_90a or compute_80, got {name!r}; name one")
    flags = _WRITTEN | {"": 0, "a": _SPECIFIC, "f": _FAMILY}[found[3]]
    if found[1] == "sm":
        if code[:4] != b"\x7fELF" or len(code) < 64:
            raise ValueError(f"fat binary, {name}: expected an ELF file, got {code[:4]!r}; pass a cubin")
        # Of an ELF file the version is that of its ABI.
        kind, version, more = 2, (code[8], 1), b""
    else:
        stated = re.search(rb"^\s*\.version\s+(\d+)\.(\d+)", code, re.MULTILINE)
        if stated is None:
            raise ValueError(
                f"fat binary, {name}: expected PTX with a .version, got {code[:32]!r}; name it sm_ if it is a cubin"
            )
        # Where options for the assembler would be, in the header: none.
        kind, version, more = 1, (int(stated[2]), int(stated[1])), struct.pack("<QQ", 72, 0)
        code += b"\0"
    padded = code + bytes(-len(code) % 8)
    header = _ENTRY.size + len(more)
    entry = _ENTRY.pack(
        kind, 0x101, header, len(padded), 0, 64 if more else 0, *version, int(found[2]), 0, 0, flags, 0, 0
    )
    return entry + more + padded


class _Malformed(Exception):
    """The bytes are no fat binary, or a cut one."""


def _entries(data: memoryview) -> Iterator[_Entry]:
    offset = 0
    while offset < len(data):
        if bytes(data[offset : offset + 4]) != MAGIC:
            gap = re.compile(rb"\x00+").match(data, offset)
            if gap is None:
                raise _Malformed(f"no fat binary header at byte {offset}")
            offset = gap.end()
            continue
        if len(data) - offset < _CONTAINER.size:
            raise _Malformed(f"a header is cut at byte {offset}")
        _, version, header, nbytes = _CONTAINER.unpack_from(data, offset)
        if version != 1 or header < _CONTAINER.size:
            raise _Malformed(f"unknown fat binary version {version} at byte {offset}")
        end = offset + header + nbytes
        if end > len(data):
            raise _Malformed(f"a fat binary at byte {offset} claims {nbytes} bytes, past the section's end")
        offset += header
        while offset < end:
            entry, offset = _entry(data, offset, end)
            yield entry


def _entry(data: memoryview, offset: int, end: int) -> tuple[_Entry, int]:
    if end - offset < _ENTRY.size:
        raise _Malformed(f"an entry is cut at byte {offset}")
    number, _, header, padded, compressed, _, _, _, arch, _, _, flags, _, unpacked = _ENTRY.unpack_from(
        data, offset
    )
    if header < _ENTRY.size or header + padded > end - offset:
        raise _Malformed(f"an entry at byte {offset} claims more bytes than its fat binary has")
    if number not in _KINDS:
        raise _Malformed(f"an entry at byte {offset} is of unknown kind {number}")
    kind = _KINDS[number]
    compression = "zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else "none"
    nbytes = min(compressed, padded) if compression != "none" and compressed else padded
    suffix = "f" if flags & _FAMILY else "a" if flags & _SPECIFIC else ""
    start = offset + header
    entry = _Entry(
        kind=kind,
        arch=f"{'sm' if kind == 'sass' else 'compute'}_{arch}{suffix}",
        compression=compression,
        stored=data[start : start + nbytes],
        nbytes=padded,
        unpacked_nbytes=unpacked,
    )
    return entry, start + padded


def _unpacked(entry: _Entry) -> memoryview | None:
    """The entry's code, or None when it cannot be unpacked here."""
    if entry.compression == "none":
        return entry.stored
    if entry.unpacked_nbytes > _UNPACK_LIMIT:
        return None
    if entry.compression == "lz4":
        return unpack_lz4(entry.stored, entry.unpacked_nbytes)
    return _unpack_zstd(entry.stored, entry.unpacked_nbytes)


def unpack_lz4(data: memoryview, limit: int) -> memoryview | None:
    """One LZ4 block (lz4_Block_format.md of the LZ4 project), at most ``limit`` bytes; None if it is
    malformed."""
    out = bytearray()
    position = 0
    try:
        while position < len(data):
            token = data[position]
            position += 1
            length, position = _lz4_length(data, position, token >> 4)
            out += data[position : position + length]
            position += length
            if position >= len(data) or len(out) > limit:
                break
            distance = data[position] | data[position + 1] << 8
            length, position = _lz4_length(data, position + 2, token & 15)
            length += 4
            if not 0 < distance <= len(out) or len(out) + length > limit:
                return None
            # A match may overlap what it makes: the last ``distance`` bytes repeat.
            pattern = bytes(out[-distance:])
            out += (pattern * (length // distance + 1))[:length]
    except IndexError:
        return None
    return memoryview(bytes(out)) if len(out) <= limit else None


def _lz4_length(data: memoryview, position: int, nibble: int) -> tuple[int, int]:
    length = nibble
    if nibble == 15:
        while True:
            more = data[position]
            position += 1
            length += more
            if more != 255:
                break
    return length, position


def _unpack_zstd(data: memoryview, limit: int) -> memoryview | None:
    """By the standard library from Python 3.14 on; None before it, or when the bytes are malformed."""
    try:
        from compression import zstd
    except ImportError:
        return None
    try:
        return memoryview(zstd.ZstdDecompressor().decompress(bytes(data), max_length=limit))
    except zstd.ZstdError:
        return None


def _kernels_in(kind: str, payload: memoryview, names: frozenset[str]) -> set[str]:
    """A kernel is a section ``.text.NAME`` of the GPU's ELF file, or an ``.entry NAME`` of PTX."""
    found = set()
    for name in names:
        quoted = re.escape(name.encode())
        pattern = rb"\x00\.text\." + quoted + rb"\x00" if kind == "sass" else rb"\.entry\s+" + quoted + rb"\b"
        if kind != "ltoir" and re.search(pattern, payload):
            found.add(name)
    return found
