"""1F1B: a rank runs as many forwards ahead as its distance from the end, then alternates backwards and forwards."""

from __future__ import annotations

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.order import one_stage
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Bubble (p-1)(F+B+W) as GPipe, but rank i of p holds min(m, p-i) activations."""
    return Schedule("1f1b", tuple(tuple(one_stage(r, microbatches, ranks - r)) for r in range(ranks)))


ONE_F1B = Method("1f1b", orders, "Fan et al. 2021, DAPPLE (arXiv 2007.01045); PipeDream-Flush (arXiv 2006.09503)")
