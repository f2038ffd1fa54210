"""Programs with another library, payload or compile spec in the place of their own, byte for byte."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

from headrace import pte

__all__ = ["for_cuda", "library", "replace_everywhere", "replace_library", "shared_library"]

KEY = re.compile(rb"([0-9a-f]{64})_so_blob")


def place(program: bytes) -> tuple[str, int, int]:
    """The key of the program's first library, where it lies in the file, and its size."""
    file = pte.read(program)
    entry = next(e for e in file.named_data if KEY.fullmatch(e.key.encode()))
    return entry.key, file.segments[entry.segment].offset, entry.nbytes


def library(program: bytes) -> bytes:
    """The bytes of the program's first library."""
    _, offset, nbytes = place(program)
    return program[offset : offset + nbytes]


def replace_library(program: bytes, other: bytes, *, rename: bool = True) -> bytes:
    """The program with ``other`` as its first library, under its true name unless ``rename`` is False.

    ``other`` may be at most as large; zeros fill the rest, and a loader does not look behind an ELF file's tables.
    """
    key, offset, nbytes = place(program)
    assert len(other) <= nbytes
    other = other.ljust(nbytes, b"\0")
    made = program[:offset] + other + program[offset + nbytes :]
    name = hashlib.sha256(other).hexdigest() + "_so_blob"
    return made.replace(key.encode(), name.encode()) if rename else made


def replace_everywhere(program: bytes, old: bytes, new: bytes) -> bytes:
    """Every ``old`` by ``new``, of the same length; there is one at least."""
    assert len(old) == len(new) and program.count(old) >= 1
    return program.replace(old, new)


def for_cuda(program: bytes) -> bytes:
    """The program without the compile specs of a host library: then it is one for CUDA, as stock ExecuTorch's are."""
    made = replace_everywhere(program, b"headrace_host", b"headrace_gone")
    return replace_everywhere(made, b"target_device", b"target_absent")


def constant(
    fqn: str, key: str, nbytes: int, sizes: tuple[int, ...], strides: tuple[int, ...], **other: int
) -> bytes:
    """An entry of a payload; ``other``: dtype (float32), device (0), offset (0)."""
    texts = b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in (fqn, key))
    head = (nbytes, other.get("dtype", 6), other.get("device", 0), other.get("offset", 0), len(sizes))
    return texts + struct.pack(f"<QiiqI{len(sizes)}q{len(strides)}q", *head, *sizes, *strides)


def payload(key: str, *constants: bytes, count: int | None = None) -> bytes:
    """A payload of ExecuTorch 1.5.1's."""
    head = b"ETCUDAFQN3" + struct.pack("<I", len(key)) + key.encode()
    return head + struct.pack("<I", len(constants) if count is None else count) + b"".join(constants)


def with_payload(program: bytes, other: bytes) -> bytes:
    """The program with ``other``, which may be at most as long, as the payload of its first AOTInductor island."""
    from headrace._schema import program as schema  # type: ignore[attr-defined]

    island = next(i for m in pte.read(program).methods for i in m.islands if i.delegate == "CudaBackend")
    assert len(other) <= island.payload_nbytes
    at = island.payload_offset
    end = at + island.payload_nbytes
    made = bytearray(program[:at] + other.ljust(end - at, b"\0") + program[end:])
    mine = (at, island.payload_nbytes)
    (index,) = (k for k, s in enumerate(pte.read(program).segments) if (s.offset, s.nbytes) == mine)
    segment = schema.Program.GetRootAs(made, 0).Segments(index)
    # The second field of its table, behind the offset.
    place = segment._tab.Pos + segment._tab.Offset(6)
    assert struct.unpack_from("<Q", made, place) == (island.payload_nbytes,)
    struct.pack_into("<Q", made, place, len(other))
    return bytes(made)


def rename(program: bytes, key: str, shorter: str) -> bytes:
    """The program with the named data ``key`` under another name, which may be at most as long."""
    old, new = key.encode(), shorter.encode()
    assert len(new) <= len(old)
    whole = struct.pack("<I", len(old)) + old + b"\0"
    assert program.count(whole) == 1
    return program.replace(whole, struct.pack("<I", len(new)) + new.ljust(len(old) + 1, b"\0"))


# What every library of AOTInductor exports, as far as it is asked for: a model without inputs, outputs or constants.
EXPORTS = """
#include <cstddef>
#include <cstdint>
#define API extern "C" __attribute__((visibility("default")))
API int AOTInductorModelContainerCreateWithDevice(void** c, size_t, const char*, const char*) { *c = c; return 0; }
API int AOTInductorModelContainerDelete(void*) { return 0; }
API int AOTInductorModelContainerGetNumInputs(void*, size_t* n) { *n = INPUTS; return 0; }
API int AOTInductorModelContainerGetNumOutputs(void*, size_t* n) { *n = OUTPUTS; return 0; }
API int AOTInductorModelContainerGetNumConstants(void*, size_t* n) { *n = 0; return 0; }
API int AOTInductorModelContainerGetConstantName(void*, size_t, const char**) { return 1; }
API int AOTInductorModelContainerGetConstantOriginalFQN(void*, size_t, const char**) { return 1; }
API int AOTInductorModelContainerGetConstantFromFolded(void*, size_t, bool*) { return 1; }
API int AOTInductorModelContainerGetConstantType(void*, size_t, int32_t*) { return 1; }
API int AOTInductorModelContainerGetConstantDtype(void*, size_t, int32_t*) { return 1; }
API int AOTInductorModelContainerGetConstantDataSize(void*, size_t, size_t*) { return 1; }
API int AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(void*, const void*, size_t, bool, bool) { return 0; }
API int AOTInductorModelContainerRunConstantFolding(void*, bool, void*, void*) { return 0; }
API int AOTInductorModelContainerRunSingleThreaded(void*, void** in, size_t, void** out, size_t, void*, void*) {
  (void)in;
  BODY
}
API int AOTInductorGetLastError(const char** text) { *text = "made to fail"; return 0; }
"""


def shared_library(
    folder: Path,
    body: str = "return 1;",
    *,
    head: str = "",
    inputs: int = 1,
    outputs: int = 1,
    flags: tuple[str, ...] = (),
    instead: dict[str, str] | None = None,
) -> bytes:
    """A library with AOTInductor's functions whose run does ``body``; ``head`` stands before them;
    ``instead`` are texts in place of others in them."""
    from tests.native import compiler

    source, target = folder / "library.cpp", folder / "library.so"
    text = EXPORTS.replace("INPUTS", str(inputs)).replace("OUTPUTS", str(outputs)).replace("BODY", body)
    for old, new in (instead or {}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    source.write_text(head + text)
    compiler.build("-std=c++20", "-shared", "-fPIC", "-O1", source, "-o", target, *flags)
    return target.read_bytes()
