"""How a logical value lies in one physical array: a jax.Array that every JAX function can hold.

Where the placement is plain (no partial axes, no uneven split) the physical array is the logical one. Else it is the
pieces of all devices side by side: a split dimension holds its pieces with their padding, and partial axes become one
leading dimension, split over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from shardc.sbp.placement import AxisSizes, Placement, is_even, local_extent, local_shape


def is_plain(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> bool:
    """Whether a jax.Array can be placed so as it is."""
    return not placement.partial_axes and is_even(shape, placement, sizes)


def physical_shape(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> tuple[int, ...]:
    """Shape of the physical array of a logical value of `shape`."""
    piece = local_shape(shape, placement, sizes)
    dims = tuple(n * math.prod(sizes[a] for a in placement.axes_of(d)) for d, n in enumerate(piece))
    lead = (math.prod(sizes[a] for a in placement.partial_axes),) if placement.partial_axes else ()
    return (*lead, *dims)


def physical_spec(placement: Placement) -> PartitionSpec:
    """How the physical array is split."""
    rest = placement.without(placement.partial_axes).to_spec()
    return PartitionSpec(placement.partial_axes, *rest) if placement.partial_axes else rest


def _pieces(
    shape: Sequence[int], placement: Placement, sizes: AxisSizes
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """For each piece where its valid elements lie in the logical and in the physical array (leading dimension not
    counted)."""
    axes = [a for d in range(len(shape)) for a in placement.axes_of(d)]
    local = local_shape(shape, placement, sizes)
    found: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = []
    for coords in np.ndindex(*(sizes[a] for a in axes)):
        at = dict(zip(axes, map(int, coords), strict=True))
        logical: list[slice] = []
        physical: list[slice] = []
        for dim, size in enumerate(shape):
            names = placement.axes_of(dim)
            start, valid = local_extent(size, names, sizes, at)
            block = 0
            for axis in names:
                block = block * sizes[axis] + at[axis]
            logical.append(slice(start, start + valid))
            physical.append(slice(block * local[dim], block * local[dim] + valid))
        found.append((tuple(logical), tuple(physical)))
    return found


def to_physical(x: NDArray[Any], placement: Placement, sizes: AxisSizes) -> NDArray[Any]:
    """The physical array of a logical numpy array. As a partial sum, the first device holds it and the others zero."""
    if is_plain(x.shape, placement, sizes):
        return x
    out = np.zeros(physical_shape(x.shape, placement, sizes), x.dtype)
    target = out[0, ...] if placement.partial_axes else out  # a view, of a scalar too
    for logical, physical in _pieces(x.shape, placement, sizes):
        target[physical] = x[logical]
    return out


def to_logical(x: NDArray[Any], shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> NDArray[Any]:
    """The logical value of a physical numpy array."""
    if placement.partial_axes:
        reduce = {"sum": np.add, "max": np.maximum, "min": np.minimum}[placement.partial_op or "sum"].reduce
        x = np.asarray(reduce(x, axis=0, dtype=x.dtype))
    if is_even(shape, placement, sizes):
        return x
    out = np.zeros(shape, x.dtype)
    for logical, physical in _pieces(shape, placement, sizes):
        out[logical] = x[physical]
    return out
