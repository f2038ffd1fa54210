"""The payload of a ``CudaBackend`` island: which library, and which constants it is given.

The format is ExecuTorch 1.5.1's (``backends/cuda/cuda_weight_collector.py``), little-endian, no padding::

    "ETCUDAFQN3"  str library_key  u32 n  then n constants:
    str fqn  str storage_key  u64 nbytes  i32 dtype  i32 device  i64 offset  u32 ndim  i64 sizes[]  i64 strides[]

``str`` is a u32 length and UTF-8. ``dtype`` is ExecuTorch's ScalarType, ``device`` 0 for the host and 1 for
CUDA, ``offset`` and ``strides`` count elements. Library and constants are named data of the program, or of its
data file, under the keys given here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ProgramError

__all__ = ["CPU", "CUDA", "MAGIC", "Constant", "Payload", "decode", "encode"]

MAGIC = b"ETCUDAFQN3"
CPU = 0
CUDA = 1


@dataclass(frozen=True)
class Constant:
    """One constant of a library: a view into the storage that ``storage_key`` names.

    ``nbytes`` is the size of that storage; ``offset`` and ``strides`` count elements of ``dtype``.
    """

    fqn: str
    storage_key: str
    nbytes: int
    dtype: int
    device: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Payload:
    library_key: str
    constants: tuple[Constant, ...]


def encode(library_key: str, constants: Sequence[Constant]) -> bytes:
    """The bytes of a payload."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<I", len(raw)) + raw

    parts = [MAGIC, text(library_key), struct.pack("<I", len(constants))]
    for c in constants:
        parts += [
            text(c.fqn),
            text(c.storage_key),
            struct.pack("<QiiqI", c.nbytes, c.dtype, c.device, c.offset, len(c.sizes)),
            struct.pack(f"<{len(c.sizes)}q", *c.sizes),
            struct.pack(f"<{len(c.strides)}q", *c.strides),
        ]
    return b"".join(parts)


def decode(data: bytes) -> Payload:
    """What a payload says. Raises ProgramError where it is of another format, cut short, or too long."""
    if not data.startswith(MAGIC):
        raise ProgramError(
            f"payload: expected {MAGIC.decode()}, got {bytes(data[:16])!r}; export the program with "
            "ExecuTorch 1.5.1 or with this package"
        )
    at = len(MAGIC)

    def take(count: int) -> bytes:
        nonlocal at
        if count > len(data) - at:
            raise ProgramError(
                f"payload: expected {count} bytes at {at}, got {len(data) - at}; export the program again"
            )
        at += count
        return bytes(data[at - count : at])

    def fields(form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, take(struct.calcsize("<" + form)))

    def text() -> str:
        raw = take(fields("I")[0])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ProgramError(
                f"payload: expected UTF-8 before byte {at}, got {raw[:32]!r}; export the program again"
            ) from None

    library_key = text()
    constants = []
    for _ in range(fields("I")[0]):
        fqn, storage_key = text(), text()
        nbytes, dtype, device, offset, rank = fields("QiiqI")
        # Before a format string of that length is made: the rest has to hold it.
        sizes = struct.unpack(f"<{rank}q", take(8 * rank))
        strides = struct.unpack(f"<{rank}q", take(8 * rank))
        constants.append(Constant(fqn, storage_key, nbytes, dtype, device, offset, sizes, strides))
    if at != len(data):
        raise ProgramError(
            f"payload: expected its end at byte {at}, got {len(data) - at} bytes more; export the program again"
        )
    return Payload(library_key, tuple(constants))
