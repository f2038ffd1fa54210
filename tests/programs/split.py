"""The models that are split over several delegates, and how each is. Needs torch; see ``export_split.py``."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.export import Dim

from headrace.export import Aoti, Node, Python, Xnnpack

from .aoti import Cache, Embedded, Method, forward, randn, several
from .steps import DTYPES, OPS

__all__ = ["MODELS", "SPLITS", "Export"]

MODULE = "tests.programs.step_delegates"
ELEMENTWISE = (
    "aten.add", "aten.sub", "aten.mul", "aten.relu", "aten.sigmoid", "aten.tanh", "aten.gelu", "aten.exp",
    "aten.neg", "aten.cos", "aten.maximum",
)  # fmt: skip


def computes(node: Node) -> bool:
    """What ``steps.py`` computes."""
    return node.operator in OPS and all(dtype in DTYPES for dtype, _ in (*node.inputs, *node.outputs))


def even(node: Node) -> bool:
    return computes(node) and zlib.crc32(node.name.encode()) % 2 == 0


# Each is a list of delegates; every model goes through the first two, some through more.
SPLITS: dict[str, tuple[Any, ...]] = {
    "xnnpack": (Python("StepsA", operators=ELEMENTWISE, predicate=computes, module=MODULE), Xnnpack()),
    "mixed": (
        Python("StepsA", predicate=even, module=MODULE),
        Python("StepsB", predicate=computes, min_size=2, module=MODULE),
    ),
    "crumbs": (Python("StepsA", predicate=even, merge=False, module=MODULE), Xnnpack(min_size=2)),
    "first_layer": (
        Python("StepsA", modules=["layers.0"], predicate=computes, module=MODULE),
        Python("StepsB", modules=["layers.*"], predicate=computes, module=MODULE),
        Xnnpack(),
    ),
    "whole": (Python("StepsA", predicate=computes, module=MODULE),),
    "two": (
        Python("StepsA", operators=["aten.mul", "aten.tanh"], module=MODULE),
        Python("StepsB", operators=["aten.add"], module=MODULE),
    ),
    "aoti": (Python("StepsA", operators=ELEMENTWISE, predicate=computes, module=MODULE), Aoti()),
}


@dataclass
class Export:
    methods: dict[str, Method]
    # Keyword arguments of headrace.export.
    options: dict[str, Any] = field(default_factory=dict)
    stateful: bool = False
    rtol: float = 1e-4
    atol: float = 1e-5


MODELS: dict[str, Callable[[], Export]] = {}


def model(*splits: str) -> Callable[[Callable[[], Export]], Callable[[], Export]]:
    """A model, and the names of the ways in which it is split."""

    def register(make: Callable[[], Export]) -> Callable[[], Export]:
        assert set(splits) <= set(SPLITS) and len(splits) > 1
        MODELS[make.__name__] = make
        return make

    return register


class Plain(torch.nn.Module):
    """A module that is one function of its inputs and of the parameters and buffers it is given."""

    def __init__(self, function: Callable[..., Any], seed: int = 0, **members: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.function = function
        for name, value in members.items():
            made = value() if callable(value) and not isinstance(value, torch.nn.Module) else value
            if isinstance(made, torch.Tensor) and not isinstance(made, torch.nn.Parameter):
                self.register_buffer(name, made)
            else:
                setattr(self, name, made)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def linear(width: int, out: int) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.Linear(width, out)


# -------------------- shapes of graphs


@model("xnnpack", "mixed", "crumbs", "aoti")
def branches() -> Export:
    def run(self, x):
        a = torch.relu(self.first(x))
        left, right = torch.tanh(self.left(a)), torch.sigmoid(self.right(a)) * a
        return left + right, left - a

    module = Plain(run, first=linear(8, 8), left=linear(8, 8), right=linear(8, 8))
    return Export(forward(module, several((4, 8))))


@model("xnnpack", "mixed", "crumbs")
def diamond() -> Export:
    """What a delegate claims on both sides of somebody else's operator, and around it: a cycle if it were one."""

    def run(self, x):
        a = torch.relu(x)
        b = torch.cos(a).cumsum(1)
        return torch.relu(b + a) * a

    return Export(forward(Plain(run), several((4, 8))))


@model("xnnpack", "mixed", "crumbs")
def unrolled() -> Export:
    """A loop of Python's, the same weight in each round."""

    def run(self, x):
        state = torch.zeros_like(x)
        for step in range(5):
            state = torch.tanh(self.cell(state) + x * (step + 1))
        return state

    return Export(forward(Plain(run, cell=linear(6, 6)), several((3, 6))))


@model("xnnpack", "mixed")
def chain_of_twenty() -> Export:
    def run(self, x):
        for i in range(10):
            x = torch.sigmoid(x * 1.5 - i * 0.1) + torch.neg(x)
        return x

    return Export(forward(Plain(run), several((4, 5))))


# -------------------- weights


@model("xnnpack", "mixed", "crumbs", "aoti")
def shared_weight() -> Export:
    """One constant in many islands."""

    def run(self, x):
        for _ in range(3):
            x = torch.relu(x @ self.weight) + (x * self.scale)
        return x @ self.weight, self.scale * 2

    module = Plain(run, weight=lambda: torch.nn.Parameter(torch.randn(8, 8) * 0.3), scale=randn(8, seed=3))
    return Export(forward(module, several((4, 8))))


@model("xnnpack", "mixed")
def tied() -> Export:
    """An embedding whose table is the weight of the last layer too."""

    def run(self, index):
        rows = self.table(index)
        return F.linear(torch.tanh(rows), self.table.weight)

    calls = [(torch.tensor([[1, 5, i], [0, 11, 3]]),) for i in range(3)]
    return Export(forward(Plain(run, table=lambda: torch.nn.Embedding(12, 6)), calls))


@model("xnnpack", "mixed")
def equal_constants() -> Export:
    def run(self, x):
        return (x + self.one) * self.other - torch.tensor(3.0), x * self.scalar

    module = Plain(
        run, one=torch.arange(9.0) * 0.25, other=torch.arange(9.0) * 0.25, scalar=torch.tensor(1.5)
    )
    return Export(forward(module, several((4, 9))))


# -------------------- views and results


@model("xnnpack", "mixed")
def views() -> Export:
    def run(self, x):
        a = x.transpose(0, 1).reshape(4, -1)
        b = torch.relu(a[1:, ::2]).unsqueeze(0).expand(2, -1, -1)
        return b, a.flatten(), a.t().contiguous() + 1.0, x[:, 0]

    return Export(forward(Plain(run), several((6, 8))))


@model("xnnpack", "mixed")
def several_results() -> Export:
    """The same value twice, an input, a constant, a scalar."""

    def run(self, x, y):
        a = torch.relu(x + y)
        return a, a, x, self.steps, a.sum(dim=(0, 1)), (a * 2, {"deep": torch.exp(-a)})

    return Export(forward(Plain(run, steps=torch.arange(6)), several((3, 5), (3, 5))))


@model("xnnpack", "mixed")
def embedded() -> Export:
    calls = [(torch.tensor([1, 11, 0, i]), torch.tensor([2**40 + i, -(2**50), 0, 2**62])) for i in range(3)]
    return Export(forward(Embedded(), calls))


@model("xnnpack", "mixed")
def concatenated() -> Export:
    def run(self, x, y):
        both = torch.cat([x, torch.tanh(y), x * y], dim=1)
        first, second, third = both.split(4, dim=1)
        return torch.relu(first) + second * third

    return Export(forward(Plain(run), several((3, 4), (3, 4))))


@model("xnnpack", "mixed")
def integers() -> Export:
    def run(self, index, x):
        near = index * 2 + 1
        return near, x[near % 6], torch.where(index > 2, index, -index)

    calls = [(torch.tensor([0, 3, 5, i]), randn(6, 4, seed=i)) for i in range(3)]
    return Export(forward(Plain(run), calls))


# -------------------- sizes that vary


@model("xnnpack", "mixed", "crumbs")
def dynamic_batch() -> Export:
    def run(self, x):
        return self.b(torch.relu(self.norm(self.a(x)))) + 1.0

    module = Plain(run, a=linear(8, 16), norm=lambda: torch.nn.LayerNorm(16), b=linear(16, 4))
    calls = [(randn(n, 8, seed=n),) for n in (4, 1, 7, 3)]
    return Export(
        forward(module, calls, ({0: Dim("batch", min=1, max=7)},)),
        {"dynamic_shapes": {"args": ({0: Dim("batch", min=1, max=7)},)}},
    )  # fmt: skip


class Attention(torch.nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.softmax(q @ k.transpose(-1, -2) * 0.5, dim=-1)
        return x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))


class Layers(torch.nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList([Attention() for _ in range(count)])
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


@model("xnnpack", "mixed", "first_layer")
def transformer() -> Export:
    return Export(forward(Layers(), several((2, 5, 16))))


@model("xnnpack", "mixed")
def dynamic_sequence() -> Export:
    calls = [(randn(n, t, 16, seed=10 * n + t),) for n, t in ((2, 5), (1, 2), (3, 6))]
    dynamic = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("length", min=2, max=6)}}
    return Export(forward(Layers(1), calls, dynamic))


# -------------------- dtypes, convolutions, state, methods, control flow


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.norm.running_mean.copy_(randn(8, seed=5) * 0.1)
        self.norm.running_var.copy_(randn(8, seed=6).abs() + 0.5)
        self.b = torch.nn.Conv2d(8, 4, 3, stride=2, groups=2)
        self.head = torch.nn.Linear(4, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        return F.log_softmax(self.head(torch.tanh(self.b(x)).mean(dim=(2, 3))), dim=-1)


@model("xnnpack", "mixed", "crumbs")
def convolved() -> Export:
    return Export(forward(Convolved(), several((2, 3, 12, 10))))


@model("xnnpack", "mixed")
def bfloat16() -> Export:
    """Half of it in bfloat16, which no delegate here takes."""

    def run(self, x, y):
        low = torch.relu(self.low(x.bfloat16())) + y
        return low, torch.sigmoid(low.float() * 0.5 + x) - x

    module = Plain(run, low=lambda: torch.nn.Linear(8, 8).bfloat16())
    calls = [(randn(4, 8, seed=i), randn(4, 8, seed=i + 9).bfloat16()) for i in range(3)]
    return Export(forward(module, calls), rtol=4e-2, atol=4e-2)


@model("xnnpack", "mixed")
def float64_and_bool() -> Export:
    def run(self, x, seen):
        return torch.where(seen, torch.exp(-x), x * 2.0), seen & (x > 0), ~seen

    calls = [(randn(5, seed=i).double(), randn(5, seed=i + 9) > 0) for i in range(3)]
    return Export(forward(Plain(run), calls))


@model("xnnpack", "mixed")
def state() -> Export:
    calls = [(torch.tensor([i]), *(randn(1, 4, seed=10 * i + k) for k in range(3))) for i in range(6)]
    return Export(forward(Cache(), calls), stateful=True)


@model("xnnpack", "mixed", "crumbs")
def counter() -> Export:
    """State that is read before it is written and afterwards, by different delegates."""

    def run(self, x):
        before = torch.relu(x) * self.count
        self.count.add_(1.0)
        return before, self.count * x

    return Export(
        forward(Plain(run, count=torch.tensor([1.0])), several((4,), seeds=4)),
        stateful=True,
    )


@model("xnnpack", "mixed", "aoti")
def two_methods() -> Export:
    trunk = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    score = Plain(lambda self, x: torch.sigmoid(self.trunk(x)).sum(dim=-1), trunk=trunk)
    methods = {"features": Method(trunk, several((4, 8))), "score": Method(score, several((2, 8)))}
    return Export(methods)


@model("xnnpack", "mixed")
def control_flow() -> Export:
    """A branch that stays with the engine; what is in it are CPU kernels."""

    def run(self, x):
        y = torch.relu(x) * 2.0
        y = torch.cond(y.sum() > 4.0, lambda v: torch.sin(v) + 1.0, lambda v: v - 1.0, (y,))
        return torch.tanh(y) + x

    return Export(forward(Plain(run), [(randn(4, seed=i) * (i + 0.2),) for i in range(4)]))


@model("whole", "two")
def resident() -> Export:
    def run(self, x, y):
        return torch.tanh(x * y + 1.0)

    return Export(forward(Plain(run), several((4, 8), (4, 8))), {"resident": True})
