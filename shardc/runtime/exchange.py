"""Texts that processes exchange all with all, in rounds, over their links.

    round 0   each process sends its text to the next one
    round 1   it sends the two that it knows to the one after the next
    round r   it sends all that it knows to the one 2**r further

After log2(n) rounds each knows all, and nobody is in the middle. The threads that read the links send on, so that an
exchange goes on while a process computes. Exchanges are numbered: all processes begin the same ones in the same order.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.cluster import Cluster
from shardc.runtime.link import Frame, FrameKind, Link


@dataclass
class _Round:
    """One exchange: the texts that are known here, by process, and what came before its turn."""

    known: dict[int, str] = field(default_factory=dict[int, str])
    early: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    done: int = -1
    """Rounds done; -1: not begun here."""
    sent: int = 0
    """Rounds whose texts are sent on. The exchange ends after the last: this process may then leave the run."""


class Exchange:
    """Exchanges of texts between some processes of a run, this one among them.

    Args:
      cluster: the run.
      members: numbers of the processes. All of them make this object at the same time.

    Raises:
      PeerLostError, ClusterError: as `Cluster.gather`.
    """

    def __init__(self, cluster: Cluster, members: Sequence[int]) -> None:
        self.members, self._cluster = tuple(members), cluster
        n, at = len(self.members), self.members.index(cluster.me)
        steps = [1 << r for r in range((n - 1).bit_length())]
        sources = {self.members[(at - s) % n] for s in steps}
        targets = [self.members[(at + s) % n] for s in steps]
        links = {p: cluster.link(p) for p in sorted(sources | set(targets))}
        self._to = [links[p] for p in targets]
        self._changed = threading.Condition()
        self._rounds: dict[int, _Round] = {}
        self._count = 0
        self._lost: PeerLostError | None = None
        name = f"exchange {cluster.epoch} {self.members}"
        self._network = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        for link in links.values():
            link.add(self._network, self)
        cluster.gather("links", "", self.members)  # nobody sends before all listen

    def begin(self, text: str) -> int:
        """Begin the next exchange. Waits for nobody. Returns its number."""
        with self._changed:
            number, self._count = self._count, self._count + 1
            found = self._rounds.setdefault(number, _Round())
            found.known[self._cluster.me] = text
            found.done = 0
            due = [*self._due(number, found), *self._go_on(number, found)]
        self._send(found, due)
        return number

    def finish(self, number: int, what: str) -> list[str]:
        """Wait for an exchange. Returns the texts of all members in their order; to be called once.

        Args:
          number: of the exchange.
          what: its purpose, for errors.

        Raises:
          PeerLostError: a process died.
          ClusterError: a process did not come before the deadline.
        """
        until = monotonic() + self._cluster.seat.deadline
        with self._changed:
            found = self._rounds[number]
            while not self._is_over(found):
                if self._lost is not None:
                    raise PeerLostError(str(self._lost), self._lost.process)
                self._cluster.check()
                if monotonic() > until:
                    raise ClusterError(self._cluster.never_came(self._missing(found), f"at {what}"))
                self._changed.wait(0.5)
            del self._rounds[number]
        return [found.known[p] for p in self.members]

    def is_done(self, number: int) -> bool:
        """Whether the texts of all members have come, so that `finish` does not wait."""
        with self._changed:
            return self._is_over(self._rounds[number])

    def _is_over(self, found: _Round) -> bool:
        return min(found.done, found.sent) >= len(self._to)

    def _missing(self, found: _Round) -> list[int]:
        return [p for p in self.members if p not in found.known]

    def _due(self, number: int, found: _Round) -> list[tuple[Link, Frame]]:
        """The frames of the current round of an exchange."""
        if found.done >= len(self._to):
            return []
        about = json.dumps(_folded(found.known)).encode()
        frame = Frame(FrameKind.MESSAGE, self._network, channel=found.done, key=number, about=about)
        return [(self._to[found.done], frame)]

    def _go_on(self, number: int, found: _Round) -> list[tuple[Link, Frame]]:
        """Do the rounds whose texts have come. Returns what they send."""
        due: list[tuple[Link, Frame]] = []
        while found.done in found.early:
            found.known |= found.early.pop(found.done)
            found.done += 1
            due += self._due(number, found)
        self._changed.notify_all()
        return due

    def _send(self, found: _Round, due: Sequence[tuple[Link, Frame]]) -> None:
        """Send, without the lock: a link that breaks tells all exchanges, which take theirs. Frames of an exchange may
        overtake each other: each says its round."""
        for link, frame in due:
            link.send(frame)
        with self._changed:
            found.sent += len(due)
            self._changed.notify_all()

    # -- as a receiver of links

    def receive(self, peer: int, frame: Frame) -> None:
        """Take a frame of another member. Runs in the thread of the link."""
        del peer
        with self._changed:
            found = self._rounds.setdefault(frame.key, _Round())
            found.early[frame.channel] = _unfolded(json.loads(frame.about))
            due = self._go_on(frame.key, found)
        self._send(found, due)

    def lose(self, error: PeerLostError) -> None:
        """Take notice that a member is lost."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()


def _folded(known: Mapping[int, str]) -> dict[str, list[int]]:
    """The processes by their text: equal texts go over the link once."""
    found: dict[str, list[int]] = {}
    for process, text in known.items():
        found.setdefault(text, []).append(process)
    return found


def _unfolded(said: Mapping[str, Sequence[int]]) -> dict[int, str]:
    return {process: text for text, processes in said.items() for process in processes}
