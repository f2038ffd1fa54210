"""SY: when a call returns, what it counted, and what its inputs wait for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, golden


def placed(device: Any, inputs: tuple[Any, ...], resident: bool) -> list[Any]:
    return [device.to_device(x) if resident else x for x in inputs]


@pytest.mark.parametrize("name", ["split_cuda_resident", "chain25_cuda_resident"])
@pytest.mark.parametrize("how", ["argument", "selection", "nothing"])
@pytest.mark.parametrize("given", ["device", "host"])
def test_a_call_waits_by_the_rule_and_no_other(name: str, how: str, given: str, sims: Devices) -> None:
    """SY1, SY2: it waits if an input was staged, or an output is, or no stream was selected; else it does not."""
    program = golden(name)
    for device in sims:
        with program.load(device) as loaded:
            method, stream = loaded["forward"], device.stream()
            inputs = placed(device, program.inputs(), given == "device")
            waits = how == "nothing" or given == "host"
            for _ in range(2):
                pending = device.pending
                if how == "selection":
                    with headrace.caller_stream(stream):
                        results = method(*inputs)
                else:
                    results = method(*inputs, stream=stream if how == "argument" else None)
                last = method.stats.last
                assert last.synchronizations == (1 if waits else 0)
                assert last.bytes_to_device == (
                    sum(x.nbytes for x in program.inputs()) if given == "host" else 0
                )
                assert last.bytes_to_host == 0
                if waits:
                    assert device.pending <= pending or not sims.late
                elif sims.late:
                    assert device.pending > pending
                assert program.right(results)


@pytest.mark.parametrize("name", ["split_cuda", "chain25_cuda", "two_islands"])
@pytest.mark.parametrize("how", ["argument", "nothing"])
def test_host_outputs_are_there_when_the_call_returns(name: str, how: str, sims: Devices) -> None:
    """SY1: arrays of the host are complete, with one wait for copies in, copies out and whatever is between."""
    program = golden(name)
    for device in sims:
        with program.load(device) as loaded:
            for k in range(3):
                results = loaded["forward"](
                    *program.inputs(k), stream=device.stream() if how == "argument" else None
                )
                last = loaded["forward"].stats.last
                assert (last.synchronizations, last.bytes_to_host) == (1, sum(r.nbytes for r in results))
                assert program.right(results, k)


def test_an_output_on_the_host_is_reason_enough_to_wait(sims: Devices) -> None:
    """SY1: inputs on the device, a stream selected, one copy to the host: the array is complete."""
    program = golden("to_host")
    for device in sims:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            for k in range(3):
                results = loaded["forward"](*(device.to_device(x) for x in program.inputs(k)), strict=True)
                last = loaded["forward"].stats.last
                assert (last.synchronizations, last.bytes_to_device) == (1, 0)
                assert last.bytes_to_host == results[0].nbytes and program.right(results, k)


def test_a_call_on_a_late_device_leaves_its_work_pending(late: Any) -> None:
    """SY1: asynchronous is meant: the output's memory is untouched when the call returns."""
    program = golden("split_cuda_resident")
    with program.load(late) as loaded:
        inputs = [late.to_device(x) for x in program.inputs()]
        stream, ran = late.stream(), []
        (out,) = loaded["forward"](*inputs, stream=stream)
        mark = stream.record()
        before = (
            late.calls("synchronize_event")
            + late.calls("synchronize_stream")
            + late.calls("synchronize_device")
        )
        stream.call(lambda: ran.append(1))
        for _ in range(3):
            (out,) = loaded["forward"](*inputs, stream=stream)
        assert not mark.query() and not stream.query() and ran == [] and late.pending > 10
        after = (
            late.calls("synchronize_event")
            + late.calls("synchronize_stream")
            + late.calls("synchronize_device")
        )
        assert before == after, "no wait of any kind"
        assert program.right([out]) and ran == [1]


def test_a_host_kernel_in_the_middle_waits_for_what_it_reads(sims: Devices) -> None:
    """SY1: a copy to the host that the next instruction reads is waited for at once, the outputs at the end."""
    program = golden("split_cuda_host_between")
    for device in sims:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            for k in range(4):
                assert program.right(loaded["forward"](*program.inputs(k)), k)
                # Two copies to the host that a kernel reads, and the end: inputs were staged.
                assert loaded["forward"].stats.last.synchronizations == 3


def test_a_call_waits_for_the_one_before_where_that_still_reads_host_memory(sims: Devices) -> None:
    """SY1, OR7: a host kernel's result on its way to the device: the call returns, and the next one, which would
    overwrite it, waits for it."""
    program = golden("host_first")
    for device in sims:
        with program.load(device) as loaded:
            results = []
            for k in range(4):
                results.append(loaded["forward"](*program.inputs(k), stream=device.stream()))
                assert loaded["forward"].stats.last.synchronizations == (1 if k else 0)
            for k, result in enumerate(results):
                assert program.right(result, k)


@pytest.mark.parametrize("name", ["split_cuda_dynamic", "fork"])
def test_several_outputs_and_shapes_that_change_cost_one_wait(
    name: str, sims: Devices, classes: dict[str, type[delegates.Base]]
) -> None:
    """SY1, DE3: and a delegate says the shape of its outputs."""
    for cls in classes.values():
        cls.dynamic = name == "split_cuda_dynamic"
    program = golden(name)
    for device in sims:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            for k in range(len(program.calls)):
                assert program.right(loaded["forward"](*program.inputs(k)), k)
                assert loaded["forward"].stats.last.synchronizations == 1


@pytest.mark.parametrize(
    "name", ["split_cuda", "split_cuda_resident", "chain25_cuda", "two_islands", "aoti_chain"]
)
def test_on_the_cpu_nothing_is_staged_or_waited_for(name: str) -> None:
    """SY1, SY4: a program planned for a GPU, in host memory: copies are counted, staging is not there."""
    program = golden(name)
    with program.load("cpu") as loaded:
        for k in range(3):
            assert program.right(loaded["forward"](*program.inputs(k), strict=True), k)


@pytest.mark.parametrize(
    "name", ["chain25_cuda_resident", "split_cuda_resident", "chain10", "chain1", "aoti_chain_resident"]
)
def test_a_steady_state_call_costs_nothing_at_the_driver(name: str, sims: Devices) -> None:
    """SY4: with device-resident inputs and outputs: no byte staged, no wait, no allocation, no free."""
    program = golden(name)
    for device in sims:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            inputs = [device.to_device(x) for x in program.inputs()]
            method = loaded["forward"]
            for _ in range(3):
                results = method(*inputs)
            events, total, allocated = device.calls("create_event"), method.stats.total, device.memory()
            for _ in range(5):
                results = method(*inputs, strict=True)
                assert set(vars(method.stats.last).values()) == {0}
            assert method.stats.total == total and method.stats.calls == 8
            after = device.memory()
            assert (after["allocations"], after["frees"]) == (allocated["allocations"], allocated["frees"])
            if not sims.late:  # where nothing ever runs, every event is still in use
                assert device.calls("create_event") - events <= 8
            assert program.right(results)


def test_strict_refuses_to_stage(sims: Devices) -> None:
    """SY4: InputError names the input; nothing ran, and the next call is right."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            inputs = [device.to_device(x) for x in program.inputs()]
            calls = device.calls("call")
            for k in range(2):
                mixed: list[Any] = list(inputs)
                mixed[k] = program.inputs()[k]
                with pytest.raises(
                    headrace.InputError, match=f"forward, input {k}.*expected .* on cuda:0, got .* cpu"
                ):
                    loaded["forward"](*mixed, strict=True)
            assert device.calls("call") == calls
            assert program.right(loaded["forward"](*inputs, strict=True))
        with golden("split_cuda").load(device) as hosted:
            with pytest.raises(headrace.InputError, match=r"input 0.*expected .* on cpu, got .* on sim:0"):
                hosted["forward"](*inputs, strict=True)
            # Without strict, device memory comes to the host.
            results = hosted["forward"](*inputs)
            assert hosted["forward"].stats.last.bytes_to_host >= sum(x.nbytes for x in inputs)
            assert golden("split_cuda").right(results)


def test_outputs_go_where_out_says(sims: Devices) -> None:
    """SY4, DM3: a Buffer of the device is written in place, an array of the host after the wait."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded, headrace.caller_stream(device.stream()):
            inputs = [device.to_device(x) for x in program.inputs()]
            want = program.calls[0][1][0]
            out = device.empty(want.shape)
            for _ in range(3):
                (result,) = loaded["forward"](*inputs, out=[out])
                assert result is out and program.right([out])
            assert set(vars(loaded["forward"].stats.last).values()) == {0}
            (fresh,) = loaded["forward"](*inputs, out=[None])
            assert fresh is not out and program.right([fresh])
            wrong: list[tuple[Any, type[Exception]]] = [
                (np.empty(want.shape, np.float32), headrace.InputError),
                (headrace.device("sim").empty(want.shape), headrace.DeviceError),
                (device.empty((*want.shape, 1)), headrace.InputError),
                (device.empty(want.shape, "float64"), headrace.InputError),
                (3.0, headrace.InputError),
            ]
            for bad, error in wrong:
                with pytest.raises(error, match=r"out"):
                    loaded["forward"](*inputs, out=[bad])
            with pytest.raises(headrace.InputError, match="out: expected 1 arrays, got 2"):
                loaded["forward"](*inputs, out=[out, out])
            assert program.right(loaded["forward"](*inputs))
        hosted = golden("split_cuda")
        with hosted.load(device) as loaded:
            array = np.full(want.shape, np.nan, np.float32)
            (result,) = loaded["forward"](*hosted.inputs(), out=[array])
            assert result is array and hosted.right([array])


def test_numpy_waits_for_the_buffer_s_writer_alone(late: Any) -> None:
    """SY5: other streams' work, and later work on the same stream, stays where it is."""
    busy, stream, ran = late.stream(), late.stream(), []
    busy.call(lambda: ran.append("busy"))
    program = golden("split_cuda_resident")
    with program.load(late) as loaded:
        inputs = [late.to_device(x) for x in program.inputs()]
        (out,) = loaded["forward"](*inputs, stream=stream)
        stream.call(lambda: ran.append("later"))
        assert program.right([out])
        assert ran == [] and not busy.query() and not stream.query()
        busy.synchronize()
        stream.synchronize()
        assert ran == ["busy", "later"]


def test_numpy_takes_a_buffer_as_an_array(late: Any) -> None:
    """SY5: np.asarray waits for the writer, as numpy() does, and is a copy; of host memory it is a view."""
    source, stream = late.to_device(np.zeros(3, np.float32)), late.stream()
    stream.call(lambda: source.numpy().fill(2), writes=[source])
    np.testing.assert_array_equal(np.asarray(source), np.float32([2, 2, 2]))
    assert np.asarray(source, "float64").dtype == np.float64
    with pytest.raises(
        ValueError, match="expected copy=None or True for device memory, got False; leave it out"
    ):
        source.__array__(copy=False)
    host = headrace.device("cpu").to_device(np.zeros(3, np.float32))
    np.asarray(host)[0] = 5
    assert host.numpy()[0] == 5
    copied = host.__array__(copy=True)
    copied[0] = 6
    assert host.numpy()[0] == 5


def test_what_a_library_enqueued_is_in_order_once_it_is_declared(late: Any) -> None:
    """SY5, OR5: reads wait for it, memory that it uses is given to nobody else, and a record sees it."""
    stream, other = late.stream(), late.stream()
    source, target = late.to_device(np.full(4, 2.0)), late.to_device(np.zeros(4))

    def kernel() -> None:  # as a library would launch it: nothing says what it touches
        target.numpy()[...] = source.numpy() + 1

    with headrace.record() as record:
        stream.call(kernel)
        stream.declare(reads=[source], writes=[target], name="kernel of a library")
        np.testing.assert_array_equal(target.numpy(), 3.0)
    record.check()
    with headrace.record() as record:
        stream.call(kernel)
        stream.declare([source], [target], name="kernel of a library")
        other.call(lambda: None)
        other.declare([target], name="its reader")
    late.synchronize()
    (conflict,) = record.findings().conflicts
    assert "kernel of a library" in str(conflict) and "its reader" in str(conflict)
    for wrong in ([3], [np.zeros(4)]):
        with pytest.raises(headrace.InputError, match=r"Stream.declare, writes: expected Buffers"):
            stream.declare(writes=wrong)


def test_an_input_that_another_stream_still_writes_is_waited_for_on_the_device(sims: Devices) -> None:
    """SY5: the host does not wait, and the values are those of the writer."""
    program = golden("split_cuda_resident")
    for device in sims:
        producer, consumer = device.stream(), device.stream()
        with program.load(device) as loaded:
            inputs = [device.empty(x.shape, stream=producer) for x in program.inputs()]
            for k in range(3):
                for buffer, x in zip(inputs, program.inputs(k), strict=True):

                    def write(buffer: Any = buffer, x: Any = x) -> None:
                        buffer.numpy()[...] = x

                    producer.call(write, writes=[buffer])
                results = loaded["forward"](*inputs, stream=consumer)
                assert loaded["forward"].stats.last.synchronizations == 0
                # The next writer is the caller's to order, as on a GPU.
                producer.wait(consumer.record())
                assert program.right(results, k)


def test_one_method_s_output_is_the_next_one_s_input(sims: Devices) -> None:
    """SY5: through device memory and three streams, nobody waiting in between."""
    first, second = golden("split_cuda_resident"), golden("chain25_cuda_resident")
    for device in sims:
        with first.load(device) as one, second.load(device) as two:
            x = device.to_device(second.inputs()[0], stream=device.stream())
            for k in range(4):
                (y,) = one["forward"](*(device.to_device(v) for v in first.inputs(k)), stream=device.stream())
                (z,) = two["forward"](x, stream=device.stream())
                (again,) = two["forward"](z, stream=device.stream())
                assert first.right([y], k) and second.right([z])
                (direct,) = two["forward"](z.numpy())
                np.testing.assert_array_equal(again.numpy(), direct.numpy())


def test_to_device_waits_for_host_memory_and_for_nothing_else(late: Any) -> None:
    """SY5: the array may be changed as soon as to_device returns; from device memory it returns at once."""
    stream, ran = late.stream(), []
    other = late.stream()
    other.call(lambda: ran.append(1))
    array = np.arange(6, dtype=np.float32)
    buffer = late.to_device(array, stream=stream)
    array[:] = -1
    assert ran == []
    stream.call(lambda: ran.append(2))
    copied = late.to_device(buffer, stream=stream)
    assert ran == [] and late.pending
    np.testing.assert_array_equal(copied.numpy(), np.arange(6))
    assert ran == [2]
    into = late.to_device(array, stream=other, out=buffer)
    assert into is buffer
    np.testing.assert_array_equal(buffer.numpy(), array)


def test_dlpack_of_a_device_orders_the_consumer_s_stream(sims: Devices) -> None:
    """SY5, DM2: an extension device to everybody else; -1 asks for no order; 0 is forbidden."""
    for device in sims:
        producer, consumer = device.stream(), device.stream()
        buffer = device.empty(4, stream=producer)
        producer.call(lambda b=buffer: b.numpy().fill(7), writes=[buffer])
        assert buffer.__dlpack_device__() == (12, 0)
        with pytest.raises((RuntimeError, BufferError, ValueError)):
            np.from_dlpack(buffer)
        waits = device.calls("wait")
        buffer.__dlpack__(stream=-1)
        assert device.calls("wait") == waits
        buffer.__dlpack__(stream=consumer.handle)
        assert device.calls("wait") == waits + 1
        seen: list[float] = []
        consumer.call(lambda b=buffer, s=seen: s.extend(b.numpy()), reads=[buffer])
        consumer.synchronize()
        assert seen == [7.0] * 4
        for bad in (0, -2, "1", 1.5):
            with pytest.raises(headrace.InputError):
                buffer.__dlpack__(stream=bad)
        with pytest.raises(headrace.InputError, match="expected its own device"):
            buffer.__dlpack__(dl_device=(1, 0))
        with pytest.raises(BufferError):
            buffer.__dlpack__(copy=True)


def test_dlpack_of_the_cpu_goes_round() -> None:
    """SY5: the same memory, both ways."""
    device = headrace.device("cpu")
    buffer = device.to_device(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert buffer.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(buffer)
    buffer.numpy()[1, 2] = 50
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 50]])
    del buffer
    assert array.sum() == 60


class CudaCapsule:
    """An array that says, by DLPack, that it lies on a GPU. Nobody may look at the address."""

    def __init__(self, kind: int) -> None:
        import ctypes

        class Tensor(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64), ("owner", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
            )  # fmt: skip

        self.shape = (ctypes.c_int64 * 2)(8, 16)
        self.tensor = Tensor(64, kind, 0, 2, 2, 32, 1, ctypes.addressof(self.shape), None, 0, None, None)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.capsule = new(ctypes.addressof(self.tensor), b"dltensor", None)
        self.kind = kind

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


@pytest.mark.parametrize("kind", [2, 13, 12, 10])
def test_a_gpu_s_array_is_never_read_as_the_host_s(kind: int, devices: Devices) -> None:
    """DM2, DM3: CUDA, managed, extension and ROCm memory: refused by name where no such device is open."""
    program = golden("split_cuda")
    for device in devices:
        with program.load(device) as loaded:
            with pytest.raises(headrace.InputError, match=r"input 0: expected .*, got "):
                loaded["forward"](CudaCapsule(kind), program.inputs()[1])
            with pytest.raises(headrace.InputError, match="expected"):
                device.to_device(CudaCapsule(kind))
            assert program.right(loaded["forward"](*program.inputs()))
        if "seeds" in devices.name:
            break


def test_waiting_threads_let_others_run(late: Any) -> None:
    """SY1: while one thread waits in a call, others run Python, host functions of the device among it."""
    gate, stream = threading.Event(), late.stream()
    stream.call(lambda: gate.wait(60))
    waiter = threading.Thread(target=stream.synchronize)
    waiter.start()
    assert waiter.is_alive()
    gate.set()
    waiter.join(60)
    assert not waiter.is_alive()
