"""Latencies as pictures: SVG that any browser shows."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape

from ..errors import InputError
from .latency import Measured, Tenant
from .split import Proposal

__all__ = ["plot_curves", "plot_side_by_side"]

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")


def plot_curves(proposal: Proposal, tenants: Sequence[Tenant], path: str | os.PathLike[str]) -> None:
    """Write the curves of p99 over SMs as an SVG picture, with each target as a dashed line and, where there is a
    proposal, a ring around its sizes."""
    width, height, left, top = 640, 360, 70, 30
    points = [(one.sms, one.latency.p99_us) for curve in proposal.curves for one in curve]
    levels = [p for _, p in points] + [t.target_us for t in tenants if t.target_us is not None]
    if not points:
        raise InputError("proposal: expected curves, got none; let propose() measure them")
    widest, low, high = max(s for s, _ in points), min(levels) * 0.9, max(levels) * 1.1

    def x(sms: float) -> float:
        return left + (width - left - 20) * sms / widest

    def y(us: float) -> float:
        return top + (height - top - 50) * (1 - math.log(us / low) / math.log(high / low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 20 * len(tenants)}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height + 20 * len(tenants)}" fill="#fff"/>',
        f'<text x="{left}" y="18">p99 latency alone in a lane, µs (logarithmic), over its SMs</text>',
        f'<path d="M{left} {top}V{height - 50}H{width - 20}" fill="none" stroke="#888"/>',
    ]
    for sms in sorted({s for s, _ in points}):
        parts.append(f'<text x="{x(sms):.1f}" y="{height - 32}" text-anchor="middle">{sms}</text>')
    for us in sorted({low, math.sqrt(low * high), high}):
        parts.append(f'<text x="{left - 6}" y="{y(us):.1f}" text-anchor="end">{us:.0f}</text>')
    for i, (tenant, curve) in enumerate(zip(tenants, proposal.curves, strict=False)):
        colour = _COLOURS[i % len(_COLOURS)]
        line = " ".join(f"{x(one.sms):.1f},{y(one.latency.p99_us):.1f}" for one in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for one in curve:
            ring = proposal.sms is not None and one.sms == proposal.sms[i]
            at = f'cx="{x(one.sms):.1f}" cy="{y(one.latency.p99_us):.1f}"'
            parts.append(f'<circle {at} r="3" fill="{colour}"/>')
            if ring:
                parts.append(f'<circle {at} r="7" fill="none" stroke="{colour}" stroke-width="2"/>')
        if tenant.target_us is not None:
            at_us = y(tenant.target_us)
            parts.append(
                f'<path d="M{left} {at_us:.1f}H{width - 20}" stroke="{colour}" stroke-dasharray="5 4"/>'
            )
        told = "" if tenant.target_us is None else f", target {tenant.target_us:g} µs"
        parts.append(
            f'<text x="{left}" y="{height - 8 + 20 * i}" fill="{colour}">{escape(tenant.label + told)}</text>'
        )
    parts.append("</svg>")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")


def plot_side_by_side(measured: Sequence[Measured], path: str | os.PathLike[str]) -> None:
    """Write what `side_by_side` measured as an SVG picture: a bar for each setting from p50 to p99, a tick at p99.9."""
    if not measured:
        raise InputError("measured: expected at least one measurement, got none; measure something first")
    tenants = list(dict.fromkeys(one.tenant for one in measured))
    left, right, row, top = 260, 80, 22, 40
    width, height = 760, top + row * (len(measured) + len(tenants)) + 10
    low = min(one.latency.p50_us for one in measured) * 0.9
    high = max(one.latency.p999_us for one in measured) * 1.1

    def x(us: float) -> float:
        return left + (width - left - right) * math.log(us / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20">latency, µs (logarithmic): bars from p50 to p99, ticks at p99.9</text>',
    ]
    y = float(top)
    for i, tenant in enumerate(tenants):
        parts.append(f'<text x="10" y="{y + 14:.1f}" font-weight="bold">{escape(tenant)}</text>')
        y += row
        for one in (one for one in measured if one.tenant == tenant):
            place = f"{one.sms} SMs" if one.sms else "whole GPU"
            begin, end, tick = (x(us) for us in (one.latency.p50_us, one.latency.p99_us, one.latency.p999_us))
            parts += [
                f'<text x="{left - 8}" y="{y + 14:.1f}" text-anchor="end">{place}, {one.beside}</text>',
                f'<rect x="{begin:.1f}" y="{y + 4:.1f}" width="{max(end - begin, 2):.1f}" height="12" '
                f'fill="{_COLOURS[i % len(_COLOURS)]}"/>',
                f'<path d="M{tick:.1f} {y + 2:.1f}v16" stroke="#222"/>',
                f'<text x="{tick + 6:.1f}" y="{y + 14:.1f}">{one.latency.p99_us:.0f}</text>',
            ]
            y += row
    parts.append("</svg>")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")
