"""A chart as text: a row for each actor, planned above measured, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from shardc.report.chart import Chart, Track, scale_of
from shardc.report.tables import WIDTH
from shardc.runtime.actor import Span

_PER_TICK: Final = 12
"""The fewest columns between marks of the scale."""
_MOST_LINES: Final = 72
"""The most lines of a drawing that is wrapped into several blocks."""
_IDLE: Final = "."
_UNKNOWN: Final = "?"
_DENOMINATOR: Final = 1000
"""Times are rounded to fractions of this largest denominator, to find their unit."""


def chart_text(chart: Chart, width: int = WIDTH) -> str:
    """The chart for a terminal.

    Args:
      chart: the runs.
      width: characters of a line. A long run is wrapped into blocks, unless there would be too many lines.

    Returns:
      A line about each run, then for each actor a line for each run, and a scale of time. A question mark is in rows
      whose times are unknown. A dot is idle time: if times are units of the costs, one unit where that leaves room for
      names. A task whose name does not fit is a letter. For tasks shorter than a character, it is the letter of the
      kind that takes the largest part of the character.
    """
    tracks, extents = chart.tracks, chart.spans_of_time
    each = len(set(extents)) > 1  # two scales: the planned run's above, the measured run's below
    names = [t.name if len(tracks) > 1 else "" for t in tracks]
    units = [scale_of(e, 1, seconds=chart.seconds)[2] for e in extents]
    heads = [(chart.row_text(row) if i == 0 else "", name) for row in chart.rows for i, name in enumerate(names)]
    heads = [(units[0], names[0]), *heads, (units[1], names[1])] if each else [*heads, (units[0], "")]
    first, second = (max(map(len, column)) for column in zip(*heads, strict=True))
    named = [f"{a:<{first}} {b:<{second}}".rstrip() for a, b in heads]
    room = max(20, width - max(map(len, named)) - len(" | "))
    columns = room * _blocks(chart, room, len(heads) + 1)
    units, cell = (0, 1) if chart.seconds else _units(chart, columns)
    columns, room = units * cell or columns, room - room % cell
    rulers = [_ruler(chart, e, columns, room) for e in extents]
    scales = [columns / e if e else 0.0 for e in extents]
    rows = [_row(chart, t, row, scale, cell) for row in chart.rows for t, scale in zip(tracks, scales, strict=True)]
    rows = [rulers[0], *rows, rulers[1]] if each else [*rows, rulers[0]]
    about = "\n".join([chart.title, *(chart.headline(t) for t in tracks)])
    return f"{about}\n\n{_wrapped(named, rows, room)}\n\n{_legend(chart)}"


def _blocks(chart: Chart, room: int, lines: int) -> int:
    """The number of blocks that the drawing is wrapped into: enough to show names, or else a letter for each task."""
    most = max(1, _MOST_LINES // lines)
    wanted: list[int] = []
    for track, extent in zip(chart.tracks, chart.spans_of_time, strict=True):
        spans = [s for row in chart.rows for s in chart.spans(track, row) if chart.number(s.label) and s.end > s.start]
        if spans:
            short = sorted(s.end - s.start for s in spans)[len(spans) // 5]
            name = max(len(chart.label(s.label)) for s in spans) + 1
            wanted += [-(-int(extent / short * n) // room) for n in (name, 2)]
    full, letters = max(wanted[::2], default=1), max(wanted[1::2], default=1)
    return next((max(1, n) for n in (full, letters) if n <= most), 1)


def _units(chart: Chart, columns: int) -> tuple[int, int]:
    """The makespan in the longest unit that divides all times, and the characters of a unit: no more than names need.
    (0, 1) if a unit is shorter than a character."""
    spans = [s for row in chart.tracks[0].timeline.spans for s in row if s.end > s.start]
    ends = [Fraction(t).limit_denominator(_DENOMINATOR) for s in spans for t in (s.start, s.end)]
    scale = math.lcm(*(t.denominator for t in ends))
    ends = [int(t * scale) for t in ends]
    unit = math.gcd(*ends)
    if not unit or columns < max(ends) // unit:
        return 0, 1
    units, shortest = max(ends) // unit, min(b - a for a, b in zip(ends[::2], ends[1::2], strict=True)) // unit
    widest = 1 + max(len(chart.label(s.label)) for s in spans)
    return units, min(columns // units, -(-widest // max(1, shortest)))


def _row(chart: Chart, track: Track, row: int, scale: float, cell: int) -> str:
    """One actor's line: `F0--- F1--- ...B0----------`. `scale` is the characters of a unit of time, `cell` those of a
    dot."""
    spans = chart.spans(track, row)
    idle = _UNKNOWN if chart.is_unknown(track, row) else _IDLE
    text = [idle if at % cell == 0 else " " for at in range(round(track.timeline.makespan * scale))]
    ends = [(round(s.start * scale), round(s.end * scale)) for s in spans]
    places = [(span, first, last) for span, (first, last) in zip(spans, ends, strict=True) if last > first]
    for i, (span, first, last) in enumerate(places):
        touches = cell > 1 or (i + 1 < len(places) and places[i + 1][1] == last)
        text[first:last] = _cell(chart, span, last - first, touches)
    for column, kind in _fine(chart, spans, scale).items():
        if column < len(text) and text[column] == idle:
            text[column] = kind
    return "".join(text)


def _cell(chart: Chart, span: Span, room: int, touches: bool) -> str:
    """A task in `room` characters: its name if that fits, or else its letter; with a blank before the next task."""
    name = chart.label(span.label)
    if len(name) > room - touches:
        name = chart.kind(span.label)
    text = max(1, room - touches)
    return f"{name[:text]:-<{text}} "[:room]


def _fine(chart: Chart, spans: Sequence[Span], scale: float) -> dict[int, str]:
    """The kind of task that takes most of a column, for columns that are mostly busy with tasks shorter than one."""
    shares: dict[int, dict[str, float]] = {}
    for span in spans:
        start, end = span.start * scale, span.end * scale
        if end - start >= 1.5:
            continue
        for column in range(int(start), int(end) + 1):
            part = min(end, column + 1) - max(start, column)
            kinds = shares.setdefault(column, {})
            kind = chart.kind(span.label)
            kinds[kind] = kinds.get(kind, 0.0) + part
    return {c: max(kinds, key=lambda k: kinds[k]) for c, kinds in shares.items() if sum(kinds.values()) > 0.5}


def _ruler(chart: Chart, extent: float, columns: int, room: int) -> str:
    """The marks of the time scale. A mark that would cross the end of a block is left out."""
    places, texts, _ = scale_of(extent, max(1, columns // _PER_TICK), seconds=chart.seconds)
    line = [" "] * columns
    for place, text in zip(places, texts, strict=True):
        at = round(place / extent * columns) if extent else 0
        if at % room + len(text) <= room and at + len(text) <= columns:
            line[at : at + len(text)] = text
    return "".join(line)


def _legend(chart: Chart) -> str:
    """The meaning of the letters that occur."""
    spans = (s for track in chart.tracks for row in chart.rows for s in chart.spans(track, row))
    found = {chart.kind(s.label) for s in spans if s.end > s.start}
    words = [f"{'other names:' if kind == '-' else kind} {word}" for kind, word in chart.kinds.items() if kind in found]
    unknown = any(chart.is_unknown(track, row) for track in chart.tracks for row in chart.rows)
    return ", ".join([*words, chart.number_is, *[f"{_UNKNOWN} unknown time"] * unknown])


def _wrapped(heads: Sequence[str], rows: Sequence[str], room: int) -> str:
    """Rows with their heads, wrapped into blocks of `room` characters that stand one below the other."""
    margin = max(map(len, heads))
    longest = max(map(len, rows))
    return "\n\n".join(
        "\n".join(f"{h:<{margin}} | {r[at : at + room]}".rstrip() for h, r in zip(heads, rows, strict=True))
        for at in range(0, longest, room)
    )
