"""The sections of a flow plan's `explain()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from shardc.dataflow.chart import base_name
from shardc.dataflow.host import StackWork
from shardc.dataflow.network import Edge
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.round import FlowNode
from shardc.dataflow.work import LeafPlace
from shardc.report.tables import (
    MOST,
    Section,
    bytes_text,
    mesh_text,
    number_text,
    numbers_text,
    percent_text,
    placement_text,
    seconds_text,
    times_text,
)


def where_text(node: FlowNode) -> str:
    """`data=4`, or `host`."""
    return " and ".join(mesh_text(m) for m in node.work.meshes) or "host"


def flow_sections(plan: PlannedFlow) -> list[Section | None]:
    """The report of a flow."""
    return [_head(plan), _nodes(plan), _turns(plan), _edges(plan), _memory(plan)]


def _head(plan: PlannedFlow) -> Section:
    built = plan.built
    unknown = [n.name for n in plan.nodes if n.work.seconds is None and n.number]
    without = 0 if plan.has_inputs else 1  # of the inputs' node and actor, which nobody called
    lines = [
        f"{number_text(len(plan.nodes) - without, 'node')} in {number_text(len(built.rows) - without, 'actor')}; "
        f"{bytes_text(plan.bytes)} move in a round",
        f"A round takes {seconds_text(plan.seconds)} of many"
        + (f", without {_some(unknown)}, whose seconds nobody knows" if unknown else ""),
        "It cannot deadlock: shown by one run without time",
    ]
    if len(built.ends) > 1 or plan.has_inputs:
        ends = [n.name for n in built.ends if (n.number or plan.has_inputs) and not isinstance(n.work, StackWork)]
        lines.append(f"It ends early if {' or '.join(_folded(ends))} has no more")
    return Section(f"Flow {plan.round.where}", lines=lines)


def _some(names: Sequence[str]) -> str:
    first = list(dict.fromkeys(map(base_name, names)))
    return ", ".join(first[:MOST]) + (", ..." if len(first) > MOST else "")


def _folded(names: Sequence[str]) -> list[str]:
    """Names; of several calls of one name the name, and how many they are: `play x16`."""
    count = Counter(map(base_name, names))
    return [times_text(name, n) for name, n in count.items()]


def _alike(rows: Iterable[tuple[str, ...]], names: Sequence[int], number: int | None = None) -> list[tuple[str, ...]]:
    """Rows of which those that differ only in the numbers of calls are one, with how many they are.

    Args:
      rows: the rows.
      names: the columns that name calls.
      number: the column of an actor's number, which is a range then.
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        key = tuple(base_name(x) if i in names else "" if i == number else x for i, x in enumerate(row))
        groups.setdefault(key, []).append(row)
    found: list[tuple[str, ...]] = []
    for key, group in groups.items():
        made = list(group[0] if len(group) == 1 else key)
        if number is not None:
            made[number] = numbers_text(int(row[number]) for row in group)
        for i in names:
            if len({row[i] for row in group}) > 1:
                made[i] = times_text(made[i], len(group))
        found.append(tuple(made))
    return found


def _nodes(plan: PlannedFlow) -> Section:
    actor = plan.built.actor
    rows = [
        (
            str(actor[n]), n.name, where_text(n), "each round" if n.every == 1 else f"every {n.every} rounds",
            "" if n.work.seconds is None else seconds_text(n.work.seconds), n.source,
        )
        for n in plan.nodes
        if n.number or plan.has_inputs
    ]  # fmt: skip
    rows = _alike(sorted(rows, key=_number), (1,), 0)
    return Section("Nodes, by actor", (">actor", "node", "where", "runs", ">time", "called in"), rows)


_LEAST: Final = 1e-3
"""What is in use for less than this share of a round is not listed."""


def _turns(plan: PlannedFlow) -> Section | None:
    """What several nodes use one after the other, and whether that is sure."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for t in plan.turns:
        share = t.seconds / (plan.seconds or t.seconds)
        if share >= _LEAST:
            row = ", ".join(_folded(t.users)), seconds_text(t.seconds), percent_text(share)
            alike.setdefault(row, []).append(t.name)
    rows = [
        (names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} like it", *rest)
        for rest, names in alike.items()
    ]
    outside, lines = plan.seconds_outside_python, []
    if outside is not None and seconds_text(outside) != seconds_text(plan.seconds):
        lines = [
            "Calls in threads count as pure Python, which runs in one thread at a time. If they only wait, or compute "
            f"outside of Python, a round takes {seconds_text(outside)}: seconds=(of a call, in Python) says how much "
            'they do, record=True measures it, and where="process" gives each an interpreter'
        ]
    return Section("Used in turns", ("what", "by", ">a round", ">of it"), rows, lines) if rows else None


def _number(row: Sequence[str]) -> int:
    return int(row[0])


def _edges(plan: PlannedFlow) -> Section | None:
    rows = _alike([_edge(e) for e in plan.edges if e.moves], (0, 1))
    if not rows:
        return None
    return Section(
        "What is handed over", ("from", "to", "late", ">values", "how", ">bytes", ">registers", ">of bytes"), rows
    )


def _edge(e: Edge) -> tuple[str, ...]:
    late = "" if not e.delay else f"{number_text(e.delay, 'round')}"
    return (
        e.giver.name, e.taker.name, late, str(len(e.moves)), how_text(e), bytes_text(e.bytes) if e.bytes else "-",
        "any" if e.registers is None else str(e.registers), bytes_text(e.held_bytes),
    )  # fmt: skip


def how_text(e: Edge) -> str:
    """`stays`, `to the host`, `to data=4 at B`, with `copied` where the giver keeps a copy."""
    moved = [m for m in e.moves if not e.stays(m)]
    copied = ", copied" if any(m.copied for m in e.moves) else ""
    if not moved:
        return f"stays{copied}"
    there = {_place_text(e.places(m)[1]) for m in moved}
    mesh = e.places(moved[0])[1].mesh
    if mesh is None:
        return f"to the host{copied}"
    return f"to {mesh_text(mesh)} at {there.pop() if len(there) == 1 else 'several placements'}{copied}"


def _place_text(place: LeafPlace) -> str:
    return str(place) if place.placement is None else placement_text(place.placement)


def _memory(plan: PlannedFlow) -> Section:
    rows = [
        (name, bytes_text(need), "" if most is None else bytes_text(most))
        for name, need, most in plan.memory_by_row
        if need
    ]
    rows = _alike(rows, (0,))
    return Section("Memory on each device, with all registers full", ("actor", ">at most", ">it has"), rows)
