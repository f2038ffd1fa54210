"""The test programs that need no device: their Python delegates' payloads compute what PyTorch computed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import pte
from tests import programs
from tests.programs import graph

COMMITTED = programs.HERE / "committed" / "two_islands.pte"
COPIES = ("et_copy::_h2d_copy.out", "et_copy::_d2h_copy.out")
OWN = {"TestA", "TestB", "NotThere"}
CHECKED = [
    name
    for name in programs.names()
    if programs.load(name).delegates and set(programs.load(name).delegates) <= OWN
]


def walk(path: Path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run a method of copies and islands alone by its instruction list."""
    raw = path.read_bytes()
    method = pte.read(raw)["forward"]
    values = dict(zip((v.index for v in method.inputs), inputs, strict=True))
    islands = iter(method.islands)
    for step in method.instructions:
        if step.kind == "delegate":
            island = next(islands)
            payload = raw[island.payload_offset : island.payload_offset + island.payload_nbytes]
            assert island.inputs is not None
            results = graph.compile(payload)([values[i] for i in island.args[: island.inputs]])
            values.update(zip(island.args[island.inputs :], results, strict=True))
        else:
            assert step.target in COPIES
            values[step.args[-1]] = values[step.args[0]]
    return [values[v.index] for v in method.outputs]


def check(path: Path, calls: tuple[programs.Call, ...]) -> None:
    assert calls
    for call in calls:
        results = walk(path, [value.data for value in call.inputs])
        for result, wanted in zip(results, call.outputs, strict=True):
            assert result.dtype == wanted.data.dtype
            np.testing.assert_allclose(result, wanted.data, rtol=1e-5, atol=1e-5)


def test_the_committed_program_is_two_islands_on_one_device() -> None:
    method = pte.read(COMMITTED)["forward"]
    assert [step.target for step in method.instructions] == [
        "et_copy::_h2d_copy.out", "et_copy::_h2d_copy.out", "TestA", "TestB", "et_copy::_d2h_copy.out",
    ]  # fmt: skip
    assert [(i.delegate, i.inputs, i.outputs) for i in method.islands] == [("TestA", 2, 1), ("TestB", 1, 1)]
    assert [buffer.device for buffer in method.buffers] == ["cpu", "cuda:0"]
    check(COMMITTED, programs.read_calls(COMMITTED.with_suffix(".npz")))


# Those that have no host kernels of their own.
WALKED = [
    name
    for name in CHECKED
    if all(op.name in COPIES for op in pte.read(programs.load(name).path)["forward"].operators)
]


@pytest.mark.parametrize("name", WALKED)
def test_payloads_compute_the_goldens(name: str) -> None:
    check(programs.load(name).path, programs.load(name).calls)


def test_enough_payloads_are_computed() -> None:
    assert len(WALKED) >= 12
    assert {"split_cuda", "split_cuda_dynamic", "split_two_devices", "chain25_cuda_resident"} <= set(WALKED)


def test_any_two_steps_of_the_chain_exchanged_give_something_else() -> None:
    """What the ordering tests rest on."""
    path = programs.load("chain25_host").path
    raw = path.read_bytes()
    islands = pte.read(raw)["forward"].islands
    steps = [graph.compile(raw[i.payload_offset : i.payload_offset + i.payload_nbytes]) for i in islands]
    call = programs.load("chain25_host").calls[0]

    def run(order: list[int]) -> np.ndarray:
        x = call.inputs[0].data
        for i in order:
            (x,) = steps[i]([x])
        return x

    right = run(list(range(25)))
    np.testing.assert_allclose(right, call.outputs[0].data, rtol=1e-5, atol=1e-5)
    for i in range(24):
        exchanged = run([*range(i), i + 1, i, *range(i + 2, 25)])
        assert np.abs(exchanged - right).max() > 1e-3, i
        dropped = run([*range(i), *range(i + 1, 25)])
        assert np.abs(dropped - right).max() > 1e-3, i


def test_payload_refuses_what_numpy_would_not_compute() -> None:
    with pytest.raises(ValueError, match="expected operations among"):
        graph.encode(["x"], ["y"], [{"op": "conv", "out": "y", "args": ["x"]}], {})
    payload = graph.encode(
        ["x"], ["y"], [{"op": "add", "out": "y", "args": ["x", "c"]}], {"c": np.ones(2, "f4")}
    )
    (y,) = graph.compile(payload)([np.ones(2, "f4")])
    assert y.tolist() == [2.0, 2.0]
    assert y.dtype == np.float32
    with pytest.raises(ValueError, match="expected 1 inputs, got 2"):
        graph.compile(payload)([y, y])


def test_processes_that_ask_at_once_export_once(tmp_path: Path) -> None:
    """Tests in several processes: the first exports, the others wait for it and find its result."""
    said = tmp_path / "said"
    code = f"""
import sys
from pathlib import Path
from tests.programs import Collection

class Once(Collection):
    def folder(self):
        return Path({str(tmp_path / "there")!r})

once = Once("tests.unit.once", (), lambda: [str(once.folder()), {str(said)!r}])
print((once.ensure() / "index.json").read_text())
"""
    environment = {**os.environ, "HEADRACE_EXPORT_PYTHON": sys.executable}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=programs.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [(child.communicate(timeout=60)[0], child.returncode) for child in children] == [("{}\n", 0)] * 3
    assert said.read_text() == "exported\n"


@pytest.mark.skipif(
    "HEADRACE_EXPORT_PYTHON" not in os.environ and importlib.util.find_spec("torch") is None,
    reason="no Python with the stock runtime: set HEADRACE_EXPORT_PYTHON",
)
def test_stock_runtime_gives_the_goldens() -> None:
    """The goldens come from eager PyTorch; a second witness for what our own runs are compared with."""
    done = subprocess.run(
        [programs.export_python(), "-m", "tests.programs.stock"],
        cwd=programs.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    calls, _, _ = done.stdout.strip().splitlines()[-1].partition(" calls equal, 0 programs wrong")
    assert int(calls) > 100
