"""The reader of ``.pte`` and ``.ptd`` files: against the stock deserializer, and against damaged files."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flatbuffers
import pytest

from headrace import pte
from headrace._schema import program as schema
from headrace.errors import ProgramError
from tests import programs

NAMES = programs.names()

# -------------------- what a file says


def scalar_type(dtype: str) -> str:
    """The schema's name of a dtype, written down independently of the reader's table."""
    return {
        "uint8": "BYTE", "int8": "CHAR", "int16": "SHORT", "int32": "INT", "int64": "LONG", "float16": "HALF",
        "float32": "FLOAT", "float64": "DOUBLE", "bool": "BOOL", "bfloat16": "BFLOAT16",
    }[dtype]  # fmt: skip


def check_value(value: pte.ValueInfo, view: dict[str, Any]) -> None:
    view = view["val"]
    kinds = {
        "Tensor": "tensor",
        "Int": "int",
        "Bool": "bool",
        "Double": "float",
        "Null": "none",
        "String": "string",
    }
    assert value.kind == kinds.get(view["type"], "list")
    if value.kind == "list":
        assert list(value.value) == view["items"]
    elif value.kind != "tensor":
        assert [value.value] == [v for k, v in view.items() if k != "type"] or value.kind == "none"
    else:
        assert scalar_type(value.dtype or "") == view["scalar_type"]
        assert list(value.shape) == view["sizes"]
        assert list(value.dim_order) == view["dim_order"]
        assert value.dynamism == {"STATIC": "static", "DYNAMIC_BOUND": "bounded"}[view["shape_dynamism"]]
        allocation, extra = view["allocation_info"], view["extra_tensor_info"] or {}
        planned = None
        if allocation:
            offset = allocation["memory_offset_high"] * 2**32 + allocation["memory_offset_low"]
            planned = allocation["memory_id"], offset
        assert value.planned == planned
        kind = extra.get("device_type", "CPU")
        assert value.device == ("cpu" if kind == "CPU" else f"cuda:{extra['device_index']}")
        assert value.name == (extra.get("fully_qualified_name") or None)
        if extra.get("location") == "EXTERNAL":
            assert value.location == "external"
        else:
            stored = view["data_buffer_idx"] > 0
            assert (
                value.location
                == {
                    (True, False): "constant",
                    (True, True): "mutable",
                    (False, True): "planned",
                    (False, False): "unplanned",
                }[stored, allocation is not None]
            )


def check_instruction(step: pte.Instruction, view: dict[str, Any], plan: dict[str, Any]) -> None:
    view = view["instr_args"]
    if view["type"] == "KernelCall":
        operator = plan["operators"][view["op_index"]]
        target = operator["name"] + (f".{operator['overload']}" if operator["overload"] else "")
        assert (step.kind, step.target, list(step.args)) == ("kernel", target, view["args"])
    elif view["type"] == "DelegateCall":
        target = plan["delegates"][view["delegate_index"]]["id"]
        assert (step.kind, step.target, list(step.args)) == ("delegate", target, view["args"])
    elif view["type"] == "MoveCall":
        assert (step.kind, step.args) == ("move", (view["move_from"], view["move_to"]))
    else:
        assert view["type"] == "JumpFalseCall"
        assert (step.kind, step.args) == ("jump", (view["cond_value_index"],))
        assert step.destination == view["destination_instruction"]


@pytest.mark.parametrize("name", NAMES)
def test_reader_agrees_with_the_stock_deserializer(name: str) -> None:
    exported = programs.load(name)
    file = pte.read(exported.path)
    view = exported.view["program"]
    assert file.version == view["version"]
    assert file.nbytes == exported.path.stat().st_size
    assert [m.name for m in file.methods] == [p["name"] for p in view["execution_plan"]]
    for method, plan in zip(file.methods, view["execution_plan"], strict=True):
        for value, seen in zip(method.values, plan["values"], strict=True):
            check_value(value, seen)
        assert [v.index for v in method.values] == list(range(len(plan["values"])))
        assert [v.index for v in method.inputs] == plan["inputs"]
        assert [v.index for v in method.outputs] == plan["outputs"]
        for chain, seen in zip(method.chains, plan["chains"], strict=True):
            for step, instruction in zip(chain.instructions, seen["instructions"], strict=True):
                check_instruction(step, instruction, plan)
        devices = {d["buffer_idx"]: f"cuda:{d['device_index']}" for d in plan["non_const_buffer_device"] or []
                   if d["device_type"] == "CUDA"}  # fmt: skip
        assert [(b.memory_id, b.nbytes, b.device) for b in method.buffers] == [
            (i, size, devices.get(i, "cpu")) for i, size in enumerate(plan["non_const_buffer_sizes"]) if i
        ]
        assert sum(operator.calls for operator in method.operators) == sum(
            step.kind == "kernel" for step in method.instructions
        )
        calls = [i["instr_args"] for c in plan["chains"] for i in c["instructions"]]
        delegates = [plan["delegates"][c["delegate_index"]] for c in calls if c["type"] == "DelegateCall"]
        for island, delegate in zip(method.islands, delegates, strict=True):
            assert island.delegate == delegate["id"]
            assert [k for k, _ in island.specs] == [s["key"] for s in delegate["compile_specs"]]
            assert [v.hex() for _, v in island.specs] == [
                s["value"]["head"] for s in delegate["compile_specs"]
            ]
            # The deserializer moves payloads back into the program, in a list of their own.
            payload = view["backend_delegate_data"][delegate["processed"]["index"]]["data"]
            assert island.payload_nbytes == payload["size"]
            assert island.payload_head.hex() == payload["head"][: 2 * pte.PAYLOAD_HEAD_NBYTES]
            raw = exported.path.read_bytes()[island.payload_offset :][: island.payload_nbytes]
            assert raw.startswith(island.payload_head)
            assert len(raw) == island.payload_nbytes
    assert {n.key: n.nbytes for n in file.named_data} == exported.view["named_data"]
    assert set(file.delegates) == set(exported.delegates)


def test_every_kind_of_thing_is_in_some_program() -> None:
    """The comparison above proves nothing about what no program holds."""
    methods = [method for name in NAMES for method in pte.read(programs.load(name).path).methods]
    values = [value for method in methods for value in method.values]
    assert {v.kind for v in values} >= {"tensor", "int", "float", "bool", "none", "list"}
    assert {v.location for v in values} >= {"constant", "mutable", "external", "planned", "unplanned"}
    assert {v.dynamism for v in values} >= {"static", "bounded"}
    assert {v.device for v in values} >= {"cpu", "cuda:0", "cuda:1"}
    assert {s.kind for m in methods for s in m.instructions} >= {"kernel", "delegate", "move", "jump"}
    assert {b.device for m in methods for b in m.buffers} == {"cpu", "cuda:0", "cuda:1"}


@pytest.mark.parametrize("name", NAMES)
def test_inputs_derived_from_the_plan_equal_those_of_the_spec(name: str) -> None:
    """The exporter of these programs writes the count; without it the plan must tell the same."""
    raw = programs.load(name).path.read_bytes()
    # Same length, so that every offset stays.
    hidden = raw.replace(pte.INPUTS_SPEC.encode(), b"headrace.hidden")
    for method, blind in zip(pte.read(raw).methods, pte.read(hidden).methods, strict=True):
        for island, derived in zip(method.islands, blind.islands, strict=True):
            assert (derived.inputs, derived.outputs) == (island.inputs, island.outputs)
            assert island.inputs is not None
            assert island.outputs == len(island.args) - island.inputs


def test_islands_of_a_long_chain_alternate() -> None:
    method = pte.read(programs.load("chain25_cuda").path)["forward"]
    assert [island.delegate for island in method.islands] == ["TestA", "TestB"] * 12 + ["TestA"]
    assert [island.index for island in method.islands] == list(range(25))
    steps = [method.instructions[island.instruction] for island in method.islands]
    assert [step.target for step in steps] == [island.delegate for island in method.islands]
    assert method.islands[0].spec("target_device") == b"cuda:0"
    assert method.islands[0].spec("no such key") is None
    assert method.devices == ("cpu", "cuda:0")


@pytest.mark.parametrize(
    ("name", "files"),
    [("external_weights", 1), ("external_two_files", 2), ("external_partly", 1), ("external_xnnpack", 1)],
)
def test_data_files_hold_what_the_program_asks_for(name: str, files: int) -> None:
    exported = programs.load(name)
    assert len(exported.data) == files
    found = {e.key: e for path in exported.data for e in pte.read_data(path).entries}
    file = pte.read(exported.path)
    for tensor in file.external:
        entry = found[tensor.key]
        assert (entry.dtype, entry.shape, entry.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
    # XNNPACK's weights are named by hashes that only its payload knows.
    assert bool(file.external) == (name != "external_xnnpack")
    assert len(found) >= len(file.external)


def test_weights_in_a_data_file_are_the_models() -> None:
    exported = programs.load("external_weights")
    (path,) = exported.data
    entry = pte.read_data(path)["a.bias"]
    raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert struct.unpack(f"<{128}f", raw)[0] != 0.0
    assert entry.shape == (128,)
    with pytest.raises(KeyError):
        pte.read_data(path)["no such key"]


def test_bounds_and_text_of_values() -> None:
    static = pte.read(programs.load("mlp_portable").path)["forward"].inputs[0]
    assert (str(static), static.bounds) == ("float32[4, 64] on cpu", (4, 64))
    bounded = pte.read(programs.load("dynamic_batch").path)["forward"].inputs[0]
    assert (str(bounded), bounded.bounds, bounded.nbytes) == ("float32[≤8, ≤64] on cpu", (8, 64), 2048)


def test_bytes_and_paths_read_alike(tmp_path: Path) -> None:
    path = programs.load("split_cuda").path
    by_path, by_bytes = pte.read(path), pte.read(path.read_bytes())
    assert by_path.methods == by_bytes.methods
    assert pte.read(os.fspath(path)) == by_path
    assert (by_path.source, by_bytes.source) == (str(path), "<bytes>")
    with pytest.raises(KeyError):
        by_path["no such method"]


def test_import_is_light() -> None:
    """Whoever only needs the names must not pay for NumPy and flatbuffers. The package is stood in for, so
    that what it imports itself does not count."""
    code = """if True:
        import sys, types
        package = types.ModuleType("headrace")
        package.__path__ = [sys.argv[1]]
        sys.modules["headrace"] = package
        import headrace.pte
        print(sorted({"numpy", "flatbuffers", "torch"} & set(sys.modules)))
    """
    folder = str(Path(pte.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -------------------- programs that no exporter writes


class Made:
    """A small program built with the schema's own builder functions; each test changes one thing."""

    def __init__(self) -> None:
        self.b = flatbuffers.Builder(256)
        self.values: list[int] = []

    def vector(self, start: Callable[[Any, int], Any], items: list[int], prepend: str) -> int:
        start(self.b, len(items))
        for item in reversed(items):
            getattr(self.b, prepend)(item)
        return self.b.EndVector()

    def value(self, kind: int, table: int) -> int:
        schema.EValueStart(self.b)
        schema.EValueAddValType(self.b, kind)
        schema.EValueAddVal(self.b, table)
        self.values.append(schema.EValueEnd(self.b))
        return len(self.values) - 1

    def int(self, number: int) -> int:
        schema.IntStart(self.b)
        schema.IntAddIntVal(self.b, number)
        return self.value(schema.KernelTypes.Int, schema.IntEnd(self.b))

    def string(self, text: str) -> int:
        made = self.b.CreateString(text)
        schema.StringStart(self.b)
        schema.StringAddStringVal(self.b, made)
        return self.value(schema.KernelTypes.String, schema.StringEnd(self.b))

    def list(self, name: str, items: list[Any]) -> int:
        prepend = {"IntList": "PrependInt64", "BoolList": "PrependBool", "DoubleList": "PrependFloat64"}.get(
            name, "PrependInt32"
        )
        made = self.vector(getattr(schema, f"{name}StartItemsVector"), items, prepend)
        getattr(schema, f"{name}Start")(self.b)
        getattr(schema, f"{name}AddItems")(self.b, made)
        return self.value(getattr(schema.KernelTypes, name), getattr(schema, f"{name}End")(self.b))

    def tensor(
        self,
        sizes: list[int],
        dim_order: list[int] | None = None,
        dtype: int = 6,
        dynamism: int = 0,
        data: int = 0,
        planned: tuple[int, int] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> int:
        made = self.vector(schema.TensorStartSizesVector, sizes, "PrependInt32")
        order = self.vector(
            schema.TensorStartDimOrderVector,
            list(range(len(sizes))) if dim_order is None else dim_order,
            "PrependUint8",
        )
        where = details = 0
        if planned:
            schema.AllocationDetailsStart(self.b)
            schema.AllocationDetailsAddMemoryId(self.b, planned[0])
            schema.AllocationDetailsAddMemoryOffsetLow(self.b, planned[1] & 0xFFFFFFFF)
            schema.AllocationDetailsAddMemoryOffsetHigh(self.b, planned[1] >> 32)
            where = schema.AllocationDetailsEnd(self.b)
        if extra is not None:
            name = self.b.CreateString(extra["name"]) if "name" in extra else 0
            schema.ExtraTensorInfoStart(self.b)
            if name:
                schema.ExtraTensorInfoAddFullyQualifiedName(self.b, name)
            schema.ExtraTensorInfoAddLocation(self.b, extra.get("location", 0))
            schema.ExtraTensorInfoAddDeviceType(self.b, extra.get("device", 0))
            schema.ExtraTensorInfoAddDeviceIndex(self.b, extra.get("device_index", 0))
            details = schema.ExtraTensorInfoEnd(self.b)
        schema.TensorStart(self.b)
        schema.TensorAddScalarType(self.b, dtype)
        schema.TensorAddSizes(self.b, made)
        schema.TensorAddDimOrder(self.b, order)
        schema.TensorAddShapeDynamism(self.b, dynamism)
        schema.TensorAddDataBufferIdx(self.b, data)
        if where:
            schema.TensorAddAllocationInfo(self.b, where)
        if details:
            schema.TensorAddExtraTensorInfo(self.b, details)
        return self.value(schema.KernelTypes.Tensor, schema.TensorEnd(self.b))

    def instruction(self, kind: str, **fields: int | list[int]) -> int:
        vectors = {
            name: self.vector(getattr(schema, f"{kind}StartArgsVector"), items, "PrependInt32")
            for name, items in fields.items()
            if isinstance(items, list)
        }
        getattr(schema, f"{kind}Start")(self.b)
        for name, item in {**fields, **vectors}.items():
            getattr(schema, f"{kind}Add{name}")(self.b, item)
        union = getattr(schema, f"{kind}End")(self.b)
        schema.InstructionStart(self.b)
        schema.InstructionAddInstrArgsType(self.b, getattr(schema.InstructionArguments, kind))
        schema.InstructionAddInstrArgs(self.b, union)
        return schema.InstructionEnd(self.b)

    def plan(
        self,
        instructions: list[int] | None = None,
        buffers: tuple[int, ...] = (0, 64),
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        operators: int = 1,
        name: str | None = "forward",
        delegates: list[int] | None = None,
    ) -> int:
        b = self.b
        named = b.CreateString(name) if name is not None else 0
        made = self.vector(schema.ChainStartInstructionsVector, instructions or [], "PrependUOffsetTRelative")
        schema.ChainStart(b)
        schema.ChainAddInstructions(b, made)
        chain = schema.ChainEnd(b)
        text = b.CreateString("aten::add")
        schema.OperatorStart(b)
        schema.OperatorAddName(b, text)
        operator = schema.OperatorEnd(b)
        p = schema
        vectors = {
            "Values": self.vector(p.ExecutionPlanStartValuesVector, self.values, "PrependUOffsetTRelative"),
            "Inputs": self.vector(p.ExecutionPlanStartInputsVector, list(inputs), "PrependInt32"),
            "Outputs": self.vector(p.ExecutionPlanStartOutputsVector, list(outputs), "PrependInt32"),
            "Chains": self.vector(p.ExecutionPlanStartChainsVector, [chain], "PrependUOffsetTRelative"),
            "Operators": self.vector(
                p.ExecutionPlanStartOperatorsVector, [operator] * operators, "PrependUOffsetTRelative"
            ),
            "Delegates": self.vector(
                p.ExecutionPlanStartDelegatesVector, delegates or [], "PrependUOffsetTRelative"
            ),
            "NonConstBufferSizes": self.vector(
                p.ExecutionPlanStartNonConstBufferSizesVector, list(buffers), "PrependInt64"
            ),
        }
        schema.ExecutionPlanStart(b)
        if named:
            schema.ExecutionPlanAddName(b, named)
        for key, vector in vectors.items():
            getattr(schema, f"ExecutionPlanAdd{key}")(b, vector)
        return schema.ExecutionPlanEnd(b)

    def finish(self, *plans: int) -> bytes:
        made = self.vector(schema.ProgramStartExecutionPlanVector, list(plans), "PrependUOffsetTRelative")
        schema.ProgramStart(self.b)
        schema.ProgramAddExecutionPlan(self.b, made)
        self.b.Finish(schema.ProgramEnd(self.b), file_identifier=b"ET12")
        return bytes(self.b.Output())


def test_a_program_without_header_and_with_rare_values_reads() -> None:
    made = Made()
    seven = made.int(7)
    made.string("größe")
    made.list("IntList", [seven, seven])
    made.list("BoolList", [True, False])
    made.list("DoubleList", [0.5, -1.5])
    tensor = made.tensor([2, 3], dim_order=[1, 0], planned=(1, 8))
    made.list("TensorList", [tensor])
    made.list("OptionalTensorList", [-1, tensor])
    free = made.tensor([9, 9], dynamism=2)
    steps = [
        made.instruction("FreeCall", ValueIndex=free),
        made.instruction("KernelCall", OpIndex=0, Args=[0, 5]),
    ]
    method = pte.read(made.finish(made.plan(steps)))["forward"]
    assert [v.value for v in method.values if v.kind != "tensor"] == [
        7, "größe", (0, 0), (True, False), (0.5, -1.5), (5,), (-1, 5),
    ]  # fmt: skip
    assert (method.values[5].planned, method.values[5].dim_order) == ((1, 8), (1, 0))
    unbounded = method.values[8]
    assert (str(unbounded), unbounded.bounds, unbounded.nbytes) == (
        "float32[?, ?] on cpu",
        (None, None),
        None,
    )
    assert [s.kind for s in method.instructions] == ["free", "kernel"]
    assert [(o.name, o.calls) for o in method.operators] == [("aten::add", 1)]


def values(*make: Callable[[Made], int], **plan: Any) -> bytes:
    """A program with these values."""
    made = Made()
    for one in make:
        one(made)
    return made.finish(made.plan(**plan))


def tensor(*args: Any, **options: Any) -> bytes:
    """A program with this tensor."""
    return values(lambda made: made.tensor(*args, **options))


def step(kind: str, **fields: Any) -> bytes:
    """A program whose value 0 is an int, whose value 1 is a tensor, and that does this."""
    made = Made()
    made.int(1)
    made.tensor([1])
    return made.finish(made.plan([made.instruction(kind, **fields)]))


WRONG: dict[str, tuple[bytes, str]] = {
    "list member beyond the table": (
        values(lambda made: made.list("IntList", [3])),
        "value 0: expected a value from 0 to 0, got 3",
    ),
    "list member of another kind": (
        values(lambda made: made.int(1), lambda made: made.list("TensorList", [0])),
        "members of kind tensor, got value 0 of kind int",
    ),
    "list that holds itself": (values(lambda made: made.list("TensorList", [0])), "of kind list"),
    "absent member of a plain list": (values(lambda made: made.list("TensorList", [-1])), "got -1"),
    "dim_order twice the same": (tensor([2, 2], [0, 0]), "each of 2 dimensions once"),
    "dim_order too short": (tensor([2, 2], [0]), "each of 2 dimensions once"),
    "negative size": (tensor([2, -2]), "expected 0 or greater"),
    "rank": (tensor([1] * 17), "at most 16"),
    "more bytes than an address can hold": (tensor([2**31 - 1] * 3), "less than 2^63 bytes"),
    "scalar type": (tensor([1], dtype=9), "scalar type"),
    "dynamism": (tensor([1], dynamism=3), "dynamism"),
    "device type": (tensor([1], extra={"device": 2}), "device type"),
    "device index": (tensor([1], extra={"device": 1, "device_index": -1}), "device index"),
    "memory id 0": (tensor([1], planned=(0, 0)), "memory id"),
    "memory id too great": (tensor([1], planned=(2, 0)), "memory id"),
    "beyond the planned buffer": (tensor([16], planned=(1, 4)), "within the buffer's 64 bytes"),
    "far beyond the planned buffer": (tensor([1], planned=(1, 2**40)), f"from {2**40}"),
    "data that is not there": (tensor([1], data=1), "no data, for there is none"),
    "external without a name": (tensor([1], extra={"location": 1}), "a named, bounded tensor"),
    "external and unbounded": (
        tensor([1], dynamism=2, extra={"location": 1, "name": "w"}),
        "a named, bounded tensor",
    ),
    "external data of two shapes": (
        values(*(lambda made, n=n: made.tensor([n], extra={"location": 1, "name": "w"}) for n in (1, 2))),
        "as elsewhere",
    ),
    "input beyond the values": (values(inputs=(0,)), "forward, inputs"),
    "output below the values": (values(outputs=(-1,)), "forward, outputs"),
    "negative buffer": (values(buffers=(0, -1)), "planned buffer 1"),
    "operator": (step("KernelCall", OpIndex=1, Args=[]), "operator"),
    "argument": (step("KernelCall", OpIndex=0, Args=[2]), "arguments"),
    "negative argument": (step("KernelCall", OpIndex=0, Args=[-1]), "arguments"),
    "delegate": (step("DelegateCall", DelegateIndex=0, Args=[]), "delegate"),
    "move": (step("MoveCall", MoveFrom=1, MoveTo=2), "expected a value from 0 to 1"),
    "jump on a number": (step("JumpFalseCall", CondValueIndex=0), "a bool or a tensor"),
    "jump beyond the end": (step("JumpFalseCall", CondValueIndex=1, DestinationInstruction=2), "destination"),
    "free a number": (step("FreeCall", ValueIndex=0), "a tensor to free"),
    "no name": (values(name=None), "method 0, name"),
    "no method": (Made().finish(), "one or more"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_contradiction_is_a_program_error_that_names_it(case: str) -> None:
    """OP3, OP4: where, what was expected, what came, what to do."""
    raw, text = WRONG[case]
    with pytest.raises(ProgramError) as caught:
        pte.read(raw)
    message = str(caught.value)
    assert text in message
    assert message.startswith("<bytes>, ")
    assert all(part in message for part in (": expected ", ", got ", "; "))


def test_two_methods_of_one_name_are_refused() -> None:
    """OP4"""
    made = Made()
    with pytest.raises(ProgramError, match="of different names"):
        pte.read(made.finish(made.plan(), made.plan()))


def test_a_wrong_count_of_inputs_is_refused() -> None:
    """OP3"""
    raw = programs.load("split_host").path.read_bytes()
    at = raw.index(b"\x01\x00\x00\x002", raw.index(b"TestA") - 400)
    for value in (b"9", b"x"):
        with pytest.raises(ProgramError, match=r"headrace\.inputs: expected a number up to 3"):
            pte.read(raw[: at + 4] + value + raw[at + 5 :])


def test_a_small_file_cannot_stand_for_an_enormous_one() -> None:
    """OP4: a hundred thousand instructions that share one vector of a hundred thousand arguments."""
    made = Made()
    made.int(1)
    step = made.instruction("KernelCall", OpIndex=0, Args=[0] * 100_000)
    raw = made.finish(made.plan([step] * 100_000))
    began = time.perf_counter()
    with pytest.raises(ProgramError, match="items in a table"):
        pte.read(raw)
    assert time.perf_counter() - began < 2


# -------------------- damaged files


def patched(raw: bytes, offset: int, fmt: str, value: int) -> bytes:
    return raw[:offset] + struct.pack(fmt, value) + raw[offset + struct.calcsize(fmt) :]


@pytest.fixture(scope="module")
def whole() -> bytes:
    return programs.load("split_cuda").path.read_bytes()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda raw: b"", "an empty file"),
        (lambda raw: raw[:7], "bytes 4 to 7"),
        (lambda raw: b"PK\3\4" * 100, "bytes 4 to 7"),
        (lambda raw: raw[:4] + b"ET13" + raw[8:], "bytes 4 to 7"),
        (lambda raw: raw[:20], "header"),
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw[: len(raw) // 2], "truncated"),
        (lambda raw: patched(raw, 12, "<I", 4), "header, length"),
        (lambda raw: patched(raw, 12, "<I", 2**32 - 1), "header: expected"),
        (lambda raw: patched(raw, 16, "<Q", 2**64 - 1), "header, table"),
        (lambda raw: patched(raw, 16, "<Q", 0), "header, table"),
        (lambda raw: patched(raw, 24, "<Q", 2**63), "segment base"),
        (lambda raw: patched(raw, 24, "<Q", 8), "segment base"),
        (lambda raw: patched(raw, 24, "<Q", 0), "segment"),
        (lambda raw: patched(raw, 32, "<Q", 2**64 - 1), "segment data"),
        (lambda raw: patched(raw, 32, "<Q", 1), "segment"),
        (lambda raw: patched(raw, 0, "<I", 2**32 - 1), "table"),
    ],
)
def test_damage_is_a_program_error_that_says_where(
    whole: bytes, damage: Callable[[bytes], bytes], text: str
) -> None:
    """OP3, OP4"""
    with pytest.raises(ProgramError) as caught:
        pte.read(damage(whole))
    assert text in str(caught.value)


def test_an_older_header_without_the_size_of_segments_reads(whole: bytes) -> None:
    older = patched(patched(whole, 12, "<I", 24), 32, "<Q", 2**64 - 1)
    assert pte.read(older).methods == pte.read(whole).methods


def test_what_is_no_file_is_a_program_error(tmp_path: Path) -> None:
    """OP4"""
    with pytest.raises(ProgramError, match="No such file"):
        pte.read(tmp_path / "absent.pte")
    with pytest.raises(ProgramError, match="expected a file, got a folder"):
        pte.read(tmp_path)
    with pytest.raises(ProgramError, match="a regular file"):
        pte.read("/dev/null")
    with pytest.raises(ProgramError, match="null"):
        pte.read("a\0b")
    for nothing in (None, 3, [b""]):
        with pytest.raises(ProgramError, match=f"bytes of a file, got {type(nothing).__name__}"):
            pte.read(nothing)  # type: ignore[arg-type]
    of_bytes = type("Raw", (), {"__fspath__": lambda self: b"a.pte"})()
    with pytest.raises(ProgramError, match="a path that is text"):
        pte.read(of_bytes)
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with pytest.raises(ProgramError, match="a regular file"):
        pte.read(fifo)
    with pytest.raises(ProgramError, match="data file"):
        pte.read_data(programs.load("add").path)
    with pytest.raises(ProgramError, match="bytes 4 to 7"):
        pte.read(programs.load("external_weights").data[0])


def test_every_truncation_is_refused_or_reads_the_same() -> None:
    """OP4"""
    raw = programs.load("two_methods").path.read_bytes()
    complete = pte.read(raw)
    for length in range(0, len(raw), 3):
        try:
            file = pte.read(raw[:length])
        except ProgramError:
            continue
        # Only padding was lost.
        assert file.methods == complete.methods


INTERESTING = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0xFFFFFFF0,
    0x10000,
)


def mutations(raw: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Copies with a few bytes, words or stretches changed. Most changes fall into the first bytes, where
    the table is."""
    dice = random.Random(seed)
    table = min(len(raw), 4096)
    for _ in range(count):
        data = bytearray(raw)
        for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
            at = dice.randrange(table)
            kind = dice.randrange(5)
            if kind == 0:
                data[at] ^= 1 << dice.randrange(8)
            elif kind == 1:
                data[at] = dice.randrange(256)
            elif kind == 2:
                at &= ~3
                data[at : at + 4] = struct.pack("<I", dice.choice(INTERESTING))
            elif kind == 3:
                at &= ~3
                (word,) = struct.unpack("<I", data[at : at + 4].ljust(4, b"\0"))
                data[at : at + 4] = struct.pack("<I", (word + dice.choice((-4, -1, 1, 4, 8))) & 0xFFFFFFFF)
            else:
                source, length = dice.randrange(table), dice.randrange(1, 24)
                data[at : at + length] = data[source : source + length]
            # A stretch at the end must not change the length.
            data[len(raw) :] = b""
            data.extend(raw[len(data) :])
        yield bytes(data)


@pytest.mark.parametrize(
    "name", ["add", "branch", "counter", "external_partly", "several_outputs", "split_cuda", "split_inline"]
)
def test_a_mutated_program_reads_or_is_refused(name: str) -> None:
    """OP3, OP4: never another exception, never slow."""
    raw = programs.load(name).path.read_bytes()
    outcomes = {"read": 0, "refused": 0}
    for number, data in enumerate(mutations(raw, 1500, seed=len(name))):
        began = time.perf_counter()
        try:
            pte.read(data)
        except ProgramError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
        assert time.perf_counter() - began < 1, f"mutation {number} took too long"
    # Both ways out are real: the changes are neither all fatal nor all harmless.
    assert min(outcomes.values()) > 50, outcomes


def test_a_mutated_data_file_reads_or_is_refused() -> None:
    """OP3, OP4"""
    raw = programs.load("external_weights").data[0].read_bytes()
    # The table alone: what follows is weights, where every change is harmless.
    outcomes = {"read": 0, "refused": 0}
    head, rest = raw[:512], raw[512:]
    for data in mutations(head, 3000, seed=1):
        try:
            pte.read_data(data + rest)
            outcomes["read"] += 1
        except ProgramError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50, outcomes


def test_a_long_name_does_not_flood_messages_or_time() -> None:
    """OP3: a name of a megabyte stands in front of every value's messages."""
    made = Made()
    for _ in range(5000):
        made.int(1)
    made.list("TensorList", [0])
    raw = made.finish(made.plan(name="n" * 1_000_000))
    began = time.perf_counter()
    with pytest.raises(ProgramError) as caught:
        pte.read(raw)
    assert time.perf_counter() - began < 2
    assert len(str(caught.value)) < 500
