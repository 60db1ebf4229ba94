"""The physical array of a logical value: one jax.Array, which every JAX function can hold.

If the placement is plain (no partial axes, no uneven split), the physical array is the logical one. Else it holds the
pieces of all devices side by side: a split dimension holds its pieces with their padding, and partial axes become one
leading dimension, split over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from shardc.sbp.placement import AxisSizes, Placement, S, extents, is_even, local_shape


def bits_of(dtype: Any) -> int:
    """Bits of an integer or float element; of other types 8, a lower bound."""
    if jax.dtypes.issubdtype(dtype, np.integer):
        return jax.numpy.iinfo(dtype).bits
    return jax.numpy.finfo(dtype).bits if jax.dtypes.issubdtype(dtype, np.floating) else 8


def is_plain(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> bool:
    """Whether a jax.Array can have this placement."""
    return not placement.partial_axes and is_even(shape, placement, sizes)


def physical_shape(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> tuple[int, ...]:
    """Shape of the physical array of a logical value of `shape`."""
    piece = local_shape(shape, placement, sizes)
    dims = tuple(n * math.prod(sizes[a] for a in placement.axes_of(d)) for d, n in enumerate(piece))
    lead = (math.prod(sizes[a] for a in placement.partial_axes),) if placement.partial_axes else ()
    return (*lead, *dims)


def physical_spec(placement: Placement) -> PartitionSpec:
    """The PartitionSpec of the physical array."""
    rest = placement.without(placement.partial_axes).to_spec()
    return PartitionSpec(placement.partial_axes, *rest) if placement.partial_axes else rest


def plain_placement(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> Placement:
    """The placement closest to `placement` that a jax.Array can have. An axis that leaves padding, or a partial value,
    splits the largest other dimension that it divides, or none.

    Examples:
      >>> str(plain_placement((13, 8), Placement({"data": S(0)}), {"data": 4}))
      '{data: S(1)}'
    """
    if is_plain(shape, placement, sizes):
        return placement
    parts = [math.prod(sizes[a] for a in placement.axes_of(d)) for d in range(len(shape))]
    even = [n % k == 0 for n, k in zip(shape, parts, strict=True)]
    kept = [(a, s) for a, s in placement.items_ if isinstance(s, S) and even[s.dim]]
    parts = [k if ok else 1 for k, ok in zip(parts, even, strict=True)]
    largest = sorted(range(len(shape)), key=lambda d: -shape[d])
    for axis in placement:
        if axis in dict(kept):
            continue
        fitting = next((d for d in largest if shape[d] % (parts[d] * sizes[axis]) == 0), None)
        if fitting is not None:
            parts[fitting] *= sizes[axis]
            kept.append((axis, S(fitting)))
    return Placement(kept)


def _valid(shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> list[slice | NDArray[Any]]:
    """The positions of the elements of each dimension in the physical array; a leading dimension is not counted."""
    found: list[slice | NDArray[Any]] = []
    for dim, (size, local) in enumerate(zip(shape, local_shape(shape, placement, sizes), strict=True)):
        pieces = extents(size, tuple(sizes[a] for a in placement.axes_of(dim)))
        if all(k * local == at for k, (at, valid) in enumerate(pieces) if valid):
            found.append(slice(0, size))
        else:
            found.append(np.concatenate([k * local + np.arange(valid) for k, (_, valid) in enumerate(pieces)]))
    return found


def to_physical(x: jax.Array, placement: Placement, sizes: AxisSizes) -> jax.Array:
    """The physical array of a logical one, also in a trace. Of a partial sum the first device holds all, the others
    zero; of a partial maximum or minimum each holds all."""
    if is_plain(x.shape, placement, sizes):
        return x
    shape = physical_shape(x.shape, placement, sizes)
    lead = bool(placement.partial_axes)
    for dim, (rows, size) in enumerate(zip(_valid(x.shape, placement, sizes), shape[lead:], strict=True)):
        source = np.full(size, x.shape[dim])  # past the end: filled with zero
        source[rows] = np.arange(x.shape[dim])
        if placement.axes_of(dim):
            x = jax.numpy.take(x, source, axis=dim, mode="fill", fill_value=0)
    if lead and placement.partial_op != "sum":
        return jax.numpy.broadcast_to(x[None], shape)
    return jax.numpy.pad(x[None], [(0, shape[0] - 1), *[(0, 0)] * x.ndim]) if lead else x


def to_logical(x: Any, shape: Sequence[int], placement: Placement, sizes: AxisSizes) -> Any:
    """The logical value of a physical array, of NumPy or JAX."""
    if placement.partial_axes:
        match placement.partial_op:
            case "max":
                x = x.max(axis=0)
            case "min":
                x = x.min(axis=0)
            case _:
                x = x.sum(axis=0, dtype=x.dtype)
    if is_even(shape, placement, sizes):
        return x
    for dim, rows in enumerate(_valid(shape, placement, sizes)):
        if not (isinstance(rows, slice) and rows.stop == x.shape[dim]):
            x = x[(*[slice(None)] * dim, rows)]
    return x
