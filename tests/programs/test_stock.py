"""The goldens themselves: the stock ExecuTorch runtime gives them too, where it can run the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import programs

torch = pytest.importorskip("torch", reason="needs torch and the stock executorch.runtime")


def as_torch(value: programs.Value) -> Any:
    if value.kind != "tensor":
        return value.data
    if value.dtype == "bfloat16":
        return torch.from_numpy(value.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value.data)


def stock_can_run(program: programs.Program) -> bool:
    # Its Python bindings take one data file at most.
    foreign = set(program.delegates) - {"XnnpackBackend"}
    return not foreign and not program.kernels_missing and len(program.data) <= 1


# The stock runtime and torch warn on import about things that are not ours.
@pytest.mark.filterwarnings("ignore")
def test_stock_runtime_gives_the_goldens(subtests: pytest.Subtests) -> None:
    from executorch.runtime import Runtime

    runtime = Runtime.get()
    checked = 0
    for program in filter(stock_can_run, map(programs.load, programs.names())):
        with subtests.test(program.name):
            loaded = runtime.load_program(program.path, data_path=program.data[0] if program.data else None)
            methods = {m: loaded.load_method(m) for m in {c.method for c in program.calls}}
            for call in program.calls:
                inputs = [as_torch(value) for value in call.inputs]
                if not program.runs:
                    with pytest.raises(RuntimeError):
                        methods[call.method].execute(inputs)
                    continue
                results = methods[call.method].execute(inputs)
                for result, wanted in zip(results, call.outputs, strict=True):
                    if wanted.kind != "tensor":
                        assert result == wanted.data
                        continue
                    assert str(result.dtype) == f"torch.{wanted.dtype}"
                    assert tuple(result.shape) == wanted.data.shape
                    np.testing.assert_allclose(
                        result.double().numpy(), wanted.float64(), rtol=program.rtol, atol=program.atol
                    )
                checked += 1
    assert checked > 100
