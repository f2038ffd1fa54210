"""TensorRT: an island becomes an ONNX graph by PyTorch's exporter, and an engine by TensorRT's parser and builder.

The delegate's id is ``TensorRTBackend``; its payload is that of ``headrace.pte.tensorrt``. Imports torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator as builtin
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..errors import ExportError, HeadraceError, OptionError
from ..pte import INPUTS_SPEC
from ..pte import tensorrt as blob
from . import engines, onnx_graph, profiles, progress
from .aoti import DEVICE_SPEC
from .cache import current
from .delegates import Plan, TensorRT
from .node import described
from .partition import Lowering
from .shapes import Shapes

__all__ = ["BACKEND", "TensorRTLowering"]

BACKEND = blob.DELEGATE
# For the compilation alone, never in a program: which delegate of the list compiles.
LOWER_SPEC = "headrace.tensorrt"

_numbers = itertools.count()
# Those of exports under way: each holds its model.
_lowerings: weakref.WeakValueDictionary[str, TensorRTLowering] = weakref.WeakValueDictionary()
# What was said of single operators, by builder, settings and content.
_refusals: dict[str, str | None] = {}


class TensorRTLowering(Lowering):
    """It can compute what PyTorch's exporter has ONNX for and TensorRT's parser accepts: each operator is tried alone."""

    backend = BACKEND
    claims: TensorRT
    device: str

    def __init__(self, claims: TensorRT, plan: Plan) -> None:
        super().__init__(claims, plan)
        if plan.device is None:
            raise OptionError(
                "device: expected 'cuda:0' with TensorRT(), got None; its islands' arguments lie on the GPU"
            )
        self.device = plan.device
        self.builder = engines.named(claims.builder)
        self.settings = _settings(claims, plan, self.builder)
        self.ranges: list[profiles.Ranges] = []
        self._seen: ExportedProgram | None = None
        # For each node the key of what was asked, or why nothing was.
        self._asked: dict[torch.fx.Node, str] = {}
        self.key = str(next(_numbers))
        _lowerings[self.key] = self

    def specs(self) -> list[CompileSpec]:
        return [CompileSpec(LOWER_SPEC, self.key.encode()), CompileSpec(DEVICE_SPEC, self.device.encode())]

    def keeps(self, program: ExportedProgram) -> Any:
        """What is claimed and what the parser takes whole; the rest is decomposed, and asked about again."""
        self._see(program)
        operators, _ = super().keeps(program)
        kept = set(operators)
        seen: set[torch.fx.Graph] = set()

        def whole(node: torch.fx.Node) -> bool:
            # The exporter asks about one graph after another, on its way down.
            if node.graph not in seen:
                seen.add(node.graph)
                self._try([n for n in node.graph.nodes if n.target in kept and self._claims(n)], program)
            # About every node, results of an operator among them.
            return node.target in kept and self._claims(node) and self._refusal(node, program) is None

        return operators, whole

    def refuses(self, node: torch.fx.Node, program: ExportedProgram) -> str | None:
        if self._see(program):
            self._try([n for n in program.graph.nodes if self._claims(n)], program)
        return _order(node) or self._refusal(node, program)

    def _see(self, program: ExportedProgram) -> bool:
        """Take the bounds of its sizes from a program. Whether it is another than the last."""
        if program is self._seen:
            return False
        self._seen = program
        self._asked.clear()
        if not self.ranges:
            self.ranges = profiles.ranges(self.plan.method, program, self.claims.profiles)
        else:
            # A trace of a trace takes 2 for the least of what may be 1; the first program has the user's bounds.
            (later,) = profiles.ranges(self.plan.method, program, ())
            self.ranges = [{**later, **one} for one in self.ranges]
        return True

    def _refusal(self, node: torch.fx.Node, program: ExportedProgram) -> str | None:
        """Why the operator alone cannot be taken, in the words of whoever refuses it."""
        if node.target is builtin.getitem and isinstance(node.args[0], torch.fx.Node):
            return self._refusal(node.args[0], program)
        if node not in self._asked:
            self._try([node], program)
        key = self._asked[node]
        return _refusals.get(key, key)

    def _single(self, node: torch.fx.Node, program: ExportedProgram) -> ExportedProgram | str:
        """The operator alone; or why it is not even asked about."""
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return "it gives a number"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return "control flow"
        if why := _dtype(node) or _unbacked(node) or _random(node):
            return why
        try:
            single = onnx_graph.alone(node, program)
            self._key(single)
        except onnx_graph.Untranslated as error:
            return str(error)
        except Exception as error:  # whatever the graph has that nobody foresaw: the next delegate is asked
            return _unforeseen(node.name, error)
        return single

    def _key(self, single: ExportedProgram) -> str:
        said = (self.builder.runtime, self.builder.version, self.settings, self.claims.precision)
        return f"{onnx_graph.key(single)} {said} {self._sizes(single)}"

    def _sizes(self, single: ExportedProgram) -> list[list[engines.Sizes]]:
        wanted = set(single.graph_signature.user_inputs)
        try:
            return profiles.sizes(
                self.plan.method, [n for n in single.graph.nodes if n.name in wanted], self.ranges
            )
        except ExportError:
            return []  # of no upper bound; the island that it is in says so

    def _try(self, nodes: Sequence[torch.fx.Node], program: ExportedProgram) -> None:
        """Ask about all operators that nobody has asked about yet: side by side in one graph, since most of the time
        goes into the first steps of an export, whatever its size; then each by the parser alone."""
        asked: dict[str, ExportedProgram] = {}
        for node in nodes:
            if node in self._asked or node.target is builtin.getitem:
                continue
            single = self._single(node, program)
            if isinstance(single, str):
                self._asked[node] = single
                continue
            key = self._asked[node] = self._key(single)
            if key not in _refusals:
                asked[key] = single
        while asked:
            keys = list(asked)
            try:
                model = onnx_graph.to_onnx(onnx_graph.together(list(asked.values())), self.claims.precision)
            except onnx_graph.Untranslated as error:
                at = re.match(r"p(\d+)_", error.node or "")
                if at is not None or len(asked) == 1:
                    culprit = keys[int(at[1]) if at else 0]
                    _refusals[culprit] = f"PyTorch's ONNX exporter: {error}"
                    del asked[culprit]
                    continue
                self._each(asked)
                return
            except HeadraceError:
                raise
            except Exception:
                self._each(asked)
                return
            onnx_graph.origins(model)
            counts = [len(single.graph_signature.user_outputs) for single in asked.values()]
            for key, part in zip(keys, onnx_graph.parts(model, counts), strict=True):
                _refusals[key] = self._answer(part, asked[key])
            return

    def _each(self, asked: Mapping[str, ExportedProgram]) -> None:
        for key, single in asked.items():
            _refusals[key] = self._tried(single)

    def _tried(self, single: ExportedProgram) -> str | None:
        try:
            model = onnx_graph.to_onnx(single, self.claims.precision)
        except onnx_graph.Untranslated as error:
            return f"PyTorch's ONNX exporter: {error}"
        except HeadraceError:
            raise
        except Exception as error:
            return _unforeseen(_operator(single), error)
        return self._answer(model, single)

    def _answer(self, model: Any, single: ExportedProgram) -> str | None:
        sizes = self._sizes(single)
        if not sizes and _varies(single):
            return self.builder.refusal(model.SerializeToString(), parse_only=True)
        return self.builder.refusal(model.SerializeToString(), sizes, self.settings)


def _settings(claims: TensorRT, plan: Plan, builder: engines.Builder) -> engines.Settings:
    known = builder.compute_capabilities
    asked = claims.compute_capabilities
    if asked is None and builder.runtime == "tensorrt_rtx" and plan.target.kind == "cuda":
        asked = tuple(f"{a.removeprefix('sm_')[:-1]}.{a[-1]}" for a in plan.target.architectures)
    asked = asked or ()
    if missing := [one for one in asked if one not in known]:
        raise ExportError(
            f"{plan.method}, TensorRT, compute capability {', '.join(missing)}: expected one that {builder.runtime} "
            f"{builder.version} builds for, {', '.join(known) or 'that of the GPU that is there'}; choose a target with these, "
            "or builder='tensorrt' on a machine with that GPU"
        )
    for option, plain in (("hardware_compatibility", "none"), ("version_compatible", False)):
        if builder.runtime != "tensorrt" and getattr(claims, option) != plain:
            raise OptionError(
                f"TensorRT, {option}: expected {plain!r} with {builder.runtime}, got {getattr(claims, option)!r}; name "
                "compute_capabilities, or install tensorrt"
            )
    return engines.Settings(
        compute_capabilities=tuple(asked),
        hardware_compatibility=claims.hardware_compatibility,
        version_compatible=claims.version_compatible,
        tf32=claims.tf32,
        optimization_level=claims.optimization_level,
        workspace_nbytes=claims.workspace_nbytes,
        weight_streaming=claims.weight_streaming,
    )


def _unforeseen(name: str, error: Exception) -> str:
    return f"{name} alone could not be written as ONNX, {type(error).__name__}: {error}"


def _operator(single: ExportedProgram) -> str:
    """The name of the node that a program of one operator was made of."""
    return next(
        str(n.name) for n in single.graph.nodes if n.op == "call_function" and n.target is not builtin.getitem
    )


# -------------------- what an operator has to be


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """What it takes, and what is used of what it gives."""
    value = node.meta.get("val")
    several = isinstance(value, (tuple, list))
    given = [n.meta.get("val") for n in node.users if n.target is builtin.getitem] if several else [value]
    taken = [n.meta.get("val") for n in node.all_input_nodes]
    return [v for v in (*given, *taken) if isinstance(v, torch.Tensor)]


def _dtype(node: torch.fx.Node) -> str | None:
    names = {str(t.dtype).removeprefix("torch.") for t in _tensors(node)}
    unknown = sorted(names - set(blob.DTYPES.values()))
    return f"TensorRT has no {', '.join(unknown)}" if unknown else None


def _unbacked(node: torch.fx.Node) -> str | None:
    """Sizes have to be known before an island has run."""
    for tensor in _tensors(node):
        if free_unbacked_symbols(tensor.shape):
            return "a size that depends on data"
    return None


def _random(node: torch.fx.Node) -> str | None:
    target: Any = getattr(node.target, "_op", node.target)
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return "random numbers, which would not be eager PyTorch's"
    return None


def _varies(program: ExportedProgram) -> bool:
    return any(
        isinstance(size, torch.SymInt)
        for n in program.graph.nodes
        if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)
        for size in n.meta["val"].shape
    )


def _order(node: torch.fx.Node) -> str | None:
    if any(not tensor.is_contiguous() for tensor in _tensors(node)):
        return "a tensor in another order than that of its dimensions"
    return None


# -------------------- one island


def _preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
    """Build one island's engine; ``compile_specs`` is the list that goes into the program, completed here.

    Raises ExportError where the exporter, the parser or the builder refuses the island as a whole.
    """
    (key,) = [spec.value.decode() for spec in compile_specs if spec.key == LOWER_SPEC]
    lowering = _lowerings[key]
    method = lowering.plan.method
    nodes = {n.name: n for n in edge_program.graph.nodes if n.op == "call_function"}
    counted = [n for n in nodes.values() if n.target is not builtin.getitem]
    progress.report(f"{method}: TensorRT, an island of {len(counted)} operators")
    inputs, results = _ends(method, edge_program)
    try:
        model = onnx_graph.to_onnx(edge_program, lowering.claims.precision)
    except onnx_graph.Untranslated as error:
        at = [nodes[error.node]] if error.node in nodes else counted
        raise _refused(method, "PyTorch's ONNX exporter to translate", str(error), at) from error
    origins = onnx_graph.origins(model)
    graph = model.SerializeToString(deterministic=True)
    wanted = _bindings(inputs, results, model)
    # Only asked for where a size varies.
    sizes = profiles.sizes(method, inputs, lowering.ranges)
    try:
        engine = _engine(lowering, graph, sizes)
    except engines.Unbuilt as error:
        at = [nodes[origins[name]] for name in error.nodes if origins.get(name) in nodes]
        raise _refused(method, "TensorRT to build", str(error), at or counted, error.log) from error
    data, bindings = engine
    if bindings != wanted:
        raise ExportError(
            f"{method}, TensorRT: expected an engine with the bindings {_listed(wanted)}, got {_listed(bindings)}; "
            "report this with the model",
            node=counted[0].name if counted else None,
        )
    built = lowering.builder.built(lowering.settings)
    payload = blob.write(
        graph if lowering.plan.stand_in else data,
        bindings,
        hardware_compatible=lowering.settings.hardware_compatibility != "none",
        built=built,
    )
    # The engine does not mark where a delegate's inputs end. The list is the one that goes into the program.
    compile_specs[:] = [spec for spec in compile_specs if spec.key != LOWER_SPEC]
    compile_specs.append(CompileSpec(INPUTS_SPEC, str(len(inputs)).encode()))
    return PreprocessResult(processed_bytes=payload)


# Kept by name: the exporter finds backends among the direct subclasses of BackendDetails, held weakly.
TensorRTBackend = type(
    BACKEND, (BackendDetails,), {"__module__": __name__, "preprocess": staticmethod(_preprocess)}
)


def _ends(method: str, program: ExportedProgram) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The nodes of the island's inputs and results. Their sizes are known before a call."""
    signature = program.graph_signature
    wanted = set(signature.user_inputs)
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted]
    results = list(program.graph.output_node().args[0])
    for node in (*inputs, *results):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise ExportError(
                f"{method}, {node.name}: expected tensors between delegates, got a {type(value).__name__}; let one "
                "delegate take both sides of it",
                node=node.name,
            )
    try:
        Shapes([n.meta["val"].shape for n in inputs], [n.meta["val"].shape for n in results])
    except ValueError as error:
        raise ExportError(
            f"{method}: expected sizes of results that the sizes of inputs determine, got {error}; keep operators whose "
            "result size depends on data out of this delegate",
            node=results[0].name,
        ) from None
    return inputs, results


def _bindings(
    inputs: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node], model: Any
) -> tuple[blob.Binding, ...]:
    """What the engine's bindings have to be: dtypes and shapes are the program's, names the ONNX graph's."""
    names = [value.name for value in (*model.graph.input, *model.graph.output)]
    found = []
    for i, (name, node) in enumerate(zip(names, (*inputs, *results), strict=True)):
        tensor = node.meta["val"]
        shape = tuple(-1 if isinstance(size, torch.SymInt) else int(size) for size in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append(blob.Binding(name, i < len(inputs), dtype, shape))
    return tuple(found)


def _listed(bindings: Sequence[blob.Binding]) -> str:
    return ", ".join(f"{b.name} {b.dtype}{list(b.shape)}" for b in bindings)


def _engine(
    lowering: TensorRTLowering, graph: bytes, sizes: Sequence[Sequence[engines.Sizes]]
) -> tuple[bytes, tuple[blob.Binding, ...]]:
    """The engine for an ONNX graph, from the cache where it is there: builders give other bytes each time."""
    builder, method = lowering.builder, lowering.plan.method
    if lowering.plan.stand_in:
        return b"", builder.bindings(graph)
    store = current()
    said = [builder.runtime, builder.version, asdict(lowering.settings), sizes, _sources()]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    digest.update(hashlib.sha256(graph).digest())
    name = f"tensorrt-{digest.hexdigest()}"
    if store is not None and (kept := store.read(name)) is not None:
        header, (engine,) = kept
        progress.report(f"{method}: TensorRT, from the cache")
        return engine, tuple(
            blob.Binding(b["name"], b["is_input"], b["dtype"], tuple(b["shape"])) for b in header["bindings"]
        )
    engine, bindings = builder.build(f"{method}: TensorRT", graph, sizes, lowering.settings, store)
    if store is not None:
        store.write(name, {"bindings": [asdict(b) for b in bindings]}, [engine])
    return engine, bindings


def _sources() -> str:
    """The code that decides how an engine is built."""
    return hashlib.sha256(Path(engines.__file__).read_bytes()).hexdigest()


def _refused(
    method: str, what: str, words: str, nodes: Sequence[torch.fx.Node], log: Sequence[str] = ()
) -> ExportError:
    few = "; ".join(map(described, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    return ExportError(
        f"{method}: expected {what} the island of {few}, got: {words}; exclude the operator at fault, "
        "TensorRT(exclude=[…]), or write it differently",
        node=nodes[0].name if nodes else None,
        log=log,
    )
