"""Export: a PyTorch model becomes a program (``.pte``) that runs without torch.

::

    exported = headrace.export(model, (x,), path="m.pte")          # AOTInductor for the host
    with headrace.load(exported.path) as program:
        (y,) = program["forward"](x.numpy())

This is the only part that imports torch, and only once it is called: torch 2.13 and ExecuTorch 1.5.1, from PyPI.
ExecuTorch's own exporter does the work. Delegates claim operators in the order they are listed; what none takes
stays with the engine's CPU kernels.

Raises ExportError, with the graph node at fault, where a model cannot be exported as asked; a file is then not
written, and an older one of that name is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import pte
from ..errors import ExportError
from .delegates import Aoti, Claims, ExportDelegate, Node, Plan, Python, Xnnpack
from .split import Island, Split, SplitNode
from .target import Target

__all__ = [
    "Aoti",
    "Claims",
    "ExportDelegate",
    "Exported",
    "Island",
    "Node",
    "Plan",
    "Python",
    "Split",
    "SplitNode",
    "Target",
    "Xnnpack",
    "export",
]


@dataclass(frozen=True)
class Exported:
    """What was written: the program, the data files that belong to it, and which node went where (printed, ``split``
    is a table)."""

    path: Path
    data: tuple[Path, ...]
    split: Split

    @property
    def file(self) -> pte.ProgramFile:
        """What the program says, read from the file."""
        return pte.read(self.path)


def export(
    model: Any,
    example_inputs: Any,
    *,
    path: str | os.PathLike[str],
    delegates: Sequence[ExportDelegate | Claims] = (Aoti(),),
    target: str | Target = "host",
    dynamic_shapes: Any = None,
    device: str | None = "cuda:0",
    resident: bool = False,
    weights: Literal["inside", "beside"] = "inside",
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write ``model`` to ``path`` and return what was written. Compiling takes seconds to minutes.

    model           ``torch.nn.Module`` or ``torch.export.ExportedProgram``; or a mapping of method names to these
    example_inputs  the positional arguments as a tuple, of the dtype and shape that the program will take; with
                    several methods a mapping of their names to such tuples
    delegates       who takes what, in order: each takes what it claims of what those before it left. What none takes
                    stays with the engine's CPU kernels
    target          what to compile for: ``host`` (any x86-64 processor with AVX2), ``host:x86-64-v4``, …
    dynamic_shapes  as in ``torch.export.export``; with several methods a mapping
    device          where islands' arguments are planned. "cuda:0" stands for whichever device the program is
                    loaded on, ``cpu`` and ``sim`` too; None plans everything in host memory
    resident        inputs and outputs are device memory of the caller's, bound without a copy. Not for methods
                    with state, which lies on the host
    weights         ``beside``: the constants of AOTInductor's islands go to a data file, ``path`` with the suffix ``.ptd``
    progress        called with one line of text for each stage and each island

    Mutable buffers are state of the method: they start as they are in the model, and advance once a call.

    Raises ExportError (``.node`` names the graph node), OptionError for an option, OSError where the files
    cannot be written.
    """
    try:
        from .program import write
    except ModuleNotFoundError as error:
        raise ExportError(
            f"export: expected torch 2.13 and ExecuTorch 1.5.1, got no module {error.name!r}; install both "
            "(docs/export.md)"
        ) from error

    return write(
        model,
        example_inputs,
        path=Path(path),
        delegates=delegates,
        target=target if isinstance(target, Target) else Target.parse(target),
        dynamic_shapes=dynamic_shapes,
        device=device,
        resident=resident,
        weights=weights,
        progress=progress,
    )
