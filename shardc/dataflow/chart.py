"""The charts of a flow: rounds as planned, and as they were measured."""

from __future__ import annotations

import string
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from shardc.dataflow.network import Edge, NodeStep
from shardc.dataflow.plan import PlannedFlow, Seconds
from shardc.dataflow.round import FlowNode
from shardc.errors import number_text
from shardc.pipeline.schedule.recorded import recorded
from shardc.report.chart import Chart, Track
from shardc.report.tables import MOST
from shardc.runtime.actor import Span

PALETTE: Final = (
    "#3b76af", "#e08a3c", "#5a9e6f", "#8265aa", "#e6b34e", "#b5482a", "#4aa3a2", "#c77ba0", "#868e99", "#a58a5f",
)  # fmt: skip
"""Colours of nodes, in the order in which a round calls them."""


@dataclass(frozen=True)
class FlowChart(Chart):
    """Runs of a flow, drawn side by side: a row for each actor, a colour and a letter for each function.

    Attributes:
      plan: the flow's.
      rounds: those that are drawn.
      unknown: the nodes whose seconds the planned run lacks.
      said: seconds of nodes, other than those that the plan knows.
    """

    plan: PlannedFlow | None = None
    rounds: int = 1
    unknown: tuple[FlowNode, ...] = ()
    said: Seconds | None = None

    number_is = "the number is the round"

    @property
    def _flow(self) -> PlannedFlow:
        assert self.plan is not None
        return self.plan

    @property
    def rows(self) -> Sequence[int]:
        return [a for a, nodes in enumerate(self._flow.built.rows) if nodes[0].number or self._flow.has_inputs]

    def row_text(self, row: int) -> str:
        return self._flow.network.names[row]

    def spans(self, track: Track, row: int) -> Sequence[Span]:
        """The calls of an actor in one run; the label of each has its round of the run."""
        return [_dated(s) for s in track.timeline.spans[row]]

    def label(self, label: Hashable) -> str:
        return f"{self.kind(label)}{self.number(label)}"

    def number(self, label: Hashable) -> str:
        assert isinstance(label, NodeStep)
        return str(label.round)

    def kind(self, label: Hashable) -> str:
        assert isinstance(label, NodeStep)
        return self._letters[self._flow.nodes[label.node].function]

    def chunk(self, label: Hashable) -> int:
        del label
        return 0

    @property
    def has_chunks(self) -> bool:
        return False

    def about(self, label: Hashable) -> dict[str, Any]:
        assert isinstance(label, NodeStep)
        return {"node": label.name, "round": label.round}

    @cached_property
    def _letters(self) -> dict[str, str]:
        """A letter for each function: of its name, if no other one has it."""
        found: dict[str, str] = {}
        for name in dict.fromkeys(n.function for n in self._flow.nodes if n.number or self._flow.has_inputs):
            own = [c for c in name if c in string.ascii_letters]
            wanted = [*own[:1], *(c.upper() for c in own[:1]), *own, *string.ascii_letters]
            found[name] = next((c for c in wanted if c not in found.values()), "*")
        return found

    @property
    def kinds(self) -> Mapping[str, str]:
        return {letter: name for name, letter in self._letters.items()}

    @property
    def colours(self) -> Mapping[str, str]:
        return {letter: PALETTE[i % len(PALETTE)] for i, letter in enumerate(self.kinds)}

    @cached_property
    def _alike(self) -> dict[tuple[str, str, int], list[int]]:
        """The channels that carry something from one actor to another, those between calls of the same two functions
        together."""
        found: dict[tuple[str, str, int], list[int]] = {}
        actor = self._flow.built.actor
        for i, e in enumerate(self._flow.edges):
            if e.moves and actor[e.giver] != actor[e.taker]:
                found.setdefault((e.giver.function, e.taker.function, e.delay), []).append(i)
        return found

    @cached_property
    def channels(self) -> Sequence[int]:
        """One channel of each kind."""
        return [numbers[0] for numbers in self._alike.values()]

    def channel_text(self, channel: int) -> str:
        edge: Edge = self._flow.edges[channel]
        key = edge.giver.function, edge.taker.function, edge.delay
        late = f", made {number_text(edge.delay, 'round')} before" if edge.delay else ""
        count = len(self._alike[key])
        return f"{key[0]}\N{RIGHTWARDS ARROW}{key[1]}{late}" + (f", 1 of {count}" if count > 1 else "")

    def is_unknown(self, track: Track, row: int) -> bool:
        return track is self.tracks[0] and any(n in self.unknown for n in self._flow.built.rows[row])

    def round_text(self, track: Track) -> str:
        """`10.0 ms`, or `at least 10.0 ms`: the time of a round of one run."""
        return self._at_least(track) + self.time_text(track.timeline.makespan / max(1, self.rounds))

    def _at_least(self, track: Track) -> str:
        return least(self.unknown if track is self.tracks[0] else ())

    def headline(self, track: Track) -> str:
        """`planned: 80.1 ms for 8 rounds; learn is busiest, 98% of it`."""
        timeline = track.timeline
        note = f" ({track.note})" if track.note else ""
        whole, at_least = timeline.makespan, self._at_least(track)
        texts = [f"{track.name}{note}: {at_least}{self.time_text(whole)}"]
        if whole:
            busy, row = max((b, -row) for row, b in enumerate(timeline.busy))
            texts[0] += f" for {number_text(self.rounds, 'round')}"
            known = " of those that are known" * bool(at_least)
            texts.append(f"{self.row_text(-row)} is busiest{known}, {100 * busy / whole:.0f}% of it")
        if at_least:
            texts.append(unknown_text(self.unknown))
        return "; ".join(texts)


def least(unknown: Sequence[FlowNode]) -> str:
    """The words before a time that lacks the seconds of these nodes."""
    return "at least " * bool(unknown)


def unknown_text(unknown: Sequence[FlowNode]) -> str:
    """`the time of play, evaluate is unknown`."""
    names = list(dict.fromkeys(n.function for n in unknown))
    more = f", {len(names) - MOST} more" * (len(names) > MOST)
    return f"the time of {', '.join(names[:MOST])}{more} is unknown"


def _dated(span: Span) -> Span:
    assert isinstance(span.label, NodeStep)
    return span._replace(label=span.label._replace(round=span.round))


def flow_chart(plan: PlannedFlow, rounds: int, seconds: Seconds | None = None, note: str = "") -> FlowChart:
    """The chart of some simulated rounds.

    Args:
      plan: the flow's.
      rounds, seconds: as in `PlannedFlow.simulate`.
      note: how their times were taken.
    """
    track = Track("planned", plan.simulate(rounds, seconds=seconds), note)
    title = f"{plan.round.where}: {number_text(rounds, 'round')}"
    said = set[Any](seconds or ())
    unknown = tuple(n for n in plan.unknown if said.isdisjoint((n, n.name, n.function)))
    return FlowChart(title, (track,), (), plan=plan, rounds=rounds, unknown=unknown, said=seconds)


def measured_flow_chart(plan: PlannedFlow, spans: Sequence[Span], rounds: int) -> FlowChart:
    """The chart of a recorded run below the planned one.

    Host functions whose seconds nobody planned take in each planned round what they took in the measured one.

    Args:
      plan: the flow's.
      spans: of the run.
      rounds: those that it completed.
    """
    unknown = {n.number: n for n in plan.nodes if n.work.seconds is None}
    known = seconds_by_node(spans)
    seconds = {unknown[n]: iter(times).__next__ for n, times in known.items() if n in unknown}
    planned = flow_chart(plan, rounds, seconds, "host functions as measured" if seconds else "")
    zero = min((s.start for s in spans), default=0.0)
    measured = Track("measured", recorded(plan.network, spans, zero, rounds), "every node waited for")
    return replace(planned, tracks=(*planned.tracks, measured))


def seconds_by_node(spans: Sequence[Span]) -> dict[int, list[float]]:
    """The seconds that each node took, by its number, run by run."""
    each: dict[int, list[float]] = {}
    for span in spans:
        assert isinstance(span.label, NodeStep)
        each.setdefault(span.label.node, []).append(span.end - span.start)
    return each
