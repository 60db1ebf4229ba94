"""The coarse problem: values with equal labels are merged into one value, so its minimum is a lower bound.

For each mesh axis a label says which dimension the axis splits. It does not say in which order several axes split one
dimension. On three axes most values of a large array differ in this order alone, which costs little. The cost of a
coarse value is the least cost of the values in its group; a pair of coarse values has the least cost of the pairs in
their groups.
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
half of the time; otherwise its work is missing from the work on the whole problem (ablation: coarse problem; GPT-3 on
three axes has 4.2e7)."""
WIDE: Final = 10_000
"""Entries of a table, on average, from which on most of its values differ in the order of axes alone."""
NEARLY: Final = 1e-4
"""Relative distance of cost and bound among the values of its best assignment, which need no proof."""
ENOUGH: Final = 5e-3
"""Relative distance of cost and bound at which the messages of the whole problem are not worth their time."""


def is_large(pairwise: Mapping[Pair, Given]) -> bool:
    """Whether the tables are so large that most values must differ in the order of axes alone."""
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
        """The groups as `Members` of a matrix in which value v has its costs in row `rows[v]`."""
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
      unary, pairwise, labels: costs and labels, as those of the whole problem.
      groups: for each variable the groups of its values.
      ops: operations with a memo of their own, which is freed with the coarse problem.
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
        """The coarse assignment that contains an assignment of the whole problem. Its cost is no higher."""
        return [int(g.group[v]) for g, v in zip(self.groups, values, strict=True)]

    def members(self, values: Sequence[int]) -> list[NDArray[np.bool_]]:
        """For each variable a mask of the values in the group of its coarse value."""
        return [g.group == v for g, v in zip(self.groups, values, strict=True)]


def solve_coarse(small: Coarse, search: Search) -> bool:
    """Solve the coarse problem, then the whole problem restricted to the values in the best coarse assignment, and
    improve the result by moves. `search` gets the bound, the best assignment and the remaining work. Returns whether
    cost and bound are so close that the search can end."""
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
