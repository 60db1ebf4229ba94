"""A lower bound by message passing, and assignments read from the messages.

The method is sequential tree-reweighted message passing (Kolmogorov 2006, "Convergent tree-reweighted message
passing"). A sweep visits the variables in an order, and then in the reverse order. Each variable gives an equal share
of its costs to each edge to a later variable. Every state of the messages is a reparametrization of the same costs. The
least entries of its tables add up to a lower bound, which no sweep lowers.

Messages change slowly in one direction for a long time. So each sweep begins at an extrapolation of the last two states
(Anderson 1965, "Iterative Procedures for Nonlinear Integral Equations", of depth one), and is undone if the bound
falls.

Any order of the variables works. In a breadth-first order, information travels far in one sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from shardc.solver.cost_tables import Index, Pair, Table, double
from shardc.solver.graph import graph_of, outwards
from shardc.solver.kernels import Kernels, numpy_kernels
from shardc.solver.kernels.numpy_kernels import block
from shardc.solver.kernels.numpy_messages import in_order

CALL: Final = 1 << 18
STEP: Final = 1 << 8
"""Entries that could be touched in the time that it takes to begin a pass, and to go on to the next edge."""
SWEEPS: Final = 4
"""Sweeps from one reading of assignments to the next."""


def extrapolated(after: Table, change: Table, before: Table, last: Table) -> Table:
    """Anderson extrapolation of depth one: the combination of two message states with the smallest change. `change` led
    to the state `after`, the change `last` to the state `before`."""
    turn = change - last
    along, square = in_order(change * turn), in_order(turn * turn)
    return after - (along / square if square > 0 else 0.0) * (after - before)


class Dual:
    """The messages of a problem, and the assignments and bounds read from them.

    Attributes:
      bound: the lower bound of the present messages.
      values: the assignment read last; readings: those of the last sweep that was read, forward and back.
      first: for each variable the offset of its values in arrays of all values.
      work, sent: table entries that one `raise_bound` touches, and messages that it sends.
      messages: the messages to all variables, one after the other.
    """

    def __init__(
        self, own: Sequence[Table], near: Sequence[Mapping[int, Table]], kernels: Kernels = numpy_kernels
    ) -> None:
        """Messages of zero. Each variable and each row of a table has an allowed entry.

        Args:
          own: for each variable the costs of its values.
          near: for each variable its neighbours and the tables, whose rows are its values.
        """
        self.near = [{j: np.ascontiguousarray(double(t)) for j, t in some.items()} for some in near]
        self.bound = -np.inf
        self.values: Index = np.zeros(len(own), np.intp)
        self.readings: list[Index] = []
        order = outwards(near)
        self.graph, self._tables = graph_of([u.size for u in own], self.near, order)
        self.kernels = kernels
        self.first = self.graph.first[:-1]
        self.own = np.concatenate([np.zeros(0), *own])
        self.messages = np.zeros(int(np.diff(self.graph.first)[self.graph.other].sum()))
        self._begin = self.messages  # of the next sweep, which copies it
        self._last: tuple[Table, Table] | None = None  # the messages after the last sweep, and how it changed them
        self.sent = SWEEPS * len(self._tables)  # half of them on each pass
        self.work = 2.0 * SWEEPS * (CALL + sum(t.size + STEP for n in near for t in n.values()))

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        """Goes on with another implementation of the passes, which gives the same."""
        if getattr(self, "_kernels", None) is not kernels:
            self._kernels, self._passes = kernels, kernels.passes(self.graph, self._tables)

    def raise_bound(self) -> float:
        """Runs a few sweeps. An assignment is read from the last one."""
        for k in range(SWEEPS):
            self._sweep(last=k == SWEEPS - 1)
        return self.bound

    def _sweep(self, last: bool) -> None:
        """One pass forward and one back, from the extrapolated messages. `last`: an assignment is read from each
        pass."""
        known, begin, bound = self.messages, self._begin, -np.inf
        self.messages = begin.copy()
        self.readings = []
        for forward in (True, False):
            bound = self._passes.send(self.own, self.messages, forward, last, self.values)
            if last:
                self.readings.append(self.values.copy())
        if bound < self.bound:
            self.messages = self._begin = known
            self._last = None
            return
        self.bound, after = bound, self.messages
        change, self._begin = after - begin, after
        if self._last is not None:
            self._begin = extrapolated(after, change, *self._last)
        self._last = after, change

    def cost(self, values: Index) -> float:
        return self._passes.improve(self.own, values, 0)

    def improve(self, values: Index, passes: int) -> Index:
        """Coordinate descent: set each variable in turn to its best value, the others unchanged, `passes` times."""
        found = values.copy()
        self._passes.improve(self.own, found, passes)
        return found

    def better_of(self, best: Index, other: Index) -> Index:
        """The cheaper of two assignments, chosen separately in each connected part of the graph in which they
        differ."""
        return self._passes.better_of(self.own, best, other)

    def excess(self) -> Table:
        """For each value of each variable a lower bound of the cost of assignments that have this value, minus
        `bound`."""
        return self._passes.excess(self.own, self.messages)

    def handed(self) -> dict[Pair, Table]:
        """For neighbours (v, j): the part of their table's costs that the last sweep moved to the values of j. The
        remaining table is nonnegative up to a constant."""
        _, given = self._passes.handed(self.own, self.messages)
        found: dict[Pair, Table] = {}
        for v, j, there, back in self._edges_back():
            found[v, j], found[j, v] = self.messages[there], -given[back]
        return found

    def rest(self, values: Sequence[Index]) -> tuple[float, list[Table], dict[Pair, Table]]:
        """The problem restricted to some values, reparametrized by the messages of the last sweep: a constant (the
        bound), the costs of values, and the tables of pairs (variable, one visited earlier). Costs and tables are
        nonnegative up to rounding."""
        left, given = self._passes.handed(self.own, self.messages)
        constant, own, tables = 0.0, list[Table](), dict[Pair, Table]()
        for mine, some in zip(np.split(left, self.first[1:]), values, strict=True):
            least = float(mine.min())
            constant += least
            own.append(mine[some] - least)
        for v, j, there, back in self._edges_back():
            table = block(self.near[v][j], values[v], values[j])
            table += given[back][values[v], None] - self.messages[there][values[j]]
            least = float(table.min())
            constant += least
            tables[v, j] = table - least
        return constant, own, tables

    def _edges_back(self) -> list[tuple[int, int, slice, slice]]:
        """Pairs (variable, neighbour visited earlier), and the slices of `messages` in both directions."""
        g = self.graph
        sizes, at, twin = np.diff(g.first).tolist(), g.at.tolist(), g.twin.tolist()
        return [
            (v, j := int(g.other[e]), slice(at[e], at[e] + sizes[j]), slice(at[twin[e]], at[twin[e]] + sizes[v]))
            for v in range(len(sizes)) for e in range(g.start[v], g.split[v])
        ]  # fmt: skip
