"""The launcher that holds the store and the supervisor of a run, and what the ways to start processes share.

    Start --> lead: Agents (with the store) --> processes --> meet --> Supervisor --> the exit code

A `Start` is what one way has of its own.
"""

from __future__ import annotations

import fcntl
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from shardc.errors import ClusterError
from shardc.launch.agent import Agents, RemoteProcess, host_id
from shardc.launch.health.publish import publishing
from shardc.launch.job import Job
from shardc.launch.local_process import LocalProcess
from shardc.launch.options import RunOptions
from shardc.launch.output import Screen
from shardc.launch.supervisor import INTERRUPTED, Event, Supervisor

LOOPBACK: Final = "127.0.0.1"
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR of Linux
_SIGNALS: Final[Mapping[signal.Signals, Event]] = {
    signal.SIGINT: ("interrupt",),
    signal.SIGHUP: ("interrupt",),
    signal.SIGTERM: ("terminate",),
    signal.SIGUSR1: ("terminate",),
    signal.SIGUSR2: ("terminate",),
}
"""Signals and their events. Schedulers send SIGTERM some seconds before they kill, Slurm also what `--signal` says."""
_GUARD: Final = 'trap "" TERM USR1 USR2; read -r line; rm -rf -- "$1"'
"""Waits for the end of its standard input, which ends with this process; then removes a directory."""
_LONGEST: Final = 80
"""The longest path of a directory for UNIX sockets: an address has at most 107 bytes."""


def awaited(number: int, agents: Agents, screen: Screen) -> None:
    """Add a process whose agent comes by itself, and shows the output on its own host."""
    agents.add(RemoteProcess(number, agents.notifier(number), agents.events))


@dataclass(frozen=True)
class Start:
    """One way to start the processes of a run.

    Attributes:
      bind: address at which the store listens.
      secret: of the run.
      here: numbers of the processes that this launcher starts itself.
      prepare: completes a job of this host.
      add: adds another process to the agents, and starts its agent if this launcher does so.
      meet: waits for the agents. False: the user has interrupted the run. None: `Agents.meet`.
      in_use: what the user can do if nobody can listen at `bind`.
    """

    bind: str
    secret: bytes
    here: Sequence[int] = ()
    prepare: Callable[[Job], Job] = lambda job: job
    add: Callable[[int, Agents, Screen], object] = awaited
    meet: Callable[[Agents], bool] | None = None
    in_use: str = ""


def lead(start: Start, options: RunOptions, places: int, events: SimpleQueue[Event]) -> int:
    """Run a script in processes at so many places, those of spares among them. Returns the exit code of the run.

    Raises:
      ClusterError: the store cannot listen, or agents did not come.
    """
    try:
        agents = Agents(start.bind, start.secret, events)
    except ClusterError as error:
        raise ClusterError(f"{error}{start.in_use}") from error
    screen, code = Screen(options.log and options.log / "launcher.log"), INTERRUPTED
    try:
        for p in range(places):
            if p not in start.here:
                start.add(p, agents, screen)
        if start.meet(agents) if start.meet else agents.meet(options.deadline, *options.missing(places)):
            job = options.job(places - options.spares, agents.server.address, start.secret)
            code = _supervise(start, options, job, agents, screen)
    finally:
        agents.end(code)
        agents.server.close()
        screen.close()
    return code


def _supervise(start: Start, options: RunOptions, job: Job, agents: Agents, screen: Screen) -> int:
    """Run the script in all processes; `job` is that of process 0."""
    host = agents.server.address.rpartition(":")[0]
    alone = bool(start.here) and all(r.host == host_id() for r in agents.remotes.values())
    local = [LocalProcess(p, options, screen, agents.events) for p in start.here]
    handles = sorted([*local, *agents.remotes.values()], key=lambda handle: handle.number)

    def job_of(job: Job, place: int) -> Job:
        here = place in start.here
        links = f"{LOOPBACK}:0" if alone else f"{host}:0" if here else ""  # an agent knows its address
        job = replace(job, config=replace(job.config, links=links))
        return start.prepare(job) if here else job

    with publishing(options.status, options.metrics) as publish:
        code = Supervisor(job, handles, screen, job_of, agents.server, agents.events, publish).run()
    for process in local:
        process.close()
    return code


# -- this host


@contextmanager
def this_host(options: RunOptions) -> Generator[tuple[SimpleQueue[Event], Path, Callable[[Job], Job]]]:
    """Events, of signals too; a private directory; and a function that completes a job of this host."""
    events: SimpleQueue[Event] = SimpleQueue()
    with private_directory() as private, interrupts_to(events):

        def prepare(job: Job) -> Job:
            island = job.config.island(job.config.me).start
            cache = str(private / f"programs-{island}") if options.restarts or options.least else ""
            return replace(job, cache=cache, private=str(private))

        yield events, private, prepare


@contextmanager
def private_directory() -> Generator[Path]:
    """A directory that only this user can enter, for the time of a run. It goes with this process, also if that is
    killed while it runs no other, whose guards would remove it."""
    path = Path(tempfile.mkdtemp(prefix="shardc-"))
    if len(str(path)) > _LONGEST:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="shardc-", dir="/tmp"))
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "sh", path],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield path
    finally:
        with guard:
            guard.kill()
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def interrupts_to(events: SimpleQueue[Event]) -> Generator[None]:
    """Signals that ask this process to end become events of the supervisor."""

    def put(number: int, _: Any) -> None:
        events.put(_SIGNALS[signal.Signals(number)])

    before = {number: signal.signal(number, put) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of(events: SimpleQueue[Event]) -> Event | None:
    """Wait a moment for an event. Returns it if it asks this process to end."""
    try:
        event = events.get(timeout=0.05)
    except Empty:
        return None
    return event if event[0] in ("interrupt", "terminate") else None


# -- addresses


def bound(options: RunOptions, host: str, port: str = "0") -> str:
    """The address of a store on this host, or on that which `--bind` names."""
    host = interface_address(options.bind) if options.bind else host
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface; any other name is returned as it is.

    Raises:
      ClusterError: the interface has no address, or the name stands for all addresses of a host: nobody reaches that.
    """
    if name in ("0.0.0.0", "::", "[::]", "*"):
        raise ClusterError(
            f"--bind {name}: others cannot reach this address. Give the address by which other hosts reach this one, "
            "or the name of its network interface."
        )
    if name not in {interface for _, interface in socket.if_nameindex()}:
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            found = fcntl.ioctl(sock, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ClusterError(f"--bind {name}: this interface has no IPv4 address.") from error
    return socket.inet_ntoa(found[20:24])
