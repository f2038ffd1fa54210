"""Delegates in Python: an island as a list of steps, and the payload that is made of it. Imports torch."""

from __future__ import annotations

import base64
import itertools
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from ..errors import ExportError, OptionError
from ..pte import INPUTS_SPEC
from . import progress
from .node import operator
from .partition import Lowering

__all__ = ["IslandGraph", "PythonLowering", "Ref", "Step", "TensorSpec"]

# For the compilation alone, never in a program: which delegate of the list makes the payload.
LOWER_SPEC = "headrace.lower"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of an island: its dtype by PyTorch's name, and its sizes, as text where they vary."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Ref:
    """An argument that is a value: an input, a constant, or the result of a step before. ``index`` is the one taken
    of several results, None for the only one."""

    name: str
    index: int | None = None


@dataclass(frozen=True)
class Step:
    """One operator: ``aten.addmm.default``. Arguments are ``Ref``, numbers, text (dtypes by PyTorch's name), None, or
    tuples of these."""

    name: str
    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class IslandGraph:
    """What a Python delegate is given to compute, in an order in which each step has its arguments.

    ``inputs`` are the tensors that ``Delegate.run`` is called with; ``outputs`` say which value each result is.
    ``constants`` are the model's, by the names that steps use, in C order; bfloat16 ones are bit patterns,
    uint16 (``dtypes`` has the name of each).
    """

    method: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[tuple[TensorSpec, Ref], ...]
    steps: tuple[Step, ...]
    constants: Mapping[str, np.ndarray[Any, Any]]
    dtypes: Mapping[str, str]

    def json(self) -> bytes:
        """All of it as JSON, UTF-8. A value is ``{"value": name}``, with ``"index"`` where one of several results is
        meant; a constant ``{"dtype", "shape", "data"}``, its little-endian bytes in base64."""
        constants = {
            name: {
                "dtype": self.dtypes[name],
                "shape": list(array.shape),
                "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
            }
            for name, array in self.constants.items()
        }
        body = {
            "inputs": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in self.inputs],
            "outputs": [{"dtype": t.dtype, "shape": list(t.shape), **_plain(ref)} for t, ref in self.outputs],
            "constants": constants,
            "steps": [
                {"name": s.name, "operator": s.operator, "args": _plain(s.args), "kwargs": _plain(s.kwargs)}
                for s in self.steps
            ],
        }
        return json.dumps(body, allow_nan=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"value": value.name} | ({} if value.index is None else {"index": value.index})
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


class PythonLowering(Lowering):
    """It can compute what it is told to; what it cannot put into a payload, ``lower`` says by raising."""

    def __init__(self, claims: Any, plan: Any) -> None:
        super().__init__(claims, plan)
        self.device = plan.device
        self.backend = _backend(claims.name)
        self.key = str(next(_numbers))
        _lowerings[self.key] = self

    def refuses(self, node: torch.fx.Node, program: ExportedProgram) -> str | None:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return "control flow"
        values = [a.meta.get("val") for a in node.all_input_nodes]
        wrong = [v for v in values if isinstance(v, (tuple, list)) and not isinstance(v, torch.Size)]
        return "it takes a list of results" if wrong else None

    def specs(self) -> list[CompileSpec]:
        specs = [CompileSpec(LOWER_SPEC, self.key.encode())]
        if self.device is not None:
            specs.append(CompileSpec("target_device", self.device.encode()))
        return specs + [CompileSpec(name, bytes(value)) for name, value in self.claims.specs.items()]  # type: ignore[attr-defined]


# Native ones, whether or not anybody has imported their exporters.
TAKEN = frozenset({"XnnpackBackend", "CudaBackend"})
_numbers = itertools.count()
# Those of exports under way: each holds its model.
_lowerings: weakref.WeakValueDictionary[str, PythonLowering] = weakref.WeakValueDictionary()
_backends: dict[str, type] = {}


def _backend(name: str) -> str:
    """The exporter's side of the delegate ``name``: it finds backends by class name among the direct subclasses of
    BackendDetails, which it holds weakly."""
    if name not in _backends:
        others = [k for k in BackendDetails.__subclasses__() if k.__module__ != __name__]
        if name in TAKEN or any(kind.__name__ == name for kind in others):
            raise OptionError(
                f"Python({name!r}): expected a name of its own, got that of a backend of ExecuTorch's; choose another"
            )
        _backends[name] = type(
            name, (BackendDetails,), {"__module__": __name__, "preprocess": staticmethod(_preprocess)}
        )
    return name


def _preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
    (key,) = [spec.value.decode() for spec in compile_specs if spec.key == LOWER_SPEC]
    lowering = _lowerings[key]
    claims: Any = lowering.claims
    island = _island(lowering.plan.method, edge_program)
    progress.report(f"{island.method}: {claims.name}, an island of {len(island.steps)} operators")
    try:
        payload = claims.lower(island)
    except ExportError:
        raise
    except Exception as error:
        steps = ", ".join(dict.fromkeys(s.operator for s in island.steps))
        raise ExportError(
            f"{island.method}, {claims.name}: expected lower() to make a payload of {steps}, got "
            f"{type(error).__name__}: {error}; claim what it can compute",
            node=island.steps[0].name if island.steps else None,
        ) from error
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise ExportError(
            f"{island.method}, {claims.name}: expected bytes from lower(), got {type(payload).__name__}; let lower() return the island's payload as bytes"
        )
    # The engine does not mark where a delegate's inputs end. The list is the one that goes into the program.
    compile_specs[:] = [spec for spec in compile_specs if spec.key != LOWER_SPEC]
    compile_specs.append(CompileSpec(INPUTS_SPEC, str(len(island.inputs)).encode()))
    return PreprocessResult(processed_bytes=bytes(payload))


def _island(method: str, program: ExportedProgram) -> IslandGraph:
    signature = program.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    stores = {**program.state_dict, **program.constants}
    inputs: list[TensorSpec] = []
    steps: list[Step] = []
    constants: dict[str, np.ndarray[Any, Any]] = {}
    dtypes: dict[str, str] = {}
    refs: dict[torch.fx.Node, Ref] = {}
    outputs: list[tuple[TensorSpec, Ref]] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            refs[node] = Ref(node.name)
            if node.name in lifted:
                tensor = stores[lifted[node.name]].detach().cpu().contiguous()
                dtypes[node.name] = str(tensor.dtype).removeprefix("torch.")
                bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
                constants[node.name] = bits.numpy()
            else:
                inputs.append(_spec(method, node))
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            refs[node] = Ref(refs[node.args[0]].name, int(node.args[1]))
        elif node.op == "call_function":
            refs[node] = Ref(node.name)
            steps.append(
                Step(
                    node.name,
                    operator(node),
                    _value(node.args, refs),
                    {k: _value(v, refs) for k, v in node.kwargs.items()},
                )
            )
        elif node.op == "output":
            outputs = [(_spec(method, result), refs[result]) for result in node.args[0]]
    return IslandGraph(method, tuple(inputs), tuple(outputs), tuple(steps), constants, dtypes)


def _spec(method: str, node: torch.fx.Node) -> TensorSpec:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ExportError(
            f"{method}, {node.name}: expected tensors between delegates, got a {type(value).__name__}; let one "
            "delegate take both sides of it",
            node=node.name,
        )
    shape = tuple(str(s) if isinstance(s, torch.SymInt) else int(s) for s in value.shape)
    return TensorSpec(node.name, str(value.dtype).removeprefix("torch."), shape)


def _value(value: Any, refs: Mapping[torch.fx.Node, Ref]) -> Any:
    if isinstance(value, torch.fx.Node):
        return refs[value]
    if isinstance(value, (list, tuple)):
        return tuple(_value(v, refs) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")
