"""Plans the stages of a pipeline, each on its own mesh: the cheapest plan, or one within limits on memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.ir.nested import bodies_of, with_bodies
from shardc.ir.program import Program
from shardc.ir.transfer import is_transfer, transfer_number
from shardc.machine.mesh import MeshView
from shardc.pipeline.cut.cut_stages import Cut, StageProgram
from shardc.pipeline.cut.split_tasks import StageTasks, split_tasks
from shardc.plan.make import Placing
from shardc.plan.names import ValueName, names_of
from shardc.plan.plan import SpmdPlan
from shardc.plan.request import Argument, Request
from shardc.sbp.placement import Pin, Placement


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


class StagePlacer:
    """Plans the stages of a cut in order. The placements of values that cross are pinned for the later stages.

    Args:
      cut: the stages.
      rank_of: the rank of each stage.
      views: the mesh of each rank.
      arguments, results: pins and arrivals of each input of the program, and pins of each result.
    """

    def __init__(
        self, cut: Cut, rank_of: Sequence[int], views: Sequence[MeshView], arguments: Sequence[Argument],
        results: Sequence[Pin | None],
    ) -> None:  # fmt: skip
        self._cut, self._rank_of, self._views = cut, tuple(rank_of), tuple(views)
        self._arguments, self._results = arguments, results
        self._readers = Counter(
            (rank, i) for s, rank in zip(cut.stages, self._rank_of, strict=True) for i in s.arguments
        )
        self._placings: dict[tuple[int, frozenset[tuple[int, Placement]]], Placing] = {}
        self._stages: dict[tuple[int, frozenset[tuple[int, Placement]], int | None], Stage] = {}

    def place(self, limits: Mapping[int, int]) -> list[Stage]:
        """The planned stages.

        Args:
          limits: for some stages, by number, the most bytes per device. If no plan is found within them, the stage gets
            the plan that takes the fewest.
        """
        ends: dict[int, Placement] = {}
        found: list[Stage] = []
        for s in self._cut.stages:
            known = frozenset(
                (c.number, ends[c.number])
                for c in self._cut.crossings
                if c.number in ends and self._axes(c.sent.stage) == self._axes(c.received.stage)
            )
            key = (s.stage, known, limits.get(s.stage))
            if key not in self._stages:
                self._stages[key] = self._place(s, known, limits.get(s.stage))
            found.append(self._stages[key])
            ends |= {n: p for n, p, _ in transfer_ends(found[-1].plan)}
        return found

    def _axes(self, stage: int) -> tuple[tuple[str, int], ...]:
        return self._views[self._rank_of[stage]].axes

    def _place(self, s: StageProgram, known: frozenset[tuple[int, Placement]], limit: int | None) -> Stage:
        rank = self._rank_of[s.stage]
        mine = self._views[rank]
        if (s.stage, known) not in self._placings:
            homes = self._cut.homes
            arguments = [
                replace(self._arguments[i], donated=self._arguments[i].donated and homes[i] == s.stage)
                for i in s.arguments
            ]
            program = _pinned(s.program, {n: Pin(p) for n, p in known})
            results = [self._results[i] for i in s.results]
            request = Request(program, mine, arguments, results, forbids=bool(mine.avoids))
            self._placings[s.stage, known] = Placing.of(request)
        placing = self._placings[s.stage, known]
        plan = placing.plan if limit is None else placing.nearest(limit)
        shared = [n for n, i in enumerate(s.arguments) if self._readers[rank, i] > 1]
        return Stage(s.stage, rank, mine, plan, split_tasks(s, plan, shared), s)


def _pinned(program: Program, pins: Mapping[int, Pin]) -> Program:
    """The program with the known placements of its transfers' other ends as pins."""

    def pin(eqn: Eqn) -> Eqn:
        if is_transfer(eqn) and transfer_number(eqn) in pins:
            return eqn.replace(params={**eqn.params, "pin": pins[transfer_number(eqn)]})
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
