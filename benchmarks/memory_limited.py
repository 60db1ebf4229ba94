"""Assignments within a limit on memory over time, by prices on memory (Everett 1963, Lagrange multipliers).

The planner does not use this: it has a limit of its own kind (`shardc.passes.place.memory_limit`). The contest's
problems have one, which `benchmarks.iopddl` measures the solver's messages on.

Only those points of time matter at which the set of live uses is maximal. The prices follow multiplicative weights, and
messages are kept from one change of the prices to the next. At any prices the bound less the price of the room is a
lower bound. An assignment that exceeds the limit is repaired by the moves that cost least for each byte they free.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardc.solver import SolverOptions, minimize, relative_gap
from shardc.solver.assignment_cost import AssignmentCost
from shardc.solver.cost_tables import Index, Memo, Pair, Table, double
from shardc.solver.dual import Dual
from shardc.solver.kernels import kernels_for
from shardc.solver.operations import Operations
from shardc.solver.reduce import Reduction

log = logging.getLogger("shardc")

UNLIMITED_PART: Final = 0.3
"""Part of the work that may go to the problem without its memory limit."""
CLOSE: Final = 1e-6
"""Relative distance of cost and bound at which an assignment counts as optimal."""
STEPS: Final = 20
"""Increases of the first price, at most."""
GROWTH: Final = 4.0
"""Factor of each of these increases."""
RATE: Final = 3.0
"""First exponent of the weights where twice the limit is in use."""
LOWEST: Final = 1e-6
"""The least price, as part of the mean: a price of zero would never rise again."""
LEAST_FREED: Final = 1e-14
"""Moves of a repair free at least this part of the limit."""
BATCH: Final = 0.02
"""Part of the variables that one step of a repair may change."""
REPAIRS: Final = 400
"""Steps of a repair, at most."""
PEAK_TURNS: Final = 40
"""Changes of the prices in the search for the least memory."""
PEAK_RATE: Final = 4.0
"""First exponent of the weights of points where nothing is in use."""
SETTLE: Final = 30
"""Rounds of improving moves, at most."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a variable during [begin, end): bytes for each of its values."""

    begin: int
    end: int
    bytes: Table


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on the bytes in use at any time.

    Attributes:
      uses: (variable, begin, end, bytes for each of its values): in use during [begin, end). A variable may have
        several.
      limit: the most that may be in use at once.
    """

    uses: Sequence[tuple[int, int, int, Table]]
    limit: float

    def of(self, variables: int) -> list[list[MemoryUse]]:
        found: list[list[MemoryUse]] = [[] for _ in range(variables)]
        for v, begin, end, amounts in self.uses:
            if end > begin and np.any(amounts):
                found[v].append(MemoryUse(begin, end, double(np.asarray(amounts))))
        return found

    def peak(self, values: Sequence[int]) -> float:
        """The most bytes that an assignment has in use at once."""
        times = np.asarray([(begin, end) for _, begin, end, _ in self.uses], np.int64).reshape(-1, 2)
        amounts = np.asarray([float(u[values[v]]) for v, _, _, u in self.uses])
        some = times[:, 1] > times[:, 0]
        moments, place = np.unique(times[some], return_inverse=True)
        place = place.reshape(-1, 2)
        size = len(moments) + 1
        change = np.bincount(place[:, 0], amounts[some], size) - np.bincount(place[:, 1], amounts[some], size)
        return float(np.cumsum(change).max(initial=0.0))


class Times:
    """The points of time that matter: those whose set of live uses is contained in no other point's set.

    Attributes:
      least: at each point in time the bytes that are in use at least.
      room: the limit, at each point that matters.
      owner, low, high: the variable of each use, and the points [low, high) of it.
      amounts: bytes of each use for each value of its owner.
    """

    def __init__(self, uses: Sequence[Sequence[MemoryUse]], limit: float) -> None:
        flat = [(v, u) for v, some in enumerate(uses) for u in some]
        spans = [(u.begin, u.end) for _, u in flat]
        begins, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
        moments = np.unique(np.concatenate((begins, ends)))
        starts, stops = np.isin(moments, begins), np.isin(moments, ends)
        # a set is maximal at a moment when something begins and the next thing that happens is an end
        nexts = np.append(stops[1:], True)
        points = moments[starts & nexts]
        low, high = np.searchsorted(points, begins), np.searchsorted(points, ends)
        least = np.asarray([u.bytes.min() for _, u in flat])
        most = np.asarray([u.bytes.max() for _, u in flat])
        self.least = _profile(low, high, least, len(points))
        keep = _profile(low, high, most, len(points)) > limit
        where = np.concatenate(([0], np.cumsum(keep)))
        self.room: Table = np.full(np.count_nonzero(keep), limit)
        low, high = where[low], where[high]
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
        """The bytes in use at each point."""
        return _profile(self.low, self.high, self._flat[self._first + values[self.owner]], self.room.size)

    def price(self, prices: Table, first: Index, size: int) -> Table:
        """The cost of the memory of each value, at a price per byte for each point. The values of variable v begin at
        first[v]."""
        total = np.concatenate(([0.0], np.cumsum(prices)))
        dear = self._flat * (total[self.high] - total[self.low])[self._use]
        return np.asarray(np.bincount(first[self.owner][self._use] + self._value, dear, size), np.float64)

    def moved(self, room: Table, variable: int, before: int, after: int) -> bool:
        """Subtracts from the room what a variable's new value uses more. Does nothing and returns False if it does not
        fit."""
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


class PricedDual(Dual):
    """Messages of a problem whose costs change with the prices."""

    def set_own(self, own: Table) -> None:
        """Replaces the costs of all values. The messages stay."""
        self.own, self.bound = own, -np.inf
        self._begin, self._last = self.messages, None

    def around(self, values: Index) -> Table:
        """For each value of each variable the cost of its tables, the other variables unchanged."""
        parts = [np.zeros(0)]
        for size, near in zip(np.diff(self.graph.first).tolist(), self.near, strict=True):
            parts.append(sum((table[:, values[j]] for j, table in near.items()), np.zeros(size)))
        return np.concatenate(parts)


class Limited:
    """The search, on a problem in which variables with memory uses are `held`: reducing it loses no use.

    Attributes:
      values: the best assignment that fits, of the variables that remain; cost: of the whole assignment.
      bound: no assignment that fits costs less.
    """

    def __init__(self, problem: Reduction, uses: Sequence[Sequence[MemoryUse]], limit: float, work: float) -> None:
        self.problem = problem
        self.inside = [v for v, some in enumerate(problem.inside) if some]
        number = {v: k for k, v in enumerate(self.inside)}
        self.own = [problem.own[v] for v in self.inside]
        self.near = [{number[j]: t for j, t in problem.near[v].items()} for v in self.inside]
        kept = problem.kept({v for v, some in enumerate(uses) if some})
        remaining = [[MemoryUse(u.begin, u.end, u.bytes[kept[v]]) for u in uses[v]] for v in self.inside]
        self.times = Times(remaining, limit)
        self.limit, self.work = limit, work
        self.dual = PricedDual(self.own, self.near, problem.ops.kernels)
        sizes = np.asarray([u.size for u in self.own], np.intp)
        self.first, self.flat = self.dual.first, self.dual.own
        self.variable = np.repeat(np.arange(len(sizes)), sizes)
        self.values: Index | None = None
        self.cost, self.bound = np.inf, -np.inf

    def run(self) -> None:
        if not self.times.room.size or not self.problem.feasible:
            return
        prices, turn, rate, last = self._first_prices(), 0, RATE, -np.inf
        while self.problem.ops.work < self.work and self.cost - self.bound > CLOSE * abs(self.cost):
            over = self._turn(prices)
            turn += 1
            if turn % 4 == 0:
                self._offer(self.dual.values, prices)
                if self.bound <= last:
                    rate *= 0.7
                last = self.bound
            share = over / self.limit
            log.debug("turn %d: bound %.6g, cost %.6g, over %.3f", turn, self.bound, self.cost, share.max())
            prices = np.maximum(prices, LOWEST * prices.mean()) * np.exp(np.clip(rate * share, -1.0, 1.0))

    def whole(self, values: Index) -> list[int]:
        """The assignment of the whole problem, from that of the variables that remain."""
        found = np.zeros(len(self.problem.own), np.intp)
        found[self.inside] = values
        return self.problem.restore(found.tolist())

    def _turn(self, prices: Table, raisings: int = 2) -> Table:
        """Passes messages at these prices. Returns by how much the assignment read exceeds the limit at each point."""
        extra = self.times.price(prices, self.first, self.flat.size)
        self.dual.set_own(self.flat + extra)
        for _ in range(raisings):
            self.dual.raise_bound()
            self.problem.ops.work += self.dual.work
        self.bound = max(self.bound, self.dual.bound + self.problem.constant - float((prices * self.times.room).sum()))
        return self.times.profile(self.dual.values) - self.times.room

    def _allowed(self, values: Index) -> bool:
        costs = self.flat + self.dual.around(values)
        return bool(np.isfinite(costs[self.first + values]).all())

    def _first_prices(self) -> Table:
        """One price for all points at which the assignment read nearly fits."""
        prices = np.zeros(self.times.room.size)
        over = self._turn(prices)
        self._offer(self.dual.values, prices)
        cost = float(np.abs(self.flat[np.isfinite(self.flat)]).sum()) + abs(self.dual.bound) + 1.0
        prices[:] = 1e-4 * cost / max(float(np.abs(over).sum()), 1.0)
        for _ in range(STEPS):
            over = self._turn(prices, 1)
            log.debug("price %.3g: over %.3f, bound %.6g", prices[0], over.max() / self.limit, self.bound)
            if over.max() <= 0.1 * self.limit:
                break
            prices *= GROWTH
        self._offer(self.dual.values, prices)
        return prices

    def _offer(self, values: Index, prices: Table) -> None:
        found = self._repaired(values.copy())
        if found is not None and self._allowed(found):
            found = self._settled(found)
            cost = self._cost(found)
            if cost < self.cost:
                self.values, self.cost = found, cost

    def _cost(self, values: Index) -> float:
        tables = self.dual.around(values)[self.first + values].sum() / 2
        return float(self.problem.constant + self.flat[self.first + values].sum() + tables)

    def _repaired(self, values: Index) -> Index | None:
        """Moves that cost least per byte freed at points over the limit, until the assignment fits."""
        for _ in range(REPAIRS):
            over = self.times.profile(values) - self.times.room
            self.problem.ops.work += self.dual.work // 16
            if over.max(initial=0.0) <= 0:
                return values
            weight = np.maximum(over, 0.0)
            bytes_ = self.times.price(weight / weight.sum(), self.first, self.flat.size)
            costs = self.flat + self.dual.around(values)
            here = (self.first + values)[self.variable]
            with np.errstate(invalid="ignore", divide="ignore"):
                freed, more = bytes_[here] - bytes_, costs - costs[here]
                some = (freed > LEAST_FREED * self.limit) & np.isfinite(costs)
                ratio = np.where(some, more / freed, np.inf)
            best = np.minimum.reduceat(ratio, self.first)
            order = np.argsort(best, kind="stable")
            order = order[np.isfinite(best[order])][: max(1, int(BATCH * len(best)))]
            if not order.size:
                return None
            held: set[int] = set()
            need = float(over.max())
            for v in order.tolist():
                if v in held or need <= 0:
                    continue
                held.update((v, *self.near[v]))
                part = slice(self.first[v], self.first[v] + self.own[v].size)
                values[v] = int(np.argmin(ratio[part]))
                need -= float(freed[part][values[v]])
        return None

    def _settled(self, values: Index) -> Index:
        """Moves that lower the cost and keep the limit."""
        room = self.times.room - self.times.profile(values)
        for _ in range(SETTLE):
            self.problem.ops.work += self.dual.work // 16
            costs = self.flat + self.dual.around(values)
            gain = costs[(self.first + values)[self.variable]] - costs
            some = np.flatnonzero(gain > 1e-9 * abs(self.cost if np.isfinite(self.cost) else 1.0))
            moved, held = False, set[int]()
            for k in some[np.argsort(-gain[some], kind="stable")].tolist():
                v = int(self.variable[k])
                if v not in held and self.times.moved(room, v, int(values[v]), k - int(self.first[v])):
                    values[v] = k - self.first[v]
                    held.update((v, *self.near[v]))
                    moved = True
            if not moved:
                break
        return values

    def least_peak(self) -> tuple[Index, float]:
        """An assignment of little memory, whatever its cost; and a lower bound of any allowed assignment's memory."""
        if not self.inside or not self.problem.feasible:
            return np.zeros(len(self.inside), np.intp), float(self.times.least.max(initial=0.0))
        nothing = np.where(np.isfinite(self.flat), 0.0, np.inf)
        free = {id(t): np.where(np.isfinite(t), 0.0, np.inf) for n in self.near for t in n.values()}
        near = [{j: free[id(t)] for j, t in n.items()} for n in self.near]
        dual = PricedDual(np.split(nothing, self.first[1:]), near, self.problem.ops.kernels)
        times, points = self.times, self.times.room.size
        prices = np.full(points, 1.0 / max(points, 1))
        bound, best, peak = float(times.least.max(initial=0.0)), dual.values, np.inf
        for turn in range(1, PEAK_TURNS + 1):
            dual.set_own(nothing + times.price(prices, self.first, self.flat.size))
            dual.raise_bound()
            bound = max(bound, dual.bound)
            for found in (dual.values, dual.improve(dual.values, 1)):
                taken = times.profile(found)
                if np.isfinite(dual.cost(found)) and taken.max(initial=0.0) < peak:
                    best, peak = found.copy(), float(taken.max(initial=0.0))
            taken = times.profile(dual.values)
            short = taken / max(taken.max(initial=0.0), 1.0) - 1.0
            prices = prices * np.exp(np.clip(short * PEAK_RATE / turn**0.5, -1.0, 0.0))
            prices /= max(float(prices.sum()), 1e-300)
        return best, min(bound, peak)


@dataclass(frozen=True, slots=True)
class LimitedSolution:
    """The result of `solve_limited`.

    Attributes:
      values: the value of each variable. If nothing fits: those of the least memory that was found.
      cost: their cost; infinite if they are not allowed or do not fit.
      bound: a lower bound of the cost of any allowed assignment that fits. Infinite: there is provably none.
      peak: the most bytes that the values have in use at once; least_peak: a lower bound of any allowed assignment's.
      cost_unlimited, bound_unlimited: cost and bound without the limit.
      work: table entries touched under the limit, roughly.
    """

    values: list[int]
    cost: float
    bound: float
    peak: float
    least_peak: float
    cost_unlimited: float
    bound_unlimited: float
    work: float

    @property
    def feasible(self) -> bool:
        """Whether the values are allowed and fit."""
        return bool(np.isfinite(self.cost))

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.bound)


def solve_limited(
    unary: Sequence[Table], pairwise: Mapping[Pair, Table], memory: MemoryLimit, work: float
) -> LimitedSolution:  # fmt: skip
    """Minimizes sum_i unary[i][x_i] + sum_(i,j) pairwise[i,j][x_i, x_j] over the assignments that fit.

    Work is counted in table entries, not in time: the result is the same on every machine.
    """
    free = minimize(unary, pairwise, options=SolverOptions(work=UNLIMITED_PART * work))
    if np.isfinite(free.cost) and memory.peak(free.values) <= memory.limit:
        peak = memory.peak(free.values)
        return LimitedSolution(free.values, free.cost, free.bound, peak, 0.0, free.cost, free.bound, 0.0)
    unary, full = [double(np.asarray(u)) for u in unary], AssignmentCost(unary, pairwise)
    ops, uses = Operations(Memo(), kernels_for(pairwise.values())), memory.of(len(unary))
    problem = Reduction.of(unary, pairwise, ops)
    problem.held = frozenset(v for v, some in enumerate(uses) if some)
    problem.run()
    limited = Limited(problem, uses, memory.limit, work)
    limited.run()
    least = float(limited.times.least.max(initial=0.0))
    if limited.values is not None:
        values = limited.whole(limited.values)
    else:
        found, least = limited.least_peak()
        values = limited.whole(found)
    peak = memory.peak(values)
    cost = full.cost(values) if peak <= memory.limit else np.inf
    nothing = least > memory.limit or free.bound == np.inf
    bound = np.inf if nothing else max(free.bound, limited.bound)
    return LimitedSolution(values, cost, bound, peak, least, free.cost, free.bound, ops.work)
