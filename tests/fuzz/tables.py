"""Where every field of a FlatBuffers file lies, so that a mutation can name what it changes.

The schemas are those of ExecuTorch 1.5.1 (``schema/program.fbs``, ``flat_tensor.fbs``, XNNPACK's
``schema.fbs``), as far as a reader follows them. A type is a scalar's struct format, a table's name,
``*Union``, ``str``, or one of these in a list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Slot", "slots"]

Type = Any

SCHEMA: dict[str, list[tuple[str, Type]]] = {
    "Program": [
        ("version", "I"),
        ("execution_plan", ["ExecutionPlan"]),
        ("constant_buffer", ["Buffer"]),
        ("backend_delegate_data", ["InlineData"]),
        ("segments", ["DataSegment"]),
        ("constant_segment", "SubsegmentOffsets"),
        ("mutable_data_segments", ["SubsegmentOffsets"]),
        ("named_data", ["NamedData"]),
    ],
    "ExecutionPlan": [
        ("name", "str"),
        ("container_meta_type", "ContainerMetadata"),
        ("values", ["EValue"]),
        ("inputs", ["i"]),
        ("outputs", ["i"]),
        ("chains", ["Chain"]),
        ("operators", ["Operator"]),
        ("delegates", ["BackendDelegate"]),
        ("non_const_buffer_sizes", ["q"]),
        ("non_const_buffer_device", ["NonConstBufferDevice"]),
    ],
    "ContainerMetadata": [("encoded_inp_str", "str"), ("encoded_out_str", "str")],
    "EValue": [("val_type", "B"), ("val", "*KernelTypes")],
    "Null": [],
    "Int": [("int_val", "q")],
    "Bool": [("bool_val", "B")],
    "Double": [("double_val", "d")],
    "String": [("string_val", "str")],
    "IntList": [("items", ["q"])],
    "DoubleList": [("items", ["d"])],
    "BoolList": [("items", ["B"])],
    "TensorList": [("items", ["i"])],
    "OptionalTensorList": [("items", ["i"])],
    "Tensor": [
        ("scalar_type", "b"),
        ("storage_offset", "i"),
        ("sizes", ["i"]),
        ("dim_order", ["B"]),
        ("requires_grad", "B"),
        ("data_buffer_idx", "I"),
        ("allocation_info", "AllocationDetails"),
        ("layout", "b"),
        ("shape_dynamism", "b"),
        ("extra_tensor_info", "ExtraTensorInfo"),
    ],
    "AllocationDetails": [("memory_id", "I"), ("memory_offset_low", "I"), ("memory_offset_high", "I")],
    "ExtraTensorInfo": [
        ("mutable_data_segments_idx", "Q"),
        ("fully_qualified_name", "str"),
        ("location", "b"),
        ("device_type", "b"),
        ("device_index", "b"),
    ],
    "Chain": [("inputs", ["i"]), ("outputs", ["i"]), ("instructions", ["Instruction"])],
    "Instruction": [("instr_args_type", "B"), ("instr_args", "*InstructionArguments")],
    "KernelCall": [("op_index", "i"), ("args", ["i"])],
    "DelegateCall": [("delegate_index", "i"), ("args", ["i"])],
    "MoveCall": [("move_from", "i"), ("move_to", "i")],
    "JumpFalseCall": [("cond_value_index", "i"), ("destination_instruction", "i")],
    "FreeCall": [("value_index", "i")],
    "Operator": [("name", "str"), ("overload", "str")],
    "BackendDelegate": [
        ("id", "str"),
        ("processed", "DataReference"),
        ("compile_specs", ["CompileSpec"]),
    ],
    "DataReference": [("location", "b"), ("index", "I")],
    "CompileSpec": [("key", "str"), ("value", ["B"])],
    "NonConstBufferDevice": [("buffer_idx", "i"), ("device_type", "b"), ("device_index", "b")],
    "Buffer": [("storage", ["bytes"])],
    "InlineData": [("data", ["bytes"])],
    "DataSegment": [("offset", "Q"), ("size", "Q")],
    "SubsegmentOffsets": [("segment_index", "I"), ("offsets", ["Q"])],
    "NamedData": [("key", "str"), ("segment_index", "I"), ("tensor_layout", "TensorLayout")],
    "FlatTensor": [("version", "I"), ("segments", ["DataSegment"]), ("named_data", ["NamedData"])],
    "TensorLayout": [("scalar_type", "b"), ("sizes", ["i"]), ("dim_order", ["B"])],
    # ---- XNNPACK
    "XNNGraph": [
        ("version", "str"),
        ("xnodes", ["XNode"]),
        ("xvalues", ["XValue"]),
        ("num_externs", "I"),
        ("input_ids", ["I"]),
        ("output_ids", ["I"]),
        ("constant_buffer", ["Buffer"]),
        ("mem_buffer_sizes", ["I"]),
        ("constant_data", ["ConstantDataOffset"]),
    ],
    "ConstantDataOffset": [("offset", "Q"), ("size", "Q"), ("named_key", "str")],
    "XValue": [("xvalue_union_type", "B"), ("xvalue_union", "*XValueUnion")],
    "XNNTensorValue": [
        ("datatype", "h"),
        ("num_dims", "I"),
        ("dims", ["I"]),
        ("constant_buffer_idx", "I"),
        ("external_id", "I"),
        ("flags", "I"),
        ("id_out", "I"),
    ],
    "XNNQuantizedTensorValue": [
        ("tensor_value", "XNNTensorValue"),
        ("quant_params_type", "B"),
        ("quant_params", "*XNNQuantParams"),
    ],
    "PerChannelQuant": [
        ("scale", ["f"]),
        ("channel_dim", "i"),
        ("scale_buffer_idx", "I"),
        ("num_scales", "I"),
    ],
    "PerTensorQuant": [("scale", "f"), ("zero_point", "i")],
    "PerTokenDynamicQuant": [("num_nonbatch_dims", "i")],
    "PerChannelGroupQuant": [
        ("scale", ["f"]),
        ("channel_dim", "i"),
        ("group_size", "i"),
        ("scale_bf16", ["H"]),
        ("scale_buffer_idx", "I"),
        ("num_scales", "I"),
    ],
    "XNode": [
        ("xnode_union_type", "B"),
        ("xnode_union", "*XNodeUnion"),
        ("debug_handle", "I"),
        ("output_min_max", "OutputMinMax"),
    ],
    "OutputMinMax": [("output_min", "f"), ("output_max", "f")],
    "Node1x1": [("input_id", "I"), ("output_id", "I"), ("flags", "I")],
    "Node2x1": [("input1_id", "I"), ("input2_id", "I"), ("output_id", "I"), ("flags", "I")],
    "FullyConnected": [
        ("input1_id", "I"),
        ("filter_id", "I"),
        ("bias_id", "I"),
        ("output_id", "I"),
        ("flags", "I"),
    ],
    "StaticTranspose": [
        ("num_dims", "I"),
        ("perm", ["I"]),
        ("input_id", "I"),
        ("output_id", "I"),
        ("flags", "I"),
    ],
    "StaticReshape": [
        ("num_dims", "I"),
        ("new_shape", ["I"]),
        ("input_id", "I"),
        ("output_id", "I"),
        ("flags", "I"),
    ],
    "StaticSlice": [
        ("num_dims", "I"),
        ("offsets", ["I"]),
        ("sizes", ["I"]),
        ("input_id", "I"),
        ("output_id", "I"),
        ("flags", "I"),
    ],
    "StaticConstantPad": [
        ("pre_paddings", ["I"]),
        ("post_paddings", ["I"]),
        ("padding_value", "f"),
        ("input_id", "I"),
        ("output_id", "I"),
        ("flags", "I"),
    ],
    # Their fields are all unsigned ints; how many is all that matters here.
    "Conv": [(f"field{i}", "I") for i in range(20)],
    "Pooling": [(f"field{i}", "I") for i in range(13)],
    "Cat": [(f"field{i}", "I") for i in range(8)],
    "Other": [(f"field{i}", "I") for i in range(5)],
}

_XNODES = {1: "Node2x1", 2: "FullyConnected", 5: "StaticTranspose", 7: "Conv", 8: "Node2x1"}
_XNODES |= {10: "StaticConstantPad", 11: "Pooling", 12: "Node2x1", 13: "Conv", 14: "Pooling"}
_XNODES |= {15: "Node2x1", 16: "Node2x1", 20: "StaticReshape", 26: "Node2x1", 31: "Node2x1"}
_XNODES |= {32: "Cat", 33: "Cat", 34: "Cat", 35: "StaticSlice", 37: "Node2x1", 38: "Cat", 39: "Conv"}
_XNODES |= dict.fromkeys((3, 4, 6, 17, 18, 19, 22, 23, 24, 27, 28, 30, *range(40, 48)), "Node1x1")

UNIONS: dict[str, dict[int, str]] = {
    "*KernelTypes": dict(
        enumerate(
            [
                "Null",
                "Int",
                "Bool",
                "Double",
                "Tensor",
                "String",
                "IntList",
                "DoubleList",
                "BoolList",
                "TensorList",
                "OptionalTensorList",
            ],
            start=1,
        )
    ),
    "*InstructionArguments": dict(
        enumerate(["KernelCall", "DelegateCall", "MoveCall", "JumpFalseCall", "FreeCall"], start=1)
    ),
    "*XValueUnion": {1: "XNNTensorValue", 2: "XNNQuantizedTensorValue"},
    "*XNNQuantParams": {
        1: "PerChannelQuant",
        2: "PerTensorQuant",
        3: "PerTokenDynamicQuant",
        4: "PerChannelGroupQuant",
    },
    "*XNodeUnion": _XNODES,
}


@dataclass(frozen=True)
class Slot:
    """A place in a file. ``role``: ``scalar``, ``offset``, ``count`` (of a vector), ``vtable``, ``soffset``."""

    path: str
    at: int
    format: str
    role: str

    def read(self, data: bytes | bytearray) -> Any:
        return struct.unpack_from("<" + self.format, data, self.at)[0]

    def write(self, data: bytearray, value: Any) -> None:
        if self.format not in "fd":
            value &= (1 << 8 * struct.calcsize(self.format)) - 1
            struct.pack_into("<" + self.format.upper(), data, self.at, value)
        else:
            struct.pack_into("<" + self.format, data, self.at, value)


def slots(data: bytes, root: str, base: int = 0) -> list[Slot]:
    """Every place in the tables at ``base``, whose root table is of type ``root``. The file is sound."""
    found: list[Slot] = []

    def u32(at: int) -> int:
        return int(struct.unpack_from("<I", data, at)[0])

    def table(at: int, name: str, path: str) -> None:
        vtable = at - struct.unpack_from("<i", data, at)[0]
        size = struct.unpack_from("<H", data, vtable)[0]
        found.append(Slot(path + ".soffset", at, "i", "soffset"))
        found.append(Slot(path + ".vtable", vtable, "H", "vtable"))

        def place(index: int) -> int:
            entry = vtable + 4 + 2 * index
            if 4 + 2 * index + 2 > size:
                return 0
            offset = struct.unpack_from("<H", data, entry)[0]
            return at + offset if offset else 0

        for index, (field, kind) in enumerate(SCHEMA[name]):
            where = place(index)
            if not where:
                continue
            found.append(Slot(f"{path}.{field}.vtable", vtable + 4 + 2 * index, "H", "vtable"))
            label = f"{path}.{field}"
            if isinstance(kind, str) and kind.startswith("*"):
                tag = data[place(index - 1)] if place(index - 1) else 0
                found.append(Slot(label, where, "I", "offset"))
                inner = UNIONS[kind].get(tag, "Other" if kind == "*XNodeUnion" else "")
                if inner:
                    table(where + u32(where), inner, f"{label}<{inner}>")
            elif isinstance(kind, list) or kind == "str":
                found.append(Slot(label, where, "I", "offset"))
                vector(where + u32(where), kind[0] if isinstance(kind, list) else "bytes", label)
            elif kind in SCHEMA:
                found.append(Slot(label, where, "I", "offset"))
                table(where + u32(where), kind, label)
            else:
                found.append(Slot(label, where, kind, "scalar"))

    def vector(at: int, kind: str, path: str) -> None:
        found.append(Slot(path + ".count", at, "I", "count"))
        if kind == "bytes":
            return
        for i in range(u32(at)):
            if kind in SCHEMA:
                where = at + 4 + 4 * i
                found.append(Slot(f"{path}[{i}]", where, "I", "offset"))
                table(where + u32(where), kind, f"{path}[{i}]")
            else:
                found.append(Slot(f"{path}[{i}]", at + 4 + struct.calcsize(kind) * i, kind, "scalar"))

    found.append(Slot("root", base, "I", "offset"))
    table(base + u32(base), root, root)
    return found


def payloads(data: bytes, places: list[Slot]) -> Iterator[tuple[int, int]]:
    """Offset and size of each XNNPACK payload in a program with segments."""
    (segments,) = struct.unpack_from("<Q", data, 24) if data[8:12] == b"eh00" else (0,)
    by_path = {s.path: s for s in places}

    def number(path: str) -> int:
        return int(by_path[path].read(data)) if path in by_path else 0  # a default is not stored

    for i in range(number("Program.segments.count")):
        start = segments + number(f"Program.segments[{i}].offset")
        if data[start + 4 : start + 8] == b"XH00":
            yield start, number(f"Program.segments[{i}].size")
