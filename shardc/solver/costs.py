"""Costs of whole assignments, from the tables as they were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardc.solver.tables import FORBIDDEN, Pair, Table


class Costs:
    def __init__(self, unary: Sequence[Table], pairwise: Mapping[Pair, Table]) -> None:
        self._own, self._first = _flat(list(unary))
        self._entries, self._start = _flat(list(pairwise.values()))
        self._pairs = np.asarray(list(pairwise), np.intp).reshape(-1, 2)
        self._columns = np.asarray([t.shape[1] for t in pairwise.values()], np.intp)

    def cost(self, values: Sequence[int]) -> float:
        """Infinite where something is not allowed."""
        x = np.asarray(values, np.intp)
        rows, columns = x[self._pairs[:, 0]], x[self._pairs[:, 1]]
        pairs = self._entries[self._start + rows * self._columns + columns]
        terms = np.concatenate((self._own[self._first + x], pairs))
        return float(terms.sum()) if terms.max(initial=0.0) < FORBIDDEN else np.inf


def _flat(tables: Sequence[Table]) -> tuple[Table, np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """All entries, each table once, and where each begins."""
    places: dict[int, int] = {}
    parts: list[Table] = [np.zeros(0)]
    size = 0
    for table in tables:
        if id(table) not in places:
            places[id(table)] = size
            parts.append(np.ravel(table))
            size += table.size
    return np.concatenate(parts), np.asarray([places[id(t)] for t in tables], np.intp)
