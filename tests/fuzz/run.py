"""Load and run mutated programs in guarded child processes.

::

    python -m tests.fuzz.run --count 600 [--seed 1] [--only KIND]

Allowed are a finished run and a typed error. A crash, a hang or another exception is a failure, named by
its case; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.fuzz.mutate import KINDS, case, indices

__all__ = ["Result", "fuzz", "main", "run_batch"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30  # of one case
BATCH = 50


class Result:
    """How the cases of a run ended: counts by outcome, and the failures with their names."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []


def run_batch(seed: int, waiting: list[int], timeout_s: float = TIMEOUT_S) -> list[tuple[int, str]]:
    """Run cases in one child, in a new one after each that ends it."""
    out: list[tuple[int, str]] = []
    while waiting:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", str(seed), *map(str, waiting)],
            cwd=ROOT,
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
            into.append(stream.read()[-1500:])

        readers = [threading.Thread(target=read), threading.Thread(target=drain)]
        for reader in readers:
            reader.start()
        running: int | None = None
        ended: set[int] = set()
        verdict = ""
        while True:
            try:
                line = lines.get(timeout=timeout_s)
            except queue.Empty:
                verdict = f"HANG after {timeout_s} s"
                child.kill()
                break
            if line is None:
                break
            word, index, *rest = line.split(maxsplit=2)
            if word == "start":
                running = int(index)
            elif word == "end":
                out.append((int(index), rest[0].strip()))
                ended.add(int(index))
                running = None
        status = child.wait()
        for reader in readers:
            reader.join()
        child.stdout.close()
        child.stderr.close()
        if running is None and status == 0:
            break
        stderr = "".join(errors).strip()
        how = verdict or f"CRASH with status {status}"
        if running is None:
            out.append((waiting[0], f"{how} outside a case: {stderr}"))
            break
        out.append((running, f"{how}: {stderr}"))
        waiting = [i for i in waiting if i not in ended and i != running]
    return out


def fuzz(seed: int, chosen: list[int], workers: int = 2, progress: bool = False) -> Result:
    """Run the cases with these indices."""
    result = Result()
    names = list(KINDS)
    batches = [chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH)]
    done, began = 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for ended in concurrent.futures.as_completed([pool.submit(run_batch, seed, b) for b in batches]):
            for index, outcome in ended.result():
                result.kinds[names[index % len(names)]] += 1
                if outcome.startswith(("CRASH", "HANG")):
                    result.outcomes[outcome.split(" ")[0]] += 1
                    result.failures.append(f"{case(seed, index).name}\n    {outcome}")
                else:
                    result.outcomes[outcome] += 1
            done += BATCH
            if progress and done % (10 * BATCH) == 0:
                print(
                    f"{done} cases, {time.monotonic() - began:.0f} s, {len(result.failures)} failures",
                    flush=True,
                )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=list(KINDS))
    options = parser.parse_args()
    chosen = indices(options.count, options.only, options.start)
    result = fuzz(options.seed, chosen, options.workers, progress=True)
    for failure in result.failures:
        print(failure)
    print(dict(result.kinds))
    print(dict(result.outcomes))
    total = sum(result.outcomes.values())
    if total != len(chosen):
        print(f"expected {len(chosen)} outcomes, got {total}")
        return 1
    print(f"{total} cases, {len(result.failures)} failures")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
