"""``headrace bench --lanes``: programs side by side, as a table and a picture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import lanes
from .device import Device
from .device import device as open_device
from .errors import OptionError
from .program import Method, load

# The greatest target in microseconds, and the most calls that are timed.
MOST, MOST_CALLS = 1e12, 10_000_000

__all__ = ["add_arguments", "measure", "table", "tenants"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE.pte[+FILE.ptd…]",
        help="the programs, each with its data files",
    )
    parser.add_argument(
        "--lanes", metavar="N,N…", help="the least size of each program's lane, in multiprocessors"
    )
    parser.add_argument(
        "--targets",
        metavar="US,US…",
        help="the greatest p99 of each program in microseconds, '-' for none: look for lanes that meet them",
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default cuda:0), or sim to see it work")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="timed calls of each (1000)")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a picture")


def _numbers(option: str, text: str, count: int, none: str = "") -> list[float | None]:
    parts = text.split(",")
    if len(parts) != count:
        raise OptionError(
            f"{option}: expected {count} numbers, one for each program, got {text!r}; separate them by commas"
        )
    out: list[float | None] = []
    for part in parts:
        if none and part == none:
            out.append(None)
            continue
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not 0 < number < MOST:
            raise OptionError(
                f"{option}: expected numbers above 0 and below {MOST:g}, got {part!r}; correct it"
            )
        out.append(number)
    return out


def tenants(
    files: Sequence[str],
    targets: Sequence[float | None],
    made_up: Callable[[Method], Sequence[Any]],
    device: Device,
) -> list[lanes.Tenant]:
    """One for each file, called with what ``made_up`` gives for its first method."""
    found = []
    for file, target in zip(files, targets, strict=True):
        source, *data = file.split("+")
        with load(source, data=data, device=device) as program:
            inputs = list(made_up(program[program.methods[0]]))
        found.append(lanes.Tenant(source, inputs, data=data, target_us=target))
    labels = [one.label for one in found]
    return [
        one if labels.count(one.label) == 1 else replace(one, name=f"{one.label} #{i}")
        for i, one in enumerate(found)
    ]


def measure(args: argparse.Namespace, made_up: Callable[[Method], Sequence[Any]]) -> dict[str, Any]:
    """What the command found: ``measured``, and a ``proposal`` where targets were given."""
    if (args.lanes is None) == (args.targets is None):
        raise OptionError(
            f"bench: expected --lanes or --targets, got {'neither' if args.lanes is None else 'both'}; give one of them"
        )
    if not 1 <= args.calls <= MOST_CALLS:
        raise OptionError(f"--calls: expected 1 to {MOST_CALLS}, got {args.calls}; choose one of these")
    if args.plot and (Path(args.plot).is_dir() or not Path(args.plot).absolute().parent.is_dir()):
        raise OptionError(
            f"--plot: expected a file in a folder that is there, got {args.plot!r}; make the folder first"
        )
    count = len(args.files)
    targets = [None] * count if args.targets is None else _numbers("--targets", args.targets, count, "-")
    device = open_device(args.device)
    found = tenants(args.files, targets, made_up, device)
    if args.targets is not None:
        proposal = lanes.propose(found, device=device, calls=args.calls)
        if args.plot:
            lanes.plot_curves(proposal, found, args.plot)
        return {
            "proposal": {"lanes": proposal.sms, "reason": proposal.reason},
            "curves": [[asdict(one) for one in curve] for curve in proposal.curves],
            "measured": [asdict(one) for one in proposal.measured],
        }
    sizes = []
    for size in _numbers("--lanes", args.lanes, count):
        if size is None or size != int(size):
            raise OptionError(
                f"--lanes: expected whole numbers of multiprocessors, got {args.lanes!r}; round them"
            )
        sizes.append(int(size))
    measured = lanes.side_by_side(found, sizes, device=device, calls=args.calls)
    if args.plot:
        lanes.plot_side_by_side(measured, args.plot)
    looked = [
        lanes.confinement(tenant, lane) for tenant, lane in zip(found, device.split(sizes), strict=True)
    ]
    return {
        "measured": [asdict(one) for one in measured],
        "confinement": [one.as_dict() | {"text": str(one)} for one in looked],
    }


def table(found: dict[str, Any]) -> str:
    """Latency of each program in each setting, and its p99 beside that alone in the same place."""
    rows = [one for curve in found.get("curves", ()) for one in curve] + found["measured"]
    alone = {
        (one["tenant"], one["sms"]): one["latency"]["p99_us"] for one in rows if one["beside"] == "alone"
    }
    lines = [
        f"{'latency, µs':28}{'where':>10}  {'the others':20}{'p50':>9}{'p99':>9}{'p99.9':>9}{'p99, to alone':>15}"
    ]
    for one in sorted(rows, key=lambda one: one["tenant"]):
        latency = one["latency"]
        base = alone.get((one["tenant"], one["sms"]))
        ratio = f"{latency['p99_us'] / base:15.2f}" if base and one["beside"] != "alone" else ""
        where = f"{one['sms']} SMs" if one["sms"] else "whole GPU"
        lines.append(
            f"{one['tenant'][-27:]:28}{where:>10}  {one['beside']:20}{latency['p50_us']:9.1f}"
            f"{latency['p99_us']:9.1f}{latency['p999_us']:9.1f}{ratio}"
        )
    lines += [one["text"] for one in found.get("confinement", ())]
    if "proposal" in found:
        sizes = found["proposal"]["lanes"]
        told = "no lanes meet the targets" if sizes is None else f"lanes of {', '.join(map(str, sizes))} SMs"
        lines.append(f"{told}: {found['proposal']['reason']}")
    else:
        lines.append(
            "Lanes divide multiprocessors. Memory bandwidth and caches stay shared: beside a neighbour that is"
        )
        lines.append("bound by memory no ratio is promised.")
    return "\n".join(lines)
