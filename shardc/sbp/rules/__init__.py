"""The rules of operations, one family in each file. Importing this package registers them all."""

from shardc.sbp.rules import (  # noqa: F401  (imported for what they register)
    contraction,
    convolution,
    elementwise,
    gather,
    layout,
    linalg,
    ordering,
    reduction,
    scatter,
    slicing,
    windows,
)

__all__: list[str] = []
