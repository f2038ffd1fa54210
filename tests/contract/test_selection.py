"""CS: which stream a call runs on, and what is selected afterwards."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import headrace

from . import delegates
from .conftest import Devices, golden


@pytest.fixture
def seen(classes: dict[str, type[delegates.Base]]) -> Iterator[list[Any]]:
    """Handles of the streams that islands ran on, and what was selected meanwhile."""
    calls: list[Any] = []

    def note(stream: Any) -> None:
        selected = headrace.current_stream()
        calls.append((stream.handle, None if selected is None else selected.handle))

    for cls in classes.values():
        cls.on_run = staticmethod(note)
    yield calls
    for cls in classes.values():
        cls.on_run = None


def test_selections_nest_and_come_back_on_every_exit(devices: Devices) -> None:
    """CS1, CS7: the former selection is back after a block, a return, an exception, and a generator's end."""
    for device in devices:
        first, second = device.stream(), device.stream()
        assert headrace.current_stream() is None
        with headrace.caller_stream(first) as given:
            assert given is first and headrace.current_stream() == first

            def interrupted(second: Any = second) -> None:
                with headrace.caller_stream(second):
                    assert headrace.current_stream() == second
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert headrace.current_stream() == first

            def early(second: Any = second) -> Any:
                with headrace.caller_stream(second):
                    return headrace.current_stream()

            assert early() == second and headrace.current_stream() == first
            with headrace.caller_stream(first), headrace.caller_stream(first), headrace.caller_stream(second):
                assert headrace.current_stream() == second
            assert headrace.current_stream() == first
        assert headrace.current_stream() is None


def test_one_selection_object_may_be_entered_again_and_by_several_threads(late: Any) -> None:
    """CS1: each thread gets back what it had before."""
    shared, own = headrace.caller_stream(late.stream()), [late.stream() for _ in range(4)]
    gate = threading.Barrier(4, timeout=60)
    wrong: list[Any] = []

    def work(k: int) -> None:
        with contextlib.ExitStack() as stack:
            if k:
                stack.enter_context(headrace.caller_stream(own[k]))
            before = headrace.current_stream()
            for _ in range(50):
                gate.wait()
                with shared, shared:
                    gate.wait()
                gate.wait()
                if headrace.current_stream() != before:
                    wrong.append((k, before, headrace.current_stream()))
                    gate.abort()
                    return

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_selection_belongs_to_its_thread(devices: Devices) -> None:
    """CS1: a new thread has none, and what it selects stays its own."""
    for device in devices:
        mine, others, found = device.stream(), device.stream(), []

        def work(device: Any = device, others: Any = others, found: list[Any] = found) -> None:
            found.append(headrace.current_stream())
            with headrace.caller_stream(others):
                found.append(headrace.current_stream())

        with headrace.caller_stream(mine):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert headrace.current_stream() == mine
        assert found == [None, others]


def test_every_island_runs_on_the_selected_stream(sims: Devices, seen: list[Any]) -> None:
    """CS1, CS3, SY3: what a delegate is handed and what it finds selected are the call's stream, throughout."""
    program = golden("chain25_cuda")
    for device in sims:
        stream, other = device.stream(), device.stream()
        with program.load(device) as loaded:
            with headrace.caller_stream(stream):
                assert program.right(loaded["forward"](*program.inputs()))
                assert headrace.current_stream() == stream
            assert seen == [(stream.handle, stream.handle)] * 25
            seen.clear()
            # An argument is the selection of that call alone, and wins over the thread's.
            with headrace.caller_stream(stream):
                assert program.right(loaded["forward"](*program.inputs(), stream=other))
                assert headrace.current_stream() == stream
                assert program.right(loaded["forward"](*program.inputs()))
            assert seen == [(other.handle, other.handle)] * 25 + [(stream.handle, stream.handle)] * 25
            seen.clear()
            # Without either: the thread's own.
            assert program.right(loaded["forward"](*program.inputs()))
            assert headrace.current_stream() is None
        assert seen == [(2, 2)] * 25
        seen.clear()


def test_a_delegate_that_selects_another_stream_disturbs_nobody(
    late: Any, classes: dict[str, type[delegates.Base]]
) -> None:
    """SY3: the stream is read once. What an island leaves selected reaches neither the next island nor the caller."""
    program, other, found = golden("split_cuda"), late.stream(), []

    def meddle(stream: Any) -> None:
        found.append(stream.handle)
        headrace.caller_stream(other).__enter__()

    for cls in classes.values():
        cls.on_run = staticmethod(meddle)
    stream = late.stream()
    with program.load(late) as loaded, headrace.caller_stream(stream):
        assert program.right(loaded["forward"](*program.inputs()))
        assert headrace.current_stream() == stream
    assert found == [stream.handle] * 2 and headrace.current_stream() is None


def test_a_selection_made_by_an_argument_does_not_change_the_call(sims: Devices, seen: list[Any]) -> None:
    """SY3: the stream is read once, before an argument's own code runs, and is that of every copy, island and wait."""
    program = golden("split_cuda")

    class Selects:
        """An array that selects a stream where it is read, and leaves it selected."""

        def __init__(self, array: Any, block: Any) -> None:
            self.array, self.block = array, block

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **how: Any) -> Any:
            self.block.__enter__()
            return self.array.__dlpack__()

    for device in sims:
        stream, other = device.stream(), device.stream()
        block = headrace.caller_stream(other)
        with program.load(device) as loaded:
            x, y = program.inputs()
            for chosen in (contextlib.nullcontext(), headrace.caller_stream(stream)):
                expected = 2 if isinstance(chosen, contextlib.nullcontext) else stream.handle
                seen.clear()
                with chosen:
                    results = loaded["forward"](Selects(x, block), y)
                    block.__exit__(None, None, None)
                    assert program.right(results)
                # A per-thread stream's handle is 2 on every device.
                assert {handle for handle, *_ in seen} == {expected}, seen


@pytest.mark.parametrize("how", ["argument", "selection"])
def test_a_program_without_device_memory_passes_the_selection_on(how: str, sims: Devices) -> None:
    """CS1, CS3: an argument and a selection are the same to a delegate that asks the thread."""
    program, found = golden("split_host"), []

    class Asks(delegates.OneCall):
        def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
            found.append(headrace.current_stream())
            super().enqueue(inputs, outputs, stream)

    delegates.install(Asks)
    for device in sims:
        stream = device.stream()
        with program.load(device) as loaded:
            if how == "argument":
                assert program.right(loaded["forward"](*program.inputs(), stream=stream))
            else:
                with headrace.caller_stream(stream):
                    assert program.right(loaded["forward"](*program.inputs()))
        assert found and all(s == stream for s in found)
        assert headrace.current_stream() is None
        found.clear()


def test_the_former_selection_is_back_after_a_failed_call(devices: Devices) -> None:
    """CS7: an island raises; the thread's selection is what it was."""

    class Fails(headrace.Delegate, name="TestB"):
        def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
            raise RuntimeError("on purpose")

    program = golden("split_cuda")
    for device in devices:
        stream, other = device.stream(), device.stream()
        with program.load(device) as loaded:
            with pytest.raises(headrace.DelegateError, match="on purpose"):
                loaded["forward"](*program.inputs(), stream=other)
            assert headrace.current_stream() is None
            with headrace.caller_stream(stream):
                with pytest.raises(headrace.DelegateError, match="on purpose"):
                    loaded["forward"](*program.inputs())
                assert headrace.current_stream() == stream


def test_nothing_selected_differs_from_handle_0(sims: Devices, seen: list[Any]) -> None:
    """CS2: 0 is the legacy stream, kept as 1; 1 and 2 are ordinary selections; nothing is nothing."""
    program = golden("split_cuda_resident")
    for device in sims:
        with program.load(device) as loaded:
            inputs = [device.to_device(x) for x in program.inputs()]
            loaded["forward"](*inputs)
            for handle in (0, 1, 2):
                expected = handle or 1
                with headrace.caller_stream(handle, device=device):
                    current = headrace.current_stream()
                    assert current.handle == expected and current.device is device
                    by_selection = loaded["forward"](*inputs)
                    assert loaded["forward"].stats.last.synchronizations == 0
                by_argument = loaded["forward"](*inputs, stream=handle)
                assert loaded["forward"].stats.last.synchronizations == 0
                assert seen[-4:] == [(expected, expected)] * 4
                assert program.right(by_selection) and program.right(by_argument)
            assert headrace.current_stream() is None
            results = loaded["forward"](*inputs)
            assert loaded["forward"].stats.last.synchronizations == 1
            assert seen[-2:] == [(2, 2)] * 2
            assert program.right(results)
        seen.clear()


class AsMethod:
    """cuda.core's protocol."""

    def __init__(self, handle: int, version: Any = 0) -> None:
        self.handle, self.version = handle, version

    def __cuda_stream__(self) -> tuple[Any, int]:
        return self.version, self.handle


class AsAttribute:
    """What early implementers had."""

    def __init__(self, handle: int) -> None:
        self.__cuda_stream__ = (0, handle)


@pytest.mark.parametrize("protocol", [AsMethod, AsAttribute])
def test_a_stream_is_anything_with_the_protocol(
    protocol: Callable[[int], Any], sims: Devices, seen: list[Any]
) -> None:
    """CS5: by argument and by selection; and our own Stream speaks it."""
    program = golden("split_cuda")
    for device in sims:
        stream = device.stream()
        assert stream.__cuda_stream__() == (0, stream.handle)
        foreign = protocol(stream.handle)
        with program.load(device) as loaded:
            assert program.right(loaded["forward"](*program.inputs(), stream=foreign))
            with headrace.caller_stream(foreign) as given:
                assert given is foreign
                assert program.right(loaded["forward"](*program.inputs()))
            with headrace.caller_stream(foreign, device=device):
                assert headrace.current_stream() == stream
                assert program.right(loaded["forward"](*program.inputs()))
            assert program.right(loaded["forward"](*program.inputs(), stream=stream.handle))
        assert seen == [(stream.handle, stream.handle)] * 8
        seen.clear()


def test_what_is_no_stream_is_refused(late: Any) -> None:
    """CS5: with InputError, by argument and by selection; nothing is selected then."""
    program = golden("split_cuda")
    bad: dict[str, Any] = {
        "text": "stream",
        "a float": 1.5,
        "a bool": True,
        "an object": object(),
        "a negative handle": -1,
        "a handle of 65 bits": 1 << 64,
        "another version": AsMethod(1, version=1),
        "a version that is no number": AsMethod(1, version="0"),
        "a handle that is no number": AsMethod("1"),  # type: ignore[arg-type]
        "no pair": type("Odd", (), {"__cuda_stream__": 5})(),
        "a pair of one": type("Odd", (), {"__cuda_stream__": (0,)})(),
    }
    with program.load(late) as loaded:
        for what, stream in bad.items():
            with pytest.raises(headrace.InputError, match=r"expected .* got "):
                headrace.caller_stream(stream, device=late).__enter__()
            assert headrace.current_stream() is None, what
            with pytest.raises(headrace.InputError, match=r"expected .* got "):
                loaded["forward"](*program.inputs(), stream=stream)
        with pytest.raises(headrace.InputError, match="int together with device="):
            headrace.caller_stream(1).__enter__()
        with pytest.raises(headrace.InputError, match="expected a Device, got str"):
            headrace.caller_stream(1, device="sim").__enter__()
        with pytest.raises(headrace.InputError):
            headrace.caller_stream(None).__enter__()
        broken = type("Broken", (), {"__cuda_stream__": lambda self: 1 / 0})()
        with pytest.raises(ZeroDivisionError), headrace.caller_stream(broken):
            pass
        assert headrace.current_stream() is None
        assert program.right(loaded["forward"](*program.inputs()))


def test_a_stream_of_another_device_is_refused_before_anything_is_enqueued(sims: Devices) -> None:
    """CS6: as argument, selection, foreign object and Stream; the message names both devices."""
    program = golden("split_cuda")
    for device in sims:
        other = headrace.device("sim:1", schedule="late")
        strange = other.stream()
        with program.load(device) as loaded:
            device.synchronize()
            before, pending = device.calls(), device.pending
            x = program.inputs()

            def attempts(loaded: Any = loaded, strange: Any = strange, x: Any = x, other: Any = other) -> Any:
                yield lambda: loaded["forward"](*x, stream=strange)
                yield lambda: loaded["forward"](*x, stream=AsMethod(strange.handle))
                yield lambda: loaded["forward"](*x, stream=strange.handle)
                for stream, of in (
                    (strange, None),
                    (AsMethod(strange.handle), None),
                    (strange.handle, other),
                ):

                    def selected(stream: Any = stream, of: Any = of) -> None:
                        with headrace.caller_stream(stream, device=of):
                            loaded["forward"](*x)

                    yield selected

            for attempt in attempts():
                with pytest.raises(headrace.DeviceError, match=r"sim:0.*sim:1") as caught:
                    attempt()
                assert caught.value.device == "sim:0"
            with pytest.raises(headrace.DeviceError, match=r"sim:1.*sim:0"):
                headrace.caller_stream(device.stream(), device=other).__enter__()
            made = 1  # the stream in the line above
            assert device.calls() - device.calls("destroy_stream") - before == made
            assert device.pending == pending and other.calls() == 1
            twin = headrace.device("sim")
            twice = r"sim:0.*sim:0, another device of that name"
            with pytest.raises(headrace.DeviceError, match=twice):
                loaded["forward"](*x, stream=twin.stream())
            with pytest.raises(headrace.DeviceError, match=twice):
                loaded["forward"](*[twin.to_device(value) for value in x])
            assert program.right(loaded["forward"](*x))


def test_a_cpu_program_refuses_a_stream_of_a_device(late: Any) -> None:
    """CS6: by argument; a selection that is of no use to it is left alone."""
    program = golden("split_cuda")
    with program.load("cpu") as loaded:
        with pytest.raises(headrace.DeviceError, match=r"expected a stream of cpu, got one of sim:0"):
            loaded["forward"](*program.inputs(), stream=late.stream())
        with headrace.caller_stream(late.stream()):
            assert program.right(loaded["forward"](*program.inputs()))
    assert late.calls("copy") == late.calls("call") == 0


def test_a_block_ends_on_the_thread_that_began_it(late: Any) -> None:
    """CS1: an end without a beginning says so, and leaves the selection."""
    stream = late.stream()
    block = headrace.caller_stream(stream)
    with pytest.raises(headrace.InputError, match="got no block"):
        block.__exit__(None, None, None)
    with block:
        failures: list[BaseException] = []

        def end() -> None:
            try:
                block.__exit__(None, None, None)
            except headrace.InputError as error:
                failures.append(error)

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert len(failures) == 1
        assert headrace.current_stream().handle == stream.handle
    assert headrace.current_stream() is None


def test_blocks_that_do_not_nest_leave_nothing_selected(late: Any) -> None:
    """CS1: generators and coroutines end blocks out of order; those still open keep their stream."""
    one, two = late.stream(), late.stream()
    a, b = headrace.caller_stream(one), headrace.caller_stream(two)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert headrace.current_stream() == two
    b.__exit__(None, None, None)
    assert headrace.current_stream() is None

    def selects() -> Iterator[None]:
        with headrace.caller_stream(one):
            yield

    generator = selects()
    next(generator)
    with headrace.caller_stream(two):
        generator.close()
        assert headrace.current_stream() == two
        with headrace.caller_stream(one):
            assert headrace.current_stream() == one
        assert headrace.current_stream() == two
    assert headrace.current_stream() is None


def test_a_closed_stream_can_be_neither_selected_nor_used(devices: Devices) -> None:
    """CS7: nor may it be closed under a selection and then called on; closing twice is fine."""
    program = golden("split_cuda")
    for device in devices:
        with program.load(device) as loaded:
            stream = device.stream()
            handle = stream.handle
            stream.close()
            stream.close()
            uses = (
                lambda s: headrace.caller_stream(s).__enter__(),
                lambda s: loaded["forward"](*program.inputs(), stream=s),
                lambda s: s.handle,
                lambda s: s.__cuda_stream__(),
                lambda s: s.synchronize(),
                lambda s: s.query(),
                lambda s: s.record(),
                lambda s: s.call(lambda: None),
                lambda s, device=device: device.empty(3, stream=s),
                lambda s, device=device: device.to_device(np.ones(3, np.float32), stream=s),
            )
            for use in uses:
                with pytest.raises(headrace.InputError, match="closed"):
                    use(stream)
            assert headrace.current_stream() is None
            with pytest.raises(headrace.InputError, match=r"stream"):
                loaded["forward"](*program.inputs(), stream=handle)
            under = device.stream()
            with headrace.caller_stream(under):
                under.close()
                if device.name != "cpu":  # a program on the cpu has no use for a selection
                    with pytest.raises(headrace.InputError, match=r"stream"):
                        loaded["forward"](*program.inputs())
            assert headrace.current_stream() is None
            assert program.right(loaded["forward"](*program.inputs()))


def test_a_selection_keeps_its_stream(late: Any) -> None:
    """CS7: dropping every other reference to the stream does not end it under the selection."""
    program = golden("split_cuda_resident")
    with program.load(late) as loaded:
        inputs = [late.to_device(x) for x in program.inputs()]
        with headrace.caller_stream(late.stream()):
            gc.collect()
            results = loaded["forward"](*inputs)
        gc.collect()
        assert program.right(results)
