"""A delegate in Python: brings each image to mean 0 and variance 1. NumPy computes it, in stream order.

Importing this module makes the delegate known; ``export.py`` gives it the network's first operation.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

import headrace

__all__ = ["Normalize"]


class Normalize(headrace.Delegate, name="DigitsNormalize"):
    """The payload is epsilon as a float64, little-endian."""

    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        (self.epsilon,) = struct.unpack("<d", payload)

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: headrace.Stream) -> None:
        (images,), (normal,) = inputs, outputs
        normal.resize(images.shape)

        def compute() -> None:
            x, y = images.numpy(), normal.numpy()
            mean = x.mean(axis=(-2, -1), keepdims=True)
            variance = x.var(axis=(-2, -1), keepdims=True)
            np.divide(x - mean, np.sqrt(variance + np.float32(self.epsilon)), out=y)

        stream.call(compute, reads=[images], writes=[normal])
