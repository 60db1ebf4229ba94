"""The contest's limit on memory, against enumeration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.memory_limited import MemoryLimit, solve_limited
from tests.solver.problems import cost_of, every, random_problem, shapes


def random_memory(unary: Sequence[np.ndarray], seed: int, tightness: float) -> MemoryLimit:
    """Several uses for some variables; the limit lies between the least and the most that can be in use."""
    rng = np.random.default_rng([seed, 7])
    uses = []
    for v, u in enumerate(unary):
        for _ in range(int(rng.integers(0, 3))):
            begin = int(rng.integers(0, 10))
            uses.append((v, begin, begin + int(rng.integers(0, 6)), rng.integers(0, 20, u.size).astype(float)))
    peaks = [MemoryLimit(uses, 0).peak(x) for x in every(unary)]
    return MemoryLimit(uses, float(np.quantile(peaks, tightness)))


def minimum(unary, pairwise, memory: MemoryLimit | None = None) -> float:
    fits = (x for x in every(unary) if memory is None or memory.peak(x) <= memory.limit)
    return min((cost_of(unary, pairwise, x) for x in fits), default=np.inf)


@pytest.mark.parametrize("tightness", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("shape", shapes)
def test_within_a_limit_on_memory(shape, tightness):
    for seed in range(15):
        unary, pairwise = random_problem(shape, seed, most=3)
        memory = random_memory(unary, seed, tightness)
        found, best = solve_limited(unary, pairwise, memory, 1e8), minimum(unary, pairwise, memory)
        assert found.feasible
        assert memory.peak(found.values) == found.peak <= memory.limit
        assert found.cost == cost_of(unary, pairwise, found.values)
        assert found.bound <= best + 1e-9 <= found.cost + 2e-9
        assert found.cost_unlimited == minimum(unary, pairwise)


@pytest.mark.parametrize("shape", shapes)
def test_what_cannot_fit_is_said_with_the_least_peak(shape):
    for seed in range(15):
        unary, pairwise = random_problem(shape, seed, most=3)
        memory = random_memory(unary, seed, 0.0)
        least = min(memory.peak(x) for x in every(unary))
        if least == 0:
            continue
        found = solve_limited(unary, pairwise, MemoryLimit(memory.uses, least - 1), 1e8)
        assert not found.feasible
        assert found.gap == found.cost == np.inf
        assert found.least_peak <= least + 1e-9 <= found.peak + 2e-9
        assert found.peak == memory.peak(found.values)
