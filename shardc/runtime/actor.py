"""The actor: a small deterministic state machine, and the network of channels that joins actors.

An actor runs its steps in one fixed order. Its next step may fire when every message that the step takes is there and
every channel that it gives to has a free register. A register is taken when the producing step starts and given back
when the consuming step ends: this is credit-based flow control, as in OneFlow (Yuan et al. 2021, section 4).

A network is periodic: its steps are those of one period of a round or more, which is run any number of times. A call of
a pipeline is one round.

The machine has no clock and no threads. Its driver decides what a message carries: the time of arrival in the simulator
(`shardc.pipeline.schedule.simulate`), an array in the executor (`shardc.runtime.executor`), nothing where only the
order matters (`shardc.runtime.deadlock`). An actor has no choices, so its behaviour does not depend on speed: a network
either finishes under every timing or stops at the same steps under every timing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

Message: TypeAlias = tuple[int, Hashable]
"""Channel number, key. The key (the microbatch) tells the messages of a channel in one period apart; those of later
periods follow them in order."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What steps, or messages on their way, hold while they run, so that others wait: devices, a link, an interpreter.

    Attributes:
      name: for people.
      units: how many may hold it at once.
    """

    name: str
    units: int = 1


@dataclass(frozen=True, slots=True)
class Channel:
    """A bounded queue of registers between two actors.

    Attributes:
      name: for people: `stash 0`, `activation 0->1`.
      source, target: actor numbers; equal for what an actor keeps for itself (a stash).
      registers: the number of messages that may be in transit or in use at once; None: no bound.
      bytes: size of one message.
      delay: the rounds by which messages are late: a step of round r takes what was given in round r - delay. What is
        taken in the first rounds is in the channel when a run begins, and occupies registers.
      uses: the numbers of the resources that a message holds on its way; none: those from one actor to another have a
        link of their own.
    """

    name: str
    source: int
    target: int
    registers: int | None = None
    bytes: int = 0
    delay: int = 0
    uses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One action of an actor: the messages that it takes and those that it gives.

    Attributes:
      label: an Action (`2F0`) or any text (`U0`).
      takes, gives: messages. A consumer may take them in another order than they were made.
      round: its round within the period.
      uses: the numbers of the resources that it holds while it runs.
    """

    label: Hashable
    takes: tuple[Message, ...] = ()
    gives: tuple[Message, ...] = ()
    round: int = 0
    uses: tuple[int, ...] = ()


class Late(NamedTuple):
    """A message of a delayed channel, as its taker sees it.

    Attributes:
      message: the message.
      delay: of its channel.
      position: in the taker's period, of the step that takes it.
      round: of this step.
      period: rounds of a period.
    """

    message: Message
    delay: int
    position: int
    round: int
    period: int

    def taken(self, rounds: int) -> int:
        """How many of it the first rounds take."""
        return max(0, -((self.round - rounds) // self.period))

    def waiting(self, rounds: int) -> int:
        """How many of it are in the channel after so many rounds."""
        return self.taken(rounds + self.delay) - self.taken(rounds)


@dataclass(frozen=True)
class Network:
    """For each actor its steps in their order, and the channels between actors.

    Every message is given by one step, of its channel's source, and taken by one step, of its channel's target:
    `check_network` lists what violates this.

    Attributes:
      actors: the steps of one period.
      period: its rounds. The steps of an actor are in the order of their rounds.
      names: of the actors, for people; empty: they are numbered.
      kind: what the network is, for people.
      resources: what its steps and messages use by turns.
    """

    actors: tuple[tuple[Step, ...], ...]
    channels: tuple[Channel, ...]
    period: int = 1
    names: tuple[str, ...] = ()
    kind: str = "pipeline"
    resources: tuple[Resource, ...] = ()

    def name(self, actor: int, what: str = "actor") -> str:
        """An actor for people: its name, or `what` it is with its number."""
        return self.names[actor] if self.names else f"{what} {actor}".lstrip()

    @cached_property
    def late(self) -> tuple[tuple[Late, ...], ...]:
        """For each actor what it takes from delayed channels."""
        delays = {i: c.delay for i, c in enumerate(self.channels) if c.delay > 0}
        if not delays:
            return ((),) * len(self.actors)
        return tuple(
            tuple(
                Late(m, delays[m[0]], i, step.round, self.period)
                for i, step in enumerate(steps)
                for m in step.takes
                if m[0] in delays
            )
            for steps in self.actors
        )

    def first_messages(self, rounds: int = 0) -> list[Message]:
        """The messages that are in delayed channels when a run begins, or after so many rounds, each channel's in the
        order of their rounds."""
        late = [late for found in self.late for late in found]
        dated = [
            (k * self.period + x.round, i)
            for i, x in enumerate(late)
            for k in range(x.taken(rounds), x.taken(rounds + x.delay))
        ]
        return [late[i].message for _, i in sorted(dated)]

    @cached_property
    def first_counts(self) -> Counter[int]:
        """How many messages are in each channel when a run begins."""
        return Counter(c for c, _ in self.first_messages())

    def ran(self, actor: int, count: int) -> list[tuple[int, Step]]:
        """The first steps that an actor runs, period after period, each with its round."""
        steps = self.actors[actor]
        return [(i // len(steps) * self.period + (s := steps[i % len(steps)]).round, s) for i in range(count)]

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
    round: int = 0


class Actor(Generic[T]):
    """The state of one actor: its next step, the messages that have arrived, its free registers.

    Attributes:
      position: of the next step, in the period.
      period: of the next step.
      step: the next step; None when all rounds are done.
      rounds: the rounds to run.

    Examples:
      >>> net = Network(((Step("give", (), ((0, "x"),)),), (Step("take", ((0, "x"),)),)), (Channel("c", 0, 1, 1),))
      >>> actor = Actor(net, 1, free=None)
      >>> actor.ready()
      False
      >>> actor.deliver((0, "x"), "value")
      >>> actor.ready(), actor.fire(), actor.step
      (True, (['value'], []), None)
    """

    __slots__ = (
        "_end", "_free", "_held", "_inbox", "_late", "_later", "_length", "_steps", "number", "period", "position",
        "rounds", "step",
    )  # fmt: skip

    def __init__(self, net: Network, number: int, free: T, rounds: int | None = None, begin: int = 0) -> None:
        """
        Args:
          net: the network.
          number: the actor's.
          free: the value that a register carries before its first use (the time 0 in the simulator).
          rounds: to run; None: one period. The driver delivers `net.first_messages()`.
          begin: the first of these rounds that is run; those before were run elsewhere.
        """
        self.number = number
        self._steps = net.actors[number]
        self._length = net.period
        self.period = begin // net.period
        self.position = sum(s.round < begin % net.period for s in self._steps)
        self.step: Step | None = None
        self._inbox: dict[Message, T] = {}
        self._later: dict[Message, deque[T]] = {}
        self._late = net.late[number]
        taken = net.first_counts
        self._free: dict[int, deque[T] | None] = {
            i: None if c.registers is None else deque([free] * (c.registers - taken[i]))
            for i, c in enumerate(net.channels)
            if c.source == number
        }
        self._held: list[T] = []
        self.run_until(net.period if rounds is None else rounds)

    @property
    def round(self) -> int:
        """The round of the next step; after the last step, the rounds that were run."""
        return self.rounds if self.step is None else self.period * self._length + self.step.round

    @property
    def fired(self) -> int:
        """The number of steps fired."""
        return self.period * len(self._steps) + self.position

    def run_until(self, rounds: int) -> None:
        """Set the number of rounds to run, counted from the first."""
        self.rounds = rounds
        self._find_step()

    def _find_step(self) -> None:
        """Set the next step, and the end of those of this period that are run."""
        steps = self._steps
        if self.position == len(steps) > 0:
            self.position = 0
            self.period += 1
        left = self.rounds - self.period * self._length
        self._end = len(steps) if left >= self._length else sum(s.round < left for s in steps)
        self.step = steps[self.position] if self.position < self._end else None

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
        if self._later:
            self._refill(step.takes)
        held, self._held = self._held, []
        self.position = position = self.position + 1
        if position < self._end:
            self.step = self._steps[position]
        else:
            self._find_step()
        return values, held

    def take_back(self, values: Sequence[T], held: Sequence[T]) -> None:
        """Undo the last `fire`, which returned these."""
        if not self.position:
            self.period -= 1
            self.position = len(self._steps)
        self.position -= 1
        self._find_step()
        for message, value in zip(self._steps[self.position].takes, values, strict=True):
            if message in self._inbox:
                self._later.setdefault(message, deque()).appendleft(self._inbox[message])
            self._inbox[message] = value
        self._held += held

    def _refill(self, taken: Sequence[Message]) -> None:
        for message in taken:
            later = self._later.get(message)
            if later is not None:
                self._inbox[message] = later.popleft()
                if not later:
                    del self._later[message]

    def deliver(self, message: Message, value: T) -> None:
        """Record a message that has arrived."""
        if message in self._inbox:
            self._later.setdefault(message, deque()).append(value)
        else:
            self._inbox[message] = value

    def owed(self) -> list[Message]:
        """After the last step: the messages that the next rounds would take and that have not arrived yet."""
        return [
            x.message
            for x in self._late
            if x.taken(self.rounds + x.delay) > self.period + (self.position > x.position) + self._waiting(x.message)
        ]

    def _waiting(self, message: Message) -> int:
        return (message in self._inbox) + len(self._later.get(message, ()))

    def drop(self) -> None:
        """Drop the messages that no step has taken."""
        self._inbox.clear()
        self._later.clear()

    def arrived(self) -> dict[Message, list[T]]:
        """The messages that no step has taken yet, in order."""
        return {m: [value, *self._later.get(m, ())] for m, value in self._inbox.items()}

    def free_registers(self) -> list[T]:
        """What the free registers of this actor's bounded channels carry."""
        return [value for free in self._free.values() if free is not None for value in free]

    def held_registers(self) -> list[T]:
        """What the registers carry that are reserved for the next step."""
        return list(self._held)

    def credit(self, channel: int, value: T) -> None:
        """Record that a register of a bounded channel that this actor gives to is free again."""
        free = self._free[channel]
        assert free is not None
        free.append(value)

    def missing(self) -> tuple[list[Message], list[int]]:
        """The messages that the next step still waits for, and the channels without a free register. After the last
        step: the messages that are owed."""
        if self.step is None:
            return self.owed(), []
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
    if net.period < 1:
        return [f"the period is {net.period} rounds; it has to be at least 1."]
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
    waiting = _most_waiting(net)
    wrong += [
        f'channel {i} "{c.name}" has {c.registers} registers, and {waiting[i]} messages between two rounds: it needs '
        f"at least {waiting[i]}."
        for i, c in enumerate(net.channels)
        if c.registers is not None and 1 <= c.registers < waiting[i]
    ]
    wrong += [
        f'channel {i} "{c.name}" has a delay of {c.delay} rounds; it has to be 0 or more.'
        for i, c in enumerate(net.channels)
        if c.delay < 0
    ]
    wrong += _wrong_orders(net)
    return wrong + (_wrong_rounds(net) if _fits(net) else _wrong_messages(net))


def _most_waiting(net: Network) -> Counter[int]:
    """For each delayed channel the most messages that are in it between two rounds."""
    taken: dict[int, list[int]] = {}
    for late in (late for found in net.late for late in found):
        taken.setdefault(late.message[0], [0] * net.period)[late.round % net.period] += 1
    most = Counter[int]()
    for channel, counts in taken.items():
        whole, rest = divmod(net.channels[channel].delay, net.period)
        sums = [0, *accumulate(counts + counts)]
        most[channel] = whole * sum(counts) + max(sums[r + rest] - sums[r] for r in range(net.period))
    return most


def _wrong_orders(net: Network) -> list[str]:
    wrong: list[str] = []
    for a, steps in enumerate(net.actors):
        rounds = [s.round for s in steps]
        if rounds and (rounds != sorted(rounds) or rounds[0] < 0 or rounds[-1] >= net.period):
            wrong.append(
                f"{net.name(a)} has steps of rounds {min(rounds)} to {max(rounds)}; they have to be in order, "
                f"from 0 to {net.period - 1}."
            )
    return wrong


def _wrong_rounds(net: Network) -> list[str]:
    """The messages that are not late by the delay of their channels."""
    if net.period == 1:
        return []
    given = {m: s.round for steps in net.actors for s in steps for m in s.gives}
    return [
        f"{_name(net, m)} is given in round {given[m]} and taken in round {s.round} of {net.period}; "
        f"its channel has a delay of {net.channels[m[0]].delay} rounds."
        for steps in net.actors
        for s in steps
        for m in s.takes
        if (s.round - given[m] - net.channels[m[0]].delay) % net.period
    ]


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
            wrong += _wrong_ends(net, f"{net.name(a)}, {step.label}, gives", "giver", a, step.gives, given)
            wrong += _wrong_ends(net, f"{net.name(a)}, {step.label}, takes", "taker", a, step.takes, taken)
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
            wrong.append(f"{who} {_name(net, message)}, whose {end} is {net.name(right)}.")
        elif message in seen:
            wrong.append(f"{who} {_name(net, message)} a second time: {seen[message]} it already.")
        seen[message] = who
    return wrong


def _name(net: Network, message: Message) -> str:
    return f'message {message[1]!r} of "{net.channels[message[0]].name}"'
