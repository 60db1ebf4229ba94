"""Plans as people see them: `Plan` of one program and `PipelinePlan`, with what they print, draw and save."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

from shardc.errors import ArgumentError, ShardcError
from shardc.pipeline.make import with_schedule
from shardc.pipeline.plan import MpmdPlan
from shardc.plan.counterfactual import Counterfactual
from shardc.plan.digest import digest_of
from shardc.plan.make import Misfit
from shardc.plan.plan import SpmdPlan, keep_computed
from shardc.plan.saved_plan import record, record_borders, to_json
from shardc.report.chart import planned_chart
from shardc.report.chart_text import chart_text
from shardc.report.diff import diff
from shardc.report.explain import explain
from shardc.report.explain_pipeline import explain_pipeline
from shardc.report.misfit import misfit_text
from shardc.report.passes import program_after, programs_after
from shardc.report.picture import draw_picture
from shardc.report.trace_file import write_trace
from shardc.report.whys import pins_section, why_in_stages, why_section


class _Shared:
    """An object that cannot change, so that it is its own copy."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        """A plan holds its program, and JAX cannot pickle programs.

        Raises:
          ArgumentError: always.
        """
        raise ArgumentError(
            f"{self!r} cannot be pickled, as it holds the traced program; write plan.save('plan.json'), and pickle "
            "shardc.load_plan('plan.json')."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Plan(_Shared, SpmdPlan):
    """A program placed on a mesh, its collectives, and what it costs. Needs no devices."""

    @classmethod
    def of(cls, plan: SpmdPlan) -> Plan:
        """The public form of a plan."""
        return keep_computed(cls(**_fields(plan)), plan)

    @cached_property
    def counterfactual(self) -> Counterfactual:
        """The placement problem of this plan, to be solved again under other conditions."""
        return Counterfactual(self)

    @cached_property
    def digest(self) -> str:
        """A digest of the program, the placement of every value and all boxings, the same in every process."""
        return digest_of([self])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON: where every value lies, and what is boxed, the same text in every process.

        `shardc.function(plan=path)` lowers it as it is, without a search; `shardc.load_plan(path)` reads it.
        """
        Path(path).write_text(to_json(record(self)), "utf-8")

    def diff(self, other: AnyPlan) -> str:
        """The differences to another plan of the same function, as text: placements of arguments and results,
        collectives, time, memory. Plans of different functions are compared by paths."""
        return diff(self, other)

    def explain(self, why: str | None = None, *, pins: bool = False, after: str | None = None) -> str:
        """A report of the plan: placements, collectives with their reason, bytes and source line, time and memory.

        Args:
          why: asks for one value: why it lies where it does, who makes and reads it with which boxings between, and
            what the whole plan would cost if it lay elsewhere. Named by the path of an argument or result, by the
            scopes and the primitive of the operation that makes it (`blocks_0/attn/q/dot_general`), the end or a part
            of such a name, or a line (`model.py:41`); `*` matches any text. The placement is solved again up to three
            times for each of the first three values that the name means.
          pins: adds what each pin costs against leaving its values AUTO. Solves once for each.
          after: gives the program after this pass instead, as JAX prints it; `python -m shardc passes` lists them.

        Raises:
          ArgumentError: `why` is the name of nothing; `after` names no pass that ran.
        """
        if after is not None:
            return program_after(self, after)
        if why is not None:
            return why_section(self.counterfactual, why)
        return explain(self) + (f"\n\n{pins_section(self.counterfactual)}" if pins else "")

    def __repr__(self) -> str:
        return (
            f"Plan({self.program.name} on {self.mesh}: {len(self.collectives)} collectives, "
            f"{self.bytes_per_device} bytes per device, {self.seconds:.3g} s)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class PipelinePlan(_Shared, MpmdPlan):
    """A program placed on the stages of a pipeline, under one schedule. Needs no devices."""

    @classmethod
    def of(cls, plan: MpmdPlan) -> PipelinePlan:
        """The public form of a plan."""
        return keep_computed(cls(**_fields(plan)), plan)

    @cached_property
    def counterfactuals(self) -> tuple[Counterfactual, ...]:
        """The placement problem of each stage, to be solved again under other conditions."""
        return tuple(Counterfactual(s.plan) for s in self.stages)

    def with_schedule(self, schedule: Any) -> PipelinePlan:
        """This plan with its tasks in another order. Nothing is cut or placed anew.

        Args:
          schedule: as for `Pipeline`. It has to run each stage on the rank that it has, and to split its backward if
            this plan's schedule does.

        Raises:
          PipelineError: it wants other tasks, cannot be, deadlocks, or does not fit.
        """
        return PipelinePlan.of(with_schedule(self, schedule))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes where arguments and results live as JSON, for `shardc.load_plan(path).in_placements`.

        A pipeline is planned anew each time: `function(plan=...)` takes no plan of one.
        """
        saved = record_borders(self.program, self.mesh, self.inputs, self.outputs, self.seconds, self.gap)
        Path(path).write_text(to_json(saved), "utf-8")

    def diff(self, other: AnyPlan) -> str:
        """The differences to another plan of the same function, as text; for the stages, their collectives."""
        return diff(self, other)

    def explain(self, why: str | None = None, *, pins: bool = False, after: str | None = None) -> str:
        """The stages, what each computes and where its values live, what moves, the schedule and its bubbles.

        Args:
          why: asks for one value, as in `Plan.explain`; each stage that has it is solved again for itself.
          pins: adds, for each stage, what each pin costs it against leaving its values AUTO.
          after: gives the program after this pass instead, as in `Plan.explain`; of each stage, if stages are cut.

        Raises:
          ArgumentError: `why` is the name of nothing; `after` names no pass that ran.
        """
        if after is not None:
            return programs_after(self, after)
        if why is not None:
            return why_in_stages(self.counterfactuals, why)
        costs = [f"Stage {k}. {pins_section(c)}" for k, c in enumerate(self.counterfactuals)] if pins else []
        return "\n\n".join((explain_pipeline(self), *costs))

    def timeline(self, width: int = 120) -> str:
        """The simulated call as text: a row for each rank, `width` characters to a line."""
        return chart_text(planned_chart(self), width)

    def draw(self, path: str | Path) -> None:
        """Draws the simulated call, and how full its channels are, into an `.svg` or `.png` file.

        Raises:
          PipelineError: another ending, or matplotlib is not installed (`pip install "shardc[report]"`).
        """
        draw_picture(planned_chart(self), path)

    def trace(self, path: str | Path) -> None:
        """Writes the simulated call as a trace in JSON, for https://ui.perfetto.dev or chrome://tracing."""
        write_trace(planned_chart(self), path)

    def __repr__(self) -> str:
        return (
            f"PipelinePlan({self.program.name} on {self.mesh}: {len(self.stages)} stages, {self.schedule.name}, "
            f"{len(self.transfers)} transfers, {self.bytes_per_device} bytes per device, {self.seconds:.3g} s)"
        )


AnyPlan: TypeAlias = Plan | PipelinePlan


class MemoryLimitError(ShardcError, ValueError):
    """No placement was found with which a program fits the memory of a device. Raised before anything is compiled.

    Attributes:
      plan: the cheapest plan, which takes too much.
    """

    def __init__(self, found: Misfit) -> None:
        super().__init__(misfit_text(found))
        self.plan = Plan.of(found.plan)


def _fields(plan: SpmdPlan | MpmdPlan) -> dict[str, Any]:
    return {f.name: getattr(plan, f.name) for f in fields(plan)}
