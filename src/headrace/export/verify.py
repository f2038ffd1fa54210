"""Verification: the files run in a fresh process without torch, and give what eager PyTorch gives. Imports torch."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from .. import pte
from ..errors import ExportError, OptionError
from .partition import user_inputs
from .progress import report
from .split import Split
from .verification import Deviation, Verification, Verify

__all__ = ["GPU", "HOST", "Call", "calls_of", "check_plan", "run"]

# A simulated device shows what the program relies on: nothing runs before something waits for it, then in some
# other order that is legal.
HOST: tuple[tuple[str, str | int | None], ...] = (("cpu", None), ("sim", "late"), ("sim", 7))
GPU: tuple[tuple[str, str | int | None], ...] = (("cuda:0", None),)
SEED = 0


@dataclass(frozen=True)
class Call:
    """One call of ``method``, its flat inputs, and the flat outputs that eager PyTorch gave. ``said`` names it."""

    method: str
    said: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def calls_of(
    verify: Verify,
    models: Mapping[str, Any],
    examples: Mapping[str, Any],
    programs: Mapping[str, ExportedProgram],
) -> list[Call]:
    """What is called and what eager PyTorch answers: for each method the example inputs and the user's own, or one
    random set. Methods with state are called on a copy of the model, in this order."""
    given = verify.inputs
    if given is not None and not isinstance(given, Mapping):
        if len(models) > 1:
            raise OptionError(
                f"Verify, inputs: expected a mapping with the methods {sorted(models)}, got a list; write {{'forward': [(x,), …]}}"
            )
        given = dict.fromkeys(models, given)
    if unknown := sorted(set(given or {}) - set(models)):
        raise OptionError(
            f"Verify, inputs: expected methods among {sorted(models)}, got {unknown}; name methods of the model"
        )
    found = []
    for name, model in models.items():
        program = programs[name]
        sets = [("the example inputs", _example(name, program, examples.get(name)))]
        if given is None:
            sets.append(("random inputs", (_random(program, sets[0][1][0]), sets[0][1][1])))
        else:
            sets += [(f"inputs {i}", (tuple(args), {})) for i, args in enumerate(given.get(name, ()))]
        # What a method writes is known once its in-place operators are gone.
        signature = program.run_decompositions({}).graph_signature
        module = _eager(model, bool(signature.buffers_to_mutate))
        for said, given_now in sets:
            # A model may write into its arguments, which are the caller's.
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given_now)
            inputs = tuple(
                v.clone() if isinstance(v, torch.Tensor) else v for v in pytree.tree_leaves((args, kwargs))
            )
            with torch.no_grad():
                try:
                    outputs = module(*args, **kwargs)
                except Exception as error:
                    raise ExportError(
                        f"{name}, verification with {said}: expected the model to run, got "
                        f"{type(error).__name__}: {error}; give inputs that it takes, Verify(inputs=…)"
                    ) from error
            # What a model writes into its arguments, a program gives back before its results.
            written = [pytree.tree_leaves((args, kwargs))[i] for i in _written(signature)]
            leaves = [*written, *pytree.tree_leaves(outputs)]
            found.append(
                Call(
                    name,
                    said,
                    inputs,
                    tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves),
                )
            )
    return found


def _written(signature: Any) -> list[int]:
    """Which of the flat inputs the method writes, in the order in which it gives them back."""
    place = {name: i for i, name in enumerate(signature.user_inputs)}
    return [place[name] for name in signature.user_inputs_to_mutate.values()]


def _example(name: str, program: ExportedProgram, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, tuple):
        return inputs, {}
    if program.example_inputs is None:
        raise OptionError(
            f"{name}: expected example inputs to verify with, got none; give them, or verify=False"
        )
    args, kwargs = program.example_inputs
    return tuple(args), dict(kwargs)


def _eager(model: Any, has_state: bool) -> Any:
    """What to call: a copy where calling it changes it."""
    if isinstance(model, ExportedProgram):
        return copy.deepcopy(model).module()
    return copy.deepcopy(model) if has_state else model


def _random(program: ExportedProgram, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers like the examples' (their mean and spread, or for integers and truth values some of theirs), in the
    least sizes that the program was traced for, and not the examples'."""
    generator = torch.Generator().manual_seed(SEED)
    placeholders = [n.meta.get("val") for n in user_inputs(program)]
    flat, spec = pytree.tree_flatten(args)
    sizes = _sizes(program)
    made = []
    for value, fake in zip(flat, placeholders[: len(flat)], strict=True):
        if not isinstance(value, torch.Tensor):
            made.append(value)
            continue
        known = [_size(s, sizes) for s in fake.shape]
        shape = [int(s) if k is None else k for k, s in zip(known, value.shape, strict=True)]
        count = math.prod(shape)
        if value.is_floating_point() and value.numel():
            plain = value.detach().double()
            spread = float(plain.std(correction=0)) or 1.0
            numbers = torch.randn(count, generator=generator, dtype=torch.float64)
            new = (numbers * spread + float(plain.mean())).to(value.dtype).reshape(shape)
        elif value.numel():
            picked = torch.randint(0, value.numel(), (count,), generator=generator)
            new = value.detach().reshape(-1)[picked].reshape(shape)
        else:
            new = value.detach().clone()
        made.append(new)
    return tuple(pytree.tree_unflatten(made, spec))


def _sizes(program: ExportedProgram) -> dict[Any, int]:
    """A size for each that varies: the least."""
    found = {}
    for symbol, bounds in program.range_constraints.items():
        try:
            found[symbol] = max(1, int(bounds.lower))
        except (TypeError, ValueError, OverflowError):
            continue
    return found


def _size(size: Any, sizes: Mapping[Any, int]) -> int | None:
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.expr.subs(sizes)
    return int(value) if value.is_Integer and value > 0 else None


# -------------------- the process


def run(
    verify: Verify,
    name: str,
    files: Mapping[Path, bytes],
    calls: Sequence[Call],
    devices: Sequence[tuple[str, str | int | None]],
    *,
    resident: bool,
    ordered: bool,
    modules: Sequence[str],
    stand_in: Mapping[str, str] | None = None,
    may_lack: Sequence[str] = (),
) -> tuple[Verification, dict[str, str]]:
    """Load ``files`` (the program first) in a fresh process, on each device, run every call and compare. ``ordered``:
    islands touch a device's memory, so the order of their accesses is checked on a simulated one. ``stand_in``: engines
    of TensorRT's are ONNX graphs in this program, and these are the run times that they say, with their versions. ``may_lack``: delegates that
    may be unavailable here, which counts as a device that is.

    The answer, and for each device that is not here why not. Raises ExportError, naming the output and the largest
    deviation, where it differs, or naming what failed.
    """
    report(f"{name}: verify on {', '.join(dict.fromkeys(device for device, _ in devices))}")
    with tempfile.TemporaryDirectory(prefix="headrace-verify-") as there:
        folder = Path(there)
        paths = [folder / path.name for path in files]
        for path, data in zip(paths, files.values(), strict=True):
            path.write_bytes(data)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        asked = []
        for i, call in enumerate(calls):
            kinds = []
            for k, value in enumerate(call.inputs):
                if isinstance(value, torch.Tensor):
                    kinds.append({"kind": "tensor", "dtype": _dtype(value)})
                    arrays[f"{i}/{k}"] = _array(value)
                else:
                    kinds.append({"kind": "number", "value": value})
            asked.append({"method": call.method, "inputs": kinds})
        np.savez(folder / "inputs.npz", **cast(Any, arrays))
        ask = {
            "program": str(paths[0]),
            "data": [str(path) for path in paths[1:]],
            "imports": list(dict.fromkeys([*modules, *verify.imports])),
            "devices": list(devices),
            "resident": resident,
            "ordered": ordered,
            "calls": asked,
            "stand_in": dict(stand_in or {}),
            "may_lack": list(may_lack),
        }
        (folder / "ask.json").write_text(json.dumps(ask))
        _process(verify, name, folder)
        answer = json.loads((folder / "answer.json").read_text())
        with np.load(folder / "answers.npz") as archive:
            answers = {key: archive[key] for key in archive.files}
    if "error" in answer:
        error = answer["error"]
        raise ExportError(
            f"{name}, {error['where']}: expected the program to run, got {error['kind']}: {error['text']}; where a "
            "delegate in Python is missing, name the module that defines it: Python(…, module=…)"
        )
    missing = {r["device"]: r["unavailable"] for r in answer["runs"] if "unavailable" in r}
    ran = [(number, r) for number, r in enumerate(answer["runs"]) if "unavailable" not in r]
    worst: dict[tuple[str, int], Deviation] = {}
    for number, one in ran:
        for i, (call, kinds) in enumerate(zip(calls, one["calls"], strict=True)):
            where = f"{name}, {call.method} on {one['device']}, {call.said}"
            if len(kinds) != len(call.outputs):
                raise ExportError(
                    f"{where}: expected {len(call.outputs)} outputs, got {len(kinds)}; report this"
                )
            for k, (want, kind) in enumerate(zip(call.outputs, kinds, strict=True)):
                got = answers.get(f"{number}/{i}/{k}", kind.get("value"))
                found = _compared(verify, where, call.method, k, want, got, kind, one["device"])
                if found is not None and found.largest >= worst.get((call.method, k), found).largest:
                    worst[call.method, k] = found
    devices_ran = tuple(r["device"] for _, r in ran)
    return Verification(devices_ran, len(calls), tuple(worst.values())), missing


def _process(verify: Verify, name: str, folder: Path) -> None:
    environment = dict(os.environ)
    if verify.python is None:
        # What this process can import, the fresh one can: the module of a delegate, a package that is not installed.
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    python = verify.python or sys.executable
    command = [python, "-m", "headrace.export.verify_process", str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=verify.timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(
            f"{name}: expected {python} to verify the program, got {error}; pass Verify(python=…), an interpreter that has headrace"
        ) from error
    if done.returncode or not (folder / "answer.json").exists():
        lines = done.stderr.strip().splitlines()
        raise ExportError(
            f"{name}: expected {python} to verify the program, got exit status {done.returncode}: "
            f"{lines[-1] if lines else 'no message'}; name an interpreter that has headrace's run time, "
            "Verify(python=…), or leave it out, verify=False",
            log=lines[-20:],
        )


def _compared(
    verify: Verify,
    where: str,
    method: str,
    output: int,
    want: Any,
    got: Any,
    kind: Mapping[str, Any],
    device: str,
) -> Deviation | None:
    if not isinstance(want, torch.Tensor):
        if got != want or kind["kind"] == "tensor":
            raise ExportError(
                f"{where}, output {output}: expected {want!r} as eager PyTorch gives, got {got!r}; report this with the model"
            )
        return None
    dtype, shape = _dtype(want), tuple(want.shape)
    if kind["kind"] != "tensor" or kind["dtype"] != dtype or tuple(got.shape) != shape:
        found = f"{kind['dtype']}{list(got.shape)}" if kind["kind"] == "tensor" else repr(got)
        raise ExportError(
            f"{where}, output {output}: expected {dtype}{list(shape)} as eager PyTorch gives, got {found}; report "
            "this with the model"
        )
    wanted = _array(want)
    if wanted.dtype.kind in "biu":
        apart = (wanted != got).astype(np.float64)
        if wanted.dtype.kind != "b" and apart.any():
            apart = np.abs(wanted.astype(np.float64) - got.astype(np.float64)).clip(apart)
    else:
        a, b = wanted.astype(np.float64), got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        apart = np.where(np.isnan(apart), np.inf, apart)
    rtol, atol = verify.tolerance(dtype)
    finite = np.abs(wanted.astype(np.float64))
    finite = np.where(np.isfinite(finite), finite, 0.0)
    scale = max(1.0, float(finite.max(initial=0.0)))
    excess = apart - (atol * scale + rtol * finite)
    largest = float(apart.max(initial=0.0))
    if excess.size and float(excess.max()) > 0:
        at = tuple(int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
        raise ExportError(
            f"{where}, output {output}, {dtype}{list(shape)}: expected eager PyTorch's numbers within a tolerance of "
            f"{rtol:g} relative + {atol * scale:g}, got a largest deviation of {largest:.6g}, and at {list(at)} "
            f"{got[at]} instead of {wanted[at]}; leave the operators at fault to another delegate, or give a tolerance, "
            "Verify(rtol=…, atol=…)"
        )
    return Deviation(method, output, dtype, shape, largest, device)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numbers; NumPy has no bfloat16, which float32 holds exactly."""
    plain = tensor.detach().cpu()
    array: np.ndarray[Any, Any] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


# -------------------- what can be seen in the files


def check_plan(name: str, file: pte.ProgramFile, split: Split) -> None:
    """Every planned tensor lies in a buffer of its own device, and every island's arguments where the split says (DM1).

    Raises ExportError.
    """
    for method in file.methods:
        devices = {buffer.memory_id: buffer.device for buffer in method.buffers}
        for value in method.values:
            if value.planned is not None and devices.get(value.planned[0]) != value.device:
                raise ExportError(
                    f"{name}, {method.name}, value {value.index}: expected it planned on {value.device}, got a buffer on "
                    f"{devices.get(value.planned[0])}; report this with the model"
                )
        islands = [island for island in split.islands if island.method == method.name]
        if len(islands) != len(method.islands):
            raise ExportError(
                f"{name}, {method.name}: expected the {len(islands)} islands of the split, got "
                f"{len(method.islands)}; report this with the model"
            )
        by_index = {island.index: island for island in islands}
        for called in method.islands:
            for arg in called.args:
                value = method.values[arg]
                wanted = by_index[called.index].device
                if value.kind == "tensor" and value.device != wanted:
                    raise ExportError(
                        f"{name}, {method.name}, island {called.index} ({called.delegate}): expected its arguments on "
                        f"{wanted}, got value {arg} on {value.device}; report this with the model"
                    )
