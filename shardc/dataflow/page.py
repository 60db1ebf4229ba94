"""The page of a flow: its runs, the values that its nodes hand over, and the programs of its functions."""

from __future__ import annotations

from typing import Any

from shardc import compat
from shardc.dataflow.chart import base_name
from shardc.dataflow.explain import flow_sections, how_text
from shardc.dataflow.plan import PlannedFlow
from shardc.dataflow.work import FunctionWork
from shardc.errors import number_text
from shardc.machine.mesh import AnyMesh, view
from shardc.report.chart import Chart
from shardc.report.page.charts import chart_data
from shardc.report.page.modules import PlacedRows
from shardc.report.page.page import Figure, Page, moves_data, programs_of
from shardc.report.page.places import ArrayAt, arrays_data, mesh_data
from shardc.report.tables import bytes_text, mesh_text, percent_text, seconds_text
from shardc.sbp.placement import is_even


def flow_page(plan: PlannedFlow, chart: Chart) -> Page:
    """The page of a flow with these runs."""
    works = {base_name(n.name): n.work for n in plan.nodes if isinstance(n.work, FunctionWork)}
    programs: list[PlacedRows] = [
        ((name, *around), rows, times) for name, work in works.items() for around, rows, times in programs_of(work.plan)
    ]
    data = {**_places(plan), "chart": chart_data(chart), **moves_data(programs)}
    name, need, most = max(plan.memory_by_row, key=lambda row: (row[2] is not None, row[1] / (row[2] or 1)))
    share = None if most is None else need / most
    without = 0 if plan.has_inputs else 1  # of the inputs' node and actor
    figures = [
        Figure("Time of a round", seconds_text(plan.seconds), "of many"),
        Figure("Moves in a round", bytes_text(plan.bytes), "between meshes and the host"),
        Figure("Most memory", bytes_text(need), name if share is None else f"{percent_text(share)} of {name}", share),
        Figure("Nodes", str(len(plan.nodes) - without), f"in {number_text(len(plan.built.rows) - without, 'actor')}"),
    ]
    sections = [section for section in flow_sections(plan) if section is not None]
    return Page(plan.name, plan.round.where, [], figures, sections, data)


def _places(plan: PlannedFlow) -> dict[str, Any]:
    """The meshes of a flow, and the values that are handed over, where they are taken."""
    meshes: dict[AnyMesh, int] = {}
    found: list[ArrayAt] = []
    for edge in plan.edges:
        why = how_text(edge) + (f", {number_text(edge.delay, 'round')} late" if edge.delay else "")
        name = f"{edge.giver} \N{RIGHTWARDS ARROW} {edge.taker}"
        for move in edge.moves:
            (_, there), aval = edge.places(move), edge.giver.results[move.output]
            if there.mesh is not None and there.placement is not None:
                kind, mesh = compat.short_text(aval.shape, aval.dtype), meshes.setdefault(there.mesh, len(meshes))
                padded = not is_even(aval.shape, there.placement, view(there.mesh).sizes)
                found.append(ArrayAt(name, kind, aval.shape, there.placement, mesh, why, there.bytes(aval), padded))
    drawn = [mesh_data(mesh_text(mesh), view(mesh)) for mesh in meshes]
    return {"meshes": drawn, "arrays": [arrays_data("Handed over to meshes", found)]} if found else {}
