"""What this installation has, and what it lacks and why."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass

import numpy as np

from . import engine as _engine
from .delegate import nvinfer
from .errors import DeviceError

__all__ = ["Cuda", "Diagnosis", "Gpu", "diagnose"]


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver tells of it. ``capability`` is such as ``"9.0"``; ``problem`` says why it cannot be
    used, and is empty where nothing speaks against it.

    ``partitions`` is empty where the driver lends the GPU's multiprocessors to green contexts, else why not and what to do, in
    the words in which ``Device.partition()`` refuses; it is empty too where no driver has them, see `Cuda`. A driver may
    still refuse when a partition is made, which needs a context. ``mps``: this process is a client of an MPS server there.
    ``mig``: it is an instance of a GPU that MIG divides."""

    device: str
    name: str
    capability: str
    sm_count: int
    memory_nbytes: int
    problem: str
    partitions: str
    mps: bool
    mig: bool


@dataclass(frozen=True)
class Cuda:
    """``driver`` is the CUDA version that the driver serves, such as ``"13.0"``, empty where there is none that
    works; ``missing`` then says what is missing and what to do. ``partitions`` is empty where the driver has green
    contexts, else why not; whether a GPU can be split is said with the GPU. ``workqueues`` is empty where a partition may be
    given workqueues (``workqueue_concurrency_limit``), else what the driver lacks."""

    driver: str
    missing: str
    partitions: str
    workqueues: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Diagnosis:
    """``engine_source`` is ``"bundled"``, or ``"installed"`` where a stock ExecuTorch's files are used. ``tensorrt`` are
    the kinds of TensorRT's run time, those that are not here included."""

    headrace: str
    python: str
    numpy: str
    machine: str
    engine: str
    engine_source: str
    engine_folder: str
    delegates: tuple[str, ...]
    kernels: int
    threads: int
    torch_loaded: bool
    cuda: Cuda
    tensorrt: tuple[nvinfer.Installed, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def _cuda() -> Cuda:
    try:
        version, no_partitions, no_workqueues, gpus = _engine.core.cuda_info()
    except DeviceError as error:
        return Cuda("", str(error), "", "", ())
    return Cuda(
        f"{version // 1000}.{version % 1000 // 10}",
        "" if gpus else "no GPU that the driver sees",
        no_partitions,
        no_workqueues,
        tuple(
            Gpu(f"cuda:{ordinal}", name, f"{major}.{minor}", *rest)
            for ordinal, name, major, minor, *rest in gpus
        ),
    )


def diagnose() -> Diagnosis:
    """Look at this process: the engine, its delegates and kernels, and the driver where there is one. Needs no
    device, and makes no context on one. Imports TensorRT's modules where they are installed."""
    from . import __version__

    found = _engine.engine()
    return Diagnosis(
        headrace=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        machine=f"{platform.system()} {platform.machine()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        engine=found.version,
        engine_source=found.source,
        engine_folder=found.folder,
        delegates=tuple(sorted(_engine.core.delegates())),
        kernels=len(set(_engine.core.kernels())),
        threads=_engine.num_threads(),
        torch_loaded="torch" in sys.modules,
        cuda=_cuda(),
        tensorrt=nvinfer.installed(),
    )
