"""The rules of operations, one family in each file. Importing this package registers them all."""

from shardc.sbp.rules import (
    attention,
    contraction,
    convolution,
    elementwise,
    gather,
    in_order,
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
    "attention",
    "contraction",
    "convolution",
    "elementwise",
    "gather",
    "in_order",
    "linalg",
    "ordering",
    "random",
    "rearrange",
    "reduction",
    "scatter",
    "slicing",
    "windows",
]
