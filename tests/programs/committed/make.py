"""Make the ``.pte`` and ``.npz`` files here, or those named. Needs torch and executorch; see ``PINS``.

::

    python -m tests.programs.committed.make [NAME…]

``two_islands``: two copies to the device, the delegate TestA (a product), the delegate TestB
(``relu(3 * (x + 0.5))``), one copy back; everything planned for ``cuda:0``. Each delegate's part changes the
other's result, so that an exchange, an omission or a start before the input is there shows.

``chain1``, ``chain10``, ``chain100``: so many islands of TestA and TestB in turn, in memory of the caller's on
``cuda:0``, no copies.

``fork``: islands with two inputs and two results on ``cuda:0``; three outputs come back to the host.

``host_first``: a kernel on the host, a copy to the device, the delegate TestB there; the output stays there.

``to_host``: as ``two_islands``, with inputs in memory of the caller's on ``cuda:0``; the output comes to the host.

``two_on_cuda1``: as ``two_islands``, planned for ``cuda:1``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.propagate_device_config import PropagateDeviceConfig
from torch.export import export

from tests.programs.delegates import GraphPartitioner, aten
from tests.programs.export import DELEGATES, check_versions, record
from tests.programs.models import Chain, Fork, alternating, resident, several

__all__ = ["PROGRAMS", "TwoIslands", "main"]

HERE = Path(__file__).resolve().parent


class TwoIslands(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu((torch.mm(x, y) + 0.5) * 3.0)


class HostFirst(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + 0.5)


def two(device: str) -> list[GraphPartitioner]:
    return [
        GraphPartitioner("TestA", [aten.mm.default], device),
        GraphPartitioner("TestB", [aten.add.Tensor, aten.mul.Tensor, aten.relu.default], device),
    ]


def fork() -> list[GraphPartitioner]:
    return [
        GraphPartitioner("TestA", [aten.mul.Tensor, aten.add.Tensor], "cuda:0"),
        GraphPartitioner("TestB", [aten.sigmoid.default, aten.relu.default], "cuda:0"),
    ]


# Name: the module, its calls, its partitioners, the configuration of the last step.
PROGRAMS: dict[str, tuple[torch.nn.Module, list[tuple[Any, ...]], list[Any], dict[str, Any]]] = {
    "two_islands": (TwoIslands(), several((4, 8), (8, 4), seeds=5), two("cuda:0"), {}),
    "two_on_cuda1": (TwoIslands(), several((4, 8), (8, 4)), two("cuda:1"), {}),
    "host_first": (
        HostFirst(),
        several((2, 3), seeds=3),
        [GraphPartitioner("TestB", [aten.relu.default], "cuda:0")],
        resident(),
    ),
    "to_host": (
        TwoIslands(),
        several((4, 8), (8, 4), seeds=3),
        two("cuda:0"),
        {
            "propagate_device_config": PropagateDeviceConfig(skip_h2d_for_method_inputs=True),
            "memory_planning_pass": MemoryPlanningPass(alloc_graph_input=False),
        },
    ),
    "fork": (Fork(), several((2, 3), (2, 3), seeds=3), fork(), {}),
    **{
        f"chain{n}": (Chain(n, 4), several((1, 4), seeds=2), alternating("cuda:0")(), resident())
        for n in (1, 10, 100)
    },
}


def main(names: list[str]) -> None:
    check_versions()
    assert {"TestA", "TestB"} <= {delegate.__name__ for delegate in DELEGATES}
    for name in names or PROGRAMS:
        module, calls, partitioners, config = PROGRAMS[name]
        lowered = to_edge_transform_and_lower(export(module, calls[0], strict=True), partitioner=partitioners)
        program = lowered.to_executorch(ExecutorchBackendConfig(**config))
        (HERE / f"{name}.pte").write_bytes(program.buffer)
        record([("forward", module, calls)], HERE / f"{name}.npz")


if __name__ == "__main__":
    main(sys.argv[1:])
