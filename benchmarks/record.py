"""What a record costs a call: off beside on, in samples of 20 ms that take turns, in this process.

``off`` is compared with ``before``, calls of the same process before anything was ever recorded: a record that is
over leaves nothing behind. What the hooks themselves cost while off, one relaxed load for each operation of a
device, is too little to show in a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace
from tests import programs
from tests.programs import graph

__all__ = ["GOAL", "measure", "met", "table"]

GOAL = 2.0  # the greatest ratio of a recorded call to one that is not
HOST = ("add", "mlp_portable", "mlp_xnnpack")
ON_SIM = ("split_cuda_resident", "chain25_cuda", "chain25_cuda_resident")
SAMPLE_S = 0.02


def _define(name: str) -> None:
    class Computes(headrace.Delegate, name=name):
        def load(self, payload: bytes, context: Any) -> None:
            self.compute = graph.compile(payload)

        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            def work() -> None:
                for out, got in zip(outputs, self.compute([x.numpy() for x in inputs]), strict=True):
                    out.numpy()[...] = got

            stream.call(work, reads=inputs, writes=outputs)


def _caller(name: str) -> Callable[[], Any]:
    """One call of the program, whose first answer was compared with eager PyTorch's."""
    program = programs.load(name)
    call = program.calls[0]
    inputs: list[Any] = [value.data for value in call.inputs]
    stream = None
    if name in ON_SIM:
        for delegate in program.delegates:
            _define(delegate)
        device = headrace.device("sim")
        loaded = headrace.load(program.path, device=device)
        stream = device.stream()
        if "resident" in name:
            inputs = [device.to_device(array) for array in inputs]
    else:
        loaded = headrace.load(program.path)
    method = loaded["forward"]
    (got,) = method(*inputs, stream=stream)
    array = got.numpy() if isinstance(got, headrace.Buffer) else got
    np.testing.assert_allclose(array, call.outputs[0].data, rtol=1e-4, atol=1e-5)
    return lambda: method(*inputs, stream=stream)


def _sample(call: Callable[[], Any], count: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6


def measure(rounds: int) -> dict[str, Any]:
    """Medians in microseconds a call, and the medians of the ratios of neighbouring samples, by program."""
    calls = {name: _caller(name) for name in HOST + ON_SIM}
    counts = {name: max(1, int(SAMPLE_S / (_sample(call, 20) * 1e-6))) for name, call in calls.items()}
    before = {name: [_sample(call, counts[name]) for _ in range(5)] for name, call in calls.items()}
    results = {}
    for name, call in calls.items():
        off, on = [], []
        for _ in range(5 * rounds):
            off.append(_sample(call, counts[name]))
            with headrace.record() as record:
                on.append(_sample(call, counts[name]))
        entries = len(record.log.entries) / counts[name]
        results[name] = {
            "before": statistics.median(before[name]),
            "off": statistics.median(off),
            "on": statistics.median(on),
            "ratio": statistics.median([b / a for a, b in zip(off, on, strict=True)]),
            "entries": entries,
        }
    return results


def met(results: dict[str, Any]) -> bool:
    return all(result["ratio"] <= GOAL for result in results.values())


def table(results: dict[str, Any]) -> str:
    lines = [f"{'record, µs a call':24}{'before':>12}{'off':>12}{'on':>12}{'ratio':>9}{'entries':>9}"]
    for name, r in results.items():
        note = "meets" if r["ratio"] <= GOAL else "MISSES"
        lines.append(
            f"  {name:22}{r['before']:12.2f}{r['off']:12.2f}{r['on']:12.2f}{r['ratio']:9.3f}{r['entries']:9.0f}"
            f"   {note} the goal of {GOAL:g}"
        )
    return "\n".join(lines)
