"""Turns: each test is in one of them, and the first has what its marks promise."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from tests.turns import TURNS, cover, of_turn, pairs, spread


def items_of(name, mark=None, **values):
    """The cases of a test, as pytest collects them."""
    return [
        SimpleNamespace(
            nodeid=f"{name}[{'-'.join(map(str, case))}]",
            callspec=SimpleNamespace(params=dict(zip(values, case, strict=True))),
            get_closest_marker=lambda _: mark and mark.mark,
        )
        for case in product(*values.values())
    ]


sampled = pytest.mark.sampled
PLAIN = items_of("plain", x=range(5))
NONE = items_of("none", sampled(0), x=range(20))
TWO = items_of("two", sampled(2), x=range(20))
PAIRS = items_of("pairs", sampled, x=range(4), y="abc", z=(True, False))
FACTS = items_of("facts", sampled(by=lambda x: {x % 3}, cost=lambda x: 10 - x), x=range(9))
ALL = [*PLAIN, *NONE, *TWO, *PAIRS, *FACTS]


def test_each_test_is_in_one_turn():
    turns = [of_turn(ALL, k + 1) for k in range(TURNS)]
    assert sorted(i.nodeid for turn in turns for i in turn) == sorted(i.nodeid for i in ALL)
    assert max(map(len, turns[1:])) - min(map(len, turns[1:])) <= 1
    assert all(turn == [i for i in ALL if i in turn] for turn in turns)  # in the order of the files


def test_the_first_turn_has_what_the_marks_say():
    first = of_turn(ALL, 1)
    assert [i for i in first if i in PLAIN] == PLAIN
    assert [i for i in first if i in NONE] == []
    assert [i.callspec.params["x"] for i in first if i in TWO] == [0, 10]
    assert [i.callspec.params["x"] for i in first if i in FACTS] == [6, 7, 8]
    found = [i.callspec.params for i in first if i in PAIRS]
    for a, b in combinations("xyz", 2):
        assert len({(p[a], p[b]) for p in found}) == len({(p[a], p[b]) for p in (i.callspec.params for i in PAIRS)})
    assert len(found) < len(PAIRS)


def test_marks_of_single_cases_make_families_of_their_own():
    some = [*items_of("x", sampled(1), n=range(3)), *items_of("x", sampled(0), n=range(3, 6)), *items_of("x", n=[6])]
    assert [i.callspec.params["n"] for i in of_turn(some, 1)] == [0, 6]


def test_pairs():
    assert pairs(x=1) == {(("x", "1"),)}
    assert pairs(x=1, y=2) == {(("x", "1"), ("y", "2"))}
    assert len(pairs(x=1, y=2, z=3)) == 3


def test_cover_takes_what_adds_most_for_its_cost():
    assert cover(["ab", "abc", "d", "cd"], set) == ["abc", "d"]
    assert cover(["ab", "abc", "d", "cd"], set, lambda c: 9 if c == "abc" else 1) == ["ab", "cd"]


def test_spread():
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 3) == [0, 1]
    assert spread(range(3), 0) == []
