"""The processes of a run as one of them sees it: who they are, links to them, agreements with them.

A run has `processes`, numbered from 0. Processes that share one JAX runtime (`jax.distributed`) are an island; each
island has the same number of processes, which follow one another. The *epoch* counts the starts: it rises each time
that lost processes are started again, and everything that was agreed or linked before is then void.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

from shardc.errors import ClusterError, DisagreementError, PeerLostError, all_offenders
from shardc.runtime.link import Allocate, Link
from shardc.runtime.store import Event, Store
from shardc.runtime.wire import Hello, Listener, dial, listen

_log: Final = logging.getLogger("shardc")


@dataclass(frozen=True)
class Seat:
    """The place of a process in a run, as its launcher gives it.

    Attributes:
      me: number of this process.
      processes: how many there are.
      islands: how many JAX runtimes they form.
      store: address of the store.
      secret: of the run.
      links: where this process listens for links: an address, its port 0 for a free one.
      epoch: the start that this is.
      restarts: how often lost processes are started again from now on.
      silence: seconds without a sign of life after which a process counts as lost.
      deadline: seconds to wait for a process that is alive but does not come.
    """

    me: int
    processes: int
    islands: int
    store: str
    secret: bytes
    links: str
    epoch: int = 0
    restarts: int = 0
    silence: float = 10.0
    deadline: float = 600.0

    @property
    def per_island(self) -> int:
        return self.processes // self.islands

    def island(self, process: int) -> range:
        """The processes of the island of a process."""
        first = process // self.per_island * self.per_island
        return range(first, first + self.per_island)


class Cluster:
    """This process among those of a run. One per process: `join` makes it, `current` gives it."""

    def __init__(self, seat: Seat, allocate: Allocate) -> None:
        self.seat = seat
        self._allocate = allocate
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._counts: dict[str, int] = {}
        self._lost: PeerLostError | None = None
        self._next: int | None = None
        self._over = ""
        self._leaving = False
        self._facts: dict[str, Any] = {}
        self.on_orphaned: Callable[[], None] = self.end
        """Called when the launcher has ended. A process of a run that nobody watches ends too."""
        self.store = Store(seat.store, seat.secret, seat.me, self._hear)
        self.store.status = lambda: json.dumps(self._facts)
        self._listener = Listener(listen(seat.links), seat.secret, self._welcome)
        self.store.set(self._key(f"address/{seat.me}"), self._listener.address)

    @property
    def me(self) -> int:
        return self.seat.me

    @property
    def processes(self) -> int:
        return self.seat.processes

    @property
    def epoch(self) -> int:
        return self.seat.epoch

    def others(self) -> list[int]:
        return [p for p in range(self.processes) if p != self.me]

    # -- what the launcher says

    def _hear(self, event: Event) -> None:
        with self._changed:
            match event["event"]:
                case "lost":
                    p = int(event["process"])
                    if self._lost is None:
                        self._lost = PeerLostError(f"process {p} is lost: {event['why']}.", p)
                case "epoch":
                    if int(event["epoch"]) > max(self.epoch, self._next or 0):
                        self._next = int(event["epoch"])
                    self.seat = replace(self.seat, restarts=int(event["restarts"]))
                case "leave":
                    self._leaving = True
                case "over":
                    self._over = str(event["why"])
                case _:
                    self._over = self._over or "the launcher has ended"
            self._changed.notify_all()
        if event["event"] == "gone":
            self.on_orphaned()

    def end(self) -> None:
        """End this process at once, and all that it has started."""
        _log.error("the launcher of this run has ended; so does process %d", self.me)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def say(self, **facts: Any) -> None:
        """Say how far this process is: facts go with its next sign of life to the launcher, which shows `step`, `loss`,
        `tokens` (a second) and `waits` (for whom). None takes a fact back."""
        self._facts = {name: fact for name, fact in {**self._facts, **facts}.items() if fact is not None}

    def wait_to_leave(self) -> bool:
        """Wait until all processes have ended well. False: the run ends otherwise."""
        with self._changed:
            self._changed.wait_for(lambda: self._leaving or bool(self._over))
            return self._leaving

    # -- links

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        peer, epoch = int(hello["process"]), int(hello["epoch"])
        with self._changed:
            known = epoch == self.epoch or self._changed.wait_for(lambda: self.epoch >= epoch, self.seat.deadline)
            if not known or epoch != self.epoch or peer in self._links:
                sock.close()
                return
            self._links[peer] = Link(sock, self.me, peer, self.seat.silence, self._allocate)
            self._changed.notify_all()

    def link(self, peer: int) -> Link:
        """The link to another process. The process with the lower number listens; the other one dials, at once.

        Raises:
          PeerLostError: the process died.
          ClusterError: it did not come before the deadline.
        """
        with self._changed:
            there = self._links.get(peer)
        if there is not None:
            return there
        return self._wait_for_link(peer) if self.me < peer else self._dial(peer)

    def _wait_for_link(self, peer: int) -> Link:
        self.store.set(self._key(f"wants/{self.me}/{peer}"), "")
        with self._changed:
            done = self._changed.wait_for(lambda: peer in self._links or self._stopped(), self.seat.deadline)
            if peer in self._links:
                return self._links[peer]
            self._raise_if_stopped()
            assert not done
        raise ClusterError(self._never_came([peer], "to open a link"))

    def _dial(self, peer: int) -> Link:
        address = self._text(f"address/{peer}", peer, "to open a link")
        hello = {"process": self.me, "epoch": self.epoch}
        sock = dial(address, self.seat.secret, hello, self.seat.deadline, self.check)
        with self._changed:
            made = self._links[peer] = Link(sock, self.me, peer, self.seat.silence, self._allocate)
            self._changed.notify_all()
        return made

    # -- agreements

    def _key(self, name: str) -> str:
        return f"{self.epoch}/{name}"

    def _text(self, name: str, process: int, why: str) -> str:
        """A text that a process sets in this epoch."""
        return self.wait_for_text(self._key(name), process, why)

    def wait_for_text(self, key: str, process: int, why: str) -> str:
        """A text that a process sets.

        Raises:
          PeerLostError: a process died.
          ClusterError: the text did not come before the deadline.
        """
        until = monotonic() + self.seat.deadline
        while (left := until - monotonic()) > 0:
            with self._changed:
                self._raise_if_stopped()
            text = self.store.get(key, min(1.0, left))
            if text is not None:
                return text
        raise ClusterError(self._never_came([process], why))

    def _never_came(self, processes: Sequence[int], why: str) -> str:
        who = f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
        return (
            f"process {self.me} waited {self.seat.deadline:g} s for {who} {why}. Each process has to make the same "
            "calls in the same order; if it only takes longer, give `--deadline` more seconds."
        )

    def gather(self, name: str, text: str) -> list[str]:
        """The text of each process, in order. All processes call this with the same names in the same order.

        Raises:
          PeerLostError: a process died.
          ClusterError: a process did not come before the deadline.
        """
        number = self._counts[name] = self._counts.get(name, -1) + 1
        key = f"gather/{name}/{number}"
        self.store.set(self._key(f"{key}/{self.me}"), text)
        return [self._text(f"{key}/{p}", p, f"at {name}") for p in range(self.processes)]

    def agree(self, name: str, facts: Mapping[str, str]) -> None:
        """Make sure that all processes have the same facts.

        Args:
          name: what is agreed on, for errors: the function.
          facts: by name, as in errors.

        Raises:
          DisagreementError: in every process, with all facts that differ.
        """
        said: list[dict[str, str]] = [json.loads(t) for t in self.gather(name, json.dumps(facts))]
        lines: list[str] = []
        for fact in dict.fromkeys(f for each in said for f in each):
            groups: dict[str, list[int]] = {}
            for p, each in enumerate(said):
                groups.setdefault(each.get(fact, "nothing"), []).append(p)
            if len(groups) > 1:
                values = "; ".join(f"{_processes_text(ps)}: {value}" for value, ps in groups.items())
                lines.append(f"{fact}: {values}")
        if lines:
            raise DisagreementError(all_offenders(f"{name}: the processes of this run differ in", lines))

    # -- losses

    def _stopped(self) -> bool:
        return self._lost is not None or self._next is not None or bool(self._over)

    def _raise_if_stopped(self) -> None:
        if self._lost is not None:
            raise PeerLostError(str(self._lost), self._lost.process)
        if self._next is not None:
            raise PeerLostError("other processes of this run were started again.", -1)
        if self._over:
            raise ClusterError(f"the run ends: {self._over}.")

    def check(self) -> None:
        """Raise PeerLostError if a process of the run is known to be lost."""
        with self._changed:
            self._raise_if_stopped()

    def rejoin(self) -> None:
        """After a loss: wait until the lost processes are started again, and begin the next epoch.

        Raises:
          PeerLostError: they are not started again.
        """
        lost = self._lost
        with self._changed:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or bool(self._over), self.seat.deadline)
            if self._next is None:
                why = self._over or f"nobody started it again within {self.seat.deadline:g} s"
                raise PeerLostError(
                    f"{lost or 'a process is lost.'} It stays lost: {why}.", lost.process if lost else -1
                )
            self.seat = replace(self.seat, epoch=self._next)
            self._next = self._lost = None
            self._counts.clear()
            self._changed.notify_all()
        self.store.set(self._key(f"address/{self.me}"), self._listener.address)

    def adopt(self) -> None:
        """Before the first agreement: begin in the newest epoch, if it has risen since this process was started."""
        with self._changed:
            if self._next is None:
                return
            self.seat = replace(self.seat, epoch=self._next)
            self._next = self._lost = None
        self.store.set(self._key(f"address/{self.me}"), self._listener.address)

    def close(self) -> None:
        """Leave the run."""
        self.store.leave()
        for link in list(self._links.values()):
            link.close()
        self._listener.close()
        self.store.close()


def _processes_text(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


_current: list[Cluster] = []


def join(seat: Seat, allocate: Allocate) -> Cluster:
    """Make this process one of a run."""
    if _current:
        raise ClusterError(f"this process is process {_current[0].me} of a run already.")
    _current.append(Cluster(seat, allocate))
    return _current[0]


def leave() -> None:
    """Make this process one of its own again."""
    while _current:
        _current.pop().close()


def current() -> Cluster | None:
    """The cluster that this process has joined; None: it runs alone."""
    return _current[0] if _current else None
