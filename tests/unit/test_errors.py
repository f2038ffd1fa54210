"""Every failure is typed, and its message says where, what was expected, what came, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import errors
from tests import programs
from tests.conftest import run_python, succeeded

ONE = np.ones(1, np.float32)


class Raises:
    def __dlpack__(self) -> Any:
        raise RuntimeError("the owner says no")


class GivesNoCapsule:
    def __dlpack__(self) -> Any:
        return 5


class GivesNoMemory:
    __array_interface__ = {"shape": (1,), "typestr": "<f4", "version": 3, "data": (0,)}  # noqa: RUF012


class OfAnotherDevice:
    """As CUDA memory gives itself: by its own interface, which the host cannot read."""

    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "version": 3, "data": (16, False)}  # noqa: RUF012


# A bad second input of the program `add`, whose inputs are float32[1].
BAD_INPUTS: dict[str, tuple[Any, str]] = {
    "dtype": (ONE.astype(np.float64), "got float64[1] on cpu; convert the dtype before calling"),
    "half": (ONE.astype(np.float16), "got float16[1] on cpu; convert the dtype before calling"),
    "integers": (ONE.astype(np.int32), "got int32[1] on cpu; convert the dtype before calling"),
    "rank too low": (np.float32(1), "got float32[] on cpu; the rank differs: reshape it before calling"),
    "rank too high": (ONE[None], "got float32[1, 1] on cpu; the rank differs: reshape it before calling"),
    "size": (np.ones(2, np.float32), "got float32[2] on cpu; dimension 0 must be 1 and is 2: pass that size"),
    "no elements": (ONE[:0], "got float32[0] on cpu; dimension 0 must be 1 and is 0"),
    "byte order": (ONE.astype(">f4"), "got a big-endian float32; call x.astype(x.dtype.newbyteorder('='))"),
    "complex": (ONE.astype(np.complex64), "expected an array of numbers, got dtype complex64"),
    "wider than float64": (ONE.astype(np.longdouble), "expected an array of numbers, got dtype float128"),
    "objects": (np.array([object()]), "expected an array of numbers, got dtype object"),
    "text array": (np.array(["a"]), "expected an array of numbers, got dtype <U1"),
    "dates": (np.array(["2026-01-01"], "M8[D]"), "expected an array of numbers, got dtype datetime64[D]"),
    "records": (np.zeros(1, [("a", "<f4")]), "expected an array of numbers, got dtype [('a', '<f4')]"),
    "too many dimensions": (ONE.reshape((1,) * 17), "expected at most 16 dimensions, got 17"),
    "None": (None, "expected float32[1] on cpu, got None"),
    "float": (1.0, "expected float32[1] on cpu, got a float; pass a value of that kind"),
    "int": (1, "expected float32[1] on cpu, got an int"),
    "bool": (True, "expected float32[1] on cpu, got a bool"),
    "text": ("x", "expected float32[1] on cpu, got a string"),
    "broken text": ("\ud800", "expected text, got a str with lone surrogates"),
    "huge int": (2**70, "expected an int of 64 bits, got a larger one"),
    "list": ([1.0], "got list; convert it with numpy.asarray"),
    "object": (object(), "got object; convert it with numpy.asarray"),
    "DLPack that raises": (Raises(), "got RuntimeError: the owner says no"),
    "DLPack without a capsule": (GivesNoCapsule(), "expected a capsule 'dltensor' from __dlpack__, got int"),
    "array interface that is broken": (GivesNoMemory(), "got TypeError: "),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_bad_input_is_refused_by_name(add: headrace.Method, case: str) -> None:
    """OP5, OP3: position, what was expected, what came; and nothing was computed."""
    bad, message = BAD_INPUTS[case]
    with pytest.raises(headrace.InputError) as caught:
        add(ONE, bad)
    text = str(caught.value)
    assert text.startswith("forward, input 1: expected ")
    assert message in text
    assert add.stats.calls == 0
    (y,) = add(ONE, ONE)
    assert y == 2.0


def test_an_input_in_memory_of_a_gpu_is_refused_by_name(add: headrace.Method) -> None:
    """OP5, OP4: by its class too, before its address is read."""
    with pytest.raises(
        headrace.InputError, match=r"^forward, input 1: expected memory of the host, got memory of a GPU"
    ):
        add(ONE, OfAnotherDevice())
    assert add(ONE, ONE)[0] == 2.0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_count_of_inputs_is_refused(add: headrace.Method, count: int) -> None:
    """OP5"""
    message = f"^forward: expected 2 inputs, got {count}; pass one value for each input$"
    with pytest.raises(headrace.InputError, match=message):
        add(*[ONE] * count)


def test_a_size_beyond_a_bound_names_dimension_and_bound() -> None:
    """OP5"""
    with headrace.load(programs.load("dynamic_batch").path) as loaded:
        method = loaded["forward"]
        with pytest.raises(headrace.InputError) as caught:
            method(np.ones((9, 64), np.float32))
    assert str(caught.value) == (
        "forward, input 0: expected float32[≤8, ≤64] on cpu, got float32[9, 64] on cpu; "
        "dimension 0 must be at most 8 and is 9: pass less, or export it with larger bounds"
    )


@pytest.mark.parametrize("name", ["dynamic_batch", "dynamic_batch_xnnpack"])
def test_a_size_that_the_file_does_not_fix_is_refused_by_kernel_or_delegate(name: str) -> None:
    """OP5, OP4: the file calls a whole tensor dynamic, so its inner dimension is for the kernels to check."""
    with headrace.load(programs.load(name).path) as loaded:
        with pytest.raises(headrace.DelegateError, match=r"^forward, instruction \d+, (kernel|delegate) "):
            loaded["forward"](np.ones((4, 63), np.float32))
        assert loaded["forward"](np.ones((4, 64), np.float32))[0].shape == (4, 64)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, 4, "expected an int, got an int 4; the program was exported for 3 and accepts no other"),
        (1, True, "expected an int, got a bool"),
        (1, 3.0, "expected an int, got a float"),
        (1, np.ones((), np.int64), "expected an int, got int64[] on cpu"),
        (2, 0.25, "expected a float, got a float 0.25; the program was exported for 0.5"),
        (2, 1, "expected a float, got an int"),
        (3, False, "expected a bool, got a bool False; the program was exported for True"),
        (3, 1, "expected a bool, got an int"),
    ],
)
def test_a_number_that_is_fixed_in_the_program_is_checked(position: int, value: Any, message: str) -> None:
    """OP5: another value would be ignored by the instructions that were made for the first."""
    program = programs.load("literal_inputs")
    inputs = [v.data for v in program.calls[0].inputs]
    with headrace.load(program.path) as loaded:
        inputs[position] = value
        with pytest.raises(headrace.InputError) as caught:
            loaded["forward"](*inputs)
    assert str(caught.value).startswith(f"forward, input {position}: {message}")


# ------------------------------------------------------------- by type


def fails_in_a_kernel() -> None:
    program = programs.load("int64")
    with headrace.load(program.path) as loaded:
        loaded["forward"](np.array([1, 2, 99, 3]), np.zeros(4, np.int64))


def fails_in_a_delegate() -> None:
    with headrace.load(programs.load("dynamic_batch_xnnpack").path) as loaded:
        loaded["forward"](np.ones((4, 63), np.float32))


def fails_to_allocate() -> None:
    # An arena of 2**46 bytes: the planned buffer's size, in the file as an int64.
    program = programs.load("mlp_portable")
    (buffer,) = program.view["program"]["execution_plan"][0]["non_const_buffer_sizes"][1:]
    data = program.path.read_bytes()
    size = buffer.to_bytes(8, "little")
    assert data.count(size) == 1
    headrace.load(data.replace(size, (1 << 46).to_bytes(8, "little")))


FAILURES: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "file missing": (lambda: headrace.load("/nowhere/at/all.pte"), headrace.ProgramError),
    "not a program": (lambda: headrace.load(b"not a program at all"), headrace.ProgramError),
    "input": (lambda: call_add(np.ones(2, np.float32)), headrace.InputError),
    "delegate missing": (
        lambda: headrace.load(programs.load("not_there").path),
        headrace.DelegateUnavailable,
    ),
    "kernel missing": (
        lambda: headrace.load(programs.load("kernel_missing").path),
        headrace.DelegateUnavailable,
    ),
    "delegate failed": (fails_in_a_delegate, headrace.DelegateError),
    "kernel failed": (fails_in_a_kernel, headrace.DelegateError),
    "out of memory": (fails_to_allocate, headrace.OutOfDeviceMemory),
    "option": (lambda: headrace.load(programs.load("add").path, instances=0), headrace.OptionError),
}


def call_add(x: Any) -> None:
    with headrace.load(programs.load("add").path) as loaded:
        loaded["forward"](x, ONE)


@pytest.mark.parametrize("case", FAILURES)
def test_what_failed_can_be_told_by_type(case: str) -> None:
    """OP4: exactly this class, and one of the project's."""
    act, kind = FAILURES[case]
    with pytest.raises(headrace.HeadraceError) as caught:
        act()
    assert type(caught.value) is kind
    assert not re.search(r"0x[0-9a-f]+", caught.value.args[0]), "a bare code in the message (OP3)"
    assert "expected" in caught.value.args[0] or "failed: " in caught.value.args[0]


def test_a_failed_kernel_is_named_with_the_engines_own_lines() -> None:
    """OP3: method, instruction, kernel and reason; the log lines of this failure and of no other."""
    with pytest.raises(headrace.DelegateError) as caught:
        fails_in_a_kernel()
    error = caught.value
    assert error.args[0].startswith("forward, instruction 0, kernel 'aten::embedding.out': running failed: ")
    assert (error.method, error.delegate, error.island) == ("forward", None, 0)
    assert any("indices_ptr[2] 99 >= weight.size(0) 16" in line for line in error.log)
    assert all(line in str(error) for line in error.log)
    with pytest.raises(headrace.DelegateError) as again:
        fails_in_a_kernel()
    assert again.value.log == error.log


def test_a_failed_delegate_is_named_with_its_island() -> None:
    """OP3, OP4"""
    with pytest.raises(headrace.DelegateError) as caught:
        fails_in_a_delegate()
    error = caught.value
    assert (error.method, error.delegate, error.island) == ("forward", "XnnpackBackend", 0)
    assert any("XNNExecutor" in line for line in error.log)


def test_the_instruction_that_failed_is_the_one_that_is_named() -> None:
    """OP3: not the first one of its chain."""
    with headrace.load(programs.load("dynamic_batch").path) as loaded:
        method = loaded["forward"]
        with pytest.raises(headrace.DelegateError) as caught:
            method(np.ones((4, 63), np.float32))
    assert "instruction 1, kernel 'aten::addmm.out'" in caught.value.args[0]
    assert caught.value.island == 1


def test_a_method_works_after_a_failed_call() -> None:
    program = programs.load("int64")
    call = program.calls[0]
    with headrace.load(program.path) as loaded:
        method = loaded["forward"]
        for _ in range(3):
            with pytest.raises(headrace.DelegateError):
                method(np.array([1, 2, 99, 3]), call.inputs[1].data)
            for got, want in zip(method(*(v.data for v in call.inputs)), call.outputs, strict=True):
                np.testing.assert_allclose(got, want.data)


def test_a_call_that_fails_inside_a_loop_leaves_nothing_of_its_counter_behind() -> None:
    """The next call starts at the first row again, not at the one that failed."""
    program = programs.load("loop")
    with headrace.load(program.path) as loaded:
        method = loaded["forward"]
        for call in program.calls * 2:
            index, table = (v.data for v in call.inputs)
            beyond = index.copy()
            beyond[1, 0] = 99
            with pytest.raises(headrace.DelegateError, match=r"kernel 'aten::index_select.out'"):
                method(beyond, table)
            np.testing.assert_array_equal(method(index, table)[0], call.outputs[0].data)


def test_log_lines_go_to_the_thread_whose_call_failed() -> None:
    """OP3: per thread."""
    out = succeeded(
        run_python(
            """
            import threading, numpy as np, headrace
            from tests import programs
            program = headrace.load(programs.load("int64").path, instances=4)
            bad, logs = threading.Barrier(4), {}
            def go(k):
                bad.wait()
                for _ in range(200):
                    index = np.array([1, 2, 100 + k, 3])
                    try:
                        program["forward"](index, np.zeros(4, np.int64))
                    except headrace.DelegateError as e:
                        logs.setdefault(k, set()).add(e.log)
            threads = [threading.Thread(target=go, args=(k,)) for k in range(4)]
            [t.start() for t in threads]; [t.join() for t in threads]
            for k in range(4):
                (log,) = logs[k]
                assert f"indices_ptr[2] {100 + k} >=" in log[0], log
            print("told apart")
            """
        )
    )
    assert out == "told apart\n"


def test_nothing_is_written_to_stderr_by_default() -> None:
    """Failures are told by exceptions; the engine's log is not printed, also not at exit."""
    succeeded(
        run_python(
            """
            import numpy as np, headrace
            from tests import programs
            for name in ("not_there", "kernel_missing", "external_weights", "external_xnnpack"):
                try: headrace.load(programs.load(name).path)
                except headrace.HeadraceError: pass
                else: raise SystemExit("loaded")
            method = headrace.load(programs.load("int64").path)["forward"]
            try: method(np.array([1, 2, 99, 3]), np.zeros(4, np.int64))
            except headrace.DelegateError: pass
            else: raise SystemExit("ran")
            """
        )
    )


# ------------------------------------------------------------ the tree


def test_the_tree_in_the_documentation_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"([├└]─ )(\w+)(?:\((\w+)\))?", errors.__doc__)
    names = {name for _, name, _ in drawn} | {"HeadraceError"}
    assert names == set(errors.__all__)
    for _, name, builtin in drawn:
        if builtin:
            assert issubclass(getattr(errors, name), getattr(__import__("builtins"), builtin))


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_public_and_carries_a_log(name: str) -> None:
    """OP3, OP4"""
    kind = getattr(errors, name)
    assert getattr(headrace, name) is kind
    error = kind("message", log=["first", "second"])
    assert isinstance(error, headrace.HeadraceError)
    assert error.log == ("first", "second")
    assert str(error) == "message\n  engine: first\n  engine: second"
    assert str(kind("message")) == "message"


def test_every_code_of_the_native_side_has_its_exception() -> None:
    """OP3: the two lists, in C++ and in the bindings, are of one length and order."""
    header = (programs.ROOT / "native/include/headrace/status.h").read_text()
    codes = re.findall(r"^  k(\w+)(?: = 0)?,", header, re.MULTILINE)
    source = (programs.ROOT / "native/python/arrays.cpp").read_text()
    (listed,) = re.findall(r"kNames\[\] = \{(.*?)\};", source, re.DOTALL)
    names = re.findall(r'"(\w+)"', listed)
    expected = {
        "Ok": "HeadraceError",
        "NotSupported": "NotSupported",
        "OutOfDeviceMemory": "OutOfDeviceMemory",
    }
    assert names == [expected.get(c, c if c == "DelegateUnavailable" else f"{c}Error") for c in codes]
    assert all(hasattr(errors, n) for n in names)


def test_paths_that_are_not_utf8_can_be_named() -> None:
    """OP3: the message, never a decoding error."""
    for path in (Path("/nowhere/\udcff.pte"), "/nowhere/\udcff.pte"):
        with pytest.raises(headrace.ProgramError, match=r"/nowhere/\\xff.pte: expected a file"):
            headrace.load(path)
