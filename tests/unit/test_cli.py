"""The command line: what each command prints, as text and as JSON, and with what status it ends."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import headrace
from headrace import cli
from tests import programs


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: object) -> tuple[int, str, str]:
        status = cli.main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def path(name: str) -> Path:
    return programs.load(name).path


def save_inputs(name: str, folder: Path, call: int = 0) -> list[str]:
    arguments = []
    for i, value in enumerate(programs.load(name).calls[call].inputs):
        file = folder / f"in{i}.npy"
        array = value.float64().astype(np.float32) if value.dtype == "bfloat16" else value.data
        np.save(file, array)
        arguments += ["--input", str(file)]
    return arguments


def expected(name: str, call: int = 0) -> list[Any]:
    outputs = programs.load(name).calls[call].outputs
    return [v.float64().astype(np.float32) if v.dtype == "bfloat16" else v.data for v in outputs]


# ------------------------------------------------------------------ doctor


def test_doctor_says_what_there_is(run: Any) -> None:
    status, out, err = run("doctor")
    assert (status, err) == (0, "")
    assert re.search(rf"^headrace +{headrace.__version__}$", out, re.MULTILINE)
    assert re.search(r"^engine +ExecuTorch 1\.5\.1\S*, (bundled|installed) \(/.*\)$", out, re.MULTILINE)
    assert re.search(r"^delegates +.*XnnpackBackend", out, re.MULTILINE)
    assert re.search(r"^TensorRT +(\w+ [\d.]+|no run time that loads)", out, re.MULTILINE)


def test_doctor_as_json(run: Any) -> None:
    status, out, err = run("doctor", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["version"], found["command"], found["headrace"]) == (1, "doctor", headrace.__version__)
    assert found["torch_loaded"] is False
    assert "XnnpackBackend" in found["delegates"]
    assert found["kernels"] > 200 and found["threads"] >= 1
    assert [kind["kind"] for kind in found["tensorrt"]] == ["tensorrt", "tensorrt_lean", "tensorrt_rtx"]
    assert all(bool(kind["version"]) != bool(kind["problem"]) for kind in found["tensorrt"])


# ----------------------------------------------------------------- inspect


def test_inspect_prints_methods_values_islands_and_instructions(run: Any) -> None:
    status, out, err = run("inspect", path("transformer_xnnpack"))
    assert (status, err) == (0, "")
    assert out.startswith("method forward\n")
    assert "XnnpackBackend, payload " in out
    plan = programs.load("transformer_xnnpack").view["program"]["execution_plan"][0]
    count = len(plan["chains"][0]["instructions"])
    assert f"  {count} instructions, " in out
    assert len(re.findall(r"^ +\d+ (?:kernel|delegate|move|jump|free)\b", out, re.MULTILINE)) == count


def test_inspect_as_json_carries_a_version_and_the_program(run: Any) -> None:
    for name in ("two_methods", "external_weights", "literal_inputs", "kv_cache", "split_cuda"):
        status, out, err = run("inspect", "--json", path(name))
        assert (status, err) == (0, "")
        found = json.loads(out)
        assert (found["version"], found["command"], found["file"]) == (1, "inspect", str(path(name)))
        names = [plan["name"] for plan in programs.load(name).view["program"]["execution_plan"]]
        assert [m["name"] for m in found["program"]["methods"]] == names


def test_inspect_shows_a_data_file(run: Any) -> None:
    (file,) = programs.load("external_weights").data
    status, out, _ = run("inspect", file)
    assert status == 0
    assert "a.weight: float32[128, 64], 32768 bytes\n" in out
    status, out, _ = run("inspect", "--json", file)
    assert status == 0
    assert {e["key"] for e in json.loads(out)["data"]["entries"]} == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    }
    status, out, _ = run("inspect", path("external_weights"))
    assert "needs data files with: a.bias, a.weight, b.bias, b.weight" in out


def test_inspect_runs_nothing_and_needs_no_delegate(run: Any) -> None:
    for name in ("not_there", "kernel_missing", "split_cuda"):
        assert run("inspect", path(name))[0] == 0


def test_a_folder_and_a_file_that_is_not_there_are_called_so(run: Any, tmp_path: Path) -> None:
    digits = programs.ROOT / "examples" / "digits" / "digits.pte"
    for arguments, status, text in (
        (["inspect", tmp_path], 3, f"ProgramError: {tmp_path}: expected a file, got a folder"),
        (["run", digits, "--input", tmp_path], 2, f"InputError: {tmp_path}: expected an array"),
        (["run", digits, "--input", tmp_path], 2, "got a folder; check the path"),
        (["run", digits, "--input", tmp_path / "x.npy"], 2, "got no such file; check the path"),
    ):
        found, _, err = run(*arguments)
        assert found == status and text in err and len(err.splitlines()) == 1, err


# --------------------------------------------------------------------- run

EVERY_KIND = [
    "mlp_xnnpack",
    "several_outputs",
    "bfloat16",
    "float16",
    "int64",
    "boolean",
    "zero_sized",
    "scalars",
    "literal_outputs",
    "int_outputs",
]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_run_reads_inputs_writes_outputs_and_compares(run: Any, name: str, tmp_path: Path) -> None:
    """GC3: exact shapes and every value; outputs of every kind are printed, written and compared."""
    inputs, want = save_inputs(name, tmp_path), expected(name)
    np.savez(tmp_path / "want.npz", *[w for w in want if w is not None])
    status, out, err = run(
        "run", path(name), *inputs, "--output", tmp_path / "out", "--expect", tmp_path / "want.npz"
    )
    assert (status, err) == (0, ""), out
    assert out.count(": equal, largest deviation ") == len([w for w in want if w is not None])
    for i, w in enumerate(want):
        file = tmp_path / "out" / f"out{i}.npy"
        if w is None:
            assert not file.exists()
        else:
            got = np.load(file, allow_pickle=False)
            assert got.shape == np.shape(w)
            np.testing.assert_allclose(
                got.astype(np.float64), np.asarray(w).astype(np.float64), rtol=2e-2, atol=2e-2
            )


@pytest.mark.parametrize("name", EVERY_KIND)
def test_what_run_wrote_is_what_a_later_run_expects(run: Any, name: str, tmp_path: Path) -> None:
    """GC3: an archive of --output goes into --expect."""
    inputs, archive = save_inputs(name, tmp_path), tmp_path / "new" / "out.npz"
    assert run("run", path(name), *inputs, "--output", archive)[0] == 0
    status, out, _ = run("run", path(name), *inputs, "--expect", archive)
    assert status == 0 and "DIFFERENT" not in out


def test_an_interruption_ends_with_status_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(headrace, "load", interrupted)
    assert run("run", path("add"), "--ones") == (130, "", "headrace: interrupted\n")


@pytest.mark.parametrize("name", EVERY_KIND)
def test_run_as_json(run: Any, name: str, tmp_path: Path) -> None:
    inputs, want = save_inputs(name, tmp_path), expected(name)
    np.savez(tmp_path / "want.npz", *[w for w in want if w is not None])
    status, out, err = run(
        "run", path(name), *inputs, "--json", "--repeat", 3, "--expect", tmp_path / "want.npz"
    )
    assert (status, err) == (0, "")
    found = json.loads(out, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert (found["version"], found["command"], found["method"], found["calls"]) == (1, "run", "forward", 3)
    assert found["median_us"] > 0
    assert [tuple(o["actual"]) for o in found["outputs"]] == [np.shape(w) for w in want]
    assert all(row["equal"] for row in found["compared"])


def test_a_difference_ends_with_status_1_and_names_the_output(run: Any, tmp_path: Path) -> None:
    """GC3: any difference beyond the tolerance that it prints."""
    inputs, (want,) = save_inputs("mlp_portable", tmp_path), expected("mlp_portable")
    wrong = want.copy()
    wrong[3, 63] += 0.01
    np.savez(tmp_path / "wrong.npz", wrong)
    command = ["run", path("mlp_portable"), *inputs, "--expect", tmp_path / "wrong.npz"]
    status, out, err = run(*command)
    assert (status, err) == (1, "")
    assert "output 0: DIFFERENT, largest deviation 0.01 (tolerance 0.0001 relative + 1e-05)" in out
    status, out, _ = run(*command, "--json")
    assert status == 1
    (row,) = json.loads(out)["compared"]
    assert row["equal"] is False and row["largest_deviation"] == pytest.approx(0.01, rel=1e-3)
    status, out, _ = run(*command, "--atol", 0.1)
    assert status == 0 and "equal" in out and "+ 0.1)" in out
    assert run(*command, "--rtol", 100)[0] == 0


def test_another_shape_and_numbers_that_are_none_are_differences(run: Any, tmp_path: Path) -> None:
    """GC3: the same count of elements is not enough, and NaN equals NaN alone."""
    inputs, (want,) = save_inputs("mlp_portable", tmp_path), expected("mlp_portable")
    nan, infinite = want.copy(), want.copy()
    nan[0, 0], infinite[0, 0] = np.nan, np.inf
    for wrong, says in (
        (want.reshape(64, 4), "DIFFERENT, shape [4, 64] instead of [64, 4]"),
        (want[None], "DIFFERENT, shape [4, 64] instead of [1, 4, 64]"),
        (nan, "DIFFERENT, largest deviation inf"),
        (infinite, "DIFFERENT, largest deviation inf"),
    ):
        np.savez(tmp_path / "wrong.npz", wrong)
        command = ["run", path("mlp_portable"), *inputs, "--expect", tmp_path / "wrong.npz"]
        status, out, _ = run(*command)
        assert status == 1 and says in out
        status, out, _ = run(*command, "--json")
        assert status == 1
        json.loads(out, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_integers_are_compared_exactly(run: Any, tmp_path: Path) -> None:
    """GC3: two int64 that are one float64 differ."""
    inputs, want = save_inputs("int64", tmp_path), expected("int64")
    assert want[1].dtype == np.int64 and abs(want[1]).max() > 2**60
    wrong = [w.copy() for w in want]
    wrong[1][np.argmax(abs(wrong[1]))] += 1
    np.savez(tmp_path / "wrong.npz", *wrong)
    status, out, _ = run("run", path("int64"), *inputs, "--expect", tmp_path / "wrong.npz")
    assert status == 1
    assert "output 1: DIFFERENT, largest deviation 1 (tolerance 0 relative + 0)" in out


def test_ones_and_random_make_inputs_of_the_greatest_shape(run: Any, tmp_path: Path) -> None:
    for name in ("dynamic_batch", "bfloat16", "int64", "boolean", "small_ints", "none_input", "no_inputs"):
        for how in (["--ones"], ["--random", 3]):
            assert run("run", path(name), *how)[0] == 0, (name, how)
    run("run", path("dynamic_batch"), "--random", 3, "--output", tmp_path / "a")
    run("run", path("dynamic_batch"), "--random", 3, "--output", tmp_path / "b")
    run("run", path("dynamic_batch"), "--random", 4, "--output", tmp_path / "c")
    a, b, c = (np.load(tmp_path / k / "out0.npy") for k in "abc")
    assert a.shape == (8, 64) and np.array_equal(a, b) and not np.array_equal(a, c)


def test_run_takes_a_method_data_files_and_threads(run: Any) -> None:
    status, out, _ = run("run", path("two_methods"), "--method", "compare", "--ones")
    assert status == 0 and "method compare" in out and "output 1" in out
    program = programs.load("external_two_files")
    data = [a for file in program.data for a in ("--data", file)]
    assert run("run", program.path, *data, "--ones")[0] == 0
    done = command("run", path("cnn_xnnpack"), "--threads", 1, "--ones", "--repeat", 2)
    assert done.returncode == 0 and "2 calls, median " in done.stdout and "XnnpackBackend" in done.stdout


# ------------------------------------------------------- status 2 and 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add"], "forward: expected 2 inputs, got none; give --input FILE.npy for each"),
        (["add", "--input", "{tmp}/one.npy"], "forward: expected 2 inputs, got 1"),
        (
            ["add", "--input", "{tmp}/nowhere.npy"],
            "nowhere.npy: expected an array written by numpy.save, got no such file",
        ),
        (["add", "--input", "{tmp}/text.npy"], "text.npy: expected an array written by numpy.save, got: "),
        (["add", "--input", "{tmp}/empty.npy"], "empty.npy: expected an array written by numpy.save, got: "),
        (["add", "--input", "{tmp}/zip.npy"], "zip.npy: expected an array written by numpy.save, got: "),
        (
            ["add", "--input", "{tmp}/object.npy"],
            "object.npy: expected an array written by numpy.save, got: ",
        ),
        (
            ["add", "--input", "{tmp}/many.npz"],
            "many.npz: expected an array written by numpy.save, got an archive",
        ),
        (
            ["add", "--input", "{tmp}/two.npy", "--input", "{tmp}/two.npy"],
            "forward, input 0: expected float32[1]",
        ),
        (
            ["add", "--ones", "--expect", "{tmp}/nowhere.npz"],
            "nowhere.npz: expected arrays written by numpy.savez",
        ),
        (
            ["add", "--ones", "--expect", "{tmp}/one.npy"],
            "expected arrays written by numpy.savez, got a single array",
        ),
        (["add", "--ones", "--expect", "{tmp}/zip.npy"], "expected arrays written by numpy.savez, got: "),
        (
            ["add", "--ones", "--expect", "{tmp}/member.npz"],
            "expected arrays written by numpy.savez, got: an archive whose member 'note' is no array",
        ),
        (["add", "--ones", "--expect", "{tmp}/many.npz"], "many.npz: expected 1 arrays, one for each output"),
        (
            ["add", "--ones", "--expect", "{tmp}/texts.npz"],
            "expected numbers to compare output 0 with, got <U1",
        ),
        (["add", "--ones", "--method", "backward"], "--method: expected one of forward, got 'backward'"),
        (["add", "--ones", "--repeat", "0"], "--repeat: expected 1 or more, got 0"),
        (["add", "--ones", "--threads", "0"], "num_threads: expected a count between 1 and 1024, got 0"),
        (
            ["add", "--ones", "--output", "{tmp}/one.npy"],
            "--output: expected a folder or an archive that can be written, got: ",
        ),
        (
            ["literal_inputs", "--ones"],
            "--ones and --random: expected a method with tensors only, got an input of",
        ),
    ],
)
def test_a_fault_of_the_command_line_or_an_input_ends_with_status_2(
    run: Any, arguments: list[str], message: str, tmp_path: Path
) -> None:
    """OP4: told by the status too, and the message goes to stderr alone."""
    np.save(tmp_path / "one.npy", np.ones(1, np.float32))
    np.save(tmp_path / "two.npy", np.ones(2, np.float32))
    np.save(tmp_path / "object.npy", np.array([None]))
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04 but no archive")
    np.savez(tmp_path / "many.npz", np.ones(1), np.ones(1))
    np.savez(tmp_path / "texts.npz", np.array(["a"]))
    with zipfile.ZipFile(tmp_path / "member.npz", "w") as archive:
        archive.writestr("note", "no array")
    name, *rest = [a.replace("{tmp}", str(tmp_path)) for a in arguments]
    status, out, err = run("run", path(name), *rest)
    assert (status, out) == (2, "")
    assert re.match(r"headrace: (Input|Option)Error: ", err) and message in err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["run", "/nowhere.pte", "--ones"], "ProgramError"),
        (["inspect", "/nowhere.pte"], "ProgramError"),
        (["inspect", "/nowhere.ptd"], "ProgramError"),
        (["inspect", __file__], "ProgramError"),
        (["run", "{not_there}", "--ones"], "DelegateUnavailable"),
        (["run", "{kernel_missing}", "--ones"], "DelegateUnavailable"),
        (["run", "{external_weights}", "--ones"], "ProgramError"),
    ],
)
def test_a_fault_of_the_program_ends_with_status_3(run: Any, arguments: list[str], kind: str) -> None:
    """OP4"""
    arguments = [re.sub(r"^\{(\w+)\}$", lambda m: str(path(m[1])), a) for a in arguments]
    status, out, err = run(*arguments)
    assert (status, out) == (3, "")
    assert err.startswith(f"headrace: {kind}: ")
    status, out, err = run(*arguments, "--json")
    assert status == 3
    found = json.loads(out)
    assert (found["version"], found["command"], found["error"]) == (1, arguments[0], kind)
    assert found["message"] in err and isinstance(found["log"], list)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("raises", "1 / 0", "ZeroDivisionError"),
        ("unfinished", "def", "SyntaxError"),
        ("", None, "ValueError"),
    ],
)
def test_a_module_that_cannot_be_imported_ends_with_status_2(
    run: Any, name: str, source: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OP4: whatever its own code raises."""
    monkeypatch.chdir(tmp_path)
    if source is not None:
        (tmp_path / f"{name}.py").write_text(source)
    status, out, err = run("run", path("add"), "--ones", "--import", name)
    assert (status, out) == (2, "")
    assert f"--import {name}: expected a module that can be imported, got {message}" in err


# ------------------------------------------------ as a process of its own


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_the_installed_command_is_this_one() -> None:
    (script,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "headrace"]
    assert script.load() is cli.main


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["run"], ["run", "x.pte", "--repeat", "often"], ["run", "x", "--ones", "--random", "1"]],
)
def test_a_command_line_that_cannot_be_read_ends_with_status_2(arguments: list[str]) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: headrace")


def test_help_tells_the_statuses_and_version_is_the_packages() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert all(f"{status} " in done.stdout for status in (0, 1, 2, 3)) and "Exit status" in done.stdout
    assert command("--version").stdout == f"headrace {headrace.__version__}\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As in `headrace inspect model.pte | head -1`: nothing on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "inspect", "--json", path("transformer_portable")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), error) == (0, b"")


def test_output_survives_a_terminal_without_utf8() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = command("run", path("dynamic_batch"), "--ones", "--repeat", 2, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "float32[?8, ?64] on cpu" in done.stdout


# ---------------------------------------------------------------------- order


def test_run_checks_the_order_and_writes_a_trace(run: Any, tmp_path: Path) -> None:
    """OR5, BY1: the record of a run, judged and as a file."""
    trace = tmp_path / "run.json"
    command = ["run", "examples/digits/digits_split.pte", "--ones", "--import", "examples.digits.normalize"]
    picture = tmp_path / "run.svg"
    files = ["--trace", trace, "--plot", picture]
    status, out, err = run(*command, "--schedule", 3, "--check-ordering", *files)
    assert (status, err) == (0, ""), err
    assert re.search(r"order: [1-9]\d* accesses in [1-9]\d* operations, no conflicts", out)
    assert any(e["name"].startswith("island") for e in json.loads(trace.read_text())["traceEvents"])
    drawn = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert [e for e in drawn.iter() if e.get("class") == "island-box"]
    picture.unlink()
    assert run(*command, "--schedule", "late", "--plot", picture)[0] == 0 and picture.exists()
    status, _, err = run(*command, "--schedule", "late", "--plot", tmp_path / "no" / "run.svg")
    assert status == cli.USAGE and "InputError: plot: expected a file that can be written" in err
    status, out, _ = run(*command, "--schedule", 3, "--check-ordering", "--json")
    found = json.loads(out)["ordering"]
    assert status == 0 and found["accesses"] > 0 and found["conflicts"] == []


def test_check_ordering_fails_where_there_is_nothing_to_check(run: Any) -> None:
    status, out, err = run("run", path("mlp_portable"), "--ones", "--check-ordering")
    assert (status, out) == (cli.FAILED, "") and "OrderingError: record: expected work of a device" in err


def test_run_in_a_lane_prints_what_was_granted_and_the_planned_memory(run: Any) -> None:
    """GC3: the granted count, which is rounded up; each planned buffer's size and device; exact values by --expect."""
    command = [
        "run",
        "examples/scale.pte",
        "--import",
        "examples.scale",
        "--ones",
        "--device",
        "sim",
        "--green-context-sms",
    ]
    status, out, err = run(*command, 9)
    assert status == 0 and err == ""
    assert "lane: 16 SMs of 132 granted, 9 asked for" in out
    assert "planned memory of forward: 16 bytes on sim:0" in out
    status, out, _ = run(*command, 8, "--graph", "--json")
    told = json.loads(out)
    assert status == 0 and told["lane"] == {"asked": 8, "granted": 8, "total": 132}
    assert told["planned"] == [{"method": "forward", "device": "sim:0", "nbytes": 16}]
    for count, kind in ((0, "OptionError"), (1000, "DeviceError")):
        status, out, err = run(*command, count)
        assert status != 0 and kind in err and str(count) in err
    status, _, err = run(*command[:-3], "--green-context-sms", 8, "--device", "cpu")
    assert status != 0 and "DeviceError" in err


def test_run_looks_whether_the_program_stays_in_its_lane(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """GC2, GC3: one line, or what left it by name and exit status 1; as JSON too."""
    command = ["run", "examples/scale.pte", "--ones", "--device", "sim", "--confinement"]
    inside = [*command, "--import", "examples.scale", "--green-context-sms", 8]
    status, out, err = run(*inside)
    assert (status, err) == (0, "")
    (line,) = [line for line in out.splitlines() if "in its lane" in line]
    assert line in (programs.ROOT / "docs/lanes.md").read_text().splitlines()
    status, out, _ = run(*inside, "--json")
    told = json.loads(out)["confinement"]
    assert status == 0 and told["confined"] is True and told["replayed"] == list(range(8))
    (tmp_path / "scale_aside.py").write_text(
        "import examples.scale\n"
        "class Scale(examples.scale.Scale, name='Scale'):\n"
        "    def run(self, inputs, outputs, stream):\n"
        "        side = stream.device.stream()\n"
        "        side.wait(stream.record())\n"
        "        super().run(inputs, outputs, side)\n"
        "        stream.wait(side.record())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = run(*command, "--import", "scale_aside", "--green-context-sms", 8)
    assert (status, err) == (cli.DIFFERS, "")
    assert "leaves its lane of 8 SMs" in out and "delegate 'Scale': call on stream" in out
    status, _, err = run(*command, "--import", "examples.scale")
    assert status == cli.USAGE and "--confinement: expected a lane to look at" in err
