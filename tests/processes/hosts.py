"""Hosts for tests: network namespaces of this machine, on a network that loses, delays and breaks as a test asks.

    host (namespace, TAP device 10.77.n.1) <--frames--> Network, a thread of the test <--frames--> host 10.77.n.2

Nothing is left when the test ends, not even if it is killed: a namespace lives as long as a process that reads a pipe
of the test, and a TAP device as long as its file is open. Needs root, `unshare`, `nsenter`, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_TUNSETIFF, _TAP, _BARE = 0x400454CA, 0x0002, 0x1000
_FRAME = 1 << 16
_numbers = itertools.count(os.getpid() % 200)


def why_not() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    if os.geteuid():
        return "needs root"
    try:
        made = subprocess.run(
            ["unshare", "-m", "-n", "-u", "mount", "--bind", "/etc/hosts", "/etc/hosts"],
            capture_output=True,
            check=False,
        )
        os.close(_tap("shardc-probe"))
    except OSError as error:
        return f"needs unshare, ip, mount and /dev/net/tun: {error}"
    return "" if made.returncode == 0 else f"needs network namespaces: {made.stderr.decode().strip()}"


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _BARE))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Network(threading.Thread):
    """The network between the hosts. Its attributes may be changed at any time.

    Attributes:
      loss: the part of all frames that is lost.
      delay: seconds that a frame takes.
      broken: the hosts that are cut off from all others.
    """

    def __init__(self, taps: Sequence[int]) -> None:
        super().__init__(name="network of hosts", daemon=True)
        self.loss, self.delay = 0.0, 0.0
        self.broken: set[int] = set()
        self.lost = self.carried = 0
        self._taps = taps
        self._chance = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._over = False

    def run(self) -> None:
        while not self._over:
            wait = self._under_way[0][0] - time.monotonic() if self._under_way else 0.1
            ready, _, _ = select.select(self._taps, [], [], min(0.1, max(0.0, wait)))
            for tap in ready:
                self._take(tap)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(self._under_way)
                self._give(tap, frame)

    def _take(self, tap: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(tap, _FRAME)
            except BlockingIOError:
                return
            if self._taps.index(tap) in self.broken or self._chance.random() < self.loss:
                self.lost += 1
            elif self.delay:
                heapq.heappush(self._under_way, (time.monotonic() + self.delay, next(self._count), tap, frame))
            else:
                self._give(tap, frame)

    def _give(self, origin: int, frame: bytes) -> None:
        self.carried += 1
        for i, tap in enumerate(self._taps):
            if tap != origin and i not in self.broken:
                with suppress(OSError):  # its queue is full: a frame is lost, as on a real network
                    os.write(tap, frame)

    def close(self) -> None:
        self._over = True
        self.join()


class Host:
    """A host: a namespace with a name and an address."""

    def __init__(self, name: str, address: str, tap: str, folder: Path, stack: ExitStack) -> None:
        self.name, self.address, self._folder = name, address, folder
        known = f"mount --bind {folder}/hosts /etc/hosts"  # Gloo listens at the address of the host's name
        init = subprocess.Popen(
            ["unshare", "-m", "-n", "-u", "sh", "-c", f"{known} && hostname {name} && echo ready && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(_end, init)
        assert init.stdout is not None and init.stdout.readline() == b"ready\n"
        self.init = init.pid
        self._network = os.readlink(f"/proc/{init.pid}/ns/net")
        stack.callback(self.kill)
        _ip("link", "set", tap, "netns", str(init.pid))
        self.call("ip", "link", "set", "lo", "up")
        self.call("ip", "addr", "add", f"{address}/24", "dev", tap)
        self.call("ip", "link", "set", tap, "up")

    def words(self, *words: Any) -> list[str]:
        """The command line that runs these words on this host."""
        enter = ["nsenter", "-t", str(self.init), "-m", "-n", "-u", "sh", "-c", 'cd "$0" && exec "$@"']
        return [*enter, str(self._folder), *map(str, words)]

    def call(self, *words: Any) -> None:
        subprocess.run(self.words(*words), check=True, capture_output=True)

    def processes(self) -> list[int]:
        """The processes that run on this host."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns/net") == self._network:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.init]

    def signal(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all that runs on this host, at once."""
        until = time.monotonic() + 10
        while self.processes() and time.monotonic() < until:
            self.signal(signal.SIGKILL)
            time.sleep(0.02)


class Hosts:
    """Some hosts on one network. `with hosts(2) as h:` makes them."""

    def __init__(self, count: int, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        number, taps = next(_numbers) % 250, []
        self.all: list[Host] = []
        known = [f"10.77.{number}.{i + 1} host{i}\n" for i in range(count)]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *known]))
        for i in range(count):
            name = f"sh{number}-{i}"
            taps.append(_tap(name))
            stack.callback(os.close, taps[-1])
            self.all.append(Host(f"host{i}", f"10.77.{number}.{i + 1}", name, folder, stack))
        self.network = Network(taps)
        self.network.start()
        stack.callback(self.network.close)
        self.ssh = self._write_ssh()

    @property
    def names(self) -> str:
        """For `--hosts`."""
        return ",".join(host.address for host in self.all)

    def _write_ssh(self) -> Path:
        """A folder with a program `ssh` that runs commands on these hosts."""
        cases = "\n".join(f"    {host.address}) pid={host.init} ;;" for host in self.all)
        path = self.folder / "bin" / "ssh"
        path.parent.mkdir()
        path.write_text(
            textwrap.dedent("""\
            #!/bin/sh
            for word; do host=$command; command=$word; done
            case "$host" in
            CASES
                *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
            esac
            exec nsenter -t $pid -m -n -u env -i HOME="$HOME" PATH="$PATH" sh -c "$command"
            """).replace("CASES", cases)
        )
        path.chmod(0o755)
        return path.parent

    def start(self, i: int, *words: Any, **more: Any) -> subprocess.Popen[bytes]:
        """Start a command on a host. Its output goes to files `out<i>` and `err<i>`."""
        kept = {name: text for name, text in os.environ.items() if name not in ("XLA_FLAGS", "NPROC", "PJRT_NPROC")}
        path = f"{self.ssh}:{os.environ['PATH']}"
        with (self.folder / f"out{i}").open("wb") as out, (self.folder / f"err{i}").open("wb") as err:
            return subprocess.Popen(
                self.all[i].words(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.folder,
                env={**kept, "PYTHONPATH": str(ROOT), "PATH": path, "HOME": str(self.folder), **more},
                start_new_session=True,
            )  # fmt: skip

    def run(self, i: int, *words: Any) -> subprocess.Popen[bytes]:
        """Start `python -m shardc run` with these words on a host."""
        return self.start(i, sys.executable, "-m", "shardc", "run", *words)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    # -- faults

    @contextmanager
    def broken(self, *hosts: int) -> Generator[None]:
        """No frame reaches or leaves these hosts meanwhile."""
        self.network.broken |= set(hosts)
        try:
            yield
        finally:
            self.network.broken -= set(hosts)

    @contextmanager
    def paused(self, host: int) -> Generator[None]:
        """All processes of a host are stopped meanwhile."""
        self.all[host].signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.all[host].signal(signal.SIGCONT)


@contextmanager
def hosts(count: int, folder: Path) -> Generator[Hosts]:
    """Hosts for the time of a test. At the end a process that still runs there is killed, and the test fails."""
    with ExitStack() as stack:
        made = Hosts(count, folder, stack)
        yield made
        until = time.monotonic() + 10
        while (left := [pid for host in made.all for pid in host.processes()]) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == [], f"processes are left: {[_command(pid) for pid in left]}"


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "gone"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _end(init: subprocess.Popen[bytes]) -> None:
    init.kill()
    init.wait()
    for stream in (init.stdin, init.stdout):
        if stream is not None:
            stream.close()
