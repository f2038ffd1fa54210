"""What every device keeps: the contract of headrace/device.h, as Python sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from ..device import Buffer, Device, Stream
from ..device import device as open_device
from ..errors import DelegateError, DeviceError, InputError, OrderingError, OutOfDeviceMemory
from ..ordering import Kind, record
from .check import Array, expect, expect_equal, expect_raises, run_checks

__all__ = ["check_device", "copy"]

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3, 5), (0, 4), (2, 1, 7))


def fill(stream: Stream, buffer: Buffer, value: float) -> None:
    stream.call(lambda: buffer.numpy().fill(value), writes=[buffer])


def copy(stream: Stream, to: Buffer, source: Buffer) -> None:
    stream.call(lambda: to.numpy().__setitem__(..., source.numpy()), reads=[source], writes=[to])


def check_device(device: Device) -> tuple[str, ...]:
    """Check that a device keeps the contract of ``headrace/device.h``, as Python sees it: memory, copies, streams,
    events, waits, refusals, partitions, records. Takes under a second and about 1 MB of the device's memory.

    Checks that enqueue Python functions are left out on a GPU, those of partitions where there are none.

    Raises:
        InputError: no device.
        ConformanceError: what was expected, and what the device did.
    """
    if isinstance(device, str):
        device = open_device(device)
    if not hasattr(device, "to_device"):
        raise InputError(
            f"check_device: expected a Device or its name, got {type(device).__name__}; pass 'sim'"
        )
    chosen: list[tuple[str, Callable[[], None]]] = [
        (check.__name__, partial(check, device))
        for check in _DEVICE_CHECKS
        if not (check in _NEEDS_CALLS and device.name.startswith("cuda"))
        and not (check in _NEEDS_PARTITIONS and not device.sm_count)
        and not (check in _NEEDS_DEVICE and device.name == "cpu")
    ]
    return run_checks(device.name, chosen)


def memory_keeps_what_is_copied_in(device: Device) -> None:
    for dtype in ("float32", "float64", "int8", "uint8", "int32", "int64", "bool"):
        for shape in SHAPES:
            count = int(np.prod(shape))
            flat: Array = (np.arange(count) % (2 if dtype == "bool" else 100)).astype(dtype)
            array = flat.reshape(list(shape))
            buffer = device.to_device(array)
            expect(buffer.dtype == dtype and buffer.shape == shape, f"{dtype}{shape}", repr(buffer))
            expect_equal(np.asarray(buffer.numpy()), array, "the array")


def copies_into_a_buffer_that_is_there(device: Device) -> None:
    buffer = device.to_device(np.zeros(8, np.float32))
    address = buffer.address
    same = device.to_device(np.arange(8, dtype=np.float32), out=buffer)
    expect(same.address == address, f"the memory at {address:#x}", f"{same.address:#x}")
    expect_equal(np.array(buffer.numpy()), np.arange(8, dtype=np.float32), "the new values")
    expect_raises(InputError, lambda: device.to_device(np.zeros(9, np.float32), out=buffer))


def too_much_memory_is_out_of_memory(device: Device) -> None:
    expect_raises(OutOfDeviceMemory, lambda: device.empty([1 << 22, 1 << 26], "uint8"))
    expect_equal(
        np.array(device.to_device(np.ones(2, np.float32)).numpy()), np.ones(2, np.float32), "memory after it"
    )


def memory_comes_back(device: Device) -> None:
    device.trim()
    before = device.memory()["current_nbytes"]
    buffer = device.empty([1 << 16], "uint8")
    during = device.memory()["current_nbytes"]
    expect(during >= before + (1 << 16), f"at least {before + (1 << 16)} bytes in use", during)
    del buffer
    device.trim()
    device.synchronize()
    after = device.memory()["current_nbytes"]
    expect(after == before, f"{before} bytes in use after the last Buffer died", after)


def streams_have_the_handles_of_cuda(device: Device) -> None:
    one, two = device.stream(), device.stream()
    expect(one.handle not in (0, 1, 2, two.handle), "streams of their own", (one, two))
    expect(device.legacy_stream().handle == 1, "1 for the legacy stream", device.legacy_stream().handle)
    expect(device.per_thread_stream().handle == 2, "2 for the per-thread stream", device.per_thread_stream())
    expect(one.__cuda_stream__() == (0, one.handle), f"(0, {one.handle})", one.__cuda_stream__())


def closed_stream_is_refused(device: Device) -> None:
    stream = device.stream()
    stream.close()
    stream.close()
    for use in (stream.synchronize, stream.query, stream.record, lambda: stream.handle):
        expect_raises(InputError, use)
    expect_raises(InputError, lambda: device.empty([1], stream=stream))


def objects_of_another_device_are_refused(device: Device) -> None:
    other = open_device("sim")
    stream, event = other.stream(), other.stream().record()
    expect_raises(DeviceError, lambda: device.empty([1], stream=stream))
    expect_raises(DeviceError, lambda: device.stream().wait(event))
    expect_raises(DeviceError, lambda: device.stream().record(event))


def unrecorded_event_is_complete_and_no_wait(device: Device) -> None:
    event, stream = device.event(), device.stream()
    expect(event.query() is True, "a complete event", event.query())
    event.synchronize()
    stream.wait(event)
    stream.synchronize()


def event_times_are_in_order(device: Device) -> None:
    stream = device.stream()
    first = stream.record()
    device.to_device(np.zeros(1024, np.float32), stream=stream)
    second = stream.record()
    second.synchronize()
    first.synchronize()
    expect(second.elapsed_ms(first) >= 0, "0 ms or more", second.elapsed_ms(first))
    untimed = stream.record(device.event())
    untimed.synchronize()
    expect_raises(InputError, lambda: untimed.elapsed_ms(first))


def stream_runs_its_work_in_order(device: Device) -> None:
    stream, seen = device.stream(), list[int]()
    for i in range(50):
        stream.call(lambda i=i: seen.append(i))
    stream.synchronize()
    expect(seen == list(range(50)), "0 to 49 in order", seen)
    expect(stream.query() is True, "an idle stream", stream.query())


def wait_orders_two_streams(device: Device) -> None:
    one, two = device.stream(), device.stream()
    buffer, out = device.to_device(np.zeros(4, np.float32)), device.to_device(np.zeros(4, np.float32))
    for value in range(20):
        fill(one, buffer, value)
        two.wait(one.record())
        copy(two, out, buffer)
        done = two.record()
        one.wait(done)
        done.synchronize()
        expect_equal(np.array(out.numpy()), np.full(4, value, np.float32), "what the other stream wrote")


def wait_takes_the_record_that_is_there(device: Device) -> None:
    one, two, seen = device.stream(), device.stream(), list[str]()
    event = device.event()
    one.call(lambda: seen.append("first"))
    one.record(event)
    two.wait(event)
    two.call(lambda: seen.append("second"))
    # Recorded anew behind the work that waits: waiting for this record would never end.
    two.record(event)
    one.wait(event)
    one.call(lambda: seen.append("third"))
    one.synchronize()
    expect(seen == ["first", "second", "third"], "first, second, third", seen)


def legacy_stream_and_blocking_streams_order_each_other(device: Device) -> None:
    buffer = device.to_device(np.zeros(1, np.float32))
    blocking, legacy = device.stream(blocking=True), device.legacy_stream()

    def times_two_plus(value: float) -> Callable[[], None]:
        def work() -> None:
            buffer.numpy()[...] = buffer.numpy() * 2 + value

        return work

    for value, stream in enumerate((blocking, legacy, device.per_thread_stream(), legacy, blocking)):
        stream.call(times_two_plus(value), reads=[buffer], writes=[buffer])
    legacy.synchronize()
    expect_equal(np.array(buffer.numpy()), np.array([26], np.float32), "the sum of all in order")


def failure_is_told_once_by_the_wait_behind_it(device: Device) -> None:
    stream, ran = device.stream(), list[int]()

    def fails() -> None:
        raise ValueError("planted")

    if device.name == "cpu":
        # Everything is done when it returns: there is no later wait to tell it.
        def at_once() -> None:
            stream.call(fails)
            stream.synchronize()

        expect_raises((DelegateError, DeviceError), at_once)
    else:
        stream.call(fails)
        stream.call(lambda: ran.append(1))
        expect_raises((DelegateError, DeviceError), stream.synchronize)
        expect(ran == [], "work behind the failure skipped", "work that ran")
    stream.synchronize()
    stream.call(lambda: ran.append(2))
    stream.synchronize()
    expect(ran == [2], "work after the telling to run", ran)


def host_function_must_not_call_the_device(device: Device) -> None:
    stream, errors = device.stream(), list[Exception]()

    def calls() -> None:
        try:
            device.synchronize()
        except DeviceError as e:
            errors.append(e)

    stream.call(calls)
    stream.synchronize()
    expect(len(errors) == 1, "DeviceError inside a host function", "no error")


def threads_have_streams_of_their_own(device: Device) -> None:
    buffers = [device.to_device(np.zeros(4, np.float32)) for _ in range(4)]

    def work(number: int) -> None:
        for _ in range(20):
            stream = device.per_thread_stream()
            fill(stream, buffers[number], number)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, buffer in enumerate(buffers):
        expect_equal(np.array(buffer.numpy()), np.full(4, number, np.float32), "each thread's value")


def objects_may_go_with_work_in_flight(device: Device) -> None:
    seen = list[int]()
    for number in range(20):
        stream, buffer = device.stream(), device.empty([16])
        stream.call(lambda number=number: seen.append(number), writes=[buffer])
        stream.record()
        del stream, buffer
    device.synchronize()
    expect(sorted(seen) == list(range(20)), "all of 20 functions to run", sorted(seen))


def partition_grants_what_it_says(device: Device) -> None:
    total = device.sm_count
    partition = device.partition(sms=1)
    expect(1 <= partition.sm_count <= total, f"1 to {total} SMs", partition.sm_count)
    stream = partition.stream()
    buffer = device.to_device(np.arange(4, dtype=np.float32), stream=stream)
    expect_equal(np.array(buffer.numpy()), np.arange(4, dtype=np.float32), "memory copied in a partition")
    expect_raises(DeviceError, lambda: device.partition(sms=total + 1))
    partition.close()
    expect_raises(InputError, partition.stream)
    stream.synchronize()


def work_is_recorded(device: Device) -> None:
    one, two = device.stream(), device.stream()
    buffer, out = device.to_device(np.zeros(4, np.float32)), device.to_device(np.zeros(4, np.float32))
    with record() as clean:
        fill(one, buffer, 1)
        two.wait(one.record())
        copy(two, out, buffer)
    with record() as torn:
        two.synchronize()
        fill(one, buffer, 2)
        copy(two, out, buffer)
    device.synchronize()
    kinds = [e.kind for e in clean.log.entries]
    for kind, count in ((Kind.CALL, 2), (Kind.RECORD, 3), (Kind.WAIT, 1)):
        # The calls put events behind themselves for the Buffers, so there are more records.
        expect(kinds.count(kind) >= count, f"{count} {kind.name.lower()} entries or more", kinds.count(kind))
    clean.check()
    expect_raises(OrderingError, torn.check)


_DEVICE_CHECKS: tuple[Callable[[Device], None], ...] = (
    memory_keeps_what_is_copied_in,
    copies_into_a_buffer_that_is_there,
    too_much_memory_is_out_of_memory,
    memory_comes_back,
    streams_have_the_handles_of_cuda,
    closed_stream_is_refused,
    objects_of_another_device_are_refused,
    unrecorded_event_is_complete_and_no_wait,
    event_times_are_in_order,
    stream_runs_its_work_in_order,
    wait_orders_two_streams,
    wait_takes_the_record_that_is_there,
    legacy_stream_and_blocking_streams_order_each_other,
    failure_is_told_once_by_the_wait_behind_it,
    host_function_must_not_call_the_device,
    threads_have_streams_of_their_own,
    objects_may_go_with_work_in_flight,
    partition_grants_what_it_says,
    work_is_recorded,
)
_NEEDS_CALLS = {
    stream_runs_its_work_in_order,
    wait_orders_two_streams,
    wait_takes_the_record_that_is_there,
    legacy_stream_and_blocking_streams_order_each_other,
    failure_is_told_once_by_the_wait_behind_it,
    host_function_must_not_call_the_device,
    threads_have_streams_of_their_own,
    objects_may_go_with_work_in_flight,
    work_is_recorded,
}
_NEEDS_PARTITIONS = {partition_grants_what_it_says}
_NEEDS_DEVICE = {work_is_recorded, memory_comes_back}
