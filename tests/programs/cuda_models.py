"""Models that are exported for a GPU beside those of ``aoti.py``. Needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.export import Aoti

from .aoti import MLP, Claims, Export, forward, randn, several
from .delegates import aten

__all__ = ["MODELS"]

MODELS: dict[str, Callable[[], Export]] = {}


def model(make: Callable[[], Export]) -> Callable[[], Export]:
    MODELS[make.__name__] = make
    return make


class Chain25(torch.nn.Module):
    """25 islands that take turns, each with a constant of its own: a step left out, done twice or done too early
    changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = torch.nn.ParameterList(randn(16, seed=20 + i) for i in range(13))
        self.scales = torch.nn.ParameterList(randn(16, seed=40 + i) + 2.0 for i in range(12))

    def forward(self, x):
        for shift, scale in zip(self.shifts, self.scales):  # noqa: B905
            x = torch.cos(x + shift) * scale
        return torch.cos(x + self.shifts[12])


@model
def chain25() -> Export:
    return Export(
        forward(Chain25(), several((8, 16))),
        {"delegates": (Claims("TestA", (aten.mul.Tensor,)), Aoti()), "resident": True, "weights": "beside"},
        delegates=("TestA", "CudaBackend"),
        note="25 islands of two delegates; inputs and outputs are the caller's device memory",
    )


@model
def mlp_several() -> Export:
    return Export(
        forward(MLP(), several((4, 16))),
        {"target": "cuda:sm_80+sm_90+ptx"},
        note="code for two architectures, and PTX",
    )


class Sorted(torch.nn.Module):
    """What Inductor has kernels of its own for on a GPU."""

    def forward(self, x):
        values, indices = x.sort(dim=-1, descending=True)
        best, where = x.topk(3, dim=0)
        return values, indices, best, where, x.cumsum(dim=1)


@model
def sorting() -> Export:
    return Export(forward(Sorted(), several((6, 20))), note="sort, topk and cumsum, without libtorch")
