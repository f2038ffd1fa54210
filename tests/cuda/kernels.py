"""Work for a GPU, by CuPy: a kernel that takes its time, one that says where it ran, and delegates for the programs
of tests/programs/committed."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace
from tests.programs import graph

__all__ = [
    "Accumulating", "Captured", "Failing", "Launched", "OwnStream", "Placed", "array", "core", "cupy", "install",
    "launch", "on", "slow", "sms_seen", "torch"
]  # fmt: skip


def _imported(name: str) -> Any:
    """The module, or None where it is missing: whether that matters is asked in tests/conftest.py alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


cupy, torch, core = (_imported(name) for name in ("cupy", "torch", "cuda.core"))
if core is not None and not hasattr(core, "Device"):  # its first releases
    core = _imported("cuda.core.experimental")

_SOURCE = r"""
extern "C" __global__ void slow(long long ns) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < ns);
}
extern "C" __global__ void where(unsigned* seen, long long ns) {
  unsigned sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  if (threadIdx.x == 0) seen[blockIdx.x] = sm;
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < ns);
}
"""


@functools.cache
def _kernel(name: str) -> Any:
    return cupy.RawKernel(_SOURCE, name)


def on(stream: Any) -> Any:
    """CuPy's view on a stream, as a context manager."""
    return cupy.cuda.Stream.from_external(stream)


def slow(stream: Any, ms: float) -> None:
    """Keep one SM busy: what comes behind it on `stream` waits, the host does not."""
    with on(stream):
        _kernel("slow")((1,), (1,), (np.int64(ms * 1e6),))


def sms_seen(stream: Any, blocks: int = 2000, us: float = 20) -> set[int]:
    """The SMs that the blocks of a kernel ran on. Waits."""
    with on(stream):
        seen = cupy.full(blocks, 0xFFFFFFFF, cupy.uint32)
        _kernel("where")((blocks,), (1024,), (seen, np.int64(us * 1e3)))
    stream.synchronize()
    return set(cupy.asnumpy(seen).tolist())


def array(buffer: Any) -> Any:
    """The memory of a Buffer as CuPy's, with no order and no ownership: for the length of a call."""
    memory = cupy.cuda.UnownedMemory(buffer.address, max(buffer.nbytes, 1), buffer, 0)
    return cupy.ndarray(buffer.shape, buffer.dtype, cupy.cuda.MemoryPointer(memory, 0))


OPS: dict[str, Callable[..., Any]] = {
    **{name: op for name, op in graph.OPS.items() if name in ("add", "mul", "sub", "t")},
    # Not by cuBLAS, which has streams and memory of its own.
    "mm": lambda a, b: (a[:, :, None] * b[None, :, :]).sum(axis=1),
    "addmm": lambda bias, a, b: bias + (a[:, :, None] * b[None, :, :]).sum(axis=1),
    "relu": lambda x: cupy.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + cupy.exp(-x)),
}


def launch(graph: dict[str, Any], inputs: Any, outputs: Any, stream: Any, view: Any = array) -> None:
    """The graph of a payload as kernels on this stream; Buffers as `view` makes CuPy's arrays of them."""
    with on(stream):
        values: dict[str, Any] = {name: cupy.asarray(value) for name, value in graph["constants"].items()}
        values.update(zip(graph["inputs"], map(view, inputs), strict=True))
        for op in graph["ops"]:
            values[op["out"]] = OPS[op["op"]](*(values[a] if isinstance(a, str) else a for a in op["args"]))
        for name, buffer in zip(graph["outputs"], outputs, strict=True):
            # It comes with the greatest size of the plan.
            if buffer.shape != values[name].shape:
                buffer.resize(values[name].shape)
            view(buffer)[...] = values[name]


class Launched(headrace.Delegate):
    """Computes the graph of its payload by CuPy, on the stream of the call and on no other."""

    requires_device = True
    delay_ms = 0.0  # of a kernel before its results are there
    by_dlpack = False
    declares = False  # what it launches, to a record

    def load(self, payload: bytes, context: Any) -> None:
        self.graph = graph.decode(payload)
        self.graph["constants"] = {k: cupy.asarray(v) for k, v in self.graph["constants"].items()}
        cupy.cuda.get_current_stream().synchronize()

    def stream_for(self, stream: Any) -> Any:
        return stream

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        chosen = self.stream_for(stream)
        if self.delay_ms:
            slow(chosen, self.delay_ms)
        launch(self.graph, inputs, outputs, chosen, cupy.from_dlpack if self.by_dlpack else array)
        if self.declares:
            chosen.declare(inputs, outputs, name="kernels of CuPy")


class Captured(Launched):
    """May be captured: temporaries come from a pool of its own, which a graph's memory never leaves. CuPy gives memory
    that was freed on a stream to the next who asks on that stream; by CuPy's common pool that would be anybody."""

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.pool = cupy.cuda.MemoryPool()

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        with cupy.cuda.using_allocator(self.pool.malloc):
            super().run(inputs, outputs, stream)


class Placed(Captured):
    """Notes the SMs that blocks of a kernel in its run were on."""

    loaded: list[Any] = []  # noqa: RUF012

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.seen = cupy.full(2000, 0xFFFFFFFF, cupy.uint32)
        cupy.cuda.get_current_stream().synchronize()
        self.loaded.append(self)

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        super().run(inputs, outputs, stream)
        with on(stream):
            _kernel("where")((2000,), (1024,), (self.seen, np.int64(20_000)))


class Failing(Captured):
    """Does in one stage what must not be done there."""

    how = "raises"
    stage_of_failure = "capture"

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        super().run(inputs, outputs, stream)
        if self.stage() != self.stage_of_failure:
            return
        if self.how == "raises":
            raise RuntimeError("on purpose")
        if self.how == "waits":
            stream.synchronize()
        else:
            cupy.cuda.Memory(1 << 20)


class Accumulating(Captured):
    """Adds how often it ran to its results: state that steps advance."""

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.steps = context.device.to_device(np.zeros(1, np.float32))

    def state(self) -> tuple[Any, ...]:
        return (self.steps,)

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        super().run(inputs, outputs, stream)
        with on(stream), cupy.cuda.using_allocator(self.pool.malloc):
            steps = array(self.steps)
            steps += 1
            for buffer in outputs:
                view = array(buffer)
                view += steps
        stream.declare(reads=[self.steps], writes=[self.steps])


class OwnStream(Launched):
    """The fault this project is about, put back on purpose: a stream of the delegate's own that nothing orders."""

    def stream_for(self, stream: Any) -> Any:
        if not hasattr(self, "own"):
            self.own = stream.device.stream()
        return self.own


def install(way: type[Launched] = Launched, **attributes: Any) -> None:
    """Put `way` behind the names TestA and TestB, for programs loaded from now on."""
    for name in ("TestA", "TestB"):

        class Named(way, name=name):  # type: ignore[misc, valid-type, call-arg]
            pass

        for attribute, value in attributes.items():
            setattr(Named, attribute, value)
