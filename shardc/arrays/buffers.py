"""Buffers that values are received into."""

from __future__ import annotations

from typing import Final

import numpy as np

_ALIGNMENT: Final = 64
"""`jax.device_put` takes a buffer with this alignment without a copy on CPU."""


def allocate(count: int) -> memoryview:
    """A fresh buffer of so many bytes, aligned and not cleared. Nobody else ever uses it."""
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return memoryview(raw[offset : offset + count])
