"""``docs/graphs.md`` and ``headrace run --graph``: what they show runs, and is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from examples import scale
from headrace.cli import main
from tests.conftest import run_python, succeeded
from tests.programs import ROOT


def test_every_block_of_the_page_runs_in_order() -> None:
    """GR1, GR2, GR3, GR6, GR7: one process, top to bottom."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs/graphs.md").read_text(), re.DOTALL)
    assert len(found) >= 6
    succeeded(run_python("\n".join(found)))


@pytest.mark.parametrize("schedule", ["eager", "late", "7"])
def test_run_replays_a_graph(schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GR1: --graph captures and replays; the outputs are compared, the order is checked, the counts are told."""
    x = np.arange(4, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "y.npz", y=6 * x)
    program = tmp_path / "scale.pte"
    program.write_bytes(
        bytes(scale.PROGRAM) if not isinstance(scale.PROGRAM, Path) else scale.PROGRAM.read_bytes()
    )
    arguments = ["run", str(program), "--import", "examples.scale", "--schedule", schedule, "--graph"]
    arguments += ["--input", str(tmp_path / "x.npy"), "--expect", str(tmp_path / "y.npz"), "--repeat", "3"]
    assert main([*arguments, "--check-ordering", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["graph"]["captures"], told["graph"]["replays"], told["graph"]["eager"]) == (1, 3, 0)
    assert told["ordering"]["accesses"] > 0 and told["ordering"]["unseen"] == []
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "2 islands in one launch" in out and "3 replays" in out and "equal" in out


def test_run_says_why_there_is_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GR7: on the cpu, as an error of its own."""
    status = main(["run", str(ROOT / "examples/digits/digits.pte"), "--ones", "--graph", "--device", "cpu"])
    assert status != 0 and "which has no graphs" in capsys.readouterr().err
