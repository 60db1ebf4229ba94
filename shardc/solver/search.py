"""Minimum of a sum of cost tables, by turns: a bound, an assignment, and a smaller problem.

What costs more than the best assignment known and the bound leave room for cannot be part of a better one and is
dropped (reduced-cost fixing); what remains is reduced exactly. Where nothing more falls, neighbours are joined into one
variable of their allowed pairs, which makes the bound sharper; joined often enough, it is the minimum.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import Costs
from shardc.solver.cost_tables import Index, Pair, Table
from shardc.solver.dual import Dual
from shardc.solver.eliminate import Elimination, elimination_order, elimination_work
from shardc.solver.kernels import Kernels
from shardc.solver.reduce import Reduction

log = logging.getLogger("shardc")

ROUNDING: Final = 1e-9
"""Relative error that sums of costs may have: an assignment whose cost is so close to the bound is proved best."""
LOOK: Final = 6, 16
"""Raisings of the bound before a look for better assignments: so many at least, and at most; between them, while they
have not taken as long as the look before, or as the first one is to take."""
FASTER: Final = 10
"""Entries that a raising of the bound reads in the time in which a look touches one, with all that belongs to it."""
WINDOW: Final = 4
"""Looks over which the bound is to rise."""
SLOW: Final = 0.1
"""The bound rises slowly if the gap shrinks by less than this part of it in a window."""
NEAR: Final = (1e-4, 3e-3, 0.1)
"""Parts of the room between bound and cost: better assignments are looked for among the values in them."""
FEW: Final = 0.8
"""Part of the values that may be left, for the rest to be dropped. While the bound rises from one look to the next by
more than what is open, they are not dropped yet, unless half as few are left."""
ENTRIES: Final = 1 << 23
"""Entries of different tables, up to which variables are joined."""
FIRST_PAIRS: Final = 256
"""Pairs of values of neighbours that are joined before anything is known."""
LITTLE: Final = 1 << 14
MUCH: Final = 1 << 24
"""Entries that may be touched in looking for beaten values of one variable where layers no longer share tables: while
values are dropped, and where neighbours are joined, since joined values beat many others."""
EXACT: Final = 1 << 24
"""Entries of all tables of an elimination that is done at once."""
WORTH: Final = 0.25
"""Part of the search's work so far that an elimination of more may add, in entries."""
LARGE: Final = 1 << 28
"""Entries of a table of an elimination, at most."""
FAR: Final = 1e-2
"""Relative distance of cost and bound from which on they are far from each other."""
SETTLED: Final = 1e-3
"""A column of labels is settled if moves along it gain no more than this part of the cost."""
MOVES: Final = 4
"""Moves along each column, at most."""
MOVE_WORK: Final = 4e9
"""Entries that one move may touch."""
TIED: Final = 3
"""How far variables must look alike to be tied, in edges."""
STEP: Final = 1 << 16
"""Entries that could be touched in the time in which a variable is eliminated."""


@dataclass
class Search:
    """The state: what is left of the problem, and the best assignment of the whole one.

    Attributes:
      problem: made smaller as the search goes on.
      full: costs of whole assignments.
      close: relative distance of cost and bound that is close enough.
      values: the best assignment known, if any; cost: what it costs.
      limit: entries that may be touched (`problem.ops.work`) until no new turn begins, besides those of moves.
      patience: so many times the limit may be touched while cost and bound are far from each other.
      bound: no assignment costs less, nor less than `cost` where that is smaller.
      labels: for each variable of the whole problem (values, columns) what its values are like. A move goes to the best
        assignment whose values differ from those known in one column at most.
    """

    problem: Reduction
    full: Costs
    limit: float
    close: float = ROUNDING
    values: list[int] | None = None
    cost: float = np.inf
    bound: float = -np.inf
    labels: Sequence[NDArray[np.int64]] | None = None
    patience: float = 1.0
    _tied: bool = False  # whether a tied assignment was looked for
    _moved: float = np.inf  # cost from which moves were made the last time

    def __post_init__(self) -> None:
        self._begin = self.problem.ops.work

    def run(self) -> None:
        pairs = FIRST_PAIRS
        self.problem.run()
        log.debug("reduced to %d variables, work %.1e", sum(self.problem.inside), self.problem.ops.work)
        while not self.closed:
            r = self.problem
            inside = [v for v, some in enumerate(r.inside) if some]
            if not r.feasible:  # nothing better than what is known
                self._raise_to(self.cost)
                return
            if not inside:
                self.offer(r.restore([0] * len(r.own)))
                self._raise_to(min(r.constant, self.cost))
                return
            part = self._sweep(inside)
            if part is None:
                return
            before, after = _values(r), _values(part)
            self.problem = part
            stuck = after > FEW * before
            part.beaten_work = MUCH if stuck else LITTLE
            part.run()
            if stuck:
                part.join_small(pairs, ENTRIES)
                pairs *= 4
                part.pair_work *= 8
            log.debug("%d of %d values are left, work %.1e", after, before, r.ops.work)
            r.ops.memo.forget()

    @property
    def closed(self) -> bool:
        return self.within(self.close)

    def within(self, part: float) -> bool:
        """Whether cost and bound are as close as this part of the cost."""
        return self.cost - self.bound <= part * abs(self.cost) < np.inf

    @property
    def _ended(self) -> bool:
        """Whether it is proved, or the work is done."""
        return self.closed or self.spent

    @property
    def spent(self) -> bool:
        """Whether the work is done."""
        far = not self.cost - self.bound <= FAR * abs(self.cost)
        return self.problem.ops.work > self.limit * (self.patience if far else 1.0)

    @property
    def _columns(self) -> int:
        return self.labels[0].shape[1] if self.labels else 0

    def _sweep(self, inside: Sequence[int]) -> Reduction | None:
        """Raises the bound for as long as it pays, looking for better assignments. Gives the problem as the messages
        write it, of what is not too dear: its constant is the bound. None at the end of the search."""
        r = self.problem
        number = {v: k for k, v in enumerate(inside)}
        near = [{number[j]: t for j, t in r.near[v].items()} for v in inside]
        part = _Part([r.own[v] for v in inside], near, r.ops.kernels)
        values = [np.arange(u.size) for u in part.own]
        if part.easy(values):
            self._offer_part(inside, self._eliminate(part, values))
            self._raise_to(self.cost)
            return None
        if not self._tied:
            self._tied = True
            self._tie()
        dual = Dual(part.own, near, r.ops.kernels)
        best = self._known(inside, dual.values)
        read, looked = np.inf, STEP * len(inside)
        gaps: list[float] = []
        for share in itertools.cycle(NEAR):
            raised = 0
            while raised < LOOK[0] or (raised < LOOK[1] and raised * dual.work < FASTER * looked):
                dual.raise_bound()
                r.ops.work += dual.work
                raised += 1
            for reading in dual.readings:
                best = dual.improve(dual.better_of(best, dual.improve(reading, 4)), 2)
            bound = r.constant + dual.bound
            rise = bound - self.bound
            self._raise_to(bound)
            excess, first = dual.excess(), dual.first
            room = min(min(self.cost, r.constant + dual.cost(best)) - bound, abs(bound))  # what was read may be far off
            alive = excess <= share * room
            alive[first + best] = True
            begin = r.ops.work
            best = self._eliminate(part, _split(alive, first), best)
            looked = r.ops.work - begin
            if self.values is None or r.constant + dual.cost(best) < self.cost - ROUNDING * abs(self.cost):
                self._offer_part(inside, best)
            last, read = read, r.constant + dual.cost(best)
            stalled = max(rise, last - read) < (read - bound) / 2 and read < self._moved * (1 - SETTLED)
            if self._columns > 1 and stalled and np.isfinite(read) and not self.within(SETTLED):
                self.move(self._whole(inside, best))  # and go on from what was read, which may lead elsewhere
            alive = excess <= self.cost - bound + ROUNDING * abs(self.cost)
            some = np.count_nonzero(alive) / alive.size
            values = _split(alive, first)
            if min(map(len, values)) == 0:
                self._raise_to(self.cost)
            elif not self.closed and part.easy(values, WORTH * (r.ops.work - self._begin)):
                self._offer_part(inside, self._eliminate(part, values))
                self._raise_to(self.cost)
            gaps.append(self.cost - self.bound)
            log.debug("bound %.9g, cost %.9g, %.2f left, work %.1e", self.bound, self.cost, some, r.ops.work)
            slowly = len(gaps) > 1 and rise < gaps[-1]  # whatever the cost fell by: only the bound takes sweeps
            if self._ended or some < FEW / 2 or (some < FEW and slowly):
                break
            if len(gaps) > WINDOW and gaps[-1] > (1 - SLOW) * gaps[-1 - WINDOW]:
                break
        if self._ended:
            return None
        constant, own, tables = dual.rest(values)
        constant += r.constant
        rest = r.cheap(
            dict(zip(inside, values, strict=True)), dict(zip(inside, own, strict=True)),
            {(inside[i], inside[j]): t for (i, j), t in tables.items()},
            self.cost - constant + ROUNDING * abs(self.cost),
        )  # fmt: skip
        rest.constant = constant
        return rest

    def _tie(self) -> None:
        """The best assignment in which variables that look alike from near, as those of repeated layers do, take the
        same value. Like moves, it comes on top of the limit."""
        begin, part = self.problem.ops.work, self.problem.tied_alike(TIED)
        if part is None:
            return
        search = Search(part, self.full, begin + self.limit, self.close, self.values, self.cost, labels=self.labels)
        search.run()
        if search.values is not None:
            self.offer(search.values)
        log.debug("tied: cost %.9g", self.cost)
        self.limit += self.problem.ops.work - begin

    def move(self, values: list[int], sweeps: int = MOVES, wide: int = 1) -> None:
        """From these values along some columns of the labels after others, `wide` at once, until nothing is gained. The
        work comes on top of the limit: the bound does not rise by it."""
        ways, settled = list(itertools.combinations(range(self._columns), wide)), 0
        cost, begin = self.full.cost(values), self.problem.ops.work
        self._moved = cost
        for columns in itertools.islice(itertools.cycle(ways), sweeps * len(ways)):
            before, part = cost, self.problem.among(self._alike(values, columns))
            search = Search(part, self.full, part.ops.work + MOVE_WORK, SETTLED, values, cost)
            search.run()
            values, cost = search.values or values, search.cost
            log.debug("columns %s: cost %.9g", columns, cost)
            settled = settled + 1 if cost >= before * (1 - SETTLED) else 1
            if settled == len(ways) or cost - self.bound <= SETTLED * abs(cost):
                break
        self.offer(values)
        self.limit += self.problem.ops.work - begin

    def _alike(self, values: Sequence[int], columns: tuple[int, ...]) -> list[NDArray[np.bool_]]:
        """For each variable what differs from a value in these columns of the labels at most."""
        do, pairs = self.problem.ops.memo.do, zip(self.labels or (), values, strict=True)

        def make(labels: NDArray[np.int64], value: int) -> NDArray[np.bool_]:
            same = labels == labels[value]
            same[:, columns] = True
            return same.all(1)

        return [do(("alike", id(a), columns, v), a, lambda a=a, v=v: make(a, v)) for a, v in pairs]

    def _known(self, inside: Sequence[int], otherwise: Index) -> Index:
        """The best assignment known, as far as variables are left, if none of its values was dropped."""
        known = None if self.values is None else self.problem.reduce(self.values)
        return otherwise if known is None else np.asarray(known, np.intp)[inside]

    def _eliminate(self, part: _Part, values: Sequence[Index], held: Index | None = None) -> Index:
        """The best assignment of these values; with `held` one that is no worse, and quickly."""
        found, work = part.eliminate(values, held)
        self.problem.ops.work += work
        return found

    def _raise_to(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _offer_part(self, inside: Sequence[int], values: Index) -> None:
        self.offer(self._whole(inside, values))

    def _whole(self, inside: Sequence[int], values: Index) -> list[int]:
        """The assignment of the whole problem."""
        whole = np.zeros(len(self.problem.own), np.intp)
        whole[inside] = values
        return self.problem.restore(whole.tolist())

    def offer(self, values: list[int]) -> None:
        """An assignment of the whole problem, to be kept if it is the best one."""
        cost = self.full.cost(values)
        if cost < self.cost:
            self.values, self.cost = values, cost


class _Part:
    """Costs and tables of variables among which some values are looked at."""

    def __init__(self, own: Sequence[Table], near: Sequence[Mapping[int, Table]], kernels: Kernels) -> None:
        self.own, self.near, self._kernels = own, near, kernels
        self._order = elimination_order(len(own), [(v, j) for v, n in enumerate(near) for j in n if v < j])

    def easy(self, values: Sequence[Index], work: float = 0.0) -> bool:
        """Whether eliminating all variables touches no more entries than this, or few."""
        order, pairs = self._open(values)
        entries, largest = elimination_work([len(values[v]) for v in order], pairs, range(len(order)))
        return entries <= max(work, EXACT) and largest <= LARGE

    def eliminate(self, values: Sequence[Index], held: Index | None) -> tuple[Index, float]:
        """The best assignment of these values, or one no worse than `held`; and the work."""
        order, pairs = self._open(values)
        own: list[Table] = []
        for v in order:
            some = values[v]
            mine = self.own[v][some]
            for j, table in self.near[v].items():
                if len(values[j]) == 1:
                    mine = mine + table[some, values[j][0]]
            own.append(mine)
        pairwise = {
            (a, b): self._kernels.block(self.near[v := order[a]][w := order[b]], values[v], values[w]) for a, b in pairs
        }
        start = None if held is None else [int(np.searchsorted(values[v], held[v])) for v in order]
        elimination = Elimination(own, pairwise, start, self._kernels)
        found = elimination.run(range(len(order)))
        whole = np.asarray([some[0] for some in values], np.intp)
        for v, value in zip(order, found, strict=True):
            whole[v] = values[v][value]
        return whole, elimination.work + STEP * len(order)

    def _open(self, values: Sequence[Index]) -> tuple[list[int], list[Pair]]:
        """The variables of more than one value in the order to eliminate them in, and the pairs of places there."""
        order = [v for v in self._order if len(values[v]) > 1]
        place = {v: k for k, v in enumerate(order)}
        return order, [(k, place[j]) for v, k in place.items() for j in self.near[v] if k < place.get(j, -1)]


def _split(alive: NDArray[np.bool_], first: Index) -> list[Index]:
    """For each variable its values that are alive."""
    where = np.flatnonzero(alive)
    bounds = np.searchsorted(where, np.append(first, alive.size))
    return [where[a:b] - f for a, b, f in zip(bounds, bounds[1:], first, strict=False)]


def _values(problem: Reduction) -> int:
    return sum(u.size for u, inside in zip(problem.own, problem.inside, strict=True) if inside)
