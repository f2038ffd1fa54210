"""Many threads: calls of one method take turns, and every caller gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import headrace
from tests import programs
from tests.conftest import array_of, assert_close

THREADS = 8


def together(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run ``work(k)`` in ``threads`` threads that start at once; raises what the first of them raised."""
    start = threading.Barrier(threads)
    failed: list[BaseException] = []

    def go(k: int) -> None:
        start.wait()
        try:
            work(k)
        except BaseException as e:
            failed.append(e)

    running = [threading.Thread(target=go, args=(k,)) for k in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("instances", [1, 3])
def test_a_hundred_thousand_calls_from_eight_threads_are_all_right(instances: int) -> None:
    """OR7: one program, a different input for each call, 0 wrong."""
    calls = 100_000 // THREADS
    wrong = [0] * THREADS
    with headrace.load(programs.load("add").path, instances=instances) as loaded:
        method = loaded["forward"]

        def work(k: int) -> None:
            x, y = np.zeros(1, np.float32), np.zeros(1, np.float32)
            for i in range(calls):
                x[0], y[0] = i, 100_000 * k
                (z,) = method(x, y)
                wrong[k] += float(z[0]) != i + 100_000 * k

        together(work)
        assert wrong == [0] * THREADS
        assert method.stats.calls == calls * THREADS == 100_000


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("name", ["mlp_portable", "mlp_xnnpack", "unplanned_io", "transformer_xnnpack"])
def test_threads_with_different_inputs_get_their_own_answers(name: str, instances: int) -> None:
    """OR7: calls long enough to overlap if nothing kept them apart."""
    program = programs.load(name)
    with headrace.load(program.path, instances=instances) as loaded:
        method = loaded["forward"]

        def work(k: int) -> None:
            call = program.calls[k % len(program.calls)]
            for _ in range(200):
                (got,) = method(*map(array_of, call.inputs))
                assert_close(got, call.outputs[0], program.rtol, program.atol)

        together(work)


@pytest.mark.parametrize("instances", [1, 2])
def test_threads_with_different_sizes_get_their_own_answers(instances: int) -> None:
    """OR7: each thread alternates the sizes of one dynamic method."""
    program = programs.load("dynamic_batch_xnnpack")
    with headrace.load(program.path, instances=instances) as loaded:
        method = loaded["forward"]

        def work(k: int) -> None:
            for i in range(200):
                call = program.calls[(i + k) % len(program.calls)]
                out = np.empty(call.outputs[0].data.shape, np.float32)
                method(call.inputs[0].data, out=[out])
                assert_close(out, call.outputs[0], program.rtol, program.atol)

        together(work)


def test_two_methods_of_one_program_do_not_disturb_each_other() -> None:
    """OR7: each has planned memory of its own."""
    program = programs.load("two_methods")
    with headrace.load(program.path) as loaded:

        def work(k: int) -> None:
            calls = [c for c in program.calls if c.method == program.calls[0 if k % 2 else -1].method]
            for i in range(1000):
                call = calls[i % len(calls)]
                for got, want in zip(
                    loaded[call.method](*map(array_of, call.inputs)), call.outputs, strict=True
                ):
                    assert_close(got, want, program.rtol, program.atol)

        assert len({call.method for call in program.calls}) == 2
        together(work)


def test_state_advances_once_for_each_call_whatever_thread_it_comes_from() -> None:
    """OR7: a mutable buffer counts every call of every thread exactly once."""
    x = np.zeros(2, np.float32)
    seen: list[int] = []
    with headrace.load(programs.load("counter").path) as loaded:

        def work(_: int) -> None:
            mine = [int(loaded["forward"](x)[0][0]) for _ in range(500)]
            assert mine == sorted(mine)
            seen.extend(mine)

        together(work)
    assert sorted(seen) == list(range(6, 6 + 500 * THREADS))


def test_instances_share_weights_and_report_what_each_costs() -> None:
    """OR7: planned memory grows with the instances, the file's bytes are there once."""
    path = programs.load("mlp_portable").path

    def use(instances: int) -> headrace.program.Memory:
        with headrace.load(path, instances=instances) as loaded:
            return loaded.memory()

    one, four = use(1), use(4)
    planned = [u for u in one.uses if u.what == "planned"]
    assert [u.nbytes for u in one.uses if u.what == "program"] == [path.stat().st_size]
    assert [u.nbytes for u in four.uses if u.what == "program"] == [path.stat().st_size]
    assert sum(u.nbytes for u in planned) > 0
    for instance in range(4):
        mine = [u.nbytes for u in four.uses if u.what == "planned" and u.instance == instance]
        assert mine == [u.nbytes for u in planned]
    assert four.nbytes() - one.nbytes() == 3 * sum(u.nbytes for u in planned)
    assert four.nbytes("cpu") == four.nbytes()
    assert four.nbytes("cuda:0") == 0


def test_data_files_are_there_once_for_all_instances() -> None:
    """OR7: external weights are shared too."""
    program = programs.load("external_weights")
    with headrace.load(program.path, data=program.data, instances=3) as loaded:
        sizes = [u.nbytes for u in loaded.memory().uses if u.what == "data"]
    assert sizes == [program.data[0].stat().st_size]


def test_outputs_held_are_reported() -> None:
    with headrace.load(programs.load("mlp_portable").path) as loaded:
        x = np.zeros((4, 64), np.float32)
        before = loaded.memory().nbytes()
        held = [loaded["forward"](x) for _ in range(5)]
        assert loaded.memory().nbytes() == before + 5 * 4 * 64 * 4
        del held


def test_close_waits_for_running_calls_and_refuses_later_ones() -> None:
    """Whatever a call got before the close is right; after it the refusal says why."""
    program = programs.load("mlp_portable")
    call = program.calls[0]
    for _ in range(20):
        loaded = headrace.load(program.path)
        method = loaded["forward"]
        started = threading.Barrier(5)
        refused: list[str] = []

        def work(
            method: headrace.Method = method,
            started: threading.Barrier = started,
            refused: list[str] = refused,
        ) -> None:
            started.wait()
            try:
                while True:
                    assert_close(method(call.inputs[0].data)[0], call.outputs[0], 1e-4, 1e-5)
            except headrace.ProgramError as e:
                refused.append(str(e))

        def end(loaded: headrace.Program = loaded, started: threading.Barrier = started) -> None:
            started.wait()
            loaded.close()
            assert loaded.memory().uses == ()

        jobs = [work] * 3 + [end] * 2

        def run(k: int, jobs: list[Callable[[], None]] = jobs) -> None:
            jobs[k]()

        together(run, len(jobs))
        text = "forward: expected an open program, got one that was closed; load it again"
        assert refused == [text] * 3


def test_loading_from_many_threads_gives_every_thread_its_program() -> None:
    program = programs.load("mlp_xnnpack")
    call = program.calls[0]

    def work(_: int) -> None:
        for _ in range(10):
            with headrace.load(program.path) as loaded:
                assert_close(loaded["forward"](call.inputs[0].data)[0], call.outputs[0], 1e-4, 1e-5)

    together(work)
