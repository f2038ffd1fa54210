"""TensorRT at export: what is written, read by its format alone, and what the engines themselves say.

Engines are TensorRT-RTX's, built with no GPU, and none is run here: on a machine without a GPU TensorRT refuses to load any.
What an engine says of itself is read from its bytes, in which the builder leaves a description of the compiled graph.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import pte
from headrace.errors import OptionError
from headrace.export import Profile, TensorRT, engines, stand_in
from headrace.pte import tensorrt
from tests import programs
from tests.conftest import run_python
from tests.unit import cases

CASES = cases.named("tests.unit.tensorrt_child")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case of tensorrt_child.py said, in one process with torch."""
    return cases.ran("tests.unit.tensorrt_child", tmp_path_factory.mktemp("tensorrt"), sys.executable)


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_with_torch(case: str, results: dict[str, str]) -> None:
    """EX1, EX4, EX5, EX6, OP2, OP3: the case of tensorrt_child.py."""
    assert results[case] == ""


# -------------------- payloads, by their format


@dataclass(frozen=True)
class Payload:
    """What 32 bytes and a JSON object say, read without the package's own reader."""

    magic: bytes
    metadata: dict[str, Any]
    engine: bytes


def parsed(data: bytes) -> Payload:
    """The format as Torch-TensorRT writes it: magic, then three numbers of 32 bits (offset and size of the metadata, offset
    of the engine), one of 64 (its size), eight reserved bytes that begin with 1; all little-endian."""
    magic, offset, nbytes, engine, engine_nbytes, reserved = struct.unpack_from("<4sIIIQ8s", data)
    assert offset == 32 and reserved == b"\1\0\0\0\0\0\0\0" and engine % 16 == 0
    assert offset + nbytes <= engine and engine + engine_nbytes == len(data)
    assert data[offset + nbytes : engine] == bytes(engine - offset - nbytes)
    text = data[offset : offset + nbytes].decode()
    metadata = json.loads(text)
    assert json.dumps(metadata, separators=(",", ":")) == text
    return Payload(magic, metadata, data[engine : engine + engine_nbytes])


@dataclass(frozen=True)
class Found:
    """One island of TensorRT's in a program."""

    program: str
    method: pte.MethodInfo
    island: pte.Island
    data: bytes


def islands(name: str) -> Iterator[Found]:
    raw = programs.ENGINES.load(name).path.read_bytes()
    for method in pte.read(raw).methods:
        for island in method.islands:
            if island.delegate == "TensorRTBackend":
                yield Found(name, method, island, raw[island.payload_offset :][: island.payload_nbytes])


@pytest.mark.parametrize("name", programs.ENGINES.names())
def test_a_payload_is_what_its_format_says(name: str) -> None:
    """EX1, DE2: inputs then outputs of the delegate's call, in order, with the dtypes and shapes of the program's plan."""
    found = list(islands(name))
    assert found
    for one in found:
        payload = parsed(one.data)
        assert payload.magic == b"TR01" and payload.metadata["aliased_io"] == []
        assert payload.metadata["hardware_compatible"] is False and payload.metadata["device_id"] == 0
        assert payload.metadata["headrace"]["runtime"] == "tensorrt_rtx"
        bindings = payload.metadata["io_bindings"]
        values = [one.method.values[arg] for arg in one.island.args]
        assert one.island.inputs == sum(b["is_input"] for b in bindings) and len(bindings) == len(values)
        assert [b["is_input"] for b in bindings] == sorted((b["is_input"] for b in bindings), reverse=True)
        outputs = [b["name"] for b in bindings if not b["is_input"]]
        assert outputs == [f"output_{i}" for i in range(len(outputs))]
        assert len({b["name"] for b in bindings}) == len(bindings)
        for binding, value in zip(bindings, values, strict=True):
            assert value.kind == "tensor" and value.device == "cuda:0"
            assert binding["dtype"] == value.dtype
            # The plan has the largest sizes; -1 is one that varies.
            shape = [v if b >= 0 else b for b, v in zip(binding["shape"], value.shape, strict=True)]
            assert binding["shape"] == shape
        assert one.island.spec("target_device") == b"cuda:0"
        assert one.island.spec("headrace.tensorrt") is None
        # And the package's own reader says the same.
        read = tensorrt.read(one.data)
        assert [(b.name, b.is_input, b.dtype, list(b.shape)) for b in read.bindings] == [
            (b["name"], b["is_input"], b["dtype"], b["shape"]) for b in bindings
        ]
        assert bytes(read.engine) == payload.engine


# -------------------- what engines say of themselves

TYPES = {
    "float": "float32", "half": "float16", "bf16": "bfloat16", "int8": "int8", "int32": "int32", "int64": "int64",
    "bool": "bool",
}  # fmt: skip


def described(
    engine: bytes,
) -> tuple[dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]], set[str], set[str]]:
    """From the text that the builder leaves in an engine: each tensor that crosses the border of a compiled graph, by
    name, with its dtype, its sizes (-1 where one is a name) and its strides; the architectures; whether TF32 is used."""
    tensors: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {}
    machines: set[str] = set()
    tf32: set[str] = set()
    for start in re.finditer(rb"header \{\n", engine):
        text = engine[start.start() : engine.find(b"\0", start.start())].decode(errors="replace")
        inner = "accelerators={*}" in text
        for names in () if inner else re.findall(r"^\s*accelerators=\{([^}]*)\}", text, re.MULTILINE):
            machines |= set(names.split())
        tf32 |= set(re.findall(r"^\s*tf32=(\d)", text, re.MULTILINE))
        if inner:
            continue
        for line in re.findall(r'^\s*tensor=\{.*region="" .*\}$', text, re.MULTILINE):
            name = re.search(r' name="([^"]+?)(?:\.1)?" ', line)
            dims = re.search(r" dims=\{ ([^}]*?) ?\}", line)
            strides = re.search(r" strides=\{ ([^}]*?) ?\}", line)
            kind = re.search(r" type=(\w+) ", line)
            assert name and dims and strides and kind, line
            sizes = tuple(int(d) if d.isdigit() else -1 for d in dims[1].split())
            tensors[name[1]] = (TYPES.get(kind[1], kind[1]), sizes, tuple(strides[1].split()))
    return tensors, machines, tf32


def compared(payload: bytes) -> int:
    """How many bindings the engine in a payload describes as the payload does; raises AssertionError where it does not."""
    read = tensorrt.read(payload)
    tensors, _, _ = described(bytes(read.engine))
    count = 0
    for binding in read.bindings:
        if binding.name not in tensors:
            continue  # read or written by a layer outside of every compiled graph
        dtype, sizes, strides = tensors[binding.name]
        assert dtype == binding.dtype, (binding, dtype)
        # To the builder a scalar is one element.
        assert sizes == (binding.shape or (1,)), (binding, sizes)
        assert strides[-1] == "1" or sizes[-1] == 1, (binding, strides)
        count += 1
    return count


def test_engines_have_the_bindings_that_their_payloads_say() -> None:
    """EX1: of every program's islands the engine's own description: names, dtypes, sizes, dense."""
    found = [one for name in programs.ENGINES.names() for one in islands(name)]
    matched = [compared(one.data) for one in found]
    wanted = [len(tensorrt.read(one.data).bindings) for one in found]
    assert len(found) >= 20
    whole = [one.program for one, m, w in zip(found, matched, wanted, strict=True) if m == w]
    assert len(whole) >= 10 and sum(matched) >= 0.8 * sum(wanted), (whole, sum(matched), sum(wanted))


def test_another_engines_description_is_not_taken_for_it() -> None:
    """EX1: the comparison above finds what is wrong."""
    one = next(islands("branches"))
    read = tensorrt.read(one.data)
    first, *rest = read.bindings
    for wrong in (
        tensorrt.Binding(first.name, True, "float16", first.shape),
        tensorrt.Binding(first.name, True, first.dtype, (*first.shape[:-1], first.shape[-1] + 1)),
    ):
        with pytest.raises(AssertionError):
            compared(tensorrt.write(read.engine, [wrong, *rest]))
    assert compared(tensorrt.write(read.engine, read.bindings)) == len(read.bindings)


def test_an_engine_is_for_the_gpus_and_the_precision_that_were_asked_for() -> None:
    """EX1: compute capabilities, no TF32 unasked, float16 inside and float32 at the border; a profile more is code more."""
    (two,) = islands("convolved.two_gpus")
    engine = bytes(tensorrt.read(two.data).engine)
    assert described(engine)[1] == {"sm86", "sm120"} and tensorrt.read(two.data).built == tensorrt.Built(
        "tensorrt_rtx", "1.7.1.116", ("8.6", "12.0")
    )
    for name in programs.ENGINES.names():
        for one in islands(name):
            assert described(bytes(tensorrt.read(one.data).engine))[2] <= {"0"}, name
    (whole,), (half,) = islands("transformer"), islands("transformer.half")
    types = [
        set(
            re.findall(
                rb"^\s*tensor=\{.* type=(\w+) \}$", bytes(tensorrt.read(one.data).engine), re.MULTILINE
            )
        )
        for one in (whole, half)
    ]
    assert b"half" in types[1] - types[0]
    assert {b.dtype for b in tensorrt.read(half.data).bindings} == {"float32"}
    (single,), (several,) = islands("dynamic_batch"), islands("dynamic_batch.two_profiles")
    assert len(several.data) > 1.5 * len(single.data)


def test_what_is_left_says_why() -> None:
    """EX5: the table of a program with a dtype that TensorRT lacks, and one with control flow."""
    there = programs.ENGINES.folder()
    rows = json.loads((there / "float64_and_bool.split.json").read_text())
    left = [why for _, _, delegate, _, why in rows if delegate != "TensorRT"]
    assert left and all(why.startswith("TensorRT: not supported: TensorRT has no float64") for why in left)
    assert any(delegate == "TensorRT" for _, _, delegate, _, _ in rows)
    rows = json.loads((there / "control_flow.split.json").read_text())
    assert any("TensorRT: not supported: control flow" in why for *_, why in rows)


AGAIN = """
    import hashlib, sys, warnings
    from tests.programs.exporting import without_run_time
    without_run_time(sys.argv[2:])
    warnings.simplefilter("ignore")
    import headrace.export
    from headrace.export import TensorRT, Xnnpack
    from tests.programs.split import MODELS
    lines = []
    for name in ("shared_weight", "dynamic_batch"):
        made = MODELS[name]()
        path = f"{sys.argv[1]}/{name}.pte"
        headrace.export.export(
            made.methods["forward"].module.eval(), tuple(made.methods["forward"].calls[0]), path=path,
            delegates=[TensorRT(builder="tensorrt_rtx", exclude=["aten.mul"]), Xnnpack()], verify=False,
            cache=sys.argv[1] + "/../cache", progress=lines.append,
            dynamic_shapes=made.options.get("dynamic_shapes"),
        )
        print(hashlib.sha256(open(path, "rb").read()).hexdigest())
    print(sum("TensorRT, from the cache" in line for line in lines))
"""


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """EX1: in processes whose hashes differ and that share a cache: the ONNX graphs, which are its keys, are the same."""
    answers = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        done = run_python(
            AGAIN,
            folder,
            *programs.package_folders(),
            environment={"PYTHONHASHSEED": str(seed)},
            python=programs.export_python(),
            timeout_s=1200,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        *hashes, kept = done.stdout.split()
        answers.append((hashes, int(kept)))
    assert answers[0][0] == answers[1][0] and len(set(answers[0][0])) == 2
    assert answers[0][1] == 0 < answers[1][1]


# -------------------- options


def test_options_are_checked_where_they_are_given() -> None:
    """OP2: what was expected, what came."""
    shapes: dict[str, Any] = {"x": (1, 4)}
    for make, text in (
        (lambda: TensorRT(builder="rtx"), "builder: expected one of None, 'tensorrt', 'tensorrt_rtx', got 'rtx'"),
        (lambda: TensorRT(precision="int8"), "precision: expected one of"),
        (lambda: TensorRT(hardware_compatibility="all"), "hardware_compatibility: expected one of"),
        (lambda: TensorRT(optimization_level=6), "optimization_level: expected one of"),
        (lambda: TensorRT(optimization_level=True), "optimization_level: expected one of"),
        (lambda: TensorRT(tf32=1), "tf32: expected True or False"),  # type: ignore[arg-type]
        (lambda: TensorRT(workspace_nbytes=-1), "workspace_nbytes: expected bytes"),
        (lambda: TensorRT(compute_capabilities="8.6"), 'expected a list such as ["8.6", "8.9"]'),
        (lambda: TensorRT(compute_capabilities=["sm_86"]), 'expected a list such as ["8.6", "8.9"]'),
        (lambda: TensorRT(compute_capabilities=["8.6", "8.6"]), "expected at least one, each once"),
        (lambda: TensorRT(compute_capabilities=[]), "expected at least one, each once"),
        (lambda: TensorRT(builder="tensorrt", compute_capabilities=["8.6"]), "builds for the GPU that is there"),
        (lambda: TensorRT(builder="tensorrt_rtx", version_compatible=True), "version_compatible: expected False"),
        (lambda: TensorRT(profiles=[{"x": 1}]), "profiles: expected a list of Profile(…)"),  # type: ignore[list-item]
        (lambda: TensorRT(min_size=0), "an integer of 1 or more"),
        (lambda: Profile(min=shapes, opt=shapes, max={}), "max: expected the inputs of min, ['x'], got []"),
        (lambda: Profile(min={"x": (-1,)}, opt=shapes, max=shapes), "integers of 0 or more, got (-1,)"),
        (lambda: Profile(min=shapes, opt={"x": (1,)}, max=shapes), "'x': expected shapes of one rank"),
        (
            lambda: Profile(min={"x": (1, 5)}, opt=shapes, max=shapes),
            "'x', dimension 1: expected min <= opt <= max, got 5, 4, 4",
        ),
        (lambda: Profile(min=3, opt=shapes, max=shapes), "min: expected a mapping"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(OptionError) as error:
            make()
        assert text in str(error.value)
    assert TensorRT(compute_capabilities=["8.6"]) == TensorRT(compute_capabilities=("8.6",))
    assert hash(TensorRT(profiles=[Profile(min=shapes, opt=shapes, max=shapes)]))


def test_the_command_takes_tensorrt(tmp_path: Path) -> None:
    """EX1, OP2: its options by name; what is wrong is an exit status of 2."""
    from headrace.export.command import _delegate

    text = "tensorrt:modules=a.*+b,builder=tensorrt_rtx,compute_capabilities=8.6+8.9,precision=float16,tf32=yes,optimization_level=2"
    assert _delegate(text) == TensorRT(
        modules=["a.*", "b"],
        builder="tensorrt_rtx",
        compute_capabilities=["8.6", "8.9"],
        precision="float16",
        tf32=True,
        optimization_level=2,
    )
    for wrong in ("tensorrt:colour=red", "tensorrt:tf32=maybe", "tensorrt:precision=int4", "aoti:tf32=yes"):
        done = run_python(
            "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))",
            "export", "tests.programs.command:make", "-o", tmp_path / "m.pte", "--delegate", wrong,
        )  # fmt: skip
        assert done.returncode == 2 and "expected" in done.stderr, (wrong, done.stderr)
    assert not list(tmp_path.iterdir())


# -------------------- in the place of engines


def test_the_stand_in_computes_the_graph() -> None:
    """EX4: every result, in order, of the inputs of each call; bfloat16 too."""
    onnx: Any = pytest.importorskip("onnx", reason="the test group has it")
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Relu", ["y"], ["output_0"]),
            helper.make_node("Shape", ["x"], ["output_1"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["n", 2])],
        [
            helper.make_tensor_value_info("output_0", kinds.FLOAT, ["n", 2]),
            helper.make_tensor_value_info("output_1", kinds.INT64, [2]),
        ],
        [helper.make_tensor("w", kinds.FLOAT, [2, 2], [1, 0, 0, -1])],
    )
    data = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()
    made = stand_in.Graph(data)
    assert made.inputs == [("x", "float32", (-1, 2))] and made.outputs[1] == ("output_1", "int64", (2,))
    for n in (1, 3, 3):
        x = np.arange(2 * n, dtype=np.float32).reshape(n, 2) - 1
        first, second = stand_in.evaluated(data, {"x": x})
        np.testing.assert_array_equal(first, np.maximum(x * [1, -1], 0))
        assert [made.result(i, [x]).tolist() for i in range(2)] == [first.tolist(), [n, 2]]
        assert second.tolist() == [n, 2]


@pytest.mark.parametrize("may_lack", [[], ["XnnpackBackend"], ["TensorRTBackend"]])
def test_engines_that_cannot_run_here_are_no_failure_where_that_is_said(
    may_lack: list[str], tmp_path: Path
) -> None:
    """EX4: a device with no run time for an engine, or that TensorRT does not support, counts as one that is not there;
    nothing else that is missing does."""
    ask = {
        "program": str(programs.ENGINES.load("branches").path),
        "data": [],
        "imports": [],
        "devices": [["cpu", None]],
        "resident": False,
        "ordered": False,
        "calls": [],
        "stand_in": {},
        "may_lack": may_lack,
    }
    (tmp_path / "ask.json").write_text(json.dumps(ask))
    np.savez(tmp_path / "inputs.npz")
    done = subprocess.run(
        [sys.executable, "-m", "headrace.export.verify_process", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["torch"] is False
    if may_lack == ["TensorRTBackend"]:
        (run,) = answer["runs"]
        assert "TensorRTBackend" in run["unavailable"] and "error" not in answer
    else:
        assert answer["error"]["kind"] == "DelegateUnavailable" and not answer["runs"]


def test_a_builder_is_asked_for_by_name() -> None:
    """OP3: in an environment that has none: what there is to install."""
    code = """
        import sys
        sys.modules.update(dict.fromkeys(["tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"]))
        from headrace.errors import ExportError
        from headrace.export import engines
        for name in (None, "tensorrt", "tensorrt_rtx"):
            try:
                engines.named(name)
            except ExportError as error:
                print(error)
    """
    lines = run_python(code).stdout.splitlines()
    assert len(lines) == 3 and all("pip install tensorrt" in line for line in lines)
    assert "tensorrt: no module" in lines[0] and "tensorrt_rtx: no module" in lines[0]
    assert "tensorrt_rtx:" not in lines[1] and "tensorrt-rtx-cu13-bindings" in lines[2]
    assert set(engines.MODULES) == {"tensorrt", "tensorrt_rtx"}
