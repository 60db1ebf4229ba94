"""PipeDream-2BW: a pipeline without a flush, on two versions of the weights."""

from __future__ import annotations

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods import one_f1b
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """One step of the steady state. The order is 1F1B's, but step t's forwards and backwards read the weights from
    before the update of step t-1. So they do not wait for this update, and steps follow each other without a bubble.
    `Method.weight_versions` is 2."""
    return Schedule("pipedream-2bw", one_f1b.orders(ranks, microbatches, chunks, costs).rows)


PIPEDREAM_2BW = Method(
    "pipedream-2bw", orders, "Narayanan et al. 2021, PipeDream-2BW (arXiv 2006.09503)", weight_versions=2
)
