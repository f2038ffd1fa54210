"""The C++ guards and the engine's allocator agree on a device and a stream: one selection, never the legacy stream."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native import compiler

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiler.program(
        HERE / "test_guard.cpp", tmp_path_factory.mktemp("guard") / "test_guard", "-lheadrace_stream"
    )


def run(binary: Path, scenario: str) -> str:
    done = subprocess.run([*compiler.prefix(), binary, scenario], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("done\n")
    return done.stdout


@pytest.mark.parametrize("scenario", ["unbound", "index", "selects"])
def test_memory_and_copies_follow_the_selection(scenario: str, binary: Path) -> None:
    """SY2, OR1, DM1, CS7: unbound, bound, and with guards of both kinds within each other."""
    run(binary, scenario)


def test_a_guard_that_cannot_hold_says_why(binary: Path) -> None:
    """CS6: nothing is selected, nothing is enqueued, and the devices are named."""
    far, unknown, _ = run(binary, "refuses").splitlines()
    assert "sim:1" in far and "expected" in far
    assert "0x3039" in unknown or "12345" in unknown
