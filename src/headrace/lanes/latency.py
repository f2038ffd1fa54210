"""What programs take beside each other, in lanes and without them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np

from ..device import Device, Event, LaneWarning, Partition
from ..device import device as open_device
from ..errors import CaptureError, InputError, OptionError
from ..graph import Graph
from ..program import OptionValue, Source, load

__all__ = ["Latency", "Measured", "Tenant", "measure", "side_by_side"]

# Calls that a neighbour keeps in flight.
DEPTH = 4
WARM_UP = 20


@dataclass(frozen=True)
class Tenant:
    """A program on the GPU and a call of it. ``inputs``: arrays for the method, on the host. ``target_us``: the greatest
    p99 latency that is acceptable, in microseconds; None: whatever is left is good enough."""

    source: Source
    inputs: Sequence[Any]
    data: Sequence[Source] = ()
    method: str | None = None
    options: Mapping[str, Mapping[str, OptionValue]] | None = None
    name: str = ""
    target_us: float | None = None

    def __post_init__(self) -> None:
        if self.target_us is not None and not self.target_us > 0:
            raise OptionError(
                f"target_us: expected a positive number or None, got {self.target_us!r}; pass microseconds, or None for no target"
            )

    @property
    def label(self) -> str:
        return self.name or (
            str(self.source) if not isinstance(self.source, bytes | bytearray) else "program"
        )


@dataclass(frozen=True)
class Latency:
    """Microseconds, over ``calls`` calls."""

    p50_us: float
    p99_us: float
    p999_us: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        p50, p99, p999 = np.percentile(np.asarray(seconds, np.float64) * 1e6, (50, 99, 99.9)).tolist()
        return cls(p50, p99, p999, len(seconds))


@dataclass(frozen=True)
class Measured:
    """One program in one setting. ``sms``: those of its lane; 0: it had the whole GPU. ``beside``: what the others did:
    ``"alone"``, ``"in lanes"``, ``"on the whole GPU"`` (all of them, this one too) or ``"outside every lane"`` (the others
    alone)."""

    tenant: str
    sms: int
    beside: str
    latency: Latency


class Running:
    """A tenant's program, loaded, with its inputs where they belong, captured if it can be."""

    def __init__(self, tenant: Tenant, device: Device, lane: Partition | None) -> None:
        self.program = load(
            tenant.source, data=tuple(tenant.data), device=device, lane=lane, options=tenant.options
        )
        name = tenant.method or self.program.methods[0]
        if name not in self.program:
            raise InputError(
                f"method: expected one of {', '.join(self.program.methods)}, got {name!r}; name one of these"
            )
        self.method = method = self.program[name]
        self.stream = device.stream() if lane is None else lane.stream()
        self.inputs = [
            device.to_device(x) if i < len(method.inputs) and method.inputs[i].device != "cpu" else x
            for i, x in enumerate(tenant.inputs)
        ]
        self.graph: Graph | None = None
        try:
            self.graph = method.capture(*self.inputs, stream=self.stream)
        except CaptureError as error:
            if error.step != "check":
                raise
        for _ in range(WARM_UP):
            self.run()
        self.stream.synchronize()

    def run(self) -> tuple[Any, ...]:
        if self.graph is None:
            return self.method(*self.inputs, stream=self.stream)
        return self.graph.replay(*self.inputs, stream=self.stream, borrow=True)

    def time(self, calls: int) -> Latency:
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            results = self.run()
            self.stream.synchronize()
            seconds.append(time.perf_counter() - began)
            del results
        return Latency.of(seconds)

    def keep_busy(self, stop: threading.Event, started: threading.Event) -> None:
        """Keeps ``DEPTH`` calls in flight until told to stop."""
        flying: deque[Event] = deque()
        while not stop.is_set():
            self.run()
            flying.append(self.stream.record())
            if len(flying) >= DEPTH:
                flying.popleft().synchronize()
                started.set()
        self.stream.synchronize()

    def close(self) -> None:
        self.stream.synchronize()
        if self.graph is not None:
            self.graph.close()
        self.program.close()
        self.stream.close()


def beside_others(one: Running, others: Sequence[Running], calls: int) -> Latency:
    """The latency of ``one`` while the others keep the GPU busy, each from a thread of its own."""
    stop = threading.Event()
    failed: list[BaseException] = []
    started = [threading.Event() for _ in others]

    def work(other: Running, flag: threading.Event) -> None:
        try:
            other.keep_busy(stop, flag)
        except BaseException as error:
            failed.append(error)
        finally:
            flag.set()

    threads = [
        threading.Thread(target=work, args=pair, daemon=True) for pair in zip(others, started, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        for flag in started:
            flag.wait()
        latency = one.time(calls)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return latency


def measure(
    tenants: Sequence[Tenant],
    sms: Sequence[int],
    *,
    device: Device | str = "cuda:0",
    calls: int = 1000,
    only: int | None = None,
) -> list[Measured]:
    """The latency of each tenant while all others are busy, each where ``sms`` puts it.

    Args:
        tenants: the programs; with one there is nobody beside it.
        sms: for each the least size of its lane, which is rounded up to what the device grants; 0: no lane.
        device: a `Device` or its name.
        calls: how many are timed for each tenant.
        only: the tenant that is measured; None: each in turn.

    Returns:
        One `Measured` for each that was measured. Waits for the device.

    Raises:
        OptionError: there is not one size for each tenant, or too few calls.
        DeviceError: the device has no partitions, or too few SMs.
        InputError, ProgramError, DelegateError: a program could not be loaded or called.
    """
    if len(sms) != len(tenants) or not tenants:
        raise OptionError(
            f"sms: expected one size for each of {len(tenants)} tenants, got {len(sms)}; pass a list as long as tenants"
        )
    if calls < 1:
        raise OptionError(f"calls: expected 1 or more, got {calls}; pass one")
    where = open_device(device) if isinstance(device, str) else device
    wanted = [count for count in sms if count]
    parts = iter(where.split(wanted) if wanted else ())
    lanes = [next(parts) if count else None for count in sms]
    bound = sum(lane is not None for lane in lanes)
    with ExitStack() as stack, catch_warnings():
        simplefilter("ignore", LaneWarning)  # what is measured is just that
        running = []
        for tenant, lane in zip(tenants, lanes, strict=True):
            one = Running(tenant, where, lane)
            stack.callback(one.close)
            running.append(one)
        found = []
        for i, one in enumerate(running):
            if only not in (None, i):
                continue
            others = running[:i] + running[i + 1 :]
            if not others:
                beside = "alone"
            elif bound == len(lanes):
                beside = "in lanes"
            else:
                beside = "on the whole GPU" if bound == 0 else "outside every lane"
            lane = lanes[i]
            found.append(
                Measured(
                    tenants[i].label,
                    0 if lane is None else lane.sm_count,
                    beside,
                    beside_others(one, others, calls),
                )
            )
        return found


def side_by_side(
    tenants: Sequence[Tenant], sms: Sequence[int], *, device: Device | str = "cuda:0", calls: int = 1000
) -> list[Measured]:
    """Everything that says what lanes are worth: each tenant alone on the whole GPU, alone in its lane, beside the others
    in lanes, beside the others with nobody in a lane, and in its lane with the others in none. Arguments, waiting and
    errors as `measure`."""
    if len(sms) != len(tenants) or not tenants:
        raise OptionError(
            f"sms: expected one size for each of {len(tenants)} tenants, got {len(sms)}; pass a list as long as tenants"
        )
    if any(count < 1 for count in sms):
        raise OptionError(
            f"sms: expected sizes of at least 1, got {list(sms)}; pass a number of multiprocessors for each"
        )
    found = []
    for i, (tenant, count) in enumerate(zip(tenants, sms, strict=True)):
        for size in (0, count):
            found += measure([tenant], [size], device=device, calls=calls)
        if len(tenants) > 1:
            alone = [count if k == i else 0 for k in range(len(tenants))]
            found += measure(tenants, alone, device=device, calls=calls, only=i)
    if len(tenants) > 1:
        found += measure(tenants, sms, device=device, calls=calls)
        found += measure(tenants, [0] * len(tenants), device=device, calls=calls)
    return found
