"""The processes of a run, as seen by one of them: their numbers, the links to them, agreements with them.

A run has `processes`, numbered from 0. Processes that share one JAX runtime (`jax.distributed`) are an island; each
island has the same number of processes, which follow one another. The *epoch* counts the starts: it rises each time
that lost processes are started again. Links and agreements belong to one epoch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from shardc.errors import ClusterError, DisagreementError, PeerLostError
from shardc.runtime.calls import call_text, calls_of, members_text, processes_text, refuse_other_calls
from shardc.runtime.gathering import Gathering, Repeats, Verdict
from shardc.runtime.last_step import LastStep
from shardc.runtime.status.arrivals import Arrivals
from shardc.runtime.status.flight import FlightRecorder
from shardc.runtime.status.loop import LoopStatus
from shardc.runtime.status.waits import Waits, longest_text
from shardc.runtime.store import Event, Store
from shardc.runtime.transport.connection import Allocate, Frame, FrameKind
from shardc.runtime.transport.link import Link, Packed
from shardc.runtime.transport.tls import TlsSocket
from shardc.runtime.transport.wire import Hello, Listener, dial, listen

_log: Final = logging.getLogger("shardc")
RUN: Final = "run"
"""Name of the text about the run of a flow in which processes may be replaced; empty if there is none."""
_UNKNOWN: Final = 5.0
"""Seconds after `silence` by which the launcher knows of every loss."""
_GATHERING: Final = 0
"""The network number of gathered texts on links. Numbers of pipelines are digests, never 0 in practice."""
_REASON: Final = 1.0
"""Seconds that a process waits after the loss of a link for the launcher to report the reason."""
_RUNS: Final = 64
"""Number of runs of repeated calls that a process remembers."""
_LOOKS: Final = 3
"""Number of signs of life in a row at which a call must be found to be wrong before `on_wrong` is called: the main
thread may raise first."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a process of a run, as its launcher gives it.

    Attributes:
      me: number of this process.
      processes: how many there are.
      islands: how many JAX runtimes they form.
      store: address of the store.
      secret: of the run.
      links: where this process listens for links: an address, its port 0 for a free one.
      epoch: the start that this is.
      restarts: how often lost processes are started again from now on.
      window: within how many seconds they are counted.
      silence: seconds without a sign of life after which a process counts as lost.
      deadline: seconds to wait for a process that is alive but does not come.
      least: how many processes the run may go on with if hosts are lost; 0: all of them.
      grace: seconds that the processes have to save and end when the run is asked to end.
      plain_data: whether large values go to other hosts without encryption.
      carrier: what carries values between processes of one JAX runtime: `put` or `links`; empty: by their devices.
      judging: seconds beyond `deadline` in which the launcher finds who does not come.
      joins: whether this process was started in place of a lost one, while the others go on with a run.
      flight: the file of its flight recorder; empty if nobody reads it.
    """

    me: int
    processes: int
    islands: int
    store: str
    secret: bytes
    links: str
    epoch: int = 0
    restarts: int = 0
    window: float = math.inf
    silence: float = 10.0
    deadline: float = 600.0
    least: int = 0
    grace: float = 25.0
    plain_data: bool = False
    carrier: str = ""
    judging: float = 0.0
    joins: bool = False
    flight: str = ""

    @property
    def patience(self) -> float:
        """Seconds after which a process that waits gives up by itself: the launcher has not found who is late."""
        return self.deadline + self.judging

    @property
    def per_island(self) -> int:
        return self.processes // self.islands

    def island(self, process: int) -> range:
        """The processes of the island of a process."""
        first = process // self.per_island * self.per_island
        return range(first, first + self.per_island)


class _Moved(Exception):
    """Raised when a process that is dialed listens elsewhere: it was replaced."""


class Cluster:
    """This process among those of a run. One per process: `join` makes it, `current` gives it."""

    def __init__(self, config: RunConfig, allocate: Allocate) -> None:
        self.config = config
        self._allocate = allocate
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._dialing: set[int] = set()
        self._counts: dict[str, int] = {}
        self._published: dict[str, str] = {}
        self._lost: PeerLostError | None = None
        self._next: int | None = None
        self._ended: dict[int, tuple[int, Mapping[str, Any]]] = {}
        """The processes whose scripts have ended: the epoch of that, and the calls that they had made."""
        self._gathering: dict[tuple[str, int], Gathering] = {}
        """Gatherings that were begun here and are not finished, by name and number. Looked at with each sign of life: a
        collective of JAX that waits for others raises no error."""
        self._early: dict[tuple[str, int], dict[str, int]] = {}
        """Texts of gatherings that were not begun here yet."""
        self._repeats: dict[str, deque[tuple[int, Repeats]]] = {}
        """The newest repeated calls, each with the number of the first, by the name of their gatherings."""
        self._over = ""
        self._closed = False
        self._leaving = False
        self._arrivals = Arrivals()
        self.recorder = FlightRecorder(config.flight, config.me)
        self.loop = LoopStatus(self.recorder.note)
        """Where the training loop is: the launcher gets to know with the next sign of life."""
        self._begun: dict[str, Gathering] = {}
        """The newest gathering of each name that was begun here."""
        self._latest = ""
        """The name of the newest gathering, or of the newest repeated call."""
        self.waits = Waits()
        self.on_show: Callable[[], str] = str
        """Gives a text that says what this process does, for the launcher: its threads with their frames."""
        self.on_wrong: Callable[[ClusterError], None] = lambda error: _log.error("%s", error)
        """Called, once for each, in a thread of its own, with the error of a call that differs from those of other
        processes, or that others never make, if the main thread has not raised it in time: by default it is logged."""
        self.welcomes: dict[int, Callable[[Link], None]] = {}
        """For each network, by its number, a function that is called with the link to the successor of a process."""
        self.replaced: frozenset[int] = frozenset()
        """The processes that may be lost and replaced now: a gathering waits for their successors."""
        self.last_step = LastStep(self._changed, self._stopped)
        self.on_orphaned: Callable[[], None] = self.end
        """Called when the launcher has ended: by default this process ends too."""
        self.store = Store(config.store, config.secret, config.me, self._on_event)
        self.store.status = self._status
        try:
            self._listener = Listener(listen(config.links), config.secret, self._welcome)
        except ClusterError:
            self.store.close()
            raise
        self.publish("address", self._listener.address)

    @property
    def me(self) -> int:
        return self.config.me

    @property
    def processes(self) -> int:
        return self.config.processes

    @property
    def epoch(self) -> int:
        return self.config.epoch

    # -- what the launcher says

    def _on_event(self, event: Event) -> None:
        if event["event"] == "show":
            self.store.set(event["key"], self.on_show())
        else:
            self._hear(event)

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
                    self.config = replace(self.config, restarts=int(event["restarts"]))
                case "done" | "end soon" | "end after" | "leave":
                    self._hear_ends(event)
                case "away" | "back":
                    self._hear_of_successor(event)
                case "over":
                    self._over = str(event["why"])
                case "text" | "computes":  # a text wakes who waits for it
                    self._vouch(event.get("processes", ()))
                case _:
                    self._over = self._over or "the launcher has ended"
            self._changed.notify_all()
        if event["event"] == "gone":
            self.on_orphaned()

    def _hear_of_successor(self, event: Event) -> None:
        """Hear that a process is started again while the others go on, or that it listens for links."""
        peer = int(event["process"])
        if event["event"] == "away":
            self.config = replace(self.config, restarts=int(event["restarts"]))
            link = self._links.pop(peer, None)
            if link is not None:  # in another thread: who sends over it may wait for this one
                threading.Thread(target=link.drop, args=("it is started again",), daemon=True).start()
        elif peer < self.me and peer not in self._links:
            name = f"shardc dials process {peer} again"
            threading.Thread(target=_unless_over, args=(self.link, peer), name=name, daemon=True).start()

    def _tell_begun(self) -> None:
        """Tell the launcher how many steps this process has begun; it names the last one to all."""
        self.store.set(self._key(f"begun/{self.me}"), json.dumps(self.last_step.ask()))

    def _hear_ends(self, event: Event) -> None:
        """Hear which scripts have ended, or all, or that this one is to end soon, or after how many steps."""
        if event["event"] == "leave":
            self._leaving = True
            return
        if event["event"] == "end soon":
            self._tell_begun()
            return
        if event["event"] == "end after":
            self.last_step.end_after(int(event["steps"]))
            return
        self._ended |= {p: (int(event["epoch"]), event["calls"]) for p in event["processes"]}
        for name in self._repeats:  # this process may wait in a call that they never make
            self._reopen(name, self._counts[name])

    def _vouch(self, processes: Sequence[int]) -> None:
        """Count the links to processes as alive: they compute, and give no sign of life."""
        for link in (self._links[p] for p in processes if p in self._links):
            link.vouch()

    def end(self) -> None:
        """Kill this process and its children."""
        _log.error("the launcher of this run has ended; so does process %d", self.me)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _look(self) -> None:
        """Look at the gatherings that are not finished: tell the others what came here, and report what is wrong."""
        with self._changed:
            calls = list(self._gathering.values())
        for call in calls:
            call.looks += 1
            if call.looks > 1:  # somebody is late: all are told who
                self._send(self._due(call, early=True))
            error = self.error_of([call])
            call.refused = 0 if error is None else call.refused + 1
            if error is not None and call.refused == _LOOKS:
                threading.Thread(target=self.on_wrong, args=(error,), name="shardc error", daemon=True).start()

    def error_of(self, calls: Sequence[Gathering]) -> ClusterError | None:
        """The error of the first of these calls that is known to be wrong; None if none is. Waits for nothing."""
        try:
            with self._changed:
                for call in calls:
                    self.refuse_ended(call.missing, call.key[0], call.why)
                    call.judge()
        except ClusterError as error:
            return error
        return None

    def error_within(self, seconds: float) -> ClusterError | None:
        """The error of an unfinished call, if it is known within these seconds; else None."""
        with self._changed:
            calls = list(self._gathering.values())
            known = self._changed.wait_for(lambda: self.error_of(calls) or all(c.is_complete for c in calls), seconds)
        return known if isinstance(known, ClusterError) else None

    def _status(self) -> str:
        self._look()
        waits = self.waits.now()
        shown = longest_text(waits, self.me)
        status = json.dumps({
            **({"waits": shown} if shown else {}),
            **self.loop.facts,
            "epoch": self.epoch,
            "steps": self.loop.steps,
            "now": time.time(),
            "arrived": self._arrivals.newest(),
            "run": {"calls": self._newest_calls(), "waits": [w.to_json() for w in waits]},
        })  # fmt: skip
        self.recorder.live(status, self.on_show)
        return status

    def _newest_calls(self) -> dict[str, list[Any]]:
        """The newest call of each name: its members, its number, and what it is; the newest of all comes last."""
        with self._changed:
            names = sorted(self._begun, key=lambda name: name == self._latest)
            calls = {name: self._counts[name] for name in names}
            begun = {name: self._begun[name] for name in names}
            repeats = {name: self._repeats[name][-1][1] for name in names if self._repeats.get(name)}
        for name, number in calls.items():
            if begun[name].key[1] < number and name in repeats:
                begun[name] = repeats[name].begin(number)
        return {name: [members_text(begun[name].members), number, begun[name].why] for name, number in calls.items()}

    def wait_to_leave(self) -> bool:
        """Wait until all processes have ended well. False: the run ends otherwise."""
        with self._changed:
            self._changed.wait_for(lambda: self._leaving or bool(self._over))
            return self._leaving

    # -- links

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        peer, epoch = hello
        with self._changed:
            # it dials where this process listens in this epoch, and once: what is late is of an earlier epoch
            known = self._links.get(peer)
            mine = self.me < peer < self.processes and (known is None or known.lost is not None)
            if epoch != self.epoch or not mine or self._closed:
                _log.warning("process %d: dropped a link of process %d, of epoch %d", self.me, peer, epoch)
                sock.close()
                return
            link = self._add_link(sock, peer)
        self._reattach(link)

    def _reattach(self, link: Link) -> None:
        """Let networks and gatherings that were begun with another process have the link to its successor."""
        for welcome in list(self.welcomes.values()):
            welcome(link)
        with self._changed:
            calls = list(self._gathering.values()) if link.peer in self.replaced else []
        for call in calls:
            call.forget(link.peer)
            self._send(self._due(call))

    def _add_link(self, sock: socket.socket, peer: int) -> Link:
        if isinstance(sock, TlsSocket):
            sock.clear = self.config.plain_data
        made = self._links[peer] = Link(sock, self.me, peer, self.config.silence, self._allocate, self.recorder.frame)
        made.add(_GATHERING, self)
        self._changed.notify_all()
        return made

    def link(self, peer: int, why: str = "to open a link") -> Link:
        """The link to another process. The process with the lower number listens; the other one dials, at once.

        Args:
          why: what the other process is waited for, for errors.

        Raises:
          PeerLostError: the process died.
          ClusterError: it did not come before the deadline.
        """
        with self._changed:
            self._changed.wait_for(lambda: peer not in self._dialing)  # another thread opens it
            if peer in self._links:
                return self._links[peer]
            if self.me < peer:
                return self._wait_for_link(peer, why)
            self._dialing.add(peer)
        try:
            return self._dial(peer, why)
        finally:
            with self._changed:
                self._dialing.discard(peer)
                self._changed.notify_all()

    def _wait_for_link(self, peer: int, why: str) -> Link:
        with self.waits.during([peer], why):
            self._changed.wait_for(
                lambda: peer in self._links or self._stopped() or self.has_ended(peer), self.config.patience
            )
        if ended := self.has_ended(peer):  # it may have opened the link before
            self._changed.wait_for(lambda: peer in self._links or self._stopped(), _REASON)
        if peer in self._links:
            return self._links[peer]
        self._raise_if_stopped()
        raise self._ended_error([peer], why) if ended else ClusterError(self._late_text([peer], why))

    def _dial(self, peer: int, why: str) -> Link:
        config, sock = self.config, None
        while sock is None:
            address = self.published("address", peer, why)
            with suppress(_Moved):
                check = partial(self._check_address, peer, address)
                sock = dial(address, config.secret, Hello(self.me, config.epoch), config.patience, check)
        with self._changed:
            made = self._add_link(sock, peer) if config.epoch == self.epoch and not self._closed else None
        if made is not None:
            self._reattach(made)
            return made
        sock.close()
        raise PeerLostError("other processes of this run were started again.", -1)

    def _check_address(self, peer: int, address: str) -> None:
        """Raise if nobody is to be dialed there any more."""
        self.check()
        if self.store.texts.get(self._key(f"address/{peer}")) != address:
            raise _Moved

    def receive_tagged(self, peer: int, tag: str, why: str) -> Packed:
        """Wait for the value that another process sends under `tag`.

        Raises:
          PeerLostError: the process died.
          ClusterError: the value did not come.
        """
        with self.waits.during([peer], why):
            return self.link(peer, why).receive_tagged(tag, self.config.patience)

    # -- agreements

    def _key(self, name: str) -> str:
        return f"{self.epoch}/{name}"

    def publish(self, name: str, text: str) -> None:
        """Set a value of this process that the others can read, in this epoch and in all later ones."""
        self._published[name] = text
        self.store.set(self._key(f"{name}/{self.me}"), text)

    def published(self, name: str, process: int, why: str = "") -> str:
        """Wait for the value that `process` has published under `name`, and return it."""
        return self.wait_for_text(self._key(f"{name}/{process}"), process, why or f"to tell its {name}")

    def wait_for_text(self, key: str, process: int, why: str) -> str:
        """Wait for the text that `process` sets in the store under `key`, and return it.

        Raises:
          PeerLostError: a process died.
          ClusterError: the text did not come before the deadline, or the script of the process has ended without it.
        """
        texts = self.store.texts
        self.store.ask(key)
        with self._changed, self.waits.during([process], why):
            self._changed.wait_for(
                lambda: texts.get(key) is not None or self._stopped() or (key in texts and self.has_ended(process)),
                self.config.patience,
            )
            self._raise_if_stopped()
            if (text := texts.get(key)) is not None:
                return text
            ended = self.has_ended(process)
        raise self._ended_error([process], why) if ended else ClusterError(self._late_text([process], why))

    def _late_text(self, processes: Sequence[int], why: str) -> str:
        """The error text for processes that have not arrived before the deadline."""
        return (
            f"process {self.me} waited {self.config.patience:g} s for {processes_text(processes)} {why}. Each process "
            "has to make the same calls in the same order; if it only takes longer, give `--deadline` more seconds."
        )

    def _ended_error(self, processes: Sequence[int], why: str) -> DisagreementError:
        """The error about processes whose scripts have ended, so that they will never arrive."""
        many = len(processes) > 1
        ended = f"the scripts of {processes_text(processes)} have" if many else f"process {processes[0]}'s script has"
        return DisagreementError(
            f"{ended} ended; process {self.me} waits for {'them' if many else 'it'} {why}. Each process has to make "
            "the same calls in the same order."
        )

    def count(self, name: str) -> int:
        """The number of earlier calls with this name in this epoch. Equal in all processes that make the same calls."""
        self._counts[name] = self._counts.get(name, -1) + 1
        return self._counts[name]

    def gather(self, name: str, text: str, among: Sequence[int] | None = None) -> list[str]:
        """Gather a text of each process, in order. All processes call this with the same names in the same order.

        Args:
          name: what is gathered, for errors.
          text: of this process.
          among: the processes that take part, this one among them; None: all.

        Raises:
          PeerLostError: a process died.
          ClusterError: a process did not come before the deadline.
          DisagreementError: a process makes another call, of this method or of an executable.
        """
        members = range(self.processes) if among is None else among
        name = name if among is None else f"{name} of {members_text(members)}"
        refuse = partial(refuse_other_calls, name)
        call = self.begin_gather(calls_of(members), call_text(name, text), members, f"at {name}", refuse)
        texts = self.finish_gather(call)
        call.judge()
        return [json.loads(each)["facts"] for each in texts]

    def begin_gather(
        self, name: str, text: str, members: Sequence[int], why: str, verdict: Verdict | None = None
    ) -> Gathering:
        """Send the text of this process to the others. Waits for them only until the links to neighbours are open.

        Args:
          name: what is gathered, and by whom: each of `members` gathers the same ones in the same order.
          why: the purpose, for errors.
          verdict: raises ClusterError if the texts that have come cannot be right.

        Raises:
          PeerLostError, ClusterError: as `gather`.
        """
        with self._changed:
            if self.config.joins:
                raise ClusterError(
                    f"process {self.me} was started again while the others run a flow. It can join them only in the "
                    f"first call that its script makes with others, and it is {why}."
                )
            key = name, self.count(name)
            self.refuse_ended(members, name, why)
            call = self._gathering[key] = self._begun[name] = Gathering(key, members, self.me, text, why, verdict)
            self._latest = name
            self.recorder.note(why)
            self._arrivals.add(*key)
            call.add(self._early.pop(key, {}))
            closed = [p for p in call.neighbours if p not in self._links]
        try:
            for p in closed:  # those that this one dials come first, so that no two wait for each other
                self.link(p, why)
        except ClusterError:
            self.drop_gather(call)
            raise
        self._send(self._due(call))
        return call

    def repeat(self, calls: Repeats) -> bool:
        """Count a call that repeats the one before it: nothing is sent. False: it has to be gathered, because another
        call came between, another process gathers at its number, or a script has ended."""
        with self._changed:
            number = calls.last + 1
            if self._counts.get(calls.name) != calls.last or (calls.name, number) in self._early:
                return False
            if any(map(self.has_ended, self._ended)):
                return False
            runs = self._repeats.setdefault(calls.name, deque(maxlen=_RUNS))
            if not runs or runs[-1][1] is not calls:
                runs.append((number, calls))
            calls.last = self._counts[calls.name] = number
            self._latest = calls.name
            self._arrivals.add(calls.name, number)
            return True

    def _reopen(self, name: str, number: int) -> Gathering | None:
        """Begin the gathering of a repeated call after all, if it is one: the others do not repeat it."""
        calls = next((c for first, c in self._repeats.get(name, ()) if first <= number <= c.last), None)
        if calls is None or (name, number) in self._gathering:
            return None
        call = self._gathering[name, number] = calls.begin(number)
        return call

    def _due(self, call: Gathering, early: bool = False) -> list[tuple[Link, Frame]]:
        """The frames that a gathering of this epoch has to send now, each with its link."""
        with self._changed:
            if self._gathering.get(call.key) is not call:
                return []
            links, head = self._links, [self.epoch, *call.key]
            return [
                (links[p], Frame(FrameKind.MESSAGE, _GATHERING, about=json.dumps([*head, texts]).encode()))
                for p, texts in call.due(links.__contains__, early).items()
            ]

    def _send(self, due: Sequence[tuple[Link, Frame]]) -> None:
        for link, frame in due:
            link.send(frame)

    def drop_gather(self, call: Gathering) -> None:
        """Forget a gathering. What others may lack is sent to them before."""
        with self._changed:
            due = self._due(call, early=not call.is_complete)
            self._gathering.pop(call.key, None)
        self._send(due)

    def finish_gather(self, call: Gathering) -> list[str]:
        """Wait for the texts of a gathering. Returns them in the order of its members.

        Raises:
          PeerLostError, ClusterError: as `gather`; ClusterError too if the verdict on the texts is one.
        """
        try:
            with self._changed:
                return self._gathered(call)
        finally:
            self.drop_gather(call)

    def _gathered(self, call: Gathering) -> list[str]:
        self._changed.wait_for(
            lambda: call.is_complete or self._stopped() or self._never_come(call) or self.error_of([call]),
            self.config.patience,
        )
        if not call.is_complete:  # a loss has a reason, and the others may say more about what differs
            self._changed.wait_for(lambda: call.is_complete or self._stopped(), _REASON)
        if call.is_complete:
            return list(call.texts.values())
        self._raise_if_stopped()
        lost = next(filter(None, map(self._loss_of, self._never_come(call))), None)
        if lost is not None:
            raise PeerLostError(f"{lost} Process {self.me} waited for it {call.why}.", lost.process)
        raise self.error_of([call]) or ClusterError(self._late_text(call.missing, call.why))

    def _never_come(self, call: Gathering) -> list[int]:
        """The neighbours that owe texts which never arrive, as their links are lost."""
        return [p for p in call.neighbours if self._loss_of(p) is not None and call.owes(p)]

    def _loss_of(self, peer: int) -> PeerLostError | None:
        link = self._links.get(peer)
        return None if link is None or peer in self.replaced else link.lost

    def receive(self, peer: int, frame: Frame) -> None:
        """Take texts of a gathering, and send on what is due. Runs in the reader thread of the link."""
        epoch, name, number, texts = json.loads(frame.about)
        with self._changed:
            if epoch != self.epoch:
                return
            due, call = [], self._gathering.get((name, number))
            if call is None and number <= self._counts.get(name, -1):  # it is finished, or was not gathered here
                call = self._reopen(name, number)
            if call is not None:
                call.add(texts)
                due = self._due(call)
            elif number > self._counts.get(name, -1):
                early = self._early.setdefault((name, number), {})
                early.update({text: early.get(text, 0) | mask for text, mask in texts.items()})
            self._changed.notify_all()
        self._send(due)

    def lose(self, error: PeerLostError) -> None:
        """Wake the threads that gather texts: a link is lost."""
        with self._changed:
            self._changed.notify_all()

    # -- a run that a process joins

    def counts(self) -> dict[str, int]:
        """How many calls of each name this process has made."""
        with self._changed:
            return dict(self._counts)

    @property
    def is_first_call(self) -> bool:
        """Whether this process has made no call yet that others take part in."""
        return not self._begun

    def say_run(self, said: Mapping[str, Any]) -> None:
        """Tell the launcher, and processes that it starts in place of lost ones, of the run that goes on."""
        self.store.set(self._key(RUN), json.dumps(said))

    def wait_for_run(self, process: int) -> str:
        """Wait for what `say_run` of a process has told last."""
        return self.wait_for_text(self._key(RUN), process, "to tell of its run")

    def join(self, counts: Mapping[str, int]) -> None:
        """Join the others, which have made so many calls of each name."""
        with self._changed:
            self._counts = dict(counts)
            self.config = replace(self.config, joins=False)

    # -- scripts that have ended

    def calls(self) -> dict[str, Any]:
        """The calls of this process in this epoch. Reported when its script has ended, so that others know what will
        never arrive."""
        with self._changed:
            return {"counts": dict(self._counts)}

    def has_ended(self, process: int) -> bool:
        """Whether the script of a process has ended in this epoch, while others still run."""
        return not self._leaving and self._ended.get(process, (-1, {}))[0] == self.epoch

    def refuse_ended(self, processes: Sequence[int], name: str, why: str) -> None:
        """Raise DisagreementError if the script of one of `processes` has ended before the call that this process waits
        for: its counter of `name` is lower."""
        if ended := self._ended_before(processes, name):
            raise self._ended_error(ended, why)

    def _ended_before(self, processes: Sequence[int], name: str) -> list[int]:
        """The processes whose scripts have ended with a lower counter of `name` than this process has."""
        ended = [p for p in list(self._ended) if p in processes and self.has_ended(p)]
        counts = {p: self._ended[p][1].get("counts") for p in ended}
        mine = self._counts.get(name, -1)
        return [p for p, known in sorted(counts.items()) if known is not None and known.get(name, -1) < mine]

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
        """Raise PeerLostError if a process of the run is known to be lost, ClusterError if the run ends."""
        with self._changed:
            self._raise_if_stopped()

    def rejoin(self) -> None:
        """Wait, after a loss, until the lost processes are started again, and begin the next epoch.

        Raises:
          PeerLostError: they are not started again.
        """
        self._drop_links()
        with self._changed:
            known = self.config.silence + _UNKNOWN
            if not self._changed.wait_for(self._stopped, known):
                raise PeerLostError(
                    f"process {self.me} has lost the link to a process that is alive: the launcher knows of no loss "
                    f"after {known:g} s.",
                    -1,
                )
            self._changed.wait_for(lambda: self._next is not None or bool(self._over), self.config.deadline)
            if self._next is None:
                lost, why = self._lost, self._over or f"nobody started it again within {self.config.deadline:g} s"
                raise PeerLostError(
                    f"{lost or 'a process is lost.'} It stays lost: {why}.", lost.process if lost else -1
                )
        self._begin_next()

    def _drop_links(self) -> None:
        with self._changed:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def adopt(self) -> None:
        """Begin the newest epoch, if the launcher has begun one since it started this process. Called before the first
        agreement."""
        if self._next is not None:
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin the epoch that the launcher has announced. Links of the epoch before, also new ones, are dropped."""
        with self._changed:
            assert self._next is not None
            self.config = replace(self.config, epoch=self._next, joins=False)
            self._next = self._lost = None
            self.replaced = frozenset()
            self.loop.begin(0)  # what is said belongs to an epoch
            self._counts.clear()
            self._begun.clear()
            self._gathering.clear()
            self._early.clear()
            self._repeats.clear()
            links, self._links = self._links, {}
            self._changed.notify_all()
        for link in links.values():
            link.close()
        self.last_step.begin_epoch()
        if self.last_step.is_asked:
            self._tell_begun()
        for name, text in list(self._published.items()):
            self.publish(name, text)

    def close(self) -> None:
        """Leave the run."""
        with self._changed:
            self._closed = True
        self._listener.close()
        self._drop_links()
        self.store.close()


def _unless_over(call: Callable[[int], object], peer: int) -> None:
    """Make a call; that the run ends meanwhile is no error of its own."""
    with suppress(ClusterError):
        call(peer)


_current: list[Cluster] = []


def join(config: RunConfig, allocate: Allocate) -> Cluster:
    """Make this process one of a run."""
    if _current:
        raise ClusterError(f"this process is process {_current[0].me} of a run already.")
    _current.append(Cluster(config, allocate))
    return _current[0]


def leave() -> None:
    """Leave the run that this process has joined, if any."""
    while _current:
        _current.pop().close()


def current() -> Cluster | None:
    """The cluster that this process has joined, or None."""
    return _current[0] if _current else None
