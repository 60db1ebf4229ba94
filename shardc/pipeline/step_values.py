"""What each step of a pipeline's actors reads and leaves: one account for the executable and for the memory plan.

A value that a step reads is a *resident* of its stage (an argument, what `load` made, a sum) or part of a message. A
resident that no later step reads, and that is no result, is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardc import compat
from shardc.compat import Var
from shardc.pipeline.cut.split_tasks import INDEX, StageTask, StageTasks
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.stage_network import Once, Route, StageNetwork
from shardc.runtime.actor import Step

Place: TypeAlias = tuple[int, int]
"""Of a value in the messages that a step takes: which message, which of its values."""


@dataclass(frozen=True)
class Given:
    """One value of a message: output `output` of the task; or, if that is None, the value at `place` of what the step
    took; or, if that is None too, a resident."""

    var: Var
    output: int | None
    place: Place | None


@dataclass(frozen=True)
class StepValues:
    """What a step reads and leaves.

    Attributes:
      stage: whose residents it reads.
      task: what it runs.
      inputs: of each input of the task its variable and, if it comes in a message, where.
      incoming: values of messages that become residents before the task runs.
      kept: for each resident that it makes anew: the output that it becomes, or None if it is another resident's value.
      gives: the values of each message that it gives.
      drops: residents that nobody reads any more when the step has ended.
    """

    stage: int
    task: StageTask
    inputs: tuple[tuple[Var, Place | None], ...]
    incoming: tuple[tuple[Var, Place], ...]
    kept: tuple[tuple[Var, int | None, Var], ...]
    gives: tuple[tuple[Given, ...], ...]
    drops: tuple[Var, ...] = ()

    def touched(self) -> set[Var]:
        """The residents that it reads or makes."""
        read = {v for v, place in self.inputs if place is None and v is not INDEX}
        read |= {g.var for give in self.gives for g in give if g.output is None and g.place is None}
        read |= {v for v, _ in self.incoming}
        read |= {made for made, _, _ in self.kept}
        return read | {source for _, output, source in self.kept if output is None}


def step_values(built: StageNetwork, tasks: Sequence[StageTasks]) -> Mapping[Hashable, StepValues]:
    """The values of every step that runs a task, by label."""
    found: dict[Hashable, StepValues] = {}
    alike: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], StepValues] = {}
    for row in built.network.actors:
        last: dict[tuple[int, Var], Action | Once] = {}
        for step in row:
            label = step.label
            assert isinstance(label, Action | Once)
            if label in built.tasks:
                stage, task = built.tasks[label]
                key = stage, id(task), tuple(c for c, _ in step.takes), tuple(c for c, _ in step.gives)
                if key not in alike:
                    alike[key] = _values(built.routes, step, stage, task)
                found[label] = alike[key]
                last |= dict.fromkeys(((stage, v) for v in alike[key].touched()), label)
            elif label.kind == "done":  # it waits for what the loop has made
                for stage, t in enumerate(tasks):
                    if built.rank_of[stage] == label.stage:
                        last |= dict.fromkeys(((stage, v) for v in sums_of(t)), label)
        drops: dict[Action | Once, list[Var]] = {}
        for (stage, v), label in last.items():
            if v not in _results(tasks[stage]):
                drops.setdefault(label, []).append(v)
        for label, names in drops.items():
            if label in found:
                found[label] = replace(found[label], drops=tuple(names))
    return found


def sums_of(tasks: StageTasks) -> list[Var]:
    """The residents of a stage that its loop makes."""
    return [v for t in tasks.loop.values() for v, _ in t.kept]


def _results(tasks: StageTasks) -> set[Var]:
    return {a for a in tasks.results if not compat.is_literal(a)}


def _values(routes: Sequence[Route | None], step: Step, stage: int, task: StageTask) -> StepValues:
    where: dict[Var, Place] = {}
    for i, (channel, _) in enumerate(step.takes):
        route = routes[channel]
        for j, v in enumerate(route.taken if route is not None else ()):
            where[v] = i, j
    outputs = {v: i for i, v in enumerate(task.outputs)}
    arrive = isinstance(step.label, Once)  # after the loop what arrives stays
    return StepValues(
        stage,
        task,
        tuple((v, where.get(v)) for v in task.inputs),
        tuple((v, where[v]) for _, v in task.received if v in where and arrive),
        tuple((resident, outputs.get(v), v) for resident, v in task.kept),
        tuple(
            tuple(Given(v, outputs.get(v), where.get(v)) for v in (route.given if route is not None else ()))
            for route in (routes[c] for c, _ in step.gives)
        ),
    )
