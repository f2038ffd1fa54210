"""The split of a program: which node went to whom, and why. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["KERNELS", "Island", "Split", "SplitNode"]

# Where nodes are that no delegate took.
KERNELS = "kernels"


@dataclass(frozen=True)
class SplitNode:
    """One operator of a method.

    ``delegate`` is who has it, ``kernels`` for the engine's CPU kernels; ``island`` the number of its island among
    those of the method, None for a kernel. ``device`` is where its island's arguments are planned. ``why``: what
    put it there, one sentence for each delegate that did not take it. ``inputs`` are the names of the nodes and arguments whose
    results it takes; ``result`` is its first tensor, ``float32[4, 8]``, and ``nbytes`` the size of all (0 where sizes vary).
    """

    method: str
    name: str
    operator: str
    delegate: str
    island: int | None
    device: str
    why: str
    module: str
    source: str | None
    inputs: tuple[str, ...]
    result: str
    nbytes: int


@dataclass(frozen=True)
class Island:
    """One delegate call of a method: its number, its delegate, and the names of its nodes in order."""

    method: str
    index: int
    delegate: str
    device: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """Every operator of every method, in the order of the graph. Printed, it is a table, with the ``notes`` below it: what
    was asked for and had no effect."""

    nodes: tuple[SplitNode, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[SplitNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.method for node in self.nodes))

    @property
    def islands(self) -> tuple[Island, ...]:
        """Every island, method after method, in the order of their first nodes."""
        found: dict[tuple[str, int], list[SplitNode]] = {}
        for node in self.nodes:
            if node.island is not None:
                found.setdefault((node.method, node.island), []).append(node)
        return tuple(
            Island(method, index, nodes[0].delegate, nodes[0].device, tuple(n.name for n in nodes))
            for (method, index), nodes in found.items()
        )

    def __getitem__(self, name: str) -> SplitNode:
        """The node called ``name``, of the first method that has one. Raises KeyError."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def __str__(self) -> str:
        rows = [("node", "operator", "delegate", "island", "why")]
        for node in self.nodes:
            name = node.name if len(self.methods) < 2 else f"{node.method}: {node.name}"
            island = "" if node.island is None else str(node.island)
            rows.append((name, node.operator, node.delegate, island, node.why))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
            for row in rows
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
