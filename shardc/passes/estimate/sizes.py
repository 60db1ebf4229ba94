"""Bytes that a device allocates for its piece of a value. Only this module knows tiles and row padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from shardc.ir.walk import itemsize_of
from shardc.passes.estimate.backend import Backend
from shardc.passes.estimate.row_tables import RowTable
from shardc.sbp.placement import AxisSizes, Placement, local_shape

MOST_FILLED: Final = 2**27
"""Bytes of row padding below which XLA:TPU pads rows, however small the array itself is."""


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array in tiles of 8 x 128 words, with the pair of tiled dimensions that wastes least.

    XLA:TPU pads the last dimension of a tile to 128, the one before to a power of two up to 8 words, and keeps arrays
    of one dimension in rows of 128.
    """
    whole = math.prod(shape) * itemsize
    words = max(1, 4 // itemsize)
    if not shape or not whole:
        return whole
    if len(shape) == 1:
        return -(-shape[0] // 128) * 128 * itemsize
    least = min(
        math.prod((-(-n // 128) * 128, -(-m // rows) * rows, *(k for d, k in enumerate(shape) if d not in (i, j))))
        for i, n in enumerate(shape) for j, m in enumerate(shape) if i != j
        for rows in [min(8 * words, 1 << (m - 1).bit_length())]
    )  # fmt: skip
    return least * itemsize


def filled_bytes(shape: Sequence[int], itemsize: int, gathered: bool) -> int:
    """Bytes of an array with padded rows: the last dimension is padded to a multiple of 128 elements.

    XLA:TPU does not pad the rows, and the array takes `tiled_bytes`, if the padding is at least `MOST_FILLED` bytes and
    at least doubles the array (more than doubles it if rows are gathered). This rule agrees with tables of 8 to 130
    columns, each compiled alone.
    """
    least, *rest = tiled_bytes(shape, itemsize), *(n for n in shape if n != 1)
    if len(rest) < 2 or not least:
        return least
    rows = min(8 * max(1, 4 // itemsize), 1 << (rest[-2] - 1).bit_length())
    filled = math.prod(rest[:-2]) * -(-rest[-2] // rows) * rows * -(-rest[-1] // 128) * 128 * itemsize
    return least if filled - least >= MOST_FILLED and filled >= 2 * least + gathered else filled


def table_bytes(table: RowTable, placement: Placement, sizes: AxisSizes) -> int:
    """Bytes that a row-padded table takes besides those of its piece."""
    shape, itemsize = local_shape(table.value.aval.shape, placement, sizes), itemsize_of(table.value.aval)
    least, filled = tiled_bytes(shape, itemsize), filled_bytes(shape, itemsize, table.gathered)
    return filled if table.copied and filled > least else filled - least


def piece_bytes(aval: Any, placement: Placement, sizes: AxisSizes, backend: Backend) -> int:
    """Bytes that a device allocates for its piece of a value."""
    return allotted_bytes(local_shape(aval.shape, placement, sizes), itemsize_of(aval), backend)


def allotted_bytes(shape: Sequence[int], itemsize: int, backend: Backend) -> int:
    """Bytes that a device allocates for an array of this shape."""
    return tiled_bytes(shape, itemsize) if backend.tiles else math.prod(shape) * itemsize
