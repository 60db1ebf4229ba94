"""Makes a schedule from a planned order of forwards and input gradients: weight gradients fill idle time.

The plan may be rough: it decides only which of several runnable actions comes first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import StageCosts

WINDOW: Final = 12
"""Planned actions that are considered when the next one cannot run."""


class Squeezed(NamedTuple):
    """The order of each rank, and the end of the last action."""

    rows: tuple[tuple[Action, ...], ...]
    makespan: float


def squeeze(
    plan: Sequence[Sequence[Action]],
    rank_of: Sequence[int],
    costs: StageCosts,
    held: Sequence[int],
    latency: float = 0.0,
    *,
    window: int = WINDOW,
) -> Squeezed | None:
    """A schedule in the plan's order, except where waiting for the next action would leave a rank idle.

    F is a forward, I an input gradient, W a weight gradient, B both gradients at once. A free rank takes the first of
    these that can run:

    1. The plan's next action, if its inputs have arrived and, for F, there is memory for one more activation.
    2. The oldest W that is waiting.
    3. The first of the plan's next `window` actions that can run now: an I, or an F whose activation fits until the F's
       place in the plan, if every W runs right after its I. So an F that is moved up never takes the memory of an
       action that it overtakes.

    Args:
      plan: for each rank F and I of all its stages and microbatches, in an order without deadlock. With B instead of I
        the backward is not split.
      rank_of: the rank of each stage.
      costs: the costs of the actions.
      held: for each rank the most activations that it may hold, in chunks.
      latency: latency of a message between two ranks, in the unit of the costs.
      window: how many of the plan's next actions are considered in step 3.

    Returns:
      None if the plan cannot run with so few activations.
    """
    ranks = [_RankQueue(deque(row), room) for row, room in zip(plan, held, strict=True)]
    arrivals: dict[tuple[int, bool, int], float] = {}  # stage, forward?, microbatch: when its input is there
    last = len(rank_of) - 1
    calls = [(0.0, r) for r in range(len(ranks))]  # when to look at a rank again
    end = 0.0
    while calls:
        now, r = heapq.heappop(calls)
        rank = ranks[r]
        if now < rank.free:
            continue
        action = rank.take(arrivals, now, window)
        if action is None:
            continue
        rank.free = now + costs(action)
        end = max(end, rank.free)
        heapq.heappush(calls, (rank.free, r))
        stage, kind, microbatch = action
        target = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or target < 0:
            continue
        forward = kind == "F" and stage < last
        target = min(target, last)
        arrival = rank.free + (latency if rank_of[target] != r else 0.0)
        arrivals[target, forward, microbatch] = arrival
        heapq.heappush(calls, (arrival, rank_of[target]))
    if any(rank.plan for rank in ranks):
        return None
    return Squeezed(tuple(tuple(rank.done) for rank in ranks), end)


class _RankQueue:
    """The remaining actions of one rank, and the activations that it holds."""

    def __init__(self, plan: deque[Action], room: int) -> None:
        self.plan = plan
        self.room = room
        self.held = 0
        self.weights: deque[Action] = deque()
        self.done: list[Action] = []
        self.free = 0.0

    def take(self, arrivals: dict[tuple[int, bool, int], float], now: float, window: int) -> Action | None:
        """Pop the action to start now; None if the rank has to wait."""
        if self._later(arrivals, now, 1) == 0:
            action = self.plan.popleft()
        elif self.weights:
            action = self.weights.popleft()
        else:
            place = self._later(arrivals, now, window)
            if place is None:
                return None
            action = self.plan[place]
            del self.plan[place]
        self._count(action)
        self.done.append(action)
        return action

    def _can_run(self, action: Action, arrivals: dict[tuple[int, bool, int], float], now: float) -> bool:
        stage, kind, microbatch = action
        if kind == "F" and not stage:
            return True
        return arrivals.get((stage, kind == "F", microbatch), now + 1) <= now  # a gradient comes after the own forward

    def _later(self, arrivals: dict[tuple[int, bool, int], float], now: float, window: int) -> int | None:
        """The place of the first action of the plan that can run and may overtake those before it."""
        held = most = self.held
        for place in range(min(window, len(self.plan))):
            action = self.plan[place]
            if self._can_run(action, arrivals, now) and (action.kind != "F" or most < self.room):
                return place
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        return None

    def _count(self, action: Action) -> None:
        if action.kind == "F":
            self.held += 1
        elif action.kind == "I":
            self.weights.append(action._replace(kind="W"))
        else:
            self.held -= 1
