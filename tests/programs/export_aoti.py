"""Export every program of ``aoti.py`` with ``headrace.export`` and record what eager PyTorch answers.

::

    python -m tests.programs.export_aoti PACKAGE… [-- NAME…]

``PACKAGE`` are the folders that hold the package's Python files and what its build generated: exporting needs no
run time, so the interpreter that has torch need not have it. Writes what ``export.py`` writes.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import multiprocessing
import sys
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any


def without_run_time(folders: list[str]) -> None:
    """Make ``headrace`` a package of these folders alone, whose ``__init__`` would load the engine."""
    package = types.ModuleType("headrace")
    package.__path__ = folders
    sys.modules["headrace"] = package


def export(name: str, made: Any, there: Path) -> dict[str, Any]:
    """Export one program into ``there`` and return its entry of the index."""
    from headrace.export import export as headrace_export

    from .export import record, view

    methods = {method: m.module.eval() for method, m in made.methods.items()}
    exported = headrace_export(
        methods,
        {method: tuple(m.calls[0]) for method, m in made.methods.items()},
        dynamic_shapes={method: m.dynamic for method, m in made.methods.items()},
        path=there / f"{name}.pte",
        **made.options,
    )
    record(
        [(method, m.module, [tuple(c) for c in m.calls]) for method, m in made.methods.items()],
        there / f"{name}.npz",
    )
    seen = view(exported.path.read_bytes())
    (there / f"{name}.view.json").write_text(json.dumps(seen))
    called = {d["id"] for plan in seen["program"]["execution_plan"] for d in plan["delegates"]}
    if called != set(made.delegates):
        raise RuntimeError(f"{name}: expected islands of {sorted(made.delegates)}, got {sorted(called)}")
    return {
        "data": [file.name for file in exported.data],
        "stateful": made.stateful,
        "delegates": list(made.delegates),
        "kernels_missing": [],
        "runs": True,
        "rtol": made.rtol,
        "atol": made.atol,
        "note": made.note,
    }


def exported(name: str) -> tuple[dict[str, Any] | None, str]:
    """One program: its entry of the index, or None, and what to print. Runs in a worker."""
    from . import AOTI
    from .aoti import MODELS

    began = time.perf_counter()
    try:
        entry = export(name, MODELS[name](), AOTI.folder())
    except Exception:
        return None, f"{name}: {traceback.format_exc()[-3000:]}"
    size = (AOTI.folder() / f"{name}.pte").stat().st_size
    return entry, f"{name:32} {size:8} bytes  {time.perf_counter() - began:5.2f} s"


def main(arguments: list[str]) -> int:
    if "--" in arguments:
        at = arguments.index("--")
        folders, only = arguments[:at], arguments[at + 1 :]
    else:
        folders, only = arguments, []
    without_run_time(folders)
    warnings.simplefilter("ignore")
    import torch

    from . import AOTI
    from .aoti import MODELS
    from .export import check_versions

    check_versions()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    there = AOTI.folder()
    there.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    failed: list[str] = []
    # Forked, so that the exporter is imported once; nothing has used torch's threads yet.
    workers = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
    with workers:
        names = only or list(MODELS)
        for name, (entry, said) in zip(names, workers.map(exported, names), strict=True):
            print(said, flush=True, file=sys.stdout if entry else sys.stderr)
            if entry is None:
                failed.append(name)
            else:
                index[name] = entry
    if failed:
        print(f"tests/programs: {len(failed)} not exported: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not only:
        pending = there / "index.json.pending"
        pending.write_text(json.dumps(index, indent=1))
        pending.rename(there / "index.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
