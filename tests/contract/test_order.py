"""OR: what is ordered, and what is not unless the caller says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, golden


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(k)`` in threads and raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(k: int) -> None:
        try:
            work(k)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def asked_for(device: Any, call: Callable[[], Any]) -> dict[str, int]:
    """How often each operation of the device was called in a call that is not one of the first."""
    names = ("call", "copy", "launch", "record", "wait", "")
    for _ in range(4):
        call()
    before = {name: device.calls(name) for name in names}
    call()
    return {name: device.calls(name) - before[name] for name in names}


def test_order_costs_islands_on_one_stream_nothing(sims: Devices) -> None:
    """BY3: an island asks the device for its own work alone; one event and the waits are the call's, as many for 25
    islands of two delegates as for one island. A replay adds a launch and its copies to them."""
    program_costs, replay_costs = set(), set()
    for device in sims:
        for name in ("chain1", "chain10", "chain25_cuda_resident"):
            program = golden(name)
            with program.load(device) as loaded:
                method, stream = loaded["forward"], device.stream()
                inputs = [device.to_device(x) for x in program.inputs()]
                called = asked_for(device, lambda m=method, x=inputs, s=stream: m(*x, stream=s))
                assert called["call"] == len(method.islands) and called["copy"] == called["launch"] == 0
                graph = method.capture(*inputs, stream=stream)
                replayed = asked_for(device, lambda g=graph, x=inputs, s=stream: g.replay(*x, stream=s))
                assert (replayed["call"], replayed["launch"], replayed["copy"]) == (0, 1, len(inputs) + 1)
                for cost in (called, replayed):
                    # For the inputs, the method's memory and the output; one event behind all.
                    assert cost["record"] == 1 and cost["wait"] <= len(inputs) + 2
                program_costs.add((called["wait"], called[""] - called["call"]))
                replay_costs.add((replayed["wait"], replayed[""]))
                assert program.right(graph.replay(*inputs, stream=stream))
    assert len(program_costs) == len(replay_costs) == 1


def test_a_stream_of_nobody_s_choice_is_the_per_thread_one(
    sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """OR1: handle 2, never 0 and never the legacy stream; for the first call too, on any thread."""
    program, seen = golden("split_cuda"), []
    for cls in classes.values():
        cls.on_run = staticmethod(lambda stream: seen.append((threading.current_thread(), stream.handle)))
    for device in sims:
        with program.load(device) as loaded:
            blocked = device.stream(blocking=True)
            gate: list[int] = []
            # The legacy stream would wait for this one.
            blocked.call(lambda gate=gate: gate.append(1))
            in_threads(
                2, lambda k, loaded=loaded: program.right(loaded["forward"](*program.inputs())) or 1 / 0
            )
            if sims.late:
                assert gate == []
            blocked.synchronize()
        assert len(seen) == 4 and {handle for _, handle in seen} == {2}
        assert len({thread for thread, _ in seen}) == 2
        seen.clear()


def test_calls_of_one_method_are_in_order_whatever_streams_they_come_on(sims: Devices) -> None:
    """OR7: they share planned memory: on a stream each, none waits on the host, and every answer is right."""
    program = golden("chain25_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            inputs = [[device.to_device(x) for x in program.inputs(k)] for k in range(3)]
            results = []
            for k in range(6):
                results.append((k, loaded["forward"](*inputs[k % 3], stream=device.stream())))
                assert loaded["forward"].stats.last.synchronizations == 0
            for k, result in reversed(results):
                assert program.right(result, k % 3)


def test_calls_of_one_method_are_in_order_whatever_threads_they_come_from(sims: Devices) -> None:
    """OR7: with a stream each, with the per-thread one, and all on one."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            inputs = [[device.to_device(x) for x in program.inputs(k)] for k in range(len(program.calls))]
            one = device.stream()

            def work(
                k: int, device: Any = device, loaded: Any = loaded, inputs: Any = inputs, one: Any = one
            ) -> None:
                own = device.stream()
                for i in range(2):
                    for stream in (own, None, one):
                        results = loaded["forward"](*inputs[(i + k) % len(inputs)], stream=stream)
                        assert program.right(results, (i + k) % len(inputs))

            in_threads(3, work)


def test_without_order_between_calls_planned_memory_would_be_overwritten(late: Any) -> None:
    """OR7: the check of the check: two loads share nothing and may run in any order, one load may not."""
    program = golden("split_cuda_resident")
    with program.load(late) as loaded:
        inputs = [[late.to_device(x) for x in program.inputs(k)] for k in range(2)]
        (a,) = loaded["forward"](*inputs[0], stream=late.stream())
        (b,) = loaded["forward"](*inputs[1], stream=late.stream())
        calls = late.pending
        # To have b, the device must do a before.
        b.numpy()
        assert late.pending <= calls - 8
        pending = late.pending
        assert program.right([a]) and program.right([b], 1)
        assert late.pending <= pending


@pytest.mark.parametrize("instances", [1, 2])
def test_instances_let_calls_overlap(instances: int, late: Any) -> None:
    """OR7: with two, the second call does not wait for the first; with one it does."""
    program = golden("split_cuda_resident")
    with program.load(late, instances=instances) as loaded:
        inputs = [late.to_device(x) for x in program.inputs()]
        gate: list[int] = []
        slow, fast = late.stream(), late.stream()
        slow.call(lambda: gate.append(1))
        barrier = threading.Barrier(2, timeout=60)
        entered = []

        class Meets(delegates.OneCall, name="TestA"):
            def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
                if instances == 2 and len(entered) < 2:
                    entered.append(1)
                    barrier.wait()
                super().enqueue(inputs, outputs, stream)

    with program.load(late, instances=instances) as loaded:
        results: dict[str, Any] = {}

        def call(k: int) -> None:
            stream = (slow, fast)[k]
            results["slow" if k == 0 else "fast"] = loaded["forward"](*inputs, stream=stream)

        if instances == 2:
            in_threads(2, call)
        else:
            call(0)
            call(1)
        assert program.right(results["fast"])
        assert gate == ([] if instances == 2 else [1])
        assert program.right(results["slow"]) and gate == [1]


def test_instances_cost_planned_memory_and_share_weights(devices: Devices) -> None:
    """OR7, DM4: each instance's memory is reported, the program's file once."""
    program = golden("chain25_cuda")
    for device in devices:
        sizes = {}
        for instances in (1, 2, 3):
            with program.load(device, instances=instances) as loaded:
                uses = loaded.memory().uses
                planned = [u for u in uses if u.what == "planned"]
                sizes[instances] = sum(u.nbytes for u in planned)
                assert {u.instance for u in planned} == set(range(instances))
                assert [u.nbytes for u in uses if u.what == "program"] == [program.path.stat().st_size]
                for k in range(4):
                    assert program.right(loaded["forward"](*program.inputs(k)), k)
        assert 0 < 6 * sizes[1] == 3 * sizes[2] == 2 * sizes[3]


def test_threads_on_streams_of_their_own_are_not_ordered(late: Any) -> None:
    """OR3: overlapping calls of two programs: each runs without the other, on one stream they do not."""
    program = golden("split_cuda_resident")
    for shared in (False, True):
        with program.load(late) as one, program.load(late) as two:
            inputs = [late.to_device(x) for x in program.inputs()]
            first = late.stream()
            second = first if shared else late.stream()
            results: dict[int, Any] = {}

            def call(k: int, one: Any = one, two: Any = two, first: Any = first, second: Any = second,
                     inputs: Any = inputs, results: dict[int, Any] = results) -> None:  # fmt: skip
                with headrace.caller_stream((first, second)[k]):
                    results[k] = (one, two)[k]["forward"](*inputs)

            in_threads(1, lambda _, call=call: call(0))
            in_threads(1, lambda _, call=call: call(1))
            marks = late.pending
            assert program.right(results[1])
            left = late.pending
            assert program.right(results[0])
            # What was left to do for the first: nothing where they shared the stream.
            assert (left - late.pending > 3) == (not shared), (marks, left, late.pending)


def test_two_programs_on_one_thread_run_one_after_the_other(sims: Devices) -> None:
    """OR3: one selection for both; the second reads what the first wrote."""
    program = golden("chain10")
    for device in sims:
        with (
            program.load(device) as one,
            program.load(device) as two,
            headrace.caller_stream(device.stream()),
        ):
            x = device.to_device(program.inputs()[0])
            out = device.empty(x.shape)
            one["forward"](x, out=[out])
            (twice,) = two["forward"](out)
            one["forward"](x, out=[out])
            assert program.right([out])
            (want,) = one["forward"](out.numpy())
            np.testing.assert_array_equal(twice.numpy(), want.numpy())


def test_no_program_runs_without_its_device_s_lock_held_against_python(late: Any) -> None:
    """OR3: threads that wait in calls of one device, and host functions that need the interpreter, do not block
    each other."""
    program = golden("split_cuda")
    with program.load(late, instances=3) as loaded:

        def work(k: int) -> None:
            for i in range(20):
                assert program.right(
                    loaded["forward"](*program.inputs(i), stream=late.stream() if i % 2 else None), i
                )

        in_threads(6, work)
