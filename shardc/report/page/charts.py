"""Courses, memory and charts of runs as data of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from shardc.errors import number_text
from shardc.ir.walk import short_aval
from shardc.pipeline.rank_memory import PipelineMemory, RankMemory
from shardc.plan.plan import PlacedProgram
from shardc.report.chart import Chart
from shardc.report.page.course import BUCKETS, KINDS, course_of
from shardc.report.page.equations import ProgramRows
from shardc.report.page.modules import rounded
from shardc.report.tables import Key, bytes_text, fold_leaves, percent_text, placement_text

LARGEST: Final = 15
"""The most rows of a table of what fills the memory."""


def course_data(placed: PlacedProgram, found: ProgramRows, limit: int) -> dict[str, Any]:
    """One call of one program along its time, with what is in memory at the peak."""
    profile, rows = placed.profile(), found.rows
    course = course_of(found, profile)
    keyed = [
        ((short_aval(v.aval), placement_text(placed.boxed.placements[v], placed.mesh)), str(found.names[v]), size)
        for v, size in profile.largest()
        if size
    ]
    texts = [f"{'/'.join(rows[i].scopes)} {rows[i].line}".strip() for i in course.first] if rows else []
    return {
        "course": {
            "extent": course.extent,
            "kinds": [(*KINDS[kind], [round(float(x), 3) for x in share]) for kind, share in course.shares.items()],
            "bytes": [int(x) for x in course.bytes],
            "where": texts,
            "limit": limit,
            "peak": course.peak,
            "filled": _largest(keyed),
        }
    }


def _largest(rows: Sequence[tuple[Key, str, int]]) -> dict[str, Any]:
    """A table of the largest of the rows ((type, where), name, bytes), alike ones folded, with one row for the others
    together."""
    folded = [(name, *map(str, key), sum(sizes)) for key, name, sizes in fold_leaves(rows)]
    folded.sort(key=lambda row: -row[-1])
    cells = [(*words, bytes_text(size)) for *words, size in folded[:LARGEST]]
    if others := folded[LARGEST:]:
        cells.append((f"{number_text(len(others), 'more row')}", "", "", bytes_text(sum(row[-1] for row in others))))
    return {"columns": ("value", "type", "where", ">bytes per device"), "rows": cells}


def ranks_data(memory: PipelineMemory) -> dict[str, Any]:
    """The memory of each rank of a pipeline over the call, and what fills the fullest at its peak."""
    worst = memory.worst
    keyed = [
        (
            (f"{h.value}{f', {h.count} of them' * (h.count > 1)}", f"{h.kind}, stage {h.stage}"),
            h.name,
            h.bytes,
        )
        for h in worst.holdings
    ]
    return {
        "ranks": [_rank(rank) for rank in memory.ranks],
        "worst": worst.rank,
        "label": str(worst.peak_label),
        "filled": _largest(keyed),
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    """The bytes of a rank in equal parts of time, by kind."""
    times, extent = np.array(rank.times), max(rank.times, default=0.0) or 1.0
    edges = np.linspace(0.0, extent, BUCKETS + 1)[:-1]
    at = np.clip(np.searchsorted(times, edges, "right") - 1, 0, None)
    whole = np.array(rank.bytes)
    most = whole[at].copy()
    np.maximum.at(most, np.clip(times[: len(whole)] / extent * BUCKETS, 0, BUCKETS - 1).astype(int), whole)
    return {
        "bytes": most.tolist(),
        "limit": rank.capacity,
        "extent": extent,
        "text": f"{bytes_text(rank.peak)}, {percent_text(rank.fullness)} of {bytes_text(rank.capacity)}",
        "parts": [(kind, bytes_text(size)) for kind, size in rank.peak_parts.items() if size],
    }


def chart_data(chart: Chart) -> dict[str, Any]:
    """The runs of a chart: spans (kind, chunk, label, begin, end) of each row, in millionths of the extent."""
    kinds = list(chart.kinds)

    def spans(track: Any, row: int, extent: float) -> list[tuple[Any, ...]]:
        scale = 1e6 / extent if extent else 0.0
        return [
            (
                kinds.index(chart.kind(s.label)),
                chart.chunk(s.label),
                chart.label(s.label),
                round(s.start * scale),
                round(s.end * scale),
            )
            for s in chart.spans(track, row)
            if s.end > s.start
        ]

    return {
        "title": chart.title,
        "kinds": [(text, chart.colours[kind]) for kind, text in chart.kinds.items()],
        "rows": [chart.row_text(row) for row in chart.rows],
        "number": chart.number_is + "; lighter: a rank's later stages" * chart.has_chunks,
        "seconds": chart.seconds,
        "tracks": [
            {
                "name": track.name,
                "headline": chart.headline(track),
                "extent": rounded(extent),
                "spans": [spans(track, row, extent) for row in chart.rows],
                "unknown": [chart.is_unknown(track, row) for row in chart.rows],
            }
            for track, extent in zip(chart.tracks, chart.spans_of_time, strict=True)
        ],
    }
