"""The benchmark measures right answers only, and what it reports of ours holds the package's promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from benchmarks import __main__ as benchmarks
from benchmarks import islands, planner
from headrace import lanes
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


SCALE = str(programs.ROOT / "examples/scale.pte")


def plan(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the report of the planner's benchmark on the simulated device, whose numbers say nothing."""
    path = tmp_path / "deep" / "planner.json"
    common = ["--device", "sim", "--import", "examples.scale", "--seconds", "0.001", "--calls", "20"]
    status = planner.main([*arguments, *common, "--json", str(path)])
    return status, json.loads(path.read_text())


def test_the_planner_s_split_is_run_and_compared_with_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GC6: targets from p99 in an equal share; the proposed lanes are run anew, all busy; targets that nothing misses hold."""
    arguments = (SCALE, SCALE, "--neighbour", SCALE, "--slack", "1e6", "--outside", "--check")
    status, report = plan(tmp_path, *arguments)
    results = report["results"]
    assert (status, results["held"], results["share_sms"]) == (0, True, 40)
    assert (report["version"], report["what"], report["command"][2]) == (1, "planner", "benchmarks.planner")
    # The smallest that is granted for each target, and what is left for the neighbour.
    assert results["proposal"]["lanes"] == [8, 8, 112]
    first, second, neighbour = results["programs"]
    assert len({row["program"] for row in results["programs"]}) == 3
    for row, sms in zip(results["programs"], (8, 8, 112), strict=True):
        for setting, where, beside, least in (
            ("whole", 0, "alone", 20),
            ("share", 40, "alone", 20),
            ("run", sms, "in lanes", planner.LEAST_CALLS),
            ("outside", sms, "outside every lane", planner.LEAST_CALLS),
        ):
            one = row[setting]
            assert (one["sms"], one["beside"]) == (where, beside)
            latency = one["latency"]
            assert 0 < latency["p50_us"] <= latency["p99_us"] <= latency["p999_us"]
            assert latency["calls"] >= least
    for row in (first, second):
        assert row["target_us"] == pytest.approx(1e6 * row["share"]["latency"]["p99_us"])
        assert row["met"] is True
    assert neighbour["target_us"] is None and neighbour["met"] is None
    told = capsys.readouterr().out
    assert told.count(" met\n") == 2 and "MISSED" not in told
    assert "the proposal of 8, 8, 112 SMs held" in told and "the others in no lane" in told


def test_a_proposal_that_misses_when_it_is_run_did_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GC6: with --check that ends with status 1, without it with 0; the planner's word is not taken for it."""

    def optimist(tenants: Sequence[lanes.Tenant], *, device: Any, calls: int) -> lanes.Proposal:
        measured = tuple(lanes.measure(tenants, [8, 16], device=device, calls=calls))
        return lanes.Proposal((8, 16), "every target was met, it says", (), measured)

    monkeypatch.setattr(lanes, "propose", optimist)
    for check, status in (("--check", 1), ("--slack=1e-6", 0)):
        found, report = plan(tmp_path, SCALE, SCALE, "--slack=1e-6", check)
        assert (found, report["results"]["held"]) == (status, False)
        assert [row["met"] for row in report["results"]["programs"]] == [False, False]
        assert all(row["outside"] is None for row in report["results"]["programs"])
        told = capsys.readouterr().out
        assert told.count("MISSED") == 2 and "the proposal of 8, 16 SMs DID NOT HOLD" in told


def test_no_proposal_is_no_split_that_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GC6: targets below what a program takes alone: nothing is run, and the reason is told."""
    status, report = plan(tmp_path, SCALE, SCALE, "--slack", "1e-6", "--check")
    results = report["results"]
    assert (status, results["held"], results["proposal"]["lanes"]) == (1, False, None)
    assert all(row["run"] is None and row["met"] is None for row in results["programs"])
    told = capsys.readouterr().out
    assert f"no lanes were proposed: {results['proposal']['reason']}" in told
    assert "with a margin of 1.2" in results["proposal"]["reason"]


def test_the_planner_needs_a_device_that_splits(tmp_path: Path) -> None:
    """GC1: the refusal of the device, and nothing is written."""
    with pytest.raises(headrace.DeviceError, match=r"cpu, split: .*partitions"):
        planner.main(
            [SCALE, SCALE, "--device", "cpu", "--import", "examples.scale", "--json", str(tmp_path / "x")]
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(headrace.DeviceError, match="at most 132 SMs"):
        planner.measure([lanes.Tenant(SCALE, ())] * 17, device=headrace.device("sim"))
