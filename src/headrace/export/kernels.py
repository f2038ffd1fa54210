"""Which operators the engine's CPU kernels cover. Imports torch."""

from __future__ import annotations

import importlib.resources
import operator as builtin

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.graph_module import get_control_flow_submodules
from executorch.exir.operator.convert import to_out_variant

from .. import pte
from .node import operator

__all__ = ["KERNELS", "branches", "has_kernel"]

# What the pinned engine registers, by name with overload; a test compares it with the engine.
KERNELS = frozenset(
    importlib.resources.files(pte.__name__).joinpath("kernels.txt").read_text(encoding="utf-8").split()
)
# What the exporter itself turns into instructions of the engine, and what it removes.
CONTROL_FLOW = {"cond", "map_impl", "while_loop", "scan"}
REMOVED = (
    "aten._assert",
    "aten.sym_constrain_range",
    "aten.lift_fresh_copy",
    "aten.alias_copy",
    "aten.detach",
)


def branches(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Every operator in the graphs that control flow of ``module`` takes, however deep."""
    found = []
    for _, inner, _ in get_control_flow_submodules(module):
        found += [n for n in inner.graph.nodes if n.op == "call_function"] + branches(inner)
    return found


def has_kernel(node: torch.fx.Node) -> bool:
    """Whether the engine can run the operator itself. Control flow counts as covered; what is in its branches is for
    ``branches`` to say."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() in CONTROL_FLOW or "delegate" in target.name()
    if isinstance(target, EdgeOpOverload):
        target = target._op
    if isinstance(target, torch._ops.OpOverload):
        if _name(target) in KERNELS or operator(node).startswith(REMOVED):
            return True
        try:
            out, _ = to_out_variant(target)
        except (RuntimeError, AssertionError, AttributeError):
            return False  # it has none; of some operators the exporter cannot even read the schema
        return _name(out) in KERNELS
    # Arithmetic on sizes, and taking one of several results.
    return target is builtin.getitem or getattr(target, "__module__", "") in ("_operator", "math", "torch")


def _name(target: torch._ops.OpOverload) -> str:
    overload = target._schema.overload_name
    return f"{target._schema.name}.{overload}" if overload else str(target._schema.name)
