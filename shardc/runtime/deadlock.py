"""Deadlock detection before the run: the actors run without a clock until they end or stop.

The actors of a network have no choices, so the point where they stop does not depend on speed: one run without a clock
decides for all runs (Kahn 1974, The semantics of a simple language for parallel programming). One period decides for all
of them: after it every channel holds as many messages as before (Lee and Messerschmitt 1987, Static scheduling of
synchronous data flow programs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from shardc.errors import PipelineError, all_offenders
from shardc.runtime.actor import Actor, Message, Network, check_network

_BEFORE: Final = 4
_AFTER: Final = 8
"""Cells shown of an actor's row before and after the one where it is stuck."""
_KEYS: Final = 6
"""Most messages named of those that fill a channel."""
_WORK: Final = 2_000_000
"""Most steps run to find a remedy."""


@dataclass(frozen=True)
class ActorWait:
    """The reason why an actor is stuck: it waits for a message, or for a register.

    Attributes:
      actor, label: the actor, and its step that cannot fire.
      channel: number of the channel.
      message: the missing message; None if a register is missing.
      on: the actor that would have to go on.
    """

    actor: int
    label: Hashable
    channel: int
    message: Message | None
    on: int


@dataclass(frozen=True)
class Deadlock:
    """The point where a network stops, and the cycle of actors that wait for each other.

    Attributes:
      network: the network.
      positions: for each actor the number of steps that it can run; the next one, if there is one, is stuck.
      cycle: each wait is on the actor of the next one, the last on that of the first.
    """

    network: Network
    positions: tuple[int, ...]
    cycle: tuple[ActorWait, ...]

    def __str__(self) -> str:
        return self.text("The pipeline")

    def text(self, what: str) -> str:
        """The report. `what`: the thing that deadlocks."""
        who = sorted({w.actor for w in self.cycle})
        stuck = sum(p < len(steps) for p, steps in zip(self.positions, self.network.actors, strict=True))
        head = (
            f"actor {who[0]} waits for itself"
            if len(who) == 1
            else f"actors {', '.join(map(str, who[:-1]))} and {who[-1]} wait for each other"
        )
        return "\n".join(
            [
                f"{what} deadlocks: {head}; {stuck} of {len(self.positions)} actors never end.",
                *(f"  {reason}" for reason in self.reasons()),
                "Order of the actions; [brackets] mark the stuck ones, actions before them are done:",
                *(f"  {line}" for line in self._grid()),
                self._remedy(),
            ]
        )

    def reasons(self) -> list[str]:
        """A line for each wait of the cycle."""
        return [self._for_register(w) if w.message is None else self._for_message(w, w.message) for w in self.cycle]

    def _for_message(self, wait: ActorWait, message: Message) -> str:
        channel = self.network.channels[wait.channel]
        giver = next(i for i, s in enumerate(self.network.actors[channel.source]) if message in s.gives)
        return (
            f'actor {wait.actor} is at {wait.label} and waits for message {message[1]!r} of "{channel.name}", '
            f"which actor {channel.source} gives in {self._place(channel.source, giver)}."
        )

    def _for_register(self, wait: ActorWait) -> str:
        channel = self.network.channels[wait.channel]
        source, target = self.network.actors[wait.actor], self.network.actors[channel.target]
        held = [m for m in self.network.first_messages() if m[0] == wait.channel]
        held += [m for s in source[: self.positions[wait.actor]] for m in s.gives if m[0] == wait.channel]
        for m in (m for s in target[: self.positions[channel.target]] for m in s.takes if m[0] == wait.channel):
            held.remove(m)
        me = f'actor {wait.actor} is at {wait.label} and waits for a register of "{channel.name}"'
        if not held:
            at_once = sum(m[0] == wait.channel for m in source[self.positions[wait.actor]].gives)
            return f"{me}: it gives {at_once} messages at once, and the channel has {channel.registers}."
        keys = ", ".join(repr(m[1]) for m in held[:_KEYS]) + ", ..." * (len(held) > _KEYS)
        first = next(i for i, s in enumerate(target) if set(held) & set(s.takes))
        full = "its only one holds message" if channel.registers == 1 else f"its {channel.registers} hold messages"
        return f"{me}: {full} {keys}; actor {channel.target} takes the first in {self._place(channel.target, first)}."

    def _place(self, actor: int, position: int) -> str:
        steps, at = self.network.actors[actor], self.positions[actor]
        ahead = position - at
        place = str(steps[position].label)
        if not ahead:
            return f"{place}, where it is stuck"
        return f"{place}, {ahead} step{'s' * (ahead > 1)} after {steps[at].label}"

    def _grid(self) -> list[str]:
        """A row for each actor, with the stuck steps in one column."""
        rows: list[tuple[list[str], list[str]]] = []
        for steps, at in zip(self.network.actors, self.positions, strict=True):
            before = [str(s.label) for s in steps[max(0, at - _BEFORE) : at]]
            after = [str(s.label) for s in steps[at + 1 : at + 1 + _AFTER]]
            stuck = f"[{steps[at].label}]" if at < len(steps) else "(end)"
            rows.append((["..."] * (at > _BEFORE) + before, [stuck, *after, *["..."] * (len(steps) > at + 1 + _AFTER)]))
        left = max(len(before) for before, _ in rows)
        cell = max(len(c) for before, rest in rows for c in (*before, *rest))
        name = len(f"actor {len(rows) - 1}")
        return [
            f"{f'actor {i}':<{name}} | "
            + " ".join(f"{c:^{cell}}" for c in [""] * (left - len(before)) + before + rest).rstrip()
            for i, (before, rest) in enumerate(rows)
        ]

    def _remedy(self) -> str:
        free = self.network.with_registers([None] * len(self.network.channels))
        contradiction = find_deadlock(free)
        if contradiction is not None:
            if all(w.message for w in self.cycle):
                return "No number of registers helps: change the order, so that the awaited messages come first."
            return "\n".join(
                [
                    "More registers do not help: the order itself contradicts the data. Without any bound:",
                    *(f"  {reason}" for reason in contradiction.reasons()),
                ]
            )
        enough = _enough(self.network)
        if enough is None:
            full = [self.network.channels[w.channel].name for w in self.cycle if w.message is None]
            return f"Give more registers to {', '.join(full)}, or change the order so that they are free earlier."
        more = ", ".join(
            f'{n} to "{c.name}" (now {c.registers})'
            for c, n in zip(self.network.channels, enough, strict=True)
            if n != c.registers
        )
        return f"It ends if you give more registers: {more}. Or change the order so that they are free earlier."


def _enough(net: Network) -> tuple[int | None, ...] | None:
    """Registers with which the network ends: while it deadlocks, a channel of the cycle gets one more.

    None if that takes too much work.
    """
    work = 0
    while (deadlock := _stop_of(net)) is not None:
        work += sum(map(len, net.actors))
        if work > _WORK:
            return None
        full = next(w.channel for w in deadlock.cycle if w.message is None)
        net = net.with_registers(
            [c.registers + 1 if i == full and c.registers else c.registers for i, c in enumerate(net.channels)]
        )
    return tuple(c.registers for c in net.channels)


def find_deadlock(net: Network) -> Deadlock | None:
    """The point where the network stops for ever; None if every actor ends.

    Linear in the number of messages.

    Raises:
      PipelineError: the network is invalid: a message that no step gives, a channel without registers.
    """
    wrong = check_network(net)
    if wrong:
        raise PipelineError(all_offenders("Invalid network: each message must be given once and taken once.", wrong))
    return _stop_of(net)


def _stop_of(net: Network) -> Deadlock | None:
    actors = run_without_time(net)
    if all(a.step is None for a in actors):
        return None
    return Deadlock(net, tuple(a.fired for a in actors), _cycle(net, actors))


def run_without_time(net: Network) -> list[Actor[None]]:
    """All actors, each run as far as it can go in one period."""
    actors: list[Actor[None]] = [Actor(net, a, None) for a in range(len(net.actors))]
    source = [c.source for c in net.channels]
    target = [c.target for c in net.channels]
    bounded = [c.registers is not None for c in net.channels]
    for message in net.first_messages():
        actors[target[message[0]]].deliver(message, None)
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


def _cycle(net: Network, actors: Sequence[Actor[None]]) -> tuple[ActorWait, ...]:
    """The cycle that the first waits lead to, from the lowest stuck actor."""
    came: dict[int, int] = {}
    path: list[ActorWait] = []
    at = next(a.number for a in actors if a.step is not None)
    while at not in came:
        came[at] = len(path)
        path.append(_first_wait(net, actors[at]))
        at = path[-1].on
    return tuple(path[came[at] :])


def _first_wait(net: Network, actor: Actor[None]) -> ActorWait:
    assert actor.step is not None
    messages, full = actor.missing()
    if messages:
        channel = messages[0][0]
        return ActorWait(actor.number, actor.step.label, channel, messages[0], net.channels[channel].source)
    return ActorWait(actor.number, actor.step.label, full[0], None, net.channels[full[0]].target)
