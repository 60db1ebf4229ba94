"""The goodput of a run: the share of its time that went into steps that counted."""

from __future__ import annotations

import math


class Goodput:
    """Counts the time of steps that no loss has undone.

    Args:
      now: the time at which the run begins, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._epoch = 0
        self._seen: dict[int, list[tuple[float, int]]] = {}
        """For each epoch in which the loop made a step, when which step was seen first."""

    @property
    def losses(self) -> int:
        """How often the loop was interrupted."""
        return sum(epoch < self._epoch for epoch in self._seen)

    def see(self, now: float, epoch: int, step: int) -> None:
        """Record that the loop has done a step in an epoch. A late report belongs to the epoch before."""
        seen = self._seen.setdefault(epoch, [])
        if not seen or step > seen[-1][1]:
            seen.append((now, step))

    def begin(self, epoch: int) -> None:
        """Record that a new epoch begins: the loop goes on from a checkpoint."""
        self._epoch = epoch

    def seconds(self) -> float:
        """Seconds of the steps that counted: those after the step at which the next epoch went on do not."""
        useful, kept = 0.0, math.inf
        for _, seen in sorted(self._seen.items(), reverse=True):
            counted = [when for when, step in seen if step < kept]
            useful += counted[-1] - counted[0] if counted else 0.0
            kept = min(kept, seen[0][1])
        return useful

    def text(self, now: float) -> str:
        """The goodput as a line; empty if nothing was lost, or the run was too short to see its steps."""
        useful, total = self.seconds(), now - self._began
        if not self.losses or not useful:
            return ""
        times = f"{self.losses} interruption{'s' * (self.losses != 1)}"
        return f"goodput {useful / total:.0%}: {useful:.0f} of {total:.0f} s went into steps that counted; {times}"
