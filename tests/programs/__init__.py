"""Exported programs and their goldens: the real input of the tests.

``models.py`` defines them, ``export.py`` exports them with the stock exporter and records what eager
PyTorch answers. Both need torch; this module does not, so the tests that run programs need none::

    python -m tests.programs.export          # once; a minute or two; into build/programs/<hash>
    program = programs.load("mlp_portable")
    for call in program.calls: ...           # method, inputs, outputs as the exporter's process saw them

``programs.AOTI`` holds those of AOTInductor: ``programs.AOTI.load("mlp")``. ``programs.CUDA`` holds them for a GPU;
``programs.SPLIT`` those that are split over several delegates: ``programs.SPLIT.load("branches.xnnpack")``.

A folder's name is a hash over the sources here and the pinned versions, so a stale export is never
mistaken for a current one.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import headrace

__all__ = [
    "AOTI",
    "CUDA",
    "CUDA_FEW",
    "CUDA_PINS",
    "ENGINES",
    "PINS",
    "SPLIT",
    "STOCK",
    "TENSORRT",
    "TENSORRT_CUDA",
    "Call",
    "Collection",
    "Program",
    "Value",
    "ensure",
    "export_python",
    "folder",
    "load",
    "names",
    "package_folders",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# What the exported bytes depend on beside the sources; export.py refuses other versions.
PINS = {"torch": "2.13.0", "executorch": "1.5.1", "torchao": "0.18.0"}
CUDA_PINS = {**PINS, "triton": "3.9.0"}


@dataclass(frozen=True)
class Value:
    """One argument or result.

    ``kind`` is ``tensor``, ``int``, ``float``, ``bool`` or ``none``. For a tensor ``dtype`` is its name
    ("float32", "bfloat16", …) and ``data`` an array in the memory layout that PyTorch used; NumPy has no
    bfloat16, so that one comes as its uint16 bit patterns. For the other kinds ``data`` is the Python value.
    """

    kind: str
    dtype: str | None
    data: Any

    def float64(self) -> np.ndarray:
        """The numbers, for comparing with a tolerance."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.asarray(self.data).astype(np.float64)


@dataclass(frozen=True)
class Call:
    """One call of ``method``: its flat inputs, and the flat outputs that eager PyTorch gave."""

    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Program:
    """One exported program.

    ``stateful``: the calls are a sequence on a freshly loaded program, not independent of each other.
    ``delegates``: the names of the delegates that its islands call, in no order.
    ``kernels_missing``: operators that the engine's kernel library does not hold.
    ``runs``: False for a program that no engine of this version can run, though it loads; see ``note``.
    ``rtol``, ``atol``: how far from eager PyTorch an answer may be.
    ``view``: what the stock exporter's own deserializer says the file holds.
    """

    name: str
    path: Path
    data: tuple[Path, ...]
    calls: tuple[Call, ...]
    stateful: bool
    delegates: tuple[str, ...]
    kernels_missing: tuple[str, ...]
    runs: bool
    rtol: float
    atol: float
    note: str

    def open(self, device: Any = None, **options: Any) -> headrace.Program:
        """The program, loaded."""
        # The exporter's Python imports this module too, and has no headrace.
        import headrace

        return headrace.load(self.path, data=self.data, device=device, **options)

    @functools.cached_property
    def view(self) -> dict[str, Any]:
        return json.loads(self.path.with_suffix(".view.json").read_text())


@dataclass(frozen=True)
class Collection:
    """A set of programs that one script exports: ``python -m MODULE ARGUMENTS``. ``sources`` are the files, beside
    ``pins``, that the result depends on; ``which`` tells sets of one script apart; ``variables`` are those of the
    environment. ``listed`` gives the programs' names where they are not those of the models in the sources."""

    module: str
    sources: tuple[Path, ...]
    arguments: Callable[[], list[str]] = list
    which: str = ""
    pins: Mapping[str, str] = field(default_factory=lambda: PINS, hash=False)
    variables: tuple[str, ...] = ()
    listed: Callable[[], list[str]] | None = None

    def folder(self) -> Path:
        """Where the export of exactly these sources lies, or will lie."""
        digest = hashlib.sha256(json.dumps(dict(self.pins), sort_keys=True).encode() + self.which.encode())
        for source in self.sources:
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        for variable in self.variables:
            digest.update(f"{variable}={os.environ.get(variable, '')}".encode() + b"\0")
        return ROOT / "build" / "programs" / digest.hexdigest()[:16]

    def there(self) -> bool:
        """Whether the export is there."""
        return (self.folder() / "index.json").exists()

    def ensure(self) -> Path:
        """The folder, exported first, in a process of its own, where it is not there yet."""
        there = self.folder()
        if (there / "index.json").exists():
            return there
        there.mkdir(parents=True, exist_ok=True)
        # Two test runs at once export once.
        with open(there / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (there / "index.json").exists():
                return there
            python = export_python()
            done = subprocess.run(
                [python, "-m", self.module, *([self.which] if self.which else []), *self.arguments()],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(
                    f"tests/programs: expected an export in {there}, got exit status {done.returncode} from "
                    f"'{python} -m {self.module}'; set HEADRACE_EXPORT_PYTHON to a Python with the 'export' "
                    f"dependency group and executorch=={PINS['executorch']}\n{done.stderr[-2000:]}"
                )
        return there

    def names(self) -> list[str]:
        """Every program of the collection, as its sources list them: asking exports nothing."""
        return self.listed() if self.listed else _models(*self.sources)

    def load(self, name: str) -> Program:
        """The exported program called ``name``."""
        return _load(self, name)


def export_python() -> str:
    """The interpreter that has torch and the exporter: ``HEADRACE_EXPORT_PYTHON``, else this one."""
    return os.environ.get("HEADRACE_EXPORT_PYTHON", sys.executable)


def package_folders() -> list[str]:
    """The package's Python files, and what its build generated: all that exporting takes from it."""
    generated = importlib.util.find_spec("headrace._schema")
    assert generated is not None
    assert generated.submodule_search_locations is not None
    (schema,) = {str(Path(folder).parent) for folder in generated.submodule_search_locations}
    return [str(ROOT / "src" / "headrace"), schema]


def _models(*sources: Path) -> list[str]:
    text = "".join(source.read_text() for source in sources)
    return re.findall(r"^@model\ndef (\w+)", text, re.MULTILINE)


def _for_cuda() -> list[str]:
    from .export_cuda import LEFT_OUT, STOCK

    models = _models(HERE / "cuda_models.py", HERE / "aoti.py")
    return [*(name for name in models if name not in LEFT_OUT), *STOCK]


def _few_for_cuda() -> list[str]:
    from .export_cuda import FEW

    return list(FEW)


STOCK = Collection(
    "tests.programs.export",
    tuple(HERE / f"{name}.py" for name in ("delegates", "export", "exporting", "graph", "models")),
)
AOTI = Collection(
    "tests.programs.export_aoti",
    (
        *(
            HERE / f"{name}.py"
            for name in ("aoti", "delegates", "export", "export_aoti", "exporting", "graph")
        ),
        HERE / "wrapper.h",
        *sorted((ROOT / "src" / "headrace" / "export").glob("*.py")),
    ),
    package_folders,
)

_CUDA_SOURCES = (
    *(HERE / f"{name}.py" for name in ("aoti", "cuda_models", "delegates", "export", "export_aoti")),
    *(HERE / f"{name}.py" for name in ("export_cuda", "exporting", "graph")),
    *sorted((ROOT / "src" / "headrace" / "export").glob("*.py")),
    ROOT / "src" / "headrace" / "pte" / "fatbin.py",
)
# For a GPU: a few whose structure is tested anywhere, and all that tests/cuda runs.
CUDA_FEW = Collection(
    "tests.programs.export_cuda",
    _CUDA_SOURCES,
    package_folders,
    which="few",
    pins=CUDA_PINS,
    listed=_few_for_cuda,
)
CUDA = Collection(
    "tests.programs.export_cuda",
    _CUDA_SOURCES,
    package_folders,
    which="all",
    pins=CUDA_PINS,
    listed=_for_cuda,
)


def _splits() -> list[str]:
    from .export_split import names

    return names()


SPLIT = Collection(
    "tests.programs.export_split",
    (
        *(
            HERE / f"{name}.py"
            for name in (
                "aoti",
                "export",
                "export_aoti",
                "exporting",
                "export_split",
                "random_models",
                "split",
                "steps",
            )
        ),
        *sorted((ROOT / "src" / "headrace" / "export").glob("*.py")),
    ),
    package_folders,
    variables=("HEADRACE_ALL_SPLITS",),
    listed=_splits,
)

_TENSORRT_SOURCES = (
    *(HERE / f"{name}.py" for name in ("aoti", "export", "export_tensorrt", "exporting")),
    *sorted((ROOT / "src" / "headrace" / "export").glob("*.py")),
    ROOT / "src" / "headrace" / "pte" / "tensorrt.py",
)


def _for_tensorrt() -> list[str]:
    from .export_tensorrt import names

    return names()


# Over TensorRT, by its stand-in, and AOTInductor: for this machine, and for a GPU.
TENSORRT = Collection(
    "tests.programs.export_tensorrt",
    _TENSORRT_SOURCES,
    package_folders,
    which="host",
    listed=_for_tensorrt,
)
TENSORRT_CUDA = Collection(
    "tests.programs.export_tensorrt",
    _TENSORRT_SOURCES,
    package_folders,
    which="cuda",
    pins=CUDA_PINS,
    listed=_for_tensorrt,
)


def _engines() -> list[str]:
    from .export_engines import names

    return names()


# With real engines of TensorRT-RTX, which are read and not run.
ENGINES = Collection(
    "tests.programs.export_engines",
    (
        *(
            HERE / f"{name}.py"
            for name in ("aoti", "export", "export_engines", "exporting", "split", "steps")
        ),
        *sorted((ROOT / "src" / "headrace" / "export").glob("*.py")),
        ROOT / "src" / "headrace" / "pte" / "tensorrt.py",
    ),
    package_folders,
    pins={**PINS, "tensorrt_rtx_cu13_bindings": "1.7.1.116"},
    listed=_engines,
)


@functools.cache
def _index(collection: Collection) -> dict[str, Any]:
    index = json.loads((collection.ensure() / "index.json").read_text())
    assert list(index) == collection.names(), (
        f"{collection.module}: exported something else than its sources list"
    )
    return dict(index)


def read_calls(path: Path) -> tuple[Call, ...]:
    """The calls that a golden ``.npz`` records."""
    with np.load(path) as archive:

        def value(key: str, entry: dict[str, Any]) -> Value:
            if entry["kind"] == "tensor":
                # The archive keeps the numbers; the memory layout is put back here.
                order = entry["dim_order"]
                array = np.ascontiguousarray(archive[key].transpose(order)).reshape(
                    [archive[key].shape[d] for d in order]
                )
                return Value("tensor", entry["dtype"], array.transpose(np.argsort(order)))
            return Value(entry["kind"], None, entry["value"])

        return tuple(
            Call(
                method=call["method"],
                inputs=tuple(value(f"{i}/in/{k}", v) for k, v in enumerate(call["inputs"])),
                outputs=tuple(value(f"{i}/out/{k}", v) for k, v in enumerate(call["outputs"])),
            )
            for i, call in enumerate(json.loads(str(archive["calls"])))
        )


@functools.cache
def _load(collection: Collection, name: str) -> Program:
    entry = _index(collection)[name]
    there = collection.folder()
    return Program(
        name=name,
        path=there / f"{name}.pte",
        data=tuple(there / file for file in entry["data"]),
        calls=read_calls(there / f"{name}.npz"),
        stateful=entry["stateful"],
        delegates=tuple(entry["delegates"]),
        kernels_missing=tuple(entry["kernels_missing"]),
        runs=entry["runs"],
        rtol=entry["rtol"],
        atol=entry["atol"],
        note=entry["note"],
    )


folder, ensure, names, load = STOCK.folder, STOCK.ensure, STOCK.names, STOCK.load
