"""The plan of a pipeline: stages, each planned on its own mesh, under one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from shardc import compat
from shardc.auto_stages import Wanted, mark_automatically
from shardc.compat import Eqn, Var
from shardc.errors import PipelineError
from shardc.mesh import AnyMesh, MeshView, view
from shardc.passes.collective import Collective
from shardc.passes.cut_stages import Cut, StageProgram, cut_stages
from shardc.passes.memory import Memory
from shardc.passes.plan import Argument, Gathered, Plan, make_plan, match_donated
from shardc.passes.problem import itemsize_of
from shardc.passes.program import Program
from shardc.passes.split_tasks import StageTasks, split_tasks
from shardc.passes.tally import short_aval
from shardc.passes.transfer import is_transfer, transfer_number
from shardc.pipeline.action import Action
from shardc.pipeline.costs import Costs
from shardc.pipeline.credits import auto_credits
from shardc.pipeline.schedule import Schedule
from shardc.pipeline.schedules import METHODS, make_schedule
from shardc.pipeline.schedules.method import ranks_of
from shardc.pipeline.simulate import Timeline, simulate
from shardc.runtime.actor import Channel, Network
from shardc.runtime.deadlock import find_deadlock
from shardc.sbp.placement import Pin, Placement, local_shape
from shardc.stage_network import StageNetwork, position_of, stage_network

HOST_SECONDS = 5e-5
"""What the host needs to launch a task: the least that a task costs."""


@dataclass(frozen=True)
class Pipeline:
    """How a function is run as a pipeline over microbatches.

    Attributes:
      axis: the mesh axis whose positions are the pipeline's ranks. It never stands in a placement.
      schedule: a name (`gpipe`, `1f1b`, `zb-h1`, ...), `"auto"`, a grid as text, a Schedule, or a function of
        (ranks, microbatches, chunks) that gives one.
      chunks: stages for each rank; None: what the schedule wants.
      credits: registers of each channel: `"auto"`, the fewest that keep the schedule's best time, or a number for all.
      recompute: `"none"`, `"full"`: each stage keeps its input only and computes its forward again in its backward;
        a sequence of these, one for each stage; or `"auto"`: full where a stage would not fit.
      stages: `"marked"`: at `shardc.stage_boundary`. `"auto"`: where a call is fastest and each stage fits its memory,
        by the cost model; the function must have no `shardc.stage_boundary` then.
      meshes: for ranks of unequal size their meshes, instead of `axis`.
    """

    axis: str = "pipe"
    schedule: Any = "1f1b"
    chunks: int | None = None
    credits: Any = "auto"
    recompute: Any = "auto"
    stages: str = "marked"
    meshes: Sequence[AnyMesh] | None = None


@dataclass(frozen=True)
class Transfer:
    """What goes from one stage to another.

    Attributes:
      source, target: stages.
      bytes: that each device of the source sends, over all executions in one call.
      count: executions in one call.
      line: of user code that made the value; for an argument its path.
      value: dtype and logical shape.
    """

    source: int
    target: int
    bytes: int
    count: int
    line: str
    value: str


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
      number, rank: of the stage, and of the actor that runs it.
      mesh: what the planner knows of its mesh.
      plan: of the stage's whole program.
      tasks: the parts of it that run one by one.
      program: what the stage computes, and which arguments and results are its own.
    """

    number: int
    rank: int
    mesh: MeshView
    plan: Plan
    tasks: StageTasks
    program: StageProgram


class PipelinePlan:
    """A program placed on the stages of a pipeline. Needs no devices. Like a `Plan`, and besides:

    Attributes:
      stages: what each computes, and its own plan.
      schedule: the order of every actor's actions; prints and parses as a grid.
      network: the actors and their channels, with registers.
      transfers: what goes from stage to stage.
      homes: the stage on which each argument lives between calls.
    """

    gap = None

    def __init__(
        self, program: Program, mesh: AnyMesh, pipeline: Pipeline, stages: Sequence[Stage], cut: Cut,
        schedule: Schedule, built: StageNetwork, arguments: Sequence[Argument], results: Sequence[Pin | None],
        notes: Sequence[str],
    ) -> None:  # fmt: skip
        self.program, self.pipeline, self.stages, self.cut = program, pipeline, tuple(stages), cut
        self.mesh = view(mesh)
        self.schedule, self.built, self.network = schedule, built, built.network
        self.arguments, self.results, self.notes = tuple(arguments), tuple(results), tuple(notes)
        self.homes = cut.homes
        self.ties = tuple(match_donated(program, arguments))
        self.inputs = tuple(self._inputs())
        self.outputs = tuple(self._outputs())

    def _inputs(self) -> list[Placement]:
        at: dict[int, Placement] = {}
        for stage in self.stages:
            for i, p in zip(stage.program.arguments, stage.plan.inputs, strict=True):
                at.setdefault(i, p)
        return [at.get(i, Placement()) for i in range(len(self.program.in_paths))]

    def _outputs(self) -> list[Placement]:
        at = {
            i: p
            for stage in self.stages
            for i, p in zip(stage.program.results, stage.plan.outputs, strict=True)
        }
        return [at[i] for i in range(len(self.program.out_paths))]

    @cached_property
    def result_stages(self) -> tuple[int, ...]:
        """The stage that each result lives on."""
        at = {i: stage.number for stage in self.stages for i in stage.program.results}
        return tuple(at[i] for i in range(len(self.program.out_paths)))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """What moves on the stages' own meshes, in the order of the stages; over all executions in one call."""
        found: list[Collective] = []
        for stage in self.stages:
            for task, times in self._runs(stage):
                found += [
                    replace(c, bytes=c.bytes * times, count=c.count * times) for c in task.collectives
                ]
        return tuple(found)

    def _runs(self, stage: Stage) -> list[tuple[Plan, int]]:
        """The plans of a stage's tasks, and how often each runs in one call."""
        t = stage.tasks
        once = [t.load, *t.updates.values()]
        runs = [(task.plan, 1) for task in once] + [(task.plan, self.cut.loop.microbatches) for task in t.loop.values()]
        return [(plan, times) for plan, times in runs if plan is not None]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What goes from stage to stage, arguments that several stages use included."""
        found: list[Transfer] = []
        for i, path in enumerate(self.program.in_paths):
            for stage in self.stages:
                if i in stage.program.arguments and stage.number != self.homes[i]:
                    aval = self.program.in_avals[i]
                    size = _piece(aval, self.inputs[i], self.stages[self.homes[i]].mesh)
                    found.append(Transfer(self.homes[i], stage.number, size, 1, f"argument {path}", short_aval(aval)))
        placed = self._crossing_placements()
        for c in self.cut.crossings:
            count = self.cut.loop.microbatches if c.in_loop else 1
            size = _piece(c.aval, placed[c.number], self.stages[c.source].mesh) * count
            found.append(Transfer(c.source, c.target, size, count, c.line, short_aval(c.aval)))
        return tuple(found)

    def _crossing_placements(self) -> dict[int, Placement]:
        return {
            n: p for stage in self.stages for n, p, sent in _ends(stage.plan) if sent
        }

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes that a device sends in one call, in collectives and transfers: those of the stage that sends most."""
        return max(
            sum(c.bytes * times for plan, times in self._runs(s) for c in plan.collectives)
            + sum(t.bytes for t in self.transfers if t.source == s.number)
            for s in self.stages
        )

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """Operations without a rule that cost a gather or a repeated computation."""
        return tuple(g for s in self.stages for g in s.plan.gathered)

    @cached_property
    def in_placements(self) -> Any:
        """A placement for each leaf of the arguments: an attribute, and an item, for each argument."""
        return self._in_tree

    @cached_property
    def out_placements(self) -> Any:
        """A placement for each leaf of the result."""
        return jax.tree.unflatten(self.program.out_tree, self.outputs)

    _in_tree: Any = None

    @cached_property
    def memory(self) -> Memory:
        """Bytes per device of the stage that needs most."""
        return max((s.plan.memory for s in self.stages), key=lambda m: m.peak)

    # -- time

    def cost(self, label: Any) -> float:
        """Seconds that a step takes."""
        found = self.built.tasks.get(label)
        plan = None if found is None else found[1].plan
        return 0.0 if plan is None else max(plan.seconds, HOST_SECONDS)

    def link(self, channel: Channel) -> tuple[float, float]:
        """Latency, and seconds that a message of a channel keeps its link busy."""
        link = self.mesh.topology.link
        return link.latency, channel.bytes / link.bandwidth

    def simulate(self) -> Timeline:
        """The call under virtual time: makespan, bubbles, registers in use."""
        return simulate(self.network, self.cost, self.link)

    @cached_property
    def seconds(self) -> float:
        """Time of one call."""
        return self.simulate().makespan

    @cached_property
    def compute_seconds(self) -> float:
        """Time that the busiest rank computes in one call."""
        return max(self.simulate().busy)

    def explain(self) -> str:
        """The stages, what each computes and where its values live, what moves, the schedule and its bubbles."""
        from shardc.report.explain_pipeline import explain_pipeline  # noqa: PLC0415  # reports know plans

        return explain_pipeline(self)

    def __repr__(self) -> str:
        return (
            f"PipelinePlan({self.program.name} on {self.mesh}: {len(self.stages)} stages, {self.schedule.name}, "
            f"{len(self.transfers)} transfers, {self.bytes_per_device} bytes per device, {self.seconds:.3g} s)"
        )


def _piece(aval: Any, placement: Placement, mesh: MeshView) -> int:
    size = itemsize_of(aval)
    for n in local_shape(aval.shape, placement, mesh.sizes):
        size *= n
    return size


def make_pipeline_plan(
    program: Program, mesh: AnyMesh, meshes: Sequence[AnyMesh], arguments: Sequence[Argument],
    results: Sequence[Pin | None], pipeline: Pipeline, where: str, notes: Sequence[str] = (),
) -> PipelinePlan:  # fmt: skip
    """Cuts, places and schedules a program.

    Args:
      program: traced with its marks.
      mesh: the whole mesh.
      meshes: of each rank.
      arguments, results: what is known of each input, and said of each result.
      pipeline: how.
      where: the function, for errors.

    Raises:
      PipelineError: the program cannot be cut so, or the schedule cannot be or can deadlock.
    """
    ranks = len(meshes)
    rank_of = _rank_of(pipeline, ranks, where)
    count = len(rank_of)
    arguments = [*arguments, *[Argument()] * (len(program.in_paths) - len(arguments))]
    if pipeline.stages == "auto":
        program = _marked(program, [view(meshes[r]) for r in rank_of], arguments, pipeline, ranks, where)
    elif pipeline.stages != "marked":
        raise PipelineError(
            f'{where}: stages={pipeline.stages!r}; write "marked", to cut at shardc.stage_boundary, or "auto".'
        )
    cut = cut_stages(program, count, where)
    stages: list[Stage] = []
    ends: dict[int, Placement] = {}
    for s, rank in zip(cut.stages, rank_of, strict=True):
        mine = view(meshes[rank])
        known = {
            c.number: Pin(ends[c.number])
            for c in cut.crossings
            if c.number in ends and view(meshes[rank_of[c.source]]).axes == view(meshes[rank_of[c.target]]).axes
        }
        plan = make_plan(
            _pinned(s.program, known), mine,
            [replace(arguments[i], donated=arguments[i].donated and cut.homes[i] == s.stage) for i in s.arguments],
            [results[i] for i in s.results],
        )  # fmt: skip
        ends |= {n: p for n, p, _ in _ends(plan)}
        stages.append(Stage(s.stage, rank, mine, plan, split_tasks(s, plan), s))
    schedule = _schedule(stages, cut, ranks, pipeline)
    stages = [replace(s, rank=schedule.rank_of[s.number]) for s in stages]
    gated = any(a.donated for a in arguments)
    built = stage_network(
        cut, [s.tasks for s in stages], [_known(s) for s in stages], [s.mesh for s in stages], schedule, gated
    )
    plan = PipelinePlan(program, mesh, pipeline, stages, cut, schedule, built, arguments, results, notes)
    network = _with_credits(plan, pipeline, where)
    deadlock = find_deadlock(network)
    if deadlock is not None:
        raise PipelineError(f"{where}: {deadlock}")
    plan.built = replace(built, network=network)
    plan.network = network
    return plan


def _marked(
    program: Program, views: Sequence[MeshView], arguments: Sequence[Argument], pipeline: Pipeline, ranks: int,
    where: str,
) -> Program:  # fmt: skip
    """The program with boundaries for stages on the meshes `views`."""
    chunks = len(views) // ranks
    if pipeline.schedule == "auto":  # the search is for the stages that this finds
        pipeline = replace(pipeline, schedule="1f1b" if chunks == 1 else "breadth-first")

    def ordered(costs: Costs, microbatches: int, backward: bool) -> Schedule:
        return _ordered(pipeline, ranks, microbatches, chunks, costs, backward)

    return mark_automatically(program, Wanted(views, arguments, ordered, HOST_SECONDS, where))


def _rank_of(pipeline: Pipeline, ranks: int, where: str) -> tuple[int, ...]:
    """The rank of each stage."""
    given = pipeline.schedule
    if isinstance(given, str) and "\n" in given:
        given = Schedule.parse(given)
    if isinstance(given, Schedule):
        if given.ranks != ranks:
            raise PipelineError(
                f"{where}: the schedule {given.name} is for {given.ranks} ranks, the pipeline has {ranks}."
            )
        return given.rank_of
    method = METHODS.get(given) if isinstance(given, str) else None
    if method is None:
        return ranks_of("loop", ranks, pipeline.chunks or 1)
    return ranks_of(method.placement, ranks, pipeline.chunks or method.chunks)


def _known(stage: Stage) -> dict[Var, Placement]:
    known = dict(stage.plan.boxed.placements)
    for task in (*stage.tasks.loop.values(), *stage.tasks.updates.values()):
        if task.plan is not None:
            known |= task.plan.boxed.placements
    return known


def _schedule(stages: Sequence[Stage], cut: Cut, ranks: int, pipeline: Pipeline) -> Schedule:
    """The schedule for the costs of the planned tasks."""
    count = len(stages)

    def cost(stage: int, kind: str) -> float:
        task = stages[stage].tasks.loop.get(position_of(Action(stage, kind, 0), count))
        return 0.0 if task is None or task.plan is None else max(task.plan.seconds, HOST_SECONDS)

    costs = [(cost(s, "F"), cost(s, "B"), cost(s, "W")) for s in range(count)]
    backward = cut.body.backward or count == 1
    return _ordered(pipeline, ranks, cut.loop.microbatches, count // ranks, Costs.read(costs), backward)


def _ordered(
    pipeline: Pipeline, ranks: int, microbatches: int, chunks: int, costs: Costs, backward: bool
) -> Schedule:
    """The schedule for tasks of given costs."""
    found = make_schedule(pipeline.schedule, ranks, microbatches, chunks, costs=costs)
    if backward:
        return found
    forward = tuple(tuple(a for a in row if a.kind == "F") for row in found.rows)
    return replace(found, rows=forward)


def _with_credits(plan: PipelinePlan, pipeline: Pipeline, where: str) -> Network:
    net = plan.network
    if pipeline.credits == "auto":
        return net.with_registers(auto_credits(net, plan.cost, plan.link))
    if isinstance(pipeline.credits, int) and not isinstance(pipeline.credits, bool) and pipeline.credits > 0:
        return net.with_registers([pipeline.credits] * len(net.channels))
    raise PipelineError(
        f'{where}: credits={pipeline.credits!r}; write "auto", or a number of registers for each channel, 1 or more.'
    )


def _pinned(program: Program, pins: dict[int, Pin]) -> Program:
    """The program with what is known of the other ends of its transfers."""

    def pin(eqn: Eqn) -> Eqn:
        if is_transfer(eqn) and transfer_number(eqn) in pins:
            return eqn.replace(params={**eqn.params, "pin": pins[transfer_number(eqn)]})
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            inner = compat.new_jaxpr(body.invars, body.outvars, [pin(e) for e in body.eqns], body)
            return eqn.replace(params={**eqn.params, "jaxpr": compat.close(inner)})
        return eqn

    jaxpr = program.jaxpr
    return replace(
        program, jaxpr=compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, [pin(e) for e in jaxpr.eqns], jaxpr)
    )


def _ends(plan: Plan) -> list[tuple[int, Placement, bool]]:
    """Number and placement of each transfer that a stage takes part in, and whether it sends it."""
    found: list[tuple[int, Placement, bool]] = []

    def look(eqns: Sequence[Eqn]) -> None:
        for eqn in eqns:
            if is_transfer(eqn):
                sent = bool(eqn.invars)
                var = eqn.invars[0] if sent else eqn.outvars[0]
                placement = Placement() if compat.is_literal(var) else plan.boxed.placements[var]
                found.append((transfer_number(eqn), placement, sent))
            elif eqn.primitive.name == "scan":
                look(eqn.params["jaxpr"].jaxpr.eqns)

    look(plan.boxed.jaxpr.eqns)
    return found

