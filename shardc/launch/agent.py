"""Agents: launchers on other hosts, which start and kill processes for the supervisor of the run.

An agent is a client of the run's store, with the number -1 - i for place i. It reports `here`, `ended`, `output` and
`terminate`, when its host is to end; the supervisor asks it to `start`, `kill` and `interrupt` its process, and to
`end`. An agent that loses the connection kills its process and connects again: to the same supervisor, or to one that
was started in its place and begins the run anew.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

from shardc.errors import ClusterError
from shardc.launch.failure import LOST
from shardc.launch.job import Job
from shardc.launch.local_process import LocalProcess
from shardc.launch.options import RunOptions
from shardc.launch.output import Screen
from shardc.launch.supervisor import GRACE, INTERRUPTED, Event
from shardc.runtime.calls import processes_text
from shardc.runtime.store import Store, StoreServer
from shardc.runtime.transport.connection import BEAT

_REFUSALS: Final = 3
"""Refused connections in a row after which the supervisor counts as ended: its host answers, and nobody listens."""
_TRY_SECONDS: Final = 2.0
"""Seconds of one try to connect again."""
_PAUSE: Final = 0.5
"""Seconds between two tries."""
_log: Final = logging.getLogger("shardc")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")


def host_id() -> str:
    """A unique name of this host or container. Processes with the same name share a loopback address."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{platform.node()} {boot} {_NETWORK.readlink() if _NETWORK.is_symlink() else ''}"


# -- on the side of the supervisor


class RemoteProcess:
    """A process that an agent starts, again and again. It is `here` while the agent is connected.

    Args:
      number: of its place.
      notify: sends an event to the agent.
      events: of the supervisor.
      screen: shows output that the agent forwards.
    """

    def __init__(
        self,
        number: int,
        notify: Callable[[Mapping[str, Any]], object],
        events: SimpleQueue[Event],
        screen: Screen | None = None,
    ) -> None:
        self.number = number
        self.host = ""
        """The unique name of the agent's host."""
        self.host_name = ""
        """The host as the user knows it: by its number, or the name that `--hosts` gives it, or its own."""
        self.status: Callable[[], str] = str
        """Gives the activity of the process, from the agent's last sign of life; empty if that is long ago."""
        self._notify, self._events, self._screen = notify, events, screen
        self._here, self._ended = threading.Event(), threading.Event()
        self._ended.set()
        self._start = 0
        self._changing = threading.Lock()
        """Guards `_start` against the end of the agent's connection."""
        self._tail: list[str] = []

    @property
    def is_here(self) -> bool:
        return self._here.is_set()

    def reported(self, said: Mapping[str, Any]) -> None:
        """Handle a report of the agent. Runs in a thread of the store."""
        match said["what"]:
            case "here":
                own, self.host = self.host.partition(" ")[0], said["host"]
                if self.host_name == own:  # not yet known, or that of the machine before
                    self.host_name = said.get("name") or self.host.partition(" ")[0]
                self._here.set()
                self._events.put(("host here", self.number))
            case "terminate":
                self._events.put(("terminate", self.number))
            case "output":
                if self._screen is not None:
                    show = self._screen.out if said["descriptor"] == 1 else self._screen.err
                    show(said["data"].encode("latin-1"))
            case _:
                if said["start"] == self._start:
                    self._tail = said["tail"]
                    self._ended.set()
                self._events.put(("ended", self.number, said["start"], said["code"]))

    def lost(self) -> None:
        """Handle the end of the agent's connection."""
        with self._changing:
            self._here.clear()
            self._ended.set()
            self._events.put(("host lost", self.number, self._start))

    def replace(self) -> None:
        """Ask for another agent, where something can start one. Here the lost one may connect again."""

    def start(self, job: Job) -> None:
        with self._changing:
            if not self.is_here:
                raise ClusterError("the launcher of its host is lost")
            self._ended.clear()
            self._start, self._tail = job.start, []
        self._notify({"event": "start", "job": job.to_json(secret=False)})

    def kill(self, why: str = "") -> None:
        self._notify({"event": "kill", "why": why})

    def interrupt(self) -> None:
        self._notify({"event": "interrupt"})

    def end(self, code: int) -> None:
        """End the agent with this exit code."""
        self._notify({"event": "end", "code": code})

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def tail(self) -> list[str]:
        return self._tail

    def activity(self) -> str:
        return self.status()


class Agents:
    """The agents of a run, and its store, which they connect to.

    Args:
      address: where the store listens.
      secret: of the run.

    Attributes:
      remotes: the processes that agents start, by number.
      server: of the store.
      events: of the supervisor.
    """

    def __init__(self, address: str, secret: bytes, events: SimpleQueue[Event]) -> None:
        self.remotes: dict[int, RemoteProcess] = {}
        self.events = events
        self.server = StoreServer(address, secret, self._on_end, self._on_report)

    def add(self, remote: RemoteProcess) -> None:
        self.remotes[remote.number] = remote
        remote.status = lambda: self.server.status(-1 - remote.number, 3 * BEAT)

    def notifier(self, process: int) -> Callable[[Mapping[str, Any]], object]:
        """A function that sends an event to the agent of a process."""
        return lambda event: self.server.notify(-1 - process, event)

    def _on_report(self, process: int, said: Mapping[str, Any]) -> None:
        if process >= 0:
            self.events.put(("report", process, said))
        elif (remote := self.remotes.get(-1 - process)) is not None:
            remote.reported(said)

    def _on_end(self, process: int) -> None:
        if process < 0 and (remote := self.remotes.get(-1 - process)) is not None:
            remote.lost()

    def meet(self, seconds: float, most_missing: int = 0, patience: float = 0.0) -> bool:
        """Wait for all agents. False: the user has interrupted the run.

        Args:
          most_missing: how many the run can do without.
          patience: seconds that it waits for these after the others have come.

        Raises:
          ClusterError: too many did not come in time; it names them.
        """
        until = monotonic() + seconds
        enough: float | None = None
        while missing := [r.number for r in self.remotes.values() if not r.is_here]:
            if len(missing) <= most_missing:
                enough = enough or monotonic()
                if monotonic() > enough + patience:
                    return True
            elif monotonic() > until:
                raise ClusterError(
                    f"{processes_text(missing)} did not come within {seconds:g} s. Process 0 waits at "
                    f"{self.server.address}: if that is no address that other hosts reach, give --bind an address or a "
                    "network interface; if hosts only start late, give --deadline more seconds."
                )
            try:
                if self.events.get(timeout=0.1)[0] in ("interrupt", "terminate"):
                    return False
            except Empty:
                continue
        return True

    def end(self, code: int) -> None:
        """End all agents with this exit code."""
        for remote in self.remotes.values():
            remote.end(code)


# -- on the other hosts


@dataclass(frozen=True)
class Post:
    """The configuration of an agent.

    Attributes:
      address: of the run's store.
      secret: of the run.
      place: number of its place.
      bind: the address of this host for other processes; empty for that by which it reaches the store.
    """

    address: str
    secret: bytes
    place: int
    bind: str = ""


class _OutputForwarder:
    """Forwards output to the screen of the supervisor."""

    def __init__(self) -> None:
        self.store: Store | None = None

    def is_terminal(self, descriptor: int) -> bool:
        return False

    def out(self, data: bytes) -> None:
        self._send(1, data)

    def err(self, data: bytes) -> None:
        self._send(2, data)

    def _send(self, descriptor: int, data: bytes) -> None:
        if self.store is not None:
            self.store.report({"what": "output", "descriptor": descriptor, "data": data.decode("latin-1")}, 0)


def serve(
    post: Post,
    options: RunOptions,
    events: SimpleQueue[Event],
    prepare: Callable[[Job], Job] = lambda job: job,
    forwards: bool = False,
) -> int:
    """Serve as an agent until the run ends. Returns the exit code of the run; `LOST` if the supervisor has ended and no
    other one comes, or it cannot be reached again before the deadline.

    Args:
      options: of the run.
      events: `("interrupt",)` or `("terminate",)` when this agent is asked to end.
      prepare: completes a job on this host.
      forwards: whether the supervisor shows the process's output.
    """
    forward = _OutputForwarder() if forwards else None
    process = LocalProcess(post.place, options, forward, events)
    store: Store | None = _connect(post, options, events, options.deadline)
    try:
        while store is not None:
            store.status = process.activity
            if forward is not None:
                forward.store = store
            with suppress(ClusterError):  # the connection is lost at once
                name = "" if options.host is None else f"{options.host} ({platform.node()})"
                store.report({"what": "here", "host": host_id(), "name": name})
            code = _obey(post, process, store, events, prepare)
            process.kill()
            process.wait(GRACE)
            store.close()
            if code is not None:
                return code
            store = _connect_again(post, options, events)
        return LOST
    finally:
        process.kill()
        process.wait(GRACE)
        process.close()


def _connect(post: Post, options: RunOptions, events: SimpleQueue[Event], seconds: float) -> Store:
    """Connect to the store of the run. What it tells comes as events."""
    return Store(
        post.address, post.secret, -1 - post.place, lambda event: events.put(("told", event)), seconds, options.silence
    )


def _connect_again(post: Post, options: RunOptions, events: SimpleQueue[Event]) -> Store | None:
    """Connect to the store after a break of the network, or to that of a new supervisor. None: the supervisor has ended
    and no other one has come, or the deadline has passed."""
    anew = options.host_0_deadline or 0.0
    more = f", for {anew:g} s, in case host 0 is started anew" if anew else ""
    _log.warning("process %d: the connection to the run is lost; trying again%s", post.place, more)
    begin, refused, waited = monotonic(), 0, 0.0
    while waited < anew or (waited < options.deadline and refused < _REFUSALS):
        if _pause(events):
            return None
        waited = monotonic() - begin
        try:
            return _connect(post, options, events, _TRY_SECONDS)
        except ClusterError as error:
            refused = refused + 1 if isinstance(error.__cause__, ConnectionRefusedError) else 0
    return None


def _pause(events: SimpleQueue[Event]) -> bool:
    """Let some time pass. Returns whether this agent was asked to end; what has happened to its last process is
    forgotten, as another supervisor counts its starts anew."""
    until, asked = monotonic() + _PAUSE, False
    while not asked and (left := until - monotonic()) > 0:
        with suppress(Empty):
            asked = events.get(timeout=left)[0] in ("interrupt", "terminate")
    return asked


def _with_links(job: Job, host: str) -> Job:
    """The job with an address for links on this host, if the supervisor has not chosen one."""
    return job if job.config.links else replace(job, config=replace(job.config, links=f"{host}:0"))


def _obey(
    post: Post, process: LocalProcess, store: Store, events: SimpleQueue[Event], prepare: Callable[[Job], Job]
) -> int | None:
    """Do what the supervisor asks for until the run ends. Returns its exit code; None if the connection is lost."""
    until: float | None = None
    terminated = False
    while until is None or monotonic() < until:
        try:
            event = events.get(timeout=0.2)
        except Empty:
            continue
        match event:
            case "told", {"event": "start", "job": job}:
                process.start(prepare(_with_links(Job.from_json(job, post.secret), post.bind or store.host)))
            case "told", {"event": "kill", "why": why}:
                process.kill(why)
            case "told", {"event": "end", "code": code}:
                return int(code)
            case "told", {"event": "gone"}:
                return None
            case "ended", _, start, code:
                with suppress(ClusterError):  # the launcher has ended: the next event says so
                    store.report({"what": "ended", "start": start, "code": code, "tail": process.tail()})
            case ("terminate",) if not terminated:  # the supervisor lets all processes save
                terminated = True
                with suppress(ClusterError):
                    store.report({"what": "terminate"}, 0)
            case _:  # interrupted: by the user here, or there
                if until is None:
                    process.interrupt()
                    until = monotonic() + GRACE
    return INTERRUPTED
