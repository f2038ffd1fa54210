"""Every exported program runs from NumPy arrays and answers what eager PyTorch answers."""

from __future__ import annotations

import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close

# What runs on the stock engine alone: no delegate of the tests, no device memory.
ENGINE = {"XnnpackBackend"}
RUNNABLE = [
    name
    for name in programs.names()
    if programs.load(name).runs
    and set(programs.load(name).delegates) <= ENGINE
    and not programs.load(name).kernels_missing
]


@pytest.mark.parametrize("name", RUNNABLE)
def test_program_equals_eager_pytorch(name: str) -> None:
    """DE4: XNNPACK and the CPU kernels answer as eager PyTorch does, alone and in one program."""
    program = programs.load(name)
    with headrace.load(program.path, data=program.data) as loaded:
        for call in program.calls:
            results = loaded[call.method](*map(array_of, call.inputs))
            assert len(results) == len(call.outputs)
            for got, want in zip(results, call.outputs, strict=True):
                assert_close(got, want, program.rtol, program.atol)


def test_nothing_runnable_is_left_out() -> None:
    """The programs above cover what the engine is used for."""
    assert len(RUNNABLE) >= 25
    for needed in (
        "mlp_portable",
        "cnn_xnnpack",
        "transformer_xnnpack",
        "two_methods",
        "kv_cache",
        "bfloat16",
    ):
        assert needed in RUNNABLE
