"""The package as type checkers see it: the extension's stub, and a user's script under mypy --strict."""

from __future__ import annotations

import ast
import collections.abc
import importlib.metadata
import os
import re
import subprocess
import sys
import types
import typing
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing
import pytest

import headrace
from examples import scale
from headrace.engine import core
from tests import programs
from tests.conftest import succeeded

MAKER = programs.ROOT / "native/python/stub.py"
SOURCE = programs.ROOT / "src/headrace"
STUB = SOURCE / "_core.pyi"
RULES = SOURCE / "_core.nbpat"
SCRIPT = Path(__file__).with_name("typed_script.py")


# -------------------- the stub of the extension


def make(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MAKER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def needs_the_stubs_nanobind() -> None:
    """The one reason for which stubs are not made here."""
    (written,) = re.findall(r"\A# Made by .* with nanobind ([0-9.]+) ", STUB.read_text())
    installed = importlib.metadata.version("nanobind")
    if installed.split(".")[:2] != written.split("."):
        pytest.skip(f"the stub is nanobind {written}'s, and {installed} may write the same otherwise")


def test_the_stub_says_what_the_extension_has() -> None:
    """`make stubs` would change nothing."""
    needs_the_stubs_nanobind()
    done = make("--check", STUB)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "call `make stubs`"


def test_a_stub_that_says_something_else_is_seen(tmp_path: Path) -> None:
    needs_the_stubs_nanobind()
    other = tmp_path / "_core.pyi"
    text = STUB.read_text()
    assert text.count(" -> Partition:") == 1
    other.write_text(text.replace(" -> Partition:", " -> object:"))
    done = make("--check", other)
    assert done.returncode == 1
    changed = [line for line in done.stdout.splitlines() if re.match(r"[-+] ", line)]
    assert [line[0] for line in changed] == ["-", "+"] and all("def partition(" in line for line in changed)
    assert changed[1].endswith(" -> Partition:")


def test_a_rule_for_a_name_that_is_gone_is_an_error(tmp_path: Path) -> None:
    needs_the_stubs_nanobind()
    rules = tmp_path / "rules.nbpat"
    rules.write_text(RULES.read_text() + "\n_core\\.Device\\.gone$:\n    def gone(self) -> int: ...\n")
    done = make("--rules", rules, "--check", STUB)
    assert done.returncode == 1
    assert r"got _core\.Device\.gone$; name what is there" in done.stderr


NOT_HERE = {
    "cuda_info": "needs a driver",
    "Buffer.__cuda_array_interface__": "needs a GPU",
    "library_facts": "needs a library: tests/aoti",
    "read_aoti_payload": "needs a library: tests/aoti",
}


def declared() -> dict[str, str]:
    """What the stub says that each function and property gives, where a rule says it and it is not None."""
    queries = [line[:-1] for line in RULES.read_text().splitlines() if re.match(r"_core.*:$", line)]
    assert len(queries) > 20
    found = {}
    for top in ast.parse(STUB.read_text()).body:
        inside = top.body if isinstance(top, ast.ClassDef) else [top]
        for each in inside:
            if not isinstance(each, ast.FunctionDef) or each.returns is None:
                continue
            name = f"{top.name}.{each.name}" if isinstance(top, ast.ClassDef) else each.name
            if any(re.search(query, f"headrace._core.{name}") for query in queries):
                found[name] = ast.unparse(each.returns)
    return {name: kind for name, kind in found.items() if kind != "None"}


def fits(value: object, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if origin is dict:
        assert isinstance(value, dict)
        return all(fits(key, inner[0]) and fits(item, inner[1]) for key, item in value.items())
    if origin is list:
        assert isinstance(value, list)
        return all(fits(item, inner[0]) for item in value)
    if origin is tuple:
        assert isinstance(value, tuple)
        kinds: Sequence[Any] = [inner[0]] * len(value) if inner[-1] is ... else inner
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    # A bool is no int here.
    return value is None if kind in (None, type(None)) else type(value) is kind


def given() -> dict[str, list[object]]:
    """What the extension gives for each of those names; what can be None both ways."""
    sim = headrace.device("sim")
    stream, lane = sim.stream(), sim.partition(sms=8)
    x = np.arange(4, dtype=np.float32)
    buffer, host = sim.to_device(x), core.Buffer.from_float32(x)
    stream._begin_capture()
    ended = stream._end_capture()
    file = core.Program.load(scale.PROGRAM, [], 1, True, 1000, {}, sim, lane)
    method = file.method("forward")
    began = core.record_start()
    outputs = method.call((buffer,), None, None, False)
    raw = core.record_stop(began)
    captured = core.capture(method, (buffer,), None, 4)
    graph = captured[0]
    former = core.select(stream, None)
    core.restore(*former)
    return {
        "device_by_id": [core.device_by_id(sim._id), core.device_by_id(-7)],
        "select": [former],
        "selection": [core.selection()],
        "record_stop": [raw],
        "capture": [captured],
        "Device.sm_limits": [sim.sm_limits],
        "Device.empty": [sim.empty(3)],
        "Device.to_device": [buffer],
        "Device.partition": [lane],
        "Device.split": [sim.split([8, 8])],
        "Device.memory": [sim.memory()],
        "Stream.__cuda_stream__": [stream.__cuda_stream__()],
        "Stream.record": [stream.record(), stream.record(sim.event())],
        "Stream.partition": [stream.partition, lane.stream().partition],
        "Stream._end_capture": [ended],
        "Buffer.shape": [buffer.shape],
        "Buffer.strides": [buffer.strides],
        "Buffer.numpy": [buffer.numpy()],
        "Buffer.float32": [host.float32()],
        "Buffer.from_float32": [host],
        "Buffer.__array__": [buffer.__array__()],
        "Buffer.__dlpack__": [buffer.__dlpack__()],
        "Buffer.__dlpack_device__": [buffer.__dlpack_device__()],
        "Graph.replay": [graph.replay((buffer,), None, None, False)],
        "Graph.stats": [graph.stats()],
        "Graph.work": [graph.work()],
        "Method.inputs": [method.inputs()],
        "Method.outputs": [method.outputs()],
        "Method.islands": [method.islands()],
        "Method.stats": [method.stats()],
        "Method.call": [outputs],
        "Program.load": [file],
        "Program.memory": [file.memory()],
    }


def test_types_that_rules_give_are_those_that_come() -> None:
    """nanobind cannot know them, so what is written by hand is compared with values."""
    typing_extensions = pytest.importorskip("typing_extensions", reason="names DLPack's capsule")
    names = {**vars(core), **vars(typing), **vars(numpy.typing), "Callable": collections.abc.Callable}
    names["CapsuleType"] = typing_extensions.CapsuleType
    said, came = declared(), given()
    assert came.keys() == said.keys() - NOT_HERE.keys() and NOT_HERE.keys() <= said.keys()
    for name, kind in said.items():
        for value in came.get(name, ()):
            assert fits(value, eval(kind, names)), f"{name}: the stub says {kind}, and there came {value!r}"
    assert not fits((1, True), tuple[int, int]) and not fits([None], list[int])


# -------------------- a user's script


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user whose environment has the package as it is installed by a wheel, NumPy, and nothing else."""
    pytest.importorskip("mypy", reason="needs mypy: it is what reads the types")
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "numpy").symlink_to(Path(np.__file__).parent)
    (site / "headrace").mkdir()
    for file in SOURCE.iterdir():
        (site / "headrace" / file.name).symlink_to(file)
    (folder / "mypy.ini").write_text("[mypy]\n")
    return folder


def mypy(user: Path, *files: Path) -> list[str]:
    """Lines of `mypy --strict`, which ended as it does with those: 1, or 0 where there are none."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MYPY")}
    command: list[object] = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += ["--config-file", user / "mypy.ini", "--cache-dir", user / "cache"]
    command += ["--python-executable", user / "venv/bin/python", *(file.name for file in files)]
    done = subprocess.run(
        [str(c) for c in command], cwd=user, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stderr == "" and done.returncode == bool(done.stdout), done.stderr + done.stdout
    return done.stdout.splitlines()


def script(user: Path, name: str, right: str = "", wrong: str = "") -> Path:
    """The script under another name, ``wrong`` in the place of ``right``."""
    text = SCRIPT.read_text()
    if right:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    file = user / f"{name}.py"
    file.write_text(text)
    return file


def test_the_script_runs() -> None:
    """On the simulated device: what it says of types is of a program that works."""
    pytest.importorskip("typing_extensions", reason="the script says types by its assert_type")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert succeeded(done) == "done\n"


def test_a_typed_script_passes_mypy_strict(user: Path) -> None:
    """PEP 561: the package's own types are used, and each is the one that the script says. Once more from mypy's cache, in
    which a function and a module of one name in one package would be confused."""
    assert mypy(user, script(user, "right")) == []
    assert mypy(user, script(user, "again")) == []


WRONG = {
    "partition(sms=8)": ('partition(sms="8")', "arg-type"),
    "device.split([8, 16])": ("device.split(8)", "arg-type"),
    'headrace.device("sim", schedule="late")': ('headrace.device("sim", schedul="late")', "call-arg"),
    "device=device, lane=lane)": ("device=device, lane=stream)", "arg-type"),
    "lane.stream()": ('lane.stream("high")', "arg-type"),
    "graph.stats.replays": ("graph.stats.replay", "attr-defined"),
    "event.synchronize()": ("event.wait()", "attr-defined"),
    "reads=[x], writes=[y]": ("reads=[1], writes=[y]", "list-item"),
    "(x * 6).tolist()": ("(x * 6).tolist() and method.devices", "attr-defined"),
}


def test_wrong_calls_are_found(user: Path) -> None:
    """Each at its line, by its kind, and nothing else."""
    files, want = [], []
    for number, (right, (wrong, kind)) in enumerate(WRONG.items()):
        file = script(user, f"wrong_{number}", right, wrong)
        (line,) = [i for i, text in enumerate(file.read_text().splitlines(), 1) if wrong in text]
        files.append(file)
        want.append((file.name, line, kind))
    found = []
    for text in mypy(user, *files):
        at = re.fullmatch(r"(\w+\.py):(\d+): error: .* +\[([\w-]+)\]", text)
        if at is not None:
            found.append((at[1], int(at[2]), at[3]))
        else:
            assert ": note: " in text, text
    assert sorted(found) == sorted(want)


def test_without_its_marker_the_package_would_have_no_types(user: Path) -> None:
    """PEP 561: it is py.typed that mypy goes by."""
    (marker,) = user.glob("venv/lib/python*/site-packages/headrace/py.typed")
    where = marker.readlink()
    marker.unlink()
    try:
        found = mypy(user, script(user, "unmarked"))
    finally:
        marker.symlink_to(where)
    assert any("missing library stubs or py.typed marker" in line for line in found), found
