"""The public conformance kit: every device and every way of the tests' delegates passes it, and it fails what is
wrong, naming what."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.testing import ConformanceError, check_delegate, check_device
from tests.programs import graph

from . import delegates
from .conftest import Devices

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_every_device_conforms(devices: Devices) -> None:
    """OR6 and the seam's contract, on every device there is."""
    ran = set()
    for count, device in enumerate(devices):
        if count == 20:
            break
        ran.add(check_device(device))
    (names,) = ran
    assert len(names) == {"cpu": 16, "cuda": 10}.get(devices.name, 19)


class Scale(headrace.Delegate):
    """As in the documentation."""

    def load(self, payload: bytes, context: Any) -> None:
        self.factor = float(payload)
        self.device = context.device

    def run(self, inputs: Any, outputs: Any, stream: Any) -> None:
        self.enqueue(inputs, outputs, stream)

    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        (x,), (y,) = inputs, outputs
        stream.call(lambda: np.multiply(x.numpy(), self.factor, out=y.numpy()), reads=[x], writes=[y])


def conforms(cls: type[headrace.Delegate]) -> tuple[str, ...]:
    return check_delegate(cls, payload=b"2.5", inputs=[X], outputs=[X * np.float32(2.5)])


def test_delegate_of_the_documentation_conforms() -> None:
    """DE3: what a delegate in Python promises."""
    assert len(conforms(Scale)) == 9


class Forks(Scale):
    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        side = self.device.stream() if stream.device is self.device else stream
        side.wait(stream.record())
        super().enqueue(inputs, outputs, side)
        stream.wait(side.record())


def test_delegate_that_forks_and_joins_conforms() -> None:
    assert len(conforms(Forks)) == 9


PAYLOAD = graph.encode(
    ["x"],
    ["y"],
    [{"op": "mul", "out": "m", "args": ["x", "c"]}, {"op": "add", "out": "y", "args": ["m", 1.5]}],
    {"c": np.full(4, 3, np.float32)},
)


@pytest.mark.parametrize("way", delegates.WAYS.values(), ids=delegates.WAYS)
def test_every_way_of_the_contract_conforms(way: type[headrace.Delegate]) -> None:
    check_delegate(way, payload=PAYLOAD, inputs=[X], outputs=[X * np.float32(3) + np.float32(1.5)])


@pytest.mark.parametrize("way", delegates.WRONG.values(), ids=delegates.WRONG)
def test_every_wrong_way_of_the_contract_fails(way: type[headrace.Delegate]) -> None:
    with pytest.raises(ConformanceError):
        check_delegate(way, payload=PAYLOAD, inputs=[X], outputs=[X * np.float32(3) + np.float32(1.5)])


class OwnStream(Scale):
    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        if not hasattr(self, "own"):
            self.own = self.device.stream()
        super().enqueue(inputs, outputs, self.own)


class Waits(Scale):
    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        super().enqueue(inputs, outputs, stream)
        stream.synchronize()


class ReadsAtOnce(Scale):
    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        (x,), (y,) = inputs, outputs
        now = np.array(x.numpy())
        stream.call(lambda: np.multiply(now, self.factor, out=y.numpy()), writes=[y])


class WritesItsInput(Scale):
    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        super().enqueue(inputs, outputs, stream)
        stream.call(lambda: inputs[0].numpy().fill(0), writes=inputs)


class Drifts(Scale):
    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        (x,), (y,), factor = inputs, outputs, self.factor
        stream.call(lambda: np.multiply(x.numpy(), factor, out=y.numpy()), reads=[x], writes=[y])
        self.factor = 2.6


class Shares(Scale):
    runs: list[int] = []  # noqa: RUF012  shared by the instances, which is the fault

    def load(self, payload: bytes, context: Any) -> None:
        super().load(payload, context)
        self.number = len(Shares.runs)
        Shares.runs.append(0)

    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        self.factor = 2.5 if self.number == len(Shares.runs) - 1 else 3.0
        super().enqueue(inputs, outputs, stream)


class Bound(Scale):
    def load(self, payload: bytes, context: Any) -> None:
        import threading

        super().load(payload, context)
        self.thread = threading.get_ident()

    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        import threading

        if threading.get_ident() != self.thread:
            raise RuntimeError("another thread")
        super().enqueue(inputs, outputs, stream)


class Unsure(Scale):
    def capturable(self) -> Any:
        return ""


class Undeclared(Scale):
    """Says that it reads its input on the stream of the call, and writes on one of its own that it joins."""

    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        own = self.device.stream() if stream.device is self.device else stream
        own.wait(stream.record())
        stream.call(lambda: None, writes=outputs)
        super().enqueue(inputs, outputs, own)
        stream.wait(own.record())


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        (OwnStream, "runs_behind_what_is_on_the_stream"),
        (Waits, "does_not_wait"),
        (ReadsAtOnce, "does_not_wait"),
        (WritesItsInput, "answers_what_it_should"),
        (Drifts, "answers_the_same_bits_each_time"),
        (Shares, "instances_are_independent"),
        (Bound, "runs_on_another_thread"),
        (Unsure, "says_whether_it_can_be_captured"),
        (Undeclared, "record_is_clean"),
        (headrace.Delegate, "is_a_delegate"),
    ],
)
def test_delegate_that_does_not_conform_is_told_why(cls: type[headrace.Delegate], check: str) -> None:
    with pytest.raises(ConformanceError) as e:
        conforms(cls)
    assert isinstance(e.value, AssertionError | headrace.HeadraceError)
    assert e.value.check == check, e.value
    assert str(e.value).startswith(f"delegate {cls.__name__}, {check.replace('_', ' ')}: expected ")


class Broken:
    """A device with one method that does something else."""

    def __init__(self, device: Any, **methods: Any) -> None:
        self._device = device
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *args, **kwargs: self._methods[name](self._device, *args, **kwargs)
        return getattr(self._device, name)


@pytest.mark.parametrize(
    ("method", "does", "check"),
    [
        ("to_device", lambda d, x, **k: d.to_device(x + 1 if x.dtype == "f4" else x, **k), "memory_keeps"),
        ("event", lambda d, **k: d.stream().record(), "event_times"),
        ("legacy_stream", lambda d: d.stream(), "streams_have"),
        ("per_thread_stream", lambda d: d.stream(blocking=True), "streams_have"),
        ("trim", lambda d: None, "memory_comes_back"),
        ("partition", lambda d, sms: d.partition(sms=8), "partition_grants"),
        ("empty", lambda d, *a, **k: d.to_device(np.zeros(4, np.float32)), "too_much_memory"),
    ],
)
def test_device_that_does_not_conform_is_told_why(method: str, does: Any, check: str) -> None:
    with pytest.raises(ConformanceError) as e:
        check_device(Broken(headrace.device("sim"), **{method: does}))
    assert e.value.check.startswith(check), e.value


def test_what_is_no_device_or_delegate_is_told() -> None:
    """OP3: an InputError that names the argument."""
    assert check_device("cpu") == check_device(headrace.device("cpu"))
    with pytest.raises(headrace.InputError, match="expected a Device or its name, got int"):
        check_device(3)
    for wrong in (3, dict):
        with pytest.raises(headrace.InputError, match=r"a subclass of headrace\.Delegate"):
            check_delegate(wrong, inputs=[X], outputs=[X])  # type: ignore[arg-type]
    for given in ({"inputs": 3, "outputs": [X]}, {"inputs": [X], "outputs": X}):
        with pytest.raises(headrace.InputError, match="puts: expected a list of arrays"):
            check_delegate(Scale, payload=b"1", **given)
    with pytest.raises(headrace.InputError, match="expected arrays of numbers"):
        check_delegate(Scale, payload=b"1", inputs=[X], outputs=[None])


def test_kit_needs_no_test_framework() -> None:
    code = (
        "import sys, headrace, headrace.testing as t; t.check_device(headrace.device('sim'));"
        "assert not {'pytest', '_pytest', 'unittest', 'hypothesis'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
