"""Whether the split that the planner proposes holds when it is run: programs side by side in lanes, beside their targets.

::

    python -m benchmarks.planner A.pte B.pte[+B.ptd] [--neighbour C.pte] [--device cuda:0] [--seconds 5] [--slack 1.5]
        [--outside] [--import MODULE] [--check]

1. Each program is measured alone on the whole GPU, and alone in an equal share of its multiprocessors: of two programs,
   half of them.
2. Its target is ``--slack`` times its own p99 in that share. A ``--neighbour`` has no target and takes what is left; one that
   is bound by memory bandwidth shows what lanes do not divide.
3. `headrace.lanes.propose` looks for lanes that meet the targets.
4. These lanes are run anew: each program is called for ``--seconds``, one call at a time, while all the others keep calls in
   flight in their lanes. With ``--outside`` once more while the others are in no lane, which is shown and no target is for.

A proposal *held* if p99 of every program with a target stayed within it. Inputs are random numbers of the greatest shape.
Writes ``build/bench/planner.json``. ``--check`` ends with status 1 where there is no proposal or it did not hold. On ``sim``
all of it works but the numbers, which are the host's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace import bench, lanes
from headrace.cli.run import import_modules, made_up

from . import __main__ as benchmarks

__all__ = ["SLACK", "held", "main", "measure", "table"]

SLACK = 1.5
# For p99.9 there are a few beyond it; and an end where calls are very short.
LEAST_CALLS, MOST_CALLS = 100, 1_000_000


def _share(device: Any, programs: int) -> int:
    """An equal share of the multiprocessors, as it is granted."""
    limits = device.sm_limits
    step = max(limits["least"], limits["alignment"], 1)
    share: int = limits["total"] // programs // step * step
    if not limits["least"] or share == 0:
        device.split([limits["least"] or 1] * programs)  # raises: there are no partitions, or not so many
    return share


def _calls(seconds: float, latency: lanes.Latency) -> int:
    return max(LEAST_CALLS, min(MOST_CALLS, math.ceil(seconds * 1e6 / latency.p50_us)))


def measure(
    tenants: Sequence[lanes.Tenant],
    *,
    device: Any,
    seconds: float = 5.0,
    calls: int = 1000,
    slack: float = SLACK,
    outside: bool = False,
) -> dict[str, Any]:
    """What was found, as plain values: for each program its latencies alone, its target and those in the proposed lanes.

    ``tenants``: those whose ``target_us`` is None are neighbours; of the others the number that is there is replaced.
    ``calls``: how many are timed for each measurement but the last, which takes ``seconds`` for each program. Waits for the
    device; raises what `lanes.propose` raises.
    """
    share = _share(device, len(tenants))

    def alone(one: lanes.Tenant, size: int) -> lanes.Measured:
        (found,) = lanes.measure([one], [size], device=device, calls=calls)
        return found

    whole, shares = ([alone(one, size) for one in tenants] for size in (0, share))
    aimed = [
        one if one.target_us is None else replace(one, target_us=slack * at.latency.p99_us)
        for one, at in zip(tenants, shares, strict=True)
    ]
    proposal = lanes.propose(aimed, device=device, calls=calls)
    run: list[lanes.Measured] = []
    beside: list[lanes.Measured] = []
    for i, sms in enumerate(proposal.sms or ()):
        planned = proposal.measured[i].latency
        settings = [(run, proposal.sms)]
        if outside and len(tenants) > 1:
            settings.append((beside, [sms if k == i else 0 for k in range(len(tenants))]))
        for rows, sizes in settings:
            rows += lanes.measure(aimed, sizes, device=device, calls=_calls(seconds, planned), only=i)
    rows = []
    for i, one in enumerate(aimed):
        ran = run[i] if run else None
        rows.append(
            {
                "program": one.label,
                "target_us": one.target_us,
                "whole": asdict(whole[i]),
                "share": asdict(shares[i]),
                "run": asdict(ran) if ran else None,
                "outside": asdict(beside[i]) if beside else None,
                "met": None if one.target_us is None or ran is None else ran.latency.p99_us <= one.target_us,
            }
        )
    return {
        "device": device.name,
        "slack": slack,
        "seconds": seconds,
        "share_sms": share,
        "proposal": {"lanes": proposal.sms, "reason": proposal.reason},
        "measured": [asdict(one) for one in proposal.measured],
        "programs": rows,
        "held": bool(run) and all(row["met"] is not False for row in rows),
    }


def held(results: dict[str, Any]) -> bool:
    """Whether there was a proposal, and every target was met when it was run."""
    return bool(results["held"])


def table(results: dict[str, Any]) -> str:
    """One line for each program and setting, and the verdict."""
    share = f"alone in {results['share_sms']} SMs"
    settings = {
        "whole": "alone on the whole GPU",
        "share": share,
        "run": "",
        "outside": "the others in no lane",
    }
    lines = [f"{'planner, µs':28}{'':30}{'p50':>10}{'p99':>10}{'p99.9':>10}{'target':>10}"]
    for row in results["programs"]:
        for setting, told in settings.items():
            if (one := row[setting]) is None:
                continue
            latency = one["latency"]
            where = told or f"in its lane of {one['sms']} SMs, all busy"
            note = ""
            if setting == "run" and row["target_us"] is not None:
                note = f"{row['target_us']:10.1f} {'met' if row['met'] else 'MISSED'}"
            lines.append(
                f"  {row['program'][-25:]:26}{where:30}{latency['p50_us']:10.1f}{latency['p99_us']:10.1f}"
                f"{latency['p999_us']:10.1f}{note}"
            )
    sizes = results["proposal"]["lanes"]
    if sizes is None:
        lines.append(f"  no lanes were proposed: {results['proposal']['reason']}")
    else:
        verdict = "held" if results["held"] else "DID NOT HOLD"
        lines.append(
            f"  the proposal of {', '.join(map(str, sizes))} SMs {verdict}: {results['proposal']['reason']}"
        )
    return "\n".join(lines)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", metavar="FILE.pte[+FILE.ptd…]", help="programs with a target")
    parser.add_argument(
        "--neighbour", action="append", default=[], metavar="FILE.pte", help="one without; may be repeated"
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default cuda:0), or sim to see it work")
    parser.add_argument(
        "--seconds", type=_positive, default=5.0, help="of each program in the proposed lanes (5)"
    )
    parser.add_argument(
        "--calls", type=int, default=1000, help="timed calls of each measurement before (1000)"
    )
    parser.add_argument(
        "--slack", type=_positive, default=SLACK, help="of a target, to p99 in an equal share"
    )
    parser.add_argument("--outside", action="store_true", help="also with the others in no lane")
    parser.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE")
    parser.add_argument(
        "--json", type=Path, default=benchmarks.ROOT / "build/bench/planner.json", metavar="FILE"
    )
    parser.add_argument(
        "--check", action="store_true", help="end with status 1 where the proposal did not hold"
    )
    arguments = parser.parse_args(argv)
    if arguments.calls < 1:
        parser.error(f"--calls: expected 1 or more, got {arguments.calls}")
    import_modules(arguments.modules)
    device = headrace.device(arguments.device)
    rng = np.random.default_rng(0)
    # Any number stands for "a target"; measure() sets it.
    targets = [1.0] * len(arguments.files) + [None] * len(arguments.neighbour)
    tenants = bench.tenants(
        [*arguments.files, *arguments.neighbour],
        targets,
        lambda method: [made_up(info, rng) for info in method.inputs],
        device,
    )
    results = measure(
        tenants,
        device=device,
        seconds=arguments.seconds,
        calls=arguments.calls,
        slack=arguments.slack,
        outside=arguments.outside,
    )
    report = {**benchmarks.facts("planner", module="benchmarks.planner", arguments=argv), "results": results}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(results), f"  {arguments.json}", sep="\n", flush=True)
    return 1 if arguments.check and not held(results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
