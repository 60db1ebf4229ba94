"""Variables that look alike, tied to one value, against enumeration."""

import itertools

import numpy as np
import pytest

from shardc.solver import AssignmentCost, SolverOptions, minimize
from shardc.solver.search import Search
from tests.solver.problems import MESSAGES, cost_of, minimum, reduction, repeated_layers, searched


def test_layers_look_alike_as_far_from_the_ends():
    layers, width = 9, 3
    problem = reduction(*repeated_layers(0, layers, width))
    for rounds in range(4):
        middle = range(rounds, layers - rounds) if rounds else range(layers)
        ends = [k for k in range(layers) if k not in middle]
        expected = [[k * width + i for k in middle] for i in range(width)]
        expected += [[k * width + i] for k in ends for i in range(width)]
        assert sorted(problem.alike(rounds)) == sorted(expected)


def test_what_differs_in_a_cost_does_not_look_alike():
    unary, pairwise = repeated_layers(0, 6, 2)
    unary = [u.copy() for u in unary]
    unary[6][0] += 1
    assert [6] in reduction(unary, pairwise).alike(0)
    assert [4] in reduction(unary, pairwise).alike(1)  # its neighbour one layer before


def tied_minimum(unary, pairwise, classes):
    found = np.inf
    for choice in itertools.product(*(range(unary[c[0]].size) for c in classes)):
        values = {v: k for c, k in zip(classes, choice, strict=True) for v in c}
        found = min(found, cost_of(unary, pairwise, [values[v] for v in range(len(unary))]))
    return found


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_the_best_of_alike_values(rounds, forbidden):
    """Edges within a class (from layer to layer), beside others of the same class, and to the ends."""
    for seed in range(8):
        unary, pairwise = repeated_layers(seed, 4 + rounds, 2, values=4 - rounds)
        rng = np.random.default_rng(seed)
        masks = {}
        for pair, table in pairwise.items():
            mask = masks.setdefault(id(table), rng.random(table.shape) < forbidden)
            pairwise[pair] = np.where(mask, np.inf, table)
        problem = reduction(unary, pairwise)
        classes = problem.alike(rounds)
        assert len(classes) < len(unary)
        part = problem.tied(classes)
        assert sum(part.inside) == len(classes)
        found = searched(part, unary, pairwise)
        assert found.cost == tied_minimum(unary, pairwise, classes)
        if found.values is not None:
            assert all(len({found.values[v] for v in c}) == 1 for c in classes)
            assert found.cost == cost_of(unary, pairwise, found.values)


def test_the_best_of_values_kept_together_that_cost_differently():
    """What looked alike before prices were put on it: classes are of other costs than those that are minimised."""
    differed = 0
    for seed in range(12):
        unary, pairwise = repeated_layers(seed, 8, 2)
        classes = reduction(unary, pairwise).alike(1)
        rng = np.random.default_rng(seed)
        unary = [u + 0.5 * rng.random(u.size) for u in unary]
        pairwise = {pair: t + 0.5 * rng.random(t.shape) for pair, t in pairwise.items()}
        found = minimize(unary, pairwise, options=SolverOptions(together=classes))
        assert found.cost == pytest.approx(tied_minimum(unary, pairwise, classes), rel=1e-12)
        assert found.cost == pytest.approx(cost_of(unary, pairwise, found.values), rel=1e-12)
        assert all(len({found.values[v] for v in c}) == 1 for c in classes)
        least = minimize(unary, pairwise).cost
        assert found.cost >= least
        differed += found.cost > least
    assert differed


def test_a_search_begins_with_tied_values_and_may_leave_them(monkeypatch):
    """The ends cost otherwise than the middle here, and what is found is proved all the same."""
    offered: list[float] = []
    plain = Search._tie

    def tie(self: Search) -> None:
        plain(self)
        offered.append(self.cost)

    monkeypatch.setattr(Search, "_tie", tie)
    left = 0  # searches that found something better than the tied assignment
    for seed in range(20):
        unary, pairwise = repeated_layers(seed, 4, 2)
        Search(reduction(unary, pairwise), AssignmentCost(unary, pairwise))._tie()
        assert offered[-1] >= minimum(unary, pairwise)
        found = minimize(unary, pairwise, options=MESSAGES)
        assert found.exact
        assert found.cost == minimum(unary, pairwise)
        left += offered[0] > found.cost
        offered.clear()
    assert left
