"""A split into lanes that meets targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..device import device as open_device
from ..errors import OptionError
from .latency import Measured, Tenant, measure

__all__ = ["Proposal", "propose"]

# A lane must leave this much between a program's latency alone and its target; a compute-bound neighbour in another lane may
# take it (GC6).
MARGIN = 1.2


@dataclass(frozen=True)
class Proposal:
    """``sms``: the size of each tenant's lane, as granted; None: no split meets the targets, and ``reason`` says why.
    ``curves``: for each tenant its latency alone by size. ``measured``: the proposed lanes, or the last ones tried, all
    of them busy."""

    sms: tuple[int, ...] | None
    reason: str
    curves: tuple[tuple[Measured, ...], ...] = ()
    measured: tuple[Measured, ...] = ()


def _sizes(device: Any, sizes: Sequence[int] | None) -> list[int]:
    limits = device.sm_limits
    least, total = limits["least"], limits["total"]
    if least == 0:
        device.split([1])  # says why there are no partitions
    if sizes is not None:
        if not sizes:
            raise OptionError("sizes: expected at least one, got none")
        if bad := [size for size in sizes if not 1 <= size <= total]:
            raise OptionError(f"sizes: expected 1 to {total} multiprocessors, got {bad[0]}")
        return sorted(set(sizes))
    found, size = [], least
    while size <= total:
        found.append(size)
        size *= 2
    return found


def propose(
    tenants: Sequence[Tenant],
    *,
    device: Any = "cuda:0",
    sizes: Sequence[int] | None = None,
    calls: int = 1000,
    margin: float = MARGIN,
) -> Proposal:
    """A split into lanes that meets the tenants' targets, measured, or why there is none.

    Each tenant is measured alone at several sizes, and gets the smallest lane in which its p99 leaves ``margin`` to its
    target; tenants without one share what is left equally. Then all of them are run together in these lanes, since memory
    bandwidth is shared whatever the lanes are: a tenant that misses its target there gets the next larger lane, as long as
    there is one. What is proposed met every target when it was run.

    Args:
        tenants: at least one with a target.
        device: a `Device` or its name.
        sizes: to try; default: the least size of the device, doubled until it is too large.
        calls: how many are timed for each measurement.
        margin: of at least 1.

    Raises:
        OptionError: no tenant has a target, or a size or the margin is out of range.
        DeviceError and others: as `measure`.
    """
    if not any(tenant.target_us is not None for tenant in tenants):
        raise OptionError("tenants: expected one with target_us at least, got none")
    if not 1 <= margin < math.inf:
        raise OptionError(f"margin: expected 1 or more, got {margin!r}")
    where = open_device(device) if isinstance(device, str) else device
    tried = _sizes(where, sizes)
    total = where.sm_limits["total"]
    curves: list[tuple[Measured, ...]] = []
    chosen: list[int] = []
    for tenant in tenants:
        curve = tuple(one for size in tried for one in measure([tenant], [size], device=where, calls=calls))
        curves.append(curve)
        if tenant.target_us is None:
            chosen.append(0)
            continue
        fits = [one.sms for one in curve if one.latency.p99_us * margin <= tenant.target_us]
        if not fits:
            best = min(curve, key=lambda one: one.latency.p99_us)
            return Proposal(
                None,
                f"{tenant.label}: expected a p99 of {tenant.target_us:g} µs with a margin of {margin:g}, got "
                f"{best.latency.p99_us:.0f} µs at best, alone in {best.sms} SMs",
                tuple(curves),
            )
        chosen.append(fits[0])
    measured: tuple[Measured, ...] = ()
    missing = ""
    while True:
        split = _share(chosen, where)
        if split is None:
            asked = " + ".join(str(size) for size in chosen if size)
            reason = missing or (
                f"expected {total} SMs to be enough, got targets that ask for {asked} and {chosen.count(0)} tenants "
                "for the rest"
            )
            return Proposal(None, reason, tuple(curves), measured)
        measured = tuple(measure(tenants, split, device=where, calls=calls))
        missed = [
            i
            for i, (tenant, one) in enumerate(zip(tenants, measured, strict=True))
            if tenant.target_us is not None and one.latency.p99_us > tenant.target_us
        ]
        if not missed:
            return Proposal(
                tuple(one.sms for one in measured), "every target was met, all busy", tuple(curves), measured
            )
        for i in missed:
            one, target = measured[i], tenants[i].target_us
            alone = next((other for other in curves[i] if other.sms >= one.sms), curves[i][-1])
            missing = (
                f"{tenants[i].label}: expected a p99 of {target:g} µs beside the others, got "
                f"{one.latency.p99_us:.0f} µs in {one.sms} SMs ({alone.latency.p99_us:.0f} µs alone), and there is no "
                "larger lane for it; what they share, memory bandwidth above all, lanes do not divide"
            )
            larger = [other.sms for other in curves[i] if other.sms > chosen[i]]
            if not larger:
                return Proposal(None, missing, tuple(curves), measured)
            chosen[i] = larger[0]


def _share(chosen: Sequence[int], device: Any) -> list[int] | None:
    """Sizes for all: those that were chosen, and equal parts of the rest for 0. None: there is too little."""
    limits = device.sm_limits
    step = max(limits["alignment"], limits["least"])
    left = limits["total"] - sum(-(-size // step) * step for size in chosen)
    rest = chosen.count(0)
    if left < rest * limits["least"]:
        return None
    each = left // rest // step * step if rest else 0
    if rest and each < limits["least"]:
        return None
    return [size or each for size in chosen]
