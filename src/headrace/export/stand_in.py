"""TensorRT's islands where no engine can run: their ONNX graphs, evaluated by ``onnx.reference`` in NumPy.

For the process that verifies, which has the run time and no torch. The program goes through the delegate as it is; what
is in the place of TensorRT's module says that an engine's bytes are an ONNX graph, and computes that.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["Graph", "evaluated", "provided"]

# The one operation of such an engine: a result of a whole graph.
OPERATION = "onnx"


class Graph:
    """An ONNX graph and the last inputs that it was evaluated with: it is asked for each result in turn."""

    def __init__(self, data: bytes) -> None:
        onnx: Any = importlib.import_module("onnx")
        reference: Any = importlib.import_module("onnx.reference")
        # Makes NumPy know bfloat16 by name.
        importlib.import_module("ml_dtypes")
        self.model = onnx.load_model_from_string(data)
        self.evaluator = reference.ReferenceEvaluator(self.model)
        names = onnx.TensorProto.DataType.Name
        self.inputs, self.outputs = (
            [
                (
                    value.name,
                    _DTYPES[names(value.type.tensor_type.elem_type)],
                    tuple(
                        dim.dim_value if dim.HasField("dim_value") else -1
                        for dim in value.type.tensor_type.shape.dim
                    ),
                )
                for value in values
            ]
            for values in (self.model.graph.input, self.model.graph.output)
        )
        self._last: tuple[list[bytes], list[Any]] | None = None

    def result(self, index: int, arrays: list[Any]) -> Any:
        given = [np.ascontiguousarray(array) for array in arrays]
        asked = [f"{array.shape}".encode() + array.tobytes() for array in given]
        if self._last is None or self._last[0] != asked:
            names = [name for name, _, _ in self.inputs]
            self._last = (asked, self.evaluator.run(None, dict(zip(names, given, strict=True))))
        return self._last[1][index]


_DTYPES = {
    "FLOAT": "float32",
    "FLOAT16": "float16",
    "BFLOAT16": "bfloat16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


def evaluated(data: bytes, inputs: Mapping[str, Any]) -> list[Any]:
    """The results of an ONNX graph, in order."""
    graph = Graph(data)
    return [graph.result(i, [inputs[name] for name, _, _ in graph.inputs]) for i in range(len(graph.outputs))]


@contextlib.contextmanager
def provided(versions: Mapping[str, str]) -> Iterator[None]:
    """Until the end of the block, programs that are loaded take the bytes of TensorRT's engines for ONNX graphs.
    ``versions``: of each run time that their payloads name."""
    testing: Any = importlib.import_module("headrace.testing.tensorrt")
    graphs: list[Graph] = []

    def result(xp: Any, number: int, index: int, *arrays: Any) -> Any:
        return graphs[int(number)].result(int(index), list(arrays))

    class Runtime:
        def __init__(self, module: Any, logger: Any) -> None:
            self.inner = testing.StandIn.Runtime(module, logger)

            self.module = module

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.inner, name)
            # TensorRT-RTX is asked before an engine is loaded.
            return self._valid if name == "get_engine_validity" else found

        def _valid(self, data: bytes, /) -> Any:
            return self.module.EngineValidity.VALID, 0

        def deserialize_cuda_engine(self, data: bytes, /) -> Any:
            graph = Graph(bytes(data))
            number = len(graphs)
            graphs.append(graph)
            names = [name for name, _, _ in graph.inputs]
            inputs, outputs = (
                [testing.Tensor(name, dtype, shape) for name, dtype, shape in values]
                for values in (graph.inputs, graph.outputs)
            )
            free = {
                name: tuple(tuple(most if size < 0 else size for size in shape) for most in (1, 1, 1 << 30))
                for name, _, shape in graph.inputs
            }
            return self.inner.deserialize_cuda_engine(
                testing.build(
                    inputs=inputs,
                    outputs=outputs,
                    steps=[
                        {"op": OPERATION, "out": name, "args": [number, i, *names]}
                        for i, (name, _, _) in enumerate(graph.outputs)
                    ],
                    profiles=[free],
                    version=self.module.__version__,
                )
            )

    class Module(testing.StandIn):  # type: ignore[misc]
        def Runtime(self, logger: Any) -> Any:
            return Runtime(self, logger)

    before = testing.OPS.get(OPERATION)
    testing.OPS[OPERATION] = result
    try:
        with contextlib.ExitStack() as stack:
            for kind, version in versions.items():
                stack.enter_context(testing.stand_in(kind, Module(kind, version)))
            yield
    finally:
        if before is None:
            del testing.OPS[OPERATION]
        else:
            testing.OPS[OPERATION] = before
