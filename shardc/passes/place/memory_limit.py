"""Memory as a limit: the cheapest plan that fits, if the cheapest plan of all does not.

The limit becomes costs: a price on each byte at each point of the program (Lagrange multipliers; Everett 1963,
"Generalized Lagrange multiplier method"). The ordinary search minimizes the sum of time and prices. Each solution
becomes a plan. Prices rise until the memory of a plan is within the limit.

Between the highest prices at which nothing fits and the lowest at which a plan fits, all layers of a model change at
once. So a plan that fits then takes parts of cheaper solutions, as many as fit. After that the higher prices are
applied to as few nodes as possible. For a small program, solutions are also tried one by one in the order of cost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.ir.box import Boxed
from shardc.passes.estimate.backend import Backend
from shardc.passes.estimate.memory import Profile, profile_memory
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.memory_prices import MemoryModel
from shardc.passes.place.place import Placed, Placer
from shardc.passes.place.relink import TOLERANCE, DifferingParts
from shardc.solver import Assignment, AssignmentCost, by_cost, choices_of
from shardc.solver.within_limit import GOOD_ENOUGH, CheapestThatFits

log = logging.getLogger("shardc")

FIRST_PRICE: Final = 0.02
"""Share of the cost that the first price adds for the excess memory. What a search with these numbers takes and reaches
at limits from 80 % to 35 % stands in docs/design/memory-limit.md."""
LEAST_COST: Final = 1e-9
"""Seconds that a cheaper plan is taken to cost."""
PRICE_GROWTH: Final = 4.0
"""Factor by which the price rises until a plan fits."""
PRICE_RAISES: Final = 16
"""Raises of the price, at most."""
STALLED: Final = 5
"""Raises without a smaller plan after which there is none; the last one uses the whole search."""
MEMORY_DECIDES: Final = 1e6
"""Ratio of the cost of memory to that of the plan above which memory alone decides."""
STEPS: Final = (0.97, 0.93, 0.88)
"""Parts of the peak of the smallest plan, above which memory has a price where nothing fits in a small program."""
PRICE_BISECTIONS: Final = 3
"""Bisection steps between the highest prices at which nothing fits and the lowest at which something does."""
JOINING: Final = 1e9
"""Work on one merge of solutions, at most."""
BOUND_TOLERANCE: Final = 1e-4
"""Relative gap at which a search for a bound ends."""
ROUNDS: Final = 3
"""Rounds of taking parts of all solutions tried, at most."""
CROSSINGS: Final = 4
"""Plans made to find which parts of one solution fit, at most: the memory model is nearly right."""
TRIALS: Final = 5000
"""Plans of a small program that are tried in the order of cost, times its nodes (docs/design/memory-limit.md, 6)."""
FEW_NODES: Final = 200
"""Nodes of a small program, at most."""
ELIMINATION: Final = 1e7
"""Entries of the tables that sort its choices by cost, at most."""
POOL: Final = 8
"""Solutions whose choices are merged, besides the cheapest without a limit."""

Prices: TypeAlias = NDArray[np.float64]
"""Seconds a byte at each point of the program."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A solution, its plan, and the memory of the plan."""

    found: Assignment
    placed: Placed
    boxed: Boxed
    profile: Profile

    @property
    def peak(self) -> int:
        return self.profile.peak


@dataclass(frozen=True, eq=False)
class LimitResult:
    """The result of a search within a limit.

    Attributes:
      best: the cheapest plan that fits; None: nothing does.
      least: the plan with least memory of all that were tried.
      arguments: the least bytes that the arguments alone can take.
    """

    best: Trial | None
    least: Trial
    arguments: float


class LimitSearch:
    """The search for the cheapest plan that takes at most `limit` bytes of each device.

    Args:
      placer: the placer of the problem.
      ties: for each result that may reuse the buffer of a donated argument, the number of this argument. It does if
        their placements agree.
      backend: the backend of the devices.
      limit: bytes per device.

    Attributes:
      target: bytes above which memory has a price: the limit, or less where nothing fits.
    """

    def __init__(self, placer: Placer, ties: Mapping[int, int], backend: Backend, limit: float) -> None:
        self.placer, self.problem, self.ties, self.backend, self.limit = placer, placer.problem, ties, backend, limit
        self.target = limit
        self.costs = AssignmentCost(placer.tables.unary, placer.tables.pairwise)
        self.found = CheapestThatFits[Trial](limit, lambda t: t.peak, lambda t: t.found.cost)
        self.pool: list[Sequence[int]] = []
        self.partings: list[int] = []
        self._tried: dict[tuple[int, ...], Trial] = {}

    @property
    def is_small(self) -> bool:
        """Whether the program has so few nodes that there is time for more searches."""
        return len(self.problem.nodes) <= FEW_NODES

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.problem, self.placer.tables, self.ties, self.backend)

    def try_(self, choices: Sequence[int]) -> Trial:
        """The plan of some choices. If it does not fit, copies are dropped at the points of most excess and boxed again
        later (`partings` of `insert_boxing`), where that lowers the peak."""
        key = tuple(choices)
        if key not in self._tried:
            trial = self._make(choices)
            if trial.peak > self.limit and not self.backend.eager:
                partings = sorted({*self.partings, *self._fullest(trial)})
                other = self._make(choices, partings)
                if other.peak < trial.peak:
                    trial, self.partings = other, partings
            self._tried[key] = self.found.add(trial)
        return self._tried[key]

    def _make(self, choices: Sequence[int], partings: Sequence[int] = ()) -> Trial:
        problem, mesh = self.problem, self.placer.mesh
        found = Assignment(list(choices), self.costs.cost(choices), 0.0)
        placed = self.placer.placed(found)
        boxed = insert_boxing(problem, placed, mesh, partings)
        ties = {
            k: i for k, i in self.ties.items()
            if placed.ports[problem.sources[i]][-1] == placed.ports[problem.sinks[k]][0]
        }  # fmt: skip
        profile = profile_memory(boxed.jaxpr, boxed.placements, mesh.sizes, ties=ties, backend=self.backend)
        return Trial(found, placed, boxed, profile)

    def _fullest(self, trial: Trial) -> list[int]:
        """The point of most excess in each interval in which memory is above the limit."""
        over = self._over(trial)
        full = np.flatnonzero(over > 0)
        stretches = np.split(full, np.flatnonzero(np.diff(full) > 1) + 1)
        return [int(s[np.argmax(over[s])]) for s in stretches if s.size]

    def _over(self, trial: Trial) -> NDArray[np.float64]:
        """(points,) bytes above the target; 0 where memory is within it."""
        return np.maximum(self.memory.used(trial.boxed, trial.profile.bytes) - self.target, 0.0)

    def run(self, cheapest: Assignment, alone: bool = True) -> LimitResult:
        """The cheapest plan that fits.

        Args:
          cheapest: the solution without the limit.
          alone: the bound is for this program alone, not also for programs that recompute values.
        """
        first, prices, bound = self.try_(cheapest.values), None, cheapest.bound
        if first.peak > self.limit and self.memory.least_arguments() <= self.limit:
            self.pool.append(cheapest.values)
            low, prices = self._raise_prices(first)
            if self.found.best is None and self.is_small:
                low, prices = self._step_down(low, prices)
            if self.found.best is not None:
                if self.found.may_win(cheapest.bound, GOOD_ENOUGH):
                    low, prices = self._between(low, prices)
                self._relink()
                self._mix(low, prices, cheapest.cost)
            reached = self._in_order()
            bound = max(bound, reached) if alone else bound
        best = self.found.best
        if best is not None:
            over = first.profile.memory.arguments > self.limit
            if over and prices is not None and self.found.may_win(bound, GOOD_ENOUGH):
                bound = max(bound, self._bound(prices, best))
            found = replace(best.found, bound=min(bound, best.found.cost))
            best = replace(best, found=found, placed=self.placer.placed(found))
        return LimitResult(best, self.found.smallest, self.memory.least_arguments())

    def least_cost(self, most: float) -> float:
        """The least cost of all solutions tried that take at most `most` bytes."""
        return min((t.found.cost for t in self.found.tried if t.peak <= most), default=np.inf)

    def _in_order(self) -> float:
        """Try the solutions of a small program in the order of increasing cost until one fits.

        Returns:
          A lower bound on the cost of all plans that fit: no solution that costs less does. -inf if the program is not
          small.
        """
        nodes, tables, reached = len(self.problem.nodes), self.placer.tables, -np.inf
        if not self.is_small or (choices := by_cost(tables.unary, tables.pairwise, ELIMINATION)) is None:
            return reached
        least = self.least_cost(self.limit)
        for cost, values in islice(choices, TRIALS // nodes):
            if cost >= least:
                return least
            trial = self.try_(values)
            if trial.peak <= self.limit:
                return trial.found.cost
            reached = cost
        return reached

    def _bound(self, prices: Prices, best: Trial) -> float:
        """A lower bound on the cost of plans that fit: Lagrangian relaxation with a price on arguments alone.

        It is the least cost with a price on the bytes of arguments, minus price * limit. In a plan that fits, arguments
        take at most the limit. Other memory depends on the boxings as well, so a price on it gives no valid bound.
        """
        on = np.zeros(len(self.memory.terms))
        on[: self.memory.arguments] = price = float(prices.sum())
        found = self.memory.priced(on).minimize(best.found.values, close=BOUND_TOLERANCE)
        log.debug("bound %.5g", found.bound - price * self.limit)
        return found.bound - price * self.limit

    def _at(self, prices: Prices, start: Trial, thorough: bool = False) -> Trial:
        """The best solution found at these prices, by moves along the axes or (`thorough`) by the whole search, merged
        with the solutions found so far."""
        self.memory.memo.forget()
        on, begin = self.memory.prices(prices), start.found.values
        if thorough:
            values = self.memory.priced(on).best(begin, proved=False).values
        else:
            values = self.placer.tables.move(begin, 1, lambda offered: self.memory.among(offered).priced(on))
        self.pool.append(values)
        trial = self._joined(on, values)
        log.debug("price %.3g: %.4g s, %.4g bytes of %.4g", prices.sum(), trial.found.cost, trial.peak, self.limit)
        return trial

    def _joined(self, on: NDArray[np.float64], start: Sequence[int]) -> Trial:
        """The best combination of the choices of the solutions found so far and `start` (as `Tables.merge`), with the
        price `on` each memory term."""
        offered = choices_of([*self.pool[:1], *self.pool[1:][-POOL:], start])
        return self.try_(self.memory.among(offered).priced(on).minimize(start, JOINING, TOLERANCE).values)

    def _raise_prices(self, first: Trial) -> tuple[Prices, Prices]:
        """Raise prices until a plan fits, or none gets smaller. Returns the last prices at which nothing fits, and the
        first at which a plan fits."""
        over, least, stalled = first, first, 0
        price = FIRST_PRICE * max(first.found.cost, LEAST_COST) / max(first.peak - self.target, 0.1 * self.target)
        low = high = np.zeros(self.memory.points)
        for _ in range(PRICE_RAISES):
            excess = self._over(over) ** 2
            high = 2 * low + price * excess / excess.sum()
            before, over = over, self._at(high, over, thorough=stalled == STALLED - 1)
            if over.peak <= max(self.limit, self.target):
                break
            if over is before:  # the price is too low to change anything
                price *= PRICE_GROWTH
            priced = least is not first or high.sum() * least.peak > MEMORY_DECIDES * least.found.cost
            stalled = stalled + 1 if priced and over.peak >= least.peak else 0
            if stalled == STALLED:
                break
            low, least, price = high, min(least, over, key=lambda t: t.peak), price * PRICE_GROWTH
        return low, high

    def _step_down(self, low: Prices, high: Prices) -> tuple[Prices, Prices]:
        """Raise prices on what exceeds parts of the smallest plan's peak, until a plan fits or none gets smaller: which
        points have a price decides what is found. Returns the prices of the last search, as `_raise_prices`."""
        for share in STEPS:
            while self.found.best is None:
                least = self.found.smallest
                self.target = share * least.peak
                low, high = self._raise_prices(least)
                if self.found.smallest is least:
                    break
        self.target = self.limit
        return low, high

    def _between(self, low: Prices, high: Prices) -> tuple[Prices, Prices]:
        """Bisect between prices at which nothing fits and prices at which a plan fits. Returns both, closer to each
        other."""
        for _ in range(PRICE_BISECTIONS):
            if not self.found.may_win(self._hoped_for(), TOLERANCE):
                break
            middle = (low + high) / 2 if low.any() else high / PRICE_GROWTH
            if self._at(middle, self.found.nearest).peak <= self.limit:
                high = middle
            else:
                low = middle
        return low, high

    def _relink(self) -> None:
        """Improve the best plan by those parts of cheaper solutions that fit as well (path relinking)."""
        for _ in range(ROUNDS):
            before = self.found.nearest
            cheaper = (t for t in self.found.tried if t.found.cost < before.found.cost)
            for other in sorted(cheaper, key=lambda t: t.peak):
                self._cross(self.found.nearest, other)
            if self.found.nearest is before:
                break

    def _cross(self, fits: Trial, other: Trial) -> None:
        """Try plans that take each differing part from one of two solutions."""
        parts = DifferingParts(self.memory, fits.found.values, other.found.values)
        base, taken = fits, np.zeros(parts.costs.size, np.bool_)
        for _ in range(CROSSINGS):
            found = parts.best(self.limit - self.memory.used(base.boxed, base.profile.bytes), taken)
            if found is None or (found == taken).all():
                break
            if not self.found.may_win(fits.found.cost + float(parts.costs @ found), TOLERANCE):
                break
            base, taken = self.try_(parts.of(found)), found
            log.debug("%d of %d parts: %.4g s, %.4g bytes", found.sum(), found.size, base.found.cost, base.peak)

    def _mix(self, low: Prices, high: Prices, least: float) -> None:
        """Apply the higher prices to as few nodes as possible, the lower prices to the others.

        The nodes with higher prices are a range: first its end is chosen by bisection, then its beginning. The search
        stops when a plan that fits costs at most `TOLERANCE` more than `least`, or than `_hoped_for`.
        """
        rank = np.asarray([h.first for h in self.memory.terms])
        higher, lower = self.memory.prices(high), self.memory.prices(low)

        def fits(first: int, last: int) -> bool:
            there = np.where((first <= rank) & (rank < last), higher, lower)
            trial = self._joined(there, self.found.nearest.found.values)
            log.debug("higher prices on %d-%d: %.4g s, %.4g bytes", first, last, trial.found.cost, trial.peak)
            return trial.peak <= self.limit

        def least_that(fits: Callable[[int], bool], high: int) -> int:
            """Bisection for the least number that `fits`; `high` does. It ends early if nothing cheaper is likely."""
            low = 0
            while high - low > 1 and self.found.may_win(max(least, self._hoped_for()), TOLERANCE):
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle) else (middle, high)
            return high

        last = least_that(lambda n: fits(0, n), len(self.problem.nodes))
        least_that(lambda n: fits(last - n, last), last)

    def _hoped_for(self) -> float:
        """An estimate of the cost at the limit: linear interpolation between a solution that fits and one that does
        not, the least over all such pairs."""
        tried = np.asarray([(t.peak, t.found.cost) for t in self.found.tried], np.float64)
        fits = tried[:, 0] <= self.limit
        (low, cost), (high, other) = tried[fits].T[:, :, None], tried[~fits].T[:, None, :]
        return float((cost + (other - cost) * (self.limit - low) / (high - low)).min(initial=np.inf))
