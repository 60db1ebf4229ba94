"""Plans the stages of a pipeline, each on its own mesh: the cheapest plan, or one within limits on memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.ir.nested import bodies_of, with_bodies
from shardc.ir.program import Program
from shardc.ir.transfer import FarEnd, is_transfer, transfer_number
from shardc.machine.mesh import MeshView, border
from shardc.pipeline.cut.cut_stages import Crossing, Cut, StageProgram
from shardc.pipeline.cut.split_tasks import StageTasks, is_loop, split_tasks
from shardc.pipeline.options import PipelineRequest
from shardc.pipeline.schedule.action import TaskId
from shardc.plan.forbid import avoided_seconds
from shardc.plan.make import Placing
from shardc.plan.names import ValueName, names_of
from shardc.plan.plan import SpmdPlan, copied
from shardc.plan.request import Argument, Request
from shardc.plan.rewrites import Compared, compare
from shardc.sbp.placement import Pin, Placement
from shardc.solver import ROUNDING


@dataclass(frozen=True)
class Stage:
    """One planned stage of a pipeline.

    Attributes:
      number, rank: the number of the stage, and of the actor that runs it.
      mesh: the planner's view of its mesh.
      plan: the plan of the stage's whole program.
      tasks: its tasks.
      program: its program, with the numbers of its arguments and results.
    """

    number: int
    rank: int
    mesh: MeshView
    plan: SpmdPlan
    tasks: StageTasks
    program: StageProgram

    @cached_property
    def names(self) -> Mapping[Var, ValueName]:
        """The names of its values; a sum has that of what is added to it last."""
        found, tasks = names_of(self.plan.boxed, self.plan.program).values, self.tasks.all.values()
        found |= {resident: found[v] for task in tasks if task.id.in_loop for resident, v in task.kept if v in found}
        kept = (pair for task in tasks if task.id.kind != "update" for pair in task.kept)
        return {v: found[resident] for resident, v in kept} | found


@dataclass(frozen=True, eq=False)
class _StageCandidate:
    """A stage with its program, as it was cut or rewritten, that is to be placed."""

    stage: StageProgram
    placing: Placing

    @property
    def seconds(self) -> float:
        """Of the cheapest plan, with those of what is avoided."""
        plan = self.placing.plan
        return plan.seconds + avoided_seconds(plan.parts)

    def is_cheaper(self, other: _StageCandidate) -> bool:
        """Whether it takes less time by more than rounding."""
        return self.seconds < other.seconds * (1 - ROUNDING)


_Known: TypeAlias = frozenset[tuple[int, Pin | FarEnd]]
"""What is known of the other ends of transfers, by their numbers."""


class StagePlacer:
    """Plans the stages of a cut in order. The placements of values that cross are pinned for the later stages; between
    meshes with other axes the ways from them are priced.

    Args:
      cut: the stages.
      rank_of: the rank of each stage.
      request: for the pipeline.
      arguments, results: pins and arrivals of each input of the cut program, and pins of each result.
    """

    def __init__(
        self, cut: Cut, rank_of: Sequence[int], request: PipelineRequest, arguments: Sequence[Argument],
        results: Sequence[Pin | None],
    ) -> None:  # fmt: skip
        self._cut, self._rank_of, self._request, self._views = cut, tuple(rank_of), request, request.views
        self._arguments, self._results = arguments, results
        self._readers = Counter(
            (rank, i) for s, rank in zip(cut.stages, self._rank_of, strict=True) for i in s.arguments
        )
        self._compared: dict[tuple[int, _Known], Compared[_StageCandidate]] = {}
        self._stages: dict[tuple[int, _Known, int | None], Stage] = {}

    def place(self, limits: Mapping[int, int]) -> list[Stage]:
        """The planned stages.

        Args:
          limits: for some stages, by number, the most bytes per device. If no plan is found within them, the stage gets
            the plan that takes the fewest.
        """
        ends: dict[int, Placement] = {}
        found: list[Stage] = []
        for s in self._cut.stages:
            of_stage = (c for c in self._cut.crossings if s.stage in (c.sent.stage, c.received.stage))
            ends_here = ((c.number, self._end(c, s.stage, ends.get(c.number))) for c in of_stage)
            known = frozenset((number, end) for number, end in ends_here if end is not None)
            key = (s.stage, known, limits.get(s.stage))
            if key not in self._stages:
                self._stages[key] = self._place(s, known, limits.get(s.stage))
            found.append(self._stages[key])
            ends |= {n: p for n, p, _ in transfer_ends(found[-1].plan)}
        return found

    def _end(self, c: Crossing, stage: int, placement: Placement | None) -> Pin | FarEnd | None:
        """What is known of a crossing at a stage, with its placement at the other one if that is planned."""
        sends = c.received.stage == stage
        near, far = (self._rank_of[n] for n in (stage, c.sent.stage if sends else c.received.stage))
        if placement is not None and self._views[near].axes == self._views[far].axes:
            return Pin(placement)
        if self._request.pipeline.meshes is None or near == far:
            return None
        meshes = self._request.meshes
        return FarEnd(placement, self._views[far], border(meshes[near], meshes[far]), sends)

    def _place(self, s: StageProgram, known: _Known, limit: int | None) -> Stage:
        rank = self._rank_of[s.stage]
        if (s.stage, known) not in self._compared:
            self._compared[s.stage, known] = self._candidates(s, dict(known))
        compared = self._compared[s.stage, known]
        plans = {c: c.placing.plan if limit is None else c.placing.nearest(limit) for c in compared.found}
        best = compared.best
        if limit is not None:
            best = min(plans, key=lambda c: (max(0, plans[c].memory.peak - limit), plans[c].seconds))
        plan, s = copied(plans[best], SpmdPlan, trials=compared.trials), best.stage
        shared = [n for n, i in enumerate(s.arguments) if self._readers[rank, i] > 1]
        return Stage(s.stage, rank, self._views[rank], plan, split_tasks(s, plan, shared), s)

    def _candidates(self, s: StageProgram, ends: Mapping[int, Pin | FarEnd]) -> Compared[_StageCandidate]:
        """The stage as it was cut, and rewritten, with what is known of its transfers' other ends."""
        homes, mesh = self._cut.homes, self._views[self._rank_of[s.stage]]
        arguments = [
            replace(self._arguments[i], donated=self._arguments[i].donated and homes[i] == s.stage) for i in s.arguments
        ]
        results = [self._results[i] for i in s.results]
        request = Request(
            s.program, mesh, arguments, results, replicate=self._request.replicate, forbids=bool(mesh.avoids),
            imbalance=self._request.imbalance,
        )  # fmt: skip

        def candidate(asked: Request, known: _StageCandidate | None) -> _StageCandidate | None:
            stage = s if asked.program is s.program else rewritten_stage(s, asked.program)
            program = pin_transfers(asked.program, ends)
            placing = Placing.of(replace(asked, program=program), known and known.placing.plan)
            return stage and _StageCandidate(stage, placing)

        return compare(request, candidate, lambda c: c.seconds, _StageCandidate.is_cheaper)


def rewritten_stage(s: StageProgram, program: Program) -> StageProgram | None:
    """The stage with a rewritten program; None if this has lost the loop over microbatches, or an operation of one task
    reads what a later one makes. A new operation belongs to the first task that reads it."""
    loop = next((e for e in program.jaxpr.eqns if e.primitive.name == "scan" and is_loop(e, s)), None)
    if loop is None:
        return None if s.tasks else replace(s, program=program)
    body, tasks, read = bodies_of(loop)[0].eqns, dict(s.tasks), dict[Var, TaskId]()
    for eqn in reversed(body):
        at = [known[v] for known in (tasks, read) for v in eqn.outvars if v in known]
        for v in eqn.outvars if at else ():
            tasks.setdefault(v, min(at))
        for a in compat.variables(eqn.invars) if at else ():
            read[a] = min(*at, read.get(a, at[0]))
    first = min(tasks.values())
    for eqn in body:  # what is read outside of the loop alone
        at = max((tasks[a] for a in compat.variables(eqn.invars) if a in tasks), default=first)
        for v in eqn.outvars:
            tasks.setdefault(v, at)
        if eqn.outvars and tasks[eqn.outvars[0]] < at:
            return None
    return replace(s, program=program, tasks=tasks)


def pin_transfers(program: Program, ends: Mapping[int, Pin | FarEnd]) -> Program:
    """The program with what is known of its transfers' other ends."""

    def pin(eqn: Eqn) -> Eqn:
        if is_transfer(eqn) and (end := ends.get(transfer_number(eqn))) is not None:
            return eqn.replace(params={**eqn.params, "pin" if isinstance(end, Pin) else "far_end": end})
        if eqn.primitive.name == "scan":
            (body,) = bodies_of(eqn)
            inner = compat.new_jaxpr(body.invars, body.outvars, [pin(e) for e in body.eqns], body)
            return eqn.replace(params=with_bodies(eqn, [inner]))
        return eqn

    jaxpr = program.jaxpr
    pinned = compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, [pin(e) for e in jaxpr.eqns], jaxpr)
    return program.after("pin_transfers", pinned)


def transfer_ends(plan: SpmdPlan) -> list[tuple[int, Placement, bool]]:
    """Number and placement of each transfer of a stage, and whether the stage sends it."""
    found: list[tuple[int, Placement, bool]] = []

    def look(eqns: Sequence[Eqn]) -> None:
        for eqn in eqns:
            if is_transfer(eqn):
                sent = bool(eqn.invars)
                var = eqn.invars[0] if sent else eqn.outvars[0]
                placement = Placement() if compat.is_literal(var) else plan.boxed.placements[var]
                found.append((transfer_number(eqn), placement, sent))
            elif eqn.primitive.name == "scan":
                look(bodies_of(eqn)[0].eqns)

    look(plan.boxed.jaxpr.eqns)
    return found
