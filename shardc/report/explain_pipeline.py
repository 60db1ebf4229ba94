"""`plan.explain()` of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from shardc.arrays.far import SMALL, bytes_of, is_small
from shardc.ir.collective import Collective
from shardc.ir.walk import short_aval
from shardc.passes.estimate.backend import backend_of
from shardc.passes.estimate.plan_cost import Time
from shardc.passes.estimate.sizes import piece_bytes
from shardc.pipeline.place_stages import Stage
from shardc.pipeline.plan import HOST_SECONDS, MpmdPlan
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.simulate import Timeline
from shardc.report.chart import KINDS, places_of
from shardc.report.explain import (
    REUSES,
    WORDS,
    found_section,
    gathered_section,
    loops_text,
    memory_decided,
    moving,
    notes_section,
    totals_section,
    why_argument,
    why_placed,
)
from shardc.report.stage_text import cut_grid, pairs_text, ranges_text, stems, stems_text
from shardc.report.tables import (
    Key,
    bytes_text,
    fold_leaves,
    fold_paths,
    fold_rows,
    indented,
    make_table,
    number_text,
    percent_text,
    placement_text,
    seconds_text,
    section,
    times_text,
)
from shardc.sbp.placement import is_even

_WIDTH: Final = 120
_MOST_COLUMNS: Final = 4
"""The most arguments with a column of their own."""
_PARTS: Final = {
    "compute": "computing", "memory": "reading and writing", "overlapped": "overlapped", "launch": "launching",
    "wait": "waiting",
}  # fmt: skip
"""Column names of the parts of a rank's time, where they differ from the field."""
_TASKS: Final = ("load", "F", "B", "I", "W", "update")


def explain_pipeline(plan: MpmdPlan) -> str:
    """The text of a pipeline's plan: time, stages with their tasks and memory, transfers and collectives."""
    timeline = plan.simulate()
    sections = (
        _head(plan, timeline), WORDS, _schedule(plan), _stages(plan, timeline), _tasks(plan, timeline), _times(plan),
        _sent(plan), _arguments(plan), _results(plan), _transfers(plan), _moves(plan), totals_section(plan.collectives),
        _channels(plan, timeline), gathered_section(plan.gathered), found_section(plan.found),
        notes_section(plan.notes), _memory(plan),
    )  # fmt: skip
    return "\n\n".join(filter(None, sections))


# -- head


def _head(plan: MpmdPlan, timeline: Timeline) -> str:
    mesh, schedule = plan.mesh, plan.schedule
    axes, size = " x ".join(f"{a}={n}" for a, n in mesh.axes), mesh.size
    if plan.pipeline.meshes is not None:
        ranks = {s.rank: s.mesh for s in plan.stages}
        axes = " | ".join(" x ".join(f"{a}={n}" for a, n in ranks[r].axes) for r in sorted(ranks))
        size = sum(m.size for m in ranks.values())
    shape = f" ({'x'.join(map(str, mesh.topology.shape))})" if mesh.topology.shape else ""
    chunks = f", {number_text(schedule.chunks, 'stage')} on each" if schedule.chunks > 1 else ""
    moves = moving(plan.collectives)
    sent = (
        f"A device sends at most {bytes_text(plan.bytes_per_device)} a call; on all stages together there are "
        f"{number_text(len(moves), 'collective')} and {number_text(len(plan.transfers), 'transfer')}."
    )
    places = places_of(plan)
    if places:
        small = sum(bytes_of(a) for a in plan.program.out_avals if is_small(a))
        sent += f"\nRank {'; rank '.join(f'{r} runs in {p}' for r, p in enumerate(places))}. "
        sent += f"Results of at most {bytes_text(SMALL)} go to every process: {bytes_text(small)} a call."
    return (
        f"{plan.program.name} on {axes}: {number_text(size, f'{mesh.topology.kind} device')}{shape}\n"
        f"{number_text(len(plan.stages), 'stage')} on {number_text(schedule.ranks, 'rank')}{chunks}; {schedule.name}, "
        f"{number_text(schedule.microbatches, 'microbatch')}{_recompute(plan)}.\n{_time(timeline)}\n{sent}"
        f"{loops_text([s.plan.boxed.jaxpr for s in plan.stages])}"
    )


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


def _time(timeline: Timeline) -> str:
    """One line: time of a call, and how long ranks are busy and idle."""
    whole, busy = timeline.makespan, timeline.busy
    most, least = max(busy), min(busy)
    inner = timeline.bubble_per_rank
    between = seconds_text(max(inner))
    if min(inner) != max(inner):
        between = f"{seconds_text(min(inner))} to {between}"
    return (
        f"About {seconds_text(whole)} a call: rank {busy.index(most)} is busy longest, {seconds_text(most)} "
        f"({_share(most, whole)}); rank {busy.index(least)} is idle longest, {seconds_text(timeline.bubble)} "
        f"({_share(timeline.bubble, whole)}); between its first and its last task a rank is idle for {between}."
    )


def _share(part: float, whole: float) -> str:
    return percent_text(part / whole if whole else 0.0)


def _schedule(plan: MpmdPlan) -> str:
    grid, cut = cut_grid(plan.schedule, _WIDTH)
    more = f"; {cut}, print(plan.schedule) shows all" if cut else ""
    found = {a.kind for row in plan.schedule.rows for a in row}
    kinds = ", ".join(f"{letter} {word}" for letter, word in KINDS.items() if letter in found)
    title = f"Schedule: stage, task ({kinds}), microbatch; a column is one unit of time{more}"
    return f"{title}\n{indented(grid)}"


# -- stages


@dataclass(frozen=True)
class _Leaf:
    """An argument on its home stage."""

    number: int
    path: str
    stage: Stage
    var: Any
    placement: Any

    @property
    def bytes(self) -> int:
        mesh = self.stage.mesh
        return piece_bytes(self.var.aval, self.placement, mesh.sizes, backend_of(mesh.topology.kind))


def _leaves(plan: MpmdPlan) -> list[_Leaf]:
    """Each argument on its home stage, in the order of the arguments."""
    found = [
        _Leaf(i, plan.pieces.program.in_paths[i], stage, var, placement)
        for stage in plan.stages
        for i, var, placement in zip(
            stage.program.arguments, stage.plan.boxed.jaxpr.invars, stage.plan.inputs, strict=True
        )
        if plan.homes[i] == stage.number
    ]
    return sorted(found, key=lambda leaf: leaf.number)


def _stages(plan: MpmdPlan, timeline: Timeline) -> str:
    leaves = _leaves(plan)
    groups: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.path.partition("/")[0], []).append(leaf)
    own = list(groups)[: _MOST_COLUMNS if len(groups) <= _MOST_COLUMNS else _MOST_COLUMNS - 1]
    rest = len(own) < len(groups)
    spread = max(groups, key=lambda name: len({leaf.stage.number for leaf in groups[name]}), default="")
    names = stems({leaf.path.partition("/")[2] or leaf.path: leaf.stage.number for leaf in groups.get(spread, ())})
    columns = [f">{name}" for name in [*own, *(["other"] if rest else [])]]
    peaks = (">peak stash", ">peak received", ">peak of its program")
    table = make_table(">stage", ">rank", "devices", f"which {spread}", *columns, *peaks)
    held, received = _registers(plan, timeline)
    for stage in plan.stages:
        mine = [leaf for leaf in leaves if leaf.stage is stage]
        sizes = [sum(x.bytes for x in mine if x.path.partition("/")[0] == name) for name in own]
        sizes += [sum(x.bytes for x in mine) - sum(sizes)] if rest else []
        axes = ", ".join(f"{a}={n}" for a, n in stage.mesh.axes)
        table.add_row(
            str(stage.number), str(stage.rank), f"{stage.mesh.size}: {axes}" if axes else str(stage.mesh.size),
            stems_text(names.get(stage.number, [])) or "-", *map(_bytes_or_none, sizes),
            _bytes_or_none(held[stage.number]), _bytes_or_none(received[stage.number]),
            bytes_text(stage.plan.memory.peak),
        )  # fmt: skip
    return section("Stages: their arguments, and the peaks of their other memory, in bytes per device", table)


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


def _steps_of(plan: MpmdPlan, stage: Stage) -> dict[str, list[tuple[Any, int]]]:
    """The labels of a stage's steps by kind of task, each with the number of its executions in a call."""
    found: dict[str, list[tuple[Any, int]]] = {}
    times = plan.schedule.microbatches
    for label, (number, _) in plan.built.tasks.items():
        if number != stage.number:
            continue
        if not isinstance(label, Action):
            found.setdefault(str(label).partition(" ")[0], []).append((label, 1))
        elif label.microbatch == 0:
            found.setdefault(label.kind, []).append((label, times))
    return found


def _tasks(plan: MpmdPlan, timeline: Timeline) -> str:
    """A table of the time of one execution of each task. Stages with equal times share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    all_steps = [_steps_of(plan, stage) for stage in plan.stages]
    kinds = [k for k in _TASKS if any(k in steps for steps in all_steps)]
    for stage, steps in zip(plan.stages, all_steps, strict=True):
        each = [sum(plan.cost(label) for label, _ in steps.get(k, ())) for k in kinds]
        busy = sum(plan.cost(label) * times for found in steps.values() for label, times in found)
        cells = (*(seconds_text(s) if s else "-" for s in each), seconds_text(busy), _share(busy, timeline.makespan))
        rows.setdefault(cells, []).append(stage.number)
    table = make_table("stages", *(f">{k}" for k in kinds), ">busy per call", ">share")
    for cells, numbers in rows.items():
        table.add_row(ranges_text(numbers), *cells)
    least = seconds_text(HOST_SECONDS)
    title = f"Tasks: time of one execution, at least {least} for its launch; a dash: nothing to compute"
    return section(title, table)


def _times(plan: MpmdPlan) -> str:
    """A table of the parts of each rank's time. Ranks with equal times share a row."""
    parts = [f.name for f in fields(Time) if any(getattr(t, f.name) for t in plan.rank_times)]
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, time in enumerate(plan.rank_times):
        cells = tuple("-" * (part == "overlapped") + seconds_text(getattr(time, part)) for part in parts)
        rows.setdefault(cells, []).append(rank)
    table = make_table("ranks", *(f">{_PARTS.get(part, part)}" for part in parts))
    for cells, ranks in rows.items():
        table.add_row(ranges_text(ranks), *cells)
    return section(f"Time: how each rank spends the {seconds_text(plan.seconds)} of a call", table)


def _sent(plan: MpmdPlan) -> str:
    """A table of the bytes that the collectives of one execution of each task send."""
    all_steps = [_steps_of(plan, stage) for stage in plan.stages]
    rows: dict[tuple[str, ...], list[int]] = {}
    found: list[list[int]] = []
    kinds = [k for k in _TASKS if any(k in steps for steps in all_steps)]
    for steps in all_steps:
        plans = [[plan.built.tasks[label][1].plan for label, _ in steps.get(k, ())] for k in kinds]
        found.append([sum(p.bytes_per_device for p in each if p is not None) for each in plans])
    shown = [i for i in range(len(kinds)) if any(row[i] for row in found)]
    if not shown:
        return ""
    for number, row in enumerate(found):
        rows.setdefault(tuple(_bytes_or_none(row[i]) for i in shown), []).append(number)
    table = make_table("stages", *(f">{kinds[i]}" for i in shown))
    for cells, numbers in rows.items():
        table.add_row(ranges_text(numbers), *cells)
    return section("Tasks: bytes that each device sends in the collectives of one execution", table)


# -- values


def _arguments(plan: MpmdPlan) -> str:
    rows: list[tuple[Key, str, _Leaf]] = []
    leaves = _leaves(plan)
    for leaf in leaves:
        padded = "" if is_even(leaf.var.aval.shape, leaf.placement, leaf.stage.mesh.sizes) else ", padded"
        why = why_argument(plan.arguments[leaf.number], leaf.placement)
        rows.append(((short_aval(leaf.var.aval), placement_text(leaf.placement) + padded, why), leaf.path, leaf))
    head = f"Arguments: {number_text(len(leaves), 'array')}, each on the stage that uses it"
    if not rows:
        return head
    table = make_table("path", "type", "placement", "why", "stages", ">bytes per device")

    def stages_of(found: list[_Leaf]) -> str:
        return ranges_text(leaf.stage.number for leaf in found)

    for key, path, found in fold_leaves(rows, stages_of):
        most = max(sum(leaf.bytes for leaf in found if leaf.stage.number == n) for n in {x.stage.number for x in found})
        table.add_row(path, *map(str, key), stages_of(found), bytes_text(most))
    return section(f"{head}; bytes of the stage that holds most of them", table)


def _results(plan: MpmdPlan) -> str:
    rows: list[tuple[Key, str, int]] = []
    paths = plan.pieces.program.out_paths
    for i, (path, aval, placement, pin, tie) in enumerate(
        zip(paths, plan.pieces.program.out_avals, plan.piece_outputs, plan.results, plan.ties, strict=True)
    ):
        if tie is None or plan.piece_inputs[tie] != placement:
            key = (short_aval(aval), placement_text(placement), why_placed(pin, "chosen"))
            rows.append((key, path or "result", plan.result_stages[i]))
    head = f"Results: {number_text(len(paths), 'array')}"
    if len(rows) < len(paths):
        head += f"; {len(paths) - len(rows)} of them {REUSES}"
    if not rows:
        return head
    table = make_table("path", "type", "placement", "why", "stages")
    for key, path, stages in fold_leaves(rows, ranges_text):
        table.add_row(path, *map(str, key), ranges_text(stages))
    return section(head, table)


# -- what moves


def _transfers(plan: MpmdPlan) -> str:
    if not plan.transfers:
        return section("Transfers between stages: none")
    link = plan.mesh.topology.link_along(plan.pipeline.axis)
    rows = [
        ((t.value, t.count, t.bytes // t.count, t.source < t.target), t.line, (t.source, t.target))
        for t in plan.transfers
    ]
    table = make_table("stages", "value", ">times each", ">bytes", ">time", "made by")
    for (value, count, size, _), lines, pairs in fold_rows(rows):
        assert isinstance(size, int)
        copies = len(set(lines))
        made = times_text(fold_paths(sorted(set(lines))), copies)
        made = f"copy of {made}" if made.startswith("argument ") else made
        seconds = link.latency + size / link.bandwidth
        table.add_row(pairs_text(pairs), str(value), str(count), bytes_text(size), seconds_text(seconds), made)
    whole = bytes_text(sum(t.bytes for t in plan.transfers))
    title = f"Transfers between stages, {whole} a call: bytes that a device sends, and time, of one execution"
    return section(title, table)


def _moves(plan: MpmdPlan) -> str:
    """A table of the collectives of all stages. Stages with equal collectives share a row."""

    def key_of(c: Collective) -> Key:
        return c.kind, ", ".join(c.axes), c.value, placement_text(c.src), placement_text(c.dst)

    rows = [(key_of(c), c.source, (stage.number, c)) for stage, c in plan.stage_collectives if c.bytes]
    if not rows:
        return section("Moves within stages: none")
    table = make_table("stages", "collective", "over", "value", "from", "to", ">times", ">bytes", "made by")
    for key, _, found in fold_rows(rows):
        of_stage: dict[int, list[Collective]] = {}
        for number, c in found:
            of_stage.setdefault(number, []).append(c)
        alike: dict[tuple[int, int], list[int]] = {}
        for number, cs in of_stage.items():
            alike.setdefault((sum(c.count for c in cs), sum(c.bytes for c in cs)), []).append(number)
        for (count, size), numbers in alike.items():
            made = fold_paths([c.source for number in numbers for c in of_stage[number]])
            table.add_row(ranges_text(numbers), *map(str, key), str(count), bytes_text(size), made)
    return section("Moves within stages: bytes that each device of one stage sends in one call", table)


def _channels(plan: MpmdPlan, timeline: Timeline) -> str:
    """A table of the registers of the channels that carry values once per microbatch."""
    rows: dict[tuple[str, str, str, int, str], list[tuple[int, int]]] = {}
    given = {c for row in plan.network.actors for s in row if isinstance(s.label, Action) for c, _ in s.gives}
    for number in sorted(given):
        channel, carried = plan.network.channels[number], plan.built.channel_values[number]
        assert carried is not None
        credits = "unbounded" if channel.registers is None else str(channel.registers)
        word, peak = channel.name.rpartition(" ")[0], timeline.peaks[number]
        at_most = bytes_text(peak * plan.register_bytes(number))
        rows.setdefault((word, credits, bytes_text(channel.bytes), peak, at_most), []).append(
            (carried.source, carried.target)
        )
    if not rows:
        return ""
    table = make_table("channel", "stages", ">credits", ">most in use", ">bytes each", ">bytes at most")
    for (word, credits, size, peak, at_most), ends in rows.items():
        inner = all(a == b for a, b in ends)
        stages = ranges_text(a for a, _ in ends) if inner else pairs_text(ends)
        table.add_row(word, stages, credits, str(peak), size, at_most)
    others = len(plan.network.channels) - len(given)
    more = f"; {number_text(others, 'other channel')} used once per call" if others else ""
    few = f"; fewer than is fastest, because ranks {ranges_text(plan.squeezed)} have too little memory for more"
    more += few if plan.squeezed else ""
    return section(f"Channels: registers of the channels used once per microbatch{more}", table)


def _memory(plan: MpmdPlan) -> str:
    memory = plan.memory
    most = memory.worst
    parts = sorted(((size, kind) for kind, size in most.peak_parts.items() if size), reverse=True)
    return (
        f"Memory: at most {bytes_text(most.peak)} on each device of rank {most.rank}, "
        f"{_share(most.peak, most.capacity)} of its {bytes_text(most.capacity)}, during {most.peak_label}\n  "
        + ", ".join(f"{bytes_text(size)} {kind}" for size, kind in parts)
        + memory_decided(plan.unlimited, plan.seconds)
    )
