"""Run the contract with a sanitized build: ``python -m tests.contract.sanitize SITE [pytest arguments]``.

``SITE`` holds the package as ``make test-sanitize`` installs it. The interpreter is not instrumented, so the
sanitizers' libraries are preloaded into it; it is the base interpreter with this environment's packages on its path,
since the editable package of the environment would come first. Leaks are not looked for: CPython keeps memory
for good. The tests count what the device holds. One test is left out, which counts resident memory: AddressSanitizer
holds freed memory back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

CORE = ("tests/contract/test_first_slice.py", "tests/contract/test_order.py", "tests/contract/test_faults.py",
        "tests/contract/test_memory.py", "tests/contract/test_delegates.py", "tests/contract/test_lifetime.py",
        "tests/contract/test_returns.py", "tests/contract/test_selection.py", "tests/contract/test_aoti_delegate.py")  # fmt: skip


def environment(site: Path) -> dict[str, str]:
    def runtime(name: str) -> str:
        found = subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        path = found.stdout.strip()
        if not os.path.isabs(path):
            raise SystemExit(f"sanitize: expected gcc to have {name}, got none; install libasan and libubsan")
        return path

    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime(n) for n in ("libasan.so", "libubsan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib")]),
    }


def main(site: Path, arguments: list[str]) -> int:
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    there = environment(site.resolve())
    # What is tested is what was sanitized.
    check = "import headrace, sys; sys.exit('build' not in headrace.__file__ or 'libasan' not in open('/proc/self/maps').read())"
    subprocess.run([python, "-c", check], env=there, check=True)
    tests = [] if any(a.startswith("tests/") for a in arguments) else CORE
    counts_memory = "tests/contract/test_lifetime.py::test_two_hundred_cycles_are_flat"
    options = ["-q", "-p", "no:cacheprovider", "--deselect", counts_memory]
    command = [python, "-m", "pytest", *options, *tests, *arguments]
    return subprocess.run([str(c) for c in command], env=there).returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
