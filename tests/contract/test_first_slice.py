"""The whole story in one sitting: two delegates in one program, on the caller's stream; and on streams of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, golden


def answers(device: Any, name: str = "two_islands") -> bool:
    """Whether every recorded call, each behind the other in flight, is answered as eager PyTorch answers."""
    program = golden(name)
    stream = device.stream()
    with program.load(device) as loaded, headrace.caller_stream(stream):
        return all(program.right(loaded["forward"](*x), k) for k, (x, _) in enumerate(program.calls))


def test_two_islands_on_the_caller_s_stream_are_right(devices: Devices, way: type[delegates.Base]) -> None:
    """OR2, DE3: a program planned for cuda:0, on every device; whatever way its delegates work on the stream."""
    for device in devices:
        assert answers(device)


@pytest.mark.parametrize("wrong", delegates.WRONG)
def test_a_stream_for_each_delegate_is_wrong_when_work_is_late(wrong: str, late: Any) -> None:
    """OR2: nothing orders the delegates' streams, and the answer shows it."""
    delegates.install(delegates.WRONG[wrong])
    assert not answers(late)


@pytest.mark.parametrize("wrong", delegates.WRONG)
def test_a_stream_for_each_delegate_is_wrong_under_some_seed_and_right_when_eager(wrong: str) -> None:
    """OR6: which is why the fault hides: on the eager device it never shows, under seeds sometimes."""
    delegates.install(delegates.WRONG[wrong])
    assert answers(headrace.device("sim", schedule="eager"))
    found = [seed for seed in range(50) if not answers(headrace.device("sim", schedule=seed))]
    assert found and len(found) < 50
    again = [seed for seed in found if not answers(headrace.device("sim", schedule=seed))]
    assert again == found, "a seed means one order"


@pytest.mark.parametrize("name", ["chain25_cuda", "chain25_cuda_resident", "split_cuda_host_between"])
def test_longer_programs_are_right(name: str, devices: Devices) -> None:
    """OR2: 25 islands of two delegates, with memory of the caller's or copies, and a host kernel in the middle."""
    program = golden(name)
    for device in devices:
        with program.load(device) as loaded:
            inputs = (
                [device.to_device(x) for x in program.inputs()] if "resident" in name else program.inputs()
            )
            with headrace.caller_stream(device.stream()):
                assert program.right(loaded["forward"](*inputs))


def noise(device: Any, stop: list[bool]) -> Iterator[None]:
    other, scratch = device.stream(), device.empty((64,))
    while not stop[0]:
        other.call(lambda: np.copyto(scratch.numpy(), 1.0), writes=[scratch])
        yield


def test_another_stream_s_work_in_between_changes_nothing(sims: Devices) -> None:
    """OR2: with strangers' work between any two calls."""
    program = golden("split_cuda")
    for device in sims:
        strangers = noise(device, [False])
        stream = device.stream()
        with program.load(device) as loaded:
            for k, (x, _) in enumerate(program.calls):
                next(strangers)
                results = loaded["forward"](*x, stream=stream)
                next(strangers)
                assert program.right(results, k)
