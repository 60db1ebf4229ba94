"""Where a pipeline cuts a model: between blocks."""

from collections.abc import Callable
from math import ceil
from typing import Any

from shardc import stage_boundary


def between(blocks: int, stages: int) -> Callable[[int, Any], Any]:
    """The `between(i, x)` of a model of the zoo that ends a stage after every so many of its blocks.

    Where the blocks do not divide, the last stage, which has the head, is among those with fewer.
    """
    if stages > blocks:
        raise ValueError(f"{stages} stages want {stages} blocks or more, the model has {blocks}")
    last = {ceil(blocks * s / stages) - 1 for s in range(1, stages)}
    return lambda i, x: stage_boundary(x) if i in last else x
