"""A chart as a trace for https://ui.perfetto.dev and chrome://tracing.

The format is Chrome's Trace Event Format (JSON object form): a process for each run, a thread for each actor, a slice
for each task, an arrow for each message between actors, a counter for each channel.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from shardc.errors import PipelineError, writing
from shardc.report.chart import Chart, Track
from shardc.runtime.actor import Message, Span


def write_trace(chart: Chart, path: str | Path) -> None:
    """Writes the chart's trace to a file.

    Raises:
      PipelineError: its name does not end in `.json`.
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        raise PipelineError(f"{path}: a trace has to be a .json file.")
    with writing(path):
        path.write_text(json.dumps(trace_events(chart), separators=(",", ":")), encoding="utf-8")


def trace_events(chart: Chart) -> dict[str, Any]:
    """The content of the trace file. Times are microseconds, or units of the costs if the chart has no seconds."""
    events = [e for pid, track in enumerate(chart.tracks, 1) for e in _track(chart, track, pid)]
    about = {"title": chart.title, **{t.name: chart.headline(t) for t in chart.tracks}}
    return {"traceEvents": events, "displayTimeUnit": "ms" if chart.seconds else "ns", "otherData": about}


def _track(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    name = f"{track.name} ({track.note})" if track.note else track.name
    yield _meta(pid, 0, "process_name", name=name)
    yield _meta(pid, 0, "process_sort_index", sort_index=pid)
    for row in chart.rows:
        yield _meta(pid, row + 1, "thread_name", name=chart.row_text(row))
        yield _meta(pid, row + 1, "thread_sort_index", sort_index=row)
    yield from _slices(chart, track, pid)
    yield from _arrows(chart, track, pid)
    yield from _counters(chart, track, pid)


def _meta(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slices(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    us = _us(chart)
    planned = chart.tracks[0]
    for row in chart.rows:
        for i, span in enumerate(chart.spans(track, row)):
            args = chart.about(span.label)
            if track is not planned:
                plan = planned.timeline.spans[row][i]
                args |= {"planned start": plan.start * us, "planned duration": (plan.end - plan.start) * us}
            yield {
                "ph": "X", "pid": pid, "tid": row + 1, "name": chart.label(span.label), "cat": chart.kind(span.label),
                "ts": span.start * us, "dur": (span.end - span.start) * us, "args": args,
            }  # fmt: skip


def _arrows(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    """Arrows from the end of each sending task to the start of the receiving one, if they are on different actors."""
    us = _us(chart)
    channels = chart.network.channels
    given: dict[Message, deque[tuple[int, Span | None]]] = defaultdict(deque)
    for message in chart.network.first_messages():
        given[message].append((-1, None))
    for row, steps in enumerate(chart.network.actors):
        for step, span in zip(cycle(steps), track.timeline.spans[row], strict=False):
            for message in step.gives:
                given[message].append((row, span))
    number = pid << 32
    for row, steps in enumerate(chart.network.actors):
        for step, taker in zip(cycle(steps), track.timeline.spans[row], strict=False):
            for message in step.takes:
                source, giver = given[message].popleft()
                if giver is None or source == row or taker.start == taker.end or giver.start == giver.end:
                    continue
                number += 1
                common = {"pid": pid, "name": channels[message[0]].name, "cat": "message", "id": number}
                inside = (giver.end - giver.start) / 1000  # an arrow belongs to the slice that it begins in
                yield {"ph": "s", "tid": source + 1, "ts": (giver.end - inside) * us, **common}
                inside = (taker.end - taker.start) / 1000
                yield {"ph": "f", "bp": "e", "tid": row + 1, "ts": (taker.start + inside) * us, **common}


def _counters(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    us = _us(chart)
    for channel in chart.channels:
        name = f"in use: {chart.network.channels[channel].name}"
        yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": 0.0, "args": {"registers": 0}}
        for time, used in track.timeline.occupancy[channel]:
            yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": time * us, "args": {"registers": used}}


def _us(chart: Chart) -> float:
    return 1e6 if chart.seconds else 1.0
