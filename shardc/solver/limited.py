"""The minimum under a limit on memory: prices on memory (Lagrange multipliers), repair, and moves that keep the limit.

At any prices, the least cost with the memory paid for, less the price of all the room there is, is below the minimum
(Everett 1963, "Generalized Lagrange multiplier method"). The prices rise where an assignment takes too much and fall
where it leaves room (multiplicative weights), while messages are passed on. What is read at some prices is made to fit
by the moves that cost least for each byte, and then improved.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from shardc.solver.cost_tables import Index, Table
from shardc.solver.dual import Dual
from shardc.solver.memory import Times
from shardc.solver.reduce import Reduction

log = logging.getLogger("shardc")

CLOSE: Final = 1e-6
"""Relative distance of cost and bound at which an assignment counts as proved best."""
STEPS: Final = 20
"""Raisings of the first price, at most."""
GROWTH: Final = 4.0
"""By which the first price is raised until what is read about fits."""
RATE: Final = 3.0
"""First exponent of the weights for a limit exceeded by itself."""
LOWEST: Final = 1e-6
"""Least price, as part of the mean: a price of zero would never rise again."""
LEAST_FREED: Final = 1e-14
"""Moves of a repair free at least this part of the limit."""
BATCH: Final = 0.02
"""Part of the variables that one step of a repair may change."""
REPAIRS: Final = 400
"""Steps of a repair, at most."""
PEAK_TURNS: Final = 40
"""Changes of the prices in looking for the least memory."""
PEAK_RATE: Final = 4.0
"""First exponent of the weights of points where nothing is taken."""
SETTLE: Final = 30
"""Rounds of improving moves, at most."""


class Limited:
    """The search. `problem` is reduced without losing anything of its memory.

    Attributes:
      values: the best that fits, of the variables that are left; cost: of the whole assignment.
      bound: no assignment that fits costs less.
    """

    def __init__(self, problem: Reduction, limit: float, work: float) -> None:
        self.problem = problem
        self.inside = [v for v, some in enumerate(problem.inside) if some]
        number = {v: k for k, v in enumerate(self.inside)}
        self.own = [problem.own[v] for v in self.inside]
        self.near = [{number[j]: t for j, t in problem.near[v].items()} for v in self.inside]
        self.times = Times([problem.uses[v] for v in self.inside], problem.fixed_uses, limit)
        self.limit, self.work = limit, work
        self.dual = Dual(self.own, self.near, problem.ops.kernels)
        sizes = np.asarray([u.size for u in self.own], np.intp)
        self.first, self.flat = self.dual.first, self.dual.own
        self.variable = np.repeat(np.arange(len(sizes)), sizes)
        self.values: Index | None = None
        self.cost, self.bound = np.inf, -np.inf

    def run(self) -> None:
        if not self.inside or not self.times.room.size or not self.problem.feasible:
            if not self.inside and self.problem.feasible and self.times.room.min(initial=0.0) >= 0:
                self.values, self.cost = np.zeros(0, np.intp), self.problem.constant
                self.bound = self.cost
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
        """The assignment of the whole problem."""
        found = np.zeros(len(self.problem.own), np.intp)
        found[self.inside] = values
        return self.problem.restore(found.tolist())

    def _turn(self, prices: Table, raisings: int = 2) -> Table:
        """Passes messages at these prices. Gives by how much the assignment read exceeds the limit at each point."""
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
        """A price for all points alike at which what is read about fits."""
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
        """Moves that cost least for what they free where too much is in use, until it fits."""
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
        """Moves that cost less and keep the limit."""
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
        """Looks for an assignment of the least memory, whatever it costs; and a bound that no allowed one is below."""
        if not self.inside or not self.problem.feasible:
            return np.zeros(len(self.inside), np.intp), float(self.times.least.max(initial=0.0))
        nothing = np.where(np.isfinite(self.flat), 0.0, np.inf)
        free = {id(t): np.where(np.isfinite(t), 0.0, np.inf) for n in self.near for t in n.values()}
        near = [{j: free[id(t)] for j, t in n.items()} for n in self.near]
        dual = Dual(np.split(nothing, self.first[1:]), near, self.problem.ops.kernels)
        times, base = self.times, self.limit - self.times.room
        prices = np.full(base.size, 1.0 / max(base.size, 1))
        bound, best, peak = float(times.least.max(initial=0.0)), dual.values, np.inf
        for turn in range(1, PEAK_TURNS + 1):
            dual.set_own(nothing + times.price(prices, self.first, self.flat.size))
            dual.raise_bound()
            bound = max(bound, dual.bound + float((prices * base).sum()))
            for found in (dual.values, dual.improve(dual.values, 1)):
                taken = times.profile(found) + base
                if np.isfinite(dual.cost(found)) and taken.max(initial=0.0) < peak:
                    best, peak = found.copy(), float(taken.max(initial=0.0))
            taken = times.profile(dual.values) + base
            short = taken / max(taken.max(initial=0.0), 1.0) - 1.0
            prices = prices * np.exp(np.clip(short * PEAK_RATE / turn**0.5, -1.0, 0.0))
            prices /= max(float(prices.sum()), 1e-300)
        return best, min(bound, peak)
