"""A chart as a trace for https://ui.perfetto.dev and chrome://tracing.

The format is Chrome's Trace Event Format (JSON object form): a process for each run, a thread for each rank, a slice
for each task, an arrow for each message between ranks, a counter for each channel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardc.pipeline.schedule.action import Action
from shardc.report.chart import Chart, Track, repeated_channels


def write_trace(chart: Chart, path: str | Path) -> None:
    """Writes the chart's trace to a file."""
    Path(path).write_text(json.dumps(trace_events(chart), separators=(",", ":")), encoding="utf-8")


def trace_events(chart: Chart) -> dict[str, Any]:
    """The content of the trace file. Times are microseconds, or units of the costs if the chart has no seconds."""
    events = [e for pid, track in enumerate(chart.tracks, 1) for e in _track(chart, track, pid)]
    about = {"title": chart.title, **{t.name: chart.headline(t) for t in chart.tracks}}
    return {"traceEvents": events, "displayTimeUnit": "ms" if chart.seconds else "ns", "otherData": about}


def _track(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    name = f"{track.name} ({track.note})" if track.note else track.name
    yield _meta(pid, 0, "process_name", name=name)
    yield _meta(pid, 0, "process_sort_index", sort_index=pid)
    for rank in range(len(chart.network.actors)):
        yield _meta(pid, rank + 1, "thread_name", name=chart.rank_text(rank))
        yield _meta(pid, rank + 1, "thread_sort_index", sort_index=rank)
    yield from _slices(chart, track, pid)
    yield from _arrows(chart, track, pid)
    yield from _counters(chart, track, pid)


def _meta(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slices(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    us = _us(chart)
    planned = chart.tracks[0]
    for rank, row in enumerate(track.timeline.spans):
        for i, span in enumerate(row):
            args: dict[str, Any] = {}
            if isinstance(span.label, Action):
                args = {"stage": span.label.stage, "microbatch": span.label.microbatch}
            if track is not planned:
                plan = planned.timeline.spans[rank][i]
                args |= {"planned start": plan.start * us, "planned duration": (plan.end - plan.start) * us}
            yield {
                "ph": "X", "pid": pid, "tid": rank + 1, "name": chart.label(span.label), "cat": chart.kind(span.label),
                "ts": span.start * us, "dur": (span.end - span.start) * us, "args": args,
            }  # fmt: skip


def _arrows(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    """Arrows from the end of each sending task to the start of the receiving one, if they are on different ranks."""
    us = _us(chart)
    channels = chart.network.channels
    given = {
        message: (rank, span)
        for rank, (steps, row) in enumerate(zip(chart.network.actors, track.timeline.spans, strict=True))
        for step, span in zip(steps, row, strict=True)
        for message in step.gives
    }
    number = pid << 32
    for rank, (steps, row) in enumerate(zip(chart.network.actors, track.timeline.spans, strict=True)):
        for step, taker in zip(steps, row, strict=True):
            for message in step.takes:
                source, giver = given[message]
                if source == rank or taker.start == taker.end or giver.start == giver.end:
                    continue
                number += 1
                common = {"pid": pid, "name": channels[message[0]].name, "cat": "message", "id": number}
                inside = (giver.end - giver.start) / 1000  # an arrow belongs to the slice that it begins in
                yield {"ph": "s", "tid": source + 1, "ts": (giver.end - inside) * us, **common}
                inside = (taker.end - taker.start) / 1000
                yield {"ph": "f", "bp": "e", "tid": rank + 1, "ts": (taker.start + inside) * us, **common}


def _counters(chart: Chart, track: Track, pid: int) -> Iterator[dict[str, Any]]:
    us = _us(chart)
    for channel in repeated_channels(chart.network):
        name = f"in use: {chart.network.channels[channel].name}"
        yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": 0.0, "args": {"registers": 0}}
        for time, used in track.timeline.occupancy[channel]:
            yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": time * us, "args": {"registers": used}}


def _us(chart: Chart) -> float:
    return 1e6 if chart.seconds else 1.0
