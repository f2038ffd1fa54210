"""PK5: the GPU code in a wheel, read without CUDA tools. The files in fatbins/ are what nvcc 13.0 wrote."""

from __future__ import annotations

import struct
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pte.fatbin import GpuCode, embedded, read, unpack_lz4, write
from tests.audit.wheel_forge import Entry, cubin, fatbin

FATBINS = Path(__file__).parent / "fatbins"
WRITTEN_BY_NVCC = {
    "plain": [("ptx", "compute_120", "none"), ("sass", "sm_75", "none")],
    "lz4": [("ptx", "compute_90a", "lz4"), ("sass", "sm_90a", "none")],
    "zstd": [("ptx", "compute_120", "zstd"), ("sass", "sm_100f", "zstd"), ("sass", "sm_120", "zstd")],
    "relocatable": [("ptx", "compute_80", "zstd"), ("sass", "sm_80", "zstd")],
    "lto": [("ltoir", "compute_80", "zstd")],
}


def sorts(code: tuple[GpuCode, ...]) -> list[tuple[str, str, str]]:
    return [(one.kind, one.arch, one.compression) for one in code]


@pytest.mark.parametrize("name", WRITTEN_BY_NVCC)
def test_reads_what_nvcc_was_asked_for(name: str) -> None:
    """PK5: architecture, SASS or PTX, compressed or not; fatbins/make.sh says what was asked."""
    binaries = read(memoryview((FATBINS / f"{name}.fatbin").read_bytes()))
    assert sorts(binaries.code) == WRITTEN_BY_NVCC[name]
    assert binaries.faults == ()


def test_lz4_code_is_unpacked_and_kernels_are_found() -> None:
    """PK5: the kernel's name in compressed PTX of nvcc."""
    data = (FATBINS / "lz4.fatbin").read_bytes()
    # The entry of PTX: kind 1.
    start = next(at for at in range(16, len(data), 8) if struct.unpack_from("<HH", data, at) == (1, 0x101))
    header, _, compressed = struct.unpack_from("<IQI", data, start + 4)
    (unpacked,) = struct.unpack_from("<Q", data, start + 56)
    text = unpack_lz4(memoryview(data)[start + header : start + header + compressed], unpacked)
    assert text is not None
    assert len(text) == unpacked
    assert b".entry _Z1kPf" in bytes(text)


def test_kernels_in_uncompressed_code_are_seen_and_compressed_code_is_counted_as_opaque() -> None:
    """PK5: a kernel that could not be looked for is not taken for one that is there."""
    wanted = frozenset({"_Z1kPf", "_Z2noPf"})
    assert read(memoryview((FATBINS / "plain.fatbin").read_bytes()), wanted).kernels == {"_Z1kPf"}
    zstd = read(memoryview((FATBINS / "zstd.fatbin").read_bytes()), wanted)
    assert zstd.kernels == {"_Z1kPf"} or zstd.opaque == 3  # Python 3.14 can unpack them


def test_zstd_code_is_unpacked_where_python_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """PK5: compression.zstd is new in Python 3.14; a stand-in with its signature serves the others."""

    class ZstdDecompressor:
        def decompress(self, data: bytes, max_length: int = -1) -> bytes:
            assert data[:4] == b"\x28\xb5\x2f\xfd"
            assert max_length > 0
            return b"\n.visible .entry _Z1kPf(\n"

    zstd = types.ModuleType("compression.zstd")
    zstd.ZstdDecompressor, zstd.ZstdError = ZstdDecompressor, ValueError  # type: ignore[attr-defined]
    package = types.ModuleType("compression")
    package.zstd = zstd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression", package)
    monkeypatch.setitem(sys.modules, "compression.zstd", zstd)
    data = memoryview((FATBINS / "relocatable.fatbin").read_bytes())
    found = read(data, frozenset({"_Z1kPf", "_Z2noPf"}))
    assert (found.kernels, found.opaque) == ({"_Z1kPf"}, 0)


def test_several_containers_with_gaps_are_summed() -> None:
    """PK5: a linker puts the containers of many objects one after the other."""
    one = fatbin(Entry("sass", 80), Entry("ptx", 80))
    data = one + b"\x00" * 24 + one
    (ptx, sass) = read(memoryview(data)).code
    assert (ptx.count, sass.count) == (2, 2)


@pytest.mark.parametrize(
    ("flags", "kind", "arch"),
    [(0x11, "sass", "sm_90"), (0x100011, "sass", "sm_90a"), (0x200011, "ptx", "compute_90f")],
)
def test_flags_name_the_suffix(flags: int, kind: str, arch: str) -> None:
    """PK5: sm_90a runs on no other GPU, so it is another architecture than sm_90."""
    (code,) = read(memoryview(fatbin(Entry(kind, 90, flags=flags)))).code
    assert code.arch == arch


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "no GPU code"),
        (b"\x00" * 64, "no GPU code"),
        (b"\x01" * 64, "no fat binary header"),
        (fatbin(Entry("sass", 90))[:40], "past the section's end"),
        (fatbin(Entry("sass", 90))[:8], "cut"),
        (struct.pack("<IHHQ", 0xBA55ED50, 9, 16, 0), "version 9"),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + b"\x00" * 8, "entry is cut"),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 63), "past the section's end"),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + b"\x02\x00" + b"\x00" * 62, "more bytes"),
        (fatbin(Entry("sass", 90, number=99)), "unknown kind 99"),
    ],
)
def test_what_is_malformed_is_told_and_does_not_raise(data: bytes, fault: str) -> None:
    """PK5: an entry of no bytes must not be read for ever."""
    binaries = read(memoryview(data))
    assert binaries.code == ()
    assert any(fault in one for one in binaries.faults), binaries.faults


def test_a_container_in_plain_data_is_found_and_a_chance_magic_number_is_not() -> None:
    """PK5: code embedded as an array, for a program that loads it by the driver."""
    whole = fatbin(Entry("sass", 90, payload=cubin("_Z1kv")))
    data = memoryview(b"text" + whole + b"more" + whole[:4] + b"junk" * 9 + whole[:-8])
    assert [bytes(one) for one in embedded(data)] == [whole]


@settings(max_examples=120, deadline=1000)
@given(st.binary(max_size=400), st.integers(0, 4176), st.sampled_from(sorted(WRITTEN_BY_NVCC)))
def test_any_bytes_are_read_without_a_crash(noise: bytes, at: int, name: str) -> None:
    """PK5: whatever the bytes, a verdict."""
    data = bytearray((FATBINS / f"{name}.fatbin").read_bytes())
    data[at : at + len(noise)] = noise
    for candidate in (bytes(data), noise):
        read(memoryview(candidate), frozenset({"_Z1kPf"}))
        list(embedded(memoryview(candidate)))


@settings(max_examples=120, deadline=1000)
@given(st.binary(max_size=200), st.integers(0, 1 << 16))
def test_unpacking_never_makes_more_than_its_limit(data: bytes, limit: int) -> None:
    """PK5: a decompression bomb in GPU code."""
    text = unpack_lz4(memoryview(data), limit)
    assert text is None or len(text) <= limit


def test_what_is_written_is_what_nvcc_writes() -> None:
    """EX2: machine code and PTX, taken out of a fat binary of nvcc's and put together again, are the same bytes."""
    raw = (FATBINS / "plain.fatbin").read_bytes()
    # Behind the container's header of 16 bytes: a header of 64 and machine code, one of 80 and PTX.
    machine = raw[80 : 80 + 2984]
    ptx = raw[80 + 2984 + 80 :].rstrip(b"\0")
    assert machine[:4] == b"\x7fELF" and b".version 9.0" in ptx
    assert write([("sm_75", machine)], ("compute_120", ptx)) == raw


def test_what_is_written_is_read() -> None:
    """EX2: every suffix; several of them; and what is no machine code, no PTX or no architecture is refused."""
    machine = cubin("_Z1kv")
    ptx = b".version 8.4\n.target sm_80\n.entry _Z1kv() { ret; }"
    written = write([("sm_80", machine), ("sm_90a", machine), ("sm_100f", machine)], ("compute_80", ptx))
    found = read(memoryview(written), frozenset({"_Z1kv"}))
    assert [(c.kind, c.arch, c.count) for c in found.code] == [
        ("ptx", "compute_80", 1),
        ("sass", "sm_100f", 1),
        ("sass", "sm_80", 1),
        ("sass", "sm_90a", 1),
    ]
    assert found.faults == () and found.kernels == {"_Z1kv"} and found.opaque == 0
    assert [bytes(c) for c in embedded(memoryview(b"\1\2" + written + b"\3"))] == [written]
    for entries, text in (
        ([("sm_80", ptx)], None),
        ([("sm_80b", machine)], None),
        ([("gfx942", machine)], None),
        ([], ("compute_80", b"no version")),
    ):
        with pytest.raises(ValueError, match="fat binary"):
            write(entries, text)
