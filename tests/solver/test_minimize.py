"""The call that placement makes."""

import numpy as np
import pytest

from shardc.solver import FORBIDDEN, Memo, minimize
from shardc.solver.eliminate import elimination_order
from tests.solver.problems import cost_of, minimum, random_problem, reduction


@pytest.mark.parametrize("seed", range(100))
def test_the_minimum_is_found_and_proved(seed):
    unary, pairwise = random_problem("sparse", seed)
    found = minimize(unary, pairwise)
    assert found.exact
    assert found.cost == cost_of(unary, pairwise, found.values) == minimum(unary, pairwise)


def test_what_is_forbidden_is_not_chosen():
    unary = [np.array([0.0, 2 * FORBIDDEN, 5.0]), np.array([1.0, 0.0])]
    pairwise = {(0, 1): np.array([[9.0, 9.0], [0.0, 0.0], [1.0, 1.5]])}
    assert minimize(unary, pairwise).values == [2, 1]


def test_the_order_takes_leaves_first():
    star = [(0, i) for i in range(1, 40)]
    assert elimination_order(40, star)[-2:] in ([0, 39], [39, 0])


class Forgetful(Memo):
    """Forgets all at every chance."""

    chances = 0

    def forget(self, most: int = 0) -> None:
        self.chances += self.held > 0
        super().forget(0)
        assert not self.held


def test_what_is_forgotten_changes_nothing():
    chances = 0
    for seed in range(3, 5):
        rng = np.random.default_rng(seed)
        unary = [rng.integers(0, 30, 10).astype(float) for _ in range(14)]
        pairs = [(i, j) for i in range(14) for j in range(i + 1, 14) if rng.random() < 0.4]
        pairwise = {pair: rng.integers(0, 30, (10, 10)).astype(float) for pair in pairs}
        memo = Forgetful()
        again, once = minimize(unary, pairwise, memo=memo), minimize(unary, pairwise)
        assert again == once and once.exact
        chances += memo.chances
    assert chances


@pytest.mark.parametrize("first", [(0, 1), (1, 0)])
def test_tables_of_a_pair_in_both_directions_add_up(first):
    """Whichever comes first, and looked at whole or among some values."""
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 20, (5, 4)).astype(float), rng.integers(0, 20, (4, 5)).astype(float)
    tables = {(0, 1): one, (1, 0): other}
    pairwise = {pair: tables[pair] for pair in (first, first[::-1])}
    unary, both = [np.zeros(5), np.zeros(4)], one + other.T
    assert minimize(unary, pairwise).cost == both.min()
    problem = reduction(unary, pairwise)
    some = problem.among([np.arange(5) > 1, np.arange(4) < 3])
    assert np.array_equal(some.near[0][1], both[2:, :3])
    assert np.array_equal(some.near[1][0], both[2:, :3].T)
    some.run()
    assert some.constant == both[2:, :3].min()
