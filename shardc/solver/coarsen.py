"""A smaller problem whose minimum is no larger: values that labels do not tell apart are one value.

Labels say along which dimension each axis splits, not in which order the axes split one dimension. On three axes most
values of a large array differ in that order alone, and little depends on it. A value of the coarse problem costs the
least that one of those it stands for does, and so does a pair of them: its bound is one of the whole problem's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.cost_tables import Given, Index, Lookup, Memo, Pair, Table, whole
from shardc.solver.kernels import Kernels, numpy_kernels
from shardc.solver.operations import Operations

Labels: TypeAlias = NDArray[np.int64]

LARGE: Final = 20_000_000
"""Entries of all tables from which on it is tried. Where it settles the whole problem, half of the time is saved, else
what it took is missing from the work on the whole problem."""
WIDE: Final = 10_000
"""Entries of a table, on average, from which on most of its values differ in the order of axes alone."""


def is_large(pairwise: Mapping[Pair, Given]) -> bool:
    return sum(t.size for t in pairwise.values()) > max(LARGE, WIDE * len(pairwise))


class _Groups(NamedTuple):
    """The group of each value, and a value of each group."""

    group: Index
    first: Index

    @classmethod
    def of(cls, labels: Labels) -> _Groups:
        _, first, group = np.unique(labels, axis=0, return_index=True, return_inverse=True)
        return cls(group.reshape(-1), first)

    def least(self, costs: Table) -> Table:
        """Of each group."""
        found = np.full(self.first.size, np.inf)
        np.minimum.at(found, self.group, costs)
        return found


def _least(table: Given, a: _Groups, b: _Groups, kernels: Kernels) -> Table:
    """Of each pair of groups."""
    if isinstance(table, Lookup):
        matrix, rows, columns = table.matrix, table.rows, table.columns
    else:
        matrix, rows, columns = whole(table), np.arange(table.shape[0]), np.arange(table.shape[1])
    matrix = np.ascontiguousarray(matrix)
    return kernels.least_of_groups(matrix, rows, columns, a.group, b.group, a.first.size, b.first.size)


@dataclass(frozen=True, eq=False)
class Coarse:
    """The coarse problem.

    Attributes:
      unary, pairwise, labels: as those of the whole one.
      groups: for each variable the groups that its values are.
      ops: its own, so that nothing is kept of it when it is solved.
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
        """The coarse problem's values that stand for those of the whole one. They cost no more."""
        return [int(g.group[v]) for g, v in zip(self.groups, values, strict=True)]

    def members(self, values: Sequence[int]) -> list[NDArray[np.bool_]]:
        """For each variable which of its values a value of the coarse problem stands for."""
        return [g.group == v for g, v in zip(self.groups, values, strict=True)]
