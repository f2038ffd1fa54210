"""The C++ tests of native/device, compiled with the sanitizers and run.

They need no engine, so the compiler alone builds them; objects stay in build/native-tests under a hash of
everything that went into them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native import compiler

HERE = Path(__file__).parent
NATIVE = compiler.ROOT / "native"
BUILD = compiler.ROOT / "build/native-tests"
SOURCES = sorted([*(NATIVE / "device").glob("*.cpp"), *HERE.glob("*.cpp")])
HEADERS = sorted(
    [*(NATIVE / "include/headrace").glob("*.h"), *(NATIVE / "device").glob("*.h"), *HERE.glob("*.h")]
)


def digest(flags: list[str], *paths: Path) -> str:
    """Of the compiler, its flags and the contents of the files."""
    hashed = hashlib.sha256(repr([compiler.run("--version").stdout, flags]).encode())
    for path in paths:
        hashed.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return hashed.hexdigest()[:20]


def make(target: Path, *arguments: object) -> Path:
    """Compile `target` if it is not there; whole or not at all, whoever else does the same."""
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.part")
        compiler.build(*arguments, "-o", part)
        part.rename(target)
    return target


def build(sanitizer: str) -> Path:
    # Without optimizing, AddressSanitizer and UBSan take half the time to compile.
    level = "-O1" if sanitizer == "thread" else "-O0"
    flags = ["-std=c++20", *compiler.STRICT, level, "-g1", "-fno-omit-frame-pointer"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    BUILD.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        target = BUILD / f"{source.stem}-{digest(flags, source, *HEADERS)}.o"
        return make(target, *flags, f"-I{NATIVE}", f"-I{compiler.INCLUDE}", "-c", source)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, SOURCES))
    return make(BUILD / f"tests-{digest(flags, *objects)}", *flags, *objects, "-pthread", "-ldl")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_devices_keep_their_rules(sanitizer: str, tmp_path: Path) -> None:
    """OR2, OR3, OR6, CS6, LT3, GR8, GC1, as far as they are the device's: sentences in the C++ files beside this."""
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    if compiler.run(f"-fsanitize={sanitizer}", empty, "-o", tmp_path / "empty").returncode != 0:
        pytest.skip(f"the compiler has no run time for -fsanitize={sanitizer}")
    command = [*compiler.prefix(sanitizer), str(build(sanitizer))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    report = done.stdout[-6000:] + done.stderr[-6000:]
    assert (done.returncode, done.stderr) == (0, ""), report
    total = re.search(r"^(\d+) tests, \d+ checks, 0 failures$", done.stdout, re.MULTILINE)
    assert total is not None, report
    assert int(total[1]) == sum(path.read_text().count("\nTEST(") for path in HERE.glob("*.cpp"))
