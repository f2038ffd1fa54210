"""What is told of AOTInductor islands without running them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import aoti as facts
from headrace import cli
from tests.native.aoti.test_library import cuda_library
from tests.programs import AOTI, ROOT

from . import forge


def test_an_island_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    """DE1: target, size, constants and their device, shims, what it asks of the system; as dataclasses, text and JSON."""
    program = AOTI.load("mlp")
    (island,) = facts.read(program.path)
    image = forge.library(program.path.read_bytes())
    assert (island.method, island.target, island.march) == ("forward", "host", "x86-64-v3")
    assert island.library_nbytes == len(image) and facts.library(program.path, island.library_key) == image
    constants = {c.fqn: c for c in island.constants}
    assert constants["a.weight"].shape == (32, 16) and constants["a.weight"].nbytes == 32 * 16 * 4
    assert {c.device for c in island.constants} == {"cpu"} and {c.dtype for c in island.constants} == {
        "float32"
    }
    assert {"libgomp.so.1", "libstdc++.so.6", "libc.so.6"} <= set(island.needed)
    assert ("libc.so.6", "GLIBC_2.34") in island.versions and "aoti_torch_empty_strided" in island.shims
    assert island.missing == ()

    assert cli.main(["inspect", str(program.path)]) == 0
    text = capsys.readouterr().out
    for line in (
        f"AOTInductor library of instruction {island.instruction}: for host, x86-64-v3, {len(image)} bytes",
        f"{len(island.constants)} constants on cpu, {sum(c.nbytes for c in island.constants)} bytes",
        "a.weight: float32[32, 16] on cpu",
        "of libc.so.6: GLIBC_2.34\n",
        f"calls {len(island.shims)} functions of headrace's: aoti_torch_clone, ",
    ):
        assert line in text, line
    assert cli.main(["inspect", "--json", str(program.path)]) == 0
    (one,) = json.loads(capsys.readouterr().out)["aoti"]
    assert one["target"] == "host" and one["gpu_code"] == [] and one["library_nbytes"] == len(image)


def test_every_island_of_a_split_program_is_described() -> None:
    """DE1: two libraries, in order."""
    program = AOTI.load("chain")
    islands = facts.read(program.path)
    assert [i.instruction for i in islands] == sorted({i.instruction for i in islands}) and len(islands) == 2
    assert len({i.library_key for i in islands}) == 2
    assert [[c.fqn for c in i.constants] for i in islands] == [["first"], ["second"]]


def test_what_is_missing_here_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DE1, DE5: shims and versions that would be refused at load; and a GPU's library says what it is."""
    raw = AOTI.load("add_one").path.read_bytes()
    head = 'extern "C" int aoti_torch_cpu_convolution(bool); extern "C" char* getenv(const char*);\n'
    body = 'return aoti_torch_cpu_convolution(getenv("X") != nullptr);'
    library = forge.shared_library(tmp_path, body, head=head)
    assert b"GLIBC_2.2.5\0" in library
    made = forge.replace_library(raw, library.replace(b"GLIBC_2.2.5\0", b"GLIBC_9.2.5\0"))
    (island,) = facts.read(made)
    assert "the function aoti_torch_cpu_convolution" in island.missing
    assert any("'GLIBC_9.2.5' of libc.so.6" in line for line in island.missing)

    made = forge.for_cuda(forge.replace_library(raw, cuda_library(tmp_path)))
    path = tmp_path / "cuda.pte"
    path.write_bytes(made)
    (island,) = facts.read(path)
    assert island.target == "cuda" and island.march is None and "libcuda.so.1" not in island.needed
    assert cli.main(["inspect", str(path)]) == 0
    assert "its kernels run on a GPU alone" in capsys.readouterr().out


def test_damaged_islands_are_a_typed_error_of_the_command() -> None:
    """OP3: exit status and one line; nothing of the program is run."""
    raw = AOTI.load("add_one").path.read_bytes()
    for made, words in (
        (raw.replace(b"ETCUDAFQN3", b"ETCUDAFQN4"), "ETCUDAFQN4"),
        (forge.replace_library(raw, b"no library"), "no ELF file"),
        (raw.replace(b'{"version": 1', b'["version": 1'), "headrace_host"),
    ):
        with pytest.raises(headrace.ProgramError, match=words) as caught:
            facts.read(made)
        assert "instruction 0, delegate 'CudaBackend'" in str(caught.value)


def test_inspecting_loads_no_library() -> None:
    """DE1: the library is not mapped afterwards, nor the program's memory made."""
    path: Any = AOTI.load("mlp").path
    code = f"""
from headrace import aoti
aoti.read({str(path)!r})
print("headrace:" in open("/proc/self/maps").read())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
