"""The best combination of two assignments within a memory limit.

The variables in which two assignments differ fall into parts that no table connects. Each part may be taken from one
assignment or the other, independently: costs add up, and so, about, do bytes at each point. The choice is a knapsack
with a constraint for each point of time, small enough for a MIP solver (on combining good solutions: Glover, Laguna and
Martí 2000, "Fundamentals of scatter search and path relinking").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import scipy
from numpy.typing import NDArray

from shardc.passes.place.memory_prices import MemoryModel
from shardc.solver.cost_tables import Given, whole

MIP_NODES: Final = 200
"""Nodes of the search for the best parts, at most."""
TOLERANCE: Final = 1e-3
"""Relative distance to the optimum at which that search ends, and a merge of solutions; and to the cost without a limit
at which mixing ends."""
MIP_ROUNDS: Final = 12
"""Solutions with added constraints, at most."""
MIP_POINTS: Final = 4
"""Points of time that become constraints in one round, at most."""
BYTES_TOLERANCE: Final = 1e-6
"""Excess that is ignored, relative to the largest room."""


class DifferingParts:
    """The parts in which two assignments differ: connected components of the variables with different values.

    Attributes:
      costs: (parts,) the change of the cost if the part is taken from the second assignment.
    """

    def __init__(self, memory: MemoryModel, one: Sequence[int], other: Sequence[int]) -> None:
        self.one, self.other = np.asarray(one), np.asarray(other)
        differs = np.flatnonzero(self.one != self.other)
        tables = memory.tables
        self.part = np.full(self.one.size, -1)
        position = np.full(self.one.size, -1)
        position[differs] = np.arange(differs.size)
        pairs = [(i, j) for i, j in tables.pairwise if position[i] >= 0 or position[j] >= 0]
        both = np.asarray([p for p in pairs if (position[list(p)] >= 0).all()], np.intp).reshape(-1, 2)
        edges = (np.ones(len(both)), (position[both[:, 0]], position[both[:, 1]]))
        graph = scipy.sparse.coo_array(edges, (differs.size,) * 2)
        count, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
        self.part[differs] = labels
        self.costs = np.zeros(count)
        for i in differs.tolist():
            self.costs[self.part[i]] += self._change(tables.unary[i], i, i)
        for i, j in pairs:
            self.costs[max(self.part[i], self.part[j])] += self._change(tables.pairwise[i, j], i, j)
        held = [h for h in memory.terms if position[h.first] >= 0 or position[h.second] >= 0]
        self._bytes = np.asarray([self._change(h.amounts, h.first, h.second) for h in held])
        self._parts = np.asarray([max(self.part[h.first], self.part[h.second]) for h in held], np.intp)
        self._points = memory.points
        self._begin, self._end = (
            np.minimum(np.asarray([getattr(h, at) for h in held], np.int64), memory.points) for at in ("begin", "end")
        )

    def _change(self, table: Given, i: int, j: int) -> float:
        if i == j:
            table = whole(table)
            return float(table[self.other[i]] - table[self.one[i]])
        return float(table[self.other[i], self.other[j]] - table[self.one[i], self.one[j]])

    def of(self, taken: NDArray[np.bool_]) -> list[int]:
        """The first assignment, with the parts marked in `taken` from the second one."""
        return np.where(np.append(taken, False)[self.part], self.other, self.one).tolist()

    def best(self, room: NDArray[np.float64], taken: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """The cheapest choice of parts from the second assignment that fits in memory, approximately; None if none
        fits.

        Only points at which a candidate did not fit become constraints of the MIP.

        Args:
          room: (points,) bytes below the limit if `taken` is chosen; negative: above the limit.
          taken: (parts,) a choice of parts.
        """
        room, near = room + self._bytes_at(taken), BYTES_TOLERANCE * np.abs(room).max(initial=0.0)
        rows, rooms = list[NDArray[np.float64]](), list[float]()
        scale, found = np.abs(self.costs).max(initial=0.0) or 1.0, self.costs < 0
        for _ in range(MIP_ROUNDS):
            over = self._bytes_at(found) - room
            full = np.flatnonzero(over > near)
            if not full.size:
                break
            for stretch in np.array_split(full, min(MIP_POINTS, full.size)):
                at = int(stretch[np.argmax(over[stretch])])
                there = (self._begin <= at) & (at < self._end)
                rows.append(_sums(self._parts[there], self._bytes[there], self.costs.size))
                rooms.append(float(room[at]))
            solved = scipy.optimize.milp(
                self.costs / scale, integrality=np.ones(self.costs.size), bounds=scipy.optimize.Bounds(0, 1),
                constraints=(np.asarray(rows), -np.inf, np.asarray(rooms)),
                options={"node_limit": MIP_NODES, "mip_rel_gap": TOLERANCE},
            )  # fmt: skip
            if solved.x is None:
                return None
            found = solved.x > 0.5
        return found

    def _bytes_at(self, taken: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(points,) the change of the bytes in use if these parts are taken from the second assignment."""
        mine = taken[self._parts]
        change, size = self._bytes[mine], self._points + 1
        return (_sums(self._begin[mine], change, size) - _sums(self._end[mine], change, size))[:-1].cumsum()


def _sums(of: NDArray[np.intp], amounts: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """(size,) segment sums: entry k is the sum of the amounts with `of` equal to k."""
    found = np.zeros(size)
    np.add.at(found, of, amounts)
    return found
