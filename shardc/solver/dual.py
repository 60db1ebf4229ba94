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
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from shardc.solver.tables import Index, Pair, Table

CHUNK: Final = 1 << 16
"""Entries of a temporary array that stay in a core's cache."""
SHARED: Final = 2048
"""Tables larger than this are not copied to be worked on side by side."""
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


@dataclass(eq=False)
class _Edges:
    """Edges of one shape out of the variables of one level. Messages are found by their places in one flat array."""

    position: Index  # of the variable in its level
    other: Index
    first: int  # where the messages to the other end lie
    back: Index  # where those from it lie
    tables: Table  # edge (or 1, where one table serves all), values here, values there


@dataclass(eq=False)
class _Level:
    """Variables of one size that have no edges among themselves."""

    variables: Index
    own: Table
    incoming: Index
    starts: Index
    ahead: list[_Edges]
    behind: list[_Edges]
    share: Table  # of its costs for each edge ahead
    left: tuple[Table, Table]  # of its costs for none of the edges ahead, on the way there and back


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
    """The messages of a problem of finite costs, in which each variable and each row of a table has an allowed entry.

    Where it is `free`, tables say only what is allowed.

    Attributes:
      bound: as the messages are now.
      values: assignment read last; readings: those of the last sweep that was read, there and back.
      work: entries that one `raise_bound` touches.
    """

    def __init__(self, own: Sequence[Table], near: Sequence[Mapping[int, Table]], free: bool = False) -> None:
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
        groups: dict[Pair, list[int]] = {}
        for v, u in enumerate(own):
            groups.setdefault((level[v], u.size), []).append(v)
        place: dict[Pair, int] = {}
        size = 0
        drafts: list[tuple[list[int], list[list[list[Pair]]]]] = []
        for (_, _), members in sorted(groups.items()):
            sides: list[list[list[Pair]]] = []
            for ahead in (True, False):
                bundles: dict[tuple[int, int], list[Pair]] = {}
                for v in members:
                    for j, table in near[v].items():
                        if (level[j] > level[v]) == ahead:
                            key = (own[j].size, id(table) if table.size > SHARED else 0)
                            bundles.setdefault(key, []).append((v, j))
                for bundle in bundles.values():
                    for pair in bundle:
                        place[pair] = size
                        size += own[pair[1]].size
                sides.append(list(bundles.values()))
            drafts.append((members, sides))
        nothing = size  # no message: zeros
        self.messages: Table = np.zeros(size + max((u.size for u in own), default=0))
        self._begin = self.messages  # of the next sweep
        self._last: tuple[Table, Table] | None = None  # the messages after the last sweep, and how it changed them
        self._levels: list[_Level] = []
        for members, sides in drafts:
            position = {v: k for k, v in enumerate(members)}
            span = np.arange(own[members[0]].size)
            sources = [[place[j, v] for j in near[v]] or [nothing] for v in members]
            counts = np.asarray([len(s) for s in sources])
            ahead, behind = (
                [
                    _Edges(
                        np.asarray([position[v] for v, _ in bundle]),
                        np.asarray([j for _, j in bundle]),
                        place[bundle[0]],
                        np.asarray([place[j, v] for v, j in bundle])[:, None] + span,
                        self._stack([near[v][j] for v, j in bundle], free),
                    )
                    for bundle in side
                ]
                for side in sides
            )
            here = np.asarray([sum(level[j] > level[v] for j in near[v]) for v in members], np.float64)
            share = 1.0 / np.maximum(np.maximum(here, [len(near[v]) for v in members] - here), 1.0)
            left = 1.0 - here * share, 1.0 - ([len(near[v]) for v in members] - here) * share
            self._levels.append(
                _Level(
                    np.asarray(members),
                    np.stack([own[v] for v in members]),
                    np.concatenate(sources)[:, None] + span,
                    np.concatenate(([0], np.cumsum(counts)[:-1])),
                    ahead,
                    behind,
                    share[:, None],
                    left,
                )
            )
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

    @staticmethod
    def _stack(tables: Sequence[Table], free: bool) -> Table:
        stack = tables[0][None] if all(t is tables[0] for t in tables) else np.stack(tables)
        return np.where(np.isfinite(stack), 0.0, np.inf) if free else stack

    def set_own(self, own: Sequence[Table]) -> None:
        """Other costs of the values; the messages stay."""
        self.own, self.bound = own, -np.inf
        self._begin, self._last = self.messages, None
        for level in self._levels:
            level.own = np.stack([own[v] for v in level.variables])

    def raise_bound(self) -> float:
        """A few sweeps, of which the last one is read."""
        for k in range(SWEEPS):
            self._sweep(read=k == SWEEPS - 1)
        return self.bound

    def _sweep(self, read: bool) -> None:
        """One pass there and one back, from further on along the way that the messages go."""
        known, begin, bound = self.messages, self._begin, self.bound
        self.messages = begin.copy()
        self.readings = []
        for forward in (True, False):
            self.bound = self._pass(forward, count=not forward, read=read)
            if read:
                self.readings.append(self.values.copy())
        if self.bound < bound:
            self.messages, self.bound = known, bound
            self._begin, self._last = known, None
            return
        change, self._begin = self.messages - begin, self.messages
        if self._last is not None:
            before, last = self._last
            turn = change - last
            if (square := float((turn * turn).sum())) > 0:  # not by BLAS, whose threads would go on to spin
                self._begin = self.messages - float((change * turn).sum()) / square * (self.messages - before)
        self._last = self.messages, change

    def _costs(self, level: _Level) -> Table:
        return level.own + np.add.reduceat(self.messages[level.incoming], level.starts, axis=0)

    def _pass(self, forward: bool, count: bool, read: bool) -> float:
        """Gives the bound, if it is counted."""
        bound = 0.0
        for level in self._levels if forward else reversed(self._levels):
            costs = self._costs(level)
            ahead, behind = (level.ahead, level.behind) if forward else (level.behind, level.ahead)
            left = level.left[0 if forward else 1]
            if count:
                bound += float(left @ costs.min(1))
            if read:
                self._read(level, costs, behind)
            costs *= level.share
            for edges in ahead:
                given = costs[edges.position] - self.messages[edges.back]
                message = least_sums(given, edges.tables)
                least = message.min(1, keepdims=True)
                if count:
                    bound += float(least.sum())
                message -= least
                self.messages[edges.first : edges.first + message.size] = message.ravel()
        return bound

    def _read(self, level: _Level, costs: Table, behind: Sequence[_Edges]) -> None:
        """The best values as those behind have been read."""
        costs = costs.copy() if behind else costs
        for edges in behind:
            known = self.values[edges.other]
            row = np.arange(len(known)) if len(edges.tables) > 1 else np.zeros(len(known), np.intp)
            np.add.at(costs, edges.position, edges.tables[row, :, known] - self.messages[edges.back])
        self.values[level.variables] = costs.argmin(1)

    def cost(self, values: Index) -> float:
        total = 0.0
        for level in self._levels:
            mine = values[level.variables]
            total += float(level.own[np.arange(mine.size), mine].sum())
            for edges in level.ahead:
                row = np.arange(edges.other.size) if len(edges.tables) > 1 else 0
                total += float(edges.tables[row, mine[edges.position], values[edges.other]].sum())
        return total

    def improve(self, values: Index, passes: int) -> Index:
        """Each variable in turn takes what is best, the others as they are."""
        values = values.copy()
        for _ in range(passes):
            before = values.copy()
            for level in self._levels:
                costs = level.own.copy()
                for edges in (*level.ahead, *level.behind):
                    known = values[edges.other]
                    row = np.arange(len(known)) if len(edges.tables) > 1 else np.zeros(len(known), np.intp)
                    np.add.at(costs, edges.position, edges.tables[row, :, known])
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
                known = values[edges.other]
                row = np.arange(len(known)) if len(edges.tables) > 1 else np.zeros(len(known), np.intp)
                np.add.at(costs, edges.position, edges.tables[row, :, known])
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
                row = np.arange(source.size) if len(edges.tables) > 1 else 0
                after = np.minimum(edges.tables[row, other[source], other[edges.other]], FAR)
                before = np.minimum(edges.tables[row, best[source], best[edges.other]], FAR)
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
            costs = self._costs(level)
            left = level.left[1][:, None] * costs
            flat[first[level.variables][:, None] + np.arange(costs.shape[1])] += left - left.min(1, keepdims=True)
            costs *= level.share
            for edges in level.behind:
                given = costs[edges.position] - self.messages[edges.back]
                count, size = len(given), edges.tables.shape[2]
                taken = self.messages[edges.first : edges.first + count * size].reshape(count, size)
                here, there = least_of_both(given, -taken, edges.tables)
                np.add.at(flat, first[level.variables[edges.position]][:, None] + np.arange(here.shape[1]), here)
                np.add.at(flat, first[edges.other][:, None] + np.arange(size), there)
        return flat, first

    def handed(self) -> dict[Pair, Table]:
        """For variables (v, j) that are neighbours what j's values cost of their table, as the messages of the last
        pass write it. What is left of the table costs nothing at least, or a constant."""
        found: dict[Pair, Table] = {}
        for level in self._levels:
            costs = self._costs(level) * level.share
            for edges in level.behind:
                given = costs[edges.position] - self.messages[edges.back]
                taken = self.messages[edges.first : edges.first + given.shape[0] * edges.tables.shape[2]]
                pairs = zip(level.variables[edges.position].tolist(), edges.other.tolist(), strict=True)
                for (v, j), mine, theirs in zip(pairs, given, taken.reshape(len(given), -1), strict=True):
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
            costs = self._costs(level)
            left = level.left[1][:, None] * costs
            least = left.min(1, keepdims=True)
            constant += float(least.sum())
            for v, mine in zip(level.variables, left - least, strict=True):
                own[v] = mine[values[v]]
            costs *= level.share
            for edges in level.behind:
                given = costs[edges.position] - self.messages[edges.back]
                count, size = len(given), edges.tables.shape[2]
                taken = self.messages[edges.first : edges.first + count * size].reshape(count, size)
                for k, (v, j) in enumerate(zip(level.variables[edges.position], edges.other, strict=True)):
                    rows, columns = values[v], values[j]
                    table = edges.tables[k if len(edges.tables) > 1 else 0][rows[:, None], columns]
                    table += given[k][rows, None] - taken[k][columns]
                    least = float(table.min())
                    constant += least
                    tables[int(v), int(j)] = table - least
        return constant, own, tables


def least_of_both(rows: Table, columns: Table, tables: Table) -> tuple[Table, Table]:
    """Of rows[e, a] + tables[e, a, b] + columns[e, b] the least for each a and for each b, less the least of all."""
    here, there = np.empty_like(rows), np.empty_like(columns)
    step = max(1, CHUNK // (rows.shape[1] * columns.shape[1]))
    for k in range(0, len(rows), step):
        part = slice(k, k + step)
        total = (tables if len(tables) == 1 else tables[part]) + rows[part, :, None] + columns[part, None, :]
        total.min(2, out=here[part])
        total.min(1, out=there[part])
    return here - here.min(1, keepdims=True), there - there.min(1, keepdims=True)


def least_sums(given: Table, tables: Table) -> Table:
    """For each edge e and value b: least over a of given[e, a] + tables[e, a, b]; one table may serve all edges."""
    count, rows, columns = len(given), tables.shape[1], tables.shape[2]
    step = max(1, CHUNK // (rows * columns))
    if count <= step:
        return (tables + given[:, :, None]).min(1)
    if len(tables) == 1 and rows * 4 < count:
        least = np.full((count, columns), np.inf)
        sums = np.empty_like(least)
        for a in range(rows):
            np.add(given[:, a, None], tables[0, a], out=sums)
            np.minimum(least, sums, out=least)
        return least
    least = np.empty((count, columns))
    for k in range(0, count, step):
        part = tables if len(tables) == 1 else tables[k : k + step]
        np.min(part + given[k : k + step, :, None], axis=1, out=least[k : k + step])
    return least

