"""Assignments, and their cost from the tables as they were given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from shardc.solver.cost_tables import FORBIDDEN, Given, Index, Pair, Table

_T = TypeVar("_T")

ROUNDING: Final = 1e-9
"""Relative error of sums of costs: an assignment whose cost is this close to the bound is optimal."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value for each variable, its cost, and a lower bound of the minimum.

    Attributes:
      settled: no move along one column of the labels gains more than a thousandth (`move`).
    """

    values: list[int]
    cost: float
    bound: float
    settled: bool = False

    @property
    def exact(self) -> bool:
        return self.cost <= self.bound + ROUNDING * abs(self.cost)

    @property
    def gap(self) -> float:
        """The relative gap between cost and bound, as `relative_gap` computes it."""
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """An upper bound on (cost - minimum) / minimum, for positive costs.

    It is (cost - bound) / bound; MIP solvers divide by the cost, which gives less. It is infinite if no assignment is
    known, or if the cost is positive and the bound is not.
    """
    excess = cost - bound
    if not math.isfinite(cost):
        return math.inf
    if excess <= 0:
        return 0.0
    return excess / min(abs(cost), abs(bound)) if cost * bound > 0 else math.inf


class AssignmentCost:
    """The cost of assignments of one problem. Each table is read once for all pairs that share it."""

    def __init__(self, unary: Sequence[Table], pairwise: Mapping[Pair, Given]) -> None:
        self._own = by_identity(unary)
        self._pairs = by_identity(list(pairwise.values()))
        self._ends = ends_of(pairwise)

    def cost(self, values: Sequence[int]) -> float:
        """The cost of an assignment; infinite if it is not allowed."""
        x = np.asarray(values, np.intp)
        rows, columns = x[self._ends[0]], x[self._ends[1]]
        terms = [np.zeros(1), *(table[x[of]] for table, of in self._own)]
        terms += [table[rows[of], columns[of]] for table, of in self._pairs]
        found = np.concatenate(terms)
        return float(found.sum()) if found.max() < FORBIDDEN else np.inf


def ends_of(pairs: Collection[Pair]) -> tuple[Index, Index]:
    """The first variable of each pair, and the second."""
    found = np.fromiter(itertools.chain.from_iterable(pairs), np.intp, 2 * len(pairs))
    return found[::2], found[1::2]


def by_identity(some: Sequence[_T]) -> list[tuple[_T, Index]]:
    """Each distinct object, in order of first appearance, with all positions at which it occurs."""
    names = np.fromiter(map(id, some), np.intp, len(some))
    order = np.argsort(names, kind="stable")
    places = np.split(order, np.flatnonzero(np.diff(names[order])) + 1) if some else []
    return [(some[of[0]], of) for of in sorted(places, key=lambda of: of[0])]
