"""Export by AOTInductor: what is written, what is refused, and that its checks find what is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace import pte
from headrace.errors import NotSupported, OptionError, ProgramError
from headrace.export import Target, payload
from headrace.export.target import ARCHITECTURES, SHIMS
from headrace.pte import fatbin
from tests import programs
from tests.conftest import run_python, succeeded
from tests.unit import cases

CASES = cases.named("tests.unit.export_child")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case of export_child.py said, in one process with torch."""
    programs.AOTI.ensure()
    programs.CUDA_FEW.ensure()
    return cases.ran("tests.unit.export_child", tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_with_torch(case: str, results: dict[str, str]) -> None:
    """EX1, EX6: the case of export_child.py; refusals name the node, its shapes and its source line."""
    assert results[case] == ""


# -------------------- what is written


class Written:
    """One exported program, its islands of AOTInductor, and the bytes that their payloads name."""

    def __init__(self, name: str, collection: programs.Collection = programs.AOTI) -> None:
        self.program = collection.load(name)
        self.file = pte.read(self.program.path)
        raw = self.program.path.read_bytes()
        segments = self.file.segments
        self.inside = {d.key: raw[segments[d.segment].offset :][: d.nbytes] for d in self.file.named_data}
        self.beside: dict[str, bytes] = {}
        for path in self.program.data:
            data = path.read_bytes()
            for entry in pte.read_data(path).entries:
                self.beside[entry.key] = data[entry.offset : entry.offset + entry.nbytes]
        self.islands = [
            (method, island, payload.decode(raw[island.payload_offset :][: island.payload_nbytes]))
            for method in self.file.methods
            for island in method.islands
            if island.delegate == "CudaBackend"
        ]


@pytest.mark.parametrize("name", programs.AOTI.names())
def test_an_island_says_what_the_run_time_needs(name: str) -> None:
    """DE1, EX1: a host library under the hash of its bytes, constants on the host, the number of inputs, the
    instruction set, a size for each dimension of each output."""
    written = Written(name)
    assert written.islands
    for method, island, said in written.islands:
        library = written.inside[said.library_key]
        assert said.library_key == hashlib.sha256(library).hexdigest() + "_so_blob"
        assert library[:4] == b"\x7fELF"
        assert island.spec("target_device") == b"cpu" and island.spec("method_name") == method.name.encode()
        host = json.loads(island.spec("headrace_host") or b"")
        assert host["version"] == 1 and host["march"] == "x86-64-v3"
        assert island.inputs is not None and len(host["outputs"]) == len(island.args) - island.inputs
        for where in host["symbols"].values():
            value = method.values[island.args[where[0]]]
            assert where[0] < island.inputs and where[1] < len(value.shape)
        for sizes, index in zip(host["outputs"], island.args[island.inputs :], strict=True):
            assert len(sizes) == len(method.values[index].shape)
        for constant in said.constants:
            storage = {**written.inside, **written.beside}[constant.storage_key]
            assert constant.device == payload.CPU and constant.nbytes == len(storage)
            last = constant.offset + sum(
                (s - 1) * stride for s, stride in zip(constant.sizes, constant.strides, strict=True)
            )
            assert (last + 1) * pte.DTYPES[constant.dtype].itemsize <= len(storage)


@pytest.mark.parametrize("name", programs.AOTI.names())
def test_sizes_of_outputs_are_what_eager_gave(name: str) -> None:
    """DE1: every shape expression, at the sizes of every recorded call, where one island is the whole method."""
    written = Written(name)
    for method, island, _ in written.islands:
        if len(method.islands) > 1 or len(method.inputs) != island.inputs:
            continue
        host = json.loads(island.spec("headrace_host") or b"")
        calls = [c for c in written.program.calls if c.method == method.name]
        assert calls
        for call in calls:
            names: dict[str, Any] = {"min": min, "max": max}
            for symbol, (i, dim) in host["symbols"].items():
                names[symbol] = call.inputs[i].data.shape[dim]
            got = [[eval(str(size), dict(names)) for size in sizes] for sizes in host["outputs"]]
            wanted = [list(o.data.shape) for o in call.outputs]
            assert all(shape in wanted for shape in got)
            if len(got) == len(wanted):
                assert got == wanted


def test_one_model_gives_one_library() -> None:
    """EX1: the same model gives the same bytes, wherever its buffers and its constants lie."""
    keys = set()
    for name in ("mlp", "mlp_host", "mlp_resident"):
        ((_, _, said),) = Written(name).islands
        keys.add((said.library_key, tuple((c.fqn, c.storage_key) for c in said.constants)))
    assert len(keys) == 1


def test_planning_follows_the_options() -> None:
    """EX1, DM1: device memory with copies, host memory, or the caller's device memory without a copy."""
    found = {}
    for name in ("mlp", "mlp_host", "mlp_resident"):
        method = Written(name).file["forward"]
        copies = sum(o.calls for o in method.operators if o.name.startswith("et_copy::"))
        devices = {b.device for b in method.buffers if b.nbytes}
        found[name] = (copies, devices, method.inputs[0].device, method.inputs[0].location)
    assert found["mlp"][0] == 2 and found["mlp"][1] == {"cpu", "cuda:0"} and found["mlp"][2] == "cpu"
    assert found["mlp_host"][:3] == (0, {"cpu"}, "cpu")
    assert found["mlp_resident"][0] == 0 and found["mlp_resident"][2:] == ("cuda:0", "unplanned")


def test_constants_lie_inside_or_beside() -> None:
    """EX1: named data of the program, or of its data file, and then of that alone. The sixth parameter of the
    model has eight elements: Inductor writes so small ones into the code."""
    assert not Written("mlp").beside and len(Written("mlp").inside) == 1 + 5
    beside = Written("mlp_resident")
    assert [p.name for p in beside.program.data] == ["mlp_resident.ptd"]
    assert len(beside.beside) == 5 and len(beside.inside) == 1


def test_methods_hold_their_weights_once() -> None:
    """EX1: two methods over one trunk name the same storages, each there once."""
    written = Written("two_methods")
    used = {
        method.name: {c.fqn: c.storage_key for c in said.constants} for method, _, said in written.islands
    }
    assert used["features"] == used["score"] and len(used["score"]) == 5
    assert set(written.beside) == set(used["score"].values())
    assert written.program.data[0].stat().st_size < 2 * sum(map(len, written.beside.values()))


def test_a_constant_of_two_islands_keeps_its_name_in_both() -> None:
    """EX3: each island lists it under its own name; the bytes are there once."""
    written = Written("split")
    (_, _, first), (_, _, second) = written.islands
    assert [c.fqn for c in first.constants] == [c.fqn for c in second.constants] == ["weight"]
    assert first.constants[0].storage_key == second.constants[0].storage_key
    assert [i.delegate for i in written.file["forward"].islands] == ["CudaBackend", "TestA", "CudaBackend"]


def test_state_starts_as_it_is_in_the_model() -> None:
    """EX1: mutable buffers are the method's, on the host, with their initial values in the file."""
    states = [v for v in Written("kv_cache").file["forward"].values if v.location == "mutable"]
    assert {v.name for v in states} == {"keys", "values", "calls"}
    assert {v.device for v in states} == {"cpu"}


def test_the_exporter_counts_on_shims_that_there_are() -> None:
    """DE1: whatever the exporter lets a library call is in the run time's library of shims."""
    folder = Path(headrace._core.__file__).parent / "lib"
    shims = ctypes.CDLL(str(folder / "libheadrace_shims.so"))
    missing = [name for name in SHIMS if not hasattr(shims, name.replace("aoti_torch_", "aoti_hrace_"))]
    assert len(SHIMS) > 30 and missing == []
    assert not hasattr(shims, "aoti_hrace_cpu_convolution")


# -------------------- for a GPU, where there is none


# `make export-cuda` looks at all of them.
FOR_GPU = programs.CUDA if os.environ.get("HEADRACE_CUDA_PROGRAMS") == "all" else programs.CUDA_FEW
OURS = [name for name in FOR_GPU.names() if not name.startswith("stock_")]


@pytest.mark.parametrize("name", OURS)
def test_an_island_for_a_gpu_says_what_the_run_time_needs(name: str) -> None:
    """EX2, DE1, DE5: a library under the hash of its bytes, every constant on the GPU and its bytes there, GPU code for
    the architecture that was asked for and for no other, only symbols that the run time answers."""
    written = Written(name, FOR_GPU)
    held = {**written.inside, **written.beside}
    code = ["sm_80", "sm_90", "compute_80"] if name == "mlp_several" else ["sm_90a"]
    assert written.islands
    for method, island, said in written.islands:
        library = held[said.library_key]
        assert said.library_key == hashlib.sha256(library).hexdigest() + "_so_blob"
        assert (
            island.spec("target_device") == b"cuda:0" and island.spec("method_name") == method.name.encode()
        )
        assert island.spec("headrace_host") is None
        cuda = json.loads(island.spec("headrace_cuda") or b"")
        assert cuda["version"] == 1 and cuda["march"] == "x86-64-v3" and cuda["code"] == code
        assert island.inputs is not None and len(cuda["outputs"]) == len(island.args) - island.inputs
        assert {method.values[i].device for i in island.args} == {"cuda:0"}
        assert {c.device for c in said.constants} <= {payload.CUDA}
        for constant in said.constants:
            assert len(held[constant.storage_key]) == constant.nbytes
            assert constant.storage_key == hashlib.sha256(held[constant.storage_key]).hexdigest() + "_weight"
        found = [fatbin.read(container) for container in fatbin.embedded(memoryview(library))]
        assert found
        for binary in found:
            assert sorted(c.arch for c in binary.code) == sorted(code) and not binary.faults
            assert {c.kind for c in binary.code} == ({"sass", "ptx"} if "compute_80" in code else {"sass"})
        unknown = unversioned(library) - Target.parse("cuda:sm_90").symbols
        assert unknown == set()
        assert {"cuLaunchKernel", "aoti_torch_empty_strided", "cudaEventRecord"} <= unversioned(library)


def test_models_for_a_gpu_have_the_constants_that_they_should() -> None:
    """EX2: the check above looked at constants: three models have some, as many as are not written into the code."""
    counts = {
        name: [len(said.constants) for _, _, said in Written(name, FOR_GPU).islands]
        for name in ("mlp", "cnn", "transformer")
    }
    assert counts == {"mlp": [5], "cnn": [4], "transformer": [12]}


def test_programs_for_a_gpu_keep_no_path_of_the_machine() -> None:
    """EX2: neither of the sources, nor of caches, nor of this repository."""
    for name in OURS:
        raw = FOR_GPU.load(name).path.read_bytes()
        assert b"torch/csrc/inductor/" in raw
        for path in (
            b"/tmp/",
            b"site-packages",
            str(programs.ROOT).encode(),
            b"/root",
            b"/home",
        ):
            assert path not in raw, (name, path)
    raw = programs.AOTI.load("mlp").path.read_bytes()
    assert b"/tmp/" not in raw and b"site-packages" not in raw and b"torch/csrc/inductor/" in raw


def unversioned(library: bytes) -> set[str]:
    """The undefined symbols of no system library."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        listed = subprocess.run(
            ["nm", "--dynamic", "--undefined-only", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {line.split()[-1] for line in listed.splitlines() if line.split()[0] == "U"}
    return {name for name in found if "@" not in name}


def test_the_exporter_and_the_run_time_have_one_list_of_symbols() -> None:
    """PK3, DE1: the shims are those that the exporter counts on, under their changed names, and none is forgotten."""
    folder = Path(headrace._core.__file__).parent / "lib"
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(folder / "libheadrace_shims.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    defined = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    renamed = {
        re.sub(r"^(aoti_)torch_|^cuda(?=[A-Z])|^cu(?=[A-Z])", _ours, name)
        for name in Target.parse("cuda:sm_90").symbols
    }
    ours = {name for name in defined if re.match(r"aoti_hrace_|hrce[A-Z]|hr[A-Z]", name)}
    assert renamed - ours == set()
    # Another compiler's libraries may ask for more than this exporter's.
    assert ours - renamed <= {"hrceMemsetAsync"}


def _ours(found: re.Match[str]) -> str:
    return "aoti_hrace_" if found[1] else {"cuda": "hrce", "cu": "hr"}[found[0]]


# -------------------- parts that need no torch


def test_targets_are_named() -> None:
    """EX1: host, portable by default; what is not there is said."""
    assert Target.parse("host") == Target() and Target().march == "x86-64-v3"
    assert Target.parse("host:x86-64-v4").vector_bits == 512
    for text in ("host:", "host:native", "gpu", ""):
        with pytest.raises(OptionError):
            Target.parse(text)
    with pytest.raises(NotSupported, match="'tpu'"):
        Target(kind="tpu")


def test_architectures_are_named() -> None:
    """EX2: one or several, in any order, and PTX by choice; what is made of each, and what is compiled for."""
    assert Target.parse("cuda:sm_90").code == ("sm_90a",)
    assert Target.parse("cuda:sm_86").code == ("sm_86",)
    both = Target.parse("cuda:sm_90+ptx+sm_80")
    assert both == Target(kind="cuda", architectures=("sm_80", "sm_90"), ptx=True)
    assert both.text == "cuda:sm_80+sm_90+ptx" and Target.parse(both.text) == both
    assert both.code == ("sm_80", "sm_90", "compute_80")
    assert both.compute.number == 80 and both.compute.block_nbytes == ARCHITECTURES["sm_80"].block_nbytes
    # What is written for 9.0 alone, 10.0 cannot take.
    assert Target.parse("cuda:sm_90+sm_100").compute.number == 89
    assert Target.parse("cuda:sm_80+sm_86").compute.block_nbytes == ARCHITECTURES["sm_86"].block_nbytes
    for name in ARCHITECTURES:
        target = Target.parse(f"cuda:{name}")
        assert Target.parse(target.text) == target and len(target.code) == 1
    for text in ("cuda", "cuda:", "cuda:ptx", "cuda:sm_90+", "cuda:sm_91", "cuda:sm_90+sm_90", "cuda:90"):
        with pytest.raises(OptionError):
            Target.parse(text)
    for options in ({"kind": "cuda"}, {"architectures": ("sm_90",)}, {"ptx": True}):
        with pytest.raises(OptionError, match="architectures"):
            Target(**options)


def test_without_torch_export_says_what_to_install() -> None:
    """OP3: ExportError names the module that is missing."""
    code = """
        import sys
        import headrace

        sys.modules["torch"] = None
        try:
            headrace.export(None, (), path="never.pte")
        except headrace.ExportError as error:
            print(error)
    """
    assert "got no module 'torch'; install both" in succeeded(run_python(code))
    assert not (programs.ROOT / "never.pte").exists()


NAMES = st.text(max_size=12)
NUMBERS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def constants(draw: Any) -> payload.Constant:
    rank = draw(st.integers(0, 4))
    numbers = st.lists(NUMBERS, min_size=rank, max_size=rank).map(tuple)
    small = st.integers(-(2**31), 2**31 - 1)
    return payload.Constant(
        draw(NAMES), draw(NAMES), draw(st.integers(0, 2**64 - 1)), draw(small), draw(small), draw(NUMBERS),
        draw(numbers), draw(numbers),
    )  # fmt: skip


@given(NAMES, st.lists(constants(), max_size=4))
def test_a_payload_is_read_as_it_was_written(key: str, items: list[payload.Constant]) -> None:
    """DE1: the format of ExecuTorch 1.5.1, both ways."""
    assert payload.decode(payload.encode(key, items)) == payload.Payload(key, tuple(items))


@given(st.lists(constants(), max_size=3), st.data())
def test_a_damaged_payload_is_an_error(items: list[payload.Constant], data: st.DataObject) -> None:
    """OP3: cut short, too long, or of another version: ProgramError; changed bytes: that, or other values."""
    whole = payload.encode("key", items)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0", b"ETCUDAFQN4" + whole[10:]):
        with pytest.raises(ProgramError):
            payload.decode(wrong)
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProgramError):
        payload.decode(bytes(changed))
