"""Lower chosen operations to a delegate whose payload is the JSON graph of ``graph.py``. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from executorch.exir.dialects._ops import ops
from torch.fx.passes.operator_support import OperatorSupportBase

from . import graph

__all__ = ["GraphPartitioner", "delegate"]

aten = ops.edge.aten
# Edge operator -> operation of the payload.
LOWERED: dict[Any, str] = {
    aten.mm.default: "mm",
    aten.addmm.default: "addmm",
    aten.add.Tensor: "add",
    aten.mul.Tensor: "mul",
    aten.sub.Tensor: "sub",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
}


def _preprocess(edge_program: Any, compile_specs: list[CompileSpec]) -> PreprocessResult:
    signature = edge_program.graph_signature
    stores = {**edge_program.state_dict, **edge_program.constants}
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    constants = {name: stores[target].detach().cpu().numpy() for name, target in lifted.items()}
    inputs: list[str] = []
    outputs: list[str] = []
    steps: list[dict[str, Any]] = []
    for node in edge_program.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name not in lifted:
            inputs.append(node.name)
        elif node.op == "call_function":
            if node.target is aten.permute_copy.default or node.target is aten.t_copy.default:
                name, args = "t", [node.args[0].name]
            else:
                name = LOWERED[node.target]
                args = [a.name if isinstance(a, torch.fx.Node) else a for a in node.args]
                if node.kwargs:
                    raise NotImplementedError(
                        f"{node}: expected no keyword arguments, got {dict(node.kwargs)}"
                    )
            steps.append({"op": name, "out": node.name, "args": args})
        elif node.op == "output":
            outputs = [a.name for a in node.args[0]]
    # The list is the one that goes into the program: each partition owns its own (see partition below).
    compile_specs.append(CompileSpec(graph.INPUTS_SPEC, str(len(inputs)).encode()))
    return PreprocessResult(processed_bytes=graph.encode(inputs, outputs, steps, constants))


def delegate(name: str) -> type:
    """A backend of that name. The exporter finds it among the direct subclasses of BackendDetails, which
    are held weakly: keep the class."""
    return type(name, (BackendDetails,), {"preprocess": staticmethod(_preprocess)})


class _Supported(OperatorSupportBase):
    def __init__(self, targets: set[Any]) -> None:
        self.targets = targets

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and node.target in self.targets


class GraphPartitioner(Partitioner):  # type: ignore[misc]
    """Gives every connected group of ``targets`` to the delegate called ``name``.

    ``device`` ("cuda:0") makes the exporter plan the islands' arguments for that device.
    """

    def __init__(self, name: str, targets: Iterable[Any], device: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.targets = set(targets)
        self.device = device

    def partition(self, exported_program: Any) -> PartitionResult:
        tags: dict[str, DelegationSpec] = {}
        groups = generate_partitions_from_list_of_nodes(
            exported_program.graph_module, op_support=_Supported(self.targets)
        )
        for i, group in enumerate(groups):
            tag = f"{self.name}_{i}"
            for node in group.nodes:
                node.meta["delegation_tag"] = tag
            specs = [CompileSpec("target_device", self.device.encode())] if self.device else []
            tags[tag] = DelegationSpec(self.name, specs)
        tag_constant_data(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)
