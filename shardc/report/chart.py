"""The data of pictures: runs side by side, and the names of their tasks and times."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from jax.sharding import Mesh

from shardc.errors import number_text
from shardc.machine.devices import processes_of
from shardc.pipeline.plan import MpmdPlan
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.simulate import Timeline
from shardc.report.tables import seconds_text
from shardc.runtime.actor import Network, Span
from shardc.runtime.calls import processes_text

KINDS: Final[Mapping[str, str]] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "L": "load",
    "U": "update",
    "-": "waits for all ranks",
}
"""The kinds of tasks, by letter."""

COLOURS: Final[Mapping[str, str]] = {
    "F": "#3b76af", "B": "#e08a3c", "I": "#e6b34e", "W": "#5a9e6f", "L": "#b9bec6", "U": "#8265aa", "-": "#e4e6ea",
}  # fmt: skip
"""The colour of each kind of task."""

SAME_SCALE: Final = 3.0
"""Runs whose makespans differ by more than this factor get a scale each: on a common one the short run is a dot."""

_ONCE: Final = {"load": "L", "update": "U"}
_ARROW: Final = re.compile(r"(\d+)->(\d+)")


@dataclass(frozen=True)
class Track:
    """One run of a network.

    Attributes:
      name: "planned", "measured".
      timeline: the times of its steps.
      note: how its times were taken, if that needs a word: "every task waited for".
    """

    name: str
    timeline: Timeline
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """Runs of a pipeline, drawn side by side. What its pictures say of a task, they ask here.

    Attributes:
      title: the name of the program or schedule.
      tracks: the planned run, then the measured one if there is one.
      rank_of: the rank of each stage.
      seconds: whether times are seconds; otherwise they are units of the costs.
      places: what runs each rank, if it is several processes: `process 1`.
    """

    title: str
    tracks: tuple[Track, ...]
    rank_of: tuple[int, ...]
    seconds: bool = True
    places: tuple[str, ...] = ()

    @property
    def network(self) -> Network:
        return self.tracks[0].timeline.network

    @property
    def rows(self) -> Sequence[int]:
        """The actors that have a row."""
        return range(len(self.network.actors))

    def row_text(self, row: int) -> str:
        """`rank 1`; with several processes `rank 1, process 1`."""
        return f"rank {row}, {self.places[row]}" if self.places else f"rank {row}"

    def spans(self, track: Track, row: int) -> Sequence[Span]:
        """The tasks of an actor in one run."""
        return track.timeline.spans[row]

    @cached_property
    def _own(self) -> bool:
        return self.rank_of == tuple(range(len(self.rank_of)))

    def label(self, label: Hashable) -> str:
        """The name of a task: `F0`, `4F0` if ranks have several stages, `U0` for a step that runs once."""
        if isinstance(label, Action):
            return f"{label.kind}{label.microbatch}" if self._own else str(label)
        word, _, rest = str(label).partition(" ")
        letter = _ONCE.get(word)
        return str(label) if letter is None else letter if self._own else f"{letter}{rest}"

    def number(self, label: Hashable) -> str:
        """The short name of a task: its microbatch; empty for what runs once."""
        return str(label.microbatch) if isinstance(label, Action) else ""

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kinds of tasks, by letter."""
        return KINDS

    @property
    def colours(self) -> Mapping[str, str]:
        """The colour of each kind."""
        return COLOURS

    number_is = "the number is the microbatch"

    def kind(self, label: Hashable) -> str:
        """One of the kinds."""
        return label.kind if isinstance(label, Action) else _ONCE.get(str(label).partition(" ")[0], "-")

    def chunk(self, label: Hashable) -> int:
        """The index of an action's stage among the stages of its rank."""
        if not isinstance(label, Action):
            return 0
        return self.rank_of[: label.stage].count(self.rank_of[label.stage])

    @property
    def has_chunks(self) -> bool:
        return len(self.rank_of) > len(self.network.actors)

    def about(self, label: Hashable) -> dict[str, Any]:
        """The numbers of a task."""
        return {"stage": label.stage, "microbatch": label.microbatch} if isinstance(label, Action) else {}

    def is_unknown(self, track: Track, row: int) -> bool:
        """Whether nobody has said how long the tasks of an actor take, so that a run lacks them."""
        del track, row
        return False

    @cached_property
    def channels(self) -> Sequence[int]:
        """The channels that are drawn, by kind and sending stage: those that are used once per microbatch."""
        return sorted(repeated_channels(self.network), key=self._channel_order)

    def _channel_order(self, number: int) -> tuple[str, int, int]:
        word, _, ends = self.network.channels[number].name.rpartition(" ")
        stage = ends.partition("->")[0]
        return word, int(stage) if stage.isdigit() else 0, number

    def channel_text(self, channel: int) -> str:
        """`weight_stash 0`, `activation 0->1` --> `weight stash 0`, `activation 0→1`."""
        name = self.network.channels[channel].name
        return _ARROW.sub("\\1\N{RIGHTWARDS ARROW}\\2", name).replace("_", " ")

    @cached_property
    def spans_of_time(self) -> tuple[float, ...]:
        """The extent of each track's time axis: the same for all tracks if their makespans are similar."""
        each = [t.timeline.makespan for t in self.tracks]
        alike = min(each) > 0 and max(each) / min(each) <= SAME_SCALE
        return tuple([max(each)] * len(each) if alike else each)

    def time_text(self, time: float) -> str:
        return seconds_text(time) if self.seconds else f"{round(time, 9):.9g}"

    def headline(self, track: Track) -> str:
        """`planned: 706 us, ranks are idle 31% to 40% of it`."""
        timeline = track.timeline
        note = f" ({track.note})" if track.note else ""
        if not timeline.makespan:
            return f"{track.name}{note}: {self.time_text(0)}"
        idle = sorted(1 - busy / timeline.makespan for busy in timeline.busy)
        low, high = f"{100 * idle[0]:.0f}%", f"{100 * idle[-1]:.0f}%"
        share = low if low == high else f"{low} to {high}"
        return f"{track.name}{note}: {self.time_text(timeline.makespan)}, ranks are idle {share} of it"


def repeated_channels(network: Network) -> list[int]:
    """The channels that are used once per microbatch."""
    return sorted({c for row in network.actors for s in row if isinstance(s.label, Action) for c, _ in s.gives})


def planned_chart(plan: MpmdPlan) -> Chart:
    """The chart of the planned call."""
    return Chart(_title(plan), (Track("planned", plan.simulate()),), plan.schedule.rank_of, places=places_of(plan))


def places_of(plan: MpmdPlan) -> tuple[str, ...]:
    """The processes that run each rank: `process 1`; empty if one process runs all, or the plan has no devices."""
    meshes = [m for m in plan.request.meshes if isinstance(m, Mesh)]
    found = [processes_of(m.devices.flat) for m in meshes]
    if len({p for ps in found for p in ps}) < 2:
        return ()
    return tuple(map(processes_text, found))


def measured_chart(plan: MpmdPlan, measured: Timeline, note: str) -> Chart:
    """The chart of the planned and the measured call.

    Args:
      plan: the plan.
      measured: the recorded call.
      note: how its times were taken.
    """
    planned = planned_chart(plan)
    return replace(planned, tracks=(*planned.tracks, Track("measured", measured, note)))


def _title(plan: MpmdPlan) -> str:
    count = number_text(plan.cut.loop.length, "microbatch")
    return f"{plan.program.name} on {plan.mesh}: {plan.schedule.name}, {count}"


def scale_of(extent: float, most: int, *, seconds: bool) -> tuple[list[float], list[str], str]:
    """At most `most` round times from 0 to `extent`, their texts, and the unit of the texts."""
    unit, name = 1.0, ""
    if seconds:
        unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if extent >= u), (1e-9, "ns"))
    if not extent:
        return [0.0], ["0"], name
    exponent = len(f"{int(extent / unit)}") + 1
    steps = [m * 10.0**e for e in range(exponent - 8, exponent + 1) for m in (1, 2, 5)]
    step = next((s for s in steps if extent / unit / s < most), steps[-1])
    count = int(extent / unit / step * (1 + 1e-9))
    return [i * step * unit for i in range(count + 1)], [f"{i * step:.6g}" for i in range(count + 1)], name
