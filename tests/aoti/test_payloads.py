"""Payloads without names: a library and all its constants in one piece, by two keys or by the method's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace import aoti
from tests import programs

from . import forge

ADD_ONE = "add_one"


def plain() -> tuple[bytes, programs.Program]:
    """A program whose library has no constants."""
    program = programs.AOTI.load(ADD_ONE)
    return program.path.read_bytes(), program


def keys(program: bytes) -> str:
    return aoti.read(program)[0].library_key


def right(made: bytes, program: programs.Program) -> None:
    with headrace.load(made, device="cpu") as loaded:
        for call in program.calls:
            (got,) = loaded["forward"](*(v.data for v in call.inputs))
            np.testing.assert_allclose(got, call.outputs[0].data, program.rtol, program.atol)


def test_two_keys_name_library_and_constants() -> None:
    """DE1: as ExecuTorch's AotiBackend writes them; a library without constants needs no data under the second."""
    raw, program = plain()
    made = forge.with_payload(raw, f"{keys(raw)}\n_weights_blob".encode())
    right(made, program)
    (island,) = aoti.read(made)
    assert (island.library_key, island.blob_key, island.constants) == (keys(raw), "_weights_blob", ())


def test_no_payload_means_keys_of_the_method_s_name() -> None:
    """DE1: whose library bears no hash."""
    raw, program = plain()
    made = forge.rename(forge.with_payload(raw, b""), keys(raw), "forward_so_blob")
    right(made, program)
    (island,) = aoti.read(made)
    assert (island.library_key, island.blob_key) == ("forward_so_blob", "forward_weights_blob")
    with pytest.raises(headrace.ProgramError, match=r"forward_so_blob"):
        headrace.load(forge.with_payload(raw, b""), device="cpu")


@pytest.mark.parametrize(
    "text", ["KEY", "KEY\n", "KEY\nx_so_blob", "KEY\na_weights_blob\n", "\n_weights_blob", "KEY\n\xff"]
)
def test_other_texts_are_refused(text: str) -> None:
    """DE1: by name, as bytes of no known format."""
    raw, _ = plain()
    made = forge.with_payload(raw, text.replace("KEY", keys(raw)).encode("latin-1"))
    with pytest.raises(headrace.ProgramError, match=r"ETCUDAFQN3, got other bytes"):
        headrace.load(made, device="cpu")


def mlp(folder: Path, library: bytes | None) -> bytes:
    """The MLP with its first constant, of 64 bytes, under a name for all of them in one piece."""
    raw = programs.AOTI.load("mlp").path.read_bytes()
    (island,) = aoti.read(raw)
    first = island.constants[0]
    assert first.nbytes == 64
    blob = first.key[: len(first.key) - len("_weights_blob")] + "_weights_blob"
    raw = forge.replace_everywhere(raw, first.key.encode(), blob.encode())
    if library is not None:
        raw = forge.replace_library(raw, library)
    key = next(e for e in forge.pte.read(raw).named_data if e.key.endswith("_so_blob")).key
    return forge.with_payload(raw, f"{key}\n{blob}".encode())


BLOB = """
#include <cstdint>
#include <cstddef>
#include <cstring>
extern "C" {
int aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
int aoti_torch_get_data_ptr(void*, void**);
}
static float held[SIZE / 4];
extern "C" __attribute__((visibility("default"))) int AOTInductorModelContainerGetConstantsBlobSize(void*, uint64_t* n) {
  *n = SIZE;
  return 0;
}
extern "C" __attribute__((visibility("default"))) int AOTInductorModelUpdateConstantsFromBlob(void*, const uint8_t* bytes) {
  std::memcpy(held, bytes, SIZE);
  return 0;
}
"""
SUM = """
    void* data = nullptr; int64_t sizes[] = {4, 8}, strides[] = {8, 1};
    aoti_torch_get_data_ptr(in[0], &data);
    float x = *static_cast<float*>(data), sum = 0;
    for (float value : held) sum += value;
    if (int code = aoti_torch_empty_strided(2, sizes, strides, 6, 0, 0, out)) return code;
    aoti_torch_get_data_ptr(out[0], &data);
    for (int i = 0; i < 32; ++i) static_cast<float*>(data)[i] = x + sum;
    return 0;
"""


def takes_one_piece(folder: Path, nbytes: int) -> bytes:
    """A library of one constant of that size, which adds its numbers to the first of its input."""
    one = {
        "GetNumConstants(void*, size_t* n) { *n = 0;": "GetNumConstants(void*, size_t* n) { *n = 1;",
        "GetConstantFromFolded(void*, size_t, bool*) { return 1; }": "GetConstantFromFolded(void*, size_t, bool* is) "
        "{ *is = false; return 0; }",
        "GetConstantType(void*, size_t, int32_t*) { return 1; }": "GetConstantType(void*, size_t, int32_t* is) "
        "{ *is = 1; return 0; }",
        "GetConstantDataSize(void*, size_t, size_t*) { return 1; }": "GetConstantDataSize(void*, size_t, size_t* n) "
        f"{{ *n = {nbytes}; return 0; }}",
    }
    return forge.shared_library(folder, SUM, head=BLOB.replace("SIZE", str(nbytes)), instead=one)


def test_constants_in_one_piece_are_given_to_the_library(tmp_path: Path) -> None:
    """DE1: all of them, before the first run."""
    made = mlp(tmp_path, takes_one_piece(tmp_path, 64))
    (weight,) = (c for c in aoti.read(programs.AOTI.load("mlp").path)[0].constants[:1])
    raw = aoti.library(programs.AOTI.load("mlp").path, weight.key)
    assert raw is not None
    x = np.full((4, 16), 2.5, np.float32)
    with headrace.load(made, device="cpu") as loaded:
        (got,) = loaded["forward"](x)
    np.testing.assert_allclose(got, np.full((4, 8), 2.5 + np.frombuffer(raw, np.float32).sum()), rtol=1e-5)


def test_a_piece_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """DE1: before the library reads beyond it."""
    with pytest.raises(headrace.ProgramError, match=r"expected 128 bytes of constants .* got 64"):
        headrace.load(mlp(tmp_path, takes_one_piece(tmp_path, 128)), device="cpu")


def test_a_library_that_takes_no_piece_is_refused(tmp_path: Path) -> None:
    """DE1: it would compute with constants that are not there."""
    with pytest.raises(headrace.ProgramError, match=r"takes its constants in one piece"):
        headrace.load(mlp(tmp_path, None), device="cpu")
