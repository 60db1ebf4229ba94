"""The solver against enumeration."""

import os
import subprocess
import sys

import numpy as np
import pytest

from shardc.solver import FORBIDDEN, Memo, SolverOptions, by_cost, minimize, relative_gap
from tests.solver.problems import (
    MESSAGES,
    cost_of,
    every,
    minimum,
    random_problem,
    reduction,
    repeated_layers,
    searched,
    shapes,
)


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", shapes)
def test_the_minimum_is_found_and_proved(shape, forbidden):
    for seed in range(25):
        unary, pairwise = random_problem(shape, seed, forbidden)
        found, best = minimize(unary, pairwise), minimum(unary, pairwise)
        assert (found.cost < np.inf) == (best < FORBIDDEN)
        if best < FORBIDDEN:
            assert found.cost == best == cost_of(unary, pairwise, found.values)
            assert found.bound <= best + 1e-9
            assert found.gap <= 1e-6
        else:
            assert found.bound == np.inf


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", ["grid", "dense", "sparse"])
def test_bounds_and_fixing_find_it_too(shape, forbidden):
    for seed in range(40):
        unary, pairwise = random_problem(shape, seed, forbidden)
        found, best = minimize(unary, pairwise, options=MESSAGES), minimum(unary, pairwise)
        assert found.cost == best
        assert found.bound <= best + 1e-9 or best == np.inf
        assert found.gap <= 1e-6 or best == np.inf


@pytest.mark.parametrize("shape", ["grid", "dense", "sparse"])
def test_stopped_early_the_bound_holds_and_the_cost_is_true(shape):
    for seed in range(40):
        unary, pairwise = random_problem(shape, seed)
        found, best = (
            minimize(unary, pairwise, [0] * len(unary), options=SolverOptions(1, at_once=0)),
            minimum(unary, pairwise),
        )
        assert found.bound <= best + 1e-9
        assert best <= found.cost == cost_of(unary, pairwise, found.values)


@pytest.mark.parametrize("seed", range(5))
def test_repeated_layers_are_solved_and_cost_no_more_each(seed):
    unary, pairwise = repeated_layers(seed, 3, values=2)
    assert minimize(unary, pairwise).cost == minimum(unary, pairwise)
    few, many = (searched(reduction(*p), *p) for p in (repeated_layers(seed, n) for n in (12, 96)))
    assert few.cost == few.bound and many.cost == many.bound
    assert many.problem.ops.work < 1.02 * 96 / 12 * few.problem.ops.work


def test_a_start_is_not_made_worse():
    for seed in range(30):
        unary, pairwise = random_problem("dense", seed)
        best = min(every(unary), key=lambda x: cost_of(unary, pairwise, x))
        assert minimize(unary, pairwise, list(best)).cost == cost_of(unary, pairwise, best)


def test_a_memo_serves_several_problems():
    unary, pairwise = random_problem("dense", 3)
    memo = Memo()
    assert minimize(unary, pairwise, memo=memo) == minimize(unary, pairwise, memo=memo) == minimize(unary, pairwise)


def test_a_table_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"table of variables 0, 1: \(2, 2\), not \(2, 3\)"):
        minimize([np.zeros(2), np.zeros(3)], {(0, 1): np.zeros((2, 2))})


def solutions():
    random = [minimize(*random_problem("dense", seed), options=MESSAGES) for seed in range(6)]
    return f"{random}, {minimize(*repeated_layers(1, 8))}\n"


def test_the_same_in_every_process():
    code = "from tests.solver.test_solve import solutions; print(solutions(), end='')"
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == solutions()


@pytest.mark.parametrize(
    ("cost", "bound", "gap"),
    [(3.0, 3.0, 0.0), (3.0, 4.0, 0.0), (4.0, 3.0, 1 / 3), (-3.0, -4.0, 1 / 3), (1.0, 0.0, np.inf), (1.0, -1.0, np.inf),
     (0.0, 0.0, 0.0), (np.inf, 3.0, np.inf), (np.inf, np.inf, np.inf)],
)  # fmt: skip
def test_the_gap_is_a_part_of_the_minimum(cost, bound, gap):
    """A cost is at most (1 + gap) times the minimum, which lies between the bound and the cost."""
    assert relative_gap(cost, bound) == pytest.approx(gap)
    if 0 < gap < np.inf and cost > 0:
        assert cost <= (1 + relative_gap(cost, bound)) * bound * (1 + 1e-9)


@pytest.mark.parametrize("forbidden", [0.0, 0.3])
@pytest.mark.parametrize("shape", shapes)
def test_assignments_come_by_cost(shape, forbidden):
    """All that are allowed, each once, none before a cheaper one."""
    for seed in range(10):
        unary, pairwise = random_problem(shape, seed, forbidden, most=3)
        found = by_cost(unary, pairwise, 1e6)
        assert found is not None
        costs, values = zip(*found, strict=True) if minimum(unary, pairwise) < FORBIDDEN else ((), ())
        want = sorted(c for c in (cost_of(unary, pairwise, x) for x in every(unary)) if c < FORBIDDEN)
        assert list(costs) == want
        assert len(set(map(tuple, values))) == len(values)
        assert [cost_of(unary, pairwise, x) for x in values] == list(costs)
    assert by_cost(unary, pairwise, 0) is None
