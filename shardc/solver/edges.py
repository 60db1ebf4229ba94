"""Tables of edges side by side, and what messages need of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.tables import CHUNK, Index

Rows: TypeAlias = slice | Index
Costs: TypeAlias = NDArray[np.floating[Any]]
"""In double or single precision."""

SHARED: Final = 2048
"""Tables larger than this are not copied to be worked on side by side."""


def rows_of(numbers: Sequence[int]) -> Rows:
    """An index of these rows; a slice where they follow each other, which numpy need not copy."""
    first, count = numbers[0], len(numbers)
    follow = numbers[-1] - first == count - 1 and all(n - first == k for k, n in enumerate(numbers))
    return slice(first, first + count) if follow else np.asarray(numbers)


def add_at(costs: Costs, rows: Rows, more: Costs) -> None:
    """costs[rows] += more, where a row may come several times."""
    if isinstance(rows, slice):
        costs[rows] += more
    else:
        np.add.at(costs, rows, more)


@dataclass(eq=False)
class Stack:
    """Those of some edges: (value here, edge, value there). One that serves all of them stands there once."""

    table: Costs

    @classmethod
    def of(cls, tables: Sequence[Costs], free: bool) -> Stack:
        """Of each edge; if they are `free` they say only what is allowed."""
        stack = tables[0][:, None] if all(t is tables[0] for t in tables) else np.stack(tables, 1)
        return cls(np.where(np.isfinite(stack), 0.0, np.inf) if free else stack)

    def part(self, edge: int, here: Index, there: Index) -> Costs:
        """A copy of an edge's table, of some values."""
        return self.table[here[:, None], edge if self.table.shape[1] > 1 else 0, there]

    def at(self, here: Index, there: Index) -> Costs:
        """The entry of each edge."""
        return self.table[here, self._numbers(there), there]

    def column(self, there: Index) -> Costs:
        """For each edge what its values here cost."""
        return self.table[:, self._numbers(there), there].T

    def _numbers(self, values: Index) -> Index | int:
        return np.arange(values.size) if self.table.shape[1] > 1 else 0


def least_of_both(here: Costs, there: Costs, tables: Costs) -> tuple[Costs, Costs]:
    """Of here[e, a] + tables[a, e, b] + there[e, b] the least for each a and for each b; or of tables[a, 0, b]."""
    left, right = np.empty_like(here), np.empty_like(there)
    for part in _parts(here, tables):
        total = (tables if tables.shape[1] == 1 else tables[:, part]) + here[part].T[:, :, None] + there[part]
        total.min(2, out=left[part].T)
        total.min(0, out=right[part])
    return left, right


def least_sums(here: Costs, tables: Costs) -> Costs:
    """For each edge e and value b: least over a of here[e, a] + tables[a, e, b], or + tables[a, 0, b]."""
    if here.size * tables.shape[2] <= CHUNK:
        return np.minimum.reduce(tables + here.T[:, :, None], 0)
    least = np.empty((len(here), tables.shape[2]), here.dtype)
    for part in _parts(here, tables):
        some = tables if tables.shape[1] == 1 else tables[:, part]
        np.minimum.reduce(some + here[part].T[:, :, None], 0, out=least[part])
    return least


def _parts(here: Costs, tables: Costs) -> Iterator[slice]:
    """The edges, so many at a time that their sums stay in a core's cache."""
    step = max(1, CHUNK // (here.shape[1] * tables.shape[2]))
    return (slice(k, k + step) for k in range(0, len(here), step))
