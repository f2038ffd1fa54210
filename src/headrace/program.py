"""Load a program, run its methods.

    program = headrace.load("model.pte")
    (y,) = program["forward"](x)

A method takes anything that is a NumPy array, a `Buffer`, or speaks DLPack or the array interface. It returns
NumPy arrays for what lies on the host (a `Buffer` where NumPy has no such dtype, as for bfloat16) and `Buffer`s
for what lies on a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .delegate import provide
from .device import Device, Partition
from .device import device as open_device
from .engine import core, library_folders
from .errors import DelegateUnavailable, OptionError, ProgramError
from .graph import Graph
from .stats import Counts, Stats

__all__ = ["Counts", "Island", "Memory", "MemoryUse", "Method", "Program", "Stats", "ValueInfo", "load"]

OptionValue = bool | int | str


@dataclass(frozen=True)
class ValueInfo:
    """What a method takes or returns at one position.

    ``kind`` is ``"tensor"``, ``"int"``, ``"float"``, ``"bool"``, ``"string"`` or ``"none"``. For a tensor
    ``shape`` holds the sizes, upper bounds where they are dynamic, and ``bounds`` a (least, greatest) pair
    for each dimension; the file does not record the least, so it is 0. ``planned`` says that the method
    owns memory for the value: the caller's array is copied, not aliased.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    device: str = "cpu"
    planned: bool = False


@dataclass(frozen=True)
class Island:
    """One delegate call: its position in the instruction list, the delegate's name, the payload's size in bytes."""

    instruction: int
    delegate: str
    payload_nbytes: int


@dataclass(frozen=True)
class MemoryUse:
    """One item of a program's memory: ``what`` is ``"program"``, ``"data"``, ``"planned"`` (one entry for
    each planned buffer and instance), ``"outputs"`` or ``"graphs"`` (what they hold for inputs and outputs)."""

    what: str
    method: str
    instance: int | None
    device: str
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """What a program holds, item by item. Delegates' own memory is not known to the engine.

    ``current_nbytes`` and ``peak_nbytes`` are what the program's device has in use now, and had at most since it
    was opened, by whatever uses it: 0 on the cpu.
    """

    uses: tuple[MemoryUse, ...]
    current_nbytes: int = 0
    peak_nbytes: int = 0

    def nbytes(self, device: str | None = None) -> int:
        """Bytes in all, or on one device."""
        return sum(u.nbytes for u in self.uses if device is None or u.device == device)


def _value_info(raw: Mapping[str, Any]) -> ValueInfo:
    if raw["kind"] != "tensor":
        return ValueInfo(raw["kind"], raw["name"])
    shape = raw["shape"]
    bounds = tuple((0 if raw["dynamic"] else n, n) for n in shape)
    return ValueInfo("tensor", raw["name"], raw["dtype"], shape, bounds, raw["device"], raw["planned"])


class Method:
    """One entry point of a program. Get it from `Program`; it keeps what it needs alive.

    Calls from any thread are safe. They run one after the other, since they share the method's planned
    memory, unless the program was loaded with more ``instances``.
    """

    __slots__ = ("_call", "_native")

    def __init__(self, native: core.Method) -> None:
        self._native = native
        self._call = native.call

    def __call__(
        self, *inputs: Any, stream: Any = None, out: Sequence[Any] | None = None, strict: bool = False
    ) -> tuple[Any, ...]:
        """Run the method once and return its outputs as a tuple.

        It waits for the device before it returns if an input was staged from the host, or an output is staged to
        the host, or no stream was given or selected. Otherwise it returns with the work in flight, in order on
        that stream. That is the whole rule, for every delegate.

        Args:
            inputs: one argument for each of `inputs`. Arrays are borrowed until the call returns: read in
                place where the plan leaves them unplanned and their layout is the program's, else copied.
            stream: the stream of this call, as if `caller_stream` had selected it: a `Stream`, anything with
                ``__cuda_stream__``, or an int handle on the program's device. Without it the thread's selection
                is the stream, else that of the program's lane, else the thread's own per-thread stream.
            out: one array (or None) for each output to write to, of the output's dtype and shape.
            strict: raise InputError where an input would have to be staged to another device.

        Returns:
            One item for each output. Arrays stay right after later calls; their memory goes back to the
            method when they are dropped.

        Raises:
            InputError: an argument does not fit; nothing was run.
            DelegateError: a delegate or kernel failed.
            DeviceError: the stream or an array is of another device, or a device operation failed.
            ProgramError: the program was closed.
        """
        return self._call(inputs, stream, out, strict)

    def capture(self, *examples: Any, stream: Any = None, keep: int = 4) -> Graph:
        """Run the method once on ``examples`` and capture it as one graph over all its islands.

        Works as the very first call. It is one logical step: `Graph.outputs` are the examples' results, and what the
        method keeps from call to call has advanced by one step. It waits for the device. The method is captured on a
        stream of its own, in the partition of the stream of the call.

        Args:
            examples: as for a call; their shapes are what the graph is for. It copies them.
            stream: as for a call; without it, and without a selection, the graph is in no partition.
            keep: for how many shapes and partitions, the most recently used ones, the `Graph` keeps its captures.

        Raises:
            CaptureError: the method cannot be captured, ``step`` is ``"check"`` and it was not run: a kernel or delegate
                on the CPU, host memory in its middle, a branch, a delegate that says no, one that allocates at every
                run. Or ``step`` failed: everything is as it was before, and graphs are off for this method, whose
                calls and replays run without them from now on.
            InputError, DeviceError, ProgramError: as a call.
            DelegateError, DeviceError: what had failed before on the stream, or in the method; nothing was captured.
        """
        if not isinstance(keep, int) or isinstance(keep, bool) or not 1 <= keep <= 1024:
            raise OptionError(
                f"keep: expected a count between 1 and 1024, got {keep!r}; pass an int in that range"
            )
        return Graph(*core.capture(self._native, examples, stream, keep))

    @property
    def name(self) -> str:
        """The method's name, such as ``"forward"``."""
        return self._native.name

    @property
    def inputs(self) -> tuple[ValueInfo, ...]:
        """What the method takes, by position."""
        return tuple(_value_info(v) for v in self._native.inputs())

    @property
    def outputs(self) -> tuple[ValueInfo, ...]:
        """What the method returns, by position."""
        return tuple(_value_info(v) for v in self._native.outputs())

    @property
    def islands(self) -> tuple[Island, ...]:
        """The method's delegate calls, in the order of its instructions."""
        return tuple(Island(index, name, nbytes) for index, name, nbytes, _ in self._native.islands())

    @property
    def stats(self) -> Stats:
        """Counts over the calls so far, by all threads."""
        calls, last, total = self._native.stats()
        return Stats(calls, Counts(**last), Counts(**total))

    @property
    def device(self) -> Device:
        """The `Device` that the program is bound to."""
        return self._native.device

    def __repr__(self) -> str:
        return f"<headrace.Method {self.name!r}: {len(self.inputs)} inputs, {len(self.outputs)} outputs>"


class Program(Mapping[str, Method]):
    """A loaded program: a mapping from method names to `Method`, and a context manager that closes it."""

    def __init__(self, native: core.Program) -> None:
        self._native = native
        self._methods = {name: Method(native.method(name)) for name in native.method_names()}

    @property
    def device(self) -> Device:
        """The `Device` that the program is bound to."""
        return next(iter(self._methods.values())).device

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods, in the order of the file."""
        return tuple(self._methods)

    def __getitem__(self, name: str) -> Method:
        try:
            return self._methods[name]
        except KeyError:
            raise KeyError(
                f"expected one of the methods {', '.join(self._methods)}, got {name!r}; call one of these"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    def memory(self) -> Memory:
        """What the program holds now, in bytes, by what and where."""
        uses = tuple(
            MemoryUse(what, method, None if instance < 0 else instance, device, nbytes)
            for what, method, instance, device, nbytes in self._native.memory()
        )
        if not self._methods or self.device.name == "cpu":
            return Memory(uses)
        counts = self.device.memory()
        return Memory(uses, counts["current_nbytes"], counts["peak_nbytes"])

    def close(self) -> None:
        """Wait for running calls and give the program's memory back. Later calls raise ProgramError.

        Outputs that are still held stay right. Closing twice is fine.
        """
        self._native.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<headrace.Program: {', '.join(self._methods)}>"


def _check_text(text: Any, error: type[ProgramError | OptionError], where: str, do: str) -> None:
    """A lone surrogate, as in an undecodable file name, is no text that could be passed on. ``do``: what to do about it."""
    if isinstance(text, str):
        try:
            os.fsencode(text) if error is ProgramError else text.encode()
        except UnicodeEncodeError:
            raise error(f"{where}: expected text that can be encoded, got {text!r}; {do}") from None


# What to do about options that are none.
_OPTIONS = "pass {'delegate': {'option': value}}"

Source = str | os.PathLike[str] | bytes | bytearray | memoryview
_SOURCES = (str, os.PathLike, bytes, bytearray, memoryview)
# What to do about an argument that is neither.
_PATH_OR_BYTES = "pass the file's path, or what file.read() gives"


def load(
    source: Source,
    *,
    data: Source | Sequence[Source] = (),
    device: Device | str | None = None,
    lane: Partition | None = None,
    options: Mapping[str, Mapping[str, OptionValue]] | None = None,
    instances: int = 1,
    allow_native_code: bool = True,
    max_steps: int = 1_000_000_000,
) -> Program:
    """Load an ExecuTorch program (``.pte``) and all its methods.

    The file is read into memory of our own: it may be replaced, truncated or deleted afterwards. Its
    structure is checked before anything in it is used.

    Args:
        source: a path, or the program's bytes (copied).
        data: data files (``.ptd``), as paths or bytes, that hold weights which the program names.
        device: where the program's device memory lies and its delegates run: a `Device`, or a name as `device`
            takes it. None is ``cpu`` for a program without device memory, else ``cuda:0``; never ``sim``. A program
            that was planned for another device of the same kind, or for a GPU, runs on any device.
        lane: a `Partition` of the device, in which calls run for which no stream is given or selected. They wait for
            the device, as they would on the per-thread stream. Its device is the program's, if ``device`` is None.
        options: for each delegate, by name, options that it understands.
        instances: copies of the planned memory and of the delegates' state, for calls that should overlap.
            Weights in the files are shared.
        allow_native_code: False refuses programs with delegates whose payload is machine code. Loading
            such a program runs its code in this process: load it only if you trust where it comes from.

        max_steps: instructions that one call of a method with loops may take before it is stopped with
            DelegateError.

    Raises:
        ProgramError: not a program, malformed, of an unknown version, or its data files are missing or of
            another program.
        DelegateUnavailable: a delegate or kernel that the program needs is not there.
        DelegateError: a delegate refused its payload.
        OptionError: an option is unknown or out of range, or there is a lane and no work for a device.
        OutOfDeviceMemory: there is no room for the planned memory.
        DeviceError: there is no such device, or the program needs one and there is none; the lane is of another
            device.
    """
    if not isinstance(source, _SOURCES):
        raise ProgramError(f"load: expected a path or bytes, got {type(source).__name__}; {_PATH_OR_BYTES}")
    try:
        files = [data] if isinstance(data, _SOURCES) else list(data)
    except TypeError:
        raise ProgramError(
            f"data: expected paths or bytes, got {type(data).__name__}; {_PATH_OR_BYTES}"
        ) from None
    for file in files:
        if not isinstance(file, _SOURCES):
            raise ProgramError(f"data: expected paths or bytes, got {type(file).__name__}; {_PATH_OR_BYTES}")
    for path in (source, *files):
        if isinstance(path, str | os.PathLike):
            _check_text(os.fspath(path), ProgramError, "path", "rename the file, or pass its bytes")
    if not isinstance(instances, int) or isinstance(instances, bool):
        raise OptionError(
            f"instances: expected an int, got {type(instances).__name__}; pass 1, or how many calls should overlap"
        )
    if not 1 <= instances <= 1024:
        raise OptionError(
            f"instances: expected a count between 1 and 1024, got {instances}; pass 1, or how many calls should overlap"
        )
    if not isinstance(allow_native_code, bool):
        raise OptionError(
            f"allow_native_code: expected a bool, got {type(allow_native_code).__name__}; pass True or False"
        )
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options: expected a mapping, got {type(options).__name__}; {_OPTIONS}")
    if not isinstance(max_steps, int) or isinstance(max_steps, bool) or not 0 < max_steps < 2**63:
        raise OptionError(
            f"max_steps: expected an int from 1 to 2**63 - 1, got {max_steps!r}; leave it out, or pass one of these"
        )
    for delegate, entries in (options or {}).items():
        if not isinstance(delegate, str):
            raise OptionError(f"options: expected the names of delegates, got {delegate!r}; {_OPTIONS}")
        if not isinstance(entries, Mapping):
            raise OptionError(
                f"options of {delegate!r}: expected a mapping, got {type(entries).__name__}; {_OPTIONS}"
            )
        for key, value in entries.items():
            if not isinstance(key, str):
                raise OptionError(f"options of {delegate!r}: expected names, got {key!r}; {_OPTIONS}")
            for text in (delegate, key, value):
                _check_text(text, OptionError, f"options of {delegate!r}", "remove what is no Unicode text")
            if not isinstance(value, bool | int | str):
                raise OptionError(
                    f"options of {delegate!r}: expected a bool, int or str for {key!r}, got {type(value).__name__}; "
                    "convert it"
                )
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise OptionError(
                    f"options of {delegate!r}: expected an int of 32 bits for {key!r}, got {value}; "
                    "pass a smaller one, or its digits as a str"
                )
    where = open_device(device) if isinstance(device, str) else device
    if where is not None and not isinstance(where, Device):
        raise OptionError(
            f"device: expected a Device or a name such as 'sim', got {type(where).__name__}; pass 'cuda:0', 'cpu' or 'sim'"
        )
    if lane is not None:
        if not isinstance(lane, Partition):
            raise OptionError(
                f"lane: expected a Partition, as Device.partition() gives it, got {type(lane).__name__}; "
                "pass device.partition(sms=N)"
            )
        where = lane.device if where is None else where
    arguments = (
        source,
        files,
        instances,
        allow_native_code,
        max_steps,
        {k: dict(v) for k, v in (options or {}).items()},
        where,
        lane,
    )
    # Where a program's own libraries find what they need beside ours.
    core.set_library_folders(library_folders())
    try:
        return Program(core.Program.load(*arguments))
    except DelegateUnavailable as missing:
        if missing.delegate in core.delegates() or not provide(missing.delegate):
            raise
    return Program(core.Program.load(*arguments))
