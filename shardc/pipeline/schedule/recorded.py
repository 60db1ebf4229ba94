"""A measured run as a Timeline, so that it can be compared with the planned one."""

from __future__ import annotations

from collections.abc import Iterable

from shardc.errors import PipelineError
from shardc.pipeline.schedule.simulate import Timeline
from shardc.runtime.actor import Network, Span


def recorded(net: Network, spans: Iterable[Span], zero: float, rounds: int | None = None) -> Timeline:
    """The timeline of a recorded run.

    Args:
      net: the network that ran.
      spans: one for each step of each actor, those of an actor in order (`Executor.run(record=True)`).
      zero: the begin of the run; the timeline's times count from it.
      rounds: to take, of a run of many; None: one period.

    Raises:
      PipelineError: the spans are not those of all steps.
    """
    rounds = net.period if rounds is None else rounds
    rows: list[list[Span]] = [[] for _ in net.actors]
    for span in spans:
        if span.round < rounds:
            rows[span.actor].append(span)
    begins = range(0, rounds, net.period)
    for actor, (row, steps) in enumerate(zip(rows, net.actors, strict=True)):
        ran = [s.label for begin in begins for s in steps if begin + s.round < rounds]
        if [s.label for s in row] != ran:
            raise PipelineError(
                f"recorded: {len(row)} spans of actor {actor}, which has {len(ran)} steps; give one for each."
            )
    order = sorted((span.start, a, i) for a, row in enumerate(rows) for i, span in enumerate(row))
    sequence = [[0] * len(row) for row in rows]
    for number, (_, a, i) in enumerate(order):
        sequence[a][i] = number
    return Timeline(
        net,
        tuple([s.start - zero for s in row] for row in rows),
        tuple([s.end - zero for s in row] for row in rows),
        tuple(sequence),
    )
