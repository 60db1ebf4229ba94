"""The solver's face: arrays in, an assignment, its cost and a proved bound out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import Costs
from shardc.solver.coarsen import Coarse, is_large
from shardc.solver.cost_tables import Given, Memo, Pair, Table, double, whole
from shardc.solver.eliminate import Elimination, elimination_order, elimination_work
from shardc.solver.kernels import Kernels, kernels_for
from shardc.solver.layer_chain import Chain, Numbered, Part
from shardc.solver.limited import Limited
from shardc.solver.memory import Memory
from shardc.solver.operations import Operations
from shardc.solver.reduce import Reduction
from shardc.solver.repeated_layers import find_chain
from shardc.solver.search import MOVE_WORK, ROUNDING, SETTLED, TIED, Search

log = logging.getLogger("shardc")

WORK: Final = 8e9
"""Table entries that one call may touch: five to ten seconds."""

SEAMS: Final = 1e-5
"""Relative distance of cost and bound at which a cell is enough, solved for all of a chain; if tables are large, it is
SETTLED."""
PART: Final = 0.3, 0.34
"""What part of the variables are to be looked at, at most, if one is; with large tables."""
TIGHT: Final = 0.1
LOOSE: Final = 0.5
LESS: Final = 1e-3
"""Parts of the distance that is aimed at: for as much the bound of a cell is raised on, by so much that of the ends may
be off, and values cost less there that a cell has too."""
COARSE: Final = SETTLED / 2
"""Relative distance of cost and bound at which the coarse problem is solved."""
PAIR_WORK: Final = 1 << 22
"""Entries that may be touched there in making one table of two, four times as many as elsewhere. It made up for slow
messages; T5 and DeepSeek are planned in the same time with as many."""
NEARLY: Final = 1e-4
"""The same of what is found in its best assignment, of which no proof is wanted."""
ENOUGH: Final = 5e-3
"""The same of the whole problem, at which its own messages, which take long, are not worth what they still find."""
UNLIMITED_PART: Final = 0.3
"""Part of the work that may go to the problem without its memory limit."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The value chosen for each variable, its cost, and a lower bound of the minimum."""

    values: list[int]
    cost: float
    bound: float

    @property
    def exact(self) -> bool:
        return self.cost <= self.bound + ROUNDING * abs(self.cost)

    @property
    def gap(self) -> float:
        """As `relative_gap`."""
        return relative_gap(self.cost, self.bound)


@dataclass(frozen=True, slots=True)
class Solution:
    """What `solve` found.

    Attributes:
      values: the value chosen for each variable. Where nothing fits, those that need the least memory that was found.
      cost: their cost; infinite if they are not allowed or do not fit.
      bound: no assignment that is allowed and fits costs less. Infinite: it is proved that there is none.
      peak: bytes that the values have in use at once, at most; 0 without a memory limit.
      least_peak: no allowed assignment has less.
      cost_unlimited, bound_unlimited: the same for the problem without its memory limit.
      work: table entries touched, roughly.
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
        """As `relative_gap`."""
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """By what part of the minimum a cost may at most exceed it: cost <= (1 + gap) * minimum, where costs are positive.

    (cost - bound) / bound, and not / cost as MIP solvers have it, which is less. Infinite where nothing is found, and
    where a bound of zero or below says nothing of a positive cost.
    """
    excess = cost - bound
    if not math.isfinite(cost):
        return math.inf
    if excess <= 0:
        return 0.0
    return excess / min(abs(cost), abs(bound)) if cost * bound > 0 else math.inf


def solve(
    unary: Sequence[Table],
    pairwise: Mapping[Pair, Table],
    memory: Memory | None = None,
    start: Sequence[int] | None = None,
    work: float = WORK,
    memo: Memo | None = None,
) -> Solution:
    """Minimises sum_i unary[i][x_i] + sum_(i,j) pairwise[i,j][x_i, x_j], within a limit on memory if there is one.

    Work is counted, not time: the same arguments give the same solution on every machine.

    Args:
      unary: for each variable the cost of each of its values; FORBIDDEN and above rules one out.
      pairwise: tables of pairs of variables, values of the first one in rows; equal tables had better be one object.
      memory: what the values have in use when, and the limit.
      start: an assignment to start from; the result costs no more, if it is allowed and fits.
      work: table entries that may be touched, roughly. A turn that has begun is finished.
      memo: to share work with other problems of the same tables.

    Raises:
      ValueError: a table whose shape is not that of its variables.
    """
    pairwise = {pair: double(np.asarray(t)) for pair, t in pairwise.items()}
    ops = Operations(memo or Memo(), kernels_for(pairwise.values()))
    unary = [double(np.asarray(u)) for u in unary]
    full = Costs(unary, pairwise)
    limit = work if memory is None else UNLIMITED_PART * work
    search = Search(Reduction.of(unary, pairwise, [], ops), full, limit)
    if start is not None:
        search.values, search.cost = list(start), full.cost(start)
    search.run()
    values, cost, bound = search.values, search.cost, search.bound
    if memory is None:
        chosen = values if values is not None else [0] * len(unary)
        return Solution(chosen, cost, bound, 0.0, 0.0, cost, bound, ops.work)
    if values is not None and memory.peak(values) <= memory.limit:
        return Solution(values, cost, bound, memory.peak(values), 0.0, cost, bound, ops.work)
    problem = Reduction.of(unary, pairwise, memory.of(len(unary)), ops)
    problem.run(join=False)
    limited = Limited(problem, memory.limit, work)
    if not limited.times.room.size:  # without what takes more memory for nothing, all fits
        problem.uses = [[] for _ in problem.uses]
        rest = Search(problem, full, work)
        rest.run()
        if rest.values is not None:
            return Solution(rest.values, rest.cost, rest.bound, memory.peak(rest.values), 0.0, cost, bound, ops.work)
    limited.run()
    found: list[int] | None = None
    if limited.values is not None:
        found = limited.whole(limited.values)
    if start is not None and memory.peak(start) <= memory.limit and full.cost(start) < limited.cost:
        found = list(start)
    least = float(limited.times.least.max(initial=0.0))
    if found is None:
        values, least = limited.least_peak()
        found = limited.whole(values)
    peak = memory.peak(found)
    cost_limited = full.cost(found) if peak <= memory.limit else np.inf
    cost = min(cost, cost_limited)
    below = np.inf if least > memory.limit or bound == np.inf else max(bound, limited.bound)
    return Solution(found, cost_limited, below, peak, least, cost, bound, ops.work)


def minimize(
    unary: Sequence[Table],
    pairwise: Mapping[Pair, Given],
    start: Sequence[int] | None = None,
    memo: Memo | None = None,
    work: float = WORK,
    close: float = ROUNDING,
    labels: Sequence[NDArray[np.int64]] | None = None,
    patience: float = 1.0,
    together: Sequence[Sequence[int]] | None = None,
    coarse: bool = True,
    kernels: Kernels | None = None,
) -> Assignment:
    """Minimises sum_i unary[i][x_i] + sum_(i,j) pairwise[i,j][x_i, x_j].

    Args:
      unary: for each variable the cost of each of its values; FORBIDDEN and above rules one out.
      pairwise: tables of pairs of variables; a `Lookup` is written out only if the whole of it is looked at.
      start: an assignment that the result is not to be worse than.
      memo: to share work with other problems of the same tables.
      work: table entries that may be touched, roughly; where layers are solved one for all, in each of its parts.
      close: relative distance of cost and bound that is close enough.
      labels: for each variable (values, columns) what its values are like; better assignments are also looked for by
        changes of many variables in one column at a time. In a large problem without a `start`, values of the same
        labels are taken as one at first; if that gives an assignment and a bound within ENOUGH, or takes all the work,
        these are the result.
      patience: so many times the work may be done while cost and bound are more than 1 % from each other.
      together: classes of variables (`alike`) that are to take one value; the bound is of such assignments.
      coarse: whether values of the same labels may be taken as one at first.
      kernels: the implementation of loops over tables; None: by the size of this problem. The result is the same.
    """
    ops = Operations(memo or Memo(), kernels or kernels_for(pairwise.values()))
    unary = [double(np.asarray(u)) for u in unary]
    full = Costs(unary, pairwise)
    problem = Reduction.of(unary, pairwise, [], ops)
    problem = problem if together is None else problem.tied(together)
    search = Search(problem, full, work, close, labels=labels, patience=patience)
    if start is not None:
        search.offer(list(start))
    fresh, large = start is None and together is None, is_large(pairwise)
    chain = find_chain(Numbered(unary, pairwise, ops)) if fresh else None
    if chain is not None and chain.part <= PART[large]:

        def solve_part(
            part: Part, start: Sequence[int] | None = None, close: float = close, coarse: bool = True
        ) -> Assignment:
            some = None if labels is None else [labels[v] for v in part.variables]
            return minimize(
                part.unary, part.pairwise, start, ops.memo, work, close, some, patience, None, coarse, ops.kernels
            )  # fmt: skip

        aim, enough = (SETTLED, SETTLED) if large else (close, max(close, SEAMS))
        settled = _settled_by_cells(chain, search, solve_part, aim, enough)
    elif together is None and labels and large and coarse:
        settled = _settled_by(Coarse.of(unary, pairwise, labels, ops.kernels), search) or search.spent
    else:
        settled = False
    if not settled:
        search.run()
    values = search.values if search.values is not None else [0] * len(unary)
    met = search.cost - search.bound <= ROUNDING * abs(search.cost)
    return Assignment(values, search.cost, search.cost if met else search.bound)


class _SolvePart(Protocol):
    """`minimize` for some of the variables."""

    def __call__(
        self, part: Part, start: Sequence[int] | None = None, close: float = ..., coarse: bool = ...
    ) -> Assignment: ...


def _settled_by_cells(chain: Chain, search: Search, solve_part: _SolvePart, aim: float, enough: float) -> bool:
    """Whether one of a chain's cells, solved for all of them, and what is at its ends give a bound and an assignment
    that are close enough. The search has both. What is at the ends begins with the cell's values there; where it then
    has others in the outermost cells, which may be as good in a cell and better at the ends, all cells may have them.
    """
    ring, many = chain.ring(), len(chain.middle)
    shares = chain.shares(ring, aim * TIGHT)
    if shares is None:
        return False
    alone = chain.one(shares)
    values = solve_part(ring).values[: len(alone.variables)]
    one = solve_part(alone, values, aim * LOOSE, coarse=False)
    part = chain.ends(shares, values, aim * LESS * many * abs(one.cost))
    close = aim * LOOSE * many * len(alone.variables) / len(part.variables)
    between = chain.between(part, values)
    known = dict(zip(between.variables, solve_part(between, close=max(close, SETTLED)).values, strict=True))
    begin = [known[v] if v in known else values[chain.place[v]] for v in part.variables]
    ends = solve_part(part, begin, close)
    search.bound = chain.problem.constant + ends.bound + many * one.bound
    for cell in (values, *(part.some(ends.values, outer) for outer in chain.cells[[0, -1]])):
        search.offer(chain.whole(part, ends.values, cell))
        if search.within(enough):
            break
    log.debug("%d cells: bound %.9g, cost %.9g", len(chain.cells), search.bound, search.cost)
    if not search.within(enough) and (part := chain.shorter()) is not None:
        found = solve_part(part, [search.values[v] for v in part.variables] if search.values else None)
        search.offer(chain.whole(part, found.values, part.some(found.values, chain.middle[0])))
        log.debug("one cell between the ends: cost %.9g", search.cost)
    return search.within(enough)


def _settled_by(small: Coarse, search: Search) -> bool:
    """Whether a coarse problem's bound, and what is found in its best assignment and from there on, are enough. The
    search has both from then on, and less work to do."""
    costs, problem = Costs(small.unary, small.pairwise), Reduction.of(small.unary, small.pairwise, [], small.ops)
    problem.pair_work = PAIR_WORK
    first = Search(
        problem, costs, search.limit, max(COARSE, search.close), labels=small.labels, patience=search.patience
    )
    if search.values is not None:
        first.offer(small.values_of(search.values))
    first.run()
    search.bound = first.bound
    log.debug("coarse: bound %.9g, cost %.9g", first.bound, first.cost)
    if first.values is None:
        return False
    inside = search.problem.among(small.members(first.values))
    fine = Search(inside, search.full, inside.ops.work + MOVE_WORK, NEARLY)
    fine.run()
    log.debug("fine: cost %.9g", fine.cost)
    if fine.values is None:
        return False
    search.offer(fine.values)
    search.limit -= small.ops.work
    for wide in (1, 2):
        if search.values is not None and not search.within(max(SETTLED, search.close)):
            search.move(search.values, wide=wide)
    return search.within(max(ENOUGH, search.close))


def by_cost(
    unary: Sequence[Table], pairwise: Mapping[Pair, Given], work: float
) -> Iterator[tuple[float, list[int]]] | None:
    """All assignments with their costs, the cheapest first; None where elimination alone would be more than `work`."""
    order = elimination_order(len(unary), list(pairwise))
    if elimination_work([u.size for u in unary], list(pairwise), order)[0] > work:
        return None
    tables = {pair: whole(t) for pair, t in pairwise.items()}
    found = Elimination(unary, tables, kernels=kernels_for(tables.values()))
    found.run(order)
    return found.by_cost()


def alike(unary: Sequence[Table], pairwise: Mapping[Pair, Given], memo: Memo) -> list[list[int]] | None:
    """Classes of variables that look alike from near, as those at one place of repeated layers do; None: most variables
    are alone in theirs."""
    classes = Reduction.of(unary, pairwise, [], Operations(memo)).alike(TIED)
    return classes if 2 * len(classes) < len(unary) else None


__all__ = ["Assignment", "Memory", "Solution", "alike", "by_cost", "elimination_order", "minimize", "solve"]
