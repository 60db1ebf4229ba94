"""Values of the same labels taken as one, against enumeration."""

import itertools

import numpy as np
import pytest

from shardc.solver import FORBIDDEN, coarse, minimize
from shardc.solver.coarse import Coarse
from shardc.solver.search import CLOSE, SETTLED, Search
from shardc.solver.solve import relative_gap
from tests.solver.problems import cost_of, minimum, random_problem, shapes

SEEDS = range(40)


def labelled(shape: str, seed: int, forbidden: float):
    """A problem, and labels of one or two columns by which some of its values are told apart."""
    unary, pairwise = random_problem(shape, seed, forbidden, most=6)
    rng = np.random.default_rng(seed)
    columns = int(rng.integers(1, 3))
    return unary, pairwise, [rng.integers(0, 2, (u.size, columns)) for u in unary]


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", shapes)
def test_a_coarse_value_costs_what_the_cheapest_does_that_it_stands_for(shape, forbidden):
    for seed in SEEDS:
        unary, pairwise, labels = labelled(shape, seed, forbidden)
        small = Coarse.of(unary, pairwise, labels)
        chosen = [int(np.random.default_rng(seed).integers(u.size)) for u in small.unary]
        some = [np.flatnonzero(m) for m in small.members(chosen)]
        for u, of, v, k in zip(unary, labels, some, range(len(unary)), strict=True):
            assert v.size and (of[v] == small.labels[k][chosen[k]]).all()
            assert (of == small.labels[k][chosen[k]]).all(1).sum() == v.size
            assert small.unary[k][chosen[k]] == u[v].min()
        for (i, j), table in pairwise.items():
            assert small.pairwise[i, j][chosen[i], chosen[j]] == table[np.ix_(some[i], some[j])].min()


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", shapes)
def test_what_a_coarse_problem_begins_is_as_good_as_it_is_said_to_be(shape, forbidden, monkeypatch):
    monkeypatch.setattr(coarse, "LARGE", -1)
    exact = 0
    for seed in SEEDS:
        unary, pairwise, labels = labelled(shape, seed, forbidden)
        least = minimum(unary, pairwise)
        found = minimize(unary, pairwise, labels=labels)
        if least >= FORBIDDEN:
            assert not found.cost < FORBIDDEN
            continue
        assert found.cost == cost_of(unary, pairwise, found.values)
        assert found.bound <= least <= found.cost
        assert relative_gap(found.cost, found.bound) <= 2 * SETTLED
        exact += found.exact
    assert exact


def test_what_the_coarse_problem_settles_is_not_searched_again(monkeypatch):
    """Two orders of each value that cost the same: what is best among them is best of all."""
    monkeypatch.setattr(coarse, "LARGE", -1)
    rng = np.random.default_rng(0)
    unary = [rng.integers(1, 30, 4).astype(float).repeat(2) for _ in range(6)]
    pairwise = {
        p: rng.integers(0, 30, (4, 4)).astype(float).repeat(2, 0).repeat(2, 1)
        for p in itertools.combinations(range(6), 2)
    }
    labels = [np.arange(4).repeat(2)[:, None] for _ in unary]
    sizes: list[int] = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: sizes.append(sum(u.size for u in self.problem.own)) or run(self))
    found = minimize(unary, pairwise, labels=labels)
    assert sizes == [24, 12]  # the coarse problem, and what its best assignment stands for
    assert found.gap <= CLOSE
    assert found.cost == minimum([u[::2] for u in unary], {p: t[::2, ::2] for p, t in pairwise.items()})
