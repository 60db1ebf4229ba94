"""The edges of a pipeline: how the values of each channel go from the mesh of one stage to that of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from shardc import compat
from shardc.compat import Var
from shardc.execute.rank_processes import RankProcesses
from shardc.execute.stage_codec import StageEdge, copies_of
from shardc.execute.stage_io import StageArray
from shardc.passes.trace.trace import settings
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.plan import MpmdPlan
from shardc.pipeline.stage_network import ChannelValues
from shardc.pipeline.step_values import StepValues
from shardc.runtime.actor import Channel
from shardc.sbp.placement import Placement


class StageEdges:
    """The edges of a pipeline on the devices of its stages.

    Args:
      plan: the plan.
      meshes: of each stage.
      places: which process runs which rank.
      steps: what each step of an actor takes and gives, by its label.
    """

    def __init__(
        self, plan: MpmdPlan, meshes: Sequence[Mesh], places: RankProcesses, steps: Mapping[Any, StepValues]
    ) -> None:
        self._plan, self._meshes, self._places, self._steps = plan, meshes, places, steps

    def between_processes(self) -> list[list[StageEdge]]:
        """The values of each channel whose ends are in different processes; none for the other channels."""
        return [
            [StageEdge(g, t, v.aval) for g, t, v in self._ends(carried)]
            if carried is not None and self._leaves_process(channel)
            else []
            for channel, carried in zip(self._plan.network.channels, self._plan.built.channel_values, strict=True)
        ]

    def _leaves_process(self, channel: Channel) -> bool:
        return self._places.of_rank[channel.source] != self._places.of_rank[channel.target]

    def _ends(self, carried: ChannelValues) -> list[tuple[StageArray, StageArray, Var]]:
        """Each value of a channel where it is given and where it is taken, and its variable there."""
        source, target = self._plan.stages[carried.source], self._plan.stages[carried.target]
        pairs = zip(carried.given, carried.taken, strict=True)
        return [(self._stage_array(source, g), self._stage_array(target, t), t) for g, t in pairs]

    def _stage_array(self, stage: Stage, v: Var) -> StageArray:
        return StageArray(tuple(v.aval.shape), _placement_of(stage, v), self._meshes[stage.number])

    def transport(self, channel: Channel) -> Callable[[Any], Any]:
        """The function that moves a message of a channel within this process, or readies it for a link."""
        number = next(i for i, c in enumerate(self._plan.network.channels) if c is channel)
        carried = self._plan.built.channel_values[number]
        if not (self._places.is_here(channel.source) and self._places.is_here(channel.target)):
            held = sorted(self._held.get(number, ()))
            return copies_of(held) if held else _stay
        if carried is None or not carried.given:
            return _stay
        ends = [(given, taken) for given, taken, _ in self._ends(carried)]
        if all(g.sharding == t.sharding and g.plain == t.plain for g, t in ends):
            return _stay
        alike = [dict(g.mesh.shape) == dict(t.mesh.shape) and g.placement == t.placement for g, t in ends]
        if all(alike):
            return compat.copies_to([t.sharding for _, t in ends])
        same = [a or (g.plain and t.plain) for a, (g, t) in zip(alike, ends, strict=True)]
        wide = bool(settings()[0])  # the actor's thread lacks this setting, and values pass through the host

        def move(values: tuple[Any, ...]) -> tuple[Any, ...]:
            with jax.enable_x64(wide):
                return tuple(
                    jax.device_put(x, t.sharding) if ok else t.enter(g.value(x))
                    for x, (g, t), ok in zip(values, ends, same, strict=True)
                )

        return move

    @cached_property
    def _held(self) -> dict[int, set[int]]:
        """For each channel the places of the values that a later step may overwrite: its sender keeps them too."""
        found: dict[int, set[int]] = {}
        for row in self._plan.network.actors:
            for step in row:
                values = self._steps.get(step.label)
                for (channel, _), give in zip(step.gives, () if values is None else values.gives, strict=False):
                    assert values is not None
                    kept = {i for _, i, _ in values.kept if i is not None}
                    found.setdefault(channel, set()).update(
                        k for k, g in enumerate(give) if g.output in kept or (g.output is None and g.place is None)
                    )
        return found


def _stay(values: Any) -> Any:
    return values


def _placement_of(stage: Stage, v: Var) -> Placement:
    for task in stage.tasks.all.values():
        if task.plan is not None and v in task.plan.boxed.placements:
            return task.plan.boxed.placements[v]
    return stage.plan.boxed.placements[v]
