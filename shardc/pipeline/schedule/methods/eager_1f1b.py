"""Eager 1F1B: 1F1B with twice as many forwards ahead, so that messages overlap with computation."""

from __future__ import annotations

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.order import one_stage
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Bubble (p-1)(F+B+W) + 2(p-1)·latency, where 1F1B pays latency for each microbatch too; rank i of p holds
    min(m, 2(p-i)-1) activations."""
    rows = tuple(tuple(one_stage(r, microbatches, 2 * (ranks - r) - 1)) for r in range(ranks))
    return Schedule("eager-1f1b", rows)


EAGER_1F1B = Method("eager-1f1b", orders, "Zhuang et al. 2023, On optimizing the communication (arXiv 2211.05322)")
