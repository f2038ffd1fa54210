"""The digits example, as a user runs it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import headrace
from headrace import pte
from tests import programs

DIGITS = programs.ROOT / "examples" / "digits"


def demo(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.digits.demo"],
        cwd=programs.ROOT,
        capture_output=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout.decode(environment.get("PYTHONIOENCODING", "utf-8"))


def test_demo_tells_its_accuracy_islands_and_time() -> None:
    text = demo(PYTHONIOENCODING="utf-8")
    accuracy = re.search(r"accuracy: ([\d.]+)% of (\d+) held-out images", text)
    assert accuracy
    assert float(accuracy[1]) > 96
    assert int(accuracy[2]) > 300
    assert text.count("island XnnpackBackend") == 2
    assert "kernel aten::_log_softmax.out" in text
    assert "torch in this process: no" in text
    started = re.search(r"process start to first answer: ([\d.]+) s, to within 0.01 s", text)
    assert started
    assert 0 < float(started[1]) < 60
    assert "██" in text
    assert re.findall(r"schedule (eager|late|seed 20) +the same predictions", text) == [
        "eager",
        "late",
        "seed 20",
    ]


def test_demo_draws_on_a_terminal_without_unicode() -> None:
    text = demo(PYTHONIOENCODING="ascii")
    assert "##" in text


def test_committed_program_is_small_and_of_any_batch() -> None:
    path = DIGITS / "digits.pte"
    assert path.stat().st_size <= 300_000
    method = pte.read(path)["forward"]
    assert method.delegates == ("XnnpackBackend",)
    assert {operator.name for operator in method.operators} >= {"aten::native_layer_norm.out"}
    assert method.inputs[0].shape == (512, 1, 8, 8)
    with np.load(DIGITS / "digits.npz") as held_out, headrace.load(path) as program:
        images, labels = held_out["images"], held_out["labels"]
        x = images[:, None].astype(np.float32)
        (scores,) = program["forward"](x)
        assert (scores.argmax(axis=-1) == labels).mean() > 0.96
        np.testing.assert_allclose(np.exp(scores).sum(axis=-1), 1.0, rtol=1e-5)
        for size in (1, 2, 17):
            (part,) = program["forward"](x[:size])
            np.testing.assert_allclose(part, scores[:size], rtol=1e-4, atol=1e-4)
        (full,) = program["forward"](np.resize(x, (512, 1, 8, 8)))
        np.testing.assert_allclose(full[: len(x)], scores, rtol=1e-4, atol=1e-4)
        with pytest.raises(headrace.InputError, match="513"):
            program["forward"](np.zeros((513, 1, 8, 8), np.float32))


@pytest.mark.parametrize("schedule", ["eager", "late", "3"])
def test_split_program_runs_from_the_command_line_on_the_simulated_device(schedule: str) -> None:
    """BY2: what needs no GPU code runs on the simulated device."""
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "run",
        str(DIGITS / "digits_split.pte"),
        "--random",
        "0",
        "--json",
    ]
    command += ["--import", "examples.digits.normalize", "--schedule", schedule]
    done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["device"] == "sim:0"
    assert [island["delegate"] for island in said["islands"]] == [
        "DigitsNormalize",
        "XnnpackBackend",
        "XnnpackBackend",
    ]


def test_split_program_answers_as_the_whole_one() -> None:
    importlib.import_module("examples.digits.normalize")
    x = np.random.default_rng(1).uniform(0, 16, (5, 1, 8, 8)).astype(np.float32)
    with headrace.load(DIGITS / "digits.pte") as whole:
        (wanted,) = whole["forward"](x)
    for device in ("cpu", headrace.device("sim", schedule="late")):
        with headrace.load(DIGITS / "digits_split.pte", device=device) as split:
            np.testing.assert_allclose(split["forward"](x)[0], wanted, rtol=1e-4, atol=1e-4)
