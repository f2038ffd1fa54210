"""How a result is verified before it is handed over, and what came of it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError

__all__ = ["TOLERANCE", "Deviation", "Verification", "Verify"]

# Relative to each number, and absolute for an output whose numbers are at most 1: what rounding in another order of
# operations may change. As ``headrace run --expect`` has it; a dtype that is not here has to be equal.
TOLERANCE = {
    "float64": (1e-7, 1e-9),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Verify:
    """How to verify.

    inputs      calls beside the example inputs, each a tuple as these: a list of them, or for several methods a
                mapping. None: one call with random numbers like the examples', of other sizes where sizes vary
    rtol, atol  how far an output may be from eager PyTorch's: ``atol * max(1, its largest number) + rtol * number``.
                None: by dtype, ``TOLERANCE``
    python      the interpreter that has headrace's run time. None: this one
    imports     modules to import there, beside those that ``Python(module=…)`` names
    timeout_s   for each process, in seconds
    """

    inputs: Mapping[str, Sequence[tuple[Any, ...]]] | Sequence[tuple[Any, ...]] | None = None
    rtol: float | None = None
    atol: float | None = None
    python: str | None = None
    imports: Sequence[str] = ()
    timeout_s: float = 600

    def __post_init__(self) -> None:
        for option in ("rtol", "atol", "timeout_s"):
            value = getattr(self, option)
            if value is not None and not (
                isinstance(value, (int, float)) and value >= 0 and math.isfinite(value)
            ):
                raise OptionError(
                    f"Verify, {option}: expected a finite number of 0 or more, got {value!r}; pass one, or leave it out for the default of the dtype"
                )
        if isinstance(self.imports, str):
            raise OptionError(
                f"Verify, imports: expected a list of names, got {self.imports!r}; write [name]"
            )

    def tolerance(self, dtype: str) -> tuple[float, float]:
        """Relative and absolute, for an output of this dtype."""
        rtol, atol = TOLERANCE.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@dataclass(frozen=True)
class Deviation:
    """How far one output was from eager PyTorch at most, over all calls and devices. ``shape`` is that of the call
    where it was."""

    method: str
    output: int
    dtype: str
    shape: tuple[int, ...]
    largest: float
    device: str


@dataclass(frozen=True)
class Verification:
    """What was verified. ``devices`` the program ran on, with the schedule of a simulated one; ``calls`` how often on
    each; ``note`` what could not be verified here, and what was in its place ("" where nothing is missing)."""

    devices: tuple[str, ...]
    calls: int
    deviations: tuple[Deviation, ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [f"verified: {self.calls} calls on each of {', '.join(self.devices)}"]
        lines += [
            f"  {d.method}, output {d.output}: {d.dtype}{list(d.shape)}, largest deviation {d.largest:.3g} ({d.device})"
            for d in self.deviations
        ]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])
