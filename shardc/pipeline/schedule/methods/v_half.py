"""V-Half: half of 1F1B's memory, evenly on all ranks."""

from __future__ import annotations

from typing import Final

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.building_block import Block, from_blocks
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.schedule import Schedule

BLOCKS: Final = (Block(1, 1, 2, 2, 1, 3, 5), Block(1, 2, 1, 2, 1, 3, 1))


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """A rank holds (p+2)/2 microbatches' activations; about half of 1F1B's bubble if F, B and W are equal."""
    return from_blocks("v-half", BLOCKS, ranks, microbatches, costs, ranks + 2)


V_HALF = Method("v-half", orders, "Qi et al. 2024, Controllable Memory (arXiv 2405.15362)", chunks=2, placement="v")
