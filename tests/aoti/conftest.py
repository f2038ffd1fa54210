"""Fixtures for tests of AOTInductor islands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close
from tests.contract import delegates

DEVICES: dict[str, Any] = {
    "cpu": lambda: headrace.device("cpu"),
    "sim-eager": lambda: headrace.device("sim", schedule="eager"),
    "sim-late": lambda: headrace.device("sim", schedule="late"),
    "sim-seed": lambda: headrace.device("sim", schedule=11),
}


@pytest.fixture(params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


@pytest.fixture(autouse=True)
def other_delegate() -> None:
    """TestA, which takes turns with the islands of `chain`."""
    delegates.install(delegates.OneCall, ["TestA"])


def arguments(call: Any) -> list[Any]:
    return [array_of(value) for value in call.inputs]


def assert_right(program: programs.Program, results: Any, call: Any) -> None:
    """Every output against eager PyTorch's."""
    assert len(results) == len(call.outputs) > 0
    for got, want in zip(results, call.outputs, strict=True):
        if isinstance(got, headrace.Buffer) and got.dtype != "bfloat16":
            got = got.numpy()
        assert_close(got, want, program.rtol, program.atol)


def check(program: programs.Program, loaded: headrace.Program) -> None:
    """Every call of the program, in order."""
    for call in program.calls:
        assert_right(program, loaded["forward"](*arguments(call)), call)


def mapped() -> int:
    """How many libraries that were loaded from memory are mapped."""
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "memfd:headrace:" in line})


def same_bits(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="session", autouse=True)
def exported() -> None:
    """The programs are there before any test's own time limit runs."""
    programs.AOTI.ensure()
