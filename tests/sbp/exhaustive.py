"""The fewest bytes between all placements of a shape: every step of DESIGN.md section 7, searched exhaustively.

Written from the page alone, without `shardc.sbp.boxing` and `shardc.sbp.cost`. A state is, for each dimension, the axes
that split it, outermost first, and the partial axes with their op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardc.sbp.placement import Placement, S

Axes = tuple[str, ...]
State = tuple[tuple[Axes, ...], frozenset[tuple[str, str]]]


def states(rank: int, axes: Sequence[str], ops: Sequence[str]) -> list[State]:
    """Every placement of a value of `rank` dimensions."""
    found: set[State] = set()
    for order in itertools.permutations(axes):
        for choice in itertools.product(("B", *ops, *range(rank)), repeat=len(axes)):
            at = list(zip(order, choice, strict=True))
            partial = frozenset((a, c) for a, c in at if c in ops)
            if len({op for _, op in partial}) < 2:
                found.add((tuple(tuple(a for a, c in at if c == d) for d in range(rank)), partial))
    return sorted(found, key=str)


def state_of(p: Placement, rank: int) -> State:
    """The state of a placement."""
    splits = tuple(tuple(a for a in p if p[a] == S(d)) for d in range(rank))
    return splits, frozenset((a, str(p.partial_op)) for a in p.partial_axes)


class Exhaustive:
    """`bytes[i, j]`: the fewest bytes from the i-th of `states` to the j-th."""

    def __init__(self, shape: Sequence[int], itemsize: int, sizes: Mapping[str, int], ops: Sequence[str]) -> None:
        self.shape, self.itemsize, self.sizes, self.ops = tuple(shape), itemsize, sizes, ops
        nodes = states(len(shape), tuple(sizes), ops)
        self.index = {state: i for i, state in enumerate(nodes)}
        cost = np.full((len(nodes), len(nodes)), np.inf)
        np.fill_diagonal(cost, 0)
        for state, i in self.index.items():
            for other, moved in self.steps(state, nodes):
                j = self.index[other]
                cost[i, j] = min(cost[i, j], moved)
        for k in range(len(nodes)):
            cost = np.minimum(cost, cost[:, k : k + 1] + cost[k : k + 1, :])
        self.bytes = cost

    def fewest(self, src: Placement, dst: Placement) -> int:
        rank = len(self.shape)
        return int(self.bytes[self.index[state_of(src, rank)], self.index[state_of(dst, rank)]])

    def blocks(self, size: int, axes: Axes) -> list[int]:
        """The nested block sizes of one dimension, padding counted."""
        found = [size]
        for a in axes:
            found.append(math.ceil(found[-1] / self.sizes[a]))
        return found

    def held(self, splits: Sequence[Axes]) -> int:
        """Bytes of a local piece, padding counted."""
        return self.itemsize * math.prod(self.blocks(n, a)[-1] for n, a in zip(self.shape, splits, strict=True))

    def owners(self, dim: int, axes: Axes) -> list[tuple[int, ...]]:
        """The contents of the pieces of a dimension, in any order."""
        pieces: list[list[int]] = [list(range(self.shape[dim]))]
        for block, a in zip(self.blocks(self.shape[dim], axes)[1:], axes, strict=False):
            pieces = [p[i * block : (i + 1) * block] for p in pieces for i in range(self.sizes[a])]
        return sorted(map(tuple, pieces))

    def steps(self, state: State, nodes: Sequence[State]) -> Iterator[tuple[State, int]]:
        """Every step that leaves `state`, with the bytes that each device sends."""
        splits, partial = state
        used = {a for axes in splits for a in axes} | {a for a, _ in partial}
        ops = {op for _, op in partial} or set(self.ops)
        dims = range(len(self.shape))

        def n(axes: Sequence[str]) -> int:
            return math.prod(self.sizes[a] for a in axes)

        def with_(dim: int, axes: Axes, of: Sequence[Axes] = splits) -> tuple[Axes, ...]:
            return tuple(axes if d == dim else old for d, old in enumerate(of))

        for dim in dims:
            for k in range(len(splits[dim])):
                outer, inner = splits[dim][:k], splits[dim][k:]
                less = with_(dim, outer)
                yield (less, partial), (n(inner) - 1) * self.held(splits)  # all-gather
                for op in ops:
                    yield (less, partial | {(a, op) for a in inner}), 0  # place in neutral values
                for other in dims:
                    if other != dim:  # all-to-all: n-1 of n pieces of what is held leave
                        more = with_(other, splits[other] + inner, less)
                        piece = with_(other, splits[other] + inner)
                        yield (more, partial), (n(inner) - 1) * self.held(piece)
        for a in set(self.sizes) - used:
            for op in ops:
                yield (splits, partial | {(a, op)}), 0  # keep on one
            for dim in dims:
                yield (with_(dim, (*splits[dim], a)), partial), 0  # slice
        for k in range(1, len(partial) + 1):
            for some in itertools.permutations(sorted(partial), k):
                axes = tuple(a for a, _ in some)
                rest = partial - set(some)
                yield (splits, rest), 2 * (n(axes) - 1) * self.held(splits) // n(axes)  # all-reduce
                for dim in dims:  # reduce-scatter, or all-to-all and local max
                    more = with_(dim, splits[dim] + axes)
                    yield (more, rest), (n(axes) - 1) * self.held(more)
        mine = [self.owners(d, splits[d]) for d in dims]
        for other in nodes:  # another order of axes, or other axes: a permute of what is held
            if other[1] == partial and all(self.owners(d, other[0][d]) == mine[d] for d in dims):
                yield other, self.held(splits)
