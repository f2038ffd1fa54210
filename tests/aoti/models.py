"""What the tests compile with AOTInductor for the host. Needs torch.

Every model is small, and each stands for something that a library may do: matrix products, int64 indices with a
check, several outputs, views, strides, dynamic sizes, state of its own, other dtypes, awkward constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """``calls``: inputs of each call; on a fresh program in this order where ``stateful``.

    ``share``: how the operators are dealt out: ``all`` to one island, or ``halves``: ReLU and sigmoid to
    the delegate TestA, the rest to islands between them. ``planned``: islands' arguments in device memory;
    ``resident``: and so are the method's inputs and outputs.
    """

    module: nn.Module
    calls: tuple[tuple[Any, ...], ...]
    dynamic: Any = None
    stateful: bool = False
    share: str = "all"
    planned: bool = True
    resident: bool = False
    rtol: float = 1e-5
    atol: float = 1e-5


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Embedding(nn.Module):
    """int64 in; an index outside the table is refused by the library's own check."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index) * 2


class Outputs(nn.Module):
    """Several outputs: a view of an input, a transposed result, a scalar, the same value twice, a bool, an int64."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = (x.unsqueeze(2) * y).sum(1)
        return x.view(-1), z.t(), z.sum(), z, z > 0, z.argmax(dim=1), x[1:3, ::2]


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return F.relu(self.linear(x)), torch.cat([x, x * 2]).sum(1)


class Cache(nn.Module):
    """A key-value cache of 8 places: state is written at a position and read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.keys.index_put_((position,), self.linear(x))
        return self.keys.sum(0, keepdim=True) + x


class Kinds(nn.Module):
    def forward(self, h: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
        return h * 2 + 1, b * 3 - h.to(torch.bfloat16), torch.where(m, h.float(), b.float()), ~m


class Scalars(nn.Module):
    """Constants of every awkward kind: a scalar, two of equal value, a strided view, a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("one", torch.arange(8.0) * 0.25)
        self.register_buffer("other", torch.arange(8.0) * 0.25)
        self.register_buffer("strided", torch.randn(16, 16)[::2].t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.one - self.other * torch.tensor(3.0) + x @ self.strided


class Chain(nn.Module):
    """Scaling by constants with an activation between, so that two delegates take turns. ``first`` is in two islands."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(1)])
        self.first = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, scale in enumerate([self.first, *self.scales, self.first]):
            x = x.cos() * scale + i
            x = torch.sigmoid(x) if i % 2 else F.relu(x)
        return x


class Add(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.constant


def _random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _calls(*shape: int, count: int = 3) -> tuple[tuple[torch.Tensor], ...]:
    return tuple((_random(*shape, seed=seed),) for seed in range(1, 1 + count))


def _kinds() -> Model:
    h, b = _random(3, 5).half(), _random(3, 5, seed=2).bfloat16()
    return Model(Kinds(), ((h, b, h > 0), (h + 1, b, h > 1)), rtol=2e-2, atol=2e-2)


def _cache() -> Model:
    calls = tuple((_random(1, 4, seed=i), torch.tensor([i])) for i in range(4))
    return Model(Cache(), calls, stateful=True)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: Model(Mlp(), _calls(8, 64)),
    "mlp_resident": lambda: Model(Mlp(), _calls(8, 64), resident=True),
    "embedding": lambda: Model(Embedding(), tuple((torch.tensor(v),) for v in ([[1, 2, 3]], [[0, 19, 7]]))),
    "outputs": lambda: Model(
        Outputs(), tuple((_random(4, 6, seed=s), _random(6, 3, seed=9)) for s in (1, 2))
    ),
    "dynamic": lambda: Model(
        Dynamic(),
        tuple((_random(n, 8),) for n in (4, 1, 16, 7)),
        dynamic=({0: torch.export.Dim("batch", min=1, max=16)},),
    ),
    "cache_kept": _cache,
    "kinds": _kinds,
    "scalars": lambda: Model(Scalars(), _calls(4, 16)),
    "chain": lambda: Model(Chain(), _calls(4, 16), share="halves"),
    "chain_resident": lambda: Model(Chain(), _calls(4, 16), share="halves", resident=True),
    "add_one": lambda: Model(Add(1.0), _calls(3), planned=False),
    "add_two": lambda: Model(Add(2.0), _calls(3), planned=False),
}
