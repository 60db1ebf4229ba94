"""Values of the same labels taken as one, against enumeration."""

import itertools

import numpy as np
import pytest

from shardc.solver import FORBIDDEN, ROUNDING, SETTLED, SolverOptions, minimize, relative_gap
from shardc.solver.coarsen import LARGE, WIDE, Coarse, is_large
from shardc.solver.search import Search
from tests.solver.problems import cost_of, minimum, random_problem, shapes

SEEDS = range(40)
FIRST = SolverOptions(coarse=True)


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
def test_what_a_coarse_problem_begins_is_as_good_as_it_is_said_to_be(shape, forbidden):
    exact = 0
    for seed in SEEDS:
        unary, pairwise, labels = labelled(shape, seed, forbidden)
        least = minimum(unary, pairwise)
        found = minimize(unary, pairwise, labels=labels, options=FIRST)
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
    found = minimize(unary, pairwise, labels=labels, options=FIRST)
    assert sizes == [24, 12]  # the coarse problem, and what its best assignment stands for
    assert found.gap <= ROUNDING
    assert found.cost == minimum([u[::2] for u in unary], {p: t[::2, ::2] for p, t in pairwise.items()})


def test_where_the_coarse_problem_takes_all_work_nothing_is_searched_again(monkeypatch):
    """What it found is the result then, and its bound."""
    options = SolverOptions(1.0, coarse=True, at_once=0)
    searched = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: searched.append(self.labels) or run(self))
    open_gaps = 0
    for seed in SEEDS:
        unary, pairwise, labels = labelled("dense", seed, 0.0)
        least = minimum(unary, pairwise)
        searched.clear()
        found = minimize(unary, pairwise, labels=labels, options=options)
        assert found.bound <= least <= found.cost == cost_of(unary, pairwise, found.values)
        assert searched and not any(of is labels for of in searched)  # those of the whole problem
        open_gaps += found.gap > SETTLED
    assert open_gaps


def test_tables_are_large_by_all_of_them_and_by_each():
    """Repeated layers share theirs, but are work all the same; many small ones are those of two axes."""
    wide = np.zeros((WIDE, 1))
    assert not is_large({(0, 1): wide})
    assert is_large({(k, k + 1): np.zeros((WIDE, 2)) for k in range(LARGE // (2 * WIDE) + 1)})
    assert not is_large({(k, k + 1): wide[:100] for k in range(LARGE // 100 + 1)})
