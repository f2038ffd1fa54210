"""Export models of ``split.py`` with real engines of TensorRT-RTX, which needs no GPU to build them.

::

    python -m tests.programs.export_engines PACKAGE… [-- NAME…]

``PACKAGE`` as for ``export_aoti.py``. Nothing here runs an engine: what is written is what the tests read.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

from .exporting import arguments_of, collect, tried, without_run_time

# Names are MODEL, or MODEL.VARIANT; what each is exported with beside its model's own options.
VARIANTS: dict[str, dict[str, Any]] = {
    "branches": {},
    "unrolled": {},
    "shared_weight": {},
    "tied": {},
    "views": {},
    "several_results": {},
    "concatenated": {},
    "integers": {},
    "dynamic_batch": {},
    "transformer": {},
    "dynamic_sequence": {},
    "convolved": {},
    "bfloat16": {},
    "float64_and_bool": {},
    "state": {},
    "two_methods": {},
    "control_flow": {},
    "transformer.half": {"precision": "float16"},
    "convolved.two_gpus": {"compute_capabilities": ["8.6", "12.0"]},
    "dynamic_batch.two_profiles": {
        "profiles": [
            {"args_0": ((1, 8), (1, 8), (2, 8))},
            {"args_0": ((3, 8), (6, 8), (7, 8))},
        ]
    },
}


def names() -> list[str]:
    return list(VARIANTS)


def delegate(options: dict[str, Any]) -> Any:
    from headrace.export import Profile, TensorRT

    given = dict(options)
    profiles = [
        Profile(
            **{which: {n: s[i] for n, s in each.items()} for i, which in enumerate(("min", "opt", "max"))}
        )
        for each in given.pop("profiles", [])
    ]
    return TensorRT(builder="tensorrt_rtx", profiles=profiles, **given)


def export(name: str) -> dict[str, Any]:
    import headrace.export
    from headrace.export import Xnnpack

    from . import ENGINES
    from .export import record
    from .split import MODELS

    made = MODELS[name.partition(".")[0]]()
    path = ENGINES.folder() / f"{name}.pte"
    options = {"verify": False, "cache": False, **made.options}
    if "dynamic_shapes" not in options:
        options["dynamic_shapes"] = {n: m.dynamic for n, m in made.methods.items()}
    else:
        options["dynamic_shapes"] = {"forward": options["dynamic_shapes"]}
    exported = headrace.export.export(
        {n: m.module.eval() for n, m in made.methods.items()},
        {n: tuple(m.calls[0]) for n, m in made.methods.items()},
        path=path,
        delegates=[delegate(VARIANTS[name]), Xnnpack()],
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
        "runs": False,
        "rtol": made.rtol,
        "atol": made.atol,
        "note": "engines of TensorRT-RTX",
    }


def main(arguments: list[str]) -> int:
    folders, only = arguments_of(arguments)
    without_run_time(folders)
    warnings.simplefilter("ignore")
    import torch

    from . import ENGINES
    from .export import check_versions

    check_versions(ENGINES.pins)
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    there = ENGINES.folder()
    there.mkdir(parents=True, exist_ok=True)
    # In one process: what was asked about an operator is not asked again.
    results = ((n, tried(n, lambda n=n: export(n), there)) for n in names() if not only or n in only)
    return collect(there, results, whole=not only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
