"""Run the native tests under a sanitizer: ``python -m tests.native.sanitize SANITIZER LIBRARIES [pytest arguments]``.

SANITIZER is ``thread`` or ``address,undefined``; LIBRARIES holds libheadrace.so and the others, as ``make test-thread``
and ``make test-sanitize`` build them. The tests are the C++ programs, which are built with the sanitizer too; there is no
Python in those processes. The engine's libraries are as they come: what happens between their own threads, and in their
own memory, is not looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = ("tests/native/test_calls.py", "tests/native/test_graphs.py", "tests/native/test_guard.py",
         "tests/native/aoti/test_module.py", "tests/native/device/test_device.py")  # fmt: skip
# Threads of the engine's pool order their work by means that the sanitizer does not see in code without instruments.
SUPPRESSIONS = """
called_from_lib:libexecutorch_threadpool.so
called_from_lib:libexecutorch_kernels_optimized.so
called_from_lib:libexecutorch_backend_xnnpack.so
"""


OPTIONS = {
    "thread": {"TSAN_OPTIONS": "suppressions={suppressions}:halt_on_error=1:print_suppressions=0"},
    # Registries of the engine keep what they are given for the life of the process.
    "address,undefined": {
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
}
# What a library that was built with it calls.
SIGN = {"thread": b"__tsan_init", "address,undefined": b"__asan_init"}


def main(sanitizer: str, libraries: Path, arguments: list[str]) -> int:
    if sanitizer not in OPTIONS:
        raise SystemExit(f"sanitize: expected one of {', '.join(OPTIONS)}, got {sanitizer}")
    with libraries.joinpath("libheadrace.so").open("rb") as file:
        if SIGN[sanitizer] not in file.read():
            raise SystemExit(f"sanitize: expected {file.name} built with {sanitizer}, got another build")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as suppressions:
        suppressions.write(SUPPRESSIONS)
        suppressions.flush()
        environment = {
            **os.environ,
            "HEADRACE_NATIVE_LIBRARIES": str(libraries.resolve()),
            "HEADRACE_NATIVE_SANITIZER": sanitizer,
            **{k: v.format(suppressions=suppressions.name) for k, v in OPTIONS[sanitizer].items()},
        }
        tests = [] if any(a.startswith("tests/") for a in arguments) else TESTS
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *arguments]
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
