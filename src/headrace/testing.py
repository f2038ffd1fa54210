"""The conformance kit, for whoever makes a device or a delegate. It needs no test framework.

    from headrace.testing import check_delegate, check_device

    check_device(headrace.device("sim"))
    check_delegate(Scale, payload=b"2.0", inputs=[x], outputs=[x * 2])

Each function runs its checks one after the other, returns the names of those that ran, and raises
`ConformanceError` at the first that fails. A check that does not apply to a device is left out of what it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from .delegate import Context, Delegate
from .device import device as open_device
from .errors import (
    DelegateError,
    DeviceError,
    HeadraceError,
    InputError,
    OrderingError,
    OutOfDeviceMemory,
)
from .ordering import Kind, record

__all__ = ["ConformanceError", "check_delegate", "check_device"]

Array = np.ndarray[Any, Any]


class ConformanceError(HeadraceError, AssertionError):
    """A device or delegate does not keep its contract. ``check`` is the name of the check that failed."""

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class _Failed(Exception):
    """What a check expected and what it got."""


def _expect(truth: object, expected: str, got: object) -> None:
    if not truth:
        raise _Failed(f"expected {expected}, got {got}")


def _expect_raises(kinds: type[Exception] | tuple[type[Exception], ...], function: Callable[[], Any]) -> None:
    names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        got = function()
    except kinds:
        return
    except Exception as e:
        raise _Failed(f"expected {names}, got {type(e).__name__}: {e}") from e
    raise _Failed(f"expected {names}, got {got!r} and no error")


def _equal(got: Array, want: Array, what: str) -> None:
    same = got.shape == want.shape and got.dtype == want.dtype
    _expect(same, f"{what} of {want.dtype}{list(want.shape)}", f"{got.dtype}{list(got.shape)}")
    kind = want.dtype.kind in "fc"
    _expect(np.array_equal(got, want, equal_nan=kind), f"{what} {want.ravel()[:4]}…", f"{got.ravel()[:4]}…")


def _in_thread(function: Callable[[], Any]) -> Any:
    out: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.append(function())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return out[0]


def _run(subject: str, checks: Sequence[tuple[str, Callable[[], Any]]]) -> tuple[str, ...]:
    def fail(name: str, what: str, cause: Exception) -> NoReturn:
        raise ConformanceError(f"{subject}, {name.replace('_', ' ')}: {what}", check=name) from cause

    ran = []
    for name, check in checks:
        try:
            check()
        except _Failed as e:
            fail(name, str(e), e)
        except Exception as e:
            fail(name, f"expected no error, got {type(e).__name__}: {e}", e)
        ran.append(name)
    return tuple(ran)


# -------------------------------------------------------------------- devices


def _fill(stream: Any, buffer: Any, value: float) -> None:
    stream.call(lambda: buffer.numpy().fill(value), writes=[buffer])


def _copy(stream: Any, to: Any, source: Any) -> None:
    stream.call(lambda: to.numpy().__setitem__(..., source.numpy()), reads=[source], writes=[to])


def check_device(device: Any) -> tuple[str, ...]:
    """Check that a device keeps the contract of ``headrace/device.h``, as Python sees it: memory, copies, streams,
    events, waits, refusals, partitions, records. Takes under a second and about 1 MB of the device's memory.

    Checks that enqueue Python functions are left out on a GPU, those of partitions where there are none.

    Raises:
        ConformanceError: what was expected, and what the device did.
    """
    chosen = [
        (name.removeprefix("device_"), lambda check=check: check(device))
        for name, check in _DEVICE_CHECKS
        if not (check in _NEEDS_CALLS and device.name.startswith("cuda"))
        and not (check in _NEEDS_PARTITIONS and not device.sm_count)
        and not (check in _NEEDS_DEVICE and device.name == "cpu")
    ]
    return _run(device.name, chosen)


def device_memory_keeps_what_is_copied_in(device: Any) -> None:
    for dtype in ("float32", "float64", "int8", "uint8", "int32", "int64", "bool"):
        for shape in ((), (1,), (3, 5), (0, 4), (2, 1, 7)):
            array = (np.arange(np.prod(shape)) % 2 if dtype == "bool" else np.arange(np.prod(shape))).astype(dtype)
            array = array.reshape(shape)
            buffer = device.to_device(array)
            _expect(buffer.dtype == dtype and buffer.shape == shape, f"{dtype}{shape}", repr(buffer))
            _equal(np.asarray(buffer.numpy()), array, "the array")


def device_copies_into_a_buffer_that_is_there(device: Any) -> None:
    buffer = device.to_device(np.zeros(8, np.float32))
    address = buffer.address
    same = device.to_device(np.arange(8, dtype=np.float32), out=buffer)
    _expect(same.address == address, f"the memory at {address:#x}", f"{same.address:#x}")
    _equal(np.array(buffer.numpy()), np.arange(8, dtype=np.float32), "the new values")
    _expect_raises(InputError, lambda: device.to_device(np.zeros(9, np.float32), out=buffer))


def device_too_much_memory_is_out_of_memory(device: Any) -> None:
    _expect_raises(OutOfDeviceMemory, lambda: device.empty([1 << 22, 1 << 26], "uint8"))
    _equal(np.array(device.to_device(np.ones(2, np.float32)).numpy()), np.ones(2, np.float32), "memory after it")


def device_memory_comes_back(device: Any) -> None:
    device.trim()
    before = device.memory()["current_nbytes"]
    buffer = device.empty([1 << 16], "uint8")
    during = device.memory()["current_nbytes"]
    _expect(during >= before + (1 << 16), f"at least {before + (1 << 16)} bytes in use", during)
    del buffer
    device.trim()
    device.synchronize()
    after = device.memory()["current_nbytes"]
    _expect(after == before, f"{before} bytes in use after the last Buffer died", after)


def device_streams_have_the_handles_of_cuda(device: Any) -> None:
    one, two = device.stream(), device.stream()
    _expect(one.handle not in (0, 1, 2, two.handle), "streams of their own", (one, two))
    _expect(device.legacy_stream().handle == 1, "1 for the legacy stream", device.legacy_stream().handle)
    _expect(device.per_thread_stream().handle == 2, "2 for the per-thread stream", device.per_thread_stream())
    _expect(one.__cuda_stream__() == (0, one.handle), f"(0, {one.handle})", one.__cuda_stream__())


def device_closed_stream_is_refused(device: Any) -> None:
    stream = device.stream()
    stream.close()
    stream.close()
    for use in (stream.synchronize, stream.query, stream.record, lambda: stream.handle):
        _expect_raises(InputError, use)
    _expect_raises(InputError, lambda: device.empty([1], stream=stream))


def device_objects_of_another_device_are_refused(device: Any) -> None:
    other = open_device("sim")
    stream, event = other.stream(), other.stream().record()
    _expect_raises(DeviceError, lambda: device.empty([1], stream=stream))
    _expect_raises(DeviceError, lambda: device.stream().wait(event))
    _expect_raises(DeviceError, lambda: device.stream().record(event))


def device_unrecorded_event_is_complete_and_no_wait(device: Any) -> None:
    event, stream = device.event(), device.stream()
    _expect(event.query() is True, "a complete event", event.query())
    event.synchronize()
    stream.wait(event)
    stream.synchronize()


def device_event_times_are_in_order(device: Any) -> None:
    stream = device.stream()
    first = stream.record()
    device.to_device(np.zeros(1024, np.float32), stream=stream)
    second = stream.record()
    second.synchronize()
    first.synchronize()
    _expect(second.elapsed_ms(first) >= 0, "0 ms or more", second.elapsed_ms(first))
    untimed = stream.record(device.event())
    untimed.synchronize()
    _expect_raises(InputError, lambda: untimed.elapsed_ms(first))


def device_stream_runs_its_work_in_order(device: Any) -> None:
    stream, seen = device.stream(), list[int]()
    for i in range(50):
        stream.call(lambda i=i: seen.append(i))
    stream.synchronize()
    _expect(seen == list(range(50)), "0 to 49 in order", seen)
    _expect(stream.query() is True, "an idle stream", stream.query())


def device_wait_orders_two_streams(device: Any) -> None:
    one, two = device.stream(), device.stream()
    buffer, out = device.to_device(np.zeros(4, np.float32)), device.to_device(np.zeros(4, np.float32))
    for value in range(20):
        _fill(one, buffer, value)
        two.wait(one.record())
        _copy(two, out, buffer)
        done = two.record()
        one.wait(done)
        done.synchronize()
        _equal(np.array(out.numpy()), np.full(4, value, np.float32), "what the other stream wrote")


def device_wait_takes_the_record_that_is_there(device: Any) -> None:
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
    _expect(seen == ["first", "second", "third"], "first, second, third", seen)


def device_legacy_stream_and_blocking_streams_order_each_other(device: Any) -> None:
    buffer = device.to_device(np.zeros(1, np.float32))
    blocking, legacy = device.stream(blocking=True), device.legacy_stream()

    def times_two_plus(value: float) -> Callable[[], None]:
        def work() -> None:
            buffer.numpy()[...] = buffer.numpy() * 2 + value

        return work

    for value, stream in enumerate((blocking, legacy, blocking, device.per_thread_stream(), legacy)):
        stream.call(times_two_plus(value), reads=[buffer], writes=[buffer])
    legacy.synchronize()
    _equal(np.array(buffer.numpy()), np.array([26], np.float32), "the sum of all in order")


def device_failure_is_told_once_by_the_wait_behind_it(device: Any) -> None:
    stream, ran = device.stream(), list[int]()

    def fails() -> None:
        raise ValueError("planted")

    if device.name == "cpu":
        # Everything is done when it returns: there is no later wait to tell it.
        _expect_raises((DelegateError, DeviceError), lambda: (stream.call(fails), stream.synchronize()))
    else:
        stream.call(fails)
        stream.call(lambda: ran.append(1))
        _expect_raises((DelegateError, DeviceError), stream.synchronize)
        _expect(ran == [], "work behind the failure skipped", "work that ran")
    stream.synchronize()
    stream.call(lambda: ran.append(2))
    stream.synchronize()
    _expect(ran == [2], "work after the telling to run", ran)


def device_host_function_must_not_call_the_device(device: Any) -> None:
    stream, errors = device.stream(), list[Exception]()

    def calls() -> None:
        try:
            device.synchronize()
        except DeviceError as e:
            errors.append(e)

    stream.call(calls)
    stream.synchronize()
    _expect(len(errors) == 1, "DeviceError inside a host function", "no error")


def device_threads_have_streams_of_their_own(device: Any) -> None:
    buffers = [device.to_device(np.zeros(4, np.float32)) for _ in range(4)]

    def work(number: int) -> None:
        for _ in range(20):
            stream = device.per_thread_stream()
            _fill(stream, buffers[number], number)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, buffer in enumerate(buffers):
        _equal(np.array(buffer.numpy()), np.full(4, number, np.float32), "each thread's value")


def device_objects_may_go_with_work_in_flight(device: Any) -> None:
    seen = list[int]()
    for number in range(20):
        stream, buffer = device.stream(), device.empty([16])
        stream.call(lambda number=number: seen.append(number), writes=[buffer])
        stream.record()
        del stream, buffer
    device.synchronize()
    _expect(sorted(seen) == list(range(20)), "all of 20 functions to run", sorted(seen))


def device_partition_grants_what_it_says(device: Any) -> None:
    total = device.sm_count
    partition = device.partition(sms=1)
    _expect(1 <= partition.sm_count <= total, f"1 to {total} SMs", partition.sm_count)
    stream = partition.stream()
    buffer = device.to_device(np.arange(4, dtype=np.float32), stream=stream)
    _equal(np.array(buffer.numpy()), np.arange(4, dtype=np.float32), "memory copied in a partition")
    _expect_raises(DeviceError, lambda: device.partition(sms=total + 1))
    partition.close()
    _expect_raises(InputError, partition.stream)
    stream.synchronize()


def device_work_is_recorded(device: Any) -> None:
    one, two = device.stream(), device.stream()
    buffer, out = device.to_device(np.zeros(4, np.float32)), device.to_device(np.zeros(4, np.float32))
    with record() as clean:
        _fill(one, buffer, 1)
        two.wait(one.record())
        _copy(two, out, buffer)
    with record() as torn:
        two.synchronize()
        _fill(one, buffer, 2)
        _copy(two, out, buffer)
    device.synchronize()
    kinds = [e.kind for e in clean.log.entries]
    for kind, count in ((Kind.CALL, 2), (Kind.RECORD, 3), (Kind.WAIT, 1)):
        # The calls put events behind themselves for the Buffers, so there are more records.
        _expect(kinds.count(kind) >= count, f"{count} {kind.name.lower()} entries or more", kinds.count(kind))
    clean.check()
    _expect_raises(OrderingError, torn.check)


_DEVICE_CHECKS: list[tuple[str, Callable[[Any], None]]] = [
    (name, check) for name, check in list(globals().items()) if name.startswith("device_")
]
_NEEDS_CALLS = {
    device_stream_runs_its_work_in_order,
    device_wait_orders_two_streams,
    device_wait_takes_the_record_that_is_there,
    device_legacy_stream_and_blocking_streams_order_each_other,
    device_failure_is_told_once_by_the_wait_behind_it,
    device_host_function_must_not_call_the_device,
    device_threads_have_streams_of_their_own,
    device_objects_may_go_with_work_in_flight,
    device_work_is_recorded,
}
_NEEDS_PARTITIONS = {device_partition_grants_what_it_says}
_NEEDS_DEVICE = {device_work_is_recorded, device_memory_comes_back}
