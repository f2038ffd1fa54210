"""Growing islands: no cycles, stable, nothing lost; on random graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.export.islands import Grown, Order, grow


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """The producers of each node, and units of nodes that belong together, in any order."""
    n = draw(st.integers(1, 18))
    producers = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(n)]
    claimed = draw(st.lists(st.integers(0, n - 1), unique=True))
    units = [[i] for i in claimed]
    for _ in range(draw(st.integers(0, 2))):
        if len(claimed) > 1:
            units.append(draw(st.lists(st.sampled_from(claimed), min_size=2, max_size=3, unique=True)))
    return producers, units


def has_cycle(producers: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> bool:
    """Whether some group has to run before itself, by trying: run what can, until nothing can."""
    owner = {node: number for number, nodes in enumerate(groups) for node in nodes}
    units: dict[object, list[int]] = {}
    for node in range(len(producers)):
        units.setdefault(("island", owner[node]) if node in owner else node, []).append(node)
    done: set[int] = set()
    waiting = list(units.values())
    while waiting:
        ready = [u for u in waiting if all(p in done or p in u for n in u for p in producers[n])]
        if not ready:
            return True
        done.update(n for u in ready for n in u)
        waiting = [u for u in waiting if u not in ready]
    return False


@given(graphs(), st.integers(1, 4), st.booleans())
def test_islands_have_no_cycle_and_nothing_is_lost(
    graph: tuple[list[list[int]], list[list[int]]], least: int, merge: bool
) -> None:
    """EX1: every claimed node is in one island or has a reason; units stay whole; small ones are given up."""
    producers, units = graph
    grown = grow(producers, [], units, least=least, merge=merge)
    assert not has_cycle(producers, grown.islands)
    inside = [node for island in grown.islands for node in island]
    claimed = {node for unit in units for node in unit}
    assert len(inside) == len(set(inside)) and set(inside) | set(grown.left) == claimed
    assert not set(inside) & set(grown.left) and all(grown.left.values())
    assert all(len(island) >= least for island in grown.islands)
    for unit in units:
        assert (
            len({next((i for i, island in enumerate(grown.islands) if n in island), None) for n in unit}) == 1
        )


@given(graphs())
def test_the_order_of_claims_does_not_matter(graph: tuple[list[list[int]], list[list[int]]]) -> None:
    """EX1: the same graph gives the same islands."""
    producers, units = graph
    assert grow(producers, [], units) == grow(producers, [], [u[::-1] for u in units[::-1]])


@given(graphs())
def test_islands_that_could_be_one_are(graph: tuple[list[list[int]], list[list[int]]]) -> None:
    """EX1: merged, no two islands are left that a cycle does not keep apart."""
    producers, units = graph
    islands = grow(producers, [], units).islands
    for a in range(len(islands)):
        for b in range(a):
            joined = [i for k, i in enumerate(islands) if k not in (a, b)] + [islands[a] + islands[b]]
            assert has_cycle(producers, joined)


@given(graphs(), st.data())
def test_delegates_one_after_the_other_make_no_cycle(
    graph: tuple[list[list[int]], list[list[int]]], data: st.DataObject
) -> None:
    """EX1: the second delegate grows islands around those of the first."""
    producers, units = graph
    flat = sorted({n for u in units for n in u})
    first = data.draw(st.sets(st.sampled_from(flat))) if flat else set()
    one = grow(producers, [], [[n] for n in first]).islands
    taken = {n for island in one for n in island}
    two = grow(producers, one, [[n] for n in flat if n not in taken]).islands
    assert not has_cycle(producers, [*one, *two])


def test_a_cycle_is_named() -> None:
    """EX5: relu, cos by another, add of both: two islands, and the second says what is between."""
    grown = grow([[], [0], [0, 1]], [], [[0], [2]], name="abc".__getitem__)
    assert grown == Grown(((0,), (2,)), {}, {2: "a cycle: b stands between it and a"})
    whole = grow([[], [0], [0, 1]], [], [[0, 2]], name="abc".__getitem__)
    assert whole.islands == () and whole.left == dict.fromkeys((0, 2), "a cycle: b stands between its parts")


def test_an_island_with_an_operator_that_has_nobody_else_stays() -> None:
    """EX1, EX6: too small for its delegate, and needed."""
    few = grow([[], [0]], [], [[0]], least=2)
    assert few.islands == () and few.left == {0: "too small: 1 of at least 2 operators"}
    assert grow([[], [0]], [], [[0]], least=2, needed=lambda node: node == 0).islands == ((0,),)
    assert grow([[], [0]], [], [[0, 1]], least=2, counted=lambda node: node == 0).islands == ()


def test_producers_come_first() -> None:
    with pytest.raises(ValueError, match="producers before it"):
        Order([[1], []])
    with pytest.raises(ValueError, match="no path through a third"):
        Order([[], [0], [1]]).join(0, 2)


def test_two_thousand_operators_are_split() -> None:
    """EX1: a graph as large as a big model's."""
    n = 2000
    producers = [[] if i == 0 else sorted({i - 1, max(0, i - 7)}) for i in range(n)]
    grown = grow(producers, [], [[i] for i in range(n) if i % 5])
    assert sum(map(len, grown.islands)) == n - n // 5 and not has_cycle(producers, grown.islands)
