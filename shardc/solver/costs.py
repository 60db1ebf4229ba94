"""Costs of whole assignments, from the tables as they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from shardc.solver.tables import FORBIDDEN, Given, Index, Pair, Table

_T = TypeVar("_T")


class Costs:
    def __init__(self, unary: Sequence[Table], pairwise: Mapping[Pair, Given]) -> None:
        self._own = _alike(list(unary))
        self._pairs = _alike(list(pairwise.values()))
        self._ends = np.asarray(list(pairwise), np.intp).reshape(-1, 2).T

    def cost(self, values: Sequence[int]) -> float:
        """Infinite where something is not allowed."""
        x = np.asarray(values, np.intp)
        rows, columns = x[self._ends[0]], x[self._ends[1]]
        terms = [np.zeros(1), *(table[x[of]] for table, of in self._own)]
        terms += [table[rows[of], columns[of]] for table, of in self._pairs]
        found = np.concatenate(terms)
        return float(found.sum()) if found.max() < FORBIDDEN else np.inf


def _alike(tables: Sequence[_T]) -> list[tuple[_T, Index]]:
    """Each table once, and the numbers of those that are it."""
    of: dict[int, list[int]] = {}
    for k, table in enumerate(tables):
        of.setdefault(id(table), []).append(k)
    return [(tables[numbers[0]], np.asarray(numbers, np.intp)) for numbers in of.values()]
