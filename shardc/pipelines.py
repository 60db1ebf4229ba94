"""Pipelines as people see them: `PipelinePlan`, and the result of compiling one. Loaded for the first pipeline."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import jax

from shardc import compat
from shardc.compiled import CompiledCall, refuse_absent
from shardc.errors import writing
from shardc.execute.check.report import CheckReport
from shardc.execute.pipeline_executable import PipelineExecutable
from shardc.passes.trace.trace import is_array
from shardc.pipeline.make import with_schedule
from shardc.pipeline.plan import MpmdPlan
from shardc.plan.saved_plan import record_borders, to_json
from shardc.plans import PlanFace, lacks
from shardc.report.chart import Chart, planned_chart
from shardc.report.drawn import Drawn
from shardc.report.page.page import page_of, write_page
from shardc.report.tables import bytes_text


class PipelinePlan(PlanFace, Drawn, MpmdPlan):
    """A program placed on the stages of a pipeline, under one schedule. Needs no devices.

    It has what a `Plan` has, with figures of the rank or stage that takes most, and

    Attributes:
      stages: records with `number`, `rank`, `mesh`, `tasks`, and `plan`, that of the stage's own program.
      schedule: the order of actions; prints as a grid.
      squeezed: the ranks without memory for as many registers as the fastest call takes.
    """

    @compat.api_boundary
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
        with writing(path):
            Path(path).write_text(to_json(saved), "utf-8")

    @property
    def chart(self) -> Chart:
        """The simulated call."""
        return planned_chart(self)

    def __getattr__(self, name: str) -> NoReturn:
        lacks(self, name)

    def __repr__(self) -> str:
        return (
            f"PipelinePlan({self.program.name} on {self.mesh}: {len(self.stages)} stages, {self.schedule.name}, "
            f"{len(self.transfers)} transfers, {bytes_text(self.bytes_per_device)} per device, {self.seconds:.3g} s)"
        )


class CompiledPipeline(CompiledCall[PipelineExecutable, "PipelinePlan"], Drawn):
    """A compiled plan of a pipeline. It has what `Compiled` has, and the last call beside the planned one."""

    def __getattr__(self, name: str) -> NoReturn:
        lacks(self, name)

    @property
    def writes(self) -> bool:
        return self.executable.places.first

    @compat.api_boundary
    def check(self, *args: Any, **kwargs: Any) -> CheckReport:
        """Runs a call, and holds the first run of each task against one device, as `Compiled.check`.

        Raises:
          MeshError: the plan is compiled for a machine that is not there.
          PipelineError: its stages run in several processes.
        """
        refuse_absent(self.executable)
        leaves = [x for x in self._taken_apart(args, kwargs).leaves if is_array(x)]
        return self.executable.check(leaves)[0]

    @compat.api_boundary
    def measure(self, *args: Any, **kwargs: Any) -> Any:
        """A call of a pipeline that waits for every task, so that `trace`, `draw` and `timeline` show what devices did.

        It is slower than a plain call: nothing is launched ahead. Gives what the call gives.
        """
        refuse_absent(self.executable)
        leaves = [x for x in self._taken_apart(args, kwargs).leaves if is_array(x)]
        return jax.tree.unflatten(self.plan.program.out_tree, self.executable.measure(leaves))

    def report(self, path: str | PathLike[str]) -> None:
        """Writes the page of `plan.report`, with the last call beside the planned one.

        Raises:
          ArgumentError: as `plan.report`.
          PipelineError: there was no call yet.
        """
        page = page_of(self.plan, self.chart)
        if self.writes:
            write_page(page, path)

    @property
    def chart(self) -> Chart:
        """The last call. Measured times are those of the host's launches; after `measure`, those on the devices.

        Raises:
          PipelineError: there was no call yet.
        """
        return self.executable.chart()

    @compat.api_boundary
    def with_schedule(self, schedule: Any) -> CompiledPipeline:
        """This pipeline under another schedule. Nothing is placed or compiled again.

        Args:
          schedule: as for `Pipeline`. It has to run each stage on the rank that it has, and to split its backward if
            this one's does.

        Raises:
          PipelineError: it wants other tasks, cannot be, or deadlocks.
        """
        made = self.executable.with_schedule(schedule)
        return CompiledPipeline(self._arguments, self._made_for, made, PipelinePlan.of(made.plan))
