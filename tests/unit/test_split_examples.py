"""The examples that export, as a user runs them: one process with torch and the run time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.programs.with_run_time import SCRIPT


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the examples print, and where they wrote."""
    folder = tmp_path_factory.mktemp("examples")
    code = """
        import pathlib
        from headrace.export import Verify, Xnnpack
        from examples import split_models
        from examples.digits import export as digits
        from examples.digits.train import Network
        import torch
        verify = Verify(python=arguments[0])
        split_models.main(pathlib.Path(arguments[1]), verify)
        torch.manual_seed(0)
        for name, delegates in (("digits", [Xnnpack()]), ("digits_split", [digits.NORMALIZE, Xnnpack()])):
            digits.write(pathlib.Path(arguments[1]) / (name + ".pte"), Network().eval(), delegates, verify)
    """
    done = subprocess.run(
        [programs.export_python(), "-W", "ignore", "-c", SCRIPT, code, *programs.package_folders(), "--", sys.executable, str(folder)],
        cwd=programs.ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, folder


def test_a_vision_model_and_a_transformer_run_split(said: tuple[str, Path]) -> None:
    """EX1, EX4, EX5: two delegates each, verified, the same under every schedule, drawn."""
    text, folder = said
    assert "vision: ExampleStandardize, Xnnpack; under three schedules the same answer" in text
    assert "transformer: Xnnpack, ExampleSoftmax; under three schedules the same answer" in text
    assert text.count("verified: 2 calls on each of cpu, sim (schedule late), sim (schedule 7)") == 4
    for name in ("vision", "transformer"):
        assert (folder / f"{name}.svg").read_text().startswith("<svg ")


def test_the_digits_are_exported_by_the_public_call(said: tuple[str, Path]) -> None:
    """EX1: what the demo runs, from a network of the same form."""
    from headrace import pte

    text, folder = said
    assert "digits.pte: " in text and "digits_split.pte: " in text
    for name in ("digits", "digits_split"):
        made = pte.read(folder / f"{name}.pte")["forward"]
        committed = pte.read(programs.ROOT / "examples" / "digits" / f"{name}.pte")["forward"]
        assert made.inputs[0].shape == committed.inputs[0].shape
        assert made.delegates == committed.delegates
        kernels = [{o.name for o in method.operators} for method in (made, committed)]
        assert "aten::_log_softmax.out" in kernels[0] and kernels[0] <= kernels[1]
