"""Replaying a method of 25 islands over two delegates, beside the driver and PyTorch, on a GPU.

::

    python -m benchmarks graphs

Needs a GPU, CuPy, cuda.bindings and PyTorch built for CUDA. The islands' kernels are CuPy's, the same for all but
PyTorch, which compiles the same model with ``mode="reduce-overhead"``. Input and output lie on the device:

``call``            an ordinary call of the method
``replay``          a replay with outputs of its own
``replay, borrow``  a replay whose output is the graph's own memory
``driver``          cuMemcpyDtoDAsync of the input and cuGraphLaunch of a graph of the same kernels, by cuda.bindings
``torch``           the compiled model, on the same stream

Three numbers each, in microseconds: ``host``, until control comes back, with nothing waited for; ``whole``, batches with
one wait at their end; ``device``, between two events, enqueued while the GPU was kept busy, so that the host's pace is
not in it. Peers take turns, sample by sample. The goal: a borrowed replay takes at most 1.10 times the driver's, whole.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace
from tests import programs
from tests.cuda import kernels

__all__ = ["GOAL", "available", "measure", "met", "table"]

GOAL = 1.10
PROGRAM = "chain25_cuda_resident"
BATCH = 50
NUMBERS = ("host", "whole", "device")


def available() -> str | None:
    """Why this cannot be measured here, or None."""
    try:
        headrace.device("cuda:0")
    except headrace.DeviceError as error:
        return str(error)
    missing = [name for name in ("cupy", "torch") if getattr(kernels, name) is None]
    return f"needs {' and '.join(missing)}" if missing else None


class _Kept(kernels.Captured):
    """Remembers the islands in the order in which they were loaded, which is that of the chain."""

    islands: list[dict[str, Any]] = []  # noqa: RUF012

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.islands.append(self.graph)


def driver_launch(islands: list[dict[str, Any]], stream: Any, array: Any) -> tuple[Callable[[], Any], Any]:
    """Launches on the stream a graph of the islands' kernels, captured there, with a copy of the input before it; and the
    output. ``stream`` is non-blocking."""
    from cuda.bindings import driver

    pool = kernels.cupy.cuda.MemoryPool()
    taking = kernels.cupy.cuda.Stream.from_external(stream)
    first = kernels.cupy.empty_like(array)
    arrays = [first, *(kernels.cupy.empty_like(array) for _ in islands)]

    def walk() -> None:
        for graph, source, target in zip(islands, arrays[:-1], arrays[1:], strict=True):
            kernels.launch(graph, [source], [target], taking, view=lambda x: x)

    kernels.cupy.cuda.Device().synchronize()  # the arrays are there
    with kernels.cupy.cuda.using_allocator(pool.malloc):
        walk()
        taking.synchronize()
        with taking:
            taking.begin_capture()
            walk()
            graph = taking.end_capture()
    exec_, on = driver.CUgraphExec(int(graph.graphExec)), driver.CUstream(stream.handle)
    source, size = array.data.ptr, array.nbytes

    def launch() -> Any:
        driver.cuMemcpyDtoDAsync(first.data.ptr, source, size, on)
        driver.cuGraphLaunch(exec_, on)
        return graph, pool  # kept alive by the closure

    return launch, arrays[-1]


def _compiled(stream: Any, array: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """PyTorch's own: the same model, from the same constants, compiled with CUDA graphs of its own."""
    torch = kernels.torch
    steps = []
    for graph in _Kept.islands:
        (op,) = graph["ops"]
        (constant,) = graph["constants"].values()
        steps.append((op["op"], torch.from_numpy(kernels.cupy.asnumpy(constant)).cuda()))

    def model(x: Any) -> Any:
        for op, constant in steps:
            x = x * constant if op == "mul" else x + constant
        return x

    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.from_numpy(kernels.cupy.asnumpy(array)).cuda()
    outside = torch.cuda.ExternalStream(stream.handle)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x)

    with torch.no_grad(), torch.cuda.stream(outside):
        for _ in range(5):
            call()
    return call, lambda: call().cpu().numpy()


def _sample(call: Callable[[], Any], stream: Any) -> dict[str, float]:
    """Microseconds each."""
    stream.synchronize()
    began = time.perf_counter()
    for _ in range(BATCH):
        call()
    host = time.perf_counter() - began
    stream.synchronize()
    whole = time.perf_counter() - began
    kernels.slow(stream, 2 + 2e3 * host)
    start = stream.record()
    for _ in range(BATCH):
        call()
    end = stream.record()
    end.synchronize()
    device_ms = end.elapsed_ms(start)
    return {"host": host / BATCH * 1e6, "whole": whole / BATCH * 1e6, "device": device_ms / BATCH * 1e3}


def measure(rounds: int) -> dict[str, Any]:
    """Medians, and the medians of the ratios to the driver's sample taken beside it."""
    _Kept.islands.clear()
    kernels.install(_Kept)
    program = programs.load(PROGRAM)
    recorded = program.calls[0]
    gpu = headrace.device("cuda:0")
    stream = gpu.stream()
    torch = kernels.torch
    with headrace.load(program.path, device=gpu) as loaded, torch.no_grad():
        method = loaded["forward"]
        x = gpu.to_device(recorded.inputs[0].data)
        want = recorded.outputs[0].data
        graph = method.capture(x, stream=stream)
        array = kernels.cupy.asarray(recorded.inputs[0].data)
        launch, driven = driver_launch(_Kept.islands, stream, array)
        peers: dict[str, Callable[[], Any]] = {
            "call": lambda: method(x, stream=stream),
            "replay": lambda: graph.replay(x, stream=stream),
            "replay, borrow": lambda: graph.replay(x, stream=stream, borrow=True),
            "driver": launch,
        }
        answers = {name: peers[name]()[0].numpy() for name in ("call", "replay", "replay, borrow")}
        launch()
        stream.synchronize()
        answers["driver"] = kernels.cupy.asnumpy(driven)
        compiled, answer = _compiled(stream, array)
        outside = torch.cuda.ExternalStream(stream.handle)
        with torch.cuda.stream(outside):
            answers["torch"] = answer()
            peers["torch"] = compiled
            for name, got in answers.items():
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
            for _ in range(20 * rounds):
                for name, call in peers.items():
                    samples[name].append(_sample(call, stream))
    results = {}
    for name, found in samples.items():
        results[name] = {number: statistics.median(one[number] for one in found) for number in NUMBERS}
        results[name]["ratio"] = statistics.median(
            one["whole"] / other["whole"] for one, other in zip(found, samples["driver"], strict=True)
        )
    return results


def met(results: dict[str, Any]) -> bool:
    return bool(results["replay, borrow"]["ratio"] <= GOAL)


def table(results: dict[str, Any]) -> str:
    lines = [f"{'graphs, 25 islands, µs':24}{'host':>12}{'whole':>12}{'device':>12}{'to driver':>11}"]
    for name, r in results.items():
        note = ""
        if name == "replay, borrow":
            note = f"   {'meets' if r['ratio'] <= GOAL else 'MISSES'} the goal of {GOAL:g}"
        lines.append(
            f"  {name:22}{r['host']:12.2f}{r['whole']:12.2f}{r['device']:12.2f}{r['ratio']:11.3f}{note}"
        )
    return "\n".join(lines)
