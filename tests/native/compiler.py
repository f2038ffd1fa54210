"""The C and C++ compilers, for tests of what is compiled: a second's work each, and no build of the package."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "native/include"
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
# By language: the variable that names another compiler, and the one that is taken otherwise.
COMMANDS = {"c": ("CC", "cc"), "c++": ("CXX", "c++")}


def engine_flags() -> list[object]:
    """What compiles against the engine's headers, as the build of the package in this folder laid them out."""
    engines = sorted(ROOT.glob("build/*/engine/include"), key=lambda p: p.stat().st_mtime)
    assert engines, "no headers of the engine in build: build the package here first (make .venv-dev/ready)"
    include = engines[-1]
    return [
        *("-isystem", include, "-isystem", include / "executorch/runtime/core/portable_type/c10"),
        *("-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_USE_THREADPOOL", "-DET_EVENT_TRACER_ENABLED"),
    ]


def libraries() -> Path:
    """The folder of libheadrace.so and the engine's libraries: the installed package's, or those that ``tests.native.sanitize``
    names, which are built with a sanitizer."""
    named = os.environ.get("HEADRACE_NATIVE_LIBRARIES")
    return Path(named or Path(sys.modules["headrace._core"].__file__ or "").parent / "lib")


def prefix(sanitizer: str = os.environ.get("HEADRACE_NATIVE_SANITIZER", "")) -> list[str]:
    """What a program built with it is started with. ThreadSanitizer's older run times refuse an address space that is
    randomized in more than 28 bits."""
    fixed = ["setarch", platform.machine(), "-R"]
    if sanitizer != "thread" or not shutil.which("setarch"):
        return []
    return fixed if subprocess.run([*fixed, "true"], capture_output=True).returncode == 0 else []


def sanitizer_flags() -> list[str]:
    """For programs that call ``libraries()``."""
    sanitizer = os.environ.get("HEADRACE_NATIVE_SANITIZER")
    return [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []


def run(*arguments: object, language: str = "c++") -> subprocess.CompletedProcess[str]:
    """The compiler with these arguments; its messages in English, whatever the locale."""
    variable, usual = COMMANDS[language]
    command = [*shlex.split(os.environ.get(variable) or usual), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})


def build(*arguments: object, language: str = "c++") -> None:
    """The same, where it has to succeed."""
    done = run(*arguments, language=language)
    assert done.returncode == 0, done.stderr


def program(source: Path, target: Path, *linked: object) -> Path:
    """``source``, compiled against the engine's headers that the build of the package laid out, linked to libheadrace.so
    and what is named beside."""
    build(
        *("-std=c++20", "-O1", "-g", *sanitizer_flags(), "-Wall", "-Wextra", "-Werror", *engine_flags()),
        *("-I", INCLUDE, source, "-o", target),
        *(f"-L{libraries()}", f"-Wl,-rpath,{libraries()}", "-lheadrace", "-lexecutorch", *linked, "-pthread"),
    )
    return target
