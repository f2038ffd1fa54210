"""Fixtures that every folder uses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import headrace
from tests import programs


def array_of(value: programs.Value) -> object:
    """A recorded argument as a caller would pass it: bfloat16 as an ml_dtypes array."""
    if value.dtype == "bfloat16":
        import ml_dtypes

        return value.data.view(ml_dtypes.bfloat16)
    return value.data


def assert_close(got: object, want: programs.Value, rtol: float, atol: float) -> None:
    """One result against eager PyTorch: dtype, shape and every number."""
    if want.kind != "tensor":
        assert got == want.data
        return
    if want.dtype == "bfloat16":
        assert isinstance(got, headrace.Buffer)
        assert got.dtype == "bfloat16"
        got = got.float32()
    else:
        assert isinstance(got, np.ndarray)
        assert got.dtype == want.dtype
    assert got.shape == want.data.shape
    np.testing.assert_allclose(got.astype(np.float64), want.float64(), rtol=rtol, atol=atol)


def run_python(
    code: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, in the repository's root, so that it may import ``tests``."""
    return subprocess.run(
        [python, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=programs.ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """The output of a child that ended well and wrote nothing to stderr."""
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def add() -> Iterator[headrace.Method]:
    """The tiniest program: two float32[1] inputs, their sum."""
    with headrace.load(programs.load("add").path) as program:
        yield program["forward"]
