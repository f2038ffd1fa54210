"""Export ``scale.pte``. Needs torch and executorch==1.5.1: ``python -m examples.scale_export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from executorch.exir.dialects._ops import ops
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.propagate_device_config import PropagateDeviceConfig
from torch.export import export

PROGRAM = Path(__file__).with_name("scale.pte")
PRODUCT = ops.edge.aten.mul.Tensor


class Scale(BackendDetails):  # type: ignore[misc]
    """The exporter's side of the delegate: the payload is the factor, in decimal."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: list[CompileSpec]) -> PreprocessResult:
        (product,) = (n for n in edge_program.graph_module.graph.nodes if n.op == "call_function")
        (factor,) = {**edge_program.state_dict, **edge_program.constants}.values()
        assert product.target is PRODUCT and factor.numel() == 1
        # How many of the island's arguments are inputs: the engine does not say.
        compile_specs.append(CompileSpec("headrace.inputs", b"1"))
        return PreprocessResult(processed_bytes=str(float(factor)).encode())


class ScalePartitioner(Partitioner):  # type: ignore[misc]
    """An island for each product with a constant."""

    def partition(self, exported_program: Any) -> PartitionResult:
        tags = {}
        for i, node in enumerate(exported_program.graph.nodes):
            if node.op != "call_function" or node.target is not PRODUCT:
                continue
            tag = node.meta["delegation_tag"] = f"scale_{i}"
            tags[tag] = DelegationSpec("Scale", [CompileSpec("target_device", b"cuda:0")])
        tag_constant_data(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("two", torch.tensor(2.0))
        self.register_buffer("three", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.two * self.three


def main() -> None:
    lowered = to_edge_transform_and_lower(
        export(Twice(), (torch.zeros(4),), strict=True), partitioner=[ScalePartitioner()]
    )
    program = lowered.to_executorch(
        ExecutorchBackendConfig(
            propagate_device_config=PropagateDeviceConfig(
                skip_h2d_for_method_inputs=True, skip_d2h_for_method_outputs=True
            ),
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
        )
    )
    PROGRAM.write_bytes(program.buffer)
    print(f"{PROGRAM.name}: {len(program.buffer)} bytes")


if __name__ == "__main__":
    main()
