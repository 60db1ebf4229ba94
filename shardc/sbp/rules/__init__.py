"""The rules of operations, one family in each file. Importing this package registers them all."""

from shardc.sbp.rules import (
    contraction,
    convolution,
    elementwise,
    gather,
    linalg,
    ordering,
    random,
    rearrange,
    reduction,
    scatter,
    slicing,
    windows,
)

__all__ = [
    "contraction",
    "convolution",
    "elementwise",
    "gather",
    "linalg",
    "ordering",
    "random",
    "rearrange",
    "reduction",
    "scatter",
    "slicing",
    "windows",
]
