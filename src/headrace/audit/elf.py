"""What one ELF file says, as facts. No code of the file runs, and no byte of it is trusted.

pyelftools reads the header, the segments and the section headers. The dynamic table and what it points to
are read straight from the bytes: a symbol table can hold a hundred thousand rows, where an object for each
field takes minutes, and a crafted one claims any number, which has to be doubted before it is read. They are
found as the loader finds them, so a stripped section table, or one that says something else, changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import IO, Any, Final, cast

from headrace.errors import AuditError
from headrace.pte import fatbin
from headrace.pte.fatbin import GpuCode

__all__ = ["ELF_MAGIC", "Import", "Library", "Quest", "read"]

ELF_MAGIC: Final = b"\x7fELF"
EM_CUDA: Final = 190
#: More than the largest libraries hold (libtorch_cuda: 60 tags, 40 sections); past it a file is refused.
_TAG_LIMIT, _ROW_LIMIT, _SYMBOL_LIMIT = 20_000, 70_000, 4_000_000
_MACHINES: Final = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 22: "s390x", 243: "riscv64", 3: "i686"}
_KINDS: Final = {1: "relocatable", 2: "executable", 3: "shared"}
_SHF_ALLOC, _SHF_EXECINSTR = 0x2, 0x4
# Each pattern starts with letters and looks behind after them: the engine then skips to the letters, which
# is several times faster over hundreds of megabytes than looking behind at every byte.
#: The driver's entry points, as they stand in the data of a library that opens the driver itself. A static
#: CUDA run time does so too.
_ENTRY_POINT: Final = re.compile(
    rb"cu(?<!\wcu)(?:Init|GetProcAddress|LaunchKernel|MemcpyHtoD|StreamSynchronize)"
)
#: The driver's file, in data or as the first eight letters in an instruction.
_DRIVER_FILE: Final = re.compile(rb"libcuda\.")
#: The name of a library as dlopen takes it, with or without folders.
_SONAME: Final = re.compile(rb"lib(?<![\x21-\x2e\x30-\x7e]lib)[\w+.-]+\.so(?:\.[0-9]+)*(?=\x00)")


class _Tag(IntEnum):
    """Tags of the dynamic table (the System V ABI's and GNU's)."""

    NEEDED = 1
    HASH = 4
    STRTAB = 5
    SYMTAB = 6
    STRSZ = 10
    SONAME = 14
    RPATH = 15
    INIT_ARRAYSZ = 27
    RUNPATH = 29
    GNU_HASH = 0x6FFFFEF5
    VERSYM = 0x6FFFFFF0
    VERNEED = 0x6FFFFFFE
    VERNEEDNUM = 0x6FFFFFFF


@dataclass(frozen=True)
class Import:
    """A symbol that the file needs. ``version`` and ``library`` are empty where the file ties it to none."""

    name: str
    version: str
    library: str
    weak: bool


@dataclass(frozen=True)
class Quest:
    """What to look for besides the tables: paths of a build machine, and kernels by mangled name."""

    build_path: re.Pattern[bytes] | None = None
    kernels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Library:
    """One ELF file. ``path`` is its place below site-packages once installed; names are as the file spells
    them, and a file without a table has the empty value. ``data_exports`` are those strong ``exports`` that
    are variables. ``opens_cuda``: its data names the driver's file or entry points, as code does that opens
    CUDA without linking to it."""

    path: str
    nbytes: int
    sha256: str
    machine: str
    bits: int
    kind: str
    dynamic: bool = False
    interpreter: bool = False
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    imports: tuple[Import, ...] = ()
    exports: frozenset[str] = frozenset()
    weak_exports: frozenset[str] = frozenset()
    data_exports: frozenset[str] = frozenset()
    version_needs: frozenset[tuple[str, str]] = frozenset()
    static_constructors: int = 0
    executable_stack: bool = False
    gpu_code: tuple[GpuCode, ...] = ()
    gpu_faults: tuple[str, ...] = ()
    kernels: frozenset[str] = frozenset()
    opaque_gpu_entries: int = 0
    build_paths: tuple[str, ...] = ()
    library_names: frozenset[str] = frozenset()
    opens_cuda: bool = False

    @property
    def program(self) -> bool:
        """Whether it is started rather than loaded: nothing links to it, and what it exports is for the
        libraries that it loads (copies of their variables, mostly)."""
        return self.kind == "executable" or self.interpreter

    @property
    def search_path(self) -> tuple[str, ...]:
        """The entries that the loader uses: DT_RPATH counts only where DT_RUNPATH is absent (ld.so(8))."""
        return self.runpath or self.rpath


def read(path: str, data: memoryview, quest: Quest, sha256: str = "") -> Library:
    """The facts of the ELF file in ``data``, whose digest is ``sha256``; an empty one is computed. Raises
    AuditError when it is cut, malformed or oversized."""
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(cast(IO[bytes], _Reader(data)))
        return _Reading(path, data, elf, quest).library(sha256 or hashlib.sha256(data).hexdigest())
    except AuditError:
        raise
    # pyelftools reports malformed input by whatever its parsers meet (its own errors, construct's,
    # AssertionError, UnicodeDecodeError, ...); on untrusted bytes each means that the file is unreadable.
    except Exception as cause:
        raise AuditError(
            f"{path}: an ELF file that cannot be read ({type(cause).__name__}: {cause})"
        ) from cause


class _Reader:
    """A read-only file over a view, for pyelftools; io.BytesIO would copy the whole file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (self._position if whence == 1 else len(self._data) if whence == 2 else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, nbytes: int = -1) -> bytes:
        if self._position < 0 or self._position > len(self._data):
            return b""
        end = len(self._data) if nbytes < 0 else self._position + nbytes
        piece = bytes(self._data[self._position : end])
        self._position += len(piece)
        return piece


class _Reading:
    def __init__(self, path: str, data: memoryview, elf: Any, quest: Quest) -> None:
        self.path, self.data, self.elf, self.quest = path, data, elf, quest
        self.endian = "<" if elf.little_endian else ">"
        self.wide = elf.elfclass == 64
        # Header rows, not pyelftools' section objects: those read whole tables of the claimed size at once.
        self.segments = self._rows(elf.structs.Elf_Phdr, "e_phoff", "e_phentsize", elf.num_segments())
        self.sections = self._rows(elf.structs.Elf_Shdr, "e_shoff", "e_shentsize", elf.num_sections())

    def _rows(self, shape: Any, offset: str, size: str, count: int) -> list[Any]:
        from elftools.common.utils import struct_parse

        start, step = int(self.elf.header[offset]), int(self.elf.header[size])
        if count > _ROW_LIMIT or (count and (not step or count * step > len(self.data) - start)):
            raise AuditError(f"{self.path}: expected a plausible ELF header, got {count} rows at {start}")
        stream = cast(IO[bytes], _Reader(self.data))
        return [struct_parse(shape, stream, start + index * step) for index in range(count)]

    def library(self, sha256: str) -> Library:
        header = self.elf.header
        number = self._number(18, "H")
        facts: dict[str, Any] = {
            "path": self.path,
            "nbytes": len(self.data),
            "sha256": sha256,
            "machine": "cuda" if number == EM_CUDA else _MACHINES.get(number, f"machine {number}"),
            "bits": self.elf.elfclass,
            "kind": _KINDS.get(self._number(16, "H"), "other"),
        }
        if number == EM_CUDA:
            return Library(**facts, gpu_code=(self._cubin(int(header["e_flags"])),))
        facts["interpreter"] = any(segment["p_type"] == "PT_INTERP" for segment in self.segments)
        facts["executable_stack"] = any(
            segment["p_type"] == "PT_GNU_STACK" and segment["p_flags"] & 1 for segment in self.segments
        )
        return Library(**facts, **self._linkage(), **self._contents())

    def _number(self, offset: int, code: str) -> int:
        return int(struct.unpack_from(self.endian + code, self.data, offset)[0])

    def _cubin(self, flags: int) -> GpuCode:
        # The architecture's place in e_flags moved with ABI version 8 (seen in what nvcc 12 and 13 write).
        arch = flags >> 8 & 0xFF if self.data[8] >= 8 else flags & 0xFF
        return GpuCode("sass", f"sm_{arch}", "none", 1, len(self.data))

    # The dynamic segment.

    def _linkage(self) -> dict[str, Any]:
        tags = self._tags()
        if tags is None:
            return {}
        strings = self._span(tags.get(_Tag.STRTAB, [0])[0], tags.get(_Tag.STRSZ, [0])[0])

        def names(tag: _Tag) -> tuple[str, ...]:
            return tuple(_string(strings, offset) for offset in tags.get(tag, []))

        def entries(tag: _Tag) -> tuple[str, ...]:
            # The loader takes a wholly empty path for none; an empty entry among others, for the folder
            # that the process happens to be in.
            return tuple(entry for path in names(tag) if path for entry in path.split(":"))

        def address(tag: _Tag) -> int:
            return tags.get(tag, [0])[0]

        needs = self._version_needs(address(_Tag.VERNEED), address(_Tag.VERNEEDNUM), strings)
        linkage: dict[str, Any] = {
            "dynamic": True,
            "soname": (names(_Tag.SONAME) or ("",))[0],
            "needed": names(_Tag.NEEDED),
            "rpath": entries(_Tag.RPATH),
            "runpath": entries(_Tag.RUNPATH),
            "version_needs": frozenset(needs.values()),
            "static_constructors": address(_Tag.INIT_ARRAYSZ) // (8 if self.wide else 4),
        }
        return linkage | self._symbols(tags, strings, needs)

    def _tags(self) -> dict[int, list[int]] | None:
        """The dynamic table, tag to values; None without one."""
        place = next((one for one in self.segments if one["p_type"] == "PT_DYNAMIC"), None)
        if place is None:
            return None
        row = struct.Struct(self.endian + ("qQ" if self.wide else "iI"))
        start, nbytes = int(place["p_offset"]), int(place["p_filesz"])
        if nbytes > min(len(self.data) - start, _TAG_LIMIT * row.size):
            raise AuditError(f"{self.path}: expected a plausible dynamic table, got one of {nbytes} bytes")
        tags: dict[int, list[int]] = {}
        for tag, value in row.iter_unpack(self.data[start : start + nbytes - nbytes % row.size]):
            if tag == 0:
                break
            tags.setdefault(tag, []).append(value)
        return tags

    def _offset(self, address: int) -> int:
        """The file offset of a loaded address."""
        for segment in self.segments:
            first = segment["p_vaddr"]
            if segment["p_type"] == "PT_LOAD" and first <= address < first + segment["p_filesz"]:
                return int(address - first + segment["p_offset"])
        raise AuditError(f"{self.path}: the dynamic table points to {address:#x}, which no segment loads")

    def _span(self, address: int, nbytes: int) -> memoryview:
        if not nbytes:
            return self.data[:0]
        start = self._offset(address)
        if nbytes > len(self.data) - start:
            raise AuditError(f"{self.path}: a table of {nbytes} bytes runs past the end of the file")
        return self.data[start : start + nbytes]

    def _symbols(
        self, tags: dict[int, list[int]], strings: memoryview, needs: dict[int, tuple[str, str]]
    ) -> dict[str, Any]:
        if _Tag.SYMTAB not in tags:
            return {}
        count = self._symbol_count(tags)
        row = struct.Struct(self.endian + ("IBBHQQ" if self.wide else "IIIBBH"))
        if count > min(_SYMBOL_LIMIT, len(self.data) // row.size):
            raise AuditError(f"{self.path}: expected a plausible symbol table, got one of {count} symbols")
        table = self._span(tags[_Tag.SYMTAB][0], count * row.size)
        versions: tuple[int, ...] = (1,) * count
        if _Tag.VERSYM in tags:
            versions = struct.unpack(f"{self.endian}{count}H", self._span(tags[_Tag.VERSYM][0], count * 2))
        imports: list[Import] = []
        strong: set[str] = set()
        weak: set[str] = set()
        state: set[str] = set()
        for fields, version in zip(row.iter_unpack(table), versions, strict=True):
            name_at, info, other, section = (
                (fields[0], fields[1], fields[2], fields[3])
                if self.wide
                else (fields[0], fields[3], fields[4], fields[5])
            )
            binding, kind, visibility = info >> 4, info & 15, other & 3
            # Section symbols, file names and local symbols link nothing; 1 and 2 hide from other files.
            if not name_at or binding == 0 or kind in (3, 4) or visibility in (1, 2):
                continue
            name = _string(strings, name_at)
            if section == 0:
                library, wanted = needs.get(version & 0x7FFF, ("", ""))
                imports.append(Import(name, wanted, library, binding == 2))
            elif section != 0xFFF1:  # absolute symbols name versions and section ends
                (strong if binding == 1 else weak).add(name)
                if binding == 1 and kind in (1, 6):  # objects and thread-local ones
                    state.add(name)
        return {
            "imports": tuple(imports),
            "exports": frozenset(strong),
            "weak_exports": frozenset(weak),
            "data_exports": frozenset(state),
        }

    def _symbol_count(self, tags: dict[int, list[int]]) -> int:
        """The dynamic segment has no count of symbols; the hash tables imply it."""
        if _Tag.HASH in tags:
            return self._number(self._offset(tags[_Tag.HASH][0]) + 4, "I")
        if _Tag.GNU_HASH not in tags:
            return 0
        start = self._offset(tags[_Tag.GNU_HASH][0])
        bucket_count, first, bloom_count, _ = struct.unpack_from(self.endian + "4I", self.data, start)
        buckets_at = start + 16 + bloom_count * (8 if self.wide else 4)
        chains_at = buckets_at + bucket_count * 4
        if chains_at > len(self.data):
            raise AuditError(f"{self.path}: the symbol hash table runs past the end of the file")
        last = max(struct.unpack_from(f"{self.endian}{bucket_count}I", self.data, buckets_at), default=0)
        if last < first:
            return int(first)
        # The chain of the last bucket ends at the first odd hash.
        while not self._number(chains_at + (last - first) * 4, "I") & 1:
            last += 1
        return last + 1

    def _version_needs(self, address: int, count: int, strings: memoryview) -> dict[int, tuple[str, str]]:
        """Version index to (library, version)."""
        needs: dict[int, tuple[str, str]] = {}
        if not address:
            return needs
        at = self._offset(address)
        for _ in range(min(count, _TAG_LIMIT)):
            _, entries, library_at, first, after = struct.unpack_from(self.endian + "HHIII", self.data, at)
            library = _string(strings, library_at)
            entry_at = at + first
            for _ in range(entries):
                _, _, index, name_at, step = struct.unpack_from(self.endian + "IHHII", self.data, entry_at)
                needs[index & 0x7FFF] = (library, _string(strings, name_at))
                entry_at += step
                if not step or len(needs) > _TAG_LIMIT:
                    break
            at += after
            if not after:
                break
        return needs

    # Sections: GPU code and strings.

    def _contents(self) -> dict[str, Any]:
        code: list[GpuCode] = []
        faults: list[str] = []
        kernels: set[str] = set()
        paths: dict[str, None] = {}
        names: set[str] = set()
        opaque = 0
        opens_cuda = False
        for name, view, strings, plain in self._sections():
            binaries = []
            if name in fatbin.FATBIN_SECTIONS:
                binaries = [fatbin.read(view, self.quest.kernels)]
            elif plain:
                binaries = [fatbin.read(part, self.quest.kernels) for part in fatbin.embedded(view)]
                names.update(match.group().decode("ascii", "replace") for match in _SONAME.finditer(view))
            for binary in binaries:
                code.extend(binary.code)
                faults.extend(f"{name}: {fault}" for fault in binary.faults)
                kernels |= binary.kernels
                opaque += binary.opaque
            if not opens_cuda and name not in fatbin.FATBIN_SECTIONS:
                entry_point = plain and _ENTRY_POINT.search(view)
                opens_cuda = bool(entry_point or _DRIVER_FILE.search(view))
            if strings and self.quest.build_path is not None:
                found = self.quest.build_path.finditer(view)
                paths.update((match.group().decode("ascii", "replace"), None) for match in found)
        if opaque:
            kernels |= self._registered(self.quest.kernels - kernels)
        return {
            "gpu_code": _merged(code),
            "gpu_faults": tuple(faults),
            "kernels": frozenset(kernels),
            "opaque_gpu_entries": opaque,
            "build_paths": tuple(paths),
            "library_names": frozenset(names),
            "opens_cuda": opens_cuda,
        }

    def _sections(self) -> Iterator[tuple[str, memoryview, bool, bool]]:
        """Name, bytes, whether it may hold strings of a build, whether it is plain data."""
        names = self._section_names()
        for header in self.sections:
            name = _string(names, int(header["sh_name"])) if names else ""
            start, nbytes = int(header["sh_offset"]), int(header["sh_size"])
            progbits = header["sh_type"] == "SHT_PROGBITS"
            if not progbits or start > len(self.data):
                continue
            if nbytes > len(self.data) - start:
                raise AuditError(f"{self.path}: section {name} runs past the end of the file")
            flags = int(header["sh_flags"])
            gpu = name in fatbin.FATBIN_SECTIONS
            plain = bool(flags & _SHF_ALLOC and not flags & _SHF_EXECINSTR and not gpu)
            strings = plain or name in (".comment", ".debug_str", ".debug_line_str")
            if flags & _SHF_ALLOC or strings:
                yield name, self.data[start : start + nbytes], strings, plain

    def _section_names(self) -> memoryview:
        index = int(self.elf.get_shstrndx()) if self.sections else 0
        if not 0 < index < len(self.sections):
            return self.data[:0]
        start, nbytes = int(self.sections[index]["sh_offset"]), int(self.sections[index]["sh_size"])
        return self.data[start : start + nbytes]

    def _registered(self, kernels: frozenset[str]) -> set[str]:
        """Kernels that host code registers by name. The name alone proves no code; a caller asks only where
        there is GPU code that it could not look into."""
        found = set()
        for _, view, _, plain in self._sections():
            for kernel in kernels if plain else ():
                if re.search(rb"(?:^|\x00)" + re.escape(kernel.encode()) + rb"\x00", view):
                    found.add(kernel)
        return found


def _merged(code: list[GpuCode]) -> tuple[GpuCode, ...]:
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for one in code:
        sort = (one.kind, one.arch, one.compression)
        count, nbytes = sums.get(sort, (0, 0))
        sums[sort] = (count + one.count, nbytes + one.nbytes)
    return tuple(GpuCode(*sort, *total) for sort, total in sorted(sums.items()))


def _string(table: memoryview, offset: int) -> str:
    """The NUL-ended string at ``offset``. Names are cut at 64 KiB: longer ones are not names."""
    if offset >= len(table):
        raise AuditError(f"a string table of {len(table)} bytes is asked for byte {offset}")
    piece = bytes(table[offset : offset + 256])
    if b"\x00" not in piece:
        piece = bytes(table[offset : offset + (64 << 10)])
    with contextlib.suppress(ValueError):
        piece = piece[: piece.index(b"\x00")]
    return piece.decode("utf-8", "backslashreplace")
