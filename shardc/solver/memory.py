"""A limit on memory over time, as numbers: what an assignment takes when, and what a price on it adds to the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardc.solver.cost_tables import Index, Table, double
from shardc.solver.reduce import Use


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that may be in use at any time.

    Attributes:
      uses: (variable, begin, end, bytes for each of its values): in use during [begin, end). A variable may have
        several.
      limit: the most that may be in use at once.
    """

    uses: Sequence[tuple[int, int, int, Table]]
    limit: float

    def of(self, variables: int) -> list[list[Use]]:
        found: list[list[Use]] = [[] for _ in range(variables)]
        for v, begin, end, amounts in self.uses:
            if end > begin and np.any(amounts):
                found[v].append(Use(begin, end, double(np.asarray(amounts))))
        return found

    def peak(self, values: Sequence[int]) -> float:
        """The most that an assignment has in use at once."""
        times = np.asarray([(begin, end) for _, begin, end, _ in self.uses], np.int64).reshape(-1, 2)
        amounts = np.asarray([float(u[values[v]]) for v, _, _, u in self.uses])
        some = times[:, 1] > times[:, 0]
        moments, place = np.unique(times[some], return_inverse=True)
        place = place.reshape(-1, 2)
        size = len(moments) + 1
        change = np.bincount(place[:, 0], amounts[some], size) - np.bincount(place[:, 1], amounts[some], size)
        return float(np.cumsum(change).max(initial=0.0))


class Times:
    """The points of time that matter: those at which a set of uses is alive that no other point's set contains.

    Attributes:
      room: at each point the limit less what is in use whatever the values.
      owner, low, high: the variable of each use, and the points [low, high) of it.
      amounts: bytes of each use for each value of its owner.
    """

    def __init__(self, uses: Sequence[Sequence[Use]], fixed: Sequence[tuple[int, int, float]], limit: float) -> None:
        flat = [(v, u) for v, some in enumerate(uses) for u in some]
        spans = [(u.begin, u.end) for _, u in flat] + [(b, e) for b, e, _ in fixed]
        begins, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
        moments = np.unique(np.concatenate((begins, ends)))
        starts, stops = np.isin(moments, begins), np.isin(moments, ends)
        # a set is maximal at a moment when something begins and the next thing that happens is an end
        nexts = np.append(stops[1:], True)
        points = moments[starts & nexts]
        low, high = np.searchsorted(points, begins), np.searchsorted(points, ends)
        count = len(flat)
        least = np.asarray([u.bytes.min() for _, u in flat])
        most = np.asarray([u.bytes.max() for _, u in flat])
        held = np.asarray([amount for *_, amount in fixed])
        base = _profile(low[count:], high[count:], held, len(points))
        self.least = base + _profile(low[:count], high[:count], least, len(points))
        keep = base + _profile(low[:count], high[:count], most, len(points)) > limit
        where = np.concatenate(([0], np.cumsum(keep)))
        self.room: Table = (limit - base)[keep]
        low, high = where[low[:count]], where[high[:count]]
        some = np.flatnonzero((high > low) & (most > 0))
        self.owner: Index = np.asarray([flat[k][0] for k in some], np.intp)
        self.low, self.high = low[some], high[some]
        self.amounts: list[Table] = [flat[k][1].bytes for k in some]
        self.of: dict[int, list[int]] = {}
        for k, v in enumerate(self.owner):
            self.of.setdefault(int(v), []).append(k)
        sizes = np.asarray([a.size for a in self.amounts], np.intp)
        self._first = np.cumsum(sizes) - sizes
        self._flat = np.concatenate([np.zeros(0), *self.amounts])
        self._use = np.repeat(np.arange(len(sizes)), sizes)
        self._value = np.arange(len(self._flat)) - self._first[self._use]

    def profile(self, values: Index) -> Table:
        """What is in use at each point."""
        return _profile(self.low, self.high, self._flat[self._first + values[self.owner]], self.room.size)

    def price(self, prices: Table, first: Index, size: int) -> Table:
        """What the memory of each value of each variable costs, at a price a byte for each point; the values of the
        variables lie one after the other, from `first` on."""
        total = np.concatenate(([0.0], np.cumsum(prices)))
        dear = self._flat * (total[self.high] - total[self.low])[self._use]
        return np.asarray(np.bincount(first[self.owner][self._use] + self._value, dear, size), np.float64)

    def moved(self, room: Table, variable: int, before: int, after: int) -> bool:
        """Takes from the room what another value of a variable uses more, if there is enough."""
        uses = [(k, float(self.amounts[k][after] - self.amounts[k][before])) for k in self.of.get(variable, ())]
        for k, more in uses:
            room[self.low[k] : self.high[k]] -= more
        if all(more <= 0 or room[self.low[k] : self.high[k]].min() >= 0 for k, more in uses):
            return True
        for k, more in uses:
            room[self.low[k] : self.high[k]] += more
        return False


def _profile(low: Index, high: Index, amounts: Table, points: int) -> Table:
    change = np.bincount(low, amounts, points + 1) - np.bincount(high, amounts, points + 1)
    return np.asarray(np.cumsum(change)[:points], np.float64)
