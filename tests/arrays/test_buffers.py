"""Buffers that values are received into: aligned, of the right size, each its own."""

import numpy as np
import pytest

from shardc.arrays.buffers import allocate


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000, 1 << 20])
def test_a_buffer_is_aligned_flat_and_writable(count):
    buffer = allocate(count)
    assert (buffer.nbytes, buffer.ndim, buffer.format, buffer.readonly) == (count, 1, "B", False)
    assert np.frombuffer(buffer, np.uint8).ctypes.data % 64 == 0 or count == 0


def test_buffers_do_not_share_memory():
    first, second = allocate(100), allocate(100)
    first[:] = b"a" * 100
    second[:] = b"b" * 100
    assert bytes(first) == b"a" * 100
