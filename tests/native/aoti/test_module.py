"""AOTInductor islands without Python, under the engine's own ``Module``."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headrace import aoti
from tests import programs
from tests.native import compiler
from tests.native.cuda.test_cuda import fake
from tests.programs import AOTI, CUDA_FEW

LIBRARIES = compiler.libraries()


@pytest.fixture(scope="module", params=["linked", "opened"])
def binary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """``test_module.cpp``, with libheadrace_cuda.so linked, or opened when it runs."""
    engines = sorted(programs.ROOT.glob("build/*/engine/include"), key=lambda p: p.stat().st_mtime)
    assert engines, "no headers of the engine in build: build the package here first"
    target = tmp_path_factory.mktemp("module") / request.param
    kernels = ["-Wl,--no-as-needed", "-lexecutorch_kernels_optimized"]
    compiler.build(
        *(
            "-std=c++20",
            "-O1",
            "-g",
            *compiler.sanitizer_flags(),
            "-DC10_USING_CUSTOM_GENERATED_MACROS",
            "-DET_USE_THREADPOOL",
        ),
        *("-DET_EVENT_TRACER_ENABLED", "-isystem", engines[-1]),
        *("-isystem", engines[-1] / "executorch/runtime/core/portable_type/c10"),
        *(f"-I{compiler.INCLUDE}", f"-I{compiler.ROOT / 'native'}", Path(__file__).with_suffix(".cpp")),
        *("-o", target, f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-lheadrace", "-lexecutorch", *kernels),
        *(["-lheadrace_cuda"] if request.param == "linked" else []),
        "-pthread",
    )
    opened = {} if request.param == "linked" else {"OPEN": str(LIBRARIES / "libheadrace_cuda.so")}
    return target, {**os.environ, **opened}


def run(binary: tuple[Path, dict[str, str]], *arguments: object) -> str:
    target, environment = binary
    done = subprocess.run(
        [*compiler.prefix(), target, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_on_the_host(binary: tuple[Path, dict[str, str]]) -> None:
    """DE1, PK4: with no device bound; the delegate registers once, whether linked or opened."""
    run(binary, "host", AOTI.load("add_one").path)


@pytest.mark.parametrize("scenario", ["sim", "memory"])
def test_memory_of_a_device(scenario: str, binary: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """DE1: enqueued on the guard's stream. DM2: host memory that the engine was told is a device's is refused by name,
    and not touched."""
    program = AOTI.load("mlp_resident")
    for name, value in (("in", program.calls[0].inputs[0]), ("out", program.calls[0].outputs[0])):
        (tmp_path / name).write_bytes(value.data.tobytes())
    out = run(binary, scenario, program.path, program.data[0], tmp_path / "in", tmp_path / "out")
    if scenario == "memory":
        assert "delegate 'CudaBackend': input 0: expected memory of sim:0, got host memory" in out


def test_a_gpu(binary: tuple[Path, dict[str, str]]) -> None:
    """LT1, LT2, LT4, DE1: a library for CUDA on the fake driver: calls are ordered by the delegate's own event where the
    stream changes, and the end of the program waits for it; kernels are loaded by the first call."""
    program = CUDA_FEW.load("mlp")
    (island,) = aoti.read(program.path)
    total = 0.0
    for constant in island.constants:
        raw = aoti.library(program.path, constant.key)
        assert raw is not None
        total += float(np.frombuffer(raw, np.float32)[0])
    library = aoti.library(program.path, island.library_key)
    assert library is not None
    total += len(set(re.findall(rb"\0(triton_[a-z]+_fused_\w*_?\d+)\0", library)))
    target, environment = binary
    run((target, {**environment, "LD_LIBRARY_PATH": str(fake())}), "gpu", program.path, total)
