"""A stand-in for TensorRT: the part of its modules that headrace uses, over engines that do real arithmetic.

    engine = build(
        inputs=[Tensor("x", "float32", (-1, 4))],
        outputs=[Tensor("output0", "float32", (-1, 4))],
        steps=[{"op": "mul", "out": "output0", "args": ["x", 2.0]}],
        profiles=[{"x": ((1, 4), (2, 4), (8, 4))}],
    )
    payload = headrace.pte.tensorrt.write(engine, bindings(engine))
    with stand_in():
        program = headrace.load("m.pte", device="sim")

So a program with TensorRT's islands runs on the cpu, on simulated devices, and, by CuPy, on a GPU that TensorRT does not
support; and the delegate is under test everywhere. The work is enqueued on the stream whose handle it is given, and on
no other. What TensorRT forbids, this refuses: a context that is set up while its work is under way, or after its work
was recorded, an address that is not a multiple of 256.

It stands in for the interface and for the order of work. It says nothing about TensorRT's own engines.
"""

from __future__ import annotations

import base64
import ctypes
import enum
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from ..delegate import Delegate, nvinfer
from ..delegate.tensorrt import DTYPES
from ..device import Stream, current_stream
from ..device import device as open_device
from ..engine import core
from ..pte.tensorrt import Binding

__all__ = ["OPS", "StandIn", "Tensor", "bindings", "build", "stand_in"]

_MAGIC = b"headrace stand-in engine\n"
_ALIGNMENT = 256

Array = Any


@dataclass(frozen=True)
class Tensor:
    """One binding of an engine. ``shape``: -1 where a size varies; ``on_host``: read or written on the host;
    ``alias``: of an output, the input that the engine writes it over; ``declared``: whether the engine tells so.
    ``vectorized`` and ``strides`` are what the engine says of its layout; ``open``: that its size depends on content."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    on_host: bool = False
    alias: str = ""
    declared: bool = True
    vectorized: int = -1
    strides: tuple[int, ...] = ()
    open: bool = False


def _mm(xp: Any, a: Array, b: Array) -> Array:
    # On a GPU not by cuBLAS, which has streams and memory of its own.
    return a @ b if xp is np else (a[:, :, None] * b[None, :, :]).sum(axis=1)


OPS: dict[str, Callable[..., Array]] = {
    "add": lambda xp, a, b: a + b,
    "sub": lambda xp, a, b: a - b,
    "mul": lambda xp, a, b: a * b,
    "mm": _mm,
    "addmm": lambda xp, bias, a, b: bias + _mm(xp, a, b),
    "relu": lambda xp, x: xp.maximum(x, 0),
    "t": lambda xp, x: x.T,
    "tanh": lambda xp, x: xp.tanh(x),
    "sigmoid": lambda xp, x: 1 / (1 + xp.exp(-x)),
    # The second argument is the shape, as the host knows it.
    "view": lambda xp, x, shape: x.reshape([int(n) for n in shape]),
    "shape": lambda xp, x: np.asarray(x.shape, np.int64),
}
"""What the steps of an engine can be: functions of NumPy or CuPy and the arguments."""


def build(
    *,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    steps: Sequence[Mapping[str, Any]],
    constants: Mapping[str, Any] | None = None,
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]] = (),
    auxiliary: int = 0,
    streamable_nbytes: int = 0,
    version: str = "1.0.0.0",
    capabilities: Sequence[str] = (),
) -> bytes:
    """The bytes of an engine.

    Args:
        steps: in order, each with ``op`` (of `OPS`), ``out`` (a name) and ``args`` (names, or numbers).
        profiles: for inputs whose sizes vary their least, best and greatest shapes.
        auxiliary: how many streams beside the call's it works on.
        streamable_nbytes: what it says of its weights.
        version: of the module that can load it.
        capabilities: the compute capabilities that it runs on; none: all.
    """
    unknown = sorted({step["op"] for step in steps} - set(OPS))
    if unknown:
        raise ValueError(
            f"build, steps: expected operations among {sorted(OPS)}, got {unknown}; build it of these"
        )
    packed = {
        name: {
            "dtype": str(np.asarray(value).dtype),
            "shape": list(np.asarray(value).shape),
            "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
        }
        for name, value in (constants or {}).items()
    }
    described = {
        "inputs": [asdict(t) for t in inputs],
        "outputs": [asdict(t) for t in outputs],
        "steps": [dict(step) for step in steps],
        "constants": packed,
        "profiles": [{name: [list(s) for s in spans] for name, spans in p.items()} for p in profiles],
        "auxiliary": auxiliary,
        "streamable_nbytes": streamable_nbytes,
        "version": version,
        "capabilities": list(capabilities),
    }
    return _MAGIC + json.dumps(described).encode()


def bindings(engine: bytes) -> tuple[Binding, ...]:
    """The bindings of what `build` gave, for `headrace.pte.tensorrt.write`."""
    described = json.loads(engine[len(_MAGIC) :])
    return tuple(
        Binding(t["name"], side == "inputs", t["dtype"], tuple(t["shape"]))
        for side in ("inputs", "outputs")
        for t in described[side]
    )


class _Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3


class _Logger:
    Severity = _Severity

    def log(self, severity: _Severity, msg: str) -> None:
        raise NotImplementedError


class _Validity(enum.Enum):
    VALID = 0
    INVALID = 2


class _Diagnostics(enum.Enum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    MALFORMED_ENGINE = 4


class StandIn:
    """A module. ``compute_capability`` is what its device is said to have.

    ``fail_next`` is for tests: the next enqueue fails, with this text in the log. ``on_work`` is called where the work
    runs, on the cpu and on simulated devices. ``contexts`` counts those
    alive, ``dropped_early`` those that were dropped while their work was under way.
    """

    TensorIOMode: Any = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
    TensorLocation: Any = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
    DataType: Any = enum.Enum("DataType", {"INT4": 0} | {name: i for i, name in enumerate(DTYPES, 1)})  # type: ignore[misc]
    EngineValidity = _Validity
    EngineInvalidityDiagnostics = _Diagnostics
    ILogger = _Logger

    def __init__(
        self,
        kind: str = "tensorrt",
        version: str = "1.0.0.0",
        compute_capability: str = "",
        capturable: bool = True,
    ) -> None:
        self.__name__ = f"headrace.testing.tensorrt ({kind})"
        self.__version__ = version
        self.kind = kind
        self.compute_capability = compute_capability
        self.capturable = capturable
        self.fail_next = ""
        self.on_work: Callable[[], None] | None = None
        self.contexts = 0
        self.dropped_early = 0

    def Runtime(self, logger: Any) -> _Runtime:
        return (_RtxRuntime if self.kind == "tensorrt_rtx" else _Runtime)(self, logger)


@contextmanager
def stand_in(kind: str = "tensorrt", module: StandIn | None = None) -> Iterator[StandIn]:
    """For the length of a block, programs that are loaded find this in the place of a kind of `nvinfer.KINDS`."""
    module = module or StandIn(kind)
    with nvinfer.provided(kind, module):
        yield module


class _Runtime:
    def __init__(self, module: StandIn, logger: Any) -> None:
        self.module, self.logger = module, logger

    def error(self, text: str) -> None:
        self.logger.log(_Severity.ERROR, text)

    def judge(self, data: bytes) -> _Diagnostics | None:
        if data[: len(_MAGIC)] != _MAGIC:
            return _Diagnostics.MALFORMED_ENGINE
        try:
            described = json.loads(data[len(_MAGIC) :])
        except ValueError:
            return _Diagnostics.MALFORMED_ENGINE
        if described["version"] != self.module.__version__:
            return _Diagnostics.VERSION_MISMATCH
        runs_on, here = described["capabilities"], self.module.compute_capability
        if here and runs_on and here not in runs_on:
            return _Diagnostics.UNSUPPORTED_CC
        return None

    def deserialize_cuda_engine(self, serialized_engine: bytes, /) -> _Engine | None:
        wrong = self.judge(serialized_engine)
        if wrong is not None:
            self.error(f"deserializeCudaEngine: {wrong.name}")
            return None
        described = json.loads(serialized_engine[len(_MAGIC) :])
        return (_RtxEngine if self.module.kind == "tensorrt_rtx" else _Engine)(self, described)


class _RtxRuntime(_Runtime):
    def get_engine_validity(self, buffer: bytes, /) -> tuple[_Validity, int]:
        wrong = self.judge(buffer)
        return (_Validity.VALID, 0) if wrong is None else (_Validity.INVALID, wrong.value)


class _Engine:
    def __init__(self, runtime: _Runtime, described: dict[str, Any]) -> None:
        self.runtime, self.module = runtime, runtime.module
        self.inputs = [_tensor(t) for t in described["inputs"]]
        self.outputs = [_tensor(t) for t in described["outputs"]]
        self.by_name = {t.name: t for t in (*self.inputs, *self.outputs)}
        self.steps: list[dict[str, Any]] = described["steps"]
        self.profiles = described["profiles"] or [{}]
        self.constants = {
            name: np.frombuffer(base64.b64decode(c["data"]), c["dtype"]).reshape(c["shape"])
            for name, c in described["constants"].items()
        }
        self.num_io_tensors = len(self.by_name)
        self.num_optimization_profiles = len(self.profiles)
        self.num_aux_streams: int = described["auxiliary"]
        self.streamable_weights_size: int = described["streamable_nbytes"]
        self._budget: int = self.streamable_weights_size

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, nbytes: int) -> None:
        if self.module.contexts == 0 and 0 <= nbytes <= self.streamable_weights_size:
            self._budget = nbytes

    def get_weight_streaming_automatic_budget(self) -> int:
        return self.streamable_weights_size // 2

    def get_tensor_name(self, index: int, /) -> str:
        return list(self.by_name)[index]

    def get_tensor_mode(self, name: str, /) -> Any:
        modes = self.module.TensorIOMode
        return modes.INPUT if any(t.name == name for t in self.inputs) else modes.OUTPUT

    def get_tensor_dtype(self, name: str, /) -> Any:
        names = {ours: theirs for theirs, ours in DTYPES.items()}
        return self.module.DataType[names.get(self.by_name[name].dtype, "INT4")]

    def get_tensor_location(self, name: str, /) -> Any:
        places = self.module.TensorLocation
        return places.HOST if self.by_name[name].on_host else places.DEVICE

    def get_tensor_shape(self, name: str, /) -> tuple[int, ...]:
        return self.by_name[name].shape

    def get_tensor_vectorized_dim(self, name: str, /) -> int:
        return int(self.by_name[name].vectorized)

    def get_tensor_profile_shape(self, name: str, profile_index: int, /) -> list[tuple[int, ...]]:
        return [tuple(s) for s in self.profiles[profile_index][name]]

    def get_aliased_input_tensor(self, name: str, /) -> str | None:
        tensor = self.by_name[name]
        return tensor.alias if tensor.alias and tensor.declared else None

    def create_execution_context(self) -> _Context | None:
        return _Context(self)


class _RtxEngine(_Engine):
    def create_runtime_config(self) -> _Config:
        return _Config(self.module)

    def create_execution_context(self, runtime_config: _Config | None = None, /) -> _Context | None:
        context = _RtxContext(self)
        if runtime_config is not None and runtime_config.cache is not None:
            runtime_config.cache.compiled.append(json.dumps(self.steps))
        return context


class _Config:
    def __init__(self, module: StandIn) -> None:
        self.module = module
        self.cache: _Cache | None = None

    def create_runtime_cache(self) -> _Cache:
        return _Cache(self.module)

    def set_runtime_cache(self, cache: _Cache, /) -> bool:
        self.cache = cache
        return True


class _Cache:
    def __init__(self, module: StandIn) -> None:
        self.head = f"{module.__version__} {module.compute_capability}\n".encode()
        self.compiled: list[str] = []

    def deserialize(self, blob: bytes, /) -> bool:
        if not blob.startswith(self.head):
            return False
        self.compiled = json.loads(blob[len(self.head) :])
        return True

    def serialize(self) -> bytes:
        return self.head + json.dumps(sorted(set(self.compiled))).encode()


def _compute(
    xp: Any, steps: Sequence[Mapping[str, Any]], inputs: Mapping[str, Array], constants: Mapping[str, Array]
) -> dict[str, Array]:
    values: dict[str, Array] = {**constants, **inputs}
    for step in steps:
        args = [values[a] if isinstance(a, str) else a for a in step["args"]]
        values[step["out"]] = OPS[step["op"]](xp, *args)
    return values


class _Work:
    """Of a context, and not the context, so that work does not keep it alive."""

    under_way = 0


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine, self.module = engine, engine.module
        self.error = engine.runtime.error
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.results: dict[str, tuple[int, ...]] = {}
        self.auxiliary: list[int] = []
        self.work = _Work()
        self.recorded = False
        self.gpu: _Gpu | None = None
        self.module.contexts += 1

    def __del__(self) -> None:
        self.module.contexts -= 1
        self.module.dropped_early += self.work.under_way > 0

    def _may_change(self) -> bool:
        busy = self.work.under_way > 0 or (self.gpu is not None and self.gpu.busy())
        if busy or self.recorded:
            self.error(f"set up {'while its work is under way' if busy else 'after its work was recorded'}")
        return not busy and not self.recorded

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int, /) -> bool:
        if not self._may_change() or not 0 <= profile_index < len(self.engine.profiles):
            return False
        self.profile, self.shapes, self.results = profile_index, {}, {}
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...], /) -> bool:
        tensor = self.engine.by_name[name]
        least, _, most = self.engine.profiles[self.profile].get(name, (tensor.shape,) * 3)
        fits = len(shape) == len(least) and all(
            a <= n <= b for a, n, b in zip(least, shape, most, strict=True)
        )
        if not fits:
            self.error(f"setInputShape: {name} {list(shape)} is not within profile {self.profile}")
        if not fits or not self._may_change():
            return False
        self.shapes[name], self.results = tuple(shape), {}
        return True

    def set_tensor_address(self, name: str, memory: int, /) -> bool:
        if not self._may_change():
            return False
        self.addresses[name] = memory
        return True

    def set_aux_streams(self, aux_streams: list[int], /) -> None:
        self.auxiliary = list(aux_streams)

    def infer_shapes(self) -> list[str]:
        missing = [t.name for t in self.engine.inputs if t.name not in self.shapes]
        missing += [t.name for t in self.engine.inputs if t.on_host and t.name not in self.addresses]
        if not missing:
            like = {
                t.name: np.ones(self.shapes[t.name], t.dtype) for t in self.engine.inputs if not t.on_host
            }
            try:
                values = _compute(
                    np, self.engine.steps, {**like, **self._host_inputs()}, self.engine.constants
                )
            except (ValueError, KeyError) as error:
                raise RuntimeError(f"inferShapes: {error}") from error
            self.results = {t.name: np.shape(values[t.name]) for t in self.engine.outputs}
            self._shape_values = values
        return missing

    def get_tensor_shape(self, name: str, /) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        if self.engine.by_name[name].open:
            return (-1,) * len(self.results[name])
        # TensorRT has no tensors without dimensions at its bindings.
        return self.results[name] or (1,)

    def get_tensor_strides(self, name: str, /) -> tuple[int, ...]:
        tensor, shape = self.engine.by_name[name], self.get_tensor_shape(name)
        return tensor.strides or tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def _host_inputs(self) -> dict[str, Array]:
        return {
            t.name: np.array(_view(self.addresses[t.name], self.shapes[t.name], t.dtype))
            for t in self.engine.inputs
            if t.on_host
        }

    def execute_async_v3(self, stream_handle: int, /) -> bool:
        engine, main = self.engine, _stream(stream_handle)
        wrong, self.module.fail_next = self.module.fail_next, ""
        for name, tensor in engine.by_name.items():
            address = self.addresses.get(name, 0)
            misplaced = address % _ALIGNMENT and not tensor.on_host and main.device.name != "cpu"
            if not address or misplaced or name not in {**self.shapes, **self.results}:
                wrong = wrong or f"{name} is at {address:#x}, or without a shape"
        if wrong:
            self.error(f"enqueueV3: {wrong}")
            return False
        for tensor in engine.outputs:
            if tensor.on_host:
                shape = self.results[tensor.name]
                _view(self.addresses[tensor.name], shape, tensor.dtype)[...] = self._shape_values[tensor.name]
        stream = main
        if engine.num_aux_streams:
            # As TensorRT does where it is given none.
            given = self.auxiliary or [(own := main.device.stream()).handle]
            stream = core.stream_on(main.device, given[0])
            stream.wait(main.record())
        self._put(stream)
        if stream is not main:
            main.wait(stream.record())
            if not self.auxiliary:
                del own
        if Delegate.stage() == "capture":
            self.recorded = True
        return True

    def _put(self, stream: Stream) -> None:
        """The arithmetic, on this stream, with the shapes and addresses of now."""
        engine = self.engine
        places = [
            (t, self.addresses[t.name], self.shapes.get(t.name, self.results.get(t.name, ())))
            for t in engine.by_name.values()
        ]
        names = {t.name for t in engine.inputs}
        host = self._host_inputs()
        if stream.device.name.startswith("cuda"):
            self.gpu = self.gpu or _Gpu(engine.constants)
            self.gpu.launch(self, stream, [p for p in places if not p[0].on_host], names, host)
            return
        captures = Delegate.stage() == "capture"
        module, counted, constants = self.module, self.work, engine.constants

        def work() -> None:
            if module.on_work is not None:
                module.on_work()
            given = {
                t.name: np.array(_view(at, shape, t.dtype))
                for t, at, shape in places
                if t.name in names and not t.on_host
            }
            values = _compute(np, engine.steps, {**given, **host}, constants)
            for t, at, shape in places:
                if t.name not in names and not t.on_host:
                    _view(at, shape, t.dtype)[...] = values[t.name]
            if not captures:
                counted.under_way -= 1

        # Where it ran at once the count was one less for a moment.
        stream.call(work)
        if not captures:
            counted.under_way += 1


class _RtxContext(_Context):
    def is_stream_capturable(self, stream: int, /) -> bool:
        return self.module.capturable


class _Gpu:
    """The same by CuPy, with memory of its own for what is between the steps: a graph's memory never leaves it."""

    cupy: ClassVar[Any] = None

    def __init__(self, constants: Mapping[str, Array]) -> None:
        if _Gpu.cupy is None:
            _Gpu.cupy = importlib.import_module("cupy")
        self.pool = self.cupy.cuda.MemoryPool()
        with self.cupy.cuda.using_allocator(self.pool.malloc):
            self.constants = {name: self.cupy.asarray(value) for name, value in constants.items()}
        self.cupy.cuda.get_current_stream().synchronize()
        self.event: Any = None

    def busy(self) -> bool:
        return self.event is not None and not self.event.query()

    def launch(
        self, context: _Context, stream: Stream, places: Sequence[Any], names: set[str], host: Any
    ) -> None:
        cupy = self.cupy

        def view(tensor: Tensor, address: int, shape: tuple[int, ...]) -> Array:
            nbytes = math.prod(shape) * np.dtype(tensor.dtype).itemsize
            memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), self, stream.device.ordinal)
            return cupy.ndarray(shape, tensor.dtype, cupy.cuda.MemoryPointer(memory, 0))

        with cupy.cuda.Stream.from_external(stream), cupy.cuda.using_allocator(self.pool.malloc):
            given = {p[0].name: view(*p) for p in places if p[0].name in names}
            values = _compute(cupy, context.engine.steps, {**given, **host}, self.constants)
            for place in places:
                if place[0].name not in names:
                    view(*place)[...] = values[place[0].name]
        if Delegate.stage() != "capture":
            self.event = stream.record()


def _tensor(described: Mapping[str, Any]) -> Tensor:
    listed = {**described, "shape": tuple(described["shape"]), "strides": tuple(described["strides"])}
    return Tensor(**listed)


def _stream(handle: int) -> Stream:
    """The stream with this handle: the thread's selection, which is the stream of the call, or one of the cpu."""
    selected = current_stream()
    if selected is not None and selected.handle == handle:
        return selected
    return core.stream_on(open_device("cpu"), handle)


def _view(address: int, shape: Sequence[int], dtype: str) -> Array:
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, kind)
    memory: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    found: Array = np.frombuffer(memory, kind).reshape(shape)
    return found
