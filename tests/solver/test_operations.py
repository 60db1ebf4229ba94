"""Operations on cost tables, against what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from shardc.solver.cost_tables import Memo
from shardc.solver.kernels.numpy_kernels import unbeaten
from shardc.solver.operations import Operations


def tables(seed):
    """The costs of a variable and tables to its neighbours, with many ties and some that is not allowed."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 30))
    made = [rng.integers(0, 4, (size, int(rng.integers(1, 60)))).astype(np.float64) for _ in range(rng.integers(0, 3))]
    for table in made:
        table[rng.random(table.shape) < rng.choice([0.0, 0.2])] = np.inf
    return rng.integers(0, 5, size).astype(np.float64), made


@pytest.mark.parametrize("seed", range(20))
def test_least_gain_is_the_least_difference_of_two_rows(seed):
    for table in tables(seed)[1]:
        found = Operations(Memo()).least_gain(table)
        for a, row in enumerate(table):
            for b, other in enumerate(table):
                both = np.isfinite(row) | np.isfinite(other)
                change = np.where(both, row, 0) - np.where(both, other, 0)
                assert found[a, b] == change.min(where=both, initial=np.inf)


@pytest.mark.parametrize("seed", range(200))
def test_each_value_that_goes_is_beaten_by_one_that_stays(seed):
    own, near = tables(seed)
    kept = Operations(Memo()).needed(own, near)
    kept = np.arange(own.size) if kept is None else kept

    def beats(b, a):
        gains = [np.fmin.reduce(t[a] - t[b], initial=np.inf) for t in near]
        return own[a] - own[b] + sum(gains) >= 0

    with np.errstate(invalid="ignore"):
        assert all(any(beats(b, a) for b in kept) for a in set(range(own.size)) - set(kept.tolist()))
        assert not any(beats(b, a) for a in kept for b in kept if a != b)


def test_values_that_beat_each_other_in_a_circle_do_not_all_go():
    """As rounding may have it."""
    circle = np.roll(np.eye(3, dtype=bool), 1, axis=1)
    assert unbeaten(np.where(circle, 0.0, -1.0)).size
