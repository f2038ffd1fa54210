"""From models to files: ExecuTorch's exporter, driven. Imports torch."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.exir.passes.propagate_device_config import PropagateDeviceConfig
from torch.export import ExportedProgram
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import bound_sympy

from .. import pte
from ..errors import ExportError, HeadraceError, OptionError, ProgramError
from ..pte import tensorrt
from . import (
    Aoti,
    Claims,
    ExportDelegate,
    Exported,
    Plan,
    Split,
    TensorRT,
    Verification,
    Verify,
    aoti,
    payload,
    verify,
)
from .cache import using
from .node import TORCH, described, frames, innermost, whole_traces
from .partition import Method, constants_in_lists, partitioners, user_inputs
from .profiles import MOST
from .progress import report, reporting
from .quiet import told_by_the_error
from .target import Target

__all__ = ["Options", "write"]

OURS = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True)
class Options:
    """The arguments of ``headrace.export`` that are not the model; the contract is there."""

    path: Path
    delegates: tuple[ExportDelegate | Claims, ...]
    target: Target
    device: str | None
    resident: bool
    weights: str
    verify: Verify | None
    cache: Path | None
    # A program for a verification where no GPU is.
    stand_in: bool = False

    def __post_init__(self) -> None:
        if self.weights not in ("inside", "beside"):
            raise OptionError(
                f"weights: expected 'inside' or 'beside', got {self.weights!r}; pass one of these"
            )
        if self.device is None and self.resident:
            raise OptionError("resident: expected a device, got device=None; name one, or leave resident out")
        for delegate in self.delegates:
            if isinstance(delegate, type) or not (
                isinstance(delegate, Claims) or hasattr(delegate, "partitioner")
            ):
                raise OptionError(
                    f"delegates: expected Aoti(), Xnnpack(), Python(…), …, got {delegate!r}; make an object of it, with parentheses, or pass one that has partitioner()"
                )
        kinds = {type(delegate) for delegate in self.delegates}
        if {TensorRT, Aoti} <= kinds and self.target.kind == "host" and not self.stand_in:
            raise OptionError(
                "target: expected a GPU, such as 'cuda:sm_86', with TensorRT() and Aoti(), got 'host'; engines run on a GPU "
                "alone, and code for the host does not"
            )


def write(
    model: Any,
    example_inputs: Any,
    dynamic_shapes: Any,
    options: Options,
    progress: Callable[[str], None] | None,
) -> Exported:
    """``headrace.export`` behind its arguments' defaults."""
    with reporting(progress), using(options.cache):
        models, inputs, shapes = _methods(model, example_inputs, dynamic_shapes)
        programs = {
            name: _exported(name, models[name], inputs.get(name), shapes.get(name)) for name in models
        }
        for name, one in programs.items():
            _refuse_unbounded(name, one)
            _refuse_foreign(name, one)
        # Before anything is compiled. What a method writes is known once its in-place operators are gone.
        if options.resident and (state := _state(p.run_decompositions({}) for p in programs.values())):
            raise ExportError(
                f"resident: expected methods without state, got mutable buffers {', '.join(state)}; export without "
                "resident=True",
                node=state[0],
            )
        files, split = _built(programs, options)
        for note in split.notes:
            if "matches nothing" in note:
                warnings.warn(note, stacklevel=4)
        said = None
        if options.verify is not None:
            calls = verify.calls_of(options.verify, models, inputs, programs)
            said = _verified(programs, options, files, split, calls)
        _replace(files)
        return Exported(options.path, tuple(p for p in files if p != options.path), split, said)


def _built(programs: Mapping[str, ExportedProgram], options: Options) -> tuple[dict[Path, bytes], Split]:
    """The files, the program first, and the split."""
    path = options.path
    methods = {name: Method(name) for name in programs}
    data_file = path.stem if options.weights == "beside" else None
    asked = {
        name: partitioners(
            options.delegates,
            Plan(
                method=name,
                target=options.target,
                device=options.device,
                data_file=data_file,
                stand_in=options.stand_in,
            ),
            methods[name],
        )
        for name in programs
    }
    try:
        report(f"{', '.join(programs)}: split and lower")
        with constants_in_lists():
            edge = to_edge_transform_and_lower(
                {name: _apart(one) for name, one in programs.items()},
                partitioner=asked,
                # Without sizes that vary there are none to compute.
                transform_passes=[_sizes_to_their_users] if _vary(programs.values()) else None,
                compile_config=EdgeCompileConfig(_check_ir_validity=False),
            )
        for name, method in methods.items():
            method.renumber(_called(edge.exported_program(name)))
            # Within an island it is the delegate's own affair.
            for node in edge.exported_program(name).graph.nodes:
                _refuse_complex(f"{name}, {described(node)}", node)
        report(f"{', '.join(programs)}: plan memory")
        program = _planned(edge, options.resident)
    except HeadraceError:
        raise
    except Exception as error:
        raise ExportError(
            f"{path.name}: expected ExecuTorch's exporter to lower and plan the methods {', '.join(programs)}, got "
            f"{type(error).__name__}: {error}; leave what it names to another delegate, or report this with the model"
        ) from error
    files = {path: program.buffer}
    for name, data in (program._tensor_data or {}).items():
        files[path.with_name(f"{name}.ptd")] = bytes(data)
    rows = tuple(row for method in methods.values() for row in method.rows.values())
    split = Split(rows, _notes(options, methods.values(), [p for p in files if p != path]))
    try:
        written = pte.read(files[path])
    except ProgramError as error:
        raise ExportError(
            f"{path.name}: expected ExecuTorch's exporter to write a program that the engine reads, got: {error}; report this with the model"
        ) from error
    _check(path.name, files)
    verify.check_plan(path.name, written, split)
    return files, split


def _verified(
    programs: Mapping[str, ExportedProgram],
    options: Options,
    files: Mapping[Path, bytes],
    split: Split,
    calls: Sequence[verify.Call],
) -> Verification:
    """Run ``files`` where they can run; GPU code without a GPU here is verified by the same split for the host."""
    assert options.verify is not None
    modules = [m for m in (getattr(d, "module", None) for d in options.delegates) if m is not None]
    name = options.path.name
    engines = tensorrt.islands(files[options.path])

    def run(
        files: Mapping[Path, bytes],
        devices: Sequence[tuple[str, Any]],
        stand_in: Mapping[str, str] | None = None,
    ) -> tuple[Verification, Any]:
        return verify.run(
            options.verify or Verify(),
            name,
            files,
            calls,
            devices,
            resident=options.resident,
            ordered=any(island.device != "cpu" for island in split.islands),
            modules=modules,
            stand_in=stand_in,
            # On a GPU that TensorRT does not support, or without its run time.
            may_lack=[tensorrt.DELEGATE] if engines and stand_in is None else [],
        )

    if options.target.kind == "host" and not engines:
        return run(files, verify.HOST)[0]
    said, missing = run(files, verify.GPU)
    if not missing:
        return said
    (why,) = missing.values()
    report(f"{name}: cannot run here ({why}); the same split for the host")
    twin, twin_split = _built(programs, replace(options, target=_on_host(options.target), stand_in=True))
    different = [a.name for a, b in zip(split, twin_split, strict=False) if a != b]
    if different or len(split) != len(twin_split):
        raise ExportError(
            f"{name}: expected the split for the host to be that for {options.target.kind}, got another for "
            f"{', '.join(different[:8]) or 'its end'}; verify it on a GPU, or leave it out, verify=False",
            node=different[0] if different else None,
        )
    stand_ins = tensorrt.islands(twin[options.path])
    for real, other in zip(engines, stand_ins, strict=True):
        if real.blob.bindings != other.blob.bindings or real.blob.built is None:
            raise ExportError(
                f"{name}, {real.method}, instruction {real.instruction}: expected the stand-in to have the engine's bindings, got others; report this with the "
                "model"
            )
    built = (real.blob.built for real in engines)
    versions = {b.runtime: b.version for b in built if b is not None}
    said = run(twin, verify.HOST, versions)[0]
    checked = "structure, constants and plan of the program were checked, and the same split was"
    note = f"not run as it is ({why}): {checked} compiled for the host and run"
    if engines:
        note += (
            f"; TensorRT built {len(engines)} engine{'s' if len(engines) > 1 else ''}, which did not run: in their place "
            "the ONNX graphs that they were built from were evaluated by onnx.reference"
        )
    return replace(said, note=note)


def _on_host(target: Target) -> Target:
    return target if target.kind == "host" else Target()


def _vary(programs: Iterable[ExportedProgram]) -> bool:
    """Whether there are sizes that are known only when a method is called."""
    return any(
        isinstance(value, torch.SymInt)
        or (isinstance(value, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in value.shape))
        for program in programs
        for node in program.graph.nodes
        for value in [node.meta.get("val")]
    )


def _apart(program: ExportedProgram) -> ExportedProgram:
    """``program`` with dictionaries of constants of its own: the exporter takes from them what goes into an island. Results
    such as ``topk``'s, a named tuple of PyTorch's that the exporter has no name for, are plain tuples."""
    other = copy.copy(program)
    other._state_dict = dict(program.state_dict)
    other._constants = dict(program.constants)
    whole, *inner = program.module_call_graph
    if whole.signature is not None:
        spec = whole.signature.out_spec
        results = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        plain = pytree.tree_map(lambda v: tuple(v) if _is_named(v) else v, results, is_leaf=_is_named)
        signature = replace(whole.signature, out_spec=pytree.tree_structure(plain))
        other._module_call_graph = [replace(whole, signature=signature), *inner]
    return other


def _is_named(value: Any) -> bool:
    return type(value).__module__ == "torch.return_types"


def _called(program: ExportedProgram) -> list[set[str]]:
    """The names of the operators in each island, in the order of the calls."""
    found = []
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is executorch_call_delegate:
            lowered = getattr(program.graph_module, node.args[0].target)
            graph = lowered.original_module.graph
            found.append({n.name for n in graph.nodes if n.op == "call_function"})
    return found


def _planned(edge: Any, resident: bool) -> Any:
    """The program, with its memory planned for each device."""
    state = _state(edge.exported_program(name) for name in edge.methods)
    return edge.to_executorch(
        ExecutorchBackendConfig(
            passes=[InitializedMutableBufferPass(state)] if state else [],
            emit_mutable_buffer_names=bool(state),
            memory_planning_pass=_Planning(alloc_graph_input=not resident, alloc_graph_output=not resident),
            propagate_device_config=PropagateDeviceConfig(
                skip_h2d_for_method_inputs=resident, skip_d2h_for_method_outputs=resident
            ),
        )
    )


def _sizes_to_their_users(module: torch.fx.GraphModule) -> PassResult:
    """Compute each size again for each operator that takes it: islands are called with tensors alone, so a size
    that one computed could not be handed to the next."""
    for node in reversed(list(module.graph.nodes)):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (torch.SymInt, int)):
            continue
        for user in list(node.users)[1:]:
            with module.graph.inserting_before(user):
                copy = module.graph.node_copy(node)
            user.replace_input_with(node, copy)
    module.recompile()
    return PassResult(module, True)


class _Planning(MemoryPlanningPass):  # type: ignore[misc]
    """Plans, and afterwards gives islands of AOTInductor the id that the run time knows, and the device that their
    code runs on: until here the exporter read from ``target_device`` where to plan."""

    def run(self, graph_module: torch.fx.GraphModule, graph_signature: Any = None) -> Any:
        planned = super().run(graph_module, graph_signature)
        for module in planned.graph_module.modules():
            if not isinstance(module, LoweredBackendModule) or module.backend_id != aoti.BACKEND:
                continue
            module._backend_id = aoti.DELEGATE
            specs = [spec for spec in module.compile_specs if spec.key != aoti.DEVICE_SPEC]
            runs_on = b"cuda:0" if any(spec.key == aoti.CUDA_SPEC for spec in specs) else b"cpu"
            module.compile_specs[:] = [*specs, CompileSpec(aoti.DEVICE_SPEC, runs_on)]
        return planned


def _methods(
    model: Any, example_inputs: Any, dynamic_shapes: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    if not isinstance(model, Mapping):
        return {"forward": model}, {"forward": example_inputs}, {"forward": dynamic_shapes}
    if not isinstance(example_inputs, Mapping) or set(example_inputs) != set(model):
        raise OptionError(
            f"example_inputs: expected a mapping with the methods {sorted(model)}, got "
            f"{sorted(example_inputs) if isinstance(example_inputs, Mapping) else type(example_inputs).__name__}; give a tuple of inputs for each method"
        )
    if not model:
        raise OptionError("model: expected one method or more, got none; write {'forward': model}")
    return dict(model), dict(example_inputs), dict(dynamic_shapes or {})


def _exported(name: str, model: Any, inputs: Any, shapes: Any) -> ExportedProgram:
    if isinstance(model, ExportedProgram):
        return model
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"{name}: expected a Module or an ExportedProgram, got {type(model).__name__}; pass the module itself, in eval mode"
        )
    if not isinstance(inputs, tuple):
        raise OptionError(
            f"{name}: expected a tuple of example inputs, got {type(inputs).__name__}; write (x,) for one"
        )
    if model.training:
        raise ExportError(f"{name}: expected a model in eval mode, got one in training; call model.eval()")
    report(f"{name}: trace")
    with torch.no_grad():
        try:
            with told_by_the_error(), whole_traces():
                return torch.export.export(model, inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise ExportError(
                f"{name}: expected torch.export to trace the model, got {_useful_first(error)}"
            ) from error


def _useful_first(error: Exception) -> str:
    """A message of several paragraphs, with what is at fault and where in front: it has both somewhere."""
    text = str(error).strip()
    said, _, rest = text.partition("\n")
    # What an operator that refuses its arguments raised; which size is not what it was said to be.
    inner = re.search(r"got (\w+\((['\"]).*\2\))$", text, re.MULTILINE) or re.match(r"\s*- (.+)", rest)
    if inner:
        said += f" {inner[1]}"
    trace = frames(text)
    trace += [
        (one.filename, str(one.lineno), one.line or "") for one in getattr(error, "real_stack", None) or ()
    ]
    # What the model's own code raised, when PyTorch ran it.
    raised = [
        (one.filename, str(one.lineno), one.line or "") for one in traceback.extract_tb(error.__traceback__)
    ]
    frame = innermost(trace or [one for one in raised if not one[0].startswith(OURS)])
    at = ", at {}:{}: {}".format(*frame) if frame and not frame[0].startswith(TORCH) else ""
    advice = "; write that differently, or export it yourself and pass the ExportedProgram"
    return f"{type(error).__name__}: {said}{at}{advice}" + (f"\n{rest}" if rest else "")


def _refuse_unbounded(name: str, program: ExportedProgram) -> None:
    """Raise ExportError for a size of an input that has no upper bound: ExecuTorch would take the example's for it."""
    for i, node in enumerate(user_inputs(program)):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if not isinstance(size, torch.SymInt):
                continue
            upper = bound_sympy(size.node.expr, program.range_constraints).upper
            if not upper.is_Integer or int(upper) > MOST:
                raise ExportError(
                    f"{name}, input {i} {node.name!r}, dimension {dim}: expected a size with an upper bound, since memory is "
                    f'planned for it, got {size} without one; give it in dynamic_shapes: Dim("name", max=…), '
                    "Dim.AUTO(max=…)",
                    node=node.name,
                )


def _refuse_foreign(name: str, program: ExportedProgram) -> None:
    """Raise ExportError for inputs and results of a dtype that the engine lacks, and where no result is a tensor."""
    (results,) = program.graph.output_node().args
    results = [one for one in pytree.tree_leaves(results) if isinstance(one, torch.fx.Node)]
    for what, nodes in (("input", user_inputs(program)), ("result", results)):
        for i, node in enumerate(nodes):
            _refuse_complex(f"{name}, {what} {i} {node.name!r}", node)
    if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in results):
        raise ExportError(
            f"{name}: expected a model that returns a tensor, got none among its results; return a tensor"
        )


def _refuse_complex(where: str, node: torch.fx.Node) -> None:
    values = node.meta.get("val")
    for value in values if isinstance(values, (tuple, list)) else [values]:
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise ExportError(
                f"{where}: expected a dtype that the engine has, got {str(value.dtype).removeprefix('torch.')}; compute "
                "with the real and the imaginary part, torch.view_as_real(…)",
                node=node.name,
            )


def _notes(options: Options, methods: Iterable[Method], data: Sequence[Path]) -> tuple[str, ...]:
    """What was asked for and had no effect, or not on everything."""
    matched = {each for method in methods for each in method.matched}
    found = []
    for delegate in options.delegates:
        for option, pattern in sorted(delegate.patterns) if isinstance(delegate, Claims) else ():
            if (delegate.name, option, pattern) not in matched:  # type: ignore[union-attr]
                found.append(f"{delegate.name}, {option}: {pattern!r} matches nothing in the graph")  # type: ignore[union-attr]
    if options.weights == "beside":
        whose: dict[str, dict[tuple[str, str], int]] = {}
        for method in methods:
            for row in method.rows.values():
                held = whose.setdefault(row.delegate, {})
                held.update({(method.name, k): n for k, n in method.weights.get(row.name, {}).items()})
        stay = [
            f"{name} ({len(held)} constant{'s'[: len(held) != 1]}, {sum(held.values())} bytes)"
            for name, held in whose.items()
            if held and name not in (Aoti.name, aoti.BACKEND)
        ]
        there = (
            ", ".join(path.name for path in data) or f"no {options.path.with_suffix('.ptd').name} was written"
        )
        if stay or not data:
            found.append(
                f"weights='beside': {there}; only Aoti's islands read their constants from a data file"
                + (f", and those of {', '.join(stay)} are in the program" if stay else ", and it has none")
            )
    return tuple(dict.fromkeys(found))


def _state(programs: Iterable[ExportedProgram]) -> list[str]:
    """The placeholders of buffers that a method writes, each once."""
    found: dict[str, None] = {}
    for program in programs:
        signature = program.graph_signature
        written = set(signature.buffers_to_mutate.values())
        found.update({p: None for p, buffer in signature.inputs_to_buffers.items() if buffer in written})
    return list(found)


def _check(name: str, files: Mapping[Path, bytes]) -> None:
    """Each island of AOTInductor finds its library and its constants in these very bytes."""
    (program_bytes, *data) = files.values()
    program = pte.read(program_bytes)
    held: dict[str, bytes] = {}
    for entry in program.named_data:
        segment = program.segments[entry.segment]
        held[entry.key] = program_bytes[segment.offset : segment.offset + entry.nbytes]
    for file in data:
        for item in pte.read_data(file).entries:
            held[item.key] = file[item.offset : item.offset + item.nbytes]
    for method in program.methods:
        for island in method.islands:
            if island.delegate != aoti.DELEGATE:
                continue
            raw = program_bytes[island.payload_offset : island.payload_offset + island.payload_nbytes]
            said = payload.decode(raw)
            for key in (said.library_key, *(c.storage_key for c in said.constants)):
                digest = hashlib.sha256(held.get(key, b"")).hexdigest()
                if not key.startswith(digest):
                    raise ExportError(
                        f"{name}, {method.name}, island {island.index}: expected the bytes that {key} names, got "
                        f"{'others' if key in held else 'none'}; report this with the model"
                    )


def _replace(files: Mapping[Path, bytes]) -> None:
    """Write all of them beside their names first, so that none is ever half there. Raises OSError, of the file at fault."""
    written: list[tuple[str, Path]] = []
    path = next(iter(files))
    try:
        for path, data in files.items():
            handle, pending = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            written.append((pending, path))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            # mkstemp's files are the owner's alone; these get what open() would have given them.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(pending, 0o666 & ~mask)
        while written:
            path = written[-1][1]
            os.replace(*written[-1])
            written.pop()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        for pending, _ in written:
            os.unlink(pending)
