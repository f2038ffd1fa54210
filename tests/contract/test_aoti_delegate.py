"""The contract with native islands: AOTInductor libraries for the host (`CudaBackend`), on their own and between
islands of a delegate in Python."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import SEEDS, golden
from .test_returns import placed

SCHEDULES = ["eager", "late", *range(6)]
NAMES = ["aoti_chain_resident", "aoti_chain"]


def sims() -> Any:
    for schedule in SCHEDULES:
        yield schedule, headrace.device("sim", schedule=schedule)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", delegates.WAYS)
def test_native_islands_and_python_ones_in_turn_are_right(name: str, way: str) -> None:
    """OR2, DE1: on the cpu and under every schedule, whatever way the Python delegate works on the stream."""
    delegates.install(delegates.WAYS[way])
    program = golden(name)
    devices = [headrace.device("cpu"), *(device for _, device in sims())]
    devices += [headrace.device("sim", schedule=seed) for seed in range(100, 100 + SEEDS // 10)]
    for device in devices:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            for k in range(len(program.calls)):
                inputs = placed(device, program.inputs(k), "resident" in name)
                assert program.right(loaded["forward"](*inputs), k)


@pytest.mark.parametrize("how", ["argument", "selection", "nothing"])
@pytest.mark.parametrize("given", ["device", "host"])
def test_a_call_waits_by_the_rule_and_no_other(how: str, given: str) -> None:
    """SY1, SY2, DE1: native islands add no wait; on a late device their work is pending when the call returns."""
    program = golden("aoti_chain_resident")
    for schedule, device in sims():
        with program.load(device) as loaded:
            method, stream = loaded["forward"], device.stream()
            inputs = placed(device, program.inputs(), given == "device")
            waits = how == "nothing" or given == "host"
            for _ in range(2):
                pending = device.pending
                if how == "selection":
                    with headrace.caller_stream(stream):
                        results = method(*inputs)
                else:
                    results = method(*inputs, stream=stream if how == "argument" else None)
                assert method.stats.last.synchronizations == (1 if waits else 0)
                if schedule == "late" and not waits:
                    assert device.pending > pending
                assert program.right(results)


@pytest.mark.parametrize("name", NAMES)
def test_the_record_of_a_call_is_in_order(name: str) -> None:
    """OR5, DE1: every island with what it reads and writes; nothing conflicts that nothing orders."""
    program = golden(name)
    for device in [headrace.device("cpu"), *(device for _, device in sims())]:
        with program.load(device) as loaded, headrace.record() as record:
            for k in range(len(program.calls)):
                assert program.right(loaded["forward"](*program.inputs(k), stream=device.stream()), k)
        if device.name == "cpu":
            # Nothing of it is a device's: what is written down is there, and no check passes for having seen nothing.
            with pytest.raises(headrace.OrderingError, match="expected work of a device"):
                record.check()
        else:
            record.check()
        named = [island.delegate for island in record.log.islands.values()]
        assert named.count("CudaBackend") == 2 * len(program.calls) == named.count("TestA"), named


@pytest.mark.parametrize("wrong", delegates.WRONG)
def test_a_python_delegate_on_a_stream_of_its_own_is_found_beside_native_islands(wrong: str) -> None:
    """OR2, OR5: the fault shows as a wrong value on the late device, and is named by the check: the native island,
    and the Python one that nothing orders behind it."""
    delegates.install(delegates.WRONG[wrong])
    program = golden("aoti_chain_resident")
    device = headrace.device("sim", schedule="late")
    with program.load(device) as loaded, headrace.record() as record:
        results = loaded["forward"](device.to_device(program.inputs()[0]), stream=device.stream())
        assert not program.right(results)
    with pytest.raises(headrace.OrderingError, match="CudaBackend"):
        record.check()


def test_calls_of_one_method_are_in_order_whatever_threads_they_come_from() -> None:
    """OR7, DE1: an island's container is never in two calls at once, and each caller gets its own answer."""
    program = golden("aoti_chain_resident")
    for _, device in sims():
        with program.load(device, instances=2) as loaded:
            wrong: list[int] = []

            def work(k: int, loaded: Any = loaded, device: Any = device, wrong: list[int] = wrong) -> None:
                stream = device.stream()
                for _ in range(5):
                    x = device.to_device(program.inputs(k)[0], stream=stream)
                    if not program.right(loaded["forward"](x, stream=stream), k):
                        wrong.append(k)

            threads = [threading.Thread(target=work, args=(k,)) for k in range(len(program.calls))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong


def test_state_in_an_island_is_ordered_between_calls_on_different_streams() -> None:
    """OR7, OR5: what one call writes the next one reads, whichever streams they are on."""
    program = golden("aoti_kept_state")
    for _, device in sims():
        with program.load(device) as loaded, headrace.record() as record:
            results = [
                loaded["forward"](*program.inputs(k), stream=device.stream())
                for k in range(len(program.calls))
            ]
            for k, result in enumerate(results):
                assert program.right(result, k)
        record.check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", ["call", "copy", "record", "wait"])
def test_a_fault_of_the_device_is_told_and_the_next_call_is_right(name: str, operation: str) -> None:
    """OP3, LT2: whichever operation of a call fails, and whenever that is told."""
    program = golden(name)
    told = 0
    for schedule in ("eager", "late", 3):
        device = headrace.device("sim", schedule=schedule)
        with program.load(device) as loaded:
            for at in range(3):
                device.fail(operation, at)
                errors: list[Exception] = []
                for k in range(3):
                    try:
                        assert program.right(loaded["forward"](*program.inputs(k)), k)
                    except headrace.HeadraceError as error:
                        errors.append(error)
                assert len(errors) <= 1, (schedule, at)
                assert all("the fault that was injected" in str(error) for error in errors)
                told += len(errors)
                device.clear_faults()
                for k in range(3):
                    assert program.right(loaded["forward"](*program.inputs(k)), k)
    # A wait between calls is all that there is to fail on one stream.
    assert told >= 6 or operation == "wait"


@pytest.mark.parametrize("schedule", ["eager", "late", 5])
def test_work_in_flight_survives_whatever_is_dropped(schedule: Any) -> None:
    """LT3, LT4: the program goes, and its library with it, only behind the work of its last call."""
    program = golden("aoti_chain_resident")
    for _ in range(3):
        device = headrace.device("sim", schedule=schedule)
        loaded = program.load(device)
        stream = device.stream()
        (result,) = loaded["forward"](device.to_device(program.inputs()[0]), stream=stream)
        del loaded
        assert program.right((result,))
        loaded = program.load(device)
        (result,) = loaded["forward"](device.to_device(program.inputs()[0]), stream=stream)
        loaded.close()
        del loaded, stream
        assert np.allclose(result.numpy(), program.calls[0][1][0], program.rtol, program.atol)


@pytest.mark.parametrize("name", NAMES)
def test_native_islands_and_python_ones_are_one_graph(name: str) -> None:
    """GR1, GR2, DE1: captured and replayed under every schedule, inputs on the host and on the device."""
    program = golden(name)
    for _, device in sims():
        with program.load(device) as loaded:
            graph = loaded["forward"].capture(*program.inputs(0))
            assert program.right(graph.outputs, 0)
            for k in range(len(program.calls)):
                inputs = placed(device, program.inputs(k), k % 2 == 1)
                assert program.right(graph.replay(*inputs, stream=device.stream()), k)
            assert graph.stats.recaptures == {} and graph.stats.captures == 1


def test_state_in_an_island_advances_once_for_capture_and_for_each_replay() -> None:
    """GR1, GR6: a cache that AOTInductor's library keeps; a capture that fails puts it back."""
    program = golden("aoti_kept_state")

    def steps(run: Any, first: int, count: int) -> list[Any]:
        return [run(*program.inputs(k % len(program.calls))) for k in range(first, first + count)]

    def values(results: Any) -> list[Any]:
        return [[y.numpy() if isinstance(y, headrace.Buffer) else y for y in result] for result in results]

    for _, device in sims():
        with program.load(device) as eager:
            want = values(steps(eager["forward"], 0, 4))
        for fault in (None, "end_capture", "instantiate", "upload"):
            with program.load(device) as loaded:
                method = loaded["forward"]
                if fault is None:
                    graph = method.capture(*program.inputs(0))
                    got = values([graph.outputs, *steps(graph.replay, 1, 2), *steps(method, 3, 1)])
                else:
                    device.fail(fault)
                    with pytest.raises(headrace.CaptureError, match="injected"):
                        method.capture(*program.inputs(0))
                    got = values(steps(method, 0, 4))
                for a, b in zip(want, got, strict=True):
                    for x, y in zip(a, b, strict=True):
                        np.testing.assert_array_equal(x, y)
