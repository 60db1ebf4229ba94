"""Boxing steps by their definition, on a list of NumPy pieces, one for each device.

Nothing here is shared with `shardc.passes.lower.lower_boxing`: a device knows which global indices it holds of each
dimension, and elements find their place by global index. Padding is NaN, so that whatever reads it shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardc.sbp.cost import BoxingStep
from shardc.sbp.placement import Placement, S

Device = tuple[int, ...]
Pieces = dict[Device, np.ndarray]
Ids = list[list[int | None]]
"""For each dimension of a piece the global index of each position; None is padding."""

NEUTRAL = {"sum": 0.0, "max": -np.inf, "min": np.inf}
REDUCE: Mapping[str, Callable[..., np.ndarray]] = {"sum": np.sum, "max": np.max, "min": np.min}


def devices(sizes: Mapping[str, int]) -> list[Device]:
    """All devices of a mesh, in its order."""
    return list(itertools.product(*(range(n) for n in sizes.values())))


def cut(block: list[int | None], n: int, i: int) -> list[int | None]:
    """Piece i of n of a block (DESIGN.md section 6.2): pieces of ceil(block/n), padding counted."""
    length = -(-len(block) // n)
    padded = block + [None] * (n * length - len(block))
    return padded[i * length : (i + 1) * length]


def ids(shape: Sequence[int], placement: Placement, sizes: Mapping[str, int], device: Device) -> Ids:
    """The elements of a value of `shape` that a device holds."""
    at = dict(zip(sizes, device, strict=True))
    found: Ids = []
    for dim, size in enumerate(shape):
        block: list[int | None] = list(range(size))
        for axis in [a for a in placement if placement[a] == S(dim)]:
            block = cut(block, sizes[axis], at[axis])
        found.append(block)
    return found


def copy(source: np.ndarray, have: Ids, target: np.ndarray, want: Ids) -> None:
    """Copies the elements that both pieces hold."""
    both = [[i for i in w if i is not None and i in h] for h, w in zip(have, want, strict=True)]
    target[_at(want, both)] = source[_at(have, both)]


def _at(held: Ids, wanted: Ids) -> tuple[np.ndarray, ...]:
    """The positions of the wanted elements, as an index."""
    return np.ix_(*([h.index(i) for i in w] for h, w in zip(held, wanted, strict=True)))


def blank(want: Ids, value: float = np.nan) -> np.ndarray:
    """A piece without elements."""
    return np.full([len(w) for w in want], value)


def partial(x: np.ndarray, op: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """n arrays of integers whose op-reduction is x."""
    if op == "sum":
        parts = [rng.integers(-9, 9, x.shape).astype(x.dtype) for _ in range(n - 1)]
        return [*parts, x - sum(parts, np.zeros_like(x))]
    sign = -1 if op == "max" else 1
    parts = [x + sign * rng.integers(0, 9, x.shape).astype(x.dtype) for _ in range(n)]
    winner = rng.integers(0, n, x.shape)
    return [np.where(winner == i, x, part) for i, part in enumerate(parts)]


def place(x: np.ndarray, placement: Placement, sizes: Mapping[str, int], rng: np.random.Generator) -> Pieces:
    """The pieces of `x` on each device; partial ones drawn at random."""
    counts = [sizes[a] for a in placement.partial_axes]
    parts = partial(x, placement.partial_op or "sum", int(np.prod(counts, dtype=int)), rng)
    found: Pieces = {}
    for device in devices(sizes):
        at = dict(zip(sizes, device, strict=True))
        which = int(np.ravel_multi_index([at[a] for a in placement.partial_axes], counts)) if counts else 0
        want = ids(x.shape, placement, sizes, device)
        found[device] = blank(want)
        copy(parts[which], [list(range(n)) for n in x.shape], found[device], want)
    return found


def group(device: Device, axes: Sequence[str], sizes: Mapping[str, int]) -> list[Device]:
    """The devices that differ from this one only along `axes`, in the order of `axes`."""
    spots = [list(sizes).index(a) for a in axes]
    members: list[Device] = []
    for coords in itertools.product(*(range(sizes[a]) for a in axes)):
        member = list(device)
        for spot, i in zip(spots, coords, strict=True):
            member[spot] = i
        members.append(tuple(member))
    return members


def read(pieces: Pieces, placement: Placement, shape: Sequence[int], sizes: Mapping[str, int]) -> list[np.ndarray]:
    """The logical value of each group of devices that together hold one copy."""
    split = [a for a in sizes if isinstance(placement[a], S)]
    held: list[np.ndarray] = []
    for device in {tuple(group(d, (*split, *placement.partial_axes), sizes)): d for d in devices(sizes)}.values():
        parts: list[np.ndarray] = []
        for member in group(device, placement.partial_axes, sizes):
            whole = np.full(shape, np.nan)
            for owner in group(member, split, sizes):
                copy(pieces[owner], ids(shape, placement, sizes, owner), whole, [list(range(n)) for n in shape])
            parts.append(whole)
        held.append(REDUCE[placement.partial_op or "sum"](parts, axis=0))
    return held


def simulate(step: BoxingStep, pieces: Pieces, shape: Sequence[int], sizes: Mapping[str, int]) -> Pieces:
    """The pieces after one step."""
    have = {d: ids(shape, step.src, sizes, d) for d in pieces}
    want = {d: ids(shape, step.dst, sizes, d) for d in pieces}

    def received(device: Device, sources: Sequence[Device]) -> np.ndarray:
        """The wanted elements of a device, from the pieces of `sources`, which must hold all of them."""
        piece = blank(want[device])
        for source in sources:
            copy(pieces[source], have[source], piece, want[device])
        assert not np.isnan(piece[_at(want[device], elements(want[device]))]).any(), f"{step} leaves holes at {device}"
        return piece

    def members(device: Device) -> list[Device]:
        return group(device, step.axes, sizes)

    def reduced(device: Device) -> np.ndarray:
        op = step.src.partial_op
        assert op is not None
        return REDUCE[op]([received(device, [m]) for m in members(device)], axis=0)

    match step.kind:
        case "all_gather":
            return {d: received(d, members(d)) for d in pieces}
        case "all_to_all" if step.src.partial_axes == step.dst.partial_axes:
            return {d: received(d, members(d)) for d in pieces}
        case "all_reduce" | "reduce_scatter" | "all_to_all":  # the last of P(max), P(min): reduced at their goal
            return {d: reduced(d) for d in pieces}
        case "slice":
            return {d: received(d, [d]) for d in pieces}
        case "keep":
            op = step.dst.partial_op
            return {d: pieces[d] if op != "sum" or d == members(d)[0] else 0 * pieces[d] for d in pieces}
        case "fill":
            after = {d: blank(want[d], NEUTRAL[str(step.dst.partial_op)]) for d in pieces}
            for d in pieces:
                copy(pieces[d], have[d], after[d], want[d])
            return after
        case "permute":
            after: Pieces = {}
            for first in {members(d)[0] for d in pieces}:
                left = members(first)  # whose piece has not been sent yet: each is sent once
                for d in members(first):
                    source = next(s for s in left if elements(have[s]) == elements(want[d]))
                    left.remove(source)
                    after[d] = received(d, [source])
            return after


def elements(held: Ids) -> Ids:
    """The valid global indices of each dimension."""
    return [[i for i in dim if i is not None] for dim in held]
