"""EX1: random models under random claims, over Python delegates, XNNPACK and CPU kernels, give what eager PyTorch gives.

``HEADRACE_RANDOM_MODELS`` says how many; ``make test-random`` asks for thousands.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace
from tests import programs
from tests.programs import step_delegates
from tests.programs.random_models import BINARY, UNARY

COUNT = int(os.environ.get("HEADRACE_RANDOM_MODELS", "100"))
# Processes that export, and models in one example, one for each.
WORKERS = 2


class Exporter:
    """A process that has torch, which exports what it is asked to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "m.pte"
        folder.mkdir()
        self.process = subprocess.Popen(
            [programs.export_python(), "-W", "ignore", "-m", "tests.programs.random_models", *programs.package_folders()],
            cwd=programs.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({**request, "path": str(self.path)}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                found: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return found
        raise AssertionError(f"the exporter ended with status {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def exporters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Exporter]]:
    folder = tmp_path_factory.mktemp("random")
    found = [Exporter(folder / str(i)) for i in range(WORKERS)]
    yield found
    for one in found:
        one.close()


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    steps: list[list[Any]] = []
    for i in range(draw(st.integers(1, 9))):
        value = st.integers(max(0, i - 4), i)
        name = draw(st.sampled_from(UNARY + BINARY))
        steps.append([name, draw(value), *([draw(value)] if name in BINARY else [])])
    claims = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "kind": st.sampled_from(["python", "python", "xnnpack"]),
                    "share": st.integers(1, 15),
                    "min_size": st.integers(1, 3),
                    "merge": st.booleans(),
                }
            ),
            min_size=1,
            max_size=3,
        )
    )
    results = draw(st.lists(st.integers(1, len(steps)), max_size=2))
    return {
        "rows": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 999)),
        "steps": steps,
        "outputs": [len(steps), *results],
        "claims": claims,
    }


def check(path: Path, request: dict[str, Any]) -> None:
    calls = programs.read_calls(path.with_suffix(".npz"))
    assert calls
    for device in (
        headrace.device("cpu"),
        headrace.device("sim", schedule="late"),
        headrace.device("sim", schedule=request["seed"]),
    ):
        with headrace.record() as record, headrace.load(path, device=device) as program:
            touched = {i.delegate for i in program["forward"].islands} & set(step_delegates.NAMES)
            for call in calls:
                outputs = program["forward"](*(v.data for v in call.inputs))
                assert len(outputs) == len(call.outputs)
                for got, want in zip(outputs, call.outputs, strict=True):
                    np.testing.assert_allclose(got, want.data, rtol=1e-4, atol=1e-5)
        if touched and device.name != "cpu":
            assert record.check().accesses > 0


seen: set[str] = set()


@settings(
    max_examples=COUNT // WORKERS, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
@given(st.tuples(*[requests()] * WORKERS))
def test_a_split_equals_eager(exporters: list[Exporter], asked: tuple[dict[str, Any], ...]) -> None:
    """EX1, EX3, OR5, DM1: on cpu and in two orders of a simulated device."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        answers = list(pool.map(lambda pair: pair[0].ask(pair[1]), zip(exporters, asked, strict=True)))
    for exporter, request, said in zip(exporters, asked, answers, strict=True):
        assert "error" not in said, said
        seen.update(said["delegates"])
        check(exporter.path, request)


def test_every_delegate_was_met() -> None:
    """A test that split nothing would pass as well."""
    assert seen == {"StepsA", "StepsB", "Xnnpack"}
