"""Two delegates in Python for ``split_models.py``. NumPy computes them, in stream order; importing makes them known."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import headrace

__all__ = ["Softmax", "Standardize"]


class Softmax(headrace.Delegate, name="ExampleSoftmax"):
    """The payload is the dimension, as JSON."""

    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        self.dim: int = json.loads(payload)

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: headrace.Stream) -> None:
        (scores,), (weights,) = inputs, outputs
        weights.resize(scores.shape)

        def compute() -> None:
            x = scores.numpy()
            e = np.exp(x - x.max(axis=self.dim, keepdims=True))
            np.divide(e, e.sum(axis=self.dim, keepdims=True), out=weights.numpy())

        stream.call(compute, reads=[scores], writes=[weights])


class Standardize(headrace.Delegate, name="ExampleStandardize"):
    """(image - mean) / deviation, channel by channel; the payload holds both lists, as JSON."""

    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        self.mean, self.deviation = (
            np.array(values, np.float32).reshape(1, -1, 1, 1) for values in json.loads(payload)
        )

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: headrace.Stream) -> None:
        (images,), (standard,) = inputs, outputs
        standard.resize(images.shape)

        def compute() -> None:
            np.divide(images.numpy() - self.mean, self.deviation, out=standard.numpy())

        stream.call(compute, reads=[images], writes=[standard])
