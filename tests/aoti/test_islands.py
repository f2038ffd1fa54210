"""AOTInductor islands: state, shapes, threads, failures of a library. Answers: tests/contract/test_aoti_programs.py."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import headrace
from tests.conftest import run_python, succeeded
from tests.programs import AOTI

from .conftest import arguments, assert_right, check, same_bits


def test_a_fresh_process_runs_them_without_torch() -> None:
    """DE1, PK1: no torch is imported, no libtorch mapped, nothing written to stderr."""
    code = """
        import sys
        import headrace
        from tests.aoti.conftest import check
        from tests.programs import AOTI
        for name in ("mlp", "embeddings", "dynamic_sizes", "kept_state", "boolean"):
            for device in ("cpu", headrace.device("sim", schedule="late")):
                with AOTI.load(name).open(device) as loaded:
                    check(AOTI.load(name), loaded)
        maps = open("/proc/self/maps").read()
        assert "libtorch" not in maps and "libc10" not in maps and "torch" not in sys.modules
        stacks = [line for line in maps.splitlines() if line.endswith("[stack]")]
        print(len(stacks), any("rwx" in line for line in stacks))
        """
    # The library asks for an executable stack; its copy does not.
    assert succeeded(run_python(code)).split() == ["1", "False"]


def test_state_that_an_island_keeps_advances_once_a_call(device: Any) -> None:
    """DE1: each instance has its own, and a program that is loaded again begins anew."""
    program = AOTI.load("kept_state")
    for _ in range(2):
        with program.open(device) as loaded:
            check(program, loaded)
    # Two instances: calls of one never see what the other wrote.
    with program.open(device, instances=2) as loaded:
        first = program.calls[0]
        seen = []

        def call() -> None:
            seen.append(loaded["forward"](*arguments(first)))

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for results in seen:
            assert_right(program, results, first)


def test_outputs_have_the_shape_that_the_inputs_give_them(device: Any) -> None:
    """DE1: smaller after greater and greater after smaller; on `sim` they are known before the work runs."""
    program = AOTI.load("dynamic_sizes")
    with program.open(device) as loaded:
        for _ in range(2):
            check(program, loaded)
        with pytest.raises(headrace.InputError, match="dimension 0 must be at most 9"):
            loaded["forward"](np.zeros((10, 3), np.float32), np.zeros((4, 3), np.float32))


def test_outputs_stay_right_after_later_calls(device: Any) -> None:
    """DE1: what a call gave is not the memory of the next one."""
    program = AOTI.load("mlp")
    with program.open(device) as loaded:
        kept = [loaded["forward"](*arguments(call)) for call in program.calls for _ in range(2)]
        for k, results in enumerate(kept):
            assert_right(program, results, program.calls[k // 2])


def test_a_steady_state_call_allocates_nothing_at_the_driver(device: Any) -> None:
    """SY4: on a device whose memory holds everything: no driver allocation, free or wait, nothing staged."""
    program = AOTI.load("chain_resident")
    with program.open(device) as loaded:
        stream = device.stream()
        x = device.to_device(arguments(program.calls[0])[0], stream=stream)
        for _ in range(3):
            results = loaded["forward"](x, stream=stream)
            del results
        results = loaded["forward"](x, stream=stream)
        last = loaded["forward"].stats.last
        assert (last.driver_allocations, last.driver_frees, last.synchronizations) == (0, 0, 0)
        assert (last.bytes_to_device, last.bytes_to_host, last.repacked_bytes) == (0, 0, 0)
        assert_right(program, results, program.calls[0])


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_a_library_s_own_check_is_a_typed_error_and_the_next_call_is_right(kind: str) -> None:
    """OP3: an index outside the table is refused by the library; the message names island, delegate and check."""
    code = """
        import sys
        import numpy as np
        import headrace
        from tests.aoti.conftest import check
        from tests.programs import AOTI
        device = sys.argv[1] if sys.argv[1] == "cpu" else headrace.device("sim", schedule=sys.argv[1])
        program = AOTI.load("embeddings")
        with program.open(device) as loaded:
            for wrong in (12, -13, 2**40):
                try:
                    loaded["forward"](np.array([1, wrong, 3, 0]), np.zeros(4, np.int64))
                except headrace.DelegateError as error:
                    assert error.delegate == "CudaBackend" and error.method == "forward"
                    assert "index out of bounds" in str(error)
                    assert f"instruction {loaded['forward'].islands[0].instruction}" in str(error)
                else:
                    raise AssertionError("not refused")
                check(program, loaded)
        print("right")
        """
    assert succeeded(run_python(code, kind)) == "right\n"


def test_many_threads_get_their_own_answers() -> None:
    """OR7: calls of one method take turns, whatever threads they come from."""
    program = AOTI.load("mlp")
    with program.open("cpu", instances=2) as loaded:
        wanted = [loaded["forward"](*arguments(call)) for call in program.calls]
        wrong: list[int] = []

        def work(k: int) -> None:
            for _ in range(20):
                if not same_bits(loaded["forward"](*arguments(program.calls[k])), wanted[k]):
                    wrong.append(k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(len(program.calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.parametrize("name", ["cnn", "embeddings"])
def test_a_forked_process_answers_too(name: str) -> None:
    """LT3: OpenMP's team stays behind in the parent; the child works without it, the parent and new threads with theirs.
    Once with a library that has checks of its own, once with one that has none."""
    code = """
import multiprocessing, os, signal, sys, threading
import numpy as np
from tests.aoti.conftest import arguments
from tests.programs import AOTI
program = AOTI.load(sys.argv[1])
loaded = program.open(device="cpu")
def call(used):
    return [np.array(y).tobytes() for y in used["forward"](*arguments(program.calls[0]))]
def anew(_):
    return call(program.open(device="cpu"))
want = call(loaded)
def child():
    signal.alarm(60)
    assert call(loaded) == want and anew(0) == want
    thread_got = []
    thread = threading.Thread(target=lambda: thread_got.append(call(loaded)))
    thread.start(); thread.join()
    assert thread_got == [want]
    again = os.fork()
    if again == 0:
        signal.alarm(60)
        os._exit(0 if call(loaded) == want else 1)
    assert os.waitpid(again, 0)[1] == 0
pid = os.fork()
if pid == 0:
    child()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert call(loaded) == want
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map_async(anew, [0, 1]).get(60) == [want, want]
print("right")
"""
    assert succeeded(run_python(code, name)) == "right\n"
