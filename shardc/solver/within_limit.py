"""The cheapest of several candidates that fits within a limit on memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

BUDGET: Final = 6
"""Plans of candidates of one kind, at most: amounts of recomputation, cuts, limits on stages."""
GOOD_ENOUGH: Final = 0.01
"""Relative distance of a plan that fits to a bound without the limit at which it is good enough: no other candidate is
planned."""

T = TypeVar("T")


class CheapestThatFits(Generic[T]):
    """The search for the cheapest candidate that fits. Where candidates differ is the business of those who make them:
    in placements, recomputation, cuts, registers, what lives on the host.

    Args:
      limit: the largest size that fits.
      size, cost: functions of a candidate.

    Attributes:
      tried: all candidates so far.
    """

    def __init__(self, limit: float, size: Callable[[T], float], cost: Callable[[T], float]) -> None:
        self.limit, self._size, self._cost = limit, size, cost
        self.tried: list[T] = []

    def add(self, candidate: T) -> T:
        self.tried.append(candidate)
        return candidate

    @property
    def best(self) -> T | None:
        """The cheapest that fits; None: none does."""
        return min((c for c in self.tried if self._size(c) <= self.limit), key=self._cost, default=None)

    @property
    def smallest(self) -> T:
        return min(self.tried, key=self._size)

    @property
    def nearest(self) -> T:
        """The cheapest that fits, or if none does the smallest."""
        best = self.best
        return self.smallest if best is None else best

    def may_win(self, least: float, margin: float = 0.0) -> bool:
        """Whether a candidate that costs at least so much may cost less than the best, by more than a part `margin`."""
        best = self.best
        return best is None or least < (1 - margin) * self._cost(best)
