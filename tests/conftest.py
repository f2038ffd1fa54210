"""Fixtures that every folder uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def add(tmp_path: Path) -> Iterator[headrace.Method]:
    """The tiniest program: two float32[2, 3] inputs, their sum."""
    with headrace.load(programs.load("add").path) as program:
        yield program["forward"]
