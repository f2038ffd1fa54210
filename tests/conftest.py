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


def missing_gpu() -> str:
    """Why the tests marked ``cuda`` cannot run here; empty where they can."""
    try:
        headrace.device("cuda:0")
    except headrace.DeviceError as error:
        return str(error)
    from tests.cuda import kernels

    missing = [n for n in ("cupy", "torch", "core") if getattr(kernels, n) is None]
    return (
        f"expected CuPy, PyTorch and cuda.core, whose kernels and arrays the tests use, got no {missing}"
        if missing
        else ""
    )


def missing_second_gpu() -> str:
    """Why the tests marked ``two_gpus`` cannot run where those marked ``cuda`` can."""
    try:
        headrace.device("cuda:1")
    except headrace.DeviceError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The one place that skips for want of a GPU. With HEADRACE_REQUIRE_CUDA set it fails instead."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    why = missing_gpu() if marked else ""
    if why and os.environ.get("HEADRACE_REQUIRE_CUDA"):
        raise pytest.UsageError(f"tests marked cuda: {why}")
    second = why or (missing_second_gpu() if any(i.get_closest_marker("two_gpus") for i in marked) else "")
    for item in marked:
        if why:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {why}"))
        elif second and item.get_closest_marker("two_gpus"):
            item.add_marker(pytest.mark.skip(reason=f"needs two NVIDIA GPUs: {second}"))


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
