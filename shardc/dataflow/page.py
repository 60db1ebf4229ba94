"""The page of a flow: its runs, the values that its nodes hand over, and the programs of its functions."""

from __future__ import annotations

from typing import Any, Final

from shardc.dataflow.chart import FlowChart, unknown_text
from shardc.dataflow.explain import average_text, flow_sections, how_text, how_to_tell, made_text, meshes_of
from shardc.dataflow.plan import PlannedFlow, functions_of
from shardc.errors import number_text
from shardc.machine.mesh import AnyMesh, view
from shardc.report.page.charts import chart_data
from shardc.report.page.modules import PlacedRows
from shardc.report.page.page import UNLAUNCHED, Figure, Page, moves_data, programs_of
from shardc.report.page.places import ArrayAt, arrays_data, mesh_data
from shardc.report.tables import bytes_text, percent_text


def flow_page(plan: PlannedFlow, chart: FlowChart) -> Page:
    """The page of a flow with these runs."""
    data = {**_places(plan), "chart": chart_data(chart), **moves_data(_programs(plan), _WORDS)}
    name, need, most = max(plan.memory_by_row, key=lambda row: (row[2] is not None, row[1] / (row[2] or 1)))
    share = None if most is None else need / most
    without = 0 if plan.has_inputs else 1  # of the inputs' node and actor
    figures = [
        *_times(plan, chart),
        Figure("Moves in a round", bytes_text(plan.bytes), "between meshes and the host"),
        Figure("Most memory", bytes_text(need), name if share is None else f"{percent_text(share)} of {name}", share),
        Figure("Nodes", str(len(plan.nodes) - without), f"in {number_text(len(plan.built.rows) - without, 'actor')}"),
    ]
    sections = [section for section in flow_sections(plan, chart) if section is not None]
    return Page(plan.name, plan.round.where, list(how_to_tell(chart.unknown)), figures, sections, data)


_WORDS: Final = {
    "program": f"in a round in which all nodes run, one device of each call added up, {UNLAUNCHED}",
    "totals": "Bytes that functions send within their meshes in a round in which all nodes run, one device of each "
    "call added up, and their time.",
}


def _programs(plan: PlannedFlow) -> list[PlacedRows]:
    """The programs of the functions, each with how often a round calls it."""
    return [
        ((function, *around), rows, times * calls)
        for function, work, calls in functions_of(plan)
        for around, rows, times in programs_of(work.plan)
    ]


def _times(plan: PlannedFlow, chart: FlowChart) -> list[Figure]:
    """The time of a round: as measured if a run was recorded, else as planned."""
    planned, *measured = chart.tracks
    if measured:
        over = f"averaged over {number_text(chart.rounds, 'recorded round')}, each node waited for"
        note = f"{planned.note}; {chart.rounds} simulated" if planned.note else f"{chart.rounds} simulated"
        return [
            Figure("Time of a round, measured", chart.round_text(measured[0]), over),
            Figure("Time of a round, planned", chart.round_text(planned), note),
        ]
    text, about = average_text(plan, chart), "averaged over rounds"
    if chart.unknown:
        about += f"; {unknown_text(chart.unknown)}"
    return [Figure("Time of a round", text, about)]


def _places(plan: PlannedFlow) -> dict[str, Any]:
    """The meshes of a flow, and the values that are handed over, where they are taken."""
    texts, meshes = meshes_of(plan), dict[AnyMesh, int]()
    found: list[ArrayAt] = []
    for edge in plan.edges:
        why = how_text(edge, texts) + (f", made {made_text(edge)}" if edge.delay else "")
        name = f"{edge.giver} \N{RIGHTWARDS ARROW} {edge.taker}"
        for move in edge.moves:
            _, there = edge.places(move)
            if there.mesh is not None and there.placement is not None:
                mesh = meshes.setdefault(there.mesh, len(meshes))
                found.append(ArrayAt(name, there, mesh, why, there.bytes))
    drawn = [mesh_data(str(texts[mesh]), view(mesh)) for mesh in meshes]
    return {"meshes": drawn, "arrays": [arrays_data("Handed over to meshes", found)]} if found else {}
