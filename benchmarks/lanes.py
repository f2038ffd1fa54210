"""What lanes are worth on this GPU: a small program beside a loud neighbour, by SPEC's row GC6.

::

    python -m benchmarks lanes

Needs a GPU, CuPy and cuda.bindings. The small program is a chain of 10 islands over two delegates, two small kernels an
island, captured as one graph, its input and output on the device. The neighbour is the same program with a kernel of 1,056
blocks after each island: of arithmetic (``compute``), or one that streams 512 MiB (``copy``). Latency is the host's, one call
at a time; the neighbour keeps four calls in flight.

``driver`` is the small program's kernels as a graph that CuPy captured in the same lane, launched by cuda.bindings with the
same copy before it. The goals: beside ``compute`` in another lane p99 grows 1.2 times at most, and no more than 5 % above
the driver's growth. With ``copy`` the ratio is shown and nothing is promised, and so it is for a neighbour in no lane.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import headrace
from headrace.lanes.latency import Latency, Running, Tenant, beside_others
from tests.contract.conftest import golden
from tests.cuda import kernels

from . import graphs

__all__ = ["GOAL", "measure", "met", "table"]

GOAL, DRIVERS = 1.2, 1.05
PROGRAM = "chain10"
SMALL, LOUD = 8, 120
CALLS = 2000
NEIGHBOURS = ("compute", "copy")

_SOURCE = r"""
extern "C" __global__ void arithmetic(float* out, int steps) {
  float a = threadIdx.x, b = blockIdx.x;
  for (int i = 0; i < steps; ++i) {
    a = a * 1.0001f + b;
    b = b * 0.9999f + a;
  }
  if (a == 12345.678f) out[0] = b;
}
extern "C" __global__ void stream(float4* to, const float4* from, long long count) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x)
    to[i] = from[i];
}
"""
_BLOCKS, _COPIED = 1056, 512 << 20


class _Loud(kernels.Captured):
    """As its option ``neighbour`` says, a large kernel behind its own; none: the small program."""

    islands: list[dict[str, Any]] = []  # noqa: RUF012

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.neighbour = context.options.get("neighbour", "")
        if not self.neighbour:
            self.islands.append(self.graph)
        cupy = kernels.cupy
        self.memory = (
            [cupy.zeros(_COPIED // 4, cupy.float32) for _ in range(2)] if self.neighbour == "copy" else []
        )
        self.out = cupy.zeros(1, cupy.float32)
        cupy.cuda.get_current_stream().synchronize()

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        super().run(inputs, outputs, stream)
        with kernels.on(stream):
            if self.neighbour == "compute":
                _kernel("arithmetic")((_BLOCKS,), (256,), (self.out, np.int32(20_000)))
            elif self.neighbour == "copy":
                _kernel("stream")((_BLOCKS,), (256,), (*self.memory, np.int64(_COPIED // 16)))


@functools.cache
def _kernel(name: str) -> Any:
    return kernels.cupy.RawKernel(_SOURCE, name)


@dataclass
class _Driver:
    """The driver's launch of the small program's kernels, timed as `Running.time` times ours."""

    launch: Callable[[], Any]
    stream: Any

    def time(self, calls: int) -> Latency:
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            self.launch()
            self.stream.synchronize()
            seconds.append(time.perf_counter() - began)
        return Latency.of(seconds)


def measure(rounds: int) -> dict[str, Any]:
    """By setting and peer: latencies in microseconds, and the ratio of p99 to that alone in the same place."""
    kernels.install(_Loud)
    program = golden(PROGRAM)
    small = Tenant(program.path, program.inputs(), name="small")
    gpu = headrace.device("cuda:0")
    results: dict[str, Any] = {}

    def loud(kind: str) -> Tenant:
        options = {name: {"neighbour": kind} for name in ("TestA", "TestB")}
        return Tenant(program.path, program.inputs(), name=kind, options=options)

    def setting(where: str, mine: int, theirs: int) -> None:
        with ExitStack() as stack:
            lanes = iter(gpu.split([n for n in (mine, theirs) if n]) if mine or theirs else ())
            lane, other = (next(lanes) if n else None for n in (mine, theirs))
            _Loud.islands.clear()
            ours = Running(small, gpu, lane)
            stack.callback(ours.close)
            assert program.right(ours.run())
            array = kernels.cupy.asarray(program.inputs()[0])
            launch, _ = graphs.driver_launch(_Loud.islands, ours.stream, array)
            peers = {"headrace": ours, "driver": _Driver(launch, ours.stream)}
            found = {peer: [one.time(CALLS) for _ in range(rounds)] for peer, one in peers.items()}
            _store(results, where, "alone", found)
            for kind in NEIGHBOURS:
                neighbour = Running(loud(kind), gpu, other)
                try:
                    found = {
                        peer: [beside_others(one, [neighbour], CALLS) for _ in range(rounds)]
                        for peer, one in peers.items()
                    }
                finally:
                    neighbour.close()
                _store(results, where, kind, found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", headrace.LaneWarning)
        setting("whole GPU", 0, 0)
        setting(f"lanes of {SMALL} and {LOUD}", SMALL, LOUD)
        setting(f"lane of {SMALL}, neighbour in none", SMALL, 0)
    return results


def _store(results: dict[str, Any], where: str, beside: str, found: dict[str, list[Latency]]) -> None:
    place = results.setdefault(where, {})
    for peer, latencies in found.items():
        row = {
            name: float(np.median([getattr(one, name) for one in latencies]))
            for name in ("p50_us", "p99_us", "p999_us")
        }
        alone = place.get("alone", {}).get(peer, row)
        place.setdefault(beside, {})[peer] = row | {"ratio": row["p99_us"] / alone["p99_us"]}


def _ratios(results: dict[str, Any]) -> tuple[float, float]:
    beside = results[f"lanes of {SMALL} and {LOUD}"]["compute"]
    return beside["headrace"]["ratio"], beside["driver"]["ratio"]


def met(results: dict[str, Any]) -> bool:
    ours, drivers = _ratios(results)
    return ours <= GOAL and ours <= DRIVERS * drivers


def table(results: dict[str, Any]) -> str:
    lines = [
        f"{'lanes, µs':32}{'neighbour':12}{'peer':10}{'p50':>9}{'p99':>9}{'p99.9':>9}{'p99, to alone':>15}"
    ]
    for where, place in results.items():
        for beside, peers in place.items():
            for peer, row in peers.items():
                lines.append(
                    f"  {where:30}{beside:12}{peer:10}{row['p50_us']:9.1f}{row['p99_us']:9.1f}{row['p999_us']:9.1f}"
                    f"{row['ratio']:15.2f}"
                )
    ours, drivers = _ratios(results)
    verdict = "meets" if met(results) else "MISSES"
    lines.append(
        f"  beside compute in lanes: {ours:.2f} (driver {drivers:.2f}); {verdict} the goals of {GOAL:g} and of "
        f"{DRIVERS:g} times the driver's"
    )
    return "\n".join(lines)
