"""Which block sizes a matrix product gets, where no GPU is there to time them.

Inductor's templates come with some twenty shapes of a block. A simple model of the work takes one: blocks are computed
by all multiprocessors at once, in waves; a wave takes as long as one block; a block's time is its products and the
elements it loads, whole steps of them along the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Block", "Product", "best"]

# What loading an element of a row or column costs, in products. Of no GPU in particular: it keeps blocks square.
LOAD = 32
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
    steps = math.ceil(max(product.k, 1) / block.k) * block.k
    ahead = AHEAD.get(block.stages, 1.0)
    return math.ceil(blocks / sms) * steps * (block.m * block.n + ahead * LOAD * (block.m + block.n))
