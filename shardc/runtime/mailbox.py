"""What reaches an actor from the others: messages and credits, through a queue that only this actor reads.

An actor posts to a `Port` of each other actor and never asks where that one lives. In one process the port is the
other's `Mailbox`; between processes it is something that writes to a socket, whose reader posts to the mailbox there.
Everything posted carries the number of the run, so that what is left of a run that failed is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from shardc.runtime.actor import Message

Posted: TypeAlias = tuple[int, Message | int | None, Any]
"""Number of the run; a message with its value, or the channel of a credit, or None: stop."""


class Port(Protocol):
    """Where to post what one actor waits for. No call may block for long, and any thread may call."""

    def message(self, run: int, message: Message, value: Any) -> None:
        """A message for this actor."""
        ...

    def credit(self, run: int, channel: int) -> None:
        """A register of a channel that this actor gives to is free again."""
        ...

    def stop(self, run: int) -> None:
        """Some actor failed: this one is to abandon the run, and all before it."""
        ...


class MailboxReader(Protocol):
    """Whom a mailbox hands on to what is posted: an actor, or all that run in one thread."""

    def deliver(self, message: Message, value: Any) -> None: ...
    def credit(self, channel: int, value: Any) -> None: ...


class Mailbox:
    """The port of the actors of one thread of this process, and the end from which that thread reads."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[list[Posted]] = SimpleQueue()
        """Lists of one, which the reader empties: the thread that posts keeps nothing alive, however slow it is."""
        self._later: list[Posted] = []
        self.stopped = 0
        """The last run that is to be abandoned."""

    def message(self, run: int, message: Message, value: Any) -> None:
        posted: list[Posted] = [(run, message, value)]
        del value
        self._posted.put(posted)

    def credit(self, run: int, channel: int) -> None:
        self._posted.put([(run, channel, None)])

    def stop(self, run: int) -> None:
        self.stopped = max(self.stopped, run)
        self._posted.put([(run, None, None)])

    def open(self, run: int, reader: MailboxReader) -> None:
        """Begins a run: drops what is left of those before it, hands on what came early."""
        early, self._later = self._later, []
        try:
            while True:
                early.append(self._posted.get_nowait().pop())
        except Empty:
            pass
        for posted in early:
            self._hand_on(posted, run, reader)

    @property
    def empty(self) -> bool:
        return self._posted.empty()

    def feed(self, run: int, reader: MailboxReader) -> None:
        """Waits for one thing that is posted and hands it on."""
        self._hand_on(self._posted.get().pop(), run, reader)

    def _hand_on(self, posted: Posted, run: int, reader: MailboxReader) -> None:
        of, what, value = posted
        if of > run:
            self._later.append(posted)
        elif of < run or what is None:
            return
        elif isinstance(what, int):
            reader.credit(what, None)
        else:
            reader.deliver(what, value)

    def clear(self, run: int) -> None:
        """Drops what is left of a run and those before it."""
        later = self._later
        try:
            while True:
                later.append(self._posted.get_nowait().pop())
        except Empty:
            pass
        self._later = [p for p in later if p[0] > run]


def stop_all(ports: Iterable[Port], run: int) -> None:
    """Tells all actors, here and elsewhere, to abandon a run."""
    for port in ports:
        with suppress(Exception):  # a connection that is gone stops nobody
            port.stop(run)
