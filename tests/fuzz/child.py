"""Run cases in this process and say how each ended. The parent judges; see `tests.fuzz.run`.

::

    python -m tests.fuzz.child SEED INDEX…

One line before a case ("start INDEX") and one behind it ("end INDEX HOW"). A crash leaves the first alone.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from typing import Any

import numpy as np

import headrace
from tests.contract import delegates
from tests.fuzz.mutate import Case, case

# Indices of no case, by which the parent's own test sees a crash and a hang.
CRASH, HANG = -1, -2
MEMORY = 6 << 30  # bytes of address space; a program that wants more must get an error
STEPS = 200_000  # instructions that a method with loops may take
# What a refusal says of a file: where, what was expected, what came, what to do. The engine has words of its own.
FOUR_PARTS = re.compile(r": expected .+, got .+; .+|(loading|running) failed: ", re.DOTALL)


def arguments(method: headrace.Method, fill: int) -> list[Any]:
    """Inputs that the method accepts; ``fill`` 1 takes smaller shapes where they may vary."""
    out: list[Any] = []
    for info in method.inputs:
        if info.kind != "tensor":
            out.append({"int": 0, "float": 0.0, "bool": False, "none": None, "string": ""}[info.kind])
            continue
        shape = [max(low, min(high, 1 if fill and low != high else high)) for (low, high) in info.bounds]
        if np.prod([float(n) for n in shape]) > 1e8:
            raise headrace.InputError("an input of more than 100 million elements")
        if info.dtype == "bfloat16":
            import ml_dtypes

            out.append(np.full(shape, fill, ml_dtypes.bfloat16))
        else:
            out.append(np.full(shape, fill, info.dtype))
    return out


def run(made: Case) -> str:
    """Load and run every method twice. "ran", or the name of the error. AssertionError: a message lacks a part."""
    try:
        # On the simulated device: programs that are planned for a GPU load there too.
        with headrace.load(made.program, data=made.data, device="sim", max_steps=STEPS) as program:
            outcome = "ran"
            for name in program:
                for fill in (0, 1):
                    try:
                        program[name](*arguments(program[name], fill))
                    except headrace.HeadraceError as error:
                        outcome = type(error).__name__
            return outcome
    except headrace.ProgramError as error:
        if not FOUR_PARTS.search(str(error)):
            raise AssertionError(f"expected a message in four parts, got: {error}") from error
        return type(error).__name__
    except headrace.HeadraceError as error:
        return type(error).__name__


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    delegates.install(delegates.OneCall)  # so that programs are not refused for want of them
    seed = int(sys.argv[1])
    for index in map(int, sys.argv[2:]):
        print("start", index, flush=True)
        if index == CRASH:
            os.abort()
        if index == HANG:
            time.sleep(3600)
        print("end", index, run(case(seed, index)), flush=True)


if __name__ == "__main__":
    main()
