"""A method: how a schedule with a name is made for any number of ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardc.pipeline.schedule.costs import Costs
from shardc.pipeline.schedule.schedule import Schedule

Placement: TypeAlias = Literal["loop", "v"]
"""Which rank runs stage s of p·v: `s % p` in a loop; in a V ranks 0 ... p-1 and back again, p-1 ... 0."""

Orders: TypeAlias = Callable[[int, int, int, Costs], Schedule]
"""(ranks, microbatches, chunks, costs) to a schedule."""


def _refuse_nothing(ranks: int, microbatches: int, chunks: int) -> str | None:
    return None


@dataclass(frozen=True)
class Method:
    """A way to order a pipeline's actions.

    Attributes:
      name: "1f1b".
      orders: makes the schedule.
      source: the paper.
      chunks: stages of each rank, if nobody says how many.
      more_chunks: whether it can have more than these.
      placement: which rank runs a stage.
      refuse: for (ranks, microbatches, chunks) why they cannot be, or None if they can.
      weight_versions: versions of the weights that live at once. With 2 (PipeDream-2BW) a step's forwards do not wait
        for the update of the step before: they read the version before it.
    """

    name: str
    orders: Orders
    source: str
    chunks: int = 1
    more_chunks: bool = False
    placement: Placement = "loop"
    refuse: Callable[[int, int, int], str | None] = _refuse_nothing
    weight_versions: int = 1


def ranks_of(placement: Placement, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each of ranks·chunks stages."""
    there = range(ranks)
    back = there if placement == "loop" else there[::-1]
    return tuple(r for chunk in range(chunks) for r in (back if chunk % 2 else there))
