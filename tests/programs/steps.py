"""What the tests' Python delegates compute when ``headrace.export`` makes their payload: its default JSON, by NumPy.

``OPS`` has a function for each operator that they may claim, by the name that the exporter's graph has. ``compile``
gives a function from an island's input arrays to its output arrays. ``StepsA`` and ``StepsB`` are the classes;
importing ``tests.programs.step_delegates`` makes them known. Needs neither torch nor the run time.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["DTYPES", "OPS", "compile"]

Array = np.ndarray[Any, Any]
# What NumPy computes as PyTorch does.
DTYPES = {"float32", "float64", "int64", "int32", "bool"}


def _like(function: Callable[..., Array]) -> Callable[..., Array]:
    """In the dtype of the first argument, as PyTorch keeps it."""
    return lambda x, *args, **kwargs: np.asarray(function(x, *args, **kwargs)).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


def _softmax(x: Array, dim: int, half: bool) -> Array:
    e = np.exp(x - x.max(axis=dim, keepdims=True))
    return e / e.sum(axis=dim, keepdims=True)


def _layer_norm(x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float) -> Any:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = x.mean(axis=axes, keepdims=True)
    rstd = 1 / np.sqrt(x.var(axis=axes, keepdims=True) + np.float32(eps))
    out = (x - mean) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).astype(x.dtype), mean, rstd


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _sum(x: Array, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Array:
    axis = tuple(dim) if dim else None
    whole = x.astype(dtype) if dtype else x.astype(np.int64) if x.dtype.kind in "bi" else x
    return np.asarray(whole.sum(axis=axis, keepdims=keepdim), dtype=whole.dtype)


def _mean(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    return np.asarray(x.mean(axis=tuple(dim) if dim else None, keepdims=keepdim), dtype=x.dtype)


def _expand(x: Array, size: Sequence[int]) -> Array:
    lead = len(size) - x.ndim
    return np.broadcast_to(x, [x.shape[i - lead] if s == -1 else s for i, s in enumerate(size)])


OPS: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": lambda a, b, alpha=1: a + (b if alpha == 1 else b * alpha),
    "aten.sub.Tensor": lambda a, b, alpha=1: a - (b if alpha == 1 else b * alpha),
    "aten.mul.Tensor": lambda a, b: a * b,
    "aten.div.Tensor": lambda a, b: a / b,
    "aten.maximum.default": np.maximum,
    "aten.minimum.default": np.minimum,
    "aten.neg.default": lambda x: -x,
    "aten.abs.default": np.abs,
    "aten.exp.default": _like(np.exp),
    "aten.tanh.default": _like(np.tanh),
    "aten.cos.default": _like(np.cos),
    "aten.sigmoid.default": _like(_sigmoid),
    "aten.relu.default": lambda x: np.maximum(x, 0).astype(x.dtype),
    "aten.gelu.default": _like(_gelu),
    "aten._softmax.default": _like(_softmax),
    "aten.native_layer_norm.default": _layer_norm,
    "aten.mm.default": lambda a, b: a @ b,
    "aten.bmm.default": lambda a, b: a @ b,
    "aten.addmm.default": lambda bias, a, b: bias + a @ b,
    "aten.linear.default": lambda x, w, b=None: x @ w.T if b is None else x @ w.T + b,
    "aten.embedding.default": lambda table, index, *_: table[index],
    "aten.where.self": np.where,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.dim": _mean,
    "aten.amax.default": lambda x, dim=(), keepdim=False: np.asarray(
        x.max(axis=tuple(dim) or None, keepdims=keepdim)
    ),
    "aten.cat.default": lambda xs, dim=0: np.concatenate(xs, axis=dim),
    "aten.view_copy.default": lambda x, size: x.reshape([int(s) for s in size]),
    "aten.permute_copy.default": lambda x, dims: x.transpose(dims),
    "aten.t_copy.default": lambda x: x.T,
    "aten.transpose_copy.int": lambda x, a, b: x.swapaxes(a, b),
    "aten.unsqueeze_copy.default": lambda x, dim: np.expand_dims(x, dim),
    "aten.squeeze_copy.dims": lambda x, dims: x.squeeze(tuple(d for d in dims if x.shape[d] == 1)),
    "aten.expand_copy.default": lambda x, size, implicit=False: _expand(x, size),
    "aten.select_copy.int": lambda x, dim, index: np.asarray(x.take(index, axis=dim)),
    "aten.slice_copy.Tensor": _slice,
    "dim_order_ops._clone_dim_order.default": lambda x, dim_order=None: x.copy(),
}
# What a size is computed with, inside an island.
SIZES: dict[str, Callable[..., Any]] = {
    "aten.sym_size.int": lambda x, dim: x.shape[dim],
    "executorch_prim.mul.Scalar": lambda a, b: a * b,
    "executorch_prim.add.Scalar": lambda a, b: a + b,
    "executorch_prim.sub.Scalar": lambda a, b: a - b,
    "executorch_prim.floordiv.Scalar": lambda a, b: a // b,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "floordiv": lambda a, b: a // b,
}


def compile(payload: bytes | memoryview) -> Callable[[Sequence[Array]], list[Array]]:
    """A function from the island's input arrays to its output arrays (fresh ones)."""
    body = json.loads(bytes(payload))
    constants = {
        name: np.frombuffer(base64.b64decode(c["data"]), dtype=c["dtype"]).reshape(c["shape"])
        for name, c in body["constants"].items()
    }

    def run(inputs: Sequence[Array]) -> list[Array]:
        values: dict[str, Any] = dict(constants)
        values.update({t["name"]: x for t, x in zip(body["inputs"], inputs, strict=True)})

        def value(argument: Any) -> Any:
            if isinstance(argument, dict):
                found = values[argument["value"]]
                return found[argument["index"]] if "index" in argument else found
            return [value(a) for a in argument] if isinstance(argument, list) else argument

        with np.errstate(all="ignore"):
            for step in body["steps"]:
                function = OPS.get(step["operator"]) or SIZES[step["operator"]]
                kwargs = {name: value(a) for name, a in step["kwargs"].items()}
                values[step["name"]] = function(*map(value, step["args"]), **kwargs)
        return [np.array(value(out), dtype=out["dtype"]) for out in body["outputs"]]

    return run
