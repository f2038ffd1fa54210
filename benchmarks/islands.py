"""What an island costs: a call over 1, 10 and 100 islands whose delegate, in Python or native, does nothing.

::

    python -m benchmarks islands

Everything lies in memory of the device and a stream is selected, so that a call neither copies nor waits: what is
left is the engine's walk, the bridge into Python and the books of one call. Each round is a fresh process, which
times the three programs in turn, so that a machine that is busy is so for all. The goal: the slope from 10 to 100
is at most a third above that from 1 to 10, that is, the cost of an island does not grow with what came before. A slope
that falls is what a call costs once, which more islands share. The native delegate is
``nothing.cpp``, compiled here against the engine's headers.

As a script, ``python benchmarks/islands.py DEVICE LIBRARY SAMPLES PROGRAM.pte…``, it is the process that measures;
an empty LIBRARY means the delegate in Python.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COUNTS = (1, 10, 100)
DEVICES = ("cpu", "sim")
KINDS = ("Python", "native")
SAMPLES = 400
# How much the slope may grow, as a share of the first one.
MOST = 1 / 3


def slopes(us: dict[int, float]) -> tuple[float, float]:
    """Microseconds for each further island, from 1 to 10 and from 10 to 100."""
    return (us[10] - us[1]) / 9, (us[100] - us[10]) / 90


def native_delegate(python: str, folder: Path) -> Path:
    """``nothing.cpp``, compiled for the package of that interpreter."""
    from tests.native import compiler  # as a script this file has no such neighbour

    code = "import headrace.engine as e, sys; print(sys.modules['headrace._core'].__file__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    libraries = Path(done.stdout.strip()).parent / "lib"
    target = folder / "libnothing.so"
    compiler.build(
        *("-std=c++20", "-O2", "-shared", "-fPIC", *compiler.engine_flags()),
        *(Path(__file__).with_name("nothing.cpp"), "-o", target, f"-L{libraries}", "-lexecutorch"),
    )
    return target


def measure(python: str, rounds: int) -> dict[str, Any]:
    """Results by device and kind of delegate, with goals; microseconds."""
    paths = [ROOT / "tests/programs/committed" / f"chain{count}.pte" for count in COUNTS]
    with tempfile.TemporaryDirectory() as folder:
        libraries = {"Python": "", "native": str(native_delegate(python, Path(folder)))}
        samples: dict[str, dict[int, list[float]]] = {
            f"{device}, {kind}": {count: [] for count in COUNTS} for device in DEVICES for kind in KINDS
        }
        for _ in range(rounds):
            for name, found in samples.items():
                device, kind = name.split(", ")
                script = str(Path(__file__).resolve())
                command = [python, script, device, libraries[kind], str(SAMPLES), *map(str, paths)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(
                        f"benchmarks: expected exit status 0 from islands.py, got {done.stderr[-2000:]}"
                    )
                for row in json.loads(done.stdout):
                    for count, us in zip(COUNTS, row, strict=True):
                        found[count].append(us)
    results: dict[str, Any] = {}
    for name, found in samples.items():
        us = {count: statistics.median(found[count]) for count in COUNTS}
        first, second = slopes(us)
        results[name] = {
            "call_us": {str(count): us[count] for count in COUNTS},
            "slope_us": [first, second],
            "grows": (second - first) / first if first > 0 else float("inf"),
        }
    goals = {d: {"most": MOST, "met": r["grows"] <= MOST} for d, r in results.items()}
    return {"results": results, "goals": goals, "rounds": rounds, "samples": SAMPLES}


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{'islands, µs a call':24}" + "".join(f"{count:>10}" for count in COUNTS) + "   for each island"
    ]
    for device, result in report["results"].items():
        first, second = result["slope_us"]
        verdict = "meets" if report["goals"][device]["met"] else "MISSES"
        lines.append(
            f"  {device:22}"
            + "".join(f"{result['call_us'][str(count)]:10.2f}" for count in COUNTS)
            + f"   {first:.2f}, then {second:.2f}: {verdict} the goal of growing by at most a third"
        )
    return "\n".join(lines)


def work(device_name: str, library: str, samples: int, paths: list[str]) -> list[list[float]]:
    """``samples`` rows of microseconds a call, one for each program."""
    import headrace

    ran = 0
    if library:
        native = ctypes.CDLL(library)
        assert native.nothing_register() == 0

    def count(self: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        nonlocal ran
        ran += 1

    def nothing(self: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        pass

    def define(run: Callable[..., None]) -> None:
        """TestA and TestB, in Python, anew."""
        for name in ("TestA", "TestB"):
            types.new_class(name, (headrace.Delegate,), {"name": name}, lambda body: body.update(run=run))

    def executed() -> int:
        return int(native.nothing_executed()) if library else ran

    def prepare(path: str) -> Callable[[], object]:
        import numpy as np

        method = headrace.load(path, device=device)["forward"]
        x = device.to_device(np.zeros((1, 4), np.float32))
        return lambda: method(x)

    device = headrace.device(device_name)
    with headrace.caller_stream(device.stream()):
        # As many islands as were asked for are what a call runs.
        if not library:
            define(count)
        for path, count in zip(paths, COUNTS, strict=True):
            before = executed()
            prepare(path)()
            assert executed() - before == count, (
                f"{path}: expected {count} islands, got {executed() - before}"
            )
        if not library:
            define(nothing)
        calls = [prepare(path) for path in paths]
        repeats = []
        for call, count in zip(calls, COUNTS, strict=True):
            for _ in range(20):
                call()
            # Samples of a tenth of a millisecond: few meet a switch to another process.
            repeats.append(max(2, 30 // count))
        rows = []
        for _ in range(samples):
            row = []
            for call, repeat in zip(calls, repeats, strict=True):
                began = time.perf_counter()
                for _ in range(repeat):
                    call()
                row.append((time.perf_counter() - began) / repeat * 1e6)
            rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])))
