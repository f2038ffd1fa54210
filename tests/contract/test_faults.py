"""What fails: on the device, in a delegate, while loading; and that the next calls are right."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest

import headrace
from tests import programs

from . import delegates
from .conftest import Devices, golden

OPERATIONS = (
    "allocate", "free", "copy", "call", "create_event", "record", "wait", "synchronize_stream",
    "synchronize_event", "synchronize_device", "query_event",
)  # fmt: skip


@pytest.mark.parametrize("name", ["split_cuda", "split_cuda_resident", "split_cuda_host_between", "fork"])
@pytest.mark.parametrize("how", ["waiting", "in flight"])
def test_a_fault_at_any_operation_of_a_call_is_told_and_leaves_nothing_behind(
    name: str, how: str, sims: Devices
) -> None:
    """LT2, OP3: every place where an operation of a call can fail: a typed error, then three calls that are right,
    and no memory more than after as many calls without a fault."""
    program = golden(name)
    hit: set[str] = set()
    for device in itertools.islice(sims, 5):  # each is hundreds of loads
        for operation in OPERATIONS:
            for at in range(12):
                # A fresh program: the first call allocates and creates, later ones would not.
                before = device.memory()["current_nbytes"]
                loaded = program.load(device)
                method, stream = loaded["forward"], device.stream()
                x = (
                    [device.to_device(v) for v in program.inputs()]
                    if "resident" in name
                    else program.inputs()
                )
                device.fail(operation, at)
                count = device.calls(operation)
                failed: Exception | None = None
                try:
                    results = method(*x, stream=stream if how == "in flight" else None)
                    assert program.right(results)
                except (headrace.DeviceError, headrace.DelegateError) as e:
                    failed = e
                reached = device.calls(operation) - count > at
                device.clear_faults()
                if failed is not None:
                    assert "the fault that was injected" in str(failed)
                    hit.add(operation)
                # Its traceback's frames hold the method.
                results = failed = None
                for k in range(3):
                    y = (
                        [device.to_device(v) for v in program.inputs(k)]
                        if "resident" in name
                        else program.inputs(k)
                    )
                    assert program.right(method(*y, stream=stream if k % 2 else None), k)
                loaded.close()
                del loaded, method, x, y
                gc.collect()
                device.synchronize()
                device.trim()
                assert device.memory()["current_nbytes"] == before, (operation, at)
                if not reached:
                    break
    assert {"call", "record", "allocate" if "resident" in name else "copy"} <= hit


@pytest.mark.parametrize("operation", ["allocate", "synchronize_stream", "create_event", "copy"])
def test_a_fault_while_loading_is_told_and_leaves_nothing_behind(operation: str, sims: Devices) -> None:
    """LT2: the next load is right."""
    program = golden("split_cuda")
    for device in itertools.islice(sims, 5):
        for at in range(3):
            device.fail(operation, at)
            if operation in ("create_event", "copy") or at:  # no such operation in a load
                program.load(device).close()
            else:
                with pytest.raises(headrace.DeviceError, match="injected"):
                    program.load(device)
            device.clear_faults()
            gc.collect()
            device.synchronize()
            device.trim()
            assert device.memory()["current_nbytes"] == 0
            with program.load(device) as loaded:
                assert program.right(loaded["forward"](*program.inputs()))


def test_a_failed_wait_still_waits(late: Any) -> None:
    """LT2: the caller's arrays are borrowed until the call returns, also when the wait at its end fails."""
    program = golden("split_cuda")
    with program.load(late) as loaded:
        for operation in ("synchronize_event", "record", "create_event"):
            x = [v.copy() for v in program.inputs()]
            if operation == "create_event":  # the first call of a method alone
                continue
            late.fail(operation)
            with pytest.raises(headrace.DeviceError, match="injected") as caught:
                loaded["forward"](*x, stream=late.stream())
            assert caught.value.device == "sim:0"
            assert late.pending == 0
            assert program.right(loaded["forward"](*program.inputs()))


@pytest.mark.parametrize("operation", ["copy", "record", "synchronize_event", "create_event"])
def test_to_device_that_fails_lets_go_of_the_array(operation: str, late: Any) -> None:
    """LT2: nothing reads the array after the exception."""
    late.fail(operation)
    with pytest.raises(headrace.DeviceError, match="injected"):
        late.to_device(np.ones(1000, np.float32), stream=late.stream())
    assert late.pending == 0 or operation == "copy"
    np.testing.assert_array_equal(late.to_device(np.ones(3, np.float32)).numpy(), 1)


@pytest.mark.parametrize("operation", ["copy", "synchronize_stream", "synchronize_event"])
def test_numpy_that_fails_leaves_no_copy_behind(operation: str, late: Any) -> None:
    """LT2: the copy would write to memory that is gone."""
    buffer = late.empty(1000)
    stream = late.stream()
    stream.wait(late.per_thread_stream().record())
    stream.call(lambda: buffer.numpy().fill(3), writes=[buffer])
    late.fail(operation)
    with pytest.raises(headrace.DeviceError, match="injected"):
        buffer.numpy()
    assert late.pending == 0 or operation != "synchronize_stream"
    np.testing.assert_array_equal(buffer.numpy(), 3)


def test_the_call_before_a_failed_one_is_still_waited_for(late: Any) -> None:
    """LT2, OR7: a call that fails before it was ordered does not make the next one forget whom it follows."""
    program = golden("split_cuda_resident")
    with program.load(late) as loaded:
        first, second = (
            [late.to_device(x) for x in program.inputs(0)],
            [late.to_device(x) for x in program.inputs(1)],
        )
        for operation in ("wait", "allocate", "record", "call"):
            (a,) = loaded["forward"](*first, stream=late.stream())
            late.fail(operation)
            # The first call that reaches the operation: a method's blocks and events are there after some.
            with pytest.raises((headrace.DeviceError, headrace.DelegateError), match="injected"):
                [loaded["forward"](*second, stream=late.stream()) for _ in range(3)]
            late.clear_faults()
            (b,) = loaded["forward"](*second, stream=late.stream())
            assert program.right([b], 1) and program.right([a], 0)


def test_memory_that_runs_out_is_told_by_type() -> None:
    """OP4: while loading and while calling; nothing is kept."""
    program = golden("split_cuda")
    tiny = headrace.device("sim", memory_nbytes=1024)
    with pytest.raises(headrace.OutOfDeviceMemory, match="forward, planned buffer"):
        program.load(tiny)
    gc.collect()
    tiny.trim()
    assert tiny.memory()["current_nbytes"] == 0
    device = headrace.device("sim")
    with program.load(device) as loaded:
        device.fail("allocate", memory=True)
        resident = golden("split_cuda_resident")
        with pytest.raises(headrace.OutOfDeviceMemory):
            resident.load(device)
        assert program.right(loaded["forward"](*program.inputs()))


class Broken(Exception):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Surrogates(Exception):
    def __str__(self) -> str:
        return "\udcff"


@pytest.mark.parametrize("kind", [Broken, Mute, Surrogates])
def test_what_run_raises_is_the_cause_of_a_delegate_error(
    kind: type[Exception], devices: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """DE3, OP3: typed, with delegate, method and island; the thread and the method go on as before."""
    program = golden("split_cuda")
    error = kind("on purpose")

    def refuse(stream: Any) -> None:
        raise error

    for device in devices:
        with program.load(device) as loaded:
            for how in (None, device.stream()):
                classes["TestB"].on_run = staticmethod(refuse)
                with pytest.raises(
                    headrace.DelegateError, match=r"delegate 'TestB': run\(\) raised "
                ) as caught:
                    loaded["forward"](*program.inputs(), stream=how)
                assert caught.value.__cause__ is error
                assert (caught.value.delegate, caught.value.method) == ("TestB", "forward")
                (island,) = (i for i in loaded["forward"].islands if i.delegate == "TestB")
                assert caught.value.island == island.instruction
                classes["TestB"].on_run = None
                assert program.right(loaded["forward"](*program.inputs(), stream=how))


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_passes_through(
    passing: type[BaseException], devices: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """DE3: from run(), and from a host function through the wait that finds it."""
    program = golden("split_cuda")
    given = passing("now")

    def interrupt(stream: Any) -> None:
        raise given

    for device in devices:
        with program.load(device) as loaded:
            classes["TestA"].on_run = staticmethod(interrupt)
            with pytest.raises(passing) as caught:
                loaded["forward"](*program.inputs())
            assert caught.value is given
            classes["TestA"].on_run = None
            assert program.right(loaded["forward"](*program.inputs()))
            if device.name.startswith("cuda"):  # where no Python runs in stream order
                continue
            stream = device.stream()

            def later(stream: Any = stream) -> None:
                stream.call(lambda: interrupt(None))
                stream.synchronize()

            with pytest.raises(passing):
                later()
            assert program.right(loaded["forward"](*program.inputs()))


def failing(classes: dict[str, type[delegates.Base]], name: str = "TestB") -> list[bool]:
    """Make the delegate's host function raise while the list holds True."""
    on = [True]
    cls: Any = classes[name]

    def enqueue(self: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        work = self.body(inputs, outputs)

        def maybe() -> None:
            if on[0]:
                raise Broken("in the middle of the device's work")
            work()

        stream.call(maybe, reads=inputs, writes=outputs)

    cls.enqueue = enqueue
    return on


def test_what_a_host_function_raises_is_raised_by_the_next_wait(
    sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """DE3, OP3: by the call where it waits, else by the buffer's or the stream's wait: typed, with its text."""
    on = failing(classes)
    resident, hosted = golden("split_cuda_resident"), golden("split_cuda")
    for device in sims:
        with resident.load(device) as there, hosted.load(device) as here:
            x = [device.to_device(v) for v in resident.inputs()]
            for how in ("call", "numpy", "stream", "event", "device"):
                on[0] = True
                stream = device.stream()

                def fail(
                    how: str = how,
                    stream: Any = stream,
                    here: Any = here,
                    there: Any = there,
                    x: Any = x,
                    device: Any = device,
                ) -> None:
                    if how == "call":
                        here["forward"](*hosted.inputs(), stream=stream)
                        return
                    (out,) = there["forward"](*x, stream=stream)
                    waits = {
                        "numpy": out.numpy,
                        "stream": stream.synchronize,
                        "event": lambda: stream.record().synchronize(),
                        "device": device.synchronize,
                    }
                    waits[how]()

                with pytest.raises(headrace.DelegateError, match="in the middle of the device's") as caught:
                    fail()
                assert isinstance(caught.value.__cause__, Broken)
                assert "Traceback" in str(caught.value) or "line" in str(caught.value)
                on[0] = False
                assert hosted.right(here["forward"](*hosted.inputs(), stream=stream))
                assert resident.right(there["forward"](*x, stream=stream))


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_failure_nobody_was_told_of_is_not_lost_with_the_program(
    how: str, sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """LT2, OP3: close() is a wait and says it; where the program is just dropped, its outputs do."""
    failing(classes)
    program = golden("split_cuda_resident")
    for device in sims:
        loaded: Any = program.load(device)
        x = [device.to_device(v) for v in program.inputs()]
        (out,) = loaded["forward"](*x, stream=device.stream())
        if how == "close":
            with pytest.raises(headrace.DelegateError, match="in the middle"):
                loaded.close()
            loaded.close()
        else:
            del loaded
            gc.collect()
        with pytest.raises(headrace.DelegateError, match="in the middle"):
            out.numpy()


@pytest.mark.parametrize("first", ["features", "score"])
def test_close_closes_every_method_whatever_failed_in_one(first: str, late: Any) -> None:
    """LT2, OP4: the failure is told, and nothing stays open; a second close() has nothing to say."""
    program = programs.AOTI.load("two_methods")
    inputs = {call.method: [v.data for v in call.inputs] for call in program.calls}
    loaded = program.open(late)
    for name in sorted(loaded, key=lambda n: n != first):
        loaded[name](*inputs[name])
    late.fail("synchronize_event")  # of the first method that is waited for
    with pytest.raises(headrace.DeviceError, match="injected"):
        loaded.close()
    for name in loaded:
        with pytest.raises(headrace.ProgramError, match="closed"):
            loaded[name](*inputs[name])
    loaded.close()
    assert late.memory()["current_nbytes"] == 0
