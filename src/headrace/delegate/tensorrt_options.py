"""What a program's loader and exporter may ask of TensorRT's delegate."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NotSupported, OptionError, ProgramError
from ..pte.tensorrt import Blob
from .nvinfer import KINDS, Engine, RtxEngine, RuntimeCache, RuntimeConfig

__all__ = ["BUDGET", "OPTIONS", "Options", "RuntimeCacheFile", "options_of", "set_budget"]

OPTIONS = ("runtime", "runtime_cache", "use_shared_cuda_stream", "weight_streaming_budget")
BUDGET = "weight_streaming_budget"


@dataclass(frozen=True)
class Options:
    """``budget`` in bytes, None: TensorRT's own choice; ``runtime``: a kind of `nvinfer.KINDS`, empty: what fits."""

    budget: int | None
    runtime: str
    cache: Path | None


def _budget(value: Any, where: str, error: type[OptionError | ProgramError], do: str) -> int | None:
    """A number of bytes; None for an empty text. ``do``: what to do about anything else."""
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace").rstrip("\0")
    if value == "":
        return None
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise error(f"{where} '{BUDGET}': expected bytes as a decimal number, got {value!r}; {do}")


def options_of(given: Mapping[str, Any], specs: Mapping[str, bytes]) -> Options:
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
        raise OptionError(
            f"option 'runtime': expected one of {', '.join(KINDS)}, got {runtime!r}; leave it out"
        )
    cache = given.get("runtime_cache", "")
    if not isinstance(cache, str) or (
        cache and not (os.path.isabs(cache) and os.path.isdir(cache) and os.access(cache, os.W_OK))
    ):
        raise OptionError(
            f"option 'runtime_cache': expected the absolute path of a folder that can be written to, got {cache!r}; "
            "make it, or leave the option out"
        )
    budget = _budget(given.get(BUDGET, ""), "option", OptionError, "pass an int, or leave it to TensorRT")
    if budget is None and BUDGET in specs:
        budget = _budget(specs[BUDGET], "compile spec", ProgramError, "export it again")
    return Options(budget, runtime, Path(cache) if cache else None)


def set_budget(engine: Engine, budget: int | None) -> None:
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


class RuntimeCacheFile:
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
