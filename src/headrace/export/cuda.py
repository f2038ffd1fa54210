"""Compiling for an NVIDIA GPU where there is none, with any build of torch. Imports torch and Triton.

Inductor and Triton ask for a GPU to know its architecture, to hold constants, and to time kernels. None of that
is needed to write code: the architecture is the target's, constants are fake tensors on ``cuda:0`` (shape, strides
and dtype without memory), and nothing is timed. ``pretend`` makes Inductor see it that way. What it changes is
changed for good, so it is for a process that ends after the compilation (``child.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram

from ..errors import ExportError
from ..pte import fatbin
from .target import ARCHITECTURES, Architecture, Target
from .tiles import SMALL, SMALL_CONVOLUTION, Block, Product, best

__all__ = ["Constants", "on_gpu", "pretend"]

# Functions of the driver that a library may call.
DRIVER = "cuFuncSetAttribute cuGetErrorString cuLaunchKernel cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleUnload"
DEVICE = torch.device("cuda", 0)
# Multiprocessors of the GPU that is made believe: those of a large one.
SM_COUNT = 132


class Constants:
    """The model's values behind the fake constants that a compilation sees.

    ``values`` are the parameters, buffers and literals of an exported program, by name. A value that is a view
    of other memory is copied, so that its storage holds it alone.
    """

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._by_storage: dict[int, str] = {}
        # By id, of values that are kept for that.
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.add(values)

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """More of them, in place of those of the same names."""
        alone = {id(value): _alone(value.detach()) for value in values.values()}
        self.by_name |= {name: alone[id(value)] for name, value in values.items()}

    def fake(self, name: str, mode: FakeTensorMode) -> torch.Tensor:
        """The fake tensor on the GPU for ``name``; one for all names of one value."""
        value = self.by_name[name]
        if id(value) not in self._fakes:
            with mode:
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
            self._fakes[id(value)] = value, made
            self._by_storage[made.untyped_storage()._cdata] = name
        return self._fakes[id(value)][1]

    def name(self, name: str, fake: torch.Tensor) -> str:
        """The program's name for the constant that Inductor knows as ``name``.

        It clones buffers and keeps their names; literals it names anew and keeps. Raises ExportError for another.
        """
        found = self._by_storage.get(fake.untyped_storage()._cdata, name)
        value = self.by_name.get(found)
        if value is None or (value.shape, value.stride(), value.dtype) != (
            fake.shape,
            fake.stride(),
            fake.dtype,
        ):
            raise ExportError(
                f"constant {name}: expected one of the model's, got a {fake.dtype}{list(fake.shape)} that has no "
                "value; report this with the model",
                node=name,
            )
        return found


def _alone(value: torch.Tensor) -> torch.Tensor:
    """``value`` with the same strides in a storage that holds nothing else, zeros where they leave gaps. One that
    repeats its elements becomes contiguous."""
    if (
        value.untyped_storage().nbytes() == value.numel() * value.element_size()
        and not value.storage_offset()
    ):
        return value
    if value.numel() and any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
        return value.contiguous().clone()
    nbytes = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    made = torch.zeros(nbytes if value.numel() else 0, dtype=value.dtype)
    made = made.as_strided(value.shape, value.stride())
    return made.copy_(value)


def on_gpu(program: ExportedProgram, constants: Constants) -> ExportedProgram:
    """``program`` as if it had been exported on ``cuda:0``, its constants fake. Changes it in place."""
    from torch.export.passes import move_to_device_pass
    from torch.utils import _pytree as pytree

    fakes = [
        leaf
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, FakeTensor)
    ]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode()
    mode.allow_non_fake_inputs = True
    for fake in fakes:
        # The value that a literal's fake remembers; moving would move it too.
        fake.constant = None
    for store in (program._state_dict, program._constants):
        for name, value in store.items():
            if isinstance(value, torch.Tensor):
                fake = constants.fake(name, mode)
                # Autograd's part of a parameter would ask for the device.
                store[name] = (
                    torch.nn.Parameter(fake, False) if isinstance(value, torch.nn.Parameter) else fake
                )
    program._example_inputs = None
    with torch.no_grad():
        moved: ExportedProgram = move_to_device_pass(program, str(DEVICE))
    return moved


def pretend(target: Target, constants: Constants, folder: Path) -> None:
    """Make torch, Inductor and Triton of this process compile for ``target``, whatever GPU it has or lacks, and
    keep what they write in ``folder``. Not to be undone: for a child process."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    # Tables of source lines hold paths, and the PTX beside the machine code.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    # Fused multiply-add, as nvcc does by default; Triton warns where it is not said.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    _answers(_properties(target.compute))
    _triton(target.compute)
    _inductor(target, constants, folder)
    _linker(folder)
    _headers(folder)


def _properties(architecture: Architecture) -> SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` says; what the heuristics of Inductor ask for is there."""
    return SimpleNamespace(
        name=architecture.name,
        major=architecture.number // 10,
        minor=architecture.number % 10,
        multi_processor_count=SM_COUNT,
        total_memory=80 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=architecture.sm_threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=architecture.block_nbytes,
        shared_memory_per_multiprocessor=architecture.sm_nbytes,
        L2_cache_size=50 << 20,
        is_integrated=0,
        gcnArchName="",
        uuid="",
        clock_rate=1_500_000,
        memory_clock_rate=2_000_000,
        memory_bus_width=5120,
    )


def _answers(properties: SimpleNamespace) -> None:
    """torch's own questions about the GPU."""
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value

    # Inductor's patterns, once for a process: they are traced with tensors that the device they name has to hold.
    torch.cuda.is_available = always(False)
    joint_graph.lazy_init()
    joint_graph.lazy_init = always(None)
    # Answers to what follows that were given before.
    for cached in vars(_triton).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    device_interface.caching_worker_device_properties.clear()
    # Whether there is a GPU: code for one is written only then.
    torch.cuda.is_available = always(True)
    torch.cuda.device_count = always(1)
    torch.cuda.current_device = always(0)
    torch.cuda.get_device_properties = always(properties)
    torch.cuda.get_device_capability = always((properties.major, properties.minor))
    # AOTAutograd keeps the state of every generator over its tracing.
    torch.cuda.get_rng_state = always(torch.get_rng_state())
    torch.cuda.set_rng_state = always(None)
    # A build without CUDA raises here, one with it would start CUDA.
    torch.cuda._lazy_init = always(None)
    # ``with torch.cuda.device(0)``, around a compilation and around the loading of a kernel.
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = always(0)
    # Copies of these functions that Inductor has.
    interface = device_interface.CudaInterface
    interface.current_device = staticmethod(always(0))
    interface.device_count = staticmethod(always(1))
    interface.exchange_device = interface.maybe_exchange_device = staticmethod(always(0))
    interface.get_device_properties = staticmethod(always(properties))
    interface.synchronize = staticmethod(always(None))
    # It would put a tensor on the GPU.
    fake_tensor.init_gpu_context = always(None)


def _triton(architecture: Architecture) -> None:
    """Triton's driver, which loads what was compiled and asks what for: this one loads nothing."""
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    properties = {
        "max_shared_mem": architecture.block_nbytes,
        "multiprocessor_count": SM_COUNT,
        "max_num_regs": 65536,
        "warpSize": 32,
    }

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = SimpleNamespace(
                get_device_properties=lambda device: properties,
                # Module, function, registers, spills, threads.
                load_binary=lambda *args: (1, 1, 32, 0, 1024),
                unload_module=lambda module: None,
            )
            self.launcher_cls = lambda source, metadata: lambda *args, **kwargs: None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", architecture.number, 32)

        def get_active_torch_device(self) -> Any:
            return DEVICE

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
            return divmod(architecture.number, 10)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

        def get_empty_cache_for_benchmark(self) -> Any:
            raise NotImplementedError

        def clear_cache(self, cache: Any) -> None:
            raise NotImplementedError

    backends = triton.backends.backends
    backends["nvidia"] = dataclasses.replace(backends["nvidia"], driver=Driver)
    driver.set_active(Driver())


def _inductor(target: Target, constants: Constants, folder: Path) -> None:
    """Inductor: kernels compiled and not run, and values of constants only where they are written into code."""
    import triton
    from torch._inductor import codecache, config, graph, lowering
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache
    from torch._inductor.template_heuristics.triton import ConvConfig, CUDAConfigHeuristic, GemmConfig
    from torch.utils import cpp_extension

    codecache.CudaKernelParamCache.cache.clear()
    # Triton's package has the headers of CUDA that the wrapper includes.
    cpp_extension.CUDA_HOME = str(Path(triton.__file__).parent / "backends" / "nvidia")

    def compile_kernels(self: Any) -> None:
        # In place of a block of code that makes arguments for each kernel and times it.
        self.kernel_autotune_defs.splice("async_compile.wait(globals())")
        scope: dict[str, Any] = {}
        exec(self.kernel_autotune_defs.getvalue(), scope)
        for kernel in scope.values():
            if not isinstance(kernel, CachingAutotuner):
                continue
            if not kernel.launchers:
                kernel.precompile()
            launcher = kernel.launchers[0]
            kernel.save_gpu_kernel(0, launcher)
            saved = codecache.CudaKernelParamCache.get(kernel.inductor_meta["kernel_name"])
            # Under this option Inductor makes fat binaries by tools of CUDA's.
            if not config.aot_inductor.emit_multi_arch_kernel:
                file = Path(saved[codecache.get_cpp_wrapper_cubin_path_name()])
                file.write_bytes(_fat_binary(launcher.bin.asm, target, folder))

    PythonWrapperCodegen.generate_and_run_autotune_block = compile_kernels

    get_attr = graph.GraphLowering.get_attr

    def get_constant(self: Any, name: str, args: Any, kwargs: Any) -> Any:
        fake = graph.getattr_recursive(self.module, name)
        small = isinstance(fake, FakeTensor) and (fake.shape == () or self.can_inline_constant(fake))
        if not small or name in self.mutated_named_buffers:
            return get_attr(self, name, args, kwargs)
        value = constants.by_name[constants.name(name, fake)]
        if value.shape == ():
            return graph.Constant(value=value.item(), dtype=value.dtype, device=fake.device)
        return lowering.tensor(value.tolist(), dtype=value.dtype, device=fake.device)

    graph.GraphLowering.get_attr = get_constant
    # The original compares addresses.
    graph.is_same_tensor = lambda a, b: a is b

    def with_ours(configs: str, kind: Any, blocks: Sequence[Block], **more: Any) -> Callable[[Any], Any]:
        ours = [kind(b.m, b.n, b.k, b.stages, b.warps) for b in blocks]
        return lambda self: functools.partial(
            self.preprocess_mm_configs, configs=[*getattr(self, configs), *ours], **more
        )

    triton_config = CUDAConfigHeuristic.triton_config

    def with_two_warps(self: Any, num_stages: int, num_warps: int, **blocks: Any) -> Any:
        # The original gives the smallest block one warp; with two it took three quarters of the time on an H200.
        return triton_config(self, num_stages, max(num_warps, 2), **blocks)

    CUDAConfigHeuristic.triton_config = with_two_warps
    CUDAConfigHeuristic.get_mm_configs = with_ours("mm_configs", GemmConfig, SMALL)
    CUDAConfigHeuristic.get_conv_configs = with_ours(
        "conv_configs", ConvConfig, SMALL_CONVOLUTION, op_name="conv"
    )
    # The original takes the first, whatever the size, where it may not time them.
    AlgorithmSelectorCache.pick_deterministic_choice = lambda self, choices: _pick(choices, target.compute)


def _pick(choices: list[Any], architecture: Architecture) -> Any:
    """One of Inductor's choices for a product or a convolution."""
    from torch._inductor.virtualized import V

    def size(expression: Any) -> int:
        # Of a size that varies, that of the example inputs.
        return int(V.graph.sizevars.optimization_hint(expression))

    found = [(c, c.info_dict()) for c in choices]
    templates = [(c, i) for c, i in found if "tile_shape" in i and "-" not in str(i["tile_shape"])]
    if not templates:
        return choices[0]
    first = templates[0][0]
    sizes = [size(n) for n in first.layout.size]
    a, b = (node.get_size() for node in first.input_nodes[-2:])
    if "convolution" in first.name:
        # Windows times filters, for each place of the result.
        product = (1, sizes[0] * int(np.prod(sizes[2:])), sizes[1], int(np.prod([size(n) for n in b[1:]])))
    else:
        product = (int(np.prod(sizes[:-2])), sizes[-2], sizes[-1], size(a[-1]))
    blocks = []
    for _, info in templates:
        m, k, n = (int(v) for v in str(info["tile_shape"]).strip("()").split(","))
        blocks.append(Block(m, n, k, int(info["num_stages"]), int(info["num_warps"])))
    chosen = best(
        Product(*product, first.layout.dtype.itemsize),
        blocks,
        sms=SM_COUNT,
        block_nbytes=architecture.block_nbytes,
    )
    return templates[chosen][0]


def _fat_binary(code: Mapping[str, Any], target: Target, folder: Path) -> bytes:
    """What is embedded of a kernel; ``code`` is what Triton made of it, for ``target.compute``."""
    ptx = code["ptx"].encode() if isinstance(code["ptx"], str) else bytes(code["ptx"])
    machine = []
    for name, written in zip(target.architectures, target.code, strict=False):
        same = ARCHITECTURES[name].number == target.compute.number
        machine.append((written, bytes(code["cubin"]) if same else _assembled(ptx, name, folder)))
    return fatbin.write(machine, (target.code[-1], ptx) if target.ptx else None)


def _assembled(ptx: bytes, architecture: str, folder: Path) -> bytes:
    from triton.backends.nvidia.compiler import get_ptxas

    source, out = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_bytes(ptx)
    assembler = get_ptxas(ARCHITECTURES[architecture].number).path
    done = subprocess.run(
        [assembler, "--gpu-name", architecture, str(source), "-o", str(out)], capture_output=True, text=True
    )
    if done.returncode:
        raise ExportError(
            f"expected ptxas to assemble a kernel for {architecture}, got {done.stderr[-500:]}; leave this "
            "architecture out"
        )
    return out.read_bytes()


def _linker(folder: Path) -> None:
    """A driver to link with, which only says what is found when the library is loaded."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    stub = folder / "libcuda.so"
    code = "\n".join(f"void {name}(void) {{}}" for name in DRIVER.split())
    subprocess.run(
        [get_cpp_compiler(), "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(stub)],
        input=code, text=True, check=True, capture_output=True,
    )  # fmt: skip
    os.environ["LIBRARY_PATH"] = f"{folder}:{os.environ.get('LIBRARY_PATH', '')}".rstrip(":")


def _headers(folder: Path) -> None:
    """The one header that CUDA's need and Triton's package lacks. Its macro chooses between code for the GPU and for
    the host; all code that includes it here is for the host."""
    header = folder / "include" / "nv" / "target"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n#define NV_IF_ELSE_TARGET(condition, gpu, host) host\n")
    os.environ["CPATH"] = f"{folder / 'include'}:{os.environ.get('CPATH', '')}".rstrip(":")
