"""Chooses the cuts of a chain of work into stages, from tables of numbers.

    point:  0 . . i . . j . . n-1        stage (i, j) runs the work between two points, forwards and backwards

First, dynamic programming over the points finds the least time of the slowest stage. Then, for this bound and a few
looser ones, it finds the cuts with the least transfers: a slower stage may save more in transfers, above all where
microbatches are few. Each of these cuts is run under the schedule in the simulator. Starting from the fastest one, cuts
are moved one by one while the simulated call becomes faster and no stage becomes slower than the loosest bound. If
there are few points, all cuts are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.network import network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import simulate
from shardc.runtime.actor import Channel

Floats: TypeAlias = NDArray[np.float64]
Cuts: TypeAlias = tuple[int, ...]
"""The P-1 points between stages, ascending."""

SLACK: Final = (1.0, 1.01, 1.02, 1.04, 1.06, 1.12, 1.25, 1.5)
"""Factors on the least time of the slowest stage that are tried to save transfers."""
WORTH: Final = 1.001
"""The least factor by which a call has to become faster for other cuts."""
ACTIONS: Final = 100_000
"""About the number of actions that a search simulates; one takes about 10 us."""
REACH: Final = 12
"""The most points by which a cut is moved at once."""


@dataclass(frozen=True)
class CutProblem:
    """The costs of cutting a chain of work at n points, of which the first is its start and the last its end.

    Attributes:
      forward, backward: (stages, n) seconds of all forward (backward) work before each point, on the devices of each
        stage.
      activation, gradient: (n,) bytes that each device sends over a cut there, forwards and backwards, for each
        microbatch.
      once: (n,) further bytes that a cut there sends once per call.
      back: (n,) the place of each point in the backward pass; it does not increase with the points.
      memory: (stages, n, n) bytes that each device of stage s needs for the work between points i and j.
      room: (stages,) bytes that each device of stage s has.
      fused: the last stage's forward lies inside its backward.
      latency, bandwidth: seconds and bytes per second of the link between two stages.
      least: the least seconds of a task.
    """

    forward: Floats
    backward: Floats
    activation: Floats
    gradient: Floats
    once: Floats
    back: NDArray[np.int64]
    memory: Floats
    room: Floats
    fused: bool
    latency: float
    bandwidth: float
    least: float

    @property
    def stages(self) -> int:
        return len(self.forward)

    def costs(self, cuts: Cuts) -> StageCosts:
        """The costs of each stage; input and weight gradient get half of the backward's time each."""
        ends = [0, *cuts, self.forward.shape[1] - 1]
        rows: list[tuple[float, float, float]] = []
        for s, (i, j) in enumerate(pairwise(ends)):
            ahead = float(self.forward[s, j] - self.forward[s, i])
            behind = float(self.backward[s, j] - self.backward[s, i])
            fused = self.fused and s == self.stages - 1
            half = max(ahead + behind if fused else behind, self.least) / 2
            rows.append((0.0 if fused else max(ahead, self.least), half, half))
        return StageCosts(tuple(rows))

    def transfer_seconds(self) -> Floats:
        """For each point, the time of an activation and a gradient over a cut there."""
        return (self.activation + self.gradient) / self.bandwidth + 2 * self.latency


def choose_cuts(chain: CutProblem, schedule: Callable[[StageCosts], Schedule]) -> Cuts | None:
    """The cuts under which a call is fastest.

    Args:
      chain: the work, and the costs of cuts.
      schedule: a function from the costs of the stages to the order of the actions.

    Returns:
      None if no cuts fit in memory, or there are too few points.
    """
    seconds = _stage_seconds(chain)
    least = _slowest_at_least(seconds)
    if least is None:
        return None
    search = _CutSearch(chain, schedule)
    for slack in SLACK:
        search.try_all([_least_transfers(chain, seconds <= least * slack * (1 + 1e-9))])
    allowed = seconds <= least * SLACK[-1] * (1 + 1e-9)
    places = range(1, seconds.shape[1] - 1)
    actions = sum(map(len, schedule(chain.costs(search.best)).rows))
    if math.comb(len(places), len(search.best)) * actions <= ACTIONS:
        search.try_all(cuts for cuts in combinations(places, len(search.best)) if _allow(allowed, cuts))
        return search.best
    while search.left > 0 and search.try_all(_moved(search.best, allowed)):
        pass
    return search.best


class _CutSearch:
    """The fastest cuts so far, and the number of actions that may still be simulated."""

    def __init__(self, chain: CutProblem, schedule: Callable[[StageCosts], Schedule]) -> None:
        self.chain, self.schedule = chain, schedule
        self.best: Cuts = ()
        self.fastest = np.inf
        self.tried: set[Cuts] = set()
        self.left = ACTIONS

    def try_all(self, candidates: Iterable[Cuts | None]) -> bool:
        """Simulate candidates. Returns whether one of them is faster than the best one before."""
        before = self.best
        for cuts in candidates:
            if cuts is None or cuts in self.tried or (self.left <= 0 and self.best):
                continue
            self.tried.add(cuts)
            order = self.schedule(self.chain.costs(cuts))
            self.left -= sum(map(len, order.rows))
            seconds = makespan(self.chain, cuts, order)
            if seconds * WORTH < self.fastest:
                self.best, self.fastest = cuts, seconds
        return self.best is not before


def _moved(cuts: Cuts, allowed: NDArray[np.bool_]) -> Iterator[Cuts]:
    """The cuts with one of them moved, or with all of them moved; short moves first."""
    n = allowed.shape[1]
    for distance in range(1, REACH + 1):
        for step in (-distance, distance):
            for moved in [*(_with(cuts, k, step) for k in range(len(cuts))), tuple(c + step for c in cuts)]:
                if all(0 < c < n - 1 for c in moved) and _allow(allowed, moved):
                    yield moved


def _allow(allowed: NDArray[np.bool_], cuts: Cuts) -> bool:
    return all(allowed[s, i, j] for s, (i, j) in enumerate(pairwise([0, *cuts, allowed.shape[1] - 1])))


def _with(cuts: Cuts, k: int, step: int) -> Cuts:
    return (*cuts[:k], cuts[k] + step, *cuts[k + 1 :])


def tightest_cuts(chain: CutProblem) -> Cuts | None:
    """The cuts that come closest to fitting in memory; None if there are too few points."""
    share = chain.memory / chain.room[:, None, None]
    return _bottleneck(np.where(_may_follow(chain), share, np.inf))


def makespan(chain: CutProblem, cuts: Cuts, order: Schedule) -> float:
    """Seconds of the loop over microbatches in the simulator."""
    at = list(cuts)
    net = network(
        order,
        bytes={"activation": [*map(int, chain.activation[at]), 0], "gradient": [0, *map(int, chain.gradient[at])]},
    )

    def link(channel: Channel) -> tuple[float, float]:
        return chain.latency, channel.bytes / chain.bandwidth

    once = float(chain.once[at].sum()) / chain.bandwidth
    return simulate(net, chain.costs(cuts), link).makespan + once


def _may_follow(chain: CutProblem) -> NDArray[np.bool_]:
    """(stages, n, n): whether a stage may go from point i to point j: it has work, and the backward keeps the order."""
    work = chain.forward + chain.backward
    ahead = work[:, None, :] > work[:, :, None]
    return ahead & (chain.back[None, None, :] <= chain.back[None, :, None])


def _stage_seconds(chain: CutProblem) -> Floats:
    """(stages, n, n): time of a stage for one microbatch, with the transfers of its inputs and their gradients."""
    ahead = chain.forward[:, None, :] - chain.forward[:, :, None]
    behind = chain.backward[:, None, :] - chain.backward[:, :, None]
    seconds = ahead + behind
    seconds[1:] += chain.transfer_seconds()[None, :, None]
    fits = chain.memory <= chain.room[:, None, None]
    return np.where(fits & _may_follow(chain), seconds, np.inf)


def _slowest_at_least(seconds: Floats) -> float | None:
    """The least time of the slowest stage over all cuts; None if there are no cuts."""
    best = _bottleneck(seconds)
    if best is None:
        return None
    return float(max(seconds[s, i, j] for s, (i, j) in enumerate(pairwise([0, *best, seconds.shape[1] - 1]))))


def _least_transfers(chain: CutProblem, allowed: NDArray[np.bool_]) -> Cuts | None:
    """The cuts into allowed stages with the least transfers."""
    price = chain.transfer_seconds() + chain.once / chain.bandwidth
    return _path(np.where(allowed, price[None, :, None], np.inf), np.add)


def _bottleneck(seconds: Floats) -> Cuts | None:
    """The cuts that minimize the largest entry (s, i, j)."""
    return _path(seconds, np.maximum)


def _path(step: Floats, join: np.ufunc) -> Cuts | None:
    """The path from the first point to the last, one step for each stage, whose total under `join` is least."""
    stages, _, n = step.shape
    total = np.full(n, np.inf)
    total[0] = 0.0
    came: list[NDArray[np.int64]] = []
    for s in range(stages):
        through = join(total[:, None], step[s])
        came.append(through.argmin(0))
        total = through.min(0)
    if not np.isfinite(total[-1]):
        return None
    points: list[int] = [n - 1]
    for s in range(stages - 1, 0, -1):
        points.append(int(came[s][points[-1]]))
    return tuple(points[:0:-1])


def in_flight(schedule: Schedule) -> Sequence[int]:
    """For each stage the peak of the microbatches whose activations it holds."""
    held, most = [0] * schedule.stages, [0] * schedule.stages
    for row in schedule.rows:
        split = {a.stage for a in row if a.kind == "W"}
        for action in row:
            ends = "W" if action.stage in split else "B"
            held[action.stage] += (action.kind == "F") - (action.kind == ends)
            most[action.stage] = max(most[action.stage], held[action.stage])
    return most
