"""AOTInductor islands: right answers on the host's devices, state, shapes, temporaries, failures of a library."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import pte
from tests import aoti
from tests.conftest import run_python, succeeded

from .conftest import arguments, assert_right, check, same_bits

WHOLE = ["mlp", "embedding", "outputs", "dynamic", "cache_kept", "kinds", "scalars", "add_one", "add_two"]


@pytest.mark.parametrize("name", WHOLE)
def test_every_program_equals_eager_pytorch(name: str, device: Any) -> None:
    """DE1: an MLP, embeddings with int64, several outputs, views and strides, a dynamic batch, a key-value cache that the
    island keeps, bool, float16 and bfloat16, constants of every kind."""
    program = aoti.load(name)
    assert len(program.calls) >= 2
    with program.open(device) as loaded:
        assert [i.delegate for i in loaded["forward"].islands] == ["CudaBackend"]
        check(program, loaded)


def test_a_fresh_process_runs_them_without_torch() -> None:
    """DE1, PK1: no torch is imported, no libtorch mapped, nothing written to stderr."""
    code = """
        import sys
        import headrace
        from tests import aoti
        from tests.aoti.conftest import check
        for name in ("mlp", "embedding", "outputs", "dynamic", "cache_kept", "kinds"):
            for device in ("cpu", headrace.device("sim", schedule="late")):
                with aoti.load(name).open(device) as loaded:
                    check(aoti.load(name), loaded)
        maps = open("/proc/self/maps").read()
        assert "libtorch" not in maps and "libc10" not in maps and "torch" not in sys.modules
        stacks = [line for line in maps.splitlines() if line.endswith("[stack]")]
        print(len(stacks), any("rwx" in line for line in stacks))
        """
    # The library asks for an executable stack; its copy does not.
    assert succeeded(run_python(code)).split() == ["1", "False"]


def test_state_that_an_island_keeps_advances_once_a_call(device: Any) -> None:
    """DE1: each instance has its own, and a program that is loaded again begins anew."""
    program = aoti.load("cache_kept")
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
    program = aoti.load("dynamic")
    with program.open(device) as loaded:
        for _ in range(2):
            check(program, loaded)
        with pytest.raises(headrace.InputError, match="dimension 0 must be at most 16"):
            loaded["forward"](np.zeros((17, 8), np.float32))


def test_outputs_stay_right_after_later_calls(device: Any) -> None:
    """DE1: what a call gave is not the memory of the next one."""
    program = aoti.load("mlp")
    with program.open(device) as loaded:
        kept = [loaded["forward"](*arguments(call)) for call in program.calls for _ in range(2)]
        for k, results in enumerate(kept):
            assert_right(program, results, program.calls[k // 2])


def test_a_constant_of_two_islands_is_in_the_files_once() -> None:
    """DE1: under one key, which both payloads name; in memory it is one too (tests/native/aoti)."""
    program = aoti.load("chain")
    file = pte.read(program.path)
    named = [e.key for e in file.named_data] + [e.key for d in program.data for e in pte.read_data(d).entries]
    assert len([key for key in named if "first" in key]) == 1, named


def test_a_steady_state_call_allocates_nothing_at_the_driver(device: Any) -> None:
    """SY4: on a device whose memory holds everything: no driver allocation, free or wait, nothing staged."""
    program = aoti.load("chain_resident")
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


def test_a_library_s_own_check_is_a_typed_error_and_the_next_call_is_right(device: Any) -> None:
    """OP3: an index outside the table is refused by the library; the message names island, delegate and check."""
    program = aoti.load("embedding")
    with program.open(device) as loaded:
        for wrong in (20, -21, 2**40):
            with pytest.raises(headrace.DelegateError, match="index out of bounds") as caught:
                loaded["forward"](np.array([[1, wrong, 3]]))
            assert caught.value.delegate == "CudaBackend" and caught.value.method == "forward"
            assert f"instruction {loaded['forward'].islands[0].index}" in str(caught.value)
            check(program, loaded)


def test_many_threads_get_their_own_answers() -> None:
    """OR7: calls of one method take turns, whatever threads they come from."""
    program = aoti.load("mlp")
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


def test_the_corpus_is_what_these_tests_think() -> None:
    """Every program that is exported is run by one of them."""
    assert set(aoti.names()) == {*WHOLE, "mlp_resident", "chain", "chain_resident"}
