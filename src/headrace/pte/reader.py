"""From the table to the facts: programs and data files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .facts import (
    DTYPES,
    INPUTS_SPEC,
    PAYLOAD_HEAD_NBYTES,
    Chain,
    DataEntry,
    DataFile,
    Dtype,
    ExternalTensor,
    Instruction,
    Island,
    MethodInfo,
    NamedData,
    Operator,
    PlannedBuffer,
    ProgramFile,
    ValueInfo,
)
from .table import File, Table

__all__ = ["DataReader", "ProgramReader"]

_DEVICE_TYPES = ("cpu", "cuda")
_DYNAMISM = ("static", "bounded", "unbounded")
# runtime/core/exec_aten/util/tensor_dimension_limit.h
_MAX_RANK = 16


class _Tensors(Table):
    """What programs and data files say about tensors in the same way."""

    def dtype(self, code: int, where: str) -> Dtype:
        if code not in DTYPES:
            raise self.file.error(f"{where}, scalar type", f"one of {sorted(DTYPES)}", str(code))
        return DTYPES[code]

    def layout(
        self, holder: Any, dtype: Dtype, dynamism: str, where: str
    ) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
        """Shape, dimension order and size in bytes of a tensor."""
        shape = self.numbers(holder.SizesAsNumpy(), f"{where}, sizes")
        dim_order = self.numbers(holder.DimOrderAsNumpy(), f"{where}, dim_order")
        if len(shape) > _MAX_RANK:
            raise self.file.error(f"{where}, rank", f"at most {_MAX_RANK}", str(len(shape)))
        if sorted(dim_order) != list(range(len(shape))):
            raise self.file.error(
                f"{where}, dim_order", f"each of {len(shape)} dimensions once", str(list(dim_order))
            )
        if dynamism == "unbounded":
            return shape, dim_order, None
        nbytes = dtype.itemsize
        for size in shape:
            if size < 0:
                raise self.file.error(f"{where}, sizes", "0 or greater", str(list(shape)))
            nbytes *= size
        if nbytes >= 1 << 63:
            raise self.file.error(f"{where}, sizes", "less than 2^63 bytes", str(list(shape)))
        return shape, dim_order, nbytes


class ProgramReader(_Tensors):
    """Reads one ``.pte``."""

    def __init__(self, file: File, schema: Any) -> None:
        super().__init__(file, schema)
        # Of each constant and each mutable value: the bytes from its start to the end of its segment.
        self.constants: list[int] = []
        self.mutables: list[list[int]] = []
        self.inline: tuple[int, Any] = (0, None)
        # Lists whose members are still to be looked at: value, members, the kinds that these may have.
        self.lists: list[tuple[int, tuple[int, ...], list[str]]] = []

    def program(self) -> ProgramFile:
        located = self.locate(b"ET12", b"eh00", "<QQQ", "program (.pte)")
        root = self.schema.Program.GetRootAs(self.table, 0)
        self.read_segments(root, located)
        self.constants = self.constant_sizes(root)
        self.mutables = [
            self.subsegments(entry, f"mutable data {i}")
            for i, entry in self.tables(
                root.MutableDataSegmentsLength(), root.MutableDataSegments, "mutable data"
            )
        ]
        self.inline = root.BackendDelegateDataLength(), root.BackendDelegateData
        named = []
        for i, entry in self.tables(root.NamedDataLength(), root.NamedData, "named data"):
            segment = self.index(
                entry.SegmentIndex(), len(self.segments), "a segment", f"named data {i}, segment"
            )
            key = self.text(entry.Key(), f"named data {i}, key")
            named.append(NamedData(key, segment, self.segments[segment].nbytes))
        methods = tuple(
            self.method(plan, i)
            for i, plan in self.tables(root.ExecutionPlanLength(), root.ExecutionPlan, "method")
        )
        names = [method.name for method in methods]
        if not methods or len(set(names)) != len(names):
            raise self.file.error("methods", "one or more, of different names", str(names))
        return ProgramFile(
            source=self.file.name,
            version=root.Version(),
            nbytes=self.file.nbytes,
            table_nbytes=len(self.table),
            methods=methods,
            segments=self.segments,
            named_data=tuple(named),
            external=self.external(methods),
        )

    def external(self, methods: Sequence[MethodInfo]) -> tuple[ExternalTensor, ...]:
        found: dict[str, ExternalTensor] = {}
        for method in methods:
            for value in method.values:
                if value.location != "external":
                    continue
                where = f"{method.name[:80]}, value {value.index}"
                if not value.name or value.dtype is None or value.nbytes is None:
                    raise self.file.error(
                        where, "a named, bounded tensor, for its data is external", str(value)
                    )
                tensor = ExternalTensor(value.name, value.dtype, value.shape, value.nbytes)
                if found.setdefault(value.name, tensor) != tensor:
                    raise self.file.error(where, f"{found[value.name]}, as elsewhere", str(tensor))
        return tuple(found.values())

    def constant_sizes(self, root: Any) -> list[int]:
        """How many bytes there are from the start of each constant; the first entry is reserved."""
        segment = root.ConstantSegment()
        if segment is not None:
            found = self.subsegments(segment, "constants")
            if found:
                if root.ConstantBufferLength():
                    raise self.file.error("constants", "a segment or inline buffers", "both")
                return found
        return [
            buffer.StorageLength()
            for _, buffer in self.tables(root.ConstantBufferLength(), root.ConstantBuffer, "constant")
        ]

    def subsegments(self, entry: Any, where: str) -> list[int]:
        offsets = self.numbers(entry.OffsetsAsNumpy(), f"{where}, offsets")
        if not offsets:
            return []
        nbytes = self.segments[
            self.index(entry.SegmentIndex(), len(self.segments), "a segment", f"{where}, segment")
        ].nbytes
        for offset in offsets:
            if offset > nbytes:
                raise self.file.error(
                    f"{where}, offset", f"at most {nbytes}, the segment's size", str(offset)
                )
        return [nbytes - offset for offset in offsets]

    # -------------------- a method

    def method(self, plan: Any, number: int) -> MethodInfo:
        full_name = self.text(plan.Name(), f"method {number}, name")
        # In front of every message below, most of which are never shown.
        name = full_name if len(full_name) <= 80 else f"{full_name[:80]}…"
        buffers = self.buffers(plan, name)
        count = plan.ValuesLength()
        values = tuple(
            self.value(entry, i, count, buffers, f"{name}, value {i}")
            for i, entry in self.tables(count, plan.Values, f"{name}, values")
        )
        self.check_lists(values, name)
        inputs = self.indices(plan.InputsAsNumpy(), count, "a value", f"{name}, inputs")
        outputs = self.indices(plan.OutputsAsNumpy(), count, "a value", f"{name}, outputs")
        operators = []
        for i, entry in self.tables(plan.OperatorsLength(), plan.Operators, f"{name}, operators"):
            operator = self.text(entry.Name(), f"{name}, operator {i}, name")
            # As the engine's registry spells it: the overload may be absent or empty.
            overload = self.text(entry.Overload() or b"", f"{name}, operator {i}, overload")
            operators.append(f"{operator}.{overload}" if overload else operator)
        delegates = [
            self.delegate(entry, f"{name}, delegate {i}")
            for i, entry in self.tables(plan.DelegatesLength(), plan.Delegates, f"{name}, delegates")
        ]

        calls = [0] * len(operators)
        islands: list[Island] = []
        # The values that hold something when the walk comes to an instruction.
        held = set(inputs)
        held.update(v.index for v in values if v.location in ("constant", "mutable", "external"))
        chains = []
        for c, chain in self.tables(plan.ChainsLength(), plan.Chains, f"{name}, chains"):
            length = chain.InstructionsLength()
            steps = []
            for i, entry in self.tables(length, chain.Instructions, f"{name}, chain {c}, instructions"):
                step, used = self.instruction(
                    entry, i, length, values, operators, delegates, f"{name}, chain {c}, instruction {i}"
                )
                if step.kind == "kernel":
                    calls[used] += 1
                elif step.kind == "delegate":
                    islands.append(
                        self.island(
                            delegates[used],
                            len(islands),
                            c,
                            step,
                            values,
                            held,
                            f"{name}, island {len(islands)}",
                        )
                    )
                held.update(step.args)
                steps.append(step)
            chains.append(
                Chain(
                    self.indices(chain.InputsAsNumpy(), count, "a value", f"{name}, chain {c}, inputs"),
                    self.indices(chain.OutputsAsNumpy(), count, "a value", f"{name}, chain {c}, outputs"),
                    tuple(steps),
                )
            )
        return MethodInfo(
            name=full_name,
            values=values,
            inputs=tuple(values[i] for i in inputs),
            outputs=tuple(values[i] for i in outputs),
            chains=tuple(chains),
            islands=tuple(islands),
            operators=tuple(map(Operator, operators, calls)),
            buffers=buffers,
        )

    def buffers(self, plan: Any, name: str) -> tuple[PlannedBuffer, ...]:
        sizes = self.numbers(plan.NonConstBufferSizesAsNumpy(), f"{name}, planned buffers")
        devices = ["cpu"] * len(sizes)
        for i, entry in self.tables(
            plan.NonConstBufferDeviceLength(), plan.NonConstBufferDevice, f"{name}, buffer devices"
        ):
            where = f"{name}, buffer device {i}"
            which = self.index(entry.BufferIdx(), len(sizes), "a buffer", where)
            devices[which] = self.device(entry, where)
        for i, nbytes in enumerate(sizes):
            if nbytes < 0:
                raise self.file.error(f"{name}, planned buffer {i}", "a size of 0 or greater", str(nbytes))
        return tuple(PlannedBuffer(i, sizes[i], devices[i]) for i in range(1, len(sizes)))

    def device(self, holder: Any, where: str) -> str:
        kind = self.name(_DEVICE_TYPES, holder.DeviceType(), f"{where}, device type")
        index = holder.DeviceIndex()
        if index < 0:
            raise self.file.error(f"{where}, device index", "0 or greater", str(index))
        return kind if kind == "cpu" else f"{kind}:{index}"

    def value(
        self, entry: Any, index: int, count: int, buffers: Sequence[PlannedBuffer], where: str
    ) -> ValueInfo:
        types = self.schema.KernelTypes
        kind = entry.ValType()
        union = entry.Val()
        if union is None:
            raise self.file.error(where, "a value", "none")

        def as_(name: str) -> Any:
            found = getattr(self.schema, name)()
            found.Init(union.Bytes, union.Pos)
            return found

        if kind == types.Tensor:
            return self.tensor(as_("Tensor"), index, buffers, where)
        if kind == types.Null:
            return ValueInfo(index, "none")
        if kind == types.Int:
            return ValueInfo(index, "int", as_("Int").IntVal())
        if kind == types.Bool:
            return ValueInfo(index, "bool", bool(as_("Bool").BoolVal()))
        if kind == types.Double:
            return ValueInfo(index, "float", as_("Double").DoubleVal())
        if kind == types.String:
            return ValueInfo(index, "string", self.text(as_("String").StringVal(), where))
        if kind == types.DoubleList:
            return ValueInfo(index, "list", self.numbers(as_("DoubleList").ItemsAsNumpy(), where))
        if kind == types.BoolList:
            return ValueInfo(index, "list", self.numbers(as_("BoolList").ItemsAsNumpy(), where))
        # The runtime keeps these as indices, so that a list sees what later happens to its members.
        for name, least, members in (
            ("IntList", 0, "int"),
            ("TensorList", 0, "tensor"),
            ("OptionalTensorList", -1, "tensor or none"),
        ):
            if kind == getattr(types, name):
                items = self.indices(as_(name).ItemsAsNumpy(), count, "a value", where, least)
                self.lists.append((index, items, members.split(" or ")))
                return ValueInfo(index, "list", items)
        raise self.file.error(
            f"{where}, type", f"a code from {types.Null} to {types.OptionalTensorList}", str(kind)
        )

    def check_lists(self, values: Sequence[ValueInfo], name: str) -> None:
        """Members may stand behind the list that refers to them: they are looked at when all are there."""
        for index, items, members in self.lists:
            for item in items:
                if item >= 0 and values[item].kind not in members:
                    raise self.file.error(
                        f"{name}, value {index}, a list",
                        f"members of kind {' or '.join(members)}",
                        f"value {item} of kind {values[item].kind}",
                    )
        self.lists.clear()

    def tensor(self, tensor: Any, index: int, buffers: Sequence[PlannedBuffer], where: str) -> ValueInfo:
        dtype = self.dtype(tensor.ScalarType(), where)
        dynamism = self.name(_DYNAMISM, tensor.ShapeDynamism(), f"{where}, dynamism")
        shape, dim_order, nbytes = self.layout(tensor, dtype, dynamism, where)
        name, device, external, segment = None, "cpu", False, 0
        extra = tensor.ExtraTensorInfo()
        if extra is not None:
            raw = extra.FullyQualifiedName()
            name = self.text(raw, f"{where}, name") if raw else None
            device = self.device(extra, where)
            external = (
                self.name(("segment", "external"), extra.Location(), f"{where}, location") == "external"
            )
            segment = extra.MutableDataSegmentsIdx()

        planned = None
        allocation = tensor.AllocationInfo()
        if allocation is not None:
            planned = (
                allocation.MemoryId(),
                allocation.MemoryOffsetHigh() << 32 | allocation.MemoryOffsetLow(),
            )
            if not 1 <= planned[0] <= len(buffers):
                raise self.file.error(f"{where}, memory id", f"from 1 to {len(buffers)}", str(planned[0]))
            room = buffers[planned[0] - 1].nbytes
            if planned[1] + (nbytes or 0) > room:
                raise self.file.error(
                    f"{where}, memory",
                    f"within the buffer's {room} bytes",
                    f"{nbytes} bytes from {planned[1]}",
                )
        data = tensor.DataBufferIdx()
        if external:
            location = "external"
        elif data:
            location = "mutable" if planned else "constant"
            known = self.constants
            if planned:
                self.index(segment, len(self.mutables), "mutable data", f"{where}, mutable data")
                known = self.mutables[segment]
            room = known[self.index(data, len(known), "data", f"{where}, data")]
            if nbytes is None or nbytes > room:
                raise self.file.error(
                    f"{where}, data", f"at most {room} bytes, the segment ends there", f"{nbytes}"
                )
        else:
            location = "planned" if planned else "unplanned"
        return ValueInfo(
            index,
            "tensor",
            None,
            name,
            dtype.name,
            shape,
            dynamism,
            dim_order,
            nbytes,
            device,
            location,
            planned,
        )

    # -------------------- what a method runs

    def delegate(self, entry: Any, where: str) -> tuple[str, tuple[tuple[str, bytes], ...], int, int, bytes]:
        """Name, compile specs, and the payload's size, offset in the file and head."""
        name = self.text(entry.Id(), f"{where}, name")
        specs = []
        for i, spec in self.tables(entry.CompileSpecsLength(), entry.CompileSpecs, f"{where}, compile specs"):
            key = self.text(spec.Key(), f"{where}, compile spec {i}, key")
            value = spec.ValueAsNumpy()
            if isinstance(value, int):
                specs.append((key, b""))
            else:
                self.take(len(value), f"{where}, compile spec {i}, value")
                specs.append((key, value.tobytes()))
        processed = entry.Processed()
        if processed is None:
            raise self.file.error(f"{where}, payload", "a reference", "none")
        place = self.name(("inline", "segment"), processed.Location(), f"{where}, payload, location")
        if place == "segment":
            segment = self.segments[
                self.index(processed.Index(), len(self.segments), "a segment", f"{where}, payload")
            ]
            offset, nbytes = segment.offset, segment.nbytes
        else:
            count, get = self.inline
            data = get(self.index(processed.Index(), count, "inline data", f"{where}, payload"))
            nbytes = data.DataLength()
            # No accessor tells where a vector lies; 4 is the table's only field.
            offset = data._tab.Vector(data._tab.Offset(4)) if nbytes else 0
            if offset + nbytes > len(self.table):
                raise self.file.error(
                    f"{where}, payload", "an end within the table", f"{nbytes} bytes from {offset}"
                )
        return name, tuple(specs), nbytes, offset, self.file.read(offset, min(nbytes, PAYLOAD_HEAD_NBYTES))

    def instruction(
        self,
        entry: Any,
        index: int,
        length: int,
        values: Sequence[ValueInfo],
        operators: Sequence[str],
        delegates: Sequence[tuple[str, Any, int, int, bytes]],
        where: str,
    ) -> tuple[Instruction, int]:
        """The instruction, and the index of the operator or delegate it calls (else -1)."""
        kinds = self.schema.InstructionArguments
        kind = entry.InstrArgsType()
        union = entry.InstrArgs()
        if union is None:
            raise self.file.error(where, "an instruction", "none")

        def as_(name: str) -> Any:
            found = getattr(self.schema, name)()
            found.Init(union.Bytes, union.Pos)
            return found

        count = len(values)
        if kind == kinds.KernelCall:
            call = as_("KernelCall")
            used = self.index(call.OpIndex(), len(operators), "an operator", f"{where}, operator")
            args = self.indices(call.ArgsAsNumpy(), count, "a value", f"{where}, arguments")
            return Instruction(index, "kernel", operators[used], args), used
        if kind == kinds.DelegateCall:
            call = as_("DelegateCall")
            used = self.index(call.DelegateIndex(), len(delegates), "a delegate", f"{where}, delegate")
            args = self.indices(call.ArgsAsNumpy(), count, "a value", f"{where}, arguments")
            return Instruction(index, "delegate", delegates[used][0], args), used
        if kind == kinds.MoveCall:
            call = as_("MoveCall")
            args = tuple(self.index(v, count, "a value", where) for v in (call.MoveFrom(), call.MoveTo()))
            return Instruction(index, "move", None, args), -1
        if kind == kinds.JumpFalseCall:
            call = as_("JumpFalseCall")
            condition = self.index(call.CondValueIndex(), count, "a value", f"{where}, condition")
            if values[condition].kind not in ("bool", "tensor"):
                raise self.file.error(f"{where}, condition", "a bool or a tensor", values[condition].kind)
            # One past the last instruction ends the chain.
            destination = self.index(
                call.DestinationInstruction(), length + 1, "an instruction", f"{where}, destination"
            )
            return Instruction(index, "jump", None, (condition,), destination), -1
        if kind == kinds.FreeCall:
            freed = self.index(as_("FreeCall").ValueIndex(), count, "a value", where)
            if values[freed].kind != "tensor":
                raise self.file.error(where, "a tensor to free", values[freed].kind)
            return Instruction(index, "free", None, (freed,)), -1
        raise self.file.error(
            f"{where}, type", f"a code from {kinds.KernelCall} to {kinds.FreeCall}", str(kind)
        )

    def island(
        self,
        delegate: tuple[str, tuple[tuple[str, bytes], ...], int, int, bytes],
        index: int,
        chain: int,
        step: Instruction,
        values: Sequence[ValueInfo],
        held: set[int],
        where: str,
    ) -> Island:
        name, specs, nbytes, offset, head = delegate
        inputs = _derived_inputs([values[arg] for arg in step.args], held)
        for key, value in specs:
            if key == INPUTS_SPEC:
                if not value.isdigit() or len(value) > 9 or int(value) > len(step.args):
                    raise self.file.error(
                        f"{where}, compile spec {INPUTS_SPEC}",
                        f"a number up to {len(step.args)}, the island's arguments, in decimal ASCII",
                        f"{value[:40]!r}",
                        "correct the exporter that wrote it",
                    )
                inputs = int(value)
        return Island(
            index=index,
            chain=chain,
            instruction=step.index,
            delegate=name,
            specs=specs,
            args=step.args,
            inputs=inputs,
            outputs=None if inputs is None else len(step.args) - inputs,
            payload_nbytes=nbytes,
            payload_offset=offset,
            payload_head=head,
        )


class DataReader(_Tensors):
    """Reads one ``.ptd``."""

    def data(self) -> DataFile:
        located = self.locate(b"FT01", b"FH01", "<QQQQ", "data file (.ptd)")
        if located is None:
            raise self.file.error("bytes 8 to 11", "b'FH01', a header", "none")
        root = self.schema.FlatTensor.GetRootAs(self.table, 0)
        self.read_segments(root, located)
        entries: dict[str, DataEntry] = {}
        for i, entry in self.tables(root.NamedDataLength(), root.NamedData, "entry"):
            key = self.text(entry.Key(), f"entry {i}, key")
            where = f"entry '{key[:80]}'"
            if key in entries:
                raise self.file.error(where, "each key once", "it twice")
            segment = self.segments[
                self.index(entry.SegmentIndex(), len(self.segments), "a segment", f"{where}, segment")
            ]
            layout = entry.TensorLayout()
            name: str | None = None
            shape: tuple[int, ...] = ()
            dim_order: tuple[int, ...] = ()
            if layout is not None:
                dtype = self.dtype(layout.ScalarType(), where)
                name = dtype.name
                shape, dim_order, nbytes = self.layout(layout, dtype, "static", where)
                if nbytes != segment.nbytes:
                    raise self.file.error(
                        where, f"{nbytes} bytes for {name}{list(shape)}", f"a segment of {segment.nbytes}"
                    )
            entries[key] = DataEntry(key, segment.offset, segment.nbytes, name, shape, dim_order)
        return DataFile(self.file.name, root.Version(), self.file.nbytes, tuple(entries.values()))


def _derived_inputs(args: Sequence[ValueInfo], held: set[int]) -> int | None:
    """How many of an island's arguments are inputs: those that held something before it.

    None where that does not settle it: unless inputs stand before all others, only tensors are left to be
    written, at least one, and no value comes twice (one that is written in place would be both).
    """
    known = [arg.index in held for arg in args]
    inputs = sum(known)
    settled = (
        inputs < len(args)
        and all(known[:inputs])
        and all(arg.kind == "tensor" for arg in args[inputs:])
        and len({arg.index for arg in args}) == len(args)
    )
    return inputs if settled else None
