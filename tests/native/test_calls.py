"""Calls of methods without Python: a program of its own, linked to the package's library."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.native import compiler

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``test_calls.cpp``, compiled against the engine's headers that the build of the package laid out."""
    return compiler.program(
        HERE / "test_calls.cpp",
        tmp_path_factory.mktemp("native") / "test_calls",
        # The kernels only register themselves, so nothing here refers to them.
        *("-Wl,--no-as-needed", "-lexecutorch_kernels_optimized"),
    )


@pytest.mark.parametrize(
    ("scenario", "program"),
    [
        ("turns", "not_there"),
        ("overlap", "not_there"),
        ("reentry", "not_there"),
        ("failure", "not_there"),
        ("thrown", "not_there"),
        ("refusal", "not_there"),
        ("handles", "not_there"),
        ("views", "not_there"),
        ("ending", "not_there"),
        ("methods", "two_methods"),
    ],
)
def test_calls(binary: Path, scenario: str, program: str) -> None:
    """OR7: one call at a time in an instance, as many at a time as there are instances, methods apart.
    OP5: views that are wrong in themselves. OP3, OP4, DE5: a delegate that fails, refuses or is unavailable. LT3: handles, and the end of the process."""
    done = subprocess.run(
        [*compiler.prefix(), binary, scenario, programs.load(program).path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
