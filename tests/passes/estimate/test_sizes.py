"""Bytes that a device allocates: tiles of 8 x 128 words, as XLA:TPU lays arrays out."""

from __future__ import annotations

import pytest

from shardc.passes.estimate.sizes import filled_bytes, tiled_bytes


@pytest.mark.parametrize(
    ("shape", "itemsize", "want"),
    [
        ((), 4, 4),
        ((10,), 4, 128 * 4),
        ((16, 128), 4, 16 * 128 * 4),
        ((3, 128), 4, 4 * 128 * 4),  # rows up to a power of two
        ((512, 16), 4, 512 * 16 * 4),  # the first dimension along the lanes
        ((256, 130), 4, 256 * 136 * 4),
        ((128, 9), 2, 128 * 16 * 2),
        ((0, 5), 4, 0),
    ],
)
def test_tiles(shape, itemsize, want):
    assert tiled_bytes(shape, itemsize) == want


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((1000, 64), 1000 * 128 * 4),  # each row in a place of its own
        ((1000, 128), 1000 * 128 * 4),
        ((10,), 128 * 4),
        ((2**22, 64), 2**22 * 64 * 4),  # the padding would be 1 GiB, as much as the table
    ],
)
def test_rows_are_padded_to_128_where_that_wastes_little(shape, want):
    assert filled_bytes(shape, 4, gathered=False) == want
