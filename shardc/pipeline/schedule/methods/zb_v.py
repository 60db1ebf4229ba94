"""ZB-V: no bubble within a rank, in the memory of 1F1B, evenly on all ranks."""

from __future__ import annotations

from typing import Final

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.building_block import Block, from_blocks
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.schedule import Schedule

BLOCKS: Final = (
    Block(2, 4, 2, 4, 2, 5, 2),
    Block(1, 1, 4, 4, 1, 5, 3),
    Block(2, 4, 2, 4, 1, 1, 1),
    Block(1, 2, 4, 2, 5, 3, 5),
    Block(1, 1, 4, 2, 3, 4, 1),
)


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Makespan bubble (p-1)F of a stage if F, B and W are equal; a rank holds 2p chunks, which are p microbatches."""
    return from_blocks("zb-v", BLOCKS, ranks, microbatches, costs, 2 * ranks)


ZB_V = Method(
    "zb-v", orders, "Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241)", chunks=2, placement="v"
)
