"""The sections of a flow plan's `explain()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from shardc.arrays.place import Place
from shardc.dataflow.chart import FlowChart, least, unknown_text
from shardc.dataflow.host import StackWork
from shardc.dataflow.network import Edge
from shardc.dataflow.plan import PlannedFlow, functions_of
from shardc.dataflow.round import FlowNode
from shardc.machine.mesh import AnyMesh
from shardc.machine.puts import HERE
from shardc.plan.counterfactual import Counterfactual
from shardc.report.explain_why import stage_title, why_sections
from shardc.report.tables import (
    MOST,
    MeshText,
    Section,
    bytes_text,
    mesh_texts,
    number_text,
    numbers_text,
    percent_text,
    placement_text,
    seconds_text,
    times_text,
)


def flow_sections(plan: PlannedFlow, chart: FlowChart | None = None) -> list[Section | None]:
    """The report of a flow.

    Args:
      plan: the flow's.
      chart: of a recorded run, whose times come first, or with seconds that the plan does not know; None: neither.
    """
    meshes = meshes_of(plan)
    return [_head(plan, chart), _nodes(plan, meshes), _turns(plan), _edges(plan, meshes), _memory(plan)]


def flow_why_sections(plan: PlannedFlow, pattern: str) -> list[Section]:
    """Why values of its functions have their placements, as `why_sections` says it.

    Raises:
      ArgumentError: no value of any function has the name.
    """
    asked, titles = list[Counterfactual](), list[str]()
    for name, work, _ in functions_of(plan):
        parts: Sequence[Counterfactual] = work.plan.counterfactuals
        asked += parts
        titles += [f"{name}, {stage_title(k)}" if len(parts) > 1 else f"{name}: one call" for k in range(len(parts))]
    return why_sections(asked, pattern, titles)


def meshes_of(plan: PlannedFlow) -> dict[AnyMesh, MeshText]:
    """The meshes of a flow, each with a text of its own."""
    return mesh_texts(mesh for node in plan.nodes for mesh in node.work.meshes)


def _head(plan: PlannedFlow, chart: FlowChart | None) -> Section:
    built = plan.built
    without = 0 if plan.has_inputs else 1  # of the inputs' node and actor, which nobody called
    lines = [
        f"{number_text(len(plan.nodes) - without, 'node')} in {number_text(len(built.rows) - without, 'actor')}; "
        f"{bytes_text(plan.bytes)} move in a round",
        *times_of_round(plan, chart),
        "It cannot deadlock: shown by one run without time",
    ]
    if len(built.ends) > 1 or plan.has_inputs:
        ends = [n for n in built.ends if (n.number or plan.has_inputs) and not isinstance(n.work, StackWork)]
        lines.append(f"It ends early if {' or '.join(_folded(ends))} has no more")
    return Section(f"Flow {plan.round.where}", lines=lines)


def times_of_round(plan: PlannedFlow, chart: FlowChart | None) -> Iterator[str]:
    """Lines with the time of a round: measured, if a run was recorded, then planned, and what is unknown of it."""
    if chart is not None and len(chart.tracks) > 1:
        planned, measured = chart.tracks
        yield (
            f"A round took {chart.round_text(measured)}, averaged over {number_text(chart.rounds, 'recorded round')} "
            f"with each node waited for; planned: {chart.round_text(planned)}"
            + (f", {planned.note}" if planned.note else "")
        )
        return
    yield f"A round takes {average_text(plan, chart)}, averaged over rounds"
    yield from how_to_tell(plan.unknown if chart is None else chart.unknown)


def average_text(plan: PlannedFlow, chart: FlowChart | None) -> str:
    """`30.0 ms`, or `at least 30.0 ms`: the time of a round as planned, with the seconds that a chart was given."""
    if chart is None:
        return least(plan.unknown) + seconds_text(plan.seconds)
    return least(chart.unknown) + seconds_text(plan.average(chart.said))


_LEAST: Final = 1e-3
"""The smallest share of a round for which a resource is listed."""


def _turns(plan: PlannedFlow) -> Section | None:
    """The resources that several nodes use by turns, and whether that is sure."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for t in plan.turns:
        share = t.seconds / (plan.seconds or t.seconds)
        if share >= _LEAST:
            row = ", ".join(_counted(t.users)), seconds_text(t.seconds), percent_text(share)
            alike.setdefault(row, []).append(t.name)
    rows = [
        (names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} like it", *rest)
        for rest, names in alike.items()
    ]
    outside, lines = plan.seconds_outside_python, []
    if outside is not None and seconds_text(outside) != seconds_text(plan.seconds):
        lines = [
            "Calls in threads count as pure Python, which runs in one thread at a time. If they only wait, or compute "
            f"outside of Python, a round takes {least(plan.unknown)}{seconds_text(outside)}: "
            "seconds=(of a call, in Python) says how much "
            'they do, record=True measures it, and where="process" gives each an interpreter'
        ]
    return Section("Used in turns", ("what", "by", ">a round", ">of it"), rows, lines) if rows else None


def how_to_tell(unknown: Sequence[FlowNode]) -> Iterator[str]:
    """A line about nodes whose seconds are unknown, if there are some."""
    if unknown:
        text = unknown_text(unknown)
        yield f"{text[0].upper()}{text[1:]}: shardc.host(..., seconds=) says it, run(..., record=True) measures it"


def _folded(nodes: Sequence[FlowNode]) -> list[str]:
    """Names; of several calls of one function its name, and how many they are: `play x16`."""
    return _counted(n.function for n in nodes)


def _counted(names: Iterable[str]) -> list[str]:
    return [times_text(name, n) for name, n in Counter(names).items()]


# -- tables whose rows are nodes, or pairs of them

_Row: TypeAlias = tuple[Any, ...]
"""The cells of a row: texts, and what `_cell` folds: nodes, meshes with words around them, numbers of actors."""


class _At(NamedTuple):
    """A mesh with the words around it."""

    before: str
    mesh: MeshText
    after: str


def _alike(rows: Iterable[_Row]) -> list[tuple[str, ...]]:
    """Rows as texts, of which those that differ only in the numbers of calls and actors, and in the devices of meshes,
    are one."""
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(map(_kind_of, row)), []).append(row)
    return [tuple(map(_cell, zip(*group, strict=True))) for group in groups.values()]


def _kind_of(x: Any) -> str:
    """The part of a cell that rows in one group share."""
    match x:
        case FlowNode():
            return x.function
        case _At():
            return f"{x.before}{x.mesh.shape}{x.after}"
        case int():
            return ""
        case _:
            return str(x)


def _cell(column: tuple[Any, ...]) -> str:
    """The text of a cell of a group, given that of each row."""
    first = column[0]
    match first:
        case FlowNode():
            nodes = dict.fromkeys(column)
            return first.name if len(nodes) == 1 else times_text(first.function, len(column))
        case _At():
            devices = [d for d in dict.fromkeys(x.mesh.devices for x in column) if d]
            some = devices[:MOST] + [f"{len(devices) - MOST} more"] * (len(devices) > MOST)
            return f"{first.before}{MeshText(first.mesh.shape, '; '.join(some))}{first.after}"
        case int():
            return numbers_text(dict.fromkeys(column))
        case _:
            return str(first)


def _nodes(plan: PlannedFlow, meshes: Mapping[AnyMesh, MeshText]) -> Section:
    actor = plan.built.actor
    nodes = sorted((n for n in plan.nodes if n.number or plan.has_inputs), key=lambda n: (actor[n], n.number))
    rows = _alike(
        (
            actor[n], n, _where(n, meshes), "each round" if n.every == 1 else f"every {n.every} rounds",
            "unknown" if n.work.seconds is None else seconds_text(n.work.seconds), n.source,
        )
        for n in nodes
    )  # fmt: skip
    return Section("Nodes, by actor", (">actor", "node", "where", "runs", ">time of a call", "called in"), rows)


def _where(node: FlowNode, meshes: Mapping[AnyMesh, MeshText]) -> _At | str:
    found = [meshes[m] for m in node.work.meshes]
    return _At("", found[0], "") if len(found) == 1 else " and ".join(map(str, found)) or "host"


def _edges(plan: PlannedFlow, meshes: Mapping[AnyMesh, MeshText]) -> Section | None:
    edges = [e for e in plan.edges if e.moves]
    if not edges:
        return None
    boxed = any(e.boxing_bytes for e in edges)
    boxing = [">boxing"] if boxed else []
    columns = ("from", "to", "made", ">values", "how", ">bytes", *boxing, ">registers", ">of bytes")
    notes = [MADE] * any(e.delay > 1 for e in edges) + [BOXING] * boxed
    return Section("What is handed over", columns, _alike(_edge(e, meshes, boxed) for e in edges), notes)


MADE: Final = (
    "made: seen from the round that takes a value. The state was made 1 round before, shardc.late(state, 1) therefore "
    "2 rounds before."
)
BOXING: Final = "boxing: what a device sends within its mesh, before values leave it and when they have come."


def _edge(e: Edge, meshes: Mapping[AnyMesh, MeshText], boxed: bool) -> _Row:
    sent = [bytes_text(n) if n else "-" for n in (e.bytes, e.boxing_bytes)]
    return (
        e.giver, e.taker, made_text(e), str(len(e.moves)), how(e, meshes), *sent[: 1 + boxed],
        "any" if e.registers is None else str(e.registers), bytes_text(e.held_bytes),
    )  # fmt: skip


def made_text(e: Edge) -> str:
    """`2 rounds before`; empty for a value of the same round."""
    return f"{number_text(e.delay, 'round')} before" if e.delay else ""


def how(e: Edge, meshes: Mapping[AnyMesh, MeshText]) -> _At | str:
    """`stays`, `to the host`, `to data=4 at B by put`, with `copied` where the giver keeps a copy."""
    moved = [m for m in e.moves if not e.stays(m)]
    copied = ", copied" if any(m.copied for m in e.moves) else ""
    if not moved:
        return f"stays{copied}"
    there = sorted({_place_text(e.places(m)[1]) for m in moved})
    mesh = e.places(moved[0])[1].mesh
    if mesh is None:
        return f"to the host{copied}"
    some = there[:MOST] + [f"{len(there) - MOST} more"] * (len(there) > MOST)
    by = "" if e.carrier == HERE else f" by {e.carrier}"
    return _At("to ", meshes[mesh], f" at {' and '.join(some)}{by}{copied}")


def how_text(e: Edge, meshes: Mapping[AnyMesh, MeshText]) -> str:
    return _cell((how(e, meshes),))


def _place_text(place: Place) -> str:
    return str(place) if place.placement is None else placement_text(place.placement)


def _memory(plan: PlannedFlow) -> Section:
    rows = [
        (row[0] if len(row) == 1 else name, bytes_text(need), "" if most is None else bytes_text(most))
        for row, (name, need, most) in zip(plan.built.rows, plan.memory_by_row, strict=True)
        if need
    ]
    columns = ("actor", ">at most", ">it has")
    return Section("Memory on each device, with all registers full", columns, _alike(rows))
