"""The library, compiled from its sources, and processes in which it is the only one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native import compiler

SOURCES = sorted((compiler.ROOT / "native/stream").glob("*.cpp"))
# As CMakeLists.txt has them.
OURS = ("-std=c++20", *compiler.STRICT, "-fPIC", "-O1", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")

HERE = Path(__file__).parent
Run = Callable[..., None]


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The library's sources, compiled and not linked."""
    folder = tmp_path_factory.mktemp("objects")
    assert SOURCES
    for source in SOURCES:
        include = ("-I", compiler.INCLUDE, "-I", compiler.ROOT / "native")
        compiler.build(*OURS, *include, "-c", source, "-o", folder / f"{source.stem}.o")
    return [folder / f"{source.stem}.o" for source in SOURCES]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, objects: list[Path]) -> Path:
    """libheadrace_stream.so."""
    library = tmp_path_factory.mktemp("stream") / "libheadrace_stream.so"
    compiler.build(
        "-shared", "-Wl,--as-needed,-soname,libheadrace_stream.so", *objects, "-o", library, "-ldl"
    )
    return library


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A file copied to another folder, or under another name."""

    def copy(library: Path, to: str) -> Path:
        target = tmp_path / to
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
        return target

    return copy


@pytest.fixture
def child() -> Run:
    """Runs code in a fresh interpreter, the keywords as its variables; it has to reach its end, quietly."""

    def child(code: str, **names: Path | str) -> None:
        head = f"""
import ctypes, json, os, sys, threading, time
from tests.native.stream.binding import *
globals().update(json.loads({json.dumps(json.dumps({k: str(v) for k, v in names.items()}))}))
"""
        program = head + textwrap.dedent(code) + "\nprint('reached the end')\n"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=compiler.ROOT
        )
        assert done.returncode == 0, done.stderr
        assert (done.stdout, done.stderr) == ("reached the end\n", "")

    return child
