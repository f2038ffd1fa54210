"""Export every model of ``split.py`` with ``headrace.export``, split in each of its ways, and record what eager PyTorch
answers.

::

    python -m tests.programs.export_split PACKAGE… [-- NAME…]

``PACKAGE`` as for ``export_aoti.py``. Programs are called ``MODEL.SPLIT``. Those that go through AOTInductor are exported
with ``HEADRACE_ALL_SPLITS`` set alone, but for ``FEW``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from .exporting import Entry, arguments_of, collect, tried, without_run_time, workers

# Through AOTInductor in every run of the tests.
FEW = {"branches.aoti"}


def names() -> list[str]:
    """Every program that this run exports, as the sources list them: asking exports nothing."""
    text = Path(__file__).with_name("split.py").read_text()
    whole = bool(os.environ.get("HEADRACE_ALL_SPLITS"))
    found = []
    for name, listed in re.findall(r'^@model\(((?:"\w+"(?:, )?)+)\)\ndef (\w+)', text, re.MULTILINE):
        name, splits = listed, re.findall(r"\w+", name)
        if whole and "resident" not in name:
            splits += ["aoti"] if "aoti" not in splits else []
        found += [f"{name}.{s}" for s in splits if whole or s != "aoti" or f"{name}.{s}" in FEW]
    return found


def export(name: str) -> dict[str, Any]:
    import headrace.export

    from . import SPLIT
    from .export import record
    from .split import MODELS, SPLITS

    model, _, split = name.partition(".")
    made = MODELS[model]()
    path = SPLIT.folder() / f"{name}.pte"
    options = {"verify": False, "cache": False, **made.options}
    if "dynamic_shapes" not in options:
        options["dynamic_shapes"] = {n: m.dynamic for n, m in made.methods.items()}
    else:
        options["dynamic_shapes"] = {"forward": options["dynamic_shapes"]}
    exported = headrace.export.export(
        {n: m.module.eval() for n, m in made.methods.items()},
        {n: tuple(m.calls[0]) for n, m in made.methods.items()},
        path=path,
        delegates=SPLITS[split],
        **options,
    )
    record([(n, m.module, list(m.calls)) for n, m in made.methods.items()], path.with_suffix(".npz"))
    (path.with_suffix(".split.json")).write_text(
        json.dumps([[n.method, n.name, n.delegate, n.island, n.why] for n in exported.split])
    )
    called = {island.delegate for method in exported.file.methods for island in method.islands}
    return {
        "data": [file.name for file in exported.data],
        "stateful": made.stateful,
        "delegates": sorted(called),
        "kernels_missing": [],
        "runs": True,
        "rtol": made.rtol,
        "atol": made.atol,
        "note": split,
    }


def exported(name: str) -> Entry:
    """One program. Runs in a worker."""
    from . import SPLIT

    return tried(name, lambda: export(name), SPLIT.folder())


def main(arguments: list[str]) -> int:
    folders, only = arguments_of(arguments)
    without_run_time(folders)
    warnings.simplefilter("ignore")
    import torch

    from . import SPLIT
    from .export import check_versions
    from .random_models import remember_operators

    check_versions()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    there = SPLIT.folder()
    there.mkdir(parents=True, exist_ok=True)
    remember_operators()
    # XNNPACK's exporter makes its patterns once a process: before it is forked.
    from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa

    bilinear_2d.get_graphs()
    sdpa.get_graphs()
    wanted = only or names()
    with workers() as pool:
        return collect(there, zip(wanted, pool.map(exported, wanted), strict=True), whole=not only)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
