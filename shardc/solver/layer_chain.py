"""Unrolled layers as a chain of equal cells: one cell is solved for all of them, and then the ends of the chain.

A link is a table between two neighbouring cells. This is a Lagrangian decomposition: costs that are added to a variable
and subtracted from the table of its link leave the problem the same. Such costs are found by message passing on a ring,
which is one cell that is its own neighbour. With them every link costs at least nothing, and a cell costs as little as
in the whole problem. So the minimum of the ends, plus the minimum of one cell for each cell between them, is a lower
bound. Assignments that attain it are optimal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.solver.adjacency import Adjacency
from shardc.solver.assignment_cost import Assignment, by_identity, ends_of
from shardc.solver.cost_tables import Given, Index, Pair, Table
from shardc.solver.dual import Dual
from shardc.solver.operations import Operations
from shardc.solver.reduce import Reduction
from shardc.solver.search import SETTLED, Search

log = logging.getLogger("shardc")

End: TypeAlias = tuple[int, int, int]
"""The end of a link: a place in a cell, the number of the table as the variable there holds it, and the place it leads
to."""

SEAMS: Final = 1e-5
"""Relative distance of cost and bound at which one cell, solved for all of a chain, is enough; SETTLED if tables are
large."""
TIGHT: Final = 0.1
LOOSE: Final = 0.5
"""Parts of the distance that is aimed at: the bound of a ring is raised while it gains TIGHT of it, a part is solved to
LOOSE of it, and values at the ends that a cell has too cost SETTLED of it less (ablation: layer chain)."""
HUB: Final = 32
"""A variable with this many neighbours belongs to no layer. It is fixed if one of its values is as good as any."""
LOOK: Final = 2
"""How often the bound is raised before its gain is looked at."""


class Numbered:
    """A problem with numbered tables, in which variables of one value are folded into the costs of their neighbours.

    Attributes:
      own: the costs of the variables' values.
      near: the edges between variables of more than one value, and the numbers of their tables.
      tables: by number; table 2k + 1 is the transpose of table 2k.
      fixed: the value of each variable that has only one value, or of which one value is as good as any other.
      constant: the cost of the fixed variables.
    """

    def __init__(self, unary: Sequence[Table], pairwise: Mapping[Pair, Given], ops: Operations) -> None:
        self.ops = ops
        groups = by_identity(unary)
        clean = {id(u): ops.clean(u) for u, _ in groups}
        self.own = [clean[id(u)] for u in unary]
        self.tables: list[Given] = []
        self.near = Adjacency.between(len(unary), *self._edges(pairwise))
        self.constant = 0.0
        self.fixed: dict[int, int] = {}
        for v in sorted(v for u, of in groups if u.size == 1 for v in of.tolist()):
            self._fix(v, 0)
        for v in np.flatnonzero(self.near.degree >= HUB).tolist():
            tables = [self.tables[k] for j, k in self.near.of(v) if j not in self.fixed]
            if v not in self.fixed and len(tables) >= HUB:
                needed = ops.needed(self.own[v], [ops.whole(t) for t in tables])
                if needed is not None and needed.size == 1:
                    self._fix(v, int(needed[0]))
        self.near = self.near.without(self.is_fixed)

    def _edges(self, pairwise: Mapping[Pair, Given]) -> tuple[Index, Index, Index]:
        """Both directed edges of each table: source, target and number of the table."""
        numbers, found = np.empty(len(pairwise), np.intp), dict[int, int]()
        for given, of in by_identity(list(pairwise.values())):
            table = self.ops.given(given)
            numbers[of] = k = found.setdefault(id(table), len(self.tables))
            if k == len(self.tables):
                self.tables += [table, table.T]
        first, second = ends_of(pairwise)
        source, other = np.stack((first, second), 1), np.stack((second, first), 1)
        return source.reshape(-1), other.reshape(-1), np.stack((numbers, numbers + 1), 1).reshape(-1)

    def _fix(self, v: int, value: int) -> None:
        self.fixed[v] = value
        self.constant += float(self.own[v][value])
        for j, k in self.near.of(v):
            if j not in self.fixed:
                own, row = self.own[j], self.ops.one(np.ascontiguousarray(self.ops.whole(self.tables[k])[value]))
                self.own[j] = self.ops.sum(own, row)

    @cached_property
    def is_fixed(self) -> NDArray[np.bool_]:
        """Whether each variable is fixed."""
        found = np.zeros(len(self.own), np.bool_)
        found[list(self.fixed)] = True
        return found

    @cached_property
    def costs(self) -> Index:
        """(variables,) a number for each variable; variables with equal costs have equal numbers."""
        found = np.empty(len(self.own), np.intp)
        for k, (_, of) in enumerate(by_identity(self.own)):
            found[of] = k
        return found

    def edge(self, i: int, j: int, k: int) -> tuple[Pair, Given]:
        """Two variables and their table k, in the direction in which it was given."""
        return ((i, j), self.tables[k]) if k % 2 == 0 else ((j, i), self.tables[k - 1])

    def part(self, variables: Index, own: Sequence[Table]) -> Part:
        """The problem restricted to some variables, in their order, with the costs `own`."""
        number = np.full(len(own), -1)
        number[variables] = np.arange(variables.size)
        source, other = self.near.source, self.near.other
        inside = np.flatnonzero((source < other) & (number[source] >= 0) & (number[other] >= 0))
        ends = (number[source[inside]].tolist(), number[other[inside]].tolist(), self.near.table[inside].tolist())
        some = variables.tolist()
        return Part(some, [own[v] for v in some], dict(map(self.edge, *ends)))


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a problem: its variable k is `variables[k]` of the whole one."""

    variables: list[int]
    unary: list[Table]
    pairwise: dict[Pair, Given]

    def some(self, values: Sequence[int], variables: Index) -> list[int]:
        """The values of some variables, which have their numbers in the whole problem."""
        number = {v: k for k, v in enumerate(self.variables)}
        return [values[number[v]] for v in variables.tolist()]


@dataclass(frozen=True, eq=False)
class LayerChain:
    """Equal cells in a row, and the links between them.

    Attributes:
      problem: the whole problem.
      cells: (cells, places) the variables of each cell.
      links: both ends of each link. Every cell has each end once.
      across: for a variable of a cell and its end of a link, the variable at the other end.
    """

    problem: Numbered
    cells: Index
    links: list[tuple[End, End]]
    across: Mapping[tuple[int, End], int]

    @property
    def part(self) -> float:
        """The variables of a ring, a cell and the two ends, as a share of all variables that are not fixed."""
        count, size = self.cells.shape
        return 1 - (count - 4) * size / (len(self.problem.own) - len(self.problem.fixed))

    @property
    def middle(self) -> Index:
        """All cells but the outermost."""
        return self.cells[1:-1]

    @cached_property
    def place(self) -> Index:
        """The place of each variable in its cell; -1: it is in none."""
        return self._of_cells(np.arange(self.cells.shape[1]))

    @cached_property
    def cell(self) -> Index:
        """The cell of each variable; -1: it is in none."""
        return self._of_cells(np.arange(len(self.cells))[:, None])

    def _of_cells(self, values: Index) -> Index:
        found = np.full(len(self.problem.own), -1)
        found[self.cells] = values
        return found

    @cached_property
    def _inner(self) -> list[tuple[int, int, int]]:
        """The tables within a cell: pairs of places, and the number of their table."""
        near, cell, place = self.problem.near, self.cells[0], self.place
        edges, which = near.edges_of(cell)
        other = near.other[edges]
        to = np.where(self.cell[other] == 0, place[other], -1)
        some = which < to
        return list(zip(which[some].tolist(), to[some].tolist(), near.table[edges[some]].tolist(), strict=True))

    def ring(self) -> Part:
        """A problem of one cell that is its own neighbour; of three cells if a single one would have a link from a
        variable to itself, or two tables between the same variables."""
        edge, cell = self.problem.edge, self.cells[0].tolist()
        pairs = [{p, q} for p, q, _ in self._inner] + [{x[0], x[2]} for x, _ in self.links]
        copies = 1 if all(len(pair) == 2 for pair in pairs) and len(set(map(frozenset, pairs))) == len(pairs) else 3
        edges = [edge(c * len(cell) + p, c * len(cell) + q, k) for c in range(copies) for p, q, k in self._inner]
        edges += [edge(*self._joined(x, c, copies), x[1]) for x, _ in self.links for c in range(copies)]
        return Part(cell * copies, [self.problem.own[v] for v in cell] * copies, dict(edges))

    def _joined(self, end: End, c: int, copies: int) -> Pair:
        """The variables at both ends of a link of cell c of a ring."""
        k, size = len(self.cells) // 2, len(self.cells[0])
        step = 1 if self.cell[self.across[int(self.cells[k, end[0]]), end]] == k + 1 else -1
        return c * size + end[0], (c + step) % copies * size + end[2]

    def shares(self, ring: Part, tight: float, most: int = 80) -> dict[End, Table] | None:
        """The costs to add to the variable at each end of a link, so that every link costs at least nothing.

        Args:
          ring: the ring of this chain.
          tight: the bound of the ring is raised as long as LOOK steps raise it by this share of itself.
          most: how often the bound is raised, at most.

        Returns:
          The costs by end; None if no assignment is allowed.
        """
        ops, size = self.problem.ops, len(self.cells[0])
        copies = len(ring.variables) // size
        small = Reduction.of(ring.unary, ring.pairwise, ops)
        small.held = frozenset(c * size + end[0] for link in self.links for end in link for c in range(copies))
        small.run()
        if not small.feasible:
            return None
        inside = [v for v, some in enumerate(small.inside) if some]
        number = {v: k for k, v in enumerate(inside)}
        near = [{number[j]: t for j, t in small.near[v].items()} for v in inside]
        dual = Dual([small.own[v] for v in inside], near, ops.kernels)
        last = -np.inf
        for turn in range(1, most + 1):
            dual.raise_bound()
            ops.work += dual.work
            if turn % LOOK == 0:
                if dual.bound - last <= tight * abs(small.constant + dual.bound):
                    break
                last = dual.bound
        log.debug("a cell of %d: bound %.9g", len(self.cells), (small.constant + dual.bound) / copies)
        handed, found = dual.handed(), dict[End, Table]()
        kept = small.kept(small.held)
        for x, y in self.links:
            i, j = self._joined(x, 0, copies)
            given, table = handed[number[i], number[j]], ops.whole(self.problem.tables[x[1]])
            there = np.full(table.shape[1], given.max())
            there[kept[j]] = given
            found[x] = (table - there).min(1)
            found[y] = (table - np.where(np.isfinite(found[x]), found[x], 0.0)[:, None]).min(0)
        return found

    def one(self, shares: Mapping[End, Table]) -> Part:
        """The problem of one cell, with the costs from its links (`shares`) added."""
        cell = self.cells[0].tolist()
        own = [self.problem.own[v] for v in cell]
        for (p, _, _), share in shares.items():
            own[p] = own[p] + share
        return Part(cell, own, dict(self.problem.edge(*inner) for inner in self._inner))

    def ends(self, shares: Mapping[End, Table], wanted: Sequence[int], less: float) -> Part:
        """The problem of the outermost cells and of the variables in no cell, with the costs (`shares`) of their links
        to inner cells.

        Args:
          wanted: the values of an inner cell. They cost less in the variables of an outermost cell with a link to an
            inner one.
          less: by how much, so that of equally good values the wanted ones are taken.
        """
        own, other = list(self.problem.own), {x: y for a, b in self.links for x, y in ((a, b), (b, a))}
        cell, last = self.cell.tolist(), len(self.cells) - 1
        for (v, end), j in self.across.items():
            if cell[v] in (0, last) and 0 < cell[j] < last:
                own[v] = own[v] + shares[end]
                own[v][wanted[end[0]]] -= less
            elif 0 < cell[v] < last and cell[j] < 0:
                own[j] = own[j] + shares[other[end]]
        return self.problem.part(self._without(self.middle), own)

    def between(self, part: Part, wanted: Sequence[int]) -> Part:
        """The problem of the variables of a part that are in no cell, with all cells fixed at the values `wanted`."""
        ops, place, own = self.problem.ops, self.place[part.variables].tolist(), list(part.unary)
        free = {k: n for n, k in enumerate(k for k, p in enumerate(place) if p < 0)}
        inner = dict[Pair, Given]()
        for (i, j), table in part.pairwise.items():
            if i in free and j in free:
                inner[free[i], free[j]] = table
            elif i in free:
                value = wanted[place[j]]
                own[i] = ops.sum(own[i], ops.one(np.ascontiguousarray(ops.whole(table)[:, value])))
            elif j in free:
                value = wanted[place[i]]
                own[j] = ops.sum(own[j], ops.one(ops.whole(table)[value]))
        return Part([part.variables[k] for k in free], [own[k] for k in free], inner)

    def shorter(self) -> Part | None:
        """The problem with a single cell between the outermost ones; None if its links would differ from those of the
        whole."""
        problem, near, last = self.problem, self.problem.near, len(self.cells) - 1
        through: dict[Pair, list[End]] = {}  # the ends at which a table that leads to a place goes on
        for end in (end for link in self.links for end in link):
            through.setdefault(end[1:], []).append(end)
        part = problem.part(self._without(self.middle[1:]), problem.own)
        number = {v: k for k, v in enumerate(part.variables)}
        gone = (self.cell > 1) & (self.cell < last)
        for e in np.flatnonzero(gone[near.other] & ~gone[near.source]):
            v, j, k = int(near.source[e]), int(near.other[e]), int(near.table[e])
            while gone[j]:
                ends = [end for end in through[k, int(self.place[j])] if self.place[v] in (-1, end[0])]
                if len(ends) > 1:
                    return None
                j = self.across[int(self.cells[self.cell[j], ends[0][0]]), ends[0]]
            pair, table = problem.edge(number[v], number[j], k)
            if v == j or part.pairwise.setdefault(pair, table) is not table or pair[::-1] in part.pairwise:
                return None
        return part

    def whole(self, part: Part, values: Sequence[int], cell: Sequence[int]) -> list[int]:
        """The assignment of the whole problem that has the values of a part, and the values `cell` in all inner
        cells."""
        found = np.zeros(len(self.problem.own), np.intp)
        found[list(self.problem.fixed)] = list(self.problem.fixed.values())
        found[self.middle] = cell
        found[part.variables] = values
        return found.tolist()

    def _without(self, cells: Index) -> Index:
        """The variables that are not fixed and not in these cells."""
        kept = ~self.problem.is_fixed
        kept[cells] = False
        return np.flatnonzero(kept)


class _SolvePart(Protocol):
    """A solver for a part of the problem, like `minimize`."""

    def __call__(
        self, part: Part, start: Sequence[int] | None = None, close: float = ..., coarse: bool = ...
    ) -> Assignment: ...


def solve_chain(chain: LayerChain, search: Search, solve_part: _SolvePart, aim: float, enough: float) -> bool:
    """Solve one cell for all of a chain, then the rest of the problem with the outermost cells. `search` gets the bound
    and the best assignment. Returns whether cost and bound are within `enough`.

    The rest begins with the cell's values in the outermost cells. If its solution has other values there, they are as
    good in a cell and better at the ends, so they are also tried in all cells.

    Args:
      aim: relative distance of cost and bound that is aimed at.
    """
    ring, many = chain.ring(), len(chain.middle)
    shares = chain.shares(ring, aim * TIGHT)
    if shares is None:
        return False
    alone = chain.one(shares)
    values = solve_part(ring).values[: len(alone.variables)]
    one = solve_part(alone, values, aim * LOOSE, coarse=False)
    part = chain.ends(shares, values, aim * SETTLED * many * abs(one.cost))
    close = aim * LOOSE * many * len(alone.variables) / len(part.variables)
    between = chain.between(part, values)
    known = dict(zip(between.variables, solve_part(between, close=max(close, SETTLED)).values, strict=True))
    begin = [known[v] if v in known else values[chain.place[v]] for v in part.variables]
    ends = solve_part(part, begin, close)
    search.bound = chain.problem.constant + ends.bound + many * one.bound
    for cell in (values, *(part.some(ends.values, outer) for outer in chain.cells[[0, -1]])):
        search.offer(chain.whole(part, ends.values, cell))
        if search.within(enough):
            break
    log.debug("%d cells: bound %.9g, cost %.9g", len(chain.cells), search.bound, search.cost)
    if not search.within(enough) and (part := chain.shorter()) is not None:
        found = solve_part(part, [search.values[v] for v in part.variables] if search.values else None)
        search.offer(chain.whole(part, found.values, part.some(found.values, chain.middle[0])))
        log.debug("one cell between the ends: cost %.9g", search.cost)
    return search.within(enough)
