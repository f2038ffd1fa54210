"""Growing islands: which claimed nodes of a graph become one delegate call. Knows no torch.

Nodes are the numbers 0, 1, …, each after those whose results it takes. An island runs as a whole: it can start when
everything that any of its nodes takes is there. Two groups may therefore join only where no path leads from one
to the other through a third; otherwise each would have to run before the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Grown", "Order", "grow"]


class Order:
    """Which groups of nodes have to run before which. At first each node is a group of its own.

    ``producers[n]`` are the nodes whose results node ``n`` takes, all less than ``n``. Sets of nodes are integers,
    one bit a node; a group is known by its least node.
    """

    def __init__(self, producers: Sequence[Sequence[int]]) -> None:
        n = len(producers)
        self.group = list(range(n))
        self.members: dict[int, int] = {i: 1 << i for i in range(n)}
        self.before = [0] * n
        self.after = [0] * n
        for i, taken in enumerate(producers):
            if any(not 0 <= p < i for p in taken):
                raise ValueError(f"node {i}: expected producers before it, got {list(taken)}")
            for p in taken:
                self.before[i] |= self.before[p] | 1 << p
        for i in reversed(range(n)):
            for p in producers[i]:
                self.after[p] |= self.after[i] | 1 << i

    def copy(self) -> Order:
        """One that may be changed apart from this."""
        other = Order(())
        other.group, other.members = list(self.group), dict(self.members)
        other.before, other.after = list(self.before), list(self.after)
        return other

    def between(self, a: int, b: int) -> int | None:
        """The least node on a path from one of the groups to the other through a third, or None: they may join."""
        a, b = self.group[a], self.group[b]
        path = (self.after[a] & self.before[b]) | (self.after[b] & self.before[a])
        path &= ~(self.members[a] | self.members[b])
        return next(_bits(path), None)

    def join(self, a: int, b: int) -> None:
        """Make one group of two. Raises ValueError where ``between`` has an answer."""
        if self.between(a, b) is not None:
            raise ValueError(f"groups {a} and {b}: expected no path through a third, got one")
        a, b = sorted((self.group[a], self.group[b]))
        if a == b:
            return
        own = self.members[a] | self.members.pop(b)
        self.members[a] = own
        for node in _bits(own):
            self.group[node] = a
        before = self.before[a] = (self.before[a] | self.before[b]) & ~own
        after = self.after[a] = (self.after[a] | self.after[b]) & ~own
        # Whatever came before or after a part comes before or after the whole, and all that lies beyond.
        for other in self.members:
            if after >> other & 1:
                self.before[other] |= before | own
            elif before >> other & 1:
                self.after[other] |= after | own


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True)
class Grown:
    """``islands``: the nodes of each, ascending; islands in the order of their first nodes. ``left`` says for each
    claimed node that is in none why not; ``apart`` for a node why it is not in the island of one whose result
    it takes."""

    islands: tuple[tuple[int, ...], ...]
    left: dict[int, str]
    apart: dict[int, str]


def grow(
    producers: Sequence[Sequence[int]],
    taken: Sequence[Sequence[int]],
    units: Sequence[Sequence[int]],
    *,
    least: int = 1,
    counted: Callable[[int], bool] = lambda node: True,
    merge: bool = True,
    needed: Callable[[int], bool] = lambda node: False,
    name: Callable[[int], str] = str,
) -> Grown:
    """Islands of the claimed ``units``, beside those that others have ``taken``.

    units    groups of nodes that belong together; units that share a node are one
    least    an island of fewer ``counted`` nodes is given up, unless one of its nodes is ``needed``: has nobody else
    merge    join islands that share no edge, too, where no cycle comes of it

    Each unit, in the order of the nodes, joins the islands whose results it takes; then islands join pair by pair,
    the first with the earliest, until no two can. The same graph gives the same islands.
    """
    order = Order(producers)
    for island in taken:
        for node in island[1:]:
            order.join(island[0], node)
    left: dict[int, str] = {}
    heads: list[int] = []
    for unit in _disjoint(units):
        # Of one that cannot be whole nothing is joined: its parts would stand between others.
        whole = order.copy() if len(unit) > 1 else order
        for node in unit[1:]:
            through = whole.between(unit[0], node)
            if through is not None:
                left.update(dict.fromkeys(unit, f"a cycle: {name(through)} stands between its parts"))
                break
            whole.join(unit[0], node)
        else:
            order = whole
            heads.append(unit[0])
    claimed = {order.group[head] for head in heads}
    apart: dict[int, str] = {}
    for node, inputs in enumerate(producers):
        if order.group[node] not in claimed:
            continue
        for producer in inputs:
            if order.group[producer] not in claimed:
                continue
            if order.group[producer] == order.group[node]:
                continue
            through = order.between(producer, node)
            if through is None:
                claimed -= {order.group[producer], order.group[node]}
                order.join(producer, node)
                claimed.add(order.group[node])
            else:
                apart[node] = f"a cycle: {name(through)} stands between it and {name(producer)}"
    joined = merge
    while joined:  # what stood between two islands may have become a part of one of them
        joined = False
        for a in sorted(claimed):
            for b in sorted(claimed):
                if a < b and a in claimed and b in claimed and order.between(a, b) is None:
                    order.join(a, b)
                    claimed.discard(b)
                    joined = True
    islands = []
    for head in sorted(claimed):
        nodes = tuple(_bits(order.members[head]))
        size = sum(map(counted, nodes))
        if size < least and not any(map(needed, nodes)):
            left.update(dict.fromkeys(nodes, f"too small: {size} of at least {least} operators"))
        else:
            islands.append(nodes)
    kept = {node for island in islands for node in island}
    return Grown(tuple(islands), left, {node: why for node, why in apart.items() if node in kept})


def _disjoint(units: Sequence[Sequence[int]]) -> list[list[int]]:
    """The units, ascending, those that share a node made one."""
    found: dict[int, list[int]] = {}
    for unit in units:
        whole = sorted({n for node in unit for n in found.get(node, [node])})
        found.update(dict.fromkeys(whole, whole))
    return sorted({id(unit): unit for unit in found.values()}.values())
