"""`plan.diff(other)`: the differences between two plans, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from shardc.ir.walk import short_aval
from shardc.pipeline.plan import MpmdPlan, PlanView
from shardc.plan.saved_plan import SavedLeaf, SavedPlan, record, record_borders
from shardc.report.tables import (
    Section,
    bytes_text,
    devices_text,
    fold_paths,
    fold_rows,
    number_text,
    percent_text,
    placement_text,
    report_text,
    seconds_text,
    signed_text,
    times_text,
)
from shardc.sbp.placement import Placement

SAME = "The plans are the same: they have equal placements and equal moves."


def diff(one: PlanView, other: PlanView, width: int | None = None) -> str:
    """The text of the differences between two plans, from the first to the second, folded to a width."""
    parts = [
        _leaves("Arguments", _inputs(one), _inputs(other)),
        _leaves("Results", _outputs(one), _outputs(other)),
        _operations(one, other),
        _moves(one, other),
    ]
    if not any(parts) and _numbers(one) == _numbers(other) and one.mesh == other.mesh and _order(one) == _order(other):
        return SAME
    return report_text([_totals(one, other), *parts], width)


def diff_saved(one: SavedPlan, other: SavedPlan, width: int | None = None) -> str:
    """The differences of two saved plans, or of one and a plan as it would be saved: what moves is not known then."""
    parts = [
        _leaves("Arguments", _of_file(one.arguments), _of_file(other.arguments)),
        _leaves("Results", _of_file(one.results), _of_file(other.results)),
        _saved_operations(one, other),
    ]
    rows = [
        ("mesh", *(", ".join(f"{a}={n}" for a, n in plan.mesh.items()) for plan in (one, other))),
        ("time of a call", seconds_text(one.seconds), seconds_text(other.seconds)),
        ("gap", _gap_text(one.gap), _gap_text(other.gap)),
    ]
    if not any(parts) and all(a == b for _, a, b in rows):
        return SAME
    head = f"{one.function} of {one.name}, and {other.function} of {other.name}"
    return report_text([Section(head, ("", ">this plan", ">the other"), rows), *parts], width)


def saved_of(plan: PlanView) -> SavedPlan:
    """A plan as it would be saved."""
    if not isinstance(plan, MpmdPlan):
        return record(plan)
    return record_borders(plan.program, plan.mesh, plan.inputs, plan.outputs, plan.seconds, plan.gap)


def _of_file(leaves: Mapping[str, SavedLeaf]) -> _Leaves:
    return {path or "result": (leaf.type, leaf.placement) for path, leaf in leaves.items()}


def _name(plan: PlanView) -> str:
    return f"{plan.program.name} on " + " x ".join(f"{a}={n}" for a, n in plan.mesh.whole_axes)


def _numbers(plan: PlanView) -> tuple[float, float, float, float]:
    return plan.seconds, plan.bytes_per_device, plan.memory.peak, len(plan.moves)


def _order(plan: PlanView) -> str:
    """The schedule of a pipeline."""
    return str(plan.schedule) if isinstance(plan, MpmdPlan) else ""


def _totals(one: PlanView, other: PlanView) -> Section:
    names = [_name(plan) for plan in (one, other)]
    machines = [replace(plan.mesh.topology, layout=()) for plan in (one, other)]
    if machines[0] != machines[1]:
        names = [f"{_name(plan)}: {devices_text(plan.mesh.topology, plan.mesh.size)}" for plan in (one, other)]
    head = f"Two plans of {names[0]}" if names[0] == names[1] else f"{names[0]}, and {names[1]}"
    figures = zip(
        ("time of a call", "sent by each device", "peak memory", "collectives"),
        (seconds_text, bytes_text, bytes_text, lambda n: f"{n:.0f}"),
        _numbers(one), _numbers(other), strict=True,
    )  # fmt: skip
    rows = [(title, text(a), text(b), signed_text(b - a, text)) for title, text, a, b in figures]
    rows.append(("gap", _gap_text(one.gap), _gap_text(other.gap), ""))
    if isinstance(one, MpmdPlan) and isinstance(other, MpmdPlan):
        a, b = (sum(t.bytes for t in plan.transfers) for plan in (one, other))
        rows.append(("sent from stage to stage", bytes_text(a), bytes_text(b), signed_text(b - a, bytes_text)))
        rows.append(("stages", str(len(one.stages)), str(len(other.stages)), ""))
        rows.append(("schedule", one.schedule.name, other.schedule.name, ""))
    return Section(head, ("", ">this plan", ">the other", ">difference"), rows)


def _gap_text(gap: float | None) -> str:
    return "unknown" if gap is None else percent_text(gap)


_Leaves: TypeAlias = dict[str, tuple[str, Placement]]
"""Type and placement of each argument or result, by path."""


def _inputs(plan: PlanView) -> _Leaves:
    return _by_path(plan.program.in_paths, plan.program.in_avals, plan.whole_inputs)


def _outputs(plan: PlanView) -> _Leaves:
    return _by_path([p or "result" for p in plan.program.out_paths], plan.program.out_avals, plan.whole_outputs)


def _by_path(paths: Sequence[str], avals: Sequence[Any], placements: Sequence[Placement]) -> _Leaves:
    return {path: (short_aval(a), p) for path, a, p in zip(paths, avals, placements, strict=True)}


def _leaves(title: str, one: _Leaves, other: _Leaves) -> Section | None:
    """A table of the arguments, or results, that differ in type or placement. Alike ones share a row."""
    differ: list[tuple[tuple[str, str, str], str, None]] = []
    for path in dict.fromkeys((*one, *other)):
        a, b = one.get(path), other.get(path)
        if a == b:
            continue
        kinds = " -> ".join(dict.fromkeys(leaf[0] for leaf in (a, b) if leaf is not None))
        here, there = ("none" if leaf is None else placement_text(leaf[1]) for leaf in (a, b))
        differ.append(((kinds, here, there), path, None))
    if not differ:
        return None
    return Section(
        f"{title} that differ: {len(differ)} of {len(one.keys() | other.keys())}",
        ("path", "type", "this plan", "the other"),
        [(times_text(fold_paths(paths), len(paths)), *map(str, key)) for key, paths, _ in fold_rows(differ)],
    )


def _operations(one: PlanView, other: PlanView) -> Section | None:
    """The number of operations whose operands or results have another placement, of two plans of one program."""
    if isinstance(one, MpmdPlan) or isinstance(other, MpmdPlan):
        return None
    return _saved_operations(record(one), record(other))


def _saved_operations(one: SavedPlan, other: SavedPlan) -> Section | None:
    if one.digests != other.digests:
        return Section("The programs differ; arguments and results are compared by path.")
    if one.rows is None or other.rows is None:  # of a pipeline
        return None
    pairs = [(x, y) for x, y in zip(one.rows, other.rows, strict=True) if x.is_operation]
    moved = sum(x.at != y.at for x, y in pairs)
    if not moved:
        return None
    count = number_text(len(pairs), "operation")
    return Section(f"{moved} of {count} read or make a value with another placement.")


_Kind: TypeAlias = tuple[str, str, str, str, str, str]
"""Collective, axes, value, placement before and after, source line."""


def _moves(one: PlanView, other: PlanView) -> Section | None:
    """A table of the kinds of collectives whose count or bytes differ between the plans."""
    a, b = _by_kind(one), _by_kind(other)
    changed = [kind for kind in dict.fromkeys((*a, *b)) if a.get(kind) != b.get(kind)]
    if not changed:
        return None
    rows: list[Sequence[str]] = []
    for kind in changed:
        found = [of.get(kind, (0, 0)) for of in (a, b)]
        counts = [f"{times_text(bytes_text(size), n)}" if n else "" for n, size in found]
        *values, source = kind
        rows.append((*values, *counts, signed_text(found[1][1] - found[0][1], bytes_text), source))
    columns = ("collective", "over", "value", "from", "to", ">this plan", ">the other", ">difference", "made by")
    return Section("Moves that differ: bytes that each device sends in one call, and how often", columns, rows)


def _by_kind(plan: PlanView) -> dict[_Kind, tuple[int, float]]:
    """Count and bytes of each kind of collective."""
    found: dict[_Kind, tuple[int, float]] = {}
    for _, c in plan.moves:
        kind = (c.kind, ", ".join(c.axes), c.value, placement_text(c.src), placement_text(c.dst), c.source)
        times, sent = found.get(kind, (0, 0))
        found[kind] = (times + c.count, sent + c.bytes)
    return found
