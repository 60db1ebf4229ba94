"""ZB-H2: as ZB-H1, with twice the activations, so that no rank idles between its first and its last action."""

from __future__ import annotations

from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.order import one_stage
from shardc.pipeline.schedule.methods.squeeze import squeeze
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Makespan bubble (p-1)F, and none within a rank, if F, B and W are equal; a rank holds 2p-1 activations at most.

    Forwards and input gradients as in eager 1F1B; weight gradients where a rank would be idle or has no room.
    """
    plan = [list(one_stage(r, microbatches, 2 * (ranks - r) - 1, "I")) for r in range(ranks)]
    squeezed = squeeze(plan, range(ranks), costs, [2 * ranks - 1] * ranks)
    assert squeezed is not None  # rank r's plan holds 2(p-r)-1, so it has room
    return Schedule("zb-h2", squeezed.rows)


ZB_H2 = Method("zb-h2", orders, "Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241)")
