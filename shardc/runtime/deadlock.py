"""Deadlock, decided before the run: the machine is driven without time until it ends or stops.

A network's actors choose nothing, so where they stop does not depend on who is faster: one run without a clock decides
for all runs (Kahn 1974, The semantics of a simple language for parallel programming).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardc.errors import PipelineError, all_offenders
from shardc.runtime.actor import Actor, Message, Network, Step, check_network

_BEFORE, _AFTER = 4, 6
"""Cells shown of an actor's row before and after the one where it is stuck."""


@dataclass(frozen=True)
class Wait:
    """Why an actor is stuck: it waits for a message (`key` tells which), or for a register (`key` is None).

    Attributes:
      actor, label: who waits, and the step that cannot fire.
      channel: number of the channel.
      message: the message; None if it is a register that is missing.
      on: the actor that would have to move on.
    """

    actor: int
    label: Hashable
    channel: int
    message: Message | None
    on: int


@dataclass(frozen=True)
class Deadlock:
    """Where a network stops, and the cycle of actors that wait for each other.

    Attributes:
      network: the network.
      positions: for each actor how many steps it can do; the next one, if there is one, is stuck.
      cycle: each wait is on the actor of the next one, the last on that of the first.
    """

    network: Network
    positions: tuple[int, ...]
    cycle: tuple[Wait, ...]

    def __str__(self) -> str:
        who = sorted({w.actor for w in self.cycle})
        head = (
            f"actor {who[0]} waits for itself"
            if len(who) == 1
            else f"actors {', '.join(map(str, who[:-1]))} and {who[-1]} wait for each other"
        )
        stuck = sum(p < len(steps) for p, steps in zip(self.positions, self.network.actors, strict=True))
        return "\n".join(
            [
                f"The pipeline deadlocks: {head} ({stuck} of {len(self.positions)} actors never end).",
                *(f"  {self._reason(w)}" for w in self.cycle),
                "In the grid of the schedule, [stuck] actions in brackets, before them what is done:",
                *(f"  {line}" for line in self._grid()),
                self._remedy(),
            ]
        )

    def _reason(self, wait: Wait) -> str:
        net = self.network
        channel = net.channels[wait.channel]
        me = f"actor {wait.actor} is at {wait.label} and waits for"
        if wait.message is not None:
            giver = _position(net.actors[channel.source], "gives", wait.message)
            given = net.actors[channel.source][giver].label
            return (
                f'{me} message {wait.message[1]!r} on channel "{channel.name}" from actor {channel.source}, '
                f"which gives it in {given}{self._distance(channel.source, giver)}."
            )
        target = net.actors[channel.target]
        sent = [
            m for s in net.actors[channel.source][: self.positions[wait.actor]] for m in s.gives if m[0] == wait.channel
        ]
        returned = {m for s in target[: self.positions[channel.target]] for m in s.takes}
        kept = [m for m in sent if m not in returned]
        firsts = min((_position(target, "takes", m) for m in kept), default=None)
        if firsts is None:
            return f'{me} more registers of channel "{channel.name}" at once than its {channel.registers}.'
        keys = ", ".join(repr(m[1]) for m in kept[:8]) + (", ..." if len(kept) > 8 else "")
        return (
            f'{me} a register of channel "{channel.name}": all {channel.registers} hold messages ({keys}) that '
            f"actor {channel.target} takes, the first in {target[firsts].label}"
            f"{self._distance(channel.target, firsts)}."
        )

    def _distance(self, actor: int, position: int) -> str:
        ahead = position - self.positions[actor]
        return f", {ahead} steps after {self.network.actors[actor][self.positions[actor]].label}" if ahead else ""

    def _grid(self) -> list[str]:
        rows: list[tuple[list[str], str, list[str]]] = []
        for steps, at in zip(self.network.actors, self.positions, strict=True):
            before = [str(s.label) for s in steps[max(0, at - _BEFORE) : at]]
            after = [str(s.label) for s in steps[at + 1 : at + 1 + _AFTER]]
            stuck = f"[{steps[at].label}]" if at < len(steps) else "(done)"
            rows.append((["..."] * (at > _BEFORE) + before, stuck, after + ["..."] * (len(steps) > at + 1 + _AFTER)))
        cell = max(len(c) for before, stuck, after in rows for c in (*before, stuck, *after))
        left = max(len(before) for before, _, _ in rows)
        names = [f"actor {i}" for i in range(len(rows))]
        return [
            f"{name:<{len(names[-1])}} | "
            + " ".join(f"{c:^{cell}}" for c in ([""] * (left - len(before)) + before + [stuck] + after)).rstrip()
            for name, (before, stuck, after) in zip(names, rows, strict=True)
        ]

    def _remedy(self) -> str:
        full = sorted({w.channel for w in self.cycle if w.message is None})
        if not full:
            return "No number of registers helps. Change the order so that what is waited for comes first."
        names = ", ".join(f'"{self.network.channels[c].name}"' for c in full)
        return f"Give more registers to {names}, or change the order so that they are given back earlier."


def find_deadlock(net: Network) -> Deadlock | None:
    """Where the network stops for ever, or None if every actor ends.

    Linear in the number of messages.

    Raises:
      PipelineError: the network is none: a message that nobody gives, a channel without registers.
    """
    wrong = check_network(net)
    if wrong:
        raise PipelineError(all_offenders("This is no network of actors:", wrong))
    actors = run_without_time(net)
    if all(a.step is None for a in actors):
        return None
    return Deadlock(net, tuple(a.position for a in actors), _cycle(net, actors))


def run_without_time(net: Network) -> list[Actor[None]]:
    """All actors, each as far as it can come."""
    actors: list[Actor[None]] = [Actor(net, a, None) for a in range(len(net.actors))]
    source = [c.source for c in net.channels]
    target = [c.target for c in net.channels]
    bounded = [c.registers is not None for c in net.channels]
    queue = deque(actors)
    waiting = [False] * len(actors)  # not in the queue
    while queue:
        actor = queue.popleft()
        while actor.ready():
            step = actor.step
            assert step is not None
            actor.fire()
            for channel, _ in step.takes:
                if bounded[channel]:
                    other = actors[source[channel]]
                    other.credit(channel, None)
                    if waiting[other.number]:
                        waiting[other.number] = False
                        queue.append(other)
            for message in step.gives:
                other = actors[target[message[0]]]
                other.deliver(message, None)
                if waiting[other.number]:
                    waiting[other.number] = False
                    queue.append(other)
        waiting[actor.number] = True
    return actors


def _cycle(net: Network, actors: Sequence[Actor[None]]) -> tuple[Wait, ...]:
    """From the lowest stuck actor, follow the first wait until an actor comes again."""
    came: dict[int, int] = {}
    path: list[Wait] = []
    at = next(a.number for a in actors if a.step is not None)
    while at not in came:
        came[at] = len(path)
        path.append(_first_wait(net, actors[at]))
        at = path[-1].on
    return tuple(path[came[at] :])


def _first_wait(net: Network, actor: Actor[None]) -> Wait:
    assert actor.step is not None
    messages, full = actor.missing()
    if messages:
        channel = messages[0][0]
        return Wait(actor.number, actor.step.label, channel, messages[0], net.channels[channel].source)
    return Wait(actor.number, actor.step.label, full[0], None, net.channels[full[0]].target)


def _position(steps: Sequence[Step], verb: str, message: Message) -> int:
    return next(i for i, s in enumerate(steps) if message in getattr(s, verb))
