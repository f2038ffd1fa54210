"""The split as ExecuTorch's exporter takes it: one partitioner for several delegates of a method. Imports torch."""

from __future__ import annotations

import contextlib
import functools
import operator as builtin
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from executorch.exir.backend import utils
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import get_delegates, get_non_lowered_nodes, tag_constant_data
from executorch.exir.tracer import _default_decomposition_table
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from ..errors import ExportError
from . import progress
from .delegates import Claims, ExportDelegate, Plan
from .islands import grow
from .kernels import branches, has_kernel
from .node import described, viewed
from .split import KERNELS, SplitNode

__all__ = ["Lowering", "Method", "constants_in_lists", "constants_of", "partitioners", "user_inputs"]


class Lowering:
    """How one delegate of the list takes part: what it can compute, and how ExecuTorch lowers it.

    ``backend`` is the name of a direct subclass of ``BackendDetails``. ``device`` is where its islands' arguments
    are planned, None for host memory. ``keeps_all``: it wants every operator as PyTorch traced it.
    """

    backend: str
    device: str | None = None
    keeps_all: bool = False

    def __init__(self, claims: Any, plan: Plan) -> None:
        self.claims: Claims = claims
        self.name: str = claims.name
        self.plan = plan

    def refuses(self, node: torch.fx.Node, program: ExportedProgram) -> str | None:
        """Why the delegate cannot compute ``node``; None where it can."""
        return None

    def companions(self, node: torch.fx.Node, program: ExportedProgram) -> Sequence[torch.fx.Node]:
        """Operators that have to be in the island of ``node``."""
        return ()

    def guests(self, node: torch.fx.Node, program: ExportedProgram) -> Sequence[torch.fx.Node]:
        """Operators that better are in the island of ``node``, where they are claimed too and nobody has them."""
        return ()

    def specs(self) -> list[CompileSpec]:
        """Compile specs of one island, a fresh list: lowering may change it."""
        return []

    def keeps(self, program: ExportedProgram) -> tuple[list[Any], Callable[[torch.fx.Node], bool] | None]:
        """Operators that the exporter shall not decompose, and for which nodes; ``Partitioner.ops_to_not_decompose``.

        Here: those that are claimed and that a decomposition exists for.
        """
        table = _decomposed()
        found: dict[Any, None] = {}
        for node in program.graph.nodes:
            if node.target in table and self._claims(node) and not _aliases(node.target):
                found[node.target] = None
        return list(found), self._claims

    def _claims(self, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and self.claims.unclaimed(viewed(node)) is None


@functools.cache
def _decomposed() -> frozenset[Any]:
    """Operators that the exporter has a decomposition for; asking its table makes it look at every operator."""
    return frozenset(_default_decomposition_table())


def _aliases(target: Any) -> bool:
    schema = target._schema
    return schema.is_mutable or any(result.alias_info is not None for result in schema.returns)


class Method:
    """One method's split, as it comes to be: a row for each operator, in the order of the graph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[str, SplitNode] = {}
        self.islands = 0
        self.constants: frozenset[str] = frozenset()
        # Of each node the constants that it takes, with their bytes.
        self.weights: dict[str, dict[str, int]] = {}
        # Patterns of each delegate, by its name, that matched something.
        self.matched: set[tuple[str, str, str]] = set()

    def add(
        self,
        node: torch.fx.Node,
        why: str,
        *,
        delegate: str = KERNELS,
        island: int | None = None,
        device: str | None = None,
    ) -> None:
        """Say where ``node`` went. What was said before, by delegates that did not take it, is kept in front."""
        view, constants = viewed(node), self.constants
        self.weights[node.name] = {n.name: _nbytes(n) for n in node.all_input_nodes if n.name in constants}
        earlier = self.rows.get(node.name)
        outputs = [f"{dtype}[{', '.join(map(str, shape))}]" for dtype, shape in view.outputs]
        self.rows[node.name] = SplitNode(
            method=self.name,
            name=node.name,
            operator=view.operator,
            delegate=delegate,
            island=island,
            device=device or "cpu",
            why="; ".join(filter(None, [earlier.why if earlier else "", why])),
            module=view.module,
            source=view.source,
            inputs=tuple(
                n.name for n in node.all_input_nodes if n.op != "get_attr" and n.name not in constants
            ),
            result=outputs[0] if outputs else "",
            nbytes=_nbytes(node),
        )

    def match(self, lowerings: Sequence[Lowering], program: ExportedProgram) -> None:
        """Remember which patterns of the delegates match a node of ``program``, before or after it is decomposed."""
        asked = [one for one in lowerings if one.claims.patterns]
        for node in program.graph.nodes if asked else ():
            if node.op == "call_function":
                view = viewed(node)
                for one in asked:
                    self.matched |= {(one.name, *each) for each in one.claims.matched(view)}

    def renumber(self, order: Sequence[set[str]]) -> None:
        """Number islands as the program calls them: ``order`` has the names of each island's nodes.

        Raises ExportError where these are not the islands that were planned.
        """
        planned: dict[int, set[str]] = {}
        for row in self.rows.values():
            if row.island is not None:
                planned.setdefault(row.island, set()).add(row.name)
        numbers: dict[int, int] = {}
        for number, names in enumerate(order):
            found = [island for island, nodes in planned.items() if nodes & names]
            if len(found) != 1 or found[0] in numbers:
                raise ExportError(
                    f"{self.name}: expected the islands of the split, got one of {sorted(names)[:8]}; report this "
                    "with the model",
                    node=min(names, default=None),
                )
            numbers[found[0]] = number
        if len(numbers) != len(planned):
            missing = sorted(planned[i] for i in planned if i not in numbers)
            raise ExportError(
                f"{self.name}: expected {len(planned)} islands, got {len(numbers)}, without that of "
                f"{sorted(missing[0])[:8]}; report this with the model"
            )
        self.rows = {
            name: row if row.island is None else replace(row, island=numbers[row.island])
            for name, row in self.rows.items()
        }


def constants_of(program: ExportedProgram) -> frozenset[str]:
    """Placeholders that are no arguments of the method and no state."""
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    buffers = [name for name, buffer in signature.inputs_to_buffers.items() if buffer not in written]
    return frozenset(
        [*signature.inputs_to_parameters, *buffers, *signature.inputs_to_lifted_tensor_constants]
    )


def user_inputs(program: ExportedProgram) -> list[torch.fx.Node]:
    """Placeholders of the method's arguments, in order; those of numbers among them, which are constants of the program."""
    specs = program.graph_signature.input_specs
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    return [n for n, spec in zip(placeholders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


def _nbytes(node: torch.fx.Node) -> int:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (tuple, list)) else [values]
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            sizes = [s for s in tensor.shape if not isinstance(s, torch.SymInt)]
            if len(sizes) < tensor.dim():
                return 0
            total += tensor.element_size() * torch.Size(sizes).numel()
    return total


def partitioners(
    delegates: Sequence[ExportDelegate | Claims], plan: Plan, method: Method
) -> list[Partitioner]:
    """ExecuTorch's list of partitioners for a method: delegates of ours that follow each other are planned
    together, as a whole and before anything is compiled; other partitioners run in their place."""
    phases: list[list[Lowering] | Partitioner] = []
    for delegate in delegates:
        if isinstance(delegate, Claims):
            lowering: Lowering = delegate.lowering(plan)  # type: ignore[attr-defined]
            if phases and isinstance(phases[-1], list):
                phases[-1].append(lowering)
            else:
                phases.append([lowering])
        else:
            phases.append(delegate.partitioner(plan))
    found: list[Partitioner] = []
    for i, phase in enumerate(phases):
        last = i == len(phases) - 1
        if not isinstance(phase, list):
            found.append(_Foreign(phase, method, last))
            continue
        found.append(_Split(phase, method, last))
        # Asked after those that keep some, whose tables decompose the rest.
        found += [_Keeps(one) for one in phase if len(phase) > 1 and one.keeps_all]
    if not phases:
        found.append(_Split([], method, True))
    return found


class _Split(Partitioner):  # type: ignore[misc]
    """Plans the islands of several delegates, the first before the next."""

    def __init__(self, lowerings: Sequence[Lowering], method: Method, last: bool) -> None:
        super().__init__()
        self.lowerings = lowerings
        self.method = method
        self.last = last
        self.done = False

    def ops_to_not_decompose(
        self, program: ExportedProgram
    ) -> tuple[list[Any], Callable[[torch.fx.Node], bool] | None]:
        # The exporter asks again when all is lowered, to find what was left; that is said at the end of partition().
        if self.done:
            return [], None
        self.method.match(self.lowerings, program)
        asked = [one for one in self.lowerings if len(self.lowerings) == 1 or not one.keeps_all]
        kept = [one.keeps(program) for one in asked]
        operators = list(dict.fromkeys(op for ops, _ in kept for op in ops))
        if all(which is None for _, which in kept):
            return _outside_branches(program, operators, None)

        def which(node: torch.fx.Node) -> bool:
            return any(node.target in ops and (each is None or each(node)) for ops, each in kept)

        return _outside_branches(program, operators, kept[0][1] if len(kept) == 1 else which)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self.done = True
        self.method.match(self.lowerings, exported_program)
        self.method.constants = constants_of(exported_program)
        tags = _planned(exported_program, self.lowerings, self.method)
        if self.last:
            _refuse_uncovered(exported_program, self.method)
        for lowering in self.lowerings:
            mine = [t for t in tags.values() if t.backend_id == lowering.backend]
            if mine:
                progress.report(
                    f"{self.method.name}: {lowering.name}, {len(mine)} island{'s' if len(mine) > 1 else ''}"
                )
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


class _Keeps(Partitioner):  # type: ignore[misc]
    """Only says what a delegate of an earlier ``_Split`` would have kept whole."""

    def __init__(self, lowering: Lowering) -> None:
        super().__init__()
        self.lowering = lowering
        self.done = False

    def ops_to_not_decompose(self, program: ExportedProgram) -> tuple[list[Any], Any]:
        return ([], None) if self.done else _outside_branches(program, *self.lowering.keeps(program))

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self.done = True
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})


def _outside_branches(
    program: ExportedProgram, operators: list[Any], which: Callable[[torch.fx.Node], bool] | None
) -> tuple[list[Any], Callable[[torch.fx.Node], bool] | None]:
    """What is in the branches of control flow is for the CPU kernels, which many operators have to be decomposed for."""
    if not any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in program.graph.nodes):
        return operators, which
    return operators, lambda node: node.graph is program.graph and (which is None or which(node))


class _Foreign(Partitioner):  # type: ignore[misc]
    """Somebody else's partitioner, whose choice is written down."""

    def __init__(self, inner: Partitioner, method: Method, last: bool) -> None:
        super().__init__()
        self.inner = inner
        self.method = method
        self.last = last
        self.done = False

    def ops_to_not_decompose(self, program: ExportedProgram) -> Any:
        return ([], None) if self.done else self.inner.ops_to_not_decompose(program)

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        return self.inner.transform_for_pre_decomposition(exported_program)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self.done = True
        self.method.constants = constants_of(exported_program)
        result: PartitionResult = self.inner.partition(exported_program)
        numbers: dict[str, int] = {}
        who = type(self.inner).__name__
        for node in get_non_lowered_nodes(exported_program.graph):
            tag = node.meta.get("delegation_tag")
            if tag is None:
                self.method.add(node, f"{who}: left it")
                continue
            if tag not in numbers:
                numbers[tag] = self.method.islands
                self.method.islands += 1
            spec = result.partition_tags[tag]
            device = next((s.value.decode() for s in spec.compile_specs if s.key == "target_device"), None)
            self.method.add(
                node, f"claimed by {who}", delegate=spec.backend_id, island=numbers[tag], device=device
            )
        if self.last:
            _refuse_uncovered(exported_program, self.method)
        return result


def _planned(
    program: ExportedProgram, lowerings: Sequence[Lowering], method: Method
) -> dict[str, DelegationSpec]:
    """Tag the nodes of every island; the tags and who lowers them."""
    graph = program.graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    index = {n: i for i, n in enumerate(nodes)}
    producers = [[index[p] for p in n.all_input_nodes if p in index] for n in nodes]
    left = set(get_non_lowered_nodes(graph))
    root = _roots(nodes, index)
    atoms: dict[int, list[int]] = {}
    for i in range(len(nodes)):
        if nodes[i] in left:
            atoms.setdefault(root[i], []).append(i)
    owner: dict[int, tuple[Lowering, int]] = {}
    whys: dict[int, list[str]] = {head: [] for head in atoms}
    taken: list[tuple[int, ...]] = []
    tags: dict[str, DelegationSpec] = {}
    apart: dict[int, str] = {}
    is_covered = [has_kernel(n) for n in nodes]
    for lowering in lowerings:
        claims = lowering.claims
        units: list[list[int]] = []
        because: dict[int, str] = {}
        for head, atom in atoms.items():
            if head in owner:
                continue
            node = nodes[head]
            if (why := claims.unclaimed(viewed(node))) is not None:
                whys[head].append(f"{lowering.name}: {why}")
                continue
            if not _is_tensor(node):
                whys[head].append(
                    f"{lowering.name}: not supported: it gives a number, and islands give tensors"
                )
                continue
            if (why := lowering.refuses(node, program)) is not None:
                whys[head].append(f"{lowering.name}: not supported: {why}")
                continue
            unit = list(atom)
            others = [root[index[c]] for c in lowering.companions(node, program) if c in index]
            gone = [nodes[o].name for o in others if o in owner or o not in atoms]
            if gone:
                whys[head].append(f"{lowering.name}: needs {', '.join(gone)}, which another has")
                continue
            for guest in lowering.guests(node, program):
                other = root[index[guest]]
                if other not in owner and other in atoms and claims.unclaimed(viewed(guest)) is None:
                    others.append(other)
            for other in others:
                unit += atoms[other]
                if other != head:
                    because.setdefault(other, f"goes with {node.name}")
            because[head] = claims.claimed
            units.append(unit)
        grown = grow(
            producers,
            taken,
            units,
            least=claims.min_size,
            counted=lambda i: root[i] == i,
            merge=claims.merge,
            needed=lambda i: not is_covered[i],
            name=lambda i: str(nodes[i].name),
        )
        for i, why in grown.left.items():
            if root[i] == i:
                whys[i].append(f"{lowering.name}: {why}")
        apart.update(grown.apart)
        for island in grown.islands:
            number = method.islands
            method.islands += 1
            tag = f"island_{number}"
            tags[tag] = DelegationSpec(lowering.backend, lowering.specs())
            taken.append(island)
            for i in island:
                nodes[i].meta["delegation_tag"] = tag
                if root[i] == i:
                    owner[i] = (lowering, number)
                    whys[i].append(because[i])
    for i, node in enumerate(nodes):
        if node not in left:
            continue
        head = root[i]
        said = list(whys[head]) if head == i else [f"goes with {nodes[head].name}"]
        if i in apart:
            said.append(f"apart: {apart[i]}")
        if head in owner:
            lowering, number = owner[head]
            method.add(node, "; ".join(said), delegate=lowering.name, island=number, device=lowering.device)
        else:
            method.add(node, "; ".join(said))
    # A branch's graph belongs to the operator that takes it.
    for node in graph.nodes:
        user = next((u for u in node.users if "delegation_tag" in u.meta), None)
        if node.op == "get_attr" and user is not None and node not in get_delegates(graph):
            node.meta["delegation_tag"] = user.meta["delegation_tag"]
    # Constants go into the island that uses them, under a name of their own in each. State does not: it stays the
    # method's, so that the engine plans, initializes and advances it, whatever the island runs on.
    tag_constant_data(program)
    return tags


@contextlib.contextmanager
def constants_in_lists() -> Iterator[None]:
    """The exporter gives each user of a constant that several islands, or an island and a kernel, take a value of its own;
    but overlooks one that is taken in a list (``cat``, ``cond``), and then refuses the program. Here none is."""
    stock = utils.duplicate_constant_node

    def duplicate(program: ExportedProgram, name: str) -> set[str]:
        (node,) = [n for n in program.graph.nodes if n.op == "placeholder" and n.name == name]
        if all(node in (*user.args, *user.kwargs.values()) for user in node.users):
            found: set[str] = stock(program, name)
            return found
        return _duplicated(program, node)

    utils.duplicate_constant_node = duplicate
    try:
        yield
    finally:
        utils.duplicate_constant_node = stock


def _duplicated(program: ExportedProgram, node: torch.fx.Node) -> set[str]:
    signature = program.graph_signature
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    at = placeholders.index(node)
    spec = signature.input_specs[at]
    specs = []
    for user in list(node.users)[1:]:
        with program.graph.inserting_before(node):
            copy = program.graph.placeholder(f"{node.name}_copy")
        copy.meta = dict(node.meta)
        user.replace_input_with(node, copy)
        specs.append(InputSpec(spec.kind, TensorArgument(copy.name), spec.target, spec.persistent))
    signature.input_specs[at:at] = specs
    program.graph_module.recompile()
    return {spec.arg.name for spec in specs}


def _roots(nodes: Sequence[torch.fx.Node], index: dict[torch.fx.Node, int]) -> list[int]:
    """For each node the one that it goes with: one of several results with its operator, a size that is computed for
    one operator with that. Delegates are called with tensors alone."""
    root = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        if node.target is builtin.getitem and node.args[0] in index:
            root[i] = root[index[node.args[0]]]
    for i in reversed(range(len(nodes))):
        users = list(nodes[i].users)
        if not _is_tensor(nodes[i]) and len(users) == 1 and users[0] in index:
            root[i] = root[index[users[0]]]
    return root


def _is_tensor(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _refuse_uncovered(program: ExportedProgram, method: Method) -> None:
    """Raise ExportError for every operator that no delegate took and no kernel covers."""
    left = [n for n in get_non_lowered_nodes(program.graph) if "delegation_tag" not in n.meta]
    kept = [n for n in left if isinstance(n.target, torch._ops.HigherOrderOperator)]
    uncovered = [n for n in left if not has_kernel(n)]
    if kept:
        uncovered += [n for n in branches(program.graph_module) if not has_kernel(n)]
    if not uncovered:
        return
    lines = []
    for node in uncovered:
        row = method.rows.get(node.name)
        lines.append(described(node) + (f": {row.why}" if row and row.why else ""))
    raise ExportError(
        f"{method.name}: expected a delegate or a CPU kernel for every operator, got none for {'; '.join(lines)}; "
        "claim it for a delegate that computes it (Aoti() at the end of the list takes whatever is left), or write "
        "it with other operators",
        node=uncovered[0].name,
    )
