"""CUDA libraries load where there is no driver: for what they say of themselves, and for tests."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path

from headrace.engine import core
from headrace.pte import fatbin
from tests.aoti import forge
from tests.native import compiler

LIBRARIES = Path(sys.modules["headrace._core"].__file__ or "").parent / "lib"

HEAD = """
#include <cstddef>
extern "C" {
int cudaGetDevice(int*); int cudaMalloc(void**, size_t); int cudaEventCreate(void**); int cudaEventRecord(void*, void*);
int cudaEventSynchronize(void*); int cudaEventQuery(void*); int cudaEventDestroy(void*); int cudaFree(void*);
int cudaMemcpy(void*, const void*, size_t, int); int cudaSetDevice(int); int cudaGetLastError();
const char* cudaGetErrorString(int);
int cuModuleLoadData(void**, const void*); int cuModuleGetFunction(void**, void*, const char*); int cuModuleUnload(void*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int cuFuncSetAttribute(void*, int, int); int cuGetErrorString(int, const char**);
int aoti_torch_create_cuda_stream_guard(void*, int, void**); int aoti_torch_delete_cuda_stream_guard(void*);
int aoti_torch_dtype_bfloat16(); void aoti_torch_warn(const char*, const char*, unsigned, const char*);
}
// A symbol that the loader would share with every later library.
template <class T> struct Flag { static inline T value = 3; };
"""
BODY = """
    int device = -1; void* p = nullptr; const char* text = nullptr;
    if (Flag<int>::value++ != 3) return 7;                  // another library's, or the one before's
    if (cudaGetDevice(&device) != 0 || device != 0 || cudaSetDevice(0) != 0) return 1;
    if (aoti_torch_dtype_bfloat16() != 15 || cuGetErrorString(100, &text) != 0 || text == nullptr) return 2;
    if (cudaMalloc(&p, 8) == 0 || cudaEventCreate(&p) == 0 || cuModuleLoadData(&p, "") == 0) return 3;
    if (cudaGetLastError() != 100 || cudaGetLastError() != 0 || cudaFree(nullptr) != 0) return 4;
    if (cudaEventRecord(p, p) == 0 || cudaEventQuery(p) == 0 || cudaEventSynchronize(p) == 0) return 5;
    if (cudaMemcpy(p, p, 1, 1) == 0 || cudaEventDestroy(p) == 0 || cuModuleUnload(p) == 0) return 5;
    if (cuModuleGetFunction(&p, p, "k") == 0 || cuFuncSetAttribute(p, 1, 1) == 0) return 6;
    if (aoti_torch_create_cuda_stream_guard(p, 0, &p) == 0 || cudaGetErrorString(100) == nullptr) return 6;
    return cuLaunchKernel(p, 1, 1, 1, 1, 1, 1, 0, p, &p, &p);
"""


def cuda_library(folder: Path) -> bytes:
    """One that calls the CUDA run time and the driver, and names libcuda.so.1 as NEEDED."""
    (folder / "driver.cpp").write_text('extern "C" int cuInit(unsigned) { return 0; }\n')
    driver = folder / "libcuda.so.1"
    compiler.build("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", folder / "driver.cpp", "-o", driver)
    flags = ("-Wl,--no-as-needed", str(driver), "-fgnu-unique")
    return forge.shared_library(folder, BODY, head=HEAD, inputs=0, outputs=0, flags=flags)


def test_a_cuda_library_loads_without_a_driver_and_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """DE1, LT4, LT5, PK3: from memory and from a folder; shared while it lives, gone afterwards; no CUDA library."""
    image = cuda_library(tmp_path)
    key = hashlib.sha256(image).hexdigest() + "_so_blob"
    target = tmp_path / "library"
    compiler.build(
        *("-std=c++20", "-O1", f"-I{compiler.INCLUDE}", f"-I{compiler.ROOT / 'native'}"),
        *(Path(__file__).with_suffix(".cpp"), "-o", target, f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}"),
        *("-lheadrace_cuda", "-lheadrace", "-lexecutorch", f"-Wl,-rpath-link,{LIBRARIES}"),
    )
    (tmp_path / "place").mkdir()
    done = subprocess.run(
        [target, tmp_path / "library.so", key, tmp_path / "place"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert not list((tmp_path / "place").iterdir())


def test_what_a_cuda_library_asks_for_is_told_without_loading_it(tmp_path: Path) -> None:
    """DE1: its shims and needs; the driver is none of them."""
    facts = core.library_facts(cuda_library(tmp_path))
    assert facts["cuda"] is True and facts["missing_shims"] == [] == facts["missing_needs"]
    assert {"cudaMalloc", "cuLaunchKernel", "aoti_torch_dtype_bfloat16"} <= set(facts["shims"])
    assert "libcuda.so.1" not in facts["needed"]


def test_architectures_in_a_library_are_those_that_the_fat_binaries_have(tmp_path: Path) -> None:
    """DE5: as nvcc wrote them, compressed and not, whole and cut; a cubin alone is told too."""
    image = cuda_library(tmp_path)
    assert core.library_facts(image)["gpu_code"] == []
    folder = compiler.ROOT / "tests/audit/fatbins"
    files = sorted(folder.glob("*.fatbin"))
    assert len(files) >= 4
    for file in files:
        raw = file.read_bytes()
        said = {code.arch for code in fatbin.read(memoryview(raw)).code if code.kind != "ltoir"}
        facts = core.library_facts(image + b"\0" * 5 + raw)
        found = {name for kernel in facts["gpu_code"] for name in kernel}
        assert found == said, file.name
        assert facts["architectures"] == ", ".join(sorted(said))
        for cut in (1, len(raw) // 2, len(raw) - 40):
            core.library_facts(image + raw[:-cut])  # a damaged one is none, or its cubins are; and no more
    for abi, flags, name in ((8, 0x9005A04, "sm_90"), (7, 0x5A055A, "sm_90"), (8, 0x6407804, "sm_120")):
        cubin = struct.pack(
            "<4sBBBBB7xHHIQQQIHHHHHH",
            b"\x7fELF",
            2,
            1,
            1,
            0x41,
            abi,
            2,
            190,
            1,
            0,
            64,
            0,
            flags,
            64,
            56,
            0,
            64,
            0,
            0,
        )
        assert core.library_facts(image + cubin)["gpu_code"] == [(name,)]
