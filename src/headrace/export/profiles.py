"""Which sizes an engine is built for: from the bounds of the dynamic shapes, or from what the user says. Imports torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from ..errors import ExportError, OptionError
from .delegates import Profile
from .engines import Sizes

__all__ = ["MOST", "Ranges", "ranges", "sizes"]

# For each size that varies, by symbol: the least, the best, the largest; None where there is no such.
Ranges = dict[sympy.Symbol, tuple[int | None, int | None, int | None]]
# nvinfer1::Dims are 64 bits wide, ExecuTorch's sizes 32.
MOST = (1 << 31) - 1
WHICH = ("min", "opt", "max")


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def ranges(method: str, program: ExportedProgram, profiles: Sequence[Profile]) -> list[Ranges]:
    """For each profile what the sizes of ``program``, the method, may be. Without profiles one: the bounds that the
    program was traced with, and the example's sizes.

    Raises OptionError for a profile that does not fit the method's inputs, naming the profile, the input and the
    dimension.
    """
    wanted = set(program.graph_signature.user_inputs)
    inputs = {
        n.name: n.meta["val"]
        for n in program.graph.nodes
        if n.op == "placeholder" and n.name in wanted and isinstance(n.meta.get("val"), torch.Tensor)
    }
    bounds = _bounds(program, inputs.values())
    if not profiles:
        return [bounds]
    return [_given(f"{method}, TensorRT, profile {i}", one, inputs, bounds) for i, one in enumerate(profiles)]


def _bounds(program: ExportedProgram, inputs: Any) -> Ranges:
    found: Ranges = {}
    examples: dict[sympy.Symbol, int] = {}
    for tensor in inputs:
        for size in tensor.shape:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                examples[size.node.expr] = int(size.node.hint)
    for symbol, bound in program.range_constraints.items():
        low, high = _number(bound.lower), _number(bound.upper)
        found[symbol] = (1 if low is None else max(1, low), examples.get(symbol), high)
    return found


def _number(bound: Any) -> int | None:
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None  # infinity, of which there are several kinds
    return number if number <= MOST else None


def _given(where: str, profile: Profile, inputs: Mapping[str, torch.Tensor], bounds: Ranges) -> Ranges:
    if unknown := sorted(set(profile.min) - set(inputs)):
        raise OptionError(
            f"{where}: expected inputs among {', '.join(inputs)}, got {', '.join(unknown)}; name inputs as the model's forward does"
        )
    solved: dict[sympy.Symbol, dict[str, tuple[int, str]]] = {}
    for name in profile.min:
        shape = inputs[name].shape
        for which in WHICH:
            given = getattr(profile, which)[name]
            if len(given) != len(shape):
                raise OptionError(
                    f"{where}, {which}, {name!r}: expected {len(shape)} sizes, {[str(s) for s in shape]}, got "
                    f"{list(given)}; give the profile those sizes"
                )
            for dim, (size, number) in enumerate(zip(shape, given, strict=True)):
                here = f"{where}, {which}, {name!r}, dimension {dim}"
                _solve(here, _expression(size), number, which, solved, bounds)
    found = dict(bounds)
    for symbol, each in solved.items():
        low, opt, high = bounds.get(symbol, (None, None, None))
        found[symbol] = (
            each["min"][0] if "min" in each else low,
            each["opt"][0] if "opt" in each else opt,
            each["max"][0] if "max" in each else high,
        )
    return found


def _solve(
    here: str,
    size: sympy.Expr,
    number: int,
    which: str,
    solved: dict[sympy.Symbol, dict[str, tuple[int, str]]],
    bounds: Ranges,
) -> None:
    """Take from ``size == number`` what the one symbol in it is."""
    if size.is_Integer:
        if int(size) != number:
            raise OptionError(
                f"{here}: expected {size}, which does not vary, got {number}; name it in dynamic_shapes, or keep it"
            )
        return
    if len(size.free_symbols) != 1:
        return
    (symbol,) = size.free_symbols
    values = (
        [v for v in sympy.solve(size - number, symbol) if v.is_Integer and v >= 0]
        if size != symbol
        else [sympy.Integer(number)]
    )
    if not values:
        raise OptionError(
            f"{here}: expected a number that {size} can be, got {number}; choose a size that the model can have there"
        )
    value = int(values[0])
    low, _, high = bounds.get(symbol, (None, None, None))
    if (low is not None and value < low) or (high is not None and value > high):
        raise OptionError(
            f"{here}: expected a size that dynamic_shapes allows, {low} to {'any' if high is None else high} for {symbol}, "
            f"got {value}; keep the profile within it, or widen dynamic_shapes"
        )
    known = solved.setdefault(symbol, {})
    if which in known and known[which][0] != value:
        raise OptionError(
            f"{here}: expected {known[which][0]}, as in {known[which][1]}, where the size is the same, got {value}; give both one number"
        )
    known.setdefault(which, (value, here))


def sizes(method: str, inputs: Sequence[torch.fx.Node], profiles: Sequence[Ranges]) -> list[list[Sizes]]:
    """For each profile the shapes of every input of an island; none where nothing varies.

    Raises ExportError, naming the input and the dimension, where a size has no upper bound.
    """
    shapes = [[_expression(size) for size in node.meta["val"].shape] for node in inputs]
    if all(size.is_Integer for shape in shapes for size in shape):
        return []
    found = []
    for i, profile in enumerate(profiles):
        made: list[Sizes] = []
        for node, shape in zip(inputs, shapes, strict=True):
            dims = [
                _size(
                    f"{method}, TensorRT, profile {i}, {node.name}, dimension {dim}", node, size, profile, dim
                )
                for dim, size in enumerate(shape)
            ]
            made.append(tuple(tuple(d[k] for d in dims) for k in range(3)))  # type: ignore[arg-type]
        found.append(made)
    return found


def _size(
    here: str, node: torch.fx.Node, size: sympy.Expr, profile: Ranges, dim: int
) -> tuple[int, int, int]:
    if size.is_Integer:
        return (int(size),) * 3
    symbols = sorted(size.free_symbols, key=str)
    for symbol in symbols:
        low, _, high = profile.get(symbol, (None, None, None))
        if low is None or high is None:
            raise ExportError(
                f"{here}: expected a size with an upper bound, got {size} without one; give it in dynamic_shapes, "
                'Dim("name", max=…)',
                node=node.name,
            )
    # A size may fall where another grows, so every corner is looked at.
    ends = [(profile[s][0], profile[s][2]) for s in symbols]
    corners = [int(size.subs(dict(zip(symbols, corner, strict=True)))) for corner in itertools.product(*ends)]
    low, high = min(corners), max(corners)
    best = {s: profile[s][1] for s in symbols}
    hint = getattr(node.meta["val"].shape[dim].node, "hint", None)
    if all(value is not None for value in best.values()):
        opt = int(size.subs(best))
    else:
        opt = high if hint is None else int(hint)
    return low, min(max(opt, low), high), high
