"""The modules that go through AOTInductor, and how each is exported. Needs torch; see ``export_aoti.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from executorch.exir.backend.partitioner import PartitionResult
from executorch.exir.backend.utils import tag_mutated_buffer
from torch.export import Dim, ExportedProgram

from headrace.export import Aoti, Plan
from headrace.export.aoti import AotiPartitioner

from .delegates import GraphPartitioner, aten

__all__ = ["MODELS", "Export"]

Inputs = tuple[Any, ...]


@dataclass
class Method:
    """``calls``: the inputs of each recorded call; the first are the example inputs of the export."""

    module: torch.nn.Module
    calls: Sequence[Inputs]
    dynamic: Any = None


@dataclass
class Export:
    methods: Mapping[str, Method]
    # Keyword arguments of headrace.export.
    options: dict[str, Any] = field(default_factory=dict)
    delegates: tuple[str, ...] = ("CudaBackend",)
    stateful: bool = False
    rtol: float = 1e-4
    atol: float = 1e-5
    note: str = ""


MODELS: dict[str, Callable[[], Export]] = {}


def model(make: Callable[[], Export]) -> Callable[[], Export]:
    MODELS[make.__name__] = make
    return make


def forward(module: torch.nn.Module, calls: Sequence[Inputs], dynamic: Any = None) -> dict[str, Method]:
    return {"forward": Method(module, calls, dynamic)}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def several(*shapes: tuple[int, ...], seeds: int = 3, dtype: torch.dtype = torch.float32) -> list[Inputs]:
    """``seeds`` calls with different random inputs of these shapes."""
    return [
        tuple(randn(*s, seed=100 * i + k, dtype=dtype) for k, s in enumerate(shapes)) for i in range(seeds)
    ]


@dataclass(frozen=True)
class Claims:
    """The tests' Python delegate ``name`` takes these operators."""

    name: str
    targets: tuple[Any, ...]

    def partitioner(self, plan: Plan) -> GraphPartitioner:
        return GraphPartitioner(self.name, self.targets, plan.device)


class KeepingPartitioner(AotiPartitioner):
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        result = super().partition(exported_program)
        tag_mutated_buffer(exported_program)
        return result


@dataclass(frozen=True)
class KeepsState:
    """AOTInductor with the state inside its islands, as stock ExecuTorch's exporter leaves it and ours does not."""

    def partitioner(self, plan: Plan) -> KeepingPartitioner:
        return KeepingPartitioner(
            plan.target, method=plan.method, device=plan.device, data_file=plan.data_file
        )


# -------------------- the plain ones


class MLP(torch.nn.Module):
    def __init__(self, width=16, hidden=32):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(width)
        self.a = torch.nn.Linear(width, hidden)
        self.b = torch.nn.Linear(hidden, 8)

    def forward(self, x):
        return self.b(F.gelu(self.a(self.norm(x))))


@model
def mlp() -> Export:
    return Export(forward(MLP(), several((4, 16))), note="planned for a device: copies in and out")


class AddOne(torch.nn.Module):
    def forward(self, x):
        return x + 1.0


@model
def add_one() -> Export:
    return Export(
        forward(AddOne(), several((3,))), {"device": None}, note="the smallest library; no constant"
    )


class CNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.norm.running_mean.copy_(randn(8, seed=5) * 0.1)
        self.norm.running_var.copy_(randn(8, seed=6).abs() + 0.5)
        self.b = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        return F.softmax(self.head(torch.relu(self.b(x)).mean(dim=(2, 3))), dim=-1)


@model
def cnn() -> Export:
    return Export(forward(CNN(), several((2, 3, 12, 10))))


class Convolutions(torch.nn.Module):
    """Every argument of a convolution that changes which elements meet."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.grouped = torch.nn.Conv2d(4, 8, 3, stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = torch.nn.Conv2d(8, 4, 1)
        self.up = torch.nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1)
        self.line = torch.nn.Conv1d(2, 3, 3, padding="same")

    def forward(self, x):
        x = self.up(self.pointwise(self.depthwise(self.grouped(x))))
        return x, self.line(x.flatten(2))


@model
def convolutions() -> Export:
    # At most 15: from 16 on eager PyTorch takes another path, and torch.export sees a bound there.
    calls = [(randn(n, 4, 9, 6, seed=n),) for n in (3, 1, 5, 2)]
    return Export(
        forward(Convolutions(), calls, {"x": {0: Dim("batch", min=1, max=8)}}),
        note="stride, padding, dilation, groups, transposed, one dimension; dynamic batch",
    )


class Block(torch.nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width=32, heads=4, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.heads = heads
        self.norm1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.to(dtype)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@model
def transformer() -> Export:
    return Export(forward(Block(), several((2, 6, 32))))


@model
def transformer_dynamic() -> Export:
    calls = [(randn(n, t, 32, seed=10 * n + t),) for n, t in ((2, 5), (1, 1), (4, 9), (3, 2))]
    dynamic = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("length", min=1, max=9)}}
    return Export(forward(Block(), calls, dynamic), note="dynamic batch and length")


@model
def float16() -> Export:
    return Export(
        forward(Block(dtype=torch.float16), several((2, 6, 32), dtype=torch.float16)), rtol=5e-3, atol=5e-3
    )


@model
def bfloat16() -> Export:
    return Export(
        forward(Block(dtype=torch.bfloat16), several((2, 6, 32), dtype=torch.bfloat16)), rtol=4e-2, atol=4e-2
    )


class Masked(torch.nn.Module):
    """Attention under masks of both kinds; heads shared in groups; a row with nothing to attend to."""

    def forward(self, q, k, v, seen, bias):
        plain = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        added = F.scaled_dot_product_attention(q, k, v, bias, scale=0.3, enable_gqa=True)
        half = F.scaled_dot_product_attention(q.half(), k.half(), v.half(), seen, enable_gqa=True)
        return plain, added, half.float()


@model
def masked_attention() -> Export:
    calls = []
    for i in range(3):
        seen = randn(5, 7, seed=i) > 0
        seen[i] = False
        q, k, v = randn(2, 4, 5, 8, seed=i), randn(2, 2, 7, 8, seed=i + 9), randn(2, 2, 7, 8, seed=i + 19)
        calls.append((q, k, v, seen, randn(5, 7, seed=i + 29)))
    return Export(forward(Masked(), calls), rtol=2e-3, atol=2e-3)


# -------------------- dtypes, results, shapes


class Embedded(torch.nn.Module):
    """int64 in and out; results that are a view of another, one twice, an input, a view of it, a constant, a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.Embedding(12, 6)
        self.register_buffer("steps", torch.arange(6))

    def forward(self, index, offset):
        rows = self.table(index)
        views = rows.transpose(0, 1), rows[1:, ::2], rows, offset.view(2, 2)
        return rows, *views, index + offset, offset, self.steps, rows.sum(), rows.argmax(dim=1)


@model
def embeddings() -> Export:
    # Values beyond 32 bits show a narrowing.
    calls = [(torch.tensor([1, 11, 0, i]), torch.tensor([2**40 + i, -(2**50), 0, 2**62])) for i in range(3)]
    return Export(forward(Embedded(), calls), note="int64; several results, views, a scalar")


class Sized(torch.nn.Module):
    """Sizes of results that are functions of an input's."""

    def forward(self, x, y):
        both = torch.cat([x, x, y], dim=0)
        return both * 2.0, x[::2] + 1.0, x.flatten(), F.max_pool1d(both.t(), 2).t()


@model
def dynamic_sizes() -> Export:
    calls = [(randn(n, 3, seed=n), randn(m, 3, seed=m + 50)) for n, m in ((5, 4), (3, 7), (9, 2), (4, 3))]
    dynamic = {"x": {0: Dim("n", min=3, max=9)}, "y": {0: Dim("m", min=2, max=7)}}
    return Export(forward(Sized(), calls, dynamic), note="2n + m, (n + 1) // 2, 3n, (2n + m) // 2")


class Logic(torch.nn.Module):
    def forward(self, a, b, x, h, m):
        logic = a & b, ~a, torch.where(a, x, -x), (x > 0) ^ b, a.any(), x.to(torch.int8), a.to(torch.uint8)
        return *logic, m * 2 - h.to(torch.bfloat16), torch.where(b, h.float(), m.float())


@model
def boolean() -> Export:
    calls = []
    for i in range(3):
        a, b, x = randn(6, seed=i) > 0, randn(6, seed=i + 9) > 0, randn(6, seed=i + 19) * 9
        calls.append((a, b, x, randn(6, seed=i + 29).half(), randn(6, seed=i + 39).bfloat16()))
    return Export(
        forward(Logic(), calls), rtol=1e-2, atol=1e-2, note="bool, int8, uint8, float16 and bfloat16 together"
    )


class Constants(torch.nn.Module):
    """A strided, a scalar, two equal ones and a literal."""

    def __init__(self):
        super().__init__()
        self.register_buffer("strided", randn(6, 8, seed=2)[::2].t())
        self.register_buffer("scalar", torch.tensor(1.5))
        self.register_buffer("twin", torch.arange(9.0) * 0.25)
        self.register_buffer("other_twin", torch.arange(9.0) * 0.25)

    def forward(self, x):
        products = (x @ self.strided).sum(-1, keepdim=True) * self.scalar
        return products + self.twin - self.other_twin * torch.tensor(3.0)


@model
def constants() -> Export:
    return Export(forward(Constants(), several((4, 8))), {"weights": "beside"}, note="awkward constants")


# -------------------- state, methods, splits


class Cache(torch.nn.Module):
    """Attention over what earlier calls put into a cache, and a count of the calls."""

    def __init__(self, length=8, width=4):
        super().__init__()
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))
        self.register_buffer("calls", torch.tensor([5], dtype=torch.int64))

    def forward(self, position, q, k, v):
        self.calls.add_(1)
        self.keys.index_copy_(0, position, k)
        self.values.index_copy_(0, position, v)
        seen = torch.arange(self.keys.shape[0]) <= position
        scores = (q @ self.keys.t()).masked_fill(~seen, -1e9)
        return F.softmax(scores, dim=-1) @ self.values, self.calls.clone()


@model
def kv_cache() -> Export:
    calls = [(torch.tensor([i]), *(randn(1, 4, seed=10 * i + k) for k in range(3))) for i in range(8)]
    return Export(
        forward(Cache(), calls), stateful=True, note="state that starts at 0 and at 5, advanced once a call"
    )


class Kept(torch.nn.Module):
    """State that is written at a position and read as a whole: two buffers that begin alike and do not stay so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.register_buffer("keys", torch.zeros(8, 4))
        self.register_buffer("values", torch.zeros(8, 4))
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, position):
        self.keys.index_put_((position,), self.linear(x))
        self.values.index_put_((position,), 3.0 - x)
        return self.keys.sum(0, keepdim=True) * self.values.sum(0, keepdim=True) + x


@model
def kept_state() -> Export:
    calls = [(randn(1, 4, seed=i), torch.tensor([i])) for i in range(4)]
    return Export(
        forward(Kept(), calls), {"delegates": (KeepsState(),)}, stateful=True, note="the island has the state"
    )


class Head(torch.nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk

    def forward(self, x):
        return torch.sigmoid(self.trunk(x)).sum(dim=-1)


class Trunk(torch.nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk

    def forward(self, x):
        return self.trunk(x)


@model
def two_methods() -> Export:
    trunk = MLP()
    return Export(
        {
            "features": Method(Trunk(trunk), several((4, 16))),
            "score": Method(Head(trunk), several((2, 16))),
        },
        {"weights": "beside"},
        note="two methods over the same weights, which the data file holds once",
    )


class Split(torch.nn.Module):
    """One constant that both of the islands of AOTInductor read, an operator between them, and a size that both
    need."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x):
        batch = x.shape[0]
        halves = F.gelu(x @ self.weight).view(batch * 2, 4)
        return torch.relu(halves).view(batch, 8) @ self.weight + x


@model
def split() -> Export:
    calls = [(randn(n, 8, seed=n),) for n in (4, 2, 7, 3)]
    return Export(
        forward(Split(), calls, {"x": {0: Dim("batch", min=2, max=7)}}),
        {"delegates": (Claims("TestA", (aten.relu.default,)), Aoti())},
        delegates=("TestA", "CudaBackend"),
        note="AOTInductor, a Python delegate, AOTInductor; dynamic batch, a constant of both islands",
    )


class Chain(torch.nn.Module):
    """Two delegates that take turns."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(randn(16, seed=7))
        self.second = torch.nn.Parameter(randn(16, seed=8))

    def forward(self, x):
        return torch.sigmoid(torch.relu(x.cos() * self.first).cos() * self.second + 1.0)


def chained(**options: Any) -> Export:
    taken = Claims("TestA", (aten.relu.default, aten.sigmoid.default))
    return Export(
        forward(Chain(), several((4, 16))),
        {"delegates": (taken, Aoti()), **options},
        delegates=("TestA", "CudaBackend"),
        note="AOTInductor, a Python delegate, and both again",
    )


@model
def chain() -> Export:
    return chained()


# -------------------- the same code elsewhere, which is compiled once: last, when it is there


@model
def mlp_host() -> Export:
    return Export(forward(MLP(), several((4, 16))), {"device": None}, note="mlp in host memory")


@model
def mlp_resident() -> Export:
    return Export(
        forward(MLP(), several((4, 16))),
        {"resident": True, "weights": "beside"},
        note="inputs and outputs are the caller's device memory; constants in a data file",
    )


@model
def chain_resident() -> Export:
    return chained(resident=True)
