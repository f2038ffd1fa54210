"""What a program is compiled for: the machine, and where its buffers are planned."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from ..errors import NotSupported, OptionError

__all__ = ["ARCHITECTURES", "CUDA_SYMBOLS", "PORTABLE", "SHIMS", "Architecture", "Target", "planned_on"]

# AVX2, FMA and F16C: every x86-64 server and laptop processor since 2013 (Intel) or 2015 (AMD). The level is
# defined in the x86-64 psABI, "micro-architecture levels".
PORTABLE = "x86-64-v3"
# Micro-architecture level -> width in bits of the vectors that Inductor writes code for; 1 is no vectors.
LEVELS = {"x86-64": 1, "x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}

# What the run time answers for every library.
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
        "dtype_element_size",
        "dtype_float16",
        "dtype_float32",
        "dtype_float64",
        "dtype_int16",
        "dtype_int32",
        "dtype_int64",
        "dtype_int8",
        "dtype_uint16",
        "dtype_uint32",
        "dtype_uint64",
        "dtype_uint8",
        "empty_strided",
        "get_data_ptr",
        "get_device_index",
        "get_device_type",
        "get_dim",
        "get_dtype",
        "get_layout",
        "get_numel",
        "get_sizes",
        "get_storage_offset",
        "get_storage_size",
        "get_strides",
        "grad_mode_is_enabled",
        "grad_mode_set_enabled",
        "item_bfloat16",
        "item_bool",
        "item_float16",
        "item_float32",
        "item_float64",
        "item_int16",
        "item_int32",
        "item_int64",
        "item_int8",
        "item_uint16",
        "item_uint32",
        "item_uint64",
        "item_uint8",
        "layout_strided",
        "new_tensor_handle",
        "_reinterpret_tensor",
        "warn",
    ]
)


# What the run time answers beside these for a CUDA library.
SHIMS_CUDA = frozenset(
    "aoti_torch_" + name
    for name in [
        "create_cuda_guard",
        "create_cuda_stream_guard",
        "cuda_guard_set_index",
        "delete_cuda_guard",
        "delete_cuda_stream_guard",
        "empty_strided_pinned",
        "get_current_cuda_stream",
    ]
)
# Of the CUDA run time and of the driver, what it answers: by shims of its own, so that neither need be there.
CUDA_SYMBOLS = frozenset(
    [
        "cudaEventCreate",
        "cudaEventDestroy",
        "cudaEventQuery",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaFree",
        "cudaGetDevice",
        "cudaGetErrorString",
        "cudaGetLastError",
        "cudaMalloc",
        "cudaMemcpy",
        "cudaMemcpyAsync",
        "cudaPointerGetAttributes",
        "cudaSetDevice",
        "cudaStreamSynchronize",
        "cuFuncSetAttribute",
        "cuGetErrorString",
        "cuLaunchKernel",
        "cuModuleGetFunction",
        "cuModuleLoadData",
        "cuModuleUnload",
    ]
)


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture that code can be made for.

    ``number`` is its compute capability without the point, 90 for 9.0. ``block_nbytes`` is the shared memory that
    one block may use, ``sm_nbytes`` that of one multiprocessor, ``sm_threads`` its resident threads: "Technical
    Specifications per Compute Capability" of the CUDA C++ Programming Guide.
    """

    number: int
    block_nbytes: int
    sm_nbytes: int
    sm_threads: int

    @property
    def name(self) -> str:
        """``sm_90``."""
        return f"sm_{self.number}"


ARCHITECTURES: Final = {
    a.name: a
    for a in (
        Architecture(75, 64 << 10, 64 << 10, 1024),
        Architecture(80, 163 << 10, 164 << 10, 2048),
        Architecture(86, 99 << 10, 100 << 10, 1536),
        Architecture(87, 163 << 10, 164 << 10, 1536),
        Architecture(89, 99 << 10, 100 << 10, 1536),
        Architecture(90, 227 << 10, 228 << 10, 2048),
        Architecture(100, 227 << 10, 228 << 10, 2048),
        Architecture(103, 227 << 10, 228 << 10, 2048),
        Architecture(120, 99 << 10, 100 << 10, 1536),
    )
}
# The last whose PTX, as Triton writes it, later ones take: from 9.0 on it is for one architecture alone.
LAST_PORTABLE = 89


def planned_on(device: Any) -> str | None:
    """Where islands' arguments are planned: "cuda:0", or None for host memory, which "cpu" says too. Raises OptionError."""
    if device not in (None, "cpu", "cuda:0"):
        raise OptionError(
            f"device: expected 'cuda:0', which stands for whichever device the program is loaded on, or 'cpu', got {device!r}; pass one of these"
        )
    return "cuda:0" if device == "cuda:0" else None


@dataclass(frozen=True, kw_only=True)
class Target:
    """What delegates compile for.

    ``kind``           ``host``: machine code for this kind of processor, run on the devices ``cpu`` and ``sim``.
                       ``cuda``: the same around GPU code, run on an NVIDIA GPU.
    ``march``          the instruction set, a micro-architecture level of the x86-64 psABI. The default runs on any
                       machine of the last ten years rather than on this one alone.
    ``architectures``  for ``cuda``: the GPUs that there is machine code for, ``("sm_80", "sm_90")``. It also runs on
                       GPUs of the same major version and a higher minor one, except from 9.0 on.
    ``ptx``            for ``cuda``: PTX is there too, which the driver compiles for any later GPU.

    Code for several architectures, or with PTX, is written for the lowest of them and uses nothing that came
    after 8.9.
    """

    kind: str = "host"
    march: str = PORTABLE
    architectures: tuple[str, ...] = ()
    ptx: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("host", "cuda"):
            raise NotSupported(
                f"target: expected kind 'host' or 'cuda', got {self.kind!r}; these are all this version has"
            )
        if self.march not in LEVELS:
            raise OptionError(
                f"target: expected march among {', '.join(LEVELS)}, got {self.march!r}; "
                f"name a micro-architecture level, {PORTABLE} if in doubt"
            )
        unknown = [name for name in self.architectures if name not in ARCHITECTURES]
        if unknown or len(set(self.architectures)) != len(self.architectures):
            raise OptionError(
                f"target: expected different architectures among {', '.join(ARCHITECTURES)}, got "
                f"{', '.join(self.architectures)}; name each once, as in 'cuda:sm_80+sm_90'"
            )
        if bool(self.architectures) != (self.kind == "cuda") or (self.ptx and self.kind != "cuda"):
            raise OptionError(
                f"target: expected architectures for 'cuda' and for it alone, got kind {self.kind!r} with "
                f"{', '.join(self.architectures) or 'none'}{' and PTX' if self.ptx else ''}; write 'cuda:sm_90'"
            )
        # One order, so that one set gives one program.
        ordered = tuple(sorted(self.architectures, key=lambda name: ARCHITECTURES[name].number))
        object.__setattr__(self, "architectures", ordered)

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that ``host``, ``host:x86-64-v4``, ``cuda:sm_90``, ``cuda:sm_80+sm_90`` or
        ``cuda:sm_80+ptx`` names. Raises OptionError."""
        kind, colon, rest = text.partition(":")
        if kind == "host" and bool(colon) == bool(rest):
            return cls(march=rest or PORTABLE)
        if kind == "cuda" and re.fullmatch(r"\w+(\+\w+)*", rest):
            names = rest.split("+")
            found = [name for name in names if name != "ptx"]
            if found and len(names) - len(found) < 2:
                return cls(kind="cuda", architectures=tuple(found), ptx="ptx" in names)
        raise OptionError(
            f"target {text!r}: expected 'host', 'host:LEVEL' or 'cuda:ARCHITECTURE', got neither; LEVEL is one of "
            f"{', '.join(LEVELS)}; ARCHITECTURE one or several of {', '.join(ARCHITECTURES)}, with + between them, "
            "and +ptx for PTX"
        )

    @property
    def text(self) -> str:
        """What ``parse`` takes."""
        if self.kind == "host":
            return "host" if self.march == PORTABLE else f"host:{self.march}"
        return "cuda:" + "+".join([*self.architectures, *(["ptx"] if self.ptx else [])])

    @property
    def vector_bits(self) -> int:
        """Width of the vectors that code for this target uses, in bits; 1 for none."""
        return LEVELS[self.march]

    @property
    def compute(self) -> Architecture:
        """What kernels are compiled for: the lowest architecture's number, at most 8.9 where more than one kind
        of code is made of it; and the least shared memory of all."""
        found = [ARCHITECTURES[name] for name in self.architectures]
        number = found[0].number
        if len(found) > 1 or self.ptx:
            number = min(number, LAST_PORTABLE)
        return Architecture(
            number,
            min(a.block_nbytes for a in found),
            min(a.sm_nbytes for a in found),
            min(a.sm_threads for a in found),
        )

    @property
    def code(self) -> tuple[str, ...]:
        """What the library's kernels are there as: ``sm_80`` for machine code, ``sm_90a`` where it uses what that
        architecture alone has, ``compute_80`` for PTX."""
        alone = self.compute.number > LAST_PORTABLE
        machine = [f"{name}a" if alone else name for name in self.architectures]
        return (*machine, *([f"compute_{self.compute.number}"] if self.ptx else []))

    @property
    def symbols(self) -> frozenset[str]:
        """What the run time answers; a library with another unversioned symbol will not load."""
        return SHIMS | SHIMS_CUDA | CUDA_SYMBOLS if self.kind == "cuda" else SHIMS
