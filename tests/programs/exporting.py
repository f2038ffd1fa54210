"""What the scripts that export a collection have in common: one program after the other, here or in workers, and the
index of all of them at last, whose presence says that the folder is complete."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["Entry", "arguments_of", "collect", "tried", "without_run_time", "workers"]

# A program's part of the index, or None where it could not be exported, and what to print.
Entry = tuple[dict[str, Any] | None, str]


def arguments_of(arguments: list[str]) -> tuple[list[str], list[str]]:
    """``PACKAGE… [-- NAME…]``: the package's folders, and the only programs to export; none: all."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def without_run_time(folders: list[str]) -> None:
    """Make ``headrace`` a package of these folders alone, whose ``__init__`` would load the engine."""
    package = types.ModuleType("headrace")
    package.__path__ = folders
    sys.modules["headrace"] = package


def workers() -> concurrent.futures.ProcessPoolExecutor:
    """Forked, so that the exporter is imported once; nothing may have used torch's threads yet."""
    return concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork"))


def tried(name: str, export: Callable[[], dict[str, Any]], there: Path) -> Entry:
    """One program, exported into the folder ``there``."""
    began = time.perf_counter()
    try:
        entry = export()
    except Exception:
        return None, f"{name}: {traceback.format_exc()[-3000:]}"
    size = (there / f"{name}.pte").stat().st_size
    return entry, f"{name:32} {size:8} bytes  {time.perf_counter() - began:5.2f} s"


def collect(there: Path, results: Iterable[tuple[str, Entry]], *, whole: bool) -> int:
    """Print each as it comes; write the index if they are the ``whole`` collection. Returns the exit status."""
    index: dict[str, Any] = {}
    failed: list[str] = []
    for name, (entry, said) in results:
        print(said, flush=True, file=sys.stdout if entry else sys.stderr)
        if entry is None:
            failed.append(name)
        else:
            index[name] = entry
    if failed:
        print(f"tests/programs: {len(failed)} not exported: {', '.join(failed)}", file=sys.stderr)
        return 1
    if whole:
        pending = there / "index.json.pending"
        pending.write_text(json.dumps(index, indent=1))
        pending.rename(there / "index.json")
    return 0
