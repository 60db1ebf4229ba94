"""A method: a named way to make a schedule for any number of ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.schedule import Schedule

RankPlacement: TypeAlias = Literal["loop", "v"]
"""The assignment of stages to ranks: in a loop rank `s % p` runs stage s; in a V ranks 0 ... p-1, then p-1 ... 0."""

Orders: TypeAlias = Callable[[int, int, int, StageCosts], Schedule]
"""A function from (ranks, microbatches, chunks, costs) to a schedule."""


def _refuse_nothing(ranks: int, microbatches: int, chunks: int) -> str | None:
    return None


@dataclass(frozen=True)
class Method:
    """A way to order a pipeline's actions.

    Attributes:
      name: the name, such as "1f1b".
      orders: makes the schedule.
      source: the paper.
      chunks: the default number of stages on each rank, which is also the least.
      more_chunks: whether there may be more stages on each rank.
      placement: the assignment of stages to ranks.
      refuse: for (ranks, microbatches, chunks), the reason why the method does not support them; None if it does.
      weight_versions: number of versions of the weights that live at once. With 2 (PipeDream-2BW) a step's forwards
        read the weights before the previous step's update, so they do not wait for it.
    """

    name: str
    orders: Orders
    source: str
    chunks: int = 1
    more_chunks: bool = False
    placement: RankPlacement = "loop"
    refuse: Callable[[int, int, int], str | None] = _refuse_nothing
    weight_versions: int = 1


def ranks_of(placement: RankPlacement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of the ranks·chunks stages."""
    down = range(ranks)
    back = down if placement == "loop" else down[::-1]
    return tuple(r for chunk in range(chunks) for r in (back if chunk % 2 else down))
