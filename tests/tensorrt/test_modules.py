"""DE2: the modules that NVIDIA ships have all that headrace's protocols ask for, and are refused where there is no GPU.

Looked at in processes of their own: TensorRT writes to stderr, and may end a process that has no driver.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.delegate import nvinfer
from headrace.delegate.tensorrt import DTYPES
from headrace.testing.tensorrt import StandIn
from tests.conftest import run_python, succeeded

MODULES = {"tensorrt_rtx_bindings": "tensorrt_rtx", "tensorrt_lean_bindings": "tensorrt_lean"}
# Of the dependency group `test`: whoever has not got it is told, not passed.
REQUIRED = "tensorrt_rtx_bindings"

CLASSES: dict[str, tuple[type, ...]] = {
    "Runtime": (nvinfer.Runtime, nvinfer.RtxRuntime),
    "ICudaEngine": (nvinfer.Engine, nvinfer.RtxEngine),
    "IExecutionContext": (nvinfer.ExecutionContext, nvinfer.RtxExecutionContext),
    "IRuntimeConfig": (nvinfer.RuntimeConfig, nvinfer.RuntimeConfig),
    "IRuntimeCache": (nvinfer.RuntimeCache, nvinfer.RuntimeCache),
}
ONLY_RTX = ("IRuntimeConfig", "IRuntimeCache")

DUMP = """
    import importlib, json, sys
    module = importlib.import_module(sys.argv[1])
    found = {"version": module.__version__, "classes": {}, "enums": {}}
    for name in json.loads(sys.argv[2]):
        cls = getattr(module, name)
        found["classes"][name] = {m: getattr(cls, m).__doc__ or "" for m in dir(cls) if not m.startswith("__")}
    enums = {n: getattr(module, n, None) for n in ("TensorIOMode", "TensorLocation", "DataType", "EngineValidity",
                                                   "EngineInvalidityDiagnostics")}
    enums["Severity"] = module.ILogger.Severity
    found["enums"] = {n: {k: v.value for k, v in e.__members__.items()} for n, e in enums.items() if e is not None}

    class Log(module.ILogger):
        def __init__(self):
            module.ILogger.__init__(self)
        def log(self, severity, msg):
            pass

    found["severity"] = module.ILogger.Severity.ERROR in (module.ILogger.Severity.ERROR,)
    Log()
    print(json.dumps(found))
"""


def installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        assert name != REQUIRED, (
            f"{name}: expected it, of the dependency group 'test', got none; install that"
        )
        pytest.skip(f"{name} is not installed")


def surface(name: str) -> dict[str, Any]:
    installed(name)
    classes = [c for c in CLASSES if MODULES[name] == "tensorrt_rtx" or c not in ONLY_RTX]
    return dict(json.loads(succeeded(run_python(DUMP, name, json.dumps(classes)))))


def members(protocols: tuple[type, ...], rtx: bool) -> dict[str, Any]:
    """Methods and attributes that the protocol asks for: name to function, or None for an attribute."""
    found: dict[str, Any] = {}
    for protocol in protocols if rtx else protocols[:1]:
        for base in reversed(protocol.__mro__):
            if base.__module__ != nvinfer.__name__:
                continue
            found.update(dict.fromkeys(inspect.get_annotations(base)))
            for name, value in vars(base).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    found[name] = value
                elif isinstance(value, property):
                    found[name] = None
    assert found
    return found


def overloads(text: str, name: str) -> list[list[str]]:
    """The parameters of each overload that pybind11 documents, without self: their types."""
    calls = re.findall(rf"{name}\(self: [^,)]+(?:, )?(.*)\) -> ", text)
    listed = [re.split(r", (?=\w+: )", c) if c else [] for c in calls]
    return [[p.split(" = ")[0].split(": ", 1)[1] for p in parameters] for parameters in listed]


TYPES = {
    "int": "SupportsInt",
    "str": "str",
    "bytes": "Buffer",
    "tuple[int, ...]": "tuple",
    "list[int]": "Sequence",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_class_and_method_that_is_used_is_there(name: str) -> None:
    """DE2: with as many arguments, of these types. What the stand-in keeps, the real ones keep."""
    found = surface(name)
    rtx = MODULES[name] == "tensorrt_rtx"
    checked = 0
    for cls, documented in found["classes"].items():
        for member, function in members(CLASSES[cls], rtx).items():
            assert member in documented, f"{name} {found['version']}: {cls} has no {member}"
            if function is None:
                continue
            parameters = list(inspect.signature(function).parameters.values())[1:]
            wanted = [str(p.annotation) for p in parameters]
            known = overloads(documented[member], member)
            assert known, f"{cls}.{member}: {documented[member]!r}"
            needed = sum(p.default is inspect.Parameter.empty for p in parameters)
            assert any(
                len(types) >= needed
                and all(
                    TYPES.get(ours, ours.split(" ")[0]) in theirs
                    for ours, theirs in zip(wanted, types)  # noqa: B905
                )
                for types in known
            ), f"{cls}.{member}: expected {wanted}, got {known}"
            checked += 1
    assert checked >= (22 if rtx else 17)


@pytest.mark.parametrize("name", MODULES)
def test_every_enum_that_is_used_has_its_members(name: str) -> None:
    """DE2: and what stands in has the same."""
    found = surface(name)
    enums = found["enums"]
    assert set(DTYPES) <= set(enums["DataType"])
    assert {"INPUT", "OUTPUT"} <= set(enums["TensorIOMode"])
    assert {"HOST", "DEVICE"} <= set(enums["TensorLocation"])
    assert {"INTERNAL_ERROR", "ERROR", "WARNING"} <= set(enums["Severity"]) and found["severity"]
    if MODULES[name] == "tensorrt_rtx":
        assert "INVALID" in enums["EngineValidity"]
        # Bits, as they are read.
        bits = enums["EngineInvalidityDiagnostics"]
        assert {"VERSION_MISMATCH", "UNSUPPORTED_CC"} <= set(bits)
        assert all(value > 0 and value & value - 1 == 0 for value in bits.values()), bits
    stand_in = StandIn(MODULES[name])
    assert {e.name for e in stand_in.DataType} - {"INT4"} == set(DTYPES)


@pytest.mark.parametrize(
    "cls", ["Runtime", "ICudaEngine", "IExecutionContext", "IRuntimeConfig", "IRuntimeCache"]
)
def test_the_stand_in_keeps_the_protocols(cls: str) -> None:
    """DE2: what it stands in for."""
    from headrace.testing import tensorrt

    ours = {
        "Runtime": (tensorrt._Runtime, tensorrt._RtxRuntime),
        "ICudaEngine": (tensorrt._Engine, tensorrt._RtxEngine),
        "IExecutionContext": (tensorrt._Context, tensorrt._RtxContext),
        "IRuntimeConfig": (tensorrt._Config, tensorrt._Config),
        "IRuntimeCache": (tensorrt._Cache, tensorrt._Cache),
    }[cls]
    for rtx, made in zip((False, True), ours, strict=True):
        for member, function in members(CLASSES[cls], rtx).items():
            if function is None:
                text = inspect.getsource(made.__mro__[-2])
                assert f"self.{member}" in text or hasattr(made, member), (cls, member)
            else:
                theirs = inspect.signature(getattr(made, member)).parameters
                assert len(theirs) == len(inspect.signature(function).parameters), (cls, member)


def test_importing_needs_no_driver_and_doctor_tells_what_there_is() -> None:
    """DE2, GC4: each kind with its module and version; none of them is a reason to fail."""
    installed(REQUIRED)
    found = {i.kind: i for i in nvinfer.installed()}
    assert set(found) == set(nvinfer.KINDS)
    rtx = found["tensorrt_rtx"]
    assert rtx.problem == "" and rtx.module == REQUIRED and rtx.version.startswith("1.")


ENGINE = """
    import importlib, sys
    import numpy as np
    trt = importlib.import_module("tensorrt_rtx_bindings")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network()
    x = network.add_input("x", trt.DataType.FLOAT, (2, 4))
    weights = network.add_constant((4, 4), trt.Weights(np.eye(4, dtype=np.float32)))
    none = trt.MatrixOperation.NONE
    y = network.add_matrix_multiply(x, none, weights.get_output(0), none).get_output(0)
    y.name = "output0"
    network.mark_output(y)
    engine = builder.build_serialized_network(network, builder.create_builder_config())
    open(sys.argv[1], "wb").write(bytes(engine))
    print("built")
"""

LOAD = """
    import sys
    from types import SimpleNamespace
    import headrace
    from headrace.delegate import nvinfer
    from headrace.pte.tensorrt import Binding, Built, read, write

    engine = open(sys.argv[1], "rb").read()
    kind, version = sys.argv[2:]
    built = Built(kind, version, version_compatible=True) if version else None
    blob = read(write(engine, [Binding("x", True), Binding("output0", False)], built=built))
    try:
        # A GPU by its name, on a machine that has none.
        nvinfer.load_engine(blob, SimpleNamespace(name="cuda:0", ordinal=0), kind if version else "")
    except headrace.DelegateUnavailable as e:
        print(e)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that TensorRT for RTX builds, which needs no GPU."""
    installed(REQUIRED)
    path = tmp_path_factory.mktemp("rtx") / "engine"
    assert succeeded(run_python(ENGINE, path)) == "built\n"
    return path


def test_real_engine_is_known_by_its_first_bytes(engine: Path) -> None:
    """DE2: what a payload without a word on its builder is refused by: kind and version of the builder."""
    data = engine.read_bytes()
    version = surface(REQUIRED)["version"]
    assert data[:4] == b"vtrt" and ".".join(map(str, data[24:28])) == version


@pytest.mark.parametrize("version", ["", "1.7.1.116"])
def test_real_run_time_without_a_gpu_refuses_and_says_why(engine: Path, version: str) -> None:
    """DE2, GC4, OP3: no crash; built for X, running Y, and the driver that is missing."""
    from tests.conftest import missing_gpu

    if "expected an NVIDIA driver" not in missing_gpu():
        pytest.skip("there is a driver: tests/cuda looks at what TensorRT says on it")
    done = run_python(LOAD, engine, "tensorrt_rtx", version)
    assert done.returncode == 0, done.stderr
    assert "expected an engine that runs here, got one built for tensorrt_rtx 1." in done.stdout
    assert "running tensorrt_rtx_bindings 1." in done.stdout and "on cuda:0: " in done.stdout
    assert "GPU driver" in done.stdout or "CUDA driver version is insufficient" in done.stdout


def test_real_lean_run_time_without_a_driver_does_not_end_the_process(engine: Path) -> None:
    """OP3: it hands out a run time that is none; using it ends the process (seen with 11.4.0.106)."""
    from tests.conftest import missing_gpu

    installed("tensorrt_lean_bindings")
    if "expected an NVIDIA driver" not in missing_gpu():
        pytest.skip("there is a driver")
    done = run_python(LOAD, engine, "tensorrt_lean", "11.4.0.106")
    assert done.returncode == 0, done.stderr
    assert "CUDA initialization failure" in done.stdout
