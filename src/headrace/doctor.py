"""What this installation has, and what it lacks and why."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass

import numpy as np

from . import engine as _engine

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """``engine_source`` is ``"bundled"``, or ``"installed"`` where a stock ExecuTorch's files are used."""

    headrace: str
    python: str
    numpy: str
    machine: str
    engine: str
    engine_source: str
    engine_folder: str
    delegates: tuple[str, ...]
    kernels: int
    threads: int
    torch_loaded: bool

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at this process: the engine, its delegates and kernels. Needs no device."""
    from . import __version__

    found = _engine.engine()
    return Diagnosis(
        headrace=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        machine=f"{platform.system()} {platform.machine()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        engine=found.version,
        engine_source=found.source,
        engine_folder=found.folder,
        delegates=tuple(sorted(_engine.core.delegates())),
        kernels=len(set(_engine.core.kernels())),
        threads=_engine.num_threads(),
        torch_loaded="torch" in sys.modules,
    )
