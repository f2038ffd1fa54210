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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import pte
from ..errors import ExportError, OptionError
from .cache import folder_of
from .delegates import Aoti, Claims, ExportDelegate, Node, Plan, Profile, Python, TensorRT, Xnnpack
from .files import writable
from .quiet import quiet
from .split import Island, Split, SplitNode
from .target import Target, planned_on
from .verification import Deviation, Verification, Verify

__all__ = [
    "Aoti",
    "Claims",
    "Deviation",
    "ExportDelegate",
    "Exported",
    "Island",
    "Node",
    "Plan",
    "Profile",
    "Python",
    "Split",
    "SplitNode",
    "Target",
    "TensorRT",
    "Verification",
    "Verify",
    "Xnnpack",
    "export",
]


@dataclass(frozen=True)
class Exported:
    """What was written: the program, and the data files that belong to it. ``split`` says which node went where;
    printed, it is a table. ``verification`` says what was compared with eager PyTorch, None where nothing was."""

    path: Path
    data: tuple[Path, ...]
    split: Split
    verification: Verification | None

    @property
    def file(self) -> pte.ProgramFile:
        """What the program says, read from the file."""
        return pte.read(self.path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write the split as a picture, SVG: operators by island in the colour of their delegate, and in red what
        goes from one device to another. ``path`` ends in ``.svg``. Raises OptionError where no file can be written
        there, OSError where writing fails."""
        from .plot import svg

        writable("plot", path, ".svg").write_text(svg(self.split), encoding="utf-8")


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
    verify: bool | Verify = True,
    cache: bool | str | os.PathLike[str] = True,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write ``model`` to ``path`` and return what was written. Compiling takes seconds to minutes.

    model           ``torch.nn.Module`` or ``torch.export.ExportedProgram``; or a mapping of method names to these
    example_inputs  the positional arguments as a tuple, of the dtype and shape that the program will take; with
                    several methods a mapping of their names to such tuples
    delegates       who takes what, in order: each takes what it claims of what those before it left. What none takes
                    stays with the engine's CPU kernels
    target          what to compile for: ``host`` (any x86-64 processor with AVX2), ``host:x86-64-v4``, …; or GPUs,
                    ``cuda:sm_90``, ``cuda:sm_80+sm_90+ptx``: no GPU is needed, Triton is
    dynamic_shapes  as in ``torch.export.export``; with several methods a mapping
    device          where islands' arguments are planned. "cuda:0" stands for whichever device the program is
                    loaded on, ``cpu`` and ``sim`` too; "cpu", or None, plans everything in host memory
    resident        inputs and outputs are device memory of the caller's, bound without a copy. Not for methods
                    with state, which lies on the host
    weights         ``beside``: the constants of AOTInductor's islands go to a data file, ``path`` with the suffix ``.ptd``;
                    those of all others stay in the program, which ``split.notes`` says
    verify          run the result in a fresh process without torch, on ``cpu`` and ``sim`` (on the GPU, for a GPU's
                    code), and compare it with eager PyTorch before anything is written; ``Verify`` says how
    cache           keep what AOTInductor compiled, by content, in a folder: this one, or the user's
                    (``$XDG_CACHE_HOME/headrace``; ``HEADRACE_EXPORT_CACHE=0`` in the environment turns it off); False: not
    progress        called with one line of text for each stage and each island

    Mutable buffers are state of the method: they start as they are in the model, and advance once a call.

    Warns (UserWarning) of a pattern in ``operators`` or ``modules`` that matches nothing.

    Raises ExportError (``.node`` names the graph node), OptionError for an option, which ``path`` is too (no such
    folder, a folder, read-only), and OSError, of ``path``, where the files cannot be written in the end.
    """
    if not isinstance(verify, (bool, Verify)):
        raise OptionError(f"verify: expected True, False or Verify(…), got {verify!r}; pass one of these")
    if isinstance(delegates, (str, Claims)) or not isinstance(delegates, Iterable):
        raise OptionError(
            f"delegates: expected a list of delegates, got {delegates!r}; write [Aoti()] for one"
        )
    where, planned = writable("path", path), planned_on(device)
    if weights == "beside":
        if where.suffix == ".ptd":
            raise OptionError(
                f"path, {where}: expected another name than that of the data file, got .ptd; write .pte"
            )
        writable("weights, the data file", where.with_suffix(".ptd"))
    try:
        with quiet():
            from .program import Options, write
    except ModuleNotFoundError as error:
        raise ExportError(
            f"export: expected torch 2.13 and ExecuTorch 1.5.1, got no module {error.name!r}; install both "
            "(docs/export.md)"
        ) from error

    options = Options(
        path=where,
        delegates=tuple(delegates),
        target=target if isinstance(target, Target) else Target.parse(target),
        device=planned,
        resident=resident,
        weights=weights,
        verify=verify if isinstance(verify, Verify) else (Verify() if verify else None),
        cache=folder_of(cache, os.environ),
    )
    with quiet():
        return write(model, example_inputs, dynamic_shapes, options, progress)
