"""The values that each step of a pipeline's actors reads and makes, for the executable and for the memory plan.

A value that a step reads is a *resident* of its stage (an argument, a result of `load`, a sum) or part of a message. A
resident that no later step reads, and that is not a result, is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardc import compat
from shardc.compat import Var
from shardc.pipeline.cut.split_tasks import INDEX, StageTask
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.schedule.action import TaskId
from shardc.pipeline.stage_network import ChannelValues, StageNetwork, done_label
from shardc.runtime.actor import Step

Spot: TypeAlias = tuple[int, int]
"""A value in the messages that a step takes: number of the message, number of the value in it."""


@dataclass(frozen=True)
class SentValue:
    """One value of a sent message: the task's output `output`; if that is None, the value at `spot` of the received
    messages; if that is None too, a resident."""

    var: Var
    output: int | None
    spot: Spot | None


@dataclass(frozen=True)
class StepValues:
    """The values that a step reads and makes.

    Attributes:
      task: the task that it runs. It reads the residents of the task's stage.
      inputs: the variable of each input of the task and, if it comes in a message, its spot there.
      incoming: values of messages that become residents before the task runs.
      kept: (resident, output, source) for each resident that it replaces: the new value is this output of the task, or,
        if that is None, the value of the resident `source`.
      gives: the values of each message that it sends.
      drops: residents that nobody reads any more after the step.
    """

    task: StageTask
    inputs: tuple[tuple[Var, Spot | None], ...]
    incoming: tuple[tuple[Var, Spot], ...]
    kept: tuple[tuple[Var, int | None, Var], ...]
    gives: tuple[tuple[SentValue, ...], ...]
    drops: tuple[Var, ...] = ()

    def touched(self) -> set[Var]:
        """The residents that it reads or makes."""
        read = {v for v, spot in self.inputs if spot is None and v is not INDEX}
        read |= {g.var for give in self.gives for g in give if g.output is None and g.spot is None}
        read |= {v for v, _ in self.incoming}
        read |= {made for made, _, _ in self.kept}
        return read | {source for _, output, source in self.kept if output is None}


def step_values(built: StageNetwork, stages: Sequence[Stage]) -> Mapping[Hashable, StepValues]:
    """The values of every step that runs a task, by label."""
    found: dict[Hashable, StepValues] = {}
    alike: dict[tuple[TaskId, tuple[int, ...], tuple[int, ...]], StepValues] = {}
    for rank, row in enumerate(built.network.actors):
        last: dict[tuple[int, Var], Hashable] = {}
        for step in row:
            label, task = step.label, built.task(step.label)
            if task is not None:
                key = task.id, tuple(c for c, _ in step.takes), tuple(c for c, _ in step.gives)
                if key not in alike:
                    alike[key] = _values(built.channel_values, step, task)
                found[label] = alike[key]
                last |= dict.fromkeys(((task.id.stage, v) for v in alike[key].touched()), label)
            elif label == done_label(rank):  # it waits for the loop's results
                last |= dict.fromkeys(_sums_on(stages, rank), label)
        found |= {s: replace(found[s], drops=v) for s, v in _drops(last, stages).items() if s in found}
    return found


def _sums_on(stages: Sequence[Stage], rank: int) -> list[tuple[int, Var]]:
    """The residents that the loops of a rank's stages make, each with its stage."""
    tasks = (t for s in stages if s.rank == rank for t in s.tasks.all.values() if t.id.in_loop)
    return [(t.id.stage, v) for t in tasks for v, _ in t.kept]


def _drops(last: Mapping[tuple[int, Var], Hashable], stages: Sequence[Stage]) -> dict[Hashable, tuple[Var, ...]]:
    """The residents that each step drops, given the last step of each resident."""
    drops: dict[Hashable, list[Var]] = {}
    for (stage, v), label in last.items():
        if v not in compat.variables(stages[stage].tasks.results):
            drops.setdefault(label, []).append(v)
    return {label: tuple(names) for label, names in drops.items()}


def _values(channel_values: Sequence[ChannelValues | None], step: Step, task: StageTask) -> StepValues:
    where: dict[Var, Spot] = {}
    for i, (channel, _) in enumerate(step.takes):
        carried = channel_values[channel]
        for j, v in enumerate(carried.taken if carried is not None else ()):
            where[v] = i, j
    outputs = {v: i for i, v in enumerate(task.outputs)}
    arrive = not task.id.in_loop  # after the loop, received values become residents
    return StepValues(
        task,
        tuple((v, where.get(v)) for v in task.inputs),
        tuple((v, where[v]) for _, v in task.received if v in where and arrive),
        tuple((resident, outputs.get(v), v) for resident, v in task.kept),
        tuple(
            tuple(SentValue(v, outputs.get(v), where.get(v)) for v in (carried.given if carried is not None else ()))
            for carried in (channel_values[c] for c, _ in step.gives)
        ),
    )
