"""The solver's entry points: cost tables in; an assignment, its cost and a proved bound out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import ROUNDING, Assignment, AssignmentCost
from shardc.solver.coarsen import Coarse, is_large, solve_coarse
from shardc.solver.cost_tables import Given, Index, Memo, Pair, Table, double, whole
from shardc.solver.eliminate import Elimination, elimination_order, elimination_work
from shardc.solver.kernels import kernels_for
from shardc.solver.layer_chain import SEAMS, Numbered, Part, solve_chain
from shardc.solver.operations import Operations
from shardc.solver.reduce import Reduction
from shardc.solver.repeated_layers import find_chain
from shardc.solver.search import (
    DEFAULT,
    MOVE_WORK,
    SETTLED,
    TIED,
    Search,
    SolverOptions,
    labelled_alike,
    move_along,
)

PART: Final = 0.3, 0.34
"""The largest part of the variables that a chain may leave to be looked at; with large tables. So chains are used from
24 layers of GPT-3 on (ablation: layer chain)."""

Among: TypeAlias = Callable[[Sequence[Index]], tuple[Sequence[Table], Mapping[Pair, Given]]]
"""Costs and tables, as those of `minimize`, restricted to some values of each variable, given by number. Two variables
of one value each need no table."""


def minimize(
    unary: Sequence[Table],
    pairwise: Mapping[Pair, Given],
    start: Sequence[int] | None = None,
    labels: Sequence[NDArray[np.int64]] | None = None,
    memo: Memo | None = None,
    options: SolverOptions = DEFAULT,
) -> Assignment:
    """Minimizes sum_i unary[i][x_i] + sum_(i,j) pairwise[i,j][x_i, x_j].

    Args:
      unary: for each variable the cost of each of its values; FORBIDDEN and above rules a value out.
      pairwise: tables of pairs of variables. A `Lookup` is written out only if all of it is looked at.
      start: an assignment; the result costs no more.
      labels: for each variable (values, columns) labels of its values. Better assignments are also searched by changes
        of many variables in one column at a time. In a large problem without a `start`, values of equal labels are
        first taken as one. If that gives an assignment and a bound that are close enough, or takes all the work, it is
        the result.
      memo: shares work with other problems of the same tables.
      options: how far the search goes.

    Raises:
      ValueError: the shape of a table is not that of its variables.
    """
    ops = Operations(memo or Memo(), options.kernels or kernels_for(pairwise.values()))
    options = replace(options, kernels=ops.kernels)
    unary = [double(np.asarray(u)) for u in unary]
    problem = Reduction.of(unary, pairwise, ops)
    problem = problem if options.together is None else problem.tied(options.together)
    search = Search(problem, AssignmentCost(unary, pairwise), options, labels)
    if start is not None:
        search.offer(list(start))
    if options.together is not None or not _shortened(search, unary, pairwise):
        search.run()
    values = search.values if search.values is not None else [0] * len(unary)
    met = search.cost - search.bound <= ROUNDING * abs(search.cost)
    return Assignment(values, search.cost, search.cost if met else search.bound, search.settled == search.cost)


def _shortened(search: Search, unary: Sequence[Table], pairwise: Mapping[Pair, Given]) -> bool:
    """Try to solve the problem as a chain of layers, or by the coarse problem; `search` keeps what they find. Returns
    whether cost and bound are so close that the search can end."""
    options, large, labels = search.options, is_large(pairwise), search.labels
    ops = search.problem.ops
    chain = find_chain(Numbered(unary, pairwise, ops)) if options.chain is not False else None
    if chain is not None and (options.chain or chain.part <= PART[large]):

        def solve_part(
            part: Part, start: Sequence[int] | None = None, close: float = options.close, coarse: bool = True
        ) -> Assignment:
            some = None if labels is None else [labels[v] for v in part.variables]
            options_of_part = replace(options, close=close, chain=None, coarse=None if coarse else False)
            return minimize(part.unary, part.pairwise, start, some, ops.memo, options_of_part)

        aim, enough = (SETTLED, SETTLED) if large else (options.close, max(options.close, SEAMS))
        return solve_chain(chain, search, solve_part, aim, enough)
    if labels and (large if options.coarse is None else options.coarse):
        return solve_coarse(Coarse.of(unary, pairwise, labels, ops.kernels), search) or search.spent
    return False


def move(
    among: Among,
    start: Sequence[int],
    labels: Sequence[NDArray[np.int64]],
    sweeps: int,
    memo: Memo | None = None,
    options: SolverOptions = DEFAULT,
) -> list[int]:
    """Moves from a start along one column of the labels after the other. They prove nothing; the result costs no more
    than the start.

    Args:
      among: the problem. Each move makes the tables of the values that it looks at, and no others.
      start: an assignment that is allowed.
      labels, memo: as those of `minimize`.
      sweeps: over all columns, at most.
      options: `together` and `kernels` as those of `minimize`.
    """
    memo, together = memo or Memo(), options.together
    options = SolverOptions(MOVE_WORK, SETTLED, together=together, kernels=options.kernels)
    values = np.asarray(start, np.intp)
    for v, *rest in together or ():
        values[rest] = values[v]

    def best_of(offered: Sequence[Index], values: list[int], options: SolverOptions) -> tuple[list[int], float, float]:
        unary, pairwise = among(offered)
        begin = [int(np.searchsorted(some, v)) for some, v in zip(offered, values, strict=True)]
        before = AssignmentCost(unary, pairwise).cost(begin)
        found = minimize(unary, pairwise, begin, None, memo, options)
        if not found.cost < before:
            return values, before, before
        return [int(some[v]) for some, v in zip(offered, found.values, strict=True)], before, found.cost

    def best_among(values: list[int], columns: Sequence[int]) -> tuple[list[int], float, float]:
        offered = [
            memo.do(("where", id(mask)), mask, lambda mask=mask: np.flatnonzero(mask))
            for mask in labelled_alike(labels, values, columns, memo)
        ]
        return best_of(offered, values, options)

    ways = [(column,) for column in range(labels[0].shape[1])]
    found = move_along(ways, sweeps, values.tolist(), best_among)
    if together is not None:  # variables of one class may have had different values in the start
        offered = choices_of([start, found])
        found, *_ = best_of(offered, list(start), replace(options, together=None))
    return found


def choices_of(assignments: Sequence[Sequence[int] | Index]) -> list[Index]:
    """For each variable the values that it has in some of the assignments."""
    found = np.asarray(assignments, np.intp)
    same = (found == found[0]).all(0).tolist()
    return [c[:1] if one else np.unique(c) for one, c in zip(same, np.ascontiguousarray(found.T), strict=True)]


def by_cost(
    unary: Sequence[Table], pairwise: Mapping[Pair, Given], work: float
) -> Iterator[tuple[float, list[int]]] | None:
    """All assignments with their costs, the cheapest first; None if elimination alone would take more than `work`."""
    order = elimination_order(len(unary), list(pairwise))
    if elimination_work([u.size for u in unary], list(pairwise), order) > work:
        return None
    tables = {pair: whole(t) for pair, t in pairwise.items()}
    found = Elimination(unary, tables)
    found.run(order)
    return found.by_cost()


def alike(unary: Sequence[Table], pairwise: Mapping[Pair, Given], memo: Memo) -> list[list[int]] | None:
    """Classes of variables that look alike, as those at one place of repeated layers do; None: most classes have one
    variable."""
    classes = Reduction.of(unary, pairwise, Operations(memo)).alike(TIED)
    return classes if 2 * len(classes) < len(unary) else None
