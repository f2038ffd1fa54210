"""The goldens themselves: the stock ExecuTorch runtime gives them too, where it can run the program.

::

    python -m tests.programs.stock       # needs torch and executorch; exit status 1 on any difference
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from executorch.runtime import Runtime

from tests import programs

__all__ = ["main"]


def as_torch(value: programs.Value) -> Any:
    if value.kind != "tensor":
        return value.data
    if value.dtype == "bfloat16":
        return torch.from_numpy(value.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value.data)


# Its bindings give every unplanned output memory of its own, also one that is an input at the same time and is
# written by nobody then.
PASSED_THROUGH = {"unplanned_square", "written_input_unplanned"}

# Its kernel writes the indices in another order than they were planned in (native/program/guards.cpp puts that right).
OUT_OF_ORDER = {"indices"}


def stock_can_run(program: programs.Program) -> bool:
    if program.name in PASSED_THROUGH | OUT_OF_ORDER:
        return False
    # Its Python bindings take one data file at most.
    foreign = set(program.delegates) - {"XnnpackBackend"}
    return program.runs and not foreign and not program.kernels_missing and len(program.data) <= 1


def check(program: programs.Program) -> int:
    """Run every call; the number of calls, or an AssertionError."""
    loaded = Runtime.get().load_program(program.path, data_path=program.data[0] if program.data else None)
    methods = {name: loaded.load_method(name) for name in {call.method for call in program.calls}}
    for call in program.calls:
        results = methods[call.method].execute([as_torch(value) for value in call.inputs])
        for result, wanted in zip(results, call.outputs, strict=True):
            if wanted.kind != "tensor":
                assert result == wanted.data
                continue
            assert str(result.dtype) == f"torch.{wanted.dtype}"
            assert tuple(result.shape) == wanted.data.shape
            np.testing.assert_allclose(
                result.double().numpy(), wanted.float64(), rtol=program.rtol, atol=program.atol
            )
    return len(program.calls)


def main() -> int:
    calls = wrong = 0
    for program in filter(stock_can_run, map(programs.load, programs.names())):
        try:
            calls += check(program)
        except (AssertionError, RuntimeError) as error:
            wrong += 1
            print(f"{program.name}: {error}", file=sys.stderr)
    print(f"{calls} calls equal, {wrong} programs wrong")
    return 1 if wrong or not calls else 0


if __name__ == "__main__":
    raise SystemExit(main())
