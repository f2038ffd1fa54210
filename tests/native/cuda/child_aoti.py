"""AOTInductor's CUDA libraries on cuda:0 of the fake driver, in a process of its own.

The library is a real one, and so is everything between `load()` and the driver; the fake's memory is the host's, and a
kernel there adds the first numbers of what it reads. So a weight that is bound wrong, an input read too early and a
kernel left out, done twice or in another order change the result.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import warnings
from typing import Any

import numpy as np

import headrace
from headrace import aoti, lanes, pte
from tests import programs

from .child import driver, refused
from .child_graphs import NAMES, UNKNOWN, settle

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))


def first(address: int) -> Any:
    return np.frombuffer((ctypes.c_char * 4).from_address(address), np.float32)


@Kernel
def add_first_numbers(name: bytes, arguments: Any) -> None:
    """Of three inputs, to the fourth argument, the output; and one. What makes a constant has an output alone."""
    inputs = 0 if name.startswith(b"triton_poi") else 3
    first(arguments[inputs])[:] = sum(first(arguments[i])[0] for i in range(inputs)) + np.float32(1)


def counts(name: str) -> int:
    return int(driver.fake_calls(name.encode()))


class Mlp:
    """A program of a layer norm and two products, each with constants of its own; small ones are made by a kernel."""

    def __init__(self) -> None:
        self.program = programs.CUDA_FEW.load("mlp")
        (self.island,) = aoti.read(self.program.path)
        weights = 0.0
        for constant in self.island.constants:
            weights += float(np.frombuffer(self.bytes_of(constant.key), np.float32)[0])
        library = self.bytes_of(self.island.library_key)
        self.kernels = set(re.findall(rb"\0(triton_[a-z]+_fused_\w*_?\d+)\0", library))
        for name in self.kernels:
            signature = b"p" if name.startswith(b"triton_poi") else b"pppp"
            driver.fake_kernel(name, signature, add_first_numbers)
        assert len(self.island.constants) >= 5 and weights != 0.0 and len(self.kernels) >= 3, self.kernels
        self.weights = weights

    def bytes_of(self, key: str) -> bytes:
        for path in (self.program.path, *self.program.data):
            file = path.read_bytes()
            found = aoti.library(path, key) if path.suffix == ".pte" else None
            if found is not None:
                return found
            data = pte.read_data(file) if path.suffix == ".ptd" else None
            if data is not None:
                entry = next((e for e in data.entries if e.key == key), None)
                if entry is not None:
                    return file[entry.offset : entry.offset + entry.nbytes]
        raise AssertionError(f"{key} is in no file")

    def inputs(self, k: int) -> list[Any]:
        return [v.data for v in self.program.calls[k % len(self.program.calls)].inputs]

    def right(self, result: Any, k: int) -> bool:
        got = result.numpy() if isinstance(result, headrace.Buffer) else result
        want = float(self.inputs(k)[0].ravel()[0]) + self.weights + len(self.kernels)
        return bool(np.isclose(got.ravel()[0], want, rtol=1e-4, atol=1e-4))


def calls(gpu: Any, mlp: Mlp) -> None:
    """DE1, SY1, SY2, SY4: right on every stream; all that a call needs is had while the program loads."""
    launches = counts("cuLaunchKernel")
    with mlp.program.open(gpu) as loaded:
        method = loaded["forward"]
        assert counts("cuModuleLoadData") == len(mlp.kernels) and counts("cuLaunchKernel") == launches
        streams = [
            None,
            gpu.stream(),
            gpu.stream(blocking=True),
            gpu.per_thread_stream(),
            gpu.legacy_stream(),
        ]
        streams.append(gpu.partition(sms=8).stream())
        ran = 0
        modules, made = counts("cuModuleLoadData"), counts("cuMemAllocFromPoolAsync")
        for k in range(3):
            for stream in streams:
                (result,) = method(*mlp.inputs(k), stream=stream)
                ran += 1
                assert mlp.right(result, k)
        assert counts("cuLaunchKernel") == launches + len(mlp.kernels) * ran
        assert counts("cuModuleLoadData") == modules
        # Of the method's own: staging and outputs. None of the island's.
        assert counts("cuMemAllocFromPoolAsync") - made <= 2
        before = counts("cuMemAllocFromPoolAsync"), counts("cuEventCreate")
        (result,) = method(*mlp.inputs(0), stream=streams[1])
        assert (counts("cuMemAllocFromPoolAsync"), counts("cuEventCreate")) == before


def another_gpu(mlp: Mlp) -> None:
    """DE1, CS6: the library finds the program's device current, and no other; the thread's is what it was."""
    gpu = headrace.device("cuda:1")
    with mlp.program.open(gpu) as loaded:
        for k in range(3):
            assert mlp.right(loaded["forward"](*mlp.inputs(k), stream=gpu.stream())[0], k)
        graph = loaded["forward"].capture(*mlp.inputs(0))
        assert mlp.right(graph.replay(*mlp.inputs(1))[0], 1)
        graph.close()
    settle(gpu)


def instances_share_weights(gpu: Any, mlp: Mlp) -> None:
    """DE1: one copy on the device for all instances; each has temporaries of its own."""
    held = []
    for instances in (1, 2, 3):
        before = settle(gpu)
        with mlp.program.open(gpu, instances=instances):
            held.append(int(gpu.memory()["current_nbytes"]) - before)
    weights = sum(c.nbytes for c in mlp.island.constants)
    assert held[2] - held[1] == held[1] - held[0] == held[0] - _rounded(mlp) < held[0] and weights > 0


def _rounded(mlp: Mlp) -> int:
    return sum((c.nbytes + 63) // 64 * 64 for c in mlp.island.constants)


def graphs(gpu: Any, mlp: Mlp) -> None:
    """GR1, GR2, GR7, LT4: captured as the first call; replays launch no kernel by themselves, and see their inputs;
    the graph outlives its program, with the library's modules."""
    loaded = mlp.program.open(gpu)
    stream = gpu.stream()
    graph = loaded["forward"].capture(*mlp.inputs(0), stream=stream)
    assert mlp.right(graph.outputs[0], 0)
    launches = counts("cuLaunchKernel")
    for k in range(6):
        assert mlp.right(graph.replay(*mlp.inputs(k), stream=stream)[0], k)
        if k % 2:
            assert mlp.right(loaded["forward"](*mlp.inputs(k))[0], k)
    assert counts("cuLaunchKernel") == launches + len(mlp.kernels) * 3
    results = graph.replay(*mlp.inputs(1), stream=stream)
    loaded.close()
    del loaded
    gc.collect()
    assert mlp.right(results[0], 1)
    graph.close()
    del graph


# A context that cannot be taken off the stack stays there, as does a graph or event that cannot be destroyed.
FIXED = {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent", "cuCtxPopCurrent"}
FIXED |= {"cuGraphDestroy", "cuGraphExecDestroy", "cuEventDestroy", "cuCtxGetCurrent"}
# A driver that tells an earlier failure may have unloaded the module all the same, so nobody asks it twice.
FIXED |= {"cuModuleUnload"}
LEFT = {"modules", "stack", "unloaded", "captures", "graphs", "streams"}
# What a library's work is made of.
TOLD = {
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuMemcpyAsync",
    "cuMemAllocFromPoolAsync",
}


def faults(gpu: Any, mlp: Mlp) -> int:
    """OP3, OP4, LT2, LT3: each driver call of a load, a call, a capture and a replay fails once: a typed error, the
    next try is right, nothing is left, and the thread's contexts are what they were."""
    steps: dict[str, Any] = {
        "load": lambda: mlp.program.open(gpu).close(),
        "call": lambda: mlp.program.open(gpu)["forward"](*mlp.inputs(0)),
        "graph": lambda: mlp.program.open(gpu)["forward"].capture(*mlp.inputs(0)).replay(*mlp.inputs(1)),
    }
    done = 0
    for what, step in steps.items():
        step()
        empty = settle(gpu)
        before = {name: counts(name) for name in NAMES}
        step()
        after = {name: counts(name) for name in NAMES}
        settle(gpu)
        for name in sorted(set(NAMES) - FIXED):
            for at in range(after[name] - before[name]):
                driver.fake_fail(name.encode(), at, UNKNOWN)
                error = None
                try:
                    step()
                except headrace.HeadraceError as e:
                    error = e
                driver.fake_forget_faults()
                where = f"{what}, {name}, call {at}: {error!r}"
                assert error is not None or name not in TOLD, where
                expected = headrace.DeviceError | headrace.DelegateError | headrace.CaptureError
                assert error is None or isinstance(error, expected), where
                if isinstance(error, headrace.DeviceError) and name in TOLD:
                    assert "cuda:0" in str(error), where
                del error
                done += 1
                step()
                assert settle(gpu) == empty, where
                left = driver.fake_left().decode()
                assert not LEFT & set(re.findall(r"[a-z]+", left)), (where, left)
    return done


def no_kernel_for_this_gpu(gpu: Any, mlp: Mlp) -> None:
    """DE5: what the driver says while the kernels are loaded, by type and when the program loads."""
    driver.fake_fail(b"cuModuleLoadData", 1, 209)
    refused(headrace.DelegateUnavailable, "NO_BINARY_FOR_GPU|export", lambda: mlp.program.open(gpu))
    driver.fake_forget_faults()


def main() -> None:
    # Streams in a lane and outside are what is shown here, with nothing that could be disturbed.
    warnings.simplefilter("ignore", headrace.LaneWarning)
    gpu = headrace.device("cuda:0")
    mlp = Mlp()
    calls(gpu, mlp)
    another_gpu(mlp)
    instances_share_weights(gpu, mlp)
    graphs(gpu, mlp)
    no_kernel_for_this_gpu(gpu, mlp)
    assert faults(gpu, mlp) > 100
    assert settle(gpu) == 0, gpu.memory()
    del gpu
    gc.collect()
    driver.fake_run_all()
    for name in ("cuda:0", "cuda:1"):
        headrace.device(name).synchronize()
    left = driver.fake_left().decode()
    assert left == "", left
    print("done")


def look_at_a_lane(nodes: bool = True) -> None:
    """GC2: compiled kernels, which nobody can change: each is looked at, and one that leaves the lane is named. `nodes`:
    whether the driver has the entry points for it; what it lacks is named, and the calls are looked at all the same."""
    gpu = headrace.device("cuda:0")
    mlp = Mlp()
    tenant = lanes.Tenant(mlp.program.path, mlp.inputs(0), data=mlp.program.data, name="mlp")
    lane = gpu.split([8, 16])[1]
    settle(gpu)
    seen = lanes.confinement(tenant, lane)
    assert seen.confined and seen.sms == seen.replayed == frozenset(range(8, 24)) and len(seen.eager) == 4
    if nodes:
        assert seen.kernels == len(mlp.kernels) and seen.not_looked == "", seen
        assert f"{seen.kernels} kernels of its graph are in the lane" in str(seen)
        name = sorted(mlp.kernels)[0]
        driver.fake_escape(name)
        seen = lanes.confinement(tenant, lane)
        driver.fake_escape(b"")
        assert not seen.confined and seen.escaped == (f"in its graph: {name.decode()} runs outside the lane",)
        assert "leaves its lane of 16 SMs" in str(seen) and name.decode() in str(seen)
        # A driver that tells nothing of functions, which these are.
        os.environ["FAKE_CONTEXTS"] = "1"
        seen = lanes.confinement(tenant, lane)
        assert seen.confined and (seen.kernels, seen.untold_kernels) == (0, len(mlp.kernels))
        assert f"does not for any of {len(mlp.kernels)}" in seen.not_looked
        del os.environ["FAKE_CONTEXTS"]
        del lane, tenant
        gc.collect()
        settle(gpu)
    else:
        assert seen.kernels == 0 and "without cuGraphGetNodes" in seen.not_looked
        assert "calls alone were checked" in str(seen)
        del lane, tenant
    gc.collect()
    assert settle(gpu) == 0, gpu.memory()
    left = driver.fake_left().decode()
    assert left == "", left
    print("done")


def refuse_another_architecture() -> None:
    """DE5: both named, at load, before anything of the library runs."""
    mlp = Mlp()
    refused(
        headrace.DelegateUnavailable,
        "cuda:0|compute capability 10.0|sm_100|sm_90|cuda:sm_100",
        lambda: mlp.program.open(headrace.device("cuda:0")),
    )
    assert counts("cuModuleLoadData") == 0
    print("done")
