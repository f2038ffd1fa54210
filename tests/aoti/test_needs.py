"""PK3: what a library needs of NVIDIA's beyond the run time and the driver: found where pip puts it, named where it is
missing, and never in two majors. The libraries here are stand-ins of one function, compiled for the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.conftest import run_python, succeeded
from tests.native import compiler

from . import forge

LAYOUTS = {12: "nvidia/cublas/lib", 13: "nvidia/cu13/lib"}
# Tells whether the program loads, and whose function its library called while it did.
LOADS = """
    import ctypes, sys
    import headrace
    program, *first = sys.argv[1:]
    for path in first:
        ctypes.CDLL(path)
    try:
        headrace.load(program, device="cpu").close()
        print("loads")
    except headrace.DelegateUnavailable as error:
        print(str(error).replace("\\n", " "))
    print(headrace.aoti.read(program)[0].missing)
"""


def cublas(site: Path, major: int) -> Path:
    """A stand-in, as pip's package of that major lies in ``site``."""
    folder = site / LAYOUTS[major]
    folder.mkdir(parents=True, exist_ok=True)
    source, target = folder / "stand_in.cpp", folder / f"libcublas.so.{major}"
    source.write_text(
        f'#include <cstdio>\nextern "C" int cublas_stand_in() {{ std::puts("cublas {major}"); std::fflush(stdout); return 0; }}'
    )
    compiler.build("-shared", "-fPIC", source, f"-Wl,-soname,libcublas.so.{major}", "-o", target)
    return target


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Of a major: the site of its stand-in, the stand-in, and a program whose library calls it while it is loaded."""

    def make(major: int) -> tuple[Path, Path, Path]:
        site = tmp_path / f"site{major}"
        library = cublas(site, major)
        head = 'extern "C" int cublas_stand_in(); static int called = cublas_stand_in();\n'
        image = forge.shared_library(tmp_path, head=head, flags=("-Wl,--no-as-needed", str(library)))
        program = tmp_path / f"m{major}.pte"
        program.write_bytes(forge.replace_library(programs.AOTI.load("add_one").path.read_bytes(), image))
        return site, library, program

    return make


def said(program: Path, *first: Path, site: Path | None = None) -> list[str]:
    code = "import headrace.aoti\n" + "\n".join(line[4:] for line in LOADS.splitlines())
    path = {} if site is None else {"PYTHONPATH": str(site)}
    return succeeded(run_python(code, program, *first, environment=path)).splitlines()


@pytest.mark.parametrize("major", LAYOUTS)
def test_it_is_found_where_pip_puts_it(made: Any, major: int) -> None:
    """PK3: CUDA 12 has a folder for each component, CUDA 13 one for all."""
    site, _, program = made(major)
    assert said(program, site=site) == [f"cublas {major}", "loads", "()"]


def test_it_is_found_in_the_process(made: Any) -> None:
    """PK3: loaded by whoever, from wherever."""
    _, library, program = made(13)
    assert said(program, library) == ["cublas 13", "loads", "()"]


def test_a_missing_one_is_named(made: Any) -> None:
    """PK3, DE5: with what to do."""
    site, _, program = made(12)
    (site / LAYOUTS[12] / "libcublas.so.12").unlink()
    refused, missing = said(program, site=site)
    for text in (refused, missing):
        assert "the library 'libcublas.so.12' (libcublas.so.12: cannot open shared object file" in text
        assert "pip install NVIDIA's package that has it" in text


def test_two_majors_in_one_process_are_refused(made: Any) -> None:
    """PK3: whichever was there first."""
    _, twelve, _ = made(12)
    site, _, program = made(13)
    refused, missing = said(program, twelve, site=site)
    for text in (refused, missing):
        assert (
            f"the library 'libcublas.so.13' where this process holds '{twelve.name}', of another major"
            in text
        )
