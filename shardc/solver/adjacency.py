"""The adjacency of all variables in CSR arrays, so that NumPy handles all edges in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.cost_tables import Index

Kinds: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Adjacency:
    """Directed edges in CSR form: each table gives two edges, one from either variable; edges are sorted by source.

    Attributes:
      start: (variables + 1,) index of the first edge out of each variable.
      other: (edges,) the target of each edge.
      table: (edges,) the number of its table, whose rows are the values of the source.
    """

    start: Index
    other: Index
    table: Index

    @classmethod
    def between(cls, count: int, source: Index, other: Index, table: Index) -> Adjacency:
        """Build the adjacency of `count` variables from edges; edges with one source keep the given order."""
        order = np.argsort(source, kind="stable")
        return cls(_before(np.bincount(source, minlength=count)), other[order], table[order])

    @cached_property
    def degree(self) -> Index:
        return np.diff(self.start)

    @cached_property
    def source(self) -> Index:
        """(edges,) the source of each edge."""
        return np.repeat(np.arange(self.degree.size), self.degree)

    def of(self, v: int) -> list[tuple[int, int]]:
        """Pairs (neighbour, number of the table) of a variable."""
        edges = slice(self.start[v], self.start[v + 1])
        return list(zip(self.other[edges].tolist(), self.table[edges].tolist(), strict=True))

    def edges_of(self, variables: Index) -> tuple[Index, Index]:
        """Indices of the edges out of some variables, and for each edge the position of its source in `variables`."""
        degree = self.degree[variables]
        which = np.repeat(np.arange(variables.size), degree)
        return np.arange(which.size) + np.repeat(self.start[variables] - (np.cumsum(degree) - degree), degree), which

    def without(self, gone: NDArray[np.bool_]) -> Adjacency:
        """A graph of the same variables without the edges from or to those that are marked as `gone`."""
        kept = ~(gone[self.source] | gone[self.other])
        return Adjacency(_before(kept)[self.start], self.other[kept], self.table[kept])

    def among(self, variables: Index) -> Adjacency:
        """The subgraph induced by some variables, renumbered by their positions; edges are sorted by source and
        target."""
        number = np.full(self.degree.size, -1)
        number[variables] = np.arange(variables.size)
        edges, which = self.edges_of(variables)
        other = number[self.other[edges]]
        inside = np.flatnonzero(other >= 0)
        inside = inside[np.argsort(which[inside] * variables.size + other[inside])]
        degree = np.bincount(which[inside], minlength=variables.size)
        return Adjacency(_before(degree), other[inside], self.table[edges[inside]])

    def kinds(self, kind: Index) -> Iterator[Kinds]:
        """Hashes of each variable's neighbourhood of radius 0, 1, 2 and so on, in edges (colour refinement).

        Variables of equal kind with equal neighbourhoods have equal hashes. Equal hashes mean equal neighbourhoods with
        high probability only: callers compare where it matters.
        """
        found, tables = _mixed(kind.astype(np.uint64)), _mixed(self.table.astype(np.uint64))
        while True:
            yield found
            found = _mixed(found + np.diff(_before(_mixed(found[self.other] + tables))[self.start]))

    def outwards(self, begin: Index, most: int | None = None) -> Index:
        """The variables that can be reached from `begin`, in breadth-first order; at most `most` of them."""
        count = self.degree.size
        return self.grown(begin, np.zeros(count, np.intp), np.asarray([count if most is None else most], np.intp))

    def grown(self, begin: Index, kind: Index, most: Index) -> Index:
        """The variables reached breadth first, at most `most[k]` of kind k."""
        start, other, kinds, left = self.start.tolist(), self.other.tolist(), kind.tolist(), most.tolist()
        found: list[int] = []
        seen = [False] * len(kinds)
        reached: list[int] = begin.tolist()
        turn = 0
        while True:
            for j in reached:
                if not seen[j] and left[kinds[j]] > 0:
                    seen[j] = True
                    left[kinds[j]] -= 1
                    found.append(j)
            if turn == len(found):
                return np.asarray(found, np.intp)
            v = found[turn]
            reached = other[start[v] : start[v + 1]]
            turn += 1


def _before(counts: NDArray[Any]) -> NDArray[Any]:
    """Cumulative sums, from 0 to the total."""
    sums = np.cumsum(counts)
    return np.concatenate((np.zeros(1, sums.dtype), sums))


def _mixed(bits: Kinds) -> Kinds:
    """SplitMix64 hashes (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
