"""What a program is compiled for: the machine, and where its buffers are planned."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import NotSupported, OptionError

__all__ = ["PORTABLE", "SHIMS", "Target"]

# AVX2, FMA and F16C: every x86-64 server and laptop processor since 2013 (Intel) or 2015 (AMD). The level is
# defined in the x86-64 psABI, "micro-architecture levels".
PORTABLE = "x86-64-v3"
# Micro-architecture level -> width in bits of the vectors that Inductor writes code for; 1 is no vectors.
LEVELS = {"x86-64": 1, "x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}

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


@dataclass(frozen=True, kw_only=True)
class Target:
    """What delegates compile for.

    ``kind``   ``host``: machine code for this kind of processor, run on the devices ``cpu`` and ``sim``.
    ``march``  the instruction set, a micro-architecture level of the x86-64 psABI. The default runs on any
               machine of the last ten years rather than on this one alone.
    """

    kind: str = "host"
    march: str = PORTABLE

    def __post_init__(self) -> None:
        if self.kind != "host":
            raise NotSupported(
                f"target: expected kind 'host', got {self.kind!r}; host is all this version has"
            )
        if self.march not in LEVELS:
            raise OptionError(
                f"target: expected march among {', '.join(LEVELS)}, got {self.march!r}; "
                f"name a micro-architecture level, {PORTABLE} if in doubt"
            )

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that ``host`` or ``host:x86-64-v4`` names. Raises OptionError or its NotSupported."""
        kind, colon, march = text.partition(":")
        if kind == "cuda":
            raise NotSupported(
                f"target {text!r}: expected 'host', got a GPU; export for the host, or by the stock "
                "exporter's CudaPartitioner, whose programs load here too"
            )
        if kind != "host" or (colon and not march):
            raise OptionError(
                f"target {text!r}: expected 'host' or 'host:LEVEL', got neither; LEVEL is one of "
                f"{', '.join(LEVELS)}"
            )
        return cls(kind=kind, march=march or PORTABLE)

    @property
    def vector_bits(self) -> int:
        """Width of the vectors that code for this target uses, in bits; 1 for none."""
        return LEVELS[self.march]
