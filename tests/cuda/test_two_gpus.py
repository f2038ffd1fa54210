"""Two GPUs in one process: what belongs to one is never taken for the other's. Skipped where there is one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import headrace
from headrace import lanes
from tests import programs

from . import kernels
from .test_aoti import check, inputs_of, raw

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore::headrace.LaneWarning"),
    pytest.mark.two_gpus,
]
# Kernels that are loaded on each; weights that each has of its own; state; stock's.
NAMES = ["mlp", "transformer", "kept_state", "stock_mlp"]


@pytest.fixture
def gpus() -> tuple[Any, Any]:
    return headrace.device("cuda:0"), headrace.device("cuda:1")


@pytest.mark.parametrize("name", NAMES)
def test_one_program_on_both_gives_the_same_bits(name: str, gpus: tuple[Any, Any]) -> None:
    """DE1, SY2, OR4: loaded on each, called in turn from one thread whose own device stays what it was."""
    program = programs.CUDA.load(name)
    current = kernels.cupy.cuda.runtime.getDevice()
    with program.open(gpus[0]) as first, program.open(gpus[1]) as second:
        for k, call in enumerate(program.calls):
            answers = []
            for gpu, loaded in zip(gpus, (first, second), strict=True):
                results = loaded[call.method](*inputs_of(program, gpu, k, "host"), stream=gpu.stream())
                check(results, program, k)
                answers.append(raw(results))
                assert all(r.device == gpu for r in results if isinstance(r, headrace.Buffer))
                assert kernels.cupy.cuda.runtime.getDevice() == current
            assert answers[0] == answers[1]


def test_streams_and_memory_of_the_other_are_refused(gpus: tuple[Any, Any]) -> None:
    """CS5, DM3: a typed error that names both; the next call is right."""
    program = programs.CUDA.load("mlp_resident")
    call = program.calls[0]
    here, there = gpus
    with program.open(here) as loaded:
        method = loaded[call.method]
        inputs, elsewhere = inputs_of(program, here, 0), [there.to_device(v.data) for v in call.inputs]
        with pytest.raises(headrace.DeviceError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
            method(*inputs, stream=there.stream())
        with pytest.raises(
            (headrace.DeviceError, headrace.InputError), match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"
        ):
            method(*elsewhere)
        with pytest.raises(headrace.DeviceError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
            program.open(here, lane=there.partition(sms=8))
        check(method(*inputs), program, 0)


def test_graphs_of_both_replay_in_turn(gpus: tuple[Any, Any]) -> None:
    """GR1: each has its own memory, and sees the inputs of its own replay."""
    program = programs.CUDA.load("transformer")
    call = program.calls[0]
    with program.open(gpus[0]) as first, program.open(gpus[1]) as second:
        graphs = []
        for gpu, loaded in zip(gpus, (first, second), strict=True):
            inputs = inputs_of(program, gpu, 0)
            graphs.append((loaded[call.method].capture(*inputs), inputs))
        answers = [raw(graph.replay(*inputs)) for _ in range(20) for graph, inputs in graphs]
        check(graphs[1][0].replay(*graphs[1][1]), program, 0)
        assert len(set(answers)) == 1


def test_threads_on_each_at_once(gpus: tuple[Any, Any]) -> None:
    """OR4: 200 calls on either GPU from a thread of its own, 0 wrong."""
    program = programs.CUDA.load("mlp")
    call = program.calls[0]
    wrong: list[str] = []

    def work(gpu: Any, loaded: Any) -> None:
        try:
            method, inputs, stream = loaded[call.method], inputs_of(program, gpu, 0), gpu.stream()
            want = raw(method(*inputs, stream=stream))
            for _ in range(200):
                if raw(method(*inputs, stream=stream)) != want:
                    wrong.append(f"{gpu.name}: other bits")
        except Exception as error:
            wrong.append(f"{gpu.name}: {error!r}")

    with program.open(gpus[0]) as first, program.open(gpus[1]) as second:
        threads = [
            threading.Thread(target=work, args=pair)
            for pair in zip(gpus, (first, second), strict=True)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_lane_on_the_second(gpus: tuple[Any, Any]) -> None:
    """GC1, GC5: multiprocessors of cuda:1 alone, and the program bound to them gives the same answer."""
    program = programs.CUDA.load("transformer")
    lane = gpus[1].partition(sms=8)
    assert len(lanes.sms_seen(lane.stream())) == lane.sm_count == 8
    call = program.calls[0]
    with program.open(gpus[1], lane=lane) as bound, program.open(gpus[1]) as free:
        want = raw(free[call.method](*inputs_of(program, gpus[1], 0)))
        assert raw(bound[call.method](*inputs_of(program, gpus[1], 0))) == want


def test_memory_comes_back_on_both(gpus: tuple[Any, Any]) -> None:
    """LT3: loads, calls and closes on each leave what was held before."""
    program = programs.CUDA.load("mlp")
    call = program.calls[0]

    def once() -> list[int]:
        for gpu in gpus:
            with program.open(gpu) as loaded:
                check(loaded[call.method](*inputs_of(program, gpu, 0)), program, 0)
        for gpu in gpus:
            gpu.synchronize()
            gpu.trim()
        return [gpu.memory()["current_nbytes"] for gpu in gpus]

    before = once()
    for _ in range(10):
        assert once() == before
