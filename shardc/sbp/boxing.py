"""Boxing: turning a value from one placement into another on the same mesh, by the cheapest path of steps.

A step changes some axes of a placement. `neighbours` lists the steps that leave a placement; a boxing is a shortest
path over placements, orders of axes included, found by Dijkstra's algorithm with the costs of `shardc.sbp.cost`:
fewest bytes first, of these the fewest hops, of these the fewest steps. All three are integers, so ties are real.
Nothing here runs anything: `shardc.passes.lower_boxing` emits the steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.mesh import MeshView
from shardc.sbp.cost import LOCAL_STEPS, StepKind, boxing_seconds, step_bytes, step_hops
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
    """The cheapest path: its steps, the bytes each device sends in each of them, and the seconds all that takes."""

    steps: tuple[Step, ...]
    moved: tuple[int, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(self.moved)


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

    def pieces(size: int, axes: tuple[str, ...]) -> object:
        counts = [sizes[a] for a in axes]
        if size % math.prod(counts) == 0:
            return size // math.prod(counts)
        coords = itertools.product(*(range(n) for n in counts))
        return tuple(sorted(piece_of(size, axes, sizes, dict(zip(axes, c, strict=True))) for c in coords))

    return (p.partial_axes, p.partial_op, *(pieces(size, p.axes_of(dim)) for dim, size in enumerate(shape)))


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


_Graph: TypeAlias = dict[Placement, tuple[tuple[Step, int, int], ...]]
"""For each placement of a shape the steps that leave it, each with its bytes and hops."""


@lru_cache(maxsize=4096)
def _graph(shape: Shape, itemsize: int, mesh: MeshView, ops: tuple[ReduceOp, ...]) -> _Graph:
    sizes = _active(mesh)
    nodes = dict.fromkeys(p for op in ops for p in all_placements(len(shape), tuple(sizes), op))
    alike: dict[tuple[object, ...], list[Placement]] = {}
    for p in nodes:
        alike.setdefault(_blocks(p, shape, sizes), []).append(p)
    graph: _Graph = {}
    for p in nodes:
        found = list(neighbours(p, shape, sizes, ops))
        for q in alike[_blocks(p, shape, sizes)]:
            changed = tuple(a for a in sizes if isinstance(p[a], S) or isinstance(q[a], S))
            if q != p:
                found.append(Step("permute", changed, p, q))
        priced: list[tuple[Step, int, int]] = []
        for step in found:
            counts = [sizes[a] for a in step.axes]
            moved = step_bytes(step.kind, shape, itemsize, step.src, step.dst, mesh, math.prod(counts))
            priced.append((step, moved, step_hops(step.kind, counts)))
        graph[p] = tuple(priced)
    return graph


def find_boxing(shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView) -> Boxing:
    """The cheapest boxing of a value of `shape` (logical) from `src` to `dst`.

    Fewest bytes first, then fewest hops, then fewest steps. Axes of size 1 cost nothing and need no step.
    """
    idle = [a for a, n in mesh.axes if n == 1]
    src, dst = src.without(idle), dst.without(idle)
    if src == dst:
        return Boxing((), (), 0.0)
    ops = tuple(sorted({p.partial_op for p in (src, dst) if p.partial_op}))
    return _shortest(shape, itemsize, src, dst, mesh, ops or ("sum",))


@lru_cache(maxsize=65536)
def _shortest(
    shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView, ops: tuple[ReduceOp, ...]
) -> Boxing:
    graph = _graph(shape, itemsize, mesh, ops)
    best: dict[Placement, tuple[int, int, int]] = {src: (0, 0, 0)}  # bytes, hops, steps
    came: dict[Placement, tuple[Step, int]] = {}
    queue: list[tuple[tuple[int, int, int], int, Placement]] = [((0, 0, 0), 0, src)]
    order = itertools.count(1)
    while queue:
        cost, _, p = heapq.heappop(queue)
        if p == dst:
            break
        if cost > best[p]:
            continue
        for step, moved, hops in graph[p]:
            further = (cost[0] + moved, cost[1] + hops, cost[2] + 1)
            if step.dst not in best or further < best[step.dst]:
                best[step.dst] = further
                came[step.dst] = (step, moved)
                heapq.heappush(queue, (further, next(order), step.dst))
    path: list[tuple[Step, int]] = []
    at = dst
    while at != src:
        path.append(came[at])
        at = came[at][0].src
    path.reverse()
    moved, hops, _ = best[dst]
    return Boxing(tuple(s for s, _ in path), tuple(m for _, m in path), boxing_seconds(moved, hops, mesh))


@dataclass(frozen=True)
class BoxingTable:
    """Seconds of the boxing between every two placements of a shape.

    Attributes:
      index: position of each placement.
      seconds: matrix, from row to column.
      local_bytes: what a device holds of the value at each placement.
    """

    index: dict[Placement, int]
    seconds: NDArray[np.float64]
    local_bytes: NDArray[np.int64]


@dataclass(frozen=True)
class _Steps:
    """All steps but permutes between the placements of a rank, as columns: they are the same for every shape."""

    index: dict[Placement, int]
    src: NDArray[np.intp]
    dst: NDArray[np.intp]
    kind: NDArray[np.str_]
    devices: NDArray[np.int64]
    hops: NDArray[np.int64]
    reduced: NDArray[np.bool_]
    """All-to-alls that stand for the reduce-scatter of a max or min."""


@lru_cache(maxsize=256)
def _steps(rank: int, axes: tuple[tuple[str, int], ...], op: ReduceOp) -> _Steps:
    sizes = dict(axes)
    index = {p: i for i, p in enumerate(all_placements(rank, tuple(sizes), op))}
    steps = [s for p in index for s in neighbours(p, (1,) * rank, sizes, (op,))]
    counts = [[sizes[a] for a in s.axes] for s in steps]
    return _Steps(
        index,
        np.array([index[s.src] for s in steps], np.intp),
        np.array([index[s.dst] for s in steps], np.intp),
        np.array([s.kind for s in steps], np.str_),
        np.array([math.prod(c) for c in counts], np.int64),
        np.array([step_hops(s.kind, c) for s, c in zip(steps, counts, strict=True)], np.int64),
        np.array([s.src.partial_axes != s.dst.partial_axes for s in steps], np.bool_),
    )


@lru_cache(maxsize=4096)
def boxing_table(shape: Shape, itemsize: int, mesh: MeshView, op: ReduceOp = "sum") -> BoxingTable:
    """All-pairs `find_boxing`, as a matrix (Floyd and Warshall)."""
    sizes = _active(mesh)
    steps = _steps(len(shape), tuple(sizes.items()), op)
    shapes = [local_shape(shape, p, sizes) for p in steps.index]
    local = np.array(shapes, np.int64).reshape(len(shapes), len(shape))
    held = local.prod(-1) * itemsize
    # bytes + hops·i: numpy orders complex numbers by their real part, then by their imaginary part
    cost: NDArray[np.complex128] = np.full((len(held), len(held)), np.inf, np.complex128)
    np.minimum.at(cost, (steps.src, steps.dst), _step_bytes(steps, local, held, itemsize) + 1j * steps.hops)
    alike: dict[tuple[object, ...], list[int]] = {}
    for p, i in steps.index.items():
        alike.setdefault(_blocks(p, shape, sizes), []).append(i)
    for group in alike.values():
        for i, j in itertools.permutations(group, 2):
            cost[i, j] = np.minimum(cost[i, j], complex(held[i], step_hops("permute", ())))
    np.fill_diagonal(cost, 0)
    for k in range(len(held)):
        cost = np.minimum(cost, cost[:, k : k + 1] + cost[k])
    return BoxingTable(steps.index, boxing_seconds(cost.real, cost.imag, mesh), held)


def _step_bytes(
    steps: _Steps, local: NDArray[np.int64], held: NDArray[np.int64], itemsize: int
) -> NDArray[np.int64]:
    """`step_bytes` of all steps at once."""
    before, after, others = held[steps.src], held[steps.dst], steps.devices - 1
    pieces = np.minimum(local[steps.src], local[steps.dst]).prod(-1) * itemsize
    return np.select(
        [steps.kind == k for k in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")],
        [others * before, others * after, 2 * others * before // steps.devices,
         others * np.where(steps.reduced, after, pieces)],
        0,
    )  # fmt: skip
