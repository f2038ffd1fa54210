"""Damaged libraries, payloads and compile specs of AOTInductor islands, under AddressSanitizer and UBSan.

::

    python -m tests.fuzz.aoti --count 200000 [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace import pte
from tests.aoti import forge
from tests.native import compiler
from tests.programs import AOTI

NATIVE = compiler.ROOT / "native"
SANITIZE = (
    "-g",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
SOURCES = (
    *("cuda/gpu_code", "cuda/image", "cuda/host_spec"),
    *("program/aoti_payload", "program/tensor", "program/text"),
)


def build(folder: Path) -> Path:
    """The program that damages and reads."""
    target = folder / "aoti"
    compiler.build(
        *(
            "-std=c++20",
            *SANITIZE,
            f"-I{NATIVE}",
            f"-I{compiler.INCLUDE}",
            Path(__file__).with_suffix(".cpp"),
        ),
        *(NATIVE / f"{source}.cpp" for source in SOURCES),
        *("-o", target),
    )
    return target


def seeds(folder: Path) -> dict[str, Path]:
    """One real library, payload and spec."""
    program = AOTI.load("mlp")
    raw = program.path.read_bytes()
    island = pte.read(raw)["forward"].islands[0]
    spec = b'{"version": 1, "march": "x86-64-v3", "symbols": {"s0": [0, 1], "s1": [1, 0]}, "outputs": [["2*s0 + 1", 3],'
    spec += b' ["max(s0, min(s1, 7)) // 2 % (s0 - -s1)"], []]}'
    found = {
        "image": forge.library(raw),
        "payload": raw[island.payload_offset : island.payload_offset + island.payload_nbytes],
        "spec": spec,
    }
    for kind, data in found.items():
        (folder / kind).write_bytes(data)
    return {kind: folder / kind for kind in found}


def fuzz(program: Path, kind: str, file: Path, seed: int, count: int) -> tuple[int, int]:
    """How many cases were accepted and refused. Raises AssertionError with the sanitizer's report."""
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        [program, kind, file, str(seed), str(count)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    found = re.fullmatch(r"(\d+) accepted, (\d+) refused\n", done.stdout)
    assert done.returncode == 0 and found, (
        f"{kind}, seed {seed}: status {done.returncode}\n{done.stderr[-4000:]}"
    )
    return int(found[1]), int(found[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        program = build(Path(name))
        for kind, file in seeds(Path(name)).items():
            print(kind, *fuzz(program, kind, file, options.seed, options.count), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
