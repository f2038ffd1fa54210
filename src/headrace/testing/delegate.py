"""What every delegate in Python keeps: right answers, on the stream of the call, without waiting, on any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..delegate import Context, Delegate
from ..device import Device, Stream, caller_stream
from ..device import device as open_device
from ..errors import InputError, OrderingError
from ..ordering import record
from .check import Array, Failed, expect, expect_equal, run_checks
from .device import copy

__all__ = ["check_delegate"]


def in_thread(function: Callable[[], Any]) -> Any:
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


def check_delegate(
    cls: type[Delegate],
    *,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    payload: bytes = b"",
    specs: Mapping[str, bytes] | None = None,
    options: Mapping[str, bool | int | str] | None = None,
    named_data: Mapping[str, bytes] | None = None,
    device: Device | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    seeds: int = 30,
) -> tuple[str, ...]:
    """Check that a delegate written in Python keeps its contract: right answers, the same bits each time, on the
    stream of the call and no other unless it joins it again, without waiting, on any thread.

    It needs no program: the delegate is loaded with ``payload`` as an island with these inputs and outputs.

    Args:
        cls: the subclass of `Delegate`, with or without a name.
        inputs: one array (or number) for each input of the island.
        outputs: the arrays that it should answer.
        specs, options, named_data: what the delegate finds in its `Context`.
        device: where to run it. None: the cpu, unless it requires device memory, and simulated devices under
            ``"eager"``, ``"late"`` and ``seeds`` seeds.
        rtol, atol: how far from ``outputs`` an answer may be.

    Raises:
        InputError: ``cls`` is no delegate, or the arrays are none.
        ConformanceError: what was expected, and what the delegate did.
    """
    if not (isinstance(cls, type) and issubclass(cls, Delegate)):
        raise InputError(
            f"check_delegate: expected a subclass of headrace.Delegate, got {cls!r}; derive it from that"
        )
    for name, given in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(given, list | tuple):
            raise InputError(
                f"check_delegate, {name}: expected a list of arrays, got {type(given).__name__}; pass [array, …]"
            )
    if any(np.asarray(y).dtype.hasobject for y in outputs):
        raise InputError(
            "check_delegate, outputs: expected arrays of numbers, got other objects; convert them"
        )
    subject = f"delegate {cls.__name__}"
    arrays = tuple(np.asarray(x) if hasattr(x, "__array__") else x for x in inputs)
    wanted = tuple(np.asarray(y) for y in outputs)
    bench = _Bench(cls, payload, arrays, wanted, specs or {}, options or {}, named_data or {}, rtol, atol)
    schedules: list[str | int] = ["eager", "late", *range(seeds)]
    sims: list[Callable[[], Device]] = [partial(open_device, "sim", schedule=each) for each in schedules]
    if device is None:
        makers = sims if cls.requires_device else [lambda: open_device("cpu"), *sims]
    else:
        makers, sims = [lambda: device], []

    def on(devices: Sequence[Callable[[], Device]], check: Callable[[Device], None]) -> Callable[[], None]:
        def run() -> None:
            for make in devices:
                check(make())

        return run

    checks: list[tuple[str, Callable[[], None]]] = [
        ("is_a_delegate", bench.is_a_delegate),
        ("says_whether_it_can_be_captured", bench.says_whether_it_can_be_captured),
        ("answers_what_it_should", on(makers, bench.answers)),
        ("answers_the_same_bits_each_time", on(makers[:3], bench.repeats)),
        ("instances_are_independent", on(makers[:3], bench.is_alone)),
        ("runs_on_another_thread", on(makers[:3], bench.moves)),
    ]
    if sims:
        checks += [
            ("does_not_wait", on(sims[1:2], bench.does_not_wait)),
            ("runs_behind_what_is_on_the_stream", on(sims, bench.follows)),
            ("record_is_clean", on(sims[:3], bench.is_ordered)),
        ]
    return run_checks(subject, checks)


class _Bench:
    """One delegate, and islands of it on devices."""

    def __init__(
        self,
        cls: type[Delegate],
        payload: bytes,
        inputs: tuple[Any, ...],
        outputs: tuple[Array, ...],
        specs: Mapping[str, bytes],
        options: Mapping[str, bool | int | str],
        named_data: Mapping[str, bytes],
        rtol: float,
        atol: float,
    ) -> None:
        self.cls, self.payload, self.inputs, self.outputs = cls, payload, inputs, outputs
        self.specs, self.options, self.named_data = specs, options, named_data
        self.rtol, self.atol = rtol, atol

    def load(self, device: Device) -> Delegate:
        made = self.cls()
        made.load(
            self.payload,
            Context(
                "forward",
                0,
                len(self.inputs),
                self.specs,
                self.options,
                device,
                lambda key: self.named_data[key],
            ),
        )
        return made

    def call(self, made: Delegate, given: tuple[Any, ...], results: tuple[Any, ...], stream: Stream) -> None:
        """As a method does: on a device the stream of the call is the thread's selection too."""
        if stream.device.name == "cpu":
            made.run(given, results, stream)
        else:
            with caller_stream(stream):
                made.run(given, results, stream)

    def arguments(self, device: Device) -> tuple[Any, ...]:
        return tuple(device.to_device(x) if isinstance(x, np.ndarray) else x for x in self.inputs)

    def results(self, device: Device) -> tuple[Any, ...]:
        """Memory of 0xFF bytes: what is not written is not a number."""
        return tuple(
            device.to_device(np.full(y.nbytes, 0xFF, np.uint8).view(y.dtype).reshape(y.shape))
            for y in self.outputs
        )

    def compare(self, results: tuple[Any, ...]) -> None:
        for number, (got, want) in enumerate(zip(results, self.outputs, strict=True)):
            array = np.array(got.numpy())
            if self.rtol or self.atol:
                close = np.allclose(array, want, self.rtol, self.atol, equal_nan=want.dtype.kind == "f")
                expect(close, f"output {number} {want.ravel()[:4]}…", f"{array.ravel()[:4]}…")
            else:
                expect_equal(array, want, f"output {number}")

    def is_a_delegate(self) -> None:
        expect(isinstance(self.cls, type) and issubclass(self.cls, Delegate), "a headrace.Delegate", self.cls)
        expect(self.cls.run is not Delegate.run, "a run() of its own", "none")
        expect(len(self.outputs) > 0, "at least one output to compare", "none")

    def says_whether_it_can_be_captured(self) -> None:
        said = self.load(open_device("cpu" if not self.cls.requires_device else "sim")).capturable()
        expect(said is True or (isinstance(said, str) and said), "True, or a reason why not", repr(said))

    def answers(self, device: Device) -> None:
        made, stream = self.load(device), device.stream()
        given, results = self.arguments(device), self.results(device)
        self.call(made, given, results, stream)
        stream.synchronize()
        self.compare(results)
        for number, (buffer, array) in enumerate(zip(given, self.inputs, strict=True)):
            if isinstance(array, np.ndarray):
                expect_equal(np.array(buffer.numpy()), array, f"input {number} untouched,")

    def repeats(self, device: Device) -> None:
        made, streams = self.load(device), [device.stream(), device.per_thread_stream()]
        first: list[bytes] = []
        for number in range(20):
            results = self.results(device)
            self.call(made, self.arguments(device), results, streams[number % 2])
            streams[number % 2].synchronize()
            bits = [np.array(r.numpy()).tobytes() for r in results]
            first = first or bits
            expect(bits == first, "the bits of the first run", f"others in run {number}")

    def is_alone(self, device: Device) -> None:
        one, two, stream = self.load(device), self.load(device), device.stream()
        for made in (one, two, one):
            results = self.results(device)
            self.call(made, self.arguments(device), results, stream)
            stream.synchronize()
            self.compare(results)
        del two
        results = self.results(device)
        self.call(one, self.arguments(device), results, stream)
        stream.synchronize()
        self.compare(results)

    def moves(self, device: Device) -> None:
        made, stream = self.load(device), device.stream()
        results = self.results(device)
        in_thread(lambda: self.call(made, self.arguments(device), results, stream))
        stream.synchronize()
        self.compare(results)

    def does_not_wait(self, device: Device) -> None:
        made, stream = self.load(device), device.stream()
        given, results = self.arguments(device), self.results(device)
        self.call(made, given, results, stream)
        waits = ("synchronize_stream", "synchronize_event", "synchronize_device")
        stream.synchronize()
        before = [device.calls(wait) for wait in waits]
        self.call(made, given, results, stream)
        after = [device.calls(wait) for wait in waits]
        expect(after == before, "run() to enqueue and return", "waits for the device in it")
        stream.synchronize()

    def follows(self, device: Device) -> None:
        """The inputs are written by work that is on the stream and need not have run, and the outputs are read so."""
        made, stream = self.load(device), device.stream()
        given = tuple(
            device.to_device(np.zeros_like(x)) if isinstance(x, np.ndarray) else x for x in self.inputs
        )
        results, copies = self.results(device), self.results(device)
        for buffer, array in zip(given, self.inputs, strict=True):
            if isinstance(array, np.ndarray):
                stream.call(lambda b=buffer, a=array: b.numpy().__setitem__(..., a), writes=[buffer])
        self.call(made, given, results, stream)
        for result, seen in zip(results, copies, strict=True):
            copy(stream, seen, result)
        stream.synchronize()
        self.compare(copies)

    def is_ordered(self, device: Device) -> None:
        with record() as recorded:
            self.follows(device)
            device.synchronize()
        try:
            recorded.check()
        except OrderingError as e:
            raise Failed(str(e)) from e
