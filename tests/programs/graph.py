"""The payload of the tests' Python delegates: a small graph as JSON, and NumPy that computes it.

::

    {"inputs": ["x", "y"], "outputs": ["mm"],
     "constants": {"w": {"dtype": "float32", "shape": [2, 2], "data": "<base64 of little-endian bytes>"}},
     "ops": [{"op": "mm", "out": "mm", "args": ["x", "w"]}, …]}

An argument is the name of a value or a number. Operations are those of ``OPS``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["INPUTS_SPEC", "OPS", "compile", "decode", "encode"]

# The compile spec that says how many of an island's arguments are inputs, in decimal ASCII.
INPUTS_SPEC = "headrace.inputs"

Array = np.ndarray[Any, Any]


def _sigmoid(x: Array) -> Array:
    # Two branches, so that exp never overflows.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


OPS: dict[str, Callable[..., Array]] = {
    "mm": lambda a, b: a @ b,
    "addmm": lambda bias, a, b: bias + a @ b,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "t": lambda x: x.T,
}


def encode(
    inputs: Sequence[str],
    outputs: Sequence[str],
    ops: Sequence[dict[str, Any]],
    constants: dict[str, Array],
) -> bytes:
    """The payload; raises ValueError for an operation that OPS lacks."""
    unknown = sorted({op["op"] for op in ops} - set(OPS))
    if unknown:
        raise ValueError(f"payload: expected operations among {sorted(OPS)}, got {unknown}")
    packed = {
        name: {
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
        }
        for name, array in constants.items()
    }
    graph = {"inputs": list(inputs), "outputs": list(outputs), "constants": packed, "ops": list(ops)}
    return json.dumps(graph).encode()


def decode(payload: bytes | memoryview) -> dict[str, Any]:
    """The graph, its constants as arrays."""
    graph: dict[str, Any] = json.loads(bytes(payload))
    graph["constants"] = {
        name: np.frombuffer(base64.b64decode(c["data"]), dtype=c["dtype"]).reshape(c["shape"])
        for name, c in graph["constants"].items()
    }
    return graph


def compile(payload: bytes | memoryview) -> Callable[[Sequence[Array]], list[Array]]:
    """A function from the island's input arrays to its output arrays (fresh ones)."""
    graph = decode(payload)

    def run(inputs: Sequence[Array]) -> list[Array]:
        if len(inputs) != len(graph["inputs"]):
            raise ValueError(f"graph: expected {len(graph['inputs'])} inputs, got {len(inputs)}")
        values: dict[str, Any] = dict(graph["constants"])
        values.update(zip(graph["inputs"], inputs, strict=True))
        for op in graph["ops"]:
            # A Python number stays one: NumPy then keeps the array's dtype, as PyTorch does.
            args = [values[a] if isinstance(a, str) else a for a in op["args"]]
            values[op["out"]] = OPS[op["op"]](*args)
        return [np.array(values[name]) for name in graph["outputs"]]

    return run
