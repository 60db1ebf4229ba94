"""The messages and seconds of agreements, with many processes that only agree.

    python -m benchmarks.agreements [--processes 2 8 32 128 512] [--hosts 8]

The processes of a run are clusters in the threads of a few operating-system processes, with UNIX sockets between them;
the launcher is a store alone. Nothing of JAX runs. The phases:

    start      all join, open their links and agree for the first time
    agree      the comparison of one call
    save       the agreement of a checkpoint that is saved
    last       the agreements of `saved.last()`
    restart    process 1 is lost and replaced: the others begin the next epoch, and all agree
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from shardc.checkpoint.writing_group import Group
from shardc.errors import PeerLostError
from shardc.runtime.cluster import Cluster, RunConfig
from shardc.runtime.store import StoreServer
from shardc.runtime.transport import connection
from shardc.runtime.transport.connection import Connection, Frame, FrameKind
from shardc.runtime.transport.link import Link
from shardc.runtime.transport.wire import new_secret

AGREEMENTS = 20
PHASES = ("start", "agree", "save", "last", "restart")


class Count(Counter[str]):
    """The messages that are sent in this operating-system process, but for signs of life: `links` and `launcher`."""

    def __init__(self) -> None:
        super().__init__()
        lock, send = threading.Lock(), Connection.send

        def counted(sender: Connection, frame: Frame) -> None:
            if frame.kind is not FrameKind.ALIVE and frame.kind is not FrameKind.LEAVE:
                with lock:
                    self["links" if isinstance(sender, Link) else "launcher"] += 1
                    self["bytes"] += sum(p.nbytes for p in frame.pieces())
            send(sender, frame)

        Connection.send = counted  # pyright: ignore[reportAttributeAccessIssue]


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, each in a thread."""
    threads = [threading.Thread(target=call) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


class Host:
    """The processes of a run in one operating-system process."""

    def __init__(self, config: dict[str, Any], processes: Sequence[int]) -> None:
        self._config, self._processes = config, processes
        self._clusters: dict[int, Cluster] = {}

    def _join(self, p: int, epoch: int = 0) -> None:
        links = f"unix:{self._config['folder']}/{p}"
        given = {k: v for k, v in self._config.items() if k != "folder"}
        self._clusters[p] = Cluster(
            RunConfig(me=p, islands=given["processes"], links=links, epoch=epoch, silence=600.0, **given), _allocate
        )
        self._clusters[p].on_orphaned = lambda: None

    def run(self, phase: str) -> None:
        at_once([lambda p=p: getattr(self, f"_{phase}")(p) for p in self._processes])

    def _start(self, p: int) -> None:
        self._join(p)
        self._clusters[p].gather("start", "")

    def _agree(self, p: int) -> None:
        cluster = self._clusters[p]
        for i in range(AGREEMENTS):
            call = cluster.begin_gather("calls", f"step, call {i}", range(cluster.processes), "at step")
            cluster.finish_gather(call)

    def _group(self, p: int) -> Group:
        cluster = self._clusters[p]
        return Group(p, cluster.processes, cluster.processes, cluster.gather)

    def _save(self, p: int) -> None:
        self._group(p).together("written", str)

    def _last(self, p: int) -> None:
        group = self._group(p)
        group.together("written", str)
        group.from_first("look", str)
        group.together("read the manifests", str)
        group.together("fits", str)
        group.together("read", str)

    def _restart(self, p: int) -> None:
        if p == 1:
            self._clusters[p].close()
            self._join(p, epoch=1)
        else:
            cluster = self._clusters[p]
            with suppress(PeerLostError):
                while True:
                    cluster.check()
                    sleep(0.01)
            cluster.rejoin()
        self._clusters[p].gather("start", "")

    def sockets(self) -> int:
        """The most sockets of a process: links, the store, the listener."""
        return 2 + max(len(c._links) for c in self._clusters.values())  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        at_once([c.close for c in self._clusters.values()])


def _allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


def _work(pipe: Pipe, config: dict[str, Any], processes: Sequence[int]) -> None:
    threading.stack_size(256 << 10)
    connection.BEAT = 10.0  # two cores serve the signs of life of all
    sys.setswitchinterval(0.5)  # thousands of threads that wait for the interpreter would wake for it all the time
    count, host = Count(), Host(config, processes)
    pipe.send("ready")
    while (phase := pipe.recv()) != "end":
        count.clear()
        host.run(phase)
        pipe.send((monotonic(), {**count, "sockets": host.sockets()}))
    host.close()


def measure(processes: int, hosts: int) -> dict[str, dict[str, float]]:
    """For each phase its seconds, and the messages of one agreement in it."""
    context, secret, found = multiprocessing.get_context("spawn"), new_secret(), dict[str, dict[str, float]]()
    hosts = min(hosts, processes)
    with tempfile.TemporaryDirectory(prefix="agree-", dir="/tmp") as folder:
        count, server = Count(), StoreServer(f"unix:{folder}/store", secret)
        config = {
            "processes": processes, "store": server.address, "secret": secret, "folder": folder, "deadline": 120.0,
        }  # fmt: skip
        pipes: list[Pipe] = []
        for h in range(hosts):
            mine, theirs = context.Pipe()
            context.Process(target=_work, args=(theirs, config, range(h, processes, hosts)), daemon=True).start()
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()
        for phase in PHASES:
            count.clear()
            begin = monotonic()
            if phase == "restart":
                server.notify_all({"event": "lost", "process": 1, "why": "killed"})
                server.notify_all({"event": "epoch", "epoch": 1, "restarts": 0}, newcomers=True)
            for pipe in pipes:
                pipe.send(phase)
            said = [pipe.recv() for pipe in pipes]
            calls = AGREEMENTS if phase == "agree" else 1
            total = sum((Counter(each) for _, each in said), Counter(count))
            found[phase] = {
                "seconds": (max(at for at, _ in said) - begin) / calls,
                **{k: total[k] / calls for k in ("links", "launcher", "bytes")},
                "sockets": max(each["sockets"] for _, each in said),
            }
        for pipe in pipes:
            pipe.send("end")
        server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8, 32, 128, 512])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threading.stack_size(256 << 10)
    found: dict[int, dict[str, dict[str, float]]] = {}
    print("| processes | phase | seconds | between processes | through the launcher | bytes | sockets of a process |")
    print("|---|---|---|---|---|---|---|")
    for n in options.processes:
        found[n] = measure(n, options.hosts)
        for phase, f in found[n].items():
            print(
                f"| {n} | {phase} | {f['seconds']:.3f} | {f['links']:.0f} | {f['launcher']:.0f} | {f['bytes']:.0f} "
                f"| {f['sockets']:.0f} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
