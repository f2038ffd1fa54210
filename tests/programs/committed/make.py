"""Make ``two_islands.pte`` and ``two_islands.npz``. Needs torch and executorch; see ``PINS``.

::

    python -m tests.programs.committed.make

Two copies to the device, the delegate TestA (a product), the delegate TestB (``relu(3 * (x + 0.5))``), one
copy back; everything planned for ``cuda:0``. Each delegate's part changes the other's result, so that an
exchange, an omission or a start before the input is there shows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from executorch.exir import to_edge_transform_and_lower
from torch.export import export

from tests.programs.delegates import GraphPartitioner, aten
from tests.programs.export import DELEGATES, check_versions, record
from tests.programs.models import several

__all__ = ["TwoIslands", "main"]

HERE = Path(__file__).resolve().parent


class TwoIslands(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu((torch.mm(x, y) + 0.5) * 3.0)


def main() -> None:
    check_versions()
    assert {"TestA", "TestB"} <= {delegate.__name__ for delegate in DELEGATES}
    calls = several((4, 8), (8, 4), seeds=5)
    lowered = to_edge_transform_and_lower(
        export(TwoIslands(), calls[0], strict=True),
        partitioner=[
            GraphPartitioner("TestA", [aten.mm.default], "cuda:0"),
            GraphPartitioner("TestB", [aten.add.Tensor, aten.mul.Tensor, aten.relu.default], "cuda:0"),
        ],
    )
    (HERE / "two_islands.pte").write_bytes(lowered.to_executorch().buffer)
    record([("forward", TwoIslands(), calls)], HERE / "two_islands.npz")


if __name__ == "__main__":
    main()
