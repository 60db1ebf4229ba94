"""ZB-H1: 1F1B with the backward split; weight gradients are delayed within the memory of 1F1B's first rank."""

from __future__ import annotations

from collections.abc import Iterator

from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.order import one_stage
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Bubble (p-1)(F+B-min(F,B,W)), a third of 1F1B's if all are equal; every rank holds p activations.

    Rank i's W lag i microbatches behind its I, so that it holds p-i activations for I and i for W.
    """
    return Schedule("zb-h1", tuple(tuple(_row(r, ranks, microbatches)) for r in range(ranks)))


def _row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    for action in one_stage(rank, microbatches, ranks - rank, "I"):
        yield action
        if action.kind == "I" and action.microbatch >= rank:
            yield Action(rank, "W", action.microbatch - rank)
    yield from (Action(rank, "W", j) for j in range(max(0, microbatches - rank), microbatches))


ZB_H1 = Method("zb-h1", orders, "Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241)")
