"""Which block sizes a matrix product gets, where no GPU is there to time them.

Inductor's templates come with some twenty shapes of a block, made for large products; ``SMALL`` are ours. A simple model of
the work takes one: blocks are computed by all multiprocessors at once, in waves; a wave takes as long as one block; a
block's time is its products and the elements it loads, in whole steps along the sum, and what each step costs in itself.

On an H200 its choice among 23 shapes took at most 1.12 times as long as the fastest of them in float32, and 1.31 times in
float16, over 13 products from [4, 64, 64] by [4, 64, 64] to [2048, 1024] by [1024, 1024] (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SMALL", "SMALL_CONVOLUTION", "Block", "Product", "best"]

# What loading an element of a row or column costs, in products. Of no GPU in particular: it keeps blocks square.
LOAD = 32
# What a step along the sum costs, in products: mostly waiting for what it loads.
STEP = 4000
# Elements of a block that one thread may accumulate before its registers overflow.
PER_THREAD = {2: 128, 4: 64, 8: 32}
# How much of the time for loads is hidden by steps that are loaded ahead.
AHEAD = {1: 1.4, 2: 1.15}


@dataclass(frozen=True)
class Product:
    """``batch`` products of [m, k] by [k, n]; ``itemsize`` of an operand's element in bytes."""

    batch: int
    m: int
    n: int
    k: int
    itemsize: int


@dataclass(frozen=True)
class Block:
    """``m`` by ``n`` results, ``k`` steps of the sum at a time, ``stages`` of these in shared memory."""

    m: int
    n: int
    k: int
    stages: int
    warps: int


SMALL = (
    Block(16, 16, 64, 3, 2),
    Block(16, 32, 64, 3, 2),
    Block(32, 16, 64, 3, 2),
    Block(64, 16, 64, 3, 4),
    Block(16, 64, 64, 3, 4),
    Block(32, 64, 64, 2, 4),
    Block(64, 32, 64, 3, 4),
)
"""Where a product has few results, blocks as small as these keep more multiprocessors busy."""
SMALL_CONVOLUTION = (
    *(Block(m, n, 32, 3, 2) for m, n in ((16, 16), (16, 32), (32, 16))),
    *SMALL,
)
"""The same for convolutions, whose steps are channels at one place of the filter."""


def best(product: Product, blocks: Sequence[Block], *, sms: int, block_nbytes: int) -> int:
    """The index of the block with the least estimated time, the first of equal ones. Those that do not fit a
    multiprocessor (``block_nbytes`` of shared memory, and its registers) are taken only if none does."""
    fitting = [i for i, b in enumerate(blocks) if _fits(b, product.itemsize, block_nbytes)]
    return min(fitting or range(len(blocks)), key=lambda i: _time(product, blocks[i], sms))


def _fits(block: Block, itemsize: int, block_nbytes: int) -> bool:
    loaded = block.stages * (block.m + block.n) * block.k * itemsize
    kept = block.m * block.n / (32 * block.warps)
    return loaded <= block_nbytes and kept <= PER_THREAD.get(itemsize, 32)


def _time(product: Product, block: Block, sms: int) -> float:
    blocks = product.batch * math.ceil(product.m / block.m) * math.ceil(product.n / block.n)
    steps = math.ceil(max(product.k, 1) / block.k)
    ahead = AHEAD.get(block.stages, 1.0)
    step = STEP + block.k * (block.m * block.n + ahead * LOAD * (block.m + block.n))
    return math.ceil(blocks / sms) * steps * step
