"""Arrays in and out: every layout, element type and protocol is handled or refused by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import headrace
from tests import programs
from tests.conftest import assert_close

# One model, float32[4, 64] to float32[4, 64]: its input and output copied by the engine, or aliased.
PLANNED, UNPLANNED = "mlp_portable", "unplanned_io"

Array = np.ndarray[Any, Any]


class ByDLPack:
    """Speaks DLPack and nothing else."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class ByArrayInterface:
    """Speaks the array interface and nothing else."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__


class Subclass(np.ndarray):
    pass


def strided(x: Array) -> Array:
    wide = np.full((2 * x.shape[0], 3 * x.shape[1]), np.nan, x.dtype)
    wide[1::2, 2::3] = x
    return wide[1::2, 2::3]


def misaligned(x: Array) -> Array:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    assert not view.flags.aligned
    return view


def read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


DENSE: dict[str, Callable[[Array], Any]] = {
    "dense": lambda x: x,
    "read-only": read_only,
    "subclass": lambda x: x.view(Subclass),
    "DLPack": ByDLPack,
    "array interface": ByArrayInterface,
}
SCATTERED: dict[str, Callable[[Array], Any]] = {
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "strided": strided,
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "one dimension reversed": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "misaligned": misaligned,
    "strided by DLPack": lambda x: ByDLPack(strided(x)),
    "reversed by the array interface": lambda x: ByArrayInterface(np.ascontiguousarray(x[::-1])[::-1]),
}


@pytest.fixture(params=[PLANNED, UNPLANNED])
def mlp(request: pytest.FixtureRequest) -> Iterator[tuple[headrace.Method, programs.Program]]:
    program = programs.load(request.param)
    with headrace.load(program.path) as loaded:
        yield loaded["forward"], program


@pytest.mark.parametrize("layout", [*DENSE, *SCATTERED])
def test_every_layout_gives_what_eager_pytorch_gives(
    mlp: tuple[headrace.Method, programs.Program], layout: str
) -> None:
    """OP5: an input's strides, sign, alignment and owner do not change the answer."""
    method, program = mlp
    for call in program.calls:
        given = {**DENSE, **SCATTERED}[layout](call.inputs[0].data)
        assert_close(method(given)[0], call.outputs[0], program.rtol, program.atol)
    repacked = sum(call.inputs[0].data.nbytes for call in program.calls)
    assert method.stats.total.repacked_bytes == (repacked if layout in SCATTERED else 0)
    assert method.stats.calls == len(program.calls)


def test_a_broadcast_input_is_read_with_its_stride_of_zero(
    mlp: tuple[headrace.Method, programs.Program],
) -> None:
    method, program = mlp
    row = program.calls[0].inputs[0].data[:1]
    given = np.broadcast_to(row, (4, 64))
    assert given.strides[0] == 0
    want = program.calls[0].outputs[0].data[0]
    np.testing.assert_allclose(method(given)[0], np.stack([want] * 4), program.rtol, program.atol)


def test_a_big_endian_input_is_refused_by_name(add: headrace.Method) -> None:
    """OP5: bytes in another order are never computed with."""
    one = np.ones(1, np.float32)
    with pytest.raises(headrace.InputError, match=r"forward, input 1: .* got a big-endian float32; call"):
        add(one, one.astype(">f4"))


def test_channels_last_needs_no_repacking_when_the_program_wants_it() -> None:
    program = programs.load("channels_last")
    with headrace.load(program.path) as loaded:
        method = loaded["forward"]
        x = program.calls[0].inputs[0].data
        assert not x.flags.c_contiguous
        assert_close(method(x)[0], program.calls[0].outputs[0], program.rtol, program.atol)
        assert method.stats.total.repacked_bytes == 0
        assert_close(
            method(np.ascontiguousarray(x))[0], program.calls[0].outputs[0], program.rtol, program.atol
        )
        assert method.stats.total.repacked_bytes == x.nbytes


def test_bfloat16_comes_and_goes_as_a_buffer() -> None:
    """A dtype that NumPy lacks is never an integer in disguise."""
    program = programs.load("bfloat16")
    call = program.calls[0]
    x = call.inputs[0].data.view(ml_dtypes.bfloat16)
    with headrace.load(program.path) as loaded:
        method = loaded["forward"]
        (got,) = method(x)
        assert isinstance(got, headrace.Buffer)
        assert (got.dtype, got.shape, got.device.name) == ("bfloat16", (2, 6), "cpu")
        assert_close(got, call.outputs[0], program.rtol, program.atol)
        buffer = headrace.Buffer.from_float32(x.astype(np.float32))
        (again,) = method(buffer)
        assert np.array_equal(again.float32(), got.float32())
        with pytest.raises(headrace.InputError, match="expected a dtype that NumPy has, got bfloat16"):
            got.numpy()
        with pytest.raises(
            headrace.InputError, match=r"expected bfloat16\[2, 8\] on cpu, got uint16\[2, 8\]"
        ):
            method(call.inputs[0].data)
    # The buffer owns its memory still.
    assert_close(got, call.outputs[0], program.rtol, program.atol)


def test_from_float32_rounds_as_bfloat16_does() -> None:
    values = np.array([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.4e38, np.inf, -np.inf, 1e-40], np.float32)
    got = headrace.Buffer.from_float32(values).float32()
    want = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    assert np.isnan(headrace.Buffer.from_float32(np.array([np.nan], np.float32)).float32()[0])


def test_a_numpy_scalar_is_a_tensor_without_dimensions() -> None:
    program = programs.load("scalars")
    call = program.calls[0]
    with headrace.load(program.path) as loaded:
        x, y = (np.float32(v.data) for v in call.inputs)
        for got, want in zip(loaded["forward"](x, np.asarray(y)), call.outputs, strict=True):
            assert_close(got, want, program.rtol, program.atol)


def test_a_numpy_scalar_is_a_number_where_the_method_takes_one() -> None:
    program = programs.load("literal_inputs")
    call = program.calls[0]
    x, times, scale, negate = (v.data for v in call.inputs)
    with headrace.load(program.path) as loaded:
        (got,) = loaded["forward"](x, np.int64(times), np.float64(scale), np.bool_(negate))
        assert_close(got, call.outputs[0], program.rtol, program.atol)


def test_the_least_batch_after_the_greatest_reads_nothing_of_it() -> None:
    """Dynamic shapes: sizes go up and down in one method, and outputs have exactly the size asked for."""
    for name in ("dynamic_batch", "dynamic_batch_xnnpack", "unplanned_dynamic"):
        program = programs.load(name)
        sizes = [call.inputs[0].data.shape[0] for call in program.calls]
        assert {1, 8} <= set(sizes)
        assert sizes.index(8) < len(sizes) - 1 - sizes[::-1].index(1)
        with headrace.load(program.path) as loaded:
            method = loaded["forward"]
            for call in program.calls * 2:
                (got,) = method(strided(call.inputs[0].data))
                assert_close(got, call.outputs[0], program.rtol, program.atol)
                out = np.full((64, got.shape[0]), np.nan, np.float32).T
                method(call.inputs[0].data, out=(out,))
                assert_close(np.ascontiguousarray(out), call.outputs[0], program.rtol, program.atol)


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("name", [PLANNED, UNPLANNED, "several_outputs", "input_and_constant_as_output"])
def test_outputs_stay_right_after_later_calls_and_after_the_program(name: str) -> None:
    """LT3: an output is the caller's for as long as it is held."""
    program = programs.load(name)
    loaded = headrace.load(program.path)
    method = loaded["forward"]
    held = [method(*(v.data for v in call.inputs)) for call in program.calls]
    for _ in range(50):
        method(*(np.full_like(v.data, 7) for v in program.calls[0].inputs))

    def check() -> None:
        for call, results in zip(program.calls, held, strict=True):
            for got, want in zip(results, call.outputs, strict=True):
                assert_close(got, want, program.rtol, program.atol)

    check()
    loaded.close()
    check()
    del loaded, method
    gc.collect()
    junk = [np.full(1000, 5, np.uint8) for _ in range(2000)]
    check()
    del junk


def test_outputs_are_the_callers_to_write(mlp: tuple[headrace.Method, programs.Program]) -> None:
    method, program = mlp
    call = program.calls[0]
    x = call.inputs[0].data.copy()
    (first,) = method(x)
    first[...] = 5.0
    assert_close(method(x)[0], call.outputs[0], program.rtol, program.atol)
    assert (first == 5.0).all()
    assert np.array_equal(x, call.inputs[0].data)


def test_an_output_dropped_gives_its_memory_to_a_later_call(add: headrace.Method) -> None:
    one = np.ones(1, np.float32)
    addresses = set()
    for _ in range(100):
        (y,) = add(one, one)
        addresses.add(y.ctypes.data)
        del y
    assert len(addresses) == 1


OUTS: dict[str, Callable[[], Array]] = {
    "dense": lambda: np.full((4, 64), np.nan, np.float32),
    "transposed": lambda: np.full((64, 4), np.nan, np.float32).T,
    "strided": lambda: np.full((8, 192), np.nan, np.float32)[::2, ::3],
    "reversed": lambda: np.full((4, 64), np.nan, np.float32)[::-1, ::-1],
    "misaligned": lambda: misaligned(np.full((4, 64), np.nan, np.float32)),
}


@pytest.mark.parametrize("layout", OUTS)
def test_out_is_written_in_any_layout(mlp: tuple[headrace.Method, programs.Program], layout: str) -> None:
    method, program = mlp
    for call in program.calls:
        out = OUTS[layout]()
        results = method(call.inputs[0].data, out=[out])
        assert results[0] is out
        assert_close(out, call.outputs[0], program.rtol, program.atol)


def test_a_strided_out_leaves_the_gaps_alone(mlp: tuple[headrace.Method, programs.Program]) -> None:
    method, program = mlp
    wide = np.full((8, 192), 3.0, np.float32)
    method(program.calls[0].inputs[0].data, out=[wide[::2, ::3]])
    gaps = np.ones(wide.shape, bool)
    gaps[::2, ::3] = False
    assert (wide[gaps] == 3.0).all()


def test_out_may_leave_some_outputs_to_the_method() -> None:
    program = programs.load("several_outputs")
    call = program.calls[0]
    with headrace.load(program.path) as loaded:
        given = [None, np.empty((), np.float32), None, np.empty(3, np.int64)]
        results = loaded["forward"](*(v.data for v in call.inputs), out=given)
        assert results[1] is given[1] and results[3] is given[3]
        for got, want in zip(results, call.outputs, strict=True):
            assert_close(got, want, program.rtol, program.atol)


def test_several_outs_by_other_protocols_are_all_written() -> None:
    """Every capsule lives until the call is over, not the last one alone."""
    program = programs.load("several_outputs")
    call = program.calls[0]
    for wrap in (ByDLPack, ByArrayInterface):
        arrays = [np.zeros_like(v.data) for v in call.outputs]
        with headrace.load(program.path) as loaded:
            loaded["forward"](*(v.data for v in call.inputs), out=[wrap(a) for a in arrays])
        for got, want in zip(arrays, call.outputs, strict=True):
            assert_close(got, want, program.rtol, program.atol)


class Watched:
    """Gives memory by DLPack that its capsule alone keeps, and looks whether earlier capsules still live."""

    def __init__(self, earlier: list[Watched]) -> None:
        self.earlier = list(earlier)
        self.memory: weakref.ref[Any] | None = None
        earlier.append(self)

    def __dlpack__(self) -> Any:
        for other in self.earlier:
            assert other.memory is not None and other.memory() is not None
        array = np.zeros((4, 64), np.float32).view(Subclass)
        self.memory = weakref.ref(array)
        return array.__dlpack__()


def test_every_out_is_kept_until_the_call_is_over() -> None:
    program = programs.load("several_outputs")
    given: list[Watched] = []
    for _ in range(4):
        Watched(given)
    with (
        headrace.load(program.path) as loaded,
        pytest.raises(headrace.InputError, match=r"^forward, out 0: "),
    ):
        # All four are asked for their memory; then the shape of the first is refused.
        loaded["forward"](*(v.data for v in program.calls[0].inputs), out=given)
    assert [w.memory is not None and w.memory() is None for w in given] == [True] * 4


def read_only_out() -> Array:
    return read_only(np.zeros((4, 64), np.float32))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            lambda: [np.zeros((4, 63), np.float32)],
            r"out 0: expected float32\[4, 64\] on cpu, got float32\[4, 63\]",
        ),
        (
            lambda: [np.zeros((4, 64), np.float64)],
            r"out 0: expected float32\[4, 64\] on cpu, got float64\[4, 64\]",
        ),
        (lambda: [np.zeros(256, np.float32)], r"out 0: expected float32\[4, 64\] on cpu, got float32\[256\]"),
        (lambda: [read_only_out()], "out 0: expected an array that can be written, got a read-only one"),
        (
            lambda: [ByArrayInterface(read_only_out())],
            "out 0: expected an array that can be written, got a read-only one",
        ),
        (
            lambda: [np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (4, 64), (0, 4))],
            "out 0: expected memory of its own for every element, got a stride of 0 in dimension 0",
        ),
        (lambda: [np.zeros((4, 64), ">f4")], "out 0: .* got a big-endian float32"),
        (lambda: ["text"], r"out 0: expected float32\[4, 64\] on cpu, got a string"),
        (lambda: [np.float32(1.0)], "out 0: expected an array that can be written, got a read-only one"),
        (list, "out: expected 1 arrays, got 0"),
        (lambda: [None, None], "out: expected 1 arrays, got 2"),
        (lambda: 5, "out: expected a sequence of arrays, got int"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_by_name(
    mlp: tuple[headrace.Method, programs.Program], out: Callable[[], Any], message: str
) -> None:
    """OP5: dtype, rank, size, stride and count of what a call shall write to."""
    method, program = mlp
    with pytest.raises(headrace.InputError, match=f"^forward, {message}"):
        method(program.calls[0].inputs[0].data, out=out())
    assert_close(
        method(program.calls[0].inputs[0].data)[0], program.calls[0].outputs[0], program.rtol, program.atol
    )


def test_an_out_of_another_size_than_a_dynamic_output_is_refused() -> None:
    with headrace.load(programs.load("dynamic_batch").path) as loaded:
        x = np.zeros((2, 64), np.float32)
        with pytest.raises(
            headrace.InputError, match=r"out 0: expected float32\[2, 64\], got float32\[3, 64\]"
        ):
            loaded["forward"](x, out=[np.zeros((3, 64), np.float32)])


def test_out_may_be_the_input() -> None:
    """The input is read to its end before memory that it shares with an output is written."""
    program = programs.load("unplanned_square")
    with headrace.load(program.path) as loaded:
        method = loaded["forward"]
        for call in program.calls:
            for position in (0, 2):
                x = call.inputs[0].data.copy()
                out: list[Any] = [None] * 4
                out[position] = x
                for got, want in zip(method(x, out=out), call.outputs, strict=True):
                    assert_close(got, want, 1e-4, 1e-5)
            # Shifted by a row: they share some of their memory.
            both = np.zeros((7, 6), np.float32)
            both[:6] = call.inputs[0].data
            (got, *_) = method(both[:6], out=[both[1:], None, None, None])
            assert_close(got, call.outputs[0], 1e-4, 1e-5)


@pytest.mark.parametrize("name", ["written_input", "written_input_unplanned"])
def test_a_program_that_writes_into_its_input_leaves_the_callers_array_alone(name: str) -> None:
    program = programs.load(name)
    with headrace.load(program.path) as loaded:
        for call in program.calls:
            x, y = (read_only(v.data) for v in call.inputs)
            for got, want in zip(loaded["forward"](x, y), call.outputs, strict=True):
                assert_close(got, want, program.rtol, program.atol)
            assert np.array_equal(x, call.inputs[0].data)


# --------------------------------------------------------------- lifetime


class Fresh:
    """Gives memory by DLPack that nothing but the capsule keeps."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.given: list[weakref.ref[Any]] = []

    def __dlpack__(self) -> Any:
        copy = self.array.copy().view(Subclass)
        self.given.append(weakref.ref(copy))
        return copy.__dlpack__()


def test_an_input_lives_as_long_as_the_call_and_no_longer(
    mlp: tuple[headrace.Method, programs.Program],
) -> None:
    method, program = mlp
    call = program.calls[0]
    fresh = Fresh(call.inputs[0].data)
    for _ in range(3):
        assert_close(method(fresh)[0], call.outputs[0], program.rtol, program.atol)
    assert [ref() for ref in fresh.given] == [None] * 3
    # Refused inputs are let go too.
    wrong = Fresh(np.zeros((4, 63), np.float32))
    with pytest.raises(headrace.InputError):
        method(wrong)
    gc.collect()
    assert wrong.given[0]() is None


def test_arrays_of_the_caller_are_not_kept(mlp: tuple[headrace.Method, programs.Program]) -> None:
    method, program = mlp
    x = program.calls[0].inputs[0].data.copy().view(Subclass)
    out = np.zeros((4, 64), np.float32).view(Subclass)
    alive = weakref.ref(x), weakref.ref(out)
    method(x, out=[out])
    del x, out
    assert [ref() for ref in alive] == [None, None]


def test_dlpack_gives_a_buffer_away_and_keeps_its_memory() -> None:
    buffer = headrace.Buffer.from_float32(np.array([1.0, 2.0, 3.0], np.float32))
    program = programs.load("bfloat16")
    assert buffer.__dlpack_device__() == (1, 0)
    capsule = buffer.__dlpack__()
    del buffer
    gc.collect()
    headrace.Buffer.from_float32(np.full(3, 9.0, np.float32))
    assert "dltensor" in repr(capsule)
    with headrace.load(program.path) as loaded:

        class Given:
            def __dlpack__(self) -> Any:
                return capsule

        with pytest.raises(headrace.InputError, match=r"got bfloat16\[3\] on cpu; the rank differs"):
            loaded["forward"](Given())


@pytest.mark.parametrize(
    "shape", [("a",), None, 3.5, (2**70,), (-1,), (1,) * 17, object()], ids=lambda s: type(s).__name__
)
def test_a_shape_that_is_none_is_refused(shape: object) -> None:
    """OP5"""
    with pytest.raises(headrace.InputError, match=r"Device\.empty: expected"):
        headrace.device("sim").empty(shape)
