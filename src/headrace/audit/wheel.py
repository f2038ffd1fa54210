"""A distribution as facts: a wheel, an unpacked folder, or what is installed. Nothing of it is executed.

Every file has a *place*: its path below site-packages once installed. The members that a wheel keeps under
``NAME.data`` go where the installer puts them, so that ``../../../lib/libx.so`` is a library in the
environment's own ``lib``. Libraries are read one at a time; a compressed member is unpacked to an unnamed
temporary file and mapped, so memory does not grow with the wheel.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import lzma
import mmap
import os
import posixpath
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from email.parser import BytesParser
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol

from headrace.audit import elf
from headrace.audit.elf import Library, Quest
from headrace.audit.policy import Limits, Policy
from headrace.errors import AuditError
from headrace.pte import fatbin
from headrace.pte.fatbin import GpuCode

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["Distribution", "Fault", "read"]

#: Where the installer puts NAME.data/KEY, seen from site-packages (``lib/pythonX.Y/site-packages``).
_SCHEMES: Final = {
    "purelib": "",
    "platlib": "",
    "data": "../../..",
    "scripts": "../../../bin",
    "headers": "../../../include",
}
#: What zipfile raises for damaged, encrypted and unknown members.
_UNREADABLE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    OSError,
    RuntimeError,
    NotImplementedError,
    EOFError,
    ValueError,
)
_METADATA_NBYTES: Final = 4 << 20
_REQUIREMENTS: Final = 10_000
_PYTHON_NBYTES: Final = 64 << 20
#: Text by name; a library that hides behind one of these cannot be loaded by that name either.
_TEXT: Final = (".py", ".pyi", ".h", ".hpp", ".cuh", ".txt", ".md", ".json", ".html", ".csv", ".pyx", ".pxd")
#: Tried at the start of a word alone, and not for ever: a long word without an end must not take its square.
_LIBRARY_NAME: Final = re.compile(rb"(?<![\w+-])[\w+-]{1,200}\.so(?:\.[0-9]+)*")


@dataclass(frozen=True)
class Fault:
    """A file that could not be read (``rule`` elf-unreadable) or must not be unpacked (member-unsafe)."""

    rule: str
    path: str
    detail: str


@dataclass(frozen=True)
class Distribution:
    """Facts about what pip would install, or has installed.

    ``tags`` are platform tags and empty without a wheel's metadata. ``requirements`` are those of METADATA.
    ``aliases`` maps a link to the file that it leads to. ``gpu_files`` is GPU code in files of its own.
    ``python_names`` are the file names of libraries that the Python sources spell. ``site`` is the
    site-packages folder of something installed, where dependencies can be looked at; else None.
    """

    source: str
    name: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    places: frozenset[str] = frozenset()
    libraries: tuple[Library, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    gpu_files: tuple[tuple[str, GpuCode], ...] = ()
    python_names: frozenset[str] = frozenset()
    faults: tuple[Fault, ...] = ()
    site: Path | None = None
    folders: frozenset[str] = field(default=frozenset())


class _Files(Protocol):
    """Where the bytes are. ``names`` maps a place to the name by which the others find it; ``opened`` is a
    real file with the content, and its SHA-256, taken while it was copied: through the map, every page of a
    large library would count as this process's memory."""

    names: dict[str, str]
    faults: list[Fault]
    aliases: list[tuple[str, str]]

    def head(self, name: str, nbytes: int) -> bytes: ...
    def opened(self, name: str) -> AbstractContextManager[tuple[IO[bytes], str]]: ...


def read(source: str, policy: Policy) -> Distribution:
    """The facts of ``source``: a wheel, a folder, a ``.dist-info`` folder or the name of something installed.

    Raises AuditError when it is none of these, is no archive, or holds no ELF file or GPU code that can be
    read: an audit of nothing has no verdict.
    """
    if not source.strip() or "\0" in source:
        raise AuditError(f"audit: expected a path or a name, got {source!r}; pass a wheel's path")
    path = Path(source)
    if path.is_dir():
        if path.name.endswith(".dist-info"):
            facts = _installed(source, importlib.metadata.PathDistribution(path), policy)
        else:
            facts = _folder(source, path, policy)
    elif path.is_file():
        facts = _wheel(source, path, policy)
    else:
        try:
            found = importlib.metadata.distribution(source)
        except (importlib.metadata.PackageNotFoundError, ValueError) as cause:
            raise AuditError(
                f"{source}: expected a wheel, a folder or the name of an installed distribution, got none; check "
                "the spelling"
            ) from cause
        facts = _installed(source, found, policy)
    if not facts.libraries and not facts.gpu_files:
        reasons = "".join(f"; {fault.path}: {fault.detail}" for fault in facts.faults[:5])
        raise AuditError(
            f"{source}: expected ELF files or GPU code to inspect, found none{reasons}; nothing was audited, audit "
            "what was built"
        )
    return facts


def _wheel(source: str, path: Path, policy: Policy) -> Distribution:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        with zipfile.ZipFile(path) as archive:
            files = _Archive(path, archive, policy.limits)
            facts = _collect(source, files, policy)
    except _UNREADABLE as cause:
        raise AuditError(
            f"{source}: expected a wheel, got an archive that cannot be read ({cause}); build or "
            "download it again"
        ) from cause
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        return facts  # WHEEL's own tags stand
    return replace(
        facts,
        name=facts.name or name,
        version=facts.version or str(version),
        tags=tuple(sorted({tag.platform for tag in tags})),
    )


def _folder(source: str, path: Path, policy: Policy) -> Distribution:
    return _collect(source, _Tree(path, _walk(path)), policy)


def _installed(source: str, found: importlib.metadata.Distribution, policy: Policy) -> Distribution:
    listed = found.files
    if listed is None:
        raise AuditError(f"{source}: expected a RECORD that lists its files, found none; install it by pip")
    site = Path(str(found.locate_file("")))
    files = _Tree(site, {posixpath.normpath(str(one)): Path(str(found.locate_file(one))) for one in listed})
    return replace(_collect(source, files, policy), site=site)


def _walk(root: Path) -> dict[str, Path]:
    places = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            places[path.relative_to(root).as_posix()] = path
    return places


class _Archive:
    """The members of a wheel that are safe to read."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, limits: Limits) -> None:
        self.archive, self.path = archive, path
        self.names: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.aliases: list[tuple[str, str]] = []
        members = archive.infolist()
        claimed = sum(member.file_size for member in members)
        stored = sum(member.compress_size for member in members)
        if len(members) > limits.members or claimed > limits.total_nbytes or stored > path.stat().st_size:
            raise AuditError(
                f"{path}: expected at most {limits.members} members and {limits.total_nbytes} bytes, got "
                f"{len(members)} members that claim {claimed} bytes, {stored} of them stored; "
                "unpack it and audit the folder, if you trust it"
            )
        for member in members:
            if member.is_dir():
                continue
            name = member.filename
            if name.startswith("/") or "\\" in name or ".." in name.split("/"):
                self.faults.append(Fault("member-unsafe", name, "expected a relative path inside the wheel"))
            elif member.file_size > max(limits.member_nbytes, limits.ratio * member.compress_size):
                detail = f"claims {member.file_size} bytes from {member.compress_size} stored"
                self.faults.append(Fault("member-unsafe", name, f"{detail}: a decompression bomb, or damage"))
            else:
                self.names[_installed_place(name)] = name

    def head(self, name: str, nbytes: int) -> bytes:
        with self.archive.open(name) as stream:
            return stream.read(nbytes)

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[IO[bytes], str]]:
        with tempfile.TemporaryFile() as file:
            with self.archive.open(name) as stream:
                digest = _copied(stream, file.write)
            file.flush()
            yield file, digest


class _Tree:
    """Files on disk. A link inside the tree is an alias of its target; others are read as files."""

    def __init__(self, root: Path, places: dict[str, Path]) -> None:
        self.names: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.aliases: list[tuple[str, str]] = []
        resolved = {str(path.resolve()): place for place, path in places.items() if not path.is_symlink()}
        for place, path in places.items():
            target = resolved.get(str(path.resolve()))
            if path.is_symlink() and target is not None:
                self.aliases.append((place, target))
            elif path.is_file():
                self.names[place] = str(path)

    def head(self, name: str, nbytes: int) -> bytes:
        with Path(name).open("rb") as stream:
            return stream.read(nbytes)

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[IO[bytes], str]]:
        with Path(name).open("rb") as file:
            yield file, _copied(file, len)


def _copied(stream: IO[bytes], take: Callable[[bytes], object]) -> str:
    """Gives a stream's bytes to ``take`` piece by piece; the SHA-256 of all."""
    digest = hashlib.sha256()
    while piece := stream.read(1 << 20):
        digest.update(piece)
        take(piece)
    return digest.hexdigest()


@contextmanager
def _view(files: _Files, name: str) -> Iterator[tuple[memoryview, str]]:
    """A file's bytes, mapped, and their SHA-256. Facts hold no part of the map, so it ends with the view."""
    with files.opened(name) as (file, digest):
        if os.fstat(file.fileno()).st_size:
            yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), digest
        else:
            yield memoryview(b""), digest


def _installed_place(name: str) -> str:
    first, _, rest = name.partition("/")
    if first.endswith(".data"):
        scheme, _, below = rest.partition("/")
        if scheme in _SCHEMES and below:
            return posixpath.normpath(posixpath.join(_SCHEMES[scheme], below))
    return posixpath.normpath(name)


def _collect(source: str, files: _Files, policy: Policy) -> Distribution:
    quest = Quest(policy.build_path, policy.kernels)
    libraries: list[Library] = []
    gpu_files: list[tuple[str, GpuCode]] = []
    faults = files.faults
    python_names: set[str] = set()
    python_nbytes = 0
    for place, name in sorted(files.names.items()):
        if place.endswith(".py") and python_nbytes < _PYTHON_NBYTES:
            text = files.head(name, 4 << 20)
            python_nbytes += len(text)
            python_names.update(
                match.group().decode("ascii", "replace") for match in _LIBRARY_NAME.finditer(text)
            )
        if place.endswith(_TEXT):
            continue
        head = files.head(name, 4)
        if head == elf.ELF_MAGIC:
            with _view(files, name) as (data, digest):
                try:
                    libraries.append(elf.read(place, data, quest, digest))
                except AuditError as fault:
                    faults.append(Fault("elf-unreadable", place, str(fault).removeprefix(f"{place}: ")))
        elif head == fatbin.MAGIC:
            with _view(files, name) as (data, _):
                binaries = fatbin.read(data)
            gpu_files.extend((place, code) for code in binaries.code)
            faults.extend(Fault("gpu-code-unreadable", place, fault) for fault in binaries.faults)
        elif place.endswith(".ptx"):
            gpu_files.extend((place, code) for code in _ptx(files.head(name, 64 << 10)))
    hosts = tuple(library for library in libraries if library.machine != "cuda")
    gpu_files.extend((one.path, code) for one in libraries if one.machine == "cuda" for code in one.gpu_code)
    places = frozenset(files.names) | frozenset(alias for alias, _ in files.aliases)
    facts = Distribution(
        source=source,
        places=places,
        libraries=hosts,
        aliases=tuple(files.aliases),
        gpu_files=tuple(gpu_files),
        python_names=frozenset(python_names),
        faults=tuple(faults),
        folders=frozenset(parent for place in places for parent in _parents(place)),
    )
    return _described(facts, files)


def _parents(place: str) -> Iterator[str]:
    while place := posixpath.dirname(place):
        yield place


def _ptx(text: bytes) -> Iterator[GpuCode]:
    target = re.search(rb"^\s*\.target\s+sm_([0-9]+[af]?)", text, re.MULTILINE)
    if target is not None:
        yield GpuCode("ptx", f"compute_{target.group(1).decode('ascii')}", "none", 1, len(text))


def _described(facts: Distribution, files: _Files) -> Distribution:
    """``facts`` with what the metadata says. Only the wheel's own .dist-info counts: one at the top."""
    from packaging.requirements import InvalidRequirement, Requirement

    tops = {place.split("/")[0] for place in files.names}
    infos = sorted(top for top in tops if top.endswith(".dist-info"))
    if not infos:
        return facts
    info = infos[0]

    def headers(name: str) -> dict[str, list[str]]:
        place = f"{info}/{name}"
        if place not in files.names:
            return {}
        message = BytesParser().parsebytes(files.head(files.names[place], _METADATA_NBYTES), headersonly=True)
        found: dict[str, list[str]] = {}
        for key, value in message.items():
            found.setdefault(key.lower(), []).append(str(value))
        return found

    metadata, wheel = headers("METADATA"), headers("WHEEL")
    requirements = []
    faults = list(facts.faults)
    listed = metadata.get("requires-dist", [])
    if len(listed) > _REQUIREMENTS:
        raise AuditError(
            f"{facts.source}: expected at most {_REQUIREMENTS} requirements, got {len(listed)}; mend its METADATA"
        )
    for text in listed:
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement as fault:
            faults.append(Fault("metadata-unreadable", f"{info}/METADATA", f"{text!r}: {fault}"))
    platforms = {part for tag in wheel.get("tag", []) for part in tag.split("-")[-1].split(".")}
    return replace(
        facts,
        name=metadata.get("name", [""])[0],
        version=metadata.get("version", [""])[0],
        requirements=tuple(requirements),
        tags=tuple(sorted(platforms)),
        faults=tuple(faults),
    )
