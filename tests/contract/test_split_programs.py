"""EX1, EX3, DM1: every model of the corpus, split over several delegates, gives what eager PyTorch gives."""

from __future__ import annotations

import json
from typing import Any

import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close
from tests.programs import step_delegates

# Enough to meet every order of a handful of islands; a program loads in some ten milliseconds.
SCHEDULES: dict[str, list[Any]] = {
    "cpu": [None],
    "sim-eager": ["eager"],
    "sim-late": ["late"],
    "sim-seeds": list(range(8)),
}
DEVICE_DELEGATES = {*step_delegates.NAMES, "CudaBackend"}


def test_the_corpus_is_what_it_is_said_to_be() -> None:
    """EX1: at least 20 models, each split in at least two ways, over two delegates at once in most."""
    ways: dict[str, set[str]] = {}
    for name in programs.SPLIT.names():
        model, _, split = name.partition(".")
        ways.setdefault(model, set()).add(split)
    assert len(ways) >= 20 and min(map(len, ways.values())) >= 2
    several = [n for n in programs.SPLIT.names() if len(programs.SPLIT.load(n).delegates) > 1]
    assert len(several) >= 25


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("name", programs.SPLIT.names())
def test_answers_are_those_of_eager(name: str, kind: str) -> None:
    """EX1, OR5, DM1: on cpu and under every kind of schedule, in order; state advances once a call."""
    program = programs.SPLIT.load(name)
    assert program.calls
    for schedule in SCHEDULES[kind]:
        device = headrace.device("cpu") if schedule is None else headrace.device("sim", schedule=schedule)
        with headrace.record() as record, program.open(device=device) as loaded:
            for call in program.calls:
                inputs = [array_of(v) for v in call.inputs]
                if name.startswith("resident."):
                    inputs = [device.to_device(x) for x in inputs]
                results = loaded[call.method](*inputs)
                assert len(results) == len(call.outputs) > 0
                for got, want in zip(results, call.outputs, strict=True):
                    if isinstance(got, headrace.Buffer) and want.dtype != "bfloat16":
                        got = got.numpy()
                    assert_close(got, want, program.rtol, program.atol)
        if schedule is not None and DEVICE_DELEGATES & set(program.delegates):
            assert record.check().accesses > 0


@pytest.mark.parametrize("name", programs.SPLIT.names())
def test_the_table_is_what_the_program_does(name: str) -> None:
    """EX5: islands of the table are the program's, in its order, with the delegates' names; every node says why."""
    program = programs.SPLIT.load(name)
    rows = json.loads(program.path.with_suffix(".split.json").read_text())
    assert rows and all(why for *_, why in rows)
    file = headrace.pte.read(program.path)
    called = {"Xnnpack": "XnnpackBackend", "Aoti": "CudaBackend"}
    for method in file.methods:
        islands = {
            island: delegate for m, _, delegate, island, _ in rows if m == method.name and island is not None
        }
        assert [called.get(islands[i], islands[i]) for i in sorted(islands)] == [
            island.delegate for island in method.islands
        ]


def test_one_constant_is_a_value_in_each_island() -> None:
    """EX3: islands of one weight have it each, whole, under a name that no other island has."""
    program = programs.SPLIT.load("shared_weight.mixed")
    raw = program.path.read_bytes()
    islands = [
        json.loads(raw[i.payload_offset :][: i.payload_nbytes])["constants"]
        for i in headrace.pte.read(program.path)["forward"].islands
        if i.delegate in step_delegates.NAMES
    ]
    assert len(islands) >= 2
    names = [name for constants in islands for name in constants]
    assert len(names) == len(set(names))
    held = [c["data"] for constants in islands for c in constants.values()]
    assert max(held.count(data) for data in set(held)) >= 2
