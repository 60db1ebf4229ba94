"""Breadth-first: all microbatches through a rank's first stage, then all through its second, and back the same way."""

from __future__ import annotations

from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Bubble (p-1)(F+B+W) of a stage; a rank holds all v·m chunks. Weights of a stage that are split over data-parallel
    devices are gathered once, and their gradients are reduced once."""
    rows: list[tuple[Action, ...]] = []
    for r in range(ranks):
        stages = range(r, ranks * chunks, ranks)
        forwards = [Action(s, "F", j) for s in stages for j in range(microbatches)]
        rows.append((*forwards, *(Action(s, "B", j) for s in reversed(stages) for j in range(microbatches))))
    return Schedule("breadth-first", tuple(rows))


BREADTH_FIRST = Method(
    "breadth-first", orders, "Lamy-Poirier 2023, Breadth-First (arXiv 2211.05953)", chunks=2, more_chunks=True
)
