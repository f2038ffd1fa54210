"""Graphs without Python, and native delegates that take part in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native import compiler
from tests.programs.committed import __file__ as committed

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiler.program(HERE / "test_graphs.cpp", tmp_path_factory.mktemp("native") / "test_graphs")


@pytest.mark.parametrize("scenario", ["replays", "refusals", "failures"])
def test_graphs_from_cpp(binary: Path, scenario: str) -> None:
    """GR1, GR2: capture and replays of native delegates with state; what a graph pins outlives its last launch.
    GR6: a failure in either stage puts the state back. GR7: one that says no, or nothing, is refused by name."""
    program = Path(committed).parent / "chain10.pte"
    done = subprocess.run(
        [*compiler.prefix(), binary, scenario, program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
