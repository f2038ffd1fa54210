"""Small programs on a simulated device, some with a fault of order planted, some right.

Each takes a device and returns (what came out, what should have). A fault is one whatever the schedule, so the
record shows it under every schedule; the wrong value shows under some.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace
from tests import programs
from tests.programs import graph

__all__ = ["FAULTS", "RIGHT", "define", "kept", "own_streams"]

Plant = Callable[[Any], tuple[Any, Any]]
FAULTS: dict[str, Plant] = {}
RIGHT: dict[str, Plant] = {}


def fault(function: Plant) -> Plant:
    FAULTS[function.__name__] = function
    return function


def right(function: Plant) -> Plant:
    RIGHT[function.__name__] = function
    return function


def zeros(device: Any, count: int = 4) -> Any:
    return device.to_device(np.zeros(count, np.float32))


def put(stream: Any, buffer: Any, value: float) -> None:
    stream.call(lambda: buffer.numpy().fill(value), writes=[buffer])


def add(stream: Any, buffer: Any, value: float) -> None:
    def work() -> None:
        buffer.numpy()[...] += value

    stream.call(work, reads=[buffer], writes=[buffer])


def times(stream: Any, buffer: Any, value: float) -> None:
    def work() -> None:
        buffer.numpy()[...] *= value

    stream.call(work, reads=[buffer], writes=[buffer])


def copy(stream: Any, to: Any, source: Any) -> None:
    stream.call(lambda: to.numpy().__setitem__(..., source.numpy()), reads=[source], writes=[to])


def result(device: Any, buffer: Any) -> float:
    device.synchronize()
    return float(buffer.numpy()[0])


def in_thread(function: Callable[[], Any]) -> Any:
    """Runs it on a thread of its own, to its end."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


# ------------------------------------------------------------------ delegates

# What taps have read, by call; kept alive beside their delegates.
kept: list[Any] = []


def define(name: str, run: Callable[..., None] | None = None) -> type:
    """A delegate for the tests' payloads. ``run(self, work, inputs, outputs, stream)`` enqueues ``work``; without it
    the work goes on the stream of the call, as it should."""

    class Computes(headrace.Delegate, name=name):
        def load(self, payload: bytes, context: Any) -> None:
            self.compute = graph.compile(payload)
            self.device = context.device
            self.streams: list[Any] = []

        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            def work() -> None:
                results = self.compute([x.numpy() for x in inputs])
                for out, got in zip(outputs, results, strict=True):
                    out.numpy()[...] = got

            if run is None:
                stream.call(work, reads=inputs, writes=outputs)
            else:
                run(self, work, inputs, outputs, stream)

        def side(self) -> Any:
            if not self.streams:
                self.streams.append(self.device.stream())
            return self.streams[0]

    return Computes


def own_streams(self: Any, work: Any, inputs: Any, outputs: Any, stream: Any) -> None:
    self.side().call(work, reads=inputs, writes=outputs)


def forked(self: Any, work: Any, inputs: Any, outputs: Any, stream: Any) -> None:
    side = self.side()
    side.wait(stream.record())
    side.call(work, reads=inputs, writes=outputs)
    stream.wait(side.record())


def undeclared(self: Any, work: Any, inputs: Any, outputs: Any, stream: Any) -> None:
    stream.call(work)


def tapped(self: Any, work: Any, inputs: Any, outputs: Any, stream: Any) -> None:
    """Reads its result on another stream too, behind the writer, and forgets to let anything wait for that."""
    stream.call(work, reads=inputs, writes=outputs)
    side, tap = self.side(), self.device.empty(outputs[0].shape, stream=self.side())
    side.wait(stream.record())
    copy(side, tap, outputs[0])
    kept.append(tap)


def chain(
    device: Any, name: str = "chain25_cuda", first: Any = None, second: Any = None
) -> tuple[headrace.Program, Any, Any]:
    """The program of 25 islands over two delegates, an input, and eager PyTorch's answer."""
    program = programs.load(name)
    for delegate, run in zip(sorted(program.delegates), (first, second), strict=False):
        define(delegate, run)
    call = program.calls[0]
    return headrace.load(program.path, device=device), call.inputs[0].data, call.outputs[0].data


def two_islands(device: Any, run: Any) -> tuple[headrace.Program, list[Any], Any]:
    """A program of two islands, device memory in and out, inputs on the device, and an answer computed in order."""
    program = programs.load("split_cuda_resident")
    for delegate in program.delegates:
        define(delegate)
    call = program.calls[0]
    arrays = [v.data for v in call.inputs]
    ordered = headrace.device("sim")
    with headrace.load(program.path, device=ordered) as loaded:
        (want,) = loaded["forward"](*map(ordered.to_device, arrays))
        want = want.numpy()
    np.testing.assert_allclose(want, call.outputs[0].data, rtol=program.rtol, atol=program.atol)
    for delegate in program.delegates:
        define(delegate, run)
    return headrace.load(program.path, device=device), list(map(device.to_device, arrays)), want


# -------------------------------------------------------------------- faults


@fault
def a_stream_per_delegate(device: Any) -> tuple[Any, Any]:
    program, x, want = chain(device, first=own_streams, second=own_streams)
    (y,) = program["forward"](x)
    device.synchronize()
    return y, want


@fault
def a_missing_wait_between_two_streams(device: Any) -> tuple[Any, Any]:
    buffer, out, one, two = zeros(device), zeros(device), device.stream(), device.stream()
    put(one, buffer, 7)
    copy(two, out, buffer)
    return result(device, out), 7


@fault
def a_host_read_before_its_copy_ended(device: Any) -> tuple[Any, Any]:
    buffer, host, stream = zeros(device), zeros(headrace.device("cpu")), device.stream()
    put(stream, buffer, 7)
    copy(stream, host, buffer)
    got = float(host.numpy()[0])
    device.synchronize()
    return got, 7


@fault
def a_buffer_freed_while_in_use(device: Any) -> tuple[Any, Any]:
    program, inputs, want = two_islands(device, tapped)
    del kept[:]
    (y,) = program["forward"](*inputs, stream=device.stream())
    del y
    program.close()
    del program
    device.synchronize()
    return kept[-1].numpy(), want


@fault
def an_output_reused_before_its_reader_ran(device: Any) -> tuple[Any, Any]:
    program, inputs, want = two_islands(device, tapped)
    others = [device.to_device(x.numpy() + 1) for x in inputs]
    stream = device.stream()
    del kept[:]
    (y,) = program["forward"](*inputs, stream=stream)
    mine = kept[-1]
    del y
    program["forward"](*others, stream=stream)
    device.synchronize()
    return mine.numpy(), want


@fault
def an_input_overwritten_by_the_next_frame(device: Any) -> tuple[Any, Any]:
    frame, out, upload, compute = zeros(device), zeros(device), device.stream(), device.stream()
    put(upload, frame, 1)
    compute.wait(upload.record())
    copy(compute, out, frame)
    put(upload, frame, 2)
    return result(device, out), 1


@fault
def an_event_recorded_on_the_wrong_stream(device: Any) -> tuple[Any, Any]:
    buffer, out = zeros(device), zeros(device)
    one, two, other = device.stream(), device.stream(), device.stream()
    put(one, buffer, 7)
    two.wait(other.record())
    copy(two, out, buffer)
    return result(device, out), 7


@fault
def a_wait_enqueued_before_its_record(device: Any) -> tuple[Any, Any]:
    buffer, out, one, two = zeros(device), zeros(device), device.stream(), device.stream()
    event = device.event()
    two.wait(event)
    put(one, buffer, 7)
    one.record(event)
    copy(two, out, buffer)
    return result(device, out), 7


@fault
def two_threads_on_one_buffer(device: Any) -> tuple[Any, Any]:
    buffer, one, two = zeros(device), device.stream(), device.stream()
    in_thread(lambda: add(one, buffer, 1))
    in_thread(lambda: times(two, buffer, 3))
    return result(device, buffer), 3


@fault
def a_legacy_write_read_on_a_non_blocking_stream(device: Any) -> tuple[Any, Any]:
    buffer, out, stream = zeros(device), zeros(device), device.stream()
    put(device.legacy_stream(), buffer, 7)
    copy(stream, out, buffer)
    return result(device, out), 7


# --------------------------------------------------------------------- right


@right
def one_stream(device: Any) -> tuple[Any, Any]:
    buffer, stream = zeros(device), device.stream()
    put(stream, buffer, 2)
    add(stream, buffer, 1)
    times(stream, buffer, 3)
    return result(device, buffer), 9


@right
def an_event_between_two_streams(device: Any) -> tuple[Any, Any]:
    buffer, out, one, two = zeros(device), zeros(device), device.stream(), device.stream()
    put(one, buffer, 7)
    two.wait(one.record())
    copy(two, out, buffer)
    return result(device, out), 7


@right
def a_wait_through_a_third_stream(device: Any) -> tuple[Any, Any]:
    buffer, out = zeros(device), zeros(device)
    one, two, between = device.stream(), device.stream(), device.stream()
    put(one, buffer, 7)
    between.wait(one.record())
    two.wait(between.record())
    copy(two, out, buffer)
    return result(device, out), 7


@right
def a_host_wait_for_an_event(device: Any) -> tuple[Any, Any]:
    buffer, out, one, two = zeros(device), zeros(device), device.stream(), device.stream()
    put(one, buffer, 7)
    one.record().synchronize()
    copy(two, out, buffer)
    return result(device, out), 7


@right
def a_host_read_behind_its_copy(device: Any) -> tuple[Any, Any]:
    buffer, host, stream = zeros(device), zeros(headrace.device("cpu")), device.stream()
    put(stream, buffer, 7)
    copy(stream, host, buffer)
    stream.synchronize()
    return float(host.numpy()[0]), 7


@right
def a_query_that_said_yes(device: Any) -> tuple[Any, Any]:
    buffer, out, one, two = zeros(device), zeros(device), device.stream(), device.stream()
    put(one, buffer, 7)
    event = one.record()
    if not any(event.query() for _ in range(100)):
        event.synchronize()
    copy(two, out, buffer)
    return result(device, out), 7


@right
def a_buffer_handed_to_another_thread_after_a_wait(device: Any) -> tuple[Any, Any]:
    buffer, one, two = zeros(device), device.stream(), device.stream()

    def first() -> None:
        add(one, buffer, 1)
        one.synchronize()

    in_thread(first)
    in_thread(lambda: times(two, buffer, 3))
    return result(device, buffer), 3


@right
def two_threads_ordered_by_an_event(device: Any) -> tuple[Any, Any]:
    buffer, one, two = zeros(device), device.stream(), device.stream()

    def first() -> Any:
        add(one, buffer, 1)
        return one.record()

    def second(event: Any) -> None:
        two.wait(event)
        times(two, buffer, 3)

    event = in_thread(first)
    in_thread(lambda: second(event))
    return result(device, buffer), 3


@right
def the_legacy_stream_and_blocking_streams(device: Any) -> tuple[Any, Any]:
    buffer, one, two = zeros(device), device.stream(blocking=True), device.stream(blocking=True)
    put(one, buffer, 1)
    add(device.legacy_stream(), buffer, 2)
    times(two, buffer, 3)
    add(device.legacy_stream(), buffer, 1)
    add(device.per_thread_stream(), buffer, 1)
    return result(device, buffer), 11


@right
def per_thread_streams_ordered_by_the_legacy_stream(device: Any) -> tuple[Any, Any]:
    buffer = zeros(device)
    in_thread(lambda: put(device.per_thread_stream(), buffer, 1))
    add(device.legacy_stream(), buffer, 1)
    in_thread(lambda: times(device.per_thread_stream(), buffer, 5))
    return result(device, buffer), 10


@right
def two_readers_and_a_writer_behind_both(device: Any) -> tuple[Any, Any]:
    buffer, left, right_, out = zeros(device), zeros(device), zeros(device), zeros(device)
    one, two = device.stream(), device.stream()
    put(one, buffer, 7)
    two.wait(one.record())
    copy(one, left, buffer)
    copy(two, right_, buffer)
    one.wait(two.record())
    put(one, buffer, 1)
    copy(one, out, buffer)
    return (result(device, left), result(device, right_), result(device, out)), (7, 7, 1)


@right
def an_event_recorded_again_after_the_wait(device: Any) -> tuple[Any, Any]:
    buffer, out, one, two = zeros(device), zeros(device), device.stream(), device.stream()
    put(one, buffer, 7)
    event = one.record()
    two.wait(event)
    two.record(event)
    copy(two, out, buffer)
    return result(device, out), 7


@right
def memory_freed_and_used_again(device: Any) -> tuple[Any, Any]:
    one, two, out = device.stream(), device.stream(), zeros(device)
    for value in range(5):
        buffer = device.empty([4], stream=(one, two)[value % 2])
        put((one, two)[value % 2], buffer, value)
        two.wait(one.record())
        copy(two, out, buffer)
        del buffer
        device.trim()
        one.wait(two.record())
    return result(device, out), 4


@right
def frames_uploaded_through_the_buffer(device: Any) -> tuple[Any, Any]:
    frame, upload, compute, seen = zeros(device), device.stream(), device.stream(), []
    for value in range(4):
        device.to_device(np.full(4, value, np.float32), stream=upload, out=frame)
        compute.wait(upload.record())
        seen.append(zeros(device))
        copy(compute, seen[-1], frame)
    return [result(device, s) for s in seen], [0, 1, 2, 3]


@right
def islands_on_the_stream_of_the_call(device: Any) -> tuple[Any, Any]:
    program, x, want = chain(device)
    for stream in (None, device.stream(), device.stream(), device.legacy_stream()):
        (y,) = program["forward"](x, stream=stream)
    return y, want


@right
def islands_that_declare_nothing(device: Any) -> tuple[Any, Any]:
    program, x, want = chain(device, first=undeclared, second=undeclared)
    (y,) = program["forward"](x, stream=device.stream())
    return y, want


@right
def a_delegate_that_forks_and_joins(device: Any) -> tuple[Any, Any]:
    program, x, want = chain(device, "chain25_cuda_resident", first=forked)
    (y,) = program["forward"](device.to_device(x), stream=device.stream())
    return y.numpy(), want


@right
def calls_in_flight_from_two_streams_and_threads(device: Any) -> tuple[Any, Any]:
    program, x, want = chain(device, "chain25_cuda_resident")
    one, two = device.stream(), device.stream()
    source = device.to_device(x)
    outputs = []
    for stream in (one, two, one, two):
        outputs += in_thread(lambda s=stream: program["forward"](source, stream=s))
    return [y.numpy() for y in outputs], [want] * 4
