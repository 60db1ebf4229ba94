"""The budget of restarts of a run: so many in all, or within a time, and the pauses before them."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from shardc.errors import number_text

_LONGEST: Final = 300.0
"""The longest pause in seconds, as of a pod of Kubernetes that fails again and again."""


class RestartBudget:
    """Counts restarts.

    Args:
      most: how many there may be.
      window: within how many seconds; infinite: in all. With a window the second restart within it waits for 1 s, the
        next ones for 2, 4, 8 ...: what fails at once uses up no budget of weeks in a minute.
    """

    def __init__(self, most: int, window: float = math.inf) -> None:
        self._most, self._window = most, window
        self._taken: deque[float] = deque()
        self.taken = 0
        """How many there were so far."""

    def left(self, now: float) -> int:
        """How many there may be now."""
        while self._taken and now - self._taken[0] > self._window:
            self._taken.popleft()
        return self._most - len(self._taken)

    def take(self, now: float) -> float:
        """Take one. Returns the seconds to wait before it."""
        earlier = self._most - self.left(now)
        self._taken.append(now)
        self.taken += 1
        return min(_LONGEST, 2.0 ** (earlier - 1)) if earlier and self._window < math.inf else 0.0

    def text(self, now: float) -> str:
        """`2 restarts are left`."""
        left = self.left(now)
        within = "" if self._window == math.inf else f" of {self._most} within {self._window:g} s"
        return f"{number_text(left, 'restart')}{within} {'is' if left == 1 else 'are'} left"
