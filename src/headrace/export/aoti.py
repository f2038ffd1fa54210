"""AOTInductor: whatever no other delegate took becomes one library for each island.

Stock ExecuTorch and PyTorch do the work; this says how to compile so that the library needs no libtorch, and
what the run time has to know about it. An island has the delegate id ``CudaBackend``, host code and GPU code
alike; docs/aoti.md has its format. Imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import get_non_lowered_nodes, tag_constant_data
from executorch.exir.tensor import scalar_type_enum
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from ..errors import ExportError, OptionError
from ..pte import INPUTS_SPEC, fatbin
from . import content
from .inductor import compile_program
from .partition import Lowering
from .payload import CPU, CUDA, Constant, encode
from .shapes import Shapes
from .target import Target

__all__ = [
    "BACKEND",
    "CUDA_SPEC",
    "DELEGATE",
    "DEVICE_SPEC",
    "HOST_SPEC",
    "METHOD_SPEC",
    "AotiLowering",
    "AotiPartitioner",
]

# The delegate's id in the program. The exporter looks a backend up by the name of its class, and stock's
# CudaBackend may be there too: ours has a name of its own until the program is planned (program.py).
DELEGATE = "CudaBackend"
BACKEND = "HeadraceAoti"

METHOD_SPEC = "method_name"
DEVICE_SPEC = "target_device"
# JSON: version, march, symbols, outputs, and for a GPU the code that its kernels are there as; see docs/aoti.md.
HOST_SPEC = "headrace_host"
CUDA_SPEC = "headrace_cuda"
SPEC_VERSION = 1
# For the compilation, which writes one of the two in its place.
TARGET_SPEC = "headrace_target"
# Of named data, in bytes: what vector loads and AOTInductor's own allocations keep to.
ALIGNMENT = 64


class AotiPartitioner(Partitioner):  # type: ignore[misc]
    """Gives everything that is left to AOTInductor, in as few convex islands as the graph allows.

    ``device`` is where the islands' inputs and outputs are planned: ``cuda:0``, which the run time binds to
    whichever device the program is loaded on (``cpu`` and ``sim`` too), or None for host memory.
    ``data_file`` names the data file, without ``.ptd``, that constants go into; None keeps them in the program.
    """

    def __init__(
        self,
        target: Target,
        *,
        method: str = "forward",
        device: str | None = "cuda:0",
        data_file: str | None = None,
    ) -> None:
        super().__init__()
        if target.kind == "cuda" and device is None:
            raise OptionError(
                f"device: expected 'cuda:0' with target {target.text}, got None; the arguments of GPU code lie on the "
                "GPU"
            )
        self.target = target
        self.method = method
        self.device = device
        self.data_file = data_file

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], None]:
        """All of them: AOTInductor decomposes as it needs."""
        found = {n.target: None for n in ep.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
        return list(found), None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        proposed = CapabilityBasedPartitioner(
            exported_program.graph_module,
            _Left(set(get_non_lowered_nodes(exported_program.graph))),
            allows_single_node_partition=True,
        ).propose_partitions()
        tags: dict[str, DelegationSpec] = {}
        for i, partition in enumerate(proposed):
            tag = f"aoti_{i}"
            for node in partition.nodes:
                node.meta["delegation_tag"] = tag
            tags[tag] = DelegationSpec(BACKEND, self._specs())
        # A branch's graph belongs to the operator that takes it.
        for node in exported_program.graph.nodes:
            owner = next((u for u in node.users if "delegation_tag" in u.meta), None)
            if node.op == "get_attr" and owner is not None:
                node.meta["delegation_tag"] = owner.meta["delegation_tag"]
        # Constants go into the island that uses them. State does not: it stays the method's, so that it is
        # planned, initialized and advanced once a call by the engine, whatever the island runs on.
        tag_constant_data(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def _specs(self) -> list[CompileSpec]:
        specs = [CompileSpec(METHOD_SPEC, self.method.encode())]
        if self.device is not None:
            specs.append(CompileSpec(DEVICE_SPEC, self.device.encode()))
        asked = {"target": self.target.text, "data_file": self.data_file}
        specs.append(CompileSpec(TARGET_SPEC, json.dumps(asked).encode()))
        return specs


class _Left(OperatorSupportBase):  # type: ignore[misc]
    """Operators that no delegate has yet."""

    def __init__(self, left: set[torch.fx.Node]) -> None:
        self.left = left

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: torch.fx.Node) -> bool:
        return node.op == "call_function" and node in self.left


def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
    """Compile one island; ``compile_specs`` is the list that goes into the program, completed here.

    Raises ExportError where an operator would call libtorch, where a size is not determined by the inputs'
    sizes, or where the result is not what was asked for.
    """
    specs = {spec.key: spec.value for spec in compile_specs}
    method = specs[METHOD_SPEC].decode()
    asked = json.loads(specs[TARGET_SPEC])
    target = Target.parse(asked["target"])
    on_gpu = target.kind == "cuda"

    inputs = _inputs(method, edge_program)
    said = {"version": SPEC_VERSION, "march": target.march, **_shapes(method, edge_program, inputs)}
    if on_gpu:
        said["code"] = list(target.code)
    weights = {**edge_program.state_dict, **edge_program.constants}
    compiled = content.compiled(method, edge_program, target, compile_program)

    store = NamedDataStore()
    library_key = hashlib.sha256(compiled.library).hexdigest() + "_so_blob"
    store.add_named_data(library_key, compiled.library, alignment=ALIGNMENT)
    entries = []
    for fqn, (tensor, view) in compiled.constants.items():
        storage = _storage(tensor)
        # By content: what several islands or methods share is there once, and no two that differ collide.
        key = hashlib.sha256(storage).hexdigest() + "_weight"
        store.add_named_data(key, storage, alignment=ALIGNMENT, external_tag=asked["data_file"])
        entry = Constant(
            fqn=fqn,
            storage_key=key,
            nbytes=len(storage),
            dtype=int(scalar_type_enum(tensor.dtype)),
            device=CUDA if on_gpu else CPU,
            offset=int(view.offset),
            sizes=tuple(int(s) for s in view.shape),
            strides=tuple(int(s) for s in view.stride),
        )
        entries.append(entry)
        if fqn in weights:
            _check_value(method, entry, storage, weights[fqn])
    _check_source(method, compiled.source, entries, target)
    _check_symbols(method, compiled.library, target)
    if on_gpu:
        _check_code(method, compiled.library, compiled.source, target)

    compile_specs[:] = [spec for spec in compile_specs if spec.key != TARGET_SPEC]
    compile_specs.append(CompileSpec(INPUTS_SPEC, str(len(inputs)).encode()))
    compile_specs.append(CompileSpec(CUDA_SPEC if on_gpu else HOST_SPEC, json.dumps(said).encode()))
    return PreprocessResult(
        processed_bytes=encode(library_key, entries),
        debug_handle_map={},
        data_store_output=store.get_named_data_store_output(),
    )


# Kept by name: the exporter finds backends among the direct subclasses of BackendDetails, held weakly.
HeadraceAoti = type(BACKEND, (BackendDetails,), {"preprocess": staticmethod(preprocess)})


def _inputs(method: str, program: ExportedProgram) -> list[torch.Tensor]:
    """What the island is called with, as fake tensors in order."""
    wanted = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted]
    for node in nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise ExportError(
                f"{method}, {node.name}: expected tensors between delegates, got a "
                f"{type(node.meta.get('val')).__name__}; let one delegate take both sides of it",
                node=node.name,
            )
    return [node.meta["val"] for node in nodes]


def _shapes(method: str, program: ExportedProgram, inputs: list[torch.Tensor]) -> dict[str, Any]:
    # What is written to state that a partitioner left in the island is no result of it.
    written = program.graph_signature.buffers_to_mutate
    results = [n for n in program.graph.output_node().args[0] if n.name not in written]
    for node in results:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise ExportError(
                f"{method}, {node.name}: expected tensors between delegates, got a "
                f"{type(node.meta.get('val')).__name__}; let one delegate take both sides of it",
                node=node.name,
            )
    try:
        shapes = Shapes([t.shape for t in inputs], [n.meta["val"].shape for n in results])
    except ValueError as error:
        sizes = "; ".join(f"{n.name}: {[str(s) for s in n.meta['val'].shape]}" for n in results)
        raise ExportError(
            f"{method}: expected sizes of results that the sizes of inputs determine, got {error} ({sizes}); "
            "keep operators whose result size depends on data out of this delegate",
            node=results[0].name,
        ) from None
    return {"symbols": shapes.symbols, "outputs": shapes.outputs}


def _storage(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    data: bytes = flat.numpy().tobytes()
    return data


# -------------------- what came out


def _check_value(method: str, constant: Constant, storage: bytes, wanted: torch.Tensor) -> None:
    """What the run time will see of a constant is what the model has under that name, byte for byte."""
    flat = torch.frombuffer(bytearray(storage), dtype=wanted.dtype) if storage else wanted.new_empty(0)
    matches = constant.dtype == int(scalar_type_enum(wanted.dtype)) and constant.sizes == tuple(wanted.shape)
    if not matches or _plain(flat.as_strided(constant.sizes, constant.strides, constant.offset)) != _plain(
        wanted
    ):
        raise ExportError(
            f"{method}, constant {constant.fqn}: expected the model's own bytes, "
            f"{wanted.dtype}{list(wanted.shape)}, got others, dtype {constant.dtype} {list(constant.sizes)}; "
            "report this with the model",
            node=constant.fqn,
        )


def _plain(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data


def _check_source(method: str, source: str, entries: list[Constant], target: Target) -> None:
    """The library's own list of constants: these names in this order, every one where the target has it. On another
    device the library would read an address of nothing, and say nothing."""
    names = re.findall(r'constants_info_\[\d+\]\.original_fqn = "(.*?)";', source)
    devices = re.findall(r"constants_info_\[\d+\]\.device_type = (\w+);", source)
    if names != [e.fqn for e in entries]:
        raise ExportError(
            f"{method}: expected the library's constants to be {[e.fqn for e in entries]}, got {names}; "
            "report this with the model"
        )
    wanted, word = ("cuda", "on the GPU") if target.kind == "cuda" else ("cpu", "on the host")
    for fqn, device in zip(names, devices, strict=True):
        if device != f"cached_torch_device_type_{wanted}":
            raise ExportError(
                f"{method}, constant {fqn}: expected it {word}, got {device}; report this with the model",
                node=fqn,
            )


def _check_symbols(method: str, library: bytes, target: Target) -> None:
    """Whatever the library leaves undefined is a versioned symbol of the system's libraries, or one that the run
    time answers."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        listed = subprocess.run(
            ["nm", "--dynamic", "--undefined-only", file.name], capture_output=True, text=True, check=True
        ).stdout
    undefined = [line.split() for line in listed.splitlines()]
    if not undefined:
        raise ExportError(f"{method}: expected a library with undefined symbols, got none; report this")
    unknown = sorted(
        name for kind, name in undefined if kind == "U" and "@" not in name and name not in target.symbols
    )
    if unknown:
        raise ExportError(
            f"{method}: expected symbols that the run time answers, got {', '.join(unknown)}; leave the operators "
            "that need them to another delegate"
        )


def _check_code(method: str, library: bytes, source: str, target: Target) -> None:
    """Each kernel that the wrapper loads is there for each architecture, and no other code is."""
    kernels = set(re.findall(r"loadKernel\(__(\w+)_start\b", source))
    found = [
        sorted(c.arch for c in fatbin.read(container).code)
        for container in fatbin.embedded(memoryview(library))
    ]
    # Kernels of the same code share what is compiled of it, and may be there once each all the same.
    wrong = [archs for archs in found if archs != sorted(target.code)]
    if wrong or bool(kernels) != bool(found) or len(found) > len(kernels):
        raise ExportError(
            f"{method}: expected the code of {len(kernels)} kernels for {', '.join(target.code)}, got "
            f"{len(found)}{': ' + ', '.join(wrong[0]) if wrong else ''}; report this with the model"
        )


class AotiLowering(Lowering):
    """AOTInductor among other delegates: it can compute all there is, or says so when it compiles."""

    backend = BACKEND

    def __init__(self, claims: Any, plan: Any) -> None:
        super().__init__(claims, plan)
        self.device = plan.device
        self.stock = claims.partitioner(plan)
        # Given all that is left, it takes it as PyTorch traced it.
        self.keeps_all = claims.everything

    def specs(self) -> list[CompileSpec]:
        return list(self.stock._specs())

    def refuses(self, node: torch.fx.Node, program: ExportedProgram) -> str | None:
        # Its branches are graphs, which PyTorch cannot trace a second time by the time islands are compiled.
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return (
                "control flow, which the engine itself runs, and what is in its branches with the CPU kernels"
            )
        return None

    def keeps(self, program: ExportedProgram) -> Any:
        return self.stock.ops_to_not_decompose(program) if self.keeps_all else super().keeps(program)
