"""The search. Each turn raises the bound by messages, reads assignments, and drops the values that the bound forbids.

A value is dropped if every assignment with it costs more than the best one known (reduced-cost fixing). The rest of the
problem is reduced exactly, and solved by elimination once it is small enough. If few values can be dropped, neighbours
are joined into one variable whose values are their allowed pairs, which makes the bound sharper.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import ROUNDING, AssignmentCost
from shardc.solver.cost_tables import Index, Memo, Pair, Table
from shardc.solver.dual import Dual
from shardc.solver.eliminate import Elimination, elimination_order, elimination_work
from shardc.solver.kernels import Kernels, kernels_after
from shardc.solver.kernels.numpy_kernels import block
from shardc.solver.reduce import AT_ONCE, EASY, Reduction

log = logging.getLogger("shardc")

LOOK: Final = 6, 16
"""The least and the largest number of times the bound is raised between two looks for better assignments. In between,
it is raised until that took as long as the last look did, or as the first is expected to. Eight times always: resnet-1
of the ablation takes 1.5 times as long."""
FASTER: Final = 10
"""Entries that raising the bound reads in the time in which a look touches one, its overhead included."""
WINDOW: Final = 4
"""Looks over which the bound has to rise."""
SLOW: Final = 0.1
"""The bound rises slowly if the gap shrinks by less than this part of it in a window."""
NEAR: Final = (1e-4, 3e-3, 0.1)
"""Parts of the room between bound and cost: successive looks search among the values within them. 1e-2 always: the same
costs in the same time, but other plans of equal cost (llama, t5)."""
FEW: Final = 0.8
"""Part of the values that may be left for the others to be dropped. While the bound rises from one look to the next by
more than the gap, they are dropped only once half as few are left."""
FIRST_PAIRS: Final = 256
"""Pairs of values of two neighbours that are joined the first time; four times as many the next time (ablation:
joining)."""
FAR: Final = 1e-2
"""Relative gap from which on cost and bound are far from each other: there more work finds a better plan
(docs/design/solver.md, "What it costs")."""
SETTLED: Final = 1e-3
"""Moves along a column of labels that gain no more than this part of the cost count as no gain: a mechanism that
gains no more goes, too (docs/design/solver.md)."""
SWEEPS: Final = 4
"""Sweeps of moves over all columns, at most; they end when nothing improves."""
TIED: Final = 3
"""Distance, in edges, up to which variables must look alike to take one value (ablation: tied layers)."""
STEP: Final = 1 << 16
"""Entries that could be touched in the time that it takes to eliminate a variable."""


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Limits of the search, and the mechanisms that it uses.

    Attributes:
      work: table entries that may be touched, roughly: by default five to ten seconds. A chain of layers may take as
        much for each of its parts.
      close: relative distance of cost and bound at which the search ends.
      patience: factor of `work` while cost and bound are more than FAR from each other.
      together: classes of variables (`alike`) that must take one value; the bound then holds for such assignments only.
      chain, coarse: whether repeated layers are solved as a chain, and whether values of equal labels are first merged.
        None: where it pays.
      at_once: an elimination that touches at most this many table entries is done at once.
      kernels: the implementation of the loops over tables; None: by the size of the problem and the work that was
        done. The result is the same.
    """

    work: float = 8e9
    close: float = ROUNDING
    patience: float = 1.0
    together: Sequence[Sequence[int]] | None = None
    chain: bool | None = None
    coarse: bool | None = None
    at_once: float = AT_ONCE
    kernels: Kernels | None = None


DEFAULT: Final = SolverOptions()
MOVE_WORK: Final = DEFAULT.work / 2
"""Entries that one move may touch."""


@dataclass
class Search:
    """The state of a search: the remaining problem, and the best assignment of the whole one.

    Attributes:
      problem: the remaining problem, which gets smaller as the search goes on.
      full: the cost of assignments of the whole problem.
      options: as those of `minimize`.
      labels: for each variable of the whole problem (values, columns) the labels of its values.
      values: the best assignment known, if any; cost: its cost.
      bound: a lower bound, never above `cost`.
      moved_from: the cost from which the last moves began.
      settled: the cost from which no move along one column gains more than SETTLED.
      limit: table entries (`problem.ops.work`) after which no new turn begins. The work of moves does not count.
    """

    problem: Reduction
    full: AssignmentCost
    options: SolverOptions = DEFAULT
    labels: Sequence[NDArray[np.int64]] | None = None
    values: list[int] | None = None
    cost: float = np.inf
    bound: float = -np.inf

    def __post_init__(self) -> None:
        self.limit = self.options.work
        self.moved_from = self.settled = np.inf
        self._tied = False  # whether layers were tied

    def run(self) -> None:
        pairs = FIRST_PAIRS
        self.problem.run()
        log.debug("reduced to %d variables, work %.1e", sum(self.problem.inside), self.problem.ops.work)
        while not self.within(self.options.close):
            r = self.problem
            inside = [v for v, some in enumerate(r.inside) if some]
            if not r.feasible:  # nothing is better than what is known
                self.raise_to(self.cost)
                return
            if not inside:
                self.offer(r.restore([0] * len(r.own)))
                self.raise_to(min(r.constant, self.cost))
                return
            part = self._turn(inside)
            if part is None:
                return
            before, after = _values(r), _values(part)
            self.problem = part
            stuck = after > FEW * before
            part.beaten_work = AT_ONCE if stuck else EASY  # layers no longer share tables
            part.run()
            if stuck:
                part.join_small(pairs)
                pairs *= 4
                part.pair_work *= 8
            log.debug("%d of %d values are left, work %.1e", after, before, r.ops.work)
            r.ops.memo.forget()

    def within(self, part: float) -> bool:
        """Whether cost - bound is at most this share of the cost."""
        return self.cost - self.bound <= part * abs(self.cost) < np.inf

    @property
    def spent(self) -> bool:
        """Whether the limit on work is reached."""
        far = not self.cost - self.bound <= FAR * abs(self.cost)
        return self.problem.ops.work > self.limit * (self.options.patience if far else 1.0)

    @property
    def _ended(self) -> bool:
        return self.within(self.options.close) or self.spent

    def _turn(self, inside: Sequence[int]) -> Reduction | None:
        """Raise the bound as long as that pays, and look for better assignments. Returns the problem reparametrized by
        the messages, without values that cost too much; its constant is the bound. None ends the search."""
        turn = _SearchTurn(self, inside)
        if turn.part.easy(turn.values, self.options.at_once):
            self._eliminate_all(turn)
            return None
        if not self._tied and self.values is None:
            self._tied = True
            self._tie()
        turn.begin()
        for share in itertools.cycle(NEAR):
            rise = turn.raise_bound()
            turn.look(share)
            if turn.stalled(rise) and self._columns > 1 and not self.within(SETTLED):
                self.move(self.whole(inside, turn.best))  # the turn goes on from what it read
            left = turn.fix()
            if min(map(len, turn.values)) == 0:
                self.raise_to(self.cost)
            elif not self.within(self.options.close) and turn.part.easy(turn.values, self.options.at_once):
                self._eliminate_all(turn)
            log.debug("bound %.9g, cost %.9g, %.2f left", self.bound, self.cost, left)
            if self._ended:
                return None
            if turn.pays_no_more(rise, left):
                return turn.rest()
        raise AssertionError

    def _eliminate_all(self, turn: _SearchTurn) -> None:
        """Find the best assignment of the remaining values by elimination. It, or the best one known, is optimal."""
        self.offer(self.whole(turn.inside, turn.eliminate(turn.values)))
        self.raise_to(self.cost)

    def _tie(self) -> None:
        """Start from the best assignment in which variables that look alike, as in repeated layers, take one value.
        This work does not count towards the limit."""
        begin, part = self.problem.ops.work, self.problem.tied_alike(TIED)
        if part is None:
            return
        options = replace(self.options, work=begin + self.limit, patience=1.0)
        search = Search(part, self.full, options, self.labels, self.values, self.cost)
        search.run()
        if search.values is not None:
            self.offer(search.values)
        log.debug("tied: cost %.9g", self.cost)
        self.limit += self.problem.ops.work - begin

    @property
    def _columns(self) -> int:
        return self.labels[0].shape[1] if self.labels else 0

    def move(self, values: list[int], sweeps: int = SWEEPS, wide: int = 1) -> None:
        """Improve an assignment by moves along `wide` columns of the labels at once, at most `sweeps` times along each.
        This work does not count towards the limit, because moves do not raise the bound."""
        self.moved_from, begin, proved = self.full.cost(values), self.problem.ops.work, True

        def best_among(values: list[int], columns: Sequence[int]) -> tuple[list[int], float, float]:
            nonlocal proved
            memo, before = self.problem.ops.memo, self.full.cost(values)
            part = self.problem.among(labelled_alike(self.labels or (), values, columns, memo))
            options = SolverOptions(part.ops.work + MOVE_WORK, SETTLED)
            search = Search(part, self.full, options, None, values, before)
            search.run()
            proved = proved and search.within(SETTLED)
            return search.values or values, before, search.cost

        ways = list(itertools.combinations(range(self._columns), wide))
        self.offer(found := move_along(ways, sweeps, values, best_among, self.bound))
        if proved and self.full.cost(found) == self.cost >= self.moved_from * (1 - SETTLED):
            self.settled = self.cost
        self.limit += self.problem.ops.work - begin

    def raise_to(self, bound: float) -> None:
        """Set the bound to `bound`, if that is higher."""
        self.bound = max(self.bound, bound)

    def whole(self, inside: Sequence[int], values: Index) -> list[int]:
        """The assignment of the whole problem, given the values of the remaining variables `inside`."""
        whole = np.zeros(len(self.problem.own), np.intp)
        whole[inside] = values
        return self.problem.restore(whole.tolist())

    def offer(self, values: list[int]) -> None:
        """Keep an assignment of the whole problem if it is cheaper than the best one known."""
        cost = self.full.cost(values)
        if cost < self.cost:
            self.values, self.cost = values, cost


class _SearchTurn:
    """The messages of a reduced problem, and the values and assignments that follow from them.

    Attributes:
      inside: the variables that remain, which are numbered by their position here.
      values: for each variable the values that may be part of a better assignment.
      best: the best assignment read.
    """

    def __init__(self, search: Search, inside: Sequence[int]) -> None:
        self.search, self.inside, self.problem = search, inside, search.problem
        number = {v: k for k, v in enumerate(inside)}
        near = [{number[j]: t for j, t in self.problem.near[v].items()} for v in inside]
        self.part = _Subproblem([self.problem.own[v] for v in inside], near)
        self.values = [np.arange(u.size) for u in self.part.own]

    def begin(self) -> None:
        search = self.search
        self.dual = Dual(self.part.own, self.part.near, self.problem.ops.kernels)
        known = None if search.values is None else self.problem.reduce(search.values)
        self.best = self.dual.values if known is None else np.asarray(known, np.intp)[self.inside]
        self._read = self._last = np.inf
        self._looked: float = STEP * len(self.inside)  # the work of the last look, or what the first is expected to be
        self._gaps: list[float] = []

    def raise_bound(self) -> float:
        """Raise the bound, for about as long as the last `look` took. Returns by how much the bound rose."""
        dual, search, ops, raised = self.dual, self.search, self.problem.ops, 0
        while raised < LOOK[0] or (raised < LOOK[1] and raised * dual.work < FASTER * self._looked):
            dual.raise_bound()
            ops.work, ops.messages = ops.work + dual.work, ops.messages + dual.sent
            ops.kernels = dual.kernels = kernels_after(ops.work, ops.messages, ops.kernels)
            raised += 1
        rise = self._bound - search.bound
        search.raise_to(self._bound)
        return rise

    @property
    def _bound(self) -> float:
        return self.problem.constant + self.dual.bound

    @property
    def _cost(self) -> float:
        """The cost of the best assignment read."""
        return self.problem.constant + self.dual.cost(self.best)

    def look(self, share: float) -> None:
        """Improve the assignments read from the messages: first one variable at a time, then by elimination among all
        values whose excess is at most `share` of the distance between bound and cost."""
        dual, search = self.dual, self.search
        for reading in dual.readings:
            self.best = dual.improve(dual.better_of(self.best, dual.improve(reading, 4)), 2)
        self._excess = dual.excess()
        room = min(min(search.cost, self._cost) - self._bound, abs(self._bound))  # what was read may be far off
        alive = self._excess <= share * room
        alive[dual.first + self.best] = True
        begin = self.problem.ops.work
        self.best = self.eliminate(_split(alive, dual.first), self.best)
        self._looked = self.problem.ops.work - begin
        if search.values is None or self._cost < search.cost - ROUNDING * abs(search.cost):
            search.offer(search.whole(self.inside, self.best))
        self._last, self._read = self._read, self._cost

    def stalled(self, rise: float) -> bool:
        """Whether bound and assignment gained less than half of their distance, and no moves began at this
        assignment."""
        little = max(rise, self._last - self._read) < (self._read - self._bound) / 2
        return bool(little and np.isfinite(self._read) and self._read < self.search.moved_from * (1 - SETTLED))

    def fix(self) -> float:
        """Drop the values that cannot be part of a better assignment. Returns the share of the values that remain."""
        search = self.search
        alive = self._excess <= search.cost - self._bound + ROUNDING * abs(search.cost)
        self.values = _split(alive, self.dual.first)
        return np.count_nonzero(alive) / alive.size

    def pays_no_more(self, rise: float, left: float) -> bool:
        """Whether the turn should end: enough values are dropped, or the bound hardly rises any more."""
        self._gaps.append(self.search.cost - self.search.bound)
        gaps = self._gaps
        slowly = len(gaps) > 1 and rise < gaps[-1]  # however the cost fell: only the bound takes sweeps
        if left < FEW / 2 or (left < FEW and slowly):
            return True
        return len(gaps) > WINDOW and gaps[-1] > (1 - SLOW) * gaps[-1 - WINDOW]

    def rest(self) -> Reduction:
        """The problem of the remaining values, reparametrized by the messages."""
        inside, search = self.inside, self.search
        constant, own, tables = self.dual.rest(self.values)
        constant += self.problem.constant
        rest = self.problem.cheap(
            dict(zip(inside, self.values, strict=True)), dict(zip(inside, own, strict=True)),
            {(inside[i], inside[j]): t for (i, j), t in tables.items()},
            search.cost - constant + ROUNDING * abs(search.cost),
        )  # fmt: skip
        rest.constant = constant
        return rest

    def eliminate(self, values: Sequence[Index], held: Index | None = None) -> Index:
        """The best assignment among these values. With `held`: a quick search for an assignment that costs no more."""
        found, work = self.part.eliminate(values, held, self.problem.ops.kernels)
        self.problem.ops.work += work
        return found


class _Subproblem:
    """A problem that is solved by elimination for a subset of each variable's values."""

    def __init__(self, own: Sequence[Table], near: Sequence[Mapping[int, Table]]) -> None:
        self.own, self.near = own, near
        self._order = elimination_order(len(own), [(v, j) for v, n in enumerate(near) for j in n if v < j])

    def easy(self, values: Sequence[Index], work: float) -> bool:
        """Whether eliminating all variables touches at most `work` entries."""
        order, pairs = self._open(values)
        return elimination_work([len(values[v]) for v in order], pairs, range(len(order))) <= work

    def eliminate(self, values: Sequence[Index], held: Index | None, kernels: Kernels) -> tuple[Index, float]:
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
        pairwise = {(a, b): block(self.near[v := order[a]][w := order[b]], values[v], values[w]) for a, b in pairs}
        start = None if held is None else [int(np.searchsorted(values[v], held[v])) for v in order]
        elimination = Elimination(own, pairwise, start, kernels)
        found = elimination.run(range(len(order)))
        whole = np.asarray([some[0] for some in values], np.intp)
        for v, value in zip(order, found, strict=True):
            whole[v] = values[v][value]
        return whole, elimination.work + STEP * len(order)

    def _open(self, values: Sequence[Index]) -> tuple[list[int], list[Pair]]:
        """The variables with more than one value, in elimination order, and the pairs of their positions in it."""
        order = [v for v in self._order if len(values[v]) > 1]
        place = {v: k for k, v in enumerate(order)}
        return order, [(k, place[j]) for v, k in place.items() for j in self.near[v] if k < place.get(j, -1)]


def move_along(
    ways: Sequence[Sequence[int]],
    sweeps: int,
    values: list[int],
    best_among: Callable[[list[int], Sequence[int]], tuple[list[int], float, float]],
    bound: float = -np.inf,
) -> list[int]:
    """Change many variables at once, along some columns of their labels, then along others, until nothing improves.

    Args:
      ways: the columns of each move.
      sweeps: how often all ways are tried, at most.
      values: the assignment to begin with.
      best_among: given values and columns, finds the best assignment that differs from these values in these columns
        alone. Returns it, the cost of the given values, and its own cost.
      bound: moves end when the cost is within SETTLED of it.
    """
    settled = 0
    for columns in itertools.islice(itertools.cycle(ways), sweeps * len(ways)):
        values, before, cost = best_among(values, columns)
        log.debug("moved along columns %s: cost %.9g", columns, cost)
        settled = settled + 1 if cost >= before * (1 - SETTLED) else 1
        if settled == len(ways) or cost - bound <= SETTLED * abs(cost):
            break
    return values


def labelled_alike(
    labels: Iterable[NDArray[np.int64]], values: Sequence[int], columns: Sequence[int], memo: Memo
) -> list[NDArray[np.bool_]]:
    """For each variable a mask of the values whose labels equal those of its present value, `columns` excepted."""

    def make(of: NDArray[np.int64], value: int) -> NDArray[np.bool_]:
        same = of == of[value]
        same[:, columns] = True
        return same.all(1)

    return [
        memo.do(("alike", id(of), tuple(columns), v), of, lambda of=of, v=v: make(of, v))
        for of, v in zip(labels, values, strict=True)
    ]


def _split(alive: NDArray[np.bool_], first: Index) -> list[Index]:
    """For each variable its values that are marked in `alive`; `first` has the offset of each variable's values."""
    where = np.flatnonzero(alive)
    bounds = np.searchsorted(where, np.append(first, alive.size))
    return [where[a:b] - f for a, b, f in zip(bounds, bounds[1:], first, strict=False)]


def _values(problem: Reduction) -> int:
    return sum(u.size for u, inside in zip(problem.own, problem.inside, strict=True) if inside)
