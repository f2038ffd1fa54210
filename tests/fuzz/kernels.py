"""Programs of one kernel call each, of the right kinds and of any values, built field by field.

Mutations of exported programs reach the kernels that those call; these reach every kernel of the engine.
"""

from __future__ import annotations

import functools
import random
import re
import struct
from pathlib import Path

import flatbuffers

__all__ = ["Plan", "kernel_program", "operators"]

# Codes and widths of the dtypes that a program may hold.
DTYPES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 15: 2, 27: 2, 28: 4, 29: 8}
KIND = {"none": 1, "int": 2, "bool": 3, "double": 4, "tensor": 5, "string": 6, "ints": 7, "doubles": 8}
KIND |= {"bools": 9, "tensors": 10, "optionals": 11}


@functools.cache
def operators() -> dict[str, str]:
    """Every kernel and its signature, from ``operators.def``."""
    text = (Path(__file__).parents[2] / "native/program/operators.def").read_text()
    return dict(re.findall(r'OPERATOR\("(.+?)", "(.*?)"\)', text))


class Plan:
    """A program under construction: values, instructions, and what they need. ``build()`` gives its bytes."""

    def __init__(self) -> None:
        self.values: list[tuple] = []
        self.constants: list[bytes] = [b""]
        self.planned = 0  # bytes of buffer 1
        self.operators: list[tuple[str, str]] = []
        self.instructions: list[tuple] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def value(self, kind: str, *body: object) -> int:
        self.values.append((kind, *body))
        return len(self.values) - 1

    def tensor(
        self,
        dtype: int,
        sizes: list[int],
        data: bytes | None = None,
        dynamism: int = 0,
        order: list[int] | None = None,
        planned: bool = True,
    ) -> int:
        """A tensor: a constant where ``data`` is given, else planned, else without memory of its own."""
        nbytes = DTYPES.get(dtype, 1)
        for n in sizes:
            nbytes *= n
        index, offset = 0, None
        if data is not None:
            self.constants.append((data + bytes(nbytes))[:nbytes])
            index = len(self.constants) - 1
        elif planned:
            offset = (self.planned + 15) // 16 * 16
            self.planned = offset + nbytes
        return self.value("tensor", dtype, sizes, order or list(range(len(sizes))), dynamism, index, offset)

    def call(self, kernel: str, args: list[int]) -> None:
        name, _, overload = kernel.partition("::")[2].partition(".")
        entry = (kernel.partition("::")[0] + "::" + name, overload)
        if entry not in self.operators:
            self.operators.append(entry)
        self.instructions.append(("kernel", self.operators.index(entry), args))

    def move(self, source: int, destination: int) -> None:
        self.instructions.append(("move", source, destination))

    def jump_false(self, condition: int, destination: int) -> None:
        self.instructions.append(("jump", condition, destination))

    def free(self, value: int) -> None:
        self.instructions.append(("free", value))

    # ---- writing

    def build(self) -> bytes:
        b = flatbuffers.Builder(4096)
        b.ForceDefaults(True)  # so that a mutation finds every field

        def vector(items: list, format: str) -> int:
            width = struct.calcsize(format)
            b.StartVector(width, len(items), width)
            put = {"i": b.PrependInt32, "q": b.PrependInt64, "d": b.PrependFloat64, "B": b.PrependUint8}[
                format
            ]
            for item in reversed(items):
                put(item)
            return b.EndVector()

        def offsets(items: list[int]) -> int:
            b.StartVector(4, len(items), 4)
            for item in reversed(items):
                b.PrependUOffsetTRelative(item)
            return b.EndVector()

        def table(*fields: tuple[int, str, object]) -> int:
            b.StartObject(max((f[0] for f in fields), default=-1) + 1)
            for slot, kind, item in fields:
                getattr(b, f"Prepend{kind}Slot")(slot, item, 0)
            return b.EndObject()

        def value(entry: tuple) -> int:
            kind, *body = entry
            if kind == "none":
                inner = table()
            elif kind in ("int", "bool", "double"):
                write = {"int": "Int64", "bool": "Bool", "double": "Float64"}[kind]
                inner = table((0, write, body[0]))
            elif kind == "string":
                inner = table((0, "UOffsetTRelative", b.CreateString(body[0])))
            elif kind == "tensor":
                dtype, sizes, order, dynamism, index, offset = body
                s, o = vector(sizes, "i"), vector(order, "B")
                fields = [(2, "UOffsetTRelative", s), (3, "UOffsetTRelative", o), (0, "Int8", dtype)]
                fields += [(5, "Uint32", index), (8, "Int8", dynamism)]
                if offset is not None:
                    where = table(
                        (0, "Uint32", 1), (1, "Uint32", offset & 0xFFFFFFFF), (2, "Uint32", offset >> 32)
                    )
                    fields.append((6, "UOffsetTRelative", where))
                inner = table(*fields)
            else:
                format = {"ints": "q", "doubles": "d", "bools": "B", "tensors": "i", "optionals": "i"}[kind]
                inner = table((0, "UOffsetTRelative", vector(body[0], format)))
            return table((0, "Uint8", KIND[kind]), (1, "UOffsetTRelative", inner))

        def instruction(entry: tuple) -> int:
            kind, *body = entry
            if kind == "kernel":
                tag, inner = 1, table((1, "UOffsetTRelative", vector(body[1], "i")), (0, "Int32", body[0]))
            elif kind == "free":
                tag, inner = 5, table((0, "Int32", body[0]))
            else:
                tag = {"move": 3, "jump": 4}[kind]
                inner = table((0, "Int32", body[0]), (1, "Int32", body[1]))
            return table((0, "Uint8", tag), (1, "UOffsetTRelative", inner))

        values = offsets([value(v) for v in self.values])
        steps = offsets([instruction(i) for i in self.instructions])
        chain = table((2, "UOffsetTRelative", steps))
        names = []
        for name, overload in self.operators:
            n, o = b.CreateString(name), b.CreateString(overload)
            names.append(table((0, "UOffsetTRelative", n), (1, "UOffsetTRelative", o)))
        plan_fields = [
            (0, "UOffsetTRelative", b.CreateString("forward")),
            (2, "UOffsetTRelative", values),
            (3, "UOffsetTRelative", vector(self.inputs, "i")),
            (4, "UOffsetTRelative", vector(self.outputs, "i")),
            (5, "UOffsetTRelative", offsets([chain])),
            (6, "UOffsetTRelative", offsets(names)),
            (7, "UOffsetTRelative", offsets([])),
            (8, "UOffsetTRelative", vector([0, self.planned], "q")),
            (1, "UOffsetTRelative", table()),
        ]
        plan = table(*plan_fields)
        segment, starts = bytearray(), []
        for data in self.constants:
            starts.append(len(segment))
            segment += data + bytes(-len(data) % 16)
        empty = offsets([])
        where = table((1, "UOffsetTRelative", vector(starts, "q")), (0, "Uint32", 0))
        root = table(
            (1, "UOffsetTRelative", offsets([plan])),
            (2, "UOffsetTRelative", empty),
            (3, "UOffsetTRelative", empty),
            (4, "UOffsetTRelative", offsets([table((1, "Uint64", len(segment)), (0, "Uint64", 0))])),
            (5, "UOffsetTRelative", where),
        )
        b.Finish(root, file_identifier=b"ET12")
        tables = bytes(b.Output())
        # The extended header lies behind the identifier (schema/extended_header.h); what follows moves by it.
        (start,) = struct.unpack_from("<I", tables)
        size = len(tables) + 32
        padding = bytes(-size % 16)
        header = struct.pack("<4sIQQQ", b"eh00", 32, size, size + len(padding), len(segment))
        return struct.pack("<I", start + 32) + tables[4:8] + header + tables[8:] + padding + bytes(segment)


INTS = [0, 0, 1, 1, 2, 3, -1, -1, -2, 4, 5, 7, 16, 100, -100, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63)]
SMALL = [0, 1, 1, 2, 2, 3, 4]
WORDS = ["", "none", "tanh", "trunc", "floor", "mean", "sum", "x" * 300]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e-5, 1e30, -1e30, float("inf"), float("nan")]


def _contents(rng: random.Random, dtype: int, count: int) -> bytes:
    """Elements of a constant: small numbers, or anything."""
    width = DTYPES[dtype]
    count = min(count, 4096)
    if dtype == 11:
        return bytes(rng.randrange(2) for _ in range(count))
    if rng.random() < 0.2 or dtype in (5, 15):
        return rng.randbytes(width * count)
    if dtype in (6, 7):
        return struct.pack(
            f"<{count}{'f' if dtype == 6 else 'd'}", *(rng.uniform(-3, 3) for _ in range(count))
        )
    least = -(1 << 8 * width - 1)
    numbers = [rng.choice([0, 0, 1, 1, 2, 3, -1, -1, 5, 100, -100, least]) for _ in range(count)]
    if rng.random() < 0.3:
        numbers = [n or 1 for n in numbers]
    return b"".join((n & (1 << 8 * width) - 1).to_bytes(width, "little") for n in numbers)


def kernel_program(rng: random.Random, kernel: str) -> tuple[bytes, str]:
    """A program that calls ``kernel`` once, with random arguments of its kinds; and what they are."""
    plan = Plan()
    signature, _, result = operators()[kernel].partition("=")
    # Most calls make sense only when the tensors agree.
    base_dtype = rng.choice([6, 6, 6, 4, 3, 11, 7, 5, 15, 0, 1])
    base_rank = rng.choice([0, 1, 2, 2, 3, 4, 4, 5])
    base = [rng.choice([0, 1, 2, 3, 4, 5, 8]) if rng.random() < 0.9 else 16 for _ in range(base_rank)]

    def shape() -> list[int]:
        roll = rng.random()
        if roll < 0.6:
            return list(base)
        if roll < 0.8:
            return [rng.choice([n, n, 1, n + 1, 0]) for n in base]
        return [rng.choice([0, 1, 2, 3, 4, 8]) for _ in range(rng.choice([0, 1, 2, 3, 4, 5, 6]))]

    def tensor(written: bool) -> int:
        dtype = base_dtype if rng.random() < 0.75 else rng.choice(list(DTYPES))
        sizes = shape()
        order = list(range(len(sizes)))
        if len(sizes) == 4 and rng.random() < 0.15:
            order = [0, 2, 3, 1]
        elif rng.random() < 0.03:
            rng.shuffle(order)
        count = 1
        for n in sizes:
            count *= n
        if written:
            dynamism = rng.choice([0, 1, 1, 1])
            if dynamism and rng.random() < 0.7:
                sizes = [max(n, rng.choice([4, 8, 16])) for n in sizes]
            return plan.tensor(dtype, sizes, None, dynamism, order)
        return plan.tensor(dtype, sizes, _contents(rng, dtype, count), 0, order)

    def integers() -> int:
        length = rng.choice([0, 1, 2, 2, 2, 3, 4, base_rank, base_rank])
        pool = SMALL if rng.random() < 0.7 else INTS
        if rng.random() < 0.3:
            numbers = shape()
        elif rng.random() < 0.3:
            numbers = list(range(base_rank))
            rng.shuffle(numbers)
        else:
            numbers = [rng.choice(pool) for _ in range(length)]
        return plan.value("ints", [plan.value("int", n) for n in numbers])

    def argument(letter: str) -> int:
        match letter:
            case "T" | "w":
                return tensor(letter == "w")
            case "i":
                return plan.value("int", rng.choice(SMALL if rng.random() < 0.6 else INTS))
            case "f":
                return plan.value("double", rng.choice(FLOATS))
            case "b":
                return plan.value("bool", rng.random() < 0.5)
            case "s":
                kind = rng.choice(["int", "double", "bool"])
                pick = {"int": INTS, "double": FLOATS, "bool": [False, True]}[kind]
                return plan.value(kind, rng.choice(pick))
            case "d":
                return plan.value("int", rng.choice([base_dtype, base_dtype, *DTYPES]))
            case "m":
                return plan.value("int", rng.randrange(4))
            case "S":
                return plan.value("string", rng.choice(WORDS))
            case "I":
                return integers()
            case "D":
                return plan.value("doubles", [rng.choice(FLOATS) for _ in range(rng.randrange(4))])
            case "B":
                return plan.value("bools", [rng.randrange(2) for _ in range(rng.randrange(5))])
            case "L" | "W":
                return plan.value("tensors", [tensor(letter == "W") for _ in range(rng.randrange(4))])
            case _:
                items = [-1 if rng.random() < 0.3 else tensor(False) for _ in range(rng.randrange(4))]
                return plan.value("optionals", items)

    args = []
    for letter in signature.split():
        if letter.endswith("?") and rng.random() < 0.4:
            args.append(plan.value("none"))
        else:
            args.append(argument(letter[0]))
    written = [a for a, letter in zip(args, signature.split(), strict=True) if letter == "w"]
    if result == "w":
        args.append(written[0])
    elif result == "W":
        lists = [a for a, letter in zip(args, signature.split(), strict=True) if letter == "W"]
        args.append(plan.value("tensors", written) if not lists else lists[0])
    elif result:
        args.append(plan.value("int", 0))
    plan.call(kernel, args)
    plan.outputs = written
    return plan.build(), str([plan.values[a] for a in args])
