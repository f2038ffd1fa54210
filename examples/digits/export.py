"""Export the trained network to ``digits.pte`` and ``digits_split.pte``. Needs torch and executorch==1.5.1.

::

    python -m examples.digits.train && python -m examples.digits.export

In both XNNPACK takes the convolutions and linear layers, and the log-softmax stays with a CPU kernel. The
normalisation before them is a CPU kernel in ``digits.pte``; in ``digits_split.pte`` the delegate of
``normalize.py`` takes it, planned for device memory. The batch may be of any size from 1 to 512.
"""

from __future__ import annotations

import operator
import struct
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.dialects._ops import ops
from torch.export import Dim, export

from .train import WEIGHTS, Network

HERE = Path(__file__).resolve().parent
LARGEST_BATCH = 512
# PyTorch 2.13 picks a convolution's algorithm by "batch < 16" while lowering, and the exporter then takes 15
# for the greatest batch if the example's is smaller than 16.
EXAMPLE_BATCH = 32
MOST_NBYTES = 300_000


LAYER_NORM = ops.edge.aten.native_layer_norm.default


class DigitsNormalize(BackendDetails):  # type: ignore[misc]
    """The exporter's side of the delegate in ``normalize.py``: its payload is the epsilon."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: list[CompileSpec]) -> PreprocessResult:
        (node,) = [n for n in edge_program.graph_module.graph.nodes if n.target is LAYER_NORM]
        if node.args[2] is not None or node.args[3] is not None:
            raise SystemExit("examples/digits: expected a normalisation without weights")
        # The engine does not mark where a delegate's inputs end.
        compile_specs.append(CompileSpec("headrace.inputs", b"1"))
        return PreprocessResult(processed_bytes=struct.pack("<d", node.args[4]))


class NormalizePartitioner(Partitioner):  # type: ignore[misc]
    """Gives the layer norm, and the one of its results that is used, to DigitsNormalize on cuda:0."""

    def partition(self, exported_program: Any) -> PartitionResult:
        spec = DelegationSpec("DigitsNormalize", [CompileSpec("target_device", b"cuda:0")])
        for node in exported_program.graph.nodes:
            used = node.target is operator.getitem and node.args[0].target is LAYER_NORM
            if node.target is LAYER_NORM or used:
                node.meta["delegation_tag"] = "normalize"
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={"normalize": spec})


def write(name: str, exported: torch.export.ExportedProgram, partitioners: list[Partitioner]) -> None:
    program = to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch()
    plan = program.executorch_program.execution_plan[0]
    steps = [type(step.instr_args).__name__ for chain in plan.chains for step in chain.instructions]
    if not {"DelegateCall", "KernelCall"} <= set(steps):
        raise SystemExit(f"examples/digits: expected islands and kernels, got {steps}")
    planned = plan.values[plan.inputs[0]].val.sizes[0]
    if planned != LARGEST_BATCH:
        raise SystemExit(f"examples/digits: expected a batch of at most {LARGEST_BATCH}, got {planned}")
    if len(program.buffer) > MOST_NBYTES:
        raise SystemExit(f"examples/digits: expected at most {MOST_NBYTES} bytes, got {len(program.buffer)}")
    (HERE / name).write_bytes(program.buffer)
    print(f"{name}: {len(program.buffer)} bytes, {steps}")


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
    write("digits.pte", exported, [XnnpackPartitioner()])
    write("digits_split.pte", exported, [NormalizePartitioner(), XnnpackPartitioner()])


if __name__ == "__main__":
    main()
