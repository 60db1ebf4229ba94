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
    """The cheapest path: its steps, the bytes each device sends and the seconds that takes."""

    steps: tuple[Step, ...]
    bytes: int
    seconds: float


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
        return Boxing((), 0, 0.0)
    ops = tuple(sorted({p.partial_op for p in (src, dst) if p.partial_op}))
    return _shortest(shape, itemsize, src, dst, mesh, ops or ("sum",))


@lru_cache(maxsize=65536)
def _shortest(
    shape: Shape, itemsize: int, src: Placement, dst: Placement, mesh: MeshView, ops: tuple[ReduceOp, ...]
) -> Boxing:
    graph = _graph(shape, itemsize, mesh, ops)
    best: dict[Placement, tuple[int, int, int]] = {src: (0, 0, 0)}  # bytes, hops, steps
    came: dict[Placement, Step] = {}
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
                came[step.dst] = step
                heapq.heappush(queue, (further, next(order), step.dst))
    path: list[Step] = []
    at = dst
    while at != src:
        path.append(came[at])
        at = came[at].src
    moved, hops, _ = best[dst]
    return Boxing(tuple(reversed(path)), moved, boxing_seconds(moved, hops, mesh))


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
    """All-pairs `find_boxing`, as a matrix (Floyd and Warshall)."""
    graph = _graph(shape, itemsize, mesh, (op,))
    index = {p: i for i, p in enumerate(graph)}
    # bytes + hops·i: numpy orders complex numbers by their real part, then by their imaginary part
    cost: NDArray[np.complex128] = np.full((len(index), len(index)), np.inf, np.complex128)
    np.fill_diagonal(cost, 0)
    for p, steps in graph.items():
        for step, moved, hops in steps:
            i, j = index[p], index[step.dst]
            cost[i, j] = np.minimum(cost[i, j], complex(moved, hops))
    for k in range(len(index)):
        cost = np.minimum(cost, cost[:, k : k + 1] + cost[k])
    seconds = boxing_seconds(cost.real, cost.imag, mesh)
    held = [math.prod(local_shape(shape, p, mesh.sizes)) * itemsize for p in index]
    return BoxingTable(index, seconds, np.array(held, dtype=np.int64))
