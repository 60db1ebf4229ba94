"""Interleaved 1F1B: several stages per rank in a loop, so that the bubble shrinks with the size of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.methods.method import Method
from shardc.pipeline.schedule.methods.order import alternate
from shardc.pipeline.schedule.schedule import Schedule


def orders(ranks: int, microbatches: int, chunks: int, costs: StageCosts) -> Schedule:
    """Bubble (p-1)(F+B+W) of a stage, 1/v of 1F1B's for the same model; rank r holds 2(p-1-r) + (v-1)p + 1 chunks.

    Microbatches go in groups of p: a rank runs a group through its first stage, then through its second, and so on.
    If p does not divide m, the last group is filled up, and the surplus microbatches are removed at the end. The order
    stays free of deadlock, because microbatches wait for each other only by a rank's order.
    """
    p, v = ranks, chunks
    rows: list[tuple[Action, ...]] = []
    for r in range(p):
        forwards = list(_in_groups("F", [r + c * p for c in range(v)], p, microbatches))
        backwards = list(_in_groups("B", [r + c * p for c in reversed(range(v))], p, microbatches))
        row = alternate(forwards, backwards, 2 * (p - 1 - r) + (v - 1) * p + 1)
        rows.append(tuple(a for a in row if a.microbatch < microbatches))
    return Schedule("interleaved", tuple(rows))


def _in_groups(kind: str, stages: list[int], ranks: int, microbatches: int) -> Iterator[Action]:
    for first in range(0, microbatches, ranks):
        yield from (Action(s, kind, first + j) for s in stages for j in range(ranks))


INTERLEAVED = Method(
    "interleaved", orders, "Narayanan et al. 2021, Megatron-LM (arXiv 2104.04473)", chunks=2, more_chunks=True
)
