"""How long an export takes beside the stock exporter's, for the same model and the same delegate, in one run.

::

    PYTHON benchmarks/export_time.py PACKAGE… [--layers N] [--rounds N] [--check]

``PYTHON`` has torch and ExecuTorch; ``PACKAGE`` are the folders of this package's Python files and of what its build
generated. The model is a stack of transformer layers; the delegate is XNNPACK. The two exporters take turns, each from the
model to the bytes of the program, verification apart, after one export of each that is not counted. Prints the median of
each and the ratio of ours to stock's as JSON; ``--check`` ends with status 1 where the ratio is above ``MOST``.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any

# What the project promises: the greatest ratio of ours to stock's.
MOST = 1.3


def stack(layers: int, width: int = 64, heads: int = 4) -> Any:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = torch.softmax(q @ k.transpose(-1, -2) * (width // heads) ** -0.5, dim=-1) @ v
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    return torch.nn.Sequential(*[Layer() for _ in range(layers)]).eval(), (torch.randn(2, 16, width),)


def measure(layers: int, rounds: int) -> dict[str, Any]:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    from headrace.export import Xnnpack, export

    model, inputs = stack(layers)

    def stock(path: Path) -> None:
        program = torch.export.export(model, inputs)
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(edge.to_executorch().buffer)

    def ours(path: Path) -> None:
        export(model, inputs, path=path, delegates=[Xnnpack()], verify=False)

    found: dict[str, list[float]] = {"stock": [], "ours": []}
    ways = [("stock", stock), ("ours", ours)]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, way in ways if number % 2 else ways[::-1]:
                began = time.perf_counter()
                way(Path(folder) / "m.pte")
                if number:
                    found[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in found.items()}
    ratios = [a / b for a, b in zip(found["ours"], found["stock"], strict=True)]
    return {
        "layers": layers,
        "rounds": rounds,
        **{f"{k}_s": v for k, v in medians.items()},
        "ratio": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    # Exporting needs no run time.
    package = types.ModuleType("headrace")
    package.__path__ = args.packages
    sys.modules["headrace"] = package
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    result = measure(args.layers, args.rounds)
    print(json.dumps(result))
    return 1 if args.check and result["ratio"] > MOST else 0


if __name__ == "__main__":
    raise SystemExit(main())
