"""The goldens themselves: the stock ExecuTorch runtime gives them too, where it can run the program."""

from __future__ import annotations

import numpy as np
import pytest

from tests import programs

torch = pytest.importorskip("torch", reason="needs torch and the stock executorch.runtime")


def as_torch(value: programs.Value) -> object:
    if value.kind != "tensor":
        return value.data
    if value.dtype == "bfloat16":
        return torch.from_numpy(value.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value.data)


def test_stock_runtime_gives_the_goldens(subtests: pytest.Subtests) -> None:
    from executorch.runtime import Runtime

    runtime = Runtime.get()
    checked = 0
    for name in programs.names():
        program = programs.load(name)
        foreign = set(program.delegates) - {"XnnpackBackend"}
        # The stock bindings take no second data file.
        if foreign or program.kernels_missing or len(program.data) > 1:
            continue
        with subtests.test(name):
            data = program.data[0] if program.data else None
            loaded = runtime.load_program(program.path, data_map=data) if data else runtime.load_program(program.path)
            methods = {m: loaded.load_method(m) for m in {c.method for c in program.calls}}
            for call in program.calls:
                got = methods[call.method].execute([as_torch(v) for v in call.inputs])
                assert len(got) == len(call.outputs)
                for result, wanted in zip(got, call.outputs, strict=True):
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
