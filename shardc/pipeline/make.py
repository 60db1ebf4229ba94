"""The search for the plan of a pipeline: settings are tried until one fits, and the fastest plan that fits is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardc import compat
from shardc.errors import PipelineError, StageMemoryError, all_offenders
from shardc.ir.program import Program
from shardc.passes import passes_that_run, run
from shardc.pipeline.cut.cut_loop import find_loop
from shardc.pipeline.cut.cut_stages import Cut, cut_stages
from shardc.pipeline.cut_search.auto_stages import Wanted, cut_automatically
from shardc.pipeline.cut_search.split_scans import Pieces, whole_program
from shardc.pipeline.memory import working_bytes
from shardc.pipeline.options import Pipeline, PipelineRequest
from shardc.pipeline.place_stages import Stage, StagePlacer
from shardc.pipeline.plan import MpmdPlan, arguments_of, results_of, task_seconds
from shardc.pipeline.rank_memory import too_large
from shardc.pipeline.schedule.action import TaskId
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS, Method, make_schedule
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.stage_network import stage_network
from shardc.plan.borders import match_donated
from shardc.plan.forbid import avoided_seconds
from shardc.plan.plan import Unlimited, copied
from shardc.plan.request import Argument
from shardc.runtime.actor import Network
from shardc.runtime.deadlock import find_deadlock
from shardc.sbp.cost import launch_seconds
from shardc.solver.within_limit import BUDGET, CheapestThatFits


@dataclass(frozen=True)
class _Tasks:
    """A program cut into the tasks of stages, and the schedule under which they run."""

    request: PipelineRequest
    pieces: Pieces
    cut: Cut
    schedule: Schedule


def make_pipeline_plan(request: PipelineRequest) -> MpmdPlan:
    """Cuts, places and schedules a program, so that it fits.

    Where the devices of a rank are too small its channels get fewer registers, or if that is not enough its stages are
    placed so that they take less. If their recompute is "auto" they compute their forward again, where that is faster.

    Raises:
      PipelineError: the program cannot be cut so, the schedule cannot be or can deadlock, or a rank's devices are too
        small.
    """
    program = run(passes_that_run("before placing", "pipelines"), request.program, request.context)
    stacks = {v for v in program.for_speed.variables.values() if v is not None}
    note = f"Recomputed for speed: {len(stacks)} values that loops would keep."
    return _PipelineSearch(replace(request, program=program, notes=(*request.notes, *[note] * bool(stacks)))).run()


class _PipelineSearch:
    """The search: over the stages that recompute their forward, for these over cuts, for a cut over memory limits."""

    def __init__(self, request: PipelineRequest) -> None:
        _refuse_fresh_weights(request.program, request.pipeline, request.where)
        if request.pipeline.stages not in ("marked", "auto"):
            raise PipelineError(
                f'{request.where}: stages={request.pipeline.stages!r}; write "marked", to cut at '
                'shardc.stage_boundary, or "auto".'
            )
        self.request = request
        self.fitting = _fitting()
        self.error: StageMemoryError | None = None

    @cached_property
    def rank_of(self) -> Sequence[int]:
        """The rank of each stage that is cut by cost."""
        r = self.request
        return _draft(r.pipeline, len(r.meshes), find_loop(r.program, r.where).length, r.where).rank_of

    def run(self) -> MpmdPlan:
        """The fastest plan that fits."""
        recompute = frozenset[int]()
        while more := self._recompute_more(recompute, last := self._with_cuts(recompute)):
            recompute |= more
        if (best := self.fitting.best) is not None:
            return best
        if last is None:
            assert self.error is not None
            raise self.error
        raise PipelineError(f"{self.request.where}: {too_large(last.memory)}")

    def _recompute_more(self, recompute: frozenset[int], plan: MpmdPlan | None) -> frozenset[int]:
        """More stages to recompute: those of ranks that have too little memory, or are slower for want of it. All where
        no cuts fit by their estimate."""
        if plan is None:
            stages = list(range(len(self.rank_of)))
        else:
            short = {r.rank for r in plan.memory.too_full}
            short = short or {*plan.squeezed, *(s.rank for s in plan.stages if s.plan.unlimited is not None)}
            stages = [s.number for s in plan.stages if s.rank in short]
        given = self.request.pipeline.recompute
        return frozenset(s for s in stages if (given if isinstance(given, str) else given[s]) == "auto") - recompute

    def _with_cuts(self, recompute: frozenset[int]) -> MpmdPlan | None:
        """The plan of the last cut that was tried; None if no cuts fit by their estimate. The next cut is for the
        memory that a plan takes where its ranks have too little, instead of for the estimate."""
        r, plan, tried = self.request, None, list[Sequence[float]]()
        scale = [1.0] * len(self.rank_of) if r.pipeline.stages == "auto" else []
        while len(tried) < BUDGET:
            pieces, estimates = whole_program(r.program), ()
            if scale:
                try:
                    pieces, estimates = self._cut_by_cost(recompute, scale)
                except StageMemoryError as error:
                    self.error = error
                    break
            rounded = list(map(round, estimates))
            if rounded in tried:  # the same cuts
                break
            tried.append(rounded)
            plan = self.fitting.add(self._with_limits(*_stages_of(r, pieces, recompute)))
            peak = {r.rank: r.peak for r in plan.memory.too_full}
            if not scale or not peak or not self.fitting.may_win(plan.seconds):
                break
            factors = zip(self.rank_of, estimates, scale, strict=True)
            scale = [peak[rank] / size if rank in peak and size else old for rank, size, old in factors]
        return plan

    def _with_limits(self, tasks: _Tasks, placer: StagePlacer) -> MpmdPlan:
        """The best plan of a cut, with lower and lower limits on the stages of ranks that have too little memory.

        A stage may take less by the part that its rank has too much, by the account of the stage's own program. That
        has one microbatch at a time, and knows what one call of the stage's whole program may write over: where the
        ranks' account differs, the next limit is of what is still too much. Two plans in a row that are no smaller end
        the search, and so do limits that were tried.
        """
        fitting, limits = _fitting(), dict[int, int]()
        for _ in range(BUDGET):
            plan = fitting.add(_scheduled(tasks, placer.place(limits)))
            lower = dict[int, int]()
            for r in plan.memory.too_full:
                mine = [s for s in plan.stages if s.rank == r.rank and s.mesh.size > 1]
                own = sum(s.plan.memory.peak for s in mine)
                lower |= {s.number: int(s.plan.memory.peak * (1 - (r.peak - r.capacity) / own)) for s in mine}
            known = lower.items() <= limits.items()
            stuck = known or min(lower.values()) <= 0 or fitting.smallest not in fitting.tried[-2:]
            if stuck or not self.fitting.may_win(fitting.tried[0].seconds):
                break
            limits |= lower
        first, found = fitting.tried[0], fitting.nearest
        if found is first:
            return found
        return copied(found, MpmdPlan, unlimited=Unlimited(first.seconds, first.memory.peak))

    def _cut_by_cost(self, recompute: frozenset[int], scale: Sequence[float]) -> tuple[Pieces, Sequence[float]]:
        """The program with boundaries between stages, and the estimated bytes of each stage. The cuts are for `scale`
        times these."""
        r, rank_of = self.request, self.rank_of
        ranks = len(r.meshes)
        chunks = len(rank_of) // ranks
        given = _stand_in(chunks) if r.pipeline.schedule == "auto" else r.pipeline.schedule

        def ordered(costs: StageCosts, microbatches: int, backward: bool) -> Schedule:
            return _ordered(given, _Size(ranks, microbatches, chunks), costs, backward)

        recomputed = {*_recomputed(r.pipeline, len(rank_of), r.where), *recompute}
        views = [r.views[k] for k in rank_of]
        arguments = [*r.arguments, *[Argument()] * (len(r.program.in_paths) - len(r.arguments))]
        # what a launch adds to each task does not depend on where the cuts are
        least = max(v.topology.dispatch - launch_seconds(0, v) for v in views)
        return cut_automatically(r.program, Wanted(views, arguments, ordered, recomputed, scale, least, r.where))


def _fitting() -> CheapestThatFits[MpmdPlan]:
    return CheapestThatFits(1.0, lambda plan: plan.memory.worst.fullness, _priced)


def _priced(plan: MpmdPlan) -> float:
    """Seconds, with those of what is avoided."""
    return plan.seconds + avoided_seconds(plan.parts)


# -- one attempt


def _stages_of(
    request: PipelineRequest, pieces: Pieces, recompute: frozenset[int]
) -> tuple[_Tasks, StagePlacer]:  # fmt: skip
    """The stages of a program with its marks, and their schedule where each stage lies wherever is cheapest."""
    ranks, where, pipeline = len(request.meshes), request.where, replace(request.pipeline, stages="marked")
    draft = _draft(pipeline, ranks, find_loop(request.program, where).length, where)
    while True:
        count = len(draft.rank_of)
        again = {*_recomputed(pipeline, count, where), *recompute}
        cut = cut_stages(pieces.program, count, where, recompute=again, split=draft.splits_backward)
        arguments, results = arguments_of(request, pieces), results_of(request, pieces)
        placer = StagePlacer(cut, draft.rank_of, request, arguments, results)
        schedule = _schedule(placer.place({}), cut, ranks, pipeline)
        if not cut.body.backward or schedule.splits_backward == draft.splits_backward:
            break
        pipeline, draft = replace(pipeline, schedule=schedule), schedule  # a search may find either
    words = tuple("full" if s in again else "none" for s in range(count))
    chosen = replace(request, pipeline=replace(pipeline, recompute=words))
    return _Tasks(chosen, pieces, cut, schedule), placer


def _scheduled(made: _Tasks, stages: Sequence[Stage]) -> MpmdPlan:
    """The plan of placed stages in the order of a schedule."""
    request, cut, schedule = made.request, made.cut, made.schedule
    _refuse_disorder(cut, schedule, request.where)
    stages = [replace(s, rank=schedule.rank_of[s.number]) for s in stages]
    gated = any(a.donated for a in arguments_of(request, made.pieces))
    built = stage_network(cut, stages, schedule, gated)
    plan = MpmdPlan(request, made.pieces, tuple(stages), cut, schedule, built)
    plan = plan.with_registers(_registers(plan, request.pipeline, request.where))
    deadlock = find_deadlock(plan.network)
    if deadlock is not None:
        raise PipelineError(f"{request.where}: {deadlock}")
    return _with_fewer_registers(plan, built.network) if request.pipeline.credits == "auto" else plan


def with_schedule(plan: MpmdPlan, schedule: Any) -> MpmdPlan:
    """A plan with its tasks in another order. Nothing is cut or placed anew.

    Args:
      schedule: as for `Pipeline`. It has to run each stage on the rank that it has, and to split its backward if
        this plan's schedule does.

    Raises:
      PipelineError: it wants other tasks, cannot be, deadlocks, or does not fit.
    """
    name, pipeline = plan.program.name, replace(plan.pipeline, schedule=schedule)
    _refuse_fresh_weights(plan.program, pipeline, name)
    found = _schedule(plan.stages, plan.cut, plan.schedule.ranks, pipeline)
    if found.rank_of != plan.schedule.rank_of:
        raise PipelineError(
            f"{name}: {found.name} runs the stages on ranks {_numbers(found.rank_of)}, this plan on "
            f"{_numbers(plan.schedule.rank_of)}; plan the function anew with it."
        )
    if plan.cut.body.backward and found.splits_backward != plan.schedule.splits_backward:
        has, wants = ("two tasks", "one") if plan.schedule.splits_backward else ("one task", "two")
        raise PipelineError(
            f"{name}: this plan has the backward of a stage in {has}, {found.name} wants {wants}; plan the "
            "function anew with it."
        )
    made = _Tasks(replace(plan.request, pipeline=pipeline, where=name), plan.pieces, plan.cut, found)
    again = _scheduled(made, plan.stages)
    if any(r.peak > r.capacity for r in again.memory.ranks):
        raise PipelineError(f"{name}: {too_large(again.memory)}")
    return replace(again, request=replace(again.request, where=plan.request.where))


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _refuse_disorder(cut: Cut, schedule: Schedule, where: str) -> None:
    """Raises PipelineError if microbatches whose state goes from one to the next do not run in their order."""
    wrong: list[str] = []
    for task in sorted({c.task for c in cut.body.carries if c.state}, key=lambda t: (t.stage, t)):
        row = schedule.rows[schedule.rank_of[task.stage]]
        order = [a.microbatch for a in row if task in (half.task for half in a.halves)]
        if order != sorted(order):
            wrong.append(f"stage {task.stage} has them in the order {', '.join(map(str, order))}.")
    if wrong:
        raise PipelineError(
            all_offenders(
                f"{where}: a microbatch reads what the one before it left, so a stage computes them in their order; "
                f'schedule "{schedule.name}" does not',
                wrong,
            )
        )


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
    read = set(compat.variables(loop.consts.values()))
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


def _schedule(stages: Sequence[Stage], cut: Cut, ranks: int, pipeline: Pipeline) -> Schedule:
    """The schedule for the costs of the planned tasks."""
    count = len(stages)

    def cost(stage: int, kind: str) -> float:
        task = stages[stage].tasks.all.get(TaskId(stage, kind))
        return 0.0 if task is None else task_seconds(task.plan)

    costs = [(cost(s, "F"), cost(s, "B"), cost(s, "W")) for s in range(count)]
    latency = stages[0].mesh.link.latency
    backward = cut.body.backward or count == 1
    costs = StageCosts.read(costs)
    size = _Size(ranks, cut.loop.length, count // ranks)
    return _ordered(pipeline.schedule, size, costs, backward, latency)


class _Size(NamedTuple):
    """The numbers that a schedule is made for; chunks are stages of each rank."""

    ranks: int
    microbatches: int
    chunks: int


def _ordered(given: Any, size: _Size, costs: StageCosts, backward: bool, latency: float = 0.0) -> Schedule:
    """The schedule for tasks of given costs; without a backward pass its forwards alone."""
    found = make_schedule(given, *size, costs=costs, latency=latency)
    if backward:
        return found
    forward = tuple(tuple(a for a in row if a.kind == "F") for row in found.rows)
    return replace(found, rows=forward)


def _registers(plan: MpmdPlan, pipeline: Pipeline, where: str) -> Sequence[int]:
    """The registers of each channel, without regard to memory."""
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


def _with_fewer_registers(plan: MpmdPlan, net: Network) -> MpmdPlan:
    """The plan with fewer registers, and slower, if that makes it fit; else the plan as it is.

    Args:
      plan: with the registers that are best for time.
      net: its network without registers.
    """
    full = plan.memory.too_full
    if not full or any(r.peak_without("registers") > r.capacity for r in full):
        return plan
    working = {i: working_bytes(t) for i, t in plan.built.tasks.items()}

    def too_full(registers: Sequence[int]) -> list[int]:
        memory = plan.with_registers(registers).memory_with(lambda task: working[task.id])
        return [r.rank for r in memory.too_full]

    try:
        found = plan.with_registers(auto_credits(net, plan.cost, plan.link, too_full))
    except PipelineError:
        return plan
    return copied(found, MpmdPlan, squeezed=tuple(r.rank for r in full))
