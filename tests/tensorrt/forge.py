"""Payloads of TensorRT islands with one thing wrong, and damaged at random."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.pte import tensorrt as blob

HEADER = struct.Struct("<4sIIIQ8s")

BINDINGS = (
    blob.Binding("x", True, "float32", (-1, 4)),
    blob.Binding("cache", True, "float32", (2, 4)),
    blob.Binding("output0", False, "float32", (-1, 4)),
    blob.Binding("output1", False, "float32", (2, 4)),
)
BUILT = blob.Built("tensorrt_rtx", "1.7.1.116", ("8.6", "12.0"))


def good(**given: Any) -> bytes:
    """A payload with an alias, ``TR02``."""
    options: dict[str, Any] = {"aliased": [blob.Aliased("output1", "cache", "user")], "built": BUILT, **given}
    return blob.write(b"engine" * 7, BINDINGS, **options)


def raw(
    metadata: bytes | Mapping[str, Any],
    *,
    magic: bytes = b"TR01",
    engine: bytes = b"engine",
    reserved: bytes = b"\1" + bytes(7),
    tail: bytes = b"",
    **fields: int,
) -> bytes:
    """A payload of this metadata, by hand; ``fields`` replace what the header would say."""
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    start = (HEADER.size + len(text) + 15) // 16 * 16
    said = {
        "at": HEADER.size,
        "nbytes": len(text),
        "engine_at": start,
        "engine_nbytes": len(engine),
    }
    header = HEADER.pack(magic, *(fields.get(name, value) for name, value in said.items()), reserved)
    return (header + text).ljust(start, b"\0") + engine + tail


def metadata(**changed: Any) -> dict[str, Any]:
    """The metadata of a payload with one input and one output, as Torch-TensorRT writes it."""
    return {
        "io_bindings": [
            {"name": "input_0", "dtype": "", "shape": [], "is_input": True},
            {"name": "output_0", "dtype": "", "shape": [], "is_input": False},
        ],
        "aliased_io": [],
        "hardware_compatible": False,
        "device_id": 0,
        "serialized_metadata": "",
        "target_platform": "",
        **changed,
    }


def damaged(seed: int, count: int, whole: bytes = b"") -> Iterator[bytes]:
    """``count`` payloads that were right once: bits, bytes, header fields, pieces and texts changed. Of ``whole``, where it
    is given, what stands before the engine."""
    rng = random.Random(seed)
    seeds = (
        [whole] if whole else [good(), raw(metadata()), raw(metadata(device_id=3, new=[{"a": [1, None]}]))]
    )
    texts = [
        b"[",
        b"{",
        b'"',
        b"}",
        b"]",
        b"-1",
        b"9" * 30,
        b"1e999",
        b"NaN",
        b"null",
        b"true",
        b"\\ud800",
        b"%",
        b"\\u0000",
    ]
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        end = HEADER.unpack_from(data)[3] if whole else len(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(max(1, min(end, len(data))))
            match rng.randrange(7):
                case 0:
                    data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b"x"
                case 1:
                    data[at : at + 1] = rng.randbytes(1)
                case 2:
                    # One field of the header.
                    value = rng.choice(
                        (0, 1, 15, 16, 31, 32, len(data), 2**31, 2**32 - 1, rng.getrandbits(32))
                    )
                    offset = 4 + 4 * rng.randrange(7)
                    data[offset : offset + 4] = struct.pack("<I", value)
                case 3:
                    del data[at:]
                case 4:
                    del data[at : at + rng.randrange(1, 20)]
                case 5:
                    data[at:at] = rng.choice(texts)
                case _:
                    length = rng.randrange(1, 40)
                    data[at:at] = data[at : at + length]
        yield bytes(data)
