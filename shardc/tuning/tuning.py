"""The result of `shardc.tune`: candidates, and a table of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shardc.api import AnyPlan, Function
from shardc.errors import MeshError
from shardc.machine.mesh import AnyMesh
from shardc.passes.estimate.backend import backend_of
from shardc.passes.place.memory_prices import MemoryModel
from shardc.passes.place.place import Placer
from shardc.pipeline.options import Pipeline
from shardc.plan.borders import may_replace, problem_of
from shardc.plans import Plan
from shardc.report.page.small import sections_html
from shardc.report.tables import (
    Section,
    bytes_text,
    fold_rows,
    indented,
    number_text,
    percent_text,
    report_text,
    seconds_text,
)
from shardc.tuning.products import pieces_of, split_alike

SPLIT_PRODUCTS: Final = (
    "To split products over an axis, as tensor parallelism does, pin what a product makes, not the weight alone, which "
    'may be gathered: shardc.constrain(h, {"model": S(-1), ...: AUTO}).'
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One planned way to run a function.

    Attributes:
      axes: sizes of the mesh's axes, for `make_mesh(**axes)`; unused axes have size 1.
      mesh: the planned mesh; with devices, if no topology was named.
      pipeline: for `function(pipeline=...)`; None: one program on the whole mesh.
      microbatches: number of microbatches of the function's loop; None: it has no loop.
      function: the `shardc.function` on this mesh. It keeps its traced program and its plan.
      plan: the plan, or None if there is none.
      seconds: time of one call by the plan.
      memory, bytes: peak memory and sent bytes of a device in one call. The plan is the fastest that fits, so where
        there is room it keeps what it could drop; `least` is a lower bound.
      gap: the plan's gap; None if nothing is proved.
      capacity: bytes of memory of a device.
      problem: the reason why there is no plan.
    """

    axes: Mapping[str, int]
    mesh: AnyMesh
    pipeline: Pipeline | None
    microbatches: int | None
    function: Function
    plan: AnyPlan | None = None
    seconds: float = math.inf
    memory: int = 0
    bytes: int = 0
    gap: float | None = None
    capacity: int = 0
    problem: str = ""

    def __repr__(self) -> str:
        does = self.problem or f"{seconds_text(self.seconds)}{'' if self.fits else ', does not fit in memory'}"
        return f"Candidate({mesh_text(self, schedule=True)}: {does})"

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and each device has the memory for it."""
        return self.plan is not None and self.memory <= self.capacity

    @cached_property
    def least(self) -> int | None:
        """A lower bound, nearly, on the memory of all plans of this program on this mesh: the peak if every value lay
        where it takes least. Recomputing more may take less. None for a pipeline, and where there is no plan."""
        plan = self.plan
        if not isinstance(plan, Plan):
            return None
        problem, ties = problem_of(plan.request, plan.ties), may_replace(plan.program, plan.ties)
        model = MemoryModel(problem, Placer(problem, plan.mesh).tables, ties, backend_of(plan.mesh.topology.backend))
        return min(self.memory, int(model.least()))


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of `shardc.tune`; prints as a table of the ten best candidates.

    Attributes:
      name: the name of the function.
      where: the devices, in words.
      candidates: the planned candidates, best first: those that fit, by time; those that do not fit, by memory; those
        without a plan.
      others: the number of candidates that were not planned.
      ideal: seconds of the function's computation, divided evenly over all devices, without any communication.
      notes: further lines of the text.
    """

    name: str
    where: str
    candidates: tuple[Candidate, ...]
    others: int
    ideal: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits in memory.

        Raises:
          MeshError: no candidate fits.
        """
        first = self.candidates[0]
        if first.fits:
            return first
        least = f"; the smallest candidate needs {first.memory} bytes" if first.plan is not None else ""
        raise MeshError(
            f"{self.name}: no candidate fits in the {first.capacity} bytes of a device{least}. Use more devices, "
            "donate the arguments that the step replaces (donate_argnames), or use more microbatches."
        )

    def explain(self, count: int = 10, *, width: int | None = None) -> str:
        """The `count` best candidates, and those without a plan, as text, folded to a width."""
        return tuning_text(self, count, width)

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str | None:
        return sections_html(_sections(self, 10))

    def __repr__(self) -> str:
        count = number_text(len(self.candidates), "candidate")
        first = f", the first {self.candidates[0]!r}" if self.candidates else ""
        return f"Tuning({self.name} on {self.where}: {count}{first})"


def tuning_text(tuning: Tuning, count: int = 10, width: int | None = None) -> str:
    """The text of `Tuning.explain`."""
    return report_text(_sections(tuning, count), width)


def _sections(tuning: Tuning, count: int) -> tuple[Section | None, ...]:
    shown = [c for c in tuning.candidates if c.plan is not None]
    title = f"The {count} best" if len(shown) > count else "All, best first"
    shown = shown[:count]
    lines = [*tuning.notes, *_alike(shown)]
    notes = Section("Notes", lines=lines) if lines else None
    return _head(tuning), _table(title, shown), _without_plan(tuning), notes, _use(tuning)


def _head(tuning: Tuning) -> Section:
    planned = number_text(len(tuning.candidates), "candidate")
    rest = f"; {tuning.others} more were not planned: tries={len(tuning.candidates)}" if tuning.others else ""
    return Section(
        f"{tuning.name} on {tuning.where}\n"
        f"{planned} planned{rest}.\n"
        f"Its computation, divided evenly over all devices, takes about {seconds_text(tuning.ideal)}."
    )


def _table(title: str, shown: Sequence[Candidate]) -> Section | None:
    if not shown:
        return None
    staged = any(c.pipeline for c in shown)
    looped = any(c.microbatches for c in shown)
    columns = [">", "mesh"] + ["pipeline"] * staged + [">microbatches"] * looped
    columns += [">time", ">memory", ">at least", ">bytes", "bound"]
    rows: list[Sequence[str]] = []
    for i, c in enumerate(shown):
        cells = [str(i + 1), mesh_text(c)] + [pipeline_text(c)] * staged + [str(c.microbatches or "-")] * looped
        memory = bytes_text(c.memory) + ("" if c.fits else ", too much")
        least = "-" if c.least is None else bytes_text(c.least)
        rows.append((*cells, seconds_text(c.seconds), memory, least, bytes_text(c.bytes), _proved(c.gap)))
    room = bytes_text(shown[0].capacity)
    title += f": time of a call; peak memory (of {room}), what any plan takes at least, and bytes sent of each device"
    return Section(title, columns, rows)


def _alike(shown: Sequence[Candidate]) -> list[str]:
    """Which of the candidates split the work alike, under other names of axes."""
    kinds: dict[Pipeline | None, list[int]] = {}
    for i, c in enumerate(shown):
        kinds.setdefault(c.pipeline, []).append(i)
    lines: list[str] = []
    for numbers in kinds.values():
        pieces = [pieces_of(plan) for i in numbers if (plan := shown[i].plan) is not None]
        for group in split_alike(pieces):
            *most, last = (str(numbers[k] + 1) for k in group)
            (heaviest, _), *_ = pieces[group[0]].most_common(1)
            lines += [
                f"{', '.join(most)} and {last} split the work alike, under other names of axes. They differ in where "
                f"values are kept and in what moves. Heaviest on each device: {heaviest}."
            ]
    return lines + [SPLIT_PRODUCTS] * bool(lines)


def mesh_text(c: Candidate, *, schedule: bool = False) -> str:
    """The axes that a candidate uses: `data=64, model=8`; with its schedule `pipe=4, data=8 under 1f1b`."""
    under = f" under {c.pipeline.schedule}" if schedule and c.pipeline is not None else ""
    return (", ".join(f"{a}={n}" for a, n in c.axes.items() if n > 1) or "one device") + under


def pipeline_text(c: Candidate) -> str:
    """Stages and schedule of a pipeline, `4 stages, 1f1b`; a dash for one program."""
    if c.pipeline is None:
        return "-"
    if c.plan is None or isinstance(c.plan, Plan):
        return str(c.pipeline.schedule)
    return f"{number_text(len(c.plan.stages), 'stage')}, {c.plan.schedule.name}"


def _proved(gap: float | None) -> str:
    return {None: "-", 0.0: "optimal"}.get(gap, f"within {percent_text(gap or 0.0)}")


def _without_plan(tuning: Tuning) -> Section | None:
    rows = [
        (("\n".join(c.problem.splitlines()[:2]),), mesh_text(c, schedule=True), None)
        for c in tuning.candidates
        if c.plan is None
    ]
    if not rows:
        return None
    lines = [f"{'; '.join(names)}\n{indented(str(why))}" for (why,), names, _ in fold_rows(rows)]
    return Section("Without a plan", lines=lines)


def _use(tuning: Tuning) -> Section:
    best = tuning.candidates[0]
    if not best.fits:
        return Section("No candidate fits in memory.")
    axes = ", ".join(f"{a}={n}" for a, n in best.axes.items())
    more = f", pipeline={_pipeline_code(best.pipeline)}" if best.pipeline else ""
    return Section(f"The best: shardc.function(..., mesh=shardc.make_mesh({axes}){more})")


def _pipeline_code(p: Pipeline) -> str:
    return f'shardc.Pipeline(schedule="{p.schedule}", stages="{p.stages}")'
