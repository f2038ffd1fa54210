"""The bindings of a TensorRT engine, as engine and payload agree on them, and the shapes that its profiles admit."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DelegateError, ProgramError
from ..pte.tensorrt import DTYPES, Blob
from .nvinfer import Engine, LoadedEngine

__all__ = [
    "EXPORT_AGAIN",
    "REPORT",
    "Profiles",
    "Tensor",
    "check_platform",
    "is_dense",
    "tensors_of",
]

EXPORT_AGAIN = "export it again"
# What no program, and no caller, can be the reason of.
REPORT = "report this with the program and the versions that `headrace doctor` prints"


@dataclass(frozen=True)
class Tensor:
    """One binding. ``shape``: -1 where a size varies. ``on_host``: the engine reads or writes it on the host."""

    name: str
    is_input: bool
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    alias: str = ""  # of an output: the input that it is written over


def tensors_of(loaded: LoadedEngine, blob: Blob) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs and outputs in the order of the island's arguments, as engine and payload agree on them."""
    module, engine = loaded.module, loaded.engine
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = {n for n in names if engine.get_tensor_mode(n) == module.TensorIOMode.INPUT}
    bindings = blob.bindings
    order = [b.name for b in bindings] if bindings else names
    said = {b.name for b in blob.inputs} if bindings else inputs
    if set(order) != set(names) or said != inputs:
        raise ProgramError(
            f"expected the bindings of the engine, inputs {sorted(inputs)} and outputs {sorted(set(names) - inputs)}, "
            f"got inputs {sorted(said)} and outputs {sorted(set(order) - said)}; {EXPORT_AGAIN}"
        )
    aliases = {a.output: a for a in blob.aliased}
    asks = getattr(engine, "get_aliased_input_tensor", lambda name: None)
    found = []
    for name in order:
        where = f"{'input' if name in inputs else 'output'} '{name}'"
        kind = engine.get_tensor_dtype(name).name
        if kind not in DTYPES:
            raise ProgramError(
                f"{where}: expected an element type that tensors have, got {kind}; export it with another"
            )
        shape = tuple(int(n) for n in engine.get_tensor_shape(name))
        binding = next((b for b in bindings if b.name == name), None)
        if binding is not None:
            told = binding.dtype or DTYPES[kind], binding.shape or shape
            same = len(told[1]) == len(shape) and all(
                a in (b, -1) or b == -1 for a, b in zip(told[1], shape, strict=False)
            )
            if told[0] != DTYPES[kind] or not same:
                raise ProgramError(
                    f"{where}: expected {DTYPES[kind]}{list(shape)}, as the engine has it, got "
                    f"{told[0]}{list(told[1])}; {EXPORT_AGAIN}"
                )
        if engine.get_tensor_vectorized_dim(name) != -1:
            raise ProgramError(f"{where}: expected a linear layout, got a vectorized one; {EXPORT_AGAIN}")
        on_host = engine.get_tensor_location(name) == module.TensorLocation.HOST
        alias = aliases[name].input if name in aliases else ""
        engines = asks(name) if name not in inputs else None
        if (engines or "") != ("" if name in aliases and aliases[name].kind == "user" else alias):
            raise ProgramError(
                f"{where}: expected to be written over {engines!r}, as the engine has it, got aliased_io of "
                f"{alias or None!r}; {EXPORT_AGAIN}"
            )
        found.append(Tensor(name, name in inputs, DTYPES[kind], shape, on_host, alias))
    by_name = {t.name: t for t in found}
    for output in found:
        source = by_name[output.alias] if output.alias else output
        if output.alias and ((source.shape, source.dtype) != (output.shape, output.dtype) or source.on_host):
            raise ProgramError(
                f"output '{output.name}': expected the shape and dtype of input '{output.alias}', which it is written "
                f"over, {source.dtype}{list(source.shape)} on a device, got {output.dtype}{list(output.shape)}; {EXPORT_AGAIN}"
            )
    return tuple(t for t in found if t.is_input), tuple(t for t in found if not t.is_input)


@dataclass
class Profiles:
    """Least, best and greatest shapes of each input under each optimization profile."""

    by_number: list[list[tuple[tuple[int, ...], ...]]]

    @staticmethod
    def of(engine: Engine, inputs: Sequence[Tensor]) -> Profiles:
        def bounds(tensor: Tensor, number: int) -> tuple[tuple[int, ...], ...]:
            if -1 not in tensor.shape:
                return (tensor.shape,) * 3
            return tuple(tuple(map(int, d)) for d in engine.get_tensor_profile_shape(tensor.name, number))

        return Profiles([[bounds(t, p) for t in inputs] for p in range(engine.num_optimization_profiles)])

    def best(self, inputs: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> int:
        """The number of the profile whose best shapes are nearest to these, by ratio, among those that admit them."""

        def distance(profile: list[tuple[tuple[int, ...], ...]]) -> float:
            away = 0.0
            for (_, best, _), shape in zip(profile, shapes, strict=True):
                for a, b in zip(best, shape, strict=True):
                    away += abs(np.log((a + 1) / (b + 1)))
            return away

        fitting = [
            (distance(profile), number)
            for number, profile in enumerate(self.by_number)
            if all(
                len(least) == len(shape)
                and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
                for (least, _, most), shape in zip(profile, shapes, strict=True)
            )
        ]
        if fitting:
            return min(fitting)[1]
        for i, (tensor, shape) in enumerate(zip(inputs, shapes, strict=True)):
            spans = [profile[i] for profile in self.by_number]
            if not any(
                len(shape) == len(least)
                and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
                for least, _, most in spans
            ):
                said = " or ".join(f"{list(least)} to {list(most)}" for least, _, most in spans)
                raise DelegateError(
                    f"input {i} '{tensor.name}': expected a shape from {said}, the engine's optimization profiles, got "
                    f"{list(shape)}; call it with another, or export it with wider bounds"
                )
        raise DelegateError(
            f"inputs: expected shapes that one of {len(self.by_number)} optimization profiles admits together, got "
            f"{', '.join(str(list(s)) for s in shapes)}; export it with a profile for them"
        )


def check_platform(blob: Blob) -> None:
    here = f"linux_{platform.machine()}"
    if blob.target_platform not in ("", "unknown", here):
        raise ProgramError(
            f"expected an engine for {here}, got one built for {blob.target_platform}; export it for this platform"
        )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return 0 in shape
        step *= size
    return True
