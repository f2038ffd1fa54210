"""AOTInductor's islands on a GPU: what each costs the host, and whole models beside PyTorch's own.

::

    python -m benchmarks aoti

Needs a GPU, cuda.bindings, a C++ compiler and PyTorch built for CUDA with Triton. The programs are exported where they
are missing, which needs no GPU but ``HEADRACE_EXPORT_PYTHON``: see ``aoti_models.py``. Everything lies in device memory, on
one stream, which PyTorch takes too.

``islands``  the time until a call of 2, 26 and 50 islands of one kernel each returns, with nothing to wait for, beside as
             many bare launches by cuLaunchKernel from a loop in C++. The slope leaves the cost of a call out. The goal: an
             island costs at most ``GOAL`` times a bare launch.
``models``   the time of one call at a time until its result is there, and until control comes back: ours, eagerly and as a
             graph; ``torch.compile`` by default and with ``mode="reduce-overhead"``. The same model, weights and
             input; float32, no TF32. PyTorch's own runner of AOTInductor's packages is no peer: that of 2.11 ends the process
             while it loads one, without anything of ours in it.

Peers take turns, sample by sample; medians.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import headrace
import headrace.aoti
from tests import programs
from tests.cuda import kernels

__all__ = ["GOAL", "available", "measure", "met", "table"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "bench" / "aoti"
GOAL = 1.2
SAMPLES = 300
PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry nothing(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) { ret; }
"""


def available() -> str | None:
    """Why this cannot be measured here, or None."""
    try:
        headrace.device("cuda:0")
    except headrace.DeviceError as error:
        return str(error)
    return "needs torch" if kernels.torch is None else None


def ensure(names: list[str]) -> None:
    """The exported programs, in ``FOLDER``."""
    if all((FOLDER / f"{name}.npz").exists() for name in names):
        return
    script = Path(__file__).with_name("aoti_models.py")
    command = [programs.export_python(), str(script), str(FOLDER), *programs.package_folders()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"benchmarks: expected exit status 0 from aoti_models.py, got {done.stderr[-2000:]}")


class Bare:
    """Launches by the driver alone, of a kernel that does nothing and takes what a small one of Triton's takes."""

    def __init__(self, stream: Any, memory: int, folder: Path) -> None:
        from cuda.bindings import driver

        library = folder / "liblaunches.so"
        compiler = os.environ.get("CXX", "c++")
        source = Path(__file__).with_name("launches.cpp")
        subprocess.run(
            [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"],
            check=True,
        )
        self.run = ctypes.CDLL(str(library)).launches_run
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
        kernels.torch.cuda.current_stream()  # the primary context is current
        error, module = driver.cuModuleLoadData(PTX)
        assert error == driver.CUresult.CUDA_SUCCESS, error
        error, function = driver.cuModuleGetFunction(module, b"nothing")
        assert error == driver.CUresult.CUDA_SUCCESS, error
        self.function, self.stream, self.memory = int(function), stream.handle, memory

    def __call__(self, count: int) -> None:
        result = self.run(self.function, self.stream, self.memory, count)
        assert result == 0, result


def host_us(call: Callable[[], Any], stream: Any) -> float:
    """Until control comes back; the stream is empty before."""
    stream.synchronize()
    began = time.perf_counter()
    kept = call()
    took = time.perf_counter() - began
    stream.synchronize()
    del kept
    return took * 1e6


def whole_us(call: Callable[[], Any], stream: Any) -> float:
    """Until the result is there."""
    stream.synchronize()
    began = time.perf_counter()
    kept = call()
    stream.synchronize()
    took = time.perf_counter() - began
    del kept
    return took * 1e6


def right(name: str, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4, err_msg=name)


def islands(gpu: Any, stream: Any, rounds: int) -> dict[str, Any]:
    from .aoti_models import CHAINS

    results: dict[str, Any] = {}
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[str, Callable[[], Any]] = {}
        for name, count in CHAINS.items():
            data = np.load(FOLDER / f"{name}.npz")
            method = headrace.load(FOLDER / f"{name}.pte", device=gpu)["forward"]
            x = gpu.to_device(data["x"])
            assert len(headrace.aoti.read(FOLDER / f"{name}.pte")) == count
            right(name, method(x, stream=stream)[0].numpy(), data["y"])
            calls[f"headrace {count}"] = lambda method=method, x=x: method(x, stream=stream)
        bare = Bare(stream, x.address, Path(folder))
        for count in CHAINS.values():
            calls[f"driver {count}"] = lambda count=count: bare(count)
        for _ in range(20):
            for call in calls.values():
                call()
        for _ in range(SAMPLES * rounds):
            for name, call in calls.items():
                samples.setdefault(name, []).append(host_us(call, stream))
    for peer in ("headrace", "driver"):
        us = {str(count): statistics.median(samples[f"{peer} {count}"]) for count in CHAINS.values()}
        first, *_, last = CHAINS.values()
        slope = (us[str(last)] - us[str(first)]) / (last - first)
        results[peer] = {"call_us": us, "slope_us": slope}
    results["ratio"] = results["headrace"]["slope_us"] / results["driver"]["slope_us"]
    return results


def torch_peers(name: str, x: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's own ways for the model, those that work here."""
    from .aoti_models import make

    torch = kernels.torch
    model = make(name)[0].cuda()

    def reduced() -> Callable[[], Any]:
        compiled = torch.compile(model, mode="reduce-overhead")

        def call() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(x)

        return call

    def compiled() -> Callable[[], Any]:
        made = torch.compile(model)
        return lambda: made(x)

    ways = {"torch.compile": compiled, "torch, reduce-overhead": reduced}
    found = {}
    for way, prepare in ways.items():
        torch.compiler.reset()
        try:
            call = prepare()
            for _ in range(5):
                call()
            found[way] = call
        except Exception as error:
            print(
                f"  {name}, {way}: does not work here: {type(error).__name__}: {str(error)[:200]}", flush=True
            )
    return found


def models(gpu: Any, stream: Any, rounds: int) -> dict[str, Any]:
    from .aoti_models import MODELS

    torch = kernels.torch
    outside = torch.cuda.ExternalStream(stream.handle)
    results: dict[str, Any] = {}
    for name in MODELS:
        data = np.load(FOLDER / f"{name}.npz")
        with headrace.load(FOLDER / f"{name}.pte", device=gpu) as program:
            method = program["forward"]
            x = gpu.to_device(data["x"])
            graph = method.capture(x, stream=stream)
            peers: dict[str, Callable[[], Any]] = {
                "headrace": lambda m=method, x=x: m(x, stream=stream),
                "headrace, graph": lambda g=graph, x=x: g.replay(x, stream=stream, borrow=True),
            }
            for peer, call in peers.items():
                right(f"{name}, {peer}", call()[0].numpy(), data["y"])
            with torch.no_grad(), torch.cuda.stream(outside):
                theirs = torch_peers(name, torch.from_numpy(data["x"]).cuda())
                for peer, call in theirs.items():
                    got = call()
                    got = got[0] if isinstance(got, list | tuple) else got
                    right(f"{name}, {peer}", got.cpu().numpy(), data["y"])
                peers |= theirs
                host: dict[str, list[float]] = {peer: [] for peer in peers}
                whole: dict[str, list[float]] = {peer: [] for peer in peers}
                for number in range(SAMPLES * rounds + 20):
                    for peer, call in peers.items():
                        took = host_us(call, stream), whole_us(call, stream)
                        if number >= 20:
                            host[peer].append(took[0])
                            whole[peer].append(took[1])
            graph.close()
        results[name] = {
            peer: {
                "host_us": statistics.median(host[peer]),
                "whole_us": statistics.median(whole[peer]),
                "p99_us": float(np.percentile(whole[peer], 99)),
                "ratio": statistics.median(
                    a / b for a, b in zip(whole[peer], whole["headrace, graph"], strict=True)
                ),
            }
            for peer in peers
        }
    return results


def measure(rounds: int) -> dict[str, Any]:
    """Medians of ``rounds`` times ``SAMPLES`` samples."""
    from .aoti_models import CHAINS, MODELS

    ensure([*MODELS, *CHAINS])
    gpu = headrace.device("cuda:0")
    stream = gpu.stream()
    return {"islands": islands(gpu, stream, rounds), "models": models(gpu, stream, rounds)}


def met(results: dict[str, Any]) -> bool:
    return bool(results["islands"]["ratio"] <= GOAL)


def table(results: dict[str, Any]) -> str:
    found = results["islands"]
    counts = list(found["driver"]["call_us"])
    lines = [
        f"{'AOTInductor, host µs for':26}" + "".join(f"{c + ' islands':>14}" for c in counts) + "   for each"
    ]
    for peer in ("headrace", "driver"):
        row = found[peer]
        lines.append(
            f"  {peer:24}"
            + "".join(f"{row['call_us'][c]:14.2f}" for c in counts)
            + f"{row['slope_us']:11.2f}"
        )
    verdict = "meets" if met(results) else "MISSES"
    lines.append(f"  an island to a bare launch: {found['ratio']:.2f}; {verdict} the goal of {GOAL:g}")
    lines.append(f"{'models, µs':40}{'host':>10}{'whole':>10}{'p99':>10}{'to our graph':>14}")
    for name, peers in results["models"].items():
        for peer, row in peers.items():
            lines.append(
                f"  {name:13}{peer:25}{row['host_us']:10.1f}{row['whole_us']:10.1f}{row['p99_us']:10.1f}{row['ratio']:14.2f}"
            )
    return "\n".join(lines)
