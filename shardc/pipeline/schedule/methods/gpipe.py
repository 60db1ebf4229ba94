"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.order import one_stage
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Bubble (p-1)(F+B+W); every rank holds all m activations."""
    return Schedule("gpipe", tuple(tuple(one_stage(r, microbatches, microbatches)) for r in range(ranks)))


GPIPE = Method("gpipe", orders, "Huang et al. 2019, GPipe (arXiv 1811.06965)")
