"""What calls, captures and replays did, counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Counts", "GraphStats", "Stats"]


@dataclass(frozen=True)
class Counts:
    """What one call, or all calls, of a method did: bytes staged each way between host and device, waits for the
    device, allocations and frees that reached the driver, and host bytes whose memory layout was not the program's
    and had to be rewritten.

    A steady-state call on device-resident buffers has 0 of each.
    """

    bytes_to_device: int
    bytes_to_host: int
    synchronizations: int
    driver_allocations: int
    driver_frees: int
    repacked_bytes: int


@dataclass(frozen=True)
class Stats:
    """How often a method was called, what the call that ended last did, and the sum over all calls."""

    calls: int
    last: Counts
    total: Counts


@dataclass(frozen=True)
class GraphStats:
    """What became of a `Graph` so far.

    ``captures`` counts the first one too, ``recaptures`` the others by what had changed: ``"shapes"``,
    ``"partition"`` (the lane of the stream), ``"delegates"`` (they were loaded anew) or ``"state"`` (it lies
    elsewhere). ``eager`` counts replays that ran as ordinary calls, since a capture had failed. ``kept`` graphs hold
    ``memory_nbytes`` of device memory for their inputs and outputs; ``evicted`` were given up. ``last`` and
    ``total`` say what replays and captures did, as `Stats` does for calls.
    """

    captures: int
    replays: int
    eager: int
    recaptures: Mapping[str, int]
    evicted: int
    kept: int
    memory_nbytes: int
    last: Counts
    total: Counts
