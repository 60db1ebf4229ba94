"""The network of a planned pipeline: the steps of its actors, and channels for messages and stashes.

    load of each stage | the schedule's actions | done -> go | updates by level

Nothing is overwritten before every stage's last backward has ended: if arguments are donated, each actor sends `done`
when its sums are there, and updates begin after `go`, when all actors have done so.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardc.compat import Var
from shardc.ir.walk import local_bytes
from shardc.pipeline.cut.cut_stages import Cut
from shardc.pipeline.cut.split_tasks import StageTask
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.schedule.action import Action, TaskId
from shardc.pipeline.schedule.schedule import Schedule
from shardc.runtime.actor import Channel, Message, Network, Step

ONCE: Final = 0
"""The key of a message that is sent once per call."""


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

    The label of a step is the action that it runs, or the task if that runs once in a call; text if it runs neither.

    Attributes:
      network: for the simulator and the executor.
      channel_values: the values of each channel; None: a token without a value.
      tasks: the tasks that its steps run.
    """

    network: Network
    channel_values: tuple[ChannelValues | None, ...]
    tasks: Mapping[TaskId, StageTask]

    def task(self, label: Hashable) -> StageTask | None:
        """The task that a step runs; None if there is nothing to run."""
        id = label.task if isinstance(label, Action) else label
        return self.tasks.get(id) if isinstance(id, TaskId) else None


def done_label(rank: int) -> str:
    """The label of the step with which a rank says that its sums are there."""
    return f"done {rank}"


class _NetworkBuilder:
    def __init__(self, cut: Cut, stages: Sequence[Stage], schedule: Schedule, gated: bool) -> None:
        self.cut, self.stages, self.schedule, self.gated = cut, stages, schedule, gated
        self.rank = schedule.rank_of
        self.channels: list[Channel] = []
        self.channel_values: list[ChannelValues | None] = []
        self.takes: dict[TaskId, list[int]] = {}
        self.gives: dict[TaskId, list[int]] = {}

    def channel(self, name: str, source: int, target: int, carried: ChannelValues | None) -> int:
        size = 0
        if carried is not None:
            stage = self.stages[source]
            size = sum(local_bytes(v, stage.tasks.placements[v], stage.mesh.sizes) for v in carried.given)
        ends = (self.rank[source], self.rank[target]) if carried is not None else (source, target)
        self.channels.append(Channel(name, *ends, None, size))
        self.channel_values.append(carried)
        return len(self.channels) - 1

    def join(self, name: str, giver: TaskId, taker: TaskId, given: tuple[Var, ...], taken: tuple[Var, ...]) -> None:
        carried = ChannelValues(giver.stage, taker.stage, given, taken)
        number = self.channel(name, giver.stage, taker.stage, carried)
        self.gives.setdefault(giver, []).append(number)
        self.takes.setdefault(taker, []).append(number)

    def run(self) -> StageNetwork:
        sent: dict[int, Var] = {}
        received: dict[int, Var] = {}
        for s in self.stages:
            for task in s.tasks.all.values():
                sent |= dict(task.sent)
                received |= dict(task.received)
        groups: dict[tuple[TaskId, TaskId], list[int]] = {}
        for c in self.cut.crossings:
            groups.setdefault((c.sent, c.received), []).append(c.number)
        for (giver, taker), numbers in groups.items():
            word = {"F": "activation", "update": "update"}.get(giver.kind, "gradient")
            given, taken = tuple(sent[n] for n in numbers), tuple(received[n] for n in numbers)
            self.join(f"{word} {giver.stage}->{taker.stage}", giver, taker, given, taken)
        for s in self.stages:
            for (giver, taker), names in s.tasks.stash.items():
                word = "weight stash" if taker.kind == "W" else "stash"
                self.join(f"{word} {s.number}", giver, taker, names, names)
        return self.steps()

    def steps(self) -> StageNetwork:
        all_tasks = {id: task for s in self.stages for id, task in s.tasks.all.items()}
        ranks, order = self.schedule.ranks, list[TaskId]()
        actors: list[list[Step]] = [[] for _ in range(ranks)]
        for load in sorted(id for id in all_tasks if id.kind == "load"):
            order.append(load)
            actors[self.rank[load.stage]].append(Step(load))
        for rank, row in enumerate(self.schedule.rows):
            for action in (part for whole in row for part in self.parts(whole)):
                order.append(action.task)
                actors[rank].append(self.step(action, action.task, action.microbatch))
        updates = sorted(id for id in all_tasks if id.kind == "update")
        first: dict[int, list[Message]] = {}
        if self.gated and updates:
            done = [self.channel(f"done {r}", r, 0, None) for r in range(ranks)]
            go = [self.channel(f"go {r}", 0, r, None) for r in range(ranks)]
            for r in range(ranks):
                actors[r].append(Step(done_label(r), (), ((done[r], ONCE),)))
                first[r] = [(go[r], ONCE)]
            actors[0].append(Step("go 0", tuple((c, ONCE) for c in done), tuple((c, ONCE) for c in go)))
        for update in updates:
            order.append(update)
            step, rank = self.step(update, update, ONCE), self.rank[update.stage]
            actors[rank].append(replace(step, takes=(*step.takes, *first.pop(rank, ()))))
        for r, waits in first.items():  # an actor without updates
            actors[r].append(Step(f"idle {r}", tuple(waits)))
        net = Network(tuple(map(tuple, actors)), tuple(self.channels))
        found = {id: all_tasks[id] for id in order if id in all_tasks}
        return StageNetwork(net, tuple(self.channel_values), found)

    def parts(self, action: Action) -> tuple[Action, ...]:
        """The action itself; or, for a full backward of a stage with two backward tasks, an action for each of them."""
        return action.halves if TaskId(action.stage, "W") in self.stages[action.stage].tasks.all else (action,)

    def step(self, label: Action | TaskId, task: TaskId, key: int) -> Step:
        takes, gives = self.takes.get(task, ()), self.gives.get(task, ())
        return Step(label, tuple((c, key) for c in takes), tuple((c, key) for c in gives))


def stage_network(cut: Cut, stages: Sequence[Stage], schedule: Schedule, gated: bool) -> StageNetwork:
    """The network of the tasks of all stages under a schedule.

    Args:
      cut, stages: the stages.
      schedule: the order of each actor's actions.
      gated: whether updates wait for every stage's last backward.
    """
    return _NetworkBuilder(cut, stages, schedule, gated).run()
