"""Export the trained network to ``digits.pte``. Needs torch and executorch==1.5.1.

::

    python -m examples.digits.train && python -m examples.digits.export

XNNPACK takes the convolutions and linear layers; the normalisation before and the log-softmax after them
stay with the CPU kernels. The batch may be of any size from 1 to 512.
"""

from __future__ import annotations

from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch.export import Dim, export

from .train import WEIGHTS, Network

PROGRAM = Path(__file__).resolve().parent / "digits.pte"
LARGEST_BATCH = 512
# PyTorch 2.13 picks a convolution's algorithm by "batch < 16" while lowering, and the exporter then takes 15
# for the greatest batch if the example's is smaller than 16.
EXAMPLE_BATCH = 32
MOST_NBYTES = 300_000


def main() -> None:
    network = Network()
    network.load_state_dict(torch.load(WEIGHTS))
    network.eval()
    exported = export(
        network,
        (torch.zeros(EXAMPLE_BATCH, 1, 8, 8),),
        dynamic_shapes={"images": {0: Dim("batch", min=1, max=LARGEST_BATCH)}},
        strict=True,
    )
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    plan = program.executorch_program.execution_plan[0]
    steps = [type(step.instr_args).__name__ for chain in plan.chains for step in chain.instructions]
    if not {"DelegateCall", "KernelCall"} <= set(steps):
        raise SystemExit(f"examples/digits: expected islands and kernels, got {steps}")
    planned = plan.values[plan.inputs[0]].val.sizes[0]
    if planned != LARGEST_BATCH:
        raise SystemExit(f"examples/digits: expected a batch of at most {LARGEST_BATCH}, got {planned}")
    if len(program.buffer) > MOST_NBYTES:
        raise SystemExit(f"examples/digits: expected at most {MOST_NBYTES} bytes, got {len(program.buffer)}")
    PROGRAM.write_bytes(program.buffer)
    print(f"{PROGRAM.name}: {len(program.buffer)} bytes, {steps}")


if __name__ == "__main__":
    main()
