"""Run the native tests under ThreadSanitizer: ``python -m tests.native.thread LIBRARIES [pytest arguments]``.

``LIBRARIES`` holds libheadrace.so and the others as ``make test-thread`` builds them. The tests are the C++ programs, which
are built with the sanitizer too; nothing of Python is instrumented, and none of it is in those processes. The engine's
libraries are as they come: what happens between their own threads is not looked at.
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


def main(libraries: Path, arguments: list[str]) -> int:
    with libraries.joinpath("libheadrace.so").open("rb") as file:
        if b"__tsan_init" not in file.read():
            raise SystemExit(f"thread: expected {file.name} built with ThreadSanitizer, got another build")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as suppressions:
        suppressions.write(SUPPRESSIONS)
        suppressions.flush()
        environment = {
            **os.environ,
            "HEADRACE_NATIVE_LIBRARIES": str(libraries.resolve()),
            "HEADRACE_NATIVE_SANITIZER": "thread",
            "TSAN_OPTIONS": f"suppressions={suppressions.name}:halt_on_error=1:print_suppressions=0",
        }
        tests = [] if any(a.startswith("tests/") for a in arguments) else TESTS
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *arguments]
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
