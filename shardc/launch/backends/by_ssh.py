"""Runs on hosts that this machine reaches by ssh: `python -m shardc run --hosts a,b script.py`.

    this machine: store, Supervisor
       |-- LocalProcess                            if a host names this machine
       '-- ssh b python -m shardc.launch.backends.by_ssh    an agent (`agent.py`) for each process of another host

An agent reads its post, with the secret, from its standard input: the secret never stands on a command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any, Final

import jax

from shardc.errors import ClusterError, all_offenders
from shardc.launch.agent import Agents, Post, RemoteProcess, serve
from shardc.launch.backends.lead import LOOPBACK, Start, bound, lead, signal_of, this_host
from shardc.launch.job import Job, Script
from shardc.launch.options import RunOptions
from shardc.launch.output import Screen
from shardc.launch.supervisor import GRACE, Event
from shardc.runtime.transport.wire import new_secret
from shardc.versions import VERSION

_CONNECT_SECONDS: Final = 10
"""Seconds that ssh may take to connect, and then the agent that it starts."""
_PAUSE: Final = 1.0
"""Seconds between two looks whether a lost host can be reached again."""
_START_SECONDS: Final = 60.0
"""Seconds from the start of ssh until its agent is here. Python may import JAX from a slow disk."""
_VERSIONS: Final = f"shardc {VERSION} with jax {jax.__version__}"
_OF_A_HOST: Final = re.compile(
    r"HOME|HOSTNAME|LOGNAME|USER|SHELL|SHLVL|PWD|OLDPWD|TMPDIR|DISPLAY|XAUTHORITY|MAIL|_|(SSH|XDG|DBUS)_.*"
)
"""Environment variables of a host or a session. All others go to the other hosts."""


class _Ssh:
    """An ssh that starts an agent.

    Args:
      host: as the user names it.
      post: what the agent reads from its standard input.

    Attributes:
      failure: why it has ended; empty if it has not.
    """

    def __init__(self, host: str, post: str) -> None:
        path = os.environ.get("PYTHONPATH")
        words = [
            *(["env", f"PYTHONPATH={path}"] if path else []),
            sys.executable,
            "-m",
            "shardc.launch.backends.by_ssh",
        ]
        self.host, self.failure = host, ""
        self._popen = subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}",
             "-o", "ServerAliveInterval=5", "--", host,
             f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._attend, args=(post,), name=f"shardc ssh {host}", daemon=True)
        self._thread.start()

    def _attend(self, post: str) -> None:
        _, err = self._popen.communicate(post.encode())
        lines = err.decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.failure = f"{self.host}: {said or f'ssh ended with exit code {self._popen.returncode}'}"

    def close(self, seconds: float) -> None:
        """Wait for its end, and end it after so long."""
        self._thread.join(seconds)
        self._popen.kill()
        self._thread.join()


class _SshProcess(RemoteProcess):
    """A process that ssh starts on another host. While its agent is lost, a new ssh takes the place of one that has
    ended, again and again."""

    def __init__(self, number: int, agents: Agents, screen: Screen, host: str, post: Mapping[str, Any]) -> None:
        super().__init__(number, agents.notifier(number), agents.events, screen)
        self.host_name = host
        agents.add(self)
        self._begin = lambda: _Ssh(host, json.dumps({**post, "place": number}) + "\n")
        self.ssh = self._begin()
        self._over = False

    def replace(self) -> None:
        name = f"shardc brings back host {self.ssh.host}"
        threading.Thread(target=self._bring_back, name=name, daemon=True).start()

    def _bring_back(self) -> None:
        while not self.is_here and not self._over:
            if self.ssh.failure:
                self.ssh = self._begin()
            sleep(_PAUSE)

    def end(self, code: int) -> None:
        self._over = True
        super().end(code)


def run_by_ssh(options: RunOptions, names: Sequence[str], count: int) -> int:
    """Run a script in `count` processes on these hosts. Returns the exit code of the run.

    Raises:
      ClusterError: hosts that cannot take part; it has a line for each.
    """
    with this_host(options) as (events, _, prepare):
        return _run(options, names, count, events, prepare)


def _run(
    options: RunOptions, names: Sequence[str], count: int, events: SimpleQueue[Event], prepare: Callable[[Job], Job]
) -> int:
    addresses = [_address(name) for name in names]
    here = [_is_here(address) for address in addresses]
    other = next((a for a, mine in zip(addresses, here, strict=True) if a and not mine), LOOPBACK)
    host_of = [p * len(names) // count for p in range(count)]
    secret, started = new_secret(), list[_SshProcess]()

    def add(number: int, agents: Agents, screen: Screen) -> None:
        post = _post(options, agents.server.address, secret)
        started.append(_SshProcess(number, agents, screen, names[host_of[number]], post))

    start = Start(
        bound(options, _address_towards(other)), secret, [p for p in range(count) if here[host_of[p]]],
        prepare, add, lambda agents: _meet(started, events),
    )  # fmt: skip
    try:
        return lead(start, options, count, events)
    finally:
        for process in started:
            process.ssh.close(GRACE)


def _meet(started: Sequence[_SshProcess], events: SimpleQueue[Event]) -> bool:
    """Wait for the agents of all. False: the user has interrupted the run.

    Raises:
      ClusterError: hosts that cannot take part, all of them.
    """
    until = monotonic() + _START_SECONDS
    failed: dict[str, None] = {}
    while missing := [s for s in started if not s.is_here and not s.ssh.failure]:
        failed = dict.fromkeys(s.ssh.failure for s in started if s.ssh.failure)
        if failed:
            until = min(until, monotonic() + _CONNECT_SECONDS)
        if monotonic() > until:
            break
        if signal_of(events):
            return False
    failed = dict.fromkeys(s.ssh.failure for s in started if s.ssh.failure)
    failed |= dict.fromkeys(f"{s.ssh.host}: it is not ready after {_START_SECONDS:g} s" for s in missing if not failed)
    if failed:
        raise ClusterError(all_offenders("these hosts cannot take part:", list(failed)))
    return True


def _address(name: str) -> str:
    """The address of a host that ssh reaches by this name; empty if it is not known here."""
    for resolve in (str, _ssh_name):
        with suppress(OSError):
            return str(socket.getaddrinfo(resolve(name.rpartition("@")[2]), None)[0][4][0])
    return ""


def _ssh_name(name: str) -> str:
    """The name that stands for this one in the user's configuration of ssh."""
    told = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, check=False).stdout
    return next((line.split()[1] for line in told.splitlines() if line.startswith("hostname ")), name)


def _address_towards(address: str) -> str:
    """The address of this machine that a host with `address` sees."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # nothing is sent
        return sock.getsockname()[0]
    return LOOPBACK


def _is_here(address: str) -> bool:
    return address.startswith("127.") or (bool(address) and _address_towards(address) == address)


# -- the agent that ssh starts


def _post(options: RunOptions, address: str, secret: bytes) -> Mapping[str, Any]:
    return {
        "versions": _VERSIONS,
        "address": address,
        "secret": secret.hex(),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "environment": {name: text for name, text in os.environ.items() if not _OF_A_HOST.fullmatch(name)},
    }


def main() -> int:
    """Serve as the agent whose post stands on standard input. Returns the exit code of the run."""
    said = json.loads(sys.stdin.readline())
    if said["versions"] != _VERSIONS:
        sys.exit(f"it has {_VERSIONS}, and {said['versions']} is needed")
    os.environ.update(said["environment"])
    options = _read_options(said["options"])
    script = options.script
    if not script.module and not Path(script.name).exists():
        sys.exit(f"it has no script {script.name} in {os.getcwd()}")
    if options.log:
        options.log.mkdir(parents=True, exist_ok=True)
    post = Post(said["address"], bytes.fromhex(said["secret"]), said["place"])
    with this_host(options) as (events, _, prepare):
        try:
            return serve(post, options, events, prepare, forwards=True)
        except ClusterError as error:
            sys.exit(f"{error} Does a firewall stop it? --bind sets the address at which it reaches the launcher.")


def _read_options(said: dict[str, Any]) -> RunOptions:
    words = said["script"]
    script = Script(words["name"], tuple(words["arguments"]), words["module"], words["devices"])
    log = Path(said["log"]) if said["log"] else None
    return RunOptions(script, log=log, restarts=said["restarts"], silence=said["silence"], deadline=_CONNECT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
