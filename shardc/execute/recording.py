"""The times of the steps of one call of a pipeline, or of one run of a flow, of all its processes on one clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.pipeline.schedule.recorded import recorded
from shardc.pipeline.schedule.simulate import Timeline
from shardc.runtime.actor import Network, Span
from shardc.runtime.cluster import Cluster


@dataclass(frozen=True)
class Recording:
    """The times of the steps of one call.

    Attributes:
      spans: the host's launches, by actor in order.
      begin: the begin of the call.
      waited: by label, the time on the devices, if the call waited for every task.
    """

    spans: Sequence[Span]
    begin: float
    waited: Mapping[Any, tuple[float, float]] | None

    @property
    def note(self) -> str:
        return "launches by the host" if self.waited is None else "every task waited for"

    def timeline(self, net: Network) -> Timeline:
        """The timeline of the call; its times count from the begin."""
        waited = self.waited or {}
        spans = (Span(s.actor, s.label, *waited.get(s.label, (s.start, s.end))) for s in self.spans)
        return recorded(net, spans, self.begin)

    def gathered(self, net: Network, cluster: Cluster) -> Recording:
        """The recording of the steps of all processes, which call this together, on the clock of process 0."""
        ahead = cluster.link(0).clock_offset() if cluster.me else 0.0
        waited = self.waited or {}
        rows: dict[int, list[tuple[float, float]]] = {}
        for s in self.spans:
            begin, end = waited.get(s.label, (s.start, s.end))
            rows.setdefault(s.actor, []).append((begin + ahead, end + ahead))
        said = cluster.gather("the times of a call", json.dumps([self.begin + ahead, list(rows.items())]))
        begins, parts = zip(*map(json.loads, said), strict=True)
        whole = {actor: times for part in reversed(parts) for actor, times in part}  # of a rank's processes the first
        spans = [
            Span(actor, step.label, begin, end, round)
            for actor, times in sorted(whole.items())
            for (round, step), (begin, end) in zip(net.ran(actor, len(times)), times, strict=True)
        ]
        return Recording(spans, min(begins), None if self.waited is None else {})
