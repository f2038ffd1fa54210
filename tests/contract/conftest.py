"""One suite over every device and, where it matters, over every way a delegate may work.

A test takes ``devices`` (all of them) or ``sims`` (those that show what is pending) and loops over it: each item
is a fresh device, and under ``seeds`` there are as many as ``HEADRACE_SEEDS`` says (200; ``make test-seeds`` asks
for 1,000). A failure says which device it was.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from tests import programs
from tests.programs.committed import __file__ as committed

from . import delegates

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "200"))

Make = Callable[[], Iterator[Any]]


def _settled_gpu() -> Any:
    """The one GPU of the process, with nothing in flight and nothing kept for later."""
    gpu = headrace.device("cuda:0")
    gpu.synchronize()
    gc.collect()
    gpu.trim()
    return gpu


def _seeds() -> Iterator[Any]:
    for seed in range(SEEDS):
        yield headrace.device("sim", schedule=seed)


# Every device the suite runs on.
DEVICES: dict[str, Make] = {
    "cpu": lambda: iter([headrace.device("cpu")]),
    "sim-eager": lambda: iter([headrace.device("sim", schedule="eager")]),
    "sim-late": lambda: iter([headrace.device("sim", schedule="late")]),
    "sim-seeds": _seeds,
    "cuda": lambda: iter([_settled_gpu()]),
}
SIMS = [name for name in DEVICES if name.startswith("sim")]

# The device that the running test looks at, for the report of a failure.
_now = "none"


def _watched(name: str) -> Iterator[Any]:
    global _now
    for count, device in enumerate(DEVICES[name]()):
        _now = f"{name}, device {count}" + (f" (schedule={count})" if name == "sim-seeds" else "")
        yield device
    _now = "none"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        report.sections.append(("device", _now))
    return report


@dataclass(frozen=True)
class Devices:
    """Fresh devices of one kind; may be looped over more than once."""

    name: str

    def __iter__(self) -> Iterator[Any]:
        return _watched(self.name)

    @property
    def late(self) -> bool:
        return self.name == "sim-late"


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.cuda) if n == "cuda" else n for n in DEVICES],
)
def devices(request: pytest.FixtureRequest) -> Devices:
    return Devices(request.param)


@pytest.fixture(params=SIMS)
def sims(request: pytest.FixtureRequest) -> Devices:
    return Devices(request.param)


@pytest.fixture
def late() -> Any:
    """A simulated device on which nothing runs until something waits for it."""
    return headrace.device("sim", schedule="late")


@pytest.fixture(autouse=True)
def classes() -> Iterator[dict[str, type[delegates.Base]]]:
    """TestA and TestB as they should be, whatever the test before made of them; no selection is left behind."""
    made = delegates.install(delegates.OneCall)
    yield made
    assert headrace.current_stream() is None


@pytest.fixture(params=list(delegates.WAYS))
def way(request: pytest.FixtureRequest) -> type[delegates.Base]:
    """A way to work on the stream of a call, put behind TestA and TestB."""
    chosen = delegates.WAYS[request.param]
    delegates.install(chosen)
    return chosen


@dataclass(frozen=True)
class Golden:
    """A program with what eager PyTorch answers: ``calls`` of (inputs, outputs) as arrays."""

    path: Any
    calls: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
    rtol: float = 1e-5
    atol: float = 1e-6
    data: tuple[Any, ...] = ()

    def load(self, device: Any, **options: Any) -> headrace.Program:
        return headrace.load(self.path, data=self.data, device=device, **options)

    def inputs(self, call: int = 0) -> tuple[Any, ...]:
        return self.calls[call % len(self.calls)][0]

    def right(self, results: Any, call: int = 0) -> bool:
        wanted = self.calls[call % len(self.calls)][1]
        assert len(results) == len(wanted) > 0
        for got, want in zip(results, wanted, strict=True):
            got = got.numpy() if isinstance(got, headrace.Buffer) else got
            assert got.dtype == want.dtype and got.shape == want.shape
            if not np.allclose(got, want, self.rtol, self.atol):
                return False
        return True


@functools.cache
def golden(name: str) -> Golden:
    """A program of tests.programs; "aoti_NAME": one of tests.programs.AOTI, whose islands are native."""
    data: tuple[Any, ...] = ()
    path = Path(committed).parent / f"{name}.pte"
    if path.exists():
        calls = programs.read_calls(path.with_suffix(".npz"))
        rtol, atol = 1e-5, 1e-6
    elif name.startswith("aoti_"):
        native = programs.AOTI.load(name.removeprefix("aoti_"))
        path, data, calls, rtol, atol = native.path, native.data, native.calls, native.rtol, native.atol
    else:
        program = programs.load(name)
        path, calls, rtol, atol = program.path, program.calls, program.rtol, program.atol
    return Golden(
        path,
        tuple((tuple(v.data for v in c.inputs), tuple(v.data for v in c.outputs)) for c in calls),
        rtol,
        atol,
        data,
    )
