"""The modules, their inputs and how each is lowered. Needs torch; see ``export.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.exir.passes.propagate_device_config import PropagateDeviceConfig
from functorch.experimental.control_flow import map as map_rows
from torch.export import Dim

from .delegates import GraphPartitioner, aten

__all__ = ["MODELS", "Export"]

Inputs = tuple[Any, ...]


@dataclass
class Method:
    """``calls``: the inputs of each recorded call; the first are the example inputs of the export."""

    module: torch.nn.Module
    calls: Sequence[Inputs]
    dynamic: Any = None
    name: str = "forward"


@dataclass
class Export:
    methods: Sequence[Method]
    partitioners: Callable[[], list[Any]] = list
    # Keyword arguments of ExecutorchBackendConfig.
    config: dict[str, Any] = field(default_factory=dict)
    delegates: tuple[str, ...] = ()
    kernels_missing: tuple[str, ...] = ()
    stateful: bool = False
    rtol: float = 1e-5
    atol: float = 1e-6
    note: str = ""
    # Whether the engine can run it at all.
    runs: bool = True
    # Called on the exported (not yet lowered) program.
    tag: Callable[[Any], Any] | None = None
    # Operators that the exporter's list of core operators lacks.
    allowed: Callable[[], list[Any]] = list


MODELS: dict[str, Callable[[], Export]] = {}


def model(make: Callable[[], Export]) -> Callable[[], Export]:
    MODELS[make.__name__] = make
    return make


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def several(*shapes: tuple[int, ...], seeds: int = 3) -> list[Inputs]:
    """``seeds`` calls with different random inputs of these shapes."""
    return [tuple(randn(*s, seed=100 * i + k) for k, s in enumerate(shapes)) for i in range(seeds)]


# -------------------- the plain ones


class Add(torch.nn.Module):
    def forward(self, x, y):
        return x + y


@model
def add() -> Export:
    return Export([Method(Add(), several((1,), (1,)))], note="the tiniest program; also for measuring a call")


class MLP(torch.nn.Module):
    def __init__(self, width=64, hidden=128):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(width, hidden)
        self.b = torch.nn.Linear(hidden, width)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@model
def mlp_portable() -> Export:
    return Export([Method(MLP(), several((4, 64)))])


@model
def mlp_xnnpack() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
    )


class CNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.b = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.a(x))), 2)
        x = torch.relu(self.b(x))
        return F.softmax(self.head(x.mean(dim=(2, 3))), dim=-1)


@model
def cnn_portable() -> Export:
    return Export([Method(CNN(), several((2, 3, 16, 16)))])


@model
def cnn_xnnpack() -> Export:
    return Export(
        [Method(CNN(), several((2, 3, 16, 16)))],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        rtol=1e-4,
        atol=1e-5,
    )


class Images(torch.nn.Module):
    """What XNNPACK has for images, one of each, so that each says how large its result is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.conv = torch.nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1), groups=2)
        self.back = torch.nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1)
        self.slope = torch.nn.PReLU(4)
        self.scale = torch.nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        x = self.slope(self.back(self.conv(x))) * self.scale
        x = F.avg_pool2d(F.max_pool2d(x, 3, 1, 1), 3, 2)
        x = F.pad(x, (1, 2, 3, 4))
        return torch.cat([x[:, 1:], x[:, :1]], dim=1).mean(dim=(2, 3), keepdim=True) + x


@model
def images_xnnpack() -> Export:
    calls = [(randn(n, 4, 13, 16, seed=n),) for n in (20, 1, 32)]
    return Export(
        [Method(Images(), calls, dynamic={"x": {0: Dim("batch", min=1, max=32)}})],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        rtol=1e-4,
        atol=1e-5,
    )


class Larger(torch.nn.Module):
    def forward(self, x):
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")


@model
def resize_xnnpack() -> Export:
    return Export(
        [Method(Larger(), several((2, 4, 5, 7)))],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
    )


class Block(torch.nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        torch.manual_seed(2)
        self.heads = heads
        self.norm1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        scores = torch.where(mask, scores, torch.full_like(scores, -1e9))
        mixed = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@model
def transformer_portable() -> Export:
    return Export([Method(Block(), several((2, 8, 32)))], rtol=1e-4, atol=1e-5)


@model
def transformer_xnnpack() -> Export:
    return Export(
        [Method(Block(), several((2, 8, 32)))],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        rtol=1e-4,
        atol=1e-5,
    )


# -------------------- shapes, methods, states


def batches(width: int, sizes: Sequence[int]) -> list[Inputs]:
    return [(randn(n, width, seed=n),) for n in sizes]


# Middle first: the example's own size must be neither bound. Then least, greatest, and back.
SIZES = (5, 1, 8, 3, 1, 8)


@model
def dynamic_batch() -> Export:
    return Export([Method(MLP(), batches(64, SIZES), dynamic={"x": {0: Dim("batch", min=1, max=8)}})])


@model
def dynamic_batch_xnnpack() -> Export:
    return Export(
        [Method(MLP(), batches(64, SIZES), dynamic={"x": {0: Dim("batch", min=1, max=8)}})],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
    )


@model
def dynamic_cnn_xnnpack() -> Export:
    calls = [(randn(n, 3, 16, 16, seed=n),) for n in (20, 1, 32, 15, 16, 32)]
    return Export(
        [Method(CNN(), calls, dynamic={"x": {0: Dim("batch", min=1, max=32)}})],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        rtol=1e-4,
        atol=1e-5,
        note="the example has a batch of 16 or more: with less, PyTorch 2.13 makes 15 the greatest, "
        "for it picks a convolution's algorithm by that while lowering",
    )


class Concat(torch.nn.Module):
    def forward(self, x, y):
        return torch.cat([x, y], dim=1) * 2.0


@model
def dynamic_two() -> Export:
    n, a, b = Dim("n", min=1, max=6), Dim("a", min=1, max=10), Dim("b", min=1, max=10)
    sizes = [(3, 4, 5), (1, 1, 1), (6, 10, 10), (2, 10, 1), (6, 1, 9)]
    calls = [(randn(r, s, 2, seed=r), randn(r, t, 2, seed=t + 50)) for r, s, t in sizes]
    return Export(
        [Method(Concat(), calls, dynamic={"x": {0: n, 1: a}, "y": {0: n, 1: b}})],
        note="two dynamic dimensions; two inputs must agree in one",
    )


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Norm(torch.nn.Module):
    def forward(self, x, y):
        return (x * y).sum(dim=-1), x - y


@model
def two_methods() -> Export:
    return Export(
        [
            Method(Scale(3.0), several((2, 3)), name="scale"),
            Method(Norm(), several((4,), (4,)), name="compare"),
        ]
    )


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor([5], dtype=torch.int64))
        self.register_buffer("total", torch.tensor([1.0, 2.0]))

    def forward(self, x):
        self.count.add_(1)
        self.total.add_(x)
        return self.count.clone(), self.total * 2.0


@model
def counter() -> Export:
    return Export(
        [Method(Counter(), several((2,), seeds=4))],
        config={
            "passes": [InitializedMutableBufferPass(["count", "total"])],
            "emit_mutable_buffer_names": True,
        },
        stateful=True,
        note="mutable buffers with an initial state, each advanced once by a call",
    )


class Cache(torch.nn.Module):
    """Attention over what earlier calls put into a cache."""

    def __init__(self, length=8, width=4):
        super().__init__()
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))

    def forward(self, position, q, k, v):
        self.keys.index_copy_(0, position, k)
        self.values.index_copy_(0, position, v)
        seen = torch.arange(self.keys.shape[0]) <= position
        scores = (q @ self.keys.t()).masked_fill(~seen, -1e9)
        return F.softmax(scores, dim=-1) @ self.values


@model
def kv_cache() -> Export:
    calls = [(torch.tensor([i]), *(randn(1, 4, seed=10 * i + k) for k in range(3))) for i in range(8)]
    return Export(
        [Method(Cache(), calls)],
        config={"passes": [InitializedMutableBufferPass(["keys", "values"])]},
        stateful=True,
    )


# -------------------- external data


@model
def external_weights() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        config={"external_constants": True},
        note="every weight in one .ptd",
    )


def _file_of(node: torch.fx.Node) -> str | None:
    """Weights in one file, biases in another."""
    return "external_two_files_weights" if "weight" in node.name else "external_two_files_biases"


@model
def external_two_files() -> Export:
    return Export([Method(MLP(), several((4, 64)))], config={"external_constants": _file_of})


def _first_only(node: torch.fx.Node) -> str | None:
    return "external_partly_first" if node.name.startswith("p_a") else None


@model
def external_partly() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        config={"external_constants": _first_only},
        note="the first layer's weights in a .ptd, the second's in the .pte",
    )


def _tag_external(exported: Any) -> Any:
    from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted

    module = exported.module()
    delegate_external_constants_pass_unlifted(module, gen_tag_fn=lambda node: "external_xnnpack")
    return torch.export.export(module, exported.example_inputs[0], strict=True)


@model
def external_xnnpack() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        tag=_tag_external,
        note="a delegate's weights as named data in a .ptd",
    )


# -------------------- results and arguments


class Several(torch.nn.Module):
    def forward(self, x, y):
        return x + y, x.sum(), (x > y), torch.argmax(x, dim=-1)


@model
def several_outputs() -> Export:
    return Export(
        [Method(Several(), several((3, 4), (3, 4)))], note="float32, a 0-d tensor, bool and int64 results"
    )


class Sizes(torch.nn.Module):
    def forward(self, x):
        return x * 2.0, x.shape[0], x.shape[0] * 3 + 1


@model
def int_outputs() -> Export:
    return Export(
        [Method(Sizes(), batches(2, (4, 1, 9)), dynamic={"x": {0: Dim("n", min=1, max=9)}})],
        note="integers, not tensors, as results",
    )


class PassThrough(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("fixed", torch.tensor([1.0, -2.0, 3.0]))

    def forward(self, x):
        return x, x + self.fixed, self.fixed


@model
def input_and_constant_as_output() -> Export:
    return Export([Method(PassThrough(), several((3,)))])


class Literals(torch.nn.Module):
    def forward(self, x):
        return x + 1.0, 7, True, 2.5, None


@model
def literal_outputs() -> Export:
    return Export([Method(Literals(), several((3,)))], note="int, bool, float and None as results")


class Optional(torch.nn.Module):
    def forward(self, x, bias=None, gain=None):
        x = x * 2.0 if bias is None else x * 2.0 + bias
        return x if gain is None else x * gain


@model
def none_input() -> Export:
    return Export([Method(Optional(), [(x, None, g) for x, g in several((3,), (3,))])])


class Literal(torch.nn.Module):
    def forward(self, x, times: int, scale: float, negate: bool):
        y = x * times * scale
        return -y if negate else y


@model
def literal_inputs() -> Export:
    return Export(
        [Method(Literal(), [(x, 3, 0.5, True) for (x,) in several((3,))])],
        note="an int, a float and a bool argument, fixed at export",
    )


class Repeat(torch.nn.Module):
    def forward(self, x, n: int):
        return x + n, n * 2


@model
def int_input() -> Export:
    return Export(
        [
            Method(
                Repeat(), [(randn(3, seed=n), n) for n in (3, 7, 100)], dynamic={"x": None, "n": Dim.DYNAMIC}
            )
        ],
        runs=False,
        note="an integer argument that may vary: the exporter (1.5.1) writes it as an absent value, and the "
        "engine then refuses an integer",
    )


class Nested(torch.nn.Module):
    def forward(self, pair, named):
        return {"sum": pair[0] + pair[1], "scaled": [named["x"] * 2.0, named["y"] * 3.0]}


@model
def nested_arguments() -> Export:
    calls = [((a, b), {"x": c, "y": d}) for a, b, c, d in several((2,), (2,), (3,), (4,))]
    return Export([Method(Nested(), calls)], note="containers, flat in the program")


class NoInputs(torch.nn.Module):
    def forward(self):
        return torch.arange(5) * 2


@model
def no_inputs() -> Export:
    return Export([Method(NoInputs(), [()])])


# -------------------- element types


class Affine(torch.nn.Module):
    """Weights of the given type, so that results carry its rounding."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(8, 6).to(dtype)

    def forward(self, x):
        return torch.relu(self.linear(x)) + x[:, :6]


@model
def float16() -> Export:
    calls = [(randn(2, 8, seed=i, dtype=torch.float16),) for i in range(3)]
    return Export([Method(Affine(torch.float16), calls)], rtol=2e-3, atol=2e-3)


@model
def bfloat16() -> Export:
    calls = [(randn(2, 8, seed=i, dtype=torch.bfloat16),) for i in range(3)]
    return Export([Method(Affine(torch.bfloat16), calls)], rtol=2e-2, atol=2e-2)


class Doubles(torch.nn.Module):
    def forward(self, x, y):
        # The exporter rounds a literal to float32: one that survives.
        return x * y + 0.125, x.to(torch.float32)


@model
def float64() -> Export:
    calls = [(randn(4, seed=i).double(), randn(4, seed=i + 9).double() / 3) for i in range(3)]
    return Export([Method(Doubles(), calls)], rtol=1e-12, atol=1e-12)


class Integers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.Embedding(16, 4)

    def forward(self, index, offset):
        return self.table(index), index + offset, torch.cumsum(index, dim=0)


@model
def int64() -> Export:
    # Values beyond 32 bits show a narrowing.
    calls = [(torch.tensor([1, 15, 0, i]), torch.tensor([2**40 + i, -(2**50), 0, 2**62])) for i in range(3)]
    return Export([Method(Integers(), calls)])


class Narrow(torch.nn.Module):
    def forward(self, a, b, c, d):
        return a + a, b + b, c + c, d * 2


@model
def small_ints() -> Export:
    calls = [
        (
            torch.tensor([1, 2, 100 + i], dtype=torch.uint8),
            torch.tensor([-3, 4, 50 + i], dtype=torch.int8),
            torch.tensor([-300, 400, 5000 + i], dtype=torch.int16),
            torch.tensor([-70000, 80000, 10**8 + i], dtype=torch.int32),
        )
        for i in range(3)
    ]
    return Export([Method(Narrow(), calls)], note="uint8, int8, int16, int32")


class Logic(torch.nn.Module):
    def forward(self, a, b):
        return torch.logical_and(a, b), torch.logical_not(a), torch.logical_or(a, b).sum()


@model
def boolean() -> Export:
    pairs = [(0b1100, 0b1010), (0b1111, 0b0001), (0, 0b0110)]
    calls = [tuple(torch.tensor([bool(v >> k & 1) for k in range(4)]) for v in pair) for pair in pairs]
    return Export([Method(Logic(), calls)])


# -------------------- layout and odd shapes


class Convolve(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))


@model
def channels_last() -> Export:
    calls = [(x.to(memory_format=torch.channels_last),) for (x,) in several((1, 3, 6, 5))]
    return Export(
        [Method(Convolve(), calls)],
        note="input and output in channels-last order: dim_order 0, 2, 3, 1",
    )


@model
def channels_last_xnnpack() -> Export:
    calls = [(x.to(memory_format=torch.channels_last),) for (x,) in several((1, 3, 6, 5))]
    return Export(
        [Method(Convolve(), calls)],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        rtol=1e-4,
        atol=1e-5,
    )


class Empty(torch.nn.Module):
    def forward(self, x, y):
        return x * 2.0, torch.cat([x, y], dim=0), x.sum(dim=0)


@model
def zero_sized() -> Export:
    return Export([Method(Empty(), several((0, 4), (2, 4)))])


class Scalars(torch.nn.Module):
    def forward(self, x, y):
        return x * y, x + 1.0, x > y


@model
def scalars() -> Export:
    return Export(
        [Method(Scalars(), [(randn(seed=i), randn(seed=i + 9)) for i in range(3)])], note="0-d tensors"
    )


def unplanned() -> dict[str, Any]:
    return {"memory_planning_pass": MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)}


@model
def unplanned_io() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        config=unplanned(),
        note="inputs and outputs without planned memory: aliased, not copied",
    )


@model
def unplanned_inputs() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        config={"memory_planning_pass": MemoryPlanningPass(alloc_graph_input=False)},
    )


@model
def unplanned_dynamic() -> Export:
    return Export(
        [Method(MLP(), batches(64, SIZES), dynamic={"x": {0: Dim("batch", min=1, max=8)}})],
        config=unplanned(),
    )


@model
def unplanned_xnnpack() -> Export:
    return Export(
        [Method(MLP(), several((4, 64)))],
        partitioners=lambda: [XnnpackPartitioner()],
        delegates=("XnnpackBackend",),
        config=unplanned(),
    )


class Branch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x * 2.0, lambda x: x - 1.0, (x,))


@model
def branch() -> Export:
    calls = [(torch.full((3,), 1.0),), (torch.full((3,), -1.0),), (torch.tensor([5.0, -1.0, 2.0]),)]
    return Export([Method(Branch(), calls)], note="a branch on data: jumps and moves")


class Found(torch.nn.Module):
    def forward(self, x):
        return x.nonzero()


@model
def indices() -> Export:
    calls = [
        (torch.tensor(x),) for x in ([[1.0, 0, 2], [0, 3, 4]], [[0.0, 0, 0], [0, 0, 5]], [[0.0, 0, 0]] * 2)
    ]
    return Export([Method(Found(), calls)], note="indices, whose columns lie one after the other in memory")


# -------------------- what may be missing


class Quantize(torch.nn.Module):
    def forward(self, x):
        q = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(q, 0.1, 3, -128, 127, torch.int8)


@model
def kernel_missing() -> Export:
    import executorch.exir.passes._quant_patterns_and_replacements  # registers the operators
    import executorch.kernels.quantized  # noqa: F401  and their out variants

    return Export(
        [Method(Quantize(), several((4,)))],
        kernels_missing=(
            "quantized_decomposed::quantize_per_tensor.out",
            "quantized_decomposed::dequantize_per_tensor.out",
        ),
        note="quantized kernels, which the engine's optimized library does not hold",
    )


class Mix(torch.nn.Module):
    def forward(self, x, y):
        return torch.sigmoid(torch.mm(x, y) + 1.0) * 2.0


MIX = [(8, 16), (16, 8)]


@model
def not_there() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=lambda: [GraphPartitioner("NotThere", [aten.mm.default])],
        delegates=("NotThere",),
        note="calls a delegate that nothing provides",
    )


# -------------------- split over two delegates, A and B

A, B = "TestA", "TestB"
LATER = (aten.add.Tensor, aten.sigmoid.default, aten.mul.Tensor)


def split(first: str | None, second: str | None, later: Sequence[Any] = LATER) -> Callable[[], list[Any]]:
    """A takes the product, B what follows; each planned for its device."""
    return lambda: [
        GraphPartitioner(A, [aten.mm.default], first),
        GraphPartitioner(B, later, second),
    ]


def resident() -> dict[str, Any]:
    """Inputs and outputs stay on the device: no copies, and no planned memory for them."""
    return {
        "propagate_device_config": PropagateDeviceConfig(
            skip_h2d_for_method_inputs=True, skip_d2h_for_method_outputs=True
        ),
        **unplanned(),
    }


@model
def split_host() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split(None, None, [aten.sigmoid.default]),
        delegates=(A, B),
        note="A, a kernel, B, a kernel; host memory",
    )


@model
def split_host_unplanned() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))], partitioners=split(None, None), delegates=(A, B), config=unplanned()
    )


@model
def split_inline() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split(None, None),
        delegates=(A, B),
        config={"extract_delegate_segments": False},
        note="payloads inside the table, not in segments",
    )


@model
def split_xnnpack() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=lambda: [GraphPartitioner(A, [aten.mm.default]), XnnpackPartitioner()],
        delegates=(A, "XnnpackBackend"),
        rtol=1e-4,
        atol=1e-5,
    )


@model
def split_cuda() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split("cuda:0", "cuda:0"),
        delegates=(A, B),
        note="two copies in, A, B, one copy out",
    )


@model
def split_cuda_host_between() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split("cuda:0", "cuda:0", [aten.sigmoid.default]),
        delegates=(A, B),
        note="a host kernel between two islands on the device",
    )


@model
def split_cuda_resident() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split("cuda:0", "cuda:0"),
        delegates=(A, B),
        config=resident(),
        note="no copies: inputs and outputs are device memory of the caller's",
    )


@model
def split_cuda_resident_planned() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split("cuda:0", "cuda:0"),
        delegates=(A, B),
        config={"propagate_device_config": resident()["propagate_device_config"]},
        note="no copies, but inputs and outputs have planned device memory",
    )


@model
def split_two_devices() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split("cuda:0", "cuda:1"),
        delegates=(A, B),
        note="A on cuda:0, B on cuda:1, through the host between",
    )


@model
def split_cuda_unplanned_device() -> Export:
    return Export(
        [Method(Mix(), several(*MIX))],
        partitioners=split("cuda:0", "cuda:0"),
        delegates=(A, B),
        config={"enable_non_cpu_memory_planning": False},
        note="tensors tagged cuda:0 whose memory is planned on the host: the old behaviour",
    )


@model
def split_cuda_dynamic() -> Export:
    return Export(
        [Method(MLP(), batches(64, SIZES), dynamic={"x": {0: Dim("batch", min=1, max=8)}})],
        partitioners=lambda: [
            GraphPartitioner(A, [aten.addmm.default, aten.permute_copy.default], "cuda:0"),
            GraphPartitioner(B, [aten.relu.default], "cuda:0"),
        ],
        delegates=(A, B),
        note="A, B, A with weights in the payloads and a dynamic batch",
    )


@model
def split_cuda_resident_dynamic() -> Export:
    export = split_cuda_dynamic()
    export.config = resident()
    return export


class Fork(torch.nn.Module):
    """One island with two results, and one that reads both."""

    def forward(self, x, y):
        p, q = x * y, x + y
        return torch.sigmoid(p), torch.sigmoid(q), torch.relu(p)


@model
def split_many_arguments() -> Export:
    return Export(
        [Method(Fork(), several((2, 3), (2, 3)))],
        partitioners=lambda: [
            GraphPartitioner(A, [aten.mul.Tensor, aten.add.Tensor]),
            GraphPartitioner(B, [aten.sigmoid.default]),
        ],
        delegates=(A, B),
        note="islands with several inputs and results",
    )


class Chain(torch.nn.Module):
    """Alternating x * c and x + c, each step with a constant of its own: any two steps exchanged, dropped
    or run too early change the result."""

    def __init__(self, steps=25, width=16):
        super().__init__()
        self.steps = steps
        for i in range(steps):
            constant = randn(width, seed=1000 + i)
            self.register_buffer(f"c{i}", 1.0 + 0.25 * constant if i % 2 == 0 else constant)

    def forward(self, x):
        for i in range(self.steps):
            constant = getattr(self, f"c{i}")
            x = x * constant if i % 2 == 0 else x + constant
        return x


def alternating(device: str | None) -> Callable[[], list[Any]]:
    return lambda: [
        GraphPartitioner(A, [aten.mul.Tensor], device),
        GraphPartitioner(B, [aten.add.Tensor], device),
    ]


@model
def chain25_host() -> Export:
    return Export([Method(Chain(), several((4, 16)))], partitioners=alternating(None), delegates=(A, B))


@model
def chain25_cuda() -> Export:
    return Export([Method(Chain(), several((4, 16)))], partitioners=alternating("cuda:0"), delegates=(A, B))


@model
def chain25_cuda_resident() -> Export:
    return Export(
        [Method(Chain(), several((4, 16)))],
        partitioners=alternating("cuda:0"),
        delegates=(A, B),
        config=resident(),
    )


@model
def chain25_single() -> Export:
    return Export(
        [Method(Chain(), several((4, 16)))],
        partitioners=lambda: [GraphPartitioner(A, [aten.mul.Tensor, aten.add.Tensor], "cuda:0")],
        delegates=(A,),
        note="the same graph in one island: the control",
    )


class Shared(torch.nn.Module):
    """One constant that islands of both delegates read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("c", randn(4, seed=77))

    def forward(self, x):
        return ((x * self.c) + self.c) * self.c


@model
def shared_constant() -> Export:
    return Export([Method(Shared(), several((2, 4)))], partitioners=alternating("cuda:0"), delegates=(A, B))


# -------------------- what writes, loops and repeats


class Accumulate(torch.nn.Module):
    def forward(self, x, y):
        x.add_(y)
        # The exported method also returns what it wrote, first.
        return x * 2.0 if torch.compiler.is_compiling() else (x, x * 2.0)


def accumulations() -> list[Method]:
    return [Method(Accumulate(), several((4,), (4,)))]


@model
def written_input() -> Export:
    return Export(accumulations(), note="writes into its first input and returns that too, first")


@model
def written_input_unplanned() -> Export:
    return Export(accumulations(), config=unplanned())


class Square(torch.nn.Module):
    def forward(self, x):
        return x @ x, x, x + 1.0, x


@model
def unplanned_square() -> Export:
    return Export(
        [Method(Square(), several((6, 6)))],
        config=unplanned(),
        note="an input that is read while the result is written, and that is a result itself, twice",
    )


class Loop(torch.nn.Module):
    def forward(self, index, table):
        return map_rows(lambda row, table: torch.index_select(table, 0, row) * 2.0, index, table)


@model
def loop() -> Export:
    table = randn(8, 4)
    calls = [(torch.tensor(rows), table) for rows in ([[0, 1], [2, 3], [4, 5]], [[7, 7], [0, 6], [1, 2]])]
    return Export([Method(Loop(), calls)], note="a loop over rows; an index beyond the table fails inside it")
