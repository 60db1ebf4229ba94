"""`plan.diff(other)`: the differences between two plans, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from shardc.ir.collective import Collective
from shardc.ir.walk import short_aval
from shardc.pipeline.plan import MpmdPlan
from shardc.plan.plan import SpmdPlan
from shardc.plan.saved_plan import record
from shardc.report.explain import moving
from shardc.report.tables import (
    bytes_text,
    fold_paths,
    fold_rows,
    make_table,
    number_text,
    percent_text,
    placement_text,
    seconds_text,
    section,
    signed_text,
    times_text,
)
from shardc.sbp.placement import Placement

SAME = "The plans are the same: they have equal placements and equal moves."


def diff(one: SpmdPlan | MpmdPlan, other: SpmdPlan | MpmdPlan) -> str:
    """The text of the differences between two plans, from the first to the second."""
    parts = [
        _leaves("Arguments", _inputs(one), _inputs(other)),
        _leaves("Results", _outputs(one), _outputs(other)),
        _operations(one, other),
        _moves(one.collectives, other.collectives),
    ]
    if not any(parts) and _numbers(one) == _numbers(other) and one.mesh == other.mesh and _order(one) == _order(other):
        return SAME
    return "\n\n".join(filter(None, [_totals(one, other), *parts]))


def _name(plan: SpmdPlan | MpmdPlan) -> str:
    return f"{plan.program.name} on " + " x ".join(f"{a}={n}" for a, n in plan.mesh.axes)


def _numbers(plan: SpmdPlan | MpmdPlan) -> tuple[float, float, float, float]:
    return plan.seconds, plan.bytes_per_device, plan.memory.peak, len(moving(plan.collectives))


def _order(plan: SpmdPlan | MpmdPlan) -> str:
    """The schedule of a pipeline."""
    return "" if plan.staging is None else plan.staging.order


def _totals(one: SpmdPlan | MpmdPlan, other: SpmdPlan | MpmdPlan) -> str:
    names = (_name(one), _name(other))
    head = f"Two plans of {names[0]}" if names[0] == names[1] else f"{names[0]}, and {names[1]}"
    table = make_table("", ">this plan", ">the other", ">difference")
    rows = zip(
        ("time of a call", "sent by each device", "peak memory", "collectives"),
        (seconds_text, bytes_text, bytes_text, lambda n: f"{n:.0f}"),
        _numbers(one), _numbers(other), strict=True,
    )  # fmt: skip
    for title, text, a, b in rows:
        table.add_row(title, text(a), text(b), signed_text(b - a, text))
    table.add_row("optimality gap", _gap_text(one.gap), _gap_text(other.gap), "")
    if (a := one.staging) is not None and (b := other.staging) is not None:
        sent = bytes_text(a.bytes), bytes_text(b.bytes), signed_text(b.bytes - a.bytes, bytes_text)
        table.add_row("sent from stage to stage", *sent)
        table.add_row("stages", str(a.count), str(b.count), "")
        table.add_row("schedule", a.schedule, b.schedule, "")
    return section(head, table)


def _gap_text(gap: float | None) -> str:
    return "unknown" if gap is None else percent_text(gap)


_Leaves: TypeAlias = dict[str, tuple[str, Placement]]
"""Type and placement of each argument or result, by path."""


def _inputs(plan: SpmdPlan | MpmdPlan) -> _Leaves:
    return _by_path(plan.program.in_paths, plan.program.in_avals, plan.inputs)


def _outputs(plan: SpmdPlan | MpmdPlan) -> _Leaves:
    return _by_path([p or "result" for p in plan.program.out_paths], plan.program.out_avals, plan.outputs)


def _by_path(paths: Sequence[str], avals: Sequence[Any], placements: Sequence[Placement]) -> _Leaves:
    return {path: (short_aval(a), p) for path, a, p in zip(paths, avals, placements, strict=True)}


def _leaves(title: str, one: _Leaves, other: _Leaves) -> str:
    """A table of the arguments, or results, that differ in type or placement. Alike ones share a row."""
    rows: list[tuple[tuple[str, str, str], str, None]] = []
    for path in dict.fromkeys((*one, *other)):
        a, b = one.get(path), other.get(path)
        if a == b:
            continue
        kinds = " -> ".join(dict.fromkeys(leaf[0] for leaf in (a, b) if leaf is not None))
        here, there = ("none" if leaf is None else placement_text(leaf[1]) for leaf in (a, b))
        rows.append(((kinds, here, there), path, None))
    if not rows:
        return ""
    table = make_table("path", "type", "this plan", "the other")
    for key, paths, _ in fold_rows(rows):
        table.add_row(times_text(fold_paths(paths), len(paths)), *map(str, key))
    return section(f"{title} that differ: {len(rows)} of {len(one.keys() | other.keys())}", table)


def _operations(one: SpmdPlan | MpmdPlan, other: SpmdPlan | MpmdPlan) -> str:
    """A line with the number of operations whose operands or results have another placement."""
    if one.staging is not None or other.staging is not None:
        return ""
    a, b = record(one.programs[0]), record(other.programs[0])
    if a.digests != b.digests:
        return "The programs differ; arguments and results are compared by path."
    pairs = [(x, y) for x, y in zip(a.rows or (), b.rows or (), strict=True) if x.is_operation]
    moved = sum(x.at != y.at for x, y in pairs)
    if not moved:
        return ""
    return f"{moved} of {number_text(len(pairs), 'operation')} read or make a value with another placement."


_Kind: TypeAlias = tuple[str, str, str, str, str, str]
"""Collective, axes, value, placement before and after, source line."""


def _moves(one: Sequence[Collective], other: Sequence[Collective]) -> str:
    """A table of the kinds of collectives whose count or bytes differ between the plans."""
    a, b = _by_kind(one), _by_kind(other)
    changed = [kind for kind in dict.fromkeys((*a, *b)) if a.get(kind) != b.get(kind)]
    if not changed:
        return ""
    columns = ("collective", "over", "value", "from", "to", ">this plan", ">the other", ">difference", "made by")
    table = make_table(*columns)
    for kind in changed:
        times, sent = zip(a.get(kind, (0, 0)), b.get(kind, (0, 0)), strict=True)
        counts = [f"{times_text(bytes_text(size), n)}" if n else "" for n, size in zip(times, sent, strict=True)]
        *values, source = kind
        table.add_row(*values, *counts, signed_text(sent[1] - sent[0], bytes_text), source)
    title = "Moves that differ: bytes that each device sends in one call, and how often"
    return section(title, table)


def _by_kind(collectives: Sequence[Collective]) -> dict[_Kind, tuple[int, int]]:
    """Count and bytes of each kind of collective."""
    found: dict[_Kind, tuple[int, int]] = {}
    for c in moving(collectives):
        kind = (c.kind, ", ".join(c.axes), c.value, placement_text(c.src), placement_text(c.dst), c.source)
        times, sent = found.get(kind, (0, 0))
        found[kind] = (times + c.count, sent + c.bytes)
    return found
