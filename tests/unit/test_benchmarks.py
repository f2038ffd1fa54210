"""The benchmark measures right answers only, and what it reports of ours holds the package's promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import islands
from tests import programs


def worker(*arguments: str, asked: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(benchmarks.WORKER), *arguments]
    return subprocess.run(command, input=asked, capture_output=True, text=True)


def test_startup_maps_no_libtorch_and_stays_small() -> None:
    """PK1: at most 60 MB resident after the first answer, and no libtorch mapped."""
    done = worker("startup", "ours", *benchmarks.files("mlp_portable"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["libtorch_mapped"]
    assert 0 < result["imported_nbytes"] <= result["answered_nbytes"] < 60e6
    assert result["import_s"] > 0


def test_calls_are_timed_one_sample_for_each_name_asked() -> None:
    done = worker("calls", "ours", *benchmarks.files("add"), asked="add\nadd\n")
    assert done.returncode == 0, done.stderr
    versions, *samples = done.stdout.splitlines()
    assert "headrace" in json.loads(versions)["versions"]
    assert len(samples) == 2
    assert all(0 < float(us) < 1e5 for us in samples)


def test_a_wrong_answer_is_no_measurement(tmp_path: Path) -> None:
    path, golden = benchmarks.files("add")
    with np.load(golden) as archive:
        arrays = dict(archive)
    arrays["0/out/0"] = arrays["0/out/0"] + 1
    np.savez(tmp_path / "wrong.npz", **arrays)
    for what in ("startup", "calls"):
        done = worker(what, "ours", path, str(tmp_path / "wrong.npz"), asked="add\n")
        assert done.returncode != 0
        assert "Not equal to tolerance" in done.stderr


def test_every_measured_program_takes_and_gives_tensors_alone() -> None:
    """The worker passes and compares arrays and nothing else."""
    for name in benchmarks.CALL_PROGRAMS:
        for call in programs.load(name).calls:
            assert {value.kind for value in call.inputs + call.outputs} == {"tensor"}


def test_table_says_whether_a_goal_is_met() -> None:
    result = {"ours": 4.0, "stock": 6.0, "ratio": 4 / 6}
    report = {
        "what": "calls",
        "results": {"add": result, "cnn": result},
        "goals": {"add": {"most": 0.5, "met": False}},
    }
    first, second = benchmarks.table(report).splitlines()[1:]
    assert "add, µs" in first
    assert "MISSES the goal of 0.5" in first
    assert "goal" not in second


@pytest.mark.parametrize("kind", islands.KINDS)
def test_islands_are_timed_over_as_many_islands_as_it_says(kind: str, tmp_path: Path) -> None:
    """The programs have 1, 10 and 100 islands, all of them are run, and a slope that grows misses the goal."""
    library = str(islands.native_delegate(sys.executable, tmp_path)) if kind == "native" else ""
    paths = [str(programs.HERE / "committed" / f"chain{count}.pte") for count in islands.COUNTS]
    command = [sys.executable, str(Path(islands.__file__)), "sim", library, "2"]
    done = subprocess.run([*command, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 2 and all(len(row) == 3 and 0 < row[0] < row[2] for row in rows)
    swapped = subprocess.run([*command, *paths[::-1]], capture_output=True, text=True)
    assert swapped.returncode != 0 and "expected 1 islands, got 100" in swapped.stderr
    assert islands.slopes({1: 5.0, 10: 23.0, 100: 203.0}) == (2.0, 2.0)
