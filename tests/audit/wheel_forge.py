"""Makes wheels to audit: tiny ELF files by the C compiler, fat binaries and archives byte by byte."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONTAINER_MAGIC = 0xBA55ED50
KINDS = {"ptx": 1, "sass": 2, "ltoir": 8}


@dataclass(frozen=True)
class Entry:
    """One entry of a fat binary. ``flags`` beyond the compression's are given as they stand."""

    kind: str
    arch: int
    payload: bytes = b"\x00" * 32
    flags: int = 0x11
    unpacked: int = 0
    number: int | None = None

    def bytes(self) -> bytes:
        padded = -len(self.payload) % 8 + len(self.payload)
        number = KINDS[self.kind] if self.number is None else self.number
        compressed = len(self.payload) if self.flags & 0xA000 else 0
        head = struct.pack("<HHIQIIHHIII", number, 0x101, 64, padded, compressed, 0, 8, 1, self.arch, 0, 0)
        return head + struct.pack("<QQQ", self.flags, 0, self.unpacked) + self.payload.ljust(padded, b"\x00")


def fatbin(*entries: Entry) -> bytes:
    """One container of the given entries."""
    body = b"".join(entry.bytes() for entry in entries)
    return struct.pack("<IHHQ", CONTAINER_MAGIC, 1, 16, len(body)) + body


def cubin(kernel: str) -> bytes:
    """Just enough of a GPU's ELF file to hold a kernel's section name."""
    return b"\x7fELF" + b"\x00" * 60 + b"\x00.text." + kernel.encode() + b"\x00"


@dataclass(frozen=True)
class Wheel:
    """What a wheel of the corpus holds. ``files`` maps members to content; a Path is read."""

    files: Mapping[str, bytes | Path]
    requires: Sequence[str] = ()
    name: str = "pkg"
    version: str = "1.0"
    platform: str = "manylinux_2_35_x86_64"
    policy: str = ""
    raw_members: Mapping[str, bytes] = field(default_factory=dict)


class Forge:
    """Builds into one folder and keeps what it built, so that cases share libraries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shared(
        self,
        source: str,
        *,
        soname: str = "",
        links: Sequence[Path] = (),
        runpath: str = "",
        flags: Sequence[str] = (),
        code: bytes | None = None,
        compiler: str = "cc",
        bare: bool = True,
    ) -> Path:
        """A shared library of C source. ``links`` become NEEDED by their sonames, used or not; ``code`` is
        put into .nv_fatbin. ``bare`` leaves the C library and the start files out."""
        key = repr((source, soname, [str(link) for link in links], runpath, flags, code, compiler, bare))
        folder = self.folder / hashlib.sha256(key.encode()).hexdigest()[:20]
        library = folder / (soname or "lib.so")
        if library.exists():
            return library
        folder.mkdir()
        if code is not None:
            (folder / "code").write_bytes(code)
            section = f'.section .nv_fatbin,\\"a\\"\\n.incbin \\"{folder}/code\\"\\n.previous'
            source += f'\n__asm__("{section}");'
        options = ["-shared", "-fPIC", "-O1", "-Wl,--no-as-needed,--enable-new-dtags,--hash-style=gnu"]
        options += ["-Wl,-z,noexecstack", *(["-nostdlib"] if bare else [])]
        options += [f"-Wl,-soname,{soname}"] if soname else []
        options += [f"-Wl,-rpath,{runpath}"] if runpath else []
        language = "c++" if compiler == "c++" else "c"
        command = [compiler, "-x", language, "-", "-x", "none", *options, *flags, "-o", str(library)]
        command += [str(link) for link in links]
        environment = {**os.environ, "LC_ALL": "C"}
        subprocess.run(command, input=source.encode(), check=True, cwd=folder, env=environment)
        return library

    def stub(self, soname: str, *functions: str) -> Path:
        """A library that stands for another package's: it defines ``functions``; wheels leave it out."""
        source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions or ("stub_symbol",))
        return self.shared(source, soname=soname)

    def wheel(self, wheel: Wheel, folder: Path) -> Path:
        """The archive of ``wheel`` in ``folder``."""
        name = wheel.name.replace("-", "_")
        info = f"{name}-{wheel.version}.dist-info"
        path = folder / f"{name}-{wheel.version}-py3-none-{wheel.platform}.whl"
        metadata = f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\n"
        metadata += "".join(f"Requires-Dist: {text}\n" for text in wheel.requires)
        tags = "".join(f"Tag: py3-none-{tag}\n" for tag in wheel.platform.split("."))
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, content in {**wheel.files, **wheel.raw_members}.items():
                archive.writestr(member, content.read_bytes() if isinstance(content, Path) else content)
            archive.writestr(f"{info}/METADATA", metadata)
            archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
            archive.writestr(f"{info}/RECORD", "")
        return path


def uses(*functions: str) -> str:
    """C source that calls ``functions`` of other libraries."""
    return "".join(f"extern int {name}(void);\n" for name in functions) + (
        "int entry(void) { return " + (" + ".join(f"{name}()" for name in functions) or "0") + "; }\n"
    )


def patched(library: Path, offset: int, replacement: bytes) -> bytes:
    """The bytes of a library with some replaced."""
    data = bytearray(library.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    return bytes(data)
