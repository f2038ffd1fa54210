"""A small vision model and a small transformer, split over several delegates and run on a simulated device.

::

    python -m examples.split_models [FOLDER]        # needs torch, executorch==1.5.1 and headrace

In the vision model a delegate in Python standardizes the images and XNNPACK takes the convolutions. In the transformer
XNNPACK takes the linear layers of the first block, the delegate of ``split_delegates.py`` the softmax of every
attention, and CPU kernels the rest. Each is compared with eager PyTorch before it is written; its split is printed, and drawn to an
SVG beside it.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import headrace
from headrace.export import Exported, Python, Verify, Xnnpack

__all__ = ["Transformer", "Vision", "main", "transformer", "vision"]

DELEGATES = "examples.split_delegates"


class Standard(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.48, 0.46, 0.41]).reshape(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.23, 0.22, 0.23]).reshape(1, 3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self.mean) / self.deviation


class Vision(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.standard = Standard()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.second = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(self.standard(images)))
        x = F.relu(self.second(F.max_pool2d(x, 2)))
        return F.log_softmax(self.head(x.mean(dim=(2, 3))), dim=-1)


class Block(torch.nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(64, 32)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(32, 64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_and_deviation(island: Any) -> bytes:
    """The payload of Standardize: the two constants of its subtraction and division, in this order."""
    return json.dumps(
        [island.constants[step.args[1].name].ravel().tolist() for step in island.steps]
    ).encode()


def dimension(island: Any) -> bytes:
    (step,) = island.steps
    return json.dumps(step.args[1]).encode()


def vision(path: Path, verify: bool | Verify = True) -> tuple[Exported, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    inputs = (torch.rand(2, 3, 16, 16),)
    standardize = Python(
        "ExampleStandardize", modules=["standard"], lower=mean_and_deviation, module=DELEGATES
    )
    model = Vision().eval()
    return headrace.export(
        model, inputs, path=path, delegates=[standardize, Xnnpack()], verify=verify
    ), inputs


def transformer(path: Path, verify: bool | Verify = True) -> tuple[Exported, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    inputs = (torch.randint(0, 64, (1, 12)),)
    softmax = Python(
        "ExampleSoftmax", operators=["aten._softmax"], merge=False, lower=dimension, module=DELEGATES
    )
    first = Xnnpack(operators=["aten.linear"], modules=["blocks.0", "head"])
    model = Transformer().eval()
    return headrace.export(model, inputs, path=path, delegates=[softmax, first], verify=verify), inputs


def main(folder: Path, verify: bool | Verify = True) -> None:
    importlib.import_module(DELEGATES)
    for make in (vision, transformer):
        exported, inputs = make(folder / f"{make.__name__}.pte", verify)
        exported.plot(folder / f"{make.__name__}.svg")
        print(exported.split, exported.verification, sep="\n")
        answers = []
        for schedule in ("eager", "late", 3):
            sim = headrace.device("sim", schedule=schedule)
            with headrace.load(exported.path, device=sim) as program, headrace.caller_stream(sim.stream()):
                (answer,) = program["forward"](*(x.numpy() for x in inputs))
                answers.append(answer)
        same = all(np.array_equal(answer, answers[0]) for answer in answers)
        delegates = ", ".join(dict.fromkeys(island.delegate for island in exported.split.islands))
        print(
            f"{make.__name__}: {delegates}; under three schedules {'the same answer' if same else 'OTHER ANSWERS'}\n"
        )
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as there:
            main(Path(there))
