"""Moves along labels, and reduced problems of some values, against enumeration."""

import itertools

import numpy as np
import pytest

from shardc.solver import AssignmentCost, Memo, SolverOptions, alike, minimize, move
from shardc.solver.search import Search
from tests.solver.problems import (
    cost_of,
    every,
    minimum,
    random_problem,
    reduction,
    repeated_layers,
    searched,
    shapes,
)

LABELS = np.asarray(list(itertools.product(range(3), range(3))), np.int64)


def grid_problem(seed: int, side: int = 4, forbidden: float = 0.0):
    """Variables in a square, whose values have two labels each."""
    rng = np.random.default_rng(seed)
    at = {(a, b): a * side + b for a in range(side) for b in range(side)}
    near = [(at[p], at[q]) for p, q in itertools.combinations(at, 2) if abs(p[0] - q[0]) + abs(p[1] - q[1]) == 1]

    def table(*size: int) -> np.ndarray:
        costs = rng.integers(0, 40, size).astype(float)
        costs[rng.random(size) < forbidden] = np.inf
        return costs

    return [table(9) for _ in at], {pair: table(9, 9) for pair in near}


@pytest.fixture
def moves(monkeypatch):
    """The gains of the moves of all searches."""
    gained: list[float] = []
    plain = Search.move

    def move(self: Search, values: list[int], **more: int) -> None:
        before = self.cost
        plain(self, values, **more)
        gained.append(before - self.cost)
        assert self.cost == self.full.cost(self.values) <= min(before, self.full.cost(values))

    monkeypatch.setattr(Search, "move", move)
    return gained


@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_a_search_moves_what_it_reads(moves, forbidden):
    """Where nothing is eliminated, it mostly comes to the minimum; bound and cost hold in any case."""
    options, found = SolverOptions(5e8, at_once=0), 0
    for seed in range(6):
        unary, pairwise = grid_problem(seed, forbidden=forbidden)
        plain = minimize(unary, pairwise)
        moved = minimize(unary, pairwise, labels=[LABELS] * len(unary), options=options)
        assert plain.exact and moved.bound <= plain.cost <= moved.cost == cost_of(unary, pairwise, moved.values)
        found += plain.cost == moved.cost
    assert moves and found >= 4


def test_a_move_changes_all_that_must_change_together():
    """Neighbours are to have the same labels; each label is best with another value, found one column at a time."""
    differ = 50.0 * (LABELS[:, None] != LABELS[None]).sum(-1)
    own = (LABELS != (2, 1)).sum(-1).astype(float)
    unary, pairwise = [own] * 12, {(k, k + 1): differ for k in range(11)} | {(0, 11): differ, (3, 9): differ}
    full = AssignmentCost(unary, pairwise)
    find = Search(reduction(unary, pairwise), full, labels=[LABELS] * 12)
    find.move([0] * 12)
    assert find.cost == full.cost(find.values) == 0.0
    assert {tuple(LABELS[v]) for v in find.values} == {(2, 1)}


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", shapes)
def test_some_values_of_a_reduced_problem(shape, forbidden):
    """The best of them costs no more than any assignment of values that are marked and left."""
    for seed in range(12):
        unary, pairwise = random_problem(shape, seed, forbidden, most=3)
        whole = reduction(unary, pairwise)
        if seed % 2:  # variables merge, but none is minimized out
            whole.held = frozenset(range(len(unary)))
        whole.run()
        rng = np.random.default_rng(seed)
        marked = [rng.random(u.size) < 0.7 for u in unary]
        some = searched(whole.among(marked), unary, pairwise)
        kept = (x for x in every(unary) if all(m[v] for m, v in zip(marked, x, strict=True)) and whole.reduce(x))
        assert some.cost <= min((cost_of(unary, pairwise, x) for x in kept), default=np.inf)
        if some.values is not None:
            assert some.cost == cost_of(unary, pairwise, some.values) >= minimum(unary, pairwise)


def test_large_arrays_are_one_if_they_are_equal():
    memo = Memo()
    rng = np.random.default_rng(0)
    table = rng.integers(0, 9, (80, 80)).astype(float)
    turned, again, other = np.ascontiguousarray(table.T), table.copy(), table.copy()
    other[3, 4] += 1
    assert memo.one(table) is table
    assert memo.one(again) is table
    assert memo.one(turned) is turned  # of the same shape and sums
    assert memo.one(other) is other
    assert memo.one(turned.copy()) is turned
    assert memo.held == 3 * table.nbytes


def some_of(unary, pairwise):
    """The tables of values that are given by number."""

    def among(offered):
        return [u[some] for u, some in zip(unary, offered, strict=True)], {
            (i, j): t[np.ix_(offered[i], offered[j])] for (i, j), t in pairwise.items()
        }

    return among


@pytest.mark.parametrize("layers", [3, 16])
def test_moves_from_a_start_keep_together_what_looks_alike(layers):
    """Of few layers every variable moves by itself, of many those of all layers together; never to something dearer."""
    gained = 0
    for seed in range(6):
        unary, pairwise = repeated_layers(seed, layers, 2, values=9)
        costs, together = AssignmentCost(unary, pairwise), alike(unary, pairwise, Memo())
        assert (together is None) == (layers == 3)
        start = np.random.default_rng(seed).integers(0, 9, len(unary)).tolist()
        labels, among, options = [LABELS] * len(unary), some_of(unary, pairwise), SolverOptions(together=together)
        found = move(among, start, labels, 4, options=options)
        assert costs.cost(found) <= costs.cost(start)
        assert costs.cost(move(among, found, labels, 4, options=options)) <= costs.cost(found)
        gained += costs.cost(found) < costs.cost(start)
    assert gained == 6


def test_moves_never_lead_to_what_is_dearer_than_a_start_that_differs_between_layers():
    """What is tied is forbidden, so that nothing is found."""
    unary, pairwise = repeated_layers(0, 16, 2, values=9)
    together = alike(unary, pairwise, Memo())
    assert together is not None
    v, other = next(c for c in together if len(c) > 1)[:2]
    pairwise[v, other] = np.where(np.eye(9) > 0, np.inf, 0.0)
    start = [0] * len(unary)
    start[other] = 1
    found = move(some_of(unary, pairwise), start, [LABELS] * len(unary), 2, options=SolverOptions(together=together))
    assert found == start


def test_moves_in_one_column_are_the_search():
    for seed in range(6):
        unary, pairwise = repeated_layers(seed, 4, 2)
        found = move(some_of(unary, pairwise), [0] * 8, [np.arange(3)[:, None]] * 8, 1)
        assert cost_of(unary, pairwise, found) == minimum(unary, pairwise)


def test_a_wide_move_changes_two_columns_at_once():
    """Of values with three labels each, all variables' at once: 1 1 0 is best, and what lies between is dear."""
    labels = np.asarray(list(itertools.product(range(2), repeat=3)), np.int64)
    own = np.where(labels.sum(1) == 0, 2.0, 5.0)
    own[6] = 0.0  # 1 1 0
    together = np.where(np.eye(8, dtype=bool), 0.0, 1.0)
    unary, pairwise = [own] * 3, {(0, 1): together, (1, 2): together}
    found = Search(reduction(unary, pairwise), AssignmentCost(unary, pairwise), labels=[labels] * 3)
    found.move([0, 0, 0])
    assert (found.cost, found.values) == (6.0, [0, 0, 0])
    found.move([0, 0, 0], wide=2)
    assert (found.cost, found.values) == (0.0, [6, 6, 6])
