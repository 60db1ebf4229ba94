"""The network of a planned pipeline: the steps of its actors, and channels for messages and stashes.

    load of each stage | the schedule's actions | done -> go | updates by level

Nothing is overwritten before every stage's last backward has ended: if arguments are donated, each actor sends `done`
when its sums are there, and updates begin after `go`, when all actors have done so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardc.compat import Var
from shardc.ir.walk import local_bytes
from shardc.machine.mesh import MeshView
from shardc.pipeline.cut.cut_loop import backward_position, forward_position, weight_position
from shardc.pipeline.cut.cut_stages import Cut
from shardc.pipeline.cut.split_tasks import StageTask, StageTasks
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.schedule import Schedule
from shardc.runtime.actor import Channel, Message, Network, Step
from shardc.sbp.placement import Placement

ONCE: Final = 0
"""The key of a message that is sent once per call."""


@dataclass(frozen=True, order=True)
class Once:
    """The label of a step that runs once in a call: `load 2`, `update 0.1`, `done 1`, `go`."""

    kind: str
    stage: int
    level: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}" + (f".{self.level}" if self.level else "")


@dataclass(frozen=True)
class ChannelValues:
    """The values that a channel carries: their variables on the sending and on the receiving stage."""

    source: int
    target: int
    given: tuple[Var, ...]
    taken: tuple[Var, ...]


@dataclass(frozen=True)
class StageNetwork:
    """A network whose channels carry the values of tasks.

    Attributes:
      network: for the simulator and the executor.
      channel_values: the values of each channel; None: a token without a value.
      tasks: the stage and the task of each label.
      rank_of: the actor of each stage.
      placements: the placements of each stage's values.
    """

    network: Network
    channel_values: tuple[ChannelValues | None, ...]
    tasks: Mapping[Action | Once, tuple[int, StageTask]]
    rank_of: tuple[int, ...]
    placements: tuple[Mapping[Var, Placement], ...]


def position_of(action: Action, stages: int) -> int:
    """The position of an action's task."""
    match action.kind:
        case "F":
            return forward_position(action.stage)
        case "W":
            return weight_position(action.stage, stages)
        case _:
            return backward_position(action.stage, stages)


class _Builder:
    def __init__(
        self, cut: Cut, tasks: Sequence[StageTasks], placements: Sequence[Mapping[Var, Placement]],
        views: Sequence[MeshView], schedule: Schedule, gated: bool,
    ) -> None:  # fmt: skip
        self.cut, self.tasks, self.placements, self.views = cut, tasks, placements, views
        self.schedule, self.gated = schedule, gated
        self.rank = schedule.rank_of
        self.channels: list[Channel] = []
        self.channel_values: list[ChannelValues | None] = []
        self.takes: dict[tuple[str, int, int], list[int]] = {}
        self.gives: dict[tuple[str, int, int], list[int]] = {}

    def channel(self, name: str, source: int, target: int, carried: ChannelValues | None) -> int:
        size = 0
        if carried is not None:
            at = self.placements[source]
            size = sum(local_bytes(v, at[v], self.views[source].sizes) for v in carried.given)
        ends = (self.rank[source], self.rank[target]) if carried is not None else (source, target)
        self.channels.append(Channel(name, *ends, None, size))
        self.channel_values.append(carried)
        return len(self.channels) - 1

    def join(self, name: str, giver: tuple[str, int, int], taker: tuple[str, int, int], carried: ChannelValues) -> None:
        number = self.channel(name, giver[1], taker[1], carried)
        self.gives.setdefault(giver, []).append(number)
        self.takes.setdefault(taker, []).append(number)

    def run(self) -> StageNetwork:
        sent: dict[int, Var] = {}
        received: dict[int, Var] = {}
        for t in self.tasks:
            for task in (*t.loop.values(), *t.updates.values()):
                sent |= dict(task.sent)
                received |= dict(task.received)
        groups: dict[tuple[bool, int, int, int, int], list[int]] = {}
        for c in self.cut.crossings:
            groups.setdefault((c.in_loop, c.source, c.sent, c.target, c.received), []).append(c.number)
        count = self.cut.body.stages
        for (in_loop, source, at, target, then), numbers in groups.items():
            kind = "loop" if in_loop else "update"
            word = ("activation" if at < count else "gradient") if in_loop else "update"
            carried = ChannelValues(
                source, target, tuple(sent[n] for n in numbers), tuple(received[n] for n in numbers)
            )
            self.join(f"{word} {source}->{target}", (kind, source, at), (kind, target, then), carried)
        for stage, t in enumerate(self.tasks):
            for (p, q), names in t.stash.items():
                word = "weight stash" if q >= 2 * count else "stash"
                self.join(
                    f"{word} {stage}", ("loop", stage, p), ("loop", stage, q), ChannelValues(stage, stage, names, names)
                )
        return self.steps()

    def steps(self) -> StageNetwork:
        found: dict[Action | Once, tuple[int, StageTask]] = {}
        ranks = self.schedule.ranks
        actors: list[list[Step]] = [[] for _ in range(ranks)]
        for stage, t in enumerate(self.tasks):
            label = Once("load", stage)
            found[label] = stage, t.load
            actors[self.rank[stage]].append(Step(label))
        for rank, row in enumerate(self.schedule.rows):
            for action in (part for whole in row for part in self.parts(whole)):
                position = position_of(action, self.cut.body.stages)
                actors[rank].append(self.step(action, ("loop", action.stage, position), action.microbatch))
                task = self.tasks[action.stage].loop.get(position)
                if task is not None:
                    found[action] = action.stage, task
        first: dict[int, list[Message]] = {}
        if self.gated and any(t.updates for t in self.tasks):
            done = [self.channel(f"done {r}", r, 0, None) for r in range(ranks)]
            go = [self.channel(f"go {r}", 0, r, None) for r in range(ranks)]
            for r in range(ranks):
                actors[r].append(Step(Once("done", r), (), ((done[r], ONCE),)))
                first[r] = [(go[r], ONCE)]
            actors[0].append(Step(Once("go", 0), tuple((c, ONCE) for c in done), tuple((c, ONCE) for c in go)))
        updates = sorted((level, stage) for stage, t in enumerate(self.tasks) for level in t.updates)
        for level, stage in updates:
            label = Once("update", stage, level)
            found[label] = stage, self.tasks[stage].updates[level]
            step = self.step(label, ("update", stage, level), ONCE)
            waits = tuple(first.pop(self.rank[stage], ()))
            actors[self.rank[stage]].append(Step(label, (*step.takes, *waits), step.gives))
        for r, waits in first.items():  # an actor without updates
            actors[r].append(Step(Once("idle", r), tuple(waits)))
        net = Network(tuple(map(tuple, actors)), tuple(self.channels))
        return StageNetwork(net, tuple(self.channel_values), found, tuple(self.rank), tuple(self.placements))

    def parts(self, action: Action) -> list[Action]:
        """The action itself; or, for a full backward of a stage with two backward tasks, an action for each of them."""
        weight = weight_position(action.stage, self.cut.body.stages)
        if action.kind != "B" or weight not in self.tasks[action.stage].loop:
            return [action]
        return [action._replace(kind="I"), action._replace(kind="W")]

    def step(self, label: Action | Once, place: tuple[str, int, int], key: int) -> Step:
        return Step(
            label,
            tuple((c, key) for c in self.takes.get(place, ())),
            tuple((c, key) for c in self.gives.get(place, ())),
        )


def stage_network(
    cut: Cut, tasks: Sequence[StageTasks], placements: Sequence[Mapping[Var, Placement]], views: Sequence[MeshView],
    schedule: Schedule, gated: bool,
) -> StageNetwork:  # fmt: skip
    """The network of the tasks of all stages under a schedule.

    Args:
      cut, tasks: the stages, and the tasks of each.
      placements, views: for each stage the placements of its values, and its mesh.
      schedule: the order of each actor's actions.
      gated: whether updates wait for every stage's last backward.
    """
    return _Builder(cut, tasks, placements, views, schedule, gated).run()
