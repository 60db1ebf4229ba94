"""The part of a logical array that one process holds: along each dimension the pieces of its devices, in order.

    process 0: devices with pieces 0, 1 of dimension 0   -->  the rows of pieces 0 and 1
    process 1: devices with pieces 2, 3                  -->  the rows of pieces 2 and 3

A partial axis counts as one that splits nothing: the value is the logical one, and its first device takes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardc.errors import ArgumentError
from shardc.sbp.layout import physical_shape, physical_spec
from shardc.sbp.placement import Placement, extents, local_shape


@dataclass(frozen=True)
class ProcessRows:
    """The pieces that a process holds.

    Attributes:
      mesh, placement: of the array; the placement is resolved.
      pieces: for each dimension the numbers of the pieces, rising.
    """

    mesh: Mesh
    placement: Placement
    pieces: tuple[tuple[int, ...], ...]

    def counts(self, dim: int) -> tuple[int, ...]:
        """The sizes of the axes that split a dimension."""
        return tuple(self.mesh.shape[a] for a in self.placement.axes_of(dim))

    def rows(self, dim: int, size: int) -> list[tuple[int, int]]:
        """Where each piece begins in a dimension of `size`, and how many elements it has."""
        every = extents(size, self.counts(dim))
        return [every[k] for k in self.pieces[dim]]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of an array of shape `whole`."""
        return tuple(sum(n for _, n in self.rows(d, size)) for d, size in enumerate(whole))

    def slices(self, whole: Sequence[int]) -> tuple[slice, ...] | None:
        """The part of an array of shape `whole` as an index; None if it is not in one piece."""
        found: list[slice] = []
        for d, size in enumerate(whole):
            rows = [(at, at + n) for at, n in self.rows(d, size) if n]
            if any(end != begin for (_, end), (begin, _) in itertools.pairwise(rows)):
                return None
            found.append(slice(rows[0][0], rows[-1][1]) if rows else slice(0, 0))
        return tuple(found)

    def padded(self, part: np.ndarray[Any, Any], whole: Sequence[int]) -> np.ndarray[Any, Any]:
        """A part with each piece padded to the size that devices hold, in memory of its own."""
        local = local_shape(whole, self.placement, dict(self.mesh.shape))
        for d, size in enumerate(whole):
            taken, at = [], 0
            for _, n in self.rows(d, size):
                widths = [(0, local[d] - n) if k == d else (0, 0) for k in range(part.ndim)]
                piece = part[(*[slice(None)] * d, slice(at, at + n))]
                taken.append(np.pad(piece, widths) if local[d] > n else piece)
                at += n
            part = np.concatenate(taken, d) if len(taken) > 1 else taken[0]
        return np.array(part, order="C")

    def put(self, part: np.ndarray[Any, Any], whole: Sequence[int]) -> jax.Array:
        """The physical array of an array of shape `whole`, of which this process has `part`.

        Further dimensions of `part`, such as the words of keys, are split by nothing.
        """
        sizes, more = dict(self.mesh.shape), part.shape[len(whole) :]
        local, held = local_shape(whole, self.placement, sizes), self.padded(part, whole)
        lead = bool(self.placement.partial_axes)

        def piece(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
            assert index is not None
            first = not lead or not index[0].start
            index = index[lead:]
            at: list[slice] = []
            for d, n in enumerate(local):
                k = self.pieces[d].index((index[d].start or 0) // n) if n else 0
                at.append(slice(k * n, (k + 1) * n))
            found = held[tuple(at)] if first else np.zeros((*local, *more), held.dtype)
            return found[None] if lead else found

        shape = (*physical_shape(whole, self.placement, sizes), *more)
        return jax.make_array_from_callback(shape, NamedSharding(self.mesh, physical_spec(self.placement)), piece)


@lru_cache(maxsize=4096)
def process_rows(mesh: Mesh, placement: Placement, rank: int, process: int) -> ProcessRows:
    """The part of an array of some rank that a process holds.

    Raises:
      ArgumentError: its pieces are no grid.
    """
    placement = placement.resolve(rank)
    here = np.vectorize(lambda d: d.process_index == process, otypes=[bool])(mesh.devices)
    at = dict(zip(mesh.axis_names, np.nonzero(here), strict=True))
    numbers: list[list[int]] = []
    for dim in range(rank):
        number = np.zeros(int(here.sum()), np.int64)
        for axis in placement.axes_of(dim):
            number = number * mesh.shape[axis] + at[axis]
        numbers.append(number.tolist())
    pieces = tuple(tuple(sorted(set(n))) for n in numbers)
    if rank and len(set(zip(*numbers, strict=True))) != math.prod(map(len, pieces)):
        raise ArgumentError(
            f"the devices of process {process} hold no rectangular part of an array at {placement}; put the whole "
            "value in every process, without here=True, or lay the mesh so that a process's devices are neighbours, as "
            "shardc.make_mesh does."
        )
    return ProcessRows(mesh, placement, pieces)


def whole_shape(
    parts: Mapping[int, ProcessRows], shapes: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, ...], list[str]]:
    """The shape of an array from the shapes of the parts that processes have, and lines about what is wrong with
    these."""
    ranks = {len(s) for s in shapes.values()}
    if len(ranks) > 1:
        return (), [f"the parts differ in rank: {', '.join(f'process {k}: {tuple(s)}' for k, s in shapes.items())}"]
    whole: list[int] = []
    wrong: list[str] = []
    for d in range(ranks.pop()):
        has = {k: s[d] for k, s in shapes.items()}
        size, line = _whole_size(d, parts, has)
        whole.append(size)
        wrong += line
    return tuple(whole), wrong


def _whole_size(d: int, parts: Mapping[int, ProcessRows], has: Mapping[int, int]) -> tuple[int, list[str]]:
    """The size of dimension `d`, of which processes have so many elements, and a line if they cannot."""
    by_pieces = {p.pieces[d]: has[k] for k, p in parts.items()}
    size, said = sum(by_pieces.values()), ", ".join(f"process {k} has {n}" for k, n in has.items())
    if any(has[k] != by_pieces[p.pieces[d]] for k, p in parts.items()):
        return size, [f"dimension {d}: {said}; processes that hold the same pieces must have equally many elements"]
    if sum(map(len, by_pieces)) != len({k for pieces in by_pieces for k in pieces}):
        return size, [f"dimension {d}: the pieces of the processes overlap without being the same"]
    must = {k: sum(n for _, n in p.rows(d, size)) for k, p in parts.items()}
    if must == has:
        return size, []
    counts = next(iter(parts.values())).counts(d)
    should = ", ".join(f"process {k} must have {n}" for k, n in must.items())
    return size, [f"dimension {d}: {said}; of {size} elements in {math.prod(counts)} pieces {should}"]
