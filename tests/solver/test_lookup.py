"""Tables whose entries stand in a smaller matrix, against the same ones written out."""

import numpy as np
import pytest

from shardc.solver import FORBIDDEN, AssignmentCost, Memo, SolverOptions, alike, by_cost, minimize
from shardc.solver.coarsen import Coarse
from shardc.solver.cost_tables import Lookup, whole
from tests.solver.problems import random_problem, shapes

SEEDS = range(20)


def looked_up(shape: str, seed: int):
    """A problem whose tables stand in matrices, each for several pairs; half of them turned, some entries forbidden."""
    unary, pairwise = random_problem(shape, seed, 0.0, most=6)
    rng = np.random.default_rng(seed)
    matrices = [rng.integers(0, 30, (4, 4)).astype(float) for _ in range(3)]
    matrices[0][rng.random((4, 4)) < 0.2] = FORBIDDEN
    tables = {}
    for i, j in pairwise:
        matrix, turn = matrices[rng.integers(3)], rng.random() < 0.5
        rows, columns = (rng.integers(0, 4, unary[v].size) for v in ((j, i) if turn else (i, j)))
        tables[i, j] = Lookup(matrix, rows, columns).T if turn else Lookup(matrix, rows, columns)
    return unary, tables, {pair: t.whole() for pair, t in tables.items()}


def test_its_entries_are_those_of_the_matrix():
    rng = np.random.default_rng(0)
    table = Lookup(rng.normal(size=(3, 4)), np.asarray([2, 0, 2, 1]), np.asarray([3, 3, 0, 1, 2]))
    assert table.shape == (4, 5) and table.size == 20
    for a, row in enumerate(table.whole()):
        for b, entry in enumerate(row):
            assert entry == table.matrix[table.rows[a], table.columns[b]] == table[a, b] == table.T[b, a]
    assert np.array_equal(table.T.whole(), table.whole().T)
    some = np.asarray([1, 3]), np.asarray([0, 4, 4])
    assert np.array_equal(table[some[0][:, None], some[1]], table.whole()[np.ix_(*some)])
    assert np.array_equal(whole(table), table.whole())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("shape", shapes)
def test_it_is_solved_as_if_it_were_written_out(shape, large):
    options = SolverOptions(coarse=large)
    found = 0
    for seed in SEEDS:
        unary, tables, plain = looked_up(shape, seed)
        labels = [np.random.default_rng(seed).integers(0, 2, (u.size, 2)) for u in unary]
        one = minimize(unary, tables, labels=labels, options=options)
        assert one == minimize(unary, plain, labels=labels, options=options)
        assert alike(unary, tables, Memo()) == alike(unary, plain, Memo())
        if one.cost < FORBIDDEN:
            assert AssignmentCost(unary, tables).cost(one.values) == one.cost
            assert AssignmentCost(unary, plain).cost(one.values) == one.cost
            assert next(by_cost(unary, tables, 1e9))[0] <= one.cost
            found += 1
    assert found > len(SEEDS) / 2


@pytest.mark.parametrize("shape", shapes)
def test_groups_of_its_values_cost_what_those_of_the_table_do(shape):
    for seed in SEEDS:
        unary, tables, plain = looked_up(shape, seed)
        labels = [np.random.default_rng(seed).integers(0, 2, (u.size, 2)) for u in unary]
        one, other = Coarse.of(unary, tables, labels), Coarse.of(unary, plain, labels)
        assert one.pairwise.keys() == other.pairwise.keys()
        assert all(np.array_equal(table, other.pairwise[pair]) for pair, table in one.pairwise.items())
