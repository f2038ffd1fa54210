"""What Inductor has no code of its own for, written with what it has.

On the CPU Inductor answers matrix products, convolutions and attention by calling libtorch, or by templates that
take constant weights of static shape alone, which they pack into a copy. Here they are sums of products, which
become fused loops: any shape and layout, weights as they are in the state dict, and every sum in float32 at least.

For a GPU it has Triton templates for most products and convolutions; what these do not take is written as above.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["decompositions"]

aten = torch.ops.aten
# What Triton's templates for products and convolutions take.
TEMPLATES = (torch.float32, torch.float16, torch.bfloat16)


def decompositions(kind: str) -> dict[Any, Callable[..., Any]]:
    """A decomposition for each operator, for ``ExportedProgram.run_decompositions``; ``kind`` is the target's,
    ``host`` or ``cuda``."""
    table: dict[Any, Callable[..., Any]] = torch.export.default_decompositions()
    table.update(_views())
    if kind == "cuda":
        table.update(
            {
                aten.mm.default: _unless_template(mm),
                aten.bmm.default: _unless_template(bmm),
                aten.addmm.default: _unless_template(addmm),
                aten.baddbmm.default: _unless_template(baddbmm),
                aten.convolution.default: convolution_for_gpu,
                # By Triton's template, in float32.
                aten.scaled_dot_product_attention.default: functools.partial(attention, product=_wide_matmul),
                aten.topk.default: topk,
            }
        )
    else:
        table.update(
            {
                aten.mm.default: mm,
                aten.bmm.default: bmm,
                aten.addmm.default: addmm,
                aten.baddbmm.default: baddbmm,
                aten.linear.default: linear,
                aten.convolution.default: convolution,
                aten.scaled_dot_product_attention.default: attention,
                aten.cumsum.default: cumsum,
            }
        )
    return table


def _views() -> dict[Any, Callable[..., Any]]:
    """The exporter makes every view a copy (``aten.slice_copy``), which Inductor calls libtorch for: views again."""
    table: dict[Any, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        base, copy, overload = name.partition("_copy")
        if (
            not copy
            or not base.startswith("aten::")
            or overload.endswith("out")
            or overload[:1] not in ("", ".")
        ):
            continue
        view, copied = (getattr(aten, base.removeprefix("aten::") + end, None) for end in ("", copy))
        which = overload.removeprefix(".") or "default"
        if view is not None and copied is not None and hasattr(view, which) and hasattr(copied, which):
            table[getattr(copied, which)] = getattr(view, which)
    # The layout may be another than the exporter saw, where a decomposition above made the tensor.
    table[aten.view_copy.default] = lambda x, size: x.reshape(size)
    return table


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a[…, m, k] @ b[…, k, n] in the dtype of sums."""
    wide = _wide(a.dtype)
    # The last two dimensions are (n, k), so that the sum runs along the innermost one.
    terms = a.to(wide).unsqueeze(-2) * b.to(wide).transpose(-1, -2).unsqueeze(-3)
    return terms.sum(dim=-1, dtype=wide)


def mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b).to(a.dtype)


bmm = mm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = _product(x, weight.t()) if x.dim() > 1 else _product(x.unsqueeze(0), weight.t()).squeeze(0)
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def addmm(base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = _product(a, b)
    if alpha != 1:
        out = out * alpha
    # beta == 0 ignores what base holds, as PyTorch documents.
    if beta != 0:
        out = out + (base if beta == 1 else base * beta)
    return out.to(a.dtype)


baddbmm = addmm


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum under a triangular mask for each element: quadratic in the length."""
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if x.dim() == 0:
        return x.to(dtype)
    wide = _wide(dtype)
    along = x.to(wide).movedim(dim, -1)
    steps = torch.arange(along.shape[-1], device=x.device)
    until = steps.unsqueeze(0) <= steps.unsqueeze(1)
    zero = torch.zeros((), dtype=wide, device=x.device)
    sums = torch.where(until, along.unsqueeze(-2), zero).sum(dim=-1, dtype=wide)
    return sums.movedim(-1, dim).to(dtype)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    wide = _wide(a.dtype)
    return torch.matmul(a.to(wide), b.to(wide))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    product: Callable[[Tensor, Tensor], Tensor] = _product,
) -> Tensor:
    """softmax(query @ key.T * scale + mask) @ value. A row whose mask is all False gives zeros, as PyTorch's
    own kernels do."""
    if dropout_p != 0.0:
        raise ValueError("attention with dropout has no result to compare; export the model in eval mode")
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = product(query, key.transpose(-1, -2)) * scale
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    # Where a row has nothing to attend to, -inf - -inf would be no number.
    greatest = scores.amax(dim=-1, keepdim=True)
    greatest = torch.where(greatest == -math.inf, torch.zeros_like(greatest), greatest)
    weights = torch.exp(scores - greatest)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    return product(weights, value.to(weights.dtype)).to(query.dtype)


def _unless_template(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """``function`` for dtypes that Triton's templates do not take; otherwise the operator stays as it is."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if args[0].dtype in TEMPLATES else function(*args, **kwargs)

    return decomposed


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The first k of the sorted: Inductor sorts short rows by a kernel of its own."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).clone(), indices.narrow(dim, 0, k).clone()


def convolution_for_gpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """By Triton's template, which takes direct convolutions in two and three dimensions without dilation. One of
    single elements is a product, which Inductor would call libtorch for."""
    n = weight.dim() - 2
    direct = not transposed and all(d == 1 for d in dilation) and not any(output_padding)
    if direct and x.dim() == n + 2 and x.dtype in TEMPLATES:
        single = all(k == 1 for k in weight.shape[2:]) and all(s == 1 for s in stride) and not any(padding)
        if single and groups == 1:
            out = torch.matmul(weight.flatten(1), x.flatten(2))
            if bias is not None:
                out = out + bias.unsqueeze(-1)
            return out.reshape(x.shape[0], weight.shape[0], *x.shape[2:])
        if n in (2, 3):
            return NotImplemented
    return convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Windows of the padded input (im2col) times the weight, in one, two or three dimensions."""
    n = weight.dim() - 2
    stride, padding, dilation, output_padding = (
        list(v) * (n if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    unbatched = x.dim() == n + 1
    if unbatched:
        x = x.unsqueeze(0)
    if transposed:
        x, weight, padding_of = _as_direct(x, weight, stride, padding, dilation, output_padding, groups)
        stride = [1] * n
    else:
        padding_of = [(p, p) for p in padding]
    wide = _wide(x.dtype)
    if any(before or after for before, after in padding_of):
        x = aten.constant_pad_nd(x, [p for pair in reversed(padding_of) for p in pair], 0)
    # [batch, channels, *positions, *kernel], views all of them.
    windows = x
    for d in range(n):
        size = dilation[d] * (weight.shape[2 + d] - 1) + 1
        windows = windows.unfold(2 + d, size, stride[d])
    for d in range(n):
        if dilation[d] > 1:
            windows = windows[(slice(None),) * (2 + n + d) + (slice(None, None, dilation[d]),)]
    batch, positions = x.shape[0], windows.shape[2 : 2 + n]
    per_group = x.shape[1] // groups
    windows = windows.reshape(batch, groups, per_group, *positions, *weight.shape[2:])
    # [batch, group, *positions, channel, *kernel] -> [batch, group, positions, channel * kernel]
    windows = windows.permute(0, 1, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    taps = per_group * math.prod(weight.shape[2:])
    columns = windows.reshape(batch, groups, math.prod(positions), taps)
    rows = weight.reshape(groups, weight.shape[0] // groups, taps)
    # [batch, group, out channel, positions]
    out = (columns.to(wide).unsqueeze(2) * rows.to(wide).unsqueeze(2)).sum(dim=-1, dtype=wide)
    out = out.reshape(batch, weight.shape[0], *positions)
    if bias is not None:
        out = out + bias.reshape(1, -1, *[1] * n)
    out = out.to(x.dtype)
    return out.squeeze(0) if unbatched else out


def _as_direct(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """A transposed convolution as a direct one of stride 1: zeros between the inputs, the kernel turned
    round, inputs and outputs of the weight exchanged. Gives input, weight and padding."""
    n = weight.dim() - 2
    for d in range(n):
        if stride[d] > 1:
            # One element and stride - 1 zeros, again and again; the last zeros are cut off.
            length = x.shape[2 + d]
            spread = aten.constant_pad_nd(
                x.unsqueeze(3 + d), [0, 0] * (x.dim() - 3 - d) + [0, stride[d] - 1], 0
            )
            x = spread.flatten(2 + d, 3 + d).narrow(2 + d, 0, (length - 1) * stride[d] + 1)
    kernel = weight.shape[2:]
    weight = weight.flip(list(range(2, 2 + n)))
    weight = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel).transpose(1, 2)
    weight = weight.reshape(-1, weight.shape[2], *kernel)
    around = []
    for d in range(n):
        reach = dilation[d] * (kernel[d] - 1)
        around.append((reach - padding[d], reach - padding[d] + output_padding[d]))
    return x, weight, around
