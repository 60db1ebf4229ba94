"""The actor: a small deterministic state machine, and the network of channels that joins actors.

An actor runs its steps in one fixed order. Its next step may fire when every message that the step takes is there and
every channel that it gives to has a free register. A register is taken when the producing step starts and given back
when the consuming step ends: this is credit-based flow control, as in OneFlow (Yuan et al. 2021, section 4).

The machine has no clock and no threads. Its driver decides what a message carries: the time of arrival in the simulator
(`shardc.pipeline.schedule.simulate`), an array in the executor (`shardc.runtime.executor`), nothing where only the
order matters (`shardc.runtime.deadlock`). An actor has no choices, so its behaviour does not depend on speed: a network
either finishes under every timing or stops at the same steps under every timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

Message: TypeAlias = tuple[int, Hashable]
"""Channel number, key. The key (the microbatch) tells the messages of a channel apart."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A bounded queue of registers between two actors.

    Attributes:
      name: for people: `stash 0`, `activation 0->1`.
      source, target: actor numbers; equal for what an actor keeps for itself (a stash).
      registers: the number of messages that may be in transit or in use at once; None: no bound.
      bytes: size of one message.
    """

    name: str
    source: int
    target: int
    registers: int | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One action of an actor: the messages that it takes and those that it gives.

    Attributes:
      label: an Action (`2F0`) or any text (`U0`).
      takes, gives: messages. A consumer may take them in another order than they were made.
    """

    label: Hashable
    takes: tuple[Message, ...] = ()
    gives: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Network:
    """For each actor its steps in their order, and the channels between actors.

    Every message is given by one step, of its channel's source, and taken by one step, of its channel's target:
    `check_network` lists what violates this.
    """

    actors: tuple[tuple[Step, ...], ...]
    channels: tuple[Channel, ...]

    def with_registers(self, registers: Sequence[int | None]) -> Network:
        """This network with other numbers of registers, one for each channel."""
        channels = tuple(replace(c, registers=r) for c, r in zip(self.channels, registers, strict=True))
        return replace(self, channels=channels)


class Span(NamedTuple):
    """The execution of one step: virtual seconds in the simulator, seconds of the host's clock in the executor."""

    actor: int
    label: Hashable
    start: float
    end: float


class Actor(Generic[T]):
    """The state of one actor: its next step, the messages that have arrived, its free registers.

    Example:
      >>> net = Network(((Step("give", (), ((0, "x"),)),), (Step("take", ((0, "x"),)),)), (Channel("c", 0, 1, 1),))
      >>> actor = Actor(net, 1, free=None)
      >>> actor.ready()
      False
      >>> actor.deliver((0, "x"), "value")
      >>> actor.ready(), actor.fire(), actor.step
      (True, (['value'], []), None)
    """

    __slots__ = ("_free", "_held", "_inbox", "_steps", "number", "position", "step")

    def __init__(self, net: Network, number: int, free: T) -> None:
        """`free` is the value that a register carries before its first use (the time 0 in the simulator)."""
        self.number = number
        self.position = 0
        self._steps = net.actors[number]
        self.step: Step | None = self._steps[0] if self._steps else None
        """The next step; None when all are done."""
        self._inbox: dict[Message, T] = {}
        self._free: dict[int, deque[T] | None] = {
            i: None if c.registers is None else deque([free] * c.registers)
            for i, c in enumerate(net.channels)
            if c.source == number
        }
        self._held: list[T] = []

    def ready(self) -> bool:
        """Whether the next step may fire. Reserves the registers that it needs as they become free."""
        step = self.step
        if step is None:
            return False
        for message in step.takes:
            if message not in self._inbox:
                return False
        return not step.gives or self._registers_held(step)

    def _registers_held(self, step: Step) -> bool:
        held = self._held
        bounded = 0
        for channel, _ in step.gives:
            free = self._free[channel]
            if free is not None:
                bounded += 1
                if bounded > len(held):
                    if not free:
                        return False
                    held.append(free.popleft())
        return True

    def fire(self) -> tuple[list[T], list[T]]:
        """Start the next step, which must be ready, and move on to the one after it.

        Returns:
          the values of the messages that it takes, in order, and those of the bounded registers that it takes.

        When the step has ended, the driver gives a credit for each taken message to the channel's source, and delivers
        each given message to the channel's target.
        """
        step = self.step
        assert step is not None
        values = [self._inbox.pop(message) for message in step.takes]
        held, self._held = self._held, []
        self.position += 1
        self.step = self._steps[self.position] if self.position < len(self._steps) else None
        return values, held

    def deliver(self, message: Message, value: T) -> None:
        """Record a message that has arrived."""
        self._inbox[message] = value

    def credit(self, channel: int, value: T) -> None:
        """Record that a register of a bounded channel that this actor gives to is free again."""
        free = self._free[channel]
        assert free is not None
        free.append(value)

    def missing(self) -> tuple[list[Message], list[int]]:
        """The messages that the next step still waits for, and the channels without a free register."""
        if self.step is None:
            return [], []
        messages = [m for m in self.step.takes if m not in self._inbox]
        held = len(self._held)
        full: list[int] = []
        spare = {c: len(free) for c, free in self._free.items() if free is not None}
        for channel, _ in self.step.gives:
            if channel not in spare:
                continue
            if held:
                held -= 1
            elif spare[channel]:
                spare[channel] -= 1
            elif channel not in full:
                full.append(channel)
        return messages, full


def check_network(net: Network) -> list[str]:
    """The errors of a network that do not depend on timing; empty if there are none."""
    count = len(net.actors)
    wrong = [
        f'channel {i} "{c.name}" is between actors {c.source} and {c.target}; the network has {count}.'
        for i, c in enumerate(net.channels)
        if not (0 <= c.source < count and 0 <= c.target < count)
    ]
    wrong += [
        f'channel {i} "{c.name}" has {c.registers} registers; it needs at least 1 (None: no bound).'
        for i, c in enumerate(net.channels)
        if c.registers is not None and c.registers < 1
    ]
    return wrong if _fits(net) else wrong + _wrong_messages(net)


def _fits(net: Network) -> bool:
    """Whether every message is given once and taken once, by the actors at the ends of its channel."""
    given: list[Message] = []
    taken: list[Message] = []
    misplaced = False
    for a, steps in enumerate(net.actors):
        gives = {i for i, c in enumerate(net.channels) if c.source == a}
        takes = {i for i, c in enumerate(net.channels) if c.target == a}
        for step in steps:
            given += step.gives
            taken += step.takes
            for channel, _ in step.gives:
                misplaced |= channel not in gives
            for channel, _ in step.takes:
                misplaced |= channel not in takes
    once = set(given)
    return not misplaced and len(given) == len(taken) == len(once) and once == set(taken)


def _wrong_messages(net: Network) -> list[str]:
    wrong: list[str] = []
    given: dict[Message, str] = {}
    taken: dict[Message, str] = {}
    for a, steps in enumerate(net.actors):
        for step in steps:
            wrong += _wrong_ends(net, f"actor {a}, {step.label}, gives", "giver", a, step.gives, given)
            wrong += _wrong_ends(net, f"actor {a}, {step.label}, takes", "taker", a, step.takes, taken)
    wrong += [f"{who} {_name(net, m)}, which no step gives." for m, who in taken.items() if m not in given]
    wrong += [f"{who} {_name(net, m)}, which no step takes." for m, who in given.items() if m not in taken]
    return wrong


def _wrong_ends(
    net: Network, who: str, end: str, actor: int, messages: tuple[Message, ...], seen: dict[Message, str]
) -> list[str]:
    wrong: list[str] = []
    for message in messages:
        channel = message[0]
        if not 0 <= channel < len(net.channels):
            known = f"channels are 0 to {len(net.channels) - 1}" if net.channels else "there are no channels"
            wrong.append(f"{who} a message of channel {channel}; {known}.")
            continue
        right = net.channels[channel].source if end == "giver" else net.channels[channel].target
        if right != actor:
            wrong.append(f"{who} {_name(net, message)}, whose {end} is actor {right}.")
        elif message in seen:
            wrong.append(f"{who} {_name(net, message)} a second time: {seen[message]} it already.")
        seen[message] = who
    return wrong


def _name(net: Network, message: Message) -> str:
    return f'message {message[1]!r} of "{net.channels[message[0]].name}"'
