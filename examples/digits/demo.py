"""Classify handwritten digits with an exported network: headrace and NumPy, no torch.

::

    python -m examples.digits.demo
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any


def since_process_start() -> tuple[float, float]:
    """Seconds since the kernel started this process, and the resolution of that in seconds.

    The start is the 22nd field of /proc/self/stat, in clock ticks since boot (usually 10 ms each).
    """
    tick = 1 / os.sysconf("SC_CLK_TCK")
    # The second field, the program's name, is in parentheses and may hold anything.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) * tick, tick


HERE = Path(__file__).resolve().parent
SHADES, PLAIN = " ░▒▓█", " .:*#"


def drawn(images: list, captions: list[str]) -> str:
    """Images of 8 x 8 values from 0 to 16, side by side, each above its caption."""
    shades = SHADES
    try:
        SHADES.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        shades = PLAIN
    rows = []
    for y in range(8):
        # Two characters a pixel: a terminal's cell is twice as high as wide.
        line = [
            "".join(shades[min(int(v) * len(shades) // 17, len(shades) - 1)] * 2 for v in im[y])
            for im in images
        ]
        rows.append("  ".join(line))
    rows.append("  ".join(f"{caption:^16}" for caption in captions))
    return "\n".join(line.rstrip() for line in rows)


def on_simulated_device(x: Any, wanted: Any) -> bool:
    """The same network split over two delegates, one of them in Python on a simulated GPU, under every schedule."""
    import headrace

    importlib.import_module("examples.digits.normalize")  # makes its delegate known
    program, schedules = HERE / "digits_split.pte", ("eager", "late", 20)
    print("split over two delegates, DigitsNormalize (Python) on a simulated device and XnnpackBackend:")
    equal = True
    for schedule in schedules:
        sim = headrace.device("sim", schedule=schedule)
        with headrace.load(program, device=sim) as loaded, headrace.caller_stream(sim.stream()):
            (scores,) = loaded["forward"](x)
            delegates = {island.delegate for island in loaded["forward"].islands}
        if delegates != {"DigitsNormalize", "XnnpackBackend"}:
            raise SystemExit(f"{program}: expected two delegates, got {sorted(delegates)}")
        same = bool((scores.argmax(axis=-1) == wanted).all())
        equal &= same
        name = f"seed {schedule}" if isinstance(schedule, int) else schedule
        print(f"  schedule {name:8} {'the same predictions' if same else 'OTHER PREDICTIONS'}")
    return equal


def main() -> int:
    import numpy as np

    import headrace

    with np.load(HERE / "digits.npz") as held_out:
        images, labels = held_out["images"], held_out["labels"]
    x = images[:, None].astype(np.float32)

    program = headrace.load(HERE / "digits.pte")
    forward = program["forward"]
    (first,) = forward(x[:1])
    elapsed, resolution = since_process_start()

    began = time.perf_counter()
    (scores,) = forward(x)
    batch_ms = (time.perf_counter() - began) * 1e3
    predictions = scores.argmax(axis=-1)
    right = predictions == labels
    if not np.allclose(first, scores[:1], rtol=1e-4, atol=1e-4):
        print(f"one image alone: expected {scores[0]}, got {first[0]}", file=sys.stderr)
        return 1

    # A few, with what went wrong among them.
    shown = [*np.flatnonzero(right)[:4], *np.flatnonzero(~right)[:1]]
    print(
        drawn(
            [images[i] for i in shown],
            [f"{predictions[i]}{'' if right[i] else f' (is {labels[i]})'}" for i in shown],
        )
    )
    print()
    print(f"accuracy: {right.mean():.2%} of {len(labels)} held-out images ({(~right).sum()} wrong)")
    print("what ran, in order:")

    from headrace import pte

    islands = iter(forward.islands)
    for step in pte.read(HERE / "digits.pte")["forward"].instructions:
        if step.kind == "delegate":
            island = next(islands)
            print(f"  island {island.delegate}, {island.payload_nbytes} bytes of payload")
        else:
            print(f"  {step.kind} {step.target or ''}")
    if not on_simulated_device(x, predictions):
        return 1
    print(f"process start to first answer: {elapsed:.2f} s, to within {resolution:.2f} s")
    print(f"all {len(labels)} images in one call: {batch_ms:.1f} ms")
    print(f"torch in this process: {'yes' if 'torch' in sys.modules else 'no'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
