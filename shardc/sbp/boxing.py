"""Boxing: turning a value from one placement into another on the same mesh, by the cheapest path of steps.

A step changes some axes of a placement. `neighbours` lists the steps that leave a placement; a boxing is a shortest
path over placements, orders of axes included, found by Dijkstra's algorithm with the costs of `shardc.sbp.cost`: the
least time, of these the least on the links, of these the fewest steps. All three are integers, so ties are real.
Nothing here runs anything: `shardc.passes.lower_boxing` emits the steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.mesh import MeshView
from shardc.sbp.cost import (
    FEMTO,
    LOCAL_STEPS,
    LONGEST,
    StepKind,
    StepPrice,
    group_of,
    memory_cost,
    rest_cost,
    sent_pieces,
    step_price,
    wire_cost,
)
from shardc.sbp.placement import SBP, AxisSizes, B, P, Placement, ReduceOp, S, local_extent, local_shape

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a boxing: `kind` over the group of `axes`, from `src` to `dst`."""

    kind: StepKind
    axes: tuple[str, ...]
    src: Placement
    dst: Placement

    @property
    def is_collective(self) -> bool:
        return self.kind not in LOCAL_STEPS


@dataclass(frozen=True, slots=True)
class Boxing:
    """The cheapest path: its steps, and what each of them costs."""

    steps: tuple[Step, ...]
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


def _move(p: Placement, axes: tuple[str, ...], sbp: SBP) -> Placement:
    """`p` with `sbp` on all `axes`; as splits they become the innermost of their dimension, in their order."""
    return Placement([*((a, s) for a, s in p.items_ if a not in axes), *((a, sbp) for a in axes)])


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Non-empty subsets in the order given."""
    for k in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, k)


def neighbours(p: Placement, shape: Shape, sizes: AxisSizes, ops: Sequence[ReduceOp]) -> Iterator[Step]:
    """All steps that leave `p`, but for permutes; what becomes partial takes the op of `p`, else any of `ops`."""
    dims = range(len(shape))
    if p.partial_op:
        ops = (p.partial_op,)
    free = tuple(a for a in sizes if p[a] == B)
    for dim in dims:
        axes = p.axes_of(dim)
        for suffix in (axes[i:] for i in range(len(axes))):
            yield Step("all_gather", suffix, p, _move(p, suffix, B))
            for other in dims:
                if other != dim:
                    yield Step("all_to_all", suffix, p, _move(p, suffix, S(other)))
            for op in ops:
                yield Step("fill", suffix, p, _move(p, suffix, P(op)))
    for axis in free:
        for dim in dims:
            yield Step("slice", (axis,), p, _move(p, (axis,), S(dim)))
        for op in ops:
            yield Step("keep", (axis,), p, _move(p, (axis,), P(op)))
    for axes in _subsets(p.partial_axes):
        yield Step("all_reduce", axes, p, _move(p, axes, B))
        scatter: StepKind = "reduce_scatter" if p.partial_op == "sum" else "all_to_all"
        for order in itertools.permutations(axes):
            for dim in dims:
                yield Step(scatter, order, p, _move(p, order, S(dim)))


def piece_of(size: int, axes: Sequence[str], sizes: AxisSizes, coords: AxisSizes) -> tuple[int, int]:
    """`local_extent`, the same for all pieces that are empty: wherever they are, they hold the same."""
    offset, valid = local_extent(size, axes, sizes, coords)
    return (offset, valid) if valid else (size, 0)


def _blocks(p: Placement, shape: Shape, sizes: AxisSizes) -> tuple[object, ...]:
    """What the pieces of each dimension are, whoever holds them; placements with equal blocks are one permute apart."""
    counts = [tuple(sizes[a] for a in p.axes_of(dim)) for dim in range(len(shape))]
    return (p.partial_axes, p.partial_op, *map(_pieces, shape, counts))


@lru_cache(maxsize=65536)
def _pieces(size: int, counts: tuple[int, ...]) -> object:
    """The pieces of a dimension that axes of `counts` devices cut, in any order; all of one size are known by that."""
    if size % math.prod(counts) == 0:
        return size // math.prod(counts)
    axes = tuple(map(str, range(len(counts))))
    sizes = dict(zip(axes, counts, strict=True))
    coords = itertools.product(*map(range, counts))
    return tuple(sorted(piece_of(size, axes, sizes, dict(zip(axes, c, strict=True))) for c in coords))


@lru_cache(maxsize=256)
def all_placements(rank: int, axes: tuple[str, ...], op: ReduceOp = "sum") -> tuple[Placement, ...]:
    """Every placement of a value of `rank` dimensions over `axes`, orders of axes included; partial ones with `op`."""
    choices: tuple[SBP, ...] = (B, *(S(d) for d in range(rank)), P(op))
    found: dict[Placement, None] = {}
    for sbps in itertools.product(choices, repeat=len(axes)):
        named = list(zip(axes, sbps, strict=True))
        shared = len({s for s in sbps if isinstance(s, S)}) < sum(isinstance(s, S) for s in sbps)
        for order in itertools.permutations(named) if shared else [named]:
            found[Placement(list(order))] = None
    return tuple(found)


def _active(mesh: MeshView) -> dict[str, int]:
    return {a: n for a, n in mesh.axes if n > 1}


def _regrouped(p: Placement, q: Placement, sizes: AxisSizes) -> tuple[str, ...]:
    """The axes of a permute between two placements."""
    return tuple(a for a in sizes if isinstance(p[a], S) or isinstance(q[a], S))


class _Graph:
    """The placements of a shape and the steps between them, each made when it is asked for."""

    def __init__(self, shape: Shape, itemsize: int, mesh: MeshView, ops: tuple[ReduceOp, ...]) -> None:
        self._shape, self._itemsize, self._mesh, self._ops = shape, itemsize, mesh, ops
        self._sizes = _active(mesh)
        self._steps: dict[Placement, tuple[tuple[Step, StepPrice], ...]] = {}
        self._alike: dict[tuple[object, ...], list[Placement]] = {}
        for p in dict.fromkeys(p for op in ops for p in all_placements(len(shape), tuple(self._sizes), op)):
            self._alike.setdefault(_blocks(p, shape, self._sizes), []).append(p)

    def steps(self, p: Placement) -> tuple[tuple[Step, StepPrice], ...]:
        """The steps from a placement, each with its price."""
        if p not in self._steps:
            shape, sizes = self._shape, self._sizes
            steps = neighbours(p, shape, sizes, self._ops)
            found = [s for s in steps if self._mesh.goes_together(s.kind, s.axes)]
            alike = self._alike[_blocks(p, shape, sizes)]
            found += [Step("permute", _regrouped(p, q, sizes), p, q) for q in alike if q != p]
            self._steps[p] = tuple(
                (s, step_price(s.kind, shape, self._itemsize, s.src, s.dst, self._mesh, s.axes)) for s in found
            )
        return self._steps[p]


_graph = lru_cache(maxsize=4096)(_Graph)


def find_boxing(shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView) -> Boxing:
    """The cheapest boxing of a value of `shape` (logical) from `src` to `dst`.

    Least time, of these the least on the links, of these the fewest steps. Axes of size 1 cost nothing and need none.
    A path may be a sum on its way, whatever P means for the value: zeros in place of what others hold.
    """
    idle = [a for a, n in mesh.axes if n == 1]
    src, dst = src.without(idle), dst.without(idle)
    if src == dst:
        return Boxing((), ())
    ops = tuple(sorted({"sum", *(p.partial_op for p in (src, dst) if p.partial_op)}))
    return _shortest(shape, itemsize, src, dst, mesh, ops)


@lru_cache(maxsize=65536)
def _shortest(
    shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView, ops: tuple[ReduceOp, ...]
) -> Boxing:
    graph = _graph(shape, itemsize, mesh, ops)
    best: dict[Placement, tuple[int, int, int]] = {src: (0, 0, 0)}  # time, time on the links, steps
    came: dict[Placement, tuple[Step, StepPrice]] = {}
    queue: list[tuple[tuple[int, int, int], int, Placement]] = [((0, 0, 0), 0, src)]
    order = itertools.count(1)
    while queue:
        cost, _, p = heapq.heappop(queue)
        if p == dst:
            break
        if cost > best[p]:
            continue
        for step, price in graph.steps(p):
            further = (cost[0] + price.wire + price.rest, cost[1] + price.wire, cost[2] + 1)
            if step.dst not in best or further < best[step.dst]:
                best[step.dst] = further
                came[step.dst] = (step, price)
                heapq.heappush(queue, (further, next(order), step.dst))
    path: list[tuple[Step, StepPrice]] = []
    at = dst
    while at != src:
        path.append(came[at])
        at = came[at][0].src
    path.reverse()
    return Boxing(tuple(s for s, _ in path), tuple(p for _, p in path))


@dataclass(frozen=True)
class BoxingTable:
    """Seconds of the boxing between every two placements of a shape.

    Attributes:
      index: position of each placement.
      placements: the placement at each position.
      seconds: matrix, from row to column.
      local_bytes: what a device holds of the value at each placement.
    """

    index: dict[Placement, int]
    placements: tuple[Placement, ...]
    seconds: NDArray[np.float64]
    local_bytes: NDArray[np.int64]


@dataclass(frozen=True)
class _Steps:
    """All steps but permutes between the placements of a rank: they are the same for every shape.

    Attributes:
      index: position of each placement.
      alike: for each kind and group of axes its steps: from, to, and 1 for all-to-alls that stand for the
        reduce-scatter of a max or min.
    """

    index: dict[Placement, int]
    alike: tuple[tuple[StepKind, tuple[str, ...], NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]], ...]


@lru_cache(maxsize=256)
def _steps(rank: int, axes: tuple[tuple[str, int], ...], op: ReduceOp) -> _Steps:
    sizes = dict(axes)
    ops: tuple[ReduceOp, ...] = (op,) if op == "sum" else (op, "sum")
    every = dict.fromkeys(p for o in ops for p in all_placements(rank, tuple(sizes), o))
    index = {p: i for i, p in enumerate(every)}
    alike: dict[tuple[StepKind, tuple[str, ...]], list[tuple[int, int, bool]]] = {}
    for step in (s for p in index for s in neighbours(p, (1,) * rank, sizes, ops)):
        reduced = step.src.partial_axes != step.dst.partial_axes
        group = tuple(a for a in sizes if a in step.axes)
        alike.setdefault((step.kind, group), []).append((index[step.src], index[step.dst], reduced))
    return _Steps(
        index,
        tuple(
            (kind, group, *np.asarray(found, np.int64).T) for (kind, group), found in alike.items()
        ),
    )  # fmt: skip


_FAR: Final = 2 * LONGEST


@lru_cache(maxsize=4096)
def boxing_table(shape: Shape, itemsize: int, mesh: MeshView, op: ReduceOp = "sum") -> BoxingTable:
    """All-pairs `find_boxing`, as a matrix (Floyd and Warshall)."""
    sizes = _active(mesh)
    steps = _steps(len(shape), tuple(sizes.items()), op)
    shapes = [local_shape(shape, p, sizes) for p in steps.index]
    local = np.array(shapes, np.int64).reshape(len(shapes), len(shape))
    held = local.prod(-1) * itemsize
    cost = _direct(steps, local, held, itemsize, mesh, op)
    alike: dict[tuple[object, ...], list[Placement]] = {}
    for p in steps.index:
        alike.setdefault(_blocks(p, shape, sizes), []).append(p)
    for p, q in (pair for group in alike.values() for pair in itertools.permutations(group, 2)):
        i, j = steps.index[p], steps.index[q]
        price = step_price("permute", shape, itemsize, p, q, mesh, _regrouped(p, q, sizes))
        cost[i, j] = min(cost[i, j], price.wire + price.rest)
    for k in range(len(held)):
        np.minimum(cost, cost[:, k : k + 1] + cost[k], out=cost)
    own = {p: i for p, i in steps.index.items() if p.partial_op in (None, op)}
    m = len(own)  # sums that are something only on the way come last
    seconds = cost[:m, :m] / FEMTO
    if op != "sum":  # no maximum is on the way between what is not partial
        plain = boxing_table(shape, itemsize, mesh)
        whole = [p for p in own if not p.partial_axes]
        at, there = [own[p] for p in whole], [plain.index[p] for p in whole]
        seconds[np.ix_(at, at)] = plain.seconds[np.ix_(there, there)]
    return BoxingTable(own, tuple(own), seconds, held[:m])


def _direct(
    steps: _Steps, local: NDArray[np.int64], held: NDArray[np.int64], itemsize: int, mesh: MeshView, op: ReduceOp
) -> NDArray[np.int64]:
    """`step_price` of all steps at once, between every two placements."""
    cost = np.full((len(held), len(held)), _FAR, np.int64)
    memory = memory_cost(mesh.topology)
    summed = np.asarray([p.partial_op == "sum" for p in steps.index])
    for kind, axes, src, dst, reduced in steps.alike:
        if not mesh.goes_together(kind, axes):
            continue
        group = group_of(mesh, axes)
        before, after = held[src], held[dst]
        smaller = np.minimum(local[src], local[dst]).prod(-1) * itemsize
        found = wire_cost(kind, sent_pieces(kind, before, after, smaller, reduced), before + after, group, memory)
        besides = rest_cost(kind, after, False, group, memory)
        if kind == "keep" and op != "sum":
            besides = np.where(summed[dst], besides, 0)
        cost[src, dst] = np.minimum(cost[src, dst], found + besides)  # steps of one kind and group have other ends
    np.fill_diagonal(cost, 0)
    return cost
