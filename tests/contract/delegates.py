"""Delegates for the contract, under the names that the exported programs call: TestA and TestB.

Their payload is the graph of ``tests/programs/graph.py``. Each class below is one way of working on the stream
of a call; what a program answers may not depend on which one is there. ``install`` puts one behind both names,
for programs loaded from then on. On a GPU, where a Python function cannot run in stream order, ``put`` launches the
same graph as CuPy's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import headrace
from headrace.delegate.tensorrt import TensorRTBackend
from headrace.pte.tensorrt import write
from headrace.testing.tensorrt import Tensor, bindings, build, stand_in
from tests.programs import graph

__all__ = ["NAMES", "WAYS", "WRONG", "Base", "install"]

NAMES = ("TestA", "TestB")


class Base(headrace.Delegate):
    """Computes the graph of its payload in one host function on the stream of the call; on a GPU, in kernels."""

    # Whether shapes differ from call to call.
    dynamic = False
    # Called with the stream of each call; a test puts its own here.
    on_run: Callable[[Any], None] | None = None

    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        self.context = context
        self.graph = graph.decode(payload)
        self.compute = graph.compile(payload)

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        if type(self).on_run is not None:
            type(self).on_run(stream)
        self.enqueue(inputs, outputs, stream)

    def settle_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """The shapes of this call: outputs come with the greatest ones of the plan."""
        if self.dynamic:
            shapes = self.compute([np.ones(b.shape, b.dtype) for b in inputs])
            for buffer, like in zip(outputs, shapes, strict=True):
                buffer.resize(like.shape)

    def body(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], None]:
        self.settle_shapes(inputs, outputs)

        def work() -> None:
            for buffer, result in zip(outputs, self.compute([b.numpy() for b in inputs]), strict=True):
                buffer.numpy()[...] = result

        return work

    def put(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        """The graph, on this stream, declared."""
        if not stream.device.name.startswith("cuda"):
            stream.call(self.body(inputs, outputs), reads=inputs, writes=outputs)
            return
        from tests.cuda import kernels

        self.settle_shapes(inputs, outputs)
        kernels.launch(self.graph, inputs, outputs, stream)
        stream.declare(inputs, outputs)

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        self.put(inputs, outputs, stream)


class OneCall(Base):
    pass


class CallForEachStep(Base):
    """Every operation of the graph is a host function of its own; what is between them is the delegate's memory."""

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        if stream.device.name.startswith("cuda"):
            self.put(inputs, outputs, stream)  # a kernel or more for each step as it is
            return
        values: dict[str, Any] = dict(self.graph["constants"])

        def fetch() -> None:
            values.update({n: np.array(b.numpy()) for n, b in zip(self.graph["inputs"], inputs, strict=True)})

        def step(op: dict[str, Any]) -> Callable[[], None]:
            def work() -> None:
                args = [values[a] if isinstance(a, str) else a for a in op["args"]]
                values[op["out"]] = graph.OPS[op["op"]](*args)

            return work

        def store() -> None:
            for name, buffer in zip(self.graph["outputs"], outputs, strict=True):
                buffer.numpy()[...] = values[name]

        stream.call(fetch, reads=inputs)
        for op in self.graph["ops"]:
            stream.call(step(op))
        stream.call(store, writes=outputs)


class SideStream(Base):
    """Works on a stream of its own, and orders it behind the stream of the call and before what follows there:
    what an engine with auxiliary streams has to do."""

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        side = stream.device.stream()
        side.wait(stream.record())
        self.put(inputs, outputs, side)
        stream.wait(side.record())


class CurrentStream(Base):
    """Ignores what it was handed and asks for the thread's selection, as a delegate of somebody else's does."""

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        selected = headrace.current_stream()
        if selected is None:  # on the cpu there is nothing to select
            selected = stream
        self.put(inputs, outputs, selected)


class Engine(Base):
    """TensorRT's delegate over its stand-in. The engine is made at the first run, which tells the shapes."""

    inner: TensorRTBackend | None = None

    def make(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> TensorRTBackend:
        def tensors(names: Sequence[str], buffers: Sequence[Any]) -> list[Tensor]:
            return [Tensor(n, b.dtype, (-1,) * len(b.shape)) for n, b in zip(names, buffers, strict=True)]

        engine = build(
            inputs=tensors(self.graph["inputs"], inputs),
            outputs=tensors(self.graph["outputs"], outputs),
            steps=self.graph["ops"],
            constants=self.graph["constants"],
            profiles=[
                {
                    name: ([0] * len(b.shape), b.shape, [1 << 20] * len(b.shape))
                    for name, b in zip(self.graph["inputs"], inputs, strict=True)
                }
            ],
            auxiliary=1,
        )
        made = TensorRTBackend()
        with stand_in():
            made.load(write(engine, bindings(engine)), self.context)
        return made

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        if self.inner is None:
            self.inner = self.make(inputs, outputs)
        self.inner.run(inputs, outputs, stream)

    def captured(self) -> Any:
        return self.inner.captured() if self.inner is not None else None


WAYS: dict[str, type[Base]] = {
    "one call": OneCall,
    "a call for each step": CallForEachStep,
    "a side stream": SideStream,
    "the thread's selection": CurrentStream,
    "an engine of TensorRT's stand-in": Engine,
}


class OwnStream(Base):
    """The fault this project is about: a stream of the delegate's own that nothing orders."""

    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        if not hasattr(self, "own"):
            self.own = stream.device.stream()
        self.put(inputs, outputs, self.own)


class OwnStreamEveryTime(Base):
    def enqueue(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        self.put(inputs, outputs, stream.device.stream())


WRONG: dict[str, type[Base]] = {"a stream for each delegate": OwnStream, "for each call": OwnStreamEveryTime}


def install(way: type[Base], names: Sequence[str] = NAMES) -> dict[str, type[Base]]:
    """Define ``names`` anew on top of ``way``; returns the classes."""
    made = {}
    for name in names:

        class Named(way, name=name):  # type: ignore[misc, valid-type, call-arg]
            pass

        Named.__name__ = name
        made[name] = Named
    return made
