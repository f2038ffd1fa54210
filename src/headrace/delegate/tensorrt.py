"""``TensorRTBackend``: TensorRT's engines, on the stream of the call.

    headrace.load("m.pte", device="cuda:0", options={"TensorRTBackend": {"weight_streaming_budget": "1000000000"}})

The payload is `headrace.pte.tensorrt`'s, which Torch-TensorRT writes too. What of TensorRT is used is in `nvinfer`.

An execution context is set up by the host: profile, shapes, addresses. It is set up anew only where one of them changes,
and then the work of the call before is waited for first. A graph that was captured keeps its context, for TensorRT
forbids to set up a context whose work is recorded; the next call makes another. So there is one context for the
calls of an island, and one for each graph.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ..device import Buffer, Event, Partition, Stream, caller_stream, current_stream
from ..device import device as open_device
from ..errors import CaptureError, DelegateError, NotSupported, ProgramError
from ..pte.tensorrt import DTYPES, read
from . import Context, Delegate
from .bindings import EXPORT_AGAIN, REPORT, Profiles, Tensor, check_platform, is_dense, tensors_of
from .nvinfer import ExecutionContext, RtxEngine, load_engine
from .tensorrt_options import BUDGET, OPTIONS, RuntimeCacheFile, options_of, set_budget

__all__ = ["DTYPES", "OPTIONS", "TensorRTBackend"]

# "The pointer must have at least 256-byte alignment": setTensorAddress() in NvInferRuntime.h. ExecuTorch plans by 16.
_ALIGNMENT = 256


class _Foreign(enum.Enum):
    """A green context that headrace did not make."""

    CONTEXT = enum.auto()


@dataclass
class _Setup:
    """What a context was set up with. ``host`` are the values of inputs that the engine reads on the host."""

    profile: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    host: tuple[bytes, ...] = ()
    addresses: tuple[int, ...] = ()
    partition: Partition | _Foreign | None = None


@dataclass
class _Execution:
    """One execution context, what it is set up with, and the memory that it needs beside the call's. Dropped, it waits for
    the work that uses it."""

    context: ExecutionContext
    event: Event  # behind the latest enqueue
    pending: bool = False  # whether the event was recorded and may not have come
    setup: _Setup = field(default_factory=_Setup)
    results: tuple[tuple[int, ...], ...] = ()
    auxiliary: list[Stream] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)
    on_host: dict[str, Any] = field(default_factory=dict)

    def settle(self) -> None:
        """Wait for what was enqueued last. Raises what failed in it."""
        if self.pending:
            self.pending = False
            if not self.event.query():
                self.event.synchronize()

    def __del__(self) -> None:
        # What failed in that work is told by whoever waits for its results.
        with contextlib.suppress(Exception):
            self.settle()


class TensorRTBackend(Delegate):
    """One TensorRT engine. Not thread-safe inside, so its runs take turns.

    Memory of the device is used in place where its address suits TensorRT (a multiple of 256), else through a copy on the
    device. Memory of the host is staged, and the call waits. An engine that reads an input on the host (a shape) makes
    each call wait for that input.
    """

    payload_is_code = True

    def load(self, payload: bytes, context: Context) -> None:
        """Raises ProgramError (payload, bindings), OptionError, DelegateUnavailable (GPU, run time, engine)."""
        blob = read(payload)
        options = options_of(context.options, context.specs)
        check_platform(blob)
        self._device = context.device
        self._lock = threading.Lock()
        self._execution: _Execution | None = None
        self._staged: dict[str, Any] = {}
        self._cache: RuntimeCacheFile | None = None
        with self._device._context():
            self._loaded = load_engine(blob, context.device, options.runtime)
            self._inputs, self._outputs = tensors_of(self._loaded, blob)
            if len(self._inputs) != context.num_inputs:
                raise ProgramError(
                    f"expected {context.num_inputs} inputs, as the program has them, got an engine with "
                    f"{len(self._inputs)}; {EXPORT_AGAIN}"
                )
            set_budget(self._loaded.engine, options.budget)
            self._profiles = Profiles.of(self._loaded.engine, self._inputs)
            if options.cache is not None and self._loaded.kind == "tensorrt_rtx":
                self._cache = RuntimeCacheFile(options.cache, blob, self._loaded.module.__version__)
                weakref.finalize(self, RuntimeCacheFile.save, self._cache)
            # Now, so that a program whose contexts do not fit fails when it is loaded.
            self._execution = self._new_execution()

    def capturable(self) -> bool | str:
        for tensor in (*self._inputs, *self._outputs):
            if tensor.on_host:
                return f"its engine uses '{tensor.name}' on the host, where a replay would not look again"
            if tensor.alias:
                return f"its engine writes '{tensor.name}' over '{tensor.alias}', memory that a capture could not put back"
        return True

    def captured(self) -> Any:
        """The execution context that was recorded: it is the graph's now, and is not set up again."""
        with self._lock:
            execution, self._execution = self._execution, None
        return execution

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Stream) -> None:
        for side, tensors, given in (("input", self._inputs, inputs), ("output", self._outputs, outputs)):
            if len(given) != len(tensors):
                raise DelegateError(f"expected {len(tensors)} {side}s, got {len(given)}; {EXPORT_AGAIN}")
            for i, (tensor, buffer) in enumerate(zip(tensors, given, strict=True)):
                if getattr(buffer, "dtype", None) != tensor.dtype:
                    got = getattr(buffer, "dtype", None) or type(buffer).__name__
                    raise DelegateError(
                        f"{side} {i} '{tensor.name}': expected {tensor.dtype}, as the engine has it, got {got}; {EXPORT_AGAIN}"
                    )
                if not is_dense(buffer.shape, buffer.strides):
                    raise DelegateError(
                        f"{side} {i} '{tensor.name}': expected contiguous memory, got strides "
                        f"{list(buffer.strides)} for {list(buffer.shape)}; export it with the default dimension order"
                    )
        with self._lock, self._device._context():
            if stream.device is self._device:
                self._run(inputs, outputs, stream)
            else:
                self._run_staged(inputs, outputs)

    # -------------------- memory of the host

    def _run_staged(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Through memory of the device, on the stream of the call; complete when it returns."""
        aliased = {t.alias for t in self._outputs}
        for i, tensor in enumerate(self._inputs):
            if tensor.name in aliased:
                raise DelegateError(
                    f"input {i} '{tensor.name}': expected memory of {self._device.name}, for the engine writes over it, "
                    "got memory of the host, where that would be lost; export it with the compile spec "
                    "target_device=cuda:0"
                )
        # Nothing selected: on the thread's own, as elsewhere. Never the legacy one, which would order it with others.
        stream = current_stream()
        if stream is None or stream.device is not self._device:
            stream = self._device.per_thread_stream()
        execution = self._ready()
        with caller_stream(stream):
            given = [self._stage(t, b.shape, stream) for t, b in zip(self._inputs, inputs, strict=True)]
            try:
                for source, target in zip(inputs, given, strict=True):
                    stream.copy(source, target)
                self._set_shapes(execution, given, stream, "call")
                for tensor, buffer, shape in zip(self._outputs, outputs, execution.results, strict=True):
                    _resize(tensor, buffer, shape)
                results = [
                    self._stage(t, b.shape, stream) for t, b in zip(self._outputs, outputs, strict=True)
                ]
                self._run(given, results, stream)
                for source, target in zip(results, outputs, strict=True):
                    stream.copy(source, target)
            finally:
                # The copies use memory that is the engine's again when this returns.
                stream.synchronize()

    def _stage(self, tensor: Tensor, shape: tuple[int, ...], stream: Stream) -> Any:
        """Memory of the device, kept for calls of this shape."""
        kept = self._staged.get(tensor.name)
        if kept is None or kept.shape != shape:
            kept = self._staged[tensor.name] = self._device.empty(shape, tensor.dtype, stream=stream)
        return kept

    # -------------------- memory of the device

    def _run(self, inputs: Sequence[Any], outputs: Sequence[Any], stream: Stream) -> None:
        execution = self._ready()
        stage = self.stage()
        try:
            self._enqueue(execution, inputs, outputs, stream, stage)
        except BaseException:
            if stage != "capture":
                # Copies, or a part of the engine, may be under way, on memory that is about to go.
                with contextlib.suppress(Exception):
                    stream.synchronize()
            raise
        if stage == "warm-up":
            # In the capture that comes nothing may be waited for.
            execution.settle()

    def _enqueue(
        self, execution: _Execution, inputs: Sequence[Any], outputs: Sequence[Any], stream: Stream, stage: str
    ) -> None:
        loaded, context = self._loaded, execution.context
        loaded.log.clear()
        self._set_shapes(execution, inputs, stream, stage)
        before, after = [], []  # copies: (from, to)
        reads, writes = [], []  # what the engine itself touches
        places: dict[str, int] = {}
        for tensor, buffer in zip(self._inputs, inputs, strict=True):
            if tensor.on_host:
                places[tensor.name] = execution.on_host[tensor.name].ctypes.data
                continue
            used = self._aligned(execution, tensor, buffer, stream)
            if used is not buffer:
                before.append((buffer, used))
            reads.append(used)
            places[tensor.name] = used.address
        for tensor, buffer, shape in zip(self._outputs, outputs, execution.results, strict=True):
            _resize(tensor, buffer, shape)
            if tensor.alias:
                places[tensor.name] = places[tensor.alias]
                source = inputs[[t.name for t in self._inputs].index(tensor.alias)]
                used = next(b for b in reads if b.address == places[tensor.alias])
                after += [(used, b) for b in (source, buffer) if b.address != used.address]
                writes.append(used)
            elif tensor.on_host:
                array = execution.on_host.get(tensor.name)
                if array is None or array.shape != shape:
                    execution.settle()
                    array = execution.on_host[tensor.name] = np.empty(shape, tensor.dtype)
                places[tensor.name] = array.ctypes.data
            else:
                used = self._aligned(execution, tensor, buffer, stream)
                if used is not buffer:
                    after.append((used, buffer))
                writes.append(used)
                places[tensor.name] = used.address
        self._set_addresses(execution, places, stage)
        self._set_auxiliary(execution, stream, stage)
        # TensorRT for RTX can be asked.
        ask = getattr(context, "is_stream_capturable", None) if stage == "warm-up" else None
        if ask is not None and not ask(stream.handle):
            raise CaptureError(
                f"expected an engine that can be captured for shapes {self._said(execution)}, got one that cannot"
                f"{loaded.told()}; call the method instead",
                step="warm-up",
            )
        for source, target in before:
            stream.copy(source, target)
        if not context.execute_async_v3(stream.handle):
            raise DelegateError(self._why_not(execution, stream), log=loaded.log.lines())
        stream.declare(reads=reads, writes=writes, name="TensorRT engine")
        for source, target in after:
            stream.copy(source, target, target.nbytes)
        for tensor, buffer in zip(self._outputs, outputs, strict=True):
            if tensor.on_host:
                self._put(execution, tensor, buffer, stream)
        if stage != "capture":
            # Where it fails the stream is drained, by run().
            stream.record(execution.event)
            execution.pending = True

    def _ready(self) -> _Execution:
        """The context of calls; another than the one that a graph took."""
        if self._execution is None:
            self._execution = self._new_execution()
        return self._execution

    def _new_execution(self) -> _Execution:
        loaded = self._loaded
        loaded.log.clear()
        engine = loaded.engine
        if self._cache is not None:
            rtx = cast(RtxEngine, engine)
            context = rtx.create_execution_context(self._cache.config(rtx))
        else:
            context = engine.create_execution_context()
        if context is None:
            raise DelegateError(
                f"expected an execution context, got none{loaded.told()}; if memory is short, load fewer programs, or "
                f"set '{BUDGET}'",
                log=loaded.log.lines(),
            )
        return _Execution(context, self._device.event())

    def _set_shapes(self, execution: _Execution, inputs: Sequence[Any], stream: Stream, stage: str) -> None:
        """Profile and shapes, where they are others than the ones before."""
        setup = execution.setup
        shapes = tuple(tuple(b.shape) for b in inputs)
        host = tuple(
            self._fetch(execution, tensor, buffer, stream)
            for tensor, buffer in zip(self._inputs, inputs, strict=True)
            if tensor.on_host
        )
        if execution.results and (shapes, host) == (setup.shapes, setup.host):
            return
        profile = self._profiles.best(self._inputs, shapes)
        self._change(execution, stage)
        context, told = execution.context, self._loaded.told
        execution.results = ()
        if profile != setup.profile:
            # A new context has profile 0.
            if (setup.profile, profile) != (-1, 0) and not context.set_optimization_profile_async(
                profile, stream.handle
            ):
                raise DelegateError(
                    f"expected optimization profile {profile} to be taken, got no{told()}; {EXPORT_AGAIN}"
                )
            setup.profile = profile
        setup.addresses = ()
        for tensor, shape in zip(self._inputs, shapes, strict=True):
            if not context.set_input_shape(tensor.name, shape):
                raise DelegateError(
                    f"input '{tensor.name}': expected a shape that the engine takes, got {list(shape)}{told()}; call it "
                    "with another"
                )
            if tensor.on_host and not context.set_tensor_address(
                tensor.name, execution.on_host[tensor.name].ctypes.data
            ):
                raise DelegateError(
                    f"input '{tensor.name}': expected its address to be taken, got no{told()}; {REPORT}"
                )
        try:
            open_ = context.infer_shapes()
        except RuntimeError as error:
            raise DelegateError(
                f"expected shapes that the engine can compute with, got {self._said(execution, shapes)}: {error}; call "
                "it with others"
            ) from error
        if open_:
            raise DelegateError(
                f"expected every shape to be known, got none for {', '.join(open_)}{told()}; {EXPORT_AGAIN}"
            )
        results = []
        for tensor in self._outputs:
            shape = tuple(int(n) for n in context.get_tensor_shape(tensor.name))
            if any(n < 0 for n in shape):
                raise DelegateError(
                    f"output '{tensor.name}': expected a shape that follows from the inputs' shapes, got {list(shape)}, "
                    "which depends on their content; leave that to another delegate"
                )
            results.append(shape)
        for tensor, shape in (
            *zip(self._inputs, shapes, strict=True),
            *zip(self._outputs, results, strict=True),
        ):
            if not tensor.on_host:
                strides = tuple(int(n) for n in context.get_tensor_strides(tensor.name))
                if not is_dense(shape, strides):
                    raise DelegateError(
                        f"'{tensor.name}': expected contiguous memory, got an engine with strides {list(strides)} for "
                        f"{list(shape)}; export it with linear formats"
                    )
        setup.shapes, setup.host, execution.results = shapes, host, tuple(results)

    def _set_addresses(self, execution: _Execution, places: Mapping[str, int], stage: str) -> None:
        addresses = tuple(places.values())
        if addresses == execution.setup.addresses:
            return
        self._change(execution, stage)
        execution.setup.addresses = ()
        for name, address in places.items():
            if not execution.context.set_tensor_address(name, address):
                raise DelegateError(
                    f"'{name}': expected its address {address:#x} to be taken, got no{self._loaded.told()}; {REPORT}"
                )
        execution.setup.addresses = addresses

    def _set_auxiliary(self, execution: _Execution, stream: Stream, stage: str) -> None:
        """Streams beside the call's, in its partition: those that TensorRT would make might be in none."""
        count = self._loaded.engine.num_aux_streams
        if not count:
            return
        partition = _partition(stream)
        if execution.auxiliary and execution.setup.partition == partition:
            return
        self._change(execution, stage)
        if partition is _Foreign.CONTEXT:
            # TensorRT makes them there itself, where it was built with CUDA 13 or later.
            execution.auxiliary = [stream]
            execution.context.set_aux_streams([])
        else:
            maker = self._device if partition is None else partition
            execution.auxiliary = [maker.stream() for _ in range(count)]
            execution.context.set_aux_streams([each.handle for each in execution.auxiliary])
        execution.setup.partition = partition

    def _change(self, execution: _Execution, stage: str) -> None:
        """Before a context is set up otherwise: what it was enqueued for is done."""
        if stage == "capture":
            raise CaptureError(
                f"expected the shapes and addresses of the run before the capture, got others; {REPORT}",
                step="record",
            )
        execution.settle()

    def _aligned(self, execution: _Execution, tensor: Tensor, buffer: Buffer, stream: Stream) -> Any:
        """The buffer, or memory of ours where TensorRT does not take its address."""
        if buffer.nbytes and (buffer.address % _ALIGNMENT == 0 or self._device.name == "cpu"):
            return buffer
        kept = execution.scratch.get(tensor.name)
        if kept is None or kept.nbytes < buffer.nbytes:
            execution.settle()
            kept = execution.scratch[tensor.name] = self._device.empty(
                (max(buffer.nbytes, 1),), "uint8", stream=stream
            )
        return kept

    def _fetch(self, execution: _Execution, tensor: Tensor, buffer: Buffer, stream: Stream) -> bytes:
        """The content of an input that the engine reads on the host. Waits."""
        host = open_device("cpu").empty(buffer.shape, buffer.dtype)
        stream.copy(buffer, host)
        stream.synchronize()
        array = host.numpy()
        kept = execution.on_host.get(tensor.name)
        if kept is None or kept.shape != array.shape or kept.tobytes() != array.tobytes():
            execution.settle()
            execution.on_host[tensor.name] = np.array(array)
        content: bytes = array.tobytes()
        return content

    def _put(self, execution: _Execution, tensor: Tensor, buffer: Buffer, stream: Stream) -> None:
        """An output that the engine wrote on the host, behind what is on the stream. Waits."""
        stream.synchronize()
        host = open_device("cpu").to_device(execution.on_host[tensor.name].reshape(buffer.shape))
        stream.copy(host, buffer)
        stream.synchronize()

    def _said(self, execution: _Execution, shapes: Sequence[tuple[int, ...]] = ()) -> str:
        return ", ".join(
            f"{t.name} {list(s)}" for t, s in zip(self._inputs, shapes or execution.setup.shapes, strict=True)
        )

    def _why_not(self, execution: _Execution, stream: Stream) -> str:
        """TensorRT answers yes or no; what it logged may say why, and if not, this is what it mostly is."""
        text = (
            f"expected the engine to be enqueued on {stream!r} for {self._said(execution)}, got no from "
            f"{self._loaded.module.__name__} {self._loaded.module.__version__}{self._loaded.told()}"
        )
        lane = _partition(stream)
        if lane is not None:
            sms = (
                f"a partition of {lane.sm_count} SMs"
                if lane is not _Foreign.CONTEXT
                else "somebody else's green context"
            )
            return (
                f"{text}; the likely cause: the stream is in {sms}, where TensorRT needs a run time of CUDA 13 or newer; "
                "call it outside, or install that"
            )
        return (
            f"{text}; the likely cause: a stream of another device than the engine's, {self._device.name}, or an earlier "
            "failure on the device: read the first error"
        )


def _partition(stream: Stream) -> Partition | _Foreign | None:
    """The partition that the stream is in, None, or somebody else's, in which no stream can be made here."""
    try:
        return stream.partition
    except NotSupported:
        return _Foreign.CONTEXT


def _resize(tensor: Tensor, buffer: Buffer, shape: tuple[int, ...]) -> None:
    # TensorRT says [1] for what has no dimensions.
    if tuple(buffer.shape) == shape or (tuple(buffer.shape) == () and shape == (1,)):
        return
    try:
        buffer.resize(shape)
    except ValueError as error:
        raise DelegateError(
            f"output '{tensor.name}': expected a shape within the plan's {list(buffer.shape)}, got {list(shape)}; "
            f"{EXPORT_AGAIN}"
        ) from error
