"""Schedules in a V from a building block: the times at which one microbatch passes the stages, repeated for all.

Rank i runs stages i and 2p-1-i. A microbatch's forwards go down the V and up again, and its backwards the same way
back. The distances between its steps decide how long its activations live, and so how many of them a rank holds. A new
block starts every six units, because each microbatch costs a rank F, I and W of two stages. The blocks give the order
on each rank, and `squeeze` makes the schedule from it. (Qi et al. 2024, Pipeline Parallelism with Controllable Memory,
arXiv 2405.15362.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from shardc.errors import PipelineError
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import ranks_of
from shardc.pipeline.schedule.methods.squeeze import Squeezed, squeeze
from shardc.pipeline.schedule.schedule import Schedule

_PERIOD: Final = 6


class Block(NamedTuple):
    """Units of time between the steps of a microbatch.

    Attributes:
      down, up: between the forwards of neighbouring stages, on the way down the V and up again.
      back_down, back_up: between the input gradients, on the way back down and up.
      turn, last, back_turn: at the bottom of the V, from the last forward to the first gradient, at the bottom again.
    """

    down: int
    up: int
    back_down: int
    back_up: int
    turn: int
    last: int
    back_turn: int

    def plan(self, ranks: int, microbatches: int) -> list[list[Action]]:
        """F and I of each rank, sorted by their times."""
        down, up, back_down, back_up, turn, last, back_turn = self
        side = ranks - 1
        steps = [0, *[down] * side, turn, *[up] * side, last, *[back_down] * side, back_turn, *[back_up] * side]
        times = list(itertools.accumulate(steps))
        forward, gradient = times[: 2 * ranks], times[: 2 * ranks - 1 : -1]
        rows: list[list[Action]] = []
        for rank in range(ranks):
            timed = [
                (time[stage] + _PERIOD * j, Action(stage, kind, j))
                for stage in (rank, 2 * ranks - 1 - rank)
                for kind, time in (("F", forward), ("I", gradient))
                for j in range(microbatches)
            ]
            rows.append([action for _, action in sorted(timed)])
        return rows


def from_blocks(
    name: str, blocks: Sequence[Block], ranks: int, microbatches: int, costs: StageCosts, held: int
) -> Schedule:
    """The fastest of the schedules of these blocks in which each rank holds at most `held` chunks."""
    best: Squeezed | None = None
    for block in blocks:
        found = squeeze(block.plan(ranks, microbatches), ranks_of("v", ranks, 2), costs, [held] * ranks)
        if found and (best is None or found.makespan < best.makespan):
            best = found
    if best is None:
        raise PipelineError(f"{name}: no schedule of {ranks} ranks holds at most {held} chunks on each.")
    return Schedule(name, best.rows)
