"""The same cases through the C++ interface, in a build with AddressSanitizer.

::

    python -m tests.fuzz.native build/sanitize/run_files --count 600 [--seed 1]

Writes the cases to a temporary folder and lets the program run them, in a new process after each that ends
it. A report of a sanitizer, a crash or a hang is a failure, named by its case; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import collections
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.fuzz.mutate import KINDS, case, indices

TIMEOUT_S = 120  # of one case
MEMORY = "hard_rss_limit_mb=6000"


def write(folder: Path, seed: int, indices: list[int]) -> None:
    """One ``NAME.pte`` a case, and its data files as ``NAME.N.ptd``."""
    for index in indices:
        made = case(seed, index)
        (folder / f"{index:07}.pte").write_bytes(made.program)
        for n, data in enumerate(made.data):
            (folder / f"{index:07}.{n}.ptd").write_bytes(data)


def run(program: Path, folder: Path) -> tuple[collections.Counter[str], dict[str, str]]:
    """Outcomes by their name, and for each case that failed what the process wrote."""
    outcomes: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    begin = ""
    environment = os.environ | {
        # Untrusted sizes are asked for and refused; that is no error. Leaks are another test's business.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4000:{MEMORY}",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    while True:
        child = subprocess.Popen(
            [str(program), str(folder), begin],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stderr is not None
        lines: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []

        def read(stream=child.stdout, into=lines) -> None:
            for line in stream:
                into.put(line)
            into.put(None)

        def drain(stream=child.stderr, into=errors) -> None:
            into.append(stream.read())

        readers = [threading.Thread(target=read), threading.Thread(target=drain)]
        for reader in readers:
            reader.start()
        running, verdict = "", ""
        while True:
            try:
                line = lines.get(timeout=TIMEOUT_S)
            except queue.Empty:
                verdict = f"HANG after {TIMEOUT_S} s"
                child.kill()
                break
            if line is None:
                break
            word, name, *rest = line.split()
            if word == "start":
                running = name
            else:
                outcomes[rest[0]] += 1
                running = ""
        status = child.wait()
        for reader in readers:
            reader.join()
        child.stdout.close()
        child.stderr.close()
        if not running:
            if status:
                failures["(outside a case)"] = f"status {status}: {''.join(errors)[-3000:]}"
            return outcomes, failures
        outcomes["FAILURE"] += 1
        failures[running] = f"{verdict or f'status {status}'}: {''.join(errors)[:3000]}"
        begin = f"{int(running) + 1:07}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(KINDS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.seed, indices(options.count, options.only))
        outcomes, failures = run(options.program.resolve(), Path(folder))
    for name, text in failures.items():
        label = case(options.seed, int(name)).name if name.isdigit() else name
        print(f"{label}\n    {text}")
    print(dict(outcomes))
    total = sum(outcomes.values())
    print(f"{total} cases, {len(failures)} failures")
    return 1 if failures or total != options.count else 0


if __name__ == "__main__":
    sys.exit(main())
