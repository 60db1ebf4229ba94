"""The plan of a pipeline as data: stages, each planned on its own mesh, under one schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from shardc.arrays.place import Place
from shardc.ir.collective import Collective, known_bytes
from shardc.ir.program import Program
from shardc.ir.walk import itemsize_of, short_aval
from shardc.machine.mesh import AnyMesh, MeshView, border, view
from shardc.machine.puts import HERE
from shardc.machine.topology import DeviceLink
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.plan_cost import Time
from shardc.passes.estimate.sizes import piece_bytes
from shardc.pipeline.cut.cut_stages import Cut
from shardc.pipeline.cut.split_tasks import StageTask
from shardc.pipeline.cut_search.split_scans import Piece, Pieces
from shardc.pipeline.memory import SimulatedCall, working_bytes
from shardc.pipeline.options import Pipeline, PipelineRequest
from shardc.pipeline.place_stages import Stage, transfer_ends
from shardc.pipeline.rank_memory import PipelineMemory
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Timeline, simulate
from shardc.pipeline.stage_network import ChannelValues, StageNetwork
from shardc.plan.borders import Border, match_donated
from shardc.plan.digest import digest_of
from shardc.plan.plan import FoundSignatures, Gathered, PlacedProgram, SpmdPlan, Unlimited
from shardc.plan.request import Argument
from shardc.runtime.actor import Channel, Network
from shardc.sbp.placement import Pin, Placement, local_shape


@dataclass(frozen=True)
class Transfer:
    """A transfer from one stage to another.

    Attributes:
      source, target: stages.
      bytes: that each device of the source sends, over all executions in one call.
      count: executions in one call.
      line: of user code that made the value; for an argument its path.
      value: dtype and logical shape.
      seconds: of one execution, on the border.
      border_bytes: that cross the border in one call, of all devices together; 0 between stages of one rank.
      device_bytes: of these, what the busiest device sends or receives.
      before, after: bytes that each device of the source, and of the target, sends within its mesh in one call: what is
        partial is reduced before it crosses, what is needed everywhere may be gathered after it.
      carrier: `here`, within a process or where no devices are known; between processes `put`, from device to device by
        `jax.device_put`, or `links`, as bytes.
    """

    source: int
    target: int
    bytes: int
    count: int
    line: str
    value: str
    seconds: float
    border_bytes: int
    device_bytes: int
    before: int
    after: int
    carrier: str


@dataclass(frozen=True, eq=False)
class MpmdPlan:
    """The plan of a pipeline, as the search gives it: `shardc.plans.PipelinePlan` shows it to people.

    Attributes:
      request: what was asked; its program as it was traced, but for what is recomputed for speed.
      pieces: the program that is cut: what scans over layers read or make stacked is in pieces, one for each stage;
        and what is known of the arguments and results of that program.
      stages: what each computes, and its own plan.
      cut: the programs of the stages, and what crosses between them.
      schedule: the order of every actor's actions; prints and parses as a grid.
      built: the network of the actors, their channels and registers.
      squeezed: the ranks without memory for as many registers as the fastest call takes.
      unlimited: the plan with each stage wherever is cheapest, if a rank has no room for that; its `peak` is that of
        the rank that is fullest.
    """

    request: PipelineRequest
    pieces: Pieces
    stages: tuple[Stage, ...]
    cut: Cut
    schedule: Schedule
    built: StageNetwork
    squeezed: tuple[int, ...] = ()
    unlimited: Unlimited | None = None
    gap: float | None = None

    @cached_property
    def digest(self) -> str:
        """A digest of the tasks of all stages, their schedule and their channels, the same in every process."""
        tasks = [t for s in self.stages for t in s.tasks.all.values()]
        channels = [(c.name, c.source, c.target, c.registers, c.bytes) for c in self.network.channels]
        parts = str(self.schedule), str(self.homes), str(channels)
        return digest_of([t.plan for t in tasks if t.plan is not None], *parts)

    @property
    def parts(self) -> tuple[tuple[int, SpmdPlan], ...]:
        return tuple((s.number, s.plan) for s in self.stages)

    @property
    def program(self) -> Program:
        return self.request.program

    @property
    def pipeline(self) -> Pipeline:
        return self.request.pipeline

    @property
    def whole_mesh(self) -> AnyMesh:
        """The mesh of all ranks together, as it was given."""
        return self.request.whole

    @cached_property
    def mesh(self) -> MeshView:
        return view(self.request.whole)

    @property
    def network(self) -> Network:
        """The actors and their channels; a channel has `name`, `registers`, and the `bytes` of a message."""
        return self.built.network

    @property
    def homes(self) -> Sequence[int]:
        """The stage on which each argument, or piece of one, lives between calls."""
        return self.cut.homes

    @cached_property
    def in_borders(self) -> list[Border]:
        """The arguments where they live; of one that is stacked over the stages, each piece."""
        program, at = self.pieces.program, dict[int, Placement]()
        for stage in self.stages:
            for i, placement in zip(stage.program.arguments, stage.plan.inputs, strict=True):
                at.setdefault(i, placement)
        known = zip(
            program.in_paths, program.in_avals, arguments_of(self.request, self.pieces), self.homes, strict=True
        )
        return [
            Border(path, aval, at.get(i, Placement()), argument, self.stages[home].mesh, home)
            for i, (path, aval, argument, home) in enumerate(known)
        ]

    @cached_property
    def out_borders(self) -> list[Border]:
        """The results where they are made; of one that is stacked over the stages, each piece."""
        program, given = self.pieces.program, self.in_borders
        ties = match_donated(program, [b.known for b in given])
        at = {
            i: (placement, stage)
            for stage in self.stages
            for i, placement in zip(stage.program.results, stage.plan.outputs, strict=True)
        }
        made = zip(program.out_paths, program.out_avals, results_of(self.request, self.pieces), ties, strict=True)
        found: list[Border] = []
        for i, (path, aval, pin, tie) in enumerate(made):
            placement, stage = at[i]
            reuses = tie is not None and given[tie].placement == placement
            found.append(Border(path, aval, placement, Argument(pin), stage.mesh, stage.number, reuses))
        return found

    @cached_property
    def inputs(self) -> tuple[Placement, ...]:
        """Placements of the arguments; of one in pieces that of the first piece."""
        return _of_first(self.in_borders, self.pieces.inputs)

    @cached_property
    def outputs(self) -> tuple[Placement, ...]:
        """Placements of the results; of one in pieces that of the first piece."""
        return _of_first(self.out_borders, self.pieces.outputs)

    @property
    def whole_inputs(self) -> tuple[Placement, ...]:
        """`inputs`: no stage has axes that are cut."""
        return self.inputs

    @property
    def whole_outputs(self) -> tuple[Placement, ...]:
        """`outputs`."""
        return self.outputs

    @cached_property
    def _stage_collectives(self) -> list[tuple[int, Collective]]:
        """The collectives in the order of the stages, each with its stage; over all executions in one call."""
        return [
            (stage.number, replace(c, bytes=c.bytes * times, count=c.count * times))
            for stage in self.stages
            for task, times in self._runs(stage)
            for c in task.collectives
        ]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives on the stages' own meshes, in the order of the stages; over all executions in one call."""
        return tuple(c for _, c in self._stage_collectives)

    @property
    def moves(self) -> list[tuple[int, Collective]]:
        return [(stage, c) for stage, c in self._stage_collectives if c.bytes]

    def _runs(self, stage: Stage) -> list[tuple[PlacedProgram, int]]:
        """The plans of a stage's tasks, and how often each runs in one call."""
        times = self.cut.loop.length
        tasks = sorted(stage.tasks.all.values(), key=lambda task: task.id.in_loop)
        return [(task.plan, times if task.id.in_loop else 1) for task in tasks if task.plan is not None]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers from stage to stage, arguments that several stages use included: `source`, `target`, `bytes`,
        `count`, `line`, `value`."""
        found: list[Transfer] = []
        for i, b in enumerate(self.in_borders):
            for s in self.stages:
                if i in s.program.arguments and s.number != b.stage:
                    at = s.plan.inputs[s.program.arguments.index(i)]
                    ends = self._place(b.stage, b.aval, b.placement), self._place(s.number, b.aval, at)
                    found.append(self._transfer(b.stage, s.number, *ends, 1, f"argument {b.path}"))
        placed = {(n, sent): p for stage in self.stages for n, p, sent in transfer_ends(stage.plan)}
        for c in self.cut.crossings:
            source, target = c.sent.stage, c.received.stage
            given, taken = (self._place(n, c.aval, placed[c.number, n == source]) for n in (source, target))
            count = self.cut.loop.length if c.sent.in_loop else 1
            found.append(self._transfer(source, target, given, taken, count, c.line))
        return tuple(found)

    def _transfer(self, source: int, target: int, given: Place, taken: Place, count: int, line: str) -> Transfer:
        link, value = self.border(source, target), short_aval(given.aval)
        size = priced = math.prod(local_shape(given.shape, given.at, given.sizes)) * itemsize_of(given.aval)
        crosses, carrier = (0, 0, 0, 0), HERE
        if self.stages[source].rank != self.stages[target].rank:
            way = given.way_to(taken, link)
            crosses = way.border_bytes, way.device_bytes, way.before.bytes, way.after.bytes
            carrier = given.carrier_to(taken, way)
            priced = size if self.pipeline.meshes is None else way.device_bytes
        seconds = link.latency + priced / link.bandwidth
        border, device, before, after = (n * count for n in crosses)
        return Transfer(
            source, target, size * count, count, line, value, seconds, border, device, before, after, carrier
        )  # fmt: skip

    def _place(self, stage: int, aval: Any, placement: Placement) -> Place:
        return Place(aval, self.request.meshes[self.stages[stage].rank], placement)

    def ends(self, carried: ChannelValues) -> list[tuple[Place, Place]]:
        """Where each value of a channel is given, and where it is taken."""
        sides = [(carried.source, carried.given), (carried.target, carried.taken)]
        given, taken = (
            [self._place(n, v.aval, self.stages[n].tasks.placements[v]) for v in values] for n, values in sides
        )
        return list(zip(given, taken, strict=True))

    def border(self, source: int, target: int) -> DeviceLink:
        """The link of one device between the meshes of two stages."""
        if self.pipeline.meshes is None:
            return self.mesh.topology.link_along(self.pipeline.axis)
        return border(*(self.request.meshes[self.stages[n].rank] for n in (source, target)))

    @cached_property
    def bytes_per_device(self) -> float:
        """Bytes that a device sends in one call, in collectives and transfers: those of the stage that sends most; nan
        if a part is unknown."""
        if not all(c.is_known for c in self.collectives):
            return math.nan
        return self.known_bytes

    @cached_property
    def known_bytes(self) -> int:
        """Those that are known."""
        return max(
            sum(known_bytes(plan.collectives) * times for plan, times in self._runs(s))
            + sum(t.bytes + t.before for t in self.transfers if t.source == s.number)
            + sum(t.after for t in self.transfers if t.target == s.number)
            for s in self.stages
        )

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """Operations that are replicated, because they have no sharding rule."""
        return tuple(g for s in self.stages for g in s.plan.gathered)

    @cached_property
    def found(self) -> tuple[FoundSignatures, ...]:
        """Operations without a sharding rule that are split by automatically found signatures."""
        return tuple(f for s in self.stages for f in s.plan.found)

    @cached_property
    def memory(self) -> PipelineMemory:
        """Bytes per device of each rank over the call: `.ranks`, each with `peak`, `peak_label` (the step at the peak),
        `peak_parts`, `holdings`. The totals are those of the fullest rank."""
        return self.memory_with(working_bytes)

    def memory_with(self, working: Callable[[StageTask], int]) -> PipelineMemory:
        """The same, with `working` bytes of temporaries inside each task."""
        call = SimulatedCall(self.built, self.stages, self.homes, self.simulate(), self.link, working)
        return call.memory(self.capacities)

    def register_bytes(self, channel: int) -> int:
        """Bytes that a device of the receiving stage allots for one message of a channel."""
        carried = self.built.channel_values[channel]
        if carried is None:
            return 0
        target = self.stages[carried.target]
        placements, mesh = target.tasks.placements, target.mesh
        backend = backend_of(mesh.topology.backend)
        return sum(piece_bytes(v.aval, placements[v], mesh.sizes, backend) for v in carried.taken)

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Bytes that a device of each rank has."""
        if self.pipeline.meshes is not None:
            return tuple(view(m).topology.hbm for m in self.pipeline.meshes)
        return (self.mesh.topology.hbm,) * self.schedule.ranks

    # -- time

    def cost(self, label: Any) -> float:
        """Seconds that a step takes."""
        task = self.built.task(label)
        return 0.0 if task is None else task_seconds(task.plan)

    def link(self, channel: Channel) -> tuple[float, float]:
        """Latency, and seconds that a message of a channel keeps its link busy."""
        if self.pipeline.meshes is None:  # a value is alike at both ends
            link = self.mesh.topology.link_along(self.pipeline.axis)
            return link.latency, channel.bytes / link.bandwidth
        return self._links[_key(channel)]

    @cached_property
    def _links(self) -> dict[Any, tuple[float, float]]:
        """Of the channels between unlike meshes what `link` says, by what they have in any number of registers."""
        carried = zip(self.network.channels, self.built.channel_values, strict=True)
        return {_key(c): self._link(c, values) for c, values in carried if c.source != c.target}

    def _link(self, channel: Channel, carried: ChannelValues | None) -> tuple[float, float]:
        if carried is None:
            return border(*(self.request.meshes[r] for r in (channel.source, channel.target))).latency, 0.0
        link = self.border(carried.source, carried.target)
        ways = [given.way_to(taken, link) for given, taken in self.ends(carried)]
        boxing = sum(w.before.seconds + w.after.seconds for w in ways)
        return link.latency + boxing, sum(w.device_bytes for w in ways) / link.bandwidth

    def simulate(self) -> Timeline:
        """The call under virtual time: `makespan`, `bubble`, `bubble_per_rank`, `busy`, `spans`, `peaks` (most
        registers in use), `messages`."""
        return self._timeline

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.network, self.cost, self.link)

    @cached_property
    def seconds(self) -> float:
        """Time of one call."""
        return self.simulate().makespan

    @cached_property
    def compute_seconds(self) -> float:
        """Time that the busiest rank computes in one call."""
        return self.time.computing

    @property
    def time(self) -> Time:
        """Seconds of one call by kind (computing, waiting, ...) on the rank that waits least."""
        return min(self.rank_times, key=lambda t: t.wait)

    @cached_property
    def rank_times(self) -> tuple[Time, ...]:
        """Seconds of one call by kind (computing, waiting, ...) on each rank. Each adds up to `seconds`."""
        timeline = self.simulate()
        plans = {id: t.plan for id, t in self.built.tasks.items() if t.plan is not None}

        def spent(labels: Sequence[Any], busy: float) -> Time:
            runs = Counter(task.id for task in map(self.built.task, labels) if task is not None)
            each = (
                (plan.time + Time(launch=task_seconds(plan) - plan.seconds)) * runs[id] for id, plan in plans.items()
            )
            return sum(each, Time(wait=timeline.makespan - busy))

        return tuple(map(spent, timeline.order(), timeline.busy))

    def with_registers(self, registers: Sequence[int | None]) -> MpmdPlan:
        """This plan with these numbers of registers for its channels."""
        return replace(self, built=replace(self.built, network=self.network.with_registers(registers)))


PlanView: TypeAlias = SpmdPlan | MpmdPlan
"""A plan of any kind, as reports and warnings read it: one SPMD program, or the stages of a pipeline. Both have

- `request`, what was asked; `program`, the whole program; `mesh`, all devices;
- `parts`: the plan of each SPMD program, with the number of its stage;
- `inputs`, `outputs`: placements of the arguments and results of the whole program; `in_borders`, `out_borders`: these
  where they live between calls, several for one that is stacked over stages;
- `moves`: the collectives that send bytes, each with the number of its stage; `bytes_per_device`, `gathered`, `found`;
- `seconds`, `time`, `memory`, `gap`, `unlimited`.
"""


def arguments_of(request: PipelineRequest, pieces: Pieces) -> tuple[Argument, ...]:
    """The inputs of a program in pieces, as they are known before planning."""
    given = request.arguments
    return tuple(given[p.number] if p.number < len(given) else Argument() for p in pieces.inputs)


def results_of(request: PipelineRequest, pieces: Pieces) -> tuple[Pin | None, ...]:
    """The pins of the results of a program in pieces."""
    return tuple(request.results[p.number] for p in pieces.outputs)


def _of_first(borders: Sequence[Border], pieces: Sequence[Piece]) -> tuple[Placement, ...]:
    """The placement of the first piece of each value."""
    found: dict[int, Placement] = {}
    for piece, b in zip(pieces, borders, strict=True):
        found.setdefault(piece.number, b.placement)
    return tuple(found.values())


def _key(channel: Channel) -> tuple[Any, ...]:
    return channel.name, channel.source, channel.target, channel.bytes


def task_seconds(plan: PlacedProgram | None) -> float:
    """Seconds of one execution of a task with this plan."""
    return 0.0 if plan is None else max(plan.seconds, plan.mesh.topology.dispatch)
