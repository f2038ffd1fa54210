"""GR4, GR5, GR6, GR10: a fault at every call to the device that a capture and its first replay make.

The calls are found by counting them in a run without a fault, so that none is forgotten when they change.
tests/cuda runs the same on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, Golden, golden
from .test_graphs import Accumulating, arrays

SCHEDULES: list[Any] = ["eager", "late", 3]


class Scene:
    """A program on a fresh device, called until it is in a steady state, with nothing in flight."""

    def __init__(self, program: Golden, make: Callable[[], Any], resident: bool) -> None:
        self.program = program
        self.device = make()
        self.loaded = program.load(self.device)
        self.method = self.loaded["forward"]
        self.stream = self.device.stream()
        self.inputs = [
            [self.device.to_device(x) if resident else x for x in program.inputs(k)] for k in range(3)
        ]
        self.scratch = self.device.empty(3, "float64")
        self.outputs = [self.call(k) for k in range(3)]
        self.outputs.clear()
        self.device.synchronize()
        self.nbytes = self.held()

    def held(self) -> int:
        gc.collect()
        self.device.synchronize()
        return int(self.device.memory()["current_nbytes"])

    def call(self, k: int) -> Any:
        return self.method(*self.inputs[k], stream=self.stream)

    def capture_and_replay(self) -> tuple[Any, Any]:
        """The graph, and what went wrong: None of both is None."""
        graph = None
        try:
            graph = self.method.capture(*self.inputs[0], stream=self.stream)
            graph.replay(*self.inputs[1], stream=self.stream)
        except headrace.HeadraceError as error:
            return graph, error
        return graph, None


def operations(device: Any) -> list[str]:
    """Every call that can be made to fail, as the device lists them."""
    with pytest.raises(headrace.InputError) as caught:
        device.fail("none of them")
    return str(caught.value).rpartition("one of: ")[2].split(", ")


def scenes(program: Golden, make: Callable[[], Any], resident: bool) -> Iterator[tuple[int, str, Scene]]:
    """A scene for each call of the device to fail in: the `at`-th one of an operation."""
    counted = Scene(program, make, resident)
    names = operations(counted.device)
    before = {name: counted.device.calls(name) for name in names}
    graph, error = counted.capture_and_replay()
    assert error is None and graph is not None
    after = {name: counted.device.calls(name) for name in names}
    # What a capture must have, or this enumerates something else.
    for name in ("begin_capture", "end_capture", "instantiate", "upload", "launch", "copy"):
        assert after[name] > before[name], name
    graph.close()
    counted.loaded.close()
    del graph, counted
    for operation in names:
        for at in range(after[operation] - before[operation]):
            yield at, operation, Scene(program, make, resident)


# Given up for good where they fail, with nobody to be told: what is left behind is a stream without work.
TOLD_NOBODY = {"destroy_stream"}


def on_sim(schedule: Any) -> Callable[[], Any]:
    return lambda: headrace.device("sim", schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "resident"),
    [("split_cuda_resident", True), ("split_cuda_resident", False), ("split_cuda", False)],
)
def test_a_fault_at_every_step_leaves_everything_as_it_was(name: str, resident: bool, schedule: Any) -> None:
    """GR4, GR5, GR6: one typed error, a clean stream, memory and selection as before, three right calls and three
    right replays after; graphs are off after a capture that failed, and only then."""
    a_fault_at_every_step(golden(name), on_sim(schedule), resident, least=0)


def a_fault_at_every_step(program: Golden, make: Callable[[], Any], resident: bool, least: int) -> None:
    """``least``: bytes that the device holds when nothing of the program is left."""
    steps: dict[str, set[str]] = {}
    count = 0
    for at, operation, scene in scenes(program, make, resident):
        what = f"{operation}, call {at}"
        scene.device.fail(operation, at)
        graph, error = scene.capture_and_replay()
        scene.device.clear_faults()
        count += 1
        assert headrace.current_stream() is None, what
        if error is None:
            assert operation in TOLD_NOBODY, what
        else:
            assert isinstance(error, headrace.CaptureError | headrace.DeviceError), what
            assert "injected" in str(error), what
            assert operation in str(error), what
        failed = graph is None and isinstance(error, headrace.CaptureError)
        if failed:
            steps.setdefault(error.step, set()).add(operation)
            assert error.step is not None and f"step '{error.step}'" in str(error), what
            assert "graphs are off" in str(error), what
        # The error is told once; the stream and the device carry on.
        scene.stream.synchronize()
        scene.device.synchronize()
        scene.device.to_device(np.arange(3.0), stream=scene.stream, out=scene.scratch)
        assert scene.scratch.numpy().tolist() == [0, 1, 2] and scene.stream._capture_status() == 0, what
        for k in range(3):
            assert program.right(scene.call(k), k), what
        if graph is not None:
            for k in range(3):
                assert program.right(graph.replay(*scene.inputs[k], stream=scene.stream), k), what
            assert graph.stats.eager == 0, what
            graph.close()
            del graph
        del error
        if failed:
            with pytest.raises(headrace.CaptureError, match="of which a capture failed before"):
                scene.method.capture(*scene.inputs[0], stream=scene.stream)
            # Nothing that it made is left; what calls made is their own, and there before.
            assert scene.held() == scene.nbytes, what
        scene.loaded.close()
        scene.inputs.clear()
        del scene.scratch
        scene.device.trim()
        assert scene.held() == least, what
    assert count >= 30
    assert {"stream", "memory", "inputs", "warm-up", "begin_capture", "end_capture"} <= set(steps)
    assert {"instantiate", "upload", "outputs"} <= set(steps)
    # On a GPU delegates launch without the device, and other calls while recording there are none.
    assert "record" in steps or make().name.startswith("cuda")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fault_at_every_step_leaves_the_state_as_it_was(schedule: Any) -> None:
    """GR6: what delegates keep from step to step is where it was before a capture that failed: the steps after it
    equal those of a program that was never captured."""
    delegates.install(Accumulating)
    program = golden("two_islands")
    with program.load("sim") as eager:
        wanted = [arrays(eager["forward"](*program.inputs(k)))[0] for k in (0, 1, 2, 0, 1, 2)]
    failures = 0
    for at, operation, scene in scenes(program, on_sim(schedule), False):
        scene.device.fail(operation, at)
        graph, error = scene.capture_and_replay()
        scene.device.clear_faults()
        if graph is not None or error is None:
            continue
        failures += 1
        for k in range(3):
            np.testing.assert_array_equal(
                arrays(scene.call(k))[0], wanted[3 + k], err_msg=f"{operation}, call {at}"
            )
    assert failures > 20


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", ["warm-up", "capture"])
def test_a_delegate_that_fails_in_a_capture_is_named(
    stage: str, schedule: Any, classes: dict[str, type[delegates.Base]]
) -> None:
    """GR6: by step, with the exception as the cause; calls run on."""
    program = golden("split_cuda_resident")
    scene = Scene(program, on_sim(schedule), True)
    given = RuntimeError("on purpose")

    def refuse(stream: Any) -> None:
        if delegates.Base.stage() == stage:
            raise given

    classes["TestB"].on_run = staticmethod(refuse)
    with pytest.raises(
        headrace.CaptureError, match=r"delegate 'TestB': run\(\) raised RuntimeError"
    ) as caught:
        scene.method.capture(*scene.inputs[0], stream=scene.stream)
    assert caught.value.step == {"warm-up": "warm-up", "capture": "record"}[stage]
    assert caught.value.__cause__ is given
    for k in range(3):
        assert program.right(scene.call(k), k)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_delegate_that_waits_in_a_capture_is_told_so(
    schedule: Any, classes: dict[str, type[delegates.Base]]
) -> None:
    """GR6, GR8: what CUDA forbids there is not done behind its back; the stream is clean afterwards."""
    program = golden("split_cuda_resident")
    for wait in ("stream", "device", "numpy"):
        scene = Scene(program, on_sim(schedule), True)
        spare = scene.device.to_device(np.ones(3, np.float32))
        waits: dict[str, Any] = {
            "stream": lambda stream: stream.synchronize(),
            "device": lambda stream: stream.device.synchronize(),
            "numpy": lambda stream, spare=spare: spare.numpy(),
        }

        def run(stream: Any, wait: Any = waits[wait]) -> None:
            if delegates.Base.stage() == "capture":
                wait(stream)

        classes["TestA"].on_run = staticmethod(run)
        with pytest.raises(headrace.CaptureError, match="STREAM_CAPTURE") as caught:
            scene.method.capture(*scene.inputs[0], stream=scene.stream)
        assert caught.value.step == "record"
        classes["TestA"].on_run = None
        np.testing.assert_array_equal(spare.numpy(), 1)
        assert program.right(scene.call(1), 1)


def test_replays_run_as_calls_once_a_capture_has_failed(
    sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """GR6: a graph that has to capture again and cannot: one error, then right answers without graphs, counted."""
    for cls in classes.values():
        cls.dynamic = True
    program = golden("split_cuda_dynamic")
    other = next(
        k for k in range(len(program.calls)) if program.inputs(k)[0].shape != program.inputs(0)[0].shape
    )
    for device in sims:
        with program.load(device) as loaded:
            graph = loaded["forward"].capture(*program.inputs(0))
            device.fail("instantiate")
            with pytest.raises(headrace.CaptureError, match="graphs are off") as caught:
                graph.replay(*program.inputs(other))
            assert caught.value.step == "instantiate"
            for k in (other, 0, other):
                assert program.right(graph.replay(*program.inputs(k)), k)
            assert (graph.stats.eager, graph.stats.captures) == (3, 1)


def test_what_had_failed_before_is_told_as_it_is(sims: Devices) -> None:
    """GR10: a failure that was pending on the caller's stream is raised by the capture that waits for it, with its
    own type; nothing was captured and nothing is off. A capture that fails leaves nothing pending."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            stream = device.stream()

            def fail() -> None:
                raise RuntimeError("the caller's own")

            stream.call(fail)
            with pytest.raises(headrace.DelegateError, match="the caller's own"):
                loaded["forward"].capture(*program.inputs(0), stream=stream)
            assert device.calls("begin_capture") == 0
            stream.synchronize()
            graph = loaded["forward"].capture(*program.inputs(0), stream=stream)
            assert program.right(graph.replay(*program.inputs(1), stream=stream), 1)
            # On a stream that the capture has nothing to do with it stays, for whoever waits there.
            other = device.stream()
            other.call(fail)
            device.fail("end_capture")
            second = program.load(device)
            with pytest.raises(headrace.CaptureError, match="end_capture"):
                second["forward"].capture(*program.inputs(0), stream=stream)
            second.close()
            stream.synchronize()
            with pytest.raises(headrace.DelegateError, match="the caller's own"):
                other.synchronize()
            device.synchronize()


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_passes_through_a_capture(
    passing: type[BaseException], sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """GR6: Ctrl-C in the middle of a capture: it is over, the thread's streams are clean."""
    program = golden("split_cuda_resident")
    for device in sims:
        for stage in ("warm-up", "capture"):
            with program.load(device) as loaded:
                given = passing("now")

                def interrupt(stream: Any, given: Any = given, stage: str = stage) -> None:
                    if delegates.Base.stage() == stage:
                        raise given

                classes["TestB"].on_run = staticmethod(interrupt)
                with pytest.raises(passing) as caught:
                    loaded["forward"].capture(*program.inputs())
                assert caught.value is given
                classes["TestB"].on_run = None
                device.synchronize()
                assert program.right(loaded["forward"](*program.inputs(1)), 1)
