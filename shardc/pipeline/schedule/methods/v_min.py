"""V-Min: a third of 1F1B's memory, evenly on all ranks."""

from __future__ import annotations

from typing import Final

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.building_block import Block, from_blocks
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.schedule import Schedule

BLOCKS: Final = (
    Block(1, 1, 1, 1, 1, 3, 1),
    Block(1, 1, 1, 1, 1, 4, 1),
    Block(1, 1, 1, 1, 1, 2, 5),
    Block(1, 1, 1, 1, 1, 1, 1),
)


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """A rank holds (p+4)/3 microbatches' activations, rounded down; somewhat over half of 1F1B's bubble if F, B
    and W are equal, more if they are not."""
    return from_blocks("v-min", BLOCKS, ranks, microbatches, costs, 2 * ((ranks + 4) // 3))


V_MIN = Method("v-min", orders, "Qi et al. 2024, Controllable Memory (arXiv 2405.15362)", chunks=2, placement="v")
