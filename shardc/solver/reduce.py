"""Makes a problem smaller without losing its minimum: what follows from something else, what costs nothing, what no
best assignment needs, and what has at most two neighbours is taken out, and put back afterwards.

    j follows i       one column of T(i, j) is allowed in each row --> j's tables become i's
    T = f(i) + g(j)   --> no table
    value beaten      another one is at least as good whatever the neighbours take --> dropped
    one neighbour     least over j of u(j) + T(i, j) --> added to u(i)
    two neighbours    least over j of u(j) + T(i, j) + T(j, k) --> a table of i, k
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import by_identity, ends_of
from shardc.solver.cost_tables import Given, Index, Pair, Table
from shardc.solver.operations import Operations

EASY: Final = 1 << 14
"""Entries that minimising a variable out may touch for it to be done before beaten values are looked for."""


@dataclass(frozen=True, slots=True)
class Use:
    """Memory that a variable takes during [begin, end): bytes for each of its values."""

    begin: int
    end: int
    bytes: Table


@dataclass(frozen=True, slots=True)
class _Kept:
    """Value v of the variable was index[v] before."""

    variable: int
    index: Index


@dataclass(frozen=True, slots=True)
class _Follows:
    """The variable takes index[value of `leader`]."""

    variable: int
    leader: int
    index: Index


@dataclass(frozen=True, slots=True)
class _Out:
    """The variable takes what is least, its neighbours given."""

    variable: int
    own: Table
    tables: tuple[tuple[int, Table], ...]


@dataclass(frozen=True, slots=True)
class _Joined:
    """The variable's value v means first[v] of itself and second[v] of `other`, which is out."""

    variable: int
    other: int
    first: Index
    second: Index


_Step: TypeAlias = _Kept | _Follows | _Out | _Joined


@dataclass
class Reduction:
    """A problem that is made smaller in place; `restore` gives the assignment of the whole one.

    Attributes:
      own: for each variable the cost of its values; meaningless for variables that are out.
      near: for each variable its neighbours and the tables, its own values being the rows.
      uses: memory of the values.
      constant: cost of what is decided.
      fixed_uses: memory of what is decided: (begin, end, bytes).
      inside: the variables that are left.
      pair_work: entries that may be touched in making one table of two neighbours.
      beaten_work: the same in looking for beaten values of one variable.
      feasible: False where some variable had no allowed value.
      held: variables that stay, with all their values that are allowed, and the tables between them.
    """

    ops: Operations
    own: list[Table]
    near: list[dict[int, Table]]
    uses: list[list[Use]]
    constant: float = 0.0
    fixed_uses: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    feasible: bool = True
    pair_work: int = 1 << 20
    beaten_work: int = 1 << 16
    steps: list[_Step] = field(default_factory=list["_Step"])
    held: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.inside = [True] * len(self.own)
        self._waiting: deque[int] = deque()
        self._queued = [False] * len(self.own)
        self._unsettled: list[int] = []
        self._touched: set[int] = set()
        self._begun = False
        self._given: Mapping[Pair, Given] = {}  # tables that are not in `near` yet

    @classmethod
    def of(
        cls, unary: Sequence[Table], pairwise: Mapping[Pair, Given], uses: Sequence[Sequence[Use]], ops: Operations
    ) -> Reduction:
        clean = {id(u): ops.clean(u) for u, _ in by_identity(unary)}
        own = [clean[id(u)] for u in unary]
        sizes, (first, second) = np.asarray([u.size for u in own], np.intp), ends_of(pairwise)
        for i in first[first == second].tolist():
            raise ValueError(f"variable {i} in a table with itself")
        for table, of in by_identity(list(pairwise.values())):
            wrong = (sizes[first[of]] != table.shape[0]) | (sizes[second[of]] != table.shape[1])
            for i, j in zip(first[of][wrong].tolist(), second[of][wrong].tolist(), strict=True):
                raise ValueError(f"table of variables {i}, {j}: {table.shape}, not {(own[i].size, own[j].size)}")
        found = cls(ops, own, [{} for _ in own], [list(u) for u in uses] if uses else [[] for _ in own])
        found._given = pairwise
        return found

    def run(self, join: bool = True) -> None:
        """All that is exact and cheap. Without `join` variables only merge; none is minimised out."""
        self._write_out()
        if not self._begun:
            self._begun = True
            for v, own in enumerate(self.own):
                if own.size == 1 and self.inside[v] and not (self.near[v] or self.uses[v]) and np.isfinite(own[0]):
                    self.inside[v] = False
                    self.constant += float(own[0])
            self._touch(v for v, inside in enumerate(self.inside) if inside)
        self._settle()
        heap: list[tuple[int, int]] = []
        changed = fresh = set(self._touched)  # since they were looked at for beaten values: `fresh`
        while self.feasible:
            if join:
                for v in changed:
                    work = self._work_of(v)
                    if work is not None:
                        heapq.heappush(heap, (work, v))
            self._touched.clear()
            changed = set[int]()
            if heap and (heap[0][0] <= EASY or not (fresh or self._waiting)):
                work, v = heapq.heappop(heap)
                if self._work_of(v) == work:
                    self._minimize_out(v)
                    self._settle()
            elif self._waiting:
                self._simplify()
            elif fresh:
                changed, fresh = fresh, set[int]()
                for v in sorted(changed):
                    if self.inside[v] and self.feasible:
                        self._drop_beaten(v)
                self._settle()
            else:
                return
            changed |= self._touched
            fresh |= self._touched

    def restore(self, values: Sequence[int]) -> list[int]:
        """The assignment of the whole problem, from that of the variables that are left (others: anything)."""
        found = [int(v) for v in values]
        for step in reversed(self.steps):
            match step:
                case _Kept(v, index):
                    found[v] = int(index[found[v]])
                case _Follows(v, leader, index):
                    found[v] = int(index[found[leader]])
                case _Out(v, own, tables):
                    total = own
                    for j, table in tables:
                        total = total + table[:, found[j]]
                    found[v] = int(np.argmin(total))
                case _Joined(v, other, first, second):
                    found[v], found[other] = int(first[found[v]]), int(second[found[v]])
        return found

    def reduce(self, values: Sequence[int]) -> list[int] | None:
        """An assignment of the whole problem, for the variables that are left; None: a value of it was dropped."""
        found = list(values)
        for step in self.steps:
            match step:
                case _Kept(v, index):
                    where = int(np.searchsorted(index, found[v]))
                    if where == index.size or index[where] != found[v]:
                        return None
                    found[v] = where
                case _Follows(v, leader, index):
                    if index[found[leader]] != found[v]:
                        return None
                case _Out():
                    pass
                case _Joined(v, other, first, second):
                    where = np.flatnonzero((first == found[v]) & (second == found[other]))
                    if not where.size:
                        return None
                    found[v] = int(where[0])
        return found

    def kept(self, variable: int) -> Index:
        """The values that are left of one that is held, by their numbers in the whole problem."""
        found: Index | None = None
        for step in self.steps:
            if isinstance(step, _Kept) and step.variable == variable:
                found = step.index if found is None else found[step.index]
        return np.arange(self.own[variable].size) if found is None else found

    def among(self, offered: Sequence[NDArray[np.bool_]]) -> Reduction:
        """A smaller one, of those values of the whole problem that are marked. Variables that were minimised out may
        take any value."""
        some = list(offered)
        for step in self.steps:
            match step:
                case _Kept(v, index):
                    some[v] = some[v][index]
                case _Follows(v, leader, index):
                    some[leader] = some[leader] & some[v][index]
                case _Out():
                    pass
                case _Joined(v, other, first, second):
                    some[v] = some[v][first] & some[other][second]
        found = self.copy()
        kept = {v: self.ops.where(some[v]) for v, inside in enumerate(self.inside) if inside}
        for v, index in kept.items():
            found.rewrite(v, index, self.own[v][index])
            found.feasible &= index.size > 0
        for v, index in kept.items():
            for j, table in self.near[v].items():
                if j > v:
                    found.link(v, j, self.ops.block(table, index, kept[j]))
        for (v, j), table in self._given.items():
            found.add_link(v, j, self.ops.block(self.ops.given(table), kept[v], kept[j]))
        found._given = {}
        found._touch(kept)
        return found

    def alike(self, rounds: int) -> list[list[int]]:
        """The variables that are left, those together whose costs and tables are the same ones, and their neighbours'
        too, so many edges far."""
        self._write_out()
        kind = {v: id(self.own[v]) for v, inside in enumerate(self.inside) if inside}
        for _ in range(rounds):
            names: dict[tuple[int, tuple[Pair, ...]], int] = {}
            around = {v: tuple(sorted((kind[j], id(t)) for j, t in self.near[v].items())) for v in kind}
            kind = {v: names.setdefault((k, around[v]), len(names)) for v, k in kind.items()}
        found: dict[int, list[int]] = {}
        for v, k in kind.items():
            found.setdefault(k, []).append(v)
        return list(found.values())

    def tied_alike(self, rounds: int) -> Reduction | None:
        """A smaller one, in which variables that look alike take one value; None: it would be more than a quarter."""
        classes = self.alike(rounds)
        return self.tied(classes) if 4 * len(classes) < sum(self.inside) else None

    def tied(self, classes: Sequence[Sequence[int]]) -> Reduction:
        """A smaller one, in which the variables of a class take the value of its first. They have as many values."""
        self._write_out()
        found, leader = self.copy(), {v: c[0] for c in classes for v in c}
        tables: dict[Pair, list[Table]] = {}
        for first, *rest in classes:
            size = self.own[first].size
            found.own[first] = self._total([self.own[v] for v in (first, *rest)])
            found.uses[first] = [u for v in (first, *rest) for u in self.uses[v]]
            found.near[first] = {}
            for v in rest:
                found.inside[v], found.near[v] = False, {}
                found.steps.append(_Follows(v, first, self.ops.one(np.arange(size))))
        for v, first in leader.items():
            for j, table in self.near[v].items():
                if (first, v) < (leader[j], j):
                    tables.setdefault((first, leader[j]), []).append(table)
        for (a, b), some in tables.items():
            table = self._total(some)
            if a == b:
                found.own[a] = self.ops.sum(found.own[a], self.ops.one(np.diagonal(table).copy()))
            else:
                found.link(a, b, table)
        found._touch(v for v, inside in enumerate(found.inside) if inside)
        return found

    def _total(self, tables: Sequence[Table]) -> Table:
        """Their sum. Most are one of a few."""
        kinds, counts = {id(t): t for t in tables}, Counter(map(id, tables))
        return self.ops.one(np.sum([n * kinds[kind] for kind, n in counts.items()], 0))

    def cheap(
        self, values: Mapping[int, Index], own: Mapping[int, Table], tables: Mapping[Pair, Table], slack: float
    ) -> Reduction:
        """A smaller one, of these values of the variables that are left, at these costs, nowhere negative: without
        values and pairs of values that cost more than `slack`, and without what then has no pair left."""
        around: dict[int, list[Pair]] = {v: [] for v in values}
        star, least = dict(own), dict[Pair, Table]()
        for (v, j), table in tables.items():
            for pair, some in (((v, j), table.min(1)), ((j, v), table.min(0))):
                star[pair[0]], least[pair] = star[pair[0]] + some, some
                around[pair[0]].append((v, j))
        allowed = dict[Pair, NDArray[np.bool_]]()
        with np.errstate(invalid="ignore"):
            for (v, j), table in tables.items():
                allowed[v, j] = self.ops.kernels.affordable(table, star[v] - least[v, j], star[j] - least[j, v], slack)
        left = {v: some <= slack for v, some in star.items()}
        _leave_supported(left, around, allowed)
        found, kept = self.copy(), {v: self.ops.where(some) for v, some in left.items()}
        found.feasible &= all(index.size for index in kept.values())
        if not found.feasible:
            return found
        for v, index in kept.items():
            found.rewrite(v, values[v][index], own[v][index])
        for (v, j), table in tables.items():
            block, fewer = self.ops.kernels.block_of_allowed(table, allowed[v, j], kept[v], kept[j])
            found.link(v, j, block if fewer else self.ops.block(table, kept[v], kept[j]))
        found._touch(kept)
        return found

    def join(self, v: int, other: int) -> None:
        """Two neighbours --> one variable, whose values are the allowed pairs of theirs."""
        ops = self.ops
        table = self.near[v][other]
        cost = table + (self.own[v][:, None] + self.own[other])
        first, second = (ops.one(index) for index in np.nonzero(np.isfinite(cost)))
        self.inside[other] = False
        self.steps.append(_Joined(v, other, first, second))
        self._forget(v, other)
        self.own[v] = ops.one(cost[first, second])
        for k, own in list(self.near[v].items()):
            self.near[v][k] = ops.rows(own, first)
            self.near[k][v] = ops.turned(self.near[v][k])
        for k, theirs in list(self.near[other].items()):
            self._forget(other, k)
            self._add(v, k, ops.rows(theirs, second))
        self.uses[v] = [Use(u.begin, u.end, ops.rows(u.bytes, first)) for u in self.uses[v]]
        self.uses[v] += [Use(u.begin, u.end, ops.rows(u.bytes, second)) for u in self.uses[other]]
        self._touch((v, *self.near[v]))

    def join_small(self, values: int, entries: int) -> None:
        """Joins neighbours of at most so many pairs of values, those first whose tables grow least, and reduces what
        comes of it, until the different tables together have so many entries."""
        while self.feasible:
            found: list[tuple[int, int, int]] = []
            distinct: dict[int, int] = {}
            for v, near in enumerate(self.near):
                found += [(self._growth(v, j), v, j) for j, t in near.items() if j > v and t.size <= values]
                distinct.update((id(t), t.size) for t in near.values())
            if sum(distinct.values()) > 2 * entries or not found:
                return
            found.sort()
            taken: set[int] = set()
            for growth, v, j in found:
                if growth > 2 * abs(found[0][0]) + values:
                    break
                if v not in taken and j not in taken:
                    taken.update((v, j), self.near[v], self.near[j])
                    self.join(v, j)
                    self._drop_beaten(v)
            self.run()

    def _growth(self, v: int, j: int) -> int:
        """Entries that joining two variables adds."""
        own, size = self.near[v], self.own[v].size * self.own[j].size
        after = size * sum(self.own[k].size for k in (own.keys() | self.near[j].keys()) - {v, j})
        return after - sum(t.size for t in own.values()) - sum(t.size for t in self.near[j].values()) + size

    def copy(self) -> Reduction:
        """To be made smaller by itself."""
        other = Reduction(
            self.ops, list(self.own), [dict(n) for n in self.near], [list(u) for u in self.uses],
            self.constant, list(self.fixed_uses), self.feasible, self.pair_work, self.beaten_work, list(self.steps),
            self.held,
        )  # fmt: skip
        other.inside, other._begun, other._given = list(self.inside), self._begun, self._given
        return other

    def _write_out(self) -> None:
        """The tables as they were given, both ways. It takes long for large ones: not done for a few values."""
        for (v, j), table in self._given.items():
            self.add_link(v, j, self.ops.whole(self.ops.given(table)))
        self._given = {}

    def _touch(self, variables: Iterable[int]) -> None:
        for v in variables:
            self._touched.add(v)
            self._unsettled.append(v)
            if not self._queued[v]:
                self._queued[v] = True
                self._waiting.append(v)

    def _settle(self) -> None:
        """What is not allowed goes, and variables of one value, for as long as there are any."""
        while self._unsettled and self.feasible:
            v = self._unsettled.pop()
            if not self.inside[v]:
                continue
            allowed = self.ops.finite(self.own[v])
            if not allowed.size:
                self.feasible = False
            elif allowed.size != self.own[v].size:
                self.keep(v, allowed)
            elif allowed.size == 1 and v not in self.held:
                self._fix(v)

    def _simplify(self) -> None:
        """What tables say of one variable alone, for as long as they do."""
        while self._waiting and self.feasible:
            v = self._waiting.popleft()
            self._queued[v] = False
            if self.inside[v]:
                self._simplify_one(v)
                self._settle()
        self._touched = {v for v in self._touched if self.inside[v]}

    def _simplify_one(self, v: int) -> None:
        ops = self.ops
        if all(map(ops.plain, self.near[v].values())):
            return
        for j in list(self.near[v]):
            rows = ops.supported(self.near[v][j])
            if rows is not None:
                if not rows.size:
                    self.feasible = False
                    self._forget(v, j)
                else:
                    self.keep(v, rows)
        if v in self.held or self._unsettled:
            return
        for j in sorted(self.near[v]):
            if j not in self.near[v]:
                continue
            table = self.near[v][j]
            apart = ops.apart(table)
            if apart is not None:
                self._forget(v, j)
                self.own[v] = ops.sum(self.own[v], apart[0])
                self.own[j] = ops.sum(self.own[j], apart[1])
                self._touch((v, j))
                continue
            behind, ahead = ops.follower(table), ops.follower(self.near[j][v])
            if behind is not None and j not in self.held and (ahead is None or len(self.near[j]) <= len(self.near[v])):
                self._follow(j, v, behind)
            elif ahead is not None:
                self._follow(v, j, ahead)
                return

    def keep(self, v: int, index: Index) -> None:
        """Only these values of a variable."""
        ops = self.ops
        index = ops.one(index)
        self.steps.append(_Kept(v, index))
        self.own[v] = ops.rows(self.own[v], index)
        for j, table in self.near[v].items():
            self.near[v][j] = ops.rows(table, index)
            self.near[j][v] = ops.turned(self.near[v][j])
        self.uses[v] = [Use(u.begin, u.end, ops.rows(u.bytes, index)) for u in self.uses[v]]
        self._touch((v, *self.near[v]))

    def rewrite(self, v: int, index: Index, own: Table) -> None:
        """Only these values of a variable, and other costs of them. Its tables are to follow, by `link`."""
        if index.size < self.own[v].size:
            index = self.ops.one(index)
            self.steps.append(_Kept(v, index))
            self.uses[v] = [Use(u.begin, u.end, self.ops.rows(u.bytes, index)) for u in self.uses[v]]
        self.own[v] = self.ops.one(own)

    def link(self, v: int, other: int, table: Table) -> None:
        """Another table for two neighbours."""
        self.near[v][other] = table
        self.near[other][v] = self.ops.turned(self.near[v][other])

    def add_link(self, v: int, other: int, table: Table) -> None:
        """One more table for two variables."""
        present = self.near[v].get(other)
        self.link(v, other, table if present is None else self.ops.sum(present, table))

    def _forget(self, i: int, j: int) -> None:
        del self.near[i][j], self.near[j][i]

    def _fix(self, v: int) -> None:
        self.inside[v] = False
        self.constant += float(self.own[v][0])
        self.steps.append(_Out(v, self.own[v], ()))
        for j, table in list(self.near[v].items()):
            self._forget(v, j)
            self.own[j] = self.ops.sum(self.own[j], self.ops.one(table[0]))
            self._touch((j,))
        self.fixed_uses += [(u.begin, u.end, float(u.bytes[0])) for u in self.uses[v]]

    def _follow(self, v: int, leader: int, index: Index) -> None:
        """Each value of the leader allows one of v: --> v's costs and tables are the leader's."""
        ops = self.ops
        self.inside[v] = False
        self.steps.append(_Follows(v, leader, index))
        own = ops.sum(ops.entries(self.near[leader][v], index), ops.rows(self.own[v], index))
        self.own[leader] = ops.sum(self.own[leader], own)
        self._forget(v, leader)
        for k, table in list(self.near[v].items()):
            self._forget(v, k)
            self._add(leader, k, ops.rows(table, index))
        self.uses[leader] += [Use(u.begin, u.end, ops.rows(u.bytes, index)) for u in self.uses[v]]
        self._touch((leader,))

    def _add(self, i: int, j: int, table: Table) -> None:
        self.add_link(i, j, table)
        self._touch((i, j))

    def _normal(self, table: Table) -> Table:
        """So that what differs by a constant only, as from layer to layer, is one object."""
        least, table = self.ops.normal(table)
        self.constant += least
        return table

    def _drop_beaten(self, v: int) -> None:
        size = self.own[v].size
        tables = [self.near[v][j] for j in sorted(self.near[v])]
        if v in self.held or size < 2 or size * sum(t.size for t in tables) > self.beaten_work:
            return
        alive = self.ops.needed(self.own[v], tables, [u.bytes for u in self.uses[v]])
        if alive is not None:
            self.keep(v, alive)

    def _work_of(self, v: int) -> int | None:
        """Entries that minimising a variable out touches; None: it stays."""
        if not self.inside[v] or len(self.near[v]) > 2 or self.uses[v] or v in self.held:
            return None
        work = self.own[v].size
        for table in self.near[v].values():
            work *= table.shape[1]
        return work if work <= self.pair_work or len(self.near[v]) < 2 else None

    def _minimize_out(self, v: int) -> None:
        near = sorted(self.near[v].items())
        self.inside[v] = False
        self.steps.append(_Out(v, self.own[v], tuple(near)))
        for j, _ in near:
            self._forget(v, j)
        match near:
            case []:
                self.constant += float(self.own[v].min())
            case [(j, table)]:
                self.own[j] = self.ops.sum(self.own[j], self._normal(self.ops.out_of_one(self.own[v], table)))
                self._touch((j,))
            case [(j, left), (k, right)]:
                self._add(j, k, self._normal(self.ops.out_of_two(self.own[v], left, right)))
            case _:
                raise AssertionError(v)


def _leave_supported(
    left: dict[int, NDArray[np.bool_]], around: Mapping[int, Sequence[Pair]], allowed: Mapping[Pair, NDArray[np.bool_]]
) -> None:
    """Takes away, of the values that are left, those without an allowed pair with one that is left of a neighbour:
    arc consistency (Mackworth 1977, "Consistency in networks of relations")."""
    waiting, queued = deque(left), set(left)
    while waiting:
        v = waiting.popleft()
        queued.remove(v)
        for pair in around[v]:
            pairs, j = (allowed[pair], pair[1]) if v == pair[0] else (allowed[pair].T, pair[0])
            fewer = left[j] & pairs[left[v]].any(0)
            if np.count_nonzero(fewer) < np.count_nonzero(left[j]):
                left[j] = fewer
                if j not in queued:
                    queued.add(j)
                    waiting.append(j)
