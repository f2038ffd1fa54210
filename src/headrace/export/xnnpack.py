"""XNNPACK: what stock ExecuTorch's partitioner takes, one operator with its weights at a time. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.config_partitioner import format_target_name
from torch.export import ExportedProgram

from .node import operator
from .partition import Lowering, constants_of

__all__ = ["XnnpackLowering"]

# What XNNPACK computes along with the operator before it, and what it can do without.
FUSED = {"aten.relu.default", "aten.hardtanh.default"}


class XnnpackLowering(Lowering):
    """``keeps``, ``refuses`` and ``companions`` are the stock partitioner's; islands grow by our rules."""

    backend = "XnnpackBackend"

    def __init__(self, claims: Any, plan: Any) -> None:
        super().__init__(claims, plan)
        self.stock = XnnpackPartitioner()
        self._together: dict[torch.fx.Node, list[torch.fx.Node]] = {}

    def _config(self, node: torch.fx.Node) -> Any:
        name = getattr(node.target, "__name__", None)
        return self.stock.target_partitioner_configs.get(format_target_name(name)) if name else None

    def _partition(self, node: torch.fx.Node, program: ExportedProgram) -> list[torch.fx.Node]:
        """What the stock partitioner puts together with ``node``, which looks at the whole graph: asked once."""
        if node not in self._together:
            self._together[node] = self._config(node).get_partition(node, program)
        return self._together[node]

    def refuses(self, node: torch.fx.Node, program: ExportedProgram) -> str | None:
        config = self._config(node)
        if config is None:
            return "XNNPACK has no such operator, or none that stands alone"
        scalars = [n.name for n in (node, *node.all_input_nodes) if _is_scalar(n)]
        if scalars and not constants_of(program).issuperset(scalars):
            # Accepted by the exporter; the engine's XNNExecutor then fails at every call (ExecuTorch 1.5.1).
            return "a tensor without dimensions, which XNNPACK cannot be called with"
        if config.check_constraints(node, program):
            state = self._state(node, program)
            return f"{', '.join(state)} is state, and XNNPACK's weights are constants" if state else None
        return _reason(config, node) or "its shapes or dtypes"

    def _state(self, node: torch.fx.Node, program: ExportedProgram) -> list[str]:
        """Buffers that the method writes, among what XNNPACK would take for weights."""
        signature = program.graph_signature
        written = set(signature.buffers_to_mutate.values())
        deps = self._partition(node, program)
        return [n.name for n in deps if signature.inputs_to_buffers.get(n.name) in written]

    def companions(self, node: torch.fx.Node, program: ExportedProgram) -> Sequence[torch.fx.Node]:
        found = self._partition(node, program)
        return [n for n in found if n is not node and not (n in node.users and operator(n) in FUSED)]

    def guests(self, node: torch.fx.Node, program: ExportedProgram) -> Sequence[torch.fx.Node]:
        found = self._partition(node, program)
        return [n for n in found if n in node.users and operator(n) in FUSED]

    def keeps(self, program: ExportedProgram) -> tuple[list[Any], Callable[[torch.fx.Node], bool] | None]:
        operators, supported = self.stock.ops_to_not_decompose(program)
        if self.claims.everything:
            return operators, supported

        def wanted(node: torch.fx.Node) -> bool:
            return (supported is None or supported(node)) and self._claims(node)

        return operators, wanted


def _is_scalar(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _reason(config: Any, node: torch.fx.Node) -> str | None:
    """What the stock partitioner's checks last said; each of its modules has a ``why`` that remembers."""
    for kind in type(config).__mro__:
        why = getattr(sys.modules.get(kind.__module__), "why", None)
        if getattr(why, "node", None) is node:
            reason = str(why.reason)  # type: ignore[union-attr]
            return reason[:1].lower() + reason[1:]
    return None
