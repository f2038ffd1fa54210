"""The C and C++ compilers, for tests of what is compiled: a second's work each, and no build of the package."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "native/include"
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
# By language: the variable that names another compiler, and the one that is taken otherwise.
COMMANDS = {"c": ("CC", "cc"), "c++": ("CXX", "c++")}


def run(*arguments: object, language: str = "c++") -> subprocess.CompletedProcess[str]:
    """The compiler with these arguments; its messages in English, whatever the locale."""
    variable, usual = COMMANDS[language]
    command = [*shlex.split(os.environ.get(variable) or usual), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})


def build(*arguments: object, language: str = "c++") -> None:
    """The same, where it has to succeed."""
    done = run(*arguments, language=language)
    assert done.returncode == 0, done.stderr
