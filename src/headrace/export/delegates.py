"""What the list of delegates holds: small frozen objects that say who takes what. Imports no torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ExportError, OptionError
from .target import Target

__all__ = ["Aoti", "Claims", "ExportDelegate", "Node", "Plan", "Profile", "Python", "TensorRT", "Xnnpack"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a delegate is told about the method that it is asked to take a part of.

    ``method`` is its name. ``device`` is where the arguments of islands that run on a device are planned
    ("cuda:0"), None for host memory. ``data_file`` names the data file, without ``.ptd``, that constants go into;
    None means into the program. ``stand_in``: the program is for a verification where no GPU is, so a delegate that
    needs one writes what it would have compiled, for the verifying process to compute.
    """

    method: str
    target: Target
    device: str | None
    data_file: str | None
    stand_in: bool = False


class ExportDelegate(Protocol):
    """Any object with this method may stand in the list of delegates; those below do more (``Claims``)."""

    def partitioner(self, plan: Plan) -> Any:
        """A fresh ``executorch.exir.backend.partitioner.Partitioner`` for one method."""


@dataclass(frozen=True)
class Node:
    """One operator of the graph, as a predicate sees it.

    ``name`` is the graph's; ``operator`` has its overload (``aten.add.Tensor``); ``module`` is the path of the module
    whose ``forward`` it is in (``layers.0.attention``, "" for the model itself); ``source`` the user's line or
    None. ``inputs`` and ``outputs`` are tensors as ``(dtype, shape)``, sizes that vary as text.
    """

    name: str
    operator: str
    module: str
    source: str | None
    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]
    outputs: tuple[tuple[str, tuple[int | str, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a delegate claims of the operators that it can compute and that nobody before it took.

    operators  names, with or without overload, with ``*``: ``aten.linear``, ``aten.add.Tensor``, ``aten.*pool2d``
    modules    paths of submodules, with ``*`` (which crosses dots): what is in one of them, however deep
    predicate  called with a ``Node``; says whether it is claimed
    exclude    names of operators that it leaves, as for ``operators``
    min_size   an island of fewer operators is given up to whoever comes after, in the end to the CPU kernels; not
               where an operator in it has no such kernel
    merge      whether islands that share no edge become one, where no cycle comes of it

    Where several are given, all have to hold. Given none, it claims all it can.
    """

    operators: Sequence[str] | None = None
    modules: Sequence[str] | None = None
    predicate: Callable[[Node], bool] | None = None
    exclude: Sequence[str] = ()
    min_size: int = 1
    merge: bool = True

    def __post_init__(self) -> None:
        who = type(self).__name__
        for option in ("operators", "modules", "exclude"):
            value = getattr(self, option)
            if isinstance(value, str) or not (
                value is None or (isinstance(value, Iterable) and all(isinstance(v, str) for v in value))
            ):
                raise OptionError(f"{who}, {option}: expected a list of names, got {value!r}; write [name]")
            # A frozen object is compared and hashed by its values.
            object.__setattr__(self, option, None if value is None else tuple(value))
        if self.predicate is not None and not callable(self.predicate):
            raise OptionError(
                f"{who}, predicate: expected a function of a node, got {self.predicate!r}; pass a function, or leave predicate out"
            )
        if isinstance(self.min_size, bool) or not isinstance(self.min_size, int) or self.min_size < 1:
            raise OptionError(
                f"{who}, min_size: expected an integer of 1 or more, got {self.min_size!r}; pass one"
            )

    @property
    def everything(self) -> bool:
        """Whether all that it can compute is claimed."""
        return self.operators is None and self.modules is None and self.predicate is None and not self.exclude

    def unclaimed(self, node: Node) -> str | None:
        """Why it does not claim ``node``; None where it does."""
        if self.operators is not None and not _named(node.operator, self.operators):
            return f"not among operators={list(self.operators)}"
        if _named(node.operator, self.exclude):
            return f"among exclude={list(self.exclude)}"
        if self.modules is not None and not _inside(node.module, self.modules):
            return f"not in modules={list(self.modules)}"
        if self.predicate is not None:
            name = getattr(self.predicate, "__qualname__", repr(self.predicate))
            try:
                claimed = self.predicate(node)
            except Exception as error:
                raise ExportError(
                    f"{node.name} ({node.operator}): expected predicate {name} to say whether it is claimed, got "
                    f"{type(error).__name__}: {error}; mend the predicate",
                    node=node.name,
                ) from error
            if not claimed:
                return f"predicate {name} says no"
        return None

    def matched(self, node: Node) -> set[tuple[str, str]]:
        """The patterns, each with its option, that match ``node``."""
        found = {("operators", one) for one in self.operators or () if _named(node.operator, [one])}
        return found | {("modules", one) for one in self.modules or () if _inside(node.module, [one])}

    @property
    def patterns(self) -> set[tuple[str, str]]:
        """All of them."""
        return {("operators", one) for one in self.operators or ()} | {
            ("modules", one) for one in self.modules or ()
        }

    @property
    def claimed(self) -> str:
        """Why it claims what it does, in words."""
        given = [
            f"{option}={list(value)}"
            for option in ("operators", "modules")
            if (value := getattr(self, option)) is not None
        ]
        if self.predicate is not None:
            given.append(f"predicate {getattr(self.predicate, '__qualname__', repr(self.predicate))}")
        return f"claimed by {', '.join(given)}" if given else "claimed: all that it can"


def _named(operator: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names the operator. The exporter makes views copies: ``aten.view`` names ``aten.view_copy``
    too."""
    packet = ".".join(operator.split(".")[:2])
    names = {operator, packet, operator.replace("_copy.", "."), packet.removesuffix("_copy")}
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _inside(module: str, patterns: Sequence[str]) -> bool:
    parts = module.split(".") if module else []
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))] or [""]
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns for path in paths)


@dataclass(frozen=True, kw_only=True)
class Aoti(Claims):
    """AOTInductor: compiled to machine code, one library for each island. It claims all that is left.

    An operator that its code would leave to libtorch is refused (ExportError): exclude it, or let a delegate before
    it take it. Building needs a C++ compiler.
    """

    name = "Aoti"

    def partitioner(self, plan: Plan) -> Any:
        """ExecuTorch's partitioner that takes everything that is left, whatever is claimed."""
        from .aoti import AotiPartitioner

        return AotiPartitioner(plan.target, method=plan.method, device=plan.device, data_file=plan.data_file)

    def lowering(self, plan: Plan) -> Any:
        from .aoti import AotiLowering

        return AotiLowering(self, plan)


@dataclass(frozen=True, kw_only=True)
class Xnnpack(Claims):
    """XNNPACK: the engine's own library for float32 and quantized operators on the host. Its islands' arguments are
    host memory, whatever ``device`` says."""

    name = "Xnnpack"

    def lowering(self, plan: Plan) -> Any:
        from .xnnpack import XnnpackLowering

        return XnnpackLowering(self, plan)


def _json(island: Any) -> bytes:
    payload: bytes = island.json()
    return payload


@dataclass(frozen=True)
class Python(Claims):
    """A delegate written in Python, ``class …(headrace.Delegate, name=name)``. It takes what it is told to take.

    name    the delegate's name in the program
    lower   makes an island's payload: a function from an ``IslandGraph`` to bytes. Default: ``IslandGraph.json``
    module  the module that defines the delegate's class, for the verification, which imports it
    specs   compile specs of each island, names to bytes; the class reads them from ``context.specs``

    One of ``operators``, ``modules`` and ``predicate`` has to be given: nobody else knows what it can compute.
    """

    name: str
    lower: Callable[[Any], bytes] = field(default=_json, kw_only=True)
    module: str | None = field(default=None, kw_only=True)
    specs: Mapping[str, bytes] = field(default_factory=dict, hash=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.name, str) or not self.name:
            raise OptionError(
                f"Python: expected a name, got {self.name!r}; name the delegate as its class does"
            )
        if self.operators is None and self.modules is None and self.predicate is None:
            raise OptionError(
                f"Python({self.name!r}): expected operators, modules or a predicate, got none; say what it takes"
            )

    def lowering(self, plan: Plan) -> Any:
        from .python import PythonLowering

        return PythonLowering(self, plan)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Sizes that an engine is built for: from ``min`` to ``max``, and fastest at ``opt``.

    Each maps inputs of the method, by name, to a whole shape. All three name the same inputs; what is left out has the
    bounds of the method's dynamic shapes, and the example's sizes in between.
    """

    min: Mapping[str, Sequence[int]] = field(hash=False)
    opt: Mapping[str, Sequence[int]] = field(hash=False)
    max: Mapping[str, Sequence[int]] = field(hash=False)

    def __post_init__(self) -> None:
        for which in ("min", "opt", "max"):
            value = getattr(self, which)
            if not isinstance(value, Mapping):
                raise OptionError(
                    f"Profile, {which}: expected a mapping of input names to shapes, got {value!r}; write {{'x': (1, 3, 224, 224)}}"
                )
            for name, shape in value.items():
                if isinstance(shape, str) or not (
                    isinstance(shape, Sequence) and all(type(size) is int and size >= 0 for size in shape)
                ):
                    raise OptionError(
                        f"Profile, {which}, {name!r}: expected a shape, integers of 0 or more, got {shape!r}; write a tuple such as (1, 3, 224, 224)"
                    )
            object.__setattr__(self, which, {name: tuple(shape) for name, shape in value.items()})
        for which in ("opt", "max"):
            if set(getattr(self, which)) != set(self.min):
                raise OptionError(
                    f"Profile, {which}: expected the inputs of min, {sorted(self.min)}, got "
                    f"{sorted(getattr(self, which))}; give all three for each input"
                )
        for name, low in self.min.items():
            opt, high = self.opt[name], self.max[name]
            if not len(low) == len(opt) == len(high):
                raise OptionError(
                    f"Profile, {name!r}: expected shapes of one rank, got min {low}, opt {opt}, max {high}; give each as many sizes as the input has"
                )
            for dim, sizes in enumerate(zip(low, opt, high, strict=True)):
                if not sizes[0] <= sizes[1] <= sizes[2]:
                    raise OptionError(
                        f"Profile, {name!r}, dimension {dim}: expected min <= opt <= max, got {sizes[0]}, {sizes[1]}, "
                        f"{sizes[2]}; order them so"
                    )


@dataclass(frozen=True, kw_only=True)
class TensorRT(Claims):
    """TensorRT: an engine for each island, which PyTorch's ONNX exporter and TensorRT's own ONNX parser make. It claims
    what both of them take, and needs ``onnx``, ``onnxscript`` and a builder.

    builder                 "tensorrt", which needs the GPU that it builds for; "tensorrt_rtx", which needs none. None:
                            the first where it is installed
    compute_capabilities    such as "8.6"; of TensorRT-RTX. None: those of ``target``, and all that it has where ``target``
                            is no GPU
    hardware_compatibility  of TensorRT: "none", "ampere_plus", "same_compute_capability"
    version_compatible      of TensorRT: the engine also loads in later versions, and in the lean runtime
    precision               "float16" or "bfloat16": what the model has in float32 is computed in that. None: as it is.
                            An island's inputs and results stay what they are
    tf32                    whether float32 products may be rounded to TF32
    profiles                sizes that engines are built for (``Profile``), where sizes vary. Empty: one, from the bounds
                            of the dynamic shapes
    optimization_level      how long the builder looks for fast code, 0 to 5. None: its own choice
    workspace_nbytes        the most that a layer may use of scratch memory on the device. None: no limit
    weight_streaming        weights may stay on the host and be streamed; how many is said when the program is loaded

    Quantized operators are taken as the model has them (int8, symmetric); nothing is quantized here.
    """

    builder: str | None = None
    compute_capabilities: Sequence[str] | None = None
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    precision: str | None = None
    tf32: bool = False
    profiles: Sequence[Profile] = ()
    optimization_level: int | None = None
    workspace_nbytes: int | None = None
    weight_streaming: bool = False

    name = "TensorRT"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, known in (
            ("builder", (None, "tensorrt", "tensorrt_rtx")),
            ("hardware_compatibility", ("none", "ampere_plus", "same_compute_capability")),
            ("precision", (None, "float16", "bfloat16")),
            ("optimization_level", (None, 0, 1, 2, 3, 4, 5)),
        ):
            value = getattr(self, option)
            if isinstance(value, bool) or value not in known:
                raise OptionError(
                    f"TensorRT, {option}: expected one of {', '.join(map(repr, known))}, got {value!r}; pass one of these"
                )
        for option in ("version_compatible", "tf32", "weight_streaming"):
            if not isinstance(getattr(self, option), bool):
                raise OptionError(
                    f"TensorRT, {option}: expected True or False, got {getattr(self, option)!r}; pass one of these"
                )
        limit = self.workspace_nbytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise OptionError(
                f"TensorRT, workspace_nbytes: expected bytes, 0 or more, got {limit!r}; pass an int, or None for the builder's own limit"
            )
        asked = self.compute_capabilities
        if asked is not None:
            if isinstance(asked, str) or not all(
                isinstance(one, str) and re.fullmatch(r"\d+\.\d", one) for one in asked
            ):
                raise OptionError(
                    f'TensorRT, compute_capabilities: expected a list such as ["8.6", "8.9"], got {asked!r}; pass a list of these'
                )
            if not asked or len(set(asked)) < len(asked):
                raise OptionError(
                    f"TensorRT, compute_capabilities: expected at least one, each once, got {list(asked)}; name each GPU once, or leave compute_capabilities out"
                )
            object.__setattr__(self, "compute_capabilities", tuple(asked))
        if isinstance(self.profiles, Profile) or not all(isinstance(p, Profile) for p in self.profiles):
            raise OptionError(
                f"TensorRT, profiles: expected a list of Profile(…), got {self.profiles!r}; pass a list, or None for one profile from dynamic_shapes"
            )
        object.__setattr__(self, "profiles", tuple(self.profiles))
        if self.builder == "tensorrt" and asked is not None:
            raise OptionError(
                "TensorRT, compute_capabilities: expected none with builder='tensorrt', which builds for the GPU that is "
                f"there, got {list(asked)}; see hardware_compatibility, or builder='tensorrt_rtx'"
            )
        if self.builder == "tensorrt_rtx":
            for option, plain in (("hardware_compatibility", "none"), ("version_compatible", False)):
                if getattr(self, option) != plain:
                    raise OptionError(
                        f"TensorRT, {option}: expected {plain!r} with builder='tensorrt_rtx', got "
                        f"{getattr(self, option)!r}; name compute_capabilities"
                    )

    def lowering(self, plan: Plan) -> Any:
        from .tensorrt import TensorRTLowering

        return TensorRTLowering(self, plan)
