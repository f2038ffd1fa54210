"""What a ``.pte`` or ``.ptd`` file says, read without the engine and without torch.

::

    file = headrace.pte.read("m.pte")
    file["forward"].inputs[0]             # float32[≤8, 64] on cpu, …
    [island.delegate for island in file["forward"].islands]

The formats are ExecuTorch 1.5's: a FlatBuffers table (``schema/program.fbs``), then segments of raw bytes,
found through a header in the first 64 bytes. The classes that read the table are generated at build time.

A file is untrusted: every offset, length and index is checked before it is used, and whatever is wrong
ends in :class:`~headrace.errors.ProgramError`. Reading takes time and memory in proportion to the table
alone; constants and payloads stay in the file, of which only sizes and first bytes are taken.

This describes, it does not license: the native verifier decides whether a program may be run.
"""

from __future__ import annotations

import importlib
from typing import Any

from .facts import (
    DTYPES,
    INPUTS_SPEC,
    PAYLOAD_HEAD_NBYTES,
    Chain,
    DataEntry,
    DataFile,
    Dtype,
    ExternalTensor,
    Instruction,
    Island,
    MethodInfo,
    NamedData,
    Operator,
    PlannedBuffer,
    ProgramFile,
    Segment,
    ValueInfo,
)
from .table import Source, malformed, opened

__all__ = [
    "DTYPES",
    "INPUTS_SPEC",
    "PAYLOAD_HEAD_NBYTES",
    "Chain",
    "DataEntry",
    "DataFile",
    "Dtype",
    "ExternalTensor",
    "Instruction",
    "Island",
    "MethodInfo",
    "NamedData",
    "Operator",
    "PlannedBuffer",
    "ProgramFile",
    "Segment",
    "ValueInfo",
    "read",
    "read_data",
]


def read(source: Source) -> ProgramFile:
    """What the program at the path ``source``, or in the bytes ``source``, holds.

    Raises ProgramError if it cannot be read, is no program, or contradicts itself.
    """
    from .reader import ProgramReader

    with opened(source) as file, malformed(file):
        return ProgramReader(file, _schema("program")).program()


def read_data(source: Source) -> DataFile:
    """What the data file (``.ptd``) at the path ``source``, or in the bytes ``source``, holds.

    Raises ProgramError if it cannot be read, is no data file, or contradicts itself.
    """
    from .reader import DataReader

    with opened(source) as file, malformed(file):
        return DataReader(file, _schema("flat_tensor")).data()


def _schema(name: str) -> Any:
    # Here and not at the top: NumPy and flatbuffers take longer to import than most programs to read.
    return importlib.import_module(f"headrace._schema.{name}")
