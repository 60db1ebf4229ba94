"""Cuts of a chain, against all cuts of small ones."""

from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import make_schedule
from shardc.pipeline.schedule.partition import SLACK, WORTH, CutProblem, choose_cuts, in_flight, makespan, tightest_cuts


def random_chain(rng, stages, n, tight=False):
    work = np.sort(rng.integers(1, 100, (2, n)).cumsum(1), axis=1).astype(float)
    work[:, 0] = 0
    kept = rng.integers(0, 10, n).cumsum().astype(float)
    room = kept[-1] / stages * 1.3 if tight else kept[-1] + 1
    return CutProblem(
        forward=np.stack([work[0]] * stages),
        backward=np.stack([work[1]] * stages),
        activation=rng.integers(0, 1000, n).astype(float),
        gradient=rng.integers(0, 1000, n).astype(float),
        once=rng.integers(0, 1000, n).astype(float),
        back=np.where(rng.random(n) < 0.9, np.arange(n, 0, -1), rng.integers(0, n, n)),
        memory=np.stack([np.maximum(kept[None, :] - kept[:, None], 0)] * stages),
        room=np.full(stages, room),
        fused=bool(rng.integers(2)),
        latency=0.5,
        bandwidth=300.0,
        least=0.0,
    )


def all_cuts(chain):
    """Every legal choice, with the time of its slowest stage."""
    n = chain.forward.shape[1]
    for cuts in combinations(range(1, n - 1), chain.stages - 1):
        ends = list(enumerate(pairwise([0, *cuts, n - 1])))
        work = chain.forward + chain.backward
        legal = all(
            work[s, j] > work[s, i] and chain.back[j] <= chain.back[i] and chain.memory[s, i, j] <= chain.room[s]
            for s, (i, j) in ends
        )
        if legal:
            yield cuts, max(work[s, j] - work[s, i] + (chain.transfer_seconds()[i] if s else 0) for s, (i, j) in ends)


def order(chain):
    return partial(make_schedule, "1f1b", chain.stages, 4, 1)


def slowest(chain, cuts):
    return dict(all_cuts(chain))[cuts]


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_is_nearly_as_fast_as_in_any_cuts_and_the_call_as_fast(seed):
    rng = np.random.default_rng(seed)
    chain = random_chain(rng, stages=int(rng.integers(2, 5)), n=9, tight=bool(seed % 2))
    legal = dict(all_cuts(chain))
    cuts = choose_cuts(chain, lambda costs: order(chain)(costs=costs))
    if not legal:
        assert cuts is None
        return
    assert cuts in legal
    best = min(legal.values())
    assert legal[cuts] <= best * SLACK[-1] * (1 + 1e-6)
    fastest_of_best = min(
        makespan(chain, c, order(chain)())
        for c, s in legal.items()
        if s <= best * (1 + 1e-6) and _transfers(chain, c) <= min(
            _transfers(chain, d) for d, t in legal.items() if t <= best * (1 + 1e-6)
        ) * (1 + 1e-9)
    )  # fmt: skip
    assert makespan(chain, cuts, order(chain)()) <= fastest_of_best * WORTH


def _transfers(chain, cuts):
    return sum(chain.transfer_seconds()[i] + chain.once[i] / chain.bandwidth for i in cuts)


def test_a_slightly_slower_stage_is_taken_for_a_far_smaller_transfer():
    even = np.arange(101.0)
    chain = random_chain(np.random.default_rng(0), 2, 101)
    size = np.full(101, 30_000.0)
    size[51] = 0.0
    chain = CutProblem(
        np.stack([even] * 2), np.stack([even] * 2), size, size, size * 0, np.arange(101, 0, -1),
        chain.memory, chain.room, True, 0.0, 3000.0, 0.0,
    )  # fmt: skip
    assert choose_cuts(chain, lambda costs: order(chain)(costs=costs)) == (51,)


def test_cuts_that_nearly_fit():
    chain = random_chain(np.random.default_rng(1), 2, 9)
    small = CutProblem(**{**vars(chain), "room": np.asarray([1.0, 1.0])})
    assert choose_cuts(small, lambda costs: order(chain)(costs=costs)) is None
    (cut,) = tightest_cuts(small)
    worst = {i: max(small.memory[0, 0, i], small.memory[1, i, -1]) for (i,), _ in all_cuts(chain)}
    assert worst[cut] == min(worst.values())


def test_a_fused_stage_has_no_forward_and_tasks_take_their_least():
    chain = random_chain(np.random.default_rng(0), 2, 9)
    chain = CutProblem(**{**vars(chain), "fused": True, "least": 1e6})
    assert chain.costs((4,)) == StageCosts(((1e6, 5e5, 5e5), (0.0, 5e5, 5e5)))


@pytest.mark.parametrize(("name", "want"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [6, 6, 6, 6]), ("zb-h1", [4, 4, 4, 4])])
def test_microbatches_in_flight(name, want):
    found = in_flight(make_schedule(name, 4, 6))
    assert all(a <= b for a, b in zip(found, want, strict=True)), found
    assert name == "zb-h1" or list(found) == want
