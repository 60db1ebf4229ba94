"""The network of a plain chain of stages: the messages between the actions of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from shardc.errors import PipelineError, did_you_mean
from shardc.pipeline.schedule.schedule import Schedule
from shardc.runtime.actor import Channel, Network, Step

CHANNELS: Final = ("activation", "gradient", "stash", "weight_stash")
"""F_s -> F_s+1; (B|I)_s+1 -> (B|I)_s; F_s -> (B|I)_s; I_s -> W_s."""

PerStage: TypeAlias = int | Sequence[int]
Registers: TypeAlias = int | Sequence[int | None] | None


def network(
    schedule: Schedule,
    *,
    bytes: Mapping[str, PerStage] | None = None,
    registers: Mapping[str, Registers] | None = None,
) -> Network:
    """The actors of a schedule, one for each rank, and their channels.

    Stage s has up to four channels of its own: `activation s->s+1`, `gradient s->s-1`, `stash s` from its forward to
    its backward (B, or I if that is split), and `weight_stash s` from I to W.

    Args:
      schedule: a schedule that `check_schedule` accepts. Others give a network that `find_deadlock` refuses.
      bytes: bytes of one message, by kind of channel ("activation", "gradient", "stash", "weight_stash"): one number
        for all stages, or a sequence with one entry for each sending stage.
      registers: number of registers, in the same form; None, or a kind that is not named: unbounded.

    Raises:
      PipelineError: an unknown kind of channel, or a sequence without one entry for each stage.

    Examples:
      >>> schedule = Schedule.parse("0F0 0B0\\n1F0 1B0")
      >>> net = network(schedule, registers={"stash": [2, 1]})
      >>> [(c.name, c.registers) for c in net.channels]
      [('activation 0->1', None), ('stash 0', 2), ('stash 1', 1), ('gradient 1->0', None)]
      >>> for step in net.actors[1]:
      ...     print(step.label, [net.channels[c].name for c, _ in step.takes])
      1F0 ['activation 0->1']
      1B0 ['stash 1']
    """
    sizes = _by_stage("bytes", bytes or {}, schedule.stages, 0)
    counts = _by_stage("registers", registers or {}, schedule.stages, None)
    rank = schedule.rank_of
    channels: list[Channel] = []
    number: dict[tuple[str, int], int] = {}
    for kind, stage, to in _ends(schedule):
        number[kind, stage] = len(channels)
        size = sizes[kind][stage]
        assert size is not None
        name = f"{kind} {stage}" if stage == to else f"{kind} {stage}->{to}"
        channels.append(Channel(name, rank[stage], rank[to], counts[kind][stage], size))
    sides = {(s, kind): _sides(number, s, kind) for s in range(schedule.stages) for kind in "FBIW"}
    actors: list[tuple[Step, ...]] = []
    for row in schedule.rows:
        steps: list[Step] = []
        for action in row:
            takes, gives = sides[action.stage, action.kind]
            key = action.microbatch
            steps.append(Step(action, tuple([(c, key) for c in takes]), tuple([(c, key) for c in gives])))
        actors.append(tuple(steps))
    return Network(tuple(actors), tuple(channels))


def _ends(schedule: Schedule) -> Iterator[tuple[str, int, int]]:
    """The kind, the sending and the receiving stage of each channel."""
    stages = range(schedule.stages)
    split = {a.stage for row in schedule.rows for a in row if a.kind == "W"}
    back = {a.stage for row in schedule.rows for a in row if a.kind in "BI"}
    yield from (("activation", s, s + 1) for s in stages[:-1])
    for s in stages:
        if s in back:
            yield "stash", s, s
        if s in split:
            yield "weight_stash", s, s
    yield from (("gradient", s, s - 1) for s in stages[1:] if s in back and s - 1 in back)


def _sides(number: Mapping[tuple[str, int], int], s: int, kind: str) -> tuple[list[int], list[int]]:
    """The existing channels that an action of stage s receives from and sends to."""
    own = ("stash", s)
    takes, gives = {
        "F": ([("activation", s - 1)], [("activation", s), own]),
        "B": ([own, ("gradient", s + 1)], [("gradient", s)]),
        "I": ([own, ("gradient", s + 1)], [("gradient", s), ("weight_stash", s)]),
        "W": ([("weight_stash", s)], []),
    }[kind]
    return [number[c] for c in takes if c in number], [number[c] for c in gives if c in number]


def _by_stage(
    argument: str, given: Mapping[str, Registers], stages: int, default: int | None
) -> dict[str, Sequence[int | None]]:
    found: dict[str, Sequence[int | None]] = {kind: [default] * stages for kind in CHANNELS}
    for kind, value in given.items():
        if kind not in CHANNELS:
            raise PipelineError(
                f'network: {argument} has "{kind}"; the channels are {", ".join(CHANNELS)}.'
                f"{did_you_mean(kind, CHANNELS)}"
            )
        if value is None or isinstance(value, int):
            found[kind] = [value] * stages
            continue
        if len(value) != stages:
            raise PipelineError(f'network: {argument}["{kind}"] has {len(value)} entries; there are {stages} stages.')
        found[kind] = value
    return found
