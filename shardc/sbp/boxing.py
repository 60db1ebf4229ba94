"""Boxing: turning a value from one placement into another on the same mesh, by the cheapest path of steps.

A step changes some axes of a placement. `neighbours` lists the steps that leave a placement; a boxing is a shortest
path over placements, orders of axes included, found by Dijkstra's algorithm with the costs of `shardc.sbp.cost`.
Nothing here runs anything: `shardc.passes.lower_boxing` emits the steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from shardc.mesh import MeshView
from shardc.sbp.cost import LOCAL_STEPS, StepKind, step_bytes, step_seconds
from shardc.sbp.placement import SBP, AxisSizes, B, P, Placement, ReduceOp, S, block_sizes, local_extent

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


def neighbours(p: Placement, shape: Shape, sizes: AxisSizes, op: ReduceOp) -> Iterator[Step]:
    """All steps that leave `p`, but for permutes; what becomes partial does so with `op`."""
    dims = range(len(shape))
    free = tuple(a for a in sizes if p[a] == B)
    for dim in dims:
        axes = p.axes_of(dim)
        for suffix in (axes[i:] for i in range(len(axes))):
            yield Step("all_gather", suffix, p, _move(p, suffix, B))
            for other in dims:
                if other != dim:
                    yield Step("all_to_all", suffix, p, _move(p, suffix, S(other)))
            yield Step("fill", suffix, p, _move(p, suffix, P(op)))
    for axis in free:
        for dim in dims:
            yield Step("slice", (axis,), p, _move(p, (axis,), S(dim)))
        yield Step("keep", (axis,), p, _move(p, (axis,), P(op)))
    for axes in _subsets(p.partial_axes):
        yield Step("all_reduce", axes, p, _move(p, axes, B))
        scatter: StepKind = "reduce_scatter" if op == "sum" else "all_to_all"
        for order in itertools.permutations(axes):
            for dim in dims:
                yield Step(scatter, order, p, _move(p, order, S(dim)))


def _blocks(p: Placement, shape: Shape, sizes: AxisSizes) -> tuple[object, ...]:
    """What the pieces of each dimension are, whoever holds them; placements with equal blocks are one permute apart."""

    def pieces(size: int, axes: tuple[str, ...]) -> object:
        counts = [sizes[a] for a in axes]
        if size % math.prod(counts) == 0:
            return size // math.prod(counts)
        coords = itertools.product(*(range(n) for n in counts))
        return sorted(local_extent(size, axes, sizes, dict(zip(axes, c, strict=True))) for c in coords)

    per_dim = [pieces(size, p.axes_of(dim)) for dim, size in enumerate(shape)]
    return (p.partial_axes, p.partial_op, *(tuple(x) if isinstance(x, list) else x for x in per_dim))


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


@dataclass(frozen=True)
class _Graph:
    """The steps between all placements of a shape, and for each placement the steps that leave it."""

    steps: dict[Placement, tuple[tuple[Step, int, float], ...]]


@lru_cache(maxsize=4096)
def _graph(shape: Shape, itemsize: int, mesh: MeshView, op: ReduceOp) -> _Graph:
    sizes = _active(mesh)
    nodes = all_placements(len(shape), tuple(sizes), op)
    alike: dict[tuple[object, ...], list[Placement]] = {}
    for p in nodes:
        alike.setdefault(_blocks(p, shape, sizes), []).append(p)
    steps: dict[Placement, tuple[tuple[Step, int, float], ...]] = {}
    for p in nodes:
        found = list(neighbours(p, shape, sizes, op))
        for q in alike[_blocks(p, shape, sizes)]:
            changed = tuple(a for a in sizes if isinstance(p[a], S) or isinstance(q[a], S))
            if q != p:
                found.append(Step("permute", changed, p, q))
        priced: list[tuple[Step, int, float]] = []
        for step in found:
            counts = [sizes[a] for a in step.axes]
            moved = step_bytes(step.kind, shape, itemsize, step.src, step.dst, mesh, math.prod(counts))
            priced.append((step, moved, step_seconds(step.kind, moved, counts, mesh)))
        steps[p] = tuple(priced)
    return _Graph(steps)


def find_boxing(shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView) -> Boxing:
    """The cheapest boxing of a value of `shape` (logical) from `src` to `dst`.

    Time first; of equal times the one with fewer steps. Axes of size 1 cost nothing and need no step.
    """
    idle = [a for a, n in mesh.axes if n == 1]
    src, dst = src.without(idle), dst.without(idle)
    if src == dst:
        return Boxing((), (), 0.0)
    ops = {p.partial_op for p in (src, dst)} - {None}
    if len(ops) == 2:  # one op has to end before the other begins
        middle = src.without(src.partial_axes)
        first, second = (find_boxing(shape, itemsize, a, b, mesh) for a, b in ((src, middle), (middle, dst)))
        return Boxing(first.steps + second.steps, first.moved + second.moved, first.seconds + second.seconds)
    return _shortest(shape, itemsize, src, dst, mesh, next(iter(ops), None) or "sum")


@lru_cache(maxsize=65536)
def _shortest(
    shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView, op: ReduceOp
) -> Boxing:
    graph = _graph(shape, itemsize, mesh, op)
    best: dict[Placement, tuple[float, int]] = {src: (0.0, 0)}
    came: dict[Placement, tuple[Step, int]] = {}
    queue: list[tuple[float, int, int, Placement]] = [(0.0, 0, 0, src)]
    order = itertools.count(1)
    while queue:
        seconds, length, _, p = heapq.heappop(queue)
        if p == dst:
            break
        if (seconds, length) > best[p]:
            continue
        for step, moved, time in graph.steps[p]:
            key = (seconds + time, length + 1)
            if step.dst not in best or key < best[step.dst]:
                best[step.dst] = key
                came[step.dst] = (step, moved)
                heapq.heappush(queue, (*key, next(order), step.dst))
    path: list[tuple[Step, int]] = []
    at = dst
    while at != src:
        path.append(came[at])
        at = came[at][0].src
    path.reverse()
    return Boxing(tuple(s for s, _ in path), tuple(b for _, b in path), best[dst][0])


@dataclass(frozen=True)
class BoxingTable:
    """Seconds of the boxing between every two placements of a shape.

    Attributes:
      index: position of each placement.
      seconds: matrix, from row to column.
      local_bytes: what a device holds of the value at each placement.
    """

    index: dict[Placement, int]
    seconds: np.ndarray
    local_bytes: np.ndarray


@lru_cache(maxsize=4096)
def boxing_table(shape: Shape, itemsize: int, mesh: MeshView, op: ReduceOp = "sum") -> BoxingTable:
    """All-pairs `find_boxing`, as a matrix (min-plus squaring)."""
    graph = _graph(shape, itemsize, mesh, op)
    index = {p: i for i, p in enumerate(graph.steps)}
    seconds = np.full((len(index), len(index)), np.inf)
    np.fill_diagonal(seconds, 0.0)
    for p, steps in graph.steps.items():
        for step, _, time in steps:
            i, j = index[p], index[step.dst]
            seconds[i, j] = min(seconds[i, j], time)
    while True:
        shorter = seconds.copy()
        for row in range(len(index)):
            shorter[row] = np.min(seconds[row][:, None] + seconds, axis=0)
        if np.array_equal(shorter, seconds):
            break
        seconds = shorter
    held = np.array([math.prod(_local(shape, p, _active(mesh))) * itemsize for p in index], dtype=np.int64)
    return BoxingTable(index, seconds, held)


def _local(shape: Shape, p: Placement, sizes: AxisSizes) -> Shape:
    return tuple(block_sizes(d, [sizes[a] for a in p.axes_of(i)])[-1] for i, d in enumerate(shape))
