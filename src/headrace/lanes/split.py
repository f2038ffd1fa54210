"""A split into lanes that meets targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
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


def _sizes(device: Device, sizes: Sequence[int] | None) -> list[int]:
    limits = device.sm_limits
    least, total = limits["least"], limits["total"]
    if least == 0:
        device.split([1])  # says why there are no partitions
    if sizes is not None:
        if not sizes:
            raise OptionError("sizes: expected at least one, got none; leave sizes out for a choice")
        if bad := [size for size in sizes if not 1 <= size <= total]:
            raise OptionError(
                f"sizes: expected 1 to {total} multiprocessors, got {bad[0]}; keep within the device"
            )
        return sorted(set(sizes))
    found, size = [], least
    while size <= total:
        found.append(size)
        size *= 2
    return found


def propose(
    tenants: Sequence[Tenant],
    *,
    device: Device | str = "cuda:0",
    sizes: Sequence[int] | None = None,
    calls: int = 1000,
    margin: float = MARGIN,
) -> Proposal:
    """A split into lanes that meets the tenants' targets, measured, or why there is none.

    Each tenant is measured alone at several sizes, and gets the smallest lane in which its p99 leaves ``margin`` to its
    target; tenants without one share what is left equally. Then all of them are run together in these lanes, since lanes
    do not divide memory bandwidth, and no measurement alone says what others will leave of it. A tenant that misses its
    target there gets the next larger lane. Where that is not to be had or does not help, those without a target get
    smaller lanes, from which they draw less bandwidth, half the size each time, and everything is tried again. What is
    proposed met every target when it was run.

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
        raise OptionError("tenants: expected one with target_us at least, got none; give one a target")
    if not 1 <= margin < math.inf:
        raise OptionError(f"margin: expected 1 or more, got {margin!r}; pass 1.0 for none")
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
    first, most = tuple(chosen), total
    while True:
        split = _share(chosen, where, most)
        if split is None:
            asked = " + ".join(str(size) for size in chosen if size)
            return Proposal(
                None,
                f"expected {total} SMs to be enough, got targets that ask for {asked} and {chosen.count(0)} tenants "
                "for the rest",
                tuple(curves),
            )
        measured = tuple(measure(tenants, split, device=where, calls=calls))
        missed = [
            i
            for i, (tenant, one) in enumerate(zip(tenants, measured, strict=True))
            if tenant.target_us is not None and one.latency.p99_us > tenant.target_us
        ]
        if not missed:
            return Proposal(
                tuple(one.sms for one in measured), _held(measured, curves), tuple(curves), measured
            )
        grown = list(chosen)
        for i in missed:
            larger = [one.sms for one in curves[i] if one.sms > grown[i]]
            wider = [*grown[:i], larger[0], *grown[i + 1 :]] if larger else grown
            if _share(wider, where, most) is not None:
                grown = wider
        if grown != chosen:
            chosen = grown
            continue
        # What they draw of the bandwidth is all that is left to change.
        rest = [size for size, asked in zip(split, chosen, strict=True) if not asked]
        smaller = _down(rest[0] // 2, where) if rest else 0
        if smaller == 0:
            return Proposal(None, _missing(tenants, measured, curves, missed[-1]), tuple(curves), measured)
        chosen, most = list(first), smaller


def _alone(one: Measured, curve: Sequence[Measured]) -> Measured:
    return next((other for other in curve if other.sms >= one.sms), curve[-1])


def _held(measured: Sequence[Measured], curves: Sequence[Sequence[Measured]]) -> str:
    """What the others cost whom, beyond what a compute-bound neighbour costs."""
    text = "every target was met, all busy"
    for one, curve in zip(measured, curves, strict=True):
        alone = _alone(one, curve)
        ratio = one.latency.p99_us / alone.latency.p99_us
        if len(measured) > 1 and alone.sms == one.sms and ratio > MARGIN:
            text += (
                f"; {one.tenant} takes {ratio:.1f} times as long as alone in {one.sms} SMs: memory bandwidth is shared, and "
                "a program that draws more of it than these will change that"
            )
    return text


def _missing(
    tenants: Sequence[Tenant], measured: Sequence[Measured], curves: Sequence[Sequence[Measured]], i: int
) -> str:
    one, alone = measured[i], _alone(measured[i], curves[i])
    return (
        f"{tenants[i].label}: expected a p99 of {tenants[i].target_us:g} µs beside the others, got "
        f"{one.latency.p99_us:.0f} µs in {one.sms} SMs ({alone.latency.p99_us:.0f} µs alone in {alone.sms}), and neither a "
        "larger lane for it nor smaller ones for tenants without a target are left to try; what they share, memory "
        "bandwidth above all, lanes do not divide"
    )


def _down(size: int, device: Device) -> int:
    """A size that is granted as it is; 0: less than the smallest."""
    limits = device.sm_limits
    step = max(limits["alignment"], limits["least"])
    return int(size // step * step)


def _share(chosen: Sequence[int], device: Device, most: int) -> list[int] | None:
    """Sizes for all: those that were chosen, and equal parts of the rest, ``most`` at most, for 0. None: too little is left."""
    limits = device.sm_limits
    step = max(limits["alignment"], limits["least"])
    left = limits["total"] - sum(min(-(-size // step) * step, limits["total"]) for size in chosen)
    rest = chosen.count(0)
    each = _down(min(left // rest, most), device) if rest else 0
    if left < 0 or (rest and each == 0):
        return None
    return [size or each for size in chosen]
