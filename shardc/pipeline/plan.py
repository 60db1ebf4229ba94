"""The plan of a pipeline: stages, each planned on its own mesh, under one schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from shardc import compat
from shardc.compat import Var
from shardc.errors import PipelineError, StageMemoryError, all_offenders
from shardc.ir.collective import Collective
from shardc.ir.program import Program
from shardc.ir.walk import itemsize_of, short_aval
from shardc.machine.mesh import AnyMesh, MeshView, view
from shardc.passes.estimate.plan_cost import Time
from shardc.passes.recompute.choose_residuals import choose_residuals
from shardc.passes.recompute.recompute import Choice, compute_again
from shardc.pipeline.cut.cut_loop import find_loop, stage_of, weight_position
from shardc.pipeline.cut.cut_stages import Cut, cut_stages
from shardc.pipeline.cut.precompute_state import precompute_state
from shardc.pipeline.cut.split_tasks import StageTask
from shardc.pipeline.memory import pipeline_memory, working_bytes
from shardc.pipeline.place_stages import Stage, StagePlacer, transfer_ends
from shardc.pipeline.points.auto_stages import Wanted, cut_automatically
from shardc.pipeline.points.split_scans import Piece, Pieces, whole_program
from shardc.pipeline.rank_memory import PipelineMemory, too_large
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.costs import Costs
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS, Method, make_schedule
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Timeline, simulate
from shardc.pipeline.stage_network import StageNetwork, position_of, stage_network
from shardc.plan.plan import Argument, FoundSignatures, Gathered, Plan, Unlimited, match_donated
from shardc.plan.saved_json import to_json
from shardc.plan.saved_plan import record
from shardc.runtime.actor import Channel, Network
from shardc.runtime.deadlock import find_deadlock
from shardc.sbp.placement import Pin, Placement, local_shape

HOST_SECONDS = 5e-5
"""What the host needs to launch a task: the least that a task costs."""
CUTS = 5
"""How often stages are cut, if what the cuts go by turns out to be too low."""
ROOMS = 4
"""How often limits are set on the memory of stages, so that their ranks have room."""


@dataclass(frozen=True)
class Pipeline:
    """How a function is run as a pipeline over microbatches.

    Attributes:
      axis: the mesh axis whose positions are the pipeline's ranks. It never stands in a placement.
      schedule: a name (`gpipe`, `1f1b`, `zb-h1`, ...), `"auto"`, a grid as text, a Schedule, or a function of
        (ranks, microbatches, chunks, costs) that gives one.
      chunks: stages for each rank; None: what the schedule wants.
      credits: registers of each channel: `"auto"`, the fewest that keep the schedule's best time, or where memory has
        no room for these those that cost the least time; or a number for all.
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


class PipelinePlan:
    """A program placed on the stages of a pipeline. Needs no devices. Like a `Plan`, and besides:

    Attributes:
      program: as it was traced, but for what takes less when it is computed again.
      pieces: the program that is cut: what scans over layers read or make stacked is in pieces, one for each stage.
      inputs, outputs: placements of arguments and results; of one in pieces that of the first.
      stages: what each computes, and its own plan.
      schedule: the order of every actor's actions; prints and parses as a grid.
      network: the actors and their channels, with registers.
      transfers: what goes from stage to stage.
      whole_mesh: of all ranks together, as it was given.
      homes: the stage on which each argument, or piece of one, lives between calls.
      squeezed: the ranks whose memory has no room for the registers with which a call would be fastest.
      unlimited: the plan with each stage wherever is cheapest, if a rank has no room for that; its `peak` is that of
        the rank that is fullest.
    """

    gap = None

    def __init__(
        self, program: Program, pieces: Pieces, mesh: AnyMesh, pipeline: Pipeline, stages: Sequence[Stage], cut: Cut,
        schedule: Schedule, built: StageNetwork, arguments: Sequence[Argument], results: Sequence[Pin | None],
        notes: Sequence[str],
    ) -> None:  # fmt: skip
        self.program, self.pieces = program, pieces
        self.pipeline, self.stages, self.cut = pipeline, tuple(stages), cut
        self.mesh, self.whole_mesh = view(mesh), mesh
        self.schedule, self.built, self.network = schedule, built, built.network
        self.arguments, self.results, self.notes = tuple(arguments), tuple(results), tuple(notes)
        self.homes = cut.homes
        self.squeezed: tuple[int, ...] = ()
        self.unlimited: Unlimited | None = None
        self.ties = tuple(match_donated(pieces.program, arguments))
        self.inputs = _of_first(self.piece_inputs, pieces.inputs)
        self.outputs = _of_first(self.piece_outputs, pieces.outputs)

    @cached_property
    def piece_inputs(self) -> tuple[Placement, ...]:
        """Placements of the inputs of the program in pieces, where they live."""
        at: dict[int, Placement] = {}
        for stage in self.stages:
            for i, p in zip(stage.program.arguments, stage.plan.inputs, strict=True):
                at.setdefault(i, p)
        return tuple(at.get(i, Placement()) for i in range(len(self.pieces.inputs)))

    @cached_property
    def piece_outputs(self) -> tuple[Placement, ...]:
        """Placements of the results of the program in pieces."""
        at = {
            i: p
            for stage in self.stages
            for i, p in zip(stage.program.results, stage.plan.outputs, strict=True)
        }
        return tuple(at[i] for i in range(len(self.pieces.outputs)))

    @cached_property
    def result_stages(self) -> tuple[int, ...]:
        """The stage that each result, or piece of one, lives on."""
        at = {i: stage.number for stage in self.stages for i in stage.program.results}
        return tuple(at[i] for i in range(len(self.pieces.outputs)))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """What moves on the stages' own meshes, in the order of the stages; over all executions in one call."""
        return tuple(c for _, c in self.stage_collectives)

    @cached_property
    def stage_collectives(self) -> tuple[tuple[Stage, Collective], ...]:
        """The same, each with its stage."""
        return tuple(
            (stage, replace(c, bytes=c.bytes * times, count=c.count * times))
            for stage in self.stages
            for task, times in self._runs(stage)
            for c in task.collectives
        )

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
        pieces = self.pieces.program
        for i, (path, aval) in enumerate(zip(pieces.in_paths, pieces.in_avals, strict=True)):
            for stage in self.stages:
                if i in stage.program.arguments and stage.number != self.homes[i]:
                    size = _piece(aval, self.piece_inputs[i], self.stages[self.homes[i]].mesh)
                    found.append(Transfer(self.homes[i], stage.number, size, 1, f"argument {path}", short_aval(aval)))
        placed = self._crossing_placements()
        for c in self.cut.crossings:
            count = self.cut.loop.microbatches if c.in_loop else 1
            size = _piece(c.aval, placed[c.number], self.stages[c.source].mesh) * count
            found.append(Transfer(c.source, c.target, size, count, c.line, short_aval(c.aval)))
        return tuple(found)

    def _crossing_placements(self) -> dict[int, Placement]:
        return {
            n: p for stage in self.stages for n, p, sent in transfer_ends(stage.plan) if sent
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
    def found(self) -> tuple[FoundSignatures, ...]:
        """Operations without a rule that are split by signatures that were found."""
        return tuple(f for s in self.stages for f in s.plan.found)

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
    def memory(self) -> PipelineMemory:
        """Bytes per device: over the time of the call for each rank, and in all for the rank that is fullest."""
        return self.memory_with(None)

    def memory_with(self, working: Callable[[StageTask], int] | None) -> PipelineMemory:
        """The same, given what lives inside each task besides its inputs and outputs."""
        return pipeline_memory(
            self.built, [s.program for s in self.stages], [s.tasks for s in self.stages], [s.mesh for s in self.stages],
            self.homes, self.capacities, self.simulate(), self.link, working,
        )  # fmt: skip

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Bytes that a device of each rank has."""
        if self.pipeline.meshes is not None:
            return tuple(view(m).topology.hbm for m in self.pipeline.meshes)
        return (self.mesh.topology.hbm,) * self.schedule.ranks

    # -- time

    def cost(self, label: Any) -> float:
        """Seconds that a step takes."""
        found = self.built.tasks.get(label)
        return 0.0 if found is None else _seconds(found[1].plan)

    def link(self, channel: Channel) -> tuple[float, float]:
        """Latency, and seconds that a message of a channel keeps its link busy."""
        link = self.mesh.topology.link_along(self.pipeline.axis)
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
        return self.time.computing

    @property
    def time(self) -> Time:
        """Seconds of one call by what they go to, on the rank that waits least."""
        return min(self.rank_times, key=lambda t: t.wait)

    @cached_property
    def rank_times(self) -> tuple[Time, ...]:
        """Seconds of one call by what they go to, on each rank. Each adds up to `seconds`."""
        timeline, tasks = self.simulate(), {label: task for label, (_, task) in self.built.tasks.items()}

        def spent(labels: Sequence[Any], busy: float) -> Time:
            runs = Counter(id(tasks[label].plan) for label in labels if label in tasks)
            plans = {id(t.plan): t.plan for t in tasks.values() if t.plan is not None}
            each = ((plan.time + Time(launch=_seconds(plan) - plan.seconds)) * runs[key] for key, plan in plans.items())
            return sum(each, Time(wait=timeline.makespan - busy))

        return tuple(map(spent, timeline.order(), timeline.busy))

    def with_registers(self, registers: Sequence[int | None]) -> PipelinePlan:
        """The same plan with so many registers for each channel."""
        built = replace(self.built, network=self.network.with_registers(registers))
        found = PipelinePlan(
            self.program, self.pieces, self.whole_mesh, self.pipeline, self.stages, self.cut, self.schedule, built,
            self.arguments, self.results, self.notes,
        )  # fmt: skip
        found._in_tree = self._in_tree
        return found

    def with_schedule(self, schedule: Any) -> PipelinePlan:
        """The same tasks in another order: nothing is cut or placed anew.

        Args:
          schedule: as for `Pipeline`. It has to run each stage on the rank that it has, and to split its backward if
            this plan's schedule does.

        Raises:
          PipelineError: it wants other tasks, cannot be, deadlocks, or does not fit.
        """
        name, pipeline = self.program.name, replace(self.pipeline, schedule=schedule)
        _refuse_fresh_weights(self.program, pipeline, name)
        found = _schedule(self.stages, self.cut, self.schedule.ranks, pipeline)
        if found.rank_of != self.schedule.rank_of:
            raise PipelineError(
                f"{name}: {found.name} runs the stages on ranks {_numbers(found.rank_of)}, this plan on "
                f"{_numbers(self.schedule.rank_of)}; plan the function anew with it."
            )
        if self.cut.body.backward and found.splits_backward != self.schedule.splits_backward:
            has, wants = ("two tasks", "one") if self.schedule.splits_backward else ("one task", "two")
            raise PipelineError(
                f"{name}: this plan has the backward of a stage in {has}, {found.name} wants {wants}; plan the "
                "function anew with it."
            )
        plan = _under_schedule(
            self.program, self.pieces, self.whole_mesh, pipeline, self.stages, self.cut, found, self.arguments,
            self.results, self.notes, name,
        )  # fmt: skip
        if any(r.peak > r.capacity for r in plan.memory.ranks):
            raise PipelineError(f"{name}: {too_large(plan.memory)}")
        plan._in_tree = self._in_tree
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Writes where arguments and results live as JSON, for `shardc.load_plan(path).in_placements`.

        A pipeline is planned anew each time: `function(plan=...)` takes no plan of one.
        """
        Path(path).write_text(to_json(record(self)), "utf-8")

    def diff(self, other: Plan | PipelinePlan) -> str:
        """What another plan of the same function does differently, as text; of the stages, what moves on them."""
        from shardc.report.diff import diff  # noqa: PLC0415  # reports know plans

        return diff(self, other)

    def explain(self, why: str | None = None, *, pins: bool = False) -> str:
        """The stages, what each computes and where its values live, what moves, the schedule and its bubbles.

        Args:
          why: asks for one value, as in `Plan.explain`; each stage that has it is solved again for itself.
          pins: adds, for each stage, what each pin costs it against leaving its values AUTO.

        Raises:
          ArgumentError: `why` is the name of nothing.
        """
        from shardc.report.explain_pipeline import explain_pipeline  # noqa: PLC0415  # reports know plans
        from shardc.report.whys import pins_section, why_in_stages  # noqa: PLC0415

        if why is not None:
            return why_in_stages([s.plan for s in self.stages], why)
        costs = [f"Stage {s.number}. {pins_section(s.plan)}" for s in self.stages] if pins else []
        return "\n\n".join((explain_pipeline(self), *costs))

    def timeline(self, width: int = 120) -> str:
        """The simulated call as text: a row for each rank, `width` characters to a line."""
        from shardc.report.chart import planned_chart  # noqa: PLC0415  # reports know plans
        from shardc.report.chart_text import chart_text  # noqa: PLC0415

        return chart_text(planned_chart(self), width)

    def draw(self, path: str | Path) -> None:
        """Draws the simulated call, and how full its channels are, into an `.svg` or `.png` file.

        Raises:
          PipelineError: another ending, or matplotlib is not installed (`pip install "shardc[report]"`).
        """
        from shardc.report.chart import planned_chart  # noqa: PLC0415  # reports know plans
        from shardc.report.picture import draw_picture  # noqa: PLC0415

        draw_picture(planned_chart(self), path)

    def trace(self, path: str | Path) -> None:
        """Writes the simulated call as a trace in JSON, for https://ui.perfetto.dev or chrome://tracing."""
        from shardc.report.chart import planned_chart  # noqa: PLC0415  # reports know plans
        from shardc.report.trace_file import write_trace  # noqa: PLC0415

        write_trace(planned_chart(self), path)

    def __repr__(self) -> str:
        return (
            f"PipelinePlan({self.program.name} on {self.mesh}: {len(self.stages)} stages, {self.schedule.name}, "
            f"{len(self.transfers)} transfers, {self.bytes_per_device} bytes per device, {self.seconds:.3g} s)"
        )


def _of_first(placements: Sequence[Placement], pieces: Sequence[Piece]) -> tuple[Placement, ...]:
    """Of each whole the placement of its first piece."""
    found: dict[int, Placement] = {}
    for piece, placement in zip(pieces, placements, strict=True):
        found.setdefault(piece.number, placement)
    return tuple(found.values())


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _piece(aval: Any, placement: Placement, mesh: MeshView) -> int:
    size = itemsize_of(aval)
    for n in local_shape(aval.shape, placement, mesh.sizes):
        size *= n
    return size


def make_pipeline_plan(
    program: Program, mesh: AnyMesh, meshes: Sequence[AnyMesh], arguments: Sequence[Argument],
    results: Sequence[Pin | None], pipeline: Pipeline, where: str, notes: Sequence[str] = (),
) -> PipelinePlan:  # fmt: skip
    """Cuts, places and schedules a program, so that it fits.

    Where the devices of a rank are too small its channels get fewer registers, or if that is not enough its stages are
    placed so that they take less. If their recompute is "auto" they compute their forward again, where that is faster.

    Args:
      program: traced with its marks.
      mesh: the whole mesh.
      meshes: of each rank.
      arguments, results: what is known of each input, and said of each result.
      pipeline: how.
      where: the function, for errors.

    Raises:
      PipelineError: the program cannot be cut so, the schedule cannot be or can deadlock, or a rank's devices are too
        small.
    """
    program = precompute_state(program)
    cheaper = Choice(*choose_residuals(program.jaxpr, view(meshes[0])))
    if cheaper:
        program = replace(program, jaxpr=compute_again(program.jaxpr, cheaper)[0])
        count = len(cheaper.stacks)
        notes = [*notes, f"Of what loops would keep, {count} values are computed again, which takes less time."]
    again: set[int] = set()
    best: PipelinePlan | None = None
    while True:
        try:
            faster_than = math.inf if best is None else best.seconds
            plan = _plan_cut(program, mesh, meshes, arguments, results, pipeline, where, notes, again, faster_than)
        except StageMemoryError:
            if best is None:
                raise
            return best
        full = {r.rank for r in plan.memory.too_full}
        if not full and (best is None or plan.seconds < best.seconds):
            best = plan
        short = full or {*plan.squeezed, *(s.rank for s in plan.stages if s.plan.unlimited is not None)}
        again = {s for s, word in enumerate(plan.pipeline.recompute) if word == "full"}
        more = {s.number for s in plan.stages if s.rank in short and _may_recompute(pipeline, s.number)} - again
        if not more and best is None:
            raise PipelineError(f"{where}: {too_large(plan.memory)}")
        if not more and best is not None:
            return best
        again |= more


def _may_recompute(pipeline: Pipeline, stage: int) -> bool:
    given = pipeline.recompute
    return (given if isinstance(given, str) else given[stage]) == "auto"


def _plan_cut(
    program: Program, mesh: AnyMesh, meshes: Sequence[AnyMesh], arguments: Sequence[Argument],
    results: Sequence[Pin | None], pipeline: Pipeline, where: str, notes: Sequence[str], again: Collection[int],
    faster_than: float,
) -> PipelinePlan:  # fmt: skip
    """The plan for stages that compute their forward `again`, whether it fits or not, cut here if nobody marked them.

    Cutting goes by an estimate. Where the account of the plan has more than fits, it is cut anew with that in mind.
    A plan that is not `faster_than` so many seconds need not fit.

    Raises:
      StageMemoryError: no cuts fit, nor do they if all stages compute their forward again that may.
    """
    _refuse_fresh_weights(program, pipeline, where)
    arguments = [*arguments, *[Argument()] * (len(program.in_paths) - len(arguments))]
    marked = replace(pipeline, stages="marked")

    def plan_of(pieces: Pieces) -> PipelinePlan:
        of_pieces = [arguments[p.number] for p in pieces.inputs], [results[p.number] for p in pieces.outputs]
        return _plan_pieces(program, pieces, mesh, meshes, *of_pieces, marked, where, notes, again, faster_than)

    if pipeline.stages == "marked":
        return plan_of(whole_program(program))
    if pipeline.stages != "auto":
        raise PipelineError(
            f'{where}: stages={pipeline.stages!r}; write "marked", to cut at shardc.stage_boundary, or "auto".'
        )
    rank_of = _draft(pipeline, len(meshes), find_loop(program, where).microbatches, where).rank_of
    scale = [1.0] * len(rank_of)
    may = {s for s in range(len(rank_of)) if _may_recompute(pipeline, s)}
    plan: PipelinePlan | None = None
    for _ in range(CUTS):
        try:
            pieces, estimates = _cut_automatically(program, meshes, rank_of, arguments, pipeline, again, scale, where)
        except StageMemoryError:
            if plan is not None:
                return plan
            if may <= set(again):
                raise
            again = {*again, *may}
            continue
        plan = plan_of(pieces)
        peak = {r.rank: r.peak for r in plan.memory.too_full}
        if not peak or plan.seconds >= faster_than:
            return plan
        for s, rank in enumerate(rank_of):
            if rank in peak and estimates[s]:
                scale[s] = peak[rank] / estimates[s]
    assert plan is not None
    return plan


def _plan_pieces(
    program: Program, pieces: Pieces, mesh: AnyMesh, meshes: Sequence[AnyMesh], arguments: Sequence[Argument],
    results: Sequence[Pin | None], pipeline: Pipeline, where: str, notes: Sequence[str], again: Collection[int],
    faster_than: float,
) -> PipelinePlan:  # fmt: skip
    """The same for a program with its marks; arguments and results are those of its pieces."""
    ranks = len(meshes)
    draft = _draft(pipeline, ranks, find_loop(program, where).microbatches, where)
    rank_of = draft.rank_of
    count = len(rank_of)
    recompute = {*_recomputed(pipeline, count, where), *again}
    cut = cut_stages(pieces.program, count, where, recompute=recompute, split=draft.splits_backward)
    placer = StagePlacer(cut, rank_of, [view(m) for m in meshes], arguments, results)
    stages = placer.place({})
    schedule = _schedule(stages, cut, ranks, pipeline)
    if cut.body.backward and schedule.splits_backward != draft.splits_backward:  # a search may find either
        found = replace(pipeline, schedule=schedule)
        return _plan_pieces(
            program, pieces, mesh, meshes, arguments, results, found, where, notes, again, faster_than
        )
    chosen = replace(pipeline, recompute=tuple("full" if s in recompute else "none" for s in range(count)))

    def planned(stages: Sequence[Stage]) -> PipelinePlan:
        return _under_schedule(
            program, pieces, mesh, chosen, stages, cut, schedule, arguments, results, notes, where
        )

    plan = planned(stages)
    return _with_room(plan, lambda limits: planned(placer.place(limits))) if plan.seconds < faster_than else plan


def _with_room(plan: PipelinePlan, within: Callable[[Mapping[int, int]], PipelinePlan]) -> PipelinePlan:
    """The plan, or if a rank's devices are too small for it, another one: the fastest found for which they are not, or
    if there is none the one that they are next to.

    What a rank has too much its stages are to take less, by the account of their own programs. That has one microbatch
    at a time, and knows what one call of the stage's whole program may write over: where the ranks' account differs,
    the next limit is of what is still too much.

    Args:
      plan: the cheapest.
      within: the plan for limits in bytes on some stages.
    """
    tried, limits = [plan], dict[int, int]()
    while (full := plan.memory.too_full) and len(tried) <= ROOMS:
        for r in full:
            mine = [s for s in plan.stages if s.rank == r.rank and s.mesh.size > 1]
            own = sum(s.plan.memory.peak for s in mine)
            limits |= {s.number: int(s.plan.memory.peak * (1 - (r.peak - r.capacity) / own)) for s in mine}
        if not limits or min(limits.values()) <= 0:
            break
        plan = within(limits)
        tried.append(plan)
    fits = [p for p in tried if not p.memory.too_full]
    found = min(fits, key=lambda p: p.seconds) if fits else min(tried, key=lambda p: p.memory.worst.fullness)
    if found is not tried[0]:
        found.unlimited = Unlimited(tried[0].seconds, tried[0].memory.peak)
    return found


def _under_schedule(
    program: Program, pieces: Pieces, mesh: AnyMesh, pipeline: Pipeline, stages: Sequence[Stage], cut: Cut,
    schedule: Schedule, arguments: Sequence[Argument], results: Sequence[Pin | None], notes: Sequence[str], where: str,
) -> PipelinePlan:  # fmt: skip
    """The plan of placed stages in the order of a schedule."""
    _refuse_disorder(cut, schedule, where)
    stages = [replace(s, rank=schedule.rank_of[s.number]) for s in stages]
    gated = any(a.donated for a in arguments)
    built = stage_network(
        cut, [s.tasks for s in stages], [_known(s) for s in stages], [s.mesh for s in stages], schedule, gated
    )
    plan = PipelinePlan(program, pieces, mesh, pipeline, stages, cut, schedule, built, arguments, results, notes)
    plan = plan.with_registers(_registers(plan, pipeline, where))
    deadlock = find_deadlock(plan.network)
    if deadlock is not None:
        raise PipelineError(f"{where}: {deadlock}")
    return _squeezed(plan, built.network) if pipeline.credits == "auto" else plan


def _refuse_disorder(cut: Cut, schedule: Schedule, where: str) -> None:
    """What a microbatch leaves for the next wants them in order in the task that replaces it."""
    n = cut.body.stages
    wrong: list[str] = []
    for stage, at in sorted({(stage_of(c.position, n), c.position) for c in cut.body.carries if c.state}):
        row = [a for a in schedule.rows[schedule.rank_of[stage]] if a.stage == stage]
        order = [a.microbatch for a in row if at in (position_of(a, n), *_parts_of(a, n))]
        if order != sorted(order):
            wrong.append(f"stage {stage} has them in the order {', '.join(map(str, order))}.")
    if wrong:
        raise PipelineError(
            all_offenders(
                f"{where}: a microbatch reads what the one before it left, so a stage computes them in their order; "
                f'schedule "{schedule.name}" does not',
                wrong,
            )
        )


def _parts_of(action: Action, stages: int) -> tuple[int, ...]:
    """The tasks that an action may be beside its own: a full backward is also that of the weights."""
    return (weight_position(action.stage, stages),) if action.kind == "B" else ()


def _cut_automatically(
    program: Program, meshes: Sequence[AnyMesh], rank_of: Sequence[int], arguments: Sequence[Argument],
    pipeline: Pipeline, again: Collection[int], scale: Sequence[float], where: str,
) -> tuple[Pieces, Sequence[float]]:  # fmt: skip
    """The program with boundaries for stages on ranks `rank_of`, and the estimated bytes of each stage."""
    ranks = len(meshes)
    chunks = len(rank_of) // ranks
    given = _stand_in(chunks) if pipeline.schedule == "auto" else pipeline.schedule

    def ordered(costs: Costs, microbatches: int, backward: bool) -> Schedule:
        return _ordered(given, ranks, microbatches, chunks, costs, backward)

    recomputed = {*_recomputed(pipeline, len(rank_of), where), *again}
    views = [view(meshes[r]) for r in rank_of]
    return cut_automatically(program, Wanted(views, arguments, ordered, recomputed, scale, HOST_SECONDS, where))


def _recomputed(pipeline: Pipeline, stages: int, where: str) -> list[int]:
    """The stages that compute their forward again."""
    given = pipeline.recompute
    words = [given] * stages if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if len(words) != stages or not set(words) <= {"none", "full", "auto"}:
        raise PipelineError(
            f'{where}: recompute={given!r}; write "none", "full" or "auto", or a sequence of {stages} of them, one for '
            "each stage."
        )
    return [s for s, word in enumerate(words) if word == "full"]


def _refuse_fresh_weights(program: Program, pipeline: Pipeline, where: str) -> None:
    """A method with two versions of the weights wants a step whose gradients are taken at the older one."""
    method = METHODS.get(pipeline.schedule) if isinstance(pipeline.schedule, str) else pipeline.schedule
    if not isinstance(method, Method) or method.weight_versions < 2:
        return
    loop = find_loop(program, where)
    read = {v for v in loop.eqn.invars[: loop.consts] if not compat.is_literal(v)}
    replaced = match_donated(program, [Argument(donated=True)] * len(program.in_paths))
    inputs = set(program.jaxpr.invars)
    fresh = [
        program.in_paths[i]
        for i, out in zip(replaced, program.jaxpr.outvars, strict=True)
        if i is not None and program.jaxpr.invars[i] in read and out not in inputs
    ]
    if fresh:
        raise PipelineError(
            all_offenders(
                f"{where}: {method.name} takes gradients at weights that are one step old (Narayanan et al. 2021: "
                "w(t+1) = w(t) - f'(w(t-1))), but the loop over microbatches reads those that this step replaces. "
                "Pass the older version as an argument of its own: step(params, older, ...) takes gradients at "
                "`older`, updates `params`, and returns (new_params, params, ...). Read and replaced are",
                [*fresh[:4], *([f"and {len(fresh) - 4} more"] if len(fresh) > 4 else [])],
            )
        )


def _draft(pipeline: Pipeline, ranks: int, microbatches: int, where: str) -> Schedule:
    """The schedule as it is before the costs of the tasks are known: which rank runs a stage, whether B is split."""
    chunks = pipeline.chunks
    if isinstance(pipeline.schedule, str) and pipeline.schedule == "auto":
        return make_schedule(_stand_in(chunks or 1), ranks, microbatches, chunks)
    try:
        return make_schedule(pipeline.schedule, ranks, microbatches, chunks)
    except PipelineError as error:
        raise PipelineError(f"{where}: {error}") from None


def _stand_in(chunks: int) -> str:
    """The method that stands for the one that a search will find."""
    return "zb-h1" if chunks == 1 else "interleaved"


def _known(stage: Stage) -> dict[Var, Placement]:
    known = dict(stage.plan.boxed.placements)
    for task in (*stage.tasks.loop.values(), *stage.tasks.updates.values()):
        if task.plan is not None:
            known |= task.plan.boxed.placements
    return known


def _seconds(plan: Plan | None) -> float:
    """Of one execution of a task with this plan."""
    return 0.0 if plan is None else max(plan.seconds, HOST_SECONDS)


def _schedule(stages: Sequence[Stage], cut: Cut, ranks: int, pipeline: Pipeline) -> Schedule:
    """The schedule for the costs of the planned tasks."""
    count = len(stages)

    def cost(stage: int, kind: str) -> float:
        task = stages[stage].tasks.loop.get(position_of(Action(stage, kind, 0), count))
        return 0.0 if task is None else _seconds(task.plan)

    costs = [(cost(s, "F"), cost(s, "B"), cost(s, "W")) for s in range(count)]
    latency = stages[0].mesh.link.latency
    backward = cut.body.backward or count == 1
    costs = Costs.read(costs)
    return _ordered(pipeline.schedule, ranks, cut.loop.microbatches, count // ranks, costs, backward, latency)


def _ordered(
    given: Any, ranks: int, microbatches: int, chunks: int, costs: Costs, backward: bool, latency: float = 0.0
) -> Schedule:
    """The schedule for tasks of given costs; without a backward pass its forwards alone."""
    found = make_schedule(given, ranks, microbatches, chunks, costs=costs, latency=latency)
    if backward:
        return found
    forward = tuple(tuple(a for a in row if a.kind == "F") for row in found.rows)
    return replace(found, rows=forward)


def _registers(plan: PipelinePlan, pipeline: Pipeline, where: str) -> Sequence[int]:
    """Of each channel, whatever the memory."""
    net = plan.network
    if pipeline.credits == "auto":
        try:
            return auto_credits(net, plan.cost, plan.link)
        except PipelineError as error:
            raise PipelineError(f"{where}: {error}") from None
    if isinstance(pipeline.credits, int) and not isinstance(pipeline.credits, bool) and pipeline.credits > 0:
        return [pipeline.credits] * len(net.channels)
    raise PipelineError(
        f'{where}: credits={pipeline.credits!r}; write "auto", or a number of registers for each channel, 1 or more.'
    )


def _squeezed(plan: PipelinePlan, net: Network) -> PipelinePlan:
    """The plan with fewer registers, and slower, if that makes it fit; else the plan as it is.

    Args:
      plan: with the registers that are best for time.
      net: its network without registers.
    """
    full = plan.memory.too_full
    if not full or any(r.peak_without("registers") > r.capacity for r in full):
        return plan
    working = {id(t): working_bytes(t) for _, t in plan.built.tasks.values()}

    def too_full(registers: Sequence[int]) -> list[int]:
        memory = plan.with_registers(registers).memory_with(lambda task: working[id(task)])
        return [r.rank for r in memory.too_full]

    try:
        found = plan.with_registers(auto_credits(net, plan.cost, plan.link, too_full))
    except PipelineError:
        return plan
    found.squeezed = tuple(r.rank for r in full)
    return found
