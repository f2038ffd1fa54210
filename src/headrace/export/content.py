"""All that goes into a compiled island, as one hash; and islands out of the cache. Imports torch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor import cpp_builder
from torch.export import ExportedProgram

from . import progress
from .cache import current
from .inductor import Compiled, View
from .target import Target

__all__ = ["compiled", "key"]

# Their versions are in what is compiled, or decide about it.
PACKAGES = ("torch", "executorch", "triton", "sympy", "torchao")
# Settings of Inductor, of the compiler and of its linker.
VARIABLES = ("TORCH", "INDUCTOR", "ATEN_", "TRITON_", "CXX", "CC", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "CPLUS_", "LIBRARY_PATH")  # fmt: skip


def compiled(
    method: str,
    program: ExportedProgram,
    target: Target,
    compile_program: Callable[[str, ExportedProgram, Target], Compiled],
) -> Compiled:
    """What ``compile_program`` gives, from the cache where it is there."""
    store = current()
    operators = sum(n.op == "call_function" for n in program.graph.nodes)
    progress.report(f"{method}: Aoti, an island of {operators} operators")
    if store is None:
        return compile_program(method, program, target)
    name = key(program, target)
    weights = {**program.state_dict, **program.constants}
    kept = store.read(name)
    if kept is not None:
        header, blobs = kept
        constants = {}
        for fqn, one in header["constants"].items():
            tensor = weights[one["of"]] if one["of"] else _tensor(one, blobs[one["blob"]])
            view = View(tuple(one["shape"]), tuple(one["stride"]), one["offset"])
            constants[fqn] = (tensor, view)
        progress.report(f"{method}: Aoti, from the cache")
        return Compiled(blobs[0], constants, blobs[1].decode())
    # Inductor may change the program.
    storages = {t.untyped_storage().data_ptr(): n for n, t in weights.items() if isinstance(t, torch.Tensor)}
    found = compile_program(method, program, target)
    blobs = [found.library, found.source.encode()]
    listed: dict[str, Any] = {}
    for fqn, (tensor, view) in found.constants.items():
        one = {"shape": list(view.shape), "stride": list(view.stride), "offset": int(view.offset)}
        storage = tensor.untyped_storage()
        of = storages.get(storage.data_ptr()) if storage.nbytes() else None
        # The model's own are not written: they are part of the key.
        one["of"] = of if of and weights[of].dtype == tensor.dtype else None
        if one["of"] is None:
            one |= {"blob": len(blobs), "dtype": str(tensor.dtype).removeprefix("torch.")}
            blobs.append(_bytes(tensor))
        listed[fqn] = one
    store.write(name, {"constants": listed}, blobs)
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    storage = tensor.detach().untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    data: bytes = flat.numpy().tobytes()
    return data


def _tensor(one: dict[str, Any], data: bytes) -> torch.Tensor:
    dtype = getattr(torch, one["dtype"])
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(
        [int(s) for s in one["shape"]], [int(s) for s in one["stride"]], int(one["offset"])
    )


def key(program: ExportedProgram, target: Target) -> str:
    """A hash over the graph, its sizes and what they were when it was traced, the constants' bytes, the target, our own
    sources, the versions of whoever takes part, and their settings."""
    digest = hashlib.sha256(_around().encode())
    digest.update(repr(target).encode())
    digest.update(str(program.graph_signature).encode())
    digest.update(str(sorted((str(k), str(v)) for k, v in program.range_constraints.items())).encode())
    for line in _graph(program.graph_module):
        digest.update(line.encode() + b"\n")
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {_described(tensor)} {tensor.storage_offset()}".encode())
            digest.update(hashlib.sha256(_bytes(tensor)).digest())
    return digest.hexdigest()


def _graph(module: torch.fx.GraphModule) -> list[str]:
    lines = []
    for node in module.graph.nodes:
        lines.append(
            f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {_described(node.meta.get('val'))}"
        )
        if node.op == "get_attr" and isinstance(
            inner := getattr(module, node.target, None), torch.fx.GraphModule
        ):
            lines += [f"{node.target}:", *_graph(inner), "end"]
    return lines


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [_size(s) for s in (*value.shape, *value.stride())]
        return f"{value.dtype} {value.device} {sizes}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return _size(value)


def _size(size: Any) -> str:
    # Code is written for any size, and tuned for the one that was traced.
    hint = getattr(size.node, "hint", None) if isinstance(size, torch.SymInt) else None
    return f"{size}={hint}" if hint is not None else str(size)


@functools.cache
def _around() -> str:
    """What does not change within a process."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    compiler = cpp_builder.get_cpp_compiler()
    said = [
        subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
        for tool in (compiler, "ld")
    ]
    variables = {
        k: v for k, v in os.environ.items() if k.startswith(VARIABLES) and k != "TORCHINDUCTOR_CACHE_DIR"
    }
    return json.dumps(
        [
            sources.hexdigest(),
            versions,
            torch.version.git_version,
            platform.python_version(),
            platform.machine(),
            platform.libc_ver(),
            compiler,
            said,
            variables,
            # Loops are cut for the threads that there are.
            [torch.get_num_threads(), os.cpu_count()],
            {k: repr(v) for k, v in sorted(inductor_config.save_config_portable().items())},
        ],
        sort_keys=True,
    )
