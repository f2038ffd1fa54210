"""TensorRT's builder: from an ONNX graph to an engine. Imports no torch, and TensorRT once it is asked for.

Two packages have it, with one interface: ``tensorrt``, which needs the GPU that it builds for, and ``tensorrt_rtx``,
which needs none and leaves some of the compilation to the machine that loads the engine.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from ..errors import ExportError
from ..pte.tensorrt import DTYPES, Binding, Built
from . import progress
from .cache import Store

__all__ = ["Builder", "Settings", "Sizes", "Unbuilt", "named"]

# Of one input: its least, its best and its largest shape.
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

# By the name that an island's payload says: the modules that may have it, and what to install.
MODULES = {
    "tensorrt": (("tensorrt",), "pip install tensorrt"),
    "tensorrt_rtx": (
        ("tensorrt_rtx", "tensorrt_rtx_bindings"),
        "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
    ),
}
# After so many seconds without a new phase, a step is told of.
QUIET_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a builder is told; the contract is that of ``headrace.export.TensorRT``. ``compute_capabilities`` empty: all."""

    compute_capabilities: tuple[str, ...] = ()
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    tf32: bool = False
    optimization_level: int | None = None
    workspace_nbytes: int | None = None
    weight_streaming: bool = False


class Unbuilt(Exception):
    """The parser or the builder said no. ``log`` has its own words, ``nodes`` the names of ONNX nodes in them."""

    def __init__(self, message: str, log: Sequence[str] = (), nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log = list(log)
        self.nodes = list(nodes)


def named(name: str | None) -> Builder:
    """The builder ``name``; None: TensorRT's where it is installed, else TensorRT-RTX's.

    Raises ExportError where it is not installed, or cannot be used here, saying what to do.
    """
    why: dict[str, str] = {}
    for one in (name,) if name else tuple(MODULES):
        for module in MODULES[one][0]:
            try:
                return Builder(one, importlib.import_module(module))
            except ModuleNotFoundError as error:
                why.setdefault(one, f"no module {error.name!r}")
            except (ImportError, OSError, RuntimeError, TypeError) as error:
                why[one] = f"{type(error).__name__}: {error}"
        # A package that is there and cannot be used is no reason to build for another runtime.
        if name is None and not why[one].startswith("no module"):
            break
    said = "; ".join(f"{one}: {reason} ({MODULES[one][1]})" for one, reason in why.items())
    raise ExportError(
        f"TensorRT: expected a builder, got {said}; 'tensorrt' needs the GPU that it builds for, "
        "TensorRT(builder='tensorrt_rtx') none"
    )


class Builder:
    """One of the two packages, ``runtime`` by name. Not for several threads at once."""

    def __init__(self, runtime: str, module: Any) -> None:
        self.runtime = runtime
        self.module = module
        self.version = str(module.__version__)
        self.log: list[str] = []
        self._logger = _logger(module, self.log)
        self._builder = module.Builder(self._logger)

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """What engines can be built for by name; none where they are for the GPU that is there."""
        if self.runtime != "tensorrt_rtx":
            return ()
        members = [re.fullmatch(r"SM(\d+)(\d)", name) for name in self.module.ComputeCapability.__members__]
        return tuple(f"{m[1]}.{m[2]}" for m in members if m)

    def built(self, settings: Settings) -> Built:
        """What an engine's payload says of its origin."""
        return Built(self.runtime, self.version, settings.compute_capabilities, settings.version_compatible)

    def refusal(
        self,
        model: bytes,
        profiles: Sequence[Sequence[Sizes]] = (),
        settings: Settings | None = None,
        *,
        parse_only: bool = False,
    ) -> str | None:
        """What there is against a small graph, in the parser's own words; None where it is taken. TensorRT-RTX's builder
        is asked as well: that takes it milliseconds, and TensorRT's seconds."""
        try:
            network, parser = self._parsed(model)
        except Unbuilt as error:
            return f"TensorRT's parser: {error}"
        if self.runtime == "tensorrt_rtx" and not parse_only:
            try:
                self._built(network, self._configured(network, profiles, settings or Settings()))
            except Unbuilt as error:
                return f"TensorRT's builder: {error}"
        del parser  # it holds the weights
        return None

    def bindings(self, model: bytes) -> tuple[Binding, ...]:
        """The inputs, then the outputs, as the parser understands the graph; -1 is a size that varies. Raises Unbuilt."""
        return self._bindings(self._parsed(model)[0])

    def build(
        self,
        where: str,
        model: bytes,
        profiles: Sequence[Sequence[Sizes]],
        settings: Settings,
        store: Store | None = None,
    ) -> tuple[bytes, tuple[Binding, ...]]:
        """The engine, and its bindings as ``bindings`` has them. Seconds, with TensorRT minutes; reports progress as
        ``where``. ``profiles``: for each the sizes of every input, none where no size varies. ``store`` keeps
        the timing cache.

        Raises Unbuilt; ExportError for a setting that this builder lacks.
        """
        network, parser = self._parsed(model)
        config = self._configured(network, profiles, settings)
        monitor = _monitor(self.module, where)
        config.progress_monitor = monitor
        key = f"timing-{self.runtime}-{self.version}"
        timing = self._timing_cache(config, store.read(key) if store else None)
        try:
            engine = self._built(network, config)
        except Unbuilt:
            if monitor.failed is not None:
                raise monitor.failed from None
            raise
        if store is not None and timing is not None:
            store.write(key, {}, [bytes(timing.serialize())])
        del parser
        return engine, self._bindings(network)

    def _built(self, network: Any, config: Any) -> bytes:
        self.log.clear()
        engine = self._builder.build_serialized_network(network, config)
        if engine is None:
            said = [line for line in self.log if line]
            nodes = [network.get_layer(i).name for i in range(network.num_layers)]
            found = sorted({n for n in nodes if any(_names(line, n) for line in said)}, key=nodes.index)
            raise Unbuilt("; ".join(said) or "no engine, and no reason", said, found)
        return bytes(engine)

    def _parsed(self, model: bytes) -> tuple[Any, Any]:
        self.log.clear()
        # Types are the graph's own: nothing is computed in another precision than the model says. From TensorRT 11 on
        # every network is typed so, and the flag may be gone.
        flags = self.module.NetworkDefinitionCreationFlag
        typed = getattr(flags, "STRONGLY_TYPED", None)
        network = self._builder.create_network(0 if typed is None else 1 << int(typed))
        parser = self.module.OnnxParser(network, self._logger)
        if not parser.parse(model):
            errors = [parser.get_error(i) for i in range(parser.num_errors)]
            raise Unbuilt(
                "; ".join(dict.fromkeys(map(_described, errors))) or "; ".join(self.log) or "no reason",
                self.log,
                [error.node_name() for error in errors if error.node_name()],
            )
        return network, parser

    def _bindings(self, network: Any) -> tuple[Binding, ...]:
        found = []
        for is_input, count, get in (
            (True, network.num_inputs, network.get_input),
            (False, network.num_outputs, network.get_output),
        ):
            for tensor in map(get, range(count)):
                dtype = DTYPES.get(tensor.dtype.name, tensor.dtype.name)
                found.append(Binding(tensor.name, is_input, dtype, tuple(int(size) for size in tensor.shape)))
        return tuple(found)

    def _configured(self, network: Any, profiles: Sequence[Sequence[Sizes]], settings: Settings) -> Any:
        config = self._config(settings)
        for sizes in profiles:
            profile = self._builder.create_optimization_profile()
            for i, (low, opt, high) in enumerate(sizes):
                profile.set_shape(network.get_input(i).name, low, opt, high)
            if config.add_optimization_profile(profile) < 0:
                raise Unbuilt("; ".join(self.log) or "the optimization profile is refused", self.log)
        return config

    def _config(self, settings: Settings) -> Any:
        trt = self.module
        config = self._builder.create_builder_config()
        for flag, wanted in (
            ("TF32", settings.tf32),
            ("VERSION_COMPATIBLE", settings.version_compatible),
            ("WEIGHT_STREAMING", settings.weight_streaming),
        ):
            (config.set_flag if wanted else config.clear_flag)(getattr(trt.BuilderFlag, flag))
        if settings.optimization_level is not None:
            config.builder_optimization_level = settings.optimization_level
        if settings.workspace_nbytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_nbytes)
        if settings.hardware_compatibility != "none":
            level = getattr(trt.HardwareCompatibilityLevel, settings.hardware_compatibility.upper(), None)
            if level is None:
                raise ExportError(
                    f"TensorRT, hardware_compatibility: expected one that {self.runtime} {self.version} has, got "
                    f"{settings.hardware_compatibility!r}; pass one of these, or install another version"
                )
            config.hardware_compatibility_level = level
        if settings.compute_capabilities:
            config.num_compute_capabilities = len(settings.compute_capabilities)
            for i, one in enumerate(settings.compute_capabilities):
                if not config.set_compute_capability(
                    getattr(trt.ComputeCapability, f"SM{one.replace('.', '')}"), i
                ):
                    raise Unbuilt(f"compute capability {one} is refused: {'; '.join(self.log)}", self.log)
        return config

    def _timing_cache(self, config: Any, kept: Any) -> Any:
        """What was timed before, so that it need not be again, and so that the same is chosen. TensorRT-RTX times
        when the engine is loaded, and keeps none."""
        if self.runtime != "tensorrt":
            return None
        cache = config.create_timing_cache(kept[1][0] if kept else b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
        return cache


def _names(line: str, node: str) -> bool:
    return bool(node) and re.search(rf"(?<![\w.]){re.escape(node)}(?![\w.])", line) is not None


def _described(error: Any) -> str:
    """A parser's error: ``node_fft (DFT): no importer for …``."""
    node = error.node_name()
    operator = f" ({error.node_operator()})" if error.node_operator() else ""
    # Some descriptions are no more than the condition that was not met.
    text = f"{error.code().name}: " + re.sub(r"\s+", " ", str(error.desc())).strip()
    return f"{node}{operator}: {text}" if node else text


def _logger(module: Any, lines: list[str]) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                lines.append(message.strip())

    return Logger()


def _monitor(module: Any, where: str) -> Any:
    """Tells of the builder's phases, from whatever thread they are in. What a listener raises ends the build."""
    context, lock = copy_context(), threading.Lock()

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self.failed: BaseException | None = None
            self._steps: dict[str, int] = {}
            self._depth: dict[str, int] = {}
            self._said_at = time.monotonic()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with lock:
                depth = self._depth[phase_name] = self._depth.get(parent_phase or "", -1) + 1
                self._steps[phase_name] = num_steps
                if depth < 2:
                    self._say(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with lock:
                if time.monotonic() - self._said_at > QUIET_S:
                    self._say(f"{phase_name}, step {step + 1} of {self._steps.get(phase_name, 0)}")
            return self.failed is None

        def phase_finish(self, phase_name: str) -> None:
            with lock:
                self._depth.pop(phase_name, None)

        def _say(self, text: str) -> None:
            self._said_at = time.monotonic()
            if self.failed is None:
                try:
                    context.run(progress.report, f"{where}: {text}")
                except BaseException as error:
                    self.failed = error

    return Monitor()
