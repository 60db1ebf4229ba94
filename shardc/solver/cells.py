"""Finds the chain of equal cells that layers make which are written out.

Tables alone tell. Variables that look alike from near are at one place of their layers; from one of them steps to
neighbours lead to one at each place: a cell. Where in the layer it begins does not matter, but it is chosen so that the
tables between cells are as small as can be, as then nothing lies across them that need not: a clip by the global norm
adds up its terms in the order of the layers' names. All cells that have the costs and the tables of the first one,
within and to others, are the chain.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from shardc.solver.chain import Chain, End, Numbered
from shardc.solver.tables import Pair

Near: TypeAlias = Sequence[Mapping[int, int]]

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
    near, own = problem.near, [id(u) for u in problem.own]
    kind = next(itertools.islice(_kinds(own, near), NEAR, None))
    size = Counter(kind)
    layers = _usual(size.values())
    if layers < LEAST:
        return None
    ball = _middle(near, [size[k] < LEAST for k in kind], BALL * len(kind) // layers)
    cell = _first_cell(ball, min(BALL, layers), own, near)
    first = None if cell is None else _Alike(cell, kind, problem).chain()
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


def _kinds(own: Sequence[int], near: Near) -> Iterator[list[int]]:
    """A number for each variable, the same for those that look alike no edge far, one, two, and so on."""
    names: dict[Any, int] = {}
    kind = [names.setdefault(u, len(names)) for u in own]
    edges = [list(n.items()) for n in near]
    while True:
        yield kind
        names = {}
        around = [tuple(sorted([(kind[j], k) for j, k in some])) for some in edges]
        kind = [names.setdefault(pair, len(names)) for pair in zip(kind, around, strict=True)]


def _usual(sizes: Iterable[int]) -> int:
    """How many variables most kinds have, of those that have some; 0: none has."""
    often = Counter(n for n in sizes if 2 * n >= LEAST)
    return max(often, key=lambda n: (often[n], n), default=0)


def _outwards(start: Iterable[int], near: Near) -> Iterator[int]:
    """All variables that are linked to some, breadth first."""
    queue = deque(start)
    seen = set(queue)
    while queue:
        v = queue.popleft()
        yield v
        fresh = [j for j in near[v] if j not in seen]
        seen.update(fresh)
        queue.extend(fresh)


def _middle(near: Near, rare: Sequence[bool], count: int) -> list[int]:
    """So many variables around the one that is farthest from those that are rare."""
    *_, last = _outwards([v for v, some in enumerate(rare) if some and near[v]] or [0], near)
    return list(itertools.islice(_outwards([last], near), count))


def _first_cell(ball: Sequence[int], layers: int, own: Sequence[int], near: Near) -> list[int] | None:
    """Variables of one layer, each a neighbour of one before it, of each kind as many as there are in a layer; with few
    neighbours outside."""
    number = {v: k for k, v in enumerate(ball)}
    around = [{number[j]: k for j, k in near[v].items() if j in number} for v in ball]
    kind, size, places = list[int](), Counter[int](), 0
    for rounds, finer in enumerate(_kinds([own[v] for v in ball], around)):
        if rounds in PLACE:
            sizes = Counter(finer)
            more = sum(n > MOST * layers for n in sizes.values())
            if more <= places:  # no more are told apart
                break
            kind, size, places = finer, sizes, more
        if rounds == PLACE[-1]:
            break
    usual = _usual(size.values())
    each = {k: round(n / usual) for k, n in size.items() if usual}
    best: tuple[int, list[int]] | None = None
    for anchor in [v for v, k in enumerate(kind) if each.get(k) == 1][:ANCHORS]:
        cell, more = [anchor], Counter(each)
        more[kind[anchor]] -= 1
        inside = {anchor}
        for v in cell:
            for j in sorted(around[v]):
                if more[kind[j]] and j not in inside:
                    more[kind[j]] -= 1
                    inside.add(j)
                    cell.append(j)
        outside = sum(j not in inside for v in cell for j in around[v])
        if best is None or outside < best[0]:
            best = outside, [ball[v] for v in cell]
    return None if best is None else best[1]


def _beyond(end: End) -> End:
    """The other end of its link."""
    return end[2], end[1] ^ 1, end[0]


class _Alike:
    """The cells that are like one of them.

    Args:
      model: its variables, each a neighbour of one before it.
      kind: of all variables, how they look from near.

    Attributes:
      broken: places between which there are tables in the model, but not in all cells that `chain` came to.
    """

    def __init__(self, model: Sequence[int], kind: Sequence[int], problem: Numbered) -> None:
        self.model, self.kind, self.problem, self.near = list(model), kind, problem, problem.near
        self.place = {v: p for p, v in enumerate(model)}
        self.inner = [[(k, self.place[j]) for j, k in self.near[v].items() if j in self.place] for v in model]
        self.broken: set[Pair] = set()
        self.outside = [sorted((k, j) for j, k in self.near[v].items() if j not in self.place) for v in model]

    def chain(self) -> Chain | None:
        """The cells in a row; None: they are in no such row."""
        ends = self._ends()
        if ends is None:
            return None
        cells, number, queue = [self.model], dict.fromkeys(self.model, 0), deque([0])
        across: dict[tuple[int, End], int] = {}
        further: list[list[int]] = [[]]  # where the next cell is if it is as far from each as that from the one before
        while queue:
            c = queue.popleft()
            for x, j in self._neighbours(cells[c], ends):
                across[cells[c][x[0]], x] = j
                if j in number:
                    continue
                sure = bool(further[c]) and further[c][x[2]] == j and self._is_like(further[c])
                cell = further[c] if sure else self._around(x[2], j)
                if cell is None or not number.keys().isdisjoint(cell):
                    continue
                if sure or self._is_like(cell):
                    number.update(dict.fromkeys(cell, len(cells)))
                    queue.append(len(cells))
                    cells.append(cell)
                    further.append(self._further(cells[c], cell))
                else:
                    self.broken |= self._missing(cell)
        links = sorted((x, y) for x in ends if x < (y := _beyond(x)))
        weights: Counter[tuple[int, ...]] = Counter()
        for x, y in links:  # the cell that each leads to; -1: to none
            ahead = [number.get(across[cell[x[0]], x], -1) for cell in cells]
            behind = [number.get(across[cell[y[0]], y], -1) for cell in cells]
            weights[min(tuple(ahead), tuple(behind))] += self.problem.tables[x[1]].size
        following = max(weights, key=lambda cells: (weights[cells], cells))
        row: list[int] = []
        for c in sorted(set(range(len(cells))).difference(following)):
            while c >= 0:
                row.append(c)
                c = following[c]
        return Chain(self.problem, [cells[c] for c in row], links, across) if len(row) == len(cells) else None

    def _ends(self) -> dict[End, int] | None:
        """The ends of links, and the variables beyond the model that they lead to; None: those are not in cells like
        it."""
        found: dict[End, int] = {}
        places: dict[int, int] = {}  # of variables in cells like the model
        for p, some in enumerate(self.outside):
            for k, j in some:
                if j not in places:
                    cells = (
                        self._around(q, j)
                        for q, others in enumerate(self.outside) if any(k_ == k ^ 1 for k_, _ in others)
                    )  # fmt: skip
                    cell = next((c for c in cells if c is not None and self._is_like(c)), [])
                    places.update((v, q) for q, v in enumerate(cell))
                end = p, k, places.get(j, -1)
                if end[2] < 0 or end in found:
                    return None
                found[end] = j
        return found if found and all(_beyond(x) != x and _beyond(x) in found for x in found) else None

    def _neighbours(self, cell: Sequence[int], ends: Mapping[End, int]) -> Iterator[tuple[End, int]]:
        """The ends of a cell, and the variables that they lead to."""
        inside = set(cell)
        for (p, k), group in itertools.groupby(sorted(ends, key=lambda x: (x[:2], ends[x])), key=lambda x: x[:2]):
            some = sorted(j for j, k_ in self.near[cell[p]].items() if k_ == k and j not in inside)
            for x in group:
                alike = (j for j in some if self.kind[j] == self.kind[self.model[x[2]]])
                some.remove(j := next(alike, some[0]))
                yield x, j

    def _further(self, before: Sequence[int], cell: Sequence[int]) -> list[int]:
        """Variables as far from those of a cell, in numbers, as these from those of the cell before; empty: they are
        not of the same kinds."""
        found = [2 * v - u for u, v in zip(before, cell, strict=True)]
        known = min(found) >= 0 and max(found) < len(self.kind) and len(set(found)) == len(found)
        return found if known and all(self.kind[v] == self.kind[w] for v, w in zip(found, cell, strict=True)) else []

    def _around(self, place: int, variable: int) -> list[int] | None:
        """The variables that steps lead to from one at that place; None: not to all places."""
        kind, near, model = self.kind, self.near, self.model
        if kind[variable] != kind[model[place]]:
            return None
        cell, taken = [-1] * len(model), {variable}
        cell[place] = variable
        tables, twins = self.problem.tables, deque[tuple[int, int]]()
        heap = [(-tables[k].size, place, k) for k, _ in self.inner[place]]
        while heap or twins:  # large tables first: the smaller ones may lead to another layer
            sure = bool(heap)
            _, p, k = heapq.heappop(heap) if sure else (0, *twins.popleft())
            places: dict[int, list[int]] = {}
            for k_, q in self.inner[p]:
                if k_ == k and cell[q] < 0:
                    places.setdefault(kind[model[q]], []).append(q)
            for looks, some in places.items():
                others = [j for j, k_ in near[cell[p]].items() if k_ == k and j not in taken and kind[j] == looks]
                if len(others) != len(some):
                    continue
                if len(some) > 1 and sure:  # unless they are told apart from elsewhere
                    twins.append((p, k))
                    continue
                for q, j in zip(sorted(some, key=model.__getitem__), sorted(others), strict=True):
                    cell[q] = j
                    for k_, further in self.inner[q]:
                        if cell[further] < 0:
                            heapq.heappush(heap, (-tables[k_].size, q, k_))
                taken.update(others)
        return cell if len(taken) == len(cell) else None

    def _missing(self, cell: Sequence[int]) -> set[Pair]:
        """Places in the model between which there are tables that this one has not."""
        return {
            (min(p, q), max(p, q))
            for p, some in enumerate(self.inner) for k, q in some if self.near[cell[p]].get(cell[q]) != k
        }  # fmt: skip

    def _is_like(self, cell: Sequence[int] | None) -> bool:
        """Whether it has the costs of the model, and the tables at the same places."""
        if cell is None:
            return False
        place = {v: p for p, v in enumerate(cell)}
        for p, (v, w) in enumerate(zip(cell, self.model, strict=True)):
            if self.problem.own[v] is not self.problem.own[w] or len(self.near[v]) != len(self.near[w]):
                return False
            outside: list[int] = []
            for j, k in self.near[v].items():
                if j not in place:
                    outside.append(k)
                elif self.near[w].get(self.model[place[j]]) != k:
                    return False
            if sorted(outside) != [k for k, _ in self.outside[p]]:
                return False
        return True


def _cut_well(chain: Chain, free: Container[Pair]) -> list[int] | None:
    """A cell of the same places, some from cells further on or before, with the least between it and others. Tables
    between places that are `free` hardly count.

    Minimises the sum over tables of their entries times |offset of one variable - offset of the other - cells between
    them|: a linear program whose solutions are whole numbers.
    """
    middle, problem = len(chain.cells) // 2, chain.problem
    where = {v: (c, p) for c, cell in enumerate(chain.cells) for p, v in enumerate(cell)}
    found: list[tuple[int, int, int, int]] = []
    for p, v in enumerate(chain.cells[middle]):
        for j, k in problem.near[v].items():
            if j not in where:
                return None
            c, q = where[j]
            if c > middle or (c == middle and q > p):
                found.append((p, q, c - middle, 1 if (min(p, q), max(p, q)) in free else problem.tables[k].size))
    if not found:
        return None
    first, second, between, weight = np.asarray(found).T
    count, size = len(found), len(chain.cells[0])
    row, one = np.arange(count), np.ones(count)
    entries = np.concatenate((one, -one, -one, one))
    columns = np.concatenate((second, first, size + row, size + count + row))
    matrix = coo_array((entries, (np.tile(row, 4), columns)), (count, size + 2 * count)).tocsr()
    cost = np.concatenate((np.zeros(size), weight, weight))
    bounds = [(0, 0)] + [(None, None)] * (size - 1) + [(0, None)] * (2 * count)
    offsets = np.rint(linprog(cost, A_eq=matrix, b_eq=between, bounds=bounds).x[:size]).astype(int)
    offsets += middle - (offsets.min() + offsets.max()) // 2
    if offsets.min() < 0 or offsets.max() >= len(chain.cells):
        return None
    return [chain.cells[c][p] for p, c in enumerate(offsets)]
