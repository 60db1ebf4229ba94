"""The simulator: runs the actors of a network under virtual time.

Actors make no choices. So a step's start is the maximum of the end of the step before it, the arrivals of its messages
and the releases of its registers, and no event queue is needed: an actor advances as far as it can, then the actors
that its messages wake; times travel with messages and registers. Every message is visited once, and the result is that
of an event simulation.
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
from shardc.runtime.actor import Actor, Channel, Message, Network, Span, Step
from shardc.runtime.deadlock import ActorWait, Deadlock, find_deadlock

__all__ = [
    "ActorWait",
    "Cost",
    "Deadlock",
    "LinkCost",
    "Span",
    "Timeline",
    "find_deadlock",
    "peak_activations",
    "simulate",
]

Cost: TypeAlias = Callable[[Any], float]
"""A function from a step's label to its seconds."""
LinkCost: TypeAlias = Callable[[Channel], tuple[float, float]]
"""A function from a channel between two actors to its latency, and the seconds for which a message occupies it."""

_FIRST: Final = -1
_LAST: Final = 1 << 62
_FOREVER: Final = float("inf")


@dataclass(frozen=True)
class Timeline:
    """The times of every step of a network. They are in the unit of the costs, and the run begins at 0.

    Attributes:
      network: the network.
      starts, ends: times by actor, in the order of its steps, period after period.
      sequence: by actor and step, a number that grows along every dependence; it orders events of the same time.
    """

    network: Network
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]
    sequence: tuple[Sequence[int], ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The steps of each actor with their times, in order."""
        return tuple(
            tuple(Span(a, s.label, b, e, at) for (at, s), b, e in zip(self._steps(a), starts, ends, strict=True))
            for a, (starts, ends) in enumerate(zip(self.starts, self.ends, strict=True))
        )

    def _steps(self, actor: int) -> list[tuple[int, Step]]:
        """The steps that an actor ran, with their rounds."""
        return self.network.ran(actor, len(self.ends[actor]))

    def order(self) -> tuple[tuple[Hashable, ...], ...]:
        """The labels of each actor's steps, in the order in which they ran."""
        return tuple(tuple(s.label for _, s in self._steps(a)) for a in range(len(self.network.actors)))

    @cached_property
    def makespan(self) -> float:
        """The end of the last step."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The busy time of each actor: the sum of its steps."""
        return tuple(fsum(map(sub, ends, starts)) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """The makespan minus the busy time of the least busy actor."""
        return self.makespan - min(self.busy, default=0.0)

    @cached_property
    def bubble_per_rank(self) -> tuple[float, ...]:
        """The idle time of each actor between the start of its first step and the end of its last one."""
        return tuple(
            ends[-1] - starts[0] - busy if ends else 0.0
            for starts, ends, busy in zip(self.starts, self.ends, self.busy, strict=True)
        )

    @cached_property
    def occupancy(self) -> tuple[list[tuple[float, int]], ...]:
        """The registers in use of each channel, after each time at which they change."""
        return tuple([(t, n) for t, n in _last_of_each_time(uses)] for uses in self._uses)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The peak of registers in use of each channel: with this number of registers the run is the same."""
        return tuple(max((n for _, n in uses), default=0) for uses in self._uses)

    @cached_property
    def messages(self) -> int:
        """The number of messages between different actors."""
        crosses = [c.source != c.target for c in self.network.channels]
        steps = (s for a in range(len(self.network.actors)) for _, s in self._steps(a))
        return sum(crosses[m[0]] for step in steps for m in step.gives)

    @cached_property
    def _uses(self) -> tuple[list[tuple[float, int]], ...]:
        """Times and registers in use of each channel, after each change.

        Events of one time are put in an order that agrees with all dependences: ends of steps, then steps without
        length, then starts.
        """
        events: list[list[tuple[float, int, int]]] = [[] for _ in self.network.channels]
        for channel, _ in self.network.first_messages():
            events[channel].append((0.0, _FIRST, 1))
        for a, (starts, ends, after) in enumerate(zip(self.starts, self.ends, self.sequence, strict=True)):
            for (_, step), start, end, number in zip(self._steps(a), starts, ends, after, strict=True):
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


def simulate(net: Network, cost: Cost, link: LinkCost | None = None, rounds: int | None = None) -> Timeline:
    """Run the network under virtual time.

    Args:
      net: actors and channels.
      cost: seconds of a step, by its label. An actor's steps ask for it in order.
      link: for a channel between two actors its latency, and the seconds for which one message occupies the link;
        both 0 if not given. The messages from one actor to another, on all their channels, go one after the other: a
        message leaves when its step has ended and the messages before it have left, and arrives seconds per message
        plus latency later. A register is free for its sender as soon as the receiving step ends.
      rounds: to run; None: one period.

    Raises:
      PipelineError: the network deadlocks (the error names the cycle), or a cost is not a number of 0 or more.
    """
    timeline = run_timed(net, cost, link, rounds)
    if timeline is None:
        raise PipelineError(str(find_deadlock(net)))
    return timeline


_ALIKE: Final = 1e-10
"""Times that differ by less than this share of a round are the same."""


def seconds_of_rounds(net: Network, cost: Cost, link: LinkCost | None, rounds: int) -> float:
    """The end of the last step of a run of many rounds, as `simulate` finds it.

    A network of steps with fixed costs repeats itself after some periods: each one then begins as an earlier one did,
    only later (Cohen, Dubois, Quadrat and Viot 1985, A linear-system-theoretic view of discrete-event processes). The
    rounds after that are not run but counted. Parts that do not hold each other back, by credits or values, may never
    repeat their common state: then all rounds are run.

    Args:
      net, cost, link: as in `simulate`; the network has no deadlock.
      rounds: number of rounds.
    """
    run = _SimulatedRun(net, cost, link or _no_link, 0)
    before, then, kept = 0, 0.0, list[float]()
    for period in range(1, -(-rounds // net.period)):
        run.go_on(period * net.period)
        at, state = run.time, run.state()
        if before and all(abs(a - b) <= _ALIKE * at / period for a, b in zip(state, kept, strict=True)):
            turns = (rounds // net.period - period) // (period - before)
            run.go_on(rounds - turns * (period - before) * net.period)
            return run.time + turns * (at - then)
        if not period & (period - 1):  # Brent 1980: the state kept is at last one of the cycle, and before it ends
            before, then, kept = period, at, state
    run.go_on(rounds)
    return run.time


def _by_message(item: tuple[Message, object]) -> tuple[int, str]:
    (channel, key), _ = item
    return channel, str(key)


def _no_link(channel: Channel) -> tuple[float, float]:
    return 0.0, 0.0


def run_timed(net: Network, cost: Cost, link: LinkCost | None, rounds: int | None = None) -> Timeline | None:
    """`simulate` without its checks; None if the network deadlocks."""
    return _SimulatedRun(net, cost, link or _no_link, net.period if rounds is None else rounds).timeline()


class _SimulatedRun:
    """One run of the simulator."""

    def __init__(self, net: Network, cost: Cost, link: LinkCost, rounds: int) -> None:
        self.net, self.cost = net, cost
        self.actors = [Actor(net, a, 0.0, rounds) for a in range(len(net.actors))]
        self.source = [c.source for c in net.channels]
        self.target = [c.target for c in net.channels]
        self.bounded = [c.registers is not None for c in net.channels]
        self.links = [None if c.source == c.target else _positive_link(c, link) for c in net.channels]
        self.sent = [[0.0] * len(self.actors) for _ in self.actors]  # when the last message left, by source and target
        self.starts: list[list[float]] = [[] for _ in self.actors]
        self.ends: list[list[float]] = [[] for _ in self.actors]
        self.sequence: list[list[int]] = [[] for _ in self.actors]
        self.number = 0
        self.queue = deque(self.actors)
        self.waiting = [False] * len(self.actors)  # not in the queue
        for message in net.first_messages():
            self.actors[self.target[message[0]]].deliver(message, 0.0)

    def _run(self) -> None:
        while self.queue:
            actor = self.queue.popleft()
            self._advance(actor)
            self.waiting[actor.number] = True

    def go_on(self, rounds: int) -> None:
        """Run until this round; only the last times are kept."""
        for actor in self.actors:
            actor.run_until(rounds)
            del self.starts[actor.number][:-1], self.ends[actor.number][:-1], self.sequence[actor.number][:-1]
        self.queue, self.waiting = deque(self.actors), [False] * len(self.actors)
        self._run()

    @property
    def time(self) -> float:
        """The end of the last step so far."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    def state(self) -> list[float]:
        """After a whole period: all times that later steps depend on, from the end of the last step. Two equal states
        go on alike. A time before an actor's last end is as good as that."""
        now = self.time
        state: list[float] = []
        for actor, ends, sent in zip(self.actors, self.ends, self.sent, strict=True):
            end = ends[-1] if ends else 0.0
            arrivals = [t for _, found in sorted(actor.arrived().items(), key=_by_message) for t in found]
            state += [max(t, end) - now for t in (end, *arrivals, *actor.free_registers(), *sent)]
        return state

    def timeline(self) -> Timeline | None:
        self._run()
        if any(a.step is not None for a in self.actors):
            return None
        return Timeline(self.net, tuple(self.starts), tuple(self.ends), tuple(self.sequence))

    def _advance(self, actor: Actor[float]) -> None:
        """Run an actor's steps as far as messages and registers allow."""
        actors, cost, waiting, sent = self.actors, self.cost, self.waiting, self.sent[actor.number]
        starts, ends = self.starts[actor.number], self.ends[actor.number]
        first, time = len(ends), ends[-1] if ends else 0.0
        while actor.ready():
            step = actor.step
            assert step is not None
            arrivals, releases = actor.fire()
            time = max([time, *arrivals, *releases])
            starts.append(time)
            seconds = cost(step.label)
            if not 0.0 <= seconds < _FOREVER:
                raise PipelineError(_no_cost(step, seconds))
            time += seconds
            ends.append(time)
            for channel, _ in step.takes:
                if self.bounded[channel]:
                    b = self.source[channel]
                    actors[b].credit(channel, time)
                    if waiting[b]:
                        self._wake(b)
            for message in step.gives:
                b = self.target[message[0]]
                arrival = time
                link = self.links[message[0]]
                if link is not None:
                    arrival = sent[b] = max(time, sent[b]) + link[1]
                    arrival += link[0]
                actors[b].deliver(message, arrival)
                if waiting[b]:
                    self._wake(b)
        count = len(ends) - first
        self.sequence[actor.number] += range(self.number, self.number + count)
        self.number += count

    def _wake(self, b: int) -> None:
        self.waiting[b] = False
        self.queue.append(self.actors[b])


def _no_cost(step: Step, seconds: float) -> str:
    return f"The cost of {step.label} is {seconds}; it has to be a number of seconds, 0 or more."


def _positive_link(channel: Channel, link: LinkCost) -> tuple[float, float] | None:
    latency, seconds = link(channel)
    if not (0.0 <= latency < float("inf") and 0.0 <= seconds < float("inf")):
        raise PipelineError(
            f'The link of channel "{channel.name}" has latency {latency} and {seconds} seconds per message; '
            "both have to be numbers of seconds, 0 or more."
        )
    return (latency, seconds) if latency or seconds else None


def peak_activations(schedule: Schedule, timeline: Timeline) -> tuple[int, ...]:
    """For each rank the peak of the activations that it holds, in chunks (one stage's share of a microbatch).

    An activation lives from the start of F to the end of the full backward B, or of W if the backward is split.
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
