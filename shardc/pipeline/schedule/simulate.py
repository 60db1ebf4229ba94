"""The simulator: runs the actors of a network under virtual time.

Actors make no choices. So a step is ready at the maximum of the end of the step before it, the arrivals of its messages
and the releases of its registers, and no event queue is needed: an actor advances as far as it can, then the actors
that its messages wake; times travel with messages and registers. Every message is visited once, and the result is that
of an event simulation.

Steps and messages that use a resource which others use too (a device, a link, an interpreter) take turns, in the order
in which they are ready, at the same time in the order of their rounds and actors. Each then waits until all that it
uses is free, and those behind it wait for it, as programs in the queues of several devices do. Only these go through an
event queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import fsum
from operator import sub
from typing import Any, Final, NamedTuple, TypeAlias

from shardc.errors import PipelineError
from shardc.pipeline.schedule.action import Action
from shardc.pipeline.schedule.schedule import Schedule
from shardc.pipeline.schedule.turns import PartlyHeld, Turns
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
"""A function from a step's label to its seconds, which may be `PartlyHeld`."""
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
      held: for how long each resource of the network was held; empty: nobody knows.
    """

    network: Network
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]
    sequence: tuple[Sequence[int], ...]
    held: tuple[float, ...] = ()

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
        plus latency later. Where channels name what they use, the messages of all channels that use it go one after
        the other. A register is free for its sender as soon as the receiving step ends.
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
    only later (Cohen, Dubois, Quadrat and Viot 1985, A linear-system-theoretic view of discrete-event processes; with
    turns it is no longer linear, but what follows from equal states is equal). The rounds after that are not run but
    counted. Parts that do not hold each other back, by credits or values, may never repeat their common state: then all
    rounds are run.

    Args:
      net, cost, link: as in `simulate`; the network has no deadlock.
      rounds: number of rounds.
    """
    run = _SimulatedRun(net, cost, link or _no_link, 0)
    seen, before, then, kept = 0, 0, 0.0, _State((), [])
    for period in range(1, -(-rounds // net.period)):
        if not run.go_on(period * net.period):
            continue
        at, state = run.time, run.state()
        if before and state.is_like(kept, _ALIKE * at / period):
            turns = (rounds // net.period - period) // (period - before)
            run.go_on(rounds - turns * (period - before) * net.period, is_last=True)
            return run.time + turns * (at - then)
        seen += 1
        if not seen & (seen - 1):  # Brent 1980: the state kept is at last one of the cycle, and before it ends
            before, then, kept = period, at, state
    run.go_on(rounds, is_last=True)
    return run.time


class _State(NamedTuple):
    """What the rest of a run depends on.

    Attributes:
      shape: what waits where.
      times: relative to the end of the last step.
    """

    shape: tuple[Hashable, ...]
    times: list[float]

    def is_like(self, other: _State, most: float) -> bool:
        """Whether both go on alike: times that differ by no more than `most` are the same."""
        return self.shape == other.shape and all(
            abs(a - b) <= most for a, b in zip(self.times, other.times, strict=True)
        )


def _by_message(item: tuple[Message, object]) -> tuple[int, str]:
    (channel, key), _ = item
    return channel, str(key)


def _no_link(channel: Channel) -> tuple[float, float]:
    return 0.0, 0.0


def run_timed(net: Network, cost: Cost, link: LinkCost | None, rounds: int | None = None) -> Timeline | None:
    """`simulate` without its checks; None if the network deadlocks."""
    return _SimulatedRun(net, cost, link or _no_link, net.period if rounds is None else rounds).timeline()


class _ChannelLink(NamedTuple):
    """The link of a channel: its latency, the seconds of a message, what a message uses, and whether others do too."""

    latency: float
    seconds: float
    uses: tuple[int, ...]
    by_turns: bool


_SEND: Final = 0
_RUN: Final = 1


class _Asked(NamedTuple):
    """Somebody who waits for a turn, in the order of turns: from when on, and which actor's message or step it is."""

    ready: float
    round: int
    actor: int
    kind: int
    number: int
    what: Any


class _SimulatedRun:
    """One run of the simulator."""

    def __init__(self, net: Network, cost: Cost, link: LinkCost, rounds: int) -> None:
        self.net, self.cost = net, cost
        self.actors = [Actor(net, a, 0.0, rounds) for a in range(len(net.actors))]
        self.source = [c.source for c in net.channels]
        self.target = [c.target for c in net.channels]
        self.bounded = [c.registers is not None for c in net.channels]
        self.turns = Turns(net)
        self.contended = {uses: self.turns.contended(uses) for uses in {s.uses for row in net.actors for s in row}}
        own: dict[tuple[int, int], int] = {}
        self.links = [None if c.source == c.target else self._link_of(c, link, own) for c in net.channels]
        self.starts: list[list[float]] = [[] for _ in self.actors]
        self.ends: list[list[float]] = [[] for _ in self.actors]
        self.sequence: list[list[int]] = [[] for _ in self.actors]
        self.number = 0
        self.queue = deque(self.actors)
        self.waiting = [False] * len(self.actors)  # neither in the queue nor for a turn
        self.asked: list[_Asked] = []  # a heap
        self.stopped: set[int] = set()  # of the actors that take turns, those that are at the end of the rounds to run
        self.asks = self.given = 0  # turns
        for message in net.first_messages():
            self.actors[self.target[message[0]]].deliver(message, 0.0)

    def _link_of(self, channel: Channel, link: LinkCost, own: dict[tuple[int, int], int]) -> _ChannelLink | None:
        latency, seconds = link(channel)
        if not (0.0 <= latency < _FOREVER and 0.0 <= seconds < _FOREVER):
            raise PipelineError(
                f'The link of channel "{channel.name}" has latency {latency} and {seconds} seconds per message; '
                "both have to be numbers of seconds, 0 or more."
            )
        if not latency and not seconds:
            return None
        uses, way = channel.uses, (channel.source, channel.target)
        if not uses:
            uses = (own[way] if way in own else own.setdefault(way, self.turns.add(channel.source)),)
        return _ChannelLink(latency, seconds, uses, bool(self.turns.contended(uses)))

    def _run(self, is_last: bool) -> None:
        """Let all actors advance as far as they can. Unless these rounds are the last, no turn is given that an actor
        might have before, which is at the end of the rounds to run."""
        queue, asked = self.queue, self.asked
        while True:
            while queue:
                self._advance(queue.popleft())
            if not asked or not (is_last or self._is_next(asked[0])):
                return
            self.given += 1
            turn = heappop(asked)
            if turn.kind == _RUN:
                time = self.turns.free(self.contended[turn.what.uses], turn.ready)
                self._advance(self.actors[turn.actor], turn, time)
            else:
                self._send(turn.what, turn.ready)

    def _is_next(self, turn: _Asked) -> bool:
        """Whether nobody who is at the end of the rounds to run could be before it."""
        return all(
            ((self.ends[a][-1] if self.ends[a] else 0.0), self.actors[a].rounds, a) > turn[:3] for a in self.stopped
        )

    def go_on(self, rounds: int, *, is_last: bool = False) -> bool:
        """Run until this round; only the last times are kept. Returns whether this brought the run on."""
        for actor in self.actors:
            actor.run_until(rounds)
            del self.starts[actor.number][:-1], self.ends[actor.number][:-1], self.sequence[actor.number][:-1]
        blocked = {turn.actor for turn in self.asked if turn.kind == _RUN}
        self.queue = deque(a for a in self.actors if a.number not in blocked)
        self.waiting = [False] * len(self.actors)
        self.stopped.clear()
        before = self.given
        self._run(is_last)
        return self.given > before or not self.turns.actors

    @property
    def time(self) -> float:
        """The end of the last step so far."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    def state(self) -> _State:
        """All that later steps depend on: what waits where, and times from the end of the last step. Two equal states
        go on alike. A time before an actor's last end is as good as that."""
        now = self.time
        shape: list[Hashable] = []
        times: list[float] = []
        last = [ends[-1] if ends else 0.0 for ends in self.ends]
        for actor, end in zip(self.actors, last, strict=True):
            found = sorted(actor.arrived().items(), key=_by_message)
            free, held = actor.free_registers(), actor.held_registers()
            shape += [actor.rounds - actor.round, actor.position, len(free), len(held)]
            shape += [(message, len(arrivals)) for message, arrivals in found]
            times += [max(t, end) - now for t in (end, *(t for _, ts in found for t in ts), *free, *held)]
        asked = sorted(self.asked)
        shape += [(self.actors[x.actor].rounds - x.round, x.actor, x.kind, x.what) for x in asked]
        times += [turn.ready - now for turn in asked]
        times += [t - now for t in self.turns.state(last, asked[0].ready if asked else _FOREVER)]
        return _State(tuple(shape), times)

    def timeline(self) -> Timeline | None:
        self._run(is_last=True)
        if any(a.step is not None for a in self.actors):
            return None
        held = tuple(self.turns.held[: len(self.net.resources)])
        return Timeline(self.net, tuple(self.starts), tuple(self.ends), tuple(self.sequence), held)

    def _advance(self, actor: Actor[float], turn: _Asked | None = None, time: float = 0.0) -> None:
        """Run an actor's steps as far as messages, registers and turns allow.

        Args:
          actor: the actor.
          turn, time: of a step whose turn begins then.
        """
        a, ends, length = actor.number, self.ends[actor.number], self.net.period
        first = len(ends)
        if turn is not None:
            self._fire(a, turn.what, time, turn.round)
        while actor.ready():
            step = actor.step
            assert step is not None
            round = actor.period * length + step.round
            arrivals, releases = actor.fire()
            time = max([ends[-1] if ends else 0.0, *arrivals, *releases])
            if step.uses and self.contended[step.uses]:
                self._ask(_RUN, time, round, a, step)
                break
            self._fire(a, step, time, round)
        else:
            self.waiting[a] = True
            if actor.step is None and a in self.turns.actors:
                self.stopped.add(a)
        count = len(ends) - first
        self.sequence[a] += range(self.number, self.number + count)
        self.number += count

    def _fire(self, a: int, step: Step, time: float, round: int) -> None:
        """Run a step of actor a, and tell those whom it gives messages and registers."""
        actors, waiting, links = self.actors, self.waiting, self.links
        self.starts[a].append(time)
        seconds = self.cost(step.label)
        if not 0.0 <= seconds < _FOREVER:
            raise PipelineError(_no_cost(step, seconds))
        if step.uses:
            self._hold(step, time, seconds)
        time += seconds
        self.ends[a].append(time)
        for channel, _ in step.takes:
            if self.bounded[channel]:
                b = self.source[channel]
                actors[b].credit(channel, time)
                if waiting[b]:
                    self._wake(b)
        for message in step.gives:
            link = links[message[0]]
            if link is None:
                b = self.target[message[0]]
                actors[b].deliver(message, time)
                if waiting[b]:
                    self._wake(b)
            elif link.by_turns:
                self._ask(_SEND, time, round, a, message)
            else:
                self._send(message, time)

    def _hold(self, step: Step, time: float, seconds: float) -> None:
        held = min(seconds, seconds.held) if isinstance(seconds, PartlyHeld) else seconds
        self.turns.take(self.contended[step.uses], time + held)
        for r in step.uses:
            self.turns.held[r] += held

    def _ask(self, kind: int, ready: float, round: int, actor: int, what: Any) -> None:
        self.asks += 1
        heappush(self.asked, _Asked(ready, round, actor, kind, self.asks, what))

    def _send(self, message: Message, ready: float) -> None:
        """Send a message whose turn it is."""
        link, b = self.links[message[0]], self.target[message[0]]
        assert link is not None
        left = self.turns.free(link.uses, ready) + link.seconds
        self.turns.take(link.uses, left)
        for r in link.uses:
            self.turns.held[r] += link.seconds
        self.actors[b].deliver(message, left + link.latency)
        if self.waiting[b]:
            self._wake(b)

    def _wake(self, b: int) -> None:
        self.waiting[b] = False
        self.queue.append(self.actors[b])


def _no_cost(step: Step, seconds: float) -> str:
    return f"The cost of {step.label} is {seconds}; it has to be a number of seconds, 0 or more."


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
