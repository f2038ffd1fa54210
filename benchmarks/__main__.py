"""headrace beside stock executorch.runtime on the same programs, in one run.

::

    python -m benchmarks [startup] [calls] [islands] [record] [graphs] [lanes] [aoti] [--ours-python P] [--stock-python P]
        [--rounds N] [--check]

``startup``: process start to first answer, import, resident memory; a fresh process each time.
``calls``: the cost of one call, from Python, inputs and outputs on the host.
``islands``: what an island costs, of ours alone: see ``islands.py``.
``record``: what `headrace.record()` adds to a call, of ours alone: see ``record.py``.
``lanes``: a small program beside a loud neighbour, in lanes and without them, where a GPU is: see ``lanes.py``.
``graphs``: a replay beside the driver and PyTorch, where a GPU is: see ``graphs.py``.
``aoti``: AOTInductor's islands and models beside the driver and PyTorch, where a GPU is: see ``aoti.py``.

The two runtimes run in turn, each in a process of its own, and in changing order. Of a startup the median
over the rounds is reported, and the ratio of medians, ours to stock's. A call is measured in samples of 20 ms,
one of the one runtime beside one of the other, so that a machine that is busy is so for both: the ratio is
the median over these pairs. Writes ``build/bench/startup.json`` and ``calls.json``. ``--check`` ends with
status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import programs

from . import aoti, graphs, islands, lanes, record

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().parent / "worker.py"
RUNTIMES = ("ours", "stock")
# Of each program, in each round.
SAMPLES = 25
STARTUP_PROGRAM = "mlp_portable"
CALL_PROGRAMS = ("add", "mlp_portable", "mlp_xnnpack", "cnn_portable", "cnn_xnnpack")
# What the project promises: the greatest ratio of ours to stock's.
GOALS = {"startup": {"answer_s": 1 / 20}, "calls": {"add": 1 / 2}}
PARTS = (*GOALS, "islands")
# Those that are measured in this process.
HERE: dict[str, Any] = {"record": record, "graphs": graphs, "lanes": lanes, "aoti": aoti}
# Why a part cannot be measured here.
NEEDS = {"graphs": graphs.available, "lanes": graphs.available, "aoti": aoti.available}


def machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") as info:
        models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average": os.getloadavg(),
    }


def failed(python: str, arguments: list[str], status: int | None, errors: str) -> SystemExit:
    command = f"{python} benchmarks/worker.py {' '.join(arguments)}"
    return SystemExit(f"benchmarks: expected exit status 0, got {status} from: {command}\n{errors[-3000:]}")


def files(name: str) -> list[str]:
    path = programs.load(name).path
    return [str(path), str(path.with_suffix(".npz"))]


def in_turn(number: int) -> tuple[str, ...]:
    return RUNTIMES if number % 2 else RUNTIMES[::-1]


def startups(pythons: dict[str, str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """``rounds`` results of each runtime; before them one of each that is not counted, which fills caches."""
    found: dict[str, list[dict[str, Any]]] = {runtime: [] for runtime in RUNTIMES}
    for number in range(rounds + 1):
        for runtime in in_turn(number):
            arguments = ["startup", runtime, *files(STARTUP_PROGRAM)]
            began = time.clock_gettime(time.CLOCK_MONOTONIC)
            done = subprocess.run([pythons[runtime], str(WORKER), *arguments], capture_output=True, text=True)
            if done.returncode:
                raise failed(pythons[runtime], arguments, done.returncode, done.stderr)
            result = json.loads(done.stdout.splitlines()[-1])
            result["answer_s"] = result.pop("answered_at") - began
            if number:
                found[runtime].append(result)
    return found


class Caller:
    """A process of one runtime that has loaded every program and times calls when asked."""

    def __init__(self, python: str, runtime: str) -> None:
        self.python = python
        self.arguments = ["calls", runtime, *(file for name in CALL_PROGRAMS for file in files(name))]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [python, str(WORKER), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.versions: dict[str, str] = json.loads(self.line())["versions"]

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            raise failed(self.python, self.arguments, status, self.errors.read())
        return line

    def sample(self, name: str) -> float:
        """Microseconds a call."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self.line())

    def close(self) -> None:
        self.process.communicate()
        self.errors.close()


def calls(pythons: dict[str, str], rounds: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Results by program, and the versions of each runtime."""
    samples: dict[str, dict[str, list[list[float]]]] = {
        name: {runtime: [] for runtime in RUNTIMES} for name in CALL_PROGRAMS
    }
    versions: dict[str, Any] = {}
    for _ in range(rounds):
        callers = {runtime: Caller(pythons[runtime], runtime) for runtime in RUNTIMES}
        for name in CALL_PROGRAMS:
            for runtime in RUNTIMES:
                samples[name][runtime].append([])
            for number in range(SAMPLES):
                for runtime in in_turn(number):
                    samples[name][runtime][-1].append(callers[runtime].sample(name))
        for runtime, caller in callers.items():
            versions[runtime] = caller.versions
            caller.close()
    results: dict[str, dict[str, Any]] = {}
    for name, found in samples.items():
        flat = {runtime: [us for one in found[runtime] for us in one] for runtime in RUNTIMES}
        ratios = [ours / stock for ours, stock in zip(flat["ours"], flat["stock"], strict=True)]
        results[name] = {
            **{runtime: statistics.median(flat[runtime]) for runtime in RUNTIMES},
            "ratio": statistics.median(ratios),
            "best": {runtime: min(flat[runtime]) for runtime in RUNTIMES},
            "all": {runtime: [statistics.median(one) for one in found[runtime]] for runtime in RUNTIMES},
        }
    return results, versions


def compared(values: dict[str, list[float]]) -> dict[str, Any]:
    medians = {runtime: statistics.median(values[runtime]) for runtime in RUNTIMES}
    return {**medians, "ratio": medians["ours"] / medians["stock"], "all": values}


def facts(what: str, *, module: str = "benchmarks", arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What every report begins with. ``arguments``: of the command; None: the process's."""
    return {
        "version": 1,
        "what": what,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)],
        "machine": machine(),
    }


def measure(what: str, pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    extra: dict[str, Any]
    if what == "islands":
        return {**facts(what), **islands.measure(pythons["ours"], rounds)}
    if what == "startup":
        found = startups(pythons, rounds)
        keys = ("answer_s", "import_s", "load_s", "imported_nbytes", "answered_nbytes")
        results = {key: compared({r: [one[key] for one in found[r]] for r in RUNTIMES}) for key in keys}
        versions = {runtime: found[runtime][0]["versions"] for runtime in RUNTIMES}
        mapped = {r: any(one["libtorch_mapped"] for one in found[r]) for r in RUNTIMES}
        extra = {"program": STARTUP_PROGRAM, "libtorch_mapped": mapped}
    else:
        results, versions = calls(pythons, rounds)
        extra = {"unit": "microseconds a call", "samples": SAMPLES}
    goals = {key: {"most": most, "met": results[key]["ratio"] <= most} for key, most in GOALS[what].items()}
    return {
        **facts(what),
        "versions": versions,
        "rounds": rounds,
        "results": results,
        "goals": goals,
        **extra,
    }


def table(report: dict[str, Any]) -> str:
    if report["what"] == "islands":
        return islands.table(report)
    lines = [f"{report['what']:24}{'headrace':>12}{'stock':>12}{'ratio':>9}"]
    for key, result in report["results"].items():
        if key.endswith("_nbytes"):
            label, scale, unit = f"resident, {key.removesuffix('_nbytes')}", 1e-6, "MB"
        elif key.endswith("_s"):
            label, scale, unit = key.removesuffix("_s"), 1e3, "ms"
        else:
            label, scale, unit = key, 1.0, "µs"
        ours, stock = (result[runtime] * scale for runtime in RUNTIMES)
        goal = report["goals"].get(key)
        note = f"   {'meets' if goal['met'] else 'MISSES'} the goal of {goal['most']:.3g}" if goal else ""
        lines.append(f"  {label + ', ' + unit:22}{ours:12.2f}{stock:12.2f}{result['ratio']:9.3f}{note}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "what",
        nargs="*",
        metavar="startup|calls|islands|record|graphs|lanes",
        help="all of them if none is named; graphs and lanes need a GPU",
    )
    parser.add_argument("--ours-python", default=sys.executable, help="has headrace installed")
    parser.add_argument("--stock-python", default=sys.executable, help="has torch and executorch installed")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each runtime (5)")
    parser.add_argument("--check", action="store_true", help="end with status 1 where a goal is missed")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {*PARTS, *HERE}:
        parser.error(
            f"expected startup, calls, islands, record, graphs or lanes, got {', '.join(sorted(unknown))}"
        )
    if arguments.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {arguments.rounds}")
    pythons = {"ours": arguments.ours_python, "stock": arguments.stock_python}
    missed = False
    for what in arguments.what or (*PARTS, *HERE):
        if (ask := NEEDS.get(what)) and (why := ask()):
            print(f"{what}: not measured: {why}", flush=True)
            missed |= what in arguments.what
            continue
        if part := HERE.get(what):
            results = part.measure(arguments.rounds)
            goals = {what: {"met": part.met(results)}}
            report = {**facts(what), "rounds": arguments.rounds, "results": results, "goals": goals}
            text = part.table(results)
        else:
            report = measure(what, pythons, arguments.rounds)
            text = table(report)
        path = ROOT / "build" / "bench" / f"{what}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(text, f"  {path.relative_to(ROOT)}", sep="\n", flush=True)
        missed |= not all(goal["met"] for goal in report["goals"].values())
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
