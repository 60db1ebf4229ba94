"""Costs of whole assignments, from the tables as they were given."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from shardc.solver.cost_tables import FORBIDDEN, Given, Index, Pair, Table

_T = TypeVar("_T")


class Costs:
    def __init__(self, unary: Sequence[Table], pairwise: Mapping[Pair, Given]) -> None:
        self._own = by_identity(unary)
        self._pairs = by_identity(list(pairwise.values()))
        self._ends = ends_of(pairwise)

    def cost(self, values: Sequence[int]) -> float:
        """Infinite where something is not allowed."""
        x = np.asarray(values, np.intp)
        rows, columns = x[self._ends[0]], x[self._ends[1]]
        terms = [np.zeros(1), *(table[x[of]] for table, of in self._own)]
        terms += [table[rows[of], columns[of]] for table, of in self._pairs]
        found = np.concatenate(terms)
        return float(found.sum()) if found.max() < FORBIDDEN else np.inf


def ends_of(pairs: Collection[Pair]) -> tuple[Index, Index]:
    """The first variables of pairs, and the second ones."""
    found = np.fromiter(itertools.chain.from_iterable(pairs), np.intp, 2 * len(pairs))
    return found[::2], found[1::2]


def by_identity(some: Sequence[_T]) -> list[tuple[_T, Index]]:
    """Each object once, in the order in which they come, and the places where it is."""
    names = np.fromiter(map(id, some), np.intp, len(some))
    order = np.argsort(names, kind="stable")
    places = np.split(order, np.flatnonzero(np.diff(names[order])) + 1) if some else []
    return [(some[of[0]], of) for of in sorted(places, key=lambda of: of[0])]
