"""AOTInductor: whatever no other delegate took becomes one library for each island.

Stock ExecuTorch and PyTorch do the work; this says how to compile so that the library needs no libtorch, and
what the run time has to know about it. An island has the delegate id ``CudaBackend``, host code and GPU code
alike; docs/export.md has its format. Imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import get_non_lowered_nodes, tag_constant_data
from executorch.exir.tensor import scalar_type_enum
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.scheduler import Scheduler
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from ..errors import ExportError
from ..pte import INPUTS_SPEC
from .decompositions import decompositions
from .node import described
from .payload import CPU, Constant, encode
from .shapes import Shapes
from .target import Target

__all__ = ["BACKEND", "DELEGATE", "DEVICE_SPEC", "HOST_SPEC", "METHOD_SPEC", "SHIMS", "AotiPartitioner"]

# The delegate's id in the program. The exporter looks a backend up by the name of its class, and stock's
# CudaBackend may be there too: ours has a name of its own until the program is planned (program.py).
DELEGATE = "CudaBackend"
BACKEND = "HeadraceAoti"

METHOD_SPEC = "method_name"
DEVICE_SPEC = "target_device"
# JSON: version, march, symbols, outputs; see docs/export.md.
HOST_SPEC = "headrace_host"
HOST_SPEC_VERSION = 1
# Of named data, in bytes: what vector loads and AOTInductor's own allocations keep to.
ALIGNMENT = 64

# What the run time answers for a host library; a symbol outside is a library that will not load.
SHIMS = frozenset(
    "aoti_torch_" + name
    for name in [
        "assign_tensors_out",
        "check",
        "clone",
        "clone_preserve_strides",
        "copy_",
        "create_tensor_from_blob",
        "create_tensor_from_blob_v2",
        "delete_tensor_object",
        "device_type_cpu",
        "device_type_cuda",
        "dtype_bfloat16",
        "dtype_bool",
        "dtype_float16",
        "dtype_float32",
        "dtype_float64",
        "dtype_int16",
        "dtype_int32",
        "dtype_int64",
        "dtype_int8",
        "dtype_uint8",
        "empty_strided",
        "get_data_ptr",
        "get_device_index",
        "get_device_type",
        "get_dim",
        "get_dtype",
        "get_numel",
        "get_sizes",
        "get_storage_offset",
        "get_storage_size",
        "get_strides",
        "grad_mode_is_enabled",
        "grad_mode_set_enabled",
        "item_bool",
        "layout_strided",
        "new_tensor_handle",
        "_reinterpret_tensor",
        "warn",
    ]
)


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
        # For the compilation, which writes what the run time reads in its place.
        asked = {"march": self.target.march, "data_file": self.data_file}
        specs.append(CompileSpec(HOST_SPEC, json.dumps(asked).encode()))
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
    asked = json.loads(specs[HOST_SPEC])
    target = Target(march=asked["march"])

    inputs = _inputs(method, edge_program)
    host = {"version": HOST_SPEC_VERSION, "march": target.march, **_shapes(method, edge_program, inputs)}
    weights = {**edge_program.state_dict, **edge_program.constants}
    library, constants, source = _compile(method, edge_program, target)

    store = NamedDataStore()
    library_key = hashlib.sha256(library).hexdigest() + "_so_blob"
    store.add_named_data(library_key, library, alignment=ALIGNMENT)
    entries = []
    for fqn, (tensor, properties) in constants.items():
        storage = _storage(tensor)
        # By content: what several islands or methods share is there once, and no two that differ collide.
        key = hashlib.sha256(storage).hexdigest() + "_weight"
        store.add_named_data(key, storage, alignment=ALIGNMENT, external_tag=asked["data_file"])
        entries.append(
            Constant(
                fqn=fqn,
                storage_key=key,
                nbytes=len(storage),
                dtype=int(scalar_type_enum(tensor.dtype)),
                device=CPU,
                offset=int(properties.offset),
                sizes=tuple(int(s) for s in properties.shape),
                strides=tuple(int(s) for s in properties.stride),
            )
        )
        _check_value(method, fqn, tensor, weights)
    _check_source(method, source, entries)
    _check_symbols(method, library)

    compile_specs[:] = [spec for spec in compile_specs if spec.key != HOST_SPEC]
    compile_specs.append(CompileSpec(INPUTS_SPEC, str(len(inputs)).encode()))
    compile_specs.append(CompileSpec(HOST_SPEC, json.dumps(host).encode()))
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
    results = list(program.graph.output_node().args[0])
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


def _compile(method: str, program: ExportedProgram, target: Target) -> tuple[bytes, Mapping[str, Any], str]:
    """The library, its constants by name with Inductor's record of each, and the source of its wrapper."""
    program = program.run_decompositions(decompositions())
    inputs = tuple(_inputs(method, program))
    calls: dict[str, list[torch.fx.Node]] = {}
    try:
        with torch.no_grad(), _libtorch_calls(calls):
            files = torch._inductor.aot_compile(program.module(), inputs, options=_options(target))
    except Exception as error:
        if calls:
            raise _refused(method, calls) from None
        node = getattr(error, "node", None)
        raise ExportError(
            f"{method}: expected AOTInductor to compile the island, got {type(error).__name__}: {error}; "
            "leave the operator to another delegate, or write it differently",
            node=node.name if isinstance(node, torch.fx.Node) else None,
        ) from error
    if not isinstance(files, list):
        raise ExportError(
            f"{method}: expected a list of files from AOTInductor, got {files!r}; use torch 2.13"
        )
    paths = [Path(f) for f in files if isinstance(f, str)]
    (library,) = (p for p in paths if p.name.endswith(".wrapper.so"))
    (source,) = (p for p in paths if p.name.endswith(".wrapper.cpp"))
    weights = [f for f in files if isinstance(f, Mapping)]
    return library.read_bytes(), weights[0] if weights else {}, source.read_text()


def _options(target: Target) -> dict[str, Any]:
    """Inductor's configuration of one compilation."""
    return {
        "aot_inductor.link_libtorch": False,
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
        # Neither paths of this machine in the library, nor frames for a profiler.
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.enable_frame_pointer": False,
        # Nothing is timed, so the same model gives the same code.
        "max_autotune": False,
        "max_autotune_gemm": False,
        "deterministic": True,
        "freezing": False,
        "cpp.march": target.march,
        "cpp.simdlen": target.vector_bits,
        # As many threads as the machine has on which it runs.
        "cpp.dynamic_threads": True,
        "cpp.fallback_scatter_reduce_sum": False,
    }


class _CallsLibtorch(Exception):
    """Stops a compilation whose library would call libtorch."""


@contextlib.contextmanager
def _libtorch_calls(calls: dict[str, list[torch.fx.Node]]) -> Iterator[None]:
    """Collect every kernel of libtorch that generated code would call, with the nodes it comes from, and stop
    before the C++ compiler is started if there is one. Inductor has no setting for that."""
    extern, shim = Scheduler.codegen_extern_call, CppWrapperCpu.generate_c_shim_extern_kernel_call
    lookup, build = CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot, AotCodeCompiler.compile
    origins: dict[str, list[torch.fx.Node]] = {}

    def codegen_extern_call(self: Any, scheduler_node: Any) -> None:
        # Calls are generated later, without the node; each is known by the kernel's name.
        node = scheduler_node.node
        for name in (getattr(node, "cpp_kernel_name", None), getattr(node, "op_overload", None)):
            if name is not None:
                found = sorted(node.get_origins(), key=lambda n: str(n.name))
                origins.setdefault(str(name), []).extend(n for n in found if n.op == "call_function")
        extern(self, scheduler_node)

    def c_shim(self: Any, kernel: str, *args: Any, **kwargs: Any) -> None:
        calls.setdefault(kernel, origins.get(kernel, []))
        shim(self, kernel, *args, **kwargs)

    def runtime_lookup(self: Any, op_overload: Any, *args: Any, **kwargs: Any) -> None:
        calls.setdefault(str(op_overload), origins.get(str(op_overload), []))
        lookup(self, op_overload, *args, **kwargs)

    def compile_code(*args: Any, **kwargs: Any) -> Any:
        if calls:
            raise _CallsLibtorch
        return build(*args, **kwargs)

    Scheduler.codegen_extern_call = codegen_extern_call
    CppWrapperCpu.generate_c_shim_extern_kernel_call = c_shim
    CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot = runtime_lookup
    AotCodeCompiler.compile = compile_code
    try:
        yield
    finally:
        Scheduler.codegen_extern_call = extern
        CppWrapperCpu.generate_c_shim_extern_kernel_call = shim
        CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot = lookup
        AotCodeCompiler.compile = build


def _refused(method: str, calls: Mapping[str, list[torch.fx.Node]]) -> ExportError:
    found = [node for nodes in calls.values() for node in nodes]
    names = [
        f"{', '.join(map(described, nodes)) or 'an operator'} by {kernel}" for kernel, nodes in calls.items()
    ]
    return ExportError(
        f"{method}: expected code that needs no libtorch, got calls of {len(calls)} of its kernels: "
        f"{'; '.join(names)}; leave these operators to another delegate, or write them differently",
        node=found[0].name if found else None,
    )


def _storage(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    data: bytes = flat.numpy().tobytes()
    return data


# -------------------- what came out


def _check_value(method: str, fqn: str, tensor: torch.Tensor, weights: Mapping[str, Any]) -> None:
    """Every constant that has a name in the model has that one's bytes."""
    wanted = weights.get(fqn)
    if wanted is None:
        return
    same = tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
    if not same or _plain(tensor) != _plain(wanted):
        raise ExportError(
            f"{method}, constant {fqn}: expected the model's own bytes ({wanted.dtype}{list(wanted.shape)}), got "
            f"others ({tensor.dtype}{list(tensor.shape)}); report this with the model",
            node=fqn,
        )


def _plain(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data


def _check_source(method: str, source: str, entries: list[Constant]) -> None:
    """The library's own list of constants: these names in this order, every one on the host."""
    names = re.findall(r'constants_info_\[\d+\]\.original_fqn = "(.*?)";', source)
    devices = re.findall(r"constants_info_\[\d+\]\.device_type = (\w+);", source)
    if names != [e.fqn for e in entries]:
        raise ExportError(
            f"{method}: expected the library's constants to be {[e.fqn for e in entries]}, got {names}; "
            "report this with the model"
        )
    for fqn, device in zip(names, devices, strict=True):
        if device != "cached_torch_device_type_cpu":
            raise ExportError(
                f"{method}, constant {fqn}: expected it on the host, got {device}; report this with the model",
                node=fqn,
            )


def _check_symbols(method: str, library: bytes) -> None:
    """Whatever the library leaves undefined is a versioned symbol of the system's libraries, or a shim."""
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
        name for kind, name in undefined if kind == "U" and "@" not in name and name not in SHIMS
    )
    if unknown:
        raise ExportError(
            f"{method}: expected symbols that the run time answers, got {', '.join(unknown)}; leave the operators "
            "that need them to another delegate"
        )
