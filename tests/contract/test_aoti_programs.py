"""DE1: every model that goes through AOTInductor, exported for the host, run here without torch."""

from __future__ import annotations

from typing import Any

import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close, run_python, succeeded

from . import delegates

# Enough to meet every order of a handful of islands; a program loads in some ten milliseconds.
SCHEDULES: dict[str, list[Any]] = {
    "cpu": [None],
    "sim-eager": ["eager"],
    "sim-late": ["late"],
    "sim-seeds": list(range(8)),
}


def devices(kind: str) -> Any:
    for schedule in SCHEDULES[kind]:
        yield headrace.device("cpu") if schedule is None else headrace.device("sim", schedule=schedule)


@pytest.fixture(autouse=True)
def dynamic() -> None:
    """The Python delegate of a split program has sizes that change from call to call."""

    class Resized(delegates.OneCall):
        dynamic = True

    delegates.install(Resized)


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("name", programs.AOTI.names())
def test_answers_are_those_of_eager(name: str, kind: str) -> None:
    """DE1, EX1, OR5, DM1: on cpu and under every kind of schedule, in order; state advances once a call."""
    program = programs.AOTI.load(name)
    resident = name.endswith("_resident")
    for device in devices(kind):
        with (
            headrace.record() as record,
            headrace.load(program.path, data=program.data, device=device) as loaded,
        ):
            for call in program.calls:
                inputs = [array_of(v) for v in call.inputs]
                if resident:
                    inputs = [device.to_device(x) for x in inputs]
                results = loaded[call.method](*inputs)
                assert len(results) == len(call.outputs) > 0
                for got, want in zip(results, call.outputs, strict=True):
                    host = (
                        got.numpy() if isinstance(got, headrace.Buffer) and want.dtype != "bfloat16" else got
                    )
                    assert_close(host, want, program.rtol, program.atol)
        # Where nothing runs on a device there is no order to look at, and a check that looks at nothing fails.
        if kind != "cpu" and name not in ("mlp_host", "add_one"):
            record.check()


def test_a_fresh_process_needs_no_torch() -> None:
    """DE1, PK1: the largest of them, in a process that has and maps no torch, on both devices."""
    program = programs.AOTI.load("transformer_dynamic")
    code = """
        import sys
        import headrace
        from tests import programs
        from tests.conftest import array_of, assert_close

        program = programs.AOTI.load(sys.argv[1])
        for device in ("cpu", "sim"):
            with headrace.load(program.path, data=program.data, device=device) as loaded:
                for call in program.calls:
                    (got,) = loaded["forward"](*map(array_of, call.inputs))
                    assert_close(got, call.outputs[0], program.rtol, program.atol)
        assert not [m for m in sys.modules if m.split(".")[0] in {"torch", "executorch"}]
        maps = open("/proc/self/maps").read()
        assert "libtorch" not in maps and "libc10" not in maps
        print("right")
    """
    assert succeeded(run_python(code, program.name)) == "right\n"
