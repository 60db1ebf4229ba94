"""Parts of two assignments: their costs and bytes add up, and the best of them are found."""

from __future__ import annotations

import itertools
import random

import numpy as np

from shardc.passes.estimate.backend import backend_of
from shardc.passes.place.memory_prices import MemoryModel
from shardc.passes.place.place import Placer
from shardc.passes.place.relink import DifferingParts
from shardc.solver import AssignmentCost
from tests.passes.place.test_optimal import random_problem


def drawn(seed):
    """A random program's memory, two random allowed assignments, and their parts."""
    rng = random.Random(seed)
    problem, mesh, _ = random_problem(rng)
    placer = Placer(problem, mesh)
    memory = MemoryModel(problem, placer.tables, {}, backend_of(mesh.topology.backend))
    near = np.random.default_rng(seed)
    one = placer.tables.best().values
    other = [near.integers(len(u)) if near.random() < 0.4 else c for c, u in zip(one, placer.tables.unary, strict=True)]
    return memory, one, other, DifferingParts(memory, one, other)


def held(memory, values):
    """(points,) bytes of an assignment by its terms."""
    found = np.zeros(memory.points + 1)
    for h in memory.terms:
        at = h.first if h.first == h.second else (h.first, h.second)
        amount = h.amounts[values[at]] if isinstance(at, int) else h.amounts[values[at[0]], values[at[1]]]
        found[h.begin : h.end] += amount
    return found[: memory.points]


def test_parts_add_up():
    several = 0
    for seed in range(250):
        memory, one, other, parts = drawn(seed)
        costs = AssignmentCost(memory.tables.unary, memory.tables.pairwise)
        several += parts.costs.size > 1
        none = np.zeros(parts.costs.size, np.bool_)
        assert parts.of(none) == list(one) and parts.of(~none) == list(map(int, other))
        if costs.cost(other) > 1e6:  # forbidden
            continue
        for taken in itertools.islice(itertools.product((False, True), repeat=parts.costs.size), 16):
            taken = np.asarray(taken, np.bool_)
            change = costs.cost(parts.of(taken)) - costs.cost(one)
            np.testing.assert_allclose(parts.costs @ taken, change, atol=1e-9 * costs.cost(one))
    assert several > 30


def test_the_best_parts_that_fit():
    """Against trying all; of what they have in memory the terms say enough here."""
    decided = 0
    for seed in range(250):
        memory, _, _, parts = drawn(seed)
        if not 0 < parts.costs.size <= 6 or np.abs(parts.costs).max() > 1e6:
            continue
        every = [np.asarray(t, np.bool_) for t in itertools.product((False, True), repeat=parts.costs.size)]
        peaks = [held(memory, parts.of(t)).max() for t in every]
        limit = np.random.default_rng(seed).uniform(min(peaks), max(peaks))
        base = every[seed % len(every)]
        found = parts.best(limit - held(memory, parts.of(base)), base)
        assert found is not None, seed
        fits = [float(parts.costs @ t) for t, peak in zip(every, peaks, strict=True) if peak <= limit]
        assert held(memory, parts.of(found)).max() <= limit * (1 + 1e-5), seed
        scale = np.abs(parts.costs).sum()
        np.testing.assert_allclose(parts.costs @ found, min(fits), atol=2e-3 * scale, err_msg=str(seed))
        decided += min(fits) > min(float(parts.costs @ t) for t in every)
    assert decided > 5
