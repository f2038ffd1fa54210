"""TensorRT's Python modules: what is used of them, which are here, and an engine out of its bytes.

Three kinds of run time read three kinds of engine: ``tensorrt`` its own, ``tensorrt_lean`` those that were built to be
version-compatible, ``tensorrt_rtx`` those of TensorRT for RTX. The protocols below are all that is asked of any of
them; a module that keeps them can stand in (`headrace.testing.tensorrt`). No module is imported before an engine, or
``headrace doctor``, asks for it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..device import Device
from ..engine import core
from ..errors import DelegateUnavailable, DeviceError, OptionError, ProgramError
from ..pte.tensorrt import Blob

__all__ = [
    "KINDS",
    "Engine",
    "ExecutionContext",
    "Installed",
    "LoadedEngine",
    "Module",
    "RtxEngine",
    "RtxExecutionContext",
    "RtxRuntime",
    "Runtime",
    "RuntimeCache",
    "RuntimeConfig",
    "installed",
    "load_engine",
    "provided",
]


# -------------------- the protocols


class ExecutionContext(Protocol):
    """``IExecutionContext``. Not thread-safe. A bool that comes back is whether it worked; why not is logged."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int, /) -> bool: ...
    def set_input_shape(self, name: str, shape: tuple[int, ...], /) -> bool: ...
    def set_tensor_address(self, name: str, memory: int, /) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def get_tensor_shape(self, name: str, /) -> Sequence[int]: ...
    def get_tensor_strides(self, name: str, /) -> Sequence[int]: ...
    def set_aux_streams(self, aux_streams: list[int], /) -> None: ...
    def execute_async_v3(self, stream_handle: int, /) -> bool: ...


class RtxExecutionContext(ExecutionContext, Protocol):
    """What TensorRT for RTX has besides."""

    def is_stream_capturable(self, stream: int, /) -> bool: ...


class RuntimeCache(Protocol):
    """``IRuntimeCache``: kernels that TensorRT for RTX compiled on this machine."""

    def deserialize(self, blob: bytes, /) -> bool: ...
    def serialize(self) -> Any: ...


class RuntimeConfig(Protocol):
    """``IRuntimeConfig`` of TensorRT for RTX."""

    def create_runtime_cache(self) -> RuntimeCache: ...
    def set_runtime_cache(self, cache: RuntimeCache, /) -> bool: ...


class Engine(Protocol):
    """``ICudaEngine``."""

    @property
    def num_io_tensors(self) -> int: ...
    @property
    def num_optimization_profiles(self) -> int: ...
    @property
    def num_aux_streams(self) -> int: ...
    @property
    def streamable_weights_size(self) -> int: ...

    weight_streaming_budget_v2: int

    def get_tensor_name(self, index: int, /) -> str: ...
    def get_tensor_mode(self, name: str, /) -> Any: ...
    def get_tensor_dtype(self, name: str, /) -> Any: ...
    def get_tensor_location(self, name: str, /) -> Any: ...
    def get_tensor_shape(self, name: str, /) -> Sequence[int]: ...
    def get_tensor_vectorized_dim(self, name: str, /) -> int: ...
    def get_tensor_profile_shape(self, name: str, profile_index: int, /) -> Sequence[Sequence[int]]: ...
    def get_aliased_input_tensor(self, name: str, /) -> str | None: ...
    def get_weight_streaming_automatic_budget(self) -> int: ...
    def create_execution_context(self) -> ExecutionContext | None: ...


class RtxEngine(Engine, Protocol):
    """What TensorRT for RTX has besides."""

    def create_runtime_config(self) -> RuntimeConfig: ...
    def create_execution_context(
        self, runtime_config: RuntimeConfig | None = None, /
    ) -> ExecutionContext | None: ...


class Runtime(Protocol):
    """``Runtime``. Without a driver the lean one is none, and ends the process when it is used or dropped."""

    def deserialize_cuda_engine(self, serialized_engine: bytes, /) -> Engine | None: ...


class RtxRuntime(Runtime, Protocol):
    """What TensorRT for RTX has besides: (``EngineValidity``, bits of ``EngineInvalidityDiagnostics``)."""

    def get_engine_validity(self, buffer: bytes, /) -> tuple[Any, int]: ...


class Module(Protocol):
    """The module itself. ``TensorIOMode`` has INPUT and OUTPUT, ``TensorLocation`` HOST and DEVICE, ``DataType`` the
    names of `headrace.delegate.tensorrt.DTYPES`; ``ILogger`` is a class to derive from, with ``log(severity, msg)`` to
    define, and ``Severity`` in it."""

    __name__: str
    __version__: str
    Runtime: Any
    ILogger: Any
    TensorIOMode: Any
    TensorLocation: Any
    DataType: Any


# -------------------- which are here


@dataclass(frozen=True)
class _Kind:
    name: str
    modules: tuple[str, ...]  # in the order in which they are looked for
    packages: str


KINDS = {
    kind.name: kind
    for kind in (
        _Kind("tensorrt", ("tensorrt", "tensorrt_bindings"), "tensorrt"),
        _Kind(
            "tensorrt_lean",
            ("tensorrt_lean", "tensorrt_lean_bindings"),
            "tensorrt-lean-cu13-bindings tensorrt-lean-cu13-libs",
        ),
        _Kind(
            "tensorrt_rtx",
            ("tensorrt_rtx", "tensorrt_rtx_bindings"),
            "tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs",
        ),
    )
}
_provided: dict[str, Any] = {}


@dataclass(frozen=True)
class Installed:
    """A kind of run time. ``module`` is the one that was found, ``""`` where none is; ``version`` its version;
    ``problem`` why it cannot be used, and is empty where it loads."""

    kind: str
    module: str
    version: str
    problem: str


def installed() -> tuple[Installed, ...]:
    """What there is of each kind. Imports the modules that it finds; needs no GPU."""
    found = []
    for kind in KINDS:
        module, problem = _module(kind)
        if module is not None:
            found.append(Installed(kind, module.__name__, module.__version__, ""))
        else:
            found.append(Installed(kind, _spec(kind), "", problem))
    return tuple(found)


@contextmanager
def provided(kind: str, module: Any) -> Iterator[None]:
    """For the length of a block, programs that are loaded find ``module`` in the place of the installed one of its kind,
    on every device. What they loaded goes on with it afterwards."""
    if kind not in KINDS:
        raise OptionError(f"provided: expected one of {', '.join(KINDS)}, got {kind!r}; name one of these")
    former = _provided.get(kind)
    _provided[kind] = module
    try:
        yield
    finally:
        if former is None:
            del _provided[kind]
        else:
            _provided[kind] = former


def _spec(kind: str) -> str:
    for name in KINDS[kind].modules:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except (ImportError, ValueError):
            continue
    return ""


def _module(kind: str) -> tuple[Any, str]:
    """The module, or None and why not."""
    if kind in _provided:
        return _provided[kind], ""
    name = _spec(kind)
    if not name:
        return None, "not installed"
    try:
        module = importlib.import_module(name)
        # A package whose compiled part or libraries are missing may import and be empty.
        for needed in ("Runtime", "ILogger", "TensorIOMode", "TensorLocation", "DataType", "__version__"):
            getattr(module, needed)
    except Exception as error:
        # Whatever it is (a missing library, another Python's binary), it is told and not raised: another kind may do.
        return None, f"{name} does not load: {type(error).__name__}: {error}"
    return module, ""


# -------------------- an engine out of its bytes


class _Log:
    """The last errors and warnings of one module, by thread."""

    def __init__(self, module: Any) -> None:
        self._lines: deque[tuple[int, bool, str]] = deque(maxlen=200)
        severity = module.ILogger.Severity
        errors, warnings = (severity.INTERNAL_ERROR, severity.ERROR), (severity.WARNING,)
        lines = self._lines

        def log(_: Any, level: Any, text: str) -> None:
            if level in errors or level in warnings:
                lines.append((threading.get_ident(), level in errors, str(text).strip()))

        base = module.ILogger
        made = type("Log", (base,), {"__init__": lambda self: base.__init__(self), "log": log})
        self.logger = made()

    def clear(self) -> None:
        """Forget this thread's lines: what comes from now on belongs to what is done now."""
        me = threading.get_ident()
        for line in tuple(self._lines):
            if line[0] == me:
                with suppress(ValueError):  # another thread's line may have pushed it out
                    self._lines.remove(line)

    def lines(self, *, errors: bool = False) -> tuple[str, ...]:
        """This thread's, oldest first."""
        me = threading.get_ident()
        return tuple(text for thread, bad, text in tuple(self._lines) if thread == me and (bad or not errors))


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, and what it came out of. ``told()`` are the errors that were logged since ``log.clear()``."""

    kind: str
    module: Module
    engine: Engine
    log: _Log = field(repr=False)

    def told(self) -> str:
        """The last errors of the calling thread, to end a sentence with."""
        lines = self.log.lines(errors=True)[-3:]
        return ": " + " / ".join(lines) if lines else ", without a word why"


# One run time for each module and process: TensorRT wants it to outlive every engine that came from it.
_runtimes: dict[int, tuple[Any, _Log, Any]] = {}
_lock = threading.Lock()


def _runtime(module: Any) -> tuple[_Log, Any, str]:
    """The module's log and run time; None and why where it cannot be made."""
    with _lock:
        if id(module) in _runtimes:
            _, log, runtime = _runtimes[id(module)]
            return log, runtime, ""
        log = _Log(module)
        try:
            runtime = module.Runtime(log.logger)
        except Exception as error:
            return log, None, f"{type(error).__name__}: {error}"
        failed = log.lines(errors=True)
        if runtime is None or failed:
            # The object may be there where the run time behind it is not: using it ends the process, and so does
            # dropping it (seen with tensorrt_lean 11.4.0.106 and no driver). So it is never dropped.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
            return log, None, " / ".join(failed[-3:]) or "no run time"
        _runtimes[id(module)] = (module, log, runtime)
        return log, runtime, ""


def _fitting(blob: Blob, wanted: str) -> tuple[str, ...]:
    """The kinds of run time that may read this engine."""
    if wanted:
        return (wanted,)
    if blob.built is not None:
        if blob.built.runtime == "tensorrt":
            return ("tensorrt", "tensorrt_lean") if blob.built.version_compatible else ("tensorrt",)
        if blob.built.runtime in KINDS:
            return (blob.built.runtime,)
        raise ProgramError(
            f"expected an engine built with one of {', '.join(KINDS)}, got one built with {blob.built.runtime!r}; "
            "export it with another"
        )
    # The first bytes of an engine of TensorRT for RTX (seen in what 1.7.1.116 builds).
    return ("tensorrt_rtx",) if bytes(blob.engine[:4]) == b"vtrt" else ("tensorrt", "tensorrt_lean")


def built_for(blob: Blob) -> str:
    """What a payload says of its builder and of the GPUs that it was built for."""
    built = blob.built
    if built is None:
        said = "a TensorRT that the program does not name"
        if bytes(blob.engine[:4]) == b"vtrt" and len(blob.engine) >= 28:
            # Version of the builder, as 1.7.1.116 writes it.
            said = "tensorrt_rtx " + ".".join(str(n) for n in blob.engine[24:28])
    else:
        said = f"{built.runtime} {built.version}"
        if built.capabilities:
            said += f", compute capability {' or '.join(built.capabilities)}"
    if blob.target_platform:
        said += f", {blob.target_platform}"
    return said + (", hardware-compatible" if blob.hardware_compatible else "")


def fitting(blob: Blob) -> tuple[tuple[Installed, ...], str]:
    """The installed run times that may read a payload's engine, and what to do where there are none; asks no GPU.

    Raises ProgramError where the payload names a builder that is unknown."""
    kinds = _fitting(blob, "")
    here = tuple(i for i in installed() if i.kind in kinds and i.version)
    return here, "" if here else _advice(blob, kinds)


def _capability(device: Device, module: Any) -> str:
    """Such as "9.0"; of a simulated device what the module that stands in says."""
    if not device.name.startswith("cuda"):
        return str(getattr(module, "compute_capability", ""))
    try:
        *_, gpus = core.cuda_info()
    except DeviceError:
        return ""
    return next((f"{gpu[2]}.{gpu[3]}" for gpu in gpus if gpu[0] == device.ordinal), "")


def _advice(blob: Blob, kinds: Sequence[str]) -> str:
    version = f" of version {blob.built.version}" if blob.built is not None else ""
    packages = " or ".join(f"'pip install {KINDS[kind].packages}'" for kind in kinds)
    return f"install{version}: {packages}; or export the program again for what is here"


def _refusal(module: Any, runtime: Any, log: _Log, data: bytes) -> str:
    """Why the run time would not take the engine, where it can be asked; else empty."""
    if not hasattr(runtime, "get_engine_validity"):
        return ""
    validity, bits = runtime.get_engine_validity(data)
    if validity != module.EngineValidity.INVALID:
        return ""
    reasons = module.EngineInvalidityDiagnostics.__members__.values()
    names = [reason.name for reason in reasons if int(reason.value) & int(bits)]
    return ", ".join(names) or " / ".join(log.lines(errors=True)[-3:]) or "no reason given"


def load_engine(blob: Blob, device: Device, wanted: str = "") -> LoadedEngine:
    """The engine in ``blob``, on ``device``, by the first installed run time that fits it and takes it.

    Args:
        wanted: the kind of run time to use; empty: whichever fits.

    Raises:
        DelegateUnavailable: no GPU, no fitting run time, or an engine that none of them takes: what it was built for,
            what is running, and what to do.
    """
    kinds = _fitting(blob, wanted)
    if not device.name.startswith("cuda") and not any(kind in _provided for kind in kinds):
        raise DelegateUnavailable(
            f"expected a GPU, for TensorRT's engines run nowhere else, got {device.name}; load it with "
            'device="cuda:0" on a machine with an NVIDIA GPU, or try the program with headrace.testing.tensorrt'
        )
    built = built_for(blob)
    found, tried = [], []
    for kind in kinds:
        module, problem = _module(kind)
        if module is None:
            tried.append(f"{kind}: {problem}")
        else:
            found.append((kind, module))
    if not found:
        raise DelegateUnavailable(
            f"expected a run time for an engine built for {built}, got none ({'; '.join(tried)}); {_advice(blob, kinds)}"
        )
    data = blob.engine.tobytes()
    for kind, module in found:
        running = f"{module.__name__} {module.__version__} on {device.name}"
        capability = _capability(device, module)
        if capability:
            running += f", compute capability {capability}"
        wanted_for = blob.built.capabilities if blob.built is not None else ()
        if capability and wanted_for and capability not in wanted_for and not blob.hardware_compatible:
            tried.append(f"running {running}: a GPU that the engine was not built for")
            continue
        log, runtime, why = _runtime(module)
        if runtime is None:
            tried.append(f"running {running}: {why}")
            continue
        log.clear()
        why = _refusal(module, runtime, log, data)
        if why:
            tried.append(f"running {running}: {why}")
            continue
        engine = runtime.deserialize_cuda_engine(data)
        if engine is not None:
            return LoadedEngine(kind, module, engine, log)
        lines = " / ".join(log.lines(errors=True)[-3:])
        tried.append(f"running {running}: {lines or 'refused without a word why'}")
    raise DelegateUnavailable(
        f"expected an engine that runs here, got one built for {built}, {'; '.join(tried)}; {_advice(blob, kinds)}"
    )
