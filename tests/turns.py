"""Turns: the parts in which the tests run.

Turn 1 is what `make test` runs: every test, but of a test that is marked `sampled` only some cases. The other turns
share what is left. Without `--turn` all tests run.

    @pytest.mark.sampled            cases that cover each pair of parameters that stand together in some case
    @pytest.mark.sampled(by=facts)  cases that cover all `facts(**parameters)`, a set for each; cheap ones by `cost=`
    @pytest.mark.sampled(3)         three cases, evenly spread
    @pytest.mark.sampled(0)         none
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

TURNS = 8
"""Turn 1, and those that share the rest."""
T = TypeVar("T")


def pairs(**values: object) -> set[Hashable]:
    """Each two of these values by name, or the one that there is."""
    named = [(name, repr(value)) for name, value in values.items()]
    return set(combinations(named, min(2, len(named))))


def cover(cases: Sequence[T], facts: Callable[[T], set], cost: Callable[[T], float] = lambda _: 1.0) -> list[T]:
    """A few cases that have all facts that any case has: one after the other that which adds most for its cost."""
    all_facts = [facts(c) for c in cases]
    missing, found = set().union(*all_facts), list[T]()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(all_facts[i] & missing) / cost(cases[i]))
        found.append(cases[best])
        missing -= all_facts[best]
    return found


def spread(cases: Sequence[T], n: int) -> list[T]:
    """At most `n` of the cases, evenly spread."""
    n = min(n, len(cases))
    return [cases[i * len(cases) // n] for i in range(n)]


def parameters(item: pytest.Item) -> dict[str, object]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def _sample(items: Sequence[pytest.Item], mark: pytest.Mark) -> list[pytest.Item]:
    if mark.args:
        return spread(items, *mark.args)
    values = {id(item): parameters(item) for item in items}
    by, cost = mark.kwargs.get("by"), mark.kwargs.get("cost", lambda **_: 1.0)
    return cover(
        items,
        lambda item: set(by(**values[id(item)])) if by else pairs(**values[id(item)]),
        lambda item: cost(**values[id(item)]),
    )


def first_turn(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of turn 1, as they stand."""
    kept, families = set[int](), dict[Hashable, tuple[pytest.Mark, list[pytest.Item]]]()
    for item in (items := list(items)):
        mark = item.get_closest_marker("sampled")
        if mark is None:
            kept.add(id(item))
        else:
            test = item.nodeid.partition("[")[0], repr(mark.args)
            families.setdefault(test, (mark, []))[1].append(item)
    for mark, cases in families.values():
        kept.update(map(id, _sample(cases, mark)))
    return [i for i in items if id(i) in kept]


def of_turn(items: Iterable[pytest.Item], turn: int) -> list[pytest.Item]:
    """The tests of a turn, counted from 1."""
    items = list(items)
    first = first_turn(items)
    if turn == 1:
        return first
    known = set(map(id, first))
    return [i for i in items if id(i) not in known][turn - 2 :: TURNS - 1]
