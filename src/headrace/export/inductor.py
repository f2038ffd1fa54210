"""One compilation by AOTInductor: code that needs no libtorch, for the host or for a GPU. Imports torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch._inductor import codecache, cpp_builder, lowering
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.ir import IRNode
from torch._inductor.scheduler import Scheduler
from torch.export import ExportedProgram

from ..errors import ExportError
from . import interface, vector_math
from .child import in_child
from .decompositions import decompositions
from .node import described
from .target import Target

__all__ = ["Compiled", "View", "compile_program"]

# Inductor's functions are wrapped for the length of a compilation.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class View:
    """Where a constant lies in a tensor's storage; ``stride`` and ``offset`` count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Compiled:
    """``library`` is a shared object. ``constants`` gives for each name, the model's where it has one, a tensor in host
    memory and the view into its storage, in the library's order. ``source`` is the C++ of its wrapper."""

    library: bytes
    constants: Mapping[str, tuple[torch.Tensor, View]]
    source: str


def compile_program(method: str, program: ExportedProgram, target: Target) -> Compiled:
    """Compile ``program``, an island of ``method``, whose inputs are tensors. Seconds.

    Raises ExportError where an operator would call libtorch, naming all of them, or where Inductor fails.
    """
    program = program.run_decompositions(decompositions(target.kind))
    with _one_at_a_time:
        if target.kind == "host":
            library, weights, source = _compile(method, program, target)
            return Compiled(library, {n: (t, _view(p)) for n, (t, p) in weights.items()}, source)
        return _compile_for_gpu(method, program, target)


def _compile_for_gpu(method: str, program: ExportedProgram, target: Target) -> Compiled:
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        raise ExportError(
            f"{method}, target {target.text}: expected Triton, which compiles for GPUs, got no module "
            f"{error.name!r}; pip install triton (docs/export.md)"
        ) from error
    from . import cuda

    # Their kernels are Inductor's, but the seeds come from libtorch, in a way that is no call of a kernel.
    random = [
        n
        for n in program.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
    ]
    if random:
        raise _refused(method, {"its generator of random numbers": random})
    values = {**program.state_dict, **program.constants}
    constants = cuda.Constants({n: v for n, v in values.items() if isinstance(v, torch.Tensor)})

    def compile_there() -> tuple[bytes, list[Any], str]:
        cuda.pretend(target, constants, Path(folder))
        library, weights, source = _compile(method, cuda.on_gpu(program, constants), target)
        # Values stay where they are; the parent has them under the same names.
        found = [(n, constants.name(n, fake), _view(p)) for n, (fake, p) in weights.items()]
        return library, found, source

    with tempfile.TemporaryDirectory() as folder:
        library, found, source = in_child(f"{method}, target {target.text}", compile_there)
    listed = {n: (constants.by_name[of], view) for n, of, view in found}
    return Compiled(library, listed, source)


def _view(properties: Any) -> View:
    """Inductor's record of a constant."""
    shape, stride = (tuple(int(n) for n in sizes) for sizes in (properties.shape, properties.stride))
    return View(shape, stride, int(properties.offset))


def _compile(
    method: str, program: ExportedProgram, target: Target
) -> tuple[bytes, Mapping[str, tuple[torch.Tensor, Any]], str]:
    """The library, its constants with Inductor's record of each, and the wrapper's source."""
    wanted = set(program.graph_signature.user_inputs)
    inputs = tuple(n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted)
    calls: dict[str, list[torch.fx.Node]] = {}
    added = vector_math.source(target.vector_bits) if target.kind == "host" else ""
    try:
        with (
            torch.no_grad(),
            _without_paths(),
            _constants_have_types(),
            _without_libtorch(calls, added),
            interface.left_out(),
        ):
            files = torch._inductor.aot_compile(program.module(), inputs, options=_options(target))
    except Exception as error:
        if calls and _is_from(error, _CallsLibtorch):
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
    options = {
        "aot_inductor.link_libtorch": False,
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
        # No tables of source lines, nor frames for a profiler.
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.enable_frame_pointer": False,
        # Nothing is timed, so the same model gives the same code.
        "max_autotune": False,
        "max_autotune_gemm": False,
        "deterministic": True,
        "freezing": False,
        "cpp.march": target.march,
        "cpp.simdlen": target.vector_bits,
        # Believed: the check compiles and runs a library that needs libtorch beside it.
        "cpp.vec_isa_ok": True,
        # As many threads as the machine has on which it runs.
        "cpp.dynamic_threads": True,
        "cpp.fallback_scatter_reduce_sum": False,
    }
    if target.kind == "cuda":
        options |= {
            "aot_inductor.embed_kernel_binary": True,
            "aot_inductor.emit_multi_arch_kernel": False,
            # Products and convolutions by Triton's templates, of which the first is taken that fits.
            "max_autotune_gemm": True,
            "max_autotune_gemm_backends": "TRITON",
            "max_autotune_conv_backends": "TRITON",
            # These would time kernels.
            "shape_padding": False,
            "benchmark_fusion": False,
            "benchmark_epilogue_fusion": False,
            "triton.autotune_at_compile_time": True,
            # These would read values of constants.
            "joint_graph_constant_folding": False,
            # In this process, where the answers about the GPU are.
            "compile_threads": 1,
            # Rounded where eager PyTorch rounds.
            "emulate_precision_casts": True,
        }
    return options


def _is_from(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether such an exception is in the error's chain."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _constants_have_types() -> Iterator[None]:
    """The exporter makes a tensor without dimensions of each number, ``x // 2``. Inductor (PyTorch 2.13) takes its value, and
    then does not see that it is an integer: quotients were rounded to zero in the place of down."""
    is_integer, is_boolean = lowering.is_integer_type, lowering.is_boolean_type

    def whether(asked: Any, dtypes: Callable[[torch.dtype], bool]) -> Any:
        return lambda x: dtypes(x.get_dtype()) if isinstance(x, IRNode) else asked(x)

    lowering.is_integer_type = whether(is_integer, lambda d: not (d.is_floating_point or d.is_complex))
    lowering.is_boolean_type = whether(is_boolean, lambda d: d is torch.bool)
    try:
        yield
    finally:
        lowering.is_integer_type, lowering.is_boolean_type = is_integer, is_boolean


@contextlib.contextmanager
def _without_paths() -> Iterator[None]:
    """Keep paths of this machine out of the library, so that it is the same wherever it is compiled: those of the
    sources, which messages name, and those of object files. Inductor has no settings for the compiler's options."""
    build, headers = cpp_builder.run_compile_cmd, codecache._HEADER_DIR
    included = str(Path(torch.__file__).parent / "include")

    def run(words: list[str], cwd: str) -> None:
        options = [f"-ffile-prefix-map={included}=torch"]
        for word in words:
            if word.endswith((".cpp", ".h", ".hpp", ".S")) and os.path.isabs(word):
                options.append(f"-ffile-prefix-map={word}=island{Path(word).suffix}")
        if "-shared" in words:
            # Symbols that the loader does not read, names of object files among them.
            options = ["-s"]
        build(shlex.join([words[0], *options, *words[1:]]), cwd)

    # Headers that are compiled beforehand, apart from those with the paths in them.
    codecache._HEADER_DIR = os.path.join(headers, "headrace")
    shared = interface.Interface(Path(codecache._HEADER_DIR), run)

    def run_compile_cmd(command: str, cwd: str) -> None:
        words = shlex.split(command)
        source = next((word for word in words if word.endswith(".wrapper.cpp")), None)
        if source is not None and "-c" in words:
            shared.like(words, source, cwd)
        run(shared.linked(words) if "-shared" in words else words, cwd)

    cpp_builder.run_compile_cmd = run_compile_cmd
    try:
        yield
    finally:
        cpp_builder.run_compile_cmd, codecache._HEADER_DIR = build, headers


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", None)


class _CallsLibtorch(Exception):
    """Stops a compilation whose library would call libtorch."""


@contextlib.contextmanager
def _without_libtorch(calls: dict[str, list[torch.fx.Node]], added: str) -> Iterator[None]:
    """Collect every kernel of libtorch that generated code would call, with the nodes it comes from, and stop
    before the C++ compiler is started if there is one; ``added`` is C++ that goes with the kernels. Inductor has
    no settings for these."""
    extern, shim = Scheduler.codegen_extern_call, CppWrapperCpu.generate_c_shim_extern_kernel_call
    lookup, build = CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot, AotCodeCompiler.compile
    origins: dict[str, list[torch.fx.Node]] = {}

    def codegen_extern_call(self: Any, scheduler_node: Any) -> None:
        # Calls are generated later, without the node; each is known by the kernel's name.
        node = scheduler_node.node
        overload = getattr(node, "op_overload", None)
        found = [n for n in node.get_origins() if n.op == "call_function"]
        # Operators that were fused into its arguments are among the origins too.
        found = sorted(found, key=lambda n: str(n.name))
        found = (
            [n for n in found if n.target == overload]
            # Inductor writes some as another overload: sort.default as sort.stable.
            or [n for n in found if _packet(n.target) is not None and _packet(n.target) is _packet(overload)]
            or found
        )
        for name in (getattr(node, "cpp_kernel_name", None), overload):
            if name is not None:
                origins.setdefault(str(name), []).extend(found)
        extern(self, scheduler_node)

    def c_shim(self: Any, kernel: str, *args: Any, **kwargs: Any) -> None:
        calls.setdefault(kernel, origins.get(kernel, []))
        shim(self, kernel, *args, **kwargs)

    def runtime_lookup(self: Any, op_overload: Any, *args: Any, **kwargs: Any) -> None:
        calls.setdefault(str(op_overload), origins.get(str(op_overload), []))
        lookup(self, op_overload, *args, **kwargs)

    def compile_code(graph: Any, wrapper_code: str, kernel_code: str, *args: Any, **kwargs: Any) -> Any:
        if calls:
            raise _CallsLibtorch
        return build(graph, wrapper_code, kernel_code + added, *args, **kwargs)

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
