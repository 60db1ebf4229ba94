"""What a stage between two points of a folded body holds, for all pairs of points at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardc.compat import Var
from shardc.passes.find_points import Floats, Points
from shardc.passes.fold_body import FoldedBody
from shardc.passes.memory import bytes_of, working_bytes


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage from point i to point j; each (n, n).

    Attributes:
      state: its parameters and what is kept with them.
      stash: what one microbatch leaves for the backward pass, its inputs included.
      inputs: these alone; (n, 1).
      working: the most that lives while it computes besides these.
    """

    state: Floats
    stash: Floats
    inputs: Floats
    working: Floats

    def activations(self, held: int, again: bool) -> Floats:
        """Of so many microbatches; a stage whose forward lies in its backward keeps inputs, and all of one."""
        return held * self.inputs + self.stash if again else held * self.stash

    def needed(self, held: int, again: bool) -> Floats:
        return self.state + self.activations(held, again) + self.working


def stage_memory(body: FoldedBody, points: Points, state: Callable[[Var], float]) -> StageMemory:
    """The memory of every possible stage, on a device that holds all of its values.

    Args:
      body, points: what is cut, and where.
      state: bytes that live wherever an input of the body is read.
    """
    n = len(points.ahead)
    where = np.searchsorted(points.ahead, np.arange(body.fold), side="right") - 1  # the point in front of each equation
    held = np.zeros((n + 1, n + 1))
    for v in body.loop.body.invars:
        places = sorted({int(where[t]) for t in body.reads.get(v, ()) if t < body.fold})
        size = state(v) if places else 0.0
        for before, place in zip([-1, *places], places, strict=False):  # stages that begin behind `before` and
            held[before + 1, place + 1] += size  # end behind `place`, but those that begin behind `place`
            held[place + 1, place + 1] -= size
    left, inputs = _stash(body, points, where)
    return StageMemory(held.cumsum(0).cumsum(1)[:n, :n], left, inputs, _working(body, points, where))


def _stash(body: FoldedBody, points: Points, where: np.ndarray) -> tuple[Floats, Floats]:
    """What each stage keeps for one microbatch, (n, n), and the part that comes from the stage before, (n, 1)."""
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


def _working(body: FoldedBody, points: Points, where: np.ndarray) -> Floats:
    """The largest operation of each stage's forward, or the most that lives at once of what its backward makes."""
    n, count = len(points.ahead), len(body.eqns)
    inside = np.asarray([working_bytes(e) - sum(map(bytes_of, e.outvars)) for e in body.eqns])
    change = np.zeros(count + 1)
    for v, t in body.made.items():
        until = max(body.reads.get(v, ()), default=t) if t >= body.fold else t  # a term of a sum is added at once
        change[t] += bytes_of(v)
        change[until + 1] -= bytes_of(v)
    back = (points.back[None, :] > np.arange(body.fold, count)[:, None]).sum(1) - 1
    most = np.zeros(n)
    np.maximum.at(most, np.concatenate([where, back]), change.cumsum()[:count] + inside)
    found = np.zeros((n, n))
    for i in range(n - 1):
        found[i, i + 1 :] = np.maximum.accumulate(most[i : n - 1])
    return found
