"""Message passing over the edges of a problem in NumPy, and what is read from the messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardc.solver.cost_tables import CHUNK, FORBIDDEN, Index, Table
from shardc.solver.graph import Graph


def least_sums(table: Table, here: Table, out: Table, space: Table) -> None:
    """out[b] = min over a of here[a] + table[a, b]. `space` for the sums has at least one row."""
    rows, columns = table.shape
    if table.size <= space.size:
        sums = space[: table.size].reshape(rows, columns)
        np.minimum.reduce(np.add(table, here[:, None], sums), 0, out=out)
        return
    step = space.size // columns
    out[:] = np.inf
    for a in range(0, rows, step):
        some = table[a : a + step]
        sums = space[: some.size].reshape(len(some), columns)
        np.add(some, here[a : a + step, None], sums)
        np.minimum(out, np.minimum.reduce(sums, 0), out=out)


def _space(tables: Sequence[Table]) -> Table:
    """A buffer for the sums of a whole table, or of as many of its rows as stay in a core's cache."""
    most = max((t.size for t in tables), default=0)
    return np.empty(max(min(most, CHUNK), max((t.shape[1] for t in tables), default=0)))


class _Side(NamedTuple):
    """The edges from the variables of a level to earlier ones, or to later ones.

    Attributes:
      edges: the indices of the edges; twins: of the same edges in the other direction.
      to: indices of the entries of the messages to the level's variables along these edges.
      of: for each entry of `to` the position of its value in the level.
      begins, counts: for each edge the offset of its entries in `to`, and their number.
      parts: for each edge its index and the slice of its entries; places: the slice of its variable's values in the
        level.
    """

    edges: Index
    twins: Index
    to: Index
    of: Index
    begins: Index
    counts: Index
    parts: list[tuple[int, slice]]
    places: list[slice]


class _Independent(NamedTuple):
    """Variables that are visited together: no two of them are neighbours.

    Attributes:
      variables: their numbers; mine: for each the slice of its values in the level.
      values: for each value of the level its position among the values of all variables.
      begins: offset of each variable's values in the level.
      share: `Graph.share` for each value.
      ranks: for k = 0, 1, ...: positions of values, and of the entries of the messages to them along the k-th edge of
        each variable.
      earlier, later: the edges to variables visited before, and after.
    """

    variables: Index
    mine: list[slice]
    values: Index
    begins: Index
    share: Table
    ranks: list[tuple[Index, Index]]
    earlier: _Side
    later: _Side


class _EdgeCall(NamedTuple):
    """The arguments of the NumPy calls for one edge. Making these views takes as long as computing with short arrays.

    Attributes:
      table: the table of the edge.
      costs: (rows, 1) the costs to add to its rows.
      sums: a buffer for table + costs; empty if the table is too large.
      message: the output, one entry for each column.
    """

    table: Table
    costs: Table
    sums: Table
    message: Table


class _Sums:
    """The tables, and buffers for table + costs.

    Attributes:
      messages: all messages, before their least entry is subtracted.
    """

    def __init__(
        self, tables: Sequence[Table], levels: Sequence[_Independent], along: Sequence[slice], size: int
    ) -> None:
        self.messages, self._given, self._space = np.empty(size), np.empty(size), _space(tables)

        def call(e: int, part: slice) -> _EdgeCall:
            table = tables[e]
            sums = self._space[: table.size if table.size <= self._space.size else 0].reshape(-1, table.shape[1])
            return _EdgeCall(table, self._given[part, None], sums, self.messages[along[e]])

        sides = [side for level in levels for side in (level.earlier, level.later)]
        self._calls = {id(side): [call(*part) for part in side.parts] for side in sides}

    def send(self, side: _Side, given: Table) -> None:
        """Compute the messages along the edges of `side`, after adding the costs `given` to the rows of their
        tables."""
        self._given[: given.size] = given
        for table, costs, sums, message in self._calls[id(side)]:
            if sums.size:
                np.minimum.reduce(np.add(table, costs, sums), 0, out=message)
            else:
                least_sums(table, costs[:, 0], message, self._space)


def _ranges(begins: Index, counts: Index) -> Index:
    """Concatenated ranges: begins[k], begins[k] + 1, ..., begins[k] + counts[k] - 1 for each k."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(begins - (ends - counts), counts)


def _levels(graph: Graph) -> list[_Independent]:
    """Groups of variables that can be visited at once: a variable is one level after the last of its earlier
    neighbours."""
    other: list[int] = graph.other.tolist()
    level = [0] * graph.order.size
    for v in graph.order.tolist():
        level[v] = 1 + max((level[j] for j in other[graph.start[v] : graph.split[v]]), default=-1)
    order = np.argsort(level, kind="stable")
    bounds = np.cumsum(np.bincount(level))[:-1] if level else []
    return [_level(graph, variables) for variables in np.split(order, bounds) if variables.size]


def _level(graph: Graph, variables: Index) -> _Independent:
    sizes = np.diff(graph.first)[variables]
    begins = np.cumsum(sizes) - sizes
    mine = [slice(a, a + n) for a, n in zip(begins.tolist(), sizes.tolist(), strict=True)]

    def side(first: Index, last: Index) -> _Side:
        degree = (last - first)[variables]
        which, edges = np.repeat(np.arange(variables.size), degree), _ranges(first[variables], degree)
        twins, counts = graph.twin[edges], sizes[which]
        ends = np.cumsum(counts)
        parts = [(e, slice(b - n, b)) for e, b, n in zip(edges.tolist(), ends.tolist(), counts.tolist(), strict=True)]
        to, of = _ranges(graph.at[twins], counts), _ranges(begins[which], counts)
        places = [mine[k] for k in which.tolist()]
        return _Side(edges, twins, to, of, ends - counts, counts, parts, places)

    ranks: list[tuple[Index, Index]] = []
    first, degree = graph.start[variables], np.diff(graph.start)[variables]
    for rank in range(int(degree.max())):
        some = degree > rank
        to = _ranges(graph.at[graph.twin[first[some] + rank]], sizes[some])
        ranks.append((_ranges(begins[some], sizes[some]), to))
    share, values = np.repeat(graph.share[variables], sizes), _ranges(graph.first[variables], sizes)
    earlier, later = side(graph.start[:-1], graph.split), side(graph.split, graph.start[1:])
    return _Independent(variables, mine, values, begins, share, ranks, earlier, later)


class NumpyPasses:
    """Passes over the edges of a problem. In all methods `own` holds the costs of all values, `messages` all messages.

    A NumPy call takes as long as a thousand entries. So `send` makes two calls for each edge, and all other calls for
    all edges of a level at once: the least entry of a message is subtracted when its variable is visited.
    """

    def __init__(self, graph: Graph, tables: Sequence[Table]) -> None:
        self._tables, self._left = tables, graph.left
        self._order: list[int] = graph.order.tolist()
        self._start: list[int] = graph.start.tolist()
        self._split: list[int] = graph.split.tolist()
        self._other: list[int] = graph.other.tolist()
        self._twin: list[int] = graph.twin.tolist()
        self._share: list[float] = graph.share.tolist()
        self._columns = [tables[e] for e in self._twin]  # rows: what the values here cost beside one there
        first, at = graph.first.tolist(), graph.at.tolist()
        self._values = [slice(a, b) for a, b in itertools.pairwise(first)]
        sizes = [b - a for a, b in itertools.pairwise(first)]
        self._along = [slice(k, k + sizes[j]) for k, j in zip(at, self._other, strict=True)]
        self._shape = [(b - a, n) for (a, b), n in zip(itertools.pairwise(self._start), sizes, strict=True)]
        ends = list(itertools.accumulate((degree * n for degree, n in self._shape), initial=0))
        self._to = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self._graph, self._size = graph, ends[-1]

    @cached_property
    def _levels(self) -> list[_Independent]:
        return _levels(self._graph)

    @cached_property
    def _sums(self) -> _Sums:
        return _Sums(self._tables, self._levels, self._along, self._size)

    @cached_property
    def _bound(self) -> Index:
        """The terms of the bound, in the order in which they are added."""
        bound: list[int] = []
        for v in reversed(self._order):
            bound += [v, *(len(self._order) + r for r in self._twin[self._start[v] : self._split[v]])]
        return np.asarray(bound, np.intp)

    def _by_variable(self, messages: Table) -> list[Table]:
        """For each variable (edges, values) the messages to it, in the order of its edges."""
        return [messages[to].reshape(shape) for to, shape in zip(self._to, self._shape, strict=True)]

    def send(self, own: Table, messages: Table, forward: bool, read: bool, values: Index) -> float:
        """Send messages along all edges: a pass in the order of the visits (`forward`), or in reverse. `read`: an
        assignment is read into `values`. Returns the lower bound after a reverse pass; 0 after a forward pass."""
        leasts, rest = np.zeros(len(self._other)), np.zeros(len(self._order))
        for level in self._levels if forward else reversed(self._levels):
            behind, ahead = (level.earlier, level.later) if forward else (level.later, level.earlier)
            if behind.edges.size:
                there = self._sums.messages[behind.to]
                leasts[behind.edges] = least = np.minimum.reduceat(there, behind.begins)
                messages[behind.to] = there - np.repeat(least, behind.counts)
            costs = own[level.values]
            for of, to in level.ranks:
                costs[of] += messages[to]
            if read:
                self._read(level, behind, costs.copy(), messages, values)
            if not forward:
                rest[level.variables] = np.minimum.reduceat(costs, level.begins)
            if not ahead.edges.size:
                continue
            costs *= level.share
            self._sums.send(ahead, costs[ahead.of] - messages[ahead.to])
        return 0.0 if forward else in_order(np.concatenate((self._left * rest, leasts))[self._bound])

    def _read(self, level: _Independent, behind: _Side, given: Table, messages: Table, values: Index) -> None:
        """Set each variable of a level to its best value, given the values of the variables visited before."""
        for (e, _), part in zip(behind.parts, behind.places, strict=True):
            here = given[part]
            here -= messages[self._along[self._twin[e]]]
            here += self._columns[e][values[self._other[e]]]
        for v, part in zip(level.variables.tolist(), level.mine, strict=True):
            values[v] = given[part].argmin()

    def handed(self, own: Table, messages: Table) -> tuple[Table, Table]:
        """After a reverse pass: the share of each value's costs that no edge gets; and, at the place of each message
        from an earlier neighbour, the costs that the variable's values gave to the table, minus this message."""
        left, given = np.empty(own.size), np.zeros(messages.size)
        incoming, outgoing = self._by_variable(messages), self._by_variable(given)
        for v, mine in enumerate(self._values):
            costs, behind = _costs(own[mine], incoming[v]), self._split[v] - self._start[v]
            np.subtract(costs * self._share[v], incoming[v][:behind], outgoing[v][:behind])
            np.multiply(costs, self._left[v], left[mine])
        return left, given

    def excess(self, own: Table, messages: Table) -> Table:
        """For each value, after a reverse pass, a lower bound of the cost of assignments that have it, minus the
        bound."""
        left, given = self.handed(own, messages)
        found, space = np.empty(left.size), _space(self._tables)
        for mine in self._values:
            found[mine] = left[mine] - left[mine].min()
        for v, split in enumerate(self._split):
            for e in range(self._start[v], split):
                j, back = self._other[e], self._twin[e]
                mine, theirs = given[self._along[back]], messages[self._along[e]]
                here, there = np.empty(mine.size), np.empty(theirs.size)
                least_sums(self._tables[back], -theirs, here, space)
                least_sums(self._tables[e], mine, there, space)
                here += mine
                there -= theirs
                found[self._values[v]] += here - here.min()
                found[self._values[j]] += there - there.min()
        return found

    def improve(self, own: Table, values: Index, passes: int) -> float:
        """Coordinate descent: set each variable in turn to its best value, in place. Returns the cost of the
        assignment."""
        for _ in range(passes):
            changed = False
            for v in self._order:
                costs = own[self._values[v]].copy()
                for e in range(self._start[v], self._start[v + 1]):
                    costs += self._columns[e][values[self._other[e]]]
                best = costs.argmin()
                if costs[best] < costs[values[v]]:
                    values[v], changed = best, True
            if not changed:
                break
        total, x = 0.0, values.tolist()
        for v in self._order:
            total += float(own[self._values[v].start + x[v]])
            for e in range(self._split[v], self._start[v + 1]):
                total += float(self._tables[e][x[v], x[self._other[e]]])
        return total

    def better_of(self, own: Table, best: Index, other: Index) -> Index:
        """The cheaper of two assignments, chosen separately in each connected part of the graph in which they
        differ."""
        before, after = best.tolist(), other.tolist()
        differ: list[bool] = (best != other).tolist()
        leader, change = list(range(len(before))), [0.0] * len(before)
        for v, here in enumerate(differ):
            if here:
                first = self._values[v].start
                change[v] += float(own[first + after[v]]) - float(own[first + before[v]])
            for e in range(self._split[v], self._start[v + 1]):
                j = self._other[e]
                if not (here or differ[j]):
                    continue
                table = self._tables[e]
                new, old = float(table[after[v], after[j]]), float(table[before[v], before[j]])
                # where but one end differs, the other one stays at a value that both have
                change[v if here else j] += min(new, FORBIDDEN) - min(old, FORBIDDEN)
                if here and differ[j]:
                    leader[_root(leader, v)] = _root(leader, j)
        gain = [0.0] * len(before)
        for v, here in enumerate(differ):
            if here:
                gain[_root(leader, v)] += change[v]
        return np.asarray(
            [b if here and gain[_root(leader, v)] < 0 else a
             for v, (a, b, here) in enumerate(zip(before, after, differ, strict=True))], np.intp
        )  # fmt: skip


def _costs(own: Table, incoming: Table) -> Table:
    """The costs of the values of a variable, plus all messages to it."""
    costs = own.copy()
    for message in incoming:
        np.add(costs, message, costs)
    return costs


def _root(leader: list[int], v: int) -> int:
    while leader[v] != v:
        leader[v] = leader[leader[v]]
        v = leader[v]
    return v


def in_order(terms: Table) -> float:
    """The sum of terms, added from left to right; `np.sum` uses pairwise summation."""
    return float(np.add.accumulate(terms)[-1]) if terms.size else 0.0
