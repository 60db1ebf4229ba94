"""A lower bound by message passing, and assignments read from it.

Sequential tree-reweighted messages (Kolmogorov 2006, "Convergent tree-reweighted message passing"): the variables are
visited in an order and back, each handing an equal share of its costs to the edges ahead. Every state of the messages
is another way to write the same costs (a reparametrisation), whose least entries add up to a lower bound; passes never
lower it. Messages creep for long in one direction, so each sweep begins where those before it seem to lead (Anderson
1965, "Iterative Procedures for Nonlinear Integral Equations", of depth one), and is undone if the bound falls by that.

Any order does. From one variable outwards, what is known travels far in a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from shardc.solver.cost_tables import Index, Pair, Single, Table, double
from shardc.solver.graph import Graph
from shardc.solver.kernels import Kernels, numpy_kernels

CALL: Final = 1 << 18
STEP: Final = 1 << 8
"""Entries that could be touched in the time that it takes to begin with a pass, and to go on to an edge."""
SWEEPS: Final = 4
"""Sweeps by which the bound is raised, from one reading of assignments to the next."""
CACHED: Final = 1 << 20
"""Entries of different tables up to which single precision gains nothing: they stay in the processor's cache."""


def outwards(near: Sequence[Mapping[int, Table]]) -> list[int]:
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


def graph_of(
    sizes: Sequence[int], near: Sequence[Mapping[int, Table]], order: Sequence[int]
) -> tuple[Graph, list[Table]]:  # fmt: skip
    """The graph of a problem whose variables are visited in that order, and the table of each edge."""
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    where = place.tolist()
    start, split, other, tables = [0], list[int](), list[int](), list[Table]()
    number: dict[tuple[int, int], int] = {}
    for v, some in enumerate(near):
        ends = sorted(some, key=lambda j: where[j] > where[v])
        split.append(len(other) + sum(where[j] < where[v] for j in ends))
        for j in ends:
            number[v, j] = len(other)
            other.append(j)
            tables.append(some[j])
        start.append(len(other))
    twin = np.asarray([number[j, v] for v, j in number], np.intp)
    first = np.cumsum([0, *sizes])
    starts, splits = np.asarray(start), np.asarray(split, np.intp)
    degree = np.diff(starts)
    lengths = np.repeat(np.asarray(sizes, np.intp), degree)  # of the messages that come back along each edge
    at = np.empty(len(other), np.intp)
    at[twin] = np.cumsum(lengths) - lengths
    behind = splits - starts[:-1]
    share = 1.0 / np.maximum(np.maximum(behind, degree - behind), 1)
    graph = Graph(
        np.asarray(order, np.intp), first, starts, splits, np.asarray(other, np.intp), twin, at, share,
        1.0 - behind * share,
    )  # fmt: skip
    return graph, tables


def _singles(tables: Sequence[Table]) -> list[Single]:
    """The tables in single precision, one after the other in memory; none where they are small."""
    different = {id(t): t for t in tables}
    size = sum(t.size for t in different.values())
    if size <= CACHED:
        return []
    entries, found, at = np.empty(size, np.float32), dict[int, Single](), 0
    for name, table in different.items():
        found[name] = part = entries[at : at + table.size].reshape(table.shape)
        part[:] = table
        at += table.size
    return [found[id(t)] for t in tables]


class Dual:
    """The messages of a problem, and what is read from them.

    Attributes:
      bound: as the messages are now.
      values: assignment read last; readings: those of the last sweep that was read, there and back.
      first: where the values of each variable begin among those of all.
      work: entries that one `raise_bound` touches.
      messages: to the variables, one after the other.
    """

    def __init__(
        self, own: Sequence[Table], near: Sequence[Mapping[int, Table]], kernels: Kernels = numpy_kernels
    ) -> None:  # fmt: skip
        """Of a problem of finite costs, in which each variable and each row of a table has an allowed entry.

        Args:
          own: for each variable the costs of its values.
          near: its neighbours and the tables, its values being the rows.
        """
        self.near = [{j: np.ascontiguousarray(double(t)) for j, t in some.items()} for some in near]
        self.bound = -np.inf
        self.values: Index = np.zeros(len(own), np.intp)
        self.readings: list[Index] = []
        order = outwards(near)
        self.graph, tables = graph_of([u.size for u in own], self.near, order)
        singles = _singles(tables)
        self._rough = bool(singles)
        self._kernels, self._passes = kernels, kernels.passes(self.graph, tables, singles)
        self.first = self.graph.first[:-1]
        self.own = np.concatenate([np.zeros(0), *own])
        self.messages = np.zeros(int(np.diff(self.graph.first)[self.graph.other].sum()))
        self._begin = self.messages  # of the next sweep, which copies it
        self._last: tuple[Table, Table] | None = None  # the messages after the last sweep, and how it changed them
        self.work = 2.0 * SWEEPS * (CALL + sum(t.size + STEP for n in near for t in n.values()))

    def set_own(self, own: Table) -> None:
        """Other costs of all values; the messages stay."""
        self.own, self.bound = own, -np.inf
        self._begin, self._last = self.messages, None

    def raise_bound(self) -> float:
        """A few sweeps, of which the last one is read, and is exact if others are not."""
        for k in range(SWEEPS):
            self._sweep(last=k == SWEEPS - 1)
        return self.bound

    def _sweep(self, last: bool) -> None:
        """One pass there and one back, from further on along the way that the messages go."""
        known, begin, bound = self.messages, self._begin, -np.inf
        self.messages = begin.copy()
        self.readings = []
        for forward in (True, False):
            bound = self._send(forward, exact=not self._rough or (last and not forward), read=last)
            if last:
                self.readings.append(self.values.copy())
        if bound < self.bound:
            self.messages = self._begin = known
            self._last = None
            if last and self._rough:
                self.bound = self._send(False, exact=True, read=False)
            return
        self.bound, after = bound, self.messages
        change, self._begin = after - begin, after
        if self._last is not None:
            self._begin = self._kernels.further(after, change, *self._last)
        self._last = after, change

    def _send(self, forward: bool, exact: bool, read: bool) -> float:
        return self._passes.send(self.own, self.messages, forward, exact, read, self.values)

    def cost(self, values: Index) -> float:
        return self._passes.improve(self.own, values, 0)

    def improve(self, values: Index, passes: int) -> Index:
        """Each variable in turn takes what is best, the others as they are."""
        found = values.copy()
        self._passes.improve(self.own, found, passes)
        return found

    def around(self, values: Index) -> Table:
        """For each value of each variable what its tables cost, the others as they are."""
        found = np.zeros(self.own.size)
        self._passes.around(values, found)
        return found

    def better_of(self, best: Index, other: Index) -> Index:
        """The better one in each part of the graph in which two assignments differ."""
        return self._passes.better_of(self.own, best, other)

    def excess(self) -> Table:
        """For each value of each variable by how much at least an assignment that has it costs more than the bound, as
        the messages are now."""
        return self._passes.excess(self.own, self.messages)

    def handed(self) -> dict[Pair, Table]:
        """For variables (v, j) that are neighbours what j's values cost of their table, as the messages of the last
        pass write it. What is left of the table costs nothing at least, or a constant."""
        _, given = self._passes.handed(self.own, self.messages)
        found: dict[Pair, Table] = {}
        for v, j, there, back in self._edges_back():
            found[v, j], found[j, v] = self.messages[there], -given[back]
        return found

    def rest(self, values: Sequence[Index]) -> tuple[float, list[Table], dict[Pair, Table]]:
        """The problem of some values as the messages of the last pass write it: a constant (the bound), and what values
        and pairs of values cost more than that, nowhere negative but for rounding. Pairs are (variable, one visited
        earlier)."""
        left, given = self._passes.handed(self.own, self.messages)
        constant, own, tables = 0.0, list[Table](), dict[Pair, Table]()
        for mine, some in zip(np.split(left, self.first[1:]), values, strict=True):
            least = float(mine.min())
            constant += least
            own.append(mine[some] - least)
        for v, j, there, back in self._edges_back():
            table = self._kernels.block(self.near[v][j], values[v], values[j])
            table += given[back][values[v], None] - self.messages[there][values[j]]
            least = float(table.min())
            constant += least
            tables[v, j] = table - least
        return constant, own, tables

    def _edges_back(self) -> list[tuple[int, int, slice, slice]]:
        """Variables and those visited earlier that are their neighbours, and where the messages there and back lie."""
        g = self.graph
        sizes, at, twin = np.diff(g.first).tolist(), g.at.tolist(), g.twin.tolist()
        return [
            (v, j := int(g.other[e]), slice(at[e], at[e] + sizes[j]), slice(at[twin[e]], at[twin[e]] + sizes[v]))
            for v in range(len(sizes)) for e in range(g.start[v], g.split[v])
        ]  # fmt: skip
