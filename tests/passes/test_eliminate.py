"""Elimination against enumeration, within and beyond its table limit."""

import itertools

import numpy as np
import pytest

from shardc.passes import eliminate
from shardc.passes.eliminate import FORBIDDEN, elimination_order, minimize


def random_problem(rng, most=6, density=0.7):
    sizes = rng.integers(1, 4, rng.integers(1, most + 1))
    unary = [rng.integers(0, 10, n).astype(float) for n in sizes]
    pairs = [p for p in itertools.combinations(range(len(sizes)), 2) if rng.random() < density]
    return unary, {(i, j): rng.integers(0, 10, (sizes[i], sizes[j])).astype(float) for i, j in pairs}


def cost_of(unary, pairwise, values):
    alone = sum(u[v] for u, v in zip(unary, values, strict=True))
    return alone + sum(t[values[i], values[j]] for (i, j), t in pairwise.items())


def least(unary, pairwise):
    return min(cost_of(unary, pairwise, v) for v in itertools.product(*(range(len(u)) for u in unary)))


@pytest.mark.parametrize("seed", range(100))
def test_the_minimum_is_found_and_proved(seed):
    unary, pairwise = random_problem(np.random.default_rng(seed))
    found = minimize(unary, pairwise)
    assert found.exact
    assert found.cost == cost_of(unary, pairwise, found.values) == least(unary, pairwise)


@pytest.mark.parametrize("limit", [4, 9, 27])
def test_beyond_the_limit_the_bound_holds_and_the_cost_is_true(monkeypatch, limit):
    monkeypatch.setattr(eliminate, "TABLE_LIMIT", limit)
    proved = 0
    for seed in range(100):
        unary, pairwise = random_problem(np.random.default_rng(seed), density=0.9)
        found, best = minimize(unary, pairwise), least(unary, pairwise)
        assert found.bound <= best <= found.cost == cost_of(unary, pairwise, found.values)
        assert not found.exact or found.cost == best
        proved += found.exact
    assert proved > 50


def test_a_start_is_not_made_worse(monkeypatch):
    monkeypatch.setattr(eliminate, "TABLE_LIMIT", 4)
    for seed in range(50):
        unary, pairwise = random_problem(np.random.default_rng(seed), density=1.0)
        best = min(
            itertools.product(*(range(len(u)) for u in unary)), key=lambda v: cost_of(unary, pairwise, v)
        )
        assert minimize(unary, pairwise, best).cost == least(unary, pairwise)


def test_what_is_forbidden_is_not_chosen():
    unary = [np.array([0.0, 2 * FORBIDDEN, 5.0]), np.array([1.0, 0.0])]
    pairwise = {(0, 1): np.array([[9.0, 9.0], [0.0, 0.0], [1.0, 2.0]])}
    assert minimize(unary, pairwise).values == [2, 1]


def test_the_order_takes_leaves_first():
    star = [(0, i) for i in range(1, 40)]
    assert elimination_order(40, star)[-2:] in ([0, 39], [39, 0])
