"""The actors of a network under virtual time.

As actors choose nothing, a step's start is a plain maximum: of the end of the step before it, the arrivals of its
messages and the release of its registers. So no calendar of events is needed: an actor is driven as far as it can
come, then those that its messages wake, and times travel with the messages and registers. This visits every message
once, and gives what a clock ticking through all events would give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from operator import sub
from typing import Any, Final, TypeAlias

from shardc.errors import PipelineError
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.schedule import Schedule
from shardc.runtime.actor import Actor, Channel, Network, Span
from shardc.runtime.deadlock import ActorWait, Deadlock, find_deadlock

__all__ = ["ActorWait", "Cost", "Deadlock", "Link", "Span", "Timeline", "find_deadlock", "peak_activations", "simulate"]

Cost: TypeAlias = Callable[[Any], float]
"""Seconds of a step, by its label."""
Link: TypeAlias = Callable[[Channel], tuple[float, float]]
"""Latency, and seconds that one message keeps the link busy, of a channel between two actors."""

_FIRST: Final = -1
_LAST: Final = 1 << 62


@dataclass(frozen=True)
class Timeline:
    """When every step of a network ran. Times are in the unit of the costs; the run begins at 0.

    Attributes:
      network: what ran.
      starts, ends: by actor, in the order of its steps.
      sequence: by actor and step, a number that grows along every dependence; it orders what happens at the same time.
    """

    network: Network
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]
    sequence: tuple[Sequence[int], ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """By actor, in order."""
        return tuple(
            tuple(Span(a, s.label, b, e) for s, b, e in zip(steps, starts, ends, strict=True))
            for a, (steps, starts, ends) in enumerate(zip(self.network.actors, self.starts, self.ends, strict=True))
        )

    def order(self) -> tuple[tuple[Hashable, ...], ...]:
        """The labels by actor, in the order in which they ran."""
        return tuple(tuple(s.label for s in steps) for steps in self.network.actors)

    @cached_property
    def makespan(self) -> float:
        """The end of the last step."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By actor, the sum of its steps."""
        return tuple(fsum(map(sub, ends, starts)) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """The makespan less the busy time of the actor that is busy least."""
        return self.makespan - min(self.busy, default=0.0)

    @cached_property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """By actor, from the start of its first step to the end of its last, less its busy time."""
        return tuple(
            ends[-1] - starts[0] - busy if ends else 0.0
            for starts, ends, busy in zip(self.starts, self.ends, self.busy, strict=True)
        )

    @cached_property
    def occupancy(self) -> tuple[list[tuple[float, int]], ...]:
        """For each channel, after each time at which it changes, the registers in use."""
        return tuple([(t, n) for t, n in _last_of_each_time(uses)] for uses in self._uses)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """For each channel the most registers in use at once: with that many it runs as it did here."""
        return tuple(max((n for _, n in uses), default=0) for uses in self._uses)

    @cached_property
    def messages(self) -> int:
        """Messages between different actors."""
        crosses = [c.source != c.target for c in self.network.channels]
        return sum(crosses[m[0]] for steps in self.network.actors for step in steps for m in step.gives)

    @cached_property
    def _uses(self) -> tuple[list[tuple[float, int]], ...]:
        """For each channel time and registers in use, after each change.

        What happens at one time is put in an order that agrees with all dependences: what ends, then steps without
        length, then what starts.
        """
        events: list[list[tuple[float, int, int]]] = [[] for _ in self.network.channels]
        for steps, starts, ends, after in zip(self.network.actors, self.starts, self.ends, self.sequence, strict=True):
            for step, start, end, number in zip(steps, starts, ends, after, strict=True):
                starting, ending = (2 * number, 2 * number + 1) if start == end else (_LAST, _FIRST)
                for channel, _ in step.gives:
                    events[channel].append((start, starting, 1))
                for channel, _ in step.takes:
                    events[channel].append((end, ending, -1))
        uses: list[list[tuple[float, int]]] = []
        for happened in events:
            happened.sort()
            used = 0
            uses.append([])
            for time, _, change in happened:
                used += change
                uses[-1].append((time, used))
        return tuple(uses)


def _last_of_each_time(uses: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    return [use for i, use in enumerate(uses) if i + 1 == len(uses) or uses[i + 1][0] != use[0]]


def simulate(net: Network, cost: Cost, link: Link | None = None) -> Timeline:
    """Runs the network under virtual time.

    Args:
      net: actors and channels.
      cost: seconds of a step, by its label.
      link: for a channel between two actors its latency, and the seconds for which one message keeps the link busy;
        both 0 if not given. What one actor sends to another, on all their channels, goes one after the other: a
        message leaves when its step has ended and those before it have left, and arrives seconds per message plus
        latency later. A register is free for its giver as soon as the taking step ends.

    Raises:
      PipelineError: the network deadlocks; the message names the cycle. Or a cost is negative or no number.
    """
    timeline = run_timed(net, cost, link)
    if timeline is None:
        raise PipelineError(str(find_deadlock(net)))
    return timeline


def _no_link(channel: Channel) -> tuple[float, float]:
    return 0.0, 0.0


def run_timed(net: Network, cost: Cost, link: Link | None) -> Timeline | None:
    """`simulate` without its checks; None if the network deadlocks."""
    actors = [Actor(net, a, 0.0) for a in range(len(net.actors))]
    source = [c.source for c in net.channels]
    target = [c.target for c in net.channels]
    bounded = [c.registers is not None for c in net.channels]
    links = [None if c.source == c.target else _positive_link(c, link or _no_link) for c in net.channels]
    sent = [0.0] * (len(actors) ** 2)  # when the last message left, by source and target
    starts: list[list[float]] = [[] for _ in actors]
    ends: list[list[float]] = [[] for _ in actors]
    sequence: list[list[int]] = [[] for _ in actors]
    now = [0.0] * len(actors)
    number = 0
    queue = deque(actors)
    waiting = [False] * len(actors)  # not in the queue
    while queue:
        actor = queue.popleft()
        a = actor.number
        time = now[a]
        while actor.ready():
            step = actor.step
            assert step is not None
            arrivals, releases = actor.fire()
            for t in arrivals:
                if t > time:
                    time = t
            for t in releases:
                if t > time:
                    time = t
            starts[a].append(time)
            seconds = cost(step.label)
            if not 0.0 <= seconds < float("inf"):
                raise PipelineError(f"The cost of {step.label} is {seconds}; a cost is a number of seconds, 0 or more.")
            time += seconds
            ends[a].append(time)
            sequence[a].append(number)
            number += 1
            for channel, _ in step.takes:
                if bounded[channel]:
                    b = source[channel]
                    actors[b].credit(channel, time)
                    if waiting[b]:
                        waiting[b] = False
                        queue.append(actors[b])
            for message in step.gives:
                channel = message[0]
                b = target[channel]
                arrival = time
                way = links[channel]
                if way is not None:
                    pair = a * len(actors) + b
                    arrival = sent[pair] = max(time, sent[pair]) + way[1]
                    arrival += way[0]
                actors[b].deliver(message, arrival)
                if waiting[b]:
                    waiting[b] = False
                    queue.append(actors[b])
        now[a] = time
        waiting[a] = True
    if any(a.step is not None for a in actors):
        return None
    return Timeline(net, tuple(starts), tuple(ends), tuple(sequence))


def _positive_link(channel: Channel, link: Link) -> tuple[float, float] | None:
    latency, seconds = link(channel)
    if not (0.0 <= latency < float("inf") and 0.0 <= seconds < float("inf")):
        raise PipelineError(
            f'The link of channel "{channel.name}" has latency {latency} and {seconds} seconds per message; '
            "both are numbers of seconds, 0 or more."
        )
    return (latency, seconds) if latency or seconds else None


def peak_activations(schedule: Schedule, timeline: Timeline) -> tuple[int, ...]:
    """For each rank the most microbatches' activations that it holds at once, counted in chunks (one stage's share).

    From the start of F to the end of the full backward B, or of W where the backward is split.
    """
    peaks: list[int] = []
    for row in timeline.order()[: schedule.ranks]:
        held = peak = 0
        for label in row:
            if isinstance(label, Action):
                held += {"F": 1, "B": -1, "W": -1, "I": 0}[label.kind]
                peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
