"""What to keep and what to do again, against every choice on random programs."""

import itertools

import numpy as np
import pytest

from shardc.passes.recompute.min_cut import Repeatable


def random_program(rng):
    """Operations that read values made before them; some values have no maker that runs again, some cannot be kept."""
    count = int(rng.integers(2, 9))
    reads, makers, sizes, after = [], [-1, -1], [4.0, 2.0], []
    for n in range(count):
        reads.append(sorted(set(rng.integers(0, len(makers), rng.integers(1, 4)).tolist())))
        for _ in range(rng.integers(1, 3)):
            repeats = rng.random() < 0.85
            makers.append(n if repeats else -1)
            sizes.append(np.inf if repeats and rng.random() < 0.2 else float(rng.integers(1, 20)))
        after.append(int(rng.integers(0, n)) if n and rng.random() < 0.15 else -1)
    needed = rng.choice(len(makers), rng.integers(1, 4), replace=False).tolist()
    seconds = rng.integers(0, 12, count).astype(float)
    return Repeatable(needed, np.asarray(sizes), np.asarray(makers), seconds, reads, np.asarray(after))


def cost(p, prices, done):
    """Of the choice to run again `done` and no other; inf where that makes no sense."""
    if any(p.after[n] >= 0 and p.after[n] not in done for n in done):
        return np.inf
    needed, pending = set(), [*p.needed, *(v for n in done for v in p.reads[n])]
    total = sum(p.seconds[n] for n in done)
    for v in pending:
        if v not in needed:
            needed.add(v)
            total += 0.0 if p.makers[v] in done else p.sizes[v] * prices[v]
    return total


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_cheaper(seed):
    rng = np.random.default_rng(seed)
    p = random_program(rng)
    prices = np.where(np.arange(len(p.sizes)) < rng.integers(0, len(p.sizes)), 1.7, rng.choice([0.3, 1.0, 2.5]))
    kept, again = p.solve(prices)
    found = {int(n) for n in np.flatnonzero(again)}
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(p.seconds)), k) for k in range(9))
    least = min(cost(p, prices, set(s)) for s in subsets)
    assert cost(p, prices, found) == pytest.approx(least, rel=1e-6)
    total = sum(p.sizes[v] * prices[v] for v in np.flatnonzero(kept)) + sum(p.seconds[n] for n in found)
    assert total == pytest.approx(least, rel=1e-6)


def test_dear_memory_is_done_without():
    """A chain: its end is needed; its beginning has no maker."""
    p = Repeatable(
        [2], np.asarray([1.0, 50.0, 10.0]), np.asarray([-1, 0, 1]), np.asarray([3.0, 3.0]), [[0], [1]],
        np.asarray([-1, -1]),
    )  # fmt: skip
    assert [list(x) for x in p.solve(np.full(3, 0.1))] == [[False, False, True], [False, False]]
    assert [list(x) for x in p.solve(np.full(3, 10.0))] == [[True, False, False], [True, True]]
