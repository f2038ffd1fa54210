"""What libheadrace_stream.so is made of (CS3, CS4), both as compiled here and as packaged."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from tests.native import compiler

# Parts of glibc; the last was merged into the first in glibc 2.34.
SYSTEM = {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libdl.so.2"}


@pytest.fixture(params=["compiled", "packaged"])
def library(request: pytest.FixtureRequest, built: Path) -> Path:
    if request.param == "compiled":
        return built
    spec = importlib.util.find_spec("headrace._core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "lib/libheadrace_stream.so"


def dynamic(library: Path) -> list[tuple[str, str]]:
    """(tag, text) of the entries of the dynamic section that name something."""
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynamic")
        named = [(t.entry.d_tag, t) for t in section.iter_tags()]
        texts = {"DT_NEEDED": "needed", "DT_SONAME": "soname", "DT_RUNPATH": "runpath", "DT_RPATH": "rpath"}
        return [(tag, getattr(t, texts[tag])) for tag, t in named if tag in texts]


def test_library_needs_the_c_library_alone(library: Path) -> None:
    needed = {text for tag, text in dynamic(library) if tag == "DT_NEEDED"}
    assert "libc.so.6" in needed
    assert needed <= SYSTEM
    assert [text for tag, text in dynamic(library) if tag == "DT_SONAME"] == ["libheadrace_stream.so"]


def test_packaged_library_looks_only_beside_itself(library: Path) -> None:
    paths = [text for tag, text in dynamic(library) if tag in ("DT_RUNPATH", "DT_RPATH")]
    assert set(paths) <= {"$ORIGIN"}


def test_library_is_small(library: Path) -> None:
    assert 0 < library.stat().st_size < 64 * 1024


def test_library_exports_what_the_header_declares_and_nothing_else(library: Path) -> None:
    header = (compiler.INCLUDE / "headrace/caller_stream.h").read_text()
    declared = set(re.findall(r"^HEADRACE_STREAM_API\s[^;(]*?(\w+)\(", header, re.MULTILINE))
    with library.open("rb") as file:
        symbols = list(ELFFile(file).get_section_by_name(".dynsym").iter_symbols())
    exported = {s.name for s in symbols if s.entry.st_shndx != "SHN_UNDEF"}
    assert len(declared) == 7
    assert exported == declared


def test_library_keeps_out_of_the_static_thread_block(library: Path) -> None:
    """That block may be full by the time the library is loaded; DF_STATIC_TLS says that a library needs it."""
    with library.open("rb") as file:
        tags = list(ELFFile(file).get_section_by_name(".dynamic").iter_tags())
    flags = [t.entry.d_val for t in tags if t.entry.d_tag == "DT_FLAGS"]
    assert tags
    assert not any(flag & 0x10 for flag in flags)
