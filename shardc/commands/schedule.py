"""The command `schedule`: shows the schedule of a pipeline, without devices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from shardc.commands import values
from shardc.errors import PipelineError, number_text
from shardc.pipeline.schedule.check import checked
from shardc.pipeline.schedule.costs import StageCosts
from shardc.pipeline.schedule.credits import auto_credits
from shardc.pipeline.schedule.methods import METHODS, FoundSchedule, SearchLimits, find_schedule, make_schedule
from shardc.pipeline.schedule.network import CHANNELS, network
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.simulate import Timeline, find_deadlock, peak_activations, simulate
from shardc.report.chart import Chart, Track
from shardc.report.chart_text import chart_text
from shardc.report.picture import draw_picture
from shardc.report.tables import WIDTH, Section, folded, report_text, terminal_width
from shardc.report.trace_file import write_trace
from shardc.runtime.actor import Channel, Network

_COLOURS: Final = (
    (r"(?<=[ |])\d*F\d+-*", "blue"),
    (r"(?<=[ |])\d*[BI]\d+-*", "green"),
    (r"(?<=[ |])\d*W\d+-*", "yellow"),
)
_RANKS, _MICROBATCHES = 4, 8
"""The ranks and microbatches that a schedule is shown for by default, if it is named as an argument."""
_HELP: Final = f"""\
Draw a pipeline schedule over time and print its cost. Needs no devices.

NAME is one of {", ".join(METHODS)}, or auto, which searches (default: 1f1b).

Letters: 2F0 is stage 2, forward, microbatch 0; B a full backward, I the input gradient, W the weight gradient: B = I +
W. If each rank has one stage, the drawing omits the stage number. A dot is idle time.

Example: shardc schedule zb-h1 --stages 4 --microbatches 16"""
_NO_REGISTERS: Final = """\
The pipeline deadlocks: rank {0} waits for itself. It is at 0F0, its first action, and waits for a register of its own
stash, which has none. Each stash and each edge needs at least 1 register; --credits auto finds the fewest that keep the
makespan."""


@dataclass(frozen=True)
class _ScheduleOptions:
    """The options that say which schedule."""

    name: str | None
    stages: int | None
    microbatches: int | None
    schedule: str | None
    chunks: int | None
    costs: StageCosts
    latency: float
    memory: int | None
    credits: int | str | None
    file: str | None


@dataclass(frozen=True)
class _Outcome:
    schedule: Schedule
    timeline: Timeline | None
    deadlock: str | None
    found: FoundSchedule | None
    net: Network
    registers_shown: bool


@click.command("schedule", help=_HELP)
@click.argument("name", required=False)
@click.option(
    "--stages", type=values.positive, metavar="N", help=f"Ranks of the pipeline (with a NAME by default {_RANKS})."
)
@click.option(
    "--microbatches",
    type=values.positive,
    metavar="M",
    help=f"Microbatches of a step (with a NAME by default {_MICROBATCHES}).",
)
@click.option("--schedule", metavar="NAME", help="The same as NAME.")
@click.option(
    "--chunks", type=values.positive, metavar="V", help="Stages on each rank (default: given by the schedule)."
)
@click.option(
    "--costs",
    type=values.costs,
    metavar="F,B,W",
    help="Times of a stage's forward, input gradient, weight gradient (default: 1,1,1); of each stage: 1,1,1;2,1,1;...",
)
@click.option(
    "--latency", type=values.time, default=0.0, metavar="T", help="Time of a message between two ranks (default: 0)."
)
@click.option(
    "--memory",
    type=values.positive,
    metavar="K",
    help="For auto: the most activations that a rank may hold, in chunks.",
)
@click.option(
    "--credits",
    type=values.registers,
    metavar="C",
    help="Registers of every stash and edge: a number, or auto, the fewest that keep the makespan (default: no limit).",
)
@click.option(
    "--file",
    metavar="FILE",
    help="Read the schedule from a file: torch's compute-only CSV (.csv), or a grid as str() prints it.",
)
@click.option("--save", metavar="FILE", help="Write the schedule as CSV.")
@click.option("--svg", metavar="FILE", help="Draw the schedule over time into an .svg or .png file.")
@click.option("--trace", metavar="FILE", help="Write a trace for https://ui.perfetto.dev; a unit of time is 1 us.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def schedule_command(save: str | None, svg: str | None, trace: str | None, as_json: bool, **options: Any) -> int:
    options["costs"] = options["costs"] or StageCosts()
    result = _plan(_ScheduleOptions(**options))
    if save:
        Path(save).write_text(result.schedule.to_csv(), encoding="utf-8")
    if result.timeline is not None:
        chart = _chart(result.schedule, result.timeline)
        if svg:
            draw_picture(chart, svg)
        if trace:
            write_trace(chart, trace)
    if as_json:
        click.echo(json.dumps(_figures(result)))
    else:
        _show(result)
    return 1 if result.deadlock else 0


def _plan(asked: _ScheduleOptions) -> _Outcome:
    """The schedule that the options ask for, and its simulation."""
    schedule, found = _schedule(asked)
    costs = StageCosts.read(asked.costs, schedule.stages)

    def link(channel: Channel) -> tuple[float, float]:
        return asked.latency, 0.0

    registers = asked.credits if isinstance(asked.credits, int) else None
    net = network(schedule, registers=dict.fromkeys(CHANNELS, registers))
    deadlock = _NO_REGISTERS.format(schedule.rank_of[0]) if registers == 0 else find_deadlock(net)
    if deadlock is None and asked.credits == "auto":
        net = net.with_registers(auto_credits(net, costs, link))
    timeline = None if deadlock else simulate(net, costs, link)
    return _Outcome(schedule, timeline, str(deadlock) if deadlock else None, found, net, asked.credits is not None)


def _schedule(asked: _ScheduleOptions) -> tuple[Schedule, FoundSchedule | None]:
    named = [
        *filter(None, ("NAME" * bool(asked.name), "--schedule" * bool(asked.schedule), "--file" * bool(asked.file)))
    ]
    if len(named) > 1:
        raise PipelineError(f"{' and '.join(named)} exclude each other: both name a schedule; give one of them.")
    if asked.file:
        text = Path(asked.file).read_text(encoding="utf-8-sig")
        is_csv = Path(asked.file).suffix.lower() == ".csv"
        schedule = Schedule.from_csv(text, Path(asked.file).stem) if is_csv else Schedule.parse(text)
        checked(schedule)
        ranks, microbatches = asked.stages or schedule.ranks, asked.microbatches or schedule.microbatches
        return make_schedule(schedule, ranks, microbatches, asked.chunks), None
    return _named_schedule(asked, asked.name or asked.schedule or "1f1b")


def _named_schedule(asked: _ScheduleOptions, name: str) -> tuple[Schedule, FoundSchedule | None]:
    ranks: Any = asked.stages
    microbatches: Any = asked.microbatches
    if asked.name:
        ranks, microbatches = ranks or _RANKS, microbatches or _MICROBATCHES
    missing = [o for o, n in (("--stages", ranks), ("--microbatches", microbatches)) if n is None]
    if missing:
        many = len(missing) > 1
        raise PipelineError(
            f"{' and '.join(missing)} {'are' if many else 'is'} missing; give {'them' if many else 'it'}, or read a "
            "schedule with --file."
        )
    if asked.memory and name != "auto":
        raise PipelineError("--memory is for --schedule auto; the memory of other schedules is fixed.")
    if name == "auto":
        found = find_schedule(
            ranks, microbatches, asked.chunks or 1,
            costs=asked.costs, latency=asked.latency, limits=SearchLimits(asked.memory),
        )  # fmt: skip
        return found.schedule, found
    if name not in METHODS:
        name = name.strip().lower()
    return make_schedule(name, ranks, microbatches, asked.chunks, costs=asked.costs), None


def _title(schedule: Schedule) -> str:
    p, m, v = schedule.ranks, schedule.microbatches, schedule.chunks
    text = f"{schedule.name}: {number_text(p, 'rank')}, {number_text(m, 'microbatch')}"
    return f"{text}, {v} stages on each rank" if v > 1 else text


def _chart(schedule: Schedule, timeline: Timeline) -> Chart:
    return Chart(_title(schedule), (Track("simulated", timeline),), schedule.rank_of, seconds=False)


def _figures(result: _Outcome) -> dict[str, Any]:
    schedule, timeline, found = result.schedule, result.timeline, result.found
    figures: dict[str, Any] = {
        "schedule": schedule.name,
        "stages": schedule.ranks,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "makespan": timeline and _rounded(timeline.makespan),
        "bubble": timeline and _rounded(timeline.bubble),
        "bubble_per_rank": timeline and [_rounded(b) for b in timeline.bubble_per_rank],
        "peak_activations": timeline and list(peak_activations(schedule, timeline)),
        "messages": timeline and timeline.messages,
        "deadlock": result.deadlock,
    }
    if result.registers_shown:
        figures["registers"] = {c.name: c.registers for c in result.net.channels}
    if found:
        figures |= {"bound": _rounded(found.bound), "gap": found.gap, "tried": found.tried}
    return figures


def _rounded(time: float) -> float:
    """The time without rounding errors of float sums."""
    return round(time, 9) + 0.0


def _show(result: _Outcome) -> None:
    if result.timeline is None:
        click.echo(folded(f"{_title(result.schedule)}\n\n{result.deadlock}", terminal_width()))
        return
    width = terminal_width() or WIDTH
    text = Text(folded(chart_text(_chart(result.schedule, result.timeline), width), width))
    for pattern, colour in _COLOURS:
        text.highlight_regex(pattern, colour)
    Console(highlight=False).print(text, soft_wrap=True)
    click.echo(f"\n{_table(result, result.timeline, width)}")


def _table(result: _Outcome, timeline: Timeline, width: int) -> str:
    """The figures as text: those of each rank, then those of the whole schedule."""
    rows = [
        ("busy", *(f"{_rounded(b):.9g}" for b in timeline.busy)),
        ("bubble, first to last action", *(f"{_rounded(b):.9g}" for b in timeline.bubble_per_rank)),
        ("peak activations, in chunks", *map(str, peak_activations(result.schedule, timeline))),
    ]
    share = timeline.bubble / timeline.makespan if timeline.makespan else 0.0
    whole = [
        f"makespan: {_rounded(timeline.makespan):.9g}",
        f"bubble, makespan minus busy: {_rounded(timeline.bubble):.9g} ({share:.1%})",
        f"messages between ranks: {timeline.messages}",
    ]
    if result.found:
        found = result.found
        gap = "proved optimal" if found.gap < 1e-9 else f"an optimal schedule is at most {found.gap:.1%} faster"
        whole.append(f"lower bound of makespan: {_rounded(found.bound):.9g}, {gap} ({found.tried} tried)")
    for kind in CHANNELS if result.registers_shown else ():
        counts = [str(c.registers) for c in result.net.channels if re.match(rf"{kind}\b", c.name)]
        if counts:
            whole.append(f"registers, {kind.replace('_', ' ')}: {' '.join(counts)}")
    return report_text((*_each_rank(rows, width), Section("The whole schedule", lines=whole)), width)


def _each_rank(rows: Sequence[Sequence[str]], width: int) -> Iterator[Section]:
    """The table with a column for each rank, cut into several that fit the width."""
    first, cell = max(len(row[0]) for row in rows), max(len(text) for row in rows for text in row[1:])
    ranks = len(rows[0]) - 1
    fit = max(1, (width - len("  ") - first) // (3 + max(cell, len(f"rank {ranks - 1}"))))
    for at in range(0, ranks, fit):
        some = range(at, min(at + fit, ranks))
        cells = [(row[0], *(row[1 + r] for r in some)) for row in rows]
        yield Section("" if at else "Each rank", ("", *(f">rank {r}" for r in some)), cells)
