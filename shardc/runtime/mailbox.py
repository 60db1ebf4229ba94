"""The mailbox of an actor: messages and credits from other actors, in a queue that only this actor reads.

An actor posts to a `Port` of each other actor, wherever that one runs. In one process the port is the other's
`Mailbox`; between processes it is an object that writes to a socket, whose reader posts to the mailbox there. Every
post carries the number of the run, which tells leftovers of a failed run apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias

from shardc.runtime.actor import Message

ALL_RUNS: Final = 2**63 - 1
"""Stands for every run in a stop."""

Posted: TypeAlias = tuple[int, Message | int | None, Any]
"""Number of the run; a message with its value, the channel of a credit (`_END`: rounds), or None to stop."""

_END: Final = -1
"""Stands for a channel where a run is to end after fewer rounds."""


class Port(Protocol):
    """The address of one actor for messages and credits. No call may block for long; any thread may call."""

    def message(self, run: int, message: Message, value: Any) -> None:
        """Post a message for this actor."""
        ...

    def credit(self, run: int, channel: int) -> None:
        """Post that a register of a channel that this actor gives to is free again."""
        ...

    def end(self, run: int, rounds: int) -> None:
        """Post that the run ends after fewer rounds."""
        ...

    def stop(self, run: int, why: Exception) -> None:
        """Post that an actor failed: this one abandons `run`, or ALL_RUNS. It may still be at an earlier run."""
        ...


@dataclass(frozen=True)
class Ports:
    """The ports that the actors of a process post to.

    Attributes:
      actors: of each actor, where its messages go, and credits for it.
      channels: instead of these, of channels whose ends run both here and in other processes.
      others: to stop and end runs in other processes; None: there are none.
      counted: channels without a bound whose giver gets credits nevertheless.
    """

    actors: Mapping[int, Port]
    channels: Mapping[int, Port] = field(default_factory=dict[int, Port])
    others: Port | None = None
    counted: Collection[int] = ()

    def at(self, actor: int, channel: int) -> Port:
        """The port for what is posted to an actor because of a channel."""
        return self.channels.get(channel) or self.actors[actor]

    @property
    def all(self) -> list[Port]:
        """The ports at which a stop reaches every actor."""
        return [*self.actors.values(), *([] if self.others is None else [self.others])]


class RunStopped(Exception):
    """Raised by a task, before it launches anything, if its run was stopped meanwhile."""

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


class MailboxReader(Protocol):
    """The receiver of what a mailbox gets: an actor, or all actors of one thread."""

    def deliver(self, message: Message, value: Any) -> None: ...
    def credit(self, channel: int, value: Any) -> None: ...
    def end(self, rounds: int) -> None: ...


class Mailbox:
    """A queue of posts for the actors of one thread. Any thread of this process posts; only the actors' thread
    reads."""

    def __init__(self) -> None:
        self._posted: SimpleQueue[list[Posted]] = SimpleQueue()
        """Lists of one post, which the reader empties: so a slow posting thread keeps no value alive."""
        self._later: list[Posted] = []
        self._stopped: dict[int, Exception] = {}
        """The runs to abandon, with the reasons. Any thread adds to it: each of its steps is atomic."""
        self.gone: dict[int, Exception] = {}
        """Actors whose processes have ended well: nothing more comes from them, but what they posted before counts."""

    def message(self, run: int, message: Message, value: Any) -> None:
        posted: list[Posted] = [(run, message, value)]
        del value
        self._posted.put(posted)

    def credit(self, run: int, channel: int) -> None:
        self._posted.put([(run, channel, None)])

    def end(self, run: int, rounds: int) -> None:
        self._posted.put([(run, _END, rounds)])

    def stop(self, run: int, why: Exception) -> None:
        self._stopped.setdefault(run, why)
        self._posted.put([(run, None, None)])

    def why_stopped(self, run: int) -> Exception | None:
        """The reason to abandon a run; None if there is none."""
        stopped = self._stopped
        return (stopped.get(ALL_RUNS) or stopped.get(run)) if stopped else None

    def leave(self, actor: int, why: Exception) -> None:
        """Post that nothing more comes from an actor. Actors that wait for it then abandon the run."""
        self.gone[actor] = why
        self._posted.put([(0, None, None)])

    def open(self, run: int, reader: MailboxReader) -> None:
        """Begin a run: drop leftovers of earlier runs, pass on posts that came early."""
        for over in [r for r in list(self._stopped) if r < run]:
            self._stopped.pop(over, None)
        early, self._later = self._later, []
        try:
            while True:
                early.append(self._posted.get_nowait().pop())
        except Empty:
            pass
        for posted in early:
            self._pass_on(posted, run, reader)

    @property
    def empty(self) -> bool:
        return self._posted.empty()

    def feed(self, run: int, reader: MailboxReader) -> None:
        """Wait for one post and pass it on."""
        self._pass_on(self._posted.get().pop(), run, reader)

    def _pass_on(self, posted: Posted, run: int, reader: MailboxReader) -> None:
        number, content, value = posted
        if number > run:
            self._later.append(posted)
        elif number < run or content is None:
            return
        elif not isinstance(content, int):
            reader.deliver(content, value)
        elif content == _END:
            reader.end(value)
        else:
            reader.credit(content, None)

    def clear(self, run: int) -> None:
        """Drop the leftovers of a run and of those before it."""
        later = self._later
        try:
            while True:
                later.append(self._posted.get_nowait().pop())
        except Empty:
            pass
        self._later = [p for p in later if p[0] > run]


def stop_all(ports: Iterable[Port], run: int, why: Exception) -> None:
    """Stop a run in all actors, of this process and of others."""
    for port in ports:
        with suppress(Exception):  # a lost connection must not keep the others from stopping
            port.stop(run, why)
