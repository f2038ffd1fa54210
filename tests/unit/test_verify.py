"""Each class of crash that hunting found, as the smallest program that shows it.

Programs are built field by field, or are a sound one with named fields changed: a patch says more than a
binary file. On the bare engine each of these ended the process, hung it, or read or wrote out of bounds.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.engine import core
from tests import programs
from tests.fuzz.child import FOUR_PARTS
from tests.fuzz.kernels import Plan, operators
from tests.fuzz.mutate import Seed, seeds
from tests.fuzz.tables import slots

ROOT = Path(__file__).parents[2]
FLOAT, INT16, INT32, INT64, UINT8, BOOL = 6, 2, 3, 4, 0, 11
BOUNDED = 1


def seed(name: str) -> Seed:
    return next(s for s in seeds() if s.name == name)


def patched(name: str, changes: dict[str, int], payload: bool = False) -> bytes:
    """The sound program with fields set: a path as `tests.fuzz.tables` names it, and its new value."""
    sound = seed(name)
    data = bytearray(sound.program)
    for path, value in changes.items():
        (slot, *_) = [s for s in (sound.payload_slots if payload else sound.slots) if s.path == path]
        slot.write(data, value)
    return bytes(data)


def refused(program: bytes, pattern: str, data: tuple[bytes, ...] = ()) -> None:
    """OP4: with all four parts of a message."""
    with pytest.raises(headrace.ProgramError, match=pattern) as caught:
        headrace.load(program, data=data)
    assert FOUR_PARTS.search(str(caught.value))


def fails(program: bytes, pattern: str, times: int = 2) -> None:
    """Loads, and each call is a DelegateError."""
    with headrace.load(program, max_steps=10_000) as loaded:
        for _ in range(times):
            with pytest.raises(headrace.DelegateError, match=pattern):
                loaded["forward"]()


@pytest.mark.parametrize("field", ["key", "value"])
def test_compile_spec_without(field: str) -> None:
    """The engine reads both without looking, before any delegate sees them. In scale.pte no other table shares the
    spec's vtable."""
    data = bytearray((ROOT / "examples/scale.pte").read_bytes())
    path = f"Program.execution_plan[0].delegates[0].compile_specs[0].{field}.vtable"
    (slot,) = [s for s in slots(bytes(data), "Program") if s.path == path]
    slot.write(data, 0)
    refused(bytes(data), f"delegate 0, compile spec 0.*: expected a {field}, got none")


ARGS = "Program.execution_plan[0].chains[0].instructions[0].instr_args<KernelCall>"


class Add(Plan):
    """``values[3] = values[0] + values[1]``, in float32[4]."""

    def __init__(self, **out: Any) -> None:
        super().__init__()
        a, b = (self.tensor(FLOAT, [4], struct.pack("<4f", 1, 2, 3, 4)) for _ in range(2))
        self.one = self.value("int", 1)
        self.out = self.tensor(FLOAT, [4], **out)
        self.outputs = [self.out]
        self.call("aten::add.out", [a, b, self.one, self.out, self.out])


def test_the_sound_program_runs() -> None:
    """The programs below differ from this one by one thing."""
    with headrace.load(Add().build()) as program:
        np.testing.assert_array_equal(program["forward"]()[0], [2, 4, 6, 8])


# ---- indices and kinds of one instruction


@pytest.mark.parametrize("index", [7, 2**31 - 1, -1, -(2**31)])
def test_value_index_outside_the_table(index: int) -> None:
    """OP3: the message names method, instruction, kernel and argument."""
    refused(
        patched("add", {ARGS + ".args[0]": index}),
        rf"method 'forward', instruction 0 \(kernel 'aten::add.out'\): argument 0: .*, got {index}",
    )


@pytest.mark.parametrize("index", [1, 2**31 - 1, -1])
def test_operator_index_outside_the_table(index: int) -> None:
    plan = Add()
    plan.instructions[0] = ("kernel", index, plan.instructions[0][2])
    refused(plan.build(), f"instruction 0: operator: expected an index below 1, got {index}")


def test_argument_of_the_wrong_kind() -> None:
    """OP3: expected and got, in words."""
    refused(
        patched("add", {ARGS + ".args[0]": 3}),
        r"instruction 0 \(kernel 'aten::add.out'\): argument 0: expected a tensor, got value 3, int",
    )
    refused(patched("add", {ARGS + ".args[2]": 0}), "argument 2: expected a number, got value 0, tensor")


def test_argument_that_may_be_none() -> None:
    """None passes where the schema says so, and nowhere else."""
    plan = Add()
    none = plan.value("none")
    plan.instructions[0][2][2] = none
    refused(plan.build(), "argument 2: expected a number, got value 4, none")
    plan = Plan()
    x, y = plan.tensor(FLOAT, [2], bytes(8)), plan.tensor(FLOAT, [2])
    low, high = plan.value("double", 0.5), plan.value("none")
    plan.call("aten::clamp.out", [x, low, high, y, y])
    plan.outputs = [y]
    with headrace.load(plan.build()) as program:
        np.testing.assert_array_equal(program["forward"]()[0], [0.5, 0.5])


def test_argument_count() -> None:
    plan = Add()
    plan.instructions[0][2].pop()
    refused(plan.build(), r"instruction 0 \(kernel 'aten::add.out'\): expected 5 arguments, got 4")


@pytest.mark.parametrize(("code", "got"), [(99, "99"), (-3, "-3"), (2**40, str(2**40)), (10, "10")])
def test_dtype_that_is_none(code: int, got: str) -> None:
    plan = Plan()
    x, y = plan.tensor(FLOAT, [2], bytes(8)), plan.tensor(FLOAT, [2])
    axis, dtype = plan.value("int", 0), plan.value("int", code)
    plan.call("aten::cumsum.out", [x, axis, dtype, y, y])
    refused(plan.build(), f"argument 2: expected a dtype, got value 3, {got}")


def test_memory_format_that_is_none() -> None:
    plan = Plan()
    size, out = plan.value("ints", []), plan.tensor(FLOAT, [])
    plan.call("aten::empty.out", [size, plan.value("int", 77), out, out])
    refused(plan.build(), "argument 1: expected a memory format, got value 2, 77")


def test_dimension_that_a_tensor_lacks() -> None:
    for dim in (1, -1, 2**40):
        plan = Plan()
        x = plan.tensor(FLOAT, [2], bytes(8))
        plan.call("aten::sym_size.int", [x, plan.value("int", dim), plan.value("int", 0)])
        refused(plan.build(), f"argument 1: expected a dimension below 1, got value 1, int {dim}")


def test_kernel_of_another_library_is_let_through_to_the_registry() -> None:
    plan = Add()
    plan.operators[0] = ("mine::add", "out")
    with pytest.raises(headrace.DelegateUnavailable, match=r"expected kernels for 'mine::add.out'"):
        headrace.load(plan.build())


# ---- kinds that change while a method runs


def test_number_that_becomes_a_float_before_it_is_used_as_an_int() -> None:
    plan = Plan()
    x = plan.tensor(FLOAT, [2], bytes(8))
    n = plan.value("int", 0)
    plan.call("aten::_local_scalar_dense", [x, n])  # a float, whatever the file declares
    out = plan.tensor(FLOAT, [1])
    plan.call("aten::select_copy.int_out", [x, n, n, out, out])
    refused(
        plan.build(),
        r"instruction 1 \(kernel 'aten::select_copy.int_out'\): argument 1: expected an int, got value 1, float",
    )


def test_number_that_the_last_call_left_as_a_float() -> None:
    """The first call is sound, the second begins with what the first left."""
    plan = Plan()
    x = plan.tensor(FLOAT, [2], bytes(8))
    n = plan.value("int", 0)
    out = plan.tensor(FLOAT, [], None)
    plan.call("aten::select_copy.int_out", [x, n, n, out, out])
    plan.call("aten::_local_scalar_dense", [x, n])
    refused(plan.build(), "instruction 0 .*argument 1: expected an int, got value 1, int or float")


def test_number_that_is_a_float_on_one_path_alone() -> None:
    plan = Plan()
    x = plan.tensor(FLOAT, [2], bytes(8))
    n, flag = plan.value("int", 0), plan.tensor(BOOL, [1], b"\1")
    plan.jump_false(flag, 2)
    plan.call("aten::_local_scalar_dense", [x, n])
    out = plan.tensor(FLOAT, [], None)
    plan.call("aten::select_copy.int_out", [x, n, n, out, out])
    refused(plan.build(), "instruction 2 .*argument 1: expected an int, got value 1, int or float")


def test_number_that_is_always_set_first_is_fine() -> None:
    """The exporter declares an int where it cannot know the kind."""
    plan = Plan()
    x = plan.tensor(FLOAT, [1], struct.pack("<f", 2.5))
    n, out = plan.value("int", 0), plan.tensor(FLOAT, [])
    plan.call("aten::_local_scalar_dense", [x, n])
    plan.call("aten::scalar_tensor.out", [n, out, out])
    plan.outputs = [out]
    with headrace.load(plan.build()) as program:
        for _ in range(2):
            assert program["forward"]()[0] == 2.5


def test_list_whose_element_becomes_a_float() -> None:
    plan = Plan()
    x = plan.tensor(FLOAT, [2], bytes(8))
    n = plan.value("int", 0)
    plan.call("aten::_local_scalar_dense", [x, n])
    sizes, out = plan.value("ints", [n]), plan.tensor(FLOAT, [2])
    plan.call("aten::full.out", [sizes, plan.value("int", 1), out, out])
    refused(
        plan.build(), "argument 0: expected a list whose elements are ints, got value 2, with value 1, float"
    )


def test_number_written_over_a_tensor() -> None:
    plan = Plan()
    x = plan.tensor(FLOAT, [2], bytes(8))
    plan.call("aten::sym_numel", [x, x])
    refused(plan.build(), "argument 1: expected a number to set, got value 0, tensor")


def test_moves_between_kinds_dtypes_and_ranks() -> None:
    for build, pattern in (
        (
            lambda p: p.move(p.value("int", 1), p.tensor(FLOAT, [1])),
            "tensors or between numbers, got int to tensor",
        ),
        (lambda p: p.move(p.value("ints", []), p.value("ints", [])), "got list of ints to list of ints"),
        (
            lambda p: p.move(p.tensor(FLOAT, [1]), p.tensor(INT64, [1])),
            "got float32 of rank 1 to int64 of rank 1",
        ),
        (lambda p: p.move(p.tensor(FLOAT, [1]), p.tensor(FLOAT, [1, 1])), "of rank 1 to float32 of rank 2"),
    ):
        plan = Plan()
        build(plan)
        refused(plan.build(), pattern)


def test_move_to_an_input() -> None:
    plan = Plan()
    a, x = plan.tensor(FLOAT, [4]), plan.tensor(FLOAT, [4], planned=False)
    plan.inputs = [x]
    plan.move(a, x)
    refused(plan.build(), "expected a move that leaves the inputs as they are, got one to value 1")


# ---- memory


def test_constant_that_is_written() -> None:
    """Constants lie in the file's own bytes, which were checked before."""
    plan = Add()
    plan.instructions[0][2][3:] = [0, 0]
    plan.outputs = [0]
    refused(plan.build(), "argument 3: expected a tensor that may be written, got value 0, a constant")


def test_view_of_a_constant_that_is_written() -> None:
    plan = Add(planned=False, dynamism=BOUNDED)
    plan.outputs = []
    add = plan.instructions.pop()
    size = plan.value("ints", [plan.value("int", 4)])
    constant = plan.tensor(FLOAT, [4], bytes(16))
    plan.call("executorch_prim::et_view.default", [constant, size, plan.out])
    plan.instructions.append(add)
    refused(plan.build(), "argument 3: expected a tensor that may be written, got value 3, a constant")


def test_view_that_may_grow_beyond_what_it_shows() -> None:
    plan = Plan()
    a = plan.tensor(FLOAT, [1 << 18], None)
    small = plan.tensor(FLOAT, [4])
    view = plan.tensor(FLOAT, [1 << 18], None, BOUNDED, planned=False)
    size = plan.value("ints", [plan.value("int", 4)])
    plan.call("executorch_prim::et_view.default", [small, size, view])
    plan.call("aten::relu.out", [a, view, view])
    refused(
        plan.build(),
        r"instruction 1 \(kernel 'aten::relu.out'\): argument 1: expected a tensor with memory for the largest",
    )


def test_input_that_a_kernel_may_grow() -> None:
    """The caller's array is as large as the call says, not as large as the program's bound."""
    plan = Plan()
    x = plan.tensor(FLOAT, [1 << 18], None, BOUNDED, planned=False)
    a = plan.tensor(FLOAT, [1 << 18], None)
    plan.inputs = [x]
    plan.call("aten::relu.out", [a, x, x])
    refused(plan.build(), "argument 1: expected a tensor with memory for the largest shape")


def test_view_that_is_used_before_it_is_made() -> None:
    plan = Plan()
    a, view, out = plan.tensor(FLOAT, [4]), plan.tensor(FLOAT, [4], planned=False), plan.tensor(FLOAT, [4])
    size = plan.value("ints", [plan.value("int", 4)])
    plan.call("aten::relu.out", [view, out, out])
    plan.call("executorch_prim::et_view.default", [a, size, view])
    refused(plan.build(), "instruction 0 .*argument 0: expected a tensor with memory, got value 1")


def test_view_that_is_made_on_one_path_alone() -> None:
    plan = Plan()
    a, view, out = plan.tensor(FLOAT, [4]), plan.tensor(FLOAT, [4], planned=False), plan.tensor(FLOAT, [4])
    size, flag = plan.value("ints", [plan.value("int", 4)]), plan.tensor(BOOL, [1], b"\0")
    plan.jump_false(flag, 2)
    plan.call("executorch_prim::et_view.default", [a, size, view])
    plan.call("aten::relu.out", [view, out, out])
    refused(plan.build(), "instruction 2 .*argument 0: expected a tensor with memory, got value 1")


def test_condition_without_memory() -> None:
    plan = Plan()
    flag = plan.tensor(BOOL, [1], planned=False)
    plan.jump_false(flag, 1)
    refused(plan.build(), "expected a tensor with memory, got value 0")


def test_value_that_is_freed_and_used_by_the_second_call() -> None:
    plan = Add()
    plan.free(plan.out)
    refused(plan.build(), "expected freed values that nothing uses, got value 3")


def test_tensor_that_a_kernel_reads_and_resizes() -> None:
    plan = Plan()
    a = plan.tensor(FLOAT, [4], None, BOUNDED)
    plan.call("aten::relu.out", [a, a, a])
    refused(plan.build(), "argument 0: expected a tensor that the kernel does not write as well, got value 0")


def test_planned_memory_outside_its_buffer() -> None:
    """OP3: overlap of offset, size and buffer, without overflow."""
    low = "Program.execution_plan[0].values[1].val<Tensor>.allocation_info.memory_offset_low"
    refused(
        patched("add", {low: 2**32 - 16}),
        "value 1: planned memory: expected .* bytes at offset 4294967280 inside buffer 1",
    )


def test_constant_between_the_elements_addresses() -> None:
    plan = Add()
    program = bytearray(plan.build())
    whole = bytes(program)
    sound = Seed("add", whole, ())
    (slot,) = [s for s in sound.slots if s.path == "Program.constant_segment.offsets[1]"]
    slot.write(program, slot.read(whole) + 1)
    refused(bytes(program), "constant data: expected it at a multiple of 4 bytes")


def test_planned_buffer_of_a_terabyte() -> None:
    """An error that says which, at once: nothing that large is written to."""
    plan = Add()
    plan.planned = 1 << 45
    began = time.monotonic()
    with pytest.raises(headrace.OutOfDeviceMemory, match="planned buffer 1: expected 35184372088832 bytes"):
        headrace.load(plan.build())
    assert time.monotonic() - began < 2


# ---- control flow


def test_loop_that_leaves_its_condition_as_it_is() -> None:
    plan = Add()
    plan.jump_false(plan.value("bool", False), 0)
    refused(plan.build(), "instruction 1: expected a loop that writes its own condition")


def test_loop_that_never_ends_is_stopped() -> None:
    """max_steps bounds it, and the method can be called again."""
    plan = Add()
    flag = plan.value("bool", False)
    zero = plan.value("int", 0)
    plan.call("executorch_prim::eq.Scalar", [zero, plan.one, flag])
    plan.jump_false(flag, 0)
    fails(plan.build(), "expected a loop to end within 10000 instructions, got more; .*max_steps")


def test_max_steps_is_checked() -> None:
    """OP2's kin: a limit that is no limit is refused."""
    for wrong in (0, -1, True, "many", 2**63):
        with pytest.raises(headrace.OptionError, match="max_steps"):
            headrace.load(Add().build(), max_steps=wrong)  # type: ignore[arg-type]


def test_jump_outside_the_chain() -> None:
    plan = Add()
    plan.jump_false(plan.value("bool", False), 3)
    refused(plan.build(), "jump target: expected an index below 3, got 3")


def test_jump_behind_the_last_instruction_is_the_end() -> None:
    plan = Add()
    plan.jump_false(plan.value("bool", False), 2)
    with headrace.load(plan.build()) as program:
        np.testing.assert_array_equal(program["forward"]()[0], [2, 4, 6, 8])


# ---- what a kernel meets in the data


@pytest.mark.parametrize("kernel", ["floordiv.Scalar", "floordiv.int", "mod.Scalar", "mod.int"])
@pytest.mark.parametrize(("a", "b"), [(1, 0), (-(2**63), -1)])
def test_numbers_that_cannot_be_divided(kernel: str, a: int, b: int) -> None:
    plan = Plan()
    x, y, z = (plan.value("int", n) for n in (a, b, 0))
    plan.call(f"executorch_prim::{kernel}", [x, y, z])
    plan.outputs = [z]
    fails(plan.build(), f"executorch_prim::{kernel}: expected integers that can be divided")


def test_numbers_that_can_be_divided() -> None:
    plan = Plan()
    x, y, z = (plan.value("int", n) for n in (-7, 2, 0))
    plan.call("executorch_prim::floordiv.Scalar", [x, y, z])
    plan.outputs = [z]
    with headrace.load(plan.build()) as program:
        assert program["forward"]() == (-4,)


def binary(kernel: str, dtype: int, a: bytes, b: bytes, *more: tuple[str, Any]) -> bytes:
    plan = Plan()
    x, y = plan.tensor(dtype, [1], a), plan.tensor(dtype, [1], b)
    out = plan.tensor(dtype, [1])
    plan.call(kernel, [x, y, *(plan.value(*m) for m in more), out, out])
    plan.outputs = [out]
    return plan.build()


LEAST, MINUS = struct.pack("<q", -(2**63)), struct.pack("<q", -1)


def test_tensors_that_cannot_be_divided() -> None:
    fails(binary("aten::div.out", INT32, bytes(4), bytes(4)), "aten::div.out: expected an output of floats")
    fails(
        binary("aten::floor_divide.out", INT64, LEAST, MINUS),
        "aten::floor_divide.out: expected integers that can",
    )
    fails(
        binary("aten::remainder.Tensor_out", INT64, LEAST, MINUS),
        "aten::remainder.Tensor_out: expected integers",
    )
    mode = ("string", "floor")
    fails(binary("aten::div.out_mode", INT64, LEAST, MINUS, mode), "aten::div.out_mode: expected integers")


def test_divisor_that_vanishes_in_a_narrower_type() -> None:
    plan = Plan()
    x, n, out = plan.tensor(UINT8, [1], b"\1"), plan.value("int", 256), plan.tensor(INT32, [1])
    plan.call("aten::remainder.Scalar_out", [x, n, out, out])
    fails(plan.build(), "aten::remainder.Scalar_out: expected integers that can be divided")


def test_tensors_that_can_be_divided() -> None:
    seven, minus_two = struct.pack("<q", 7), struct.pack("<q", -2)
    with headrace.load(binary("aten::floor_divide.out", INT64, seven, minus_two)) as program:
        assert program["forward"]()[0] == -4
    with headrace.load(binary("aten::remainder.Tensor_out", INT64, seven, struct.pack("<q", 4))) as program:
        assert program["forward"]()[0] == 3
    with headrace.load(binary("aten::div.out", FLOAT, struct.pack("<f", 1), struct.pack("<f", 4))) as program:
        assert program["forward"]()[0] == 0.25


def test_transform_of_numbers_that_are_not_complex() -> None:
    plan = Plan()
    x, out = plan.tensor(FLOAT, [16, 3, 0]), plan.tensor(FLOAT, [], None, BOUNDED)
    axes = plan.value("ints", [plan.value("int", 1)])
    plan.call("aten::_fft_c2r.out", [x, axes, plan.value("int", 4), plan.value("int", 2), out, out])
    fails(plan.build(), "aten::_fft_c2r.out: expected an input of complex numbers")


def test_assertion_of_the_engine_is_an_error() -> None:
    """OP3: where the engine would end the process, its last words come with the exception."""
    plan = Plan()
    weights, indices = plan.tensor(FLOAT, [2, 2], bytes(16)), plan.tensor(INT16, [2], bytes(4))
    out, no = plan.tensor(FLOAT, [2, 2]), plan.value("bool", False)
    plan.call("aten::embedding.out", [weights, indices, plan.value("int", -1), no, no, out, out])
    fails(plan.build(), "the engine says: .*Expected indices tensor to have Long or Int scalar types")


# ---- names


@pytest.mark.parametrize("byte", [0x00, 0x0A, 0x7F, 0xFF, 0xC0])
def test_name_that_is_not_text(byte: int) -> None:
    """The engine stops at a zero byte and would find another method than the one that was checked."""
    at = seed("two_methods").program.index(b"encode") if b"encode" in seed("two_methods").program else None
    name = re.search(rb"\x07\0\0\0forward\0", seed("add").program)
    assert name is not None or at is not None
    data = bytearray(seed("add").program)
    data[name.start() + 6] = byte
    refused(bytes(data), "method name: expected UTF-8 without control characters|method 0")


def test_kernel_whose_result_lies_in_its_input() -> None:
    """It would copy memory over itself; found under AddressSanitizer in a kernel that slices."""
    place = "Program.execution_plan[0].values[11].val<Tensor>.allocation_info.memory_offset_low"
    refused(
        patched("bfloat16", {place: 128}),
        "expected planned memory that the kernel does not write as well, got value .*that of argument",
    )


# ---- XNNPACK's payload


VALUE = "XNNGraph.xvalues[{}].xvalue_union<XNNTensorValue>."


def xnnpack(changes: dict[str, int], pattern: str, name: str = "mlp_xnnpack") -> None:
    refused(patched(name, changes, payload=True), r"payload of delegate 0 \('XnnpackBackend'\): " + pattern)


def test_delegate_call_without_the_arguments_of_its_payload() -> None:
    count = "Program.execution_plan[0].chains[0].instructions[0].instr_args<DelegateCall>.args.count"
    refused(
        patched("mlp_xnnpack", {count: 0}),
        "instruction 0: expected an argument 0, which the payload names, got 0",
    )


def test_payload_argument_of_another_dtype_or_shape() -> None:
    tensor = "Program.execution_plan[0].values[0].val<Tensor>."
    refused(
        patched("mlp_xnnpack", {tensor + "scalar_type": 3}),
        "expected a tensor of the payload's datatype 1, got value 0, int32",
    )
    refused(
        patched("mlp_xnnpack", {tensor + "sizes[0]": 1}),
        "argument 0: expected a tensor of the payload's shape",
    )


def test_payload_constant_too_small_for_its_shape() -> None:
    xnnpack(
        {VALUE.format(1) + "dims[0]": 1 << 20}, "value 1: expected .* bytes for its shape, got a constant of "
    )


def test_payload_rank_that_its_sizes_do_not_have() -> None:
    xnnpack(
        {VALUE.format(1) + "num_dims": 5},
        "value 1: expected a size for each of at most 6 dimensions, got 5 dimensions",
    )


def test_payload_node_on_a_value_that_is_none() -> None:
    node = "XNNGraph.xnodes[0].xnode_union<FullyConnected>."
    xnnpack({node + "filter_id": 77}, "node 0: expected the id of a value, got 77")
    xnnpack(
        {node + "output_id": 1}, "node 0: expected a value that nothing else makes as its output, got id 1"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"[1].xnode_union<Conv>.field2": 127 << 16},  # padding
        {"[1].xnode_union<Conv>.field9": 0, "[1].xnode_union<Conv>.field3": 2**32 - 1},  # dilation, padding
        {"[2].xnode_union<Conv>.field6": 2**32 - 1},  # stride of a transposed convolution
        {"[2].xnode_union<Conv>.field14": 2**31},  # and what it adds behind
        {"[7].xnode_union<Pooling>.field0": 2**31, "[7].xnode_union<Pooling>.field1": 2**31},
        {"[8].xnode_union<Pooling>.field6": 1},
        {"[9].xnode_union<StaticConstantPad>.post_paddings[1]": 2**31},
    ],
)
def test_payload_that_asks_for_more_memory_than_its_shapes(change: dict[str, int]) -> None:
    """XNNPACK asks for what it works out from such numbers: two bytes made it 20 GB."""
    xnnpack(
        {"XNNGraph.xnodes" + path: value for path, value in change.items()},
        r"node \d+: expected at most the \d+ elements of the payload's shape as an output, got \d+",
        "images_xnnpack",
    )


def test_payload_that_asks_for_a_larger_image_than_its_shape() -> None:
    sound = seed("resize_xnnpack")
    size = next(s.path for s in sound.payload_slots if s.path.endswith("<Other>.field0"))
    xnnpack({size: 2**31}, r"node \d+: expected at most the 1120 elements", "resize_xnnpack")


def test_payload_whose_transposed_convolution_leaves_nothing() -> None:
    """XNNPACK divides by the size of its output, which inputs of other sizes may make 0 too."""
    padding = "XNNGraph.xnodes[2].xnode_union<Conv>.field2"
    xnnpack(
        {padding: 18},
        "node 2: expected padding that leaves rows and columns over, got more",
        "images_xnnpack",
    )
    xnnpack(
        {padding: 3},
        "instruction 0: node 2: expected less padding than what a single row and column become, got more, and argument",
        "images_xnnpack",
    )


def test_payload_that_divides_by_its_stride() -> None:
    node = "XNNGraph.xnodes[1].xnode_union<Conv>."
    xnnpack(
        {node + "field6": 0}, "node 1: expected a window of .* and a stride of 1 or more", "images_xnnpack"
    )
    xnnpack({node + "field4": 2**20, node + "field10": 0}, "node 1: expected", "images_xnnpack")


def test_payload_key_that_no_file_has() -> None:
    """The delegate reads through a null pointer where no data file was given at all."""
    refused(
        seed("external_xnnpack").program,
        "the data files lack the keys '[0-9a-f]{64}'",
    )


def test_payload_of_another_kind() -> None:
    sound = seed("mlp_xnnpack")
    at = sound.program.index(b"XH00")
    refused(sound.program[:at] + b"XXXX" + sound.program[at + 4 :], "expected an XNNPACK graph")


def test_delegate_that_ran_out_of_memory_may_be_called_again() -> None:
    """XNNPACK takes shapes for settled whose memory it did not get, and writes through null the next time.

    In a process of its own, whose address space is limited."""
    code = """
import resource, sys
import numpy as np
import headrace
from tests.unit.test_verify import patched, VALUE
program = headrace.load(sys.stdin.buffer.read())
method = program["forward"]
x = [np.zeros(i.shape, i.dtype) for i in method.inputs]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, used))
outcomes = []
for _ in range(3):
    try:
        method(*x)
        outcomes.append("ran")
    except headrace.HeadraceError as error:
        outcomes.append(type(error).__name__)
print(outcomes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=seed("cnn_xnnpack").program,
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


# ---- data files


def ptd(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray(programs.load("external_weights").data[0].read_bytes())
    change(data)
    return bytes(data)


def test_data_file_cut_short() -> None:
    program = seed("external_weights").program
    whole = programs.load("external_weights").data[0].read_bytes()
    for size in (0, 7, 11, 40, 47, 100, len(whole) - 1):
        refused(program, "expected", (whole[:size],))


def test_data_file_with_a_segment_outside() -> None:
    def move(data: bytearray) -> None:
        data[32:40] = struct.pack("<Q", 2**63)

    refused(seed("external_weights").program, "expected segments at .* inside the file", (ptd(move),))


# ---- nothing sound is refused


@pytest.mark.parametrize("name", programs.names())
def test_no_valid_program_is_refused(name: str) -> None:
    """OP3: the exporter's programs pass; what may be missing is a delegate or a kernel, and it says so.

    Programs that no engine of this version can run (``runs``) may be refused: they would end the process."""
    program = programs.load(name)

    def load(device: str | None) -> None:
        headrace.load(program.path, data=program.data, device=device).close()

    try:
        try:
            load(None)
        except headrace.DeviceError:
            load("sim")
    except headrace.DelegateUnavailable:
        assert set(program.delegates) - {"XnnpackBackend"} or program.kernels_missing
    except headrace.ProgramError as refusal:
        # The structure is sound; where its memory lies is not what headrace runs.
        if program.runs and "expected device memory that the caller brings" not in str(refusal):
            raise


def test_every_kernel_of_the_engine_has_a_signature() -> None:
    assert set(operators()) == set(core.kernels())
    assert len(operators()) > 200


def test_signatures_are_those_of_torch(tmp_path: Path) -> None:
    """Where torch is at hand, operators.def is what operators.py writes."""
    names = tmp_path / "kernels.txt"
    names.write_text("\n".join(core.kernels()))
    done = subprocess.run(
        [programs.export_python(), str(ROOT / "native/program/operators.py"), str(names)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "No module named" in done.stderr:
        pytest.skip("the interpreter that exports has no torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "native/program/operators.def").read_text()
