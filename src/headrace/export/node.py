"""A node of a graph in words, for messages that a person can act on."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import uninteresting_files

from .delegates import Node

__all__ = [
    "described",
    "frames",
    "innermost",
    "module_path",
    "operator",
    "source_line",
    "viewed",
    "whole_traces",
]

# One frame of a stack trace as PyTorch writes it into a node.
FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in .+\n\s*(?P<code>.*)$', re.MULTILINE)
TORCH = os.path.dirname(torch.__file__) + os.sep

# Of a line of source, in messages and tables.
MOST = 120


@contextlib.contextmanager
def whole_traces() -> Iterator[None]:
    """Nodes that are traced meanwhile remember the functions that a module's ``forward`` called, and not its line alone, as
    PyTorch (2.13) has it unless Dynamo traces."""
    stock = PythonKeyTracer._filter_traceback_frames

    def frames_of(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        first = next((i for i, frame in enumerate(summary) if frame.name == "forward"), len(summary))
        kept = [f for f in summary[first:] if f.name == "forward" or not f.filename.startswith(TORCH)]
        return traceback.StackSummary.from_list([f for f in kept if f.filename not in uninteresting_files()])

    PythonKeyTracer._filter_traceback_frames = frames_of
    try:
        yield
    finally:
        PythonKeyTracer._filter_traceback_frames = stock


def operator(node: torch.fx.Node) -> str:
    """The operator's name with its overload: ``aten.topk.default``."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # The exporter's edge dialect wraps operators.
        target = getattr(target, "_op", target)
    return (
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )


def frames(text: str) -> list[tuple[str, str, str]]:
    """File, line number and line of each frame in ``text``, the outermost first."""
    return [(file, line, code.strip()) for file, line, code in FRAME.findall(text)]


def innermost(trace: Sequence[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    """The last frame outside PyTorch, whose modules call functions of their own for the user's; its last where all are inside."""
    theirs = [frame for frame in trace if not frame[0].startswith(TORCH)]
    found = theirs or trace
    return found[-1] if found else None


def source_line(node: torch.fx.Node) -> str | None:
    """Where the user's code made the node: ``model.py:12: x.topk(3)``; None where it is not recorded."""
    frame = innermost(frames(node.meta.get("stack_trace") or ""))
    if frame is None:
        return None
    file, line, code = frame
    return f"{file}:{line}: {code if len(code) <= MOST else code[: MOST - 1] + '…'}"


def module_path(node: torch.fx.Node) -> str:
    """The submodule whose ``forward`` made the node, ``layers.0.attention``; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    # Traced without Dynamo it may be written as Python: L['self'].layers[0].
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", re.sub(r"^L\[['\"]self['\"]\]\.?", "", path)).strip(".")


def viewed(node: torch.fx.Node) -> Node:
    """The node as rules and tables see it, without torch."""
    values = node.meta.get("val")
    outputs = values if isinstance(values, (tuple, list)) else [values]
    return Node(
        name=node.name,
        operator=operator(node),
        module=module_path(node),
        source=source_line(node),
        inputs=_tensors(a.meta.get("val") for a in node.all_input_nodes),
        outputs=_tensors(outputs),
    )


def _tensors(values: Iterable[Any]) -> tuple[tuple[str, tuple[int | str, ...]], ...]:
    return tuple(
        (
            str(t.dtype).removeprefix("torch."),
            tuple(str(s) if isinstance(s, torch.SymInt) else int(s) for s in t.shape),
        )
        for t in values
        if isinstance(t, torch.Tensor)
    )


def described(node: torch.fx.Node) -> str:
    """``topk (aten.topk.default of float32[8, 16], at model.py:12: x.topk(3))``."""
    tensors = _tensors(a.meta.get("val") for a in node.all_input_nodes)
    shapes = ", ".join(f"{dtype}[{', '.join(map(str, shape))}]" for dtype, shape in tensors)
    line = source_line(node)
    return f"{node.name} ({operator(node)} of {shapes or 'no tensor'}{f', at {line}' if line else ''})"
