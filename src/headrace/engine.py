"""Find ExecuTorch's libraries and load them once.

The package bundles the run time, the thread pool, the CPU kernels and XNNPACK of one stock ExecuTorch
wheel. Where that very build is installed too, its files are used instead, so that the two share one copy
of every registry. Any other version or build is refused: two engines in one process have two registries,
and a program would find its delegates in one or the other by accident.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import EngineError, OptionError

__all__ = ["Engine", "core", "engine", "library_folders", "num_threads", "set_num_threads"]

RUNTIME = "libexecutorch.so"
# In the order in which each finds its needs loaded already. The last two only register themselves.
LIBRARIES = (
    RUNTIME,
    "libexecutorch_threadpool.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_backend_xnnpack.so",
)


@dataclass(frozen=True)
class Engine:
    """The engine of this process. ``source`` is ``"bundled"``, or ``"installed"`` where the stock wheel's
    own files are in use."""

    version: str
    source: str
    folder: str


def bundled() -> Path:
    """The folder of the libraries that came with this package: beside the extension."""
    spec = importlib.util.find_spec("headrace._core")
    if spec is None or spec.origin is None:
        raise EngineError(
            f"{Path(__file__).parent}: expected the extension headrace._core, got none; "
            "the package was not built: pip install it instead of importing its source folder"
        )
    return Path(spec.origin).parent / "lib"


def library_folders() -> list[str]:
    """Where pip's packages of NVIDIA's libraries lie: of CUDA 12 a folder for each component (``nvidia/cublas/lib``), of
    CUDA 13 one for all (``nvidia/cu13/lib``). Loads none of them. Looked for once for each ``sys.path``."""
    return list(_library_folders(tuple(sys.path)))


@functools.lru_cache(maxsize=1)
def _library_folders(path: tuple[str, ...]) -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return ()
    roots = () if spec is None else spec.submodule_search_locations or ()
    return tuple(str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib")))


def _installed() -> Path | None:
    """The folder of an installed ``executorch`` package, found without importing it."""
    try:
        spec = importlib.util.find_spec("executorch")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.exists(os.path.join(folder, "version.py")) or os.path.isdir(os.path.join(folder, "lib")):
            return Path(folder)
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_installed(package: Path, wanted: dict[str, str]) -> Path:
    """The library folder of the installed package if it is the build that we were made for."""
    advice = (
        f"install executorch=={wanted['version'].partition('+')[0]} from the package index, or use an "
        "environment without executorch: headrace brings its own"
    )
    runtime = package / "lib" / RUNTIME
    try:
        text = (package / "version.py").read_text()
    except OSError:
        text = ""
    found = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    version = found[1] if found else "an unknown version"
    if version != wanted["version"]:
        raise EngineError(
            f"{package}: expected executorch {wanted['version']} or none, got {version}; {advice}"
        )
    if not runtime.is_file():
        raise EngineError(
            f"{runtime}: expected the run time of executorch {version}, got no such file; {advice}"
        )
    if _sha256(runtime) != wanted["runtime_sha256"]:
        raise EngineError(
            f"{runtime}: expected the stock build of executorch {version} (SHA-256 "
            f"{wanted['runtime_sha256'][:12]}…), got another build of the same version; {advice}"
        )
    return runtime.parent


def _mapped(name: str) -> set[str]:
    """Paths under which a library of this file name is mapped into the process."""
    with open("/proc/self/maps") as maps:
        # A file that was deleted since is still a run time in this process.
        paths = {
            line.split(maxsplit=5)[5].rstrip("\n").removesuffix(" (deleted)") for line in maps if name in line
        }
    return {path for path in paths if os.path.basename(path) == name}


def _check_mapped(folder: Path) -> None:
    """Refuses a run time that something else loaded from another file."""
    for path in _mapped(RUNTIME):
        ours = folder / RUNTIME
        if not (os.path.exists(path) and os.path.samefile(path, ours)):
            raise EngineError(
                f"expected one ExecuTorch run time in this process, got {path}, loaded before headrace, "
                f"beside {ours}; import headrace first, or remove one of them"
            )


def _load() -> tuple[Engine, ModuleType]:
    ours = bundled()
    wanted = json.loads((ours / "engine.json").read_text())
    package = _installed()
    folder = _check_installed(package, wanted) if package else ours
    _check_mapped(folder)
    for name in LIBRARIES:
        try:
            # By path and before the extension, which then finds each by name whatever its own search
            # path says. Local scope is enough: each names what it needs.
            ctypes.CDLL(str(folder / name), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as e:
            raise EngineError(
                f"{folder / name}: expected a library that loads, got: {e}; reinstall"
            ) from None
    _core = importlib.import_module("headrace._core")
    _core.initialize()
    return Engine(wanted["version"], "installed" if package else "bundled", str(folder)), _core


_engine, _extension = _load()
if TYPE_CHECKING:
    # A module by name, so that its classes are types wherever they are imported from here.
    from . import _core as core
else:
    core = _extension


def engine() -> Engine:
    """Which engine this process runs."""
    return _engine


def num_threads() -> int:
    """Threads that the CPU kernels and XNNPACK share in this process. At first one for each fast core."""
    return core.num_threads()


def set_num_threads(count: int) -> None:
    """Set the number of threads (1 to 1024) that the CPU kernels and XNNPACK share in this process.

    To be called while no program is loaded: delegates hold on to the pool that they were loaded with.

    Raises:
        OptionError: the count is out of range, or a program is loaded.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise OptionError(
            f"num_threads: expected an int, got {type(count).__name__}; pass a count such as os.cpu_count()"
        )
    if not 1 <= count <= 1024:
        raise OptionError(f"num_threads: expected a count between 1 and 1024, got {count}; pass one of these")
    core.set_num_threads(count)
