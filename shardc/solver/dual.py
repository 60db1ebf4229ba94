"""A lower bound by message passing, and assignments read from it.

Sequential tree-reweighted messages (Kolmogorov 2006, "Convergent tree-reweighted message passing"): the variables are
visited in an order and back, each handing an equal share of its costs to the edges ahead. Every state of the messages
is another way to write the same costs (a reparametrisation), whose least entries add up to a lower bound; passes never
lower it. Messages creep for long in one direction, so each sweep begins where those before it seem to lead (Anderson
1965, "Iterative Procedures for Nonlinear Integral Equations", of depth one), and is undone if the bound falls by that.

Any order does. From one variable outwards, what is known travels far in a pass. Where variables that look alike from
near (as those at one place of repeated layers do) come together, many are visited at once: variables of one level have
no edges among themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from shardc.solver.edges import SHARED, Costs, add_at, least_of_both
from shardc.solver.messages import Messages
from shardc.solver.tables import Index, Pair, Table

CALL: Final = 1 << 14
"""Entries that could be touched in the time that an operation takes to begin."""
FAR: Final = 1e30
"""Stands for infinity in differences of costs."""
SWEEPS: Final = 4
"""Sweeps by which the bound is raised, from one reading of assignments to the next."""
SLOWER: Final = 2.0
"""Raisings that take a bound as far as one does where variables are visited outwards from one of them."""
ROUNDS: Final = 3
"""How far variables must look alike to be visited together, in edges."""


def by_likeness(sizes: Sequence[int], near: Sequence[Sequence[int]]) -> list[int]:
    """The variables, those that look alike together."""
    kind = list(sizes)
    for _ in range(ROUNDS):
        names: dict[tuple[int, tuple[int, ...]], int] = {}
        kind = [names.setdefault((k, tuple(sorted(kind[j] for j in n))), len(names)) for k, n in zip(kind, near)]  # noqa: B905
    return sorted(range(len(sizes)), key=lambda v: (kind[v], v))


def outwards(near: Sequence[Sequence[int]]) -> list[int]:
    """The variables breadth first."""
    found: list[int] = []
    seen = [False] * len(near)
    for root in range(len(near)):
        queue = deque([root])
        while queue:
            v = queue.popleft()
            if not seen[v]:
                seen[v] = True
                found.append(v)
                queue.extend(j for j in sorted(near[v]) if not seen[j])
    return found


def levels(order: Sequence[int], near: Sequence[Sequence[int]]) -> list[int]:
    """A level for each variable: neighbours never share one, and each has those before it in lower ones."""
    level = [-1] * len(order)
    for v in order:
        level[v] = 1 + max((level[j] for j in near[v]), default=-1)
    return level


class Dual:
    """The messages of a problem, and what is read from them.

    Attributes:
      bound: as the messages are now.
      values: assignment read last; readings: those of the last sweep that was read, there and back.
      work: entries that one `raise_bound` touches.
    """

    def __init__(
        self, own: Sequence[Table], near: Sequence[Mapping[int, Table]], free: bool = False, rough: bool = False
    ) -> None:
        """Of a problem as `Messages` take it. Where it is `rough` all sweeps but those that are read are in single
        precision: a pass takes a little more than half of the time where tables are large. The bound is exact."""
        self.own, self.near = own, near
        self.bound = -np.inf
        self.values: Index = np.zeros(len(own), np.intp)
        self.readings: list[Index] = []
        sizes, around = [u.size for u in own], [list(n) for n in near]
        level = min(
            (levels(outwards(around), around), 1.0),
            (levels(by_likeness(sizes, around), around), SLOWER),
            key=lambda found: found[1] * self._work(found[0]),
        )[0]
        self.messages = Messages(own, near, level, free)
        self._levels = self.messages.levels
        self._rough = Messages(own, near, level, rough=True) if rough else None
        self._begin = self.messages.all.copy()  # of the next sweep
        self._last: tuple[Costs, Costs] | None = None  # the messages after the last sweep, and how it changed them
        self.work = self._work(level)

    def _work(self, level: Sequence[int]) -> float:
        """Entries that one `raise_bound` touches with these levels."""
        calls = {(level[v], u.size) for v, u in enumerate(self.own)} | {
            (level[v], self.own[v].size, level[j] > level[v], self.own[j].size, id(t) if t.size > SHARED else 0)
            for v, n in enumerate(self.near)
            for j, t in n.items()
        }
        entries = sum(t.size for n in self.near for t in n.values())
        return 2 * SWEEPS * (entries + CALL * len(calls))

    def set_own(self, own: Sequence[Table]) -> None:
        """Other costs of the values; the messages stay."""
        self.own, self.bound = own, -np.inf
        self._begin, self._last = self.messages.all.copy(), None
        for messages in (self.messages, self._rough):
            if messages is not None:
                messages.set_own(own)

    def raise_bound(self) -> float:
        """A few sweeps, of which the last one is read. It is exact."""
        for _ in range(SWEEPS - 1):
            self._sweep(self._rough or self.messages)
        if self._rough is not None:
            self.bound, self._begin = -np.inf, self.messages.all.copy()  # what they said of it is not quite true
        self._sweep(self.messages, read=True)
        return self.bound

    def _sweep(self, by: Messages, read: bool = False) -> None:
        """One pass there and one back, from further on along the way that the messages go."""
        messages, begin = self.messages.all, self._begin
        known, by.all[:] = messages.copy(), begin
        self.readings = []
        for forward in (True, False):
            by.run(forward, self.values if read else None)
            if read:
                self.readings.append(self.values.copy())
        if by.bound < self.bound:
            messages[:], self._begin, self._last = known, known, None
            return
        self.bound, messages[:] = by.bound, by.all
        after = messages.copy()
        change, self._begin = after - begin, after
        if self._last is not None:
            before, last = self._last
            turn = change - last
            if (square := float((turn * turn).sum())) > 0:  # not by BLAS, whose threads would go on to spin
                self._begin = after - float((change * turn).sum()) / square * (after - before)
        self._last = after, change

    def cost(self, values: Index) -> float:
        total = 0.0
        for level in self._levels:
            mine = values[level.variables]
            total += float(level.own[np.arange(mine.size), mine].sum())
            for edges in level.ahead:
                total += float(edges.tables.at(mine[edges.position], values[edges.other]).sum())
        return total

    def improve(self, values: Index, passes: int) -> Index:
        """Each variable in turn takes what is best, the others as they are."""
        values = values.copy()
        for _ in range(passes):
            before = values.copy()
            for level in self._levels:
                costs = level.own.copy()
                for edges in (*level.ahead, *level.behind):
                    add_at(costs, edges.position, edges.tables.column(values[edges.other]))
                mine, rows = values[level.variables], np.arange(len(costs))
                best = costs.argmin(1)
                values[level.variables] = np.where(costs[rows, best] < costs[rows, mine], best, mine)
            if (before == values).all():
                break
        return values

    def around(self, values: Index) -> Table:
        """For each value of each variable, one after the other, what its tables cost, the others as they are."""
        sizes = np.asarray([u.size for u in self.own])
        first = np.cumsum(sizes) - sizes
        flat = np.zeros(int(sizes.sum()))
        for level in self._levels:
            costs = np.zeros_like(level.own)
            for edges in (*level.ahead, *level.behind):
                add_at(costs, edges.position, edges.tables.column(values[edges.other]))
            flat[first[level.variables][:, None] + np.arange(costs.shape[1])] = costs
        return flat

    def better_of(self, best: Index, other: Index) -> Index:
        """The better one in each part of the graph in which two assignments differ."""
        differ = best != other
        ends: list[Index] = []
        change = np.zeros((len(self.own), 2))  # cost of `other` less that of `best`: of a variable, of edges from it
        for level in self._levels:
            old, new, rows = best[level.variables], other[level.variables], np.arange(level.variables.size)
            change[level.variables, 0] = level.own[rows, new] - level.own[rows, old]
            for edges in level.ahead:
                source = level.variables[edges.position]
                after = np.minimum(edges.tables.at(other[source], other[edges.other]), FAR)
                before = np.minimum(edges.tables.at(best[source], best[edges.other]), FAR)
                both = differ[source] & differ[edges.other]
                ends.append(np.stack((source[both], edges.other[both])))
                # where but one end differs, the other one stays at a value that both have
                np.add.at(change[:, 1], np.where(differ[source], source, edges.other), after - before)
        pairs = np.concatenate(ends, axis=1) if ends else np.zeros((2, 0), np.intp)
        size = len(self.own)
        links = coo_array((np.ones(pairs.shape[1]), (pairs[0], pairs[1])), (size, size))
        parts = connected_components(links, directed=False)[1]
        gain = np.bincount(parts, np.where(differ, change.sum(1), 0.0))
        return np.where(differ & (gain[parts] < 0), other, best)

    def excess(self) -> tuple[Table, Index]:
        """For each value of each variable, one after the other, and where each variable begins: by how much at least
        an assignment that has it costs more than the bound, as the messages are now."""
        sizes = np.asarray([u.size for u in self.own])
        first = np.cumsum(sizes) - sizes
        flat = np.zeros(int(sizes.sum()))
        for level in self._levels:
            costs = level.costs()
            left = level.left[1][:, None] * costs
            flat[first[level.variables][:, None] + np.arange(costs.shape[1])] += left - left.min(1, keepdims=True)
            costs *= level.share
            for edges in level.behind:
                given = costs[edges.position] - level.messages[edges.back]
                here, there = least_of_both(given, -edges.into[edges.rows], edges.tables.table)
                here -= here.min(1, keepdims=True)
                there -= there.min(1, keepdims=True)
                size = there.shape[1]
                np.add.at(flat, first[level.variables[edges.position]][:, None] + np.arange(here.shape[1]), here)
                np.add.at(flat, first[edges.other][:, None] + np.arange(size), there)
        return flat, first

    def handed(self) -> dict[Pair, Table]:
        """For variables (v, j) that are neighbours what j's values cost of their table, as the messages of the last
        pass write it. What is left of the table costs nothing at least, or a constant."""
        found: dict[Pair, Table] = {}
        for level in self._levels:
            costs = level.costs() * level.share
            for edges in level.behind:
                given = costs[edges.position] - level.messages[edges.back]
                pairs = zip(level.variables[edges.position].tolist(), edges.other.tolist(), strict=True)
                for (v, j), mine, theirs in zip(pairs, given, edges.into[edges.rows], strict=True):
                    found[v, j], found[j, v] = theirs, -mine
        return found

    def rest(self, values: Sequence[Index]) -> tuple[float, list[Table], dict[Pair, Table]]:
        """The problem of some values as the messages of the last pass write it: a constant (the bound), and what values
        and pairs of values cost more than that, nowhere negative but for rounding. Pairs are (variable, one of an
        earlier level)."""
        constant = 0.0
        own: list[Table] = list(self.own)
        tables: dict[Pair, Table] = {}
        for level in self._levels:
            costs = level.costs()
            left = level.left[1][:, None] * costs
            least = left.min(1, keepdims=True)
            constant += float(least.sum())
            for v, mine in zip(level.variables, left - least, strict=True):
                own[v] = mine[values[v]]
            costs *= level.share
            for edges in level.behind:
                given = costs[edges.position] - level.messages[edges.back]
                taken = edges.into[edges.rows]
                for k, (v, j) in enumerate(zip(level.variables[edges.position], edges.other, strict=True)):
                    rows, columns = values[v], values[j]
                    table = edges.tables.part(k, rows, columns)
                    table += given[k][rows, None] - taken[k][columns]
                    least = float(table.min())
                    constant += least
                    tables[int(v), int(j)] = table - least
        return constant, own, tables
