"""Where the C++ SDK of this installation lies: what compilers and CMake are told.

All of it came with the package, in folders beside the extension; nothing is searched for. docs/cpp.md shows the way
from here to a program.
"""

from __future__ import annotations

from pathlib import Path

from .engine import bundled

__all__ = ["cmake_dir", "include_dir", "library_dir"]


def include_dir() -> Path:
    """The folder for the compiler's ``-I``: ``headrace/program.h`` and the other headers.

    The engine's own headers are in its subfolder ``engine``. They need the definitions that the CMake target
    ``headrace::executorch`` carries.
    """
    return bundled().parent / "include"


def library_dir() -> Path:
    """The folder of ``libheadrace.so``, of what it needs, and of ``libheadrace_cuda.so``.

    These are the files that came with the package, also where Python uses those of an installed ExecuTorch: the two are
    one build, and a process that holds one loads no second copy of it.
    """
    return bundled()


def cmake_dir() -> Path:
    """The folder for CMake's ``-Dheadrace_DIR=``, in which ``headrace-config.cmake`` lies."""
    return bundled() / "cmake/headrace"
