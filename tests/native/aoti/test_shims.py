"""The shims in a program of their own, under AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.native import compiler

NATIVE = compiler.ROOT / "native"
SANITIZE = (
    "-g",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)


def test_tensors_memory_and_ends_of_threads(tmp_path: Path) -> None:
    """SY4, LT4, DE1: constants are held once; temporaries come from a cache; views, copies and items are torch's; a library that is closed takes
    along what it registered for the ends of threads. No error of a sanitizer, and no leak."""
    target = tmp_path / "shims"
    compiler.build(
        *("-std=c++20", *SANITIZE, f"-I{NATIVE}", f"-I{compiler.INCLUDE}"),
        *(
            Path(__file__).with_suffix(".cpp"),
            NATIVE / "cuda/shims.cpp",
            NATIVE / "cuda/threads.cpp",
            NATIVE / "cuda/shims_cuda.cpp",
            NATIVE / "cuda/constants.cpp",
        ),
        *("-o", target, "-pthread"),
    )
    # Sizes that cannot be had are asked for and refused.
    environment = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1"}
    done = subprocess.run([target], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stdout + done.stderr[-3000:]
