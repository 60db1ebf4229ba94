"""Finds the repeated layers of an unrolled program: a chain of equal cells, from the tables alone.

Variables with equal neighbourhoods have the same place in their layers. From such a variable, steps to neighbours lead
to one variable at each place; together they are a cell. A cell may begin anywhere in a layer. It is cut where the
tables between cells are smallest, so that few tables cross the cut. For example, a clip by the global norm adds up its
terms in the order of the layers' names. The chain has all cells that equal the first one, in costs, inner tables and
tables to other cells.
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

from shardc.solver.adjacency import Adjacency, Kinds
from shardc.solver.cost_tables import Index, Pair
from shardc.solver.layer_chain import End, LayerChain, Numbered

LEAST: Final = 12
"""The fewest cells of a chain (ablation: layer chain)."""
NEAR: Final = 2
"""Distance, in edges, up to which variables of one kind have equal surroundings."""
PLACE: Final = 2, 4, 8, 16
"""Distances that may tell the places of a layer apart: the first that tells as many apart as the next."""
BALL: Final = 2 * LEAST
"""Layers around the middle in which the first cell is looked for."""
MOST: Final = 0.6
"""A place counts if this part of these layers have a variable there."""


def find_chain(problem: Numbered, shapes: int = 4) -> LayerChain | None:
    """The chain of cells around the middle of the program; None if it has too few cells.

    At most `shapes` ways to cut a cell are tried. Each prefers to cut tables that an earlier cell did not have in all
    layers.
    """
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
    for _ in range(shapes):
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
    """The most frequent size of the kinds that have enough variables; 0 if no kind has."""
    often = np.bincount(sizes[2 * sizes >= LEAST], minlength=1)
    return int(often.size - 1 - often[::-1].argmax())


def _middle(near: Adjacency, rare: NDArray[np.bool_], count: int) -> Index:
    """The `count` variables nearest to the variable that is farthest from all rare variables."""
    begin = np.flatnonzero(rare & (near.degree > 0))
    last = near.outwards(begin if begin.size else np.zeros(1, np.intp))[-1:]
    return near.outwards(last, count)


def _first_cell(near: Adjacency, costs: Index, layers: int, anchors: int = 16) -> Index | None:
    """The variables of one layer, each a neighbour of an earlier one. Cells are grown from some anchors; the one with
    the fewest edges to the outside is taken."""
    kind, size, places = np.zeros_like(costs), np.zeros(1, np.intp), 0
    for rounds, finer in enumerate(itertools.islice(near.kinds(costs), PLACE[-1] + 1)):
        if rounds in PLACE:
            _, which, sizes = np.unique(finer, return_inverse=True, return_counts=True)
            more = np.count_nonzero(sizes > MOST * layers)
            if more <= places:  # no more places are told apart
                break
            kind, size, places = which, sizes, more
    usual = _usual(size)
    each = np.rint(size / usual).astype(np.intp) if usual else size * 0
    best: tuple[int, Index] | None = None
    for anchor in np.flatnonzero(each[kind] == 1)[:anchors, None]:
        cell = near.grown(anchor, kind, each)
        inside = np.zeros(kind.size, np.bool_)
        inside[cell] = True
        outside = int(np.count_nonzero(~inside[near.other[near.edges_of(cell)[0]]]))
        if best is None or outside < best[0]:
            best = outside, cell
    return None if best is None else best[1]


def _beyond(end: End) -> End:
    """The other end of the link of which this is one end."""
    return end[2], end[1] ^ 1, end[0]


class _CellEdges(NamedTuple):
    """The edges within a cell, in both directions, in the order in which they are followed: large tables first, since
    small ones may lead to another layer.

    Attributes:
      place, table, to: (edges,) the places at the ends of each edge, and the number of its table.
      kind: (edges,) the kind of the variable that it leads to.
      first, last: (edges,) the range of the edges with the same place and table. Those to one kind follow each other,
        in the order of the variables.
      start, out: the edges out of place p are out[start[p] : start[p + 1]].
    """

    place: Index
    table: Index
    to: Index
    kind: Kinds
    first: Index
    last: Index
    start: Index
    out: Index


def _steps_in(cell: Index, kind: Kinds, problem: Numbered) -> _CellEdges:
    inner = problem.near.among(cell)
    place, table, variable = inner.source, inner.table, cell[inner.other]
    sizes = np.asarray([t.size for t in problem.tables], np.intp)
    order = np.lexsort((variable, kind[variable], table, place, -sizes[table]))
    place, table, variable = place[order], table[order], variable[order]
    begins = np.flatnonzero((np.diff(place, prepend=-1) != 0) | (np.diff(table, prepend=-1) != 0))
    lengths = np.diff(begins, append=place.size)
    first = np.repeat(begins, lengths)
    out = np.argsort(place, kind="stable")
    return _CellEdges(
        place, table, inner.other[order], kind[variable], first, first + np.repeat(lengths, lengths), inner.start, out
    )


class _Follower:
    """Follows steps from one variable to the others of its cell. Python reads lists faster than arrays."""

    def __init__(self, steps: _CellEdges, near: Adjacency, kind: Kinds) -> None:
        self._place, self._table, self._to = steps.place.tolist(), steps.table.tolist(), steps.to.tolist()
        self._wanted = steps.kind.tolist()
        self._first, self._last = steps.first.tolist(), steps.last.tolist()
        start, out = steps.start.tolist(), steps.out.tolist()
        self._out: list[list[int]] = [out[a:b] for a, b in itertools.pairwise(start)]
        self._start, self._other, self._tables = near.start.tolist(), near.other.tolist(), near.table.tolist()
        self._kind: list[int] = kind.tolist()

    def follow(self, place: int, variable: int) -> Index:
        """The cell in which a variable has that place, found by the steps; -1 at places that no step leads to."""
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
    """The search for all cells that equal a model.

    Args:
      model: the variables of one cell, each a neighbour of an earlier one.
      kind: for each variable a hash of its neighbourhood.
      problem: the problem.

    Attributes:
      broken: pairs of places with a table in the model, but not in all cells that `chain` looked at.
    """

    def __init__(self, model: Index, kind: Kinds, problem: Numbered) -> None:
        self.model, self.kind, self.problem, self.near = model, kind, problem, problem.near
        self.broken: set[Pair] = set()
        self._follower = _Follower(_steps_in(model, kind, problem), problem.near, kind)
        self._place = np.full(kind.size, model.size)  # places of the variables of the cell that is looked at
        self._model_tables = self._tables(model)

    def chain(self) -> LayerChain | None:
        """The chain of all cells that equal the model; None if they are not in a row."""
        ends = self._ends()
        if ends is None:
            return None
        cells, queue = [self.model], deque([0])
        number = np.full(self.kind.size, -1)  # the cell of each variable
        number[self.model] = 0
        across: dict[tuple[int, End], int] = {}
        further = [self.model[:0]]  # for each cell the next one, if variable numbers grow evenly
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
    ) -> LayerChain | None:
        """The cells as a chain, in the order that most of their links give; None if they are not in a row. `ends`: one
        end of each link."""
        links = [(x, _beyond(x)) for x in ends]
        weights: Counter[tuple[int, ...]] = Counter()
        for link in links:  # the cell that it leads to from each cell; -1: none
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
        return LayerChain(self.problem, cells[row], links, across) if len(row) == len(cells) else None

    def _ends(self) -> dict[End, int] | None:
        """The ends of the model's links, and the variables at their other ends; None if these are not in cells that
        equal the model."""
        found: dict[End, int] = {}
        places: dict[int, int] = {}  # of variables in equal cells
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
        """For each end of a link in a cell: the cell's variable, the end, and the variable at the other end."""
        for (p, k), group in itertools.groupby(sorted(ends, key=lambda x: (x[:2], ends[x])), key=lambda x: x[:2]):
            v = int(cell[p])
            some = sorted(j for j, k_ in self.near.of(v) if k_ == k and number[j] != number[v])
            for x in group:
                alike = (j for j in some if self.kind[j] == self.kind[self.model[x[2]]])
                some.remove(j := next(alike, some[0]))
                yield v, x, j

    def _further(self, before: Index, cell: Index) -> Index:
        """A guess of the next cell, if variable numbers grow by the same amount from cell to cell; empty if the kinds
        differ."""
        found = 2 * cell - before
        known = found.min() >= 0 and found.max() < self.kind.size and np.array_equal(self.kind[found], self.kind[cell])
        return found if known and np.diff(np.sort(found)).min(initial=1) > 0 else found[:0]

    def _around(self, place: int, variable: int) -> Index | None:
        """The cell in which a variable has that place; None if the steps do not lead to all places."""
        if self.kind[variable] != self.kind[self.model[place]]:
            return None
        cell = self._follower.follow(place, variable)
        return cell if cell.min() >= 0 else None

    def _tables(self, cell: Index) -> Index:
        """A sorted array with a code for each table of a cell: the places at its ends, and its number."""
        edges, which = self.near.edges_of(cell)
        self._place[cell] = np.arange(cell.size)
        to = self._place[self.near.other[edges]]
        self._place[cell] = cell.size
        numbers = (which * (cell.size + 1) + to) * len(self.problem.tables) + self.near.table[edges]
        return np.sort(numbers, kind="stable")  # which is quick where they nearly are

    def _missing(self, cell: Index) -> set[Pair]:
        """Pairs of places with a table in the model, but not in this cell."""
        model, tables = self._model_tables, self._tables(cell)
        gone = tables[np.searchsorted(tables, model).clip(max=tables.size - 1)] != model
        pairs = (divmod(number // len(self.problem.tables), cell.size + 1) for number in model[gone].tolist())
        return {(min(p, q), max(p, q)) for p, q in pairs if q < cell.size}

    def _is_like(self, cell: Index) -> bool:
        """Whether a cell has the costs of the model, and the same tables at the same places."""
        costs = self.problem.costs
        return np.array_equal(costs[cell], costs[self.model]) and np.array_equal(self._tables(cell), self._model_tables)


def _cut_well(chain: LayerChain, free: Container[Pair]) -> Index | None:
    """A cell with the same places, some of them taken from other cells, whose tables to the next cells are smallest.
    Tables between the pairs of places `free` hardly count.

    This is a linear program with integral solutions. It minimizes the sum, over all tables, of the table's entries
    times |offset of one place - offset of the other - cells between them|.
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
