"""The sections of `plan.explain()` that only a pipeline has: its schedule, stages, transfers and channels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from shardc.arrays.remote_array import SMALL, bytes_of, is_small
from shardc.ir.collective import known_bytes, unknown_among
from shardc.ir.walk import all_eqns, is_narrow_copy
from shardc.machine.mesh import MeshView
from shardc.machine.puts import HERE
from shardc.machine.topology import Topology
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.plan_cost import Time
from shardc.pipeline.cut.split_tasks import StageTask
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.plan import MpmdPlan, PlanView, task_seconds
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.simulate import Timeline
from shardc.plan.borders import Border
from shardc.report.chart import KINDS, places_of, repeated_channels
from shardc.report.stage_text import FEW, cut_grid, pairs_text, ranges_text, stems, stems_text
from shardc.report.tables import (
    WIDTH,
    Section,
    bytes_text,
    fold_paths,
    fold_rows,
    number_text,
    percent_text,
    seconds_text,
    times_text,
)

_PARTS: Final = {
    "compute": "computing", "memory": "reading and writing", "overlapped": "overlapped", "launch": "launching",
    "wait": "waiting", "recompute": "of it recomputing",
}  # fmt: skip
"""Column names of the parts of a rank's time, where they differ from the field."""
_WITHIN: Final = ("overlapped_reductions", "overlapped_rings")
"""Parts of `overlapped`, which have no columns."""
_TASKS: Final = ("load", "F", "B", "I", "W", "update")


@dataclass(frozen=True)
class OwnSections:
    """The parts of a report that differ between a plan of one program and one of a pipeline.

    Attributes:
      meshes: those that the head names.
      head: its lines about time and what moves.
      memory: the devices that are fullest.
      rewrites: lines of the head.
      recomputed: lines of the section about memory.
      stages: sections before the arguments.
      transfers, channels: sections before and after the collectives.
    """

    meshes: Sequence[MeshView]
    head: Sequence[str]
    memory: Section
    rewrites: Sequence[str] = ()
    recomputed: Sequence[str] = ()
    stages: Sequence[Section | None] = ()
    transfers: Sequence[Section] = ()
    channels: Sequence[Section | None] = ()


def pipeline_sections(plan: MpmdPlan, width: int | None = None) -> OwnSections:
    """The sections that only the plan of a pipeline has, its schedule drawn in so many characters."""
    timeline = plan.simulate()
    ranks = {s.rank: s.mesh for s in plan.stages}
    return OwnSections(
        (plan.mesh,) if plan.pipeline.meshes is None else [ranks[r] for r in sorted(ranks)],
        _head(plan, timeline),
        _memory(plan),
        stages=(
            _schedule(plan, width - 2 if width else WIDTH),
            _stages(plan, timeline),
            _tasks(plan, timeline),
            _times(plan),
            _sent(plan),
        ),
        transfers=(_transfers(plan),),
        channels=(_channels(plan, timeline),),
    )


# -- head


def _head(plan: MpmdPlan, timeline: Timeline) -> list[str]:
    schedule = plan.schedule
    chunks = f", {number_text(schedule.chunks, 'stage')} on each" if schedule.chunks > 1 else ""
    lines = [
        f"{number_text(len(plan.stages), 'stage')} on {number_text(schedule.ranks, 'rank')}{chunks}; {schedule.name}, "
        f"{number_text(schedule.microbatches, 'microbatch')}{_recompute(plan)}.",
        _time(plan, timeline),
        *uncounted(plan.mesh.topology),
        *narrowed(plan),
        f"A device sends at most {bytes_text(plan.known_bytes)} a call{_besides(plan)}; on all stages together there "
        f"are {number_text(len(plan.moves), 'collective')} and {number_text(len(plan.transfers), 'transfer')}.",
    ]
    if places := places_of(plan):
        small = sum(bytes_of(a) for a in plan.program.out_avals if is_small(a))
        lines.append(
            f"Rank {'; rank '.join(f'{r} runs in {p}' for r, p in enumerate(places))}. "
            f"Results of at most {bytes_text(SMALL)} go to every process: {bytes_text(small)} a call."
        )
    return lines


def _besides(plan: MpmdPlan) -> str:
    """`, and an unknown number of bytes in ffi_call at model.py:12 (step), ...`; empty if all is known."""
    unknown = unknown_among(plan.collectives)
    said = f", and an unknown number of bytes in {', '.join(unknown)}, of which shardc does not know what moves"
    return f"{said}; times are without it" if unknown else ""


def _recompute(plan: MpmdPlan) -> str:
    """`; stage 0 recomputes its forward pass in its backward pass`; empty if no stage does."""
    given = plan.pipeline.recompute
    words = [given] * len(plan.stages) if isinstance(given, str) else list(given)
    full = [number for number, word in enumerate(words) if word == "full"]
    if not full:
        return ""
    some = f"stage {full[0]}" if len(full) == 1 else f"each of stages {ranges_text(full)}"
    who = "every stage" if len(full) == len(words) else some
    return f"; {who} recomputes its forward pass in its backward pass"


def about_text(plan: PlanView) -> str:
    """`at least` where the seconds of a plan lack a part, else `about`."""
    return "about" if plan.mesh.topology.vector and all(c.is_known for c in plan.collectives) else "at least"


def uncounted(machine: Topology) -> Iterator[str]:
    """A line about work that takes no time in plans for a machine."""
    if not machine.vector:
        yield f'Elementwise work takes no time here: topology {machine.kind} has no "vector" (operations per second).'


def narrowed(plan: PlanView) -> Iterator[str]:
    """A line about values that are sent and kept in the type in which the machine multiplies."""
    if backend_of(plan.mesh.topology.backend).multiplies_in is None:
        return
    copies = [e.outvars[0] for _, p in plan.parts for e in all_eqns(p.boxed.jaxpr) if is_narrow_copy(e)]
    if copies:
        what = f"{number_text(len(copies), 'value')} that products read {'is' if len(copies) == 1 else 'are'}"
        yield (
            f"XLA multiplies float32 in {copies[0].aval.dtype} on {plan.mesh.topology.kind}: {what} sent and "
            "kept so (docs/accelerators.md)."
        )


def _time(plan: MpmdPlan, timeline: Timeline) -> str:
    """One line: time of a call, and how long ranks are busy and idle."""
    whole, busy = timeline.makespan, timeline.busy
    most, least = max(busy), min(busy)
    inner = timeline.bubble_per_rank
    between = seconds_text(max(inner))
    if min(inner) != max(inner):
        between = f"{seconds_text(min(inner))} to {between}"
    return (
        f"{about_text(plan).capitalize()} {seconds_text(whole)} a call: rank {busy.index(most)} is busy longest, "
        f"{seconds_text(most)} ({_share(most, whole)}); rank {busy.index(least)} is idle longest, "
        f"{seconds_text(timeline.bubble)} ({_share(timeline.bubble, whole)}); between its first and its last task a "
        f"rank is idle for {between}."
    )


def _share(part: float, whole: float) -> str:
    return percent_text(part / whole if whole else 0.0)


def _schedule(plan: MpmdPlan, width: int) -> Section:
    grid, cut = cut_grid(plan.schedule, width)
    more = f"; {cut}, print(plan.schedule) shows all" if cut else ""
    found = {a.kind for row in plan.schedule.rows for a in row}
    kinds = ", ".join(f"{letter} {word}" for letter, word in KINDS.items() if letter in found)
    title = f"Schedule: stage, task ({kinds}), microbatch; a column is one unit of time{more}"
    return Section(title, lines=grid.splitlines())


# -- stages


def _stages(plan: MpmdPlan, timeline: Timeline) -> Section:
    borders = plan.in_borders
    groups: dict[str, list[Border]] = {}
    for b in borders:
        groups.setdefault(b.path.partition("/")[0], []).append(b)
    own = list(groups)[: FEW if len(groups) <= FEW else FEW - 1]  # with a column of their own
    rest = len(own) < len(groups)
    spread = max(groups, key=lambda name: len({b.stage for b in groups[name]}), default="")
    names = stems({b.path.partition("/")[2] or b.path: b.stage for b in groups.get(spread, ())})
    held, received = _registers(plan, timeline)
    rows: list[Sequence[str]] = []
    for stage in plan.stages:
        sizes = [sum(b.bytes for b in groups[name] if b.stage == stage.number) for name in own]
        sizes += [sum(b.bytes for b in borders if b.stage == stage.number) - sum(sizes)] * rest
        axes = ", ".join(f"{a}={n}" for a, n in stage.mesh.axes)
        rows.append((
            str(stage.number), str(stage.rank), f"{stage.mesh.size}: {axes}" if axes else str(stage.mesh.size),
            stems_text(names.get(stage.number, [])) or "-", *map(_bytes_or_none, sizes),
            _bytes_or_none(held[stage.number]), _bytes_or_none(received[stage.number]),
            bytes_text(stage.plan.memory.peak),
        ))  # fmt: skip
    columns = (
        ">stage", ">rank", "devices", f"which {spread}", *(f">{name}" for name in [*own, *["other"] * rest]),
        ">peak stash", ">peak received", ">peak of its program",
    )  # fmt: skip
    return Section("Stages: their arguments, and the peaks of their other memory, in bytes per device", columns, rows)


def _bytes_or_none(size: int) -> str:
    return bytes_text(size) if size else "-"


def _registers(plan: MpmdPlan, timeline: Timeline) -> tuple[list[int], list[int]]:
    """For each stage the peak bytes of its own stashes, and of the registers that it receives from other stages."""
    held, received = [0] * len(plan.stages), [0] * len(plan.stages)
    for channel, (carried, peak) in enumerate(zip(plan.built.channel_values, timeline.peaks, strict=True)):
        if carried is not None:
            into = held if carried.source == carried.target else received
            into[carried.target] += peak * plan.register_bytes(channel)
    return held, received


def _steps_of(plan: MpmdPlan, stage: Stage) -> dict[str, list[tuple[StageTask, int]]]:
    """The tasks of a stage by the kind of their steps, each with the number of its executions in a call."""
    found: dict[str, list[tuple[StageTask, int]]] = {}
    for step in plan.network.actors[stage.rank]:
        label, task = step.label, plan.built.task(step.label)
        if task is None or task.id.stage != stage.number:
            continue
        if not isinstance(label, Action):
            found.setdefault(task.id.kind, []).append((task, 1))
        elif label.microbatch == 0:
            found.setdefault(label.kind, []).append((task, plan.schedule.microbatches))
    return found


def _kinds(all_steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """The kinds of tasks that there are, in order."""
    return [k for k in _TASKS if any(k in steps for steps in all_steps)]


def _alike(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows of stages, or ranks, with their numbers in front. Rows with equal cells are one row."""
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, cells in enumerate(rows):
        numbers.setdefault(cells, []).append(number)
    return [(ranges_text(ns), *cells) for cells, ns in numbers.items()]


def _tasks(plan: MpmdPlan, timeline: Timeline) -> Section:
    """A table of the time of one execution of each task."""
    all_steps = [_steps_of(plan, stage) for stage in plan.stages]
    kinds = _kinds(all_steps)

    def row(steps: Mapping[str, Sequence[tuple[StageTask, int]]]) -> tuple[str, ...]:
        each = [sum(task_seconds(task.plan) for task, _ in steps.get(k, ())) for k in kinds]
        busy = sum(task_seconds(task.plan) * times for found in steps.values() for task, times in found)
        return (*(seconds_text(s) if s else "-" for s in each), seconds_text(busy), _share(busy, timeline.makespan))

    least = seconds_text(plan.mesh.topology.dispatch)
    title = f"Tasks: time of one execution, at least {least} for its launch; a dash: nothing to compute"
    columns = ("stages", *(f">{k}" for k in kinds), ">busy per call", ">share")
    return Section(title, columns, _alike(map(row, all_steps)))


def _times(plan: MpmdPlan) -> Section:
    """A table of the parts of each rank's time."""
    times = plan.rank_times
    parts = [f.name for f in fields(Time) if f.name not in _WITHIN and any(getattr(t, f.name) for t in times)]
    rows = (tuple("-" * (part == "overlapped") + seconds_text(getattr(t, part)) for part in parts) for t in times)
    columns = ("ranks", *(f">{_PARTS.get(part, part)}" for part in parts))
    return Section(f"Time: how each rank spends the {seconds_text(plan.seconds)} of a call", columns, _alike(rows))


def _sent(plan: MpmdPlan) -> Section | None:
    """A table of the bytes that the collectives of one execution of each task send."""
    all_steps = [_steps_of(plan, stage) for stage in plan.stages]
    kinds = _kinds(all_steps)

    def sent(steps: Mapping[str, Sequence[tuple[StageTask, int]]], kind: str) -> int:
        plans = [task.plan for task, _ in steps.get(kind, ())]
        return sum(known_bytes(p.collectives) for p in plans if p is not None)

    found = [[sent(steps, k) for k in kinds] for steps in all_steps]
    shown = [i for i in range(len(kinds)) if any(row[i] for row in found)]
    if not shown:
        return None
    rows = _alike(tuple(_bytes_or_none(row[i]) for i in shown) for row in found)
    title = "Tasks: bytes that each device sends in the collectives of one execution"
    return Section(title, ("stages", *(f">{kinds[i]}" for i in shown)), rows)


# -- what moves


def _transfers(plan: MpmdPlan) -> Section:
    if not plan.transfers:
        return Section("Transfers between stages: none")
    keyed = [
        (
            (t.value, t.count, t.bytes // t.count, t.source < t.target, t.seconds, t.carrier),
            t.line,
            (t.source, t.target),
        )
        for t in plan.transfers
    ]
    rows: list[Sequence[str]] = []
    apart = any(t.carrier != HERE for t in plan.transfers)
    for (value, count, size, _, seconds, carrier), lines, pairs in fold_rows(keyed):
        assert isinstance(size, int) and isinstance(seconds, float)
        copies = len(set(lines))
        made = times_text(fold_paths(sorted(set(lines))), copies)
        made = f"copy of {made}" if made.startswith("argument ") else made
        by = [str(carrier)] * apart
        rows.append((pairs_text(pairs), str(value), str(count), bytes_text(size), seconds_text(seconds), *by, made))
    for t in plan.transfers:
        for stage, size, when in (
            (t.source, t.before, "before it crosses"),
            (t.target, t.after, "after it has crossed"),
        ):
            if size:
                made = f"within stage {stage}, {when} {t.source} -> {t.target}"
                rows.append((str(stage), t.value, str(t.count), bytes_text(size // t.count), "", *[""] * apart, made))
    whole, crosses = (
        bytes_text(sum(sizes)) for sizes in zip(*((t.bytes, t.border_bytes) for t in plan.transfers), strict=True)
    )
    title = (
        f"Transfers between stages, {whole} a call, {crosses} of all devices together: bytes that a device sends, and "
        "time, of one execution"
    )
    return Section(title, ("stages", "value", ">times each", ">bytes", ">time", *["by"] * apart, "made by"), rows)


def _channels(plan: MpmdPlan, timeline: Timeline) -> Section | None:
    """A table of the registers of the channels that carry values once per microbatch."""
    alike: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    repeated = repeated_channels(plan.network)
    for number in repeated:
        channel, carried = plan.network.channels[number], plan.built.channel_values[number]
        assert carried is not None
        credits = "unbounded" if channel.registers is None else str(channel.registers)
        word, peak = channel.name.rpartition(" ")[0], timeline.peaks[number]
        at_most = bytes_text(peak * plan.register_bytes(number))
        cells = (word, credits, str(peak), bytes_text(channel.bytes), at_most)
        alike.setdefault(cells, []).append((carried.source, carried.target))
    if not alike:
        return None
    rows = [
        (word, ranges_text(a for a, _ in ends) if all(a == b for a, b in ends) else pairs_text(ends), *cells)
        for (word, *cells), ends in alike.items()
    ]
    others = len(plan.network.channels) - len(repeated)
    more = f"; {number_text(others, 'other channel')} used once per call" if others else ""
    if ranks := plan.squeezed:
        more += f"; fewer than is fastest, because ranks {ranges_text(ranks)} have too little memory for more"
    return Section(
        f"Channels: registers of the channels used once per microbatch{more}",
        ("channel", "stages", ">credits", ">most in use", ">bytes each", ">bytes at most"),
        rows,
    )


def _memory(plan: MpmdPlan) -> Section:
    most = plan.memory.worst
    parts = sorted(((size, kind) for kind, size in most.peak_parts.items() if size), reverse=True)
    return Section(
        f"Memory: at most {bytes_text(most.peak)} on each device of rank {most.rank}, "
        f"{_share(most.peak, most.capacity)} of its {bytes_text(most.capacity)}, during {most.peak_label}",
        lines=[", ".join(f"{bytes_text(size)} {kind}" for size, kind in parts)],
    )
