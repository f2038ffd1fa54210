"""A node of a graph in words, for messages that a person can act on."""

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["described", "operator", "source_line"]

# One frame of a stack trace as PyTorch writes it into a node.
FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in .+\n\s*(?P<code>.*)$', re.MULTILINE)


def operator(node: torch.fx.Node) -> str:
    """The operator's name with its overload: ``aten.topk.default``."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # The exporter's edge dialect wraps operators.
        target = getattr(target, "_op", target)
    return (
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )


def source_line(node: torch.fx.Node) -> str | None:
    """Where the user's code made the node: ``model.py:12: x.topk(3)``; None where it is not recorded."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    file, line, code = frames[-1]
    return f"{file}:{line}: {code.strip()}"


def described(node: torch.fx.Node) -> str:
    """``topk (aten.topk.default of float32[8, 16], at model.py:12: x.topk(3))``."""
    tensors = [a.meta.get("val") for a in node.all_input_nodes]
    shapes = ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{[str(s) if isinstance(s, torch.SymInt) else s for s in t.shape]}"
        for t in tensors
        if isinstance(t, torch.Tensor)
    ).replace("'", "")
    line = source_line(node)
    return f"{node.name} ({operator(node)} of {shapes or 'no tensor'}{f', at {line}' if line else ''})"
