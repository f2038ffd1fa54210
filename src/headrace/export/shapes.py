"""Sizes that depend on the inputs, as text that the run time computes without torch or SymPy.

A size is an integer, or an expression over symbols ``s0``, ``s1``, … with integers, ``+ - * // %``,
``min(a, b)``, ``max(a, b)`` and parentheses. Every symbol is the size of one dimension of one input. ``//`` and
``%`` round towards minus infinity, as Python's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

__all__ = ["Shapes"]


class Shapes:
    """The sizes of an island's outputs as functions of the sizes of its inputs.

    ``inputs``, ``outputs``: for each tensor its sizes, integers or ``torch.SymInt``. ``symbols`` maps a name
    to (input, dimension); ``outputs`` holds for each output its sizes, integers or expressions. Names count
    from ``s0`` in the order of use, so the same program gives the same text. Raises ValueError for a size
    that the inputs' sizes do not determine, or for a function that the expressions lack.
    """

    symbols: dict[str, tuple[int, int]]
    outputs: list[list[int | str]]

    def __init__(self, inputs: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]]) -> None:
        self.symbols = {}
        self._names: dict[sympy.Symbol, str] = {}
        self._where = _where(inputs)
        self.outputs = [[self._size(size) for size in shape] for shape in outputs]

    def _size(self, size: Any) -> int | str:
        expression = _expression(size)
        if expression.is_Integer:
            return int(expression)
        return self._text(expression)

    def _symbol(self, symbol: sympy.Symbol) -> str:
        if symbol not in self._where:
            raise ValueError(f"{symbol} is no size of an input")
        where, inverse = self._where[symbol]
        if symbol not in self._names:
            self._names[symbol] = f"s{len(self._names)}"
            self.symbols[self._names[symbol]] = where
        return inverse.format(self._names[symbol])

    def _text(self, e: sympy.Expr) -> str:
        if e.is_Integer:
            return str(int(e)) if e >= 0 else f"(0 - {-int(e)})"
        if e.is_Symbol:
            return self._symbol(e)
        if isinstance(e, (sympy.Min, sympy.Max, functions.Min, functions.Max)):
            name = "min" if isinstance(e, (sympy.Min, functions.Min)) else "max"
            first, *rest = sorted(self._text(a) for a in e.args)
            for other in rest:
                first = f"{name}({first}, {other})"
            return first
        if isinstance(e, (functions.FloorDiv, functions.CleanDiv)):
            return f"({self._text(e.args[0])} // {self._text(e.args[1])})"
        if isinstance(e, sympy.floor):
            above, below = sympy.fraction(sympy.together(e.args[0]))
            return f"({self._text(above)} // {self._text(below)})"
        if isinstance(e, (functions.Mod, functions.PythonMod, sympy.Mod)):
            return f"({self._text(e.args[0])} % {self._text(e.args[1])})"
        if isinstance(e, functions.ModularIndexing):
            base, divisor, modulus = (self._text(a) for a in e.args)
            return f"(({base} // {divisor}) % {modulus})"
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and 0 < e.exp <= 8:
            return "(" + " * ".join([self._text(e.base)] * int(e.exp)) + ")"
        if isinstance(e, (sympy.Add, sympy.Mul)):
            # A size is a whole number even where its terms are not: (s + 1) / 2.
            above, below = sympy.fraction(sympy.together(e))
            if below != 1:
                return f"({self._text(above)} // {self._text(below)})"
            if isinstance(e, sympy.Add):
                return "(" + " + ".join(self._text(a) for a in e.as_ordered_terms()) + ")"
            return "(" + " * ".join(self._text(a) for a in e.as_ordered_factors()) + ")"
        raise ValueError(f"{type(e).__name__} in the size {e} has no form in a shape expression")


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _where(inputs: Sequence[Sequence[Any]]) -> dict[sympy.Symbol, tuple[tuple[int, int], str]]:
    """Which dimension tells a symbol, and how it is computed from that dimension's size, ``{}``."""
    found: dict[sympy.Symbol, tuple[tuple[int, int], str]] = {}
    composed: list[tuple[tuple[int, int], sympy.Expr]] = []
    for i, shape in enumerate(inputs):
        for dim, size in enumerate(shape):
            e = _expression(size)
            if e.is_Symbol:
                found.setdefault(e, ((i, dim), "{}"))
            elif not e.is_Integer:
                composed.append(((i, dim), e))
    # A symbol that only comes composed, as 2 * s + 1: solved for.
    for where, e in composed:
        (symbol, *others) = e.free_symbols
        if others or symbol in found or not e.is_polynomial(symbol) or sympy.degree(e, symbol) != 1:
            continue
        factor, rest = e.coeff(symbol, 1), e.coeff(symbol, 0)
        if factor.is_Integer and rest.is_Integer and factor > 0:
            less = f"{{}} - {rest}" if rest >= 0 else f"{{}} + {-rest}"
            found[symbol] = (where, f"(({less}) // {factor})")
    return found
