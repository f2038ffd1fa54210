"""The libraries as they are installed: what they need, where they look, what they show and what they tell."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from tests import programs

EXTENSION = Path(sys.modules["headrace._core"].__file__ or "")
BUNDLED = EXTENSION.parent / "lib"
OURS = [EXTENSION, *sorted(BUNDLED.glob("libheadrace*.so"))]
ENGINES = sorted(BUNDLED.glob("libexecutorch*.so"))

# PEP 600's list (manylinux), as far as anything here needs it.
SYSTEM = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
}


def name(path: Path) -> str:
    return path.name.partition(".")[0]


class Library:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            tags = [(t.entry.d_tag, t) for t in elf.get_section_by_name(".dynamic").iter_tags()]
            self.needed = [t.needed for tag, t in tags if tag == "DT_NEEDED"]
            self.soname = [t.soname for tag, t in tags if tag == "DT_SONAME"]
            self.search = [part for tag, t in tags if tag == "DT_RUNPATH" for part in t.runpath.split(":")]
            self.old_search = [t for tag, t in tags if tag == "DT_RPATH"]
            symbols = [
                (s.entry.st_info.bind, s.name)
                for s in elf.get_section_by_name(".dynsym").iter_symbols()
                if s.entry.st_shndx != "SHN_UNDEF"
            ]
            self.exported = [s for bind, s in symbols if bind == "STB_GLOBAL"]
            self.weak = [s for bind, s in symbols if bind == "STB_WEAK"]


def test_nothing_of_ours_and_of_the_engine_is_missing() -> None:
    ours = {"_core", "libheadrace", "libheadrace_cuda", "libheadrace_shims", "libheadrace_stream"}
    assert {name(p) for p in OURS} == ours
    assert {name(p) for p in ENGINES} == {
        "libexecutorch",
        "libexecutorch_threadpool",
        "libexecutorch_kernels_optimized",
        "libexecutorch_backend_xnnpack",
        "libexecutorch_etdump",
    }


@pytest.mark.parametrize("path", OURS + ENGINES, ids=name)
def test_each_library_finds_the_next_by_a_path_relative_to_itself(path: Path) -> None:
    """PK2: every hop lies inside what pip installed, sized to the library's own depth."""
    library = Library(path)
    assert library.old_search == []
    assert library.search == ["$ORIGIN/lib" if path == EXTENSION else "$ORIGIN"]
    for needed in library.needed:
        hops = [Path(part.replace("$ORIGIN", str(path.parent))) / needed for part in library.search]
        assert needed in SYSTEM or any(hop.is_file() for hop in hops), f"{needed} is nowhere"


@pytest.mark.parametrize("path", OURS + ENGINES, ids=name)
def test_no_cuda_library_is_needed_or_bundled(path: Path) -> None:
    """PK3"""
    assert not [n for n in Library(path).needed if n.startswith(("libcu", "libnv", "libtorch", "libc10"))]
    assert not list(BUNDLED.glob("libcu*")) + list(BUNDLED.glob("libnv*"))


@pytest.mark.parametrize("path", OURS, ids=name)
def test_no_path_of_the_building_machine_is_recorded(path: Path) -> None:
    """PK2: no source, build or temporary folder, by which two builds would differ too."""
    data = path.read_bytes()
    for folder in {programs.ROOT, Path.home(), Path(sys.prefix), Path("/tmp"), Path("/home")}:
        if len(folder.parts) > 1:
            at = data.find(os.fsencode(folder) + b"/")
            assert at < 0, data[max(0, at - 40) : at + 120]


@pytest.mark.parametrize("path", OURS, ids=name)
def test_only_what_is_public_is_exported(path: Path) -> None:
    """Nothing of the engine or of nanobind can be confused with another's; weak are standard templates."""
    library = Library(path)
    if path == EXTENSION:
        assert library.exported == ["PyInit__core"]
    elif name(path) == "libheadrace_shims":
        # Visible to the whole process: ours by namespace, or by a prefix that stands for torch's, the CUDA run time's,
        # the driver's, OpenMP's, and one for the C++ ABI's.
        ours = re.compile(
            r"_ZN8headrace5shims|aoti_hrace_[a-z_]|hrce[A-Z]|hr[A-Z]|HRM[PQ]_(parallel|barrier)$|__hra_thread_atexit$"
        )
        assert [s for s in library.exported if not ours.match(s)] == [] == library.weak
        assert set(library.needed) <= {"libc.so.6", "ld-linux-x86-64.so.2"}
    else:
        assert library.exported
        assert [s for s in library.exported if "8headrace" not in s and not s.startswith("headrace_")] == []
    assert [s for s in library.weak if "executorch" in s] == []


@pytest.mark.parametrize("path", OURS, ids=name)
def test_each_library_is_known_by_its_own_name(path: Path) -> None:
    """PK2: two libraries of one name would be one to the loader."""
    if path != EXTENSION:
        assert Library(path).soname == [path.name]


def test_licences_travel_with_what_they_cover() -> None:
    assert 'For "ExecuTorch" software' in (BUNDLED / "LICENSE.executorch").read_text()
