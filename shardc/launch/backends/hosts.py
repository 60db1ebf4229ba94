"""Runs on plain hosts, named (`--hosts a,b`: `by_ssh.py`) or with one command line for each host:

    host 0: python -m shardc run --hosts 2 --host 0 --at a:4711 script.py     the store and the supervisor
    host 1: python -m shardc run --hosts 2 --host 1 --at a:4711 script.py     an agent for each process of host 1

All hosts hold the same secret: a file in the user's home directory, made once.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Final

from shardc.errors import ClusterError, all_offenders
from shardc.launch.agent import Agents, Post, serve
from shardc.launch.backends.by_ssh import run_by_ssh
from shardc.launch.backends.lead import Start, bound, interface_address, lead, signal_of, this_host
from shardc.launch.backends.under_a_cluster import read_secret
from shardc.launch.job import Job
from shardc.launch.options import RunOptions
from shardc.launch.supervisor import GRACE, INTERRUPTED, Event
from shardc.runtime.transport.wire import write_secret

_HINT_SECONDS: Final = 3.0
"""Seconds that a launcher waits for other hosts before it says what to do there."""


def run_on_hosts(options: RunOptions) -> int:
    """Run a script on the hosts that the options name or count. Returns the exit code of the run.

    Raises:
      ClusterError: options do not fit, or hosts cannot take part; it has a line for each of these.
    """
    assert options.hosts is not None
    names = options.hosts.split(",")
    counted = options.hosts.isdecimal()
    hosts = int(options.hosts) if counted else len(names)
    count = options.places(hosts)
    _check(options, names, hosts, counted)
    if not counted:
        return run_by_ssh(options, names, count)
    each = count // hosts
    with this_host(options) as (events, _, prepare):
        if options.host:
            return _follow(options, range(options.host * each, (options.host + 1) * each), events, prepare)
        return _lead(options, each, count, events, prepare)


def _check(options: RunOptions, names: Sequence[str], hosts: int, counted: bool) -> None:
    count = options.places(hosts)
    if hosts < 1 or count % hosts:
        raise ClusterError(f"--processes {count} cannot be divided evenly over --hosts {options.hosts}.")
    options.check(count - options.spares)
    if counted and not (options.at and options.host is not None and options.host < hosts):
        raise ClusterError(
            f"--hosts {hosts} needs --host I, the number of this host (0 to {hosts - 1}), and --at ADDRESS:PORT, an "
            "address of host 0 and a free port there. To start all hosts from here by ssh, name them: --hosts a,b."
        )
    if not counted and (options.at or options.host is not None):
        raise ClusterError("--host and --at need the number of hosts: --hosts N.")
    if bad := [name for name in names if not name or name.startswith("-") or names.count(name) > 1]:
        raise ClusterError(
            f'--hosts {options.hosts}: "{bad[0]}" is no name of a host, or stands there twice; --processes sets how '
            "many processes there are."
        )


def _lead(options: RunOptions, each: int, count: int, events: SimpleQueue[Event], prepare: Callable[[Job], Job]) -> int:
    """Supervise the run, as the launcher of host 0."""
    host, _, port = str(options.at).rpartition(":")
    _refuse_loopback(host)
    secret = read_secret(options.secret or _make_secret())

    def meet(agents: Agents) -> bool:
        with _hint(lambda: _line_to_run(agents, each)):
            return agents.meet(options.deadline, *options.missing(count))

    return lead(Start(bound(options, host, port), secret, range(each), prepare, meet=meet), options, count, events)


def _refuse_loopback(host: str) -> None:
    with suppress(OSError):
        address = socket.gethostbyname(host)
        if address.startswith("127.") and host != "localhost" and host != address:
            raise ClusterError(
                f"--at: this host knows {host} as {address}, which other hosts cannot reach; give its address in place "
                "of its name."
            )


@contextmanager
def _hint(text: Callable[[], str]) -> Generator[None]:
    """Prints a hint if what is done here takes long."""

    def say() -> None:
        sys.stderr.write(f"{text()}\n")

    timer = threading.Timer(_HINT_SECONDS, say)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line_to_run(agents: Agents, each: int) -> str:
    missing = sorted({p // each for p, remote in agents.remotes.items() if not remote.is_here})
    line = shlex.join(["python", "-m", "shardc", *sys.argv[1:]])
    lines = [re.sub(r"(--host[ =])\d+", rf"\g<1>{i}", line, count=1) for i in missing]
    return all_offenders("waiting for other hosts; there, in the same directory, run:", lines)


def _follow(options: RunOptions, mine: range, events: SimpleQueue[Event], prepare: Callable[[Job], Job]) -> int:
    """Serve as the agents of the processes of another host than 0."""
    file = options.secret or _wait_for_secret(str(options.at), options.deadline, events)
    if file is None:
        return INTERRUPTED
    secret = read_secret(file)
    bind = interface_address(options.bind) if options.bind else ""
    queues: list[SimpleQueue[Event]] = []
    ends: SimpleQueue[int | ClusterError] = SimpleQueue()

    def agent(process: int, queue: SimpleQueue[Event]) -> None:
        try:
            ends.put(serve(Post(str(options.at), secret, process, bind), options, queue, prepare))
        except ClusterError as error:
            ends.put(error)
        events.put(("over",))

    for p in mine:
        queues.append(SimpleQueue())
        threading.Thread(target=agent, args=(p, queues[-1]), name=f"shardc agent {p}", daemon=True).start()
    until, asked = math.inf, False
    while ends.qsize() < len(mine) and monotonic() < until:
        if event := signal_of(events):
            soon = event[0] == "interrupt" or asked
            until, asked = min(until, monotonic() + (0.0 if soon else options.grace) + 2 * GRACE), True
            for queue in queues:
                queue.put(event)
    end = INTERRUPTED if ends.empty() else ends.get()  # an agent that still connects has started nothing
    if isinstance(end, ClusterError):
        more = "" if options.secret or "secret" not in str(end) else f" {_copy_text(str(options.at))}"
        raise ClusterError(f"{end}{more}") from end
    return end


# -- the user's secret


def _secret_file() -> Path:
    return Path.home() / ".shardc" / "secret"


def _copy_text(at: str) -> str:
    host = at.rpartition(":")[0]
    return (
        f"Hosts without a shared home directory need a copy of this file of host 0, once: scp {host}:.shardc/secret "
        "~/.shardc/secret. Or give all hosts the same --secret FILE."
    )


def _make_secret() -> Path:
    """The file of this user's secret. It is made once, and stays for later runs."""
    path = _secret_file()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        write_secret(path, secrets.token_hex(32).encode())
    return path


def _wait_for_secret(at: str, seconds: float, events: SimpleQueue[Event]) -> Path | None:
    """The file of this user's secret, once host 0 has made it or the user has copied it. None: the user has interrupted
    the run."""
    path, until = _secret_file(), monotonic() + seconds
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with _hint(lambda: f"there is no {path} yet. {_copy_text(at)}"):
        while not (path.exists() and path.stat().st_size):
            if monotonic() > until:
                raise ClusterError(f"there is no {path}. {_copy_text(at)}")
            if signal_of(events):
                return None
    return path
