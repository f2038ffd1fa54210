"""The models that ``aoti.py`` measures, and their export for a GPU, with or without one.

::

    PYTHON benchmarks/aoti_models.py FOLDER PACKAGE…

``PYTHON`` has torch, ExecuTorch and Triton; ``PACKAGE`` are the folders of this package's Python files and of what its
build generated. Writes ``NAME.pte``, planned for device memory of the caller's, and ``NAME.npz`` with the inputs, what
eager PyTorch answers on the CPU, and of the chains the constants.
"""

from __future__ import annotations

import logging
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["CHAINS", "MODELS", "make"]

ARCHITECTURE = "cuda:sm_90"
# Islands of one kernel each.
CHAINS = {"chain2": 2, "chain26": 26, "chain50": 50}


class Chain(torch.nn.Module):
    """Islands of one kernel each, that take turns: a cosine, and a product and a sum. Every second island has the same
    code, so that all chains together compile two."""

    def __init__(self, islands: int) -> None:
        super().__init__()
        self.turns = islands // 2
        self.scale = torch.nn.Parameter(torch.rand(256) + 0.5)

    def forward(self, x: Any) -> Any:
        for _ in range(self.turns):
            x = torch.cos(x) * self.scale + 0.25
        return x


class Perceptron(torch.nn.Module):
    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Residual(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_a = torch.nn.BatchNorm2d(channels)
        self.b = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_b = torch.nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        return torch.relu(x + self.norm_b(self.b(torch.relu(self.norm_a(self.a(x))))))


class Vision(torch.nn.Module):
    """A small residual network on an image of 64 by 64."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.first = torch.nn.Sequential(Residual(32), Residual(32))
        self.down = torch.nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.second = torch.nn.Sequential(Residual(64), Residual(64))
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = self.second(self.down(self.first(torch.relu(self.stem(x)))))
        return self.head(x.mean(dim=(2, 3)))


class Layer(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer() -> Any:
    return torch.nn.Sequential(*(Layer(256, 4) for _ in range(4)))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "perceptron": (Perceptron, (16, 512)),
    "vision": (Vision, (1, 3, 64, 64)),
    "transformer": (transformer, (1, 64, 256)),
}


def make(name: str) -> tuple[Any, Any]:
    """A model with its weights, the same in every process, and an input."""
    torch.manual_seed(0)
    if islands := CHAINS.get(name):
        model, shape = Chain(islands), (8, 256)
    else:
        maker, shape = MODELS[name]
        model = maker()
    return model.eval(), torch.randn(shape)


def export(name: str, folder: Path) -> None:
    from headrace.export import Aoti, export

    model, x = make(name)
    delegates = [Aoti(operators=["aten.cos"]), Aoti()] if name in CHAINS else [Aoti()]
    export(
        model,
        (x,),
        path=folder / f"{name}.pte",
        delegates=delegates,
        target=ARCHITECTURE,
        resident=True,
        verify=False,
    )
    with torch.no_grad():
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=model(x).numpy())
    print(name, flush=True)


def main() -> int:
    folder, *packages = sys.argv[1:]
    # Exporting needs no run time.
    package = types.ModuleType("headrace")
    package.__path__ = packages
    sys.modules["headrace"] = package
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in (*MODELS, *CHAINS):
        if (Path(folder) / f"{name}.npz").exists():
            continue
        export(name, Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
