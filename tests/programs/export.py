"""Export every program of ``models.py`` and record what eager PyTorch answers.

::

    python -m tests.programs.export [NAME…]      # names: only these, into the folder, no index

Needs torch and executorch in the versions of ``PINS``. Writes, per program, ``NAME.pte``, its ``.ptd``
files, ``NAME.npz`` (inputs and outputs) and ``NAME.view.json`` (what the exporter's own deserializer
reads back from the bytes); at last ``index.json``, whose presence says that the folder is complete.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir._serialize._program import deserialize_pte_binary
from torch.export import export as torch_export
from torch.utils import _pytree as pytree

from . import PINS, folder
from .delegates import delegate
from .exporting import collect, tried
from .models import MODELS, Export

__all__ = ["export", "record", "view"]

# Kept: the exporter finds backends through weak references.
DELEGATES = [delegate(name) for name in ("TestA", "TestB", "NotThere")]


def check_versions(pins: Mapping[str, str] = PINS) -> None:
    for package, wanted in pins.items():
        found = importlib.metadata.version(package).partition("+")[0]
        if found != wanted:
            raise SystemExit(
                f"tests/programs: expected {package} {wanted}, got {found}; install {package}=={wanted}"
            )


def pack(value: Any) -> tuple[dict[str, Any], np.ndarray | None]:
    """How one argument or result is written: its entry, and the array that goes into the archive."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        value = value.detach()
        entry = {"kind": "tensor", "dtype": dtype, "dim_order": list(value.dim_order())}
        if value.dtype is torch.bfloat16:
            # NumPy has no bfloat16: the bit patterns.
            return entry, value.view(torch.int16).numpy().view(np.uint16)
        return entry, value.numpy()
    kind = {bool: "bool", int: "int", float: "float", type(None): "none"}[type(value)]
    return {"kind": kind, "value": value}, None


def flat(tree: Any) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves(tree)
    return leaves


def record(methods: list[tuple[str, torch.nn.Module, list[tuple[Any, ...]]]], path: Path) -> None:
    """Run each method's calls in eager PyTorch, on a copy of its module, and write them to ``path``."""
    calls: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, module, inputs_of in methods:
        module = copy.deepcopy(module).eval()
        for inputs in inputs_of:
            # A module may write into its inputs, and a result may share memory with them.
            given = copy.deepcopy(inputs)
            with torch.no_grad():
                results = flat(module(*given))
            entry: dict[str, Any] = {"method": name}
            for side, values in (("in", flat(inputs)), ("out", results)):
                entries = []
                for k, value in enumerate(values):
                    one, array = pack(value)
                    entries.append(one)
                    if array is not None:
                        arrays[f"{len(calls)}/{side}/{k}"] = array
                entry["inputs" if side == "in" else "outputs"] = entries
            calls.append(entry)
    np.savez_compressed(path, calls=np.array(json.dumps(calls)), **arrays)


def view(data: bytes) -> dict[str, Any]:
    """The program as the stock deserializer reads it, as JSON; bytes become size, hash and head."""

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.name
        if dataclasses.is_dataclass(value):
            fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"type": type(value).__name__, **fields}
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = bytes(value)
            return {"size": len(value), "sha256": hashlib.sha256(value).hexdigest(), "head": value[:64].hex()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return value

    file = deserialize_pte_binary(data)
    named = {}
    if file.named_data is not None:
        named = {
            key: len(bytes(file.named_data.buffers[entry.buffer_index]))
            for key, entry in file.named_data.pte_data.items()
        }
    return {"program": plain(file.program), "named_data": named}


def export(name: str, made: Export, there: Path) -> dict[str, Any]:
    """Export one program into ``there`` and return its entry of the index."""
    programs = {}
    for method in made.methods:
        exported = torch_export(
            method.module.eval(), tuple(method.calls[0]), dynamic_shapes=method.dynamic, strict=True
        )
        programs[method.name] = made.tag(exported) if made.tag else exported
    lowered = to_edge_transform_and_lower(
        programs,
        partitioner=made.partitioners(),
        compile_config=EdgeCompileConfig(_core_aten_ops_exception_list=made.allowed()),
    )
    program = lowered.to_executorch(ExecutorchBackendConfig(**made.config))
    (there / f"{name}.pte").write_bytes(program.buffer)

    data: list[str] = []
    if program._tensor_data:
        program.write_tensor_data_to_file(str(there))
        for file in sorted(program._tensor_data):
            # The exporter's own name for the only file is the same for every program.
            wanted = name if file == "_default_external_constant" else file
            (there / f"{file}.ptd").rename(there / f"{wanted}.ptd")
            data.append(f"{wanted}.ptd")

    record([(m.name, m.module, [tuple(c) for c in m.calls]) for m in made.methods], there / f"{name}.npz")
    seen = view(program.buffer)
    (there / f"{name}.view.json").write_text(json.dumps(seen))
    called = {d["id"] for plan in seen["program"]["execution_plan"] for d in plan["delegates"]}
    if called != set(made.delegates):
        raise RuntimeError(f"{name}: expected islands of {sorted(made.delegates)}, got {sorted(called)}")
    return {
        "data": data,
        "stateful": made.stateful,
        "delegates": list(made.delegates),
        "kernels_missing": list(made.kernels_missing),
        "runs": made.runs,
        "rtol": made.rtol,
        "atol": made.atol,
        "note": made.note,
    }


def main(only: list[str]) -> int:
    check_versions()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    there = folder()
    there.mkdir(parents=True, exist_ok=True)
    results = (
        (name, tried(name, lambda name=name: export(name, MODELS[name](), there), there))
        for name in only or MODELS
    )
    return collect(there, results, whole=not only)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
