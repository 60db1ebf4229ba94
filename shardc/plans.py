"""Plans as people see them: `Plan` of one program and `PipelinePlan`, with what they print, draw and save."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

import jax

from shardc.errors import ArgumentError, ShardcError
from shardc.pipeline.make import with_schedule
from shardc.pipeline.plan import MpmdPlan, PlanView
from shardc.plan.counterfactual import Counterfactual
from shardc.plan.digest import digest_of
from shardc.plan.make import DoesNotFit
from shardc.plan.plan import SpmdPlan, copied
from shardc.plan.saved_json import to_json
from shardc.plan.saved_plan import record, record_borders
from shardc.report.chart import Chart, planned_chart
from shardc.report.chart_text import chart_text
from shardc.report.diff import diff
from shardc.report.explain import sections_of
from shardc.report.explain_why import pins_sections, why_sections
from shardc.report.memory_error import memory_error_text
from shardc.report.passes import programs_after
from shardc.report.picture import draw_picture
from shardc.report.tables import report_text
from shardc.report.trace_file import write_trace


class _Face:
    """The attributes and texts of a plan of any kind. It cannot change, so it is its own copy."""

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

    @classmethod
    def of(cls, plan: PlanView) -> Self:
        """The public form of a plan that was found."""
        return copied(plan, cls)

    @property
    def _plan(self) -> AnyPlan:
        assert isinstance(self, Plan | PipelinePlan)
        return self

    @property
    def in_placements(self) -> Any:
        """A placement for each leaf of the arguments: an attribute, and an item, for each argument."""
        tree = self._plan.request.tree
        return None if tree is None else tree.unflatten(self._plan.inputs)

    @property
    def out_placements(self) -> Any:
        """A placement for each leaf of the result."""
        return jax.tree.unflatten(self._plan.program.out_tree, self._plan.outputs)

    @cached_property
    def counterfactuals(self) -> tuple[Counterfactual, ...]:
        """The placement problem of each part, to be solved again under other conditions."""
        return tuple(Counterfactual(part) for _, part in self._plan.parts)

    def diff(self, other: PlanView) -> str:
        """The differences to another plan of the same function, as text: placements of arguments and results,
        collectives, time, memory. Plans of different functions are compared by paths."""
        return diff(self._plan, other)

    def explain(self, why: str | None = None, *, pins: bool = False, after: str | None = None) -> str:
        """A report of the plan: placements, collectives with their reason, bytes and source line, time and memory; of
        a pipeline also its stages, their schedule and its bubbles.

        Args:
          why: asks for one value: why it lies where it does, who makes and reads it with which boxings between, and
            what the whole plan would cost if it lay elsewhere. Named by the path of an argument or result, by the
            scopes and the primitive of the operation that makes it (`blocks_0/attn/q/dot_general`), the end or a part
            of such a name, or a line (`model.py:41`); `*` matches any text. The placement is solved again up to three
            times for each of the first three values that the name means; each stage that has it is solved for itself.
          pins: adds what each pin costs against leaving its values AUTO, for each stage. Solves once for each.
          after: gives the program after this pass instead, as JAX prints it, of each stage if stages are cut;
            `python -m shardc passes` lists the passes.

        Raises:
          ArgumentError: `why` is the name of nothing; `after` names no pass that ran.
        """
        if after is not None:
            return programs_after(self._plan, after)
        if why is not None:
            return report_text(why_sections(self.counterfactuals, why))
        return report_text([*sections_of(self._plan), *(pins_sections(self.counterfactuals) if pins else ())])


class Plan(_Face, SpmdPlan):
    """A program placed on a mesh, its collectives, and what it costs. Needs no devices."""

    @cached_property
    def digest(self) -> str:
        """A digest of the program, the placement of every value and all boxings, the same in every process."""
        return digest_of([self])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON: where every value lies, and what is boxed, the same text in every process.

        `shardc.function(plan=path)` lowers it as it is, without a search; `shardc.load_plan(path)` reads it.
        """
        Path(path).write_text(to_json(record(self)), "utf-8")

    def __repr__(self) -> str:
        return (
            f"Plan({self.program.name} on {self.mesh}: {len(self.collectives)} collectives, "
            f"{self.bytes_per_device} bytes per device, {self.seconds:.3g} s)"
        )


class Drawn:
    """A call of a pipeline that can be drawn: the simulated one, or the last one, planned above measured.

    Attributes:
      writes: whether this process writes files; one of several does.
    """

    writes = True

    @property
    def chart(self) -> Chart:
        """The call.

        Raises:
          PipelineError: there was no call yet.
        """
        raise NotImplementedError

    def timeline(self, width: int = 120) -> str:
        """The call as text: a row for each rank, `width` characters to a line."""
        return chart_text(self.chart, width)

    def draw(self, path: str | Path) -> None:
        """Draws the call, and how full its channels are, into an `.svg` or `.png` file.

        Raises:
          PipelineError: another ending, or matplotlib is not installed (`pip install "shardc[report]"`).
        """
        chart = self.chart
        if self.writes:
            draw_picture(chart, path)

    def trace(self, path: str | Path) -> None:
        """Writes the call as a trace in JSON, for https://ui.perfetto.dev or chrome://tracing."""
        chart = self.chart
        if self.writes:
            write_trace(chart, path)


class PipelinePlan(_Face, Drawn, MpmdPlan):
    """A program placed on the stages of a pipeline, under one schedule. Needs no devices."""

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

    @property
    def chart(self) -> Chart:
        """The simulated call."""
        return planned_chart(self)

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

    def __init__(self, found: DoesNotFit) -> None:
        super().__init__(memory_error_text(found))
        self.plan = Plan.of(found.plan)
