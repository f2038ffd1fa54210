"""Islands as ONNX graphs, by PyTorch's own exporter. Imports torch, and onnx once it is asked for."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from ..errors import ExportError
from .content import _graph
from .partition import constants_of

__all__ = ["Untranslated", "alone", "key", "origins", "parts", "to_onnx", "together"]

# What protobuf's own format can hold.
MOST_NBYTES = (1 << 31) - 1
# In the place of a node's stack trace, which goes through every step into the ONNX node that comes of it.
ORIGIN = "headrace node "
REDUCED = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Untranslated(Exception):
    """PyTorch's exporter has no ONNX for a graph. ``node`` is the name of the node at fault, where that is known."""

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


# -------------------- programs of PyTorch's operators


def alone(node: torch.fx.Node, program: ExportedProgram) -> ExportedProgram:
    """``node`` as a program of its own, with constants in the place of its own, and with the sizes that are computed for
    it; names are canonical. Raises Untranslated where it takes something that is no tensor and no such size."""
    constants = constants_of(program)
    tensors: dict[torch.fx.Node, None] = {}

    def visit(taken: torch.fx.Node) -> None:
        value = taken.meta.get("val")
        if taken.op == "get_attr":
            raise Untranslated("control flow")
        if isinstance(value, torch.Tensor):
            tensors.setdefault(taken)
        elif taken.op == "call_function" and not isinstance(value, (tuple, list)):
            for each in taken.all_input_nodes:
                visit(each)
        else:
            raise Untranslated(f"it takes {taken.name}, which is no tensor")

    for taken in node.all_input_nodes:
        visit(taken)
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    specs, values = [], {}
    for constant in (True, False):
        for taken in tensors:
            if (taken.op == "placeholder" and taken.name in constants) is not constant:
                continue
            new = copied[taken] = graph.placeholder(f"{'c' if constant else 'x'}{len(copied)}")
            new.meta["val"] = taken.meta["val"]
            kind = InputKind.BUFFER if constant else InputKind.USER_INPUT
            target = new.name if constant else None
            specs.append(
                InputSpec(kind, TensorArgument(new.name), target, persistent=True if constant else None)
            )
            if constant:
                values[new.name] = _substitute(taken.meta["val"])

    def copied_of(taken: torch.fx.Node) -> torch.fx.Node:
        if taken not in copied:
            args, kwargs = (torch.fx.map_arg(part, copied_of) for part in (taken.args, taken.kwargs))
            target, kwargs = _operator(taken, dict(kwargs))
            copied[taken] = graph.create_node(taken.op, target, args, kwargs)
            copied[taken].meta["val"] = taken.meta.get("val")
        return copied[taken]

    whole = copied_of(node)
    results = [whole]
    if isinstance(node.meta.get("val"), (tuple, list)):
        results = [
            copied_of(user) for user in node.users if getattr(user.target, "__name__", "") == "getitem"
        ]
    graph.output(tuple(results))
    signature = ExportGraphSignature(
        specs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(r.name), None) for r in results]
    )
    return _program(graph, signature, values, {}, program.range_constraints)


def together(programs: Sequence[ExportedProgram]) -> ExportedProgram:
    """Programs of ``alone`` side by side: the names of the i-th begin with ``pI_``, as do those in its nodes' origins."""
    graph = torch.fx.Graph()
    copied: list[dict[torch.fx.Node, torch.fx.Node]] = [{} for _ in programs]
    specs: list[InputSpec] = []
    values, constraints = {}, {}
    for kind in (InputKind.BUFFER, InputKind.USER_INPUT):
        for i, program in enumerate(programs):
            placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
            for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
                if spec.kind is not kind:
                    continue
                new = copied[i][node] = graph.placeholder(f"p{i}_{node.name}")
                new.meta["val"] = node.meta["val"]
                target = new.name if spec.target else None
                specs.append(InputSpec(kind, TensorArgument(new.name), target, spec.persistent))
                if spec.target:
                    values[new.name] = program.state_dict[spec.target]
    results = []
    for i, program in enumerate(programs):
        constraints.update(program.range_constraints)
        for node in program.graph.nodes:
            if node.op == "call_function":
                new = copied[i][node] = graph.node_copy(node, copied[i].__getitem__)
                new.name = f"p{i}_{node.name}"
        results += [copied[i][n] for n in program.graph.output_node().args[0]]
    graph.output(tuple(results))
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(r.name), None) for r in results]
    return _program(graph, ExportGraphSignature(specs, outputs), values, {}, constraints)


def parts(model: Any, counts: Sequence[int]) -> list[Any]:
    """The graph that ``together`` became, cut: the first has the first ``counts[0]`` results, and what they need."""
    import onnx

    made_by = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    found, start = [], 0
    for number, count in enumerate(counts):
        # Without the weights of all the others.
        part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        part.functions.extend(model.functions)
        part.graph.name = model.graph.name
        wanted = {value.name for value in model.graph.output[start : start + count]}
        kept: set[int] = set()
        left = list(wanted)
        while left:
            at = made_by.get(left.pop())
            if at is not None and at not in kept:
                kept.add(at)
                left += model.graph.node[at].input
        names = {name for i in kept for name in model.graph.node[i].input} | wanted
        for field, chosen in (
            ("node", [n for i, n in enumerate(model.graph.node) if i in kept]),
            ("output", list(model.graph.output[start : start + count])),
            # All of the program's own, used or not.
            ("input", [v for v in model.graph.input if v.name.startswith(f"p{number}_")]),
            ("initializer", [t for t in model.graph.initializer if t.name in names]),
        ):
            getattr(part.graph, field).extend(chosen)
        found.append(part)
        start += count
    return found


def _substitute(tensor: torch.Tensor) -> torch.Tensor:
    """A constant of the same kind: while islands are planned the model's own values are not there."""
    filled = torch.ones if tensor.is_floating_point() else torch.zeros
    return filled([int(size) for size in tensor.shape], dtype=torch.float32).to(tensor.dtype)


def _program(
    graph: torch.fx.Graph,
    signature: ExportGraphSignature,
    state: dict[str, Any],
    constants: dict[str, Any],
    constraints: dict[Any, Any],
) -> ExportedProgram:
    spec_in = pytree.tree_flatten((tuple(signature.user_inputs), {}))[1]
    spec_out = pytree.tree_flatten(signature.user_outputs)[1]
    call = ModuleCallSignature(inputs=[], outputs=[], in_spec=spec_in, out_spec=spec_out)
    return ExportedProgram(
        root=torch.fx.GraphModule({}, graph),
        graph=graph,
        graph_signature=signature,
        state_dict=state,
        range_constraints=constraints,
        module_call_graph=[ModuleCallEntry("", call)],
        constants=constants,
    )


def key(program: ExportedProgram) -> str:
    """What decides whether a program of ``alone`` can be translated: operators, dtypes, sizes, what is constant."""
    return hashlib.sha256("\n".join(_graph(program.graph_module)).encode()).hexdigest()


def _plain(program: ExportedProgram, precision: str | None) -> ExportedProgram:
    """``program`` with PyTorch's operators in place of the edge dialect's, computed in ``precision`` where it is
    float32. Each node says in its stack trace where it comes from. The given one is not changed."""
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        new = copied[node] = graph.node_copy(node, lambda n: copied[n])
        new.name = node.name
        if node.op != "call_function":
            continue
        new.target, new.kwargs = _operator(node, dict(new.kwargs))
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta", "nn_module_stack")}
        new.meta["stack_trace"] = f'File "{ORIGIN}{node.name}", line 1, in forward\n    {node.name}'
    graph.output(torch.fx.map_arg(program.graph.output_node().args[0], lambda n: copied[n]))
    state, constants = dict(program.state_dict), dict(program.constants)
    signature = copy.deepcopy(program.graph_signature)
    if precision is not None:
        _reduce(graph, signature, [state, constants], REDUCED[precision])
    return _program(graph, signature, state, constants, program.range_constraints)


def _operator(node: torch.fx.Node, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """PyTorch's operator for one of the exporter's: a view for its copy, no order of dimensions, in which ONNX has
    no say."""
    target: Any = node.target
    if isinstance(target, EdgeOpOverload):
        target = target._op
    if not isinstance(target, torch._ops.OpOverload):
        return target, kwargs
    namespace, name = target._schema.name.split("::")
    if namespace == "dim_order_ops":
        kwargs.pop("dim_order", None)
        name = name.removeprefix("_").replace("_dim_order", "").replace("to_copy", "_to_copy")
    elif namespace == "aten" and name == "view_copy" and target._overloadname == "default":
        # With views in the place of copies, a tensor may have strides that a view would not take.
        name = "reshape"
    elif namespace == "aten" and name.endswith("_copy") and name not in ("_to_copy", "as_strided_copy"):
        name = name.removesuffix("_copy")
    else:
        return target, kwargs
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, target._overloadname, None) or target, kwargs


def _reduce(
    graph: torch.fx.Graph,
    signature: ExportGraphSignature,
    stores: Sequence[dict[str, Any]],
    dtype: torch.dtype,
) -> None:
    """Compute in ``dtype`` what is float32: constants become it, inputs are cast to it, results back."""
    fqns = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    cast = torch.ops.aten._to_copy.default
    lowered: set[torch.fx.Node] = set()
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in list(graph.nodes):
        value = node.meta.get("val")
        is_float32 = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        if node.op == "placeholder" and is_float32:
            if node.name in fqns:
                node.meta["val"] = value.to(dtype)
                for store in stores:
                    if (tensor := store.get(fqns[node.name])) is not None:
                        narrow = tensor.detach().to(dtype)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        store[fqns[node.name]] = torch.nn.Parameter(narrow, False) if is_parameter else narrow
                continue
            with graph.inserting_before(first):
                lower = graph.call_function(cast, (node,), {"dtype": dtype})
            lower.meta["val"] = value.to(dtype)
            lowered.add(lower)
            node.replace_all_uses_with(lower, delete_user_cb=lambda user, made=lower: user is not made)
        elif node.op == "call_function":
            node.args, node.kwargs = (
                pytree.tree_map(lambda v: dtype if v is torch.float32 else v, part)
                for part in (node.args, node.kwargs)
            )
    output = graph.output_node()
    results = []
    with graph.inserting_before(output):
        for node, spec in zip(output.args[0], signature.output_specs, strict=True):
            value = node.meta["val"]
            made = node
            # Values in the graph say what was float32; in a new trace they are made anew.
            if node in lowered or value.dtype == torch.float32:
                made = graph.call_function(cast, (node,), {"dtype": torch.float32})
                made.meta["val"] = value.to(torch.float32)
                spec.arg = type(spec.arg)(made.name)
            results.append(made)
    output.args = (tuple(results),)


# -------------------- ONNX


def to_onnx(program: ExportedProgram, precision: str | None = None) -> Any:
    """``program`` as an ``onnx.ModelProto``: inputs by their names in order, results as ``output_0``, ``output_1``, …;
    weights inside. Raises Untranslated, in the exporter's words; ExportError where onnx is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ExportError(
            f"TensorRT: expected onnx and onnxscript, by which PyTorch's ONNX exporter works, got no module "
            f"{error.name!r}; pip install onnx onnxscript (docs/export.md)"
        ) from error
    plain = _plain(program, precision)
    try:
        with _quietly(), torch.no_grad():
            made = torch.onnx.export(
                plain,
                dynamo=True,
                verbose=False,
                external_data=False,
                input_names=list(program.graph_signature.user_inputs),
            )
            model = made.model_proto
    except Exception as error:
        raise Untranslated(_words(error), _culprit(error)) from error
    nbytes = sum(
        t.untyped_storage().nbytes() for t in {**plain.state_dict, **plain.constants}.values()
        if isinstance(t, torch.Tensor)
    )  # fmt: skip
    if nbytes > MOST_NBYTES:
        raise Untranslated(
            f"{nbytes} bytes of weights in one graph, of which ONNX's format holds {MOST_NBYTES}"
        )
    _rename(model, len(program.graph_signature.user_outputs))
    return model


def _words(error: BaseException) -> str:
    """What the first error in the chain says, on one line."""
    while (deeper := error.__cause__) is not None:
        error = deeper
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text.split("\n\n")[0])[:300]


def _culprit(error: BaseException | None) -> str | None:
    """The node that the exporter was at, by its origin. Its errors have no field for it; the frames they come from do."""
    while error is not None:
        frame = error.__traceback__
        while frame is not None:
            node = frame.tb_frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node):
                match = re.search(rf'"{re.escape(ORIGIN)}([^"]+)"', node.meta.get("stack_trace") or "")
                if match:
                    return match[1]
            frame = frame.tb_next
        error = error.__cause__
    return None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's warnings, and with its list of operators kept: reading it takes most of an export's time."""
    from torch.onnx._internal.exporter import _registration

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels, registry = [logger.level for logger in loggers], _registration.ONNXRegistry
    read = registry.__dict__["from_torchlib"]

    def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
        asked = repr((args, sorted(kwargs.items())))
        if asked not in _registries:
            _registries[asked] = read.__func__(cls, *args, **kwargs)
        return _registries[asked]

    registry.from_torchlib = classmethod(from_torchlib)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        registry.from_torchlib = read
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_registries: dict[str, Any] = {}


def _rename(model: Any, count: int) -> None:
    """Give each result a value and a name of its own, and leave out what only says where nodes come from."""
    from onnx import helper

    graph = model.graph
    taken = {v.name for v in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
    clash = {name: f"{name}_of_island" for name in taken if re.fullmatch(r"outputs?[_.]?\d+", name)}
    for node in graph.node:
        node.input[:] = [clash.get(name, name) for name in node.input]
        node.output[:] = [clash.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.initializer, *graph.value_info):
        value.name = clash.get(value.name, value.name)
    assert len(graph.output) == count
    for i, result in enumerate(graph.output):
        source = clash.get(result.name, result.name)
        graph.node.append(helper.make_node("Identity", [source], [f"output_{i}"], name=f"result_{i}"))
        result.name = f"output_{i}"


def origins(model: Any) -> dict[str, str]:
    """For each ONNX node, by name, the node of the island that it comes from. What says so is taken out of the graph,
    and so is all else that only describes."""
    found = {}
    for node in model.graph.node:
        for entry in node.metadata_props:
            match = re.search(rf'"{re.escape(ORIGIN)}([^"]+)"', entry.value)
            if entry.key.endswith("stack_trace") and match:
                found[node.name] = match[1]
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        value.ClearField("metadata_props")
        value.ClearField("doc_string")
    model.ClearField("metadata_props")
    model.graph.ClearField("metadata_props")
    model.ClearField("doc_string")
    model.graph.ClearField("doc_string")
    return found
