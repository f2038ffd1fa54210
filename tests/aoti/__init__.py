"""Programs with AOTInductor islands for the host, and what eager PyTorch answers for them.

``models.py`` and ``export.py`` need torch; this module does not. The export takes minutes and is kept in
``build/aoti/<hash>``, by the content of everything that it depends on.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import programs

if TYPE_CHECKING:
    import headrace

__all__ = ["ENVIRONMENT", "Program", "ensure", "folder", "load", "names"]

HERE = Path(__file__).resolve().parent
# Code that any x86-64 of the last ten years runs. torch reads it when it is imported.
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3"}


@dataclass(frozen=True)
class Program:
    """``calls``: as tests.programs.Call; a sequence on a fresh program where ``stateful``."""

    name: str
    path: Path
    data: tuple[Path, ...]
    calls: tuple[programs.Call, ...]
    stateful: bool
    rtol: float
    atol: float

    def open(self, device: Any = None, **options: Any) -> headrace.Program:
        # The exporter's Python imports this module too, and has no headrace.
        import headrace

        return headrace.load(self.path, data=self.data, device=device, **options)


def folder() -> Path:
    """Where the export of exactly these sources lies, or will lie."""
    digest = hashlib.sha256(json.dumps([programs.PINS, ENVIRONMENT], sort_keys=True).encode())
    sources = [HERE / "export.py", HERE / "models.py"]
    sources += [programs.HERE / f"{name}.py" for name in ("delegates", "export", "graph")]
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return programs.ROOT / "build" / "aoti" / digest.hexdigest()[:16]


def ensure() -> Path:
    """The folder, exported first, in a process of its own, where it is not there yet."""
    there = folder()
    if (there / "index.json").exists():
        return there
    there.mkdir(parents=True, exist_ok=True)
    # Two test runs at once export once.
    with open(there / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (there / "index.json").exists():
            return there
        python = programs.export_python()
        command = [python, "-m", "tests.aoti.export", str(there)]
        done = subprocess.run(
            command, cwd=programs.ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"tests/aoti: expected an export in {there}, got exit status {done.returncode} from "
                f"'{' '.join(command)}'; set HEADRACE_EXPORT_PYTHON to a Python with the 'export' dependency "
                f"group, executorch=={programs.PINS['executorch']} and a C++ compiler\n{done.stderr[-2000:]}"
            )
    return there


@functools.cache
def _index() -> dict[str, Any]:
    return json.loads((ensure() / "index.json").read_text())


def names() -> list[str]:
    """Every exported program."""
    return list(_index())


@functools.cache
def load(name: str) -> Program:
    """The exported program called ``name``."""
    entry = _index()[name]
    there = folder()
    return Program(
        name=name,
        path=there / f"{name}.pte",
        data=tuple(there / file for file in entry["data"]),
        calls=programs.read_calls(there / f"{name}.npz"),
        stateful=entry["stateful"],
        rtol=entry["rtol"],
        atol=entry["atol"],
    )
