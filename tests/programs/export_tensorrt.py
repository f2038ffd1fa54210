"""Export models that are split over TensorRT and AOTInductor, TensorRT's islands as engines of the stand-in
(``headrace.testing.tensorrt``), and record what eager PyTorch answers.

::

    python -m tests.programs.export_tensorrt host|cuda PACKAGE… [-- NAME…]

``host``: AOTInductor's islands are compiled for this machine; ``cuda``: for a GPU. The payloads are the same.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from .exporting import arguments_of, collect, tried, without_run_time

# What the stand-in computes, by the names that the exporter's graph has.
OPERATORS = {
    "aten.add.Tensor": "add",
    "aten.sub.Tensor": "sub",
    "aten.mul.Tensor": "mul",
    "aten.mm.default": "mm",
    "aten.addmm.default": "addmm",
    "aten.relu.default": "relu",
    "aten.tanh.default": "tanh",
    "aten.t_copy.default": "t",
    "aten.permute_copy.default": "t",
}
# As headrace.testing.tensorrt has it, which needs the run time.
MAGIC = b"headrace stand-in engine\n"
NAMES = ("alone", "sizes", "staged", "chain")


def names() -> list[str]:
    return list(NAMES)


def lower(island: Any) -> bytes:
    """The payload of one island: a stand-in's engine with its bindings."""
    from headrace.pte.tensorrt import Binding, Built, write

    def tensor(name: str, spec: Any) -> dict[str, Any]:
        shape = [size if isinstance(size, int) else -1 for size in spec.shape]
        plain = {
            "on_host": False,
            "alias": "",
            "declared": True,
            "vectorized": -1,
            "strides": [],
            "open": False,
        }
        return {"name": name, "dtype": spec.dtype, "shape": shape, **plain}

    inputs = [tensor(spec.name, spec) for spec in island.inputs]
    outputs = [tensor(f"output{i}", spec) for i, (spec, _) in enumerate(island.outputs)]
    steps = [
        {
            "op": OPERATORS[step.operator],
            "out": step.name,
            "args": [a.name if hasattr(a, "name") else a for a in step.args if not isinstance(a, tuple)],
        }
        for step in island.steps
    ]
    results = {ref.name: f"output{i}" for i, (_, ref) in enumerate(island.outputs)}
    for step in steps:
        step["out"] = results.get(step["out"], step["out"])
        step["args"] = [results.get(a, a) if isinstance(a, str) else a for a in step["args"]]
    engine = {
        "inputs": inputs,
        "outputs": outputs,
        "steps": steps,
        "constants": {
            name: {
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "data": base64.b64encode(array.tobytes()).decode(),
            }
            for name, array in island.constants.items()
        },
        "profiles": [
            {
                t["name"]: [[bound if n < 0 else n for n in t["shape"]] for bound in (1, best, most)]
                for t in inputs
            }
            for best, most in ((4, 64), (1, 2))
        ],
        "auxiliary": 1,
        "streamable_nbytes": 0,
        "version": "1.0.0.0",
        "capabilities": [],
    }
    bindings = [
        Binding(t["name"], side is inputs, t["dtype"], tuple(t["shape"]))
        for side in (inputs, outputs)
        for t in side
    ]
    return write(MAGIC + json.dumps(engine).encode(), bindings, built=Built("tensorrt", "1.0.0.0"))


def models() -> dict[str, tuple[Any, list[Any], Any, dict[str, Any]]]:
    """Module, calls, which sizes vary, options of the export."""
    import torch
    from torch.export import Dim

    from .aoti import randn, several

    class Dense(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.first(x))
            return torch.tanh(self.second(y)) + y, y * 0.5

    class Between(Dense):
        def forward(self, x: Any) -> Any:
            return torch.tanh(self.second(torch.sin(torch.relu(self.first(x)))))

    class Chain(torch.nn.Module):
        """26 islands, each with constants of its own."""

        def forward(self, x: Any) -> Any:
            for i in range(13):
                x = torch.sin((x * (1.1 + i / 7) + i / 5) * 1.0) if i % 2 else torch.sin(x * 1.3 - i / 9)
            return x

    batch = Dim("batch", min=1, max=16)
    sizes = [(randn(n, 8, seed=n),) for n in (4, 1, 16, 3, 4)]
    return {
        "alone": (Dense(), several((4, 8)), None, {}),
        "sizes": (Between(), sizes, ({0: batch},), {"resident": True}),
        "staged": (Dense(), sizes, ({0: batch},), {"device": None}),
        "chain": (Chain(), several((4, 8)), None, {"resident": True}),
    }


def export(name: str, which: str, there: Path) -> dict[str, Any]:
    import headrace.export
    from headrace.export import Aoti, Python

    from .export import record

    module, calls, dynamic, options = models()[name]
    path = there / f"{name}.pte"
    delegates = [Python("TensorRTBackend", operators=list(OPERATORS), lower=lower), Aoti()]
    if which == "cuda":
        options = {**options, "target": "cuda:sm_90"}
    exported = headrace.export.export(
        {"forward": module.eval()},
        {"forward": tuple(calls[0])},
        path=path,
        delegates=delegates[:1] if name in ("alone", "staged") else delegates,
        dynamic_shapes={"forward": dynamic},
        verify=False,
        cache=False,
        **options,
    )
    record([("forward", module, calls)], path.with_suffix(".npz"))
    called = {island.delegate for method in exported.file.methods for island in method.islands}
    return {
        "data": [file.name for file in exported.data],
        "stateful": False,
        "delegates": sorted(called),
        "kernels_missing": [],
        "runs": True,
        "rtol": 1e-4,
        "atol": 1e-5,
        "note": which,
    }


def main(arguments: list[str]) -> int:
    which, *rest = arguments
    folders, only = arguments_of(rest)
    without_run_time(folders)
    warnings.simplefilter("ignore")
    import torch

    from . import TENSORRT, TENSORRT_CUDA
    from .export import check_versions

    check_versions()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    there = (TENSORRT_CUDA if which == "cuda" else TENSORRT).folder()
    there.mkdir(parents=True, exist_ok=True)
    wanted = only or names()
    results = ((name, tried(name, lambda n=name: export(n, which, there), there)) for name in wanted)
    return collect(there, results, whole=not only)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
