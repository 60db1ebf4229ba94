"""Finds the chain of equal cells that layers make which are written out.

Tables alone tell. Variables that look alike from near are at one place of their layers; from one of them steps to
neighbours lead to one at each place: a cell. Where in the layer it begins does not matter, but it is chosen so that the
tables between cells are as small as can be, as then nothing lies across them that need not: a clip by the global norm
adds up its terms in the order of the layers' names. All cells that have the costs and the tables of the first one,
within and to others, are the chain.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from shardc.solver.adjacency import Kinds, Near
from shardc.solver.cost_tables import Index, Pair
from shardc.solver.layer_chain import Chain, End, Numbered

LEAST: Final = 12
"""Cells of a chain, at least."""
NEAR: Final = 2
"""How far variables must look alike, in edges, to be of one kind."""
PLACE: Final = 2, 4, 8, 16
"""The same, to be at one place of their layers: the first after which the next tells no more places apart."""
BALL: Final = 24
"""Layers around the middle in which the first cell is looked for."""
MOST: Final = 0.6
"""Part of these layers that have a variable at each place that counts."""
ANCHORS: Final = 16
"""Variables from which it is tried."""
SHAPES: Final = 4
"""Shapes of a cell that are tried, each cut where tables of the one before were not in all layers."""


def find_chain(problem: Numbered) -> Chain | None:
    """The chain that there is around the middle; None: there is none of enough cells."""
    near = problem.near
    kind = next(itertools.islice(near.kinds(problem.costs), NEAR, None))
    _, which, size = np.unique(kind, return_inverse=True, return_counts=True)
    layers = _usual(size)
    if layers < LEAST:
        return None
    ball = _middle(near, size[which] < LEAST, BALL * kind.size // layers)
    cell = _first_cell(near.among(ball), problem.costs[ball], min(BALL, layers))
    first = None if cell is None else _Alike(ball[cell], kind, problem).chain()
    if first is None:
        return None
    best, free = first, set[Pair]()
    for _ in range(SHAPES):
        cell = _cut_well(first, free)
        alike = None if cell is None else _Alike(cell, kind, problem)
        chain = None if alike is None else alike.chain()
        if alike is None or chain is None:
            break
        best = max(best, chain, key=lambda c: (len(c.cells), -len(c.links)))
        if alike.broken <= free:
            break
        free |= alike.broken
    return best if len(best.cells) >= LEAST else None


def _usual(sizes: Index) -> int:
    """How many variables most kinds have, of those that have some; 0: none has."""
    often = np.bincount(sizes[2 * sizes >= LEAST], minlength=1)
    return int(often.size - 1 - often[::-1].argmax())


def _middle(near: Near, rare: NDArray[np.bool_], count: int) -> Index:
    """So many variables around the one that is farthest from those that are rare."""
    begin = np.flatnonzero(rare & (near.degree > 0))
    last = near.outwards(begin if begin.size else np.zeros(1, np.intp))[-1:]
    return near.outwards(last, count)


def _first_cell(near: Near, costs: Index, layers: int) -> Index | None:
    """Variables of one layer, each a neighbour of one before it, of each kind as many as there are in a layer; with few
    neighbours outside."""
    kind, size, places = np.zeros_like(costs), np.zeros(1, np.intp), 0
    for rounds, finer in enumerate(itertools.islice(near.kinds(costs), PLACE[-1] + 1)):
        if rounds in PLACE:
            _, which, sizes = np.unique(finer, return_inverse=True, return_counts=True)
            more = np.count_nonzero(sizes > MOST * layers)
            if more <= places:  # no more are told apart
                break
            kind, size, places = which, sizes, more
    usual = _usual(size)
    each = np.rint(size / usual).astype(np.intp) if usual else size * 0
    best: tuple[int, Index] | None = None
    for anchor in np.flatnonzero(each[kind] == 1)[:ANCHORS, None]:
        cell = near.grown(anchor, kind, each)
        inside = np.zeros(kind.size, np.bool_)
        inside[cell] = True
        outside = int(np.count_nonzero(~inside[near.other[near.edges_of(cell)[0]]]))
        if best is None or outside < best[0]:
            best = outside, cell
    return None if best is None else best[1]


def _beyond(end: End) -> End:
    """The other end of its link."""
    return end[2], end[1] ^ 1, end[0]


class _Steps(NamedTuple):
    """The edges within a cell, both ways, in the order in which they are followed: large tables first, since smaller
    ones may lead to another layer.

    Attributes:
      place, table, to: (edges,) of each the places at its ends, and the number of the table.
      kind: (edges,) of the variable that it leads to.
      first, last: (edges,) where those begin and end that are of the same place and table. Those to one kind follow
        each other, in the order of the variables.
      start: (places + 1,) where the edges out of each place begin among `out`.
    """

    place: Index
    table: Index
    to: Index
    kind: Kinds
    first: Index
    last: Index
    start: Index
    out: Index


def _steps_in(cell: Index, kind: Kinds, problem: Numbered) -> _Steps:
    inner = problem.near.among(cell)
    place, table, variable = inner.source, inner.table, cell[inner.other]
    sizes = np.asarray([t.size for t in problem.tables], np.intp)
    order = np.lexsort((variable, kind[variable], table, place, -sizes[table]))
    place, table, variable = place[order], table[order], variable[order]
    begins = np.flatnonzero((np.diff(place, prepend=-1) != 0) | (np.diff(table, prepend=-1) != 0))
    lengths = np.diff(begins, append=place.size)
    first = np.repeat(begins, lengths)
    out = np.argsort(place, kind="stable")
    return _Steps(
        place, table, inner.other[order], kind[variable], first, first + np.repeat(lengths, lengths), inner.start, out
    )


class _Follower:
    """Follows steps from one variable to the others of its cell; in lists, which Python reads faster than arrays."""

    def __init__(self, steps: _Steps, near: Near, kind: Kinds) -> None:
        self._place, self._table, self._to = steps.place.tolist(), steps.table.tolist(), steps.to.tolist()
        self._wanted = steps.kind.tolist()
        self._first, self._last = steps.first.tolist(), steps.last.tolist()
        start, out = steps.start.tolist(), steps.out.tolist()
        self._out: list[list[int]] = [out[a:b] for a, b in itertools.pairwise(start)]
        self._start, self._other, self._tables = near.start.tolist(), near.other.tolist(), near.table.tolist()
        self._kind: list[int] = kind.tolist()

    def follow(self, place: int, variable: int) -> Index:
        """The variables that steps lead to from one at that place; -1 where none does."""
        cell, taken = [-1] * len(self._out), {variable}
        cell[place] = variable
        heap, twins, turn = self._out[place].copy(), list[int](), 0
        heapify(heap)
        while heap or turn < len(twins):
            sure = bool(heap)
            if sure:
                step = heappop(heap)
            else:
                step, turn = twins[turn], turn + 1
            v, a, last = cell[self._place[step]], self._first[step], self._last[step]
            edges = range(self._start[v], self._start[v + 1])
            while a < last:
                kind, table = self._wanted[a], self._table[a]
                b = next((b for b in range(a + 1, last) if self._wanted[b] != kind), last)
                places = [q for q in self._to[a:b] if cell[q] < 0]
                some = sorted(
                    j for e in edges
                    if self._tables[e] == table and self._kind[j := self._other[e]] == kind and j not in taken
                )  # fmt: skip
                if len(some) == len(places) > 1 and sure:  # unless they are told apart from elsewhere
                    twins.append(step)
                elif len(some) == len(places):
                    taken.update(some)
                    for q, j in zip(places, some, strict=True):
                        cell[q] = j
                        for e in self._out[q]:
                            if cell[self._to[e]] < 0:
                                heappush(heap, e)
                a = b
        return np.asarray(cell, np.intp)


class _Alike:
    """The cells that are like one of them.

    Args:
      model: its variables, each a neighbour of one before it.
      kind: of all variables, how they look from near.

    Attributes:
      broken: places between which there are tables in the model, but not in all cells that `chain` came to.
    """

    def __init__(self, model: Index, kind: Kinds, problem: Numbered) -> None:
        self.model, self.kind, self.problem, self.near = model, kind, problem, problem.near
        self.broken: set[Pair] = set()
        self._follower = _Follower(_steps_in(model, kind, problem), problem.near, kind)
        self._place = np.full(kind.size, model.size)  # of the variables of a cell that is looked at
        self._model_tables = self._tables(model)

    def chain(self) -> Chain | None:
        """The cells in a row; None: they are in no such row."""
        ends = self._ends()
        if ends is None:
            return None
        cells, queue = [self.model], deque([0])
        number = np.full(self.kind.size, -1)  # of the cell that each variable is in
        number[self.model] = 0
        across: dict[tuple[int, End], int] = {}
        further = [self.model[:0]]  # where the next cell is if it is as far from each as that from the one before
        while queue:
            c = queue.popleft()
            for v, x, j in self._neighbours(cells[c], number, ends):
                across[v, x] = j
                if number[j] >= 0:
                    continue
                sure = further[c].size > 0 and further[c][x[2]] == j and self._is_like(further[c])
                cell = further[c] if sure else self._around(x[2], j)
                if cell is None or (number[cell] >= 0).any():
                    continue
                if sure or self._is_like(cell):
                    number[cell] = len(cells)
                    queue.append(len(cells))
                    further.append(self._further(cells[c], cell))
                    cells.append(cell)
                else:
                    self.broken |= self._missing(cell)
        return self._in_a_row(np.asarray(cells), number, across, sorted(x for x in ends if x < _beyond(x)))

    def _in_a_row(
        self, cells: Index, number: Index, across: Mapping[tuple[int, End], int], ends: Sequence[End]
    ) -> Chain | None:
        """The chain of these cells along most of their links, each of which is told by one of its ends."""
        links = [(x, _beyond(x)) for x in ends]
        weights: Counter[tuple[int, ...]] = Counter()
        for link in links:  # the cell that each leads to; -1: to none
            ahead, behind = (
                tuple(number[[across[v, x] for v in cells[:, x[0]].tolist()]].tolist()) for x in link
            )  # fmt: skip
            weights[min(ahead, behind)] += self.problem.tables[link[0][1]].size
        following = max(weights, key=lambda cells: (weights[cells], cells))
        row: list[int] = []
        for c in sorted(set(range(len(cells))).difference(following)):
            while c >= 0:
                row.append(c)
                c = following[c]
        return Chain(self.problem, cells[row], links, across) if len(row) == len(cells) else None

    def _ends(self) -> dict[End, int] | None:
        """The ends of links, and the variables beyond the model that they lead to; None: those are not in cells like
        it."""
        found: dict[End, int] = {}
        places: dict[int, int] = {}  # of variables in cells like the model
        edges, which = self.near.edges_of(self.model)
        other, table = self.near.other[edges], self.near.table[edges]
        out = ~np.isin(other, self.model)
        outside = sorted(zip(which[out].tolist(), table[out].tolist(), other[out].tolist(), strict=True))
        for p, k, j in outside:
            if j not in places:
                cells = (self._around(q, j) for q in sorted({q for q, k_, _ in outside if k_ == k ^ 1}))
                cell = next((c for c in cells if c is not None and self._is_like(c)), self.model[:0])
                places.update((v, q) for q, v in enumerate(cell.tolist()))
            end = p, k, places.get(j, -1)
            if end[2] < 0 or end in found:
                return None
            found[end] = j
        return found if found and all(_beyond(x) != x and _beyond(x) in found for x in found) else None

    def _neighbours(
        self, cell: Index, number: Index, ends: Mapping[End, int]
    ) -> Iterator[tuple[int, End, int]]:  # fmt: skip
        """The variables of a cell at the ends of links, and those that they lead to."""
        for (p, k), group in itertools.groupby(sorted(ends, key=lambda x: (x[:2], ends[x])), key=lambda x: x[:2]):
            v = int(cell[p])
            some = sorted(j for j, k_ in self.near.of(v) if k_ == k and number[j] != number[v])
            for x in group:
                alike = (j for j in some if self.kind[j] == self.kind[self.model[x[2]]])
                some.remove(j := next(alike, some[0]))
                yield v, x, j

    def _further(self, before: Index, cell: Index) -> Index:
        """Variables as far from those of a cell, in numbers, as these from those of the cell before; empty: they are
        not of the same kinds."""
        found = 2 * cell - before
        known = found.min() >= 0 and found.max() < self.kind.size and np.array_equal(self.kind[found], self.kind[cell])
        return found if known and np.diff(np.sort(found)).min(initial=1) > 0 else found[:0]

    def _around(self, place: int, variable: int) -> Index | None:
        """The variables that steps lead to from one at that place; None: not to all places."""
        if self.kind[variable] != self.kind[self.model[place]]:
            return None
        cell = self._follower.follow(place, variable)
        return cell if cell.min() >= 0 else None

    def _tables(self, cell: Index) -> Index:
        """A number for each table of the variables: of its place, of that which it leads to, if any, and of the
        table."""
        edges, which = self.near.edges_of(cell)
        self._place[cell] = np.arange(cell.size)
        to = self._place[self.near.other[edges]]
        self._place[cell] = cell.size
        numbers = (which * (cell.size + 1) + to) * len(self.problem.tables) + self.near.table[edges]
        return np.sort(numbers, kind="stable")  # which is quick where they nearly are

    def _missing(self, cell: Index) -> set[Pair]:
        """Places in the model between which there are tables that this one has not."""
        model, tables = self._model_tables, self._tables(cell)
        gone = tables[np.searchsorted(tables, model).clip(max=tables.size - 1)] != model
        pairs = (divmod(number // len(self.problem.tables), cell.size + 1) for number in model[gone].tolist())
        return {(min(p, q), max(p, q)) for p, q in pairs if q < cell.size}

    def _is_like(self, cell: Index) -> bool:
        """Whether it has the costs of the model, and the tables at the same places."""
        costs = self.problem.costs
        return np.array_equal(costs[cell], costs[self.model]) and np.array_equal(self._tables(cell), self._model_tables)


def _cut_well(chain: Chain, free: Container[Pair]) -> Index | None:
    """A cell of the same places, some from cells further on or before, with the least between it and others. Tables
    between places that are `free` hardly count.

    Minimises the sum over tables of their entries times |offset of one variable - offset of the other - cells between
    them|: a linear program whose solutions are whole numbers.
    """
    middle, near, tables = len(chain.cells) // 2, chain.problem.near, chain.problem.tables
    edges, first = near.edges_of(chain.cells[middle])
    between, second = chain.cell[near.other[edges]] - middle, chain.place[near.other[edges]]
    if second.min(initial=0) < 0:
        return None
    some = np.flatnonzero((between > 0) | ((between == 0) & (second > first)))
    if not some.size:
        return None
    first, second, between = first[some], second[some], between[some]
    weight = np.asarray([
        1 if (min(p, q), max(p, q)) in free else tables[k].size
        for p, q, k in zip(first.tolist(), second.tolist(), near.table[edges[some]].tolist(), strict=True)
    ])  # fmt: skip
    count, size = some.size, chain.cells.shape[1]
    row, one = np.arange(count), np.ones(count)
    entries = np.concatenate((one, -one, -one, one))
    columns = np.concatenate((second, first, size + row, size + count + row))
    matrix = scipy.sparse.coo_array((entries, (np.tile(row, 4), columns)), (count, size + 2 * count)).tocsr()
    cost = np.concatenate((np.zeros(size), weight, weight))
    bounds = [(0, 0)] + [(None, None)] * (size - 1) + [(0, None)] * (2 * count)
    offsets = np.rint(scipy.optimize.linprog(cost, A_eq=matrix, b_eq=between, bounds=bounds).x[:size]).astype(int)
    offsets += middle - (offsets.min() + offsets.max()) // 2
    if offsets.min() < 0 or offsets.max() >= len(chain.cells):
        return None
    return chain.cells[offsets, np.arange(size)]
