"""`headrace inspect` on programs with TensorRT's islands: what their payloads say, without running or loading any."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace import cli, pte
from headrace.delegate import nvinfer
from headrace.errors import ProgramError
from headrace.pte import tensorrt
from tests import programs


def test_islands_are_read_where_they_are() -> None:
    """DE2: as many as the program calls, each with the payload that its place in the file holds."""
    program = programs.TENSORRT.load("chain")
    found = tensorrt.islands(program.path)
    called = [i for i in pte.read(program.path)["forward"].islands if i.delegate == tensorrt.DELEGATE]
    assert [e.instruction for e in found] == [i.instruction for i in called] and len(found) == 13
    data = program.path.read_bytes()
    for engine, island in zip(found, called, strict=True):
        payload = data[island.payload_offset : island.payload_offset + island.payload_nbytes]
        assert engine.blob == tensorrt.read(payload) and bytes(engine.blob.engine) in payload
    assert tensorrt.islands(data) == found


def test_a_damaged_payload_is_named_by_its_place(tmp_path: Path) -> None:
    """OP3: method, instruction and delegate."""
    program = programs.TENSORRT.load("alone")
    (island,) = pte.read(program.path)["forward"].islands
    data = bytearray(program.path.read_bytes())
    data[island.payload_offset : island.payload_offset + 4] = b"TR99"
    with pytest.raises(
        ProgramError, match=rf"method 'forward', instruction {island.instruction}, delegate '.*TR99"
    ):
        tensorrt.islands(bytes(data))


def test_inspect_says_what_an_engine_is(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DE2: builder, size, bindings, and which run time here may read it, as text and as JSON."""
    program = programs.TENSORRT.load("alone")
    (engine,) = tensorrt.islands(program.path)
    blob = engine.blob
    missing = nvinfer.Installed("tensorrt", "", "", "not installed")
    there = nvinfer.Installed("tensorrt_lean", "tensorrt_lean_bindings", "11.4.0.106", "")
    for here in ((missing,), (missing, there)):
        monkeypatch.setattr(nvinfer, "installed", lambda here=here: here)
        monkeypatch.setattr(nvinfer, "_fitting", lambda blob, wanted: ("tensorrt", "tensorrt_lean"))
        assert cli.main(["inspect", str(program.path)]) == 0
        out = capfd.readouterr().out
        assert (
            f"  TensorRT engine of instruction {engine.instruction}: built for {nvinfer.built_for(blob)}, "
            f"{len(blob.engine)} bytes\n" in out
        )
        for binding in blob.bindings:
            role = "input" if binding.is_input else "output"
            assert re.search(rf"^    {role} {re.escape(binding.name)}: ", out, re.MULTILINE)
        assert ("may be read here by tensorrt_lean_bindings 11.4.0.106" in out) == (there in here)
        assert ("missing here: install" in out) == (there not in here)
        assert cli.main(["inspect", "--json", str(program.path)]) == 0
        (told,) = json.loads(capfd.readouterr().out)["tensorrt"]
        assert told["engine_nbytes"] == len(blob.engine)
        assert [b["name"] for b in told["bindings"]] == [b.name for b in blob.bindings]
        assert [i["version"] for i in told["fitting"]] == (["11.4.0.106"] if there in here else [])
