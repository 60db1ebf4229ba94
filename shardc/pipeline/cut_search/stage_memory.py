"""The memory of a stage between two points of a folded body, for all pairs of points at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shardc.compat import Var
from shardc.ir.walk import bytes_of
from shardc.passes.estimate.memory import working_bytes
from shardc.pipeline.cut_search.cut_points import Points
from shardc.pipeline.cut_search.fold_body import FoldedBody
from shardc.pipeline.schedule.partition import Floats


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage from point i to point j; each (n, n).

    Attributes:
      state: its parameters, and the values that are kept with them.
      stash: values of one microbatch that are kept for the backward pass, including the stage's inputs.
      inputs: the stage's inputs alone; (n, 1).
      working: the peak of other live values while the stage computes.
      whole: the same for a last stage that computes forward and backward at once; (n, 1).
    """

    state: Floats
    stash: Floats
    inputs: Floats
    working: Floats
    whole: Floats

    def activations(self, held: int, recomputes: bool) -> Floats:
        """Bytes of activations for `held` microbatches.

        A recomputing stage keeps only the inputs, plus one full set while it runs.
        """
        return held * self.inputs + self.stash if recomputes else held * self.stash

    def needed(self, held: int, recomputes: bool) -> Floats:
        return self.state + self.activations(held, recomputes) + self.working

    def share(self, devices: int) -> StageMemory:
        """The memory on each of several devices that hold equal parts of the loop's values."""
        made = (self.stash, self.inputs, self.working, self.whole)
        return StageMemory(self.state, *(size / devices for size in made))

    def at_once(self) -> StageMemory:
        """The memory if forward and backward are computed at once: only the inputs are kept for the backward."""
        alike = np.zeros_like(self.state)
        return replace(self, stash=alike + self.inputs, working=alike + self.whole)


def stage_memory(body: FoldedBody, points: Points, state: Callable[[Var], float]) -> StageMemory:
    """The memory of every possible stage, on a device that holds all of its values.

    Args:
      body, points: the body and its points.
      state: bytes that each stage that reads an input of the body keeps for it.
    """
    n = len(points.ahead)
    where = np.searchsorted(points.ahead, np.arange(body.fold), side="right") - 1  # the point before each equation
    held = np.zeros((n + 1, n + 1))
    for v in body.loop.operands:
        places = sorted({int(where[t]) for t in body.reads.get(v, ()) if t < body.fold})
        size = state(v) if places else 0.0
        for before, place in zip([-1, *places], places, strict=False):  # stages that begin behind `before` and
            held[before + 1, place + 1] += size  # end behind `place`, but those that begin behind `place`
            held[place + 1, place + 1] -= size
    left, inputs = _stash(body, points, where)
    live = _LiveBytes(body)
    whole = np.asarray([[live.most(int(i), int(j))] for i, j in zip(points.ahead, points.back, strict=True)])
    return StageMemory(held.cumsum(0).cumsum(1)[:n, :n], left, inputs, _working(body, live, points, where), whole)


def _stash(body: FoldedBody, points: Points, where: np.ndarray) -> tuple[Floats, Floats]:
    """Bytes that each stage keeps for one microbatch, (n, n), and the part received from the stage before, (n, 1)."""
    n = len(points.ahead)
    left = np.zeros(n + 1)
    received = np.zeros(n)
    for v, t in body.made.items():
        later = [r for r in body.reads.get(v, ()) if r >= body.fold]
        if t >= body.fold or v in body.cheap or not later:
            continue
        left[where[t] + 1] += bytes_of(v)
        received[(points.ahead > t) & (points.back > later[0])] += bytes_of(v)
    total = left.cumsum()[:n]
    return total[None, :] - total[:, None] + received[:, None], received[:, None]


def _working(body: FoldedBody, live: _LiveBytes, points: Points, where: np.ndarray) -> Floats:
    """The larger of the largest operation of each stage's forward, and the peak of live values of its backward."""
    n, count = len(points.ahead), len(body.eqns)
    back = (points.back[None, :] > np.arange(body.fold, count)[:, None]).sum(1) - 1  # as `where`, of the backward
    most = np.zeros(n)
    np.maximum.at(most, where, [working_bytes(e) for e in body.eqns[: body.fold]])
    np.maximum.at(most, back, live.between(body.fold, count))
    found = np.zeros((n, n))
    for i in range(n - 1):
        found[i, i + 1 :] = np.maximum.accumulate(most[i : n - 1])
    return found


class _LiveBytes:
    """Live bytes at each equation, of the values that a range of equations makes. Terms of sums are added at once."""

    def __init__(self, body: FoldedBody) -> None:
        made = body.made.items()
        self.made = np.asarray([t for _, t in made], int)
        self.last = np.asarray([max(body.reads.get(v, ()), default=t) for v, t in made], int)
        self.size = np.asarray([bytes_of(v) for v, _ in made], float)
        self.inside = np.asarray([working_bytes(e) - sum(map(bytes_of, e.outvars)) for e in body.eqns], float)

    def between(self, begin: int, end: int) -> Floats:
        """(end - begin,) live bytes of the values that equations `begin` to `end` make, at each of them."""
        mine = (begin <= self.made) & (self.made < end)
        change = np.zeros(end - begin + 1)
        np.add.at(change, self.made[mine] - begin, self.size[mine])
        np.subtract.at(change, np.minimum(self.last[mine] + 1, end) - begin, self.size[mine])
        return change.cumsum()[:-1] + self.inside[begin:end]

    def most(self, begin: int, end: int) -> float:
        return float(self.between(begin, end).max(initial=0.0))
