"""Export every program of ``aoti.py`` with ``headrace.export`` and record what eager PyTorch answers.

::

    python -m tests.programs.export_aoti PACKAGE… [-- NAME…]

``PACKAGE`` are the folders that hold the package's Python files and what its build generated: exporting needs no
run time, so the interpreter that has torch need not have it. Writes what ``export.py`` writes, and ``torch.pt2``,
a library of ``add_one`` that calls libtorch, for torch's own runner.

The C++ compiler takes most of the time. What it is given twice it compiles once, and what all wrappers include is
compiled beforehand; neither changes a byte of what is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from .exporting import Entry, arguments_of, collect, tried, without_run_time, workers


def compile_once(folder: Path) -> None:
    """For this process and those forked from it: keep what Inductor compiles in ``folder``: objects, by source and
    options, and headers beforehand, among them those of every wrapper, which are all of ``wrapper.h``."""
    from torch._inductor import codecache, cpp_builder

    from . import HERE

    compile_really = cpp_builder.run_compile_cmd

    def run_compile_cmd(command: str, cwd: str) -> None:
        words = shlex.split(command)
        sources = [w for w in words if w.endswith(".cpp")]
        if "-c" not in words or len(sources) != 1:
            return compile_really(command, cwd)
        target = words[words.index("-o") + 1]
        options = [w for w in words if w not in (*sources, target)]
        # Behind its code Inductor writes how it was compiled, once it was.
        source = Path(sources[0]).read_bytes().partition(b"// Compile cmd")[0].rstrip()
        given = json.dumps(options).encode() + b"\n" + source
        kept = folder / hashlib.sha256(given).hexdigest()
        with open(kept.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                compile_really(command, cwd)
                shutil.copyfile(target, kept)
                return None
        shutil.copyfile(kept, target)
        return None

    headers = folder / "headers"
    cpp_builder.run_compile_cmd = run_compile_cmd
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
    codecache._get_cpp_wrapper_header = lambda device, aot_mode=False: str(HERE / "wrapper.h")


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
        # The tests that run them compare more than the exporter would; each is compiled as it is here.
        verify=False,
        cache=False,
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


def exported(name: str) -> Entry:
    """One program. Runs in a worker."""
    from . import AOTI
    from .aoti import MODELS

    return tried(name, lambda: export(name, MODELS[name](), AOTI.folder()), AOTI.folder())


def package_for_torch(path: Path) -> str:
    """``add_one`` as torch packages it for itself. Runs in a worker; returns what to print."""
    import torch

    from headrace.export.target import PORTABLE

    from .aoti import MODELS

    began = time.perf_counter()
    method = MODELS["add_one"]().methods["forward"]
    torch._inductor.aoti_compile_and_package(
        torch.export.export(method.module.eval(), method.calls[0]),
        package_path=str(path),
        inductor_configs={
            # Its headers are others; there is one library to compile with them.
            "aot_inductor.precompile_headers": False,
            "cpp.march": PORTABLE,
            "cpp.simdlen": 256,
        },
    )
    return f"{path.name:32} {path.stat().st_size:8} bytes  {time.perf_counter() - began:5.2f} s"


def main(arguments: list[str]) -> int:
    folders, only = arguments_of(arguments)
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
    with tempfile.TemporaryDirectory() as compiled, workers() as pool:
        # Apart from the user's own cache, and gone afterwards.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        compile_once(Path(compiled))
        names = only or list(MODELS)
        packaged = None if only else pool.submit(package_for_torch, there / "torch.pt2")
        status = collect(there, zip(names, pool.map(exported, names), strict=True), whole=not only)
        if packaged is not None:
            print(packaged.result(), flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
