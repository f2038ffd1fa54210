"""DE2: payloads of TensorRT islands are read strictly, and written so that they read back."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.delegate import Context
from headrace.delegate.tensorrt import TensorRTBackend
from headrace.pte import tensorrt as blob
from headrace.pte.tensorrt import Aliased, Binding, Built
from headrace.testing.tensorrt import StandIn, Tensor, build, stand_in

from . import forge
from .forge import metadata, raw


def test_what_is_written_reads_back() -> None:
    """DE2: every field, the engine byte for byte, and the magic that says whether there are aliases."""
    data = forge.good(
        hardware_compatible=True,
        device_id=2,
        serialized_metadata="é",
        target_platform="linux_x86_64",
        extra={"note": [1, None]},
    )
    found = blob.read(data)
    assert data[:4] == b"TR02"
    assert (found.bindings, found.aliased) == (forge.BINDINGS, (Aliased("output1", "cache", "user"),))
    assert [b.name for b in found.inputs] == ["x", "cache"]
    assert [b.name for b in found.outputs] == ["output0", "output1"]
    assert (found.engine.tobytes(), found.built) == (b"engine" * 7, forge.BUILT)
    assert (found.hardware_compatible, found.device_id) == (True, 2)
    assert (found.serialized_metadata, found.target_platform) == ("é", "linux_x86_64")
    assert found.extra == {"note": [1, None]}
    assert forge.good(aliased=[])[:4] == b"TR01"
    assert blob.read(memoryview(bytearray(data))) == found


def test_layout_is_the_one_that_torch_tensorrt_reads() -> None:
    """DE2: header of 32 bytes, metadata from byte 32 with both lists first, engine at a multiple of 16."""
    data = blob.write(b"E" * 5, [Binding("x", True), Binding("output0", False)])
    magic, at, nbytes, engine, engine_nbytes, reserved = struct.unpack_from("<4sIIIQ8s", data)
    assert (magic, at, engine_nbytes, reserved) == (b"TR01", 32, 5, b"\1\0\0\0\0\0\0\0")
    assert engine % 16 == 0 and engine - at - nbytes < 16 and len(data) == engine + 5
    text = data[at : at + nbytes]
    assert b" " not in text
    assert list(json.loads(text)) == [
        "io_bindings",
        "aliased_io",
        "hardware_compatible",
        "device_id",
        "serialized_metadata",
        "target_platform",
    ]


def test_payloads_of_torch_tensorrt_are_read() -> None:
    """DE2: its metadata; names joined by %; no names at all; a reader's zeros for reserved bytes."""
    found = blob.read(raw(metadata()))
    assert found.bindings == (Binding("input_0", True), Binding("output_0", False))
    assert found.built is None
    joined = metadata(
        io_bindings=[{"name": "a%b%", "is_input": True}, {"name": "output_0%output_1", "is_input": False}]
    )
    assert [b.name for b in blob.read(raw(joined)).bindings] == ["a", "b", "output_0", "output_1"]
    assert blob.read(raw(metadata(io_bindings=[]))).bindings == ()
    assert blob.read(raw(metadata(), reserved=bytes(8))).engine == b"engine"
    typed = metadata(
        io_bindings=[{"name": "y", "is_input": False, "dtype": "torch.float16", "shape": [2, -1]}]
    )
    assert blob.read(raw(typed)).outputs == (Binding("y", False, "float16", (2, -1)),)
    # Read under either magic: ignoring an alias would lose what is written.
    alias = [{"output": "output_0", "input": "input_0"}]
    for magic in (b"TR01", b"TR02"):
        found = blob.read(raw(metadata(aliased_io=alias), magic=magic))
        assert found.aliased == (Aliased("output_0", "input_0", "kv_cache_update"),)


def one(**changed: Any) -> dict[str, Any]:
    entry = {"name": "y", "is_input": False} | changed
    return metadata(io_bindings=[{k: v for k, v in entry.items() if v is not ...}])


TWO = [{"name": "a", "is_input": True}, {"name": "b", "is_input": True}, {"name": "y", "is_input": False}, {"name": "z", "is_input": False}]  # fmt: skip

WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "header: expected a header of 32 bytes, got 0 bytes"),
    "magic": (raw(metadata(), magic=b"TR03"), r"expected the magic b'TR01' or b'TR02', got b'TR03'"),
    "reserved": (raw(metadata(), reserved=b"\2" + bytes(7)), "expected reserved bytes"),
    "metadata in the header": (raw(metadata(), at=31), "expected metadata between byte 32 and the end"),
    "metadata beyond": (raw(metadata(), nbytes=2**32 - 1), "4294967295 bytes from 32"),
    "engine not aligned": (raw(metadata(), engine_at=40), "at a multiple of 16, got one at byte 40"),
    "engine over metadata": (raw(metadata(), engine_at=64), "where the metadata ends"),
    "engine size wraps": (raw(metadata(), engine_nbytes=2**64 - 16), "18446744073709551600 bytes from"),
    "no engine": (raw(metadata(), engine=b""), "expected an engine, got none: its size is 0"),
    "bytes around": (raw(metadata(), tail=b"\0\1"), "expected zeros around metadata and engine"),
    "aliases announced": (raw(metadata(), magic=b"TR02"), "expected aliases, for the magic is b'TR02', got none"),
    "no JSON": (raw(b"{'a': 1}"), "metadata: expected JSON"),
    "two values": (raw(b"{} {}"), "metadata: expected JSON"),
    "no object": (raw(b"[]"), "expected a JSON object, got list"),
    "no UTF-8": (raw(b'{"a": "\xff"}'), "expected UTF-8"),
    "deep": (raw(b"[" * 100_000), "expected at most 32 lists and objects in each other"),
    "deep objects": (raw(b'{"a":' * 40 + b"1" + b"}" * 40), "expected at most 32 lists"),
    "long number": (raw(b'{"a": ' + b"9" * 5000 + b"}"), "expected numbers of at most 19 digits"),
    "NaN": (raw(b'{"a": NaN}'), "expected numbers, got NaN"),
    "a key twice": (raw(b'{"a": 1, "a": 2}'), "expected each key once, got 'a' twice"),
    "no bindings": (raw({}), "expected the key 'io_bindings', got none"),
    "bindings of another type": (raw(metadata(io_bindings={})), "'io_bindings': expected a list"),
    "binding of another type": (raw(metadata(io_bindings=["x"])), "io_bindings 0: expected an object, got 'x'"),
    "nameless": (raw(one(name=...)), "io_bindings 0: expected the key 'name'"),
    "empty name": (raw(one(name="%")), "expected a name, got '%'"),
    "name with a zero": (raw(one(name="a\0b")), "none of them 0"),
    "long name": (raw(one(name="n" * 5000)), "at most 4096 bytes"),
    "half a character": (raw(b'{"io_bindings": [{"name": "\\ud800", "is_input": true}]}'), "expected text that can be encoded"),
    "no direction": (raw(one(is_input=...)), "expected the key 'is_input'"),
    "number for a direction": (raw(one(is_input=1)), "'is_input': expected true or false, got 1"),
    "unknown key in a binding": (raw(one(scale=2)), "io_bindings 0: expected known keys alone, got 'scale'"),
    "dtype": (raw(one(dtype="complex64")), "expected a dtype of float32, .*got 'complex64'"),
    "rank": (raw(one(shape=[1] * 9)), "expected at most 8 dimensions, got 9"),
    "size": (raw(one(shape=[-2])), "expected sizes from 0"),
    "huge size": (raw(one(shape=[2**31])), "expected sizes from 0"),
    "true for a size": (raw(one(shape=[True])), "expected sizes from 0"),
    "shape of two": (raw(one(name="a%b", shape=[1])), "expected no dtype and no shape for joined names"),
    "a name twice": (raw(metadata(io_bindings=[*TWO, TWO[0]])), "expected each name once, got 'a' twice"),
    "twice by joining": (raw(one(name="y%y")), "expected each name once, got 'y' twice"),
    "no output": (raw(one(is_input=True)), "expected an output, got none"),
    "outputs out of order": (
        raw(one(name="output1%output0")),
        "expected outputs numbered 0 to 1 in order, got output1, output0",
    ),
    "output missing": (raw(one(name="output_0%output_2")), "expected outputs numbered 0 to 1 in order"),
    "alias of nothing": (raw(metadata(aliased_io=[{"output": "q", "input": "input_0"}])), "the name of an output"),
    "alias of an output": (
        raw(metadata(aliased_io=[{"output": "output_0", "input": "output_0"}])),
        "expected the name of an input",
    ),
    "alias of another kind": (
        raw(metadata(aliased_io=[{"output": "output_0", "input": "input_0", "kind": "new"}])),
        "expected a kind of kv_cache_update, user, got 'new'",
    ),
    "one input aliased twice": (
        raw(metadata(io_bindings=TWO, aliased_io=[{"output": "y", "input": "a"}, {"output": "z", "input": "a"}])),
        "expected each input in one alias",
    ),
    "one output aliased twice": (
        raw(metadata(io_bindings=TWO, aliased_io=[{"output": "y", "input": "a"}, {"output": "y", "input": "b"}])),
        "expected each output in one alias",
    ),
    "unknown key in an alias": (
        raw(metadata(aliased_io=[{"output": "output_0", "input": "input_0", "offset": 4}])),
        "expected known keys alone, got 'offset'",
    ),
    "device": (raw(metadata(device_id=-1)), "expected a GPU's number, got -1"),
    "flag for a device": (raw(metadata(device_id=True)), "'device_id': expected an integer, got True"),
    "built by a list": (raw(metadata(headrace=[])), "'headrace': expected an object"),
    "built without a version": (raw(metadata(headrace={"runtime": "tensorrt"})), "expected the key 'version'"),
    "built for a number": (
        raw(metadata(headrace={"runtime": "tensorrt", "version": "1", "capabilities": [8]})),
        "expected short names and versions, got 8",
    ),
    "built and more": (
        raw(metadata(headrace={"runtime": "tensorrt", "version": "1", "x": 1})),
        "metadata, headrace: expected known keys alone, got 'x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(name: str) -> None:
    """DE2, OP3: where, what was expected, what came, what to do; nothing is guessed."""
    data, says = WRONG[name]
    with pytest.raises(headrace.ProgramError, match=says) as e:
        blob.read(data)
    text = str(e.value)
    assert text.startswith("TensorRT payload, ") and ", got " in text and "; " in text
    assert len(text) < 600


def test_metadata_of_many_megabytes_is_refused() -> None:
    with pytest.raises(headrace.ProgramError, match="at most 16777216 bytes of metadata"):
        blob.read(raw(b"{}".ljust((1 << 24) + 1)))
    with pytest.raises(headrace.ProgramError, match="expected bytes, got str"):
        blob.read("TR01")  # type: ignore[arg-type]


def test_writing_refuses_what_reading_would() -> None:
    """DE2: a payload that nobody can read is not written."""
    x, y = Binding("x", True), Binding("y", False)
    for bindings, options, says in (
        ([x], {}, "expected an output"),
        ([x, y, y], {}, "each name once"),
        ([x, y], {"aliased": [Aliased("y", "z")]}, "the name of an input"),
        ([x, y], {"device_id": 2**20}, "a GPU's number"),
        ([x, y], {"extra": {"device_id": 1}}, "keys of one's own"),
        ([x, y], {"extra": {"headrace": 1}}, "keys of one's own"),
        ([x, y], {"extra": {"a": object()}}, "what JSON can say"),
        ([x, y], {"extra": {"a": float("nan")}}, "what JSON can say"),
        ([x, y], {"built": Built("tensorrt", "")}, "short names and versions"),
    ):
        with pytest.raises(headrace.ProgramError, match=says):
            blob.write(b"engine", bindings, **options)  # type: ignore[arg-type]
    with pytest.raises(headrace.ProgramError, match="expected an engine, got none"):
        blob.write(b"", [x, y])


names = st.text(
    st.characters(exclude_characters="%\0", exclude_categories=["Cs"]), min_size=1, max_size=12
).filter(lambda n: not n.lower().startswith("output"))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
shapes = st.lists(st.integers(-1, 2**31 - 1), max_size=8).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    names=st.lists(names, min_size=2, max_size=8, unique=True),
    dtypes=st.lists(st.sampled_from(["", *blob.DTYPES.values()]), min_size=8, max_size=8),
    shape=shapes,
    split=st.integers(0, 6),
    engine=st.binary(min_size=1, max_size=60),
    text=texts,
    device=st.integers(0, 2**16 - 1),
)
def test_any_payload_reads_back(
    names: list[str], dtypes: list[str], shape: Any, split: int, engine: bytes, text: str, device: int
) -> None:
    """DE2: whatever the names, shapes and texts."""
    inputs = min(split, len(names) - 1)
    bindings = tuple(Binding(n, i < inputs, d, shape) for i, (n, d) in enumerate(zip(names, dtypes)))  # noqa: B905
    aliased = [Aliased(names[-1], names[0], "user")] if inputs else []
    found = blob.read(blob.write(engine, bindings, aliased, device_id=device, serialized_metadata=text))
    assert (found.bindings, found.engine, found.device_id) == (bindings, engine, device)
    assert (found.aliased, found.serialized_metadata) == (tuple(aliased), text)


def test_damaged_payloads_are_read_or_refused() -> None:
    """DE2, OP3: 400 damaged payloads, more by HEADRACE_FUZZ: a payload, or a ProgramError, and nothing else."""
    count = int(os.environ.get("HEADRACE_FUZZ", "400"))
    ends: Counter[str] = Counter()
    for number, data in enumerate(forge.damaged(1, count)):
        try:
            found = blob.read(data)
        except headrace.ProgramError as e:
            ends[str(e).partition(", got ")[0]] += 1
            continue
        except Exception as e:
            raise AssertionError(f"payload {number}: {data!r}") from e
        assert found.engine.nbytes <= len(data) and all(b.name for b in found.bindings)
        ends["read"] += 1
    assert ends["read"] > count // 100 and len(ends) > 15, ends


def test_damaged_payloads_are_loaded_or_refused() -> None:
    """DE2, OP3: the same through the delegate, over an engine that is right: one that runs as it should, or one of
    headrace's errors."""
    count = int(os.environ.get("HEADRACE_FUZZ", "400"))
    engine = build(
        inputs=[Tensor("x", "float32", (-1, 4)), Tensor("cache", "float32", (2, 4))],
        outputs=[
            Tensor("output0", "float32", (-1, 4)),
            Tensor("output1", "float32", (2, 4), alias="cache", declared=False),
        ],
        steps=[
            {"op": "mul", "out": "output0", "args": ["x", 2.0]},
            {"op": "add", "out": "output1", "args": ["cache", 1.0]},
        ],
        profiles=[{"x": ((1, 4), (2, 4), (8, 4))}],
        version="1.7.1.116",
    )
    whole = blob.write(
        engine, forge.BINDINGS, [Aliased("output1", "cache", "user")], built=Built("tensorrt", "1.7.1.116")
    )
    device, x = headrace.device("cpu"), np.ones((3, 4), np.float32)
    stream, ends = device.stream(), Counter[str]()
    with stand_in(module=StandIn(version="1.7.1.116")):
        for number, data in enumerate(forge.damaged(2, count, whole)):
            made = TensorRTBackend()
            try:
                made.load(data, Context("forward", 0, 2, {}, {}, device, lambda key: b""))
                kept, out, other = device.to_device(x[:2]), device.empty((3, 4)), device.empty((2, 4))
                made.run((device.to_device(x), kept), (out, other), stream)
            except headrace.HeadraceError as e:
                ends[type(e).__name__] += 1
                continue
            except Exception as e:
                raise AssertionError(f"payload {number}: {data!r}") from e
            assert (out.numpy() == 2).all() and (kept.numpy() == 2).all() and (other.numpy() == 2).all()
            ends["ran"] += 1
    assert ends["ran"] > count // 100 and ends["ProgramError"] > count // 2, ends
