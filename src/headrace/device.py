"""Devices, streams, events, partitions and buffers, and the thread's selected stream.

sim = headrace.device("sim", schedule="late")
stream = sim.stream()
with headrace.caller_stream(stream):
    outputs = method(x)              # on that stream, with every delegate
"""

from __future__ import annotations

import re
from threading import local
from types import TracebackType
from typing import Any, NamedTuple

from .engine import core
from .errors import DeviceError, InputError, OptionError

__all__ = [
    "Buffer",
    "Device",
    "Event",
    "LaneWarning",
    "Partition",
    "Stream",
    "caller_stream",
    "current_stream",
    "device",
]

Device = core.Device
Stream = core.Stream
Event = core.Event
Partition = core.Partition


class LaneWarning(UserWarning):
    """A method runs on a stream in no partition while the device has partitions. Nothing keeps its work off their SMs, and
    their latencies grow (5 to 16 times, measured on an H200). Given once for each method."""


Buffer = core.Buffer

_FIRST_SIMULATED = 1 << 16
"""Numbers of devices below it are GPUs' (caller_stream.h)."""


def device(
    name: str = "cpu",
    *,
    schedule: str | int = "eager",
    sms: int = 132,
    memory_nbytes: int = 1 << 30,
) -> Device:
    """A device by name: ``"cpu"``, ``"sim"`` or ``"sim:1"``, ``"cuda:0"``.

    ``cpu`` is plain host memory and synchronous. ``sim`` simulates a CUDA device deterministically, by CUDA's
    rules of order; each call makes a new one, with memory and streams of its own. ``cuda:N`` is a GPU, by the
    driver's count; there is one for the process, which holds the GPU's primary context (the one that CuPy and
    PyTorch use too) and a memory pool until the process ends. NVIDIA's driver is all that it needs.

    Args:
        schedule: (sim) when work runs. ``"eager"``: at once. ``"late"``: only when a wait demands it, and no more
            than it demands. A seed: a random legal interleaving, the same for one order of submission.
        sms: (sim) how many multiprocessors it pretends to have.
        memory_nbytes: (sim) how much memory it has.

    Raises:
        OptionError: an unknown name or knob.
        DeviceError: there is no such device here.
    """
    if not isinstance(name, str):
        raise OptionError(
            f"device: expected a name such as 'cpu', 'sim' or 'cuda:0', got {type(name).__name__}; pass one of these"
        )
    kind, _, number = name.partition(":")
    numbered = kind != "cpu" and re.fullmatch("[0-9]{1,4}", number)
    if kind not in ("cpu", "cuda", "sim") or (number and not numbered):
        raise OptionError(
            f"device: expected 'cpu', 'sim', 'sim:N' or 'cuda:N', got {name!r}; pass one of these"
        )
    ordinal = int(number or 0)
    if kind == "cpu":
        return core.cpu()
    if kind == "cuda":
        return core.cuda(ordinal)
    named = isinstance(schedule, str) and schedule in ("eager", "late")
    if not named and (isinstance(schedule, bool) or not isinstance(schedule, int)):
        raise OptionError(
            f"schedule: expected 'eager', 'late' or a seed, got {schedule!r}; pass an int as the seed"
        )
    sizes = (sms, memory_nbytes)
    if any(not isinstance(size, int) or not 1 <= size < 1 << 40 for size in sizes) or sms >= 1 << 20:
        raise OptionError(
            f"{name}: expected sms from 1 to 2**20 - 1 and memory_nbytes from 1 to 2**40 - 1, got {sms!r} and "
            f"{memory_nbytes!r}; leave them out, or pass ints of these"
        )
    way, seed = ("seed", schedule % (1 << 64)) if isinstance(schedule, int) else (schedule, 0)
    return core.sim(way, seed, ordinal, sms, memory_nbytes)


class caller_stream:  # reads as a verb where it is used
    """Select a stream for the calling thread, for the length of a ``with`` block.

    Every delegate of every program that the thread runs then works on it, and calls may return with their work in
    flight. Blocks nest; the former selection is back on every way out.

    Args:
        stream: a `Stream`, anything with ``__cuda_stream__`` (cuda.core, CuPy, PyTorch), or an int handle together
            with ``device``. 0 and 1 are the legacy stream, 2 the per-thread one.
        device: the device of an int handle.

    Raises:
        InputError: not a stream, an int without a device, or a stream that was closed.
        DeviceError: ``device`` is given and the stream is another's.
    """

    def __init__(self, stream: Any, device: Device | None = None) -> None:
        self._stream = stream
        self._device = device

    def __enter__(self) -> Any:
        former = core.select(self._stream, self._device)
        _open_blocks().append(_Block(self, former, core.selection()))
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # One object may be entered by several threads, and several times: the innermost of them ends.
        blocks = _open_blocks()
        for at in range(len(blocks) - 1, -1, -1):
            if blocks[at].of is self:
                break
        else:
            raise InputError(
                "caller_stream: expected the end of a block on the thread that began it, got no block; "
                "leave each `with caller_stream` where it was entered"
            )
        # What a delegate left selected was undone when its call ended.
        now = core.selection()
        while len(blocks) - 1 > at and blocks[-1].selected != now:
            blocks.pop()
        ended = blocks.pop(at)
        if at == len(blocks):
            core.restore(*ended.former)
        else:
            # It began before blocks that are still open, as generators and coroutines make them: those keep
            # their selection, and put back in the end what was there before this one.
            blocks[at] = blocks[at]._replace(former=ended.former)


class _Block(NamedTuple):
    of: caller_stream
    former: tuple[int, int, int]
    selected: tuple[int, int, int]


_local = local()


def _open_blocks() -> list[_Block]:
    """The calling thread's, the outermost first."""
    try:
        blocks: list[_Block] = _local.blocks
    except AttributeError:
        blocks = _local.blocks = []
    return blocks


def current_stream() -> Stream | None:
    """The calling thread's selected stream as a `Stream`, or None where nothing is selected.

    Raises:
        DeviceError: it was selected by C++ code that did not say the device.
    """
    handle, owner, selected = core.selection()
    if not selected:
        return None
    found = core.device_by_id(owner)
    if found is None and 0 <= owner < _FIRST_SIMULATED:
        found = core.cuda(owner)
    if found is None:
        raise DeviceError(
            f"current_stream: expected a stream whose device is known, got handle {handle:#x}; name its device where "
            "it is selected: headrace::CallerStreamGuard takes it"
        )
    return core.stream_on(found, handle)
