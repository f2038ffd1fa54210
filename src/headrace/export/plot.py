"""A split as a picture: SVG that any browser shows. Imports no torch.

Islands are boxes in the colour of their delegate, operators stand in them in the order in which they can run; CPU
kernels that follow each other share a grey box. Lines are tensors; a red, dashed one goes to another device, with
what is copied. Each operator has a tooltip with its line in the user's source and why it is where it is.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from .islands import grow
from .split import KERNELS, Split, SplitNode

__all__ = ["svg"]

# An island of more operators than this is drawn as a field of squares, so many in a row: in a method of at most
# SMALL operators, and in a larger one.
DETAIL, DETAIL_OF_LARGE, SMALL, ACROSS = 60, 12, 300, 48
# Pixels.
CHARACTER, LINE, PAD, GAP, SQUARE = 6.3, 18, 10, 34, 11
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
STYLE = """
  text { font: 11px ui-monospace, monospace; fill: #222 } .title { font-weight: bold; font-size: 12px }
  .edge { fill: none; stroke: #9aa0a6; stroke-width: 1 } .cross { fill: none; stroke: #d62728; stroke-width: 1.8;
  stroke-dasharray: 5 3 } .label { fill: #d62728; font-size: 10px }
  .box { stroke-width: 1.5 } .op { stroke: #fff; stroke-width: 1 }
"""


@dataclass
class _Box:
    """One island, or CPU kernels that follow each other, or an input of the method."""

    title: str
    colour: str
    device: str
    nodes: list[SplitNode]
    most: int = DETAIL
    layers: list[list[SplitNode]] = field(default_factory=list)
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    @property
    def detailed(self) -> bool:
        return len(self.nodes) <= self.most


def svg(split: Split) -> str:
    """The picture, method under method."""
    delegates = sorted({n.delegate for n in split} - {KERNELS}, key=str)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(delegates)}
    parts: list[str] = []
    y, width = 54.0, 640.0
    for method in split.methods:
        drawn, right, below = _method([n for n in split if n.method == method], colours, y + 22)
        parts.append(f'<text class="title" x="{PAD}" y="{y + 8:.0f}">{escape(method)}</text>')
        parts += drawn
        y, width = below + 30, max(width, right + PAD)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
            f'viewBox="0 0 {width:.0f} {y:.0f}">',
            f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
            *_legend(colours),
            *parts,
            "</svg>\n",
        ]
    )


def _legend(colours: dict[str, str]) -> list[str]:
    parts, x = [], float(PAD)
    for name, colour in [*colours.items(), ("CPU kernels", "#8a8f94")]:
        parts.append(f'<rect x="{x:.0f}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="20">{escape(name)}</text>')
        x += 34 + len(name) * CHARACTER
    parts.append(f'<path class="cross" d="M{x:.0f},16 h26"/>')
    parts.append(f'<text x="{x + 32:.0f}" y="20">to another device</text>')
    return parts


def _method(
    nodes: Sequence[SplitNode], colours: dict[str, str], top: float
) -> tuple[list[str], float, float]:
    """What is drawn, its right edge and its lower edge."""
    index = {n.name: i for i, n in enumerate(nodes)}
    producers = _ordered([[index[p] for p in n.inputs if p in index] for n in nodes])
    boxes: list[_Box] = []
    of: dict[str, _Box] = {}
    groups: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.island is not None:
            groups.setdefault(node.island, []).append(i)
    kernels = [i for i, n in enumerate(nodes) if n.island is None]
    # Kernels that can stand together do, as islands of their own would.
    rank = {old: new for new, old in enumerate(producers[1])}
    grown = grow(
        [[rank[p] for p in producers[0][old]] for old in producers[1]],
        [tuple(sorted(rank[i] for i in island)) for island in groups.values()],
        [[rank[i]] for i in kernels],
        merge=False,
    )
    for number, island in groups.items():
        first = nodes[island[0]]
        title = f"{number} · {first.delegate} · {first.device} · {_count(nodes, island)}"
        boxes.append(_Box(title, colours[first.delegate], first.device, [nodes[i] for i in island]))
    for run in grown.islands:
        own = [producers[1][i] for i in run]
        boxes.append(_Box(f"CPU kernels · {_count(nodes, own)}", "#8a8f94", "cpu", [nodes[i] for i in own]))
    for box in boxes:
        box.most = DETAIL if len(nodes) <= SMALL else DETAIL_OF_LARGE
        of.update({n.name: box for n in box.nodes})
    for name in dict.fromkeys(p for n in nodes for p in n.inputs if p not in of):
        of[name] = _Box(name, "#5f6368", "cpu", [])
        boxes.append(of[name])
    edges = _edges(nodes, of)
    for box in boxes:
        _size(box)
    right, below = _place(boxes, edges, top)
    place = {n.name: spot for box in boxes for n, spot in _spots(box)}
    return [*_drawn_edges(nodes, edges, of, place), *(s for box in boxes for s in _drawn(box))], right, below


def _ordered(producers: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The producers as they are, and an order in which each node comes after its own."""
    done: set[int] = set()
    order: list[int] = []
    waiting = list(range(len(producers)))
    while waiting:
        ready = [i for i in waiting if all(p in done or p == i for p in producers[i])] or waiting[:1]
        done.update(ready)
        order += ready
        waiting = [i for i in waiting if i not in done]
    return producers, order


def _count(nodes: Sequence[SplitNode], which: Sequence[int]) -> str:
    count = sum(nodes[i].operator != "getitem" for i in which)
    return f"{count} operator{'s' if count != 1 else ''}"


def _edges(
    nodes: Sequence[SplitNode], of: dict[str, _Box]
) -> dict[tuple[int, int], list[tuple[str, SplitNode]]]:
    """(from, to) of boxes, by identity: the values between them and one that takes each."""
    found: dict[tuple[int, int], list[tuple[str, SplitNode]]] = {}
    for node in nodes:
        for producer in node.inputs:
            a, b = of[producer], of[node.name]
            if a is not b:
                found.setdefault((id(a), id(b)), []).append((producer, node))
    return found


def _label(node: SplitNode) -> str:
    return node.operator.removeprefix("aten.").removesuffix(".default")


def _size(box: _Box) -> None:
    titled = len(box.title) * 7.4 + 2 * PAD
    if not box.nodes:
        box.width, box.height = titled, LINE + 4
        return
    if not box.detailed:
        rows = -(-len(box.nodes) // ACROSS)
        box.width = max(titled, min(len(box.nodes), ACROSS) * SQUARE + 2 * PAD)
        box.height = LINE + rows * SQUARE + 2 * PAD + LINE
        return
    depth: dict[str, int] = {}
    for node in box.nodes:
        depth[node.name] = max((depth[p] + 1 for p in node.inputs if p in depth), default=0)
        while len(box.layers) <= depth[node.name]:
            box.layers.append([])
        box.layers[depth[node.name]].append(node)
    widest = max(sum(_width(n) + PAD for n in layer) for layer in box.layers)
    box.width = max(titled, widest + PAD)
    box.height = LINE + PAD + len(box.layers) * (LINE + 12)


def _width(node: SplitNode) -> float:
    return len(_label(node)) * CHARACTER + 12


def _place(
    boxes: list[_Box], edges: dict[tuple[int, int], list[tuple[str, SplitNode]]], top: float
) -> tuple[float, float]:
    """Rows by the longest way from an input, in each row by where the boxes before stand. Right and lower edge."""
    before: dict[int, list[_Box]] = {id(b): [] for b in boxes}
    known = {id(b): b for b in boxes}
    for a, b in edges:
        before[b].append(known[a])
    depth: dict[int, int] = {}
    pending = list(boxes)
    while pending:
        ready = [b for b in pending if all(id(p) in depth for p in before[id(b)])] or pending[:1]
        for box in ready:
            depth[id(box)] = max((depth.get(id(p), -1) + 1 for p in before[id(box)]), default=0)
        pending = [b for b in pending if id(b) not in depth]
    rows: dict[int, list[_Box]] = {}
    for box in boxes:
        rows.setdefault(depth[id(box)], []).append(box)
    y, right = top, 0.0
    for _, row in sorted(rows.items()):
        centre = {
            id(b): sum(p.x + p.width / 2 for p in before[id(b)]) / len(before[id(b)])
            if before[id(b)]
            else 0.0
            for b in row
        }
        x = float(PAD)
        for box in sorted(row, key=lambda b: centre[id(b)]):
            box.x, box.y = max(x, min(centre[id(box)] - box.width / 2, x + 240)), y
            x = box.x + box.width + GAP
            right = max(right, box.x + box.width)
        y += max(b.height for b in row) + GAP
    return right, y


def _spots(box: _Box) -> list[tuple[SplitNode, tuple[float, float, float]]]:
    """Each operator with the middle of its upper edge, and its width."""
    found = []
    if not box.detailed:
        for i, node in enumerate(box.nodes):
            x = box.x + PAD + (i % ACROSS) * SQUARE + SQUARE / 2
            found.append((node, (x, box.y + LINE + PAD + (i // ACROSS) * SQUARE, SQUARE - 2.0)))
        return found
    for row, layer in enumerate(box.layers):
        x = box.x + (box.width - sum(_width(n) + PAD for n in layer) + PAD) / 2
        for node in layer:
            found.append((node, (x + _width(node) / 2, box.y + LINE + PAD + row * (LINE + 12), _width(node))))
            x += _width(node) + PAD
    return found


def _drawn(box: _Box) -> list[str]:
    where = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    parts = [
        f'<rect class="box" {where} rx="6" fill="{box.colour}" fill-opacity="0.13" stroke="{box.colour}"/>'
    ]
    parts.append(f'<text class="title" x="{box.x + PAD:.1f}" y="{box.y + 15:.1f}">{escape(box.title)}</text>')
    for node, (x, y, width) in _spots(box):
        height = LINE if box.detailed else SQUARE - 2
        tip = escape(
            f"{node.name}: {node.operator} → {node.result}\n{node.module}\n{node.source or ''}\n{node.why}"
        )
        parts.append(
            f'<g><title>{tip}</title><rect class="op" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height}" rx="3" fill="{_shade(box, node)}" fill-opacity="{0.3 if box.detailed else 0.75}"/>'
        )
        if box.detailed:
            parts.append(
                f'<text x="{x:.1f}" y="{y + 13:.1f}" text-anchor="middle">{escape(_label(node))}</text>'
            )
        parts.append("</g>")
    if box.nodes and not box.detailed:
        common = Counter(_label(n) for n in box.nodes if n.operator != "getitem").most_common(5)
        said = ", ".join(f"{count} {name}" for name, count in common)
        parts.append(f'<text x="{box.x + PAD:.1f}" y="{box.y + box.height - 8:.1f}">{escape(said)}</text>')
    return parts


def _shade(box: _Box, node: SplitNode) -> str:
    """In a field of squares, the same operator has the same shade."""
    if box.detailed:
        return box.colour
    light = 0.55 + hashlib.sha256(node.operator.encode()).digest()[0] / 255 * 0.45
    return "#" + "".join(f"{int(int(box.colour[i : i + 2], 16) * light):02x}" for i in (1, 3, 5))


def _drawn_edges(
    nodes: Sequence[SplitNode],
    edges: dict[tuple[int, int], list[tuple[str, SplitNode]]],
    of: dict[str, _Box],
    place: dict[str, tuple[float, float, float]],
) -> list[str]:
    by_name = {n.name: n for n in nodes}
    parts = []
    for node in nodes:
        box = of[node.name]
        for producer in node.inputs:
            if of[producer] is box and box.detailed:
                (ax, ay, _), (bx, by, _) = place[producer], place[node.name]
                parts.append(_curve("edge", ax, ay + LINE, bx, by, f"{producer} → {node.name}"))
    for values in edges.values():
        # A value that several operators of a box take is one line.
        for producer, node in dict(reversed(values)).items():
            a, b = of[producer], of[node.name]
            made = by_name.get(producer)
            ax, ay = a.x + a.width / 2, a.y + a.height
            if a.nodes and a.detailed:
                ax, ay = place[producer][0], place[producer][1] + LINE
            bx, by = (place[node.name][0], place[node.name][1]) if b.detailed else (b.x + b.width / 2, b.y)
            crosses = a.device != b.device
            what = f"{producer}{f': {made.result}' if made else ''}"
            parts.append(
                _curve("cross" if crosses else "edge", ax, ay, bx, by, f"{what}, {a.device} → {b.device}")
            )
            if crosses and made and made.result:
                # In the gap above the box that it goes to.
                parts.append(
                    f'<text class="label" x="{(ax + 3 * bx) / 4:.1f}" y="{b.y - 8:.1f}" text-anchor="middle">'
                    f"{escape(made.result)}</text>"
                )
    return parts


def _curve(kind: str, ax: float, ay: float, bx: float, by: float, tip: str) -> str:
    bend = max(12.0, abs(by - ay) / 2)
    path = f"M{ax:.1f},{ay:.1f} C{ax:.1f},{ay + bend:.1f} {bx:.1f},{by - bend:.1f} {bx:.1f},{by:.1f}"
    return f'<path class="{kind}" d="{path}"><title>{escape(tip)}</title></path>'
