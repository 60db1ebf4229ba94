"""The coarse problem: values whose labels are equal are taken as one value, so its minimum is a lower bound.

Labels say along which dimension each axis splits, not in which order the axes split one dimension. On three axes most
values of a large array differ in that order alone, and little depends on it. A coarse value costs as little as the
cheapest value in its group, and so does a pair of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import AssignmentCost
from shardc.solver.cost_tables import Given, Index, Lookup, Memo, Pair, Table, whole
from shardc.solver.graph import Members
from shardc.solver.kernels import Kernels, numpy_kernels
from shardc.solver.operations import Operations
from shardc.solver.reduce import Reduction
from shardc.solver.search import MOVE_WORK, SETTLED, Search, SolverOptions

log = logging.getLogger("shardc")

Labels: TypeAlias = NDArray[np.int64]

LARGE: Final = 20_000_000
"""Entries of all tables from which on the coarse problem is solved first. If it settles the whole problem, that saves
half of the time; otherwise its work is missing from the work on the whole problem."""
WIDE: Final = 10_000
"""Entries of a table, on average, from which on most of its values differ in the order of axes alone."""
NEARLY: Final = 1e-4
"""Relative distance of cost and bound among the values of its best assignment, which need no proof."""
ENOUGH: Final = 5e-3
"""Relative distance of cost and bound at which the messages of the whole problem are not worth their time."""


def is_large(pairwise: Mapping[Pair, Given]) -> bool:
    """Whether the tables are so large that most of their values differ in the order of axes alone."""
    return sum(t.size for t in pairwise.values()) > max(LARGE, WIDE * len(pairwise))


class _Groups(NamedTuple):
    """The group of each value of a variable, and the first value of each group."""

    group: Index
    first: Index

    @classmethod
    def of(cls, labels: Labels) -> _Groups:
        _, first, group = np.unique(labels, axis=0, return_index=True, return_inverse=True)
        return cls(group.reshape(-1), first)

    def least(self, costs: Table) -> Table:
        """The least cost in each group."""
        found = np.full(self.first.size, np.inf)
        np.minimum.at(found, self.group, costs)
        return found

    def members(self, rows: Index) -> Members:
        """The groups of values that have their costs in these rows."""
        return Members(rows, self.group, self.first.size)


def _least(table: Given, a: _Groups, b: _Groups, kernels: Kernels) -> Table:
    """The least entry for each pair of groups."""
    if isinstance(table, Lookup):
        matrix, rows, columns = table.matrix, table.rows, table.columns
    else:
        matrix, rows, columns = whole(table), np.arange(table.shape[0]), np.arange(table.shape[1])
    return kernels.least_of_groups(np.ascontiguousarray(matrix), a.members(rows), b.members(columns))


@dataclass(frozen=True, eq=False)
class Coarse:
    """The coarse problem.

    Attributes:
      unary, pairwise, labels: as those of the whole problem.
      groups: for each variable the groups of its values.
      ops: with a memo of its own, so that nothing is kept once it is solved.
    """

    unary: Sequence[Table]
    pairwise: Mapping[Pair, Table]
    labels: Sequence[Labels]
    groups: Sequence[_Groups]
    ops: Operations

    @classmethod
    def of(
        cls, unary: Sequence[Table], pairwise: Mapping[Pair, Given], labels: Sequence[Labels],
        kernels: Kernels = numpy_kernels,
    ) -> Coarse:  # fmt: skip
        ops = Operations(Memo(), kernels)
        do = ops.memo.do

        found = [do(("groups", id(of)), of, lambda of=of: _Groups.of(of)) for of in labels]
        own = [
            do(("least", id(u), id(g)), (u, g), lambda u=u, g=g: ops.one(g.least(u)))
            for u, g in zip(unary, found, strict=True)
        ]
        tables = {
            (i, j): do(
                ("least", id(t), id(a := found[i]), id(b := found[j])), (t, a, b),
                lambda t=t, a=a, b=b: ops.one(_least(t, a, b, kernels)),
            )
            for (i, j), t in pairwise.items()
        }  # fmt: skip
        firsts = [
            do(("firsts", id(of)), of, lambda of=of, g=g: of[g.first]) for of, g in zip(labels, found, strict=True)
        ]
        return cls(own, tables, firsts, found, ops)

    def values_of(self, values: Sequence[int]) -> list[int]:
        """The coarse values that stand for an assignment of the whole problem. They cost no more."""
        return [int(g.group[v]) for g, v in zip(self.groups, values, strict=True)]

    def members(self, values: Sequence[int]) -> list[NDArray[np.bool_]]:
        """For each variable the values in the group of its coarse value, as a mask."""
        return [g.group == v for g, v in zip(self.groups, values, strict=True)]


def solve_coarse(small: Coarse, search: Search) -> bool:
    """Solves the coarse problem, then the values in its best assignment, then moves on from there. The search keeps the
    bound, the best assignment, and the work that is left. Returns whether they are close enough."""
    options = search.options
    problem = Reduction.of(small.unary, small.pairwise, small.ops)
    problem.pair_work *= 4  # its tables are smaller
    first = Search(
        problem, AssignmentCost(small.unary, small.pairwise),
        replace(options, work=search.limit, close=max(SETTLED / 2, options.close)), small.labels,
    )  # fmt: skip
    if search.values is not None:
        first.offer(small.values_of(search.values))
    first.run()
    search.bound = first.bound
    log.debug("coarse: bound %.9g, cost %.9g", first.bound, first.cost)
    if first.values is None:
        return False
    inside = search.problem.among(small.members(first.values))
    fine = Search(inside, search.full, SolverOptions(inside.ops.work + MOVE_WORK, NEARLY))
    fine.run()
    log.debug("fine: cost %.9g", fine.cost)
    if fine.values is None:
        return False
    search.offer(fine.values)
    search.limit -= small.ops.work
    for wide in (1, 2):
        if search.values is not None and not search.within(max(SETTLED, options.close)):
            search.move(search.values, wide=wide)
    return search.within(max(ENOUGH, options.close))
