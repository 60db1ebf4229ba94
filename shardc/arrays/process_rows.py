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

import numpy as np
from jax.sharding import Mesh

from shardc.arrays.place import Pieces, Place
from shardc.errors import ArgumentError
from shardc.sbp.placement import Placement, extents
from shardc.sbp.way import Index


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

    def cut(self, part: np.ndarray[Any, Any], place: Place) -> Pieces:
        """The boxes that this process needs at a place, cut out of its part, in memory of their own."""
        starts = [self._starts(d, size) for d, size in enumerate(place.shape)]
        found: dict[Index, np.ndarray[Any, Any]] = {}
        for box in place.needs():
            at = [(of[a], of[a] + b - a) for of, (a, b) in zip(starts, box, strict=True)]
            found[box] = np.array(part[tuple(slice(*pair) for pair in at)])
        return found

    def _starts(self, dim: int, size: int) -> dict[int, int]:
        """Where each piece begins in the part, by where it begins in the whole."""
        rows = self.rows(dim, size)
        counts = itertools.accumulate((n for _, n in rows), initial=0)
        return dict(zip((at for at, _ in rows), counts, strict=False))


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
