"""Imports run one way, and the run time never reaches torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/headrace"

# A module may import those of lower layers, by ARCHITECTURE.md; of its own layer those below alone.
LAYERS = [
    {"errors"},
    {"engine", "pte"},
    {"device"},
    {"delegate", "aoti"},
    {"stats"},
    {"graph"},
    {"program"},
    {"ordering", "lanes", "timeline"},
    {"doctor", "bench", "testing", "sdk"},
    {"cli"},
]
# A record draws its trace, and a trace is drawn of a record; lanes are checked by records.
SIDEWAYS = {("lanes", "ordering"), ("ordering", "timeline"), ("timeline", "ordering")}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Apart from the run time: they know the file format and the errors alone.
APART = {"export", "audit"}
OUTSIDE = {"numpy", "flatbuffers"}
# Of the standard library from Python 3.14 on.
LATER = {"compression"}
TORCH = {"torch", "executorch", "torchao", "triton"}


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py") if "_schema" not in p.parts)


def room(path: Path) -> str:
    """The name that the layers know a file by: its own, or its folder's."""
    inner = path.relative_to(SOURCE)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


def imports(path: Path) -> set[tuple[str, bool]]:
    """(name, is ours) of everything that a file imports, inside functions too."""
    found = set()
    package = ("headrace", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            ours = name[0] == "headrace"
            found.add((name[1] if ours and len(name) > 1 else name[0], ours))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    here = room(path)
    for name, ours in imports(path):
        if not ours:
            if here != "export":
                assert name not in TORCH, f"{path.name} imports {name}"
            if here not in APART:
                known = name in OUTSIDE | LATER or name in sys.stdlib_module_names
                assert known, f"{path.name} imports {name}"
            continue
        if here == "__init__" or name in {"headrace", "_core", "_schema", "__version__", here}:
            continue
        if here in APART:
            assert name in {"errors", "pte"}, f"{path.name} imports {name}"
        elif name in LEVEL:
            allowed = LEVEL[name] < LEVEL[here] or (here, name) in SIDEWAYS
            assert allowed, f"{path.name} imports {name}"
        else:
            assert here == "cli" and name in APART, f"{path.name} imports {name}"


# By ARCHITECTURE.md: what the files of each room of native/ may include, beside the public headers.
NATIVE = {
    "include": set(),
    "stream": {"stream"},
    "device": {"device"},
    "program": {"program", "device"},
    "cuda": {"cuda", "program", "device"},
    "python": {"python", "cuda", "program", "device"},
}


def test_native_rooms_include_one_way() -> None:
    """The engine's parts need no Python, and devices know of no programs."""
    native = SOURCE.parents[1] / "native"
    files = [p for p in native.rglob("*") if p.suffix in {".h", ".cpp"}]
    assert {p.relative_to(native).parts[0] for p in files} == set(NATIVE)
    for path in files:
        here = path.relative_to(native).parts[0]
        found = set(re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE))
        assert found <= NATIVE[here] | {"headrace"}, f"{path.name} includes {found - NATIVE[here]}"


def test_every_module_has_a_layer() -> None:
    assert {room(p) for p in modules()} <= set(LEVEL) | APART | {"__init__"}


def test_importing_and_running_maps_no_libtorch() -> None:
    """PK1: the run time imports no torch, and no libtorch is mapped."""
    code = """
import sys, headrace, headrace.cli
assert not [m for m in sys.modules if m.split('.')[0] in {'torch', 'executorch'}]
maps = open('/proc/self/maps').read()
assert 'libexecutorch.so' in maps and 'libtorch' not in maps and 'libc10' not in maps
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
