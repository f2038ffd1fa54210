"""What checking a program's structure costs, beside loading it.

::

    python -m benchmarks.verify [--check] [NAME…]

Both from bytes in memory, in turn, so that a busy machine is busy for both; medians. ``--check`` ends with
status 1 where checking takes more than 5 % of the load and more than 1 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import headrace
from headrace.engine import core
from tests import programs

SHARE, MOST_S = 0.05, 1e-3


def measure(name: str, rounds: int) -> tuple[float, float]:
    """Seconds to check and to load ``name``."""
    program = programs.load(name)
    file = program.path.read_bytes()
    data = [path.read_bytes() for path in program.data]
    check, load = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        core.Program.verify(file, data)
        check.append(time.perf_counter() - began)
        began = time.perf_counter()
        loaded = headrace.load(file, data=data)
        load.append(time.perf_counter() - began)
        loaded.close()
    return statistics.median(check), statistics.median(load)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=programs.names())
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    missed = []
    for name in options.names:
        program = programs.load(name)
        if not program.runs or program.kernels_missing or set(program.delegates) - {"XnnpackBackend"}:
            continue
        check, load = measure(name, options.rounds)
        print(f"{name:30} check {check * 1e6:8.1f} us   load {load * 1e6:8.1f} us   {check / load:6.1%}")
        if check > MOST_S and check > SHARE * load:
            missed.append(name)
    for name in missed:
        print(f"{name}: expected at most {SHARE:.0%} of the load or {MOST_S * 1e3:.0f} ms")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
