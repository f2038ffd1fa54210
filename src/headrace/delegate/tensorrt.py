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
import difflib
import hashlib
import os
import platform
import re
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..device import caller_stream, current_stream
from ..device import device as open_device
from ..errors import CaptureError, DelegateError, NotSupported, OptionError, ProgramError
from ..pte.tensorrt import Blob, read
from . import Context, Delegate
from .nvinfer import (
    KINDS,
    Engine,
    ExecutionContext,
    Loaded,
    RtxEngine,
    RuntimeCache,
    RuntimeConfig,
    load_engine,
)

__all__ = ["DTYPES", "OPTIONS", "TensorRTBackend"]

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
"""TensorRT's ``DataType`` by name, and PyTorch's names of those that an island's tensors can have."""

OPTIONS = ("runtime", "runtime_cache", "use_shared_cuda_stream", "weight_streaming_budget")
BUDGET = "weight_streaming_budget"

# "The pointer must have at least 256-byte alignment": setTensorAddress() in NvInferRuntime.h. ExecuTorch plans by 16.
_ALIGNMENT = 256
_EXPORT = "export it again"


@dataclass(frozen=True)
class _Options:
    """``budget`` in bytes, None: TensorRT's own choice; ``runtime``: a kind of `nvinfer.KINDS`, empty: what fits."""

    budget: int | None
    runtime: str
    cache: Path | None


def _budget(value: Any, where: str, error: type[OptionError | ProgramError]) -> int | None:
    """A number of bytes; None for an empty text."""
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace").rstrip("\0")
    if value == "":
        return None
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise error(f"{where} '{BUDGET}': expected bytes as a decimal number, got {value!r}")


def _options(given: Mapping[str, Any], specs: Mapping[str, bytes]) -> _Options:
    for key in given:
        if key not in OPTIONS:
            (nearest,) = difflib.get_close_matches(key, OPTIONS, 1, 0)
            raise OptionError(
                f"option: expected one that TensorRTBackend has, got {key!r}; the nearest is '{nearest}'"
            )
    shared = given.get("use_shared_cuda_stream", False)
    if not isinstance(shared, bool):
        raise OptionError(
            f"option 'use_shared_cuda_stream': expected a bool, got {type(shared).__name__}; leave it out"
        )
    if shared:
        raise NotSupported(
            "option 'use_shared_cuda_stream': expected false, got true, which is not supported: headrace runs every "
            "delegate on the stream of the call, which is the caller's; select one with headrace.caller_stream() or "
            "stream="
        )
    runtime = given.get("runtime", "")
    if runtime != "" and runtime not in KINDS:
        raise OptionError(f"option 'runtime': expected one of {', '.join(KINDS)}, got {runtime!r}")
    cache = given.get("runtime_cache", "")
    if not isinstance(cache, str) or (
        cache and not (os.path.isabs(cache) and os.path.isdir(cache) and os.access(cache, os.W_OK))
    ):
        raise OptionError(
            f"option 'runtime_cache': expected the absolute path of a folder that can be written to, got {cache!r}"
        )
    budget = _budget(given.get(BUDGET, ""), "option", OptionError)
    if budget is None and BUDGET in specs:
        budget = _budget(specs[BUDGET], "compile spec", ProgramError)
    return _Options(budget, runtime, Path(cache) if cache else None)


@dataclass(frozen=True)
class _Tensor:
    """One binding. ``shape``: -1 where a size varies. ``on_host``: the engine reads or writes it on the host."""

    name: str
    is_input: bool
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    alias: str = ""  # of an output: the input that it is written over


def _tensors(loaded: Loaded, blob: Blob) -> tuple[tuple[_Tensor, ...], tuple[_Tensor, ...]]:
    """Inputs and outputs in the order of the island's arguments, as engine and payload agree on them."""
    module, engine = loaded.module, loaded.engine
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = {n for n in names if engine.get_tensor_mode(n) == module.TensorIOMode.INPUT}
    bindings = blob.bindings
    order = [b.name for b in bindings] if bindings else names
    said = {b.name for b in blob.inputs} if bindings else inputs
    if set(order) != set(names) or said != inputs:
        raise ProgramError(
            f"expected the bindings of the engine, inputs {sorted(inputs)} and outputs {sorted(set(names) - inputs)}, "
            f"got inputs {sorted(said)} and outputs {sorted(set(order) - said)}; {_EXPORT}"
        )
    aliases = {a.output: a for a in blob.aliased}
    asks = getattr(engine, "get_aliased_input_tensor", lambda name: None)
    found = []
    for name in order:
        where = f"{'input' if name in inputs else 'output'} '{name}'"
        kind = engine.get_tensor_dtype(name).name
        if kind not in DTYPES:
            raise ProgramError(
                f"{where}: expected an element type that tensors have, got {kind}; export it with another"
            )
        shape = tuple(int(n) for n in engine.get_tensor_shape(name))
        binding = next((b for b in bindings if b.name == name), None)
        if binding is not None:
            told = binding.dtype or DTYPES[kind], binding.shape or shape
            same = len(told[1]) == len(shape) and all(
                a in (b, -1) or b == -1 for a, b in zip(told[1], shape, strict=False)
            )
            if told[0] != DTYPES[kind] or not same:
                raise ProgramError(
                    f"{where}: expected {DTYPES[kind]}{list(shape)}, as the engine has it, got "
                    f"{told[0]}{list(told[1])}; {_EXPORT}"
                )
        if engine.get_tensor_vectorized_dim(name) != -1:
            raise ProgramError(f"{where}: expected a linear layout, got a vectorized one; {_EXPORT}")
        on_host = engine.get_tensor_location(name) == module.TensorLocation.HOST
        alias = aliases[name].input if name in aliases else ""
        engines = asks(name) if name not in inputs else None
        if (engines or "") != ("" if name in aliases and aliases[name].kind == "user" else alias):
            raise ProgramError(
                f"{where}: expected to be written over {engines!r}, as the engine has it, got aliased_io of "
                f"{alias or None!r}; {_EXPORT}"
            )
        found.append(_Tensor(name, name in inputs, DTYPES[kind], shape, on_host, alias))
    by_name = {t.name: t for t in found}
    for output in found:
        source = by_name[output.alias] if output.alias else output
        if output.alias and ((source.shape, source.dtype) != (output.shape, output.dtype) or source.on_host):
            raise ProgramError(
                f"output '{output.name}': expected the shape and dtype of input '{output.alias}', which it is written "
                f"over, {source.dtype}{list(source.shape)} on a device, got {output.dtype}{list(output.shape)}; {_EXPORT}"
            )
    return tuple(t for t in found if t.is_input), tuple(t for t in found if not t.is_input)


def _set_budget(engine: Engine, budget: int | None) -> None:
    """Before there is a context. An engine without weights to stream keeps all of them."""
    streamable = engine.streamable_weights_size
    if streamable <= 0:
        return
    wanted = engine.get_weight_streaming_automatic_budget() if budget is None else min(budget, streamable)
    engine.weight_streaming_budget_v2 = wanted
    if budget is None and engine.weight_streaming_budget_v2 != wanted:
        # TensorRT's own choice may not fit any more; this always does.
        engine.weight_streaming_budget_v2 = wanted = 0
    if engine.weight_streaming_budget_v2 != wanted:
        raise OptionError(
            f"option '{BUDGET}': expected a budget that the engine accepts, got {wanted} bytes of {streamable}; "
            "choose another, or leave it to TensorRT"
        )


@dataclass
class _Profiles:
    """Least, best and greatest shapes of each input under each optimization profile."""

    by_number: list[list[tuple[tuple[int, ...], ...]]]

    @staticmethod
    def of(engine: Engine, inputs: Sequence[_Tensor]) -> _Profiles:
        def bounds(tensor: _Tensor, number: int) -> tuple[tuple[int, ...], ...]:
            if -1 not in tensor.shape:
                return (tensor.shape,) * 3
            return tuple(tuple(map(int, d)) for d in engine.get_tensor_profile_shape(tensor.name, number))

        return _Profiles([[bounds(t, p) for t in inputs] for p in range(engine.num_optimization_profiles)])

    def best(self, inputs: Sequence[_Tensor], shapes: Sequence[tuple[int, ...]]) -> int:
        """The number of the profile whose best shapes are nearest to these, by ratio, among those that admit them."""

        def distance(profile: list[tuple[tuple[int, ...], ...]]) -> float:
            away = 0.0
            for (_, best, _), shape in zip(profile, shapes, strict=True):
                for a, b in zip(best, shape, strict=True):
                    away += abs(np.log((a + 1) / (b + 1)))
            return away

        fitting = [
            (distance(profile), number)
            for number, profile in enumerate(self.by_number)
            if all(
                len(least) == len(shape)
                and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
                for (least, _, most), shape in zip(profile, shapes, strict=True)
            )
        ]
        if fitting:
            return min(fitting)[1]
        for i, (tensor, shape) in enumerate(zip(inputs, shapes, strict=True)):
            spans = [profile[i] for profile in self.by_number]
            if not any(
                len(shape) == len(least)
                and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
                for least, _, most in spans
            ):
                said = " or ".join(f"{list(least)} to {list(most)}" for least, _, most in spans)
                raise DelegateError(
                    f"input {i} '{tensor.name}': expected a shape from {said}, the engine's optimization profiles, got "
                    f"{list(shape)}; call it with another, or export it with wider bounds"
                )
        raise DelegateError(
            f"inputs: expected shapes that one of {len(self.by_number)} optimization profiles admits together, got "
            f"{', '.join(str(list(s)) for s in shapes)}; export it with a profile for them"
        )


@dataclass
class _Setup:
    """What a context was set up with. ``host`` are the values of inputs that the engine reads on the host."""

    profile: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    host: tuple[bytes, ...] = ()
    addresses: tuple[int, ...] = ()
    partition: Any = None


@dataclass
class _Execution:
    """One execution context, what it is set up with, and the memory that it needs beside the call's. Dropped, it waits for
    the work that uses it."""

    context: ExecutionContext
    event: Any  # behind the latest enqueue
    pending: bool = False  # whether the event was recorded and may not have come
    setup: _Setup = field(default_factory=_Setup)
    results: tuple[tuple[int, ...], ...] = ()
    auxiliary: list[Any] = field(default_factory=list)
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


class _Cache:
    """Kernels that TensorRT for RTX compiled for one engine, in a file between processes."""

    def __init__(self, folder: Path, blob: Blob, version: str) -> None:
        digest = hashlib.sha256(blob.engine).hexdigest()
        self.path = folder / f"{digest[:32]}-{version}.rtxcache"
        self.native: RuntimeCache | None = None
        self.written = b""

    def config(self, engine: RtxEngine) -> RuntimeConfig:
        """A configuration for a context that uses the cache."""
        config = engine.create_runtime_config()
        if self.native is None:
            self.native = config.create_runtime_cache()
            with contextlib.suppress(OSError):
                data = self.path.read_bytes()
                # One of another driver or GPU is refused, and written anew.
                if data and self.native.deserialize(data):
                    self.written = data
        config.set_runtime_cache(self.native)
        return config

    def save(self) -> None:
        """Write it where it changed, whole or not at all. A full disk is no failure of the program's."""
        if self.native is None:
            return
        data = bytes(self.native.serialize())
        if data == self.written:
            return
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                os.replace(name, self.path)
                self.written = data
            except OSError:
                os.unlink(name)


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
        options = _options(context.options, context.specs)
        _check_platform(blob)
        self._device = context.device
        self._lock = threading.Lock()
        self._execution: _Execution | None = None
        self._staged: dict[str, Any] = {}
        self._cache: _Cache | None = None
        with self._device._context():
            self._loaded = load_engine(blob, context.device, options.runtime)
            self._inputs, self._outputs = _tensors(self._loaded, blob)
            if len(self._inputs) != context.num_inputs:
                raise ProgramError(
                    f"expected {context.num_inputs} inputs, as the program has them, got an engine with "
                    f"{len(self._inputs)}; {_EXPORT}"
                )
            _set_budget(self._loaded.engine, options.budget)
            self._profiles = _Profiles.of(self._loaded.engine, self._inputs)
            if options.cache is not None and self._loaded.kind == "tensorrt_rtx":
                self._cache = _Cache(options.cache, blob, self._loaded.module.__version__)
                weakref.finalize(self, _Cache.save, self._cache)
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

    def run(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: Any) -> None:
        for side, tensors, given in (("input", self._inputs, inputs), ("output", self._outputs, outputs)):
            if len(given) != len(tensors):
                raise DelegateError(f"expected {len(tensors)} {side}s, got {len(given)}; {_EXPORT}")
            for i, (tensor, buffer) in enumerate(zip(tensors, given, strict=True)):
                if getattr(buffer, "dtype", None) != tensor.dtype:
                    got = getattr(buffer, "dtype", None) or type(buffer).__name__
                    raise DelegateError(
                        f"{side} {i} '{tensor.name}': expected {tensor.dtype}, as the engine has it, got {got}; {_EXPORT}"
                    )
                if not _is_dense(buffer):
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

    def _stage(self, tensor: _Tensor, shape: tuple[int, ...], stream: Any) -> Any:
        """Memory of the device, kept for calls of this shape."""
        kept = self._staged.get(tensor.name)
        if kept is None or kept.shape != shape:
            kept = self._staged[tensor.name] = self._device.empty(shape, tensor.dtype, stream=stream)
        return kept

    # -------------------- memory of the device

    def _run(self, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
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
        self, execution: _Execution, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any, stage: str
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

    def _set_shapes(self, execution: _Execution, inputs: Sequence[Any], stream: Any, stage: str) -> None:
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
                    f"expected optimization profile {profile} to be taken, got no{told()}; {_EXPORT}"
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
                    f"input '{tensor.name}': expected its address to be taken, got no{told()}"
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
                f"expected every shape to be known, got none for {', '.join(open_)}{told()}; {_EXPORT}"
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
                if not _dense(shape, strides):
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
                    f"'{name}': expected its address {address:#x} to be taken, got no{self._loaded.told()}"
                )
        execution.setup.addresses = addresses

    def _set_auxiliary(self, execution: _Execution, stream: Any, stage: str) -> None:
        """Streams beside the call's, in its partition: those that TensorRT would make might be in none."""
        count = self._loaded.engine.num_aux_streams
        if not count:
            return
        partition = _partition(stream)
        if execution.auxiliary and execution.setup.partition == partition:
            return
        self._change(execution, stage)
        if partition is _FOREIGN:
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
                "expected the shapes and addresses of the run before the capture, got others", step="record"
            )
        execution.settle()

    def _aligned(self, execution: _Execution, tensor: _Tensor, buffer: Any, stream: Any) -> Any:
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

    def _fetch(self, execution: _Execution, tensor: _Tensor, buffer: Any, stream: Any) -> bytes:
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

    def _put(self, execution: _Execution, tensor: _Tensor, buffer: Any, stream: Any) -> None:
        """An output that the engine wrote on the host, behind what is on the stream. Waits."""
        stream.synchronize()
        host = open_device("cpu").to_device(execution.on_host[tensor.name].reshape(buffer.shape))
        stream.copy(host, buffer)
        stream.synchronize()

    def _said(self, execution: _Execution, shapes: Sequence[tuple[int, ...]] = ()) -> str:
        return ", ".join(
            f"{t.name} {list(s)}" for t, s in zip(self._inputs, shapes or execution.setup.shapes, strict=True)
        )

    def _why_not(self, execution: _Execution, stream: Any) -> str:
        """TensorRT answers yes or no; what it logged may say why, and if not, this is what it mostly is."""
        text = (
            f"expected the engine to be enqueued on {stream!r} for {self._said(execution)}, got no from "
            f"{self._loaded.module.__name__} {self._loaded.module.__version__}{self._loaded.told()}"
        )
        lane = _partition(stream)
        if lane is not None:
            sms = (
                f"a partition of {lane.sm_count} SMs"
                if lane is not _FOREIGN
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


_FOREIGN = object()


def _partition(stream: Any) -> Any:
    """The partition that the stream is in, None, or _FOREIGN: somebody else's, in which no stream can be made here."""
    try:
        return stream.partition
    except NotSupported:
        return _FOREIGN


def _check_platform(blob: Blob) -> None:
    here = f"linux_{platform.machine()}"
    if blob.target_platform not in ("", "unknown", here):
        raise ProgramError(
            f"expected an engine for {here}, got one built for {blob.target_platform}; export it for this platform"
        )


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def _is_dense(buffer: Any) -> bool:
    return _dense(buffer.shape, buffer.strides)


def _resize(tensor: _Tensor, buffer: Any, shape: tuple[int, ...]) -> None:
    # TensorRT says [1] for what has no dimensions.
    if tuple(buffer.shape) == shape or (tuple(buffer.shape) == () and shape == (1,)):
        return
    try:
        buffer.resize(shape)
    except ValueError as error:
        raise DelegateError(
            f"output '{tensor.name}': expected a shape within the plan's {list(buffer.shape)}, got {list(shape)}; "
            f"{_EXPORT}"
        ) from error
