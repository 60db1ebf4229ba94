"""Exact reductions: a smaller problem with the same minimum. Each step is recorded, and undone by `restore`.

j follows i       T(i, j) allows one column in each row --> j's tables become tables of i
T = f(i) + g(j)   --> no table
value beaten      another value is at least as good whatever the neighbours take --> dropped
one neighbour     min over j of u(j) + T(i, j) --> added to u(i)
two neighbours    min over j of u(j) + T(i, j) + T(j, k) --> a table of i, k
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.assignment_cost import by_identity, ends_of
from shardc.solver.cost_tables import CHUNK, Given, Index, Pair, Table
from shardc.solver.kernels.numpy_kernels import affordable, block_of_allowed
from shardc.solver.operations import Operations

EASY: Final = 1 << 14
"""Variables that cost no more table entries than this are minimized out before values are compared; after the first
turn of a search no more are touched in comparing the values of one variable."""
AT_ONCE: Final = 1 << 24
"""Entries that may be touched in eliminating all variables at once; in comparing the values of one variable where few
could be dropped, as joined values beat many others; and that all tables may have for neighbours to be joined (ablation:
elimination, joining)."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Record: a variable kept only some values; the new value v is the old value index[v]."""

    variable: int
    index: Index


@dataclass(frozen=True, slots=True)
class _Follows:
    """Record: a variable was removed; it takes the value index[value of `leader`]."""

    variable: int
    leader: int
    index: Index


@dataclass(frozen=True, slots=True)
class _Out:
    """Record: a variable was minimized out; it takes its cheapest value, given the values of its neighbours."""

    variable: int
    own: Table
    tables: tuple[tuple[int, Table], ...]


@dataclass(frozen=True, slots=True)
class _Joined:
    """Record: `other` was joined to a variable; value v means its own value first[v] and the value second[v] of
    `other`."""

    variable: int
    other: int
    first: Index
    second: Index


_Step: TypeAlias = _Kept | _Follows | _Out | _Joined


@dataclass
class Reduction:
    """A problem that is made smaller in place; `restore` maps its assignments to those of the whole problem.

    Attributes:
      own: for each variable the cost of its values; meaningless for variables that are out.
      near: for each variable its neighbours and the tables, its own values being the rows.
      constant: the cost of what is decided.
      inside: whether each variable remains.
      pair_work: the most entries that may be touched in making one table of two neighbours.
      beaten_work: the most entries that may be touched in comparing the values of one variable.
      feasible: False if some variable has no allowed value left.
      held: variables that stay, with all their allowed values, and the tables between them.
    """

    ops: Operations
    own: list[Table]
    near: list[dict[int, Table]]
    constant: float = 0.0
    feasible: bool = True
    pair_work: int = 1 << 20
    beaten_work: int = CHUNK
    steps: list[_Step] = field(default_factory=list["_Step"])
    held: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.inside = [True] * len(self.own)
        self._waiting: deque[int] = deque()  # variables whose tables are to be looked at
        self._queued = [False] * len(self.own)  # whether each variable is in `_waiting`
        self._unsettled: list[int] = []  # variables that may have forbidden values, or one value
        self._touched: set[int] = set()  # variables that changed since the main loop last looked
        self._begun = False
        self._given: Mapping[Pair, Given] = {}  # tables that are not in `near` yet

    @classmethod
    def of(cls, unary: Sequence[Table], pairwise: Mapping[Pair, Given], ops: Operations) -> Reduction:
        """The whole problem.

        Raises:
          ValueError: the shape of a table is not that of its variables, or a table joins a variable to itself.
        """
        clean = {id(u): ops.clean(u) for u, _ in by_identity(unary)}
        own = [clean[id(u)] for u in unary]
        sizes, (first, second) = np.asarray([u.size for u in own], np.intp), ends_of(pairwise)
        for i in first[first == second].tolist():
            raise ValueError(f"variable {i} in a table with itself")
        for table, of in by_identity(list(pairwise.values())):
            wrong = (sizes[first[of]] != table.shape[0]) | (sizes[second[of]] != table.shape[1])
            for i, j in zip(first[of][wrong].tolist(), second[of][wrong].tolist(), strict=True):
                raise ValueError(f"table of variables {i}, {j}: {table.shape}, not {(own[i].size, own[j].size)}")
        found = cls(ops, own, [{} for _ in own])
        found._given = pairwise
        return found

    # --- the main loop ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Reduces the problem until nothing exact and cheap is left to do."""
        self._begin()
        self._settle()
        heap: list[tuple[int, int]] = []
        changed = fresh = set(self._touched)  # fresh: changed since their values were last compared
        while self.feasible:
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
                self._compare_values(changed)
            else:
                return
            changed |= self._touched
            fresh |= self._touched

    def _begin(self) -> None:
        """Link the given tables. The first time, also take out variables of one value without neighbours, and mark all
        others as changed."""
        self._write_out()
        if self._begun:
            return
        self._begun = True
        for v, own in enumerate(self.own):
            alone = self.inside[v] and not self.near[v] and v not in self.held
            if alone and own.size == 1 and np.isfinite(own[0]):
                self.inside[v] = False
                self.constant += float(own[0])
        self._touch(v for v, inside in enumerate(self.inside) if inside)

    def _write_out(self) -> None:
        """Links the tables as they were given, in both directions. Large ones take long: `among` does without."""
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
        """Drops forbidden values and fixes variables of one value, as long as there are any."""
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
        """Simplify tables, until none says anything about one of its variables alone (`_drop_unsupported`,
        `_split_tables`)."""
        while self._waiting and self.feasible:
            v = self._waiting.popleft()
            self._queued[v] = False
            if self.inside[v]:
                self._simplify_one(v)
                self._settle()
        self._touched = {v for v in self._touched if self.inside[v]}

    def _simplify_one(self, v: int) -> None:
        if all(map(self.ops.plain, self.near[v].values())):
            return
        self._drop_unsupported(v)
        if v not in self.held and not self._unsettled:
            self._split_tables(v)

    def _drop_unsupported(self, v: int) -> None:
        """Drops values without any allowed entry in some table."""
        for j in list(self.near[v]):
            rows = self.ops.supported(self.near[v][j])
            if rows is not None:
                if not rows.size:
                    self.feasible = False
                    self._forget(v, j)
                else:
                    self.keep(v, rows)

    def _split_tables(self, v: int) -> None:
        """Removes tables that are the sum of two vectors, and merges neighbours of which one follows the other."""
        ops = self.ops
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

    def _compare_values(self, variables: Collection[int]) -> None:
        """Drops values that another value beats."""
        for v in sorted(variables):
            if self.inside[v] and self.feasible:
                self._drop_beaten(v)
        self._settle()

    def _drop_beaten(self, v: int) -> None:
        size = self.own[v].size
        tables = [self.near[v][j] for j in sorted(self.near[v])]
        if v in self.held or size < 2 or size * sum(t.size for t in tables) > self.beaten_work:
            return
        alive = self.ops.needed(self.own[v], tables)
        if alive is not None:
            self.keep(v, alive)

    def _work_of(self, v: int) -> int | None:
        """Entries that minimizing a variable out touches; None: it stays."""
        if not self.inside[v] or len(self.near[v]) > 2 or v in self.held:
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

    def _normal(self, table: Table) -> Table:
        """The table less its least entry: tables that differ by a constant, as from layer to layer, are one object."""
        least, table = self.ops.normal(table)
        self.constant += least
        return table

    def _fix(self, v: int) -> None:
        """A variable of one value --> its costs and rows are added to its neighbours' costs."""
        self.inside[v] = False
        self.constant += float(self.own[v][0])
        self.steps.append(_Out(v, self.own[v], ()))
        for j, table in list(self.near[v].items()):
            self._forget(v, j)
            self.own[j] = self.ops.sum(self.own[j], self.ops.one(table[0]))
            self._touch((j,))

    def _follow(self, v: int, leader: int, index: Index) -> None:
        """Each value of the leader allows one value of v --> v's costs and tables become the leader's."""
        ops = self.ops
        self.inside[v] = False
        self.steps.append(_Follows(v, leader, index))
        own = ops.sum(ops.entries(self.near[leader][v], index), ops.rows(self.own[v], index))
        self.own[leader] = ops.sum(self.own[leader], own)
        self._forget(v, leader)
        for k, table in list(self.near[v].items()):
            self._forget(v, k)
            self._add(leader, k, ops.rows(table, index))
        self._touch((leader,))

    # --- joining ---------------------------------------------------------------------------------------------------

    def join_small(self, values: int) -> None:
        """Joins neighbours with at most `values` pairs of values, those first whose tables grow least, and reduces the
        result, until the different tables together have more than AT_ONCE entries."""
        while self.feasible:
            found: list[tuple[int, int, int]] = []
            distinct: dict[int, int] = {}
            for v, near in enumerate(self.near):
                found += [(self._growth(v, j), v, j) for j, t in near.items() if j > v and t.size <= values]
                distinct.update((id(t), t.size) for t in near.values())
            if sum(distinct.values()) > AT_ONCE or not found:
                return
            found.sort()
            taken: set[int] = set()
            for growth, v, j in found:
                if growth > 2 * abs(found[0][0]) + values:
                    break
                if v not in taken and j not in taken:
                    taken.update((v, j), self.near[v], self.near[j])
                    self._join(v, j)
                    self._drop_beaten(v)
            self.run()

    def _growth(self, v: int, j: int) -> int:
        """The number of entries that joining two variables adds."""
        own, size = self.near[v], self.own[v].size * self.own[j].size
        after = size * sum(self.own[k].size for k in (own.keys() | self.near[j].keys()) - {v, j})
        return after - sum(t.size for t in own.values()) - sum(t.size for t in self.near[j].values()) + size

    def _join(self, v: int, other: int) -> None:
        """Two neighbours --> one variable, whose values are the allowed pairs of theirs."""
        ops = self.ops
        cost = self.near[v][other] + (self.own[v][:, None] + self.own[other])
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
        self._touch((v, *self.near[v]))

    # --- edits -----------------------------------------------------------------------------------------------------

    def keep(self, v: int, index: Index) -> None:
        """Restrict a variable to these values."""
        ops = self.ops
        index = ops.one(index)
        self.steps.append(_Kept(v, index))
        self.own[v] = ops.rows(self.own[v], index)
        for j, table in self.near[v].items():
            self.near[v][j] = ops.rows(table, index)
            self.near[j][v] = ops.turned(self.near[v][j])
        self._touch((v, *self.near[v]))

    def rewrite(self, v: int, index: Index, own: Table) -> None:
        """Restrict a variable to these values, with new costs. The caller then replaces its tables by `link`."""
        if index.size < self.own[v].size:
            index = self.ops.one(index)
            self.steps.append(_Kept(v, index))
        self.own[v] = self.ops.one(own)

    def link(self, v: int, other: int, table: Table) -> None:
        """Sets the table of two variables."""
        self.near[v][other] = table
        self.near[other][v] = self.ops.turned(self.near[v][other])

    def add_link(self, v: int, other: int, table: Table) -> None:
        """Adds a table of two variables to the one they have, if any."""
        present = self.near[v].get(other)
        self.link(v, other, table if present is None else self.ops.sum(present, table))

    def _add(self, i: int, j: int, table: Table) -> None:
        self.add_link(i, j, table)
        self._touch((i, j))

    def _forget(self, i: int, j: int) -> None:
        del self.near[i][j], self.near[j][i]

    # --- assignments -----------------------------------------------------------------------------------------------

    def restore(self, values: Sequence[int]) -> list[int]:
        """The assignment of the whole problem, given the values of the remaining variables (any value for the
        others)."""
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
        """The inverse of `restore` for the variables that remain; None: one of the values was dropped."""
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
                case _Joined(v, other, first, second):
                    where = np.flatnonzero((first == found[v]) & (second == found[other]))
                    if not where.size:
                        return None
                    found[v] = int(where[0])
                case _Out():
                    pass
        return found

    def kept(self, variables: Collection[int]) -> dict[int, Index]:
        """For each of these held variables its values that are left, by their numbers in the whole problem."""
        found = dict[int, Index]()
        for step in self.steps:
            if isinstance(step, _Kept) and (v := step.variable) in variables:
                found[v] = found[v][step.index] if v in found else step.index
        return {v: found[v] if v in found else np.arange(self.own[v].size) for v in variables}

    # --- smaller problems ------------------------------------------------------------------------------------------

    def copy(self) -> Reduction:
        """A copy that can be reduced by itself."""
        other = Reduction(
            self.ops, list(self.own), [dict(n) for n in self.near], self.constant, self.feasible, self.pair_work,
            self.beaten_work, list(self.steps), self.held,
        )  # fmt: skip
        other.inside, other._begun, other._given = list(self.inside), self._begun, self._given
        return other

    def among(self, offered: Sequence[NDArray[np.bool_]]) -> Reduction:
        """The problem restricted to the marked values of the whole problem. Variables that were minimized out may take
        any value."""
        some = self._remaining(offered)
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

    def _remaining(self, offered: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
        """Which remaining values of each variable stand for marked values of the whole problem."""
        some = list(offered)
        for step in self.steps:
            match step:
                case _Kept(v, index):
                    some[v] = some[v][index]
                case _Follows(v, leader, index):
                    some[leader] = some[leader] & some[v][index]
                case _Joined(v, other, first, second):
                    some[v] = some[v][first] & some[other][second]
                case _Out():
                    pass
        return some

    def alike(self, rounds: int) -> list[list[int]]:
        """Classes of remaining variables with equal costs, tables and neighbourhoods of radius `rounds`."""
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
        """The problem in which variables that look alike (`alike`) take one value; None if that leaves more than a
        quarter of the variables."""
        classes = self.alike(rounds)
        return self.tied(classes) if 4 * len(classes) < sum(self.inside) else None

    def tied(self, classes: Sequence[Sequence[int]]) -> Reduction:
        """The problem in which all variables of a class take one value. Variables of a class have equally many
        values."""
        self._write_out()
        found, leader = self.copy(), {v: c[0] for c in classes for v in c}
        tables: dict[Pair, list[Table]] = {}
        for first, *rest in classes:
            size = self.own[first].size
            found.own[first] = self._total([self.own[v] for v in (first, *rest)])
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
        """The sum of tables, most of which are the same few objects."""
        kinds, counts = {id(t): t for t in tables}, Counter(map(id, tables))
        return self.ops.one(np.sum([n * kinds[kind] for kind, n in counts.items()], 0))

    def cheap(
        self, values: Mapping[int, Index], own: Mapping[int, Table], tables: Mapping[Pair, Table], slack: float
    ) -> Reduction:
        """The problem of these values of the remaining variables, at these costs, all of them nonnegative: without
        values and pairs of values that cost more than `slack`, and without values that then have no pair left."""
        around: dict[int, list[Pair]] = {v: [] for v in values}
        star, least = dict(own), dict[Pair, Table]()
        for (v, j), table in tables.items():
            for pair, some in (((v, j), table.min(1)), ((j, v), table.min(0))):
                star[pair[0]], least[pair] = star[pair[0]] + some, some
                around[pair[0]].append((v, j))
        allowed = dict[Pair, NDArray[np.bool_]]()
        with np.errstate(invalid="ignore"):
            for (v, j), table in tables.items():
                allowed[v, j] = affordable(table, star[v] - least[v, j], star[j] - least[j, v], slack)
        left = {v: some <= slack for v, some in star.items()}
        _leave_supported(left, around, allowed)
        found, kept = self.copy(), {v: self.ops.where(some) for v, some in left.items()}
        found.feasible &= all(index.size for index in kept.values())
        if not found.feasible:
            return found
        for v, index in kept.items():
            found.rewrite(v, values[v][index], own[v][index])
        for (v, j), table in tables.items():
            block, fewer = block_of_allowed(table, allowed[v, j], kept[v], kept[j])
            found.link(v, j, block if fewer else self.ops.block(table, kept[v], kept[j]))
        found._touch(kept)
        return found


def _leave_supported(
    left: dict[int, NDArray[np.bool_]], around: Mapping[int, Sequence[Pair]], allowed: Mapping[Pair, NDArray[np.bool_]]
) -> None:
    """Removes from `left` the values without an allowed pair with a remaining value of some neighbour: arc consistency
    (Mackworth 1977, "Consistency in networks of relations")."""
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
