"""Export the trained network to ``digits.pte`` and ``digits_split.pte``. Needs torch, executorch==1.5.1 and headrace.

::

    python -m examples.digits.train && python -m examples.digits.export

In both XNNPACK takes the convolutions and linear layers, and the log-softmax stays with a CPU kernel. The
normalisation before them is a CPU kernel in ``digits.pte``; in ``digits_split.pte`` the delegate of
``normalize.py`` takes it, planned for device memory. The batch may be of any size from 1 to 512.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import headrace
from headrace.export import Python, Verify, Xnnpack

from .train import WEIGHTS, Network

HERE = Path(__file__).resolve().parent
LARGEST_BATCH = 512
# PyTorch 2.13 picks a convolution's algorithm by "batch < 16" while lowering, and the exporter then takes 15
# for the greatest batch if the example's is smaller than 16.
EXAMPLE_BATCH = 32
MOST_NBYTES = 300_000


def epsilon(island: Any) -> bytes:
    """The payload of the delegate in ``normalize.py``: the epsilon of a layer norm without weights."""
    (step,) = island.steps
    _, _, weight, bias, value = step.args
    if weight is not None or bias is not None:
        raise ValueError("expected a normalisation without weights")
    return struct.pack("<d", value)


NORMALIZE = Python(
    "DigitsNormalize",
    operators=["aten.native_layer_norm"],
    lower=epsilon,
    module="examples.digits.normalize",
)


def write(
    path: Path, network: torch.nn.Module, delegates: Sequence[Any], verify: bool | Verify = True
) -> None:
    exported = headrace.export(
        network,
        (torch.randn(EXAMPLE_BATCH, 1, 8, 8, generator=torch.Generator().manual_seed(0)),),
        path=path,
        delegates=delegates,
        dynamic_shapes={"images": {0: Dim("batch", min=1, max=LARGEST_BATCH)}},
        verify=verify,
    )
    method = exported.file["forward"]
    steps = [step.kind for step in method.instructions]
    if not {"delegate", "kernel"} <= set(steps):
        raise SystemExit(f"examples/digits: expected islands and kernels, got {steps}")
    planned = method.inputs[0].shape[0]
    if planned != LARGEST_BATCH:
        raise SystemExit(f"examples/digits: expected a batch of at most {LARGEST_BATCH}, got {planned}")
    size = path.stat().st_size
    if size > MOST_NBYTES:
        raise SystemExit(f"examples/digits: expected at most {MOST_NBYTES} bytes, got {size}")
    print(f"{path.name}: {size} bytes, {len(method.islands)} islands", exported.verification, sep="\n")


def main() -> None:
    network = Network()
    network.load_state_dict(torch.load(WEIGHTS))
    network.eval()
    write(HERE / "digits.pte", network, [Xnnpack()])
    write(HERE / "digits_split.pte", network, [NORMALIZE, Xnnpack()])


if __name__ == "__main__":
    main()
