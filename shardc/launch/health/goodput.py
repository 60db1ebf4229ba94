"""The goodput of a run: the share of its time that went into steps that counted."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

_MOST: Final = 1000
"""The most times of one epoch that are kept; between two of them steps count as equally long."""


class Goodput:
    """Counts the time of steps that no loss has undone.

    Args:
      now: the time at which the run begins, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._epoch = 0
        self._seen: dict[int, list[tuple[int, float]]] = {}
        """For each epoch in which the loop made a step, steps and when they were done, the first and the last among
        them. The clock is the epoch's own."""

    @property
    def losses(self) -> int:
        """How often the loop was interrupted."""
        return sum(epoch < self._epoch for epoch in self._seen)

    def see(self, at: float, epoch: int, step: int) -> None:
        """Record that the loop has done a step of an epoch at a time. A late report belongs to the epoch before."""
        seen = self._seen.setdefault(epoch, [])
        if not seen or step > seen[-1][0]:
            seen.append((step, at))
        if len(seen) > _MOST:
            seen[:] = [*seen[:-1:2], seen[-1]]

    def begin(self, epoch: int) -> None:
        """Record that a new epoch begins: the loop goes on from a checkpoint."""
        self._epoch = epoch

    def seconds(self) -> float:
        """Seconds of the steps that counted: those after the step at which the next epoch went on do not."""
        useful, kept = 0.0, math.inf
        for _, seen in sorted(self._seen.items(), reverse=True):
            useful += _time_of(seen, kept - 1) - seen[0][1]
            kept = min(kept, seen[0][0])
        return useful

    def share(self, now: float) -> float | None:
        """The part of the run's time that counted; None before the first step."""
        return self.seconds() / max(now - self._began, 1e-9) if self._seen else None

    def text(self, now: float) -> str:
        """The goodput as a line; empty if nothing was lost, or the run was too short to see its steps."""
        useful, total = self.seconds(), now - self._began
        if not self.losses or not useful:
            return ""
        times = f"{self.losses} interruption{'s' * (self.losses != 1)}"
        return f"goodput {useful / total:.0%}: {useful:.0f} of {total:.0f} s went into steps that counted; {times}"


def _time_of(seen: list[tuple[int, float]], step: float) -> float:
    """When a step was done; at the earliest the first one. One after the last one that is known, which the process has
    not said before it was lost, took as long as the others; without end stands for the last one that is known."""
    (first, begin), (last, end) = seen[0], seen[-1]
    if step <= first or last == first or math.isinf(step):
        return begin if step <= first else end
    if step > last:
        return end + (end - begin) * (step - last) / (last - first)
    after = bisect_right(seen, step, hi=len(seen) - 1, key=lambda pair: pair[0])
    (before, begin), (later, end) = seen[after - 1], seen[after]
    return begin + (end - begin) * (step - before) / (later - before)
