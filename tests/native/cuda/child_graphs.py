"""Graphs on cuda:0 of the fake driver, in a process of its own: the delegates and helpers are child.py's.

Capture, launch and the rules about them are the fake's, which are those measured on a GPU; so the code between
`Method.capture` and the driver is the one that runs there.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from typing import Any

import headrace
from tests import programs

from . import child
from .child import TWO, check, driver

RESIDENT = child.ROOT / "chain10.pte"
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
# As the fake counts its calls.
NAMES = re.findall(r'BEGIN\("(\w+)"\)', (programs.ROOT / "tests/native/cuda/fake_driver.cpp").read_text())
# Made by the delegates of child.py too; a context that cannot be taken off the stack stays there.
FIXED = {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent", "cuCtxPopCurrent"}
# What work is made of. Others are made by cleaning up too, which has nobody to tell.
ALWAYS_TOLD = {
    "cuMemAllocFromPoolAsync",
    "cuMemcpyAsync",
    "cuStreamCreateWithPriority",
    "cuStreamSynchronize",
}
ALWAYS_TOLD |= {"cuLaunchHostFunc", "cuEventRecord", "cuEventSynchronize", "cuStreamBeginCapture"}
ALWAYS_TOLD |= {
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo",
    "cuGraphInstantiate",
    "cuGraphUpload",
    "cuGraphLaunch",
}


def settle(gpu: Any) -> int:
    driver.fake_run_all()
    gc.collect()
    gpu.synchronize()
    gpu.trim()
    return int(gpu.memory()["current_nbytes"])


def replays(gpu: Any, method: Any, calls: Any) -> None:
    """GR1, GR2: host arrays, Buffers and other libraries' arrays, written late on another stream; every stream."""
    other, lane = gpu.stream(), gpu.partition(sms=8)
    graph = method.capture(*calls[0][0])
    check(graph.outputs[0], calls[0][1])
    streams = [None, gpu.stream(), gpu.stream(blocking=True), gpu.per_thread_stream(), lane.stream()]
    for inputs, want in calls:
        for stream in streams:
            check(graph.replay(*inputs, stream=stream)[0], want)
            check(graph.replay(*[gpu.to_device(x) for x in inputs], stream=stream)[0], want)
            foreign = [child.Foreign(child.late(gpu, x, other), other) for x in inputs]
            check(graph.replay(*foreign, stream=stream)[0], want)
            faced = [child.Faced(child.late(gpu, x, other), stream=other.handle) for x in inputs]
            check(graph.replay(*faced, stream=stream)[0], want)
            check(method(*inputs, stream=stream)[0], want)
    assert graph.stats.recaptures == {"partition": 1}, graph.stats
    launches, functions = (driver.fake_calls(n) for n in (b"cuGraphLaunch", b"cuLaunchHostFunc"))
    graph.replay(*calls[0][0], stream=streams[1])
    assert driver.fake_calls(b"cuGraphLaunch") == launches + 1
    assert driver.fake_calls(b"cuLaunchHostFunc") == functions, "no delegate ran"
    graph.close()


def costs(gpu: Any) -> None:
    """BY3, LT4: what a replay asks of the driver does not grow with those in flight before it; its context is put in
    place once, and the caller's is back."""
    stream = gpu.stream()
    (recorded, *_) = programs.read_calls(RESIDENT.with_suffix(".npz"))
    inputs, want = [gpu.to_device(v.data) for v in recorded.inputs], recorded.outputs[0].data
    with headrace.load(RESIDENT, device=gpu) as program:
        calls_of = {
            "call": program["forward"],
            "replay": program["forward"].capture(*inputs, stream=stream).replay,
        }
        for what, call in calls_of.items():
            for _ in range(5):
                call(*inputs, stream=stream)
            before = {name: driver.fake_calls(name.encode()) for name in NAMES}
            for _ in range(60):
                (result,) = call(*inputs, stream=stream)
            counts = {name: (driver.fake_calls(name.encode()) - before[name]) / 60 for name in NAMES}
            assert counts["cuEventQuery"] <= 2 and counts["cuEventCreate"] < 1, (what, counts)
            if what == "replay":
                assert counts["cuCtxPushCurrent"] <= 2 and counts["cuGraphLaunch"] == 1, counts
                assert counts["cuStreamWaitEvent"] <= 2 * len(inputs) + 1 and counts["cuEventRecord"] == 1, (
                    counts
                )
            assert child.current_context() is None
            check(result, want)
            del result


def in_the_caller_s_capture(gpu: Any, method: Any, calls: Any) -> None:
    """GR8: refused before anything is enqueued, the capture intact; elsewhere on the thread calls go on in it."""
    inputs, want = calls[0]
    graph = method.capture(*inputs)
    stream, other = gpu.stream(), gpu.stream()
    for mode in range(3):
        ran: list[int] = []
        stream._begin_capture(mode)
        child.launch(stream.handle, lambda ran=ran: ran.append(1))
        for run in (method, graph.replay, method.capture):
            child.refused(
                headrace.CaptureError, "does not capture", lambda run=run: run(*inputs, stream=stream)
            )
        results = [method(*inputs, stream=other), graph.replay(*inputs, stream=other)]
        assert stream._capture_status() == 1
        launch = stream._end_capture()
        launch(other)
        assert ran == [1]
        for result in results:
            check(result[0], want)
        del launch
    graph.close()


def faults(gpu: Any, calls: Any) -> Iterator[tuple[str, int]]:
    """GR4, GR5, GR6: each driver call of a capture and the first replay fails once, found by counting."""
    before = {name: driver.fake_calls(name.encode()) for name in NAMES}
    with headrace.load(TWO, device=gpu) as program:
        loaded = {name: driver.fake_calls(name.encode()) for name in NAMES}
        program["forward"].capture(*calls[0][0]).replay(*calls[1][0])
        after = {name: driver.fake_calls(name.encode()) for name in NAMES}
    assert before and after["cuStreamBeginCapture"] == loaded["cuStreamBeginCapture"] + 1
    for name in sorted(set(NAMES) - FIXED):
        for at in range(after[name] - loaded[name]):
            yield name, at


def a_fault_at_every_driver_call(gpu: Any, calls: Any) -> tuple[int, set[str | None]]:
    count = 0
    steps: set[str | None] = set()
    assert set(NAMES) >= ALWAYS_TOLD
    for name, at in list(faults(gpu, calls)):
        what = f"{name}, call {at}"
        empty = settle(gpu)
        program = headrace.load(TWO, device=gpu)
        method, stream = program["forward"], gpu.stream()
        child.check(method(*calls[0][0], stream=stream)[0], calls[0][1])
        held = settle(gpu)
        driver.fake_fail(name.encode(), at, UNKNOWN)
        graph, error = None, None
        try:
            graph = method.capture(*calls[0][0], stream=stream)
            graph.replay(*calls[1][0], stream=stream)
        except headrace.HeadraceError as e:
            error = e
        driver.fake_forget_faults()
        count += 1
        assert error is not None or name not in ALWAYS_TOLD, what
        if error is not None:
            assert isinstance(error, headrace.CaptureError | headrace.DeviceError), (what, error)
            if isinstance(error, headrace.CaptureError):
                steps.add(error.step)
        assert headrace.current_stream() is None and stream._capture_status() == 0, what
        stream.synchronize()
        for inputs, want in calls[:3]:
            check(method(*inputs, stream=stream)[0], want)
            if graph is not None:
                check(graph.replay(*inputs, stream=stream)[0], want)
        if graph is None:
            assert settle(gpu) == held, (what, error)
        del error, graph
        program.close()
        del program, method, stream
        assert settle(gpu) == empty, what
    return count, steps


def main() -> None:
    warnings.simplefilter("ignore", headrace.LaneWarning)
    gpu = headrace.device("cuda:0")
    calls = [
        ([v.data for v in c.inputs], c.outputs[0].data) for c in programs.read_calls(TWO.with_suffix(".npz"))
    ]
    with headrace.load(TWO, device=gpu) as program:
        replays(gpu, program["forward"], calls)
        in_the_caller_s_capture(gpu, program["forward"], calls)
    del program
    costs(gpu)
    count, steps = a_fault_at_every_driver_call(gpu, calls)
    assert count > 100 and {"begin_capture", "record", "end_capture", "instantiate", "upload"} <= steps, (
        count,
        steps,
    )
    assert settle(gpu) == 0, gpu.memory()
    del gpu
    gc.collect()
    driver.fake_run_all()
    headrace.device("cuda:0").synchronize()
    left = driver.fake_left().decode()
    assert left == "", left
    print("done")
