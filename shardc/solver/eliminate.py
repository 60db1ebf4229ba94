"""Variable elimination: the exact minimum if the graph is narrow, otherwise the best assignment near a given one.

Eliminating a variable minimizes it out of its tables and leaves one table over its neighbours (Bertele and Brioschi
1972, "Nonserial Dynamic Programming"). The work is exponential in the width of the graph only; the graph of a training
step is almost a tree.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from shardc.solver.cost_tables import FORBIDDEN, Index, Pair, Table
from shardc.solver.kernels import Kernels, numpy_kernels

_Scope: TypeAlias = tuple[int, ...]

HUB: Final = 24
"""Variables with more neighbours are eliminated last: counting the pairs that they join takes too long."""
HELD_TABLE: Final = 1 << 16, 1 << 20
"""The largest table before one of its variables is held at its value: with many variables, and with few."""
HELD_WORK: Final = 1 << 29
"""Entries of all such tables together: in between, each of the variables has an equal share."""


def elimination_order(count: int, pairs: Sequence[Pair]) -> list[int]:
    """The min-fill order: each variable in turn joins the fewest new pairs of neighbours when it is eliminated."""
    around: list[set[int]] = [set() for _ in range(count)]
    for i, j in pairs:
        around[i].add(j)
        around[j].add(i)

    def fill(v: int) -> tuple[int, int]:
        near = around[v]
        if len(near) > HUB:
            return len(near) ** 2, len(near)
        return (sum(len(near - around[a]) for a in near) - len(near)) // 2, len(near)

    queue = [(*fill(v), v) for v in range(count)]
    heapq.heapify(queue)
    order: list[int] = []
    done = [False] * count
    while queue:
        *cost, v = heapq.heappop(queue)
        if done[v]:
            continue
        now = fill(v)
        if now > tuple(cost):
            heapq.heappush(queue, (*now, v))
            continue
        done[v] = True
        order.append(v)
        for i in around[v]:
            around[i] |= around[v]
            around[i] -= {i, v}
        for i in around[v]:
            heapq.heappush(queue, (*fill(i), i))
    return order


def elimination_work(sizes: Sequence[int], pairs: Sequence[Pair], order: Sequence[int]) -> float:
    """The number of table entries that an elimination in this order touches."""
    around: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        around[i].add(j)
        around[j].add(i)
    work = 0.0
    for v in order:
        near = around[v]
        work += math.prod((float(sizes[i]) for i in near), start=float(sizes[v]))
        for i in near:
            around[i] |= near
            around[i] -= {i, v}
        around[v] = set()
    return work


class _Ways(NamedTuple):
    """The ways to go on in `by_cost`: the values of the next variable, given the values chosen before.

    Attributes:
      cost: the least cost with the values chosen before; values: these values; done: how many they are.
      more: the cost that each value of the next variable adds; order: these values in the order of cost.
    """

    cost: float
    values: list[int]
    done: int
    more: Table
    order: Index


class Elimination:
    """One elimination of all variables.

    Args:
      unary, pairwise: the costs; pairs are (i, j) with i < j.
      held: an assignment that limits the size of the tables. If a table would grow too large, a variable is fixed at
        its value in `held`; the result costs no more than `held`. None: tables are made whatever their size.
      kernels: the implementation of the loops.

    Attributes:
      least: after `run`, the minimum over the variables that were not fixed.
      work: table entries touched.
    """

    def __init__(
        self, unary: Sequence[Table], pairwise: Mapping[Pair, Table], held: Sequence[int] | None = None,
        kernels: Kernels = numpy_kernels,
    ) -> None:  # fmt: skip
        self.least, self.work, self._kernels = 0.0, 0.0, kernels
        self._held = held
        self._back: list[tuple[int, Table, dict[_Scope, Table]]] = []
        self._largest = float(np.clip(HELD_WORK / max(len(unary), 1), *HELD_TABLE))
        self._own = list(unary)
        self._tables: list[dict[_Scope, Table]] = [{} for _ in unary]
        for scope, table in pairwise.items():
            self._add(scope, table)

    def run(self, order: Sequence[int]) -> list[int]:
        """Eliminate the variables in this order. Returns the assignment of least cost."""
        values = [-1] * len(self._own)
        self._back = back = []
        for v in order:
            if self._held is not None:
                self._hold(v, self._held, values)
            if values[v] >= 0:
                continue
            tables = dict(self._tables[v])
            back.append((v, self._own[v], tables))
            for scope in tables:
                for i in scope:
                    self._tables[i].pop(scope, None)
            self._minimize_out(v, tables)
        for step in reversed(back):
            values[step[0]] = int(np.argmin(_costs_of(step, values)))
        return values

    def by_cost(self) -> Iterator[tuple[float, list[int]]]:
        """All assignments with their costs, the cheapest first. Call it after `run`, without `held`.

        This is A* with an exact bound: the least cost of the remaining variables is known at each step. The next value
        of a variable enters the queue when the one before leaves it, so each assignment adds two entries per variable.
        """
        steps, ties = self._back[::-1], itertools.count()
        queue: list[tuple[float, int, int, _Ways]] = []

        def add(ways: _Ways, k: int) -> None:
            if k < ways.order.size and (cost := ways.cost + float(ways.more[ways.order[k]])) < FORBIDDEN:
                heapq.heappush(queue, (cost, next(ties), k, ways))

        def go_on(cost: float, values: list[int], done: int) -> None:
            total = _costs_of(steps[done], values)
            more = total - total.min()
            add(_Ways(cost, values, done, more, np.argsort(more, kind="stable")), 0)

        go_on(self.least, [-1] * len(steps), 0)
        while queue:
            cost, _, k, ways = heapq.heappop(queue)
            add(ways, k + 1)
            values = ways.values.copy()
            values[steps[ways.done][0]] = int(ways.order[k])
            if ways.done + 1 == len(steps):
                yield cost, values
            else:
                go_on(cost, values, ways.done + 1)

    def _add(self, scope: _Scope, table: Table) -> None:
        present = self._tables[scope[0]].get(scope)
        if present is not None:
            table = present + table
        for i in scope:
            self._tables[i][scope] = table

    def _hold(self, v: int, held: Sequence[int], values: list[int]) -> None:
        """Fix variables at their values in `held` until the table of `v` is small, or `v` itself is fixed."""
        while values[v] < 0:
            near = {i for scope in self._tables[v] for i in scope} | {v}
            if math.prod(float(self._own[i].size) for i in near) <= self._largest:
                return
            wide = max(near, key=lambda i: (len(self._tables[i]) * self._own[i].size, -i))
            values[wide] = held[wide]
            self._fix(wide, held[wide])

    def _fix(self, v: int, value: int) -> None:
        """Each table of `v` --> its slice at that value."""
        self.least += float(self._own[v][value])
        for scope, table in list(self._tables[v].items()):
            for i in scope:
                self._tables[i].pop(scope, None)
            self._put(tuple(i for i in scope if i != v), np.asarray(table.take(value, axis=scope.index(v))))

    def _put(self, scope: _Scope, table: Table) -> None:
        if not scope:
            self.least += float(table)
        elif len(scope) == 1:
            self._own[scope[0]] = self._own[scope[0]] + table
        else:
            self._add(scope, table)

    def _minimize_out(self, v: int, tables: Mapping[_Scope, Table]) -> None:
        """The tables of `v` --> one table over its neighbours."""
        rest = sorted({i for scope in tables for i in scope} - {v})
        self.work += math.prod((float(self._own[i].size) for i in rest), start=float(self._own[v].size))
        # the widest last, so that the inner loop is long
        rest.sort(key=lambda i: (self._own[i].size, i))
        terms = [((v,), self._own[v]), *sorted(tables.items(), key=lambda item: item[0])]
        least = _least_sum(terms, v, rest, self._kernels)
        scope = tuple(sorted(rest))
        self._put(scope, least.transpose([rest.index(i) for i in scope]))


def _costs_of(step: tuple[int, Table, dict[_Scope, Table]], values: Sequence[int]) -> Table:
    """The cost of each value of a variable: with the values chosen so far, and the best values of the variables
    eliminated before it."""
    v, total, tables = step
    for scope, table in tables.items():
        total = total + table[tuple(slice(None) if i == v else values[i] for i in scope)]
    return total


def _least_sum(terms: Sequence[tuple[_Scope, Table]], v: int, rest: Sequence[int], kernels: Kernels) -> Table:
    """The minimum over `v` of a sum of tables; the dimensions of the result are the variables `rest`."""
    if not rest:
        return np.asarray(np.sum([table for _, table in terms], 0).min())
    order = (*rest[:-1], v, rest[-1])
    size = {i: n for scope, table in terms for i, n in zip(scope, table.shape, strict=True)}
    strides, begins, taken, entries = np.zeros((len(terms), len(order)), np.intp), list[int](), 0, list[Table]()
    for k, (scope, table) in enumerate(terms):
        dimensions = sorted(scope, key=order.index)
        entries.append(table.transpose([scope.index(i) for i in dimensions]).reshape(-1))
        begins.append(taken)
        taken += table.size
        step = 1  # as numpy has it, but for dimensions of one
        for i in reversed(dimensions):
            strides[k, order.index(i)] = step
            step *= size[i]
    sizes = np.asarray([size[i] for i in order], np.intp)
    found = kernels.least_of_sum(np.concatenate(entries), np.asarray(begins, np.intp), strides, sizes)
    return found.reshape([size[i] for i in rest])
