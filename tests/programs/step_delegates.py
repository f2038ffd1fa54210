"""The run-time classes of the delegates that compute ``steps.py``: StepsA and StepsB, on the stream of the call."""

from __future__ import annotations

from typing import Any

import numpy as np

import headrace

from . import steps

__all__ = ["NAMES", "Steps"]

NAMES = ("StepsA", "StepsB")


class Steps(headrace.Delegate, name=NAMES[0]):
    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        self.compute = steps.compile(payload)

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: headrace.Stream) -> None:
        # Outputs come with the greatest shapes of the plan.
        for buffer, like in zip(
            outputs, self.compute([np.ones(b.shape, b.dtype) for b in inputs]), strict=True
        ):
            buffer.resize(like.shape)

        def work() -> None:
            for buffer, result in zip(outputs, self.compute([b.numpy() for b in inputs]), strict=True):
                buffer.numpy()[...] = result

        stream.call(work, reads=inputs, writes=outputs)


class OtherSteps(Steps, name=NAMES[1]):
    pass


class WrongSteps(Steps, name="StepsWrong"):
    """Half off: what a verification has to find."""

    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        right = steps.compile(payload)
        self.compute = lambda arrays: [array + np.asarray(0.5, array.dtype) for array in right(arrays)]
