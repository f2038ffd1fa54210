"""Mutated programs and data files, by seed: the same seed gives the same bytes, everywhere.

``case(seed, index)`` makes one. Each is one sound file of the test programs with one to four mutations of
one kind; the kinds are named in `KINDS`.
"""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import programs
from tests.fuzz.kernels import kernel_program, operators
from tests.fuzz.tables import Slot, payloads, slots

__all__ = ["KINDS", "Case", "case", "indices"]

BIG = 80_000  # bytes; larger programs show nothing that smaller ones do not
EDGES = [0, 1, 2, 3, 7, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 1]
EDGES += [2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8, 2**62, 2**61 + 1]


@dataclass(frozen=True)
class Case:
    """One mutated program with its data files; ``name`` says how it was made."""

    name: str
    program: bytes
    data: tuple[bytes, ...]


@dataclass(frozen=True)
class Seed:
    name: str
    program: bytes
    data: tuple[bytes, ...]

    @functools.cached_property
    def slots(self) -> list[Slot]:
        return slots(self.program, "Program")

    @functools.cached_property
    def payload_slots(self) -> list[Slot]:
        out = []
        for start, _ in payloads(self.program, self.slots):
            (tables,) = struct.unpack_from("<I", self.program, start + 10)
            out += slots(self.program, "XNNGraph", start + tables)
            # The payload's header: where its tables and its constants lie.
            out += [
                Slot(f"XNNHeader.{name}", start + at, format, "scalar")
                for name, at, format in (
                    ("header_length", 8, "H"),
                    ("flatbuffer_offset", 10, "I"),
                    ("flatbuffer_size", 14, "I"),
                    ("constant_data_offset", 18, "I"),
                    ("constant_data_size", 22, "Q"),
                )
            ]
        return out


@functools.cache
def seeds() -> tuple[Seed, ...]:
    """The sound files that mutations start from."""
    out = []
    for name in programs.names():
        program = programs.load(name)
        data = program.path.read_bytes()
        if len(data) <= BIG:
            out.append(Seed(name, data, tuple(path.read_bytes() for path in program.data)))
    extra = Path(__file__).with_name("seeds")
    for path in sorted(extra.glob("*.pte")):
        out.append(Seed(path.stem, path.read_bytes(), ()))
    return tuple(out)


def near(rng: random.Random, slot: Slot, data: bytes) -> int:
    """A value that is likely to be wrong in an interesting way."""
    old = slot.read(data) if slot.format not in "fd" else 0
    choice = rng.random()
    if choice < 0.35:
        return rng.randrange(0, 48)
    if choice < 0.55:
        return old + rng.choice([-8, -4, -2, -1, 1, 2, 4, 8, 16, 128])
    if choice < 0.65:
        return -rng.randrange(1, 300)
    return rng.choice(EDGES) + rng.choice([0, 0, 0, -1, 1])


def truncate(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """Cut at a boundary: of a field, a segment, the header, or anywhere."""
    edges = [s.at for s in seed.slots] + [4, 8, 12, 16, 24, 32, 40, len(data) - 1]
    at = min(max(0, rng.choice(edges) + rng.choice([0, 0, -1, 1, 4])), len(data))
    del data[at:]
    return f"cut at {at}"


def bits(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """Flip single bits, mostly in the tables."""
    end = max((s.at for s in seed.slots), default=len(data) - 8) + 8
    flipped = []
    for _ in range(rng.randrange(1, 9)):
        at = rng.randrange(min(end, len(data)) if rng.random() < 0.8 else len(data))
        bit = rng.randrange(8)
        data[at] ^= 1 << bit
        flipped.append(f"{at}.{bit}")
    return "bits " + " ".join(flipped)


def offsets(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """Let an offset or a vtable point elsewhere: at another's target, into its middle, behind the end."""
    pointers = [s for s in seed.slots if s.role == "offset"]
    slot = rng.choice(pointers)
    roll = rng.random()
    if roll < 0.5:
        other = rng.choice(pointers)
        target = other.at + other.read(data) + rng.choice([0, 0, 0, 4, -4, 1])
        slot.write(data, target - slot.at)
        return f"{slot.path} -> {other.path}"
    if roll < 0.7:
        slot.write(data, near(rng, slot, data))
        return f"{slot.path} = {slot.read(data)}"
    slot = rng.choice([s for s in seed.slots if s.role in ("vtable", "soffset")])
    slot.write(data, near(rng, slot, data))
    return f"{slot.path} = {slot.read(data)}"


def counts(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """Lengths of vectors and sizes, near the powers of two where sums and products overflow."""
    words = ("size", "offset", "sizes", "segment")
    pool = [
        s for s in seed.slots if s.role == "count" or (s.role == "scalar" and any(w in s.path for w in words))
    ]
    slot = rng.choice(pool)
    slot.write(data, rng.choice(EDGES) + rng.choice([0, 0, -1, 1]))
    return f"{slot.path} = {slot.read(data)}"


def kinds(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """A value, an argument or an instruction of another kind."""
    words = (
        "val_type",
        "instr_args_type",
        ".args[",
        "op_index",
        "delegate_index",
        "move_",
        "cond_",
        ".items[",
    )
    pool = [s for s in seed.slots if s.role == "scalar" and any(w in s.path for w in words)]
    slot = rng.choice(pool)
    if "_type" in slot.path:
        slot.write(data, rng.randrange(0, 13))
    elif rng.random() < 0.8:
        slot.write(data, rng.randrange(0, 40))
    else:
        slot.write(data, near(rng, slot, data))
    return f"{slot.path} = {slot.read(data)}"


def fields(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """Any scalar of the tables, by name."""
    slot = rng.choice([s for s in seed.slots if s.role == "scalar"])
    return _set(rng, slot, data)


def missing(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """A field that its table does not have."""
    slot = rng.choice([s for s in seed.slots if s.role == "vtable"])
    slot.write(data, 0)
    return f"{slot.path} is missing"


def _set(rng: random.Random, slot: Slot, data: bytearray) -> str:
    if slot.format in "fd":
        slot.write(data, rng.choice([0.0, -0.0, 1e30, -1e30, float("inf"), float("nan"), 0.5, 1e-40]))
    else:
        slot.write(data, near(rng, slot, data))
    return f"{slot.path} = {slot.read(data)}"


def instructions(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """What instructions do: operators, arguments, jump targets, and the values behind them."""
    words = (
        ".chains[",
        "int_val",
        "bool_val",
        "memory_",
        "shape_dynamism",
        "dim_order",
        "scalar_type",
        ".inputs[",
    )
    words += (".outputs[", "data_buffer_idx", ".sizes[")
    slot = rng.choice([s for s in seed.slots if s.role == "scalar" and any(w in s.path for w in words)])
    return _set(rng, slot, data)


def splice(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """Copy, drop or double a stretch of bytes; take one from another program."""
    length = rng.choice([1, 2, 4, 8, 16, 64])
    at = rng.randrange(max(1, len(data) - length))
    roll = rng.random()
    if roll < 0.4:
        source = rng.choice(seeds()).program
        start = rng.randrange(max(1, len(source) - length))
        data[at : at + length] = source[start : start + length]
        return f"{length} bytes from elsewhere at {at}"
    if roll < 0.6:
        del data[at : at + length]
        return f"{length} bytes dropped at {at}"
    if roll < 0.8:
        data[at:at] = data[at : at + length]
        return f"{length} bytes doubled at {at}"
    data[at : at + length] = bytes([rng.choice([0, 0xFF, 0x7F, 0x80])]) * min(length, len(data) - at)
    return f"{length} bytes filled at {at}"


def payload(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """The delegate's own tables, inside its payload."""
    slot = rng.choice(seed.payload_slots)
    if slot.role == "offset" and rng.random() < 0.5:
        other = rng.choice([s for s in seed.payload_slots if s.role == "offset"])
        slot.write(data, other.at + other.read(data) - slot.at)
        return f"{slot.path} -> {other.path}"
    if slot.role == "scalar":
        return _set(rng, slot, data)
    slot.write(data, near(rng, slot, data))
    return f"{slot.path} = {slot.read(data)}"


def data_file(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """A ``.ptd`` file: its header, its tables, its bytes."""
    places = slots(bytes(data), "FlatTensor", 0)
    header = [
        Slot(f"FlatTensorHeader[{at}]", at, format, "scalar")
        for at, format in ((8, "I"), (12, "I"), (16, "Q"), (24, "Q"), (32, "Q"), (40, "Q"))
    ]
    roll = rng.random()
    if roll < 0.15:
        at = min(rng.choice([s.at for s in places + header]) + rng.choice([0, -1, 1]), len(data))
        del data[at:]
        return f"cut at {at}"
    if roll < 0.35:
        end = max(s.at for s in places) + 8
        flipped = []
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(min(end, len(data)))
            data[at] ^= 1 << rng.randrange(8)
            flipped.append(str(at))
        return "bits at " + " ".join(flipped)
    if roll < 0.55:
        pointers = [s for s in places if s.role == "offset"]
        slot, other = rng.choice(pointers), rng.choice(pointers)
        slot.write(data, other.at + other.read(data) - slot.at + rng.choice([0, 0, 4, -4]))
        return f"{slot.path} -> {other.path}"
    slot = rng.choice(places + 2 * header)
    slot.write(data, near(rng, slot, data))
    return f"{slot.path} = {slot.read(data)}"


def kernel(rng: random.Random, seed: Seed, data: bytearray) -> str:
    """One call of any kernel, its arguments of the right kinds and of any values; not a mutation."""
    name = rng.choice(sorted(operators()))
    data[:], what = kernel_program(rng, name)
    return f"{name} {what}"


Mutation = Callable[[random.Random, Seed, bytearray], str]
KINDS: dict[str, Mutation] = {
    f.__name__: f
    for f in (
        truncate,
        bits,
        offsets,
        counts,
        kinds,
        fields,
        missing,
        instructions,
        splice,
        payload,
        data_file,
        kernel,
    )
}


def indices(count: int, only: str | None = None, start: int = 0) -> list[int]:
    """``count`` indices of cases, of all kinds in turn or of one."""
    step = 1 if only is None else len(KINDS)
    first = 0 if only is None else list(KINDS).index(only)
    return [first + step * i for i in range(start, start + count)]


def case(seed: int, index: int) -> Case:
    """The mutated program number ``index`` of a run; kinds take turns."""
    rng = random.Random(f"{seed}/{index}")
    kind = list(KINDS)[index % len(KINDS)]
    pool = seeds()
    if kind == "payload":
        pool = tuple(s for s in pool if s.payload_slots)
    if kind == "data_file":
        pool = tuple(s for s in pool if s.data)
    chosen = rng.choice(pool)
    mutation = KINDS[kind]
    if kind == "data_file":
        files = [bytearray(d) for d in chosen.data]
        which = rng.randrange(len(files))
        what = mutation(rng, chosen, files[which])
        return Case(f"{index} {kind} {chosen.name}: {what}", chosen.program, tuple(map(bytes, files)))
    data = bytearray(chosen.program)
    if kind == "kernel":
        return Case(f"{index} {kind}: {kernel(rng, chosen, data)}", bytes(data), ())
    done = []
    # Several small changes get past checks that one alone does not.
    rounds = 1 if kind in ("truncate", "bits", "splice") or rng.random() < 0.6 else rng.randrange(2, 5)
    for _ in range(rounds):
        try:
            done.append(mutation(rng, chosen, data))
        except (struct.error, IndexError) as error:  # an earlier change took the place away
            done.append(f"({error})")
    return Case(f"{index} {kind} {chosen.name}: {'; '.join(done)}", bytes(data), chosen.data)
