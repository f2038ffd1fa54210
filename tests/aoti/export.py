"""Compile the models of ``models.py`` with AOTInductor for the host and wrap them in programs. Needs torch.

::

    python -m tests.aoti.export FOLDER [NAME…]      # with the ENVIRONMENT of this package

Writes, per program, ``NAME.pte``, its ``.ptd`` files and ``NAME.npz`` (inputs, and what eager PyTorch answers);
``torch.pt2``, a library that calls libtorch, for torch's own runner; at last ``index.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from executorch.backends.aoti.aoti_backend import AotiBackend
from executorch.backends.aoti.aoti_partitioner import AotiPartitioner
from executorch.backends.cuda.cuda_weight_collector import CudaWeightCollector
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult
from executorch.exir.dialects._ops import ops
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.propagate_device_pass import PropagateDeviceConfig

from tests.programs.delegates import GraphPartitioner, delegate
from tests.programs.export import check_versions, record

from . import ENVIRONMENT
from .models import MODELS, Model

MARCH = ENVIRONMENT["TORCHINDUCTOR_CPP_MARCH"]


class CudaBackend(AotiBackend, BackendDetails):  # type: ignore[misc]
    """Stock ExecuTorch's way to call AOTInductor, turned to the host; payload and constants as its CUDA one's."""

    @classmethod
    def get_device_name(cls) -> str:
        return "cpu"

    @classmethod
    def get_supported_fallback_kernels(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def get_decomposition_table(cls) -> dict[Any, Any]:
        return {}

    @classmethod
    def get_custom_passes(cls, specs: Any) -> list[Any]:
        return []

    @classmethod
    def get_aoti_compile_options(cls, specs: Any) -> dict[str, Any]:
        return {
            "aot_inductor.link_libtorch": False,
            "aot_inductor.package": True,
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.package_constants_on_disk_format": "pickle_weights",
            "max_autotune": True,
            "max_autotune_gemm_backends": "CPP",
        }

    @classmethod
    def materialize_weights_blob(cls, paths: Any, specs: Any) -> Any:
        from torch.export.pt2_archive._package_weights import Weights

        weights = [p for p in paths if isinstance(p, Weights)]
        so = next(p for p in paths if isinstance(p, str) and p.endswith(".wrapper.so"))
        blob = os.path.splitext(so)[0] + "_weights.blob"
        capture = CudaWeightCollector.current_capture()
        capture.artifact = capture.collector.materialize(
            weights[0] if weights else {}, os.path.dirname(blob), capture.device_type_for_weight
        )
        Path(blob).touch()
        return [p for p in paths if isinstance(p, str)] + ([] if blob in paths else [blob])

    @classmethod
    def preprocess(cls, edge_program: Any, compile_specs: list[CompileSpec]) -> Any:
        compile_specs += _specs(edge_program)
        collector = CudaWeightCollector()
        with collector.capture(lambda tensor: 0) as capture:
            result = super().preprocess(edge_program, compile_specs)
        collector.add_preprocess_result(result, capture.artifact, "cpu")
        collector.finish()
        return result


def _specs(program: Any) -> list[CompileSpec]:
    """How many inputs there are, and the sizes of the outputs as expressions over those of the inputs."""
    names = program.graph_signature.user_inputs
    mutated = set(program.graph_signature.buffers_to_mutate)
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    symbols: dict[str, list[int]] = {}
    for i, node in enumerate(inputs):
        for d, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                symbols.setdefault(str(size.node.expr), [i, d])

    def dim(size: Any) -> Any:
        return str(size.node.expr) if isinstance(size, torch.SymInt) else int(size)

    results = program.graph.output_node().args[0]
    outputs = [[dim(s) for s in r.meta["val"].shape] for r in results if r.name not in mutated]
    host = {
        "version": 1,
        "march": MARCH,
        "symbols": {k: v for k, v in symbols.items() if k.isidentifier()},
        "outputs": outputs,
    }
    return [
        CompileSpec("headrace.inputs", str(len(inputs)).encode()),
        CompileSpec("headrace_host", json.dumps(host).encode()),
    ]


class Partitioner(AotiPartitioner):  # type: ignore[misc]
    """Everything that is left to islands of ``CudaBackend``, each with a list of specs of its own."""

    def __init__(self, planned: bool) -> None:
        super().__init__("CudaBackend", [])
        self.planned = planned

    def partition(self, exported_program: Any) -> PartitionResult:
        result = super().partition(exported_program)
        for tag in list(result.partition_tags):
            specs = [CompileSpec("method_name", b"forward")]
            # The exporter puts copies around islands of any target device, "cpu" included, which then fail.
            if self.planned:
                specs.append(CompileSpec("target_device", b"cuda:0"))
            result.partition_tags[tag] = DelegationSpec("CudaBackend", specs)
        return result


# Kept: the exporter finds backends through weak references.
OTHER = delegate("TestA")


def export(name: str, model: Model, there: Path) -> dict[str, Any]:
    exported = torch.export.export(
        model.module.eval(), model.calls[0], dynamic_shapes=model.dynamic, strict=True
    )
    partitioners: list[Any] = [Partitioner(model.planned)]
    if model.share == "halves":
        aten = ops.edge.aten
        others = [aten.relu.default, aten.sigmoid.default]
        partitioners.insert(0, GraphPartitioner("TestA", others, "cuda:0" if model.planned else None))
    config: dict[str, Any] = {}
    if model.resident:
        config = {
            "propagate_device_config": PropagateDeviceConfig(
                skip_h2d_for_method_inputs=True, skip_d2h_for_method_outputs=True
            ),
            "memory_planning_pass": MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False),
        }
    lowered = to_edge_transform_and_lower(
        exported,
        partitioner=partitioners,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    program = lowered.to_executorch(ExecutorchBackendConfig(**config))
    (there / f"{name}.pte").write_bytes(program.buffer)
    data = []
    if program._tensor_data:
        with tempfile.TemporaryDirectory() as folder:
            program.write_tensor_data_to_file(folder)
            for k, file in enumerate(sorted(Path(folder).iterdir())):
                data.append(f"{name}.{k}.ptd" if k else f"{name}.ptd")
                (there / data[-1]).write_bytes(file.read_bytes())
    record([("forward", model.module, [tuple(c) for c in model.calls])], there / f"{name}.npz")
    return {"data": data, "stateful": model.stateful, "rtol": model.rtol, "atol": model.atol}


def main(folder: str, only: list[str]) -> int:
    check_versions()
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        raise SystemExit(
            f"tests/aoti: expected the environment {ENVIRONMENT}, which torch read while it was imported"
        )
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    there = Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    failed = []
    for name in only or MODELS:
        began = time.perf_counter()
        torch.manual_seed(0)
        try:
            index[name] = export(name, MODELS[name](), there)
        except Exception:
            failed.append(name)
            print(f"{name}: {traceback.format_exc()[-3000:]}", file=sys.stderr, flush=True)
            continue
        size = (there / f"{name}.pte").stat().st_size
        print(f"{name:16} {size:8} bytes  {time.perf_counter() - began:5.2f} s", flush=True)
    if not only:
        # For a process in which torch runs a library of its own.
        model, inputs = MODELS["add_one"]().module.eval(), MODELS["add_one"]().calls[0]
        torch._inductor.aoti_compile_and_package(
            torch.export.export(model, inputs), package_path=str(there / "torch.pt2")
        )
    if failed:
        print(f"tests/aoti: {len(failed)} not exported: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not only:
        pending = there / "index.json.pending"
        pending.write_text(json.dumps(index, indent=1))
        pending.rename(there / "index.json")
    return 0


if __name__ == "__main__":
    # Kept apart from the user's own cache, and gone afterwards.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        raise SystemExit(main(sys.argv[1], sys.argv[2:]))
