"""Export programs for a GPU, with or without one, and record what eager PyTorch answers on the CPU.

::

    python -m tests.programs.export_cuda few|all PACKAGE… [-- NAME…]

``few`` are those whose structure is tested where there is no GPU. ``all`` are what ``tests/cuda`` runs: the models of
``aoti.py`` by ``headrace.export``, a program of 25 islands, and some by the stock ExecuTorch exporter with nothing of
ours in them, for which CUDA's ``fatbinary`` has to be found. ``PACKAGE`` is as for ``export_aoti.py``, and so is
what is written.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .exporting import Entry, arguments_of, collect, tried, without_run_time, workers

ARCHITECTURE = "cuda:sm_90"


def makers() -> dict[str, Callable[[], Any]]:
    """What is exported by ``headrace.export``, in the order in which it is worth to begin: those that take long,
    first."""
    from .aoti import MODELS
    from .cuda_models import MODELS as MORE

    return {**MORE, **{name: make for name, make in MODELS.items() if name not in LEFT_OUT}}


def export(name: str, there: Path) -> dict[str, Any]:
    """Export one program into ``there`` and return its entry of the index."""
    from . import export_aoti

    made = makers()[name]()
    made.options.setdefault("target", ARCHITECTURE)
    return export_aoti.export(name, made, there)


def export_stock(name: str, there: Path) -> dict[str, Any]:
    """The same by ExecuTorch's own exporter. What stands in for the GPU is ``headrace.export.cuda``."""
    from headrace.export.child import in_child

    from .aoti import MODELS
    from .export import record, view

    made = MODELS[name.removeprefix("stock_")]()
    (method,) = made.methods.values()
    module, calls = method.module.eval(), [tuple(c) for c in method.calls]
    with tempfile.TemporaryDirectory() as folder:
        program, data = in_child(name, lambda: stock_bytes(module, calls[0], method.dynamic, Path(folder)))
    (there / f"{name}.pte").write_bytes(program)
    files = []
    for k, raw in enumerate(data):
        files.append(f"{name}{k or ''}.ptd")
        (there / files[-1]).write_bytes(raw)
    record([("forward", module, calls)], there / f"{name}.npz")
    (there / f"{name}.view.json").write_text(json.dumps(view(program)))
    return {
        "data": files,
        "stateful": made.stateful,
        "delegates": ["CudaBackend"],
        "kernels_missing": [],
        "runs": True,
        "rtol": made.rtol,
        "atol": made.atol,
        "note": f"{made.note}; by the stock exporter".lstrip("; "),
    }


def stock_bytes(module: Any, inputs: Any, dynamic: Any, folder: Path) -> tuple[bytes, list[bytes]]:
    """In a child process: the program and its data files."""
    import torch
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
    from executorch.backends.cuda.cuda_weight_collector import CudaWeightCollector
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from torch._inductor import config

    from headrace.export import cuda
    from headrace.export.target import Target

    target = Target.parse(ARCHITECTURE)
    constants = cuda.Constants({})
    exported = torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=True)
    cuda.pretend(target, constants, folder)
    # As where there is a GPU: fat binaries rather than bare machine code.
    torch.version.cuda = "13.0"
    # It would time kernels, or read values of constants.
    config.deterministic = True
    config.shape_padding = config.benchmark_fusion = config.benchmark_epilogue_fusion = False
    config.joint_graph_constant_folding = False
    config.triton.autotune_at_compile_time = True
    config.compile_threads = 1
    config.cpp.march, config.cpp.simdlen, config.cpp.vec_isa_ok = target.march, target.vector_bits, True

    def move(cls: Any, program: Any, device: str, specs: Any) -> Any:
        values = {**program.state_dict, **program.constants}
        constants.add({n: v for n, v in values.items() if isinstance(v, torch.Tensor)})
        return cuda.on_gpu(program, constants)

    materialize = CudaWeightCollector.materialize

    def with_values(self: Any, weights: Any, directory: Any, device_type: Callable[[Any], int]) -> Any:
        # The weights' bytes are read here alone.
        found = {n: constants.by_name[constants.name(n, fake)] for n, (fake, _) in weights.items()}
        of = {id(found[n]): device_type(fake) for n, (fake, _) in weights.items()}
        values = {n: (found[n], properties) for n, (_, properties) in weights.items()}
        return materialize(self, values, directory, lambda value: of[id(value)])

    CudaBackend.move_program_to_device = classmethod(move)
    CudaWeightCollector.materialize = with_values
    specs = [
        CudaBackend.generate_method_name_compile_spec("forward"),
        # Its own attention kernel takes bfloat16 alone.
        CompileSpec("triton_kernel_mode", b"OFF"),
    ]
    with torch.no_grad():
        program = to_edge_transform_and_lower(
            exported,
            partitioner=[CudaPartitioner(specs)],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        ).to_executorch()
    data = [bytes(raw) for raw in (program._tensor_data or {}).values()]
    return bytes(program.buffer), data


STOCK = ("stock_mlp", "stock_cnn", "stock_transformer", "stock_bfloat16")
FEW = ("mlp", "cnn", "transformer")
# Of those of ``aoti.py``: their plan is for host memory, or only the plan differs.
LEFT_OUT = ("add_one", "mlp_host")


def exported(name: str, there: Path) -> Entry:
    """One program. Runs in a worker."""
    return tried(name, lambda: (export_stock if name in STOCK else export)(name, there), there)


def main(arguments: list[str]) -> int:
    which, *rest = arguments
    folders, only = arguments_of(rest)
    without_run_time(folders)
    warnings.simplefilter("ignore")
    import torch

    from . import CUDA, CUDA_FEW, CUDA_PINS
    from .export import check_versions

    check_versions(CUDA_PINS)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    there = (CUDA_FEW if which == "few" else CUDA).folder()
    there.mkdir(parents=True, exist_ok=True)
    names = only or list(FEW if which == "few" else (*makers(), *STOCK))
    with tempfile.TemporaryDirectory() as compiled, workers() as pool:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        results = pool.map(exported, names, [there] * len(names))
        return collect(there, zip(names, results, strict=True), whole=not only)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
