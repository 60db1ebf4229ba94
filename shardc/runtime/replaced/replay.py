"""A process of a network that is replaced while the others go on: what each of them keeps for its successor.

Such a process holds nothing that the others cannot give it again. Messages and credits of a channel are counted: each
has a number: that of its round. The successor begins with the first round of which a message has not come.

    lost      its messages of rounds 0 to 6 have come; those to it of rounds 5 to 9 are kept
    joins     begins with round 7: it is sent rounds 7 to 9 again
    goes on   a message, or a credit, that had come already is dropped: each counts once
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardc.runtime.actor import Network
from shardc.runtime.transport.link import Link

Send: TypeAlias = Callable[[Link], None]
"""Sends a message over a link."""


@dataclass(frozen=True)
class Replaceable:
    """The processes of a network that may be replaced while a run goes on.

    Attributes:
      processes: their numbers.
      empty: the channels whose messages have no values.
    """

    processes: frozenset[int] = frozenset()
    empty: frozenset[int] = frozenset()


def replaceable(
    net: Network, places: Sequence[Sequence[int]], holders: Collection[int], empty: Collection[int]
) -> Replaceable:
    """The processes whose part of a network can be done again from what others have: none that keeps a message for a
    later round, or runs an actor together with others; and no two of them exchange values.

    Args:
      net, places: the network, and the processes of its actors.
      holders: processes that hold something else.
      empty: the channels whose messages have no values.
    """
    found: list[int] = []
    for p in sorted({p for ps in places for p in ps} - set(holders)):
        ends = [{*places[c.source], *places[c.target]} for i, c in enumerate(net.channels) if i not in empty]
        near = {q for both in ends if p in both for q in both}
        if near.isdisjoint(found) and _can_be_done_again(net, places, p):
            found.append(p)
    return Replaceable(frozenset(found), frozenset(empty))


def _can_be_done_again(net: Network, places: Sequence[Sequence[int]], p: int) -> bool:
    mine = {a for a, ps in enumerate(places) if p in ps}
    given = [c for c in net.channels if c.source in mine]
    out = [c for c in given if c.target not in mine]
    if any(len(places[a]) > 1 for a in mine) or any(c.delay for c in given):
        return False
    if any(len(places[c.target]) > 1 or c.registers is None for c in out):
        return False
    heard = {c.source for c in out}  # the actors whose rounds others can count
    while more := {c.source for c in given if c.target in heard and c.registers is not None} - heard:
        heard |= more
    return bool(mine) and heard == mine


class Again(NamedTuple):
    """A message that is sent again: its channel, its round, and how; None: it has no value."""

    channel: int
    round: int
    send: Send | None


class ChannelRounds:
    """The rounds in which the messages of a channel are taken, in order."""

    def __init__(self, net: Network, channel: int) -> None:
        self._period, taker = net.period, net.actors[net.channels[channel].target]
        self._in_period = [step.round for step in taker for c, _ in step.takes if c == channel]

    def before(self, round: int) -> int:
        """How many messages are taken before a round: the number of the first one that is not."""
        periods, rest = divmod(round, self._period)
        return periods * len(self._in_period) + bisect_left(self._in_period, rest)

    def of(self, number: int) -> int:
        """The round that takes a message."""
        periods, at = divmod(number, len(self._in_period))
        return periods * self._period + self._in_period[at]


class Replay:
    """What one process keeps, in one run, for the successor of another one.

    Args:
      net, places: the network, and the processes of its actors.
      peer: the process that may be replaced.
      me: this process.
      empty: the channels whose messages have no values.
    """

    def __init__(
        self, net: Network, places: Sequence[Sequence[int]], peer: int, me: int, empty: Collection[int]
    ) -> None:
        self.lock = threading.RLock()
        self._empty = empty
        self.present = True
        """Whether the peer, or its successor, takes messages."""
        of_peer = [i for i, c in enumerate(net.channels) if peer in places[c.source]]
        out = [i for i in of_peer if peer not in places[net.channels[i].target]]
        self._rounds = [ChannelRounds(net, i) for i in range(len(net.channels))]
        self._delay = [c.delay for c in net.channels]
        self._coming = [i for i in out if me in places[net.channels[i].target]]
        """The channels from the peer to this process."""
        self._going = [
            i for i, c in enumerate(net.channels) if peer in places[c.target] and me in places[c.source] and me != peer
        ]
        self._hears_all = out == self._coming
        self._ahead = net.period * sum(net.channels[i].registers or 0 for i in of_peer)
        """The most rounds by which the peer has taken messages before its own ones have come."""
        self._is_begun = False
        """Whether the peer has a successor."""
        self._begun = 0
        """The first round of the present peer."""
        self._kept: dict[int, deque[tuple[int, Send]]] = {}
        self._sent = Counter({i: self._rounds[i].before(c.delay) for i, c in enumerate(net.channels)})
        self._came = Counter[int]()
        self._next = Counter[int]()
        """By channel the number of the next message of the present peer; those below `_came` are known."""
        self._taken = Counter[int]()
        """By channel from the peer the messages that were used up here."""
        self._freed = Counter[int]()
        self._next_freed = Counter[int]()
        """As `_came` and `_next`, of credits of the peer."""

    def keep(self, channel: int, send: Send) -> None:
        """Keep a message for the peer, until it cannot be wanted again."""
        self._kept.setdefault(channel, deque()).append((self._sent[channel], send))
        self._sent[channel] += 1
        self._forget(channel)

    def _forget(self, channel: int) -> None:
        rounds, kept = self._rounds[channel], self._kept.get(channel, deque[tuple[int, Send]]())
        floor = rounds.of(self._freed[channel]) - self._ahead
        if self._hears_all:
            floor = max(floor, min(self._rounds[c].of(self._came[c]) for c in self._coming))
        first = rounds.before(max(0, floor))
        while kept and kept[0][0] < first:
            kept.popleft()

    def comes(self, channel: int) -> bool:
        """Count a message of the peer. Returns whether it is new."""
        number = self._next[channel]
        self._next[channel] += 1
        if number < self._came[channel]:
            return False
        self._came[channel] += 1
        for to_peer in self._kept if self._hears_all else ():
            self._forget(to_peer)
        return True

    def was_taken(self, channel: int) -> bool:
        """Whether the newest message of the peer, one that had come already, is used up: its register is free."""
        return self._next[channel] <= self._taken[channel]

    def takes(self, channel: int) -> bool:
        """Count a message of the peer that is used up here. Returns whether its register is to be given back now: not
        if a successor has not sent it again, which gets it by `was_taken`, or never sends it."""
        number = self._taken[channel]
        self._taken[channel] += 1
        return self._rounds[channel].before(self._begun) <= number < self._next[channel]

    def frees(self, channel: int) -> bool:
        """Count a credit of the peer. Returns whether it is new."""
        number = self._next_freed[channel]
        self._next_freed[channel] += 1
        if number < self._freed[channel]:
            return False
        self._freed[channel] += 1
        self._forget(channel)
        return True

    @property
    def first_missing(self) -> list[int]:
        """For each channel from the peer to this process the first round of which nothing has come."""
        return [self._rounds[c].of(self._came[c]) for c in self._coming]

    def begin_here(self, round: int) -> None:
        """Begin in the successor of a process, from this round on: it has nothing of earlier ones, and misses none."""
        for channel, rounds in enumerate(self._rounds):
            first = rounds.before(round)
            for known in (self._sent, self._came, self._taken, self._freed):
                known[channel] = max(known[channel], first)
            if not self._is_begun:
                self._next[channel] = self._next_freed[channel] = first

    def begin(self, round: int) -> tuple[list[Again], Counter[int]]:
        """Begin with the successor of the peer, from this round on.

        Returns:
          what it is sent again, in the order of each channel; and the credits of its predecessor that have not come, by
          channel.

        Raises:
          LookupError: a value is not there any more.
        """
        self._begun, self._is_begun, self.present = round, True, True
        found: list[Again] = []
        credits = Counter[int]()
        for channel, rounds in enumerate(self._rounds):
            first = self._next[channel] = self._next_freed[channel] = rounds.before(round)
            if channel not in self._going:
                continue
            credits[channel] = max(0, first - self._freed[channel])
            self._freed[channel] += credits[channel]
            kept = self._kept.get(channel, ())
            known = [number for number, _ in kept]
            given = max(first, rounds.before(self._delay[channel]))  # it has the values that a run begins with
            gone = range(given, known[0] if known else self._sent[channel])
            if gone and channel not in self._empty:
                raise LookupError(f"message {given} of channel {channel} is gone")
            found += [Again(channel, rounds.of(number), None) for number in gone]
            found += [Again(channel, rounds.of(number), send) for number, send in kept if number >= first]
        return found, credits
