"""A delegate in Python, and a program that calls it twice: ``python -m examples.scale``.

``scale.pte`` (made by ``scale_export.py`` with the stock exporter) is ``x * 2 * 3`` on float32[4], in device memory,
each product an island of the delegate "Scale" whose payload is the factor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import headrace

__all__ = ["PROGRAM", "Scale"]

PROGRAM = Path(__file__).with_name("scale.pte")


class Scale(headrace.Delegate, name="Scale"):
    def load(self, payload: bytes, context: headrace.delegate.Context) -> None:
        self.factor = np.float32(payload)

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        (x,), (y,) = inputs, outputs

        def work() -> None:
            np.multiply(x.numpy(), self.factor, out=y.numpy())

        stream.call(work, reads=[x], writes=[y])


def main() -> None:
    x = np.arange(4, dtype=np.float32)
    for schedule in ("eager", "late", 7):
        device = headrace.device("sim", schedule=schedule)
        with headrace.load(PROGRAM, device=device) as program, headrace.caller_stream(device.stream()):
            (y,) = program["forward"](device.to_device(x))
            print(f"{schedule!s:6} {x.tolist()} -> {y.numpy().tolist()}")


if __name__ == "__main__":
    main()
