"""Memory as a limit: where the cheapest plan does not fit, the cheapest found that does.

Prices on memory at each point of time (Everett 1963, "Generalized Lagrange multiplier method") turn the limit into
costs, and the ordinary search minimises these. A plan that was made is the judge: where it takes too much, memory
becomes dearer. Between the dearest prices at which nothing fits and the cheapest at which it does, all layers of a
model change at once; so what fits takes such parts of what is cheaper as fit as well, and what was found is mixed, the
higher prices on a part of the nodes only, as few as will do. Of a small program the cheapest choices are tried one by
one.
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
from shardc.passes.estimate.backend import Habits
from shardc.passes.estimate.memory import Profile, profile_memory
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.memory_prices import Charges
from shardc.passes.place.place import Placed, Placer
from shardc.passes.place.relink import Relink
from shardc.solver import Assignment, AssignmentCost, by_cost, choices_of

log = logging.getLogger("shardc")

FIRST_PRICE: Final = 0.02
"""Part of the cost that the first price makes of what is too much."""
LEAST_COST: Final = 1e-9
"""Seconds: what costs less is taken to cost so much."""
GROWTH: Final = 4.0
"""By which the price rises until a plan fits."""
RAISINGS: Final = 16
"""Of the price, at most."""
STALLED: Final = 5
"""Raisings without a smaller plan after which there is none; the last of them has the whole search."""
DEAREST: Final = 1e6
"""So many times what a plan costs is what its memory costs where nothing else is dear any more."""
HALVINGS: Final = 3
"""Of the room between prices at which nothing fits and those at which something does."""
MIXTURES: Final = 12
"""Of these two, tried to find the fewest nodes that have to pay the higher ones."""
JOINING: Final = 1e9
"""Work on one joining, at most."""
NEAR: Final = 1e-3
"""Relative distance to the best at which it ends, and to what would be cheapest without a limit at which nothing more
is mixed."""
ENOUGH: Final = 1e-4
"""Relative distance of what is found to the bound where a bound is all that is wanted."""
GOOD_ENOUGH: Final = 0.01
"""Relative distance of what fits to the bound without a limit up to which it is good enough: prices are not halved, no
bound is looked for that knows of the limit, and no other program."""
ROUNDS: Final = 3
"""Of taking parts of all that was tried, at most."""
CROSSINGS: Final = 4
"""Programs made to find which parts of one assignment fit, at most: what is known of memory before is nearly right."""
TRIALS: Final = 5000
"""Of the cheapest choices of a small program, one by one: so many of one node, and of more the fewer."""
SMALL: Final = 200
"""Nodes of such a program, at most."""
ELIMINATION: Final = 1e7
"""Entries of the tables that put its choices in order, at most."""
POOL: Final = 8
"""Assignments whose choices are joined, besides the cheapest without a limit."""

Prices: TypeAlias = NDArray[np.float64]
"""Seconds a byte at each point of the program."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Choices of all nodes, and what their plan has in memory."""

    found: Assignment
    placed: Placed
    boxed: Boxed
    profile: Profile

    @property
    def peak(self) -> int:
        return self.profile.peak


@dataclass(frozen=True, eq=False)
class Fitted:
    """What was found.

    Attributes:
      best: the cheapest that fits; None: nothing does.
      least: what takes least of all that was tried.
      arguments: the least that the arguments alone can take.
    """

    best: Trial | None
    least: Trial
    arguments: float


class Fit:
    """The search for the cheapest plan that takes no more than `limit` bytes of each device.

    Args:
      placer: of the problem.
      ties: for results the number of the donated argument whose buffer each takes if they lie alike.
      habits: of the device.
      limit: bytes.
    """

    def __init__(self, placer: Placer, ties: Mapping[int, int], habits: Habits, limit: float) -> None:
        self.placer, self.problem, self.ties, self.habits, self.limit = placer, placer.problem, ties, habits, limit
        self.costs = AssignmentCost(placer.tables.unary, placer.tables.pairwise)
        self.pool: list[Sequence[int]] = []
        self.partings: list[int] = []
        self._tried: dict[tuple[int, ...], Trial] = {}

    @cached_property
    def charges(self) -> Charges:
        return Charges(self.problem, self.placer.tables, self.ties, self.habits)

    def try_(self, choices: Sequence[int]) -> Trial:
        """Makes the boxed program of some choices; where it does not fit, with copies parted where it is too full."""
        key = tuple(choices)
        if key not in self._tried:
            trial = self._make(choices)
            if trial.peak > self.limit and not self.habits.eager:
                partings = sorted({*self.partings, *self._fullest(trial)})
                other = self._make(choices, partings)
                if other.peak < trial.peak:
                    trial, self.partings = other, partings
            self._tried[key] = trial
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
        profile = profile_memory(boxed.jaxpr, boxed.placements, mesh.sizes, ties=ties, habits=self.habits)
        return Trial(found, placed, boxed, profile)

    def _fullest(self, trial: Trial) -> list[int]:
        """Of each stretch that is too full the point at which it is fullest."""
        over = self._over(trial)
        full = np.flatnonzero(over > 0)
        stretches = np.split(full, np.flatnonzero(np.diff(full) > 1) + 1)
        return [int(s[np.argmax(over[s])]) for s in stretches if s.size]

    def _over(self, trial: Trial) -> NDArray[np.float64]:
        """(points,) bytes above the limit."""
        return np.maximum(self.charges.used(trial.boxed, trial.profile.bytes) - self.limit, 0.0)

    def run(self, cheapest: Assignment, alone: bool = True) -> Fitted:
        """The cheapest that fits.

        Args:
          cheapest: what is cheapest without the limit.
          alone: the bound is of this program alone, not also of those that compute again what it keeps.
        """
        first, prices, bound = self.try_(cheapest.values), None, cheapest.bound
        if first.peak > self.limit and self.charges.least_arguments() <= self.limit:
            self.pool.append(cheapest.values)
            low, prices, fits = self._raise_prices(first)
            if fits is not None:
                if fits.found.cost - cheapest.bound > GOOD_ENOUGH * fits.found.cost:
                    low, prices, fits = self._between(low, prices, fits)
                self._mix(low, prices, self._relink(fits), cheapest.cost)
            reached = self._in_order()
            bound = max(bound, reached) if alone else bound
        tried = self._tried.values()
        best = min((t for t in tried if t.peak <= self.limit), key=lambda t: t.found.cost, default=None)
        if best is not None:
            far = best.found.cost - bound > GOOD_ENOUGH * best.found.cost
            if far and prices is not None and first.profile.memory.arguments > self.limit:
                bound = max(bound, self._bound(prices, best))
            found = replace(best.found, bound=min(bound, best.found.cost))
            best = replace(best, found=found, placed=self.placer.placed(found))
        return Fitted(best, min(tried, key=lambda t: t.peak), self.charges.least_arguments())

    def least_cost(self, most: float) -> float:
        """Of all that was tried and takes no more than so many bytes."""
        return min((t.found.cost for t in self._tried.values() if t.peak <= most), default=np.inf)

    def _in_order(self) -> float:
        """Of a small program tries what is cheapest, one after the other, until one fits. What fits costs no less than
        the one that it comes to: all that are cheaper do not."""
        nodes, tables, reached = len(self.problem.nodes), self.placer.tables, -np.inf
        if nodes > SMALL or (choices := by_cost(tables.unary, tables.pairwise, ELIMINATION)) is None:
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
        """A lower bound of the cost of what fits: the least cost with a price on arguments, of which there is never
        more than the limit, less the price of the limit. All else depends on boxings too, and proves nothing."""
        on = np.zeros(len(self.charges.holdings))
        on[: self.charges.arguments] = price = float(prices.sum())
        found = self.charges.priced(on).minimize(best.found.values, close=ENOUGH)
        log.debug("bound %.5g", found.bound - price * self.limit)
        return found.bound - price * self.limit

    def _at(self, prices: Prices, start: Trial, thorough: bool = False) -> Trial:
        """The best found at some prices: along the axes, or by the whole search; then of all that was found so far,
        joined."""
        self.charges.memo.forget()
        on, begin = self.charges.prices(prices), start.found.values
        if thorough:
            values = self.charges.priced(on).best(begin, proved=False).values
        else:
            values = self.placer.tables.move(begin, 1, lambda offered: self.charges.among(offered).priced(on))
        self.pool.append(values)
        trial = self._joined(on, values)
        log.debug("price %.3g: %.4g s, %.4g bytes of %.4g", prices.sum(), trial.found.cost, trial.peak, self.limit)
        return trial

    def _joined(self, on: NDArray[np.float64], start: Sequence[int]) -> Trial:
        """Of what was found the best choice for each node, together (as `Tables.fuse`), at prices on the holdings."""
        offered = choices_of([*self.pool[:1], *self.pool[1:][-POOL:], start])
        return self.try_(self.charges.among(offered).priced(on).minimize(start, JOINING, NEAR).values)

    def _raise_prices(self, first: Trial) -> tuple[Prices, Prices, Trial | None]:
        """Until a plan fits: the last prices at which none did, those at which one does, and that one, if any."""
        over, least, stalled = first, first, 0
        price = FIRST_PRICE * max(first.found.cost, LEAST_COST) / max(first.peak - self.limit, 0.1 * self.limit)
        low = high = np.zeros(self.charges.points)
        for _ in range(RAISINGS):
            excess = self._over(over) ** 2
            high = 2 * low + price * excess / excess.sum()
            before, over = over, self._at(high, over, thorough=stalled == STALLED - 1)
            if over.peak <= self.limit:
                return low, high, over
            if over is before:  # not dear enough for anything else
                price *= GROWTH
            dear = least is not first or high.sum() * least.peak > DEAREST * least.found.cost
            stalled = stalled + 1 if dear and over.peak >= least.peak else 0
            if stalled == STALLED:
                break
            low, least, price = high, min(least, over, key=lambda t: t.peak), price * GROWTH
        return low, high, None

    def _between(self, low: Prices, high: Prices, fits: Trial) -> tuple[Prices, Prices, Trial]:
        """Prices nearer to each other, and the cheapest found that fits."""
        for _ in range(HALVINGS):
            if fits.found.cost - self._hoped_for() <= NEAR * fits.found.cost:
                break
            middle = (low + high) / 2 if low.any() else high / GROWTH
            trial = self._at(middle, fits)
            if trial.peak <= self.limit:
                high, fits = middle, min(fits, trial, key=lambda t: t.found.cost)
            else:
                low = middle
        return low, high, fits

    def _relink(self, fits: Trial) -> Trial:
        """What fits, with those parts of what was tried and costs less that fit as well."""
        for _ in range(ROUNDS):
            before = fits
            cheaper = (t for t in self._tried.values() if t.found.cost < fits.found.cost)
            for other in sorted(cheaper, key=lambda t: t.peak):
                fits = self._crossed(fits, other)
            if fits is before:
                break
        return fits

    def _crossed(self, fits: Trial, other: Trial) -> Trial:
        """The cheapest found that fits and has all parts from one of both."""
        parts = Relink(self.charges, fits.found.values, other.found.values)
        base, taken, best = fits, np.zeros(parts.costs.size, np.bool_), fits
        for _ in range(CROSSINGS):
            found = parts.best(self.limit - self.charges.used(base.boxed, base.profile.bytes), taken)
            if found is None or (found == taken).all():
                break
            if fits.found.cost + parts.costs @ found > (1 - NEAR) * best.found.cost:
                break
            base, taken = self.try_(parts.of(found)), found
            log.debug("%d of %d parts: %.4g s, %.4g bytes", found.sum(), found.size, base.found.cost, base.peak)
            if base.peak <= self.limit:
                best = min(best, base, key=lambda t: t.found.cost)
        return best

    def _mix(self, low: Prices, high: Prices, fits: Trial, least: float) -> None:
        """Choices among those that were tried: the higher prices on as few nodes as will do, from the first on, and of
        these no more of the first than are needed; until what fits costs next to no more than `least`, or than may be
        hoped for."""
        rank = np.asarray([h.first for h in self.charges.holdings])
        dear, cheap = self.charges.prices(high), self.charges.prices(low)

        def done() -> bool:
            return fits.found.cost - max(least, self._hoped_for()) <= NEAR * fits.found.cost

        def fitting(first: int, last: int) -> Trial | None:
            nonlocal fits
            trial = self._joined(np.where((first <= rank) & (rank < last), dear, cheap), fits.found.values)
            log.debug("higher prices on %d-%d: %.4g s, %.4g bytes", first, last, trial.found.cost, trial.peak)
            if trial.peak > self.limit:
                return None
            fits = min(fits, trial, key=lambda t: t.found.cost)
            return trial

        last = _least(0, len(self.problem.nodes), lambda n: fitting(0, n) is not None, done)
        _least(0, last, lambda n: fitting(last - n, last) is not None, done)

    def _hoped_for(self) -> float:
        """The cost at the limit on the lowest line from something tried that fits to something that does not: of both
        in the proportion that fills the memory."""
        tried = np.asarray([(t.peak, t.found.cost) for t in self._tried.values()], np.float64)
        fits = tried[:, 0] <= self.limit
        (low, cost), (high, other) = tried[fits].T[:, :, None], tried[~fits].T[:, None, :]
        return float((cost + (other - cost) * (self.limit - low) / (high - low)).min(initial=np.inf))


def _least(low: int, high: int, fits: Callable[[int], bool], done: Callable[[], bool]) -> int:
    """The least number above `low` that fits, `high` being one that does."""
    for _ in range(MIXTURES):
        middle = (low + high) // 2
        if middle == low or done():
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
