"""Minimum of a sum of cost tables over discrete variables, by variable elimination. Pure arrays: knows no placements.

Eliminating a variable minimises it out of the tables it stands in, leaving one table over its neighbours (Bertele and
Brioschi 1972, "Nonserial Dynamic Programming"). The work is exponential in the width of the graph only; a training
step's graph is almost a tree. Where a table would grow over the limit, its parts are minimised apart (mini-buckets:
Dechter and Rish 2003), which gives a lower bound and, read backwards, an assignment; that is then improved by
eliminating exactly around the few variables in question, held at what they are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Table: TypeAlias = NDArray[np.float64]
Scope: TypeAlias = tuple[int, ...]

TABLE_LIMIT: Final = 1 << 20
"""Entries of the largest table that elimination may make."""
FORBIDDEN: Final = 1e15
"""Costs from here on mean: not allowed."""
CLOSE: Final = 1e-6
"""Relative distance of cost and bound at which an assignment counts as proved best."""
HUB: Final = 24
"""Variables with more neighbours are eliminated last, whatever they would join."""
LARGE: Final = 4096
"""Entries from which on tables are not remembered."""
ROUNDS: Final = 6
"""Improvements of an assignment that is not proved best, at most."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The value chosen for each variable, its cost, and a lower bound of the minimum."""

    values: list[int]
    cost: float
    bound: float

    @property
    def exact(self) -> bool:
        return self.cost <= self.bound + CLOSE * abs(self.cost)


class Memo:
    """Results of small array operations by the identity of their operands.

    A model repeats its layers: most tables are one of a few, and so are the results of eliminating them. Equal arrays
    are one object (`one`), and an operation on the same objects is done once (`do`).
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], bytes], Table] = {}
        self._done: dict[Hashable, tuple[Any, Any]] = {}

    def one(self, array: Table) -> Table:
        """The one array that equals `array`; large ones are not looked up."""
        if array.size > LARGE:
            return array
        return self._arrays.setdefault((array.shape, array.tobytes()), array)

    def do(self, key: Hashable, operands: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made once for `key`; the key names `operands` by identity, so they are kept."""
        found = self._done.get(key)
        if found is None:
            found = self._done[key] = (operands, make())
        return found[1]


def elimination_order(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Variables in the order in which eliminating them joins the fewest new pairs of neighbours (min-fill)."""
    around: list[set[int]] = [set() for _ in range(count)]
    for i, j in pairs:
        around[i].add(j)
        around[j].add(i)

    def fill(v: int) -> tuple[int, int]:
        if len(around[v]) > HUB:  # counting its pairs takes longer than it is worth: it comes last
            return len(around[v]) ** 2, len(around[v])
        near = sorted(around[v])
        missing = sum(1 for k, a in enumerate(near) for b in near[:k] if b not in around[a])
        return missing, len(near)

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


def undominated(
    unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table], memo: Memo
) -> tuple[list[NDArray[np.intp]], list[Table], dict[tuple[int, int], Table]]:
    """For each variable the values that may be needed, and the tables of these alone.

    Dropped are values that are not allowed, and those that another one beats whatever the neighbours take: b beats a if
    unary[a] - unary[b] + sum over the tables of min over the neighbour of (T[a] - T[b]) >= 0.
    """
    keep: list[NDArray[np.intp]] = []
    own: list[Table] = []
    around: list[dict[int, Table]] = [{} for _ in unary]
    for u in unary:
        some = memo.do(("allowed", id(u)), u, lambda u=u: _allowed(u))
        keep.append(some)
        taken = memo.do(("take", id(u), id(some)), (u, some), lambda u=u, s=some: u if s.size == u.size else u[s])
        own.append(taken)
    for (i, j), table in pairwise.items():
        rows, columns = keep[i], keep[j]
        if rows.size != table.shape[0] or columns.size != table.shape[1]:
            table = memo.do(
                ("ix", id(table), id(rows), id(columns)),
                (table, rows, columns),
                lambda t=table, r=rows, c=columns: memo.one(np.ascontiguousarray(t[np.ix_(r, c)])),
            )
        around[i][j] = table
        around[j][i] = memo.do(("T", id(table)), table, lambda t=table: memo.one(np.ascontiguousarray(t.T)))
    waiting = deque(range(len(own)))
    queued = [True] * len(own)
    while waiting:
        v = waiting.popleft()
        queued[v] = False
        if own[v].size < 2:
            continue
        tables = list(around[v].values())
        alive = memo.do(
            ("alive", id(own[v]), *map(id, tables)), (own[v], tables), lambda v=v, t=tables: _alive(own[v], t)
        )
        if alive.size == own[v].size:
            continue
        keep[v] = keep[v][alive]
        own[v] = memo.do(("take", id(own[v]), id(alive)), (own[v], alive), lambda v=v, a=alive: memo.one(own[v][a]))
        for j, table in around[v].items():
            table = memo.do(("rows", id(table), id(alive)), (table, alive), lambda t=table, a=alive: memo.one(t[a]))
            around[v][j] = table
            around[j][v] = memo.do(("T", id(table)), table, lambda t=table: memo.one(np.ascontiguousarray(t.T)))
            if not queued[j]:
                queued[j] = True
                waiting.append(j)
    return keep, own, {(i, j): around[i][j] for i, j in pairwise}


def _allowed(u: Table) -> NDArray[np.intp]:
    allowed = np.flatnonzero(u < FORBIDDEN)
    return allowed if allowed.size else np.arange(u.size)


def _alive(own: Table, tables: Sequence[Table]) -> NDArray[np.intp]:
    """The values that no other beats."""
    worse = own[:, None] - own[None, :]
    for table in tables:
        worse = worse + (table[:, None, :] - table[None, :, :]).min(-1)
    alive = list(range(own.size))
    for a in range(own.size):
        if any(worse[a, b] >= 0 for b in alive if b != a):
            alive.remove(a)
    return np.asarray(alive, np.intp)


def minimize(
    unary: Sequence[Table],
    pairwise: Mapping[tuple[int, int], Table],
    start: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    memo: Memo | None = None,
) -> Assignment:
    """Minimises sum_i unary[i][x_i] + sum_(i,j) pairwise[i,j][x_i, x_j].

    Args:
      unary: for each variable the cost of each of its values; FORBIDDEN and above rules one out.
      pairwise: tables of pairs i < j.
      start: an assignment that the result is not to be worse than.
      order: elimination order; by default `elimination_order`.
      memo: to share work with other problems of the same tables.
    """
    memo = memo or Memo()
    unary = [memo.one(np.asarray(u, np.float64)) for u in unary]
    pairwise = {pair: memo.one(np.ascontiguousarray(t)) for pair, t in pairwise.items()}
    allowed, own, tables = undominated(unary, pairwise, memo)
    order = elimination_order(len(own), list(tables)) if order is None else order

    def cost(x: Sequence[int]) -> float:
        return sum(float(u[v]) for u, v in zip(own, x, strict=True)) + sum(
            float(t[x[i], x[j]]) for (i, j), t in tables.items()
        )

    first = _Elimination(own, tables, {}, memo)
    values = first.run(order)
    best, bound = cost(values), first.bound
    if best > bound + CLOSE * abs(best):
        if start is not None and all(s in a for a, s in zip(allowed, start, strict=True)):
            begin = [int(np.argmax(a == s)) for a, s in zip(allowed, start, strict=True)]
            if cost(begin) < best:
                values, best = begin, cost(begin)
        for _ in range(ROUNDS):
            held = _Elimination(own, tables, dict(enumerate(values)), memo)
            found = held.run(order)
            now = cost(found)
            if now >= best - CLOSE * abs(best):
                break
            values, best = found, now
    return Assignment([int(a[v]) for a, v in zip(allowed, values, strict=True)], best, bound)


@dataclass
class _Elimination:
    """One run over all variables. With `held` values a variable whose table is too large is fixed at its own; without
    them its tables are minimised apart, and `bound` is below the minimum."""

    unary: Sequence[Table]
    pairwise: Mapping[tuple[int, int], Table]
    held: Mapping[int, int]
    memo: Memo
    bound: float = 0.0
    own: list[Table] = field(default_factory=list[Table])
    factors: list[dict[Scope, Table]] = field(default_factory=list[dict[Scope, Table]])

    def run(self, order: Sequence[int]) -> list[int]:
        self.own = list(self.unary)
        self.factors = [{} for _ in self.own]
        for scope, table in self.pairwise.items():
            self._add(scope, table)
        fixed: dict[int, int] = {v: 0 for v, u in enumerate(self.own) if u.size == 1}
        for v in fixed:
            self._fix(v, 0)
        back: list[tuple[int, Table, dict[Scope, Table]]] = []
        for v in order:
            if v in fixed:
                continue
            buckets = self._buckets(v)
            while len(buckets) > 1 and self.held:
                wide = self._widest(v)
                fixed[wide] = self.held[wide]
                self._fix(wide, fixed[wide])
                if wide == v:
                    break
                buckets = self._buckets(v)
            if v in fixed:
                continue
            tables = dict(self.factors[v])
            back.append((v, self.own[v], tables))
            for scope in tables:
                for i in scope:
                    self.factors[i].pop(scope, None)
            for k, bucket in enumerate(buckets):
                self._minimize_out(v, bucket, self.own[v] if k == 0 else self.memo.one(np.zeros_like(self.own[v])))
        values = [fixed.get(v, 0) for v in range(len(self.own))]
        for v, alone, tables in reversed(back):
            total = alone
            for scope, table in tables.items():
                total = total + table[tuple(slice(None) if i == v else values[i] for i in scope)]
            values[v] = int(np.argmin(total))
        return values

    def _add(self, scope: Scope, table: Table) -> None:
        present = self.factors[scope[0]].get(scope)
        if present is not None:
            table = self._sum(present, table)
        for i in scope:
            self.factors[i][scope] = table

    def _buckets(self, v: int) -> list[dict[Scope, Table]]:
        """The tables of `v`, in groups whose joint table is within the limit; one group if all fit together."""
        groups: list[tuple[set[int], dict[Scope, Table]]] = []
        for scope, table in sorted(self.factors[v].items(), key=lambda item: (-item[1].size, item[0])):
            for names, group in groups:
                if self._entries(names | set(scope)) <= TABLE_LIMIT:
                    names |= set(scope)
                    group[scope] = table
                    break
            else:
                groups.append((set(scope), {scope: table}))
        return [group for _, group in groups] or [{}]

    def _entries(self, names: set[int]) -> float:
        entries = 1.0
        for i in names:
            entries *= self.own[i].size
        return entries

    def _widest(self, v: int) -> int:
        """The variable to fix so that the table of `v` shrinks most: the one in most tables."""
        near = {i for scope in self.factors[v] for i in scope}
        return max(near, key=lambda i: (len(self.factors[i]) * self.own[i].size, -i))

    def _minimize_out(self, v: int, tables: Mapping[Scope, Table], alone: Table) -> None:
        """`v` out of its tables: --> one table over the others."""
        rest = tuple(sorted({i for scope in tables for i in scope} - {v}))
        position = {i: p for p, i in enumerate((*rest, v))}
        shapes = [(tuple(position[i] for i in names), table) for names, table in tables.items()]
        shapes.sort(key=lambda item: item[0])  # never by identity: sums are to round alike in every process
        key = ("out", id(alone), *((places, id(table)) for places, table in shapes))
        if self._entries({*rest, v}) > LARGE:
            least = _least(alone, shapes, len(rest))
        else:
            least = self.memo.do(key, (alone, shapes), lambda: self.memo.one(_least(alone, shapes, len(rest))))
        if not rest:
            self.bound += float(least)
        elif len(rest) == 1:
            self.own[rest[0]] = self._sum(self.own[rest[0]], least)
        else:
            self._add(rest, least)

    def _sum(self, a: Table, b: Table) -> Table:
        if a.size > LARGE:
            return a + b
        return self.memo.do(("sum", id(a), id(b)), (a, b), lambda: self.memo.one(a + b))

    def _fix(self, v: int, value: int) -> None:
        """Sets `v`: each of its tables --> its slice at that value."""
        self.bound += float(self.own[v][value])
        for names, table in list(self.factors[v].items()):
            for i in names:
                self.factors[i].pop(names, None)
            rest = tuple(i for i in names if i != v)
            place = names.index(v)
            piece = self.memo.do(
                ("fix", id(table), value, place),
                table,
                lambda t=table, p=place: self.memo.one(np.array(np.take(t, value, axis=p))),
            )
            if not rest:
                self.bound += float(piece)
            elif len(rest) == 1:
                self.own[rest[0]] = self._sum(self.own[rest[0]], piece)
            else:
                self._add(rest, piece)


def _least(alone: Table, shapes: Sequence[tuple[Scope, Table]], rank: int) -> Table:
    """Minimum over the last of `rank` + 1 dimensions of the sum of tables, each over some of them."""
    total = alone.reshape((1,) * rank + (-1,))
    for places, table in shapes:
        by_position = sorted(range(len(places)), key=places.__getitem__)
        shape = [1] * (rank + 1)
        for k in by_position:
            shape[places[k]] = table.shape[k]
        total = total + table.transpose(by_position).reshape(shape)
    return np.array(total.min(-1))
