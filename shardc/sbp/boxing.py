"""Boxing: the cheapest path of steps from one placement of a value to another on the same mesh.

A step changes some axes of a placement. `neighbours` lists the steps that leave a placement; a boxing is a shortest
path over placements, orders of axes included, found by Dijkstra's algorithm with the costs of `shardc.sbp.cost`: least
time, then least time on the links, then fewest steps. All three are integers, so that ties are exact. Nothing runs
here: `shardc.passes.lower.lower_boxing` emits the steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardc.machine.mesh import MeshView
from shardc.sbp.cost import (
    FEMTO,
    LONGEST,
    STEP_KINDS,
    BoxingStep,
    DeviceGroup,
    StepKind,
    StepPrice,
    avoided_cost,
    group_of,
    memory_cost,
    rest_cost,
    sent_pieces,
    step_price,
    wire_cost,
)
from shardc.sbp.placement import SBP, AxisSizes, B, P, Placement, ReduceOp, S, block_sizes, local_extent

Shape: TypeAlias = tuple[int, ...]
MANY: Final = 1000
"""Placements of a value below which all of them take next to no time."""
EVEN: Final = -1
"""Stands for a size that is a multiple of the number of devices."""


@dataclass(frozen=True, slots=True)
class Boxing:
    """The cheapest path: its steps, and the price of each."""

    steps: tuple[BoxingStep, ...]
    prices: tuple[StepPrice, ...]

    @property
    def moved(self) -> tuple[int, ...]:
        """Bytes that each device sends in each step."""
        return tuple(p.bytes for p in self.prices)

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.prices)

    @property
    def seconds(self) -> float:
        return float(sum(p.wire + p.rest for p in self.prices)) / FEMTO


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Non-empty subsets in the order given."""
    for k in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, k)


_Leaving: TypeAlias = Iterator[tuple[StepKind, tuple[str, ...], Placement]]


def neighbours(p: Placement, rank: int, sizes: AxisSizes, ops: Sequence[ReduceOp]) -> _Leaving:
    """All steps that leave `p`, except permutes: kind, axes and the placement that the step leads to.

    A value that becomes partial takes the op of `p`, else any of `ops`.
    """
    partials = [P(op) for op in ((p.partial_op,) if p.partial_op else ops)]
    yield from _from_splits(p, _splits(rank), partials)
    yield from _from_broadcast(p, _splits(rank), partials, sizes)
    yield from _from_partials(p, _splits(rank))


def _from_splits(p: Placement, splits: Sequence[S], partials: Sequence[P]) -> _Leaving:
    for dim, cut_by in p.splits.items():
        for axes in (cut_by[i:] for i in range(len(cut_by))):
            yield "all_gather", axes, p.moved(axes, B)
            for split in splits:
                if split.dim != dim:
                    yield "all_to_all", axes, p.moved(axes, split)
            for partial in partials:
                yield "fill", axes, p.moved(axes, partial)


def _from_broadcast(p: Placement, splits: Sequence[S], partials: Sequence[P], sizes: AxisSizes) -> _Leaving:
    for axes in ((a,) for a in sizes if a not in p):
        for split in splits:
            yield "slice", axes, p.moved(axes, split)
        for partial in partials:
            yield "keep", axes, p.moved(axes, partial)


def _from_partials(p: Placement, splits: Sequence[S]) -> _Leaving:
    scatter: StepKind = "reduce_scatter" if p.partial_op == "sum" else "all_to_all"
    for axes in _subsets(p.partial_axes):
        yield "all_reduce", axes, p.moved(axes, B)
        for order in itertools.permutations(axes):
            for split in splits:
                yield scatter, order, p.moved(order, split)


@lru_cache(maxsize=64)
def _splits(rank: int) -> tuple[S, ...]:
    return tuple(map(S, range(rank)))


def piece_of(size: int, axes: Sequence[str], sizes: AxisSizes, coords: AxisSizes) -> tuple[int, int]:
    """`local_extent`, with one common value for all empty pieces, which hold the same wherever they are."""
    offset, valid = local_extent(size, axes, sizes, coords)
    return (offset, valid) if valid else (size, 0)


@lru_cache(maxsize=65536)
def _pieces(size: int, counts: tuple[int, ...]) -> object:
    """A key of the pieces into which axes of `counts` devices cut a dimension, in any order; of equal ones the size."""
    if size % math.prod(counts) == 0:
        return size // math.prod(counts)
    offset, valid = np.zeros(1, np.int64), np.full(1, size)
    for n, block in zip(counts, block_sizes(size, counts)[1:], strict=True):
        start = block * np.arange(n)
        offset = (offset[:, None] + start).ravel()
        valid = (valid[:, None] - start).clip(0, block).ravel()
    offset = np.where(valid, offset, size)  # as in `piece_of`
    return np.stack([offset, valid])[:, np.lexsort([valid, offset])].tobytes()


@lru_cache(maxsize=256)
def all_placements(rank: int, axes: tuple[str, ...], op: ReduceOp = "sum") -> tuple[Placement, ...]:
    """All placements of a value of `rank` dimensions over `axes`, orders of axes included; partial ones with `op`."""
    choices: tuple[SBP, ...] = (B, *_splits(rank), P(op))
    found: dict[Placement, None] = {}
    for sbps in itertools.product(choices, repeat=len(axes)):
        named = list(zip(axes, sbps, strict=True))
        shared = len({s for s in sbps if isinstance(s, S)}) < sum(isinstance(s, S) for s in sbps)
        for order in itertools.permutations(named) if shared else [named]:
            found[Placement(list(order))] = None
    return tuple(found)


def _active(mesh: MeshView) -> dict[str, int]:
    return {a: n for a, n in mesh.axes if n > 1}


@dataclass(frozen=True)
class _Steps:
    """The placements of a rank, and the steps between them except permutes. They are the same for every shape.

    Attributes:
      placements: all placements.
      index: position of each placement.
      src, dst: positions of the ends of each step; steps are in the order of `src`.
      name: for each step, the number of its kind and axes in `names`.
      group: for each step, the number of its kind and axes in `groups`, where axes have the order of the mesh.
      reduced: for each step, whether it reduces.
      cuts: (placements, rank) number in `orders` of the sizes of the axes that cut each dimension, outermost first.
      partial: for each placement, a number for its partial axes and their op.
      idle: for each placement, whether it is partial by max or min.
      split: (placements, axes) whether an axis splits.
    """

    placements: tuple[Placement, ...]
    index: dict[Placement, int]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    name: NDArray[np.int64]
    names: tuple[tuple[StepKind, tuple[str, ...]], ...]
    group: NDArray[np.int64]
    groups: tuple[tuple[StepKind, tuple[str, ...]], ...]
    reduced: NDArray[np.bool_]
    cuts: NDArray[np.int64]
    orders: tuple[tuple[int, ...], ...]
    partial: NDArray[np.int64]
    idle: NDArray[np.bool_]
    split: NDArray[np.bool_]


_Key = TypeVar("_Key", bound=Hashable)


def _number(known: dict[_Key, int], key: _Key) -> int:
    return known.setdefault(key, len(known))


@lru_cache(maxsize=256)
def _steps(rank: int, axes: tuple[tuple[str, int], ...], ops: tuple[ReduceOp, ...]) -> _Steps:
    sizes = dict(axes)
    every = tuple(dict.fromkeys(p for op in ops for p in all_placements(rank, tuple(sizes), op)))
    index = {p: i for i, p in enumerate(every)}
    names: dict[tuple[StepKind, tuple[str, ...]], int] = {}
    found = [
        (i, index[q], _number(names, (kind, together)))
        for i, p in enumerate(every) for kind, together, q in neighbours(p, rank, sizes, ops)
    ]  # fmt: skip
    src, dst, name = np.asarray(found, np.int64).reshape(len(found), 3).T
    groups: dict[tuple[StepKind, tuple[str, ...]], int] = {}
    group = [_number(groups, (kind, tuple(a for a in sizes if a in together))) for kind, together in names]
    orders: dict[tuple[int, ...], int] = {}
    cuts = [_number(orders, tuple(sizes[a] for a in p.axes_of(d))) for p in every for d in range(rank)]
    partials: dict[tuple[str, ...], int] = {}
    partial = [_number(partials, (p.partial_op or "", *p.partial_axes)) for p in every]
    reducible = np.asarray([len(p.partial_axes) for p in every])
    return _Steps(
        every, index, src, dst, name, tuple(names), np.asarray(group, np.int64)[name], tuple(groups),
        reducible[src] != reducible[dst], np.asarray(cuts, np.int64).reshape(len(every), rank), tuple(orders),
        np.asarray(partial, np.int64), np.asarray([p.partial_op in ("max", "min") for p in every], np.bool_),
        np.asarray([isinstance(p[a], S) for p in every for a in sizes], np.bool_).reshape(len(every), len(sizes)),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Costs:
    """The costs of steps over groups of devices, for each kind and group.

    Attributes:
      together: whether the collective runs as one of its kind (`MeshView.goes_together`).
      kind: number of the kind in STEP_KINDS.
      n, wire, latency: of the collective, as in `DeviceGroup`; 0 for a local step.
      avoided: femtoseconds that are added to the step because the mesh avoids it.
    """

    together: NDArray[np.bool_]
    kind: NDArray[np.int64]
    n: NDArray[np.int64]
    wire: NDArray[np.int64]
    latency: NDArray[np.int64]
    avoided: NDArray[np.int64]

    def of(self, groups: NDArray[np.int64], kind: StepKind) -> DeviceGroup:
        """The costs of these groups for steps of one kind, in arrays."""
        return DeviceGroup(self.n[groups], {kind: self.wire[groups]}, {kind: self.latency[groups]})


@lru_cache(maxsize=256)
def _costs_of(groups: tuple[tuple[StepKind, tuple[str, ...]], ...], mesh: MeshView) -> _Costs:
    devices = [(kind, group_of(mesh, axes)) for kind, axes in groups]
    return _Costs(
        np.asarray([mesh.goes_together(*g) for g in groups], np.bool_),
        np.asarray([STEP_KINDS.index(k) for k, _ in groups], np.int64),
        np.asarray([g.n for _, g in devices], np.int64),
        np.asarray([min(g.wire.get(k, 0), LONGEST) for k, g in devices], np.int64),
        np.asarray([g.latency.get(k, 0) for k, g in devices], np.int64),
        np.asarray([avoided_cost(*g, mesh) for g in groups], np.int64),
    )  # fmt: skip


class _KindSteps(NamedTuple):
    """All steps of one kind. Arrays have an entry for each step.

    Attributes:
      at: indices of the steps in `_Edges.src` and `_Edges.dst`.
      groups: costs of the device groups.
      avoided: femtoseconds that are added because the mesh avoids the step.
      reduced: whether the step reduces a partial value.
      idle: whether the placement that the step leads to is partial by max or min.
    """

    kind: StepKind
    at: NDArray[np.intp]
    groups: DeviceGroup
    avoided: NDArray[np.int64]
    reduced: NDArray[np.bool_]
    idle: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Edges:
    """The steps between the placements of all shapes whose dimensions are cut evenly alike.

    Attributes:
      steps: the steps of the rank, without permutes.
      names, name: kinds and axes, and for each step their number.
      src, dst: positions of the ends of each step; steps are in the order of `src`, permutes after the others.
      first: for each placement the number of the first step that leaves it; at the end the number of steps.
      kinds: the steps of each kind.
    """

    steps: _Steps
    names: tuple[tuple[StepKind, tuple[str, ...]], ...]
    name: NDArray[np.int64]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    first: NDArray[np.intp]
    kinds: tuple[_KindSteps, ...]


@lru_cache(maxsize=1024)
def _edges(uneven: Shape, mesh: MeshView, ops: tuple[ReduceOp, ...]) -> _Edges:
    """The edges for shapes whose dimensions are EVEN (all pieces alike, however cut) or have these sizes."""
    axes = _active(mesh)
    steps = _steps(len(uneven), tuple(axes.items()), ops)
    away, to = _alike(tuple(math.prod(axes.values()) if size == EVEN else size for size in uneven), steps)
    masks = (steps.split[away] | steps.split[to]) @ (1 << np.arange(len(axes)))
    regrouped = [tuple(a for i, a in enumerate(axes) if mask >> i & 1) for mask in range(1 << len(axes))]
    permutes: list[tuple[StepKind, tuple[str, ...]]] = [("permute", group) for group in regrouped]
    groups = (*steps.groups, *permutes)
    group = np.concatenate([steps.group, len(steps.groups) + masks])
    src, dst = np.concatenate([steps.src, away]), np.concatenate([steps.dst, to])
    costs = _costs_of(groups, mesh)
    order = np.argsort(src, kind="stable")
    order = order[costs.together[group[order]]]
    name = np.concatenate([steps.name, len(steps.names) + masks])[order]
    reduced = np.concatenate([steps.reduced, np.zeros(len(away), np.bool_)])[order]
    group, src, dst = group[order], src[order], dst[order]
    kinds: list[_KindSteps] = []
    for k, kind in enumerate(STEP_KINDS):
        at = np.flatnonzero(costs.kind[group] == k)
        if at.size:
            of = group[at]
            kinds.append(_KindSteps(kind, at, costs.of(of, kind), costs.avoided[of], reduced[at], steps.idle[dst[at]]))
    first = np.searchsorted(src, np.arange(len(steps.placements) + 1))
    return _Edges(steps, (*steps.names, *permutes), name, src, dst, first, tuple(kinds))


class _PlacementGraph:
    """The placements of a shape, and the steps between them with their costs.

    Attributes:
      edges: the steps.
      held: (placements,) bytes that a device holds, padding included.
      wire, rest: for each step, as in `StepPrice`.
    """

    def __init__(self, shape: Shape, itemsize: int, mesh: MeshView, ops: tuple[ReduceOp, ...]) -> None:
        devices = math.prod(_active(mesh).values())
        self.edges = edges = _edges(tuple(EVEN if n and n % devices == 0 else n for n in shape), mesh, ops)
        counts = np.asarray(list(map(math.prod, edges.steps.orders)), np.int64)
        local = -(-np.asarray(shape, np.int64) // counts[edges.steps.cuts])
        self.held: NDArray[np.int64] = local.prod(-1) * itemsize
        self.wire, self.rest = np.empty((2, len(edges.src)), np.int64)
        memory = memory_cost(mesh.topology)
        for kind, at, groups, avoided, reduced, idle in edges.kinds:
            i, j = edges.src[at], edges.dst[at]
            before, after = self.held[i], self.held[j]
            smaller = np.minimum(local[i], local[j]).prod(-1) * itemsize if kind == "all_to_all" else after
            piece = sent_pieces(kind, before, after, smaller, reduced)
            self.wire[at] = wire_cost(kind, piece, before + after, groups, memory)
            self.rest[at] = rest_cost(kind, after, idle, groups, memory) + avoided

    def leaving(self, i: int) -> Iterator[tuple[int, int, int, int]]:
        """The steps that leave a placement: number, position of the end, wire, rest."""
        begin, end = self.edges.first[i : i + 2].tolist()
        dst, wire, rest = (column[begin:end].tolist() for column in (self.edges.dst, self.wire, self.rest))
        return zip(range(begin, end), dst, wire, rest, strict=True)

    def step(self, number: int) -> BoxingStep:
        kind, axes = self.edges.names[self.edges.name[number]]
        src, dst = (self.edges.steps.placements[ends[number]] for ends in (self.edges.src, self.edges.dst))
        return BoxingStep(kind, axes, src, dst)


def _alike(shape: Shape, steps: _Steps) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The pairs of placements with the same pieces on other devices: they are one permute apart."""
    alike = steps.partial
    for dim, size in enumerate(shape):
        known: dict[object, int] = {}
        pieces = np.asarray([_number(known, _pieces(size, counts)) for counts in steps.orders])
        alike = np.unique(alike * len(pieces) + pieces[steps.cuts[:, dim]], return_inverse=True)[1]
    same = alike[:, None] == alike
    np.fill_diagonal(same, False)
    src, dst = np.nonzero(same)
    return src, dst


_graph = lru_cache(maxsize=1024)(_PlacementGraph)


def find_boxing(shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView) -> Boxing:
    """The cheapest boxing of a value of `shape` (logical) from `src` to `dst`.

    Least time, then least time on the links, then fewest steps. Axes of size 1 need no step. A path may pass a partial
    sum whatever the partial op of the ends: each device then holds zeros in place of the pieces of others.
    """
    if mesh.idle:
        src, dst = src.without(mesh.idle), dst.without(mesh.idle)
    if src == dst:
        return Boxing((), ())
    ops = tuple(sorted({"sum", *(p.partial_op for p in (src, dst) if p.partial_op)}))
    if (len(shape) + 2) ** len(_active(mesh)) > MANY:
        kept = _worth_splitting(shape, {*src.splits, *dst.splits}, len(_active(mesh)))
        if len(kept) < len(shape):
            place = {d: k for k, d in enumerate(kept)}
            ends = _renamed(src, place), _renamed(dst, place)
            found = _shortest(*_without(shape, itemsize, kept), *ends, mesh, ops)
            steps = [replace(s, src=_renamed(s.src, kept), dst=_renamed(s.dst, kept)) for s in found.steps]
            return Boxing(tuple(steps), found.prices)
    return _shortest(shape, itemsize, src, dst, mesh, ops)


def _worth_splitting(shape: Shape, named: Set[int], axes: int) -> list[int]:
    """The named dimensions, and of the others as many of each size as there are mesh axes: they are alike, and a path
    splits no more of them at once."""
    left, kept = Counter(dict.fromkeys(shape, axes)), list[int]()
    for d, size in enumerate(shape):
        left[size] -= d not in named
        if d in named or left[size] >= 0:
            kept.append(d)
    return kept


@lru_cache(maxsize=65536)
def _shortest(
    shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView, ops: tuple[ReduceOp, ...]
) -> Boxing:
    graph = _graph(shape, itemsize, mesh, ops)
    start, goal = graph.edges.steps.index[src], graph.edges.steps.index[dst]
    best: dict[int, tuple[int, int, int]] = {start: (0, 0, 0)}  # time, time on the links, steps
    came: dict[int, int] = {}
    queue: list[tuple[tuple[int, int, int], int, int]] = [((0, 0, 0), 0, start)]
    order = itertools.count(1)
    while queue:
        cost, _, i = heapq.heappop(queue)
        if i == goal:
            break
        if cost > best[i]:
            continue
        for e, j, wire, rest in graph.leaving(i):
            further = (cost[0] + wire + rest, cost[1] + wire, cost[2] + 1)
            if j not in best or further < best[j]:
                best[j] = further
                came[j] = e
                heapq.heappush(queue, (further, next(order), j))
    path = _path(graph, start, goal, came)
    return Boxing(path, tuple(step_price(s, shape, itemsize, mesh) for s in path))


def _path(graph: _PlacementGraph, start: int, goal: int, came: Mapping[int, int]) -> tuple[BoxingStep, ...]:
    """The steps from `start` to `goal`; `came` is the number of the last step to each placement."""
    path: list[BoxingStep] = []
    while goal != start:
        path.append(graph.step(came[goal]))
        goal = int(graph.edges.src[came[goal]])
    return tuple(reversed(path))


@dataclass(frozen=True)
class BoxingTable:
    """Seconds of the boxings between all placements of a shape.

    Attributes:
      index: position of each placement.
      placements: the placement at each position.
      seconds: matrix, from row to column.
      local_bytes: bytes of the value that a device holds at each placement.
    """

    index: dict[Placement, int]
    placements: tuple[Placement, ...]
    seconds: NDArray[np.float64]
    local_bytes: NDArray[np.int64]


_FAR: Final = 2 * LONGEST


def _all_pairs(graph: _PlacementGraph) -> NDArray[np.int64]:
    """The least time between every two placements."""
    n, price, edges = len(graph.held), graph.wire + graph.rest, graph.edges
    cost = np.full((n, n), _FAR, np.int64)
    np.minimum.at(cost, (edges.src, edges.dst), price)
    np.fill_diagonal(cost, 0)
    _relax(cost, edges.dst, price, edges.first)
    return cost


def _relax(cost: NDArray[np.int64], to: NDArray[np.intp], price: NDArray[np.int64], first: NDArray[np.intp]) -> None:
    """Relax each placement by its own steps until nothing changes (Bellman 1958, Ford 1956). Paths have few steps."""
    ends = [to[a:b] for a, b in itertools.pairwise(first.tolist())]
    prices = [price[a:b, None] for a, b in itertools.pairwise(first.tolist())]
    changed = np.ones(len(cost), np.bool_)
    while changed.any():
        before, changed = changed, np.zeros(len(cost), np.bool_)
        for i, j in enumerate(ends):
            if not (before[j] | changed[j]).any():
                continue
            further = np.minimum.reduce(cost[j] + prices[i], 0)
            if (further < cost[i]).any():
                np.minimum(cost[i], further, out=cost[i])
                changed[i] = True


@lru_cache(maxsize=4096)
def boxing_table(shape: Shape, itemsize: int, mesh: MeshView, op: ReduceOp = "sum") -> BoxingTable:
    """All-pairs `find_boxing`, as a matrix."""
    graph = _graph(shape, itemsize, mesh, (op,) if op == "sum" else (op, "sum"))
    held, cost = graph.held, _all_pairs(graph)
    own = {p: i for p, i in graph.edges.steps.index.items() if p.partial_op in (None, op)}
    m = len(own)  # partial sums that occur only on a path come last
    seconds = cost[:m, :m] / FEMTO
    if op != "sum":  # between placements that are not partial, no path passes a maximum
        plain = boxing_table(shape, itemsize, mesh)
        whole = [p for p in own if not p.partial_axes]
        at, there = [own[p] for p in whole], [plain.index[p] for p in whole]
        seconds[np.ix_(at, at)] = plain.seconds[np.ix_(there, there)]
    return BoxingTable(own, tuple(own), seconds, held[:m])


def table_of_some(
    shape: Shape, itemsize: int, mesh: MeshView, op: ReduceOp, unsplit: Set[int]
) -> BoxingTable:  # fmt: skip
    """The boxing table without placements that split some dimensions. Prices depend on nothing but bytes, so these are
    part of the elements."""
    if not unsplit:
        return boxing_table(shape, itemsize, mesh, op)
    kept = [d for d in range(len(shape)) if d not in unsplit]
    found = boxing_table(*_without(shape, itemsize, kept), mesh, op)
    index = {_renamed(p, kept): i for p, i in found.index.items()}
    return BoxingTable(index, tuple(index), found.seconds, found.local_bytes)


def _without(shape: Shape, itemsize: int, kept: Sequence[int]) -> tuple[Shape, int]:
    """Shape and size of elements of a value whose other dimensions are part of its elements."""
    rest = math.prod(n for d, n in enumerate(shape) if d not in kept)
    return tuple(shape[d] for d in kept), itemsize * rest


def _renamed(p: Placement, dims: Mapping[int, int] | Sequence[int]) -> Placement:
    """The placement with dimension k called `dims[k]`."""
    return Placement([(a, S(dims[s.dim]) if isinstance(s, S) else s) for a, s in p.items_])
