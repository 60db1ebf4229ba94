"""`plan.report("plan.html")`: a plan or a recorded run as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardc.errors import ArgumentError, writing
from shardc.ir.collective import unknown_among
from shardc.pipeline.plan import MpmdPlan, PlanView
from shardc.plan.plan import SpmdPlan
from shardc.report.advice.advice import Advice, advice_on
from shardc.report.chart import Chart, planned_chart
from shardc.report.explain import compared_text, notes_of, proof_text, sections_of, why_placed
from shardc.report.explain_pipeline import about_text
from shardc.report.page.charts import chart_data, course_data, ranks_data
from shardc.report.page.equations import program_rows
from shardc.report.page.modules import PlacedRows, modules_data, totals_data
from shardc.report.page.places import borders_data, mesh_data
from shardc.report.plan_warnings import warnings_of
from shardc.report.tables import (
    Section,
    bytes_text,
    devices_text,
    number_text,
    percent_text,
    report_text,
    seconds_text,
)

if TYPE_CHECKING:
    from jinja2 import Environment

FULL: Final = 0.9
"""The part of the memory from which on a plan is said to be close to the limit."""


@dataclass(frozen=True)
class Figure:
    """One of the headline figures.

    Attributes:
      name, value, note: texts.
      share: of a whole, to be drawn as a bar; None: no bar.
    """

    name: str
    value: str
    note: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
      title, about: what it is of.
      warnings: to be read first.
      figures: the headline.
      sections: those of `explain()`.
      data: of what is drawn: `meshes`, `arrays`, `program`, `totals`, `course` or `ranks`, `chart`, `schedule`.
      notes: that warn of nothing; in a fold.
      advice: the largest costs; None: there are none, or nobody has looked.
    """

    title: str
    about: str
    warnings: Sequence[str]
    figures: Sequence[Figure]
    sections: Sequence[Section]
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Sequence[str] = ()
    advice: Advice | None = None

    @property
    def text(self) -> str:
        """The text of `explain()`."""
        return report_text(self.sections)


def write_page(page: Page, path: str | PathLike[str]) -> None:
    """Write a page into an `.html` file.

    Raises:
      ArgumentError: another ending, a file that cannot be written, or jinja2 is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"{path}: a report has to be an .html file.")
    try:
        templates = environment()
    except ImportError:
        raise ArgumentError(
            f'{path}: reports need jinja2, which is not installed: pip install "shardc[report]". '
            "plan.explain() does not need it."
        ) from None
    with writing(path):
        path.write_text(templates.get_template("page.html").render(page=page), "utf-8")


def environment() -> Environment:
    """The templates of this folder; whatever is put into them is escaped.

    Raises:
      ImportError: jinja2 is not installed.
    """
    import jinja2  # noqa: PLC0415  # an extra

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def page_of(plan: PlanView, chart: Chart | None = None) -> Page:
    """The page of a plan.

    Args:
      plan: of any kind.
      chart: of a pipeline, the runs to draw; None: the planned one.
    """
    staged = isinstance(plan, MpmdPlan)
    own = _pipeline_data(plan, chart or planned_chart(plan)) if isinstance(plan, MpmdPlan) else _program_data(plan)
    meshes = [mesh_data(f"stage {n}" if staged else "", part.mesh) for n, part in plan.parts]
    borders = (("Arguments", plan.in_borders), ("Results", plan.out_borders))
    arrays = [borders_data(title, found, why_placed, staged) for title, found in borders]
    where = plan.request.where
    sizes = {s.rank: s.mesh.size for s in plan.stages} if isinstance(plan, MpmdPlan) else {0: plan.mesh.size}
    about = f"{where} on {devices_text(plan.mesh.topology, sum(sizes.values()))}"
    data = {"meshes": meshes, "arrays": arrays, **own}
    warnings = warnings_on(plan)
    notes = [note for note in notes_of(plan) if note not in warnings]
    advice = advice_on(plan)
    figures, sections = figures_of(plan), sections_of(plan, advice=advice)
    if chart is not None and len(chart.tracks) > 1:
        measured = chart.tracks[1]
        figures[0] = replace(figures[0], name="Time of a call, planned")
        took = chart.time_text(measured.timeline.makespan)
        figures.insert(0, Figure("Time of a call, measured", took, measured.note))
        note = f" ({measured.note})" if measured.note else ""
        sections.insert(0, Section(f"Measured: a call took {took}{note}; planned: {seconds_text(plan.seconds)}."))
    return Page(plan.program.name, about, warnings, figures, sections, data, notes, advice)


def warnings_on(plan: PlanView) -> list[str]:
    """The warnings about a plan."""
    where = plan.request.where
    found = [text.removeprefix(f"{where}: ") for text in warnings_of(plan, where)]
    if (free := plan.unlimited) is not None:
        found.append(
            f"Memory decided this plan: without the limit a call takes about {seconds_text(free.seconds)} and "
            f"{bytes_text(free.peak)} of memory."
        )
    if isinstance(plan, SpmdPlan) and plan.offloaded is not None and plan.mesh.topology.kind == "cpu":
        found.append("Values live in host memory, but fake CPU devices share it: nothing is saved.")
    return found


def figures_of(plan: PlanView) -> list[Figure]:
    """The headline figures of a plan."""
    memory, time = plan.memory, plan.time
    hbm = plan.memory.worst.capacity if isinstance(plan, MpmdPlan) else plan.mesh.topology.hbm
    share = memory.peak / hbm
    computing = percent_text(time.computing / time.total if time.total else 0.0)
    launching = f", {seconds_text(time.launch)} launching" if time.launch else ""
    unknown = unknown_among(c for _, c in plan.moves)
    without = f"; unknown: {', '.join(unknown)}" if unknown else ""
    least = "at least " * (about_text(plan) == "at least")
    pipeline = isinstance(plan, MpmdPlan)
    most = "at most " * (pipeline or (not unknown and any(c.at_most for _, c in plan.moves)))
    sent, collectives = most + bytes_text(plan.bytes_per_device), number_text(len(plan.moves), "collective")
    if pipeline:
        collectives += " on all stages together"
        proved = "of a pipeline nothing is proved"
    else:
        proved = f"of the seconds of a call; {compared_text(plan)}"
    found = [
        Figure("Time of a call", least + seconds_text(plan.seconds), f"{computing} computing{launching}{without}"),
        Figure("Sent by a device", sent, collectives + without),
        Figure("Peak memory", bytes_text(memory.peak), f"{percent_text(share)} of {bytes_text(hbm)}", share),
        Figure("Bound", proof_text(plan), proved),
    ]
    if isinstance(plan, SpmdPlan) and plan.offloaded is not None:
        moving = f"for each device; {seconds_text(time.host)} of moves a call"
        found.append(Figure("Host memory", bytes_text(plan.memory.host), moving))
    if isinstance(plan, MpmdPlan):
        schedule, timeline = plan.schedule, plan.simulate()
        idle = percent_text(timeline.bubble / timeline.makespan if timeline.makespan else 0.0)
        stages = f"{number_text(len(plan.stages), 'stage')} on {number_text(schedule.ranks, 'rank')}"
        microbatches = number_text(schedule.microbatches, "microbatch")
        found.append(Figure("Schedule", schedule.name, f"{stages}, {microbatches}; a rank is idle at most {idle}"))
    return found


def _program_data(plan: SpmdPlan) -> dict[str, Any]:
    found, time = program_rows(plan), plan.time
    rest = [
        f"less {seconds_text(time.overlapped)} that overlap" if time.overlapped else "",
        f"and {seconds_text(time.launch)} of launching" if time.launch else "",
    ]
    drawn = f" The call takes {seconds_text(time.total)}: what is drawn {', '.join(filter(None, rest))}." * any(rest)
    words = {
        "program": f"in one call of one device, {UNLAUNCHED}",
        "totals": "Bytes that each device sends in one call, and their time.",
        "course": drawn,
    }
    return course_data(plan, found, plan.mesh.topology.hbm) | moves_data([((), found.rows, 1)], words)


UNLAUNCHED: Final = "without launching"
"""A note on the parts of a call that the times of a program's lines leave out."""


def _pipeline_data(plan: MpmdPlan, chart: Chart) -> dict[str, Any]:
    own = {"ranks": ranks_data(plan.memory), "chart": chart_data(chart), "schedule": str(plan.schedule).splitlines()}
    words = {
        "program": f"in one call, one device of each stage added up, {UNLAUNCHED}",
        "totals": "Bytes in one call, one device of each stage added up, and their time.",
    }
    return own | moves_data(programs_of(plan), words)


def moves_data(programs: Sequence[PlacedRows], words: Mapping[str, str]) -> dict[str, Any]:
    """The program by module, and what moves by axis and kind, with words that say what is added up in them."""
    return {"program": modules_data(programs), "totals": totals_data(programs), "words": words}


def programs_of(plan: PlanView) -> list[PlacedRows]:
    """The programs of a plan: itself, or the tasks of its stages."""
    if not isinstance(plan, MpmdPlan):
        return [((), program_rows(plan).rows, 1)]
    times, tasks = plan.cut.loop.length, sorted(plan.built.tasks.values(), key=lambda task: task.id.stage)
    return [
        (
            (f"stage {task.id.stage}",),
            program_rows(task.plan, plan.stages[task.id.stage].names).rows,
            times if task.id.in_loop else 1,
        )
        for task in tasks
        if task.plan is not None
    ]
