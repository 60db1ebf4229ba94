"""Edges between processes: what a link and an executor take for a message, beside a plain socket that sends the same.

    python -m benchmarks.edges [--rounds 20] [--sizes 1024 1048576 67108864] [--planes unix tcp tls] [--kinds numpy jax]

Two processes on this machine. Three ways take turns in each round, all in the same two processes:

- plain: a UNIX or TCP socket with the same buffers, not encrypted; a header of 8 bytes and the value in one `sendmsg`,
  received with `recv_into` into a fresh aligned `np.empty`;
- link: a tagged value, `Link.send_tagged` to `Link.receive_tagged`;
- edge: a message of a network, from the task that gives it to the task that takes it (`DistributedNetwork`).

`unix` is what goes between processes of a host, `tls` between hosts, `tcp` too with `shardc run --plain-data`.

`numpy`: from an array on the host to one on the host. `jax`: from an array on a device to one on a device, which each
way reads with `np.asarray` and puts with `jax.device_put` of the buffer that it received into.

One way: from the call that sends to the value in hand, by the clock that both processes share; the next message waits
for an answer. Ping-pong: half of a round trip of equal messages.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from shardc.runtime.actor import Channel, Network, Step
from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare, Task
from shardc.runtime.transport import wire
from shardc.runtime.transport.link import Link, Packed
from shardc.runtime.transport.tls import TlsSocket

SECRET = b"edges"
HEAD = struct.Struct("!q")
TIME = struct.Struct("!d")
WAYS = "plain", "link", "edge"
PLANES = "unix", "tcp", "tls"


def allocate(count: int) -> memoryview:
    raw = np.empty(count + 64, np.uint8)
    offset = -raw.__array_interface__["data"][0] % 64
    return memoryview(raw[offset : offset + count])


class Values:
    """Values of one kind: how they become bytes and back."""

    def __init__(self, kind: str) -> None:
        self._on_device = kind == "jax"

    def make(self, size: int) -> Any:
        x = np.frombuffer(allocate(size), np.float32)
        x[:] = np.arange(x.size)
        return self.value(memoryview(x).cast("B"))

    def bytes_of(self, x: Any) -> memoryview:
        return memoryview(np.asarray(x)).cast("B")

    def value(self, buffer: memoryview) -> Any:
        x = np.frombuffer(buffer, np.float32)
        return jax.block_until_ready(jax.device_put(x)) if self._on_device else x

    # the codec of a network

    def is_ready(self, value: Any) -> bool:
        return not self._on_device or value.is_ready()

    def pack(self, channel: int, peer: int, value: Any) -> Packed:
        return b"x", [self.bytes_of(value)]

    def unpack(self, channel: int, parts: Mapping[int, Packed]) -> Any:
        ((_, (buffer,)),) = parts.values()
        return self.value(buffer)


class Plain:
    """Messages over a socket as Python has it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, data: memoryview) -> None:
        sent = self.sock.sendmsg([HEAD.pack(data.nbytes), data]) - HEAD.size
        if sent < data.nbytes:
            self.sock.sendall(data[sent:])

    def receive(self) -> memoryview:
        buffer = allocate(*HEAD.unpack(wire.read(self.sock, HEAD.size)))
        rest = buffer
        while rest:
            rest = rest[self.sock.recv_into(rest, 0, socket.MSG_WAITALL) :]
        return buffer


class Tagged:
    """Messages over a link, under a tag."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def send(self, data: memoryview) -> None:
        self.link.send_tagged("edge", (b"", [data]))

    def receive(self) -> memoryview:
        return self.link.receive_tagged("edge", 60.0)[1][0]


Seconds = list[float]


def by_calls(way: Plain | Tagged, first: bool, values: Values, x: Any, count: int) -> tuple[Seconds, Seconds]:
    """Seconds one way and of ping-pongs, measured in the first process; the other one does its part."""
    one_way: Seconds = []
    for _ in range(count):
        if first:
            begin = perf_counter()
            way.send(values.bytes_of(x))
            (end,) = TIME.unpack(way.receive())
            one_way.append(end - begin)
        else:
            y = values.value(way.receive())
            way.send(memoryview(TIME.pack(perf_counter())))
            del y
    pings: Seconds = []
    for _ in range(count):
        begin = perf_counter()
        if first:
            way.send(values.bytes_of(x))
            y = values.value(way.receive())
            pings.append((perf_counter() - begin) / 2)
        else:
            y = values.value(way.receive())
            way.send(values.bytes_of(y))
        del y
    return one_way, pings


class Edge:
    """The same by executors: networks of two actors, one in each process."""

    def __init__(self, link: Link, first: bool, values: Values, x: Any, count: int, number: int) -> None:
        self.first, self.link = first, link
        self.times: SimpleQueue[float] = SimpleQueue()
        there = Channel("there", 0, 1, 1)
        numbers = range(count)
        one_way = Network(
            (
                tuple(Step(("give", j), (), ((0, j),)) for j in numbers),
                tuple(Step(("take", j), ((0, j),)) for j in numbers),
            ),
            (there,),
        )
        turns = Network(
            (
                tuple(
                    Step(("ping", j), ((1, j - 1),) if j else (), ((0, j),) if j < count else ())
                    for j in range(count + 1)
                ),
                tuple(Step(("pong", j), ((0, j),), ((1, j),)) for j in numbers),
            ),
            (there, Channel("back", 1, 0, 1)),
        )  # fmt: skip

        def task(label: Any) -> Task:
            what, j = label

            def run(taken: list[Any]) -> list[Any]:
                if what != "pong":
                    self.times.put(perf_counter())
                if what == "give" or (what == "ping" and j < count):
                    return [x]
                return taken if what == "pong" else []

            return Task(run)

        self.networks: list[tuple[Executor, DistributedNetwork]] = []
        for i, net in enumerate((one_way, turns)):
            spread = DistributedNetwork(net, 2 * number + i, [[0], [1]], {link.peer: link}, values)
            executor = Executor(net, task, share=ProcessShare(spread.mine, spread.ports))
            spread.open(executor.mailboxes, 60.0)
            self.networks.append((executor, spread))

    def _run(self, executor: Executor) -> Seconds:
        executor.run()
        return [self.times.get() for _ in range(self.times.qsize())]

    def measure(self) -> tuple[Seconds, Seconds]:
        (one_way, _), (turns, _) = self.networks
        mine = self._run(one_way)
        if not self.first:
            self.link.send_tagged("times", (b"".join(map(TIME.pack, mine)), ()))
            self._run(turns)
            return [], []
        took = [t for (t,) in TIME.iter_unpack(self.link.receive_tagged("times", 60.0)[0])]
        pings = self._run(turns)
        return (
            [end - begin for begin, end in zip(mine, took, strict=True)],
            [(end - begin) / 2 for begin, end in pairwise(pings)],
        )

    def close(self) -> None:
        for executor, spread in self.networks:
            executor.close()
            spread.close()


def measure(
    args: argparse.Namespace, plane: str, sockets: Sequence[socket.socket], first: bool
) -> list[dict[str, Any]]:
    """All rows of one plane. Both processes call this."""
    sock, linked = sockets
    if isinstance(linked, TlsSocket):
        sock = socket.socket(fileno=sock.detach())  # without TLS
        linked.clear = plane == "tcp"
    plain, link = Plain(sock), Link(linked, 0 if first else 1, 1 if first else 0, 30.0, allocate)
    rows: list[dict[str, Any]] = []
    for number, (kind, size) in enumerate((k, s) for k in args.kinds for s in args.sizes):
        values = Values(kind)
        x = values.make(size)
        count = 100 if size < 1 << 16 else 10 if size < 1 << 23 else 2
        edge = Edge(link, first, values, x, count, number)

        def calls(way: Plain | Tagged, values: Values = values, x: Any = x, count: int = count):
            return lambda: by_calls(way, first, values, x, count)

        ways: dict[str, Callable[[], tuple[Seconds, Seconds]]] = {
            "plain": calls(plain),
            "link": calls(Tagged(link)),
            "edge": edge.measure,
        }
        found: dict[str, tuple[Seconds, Seconds]] = {way: ([], []) for way in WAYS}
        for turn in range(args.rounds + 1):
            for i in range(len(WAYS)):
                way = WAYS[(turn + i) % len(WAYS)]
                for known, new in zip(found[way], ways[way](), strict=True):
                    known += new if turn else []  # the first turn warms up
        edge.close()
        if first:
            for i, what in enumerate(("one way", "ping-pong")):
                rows.append({"kind": kind, "size": size, "what": what, **{w: found[w][i] for w in WAYS}})
    link.close()
    sock.close()
    return rows


@contextmanager
def second_process(words: Sequence[str], plane: str, address: str) -> Generator[list[socket.socket]]:
    """Start the other process of a plane. Gives a socket for each of plain and link."""
    arrived: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
    listener = wire.Listener(wire.listen(address), SECRET, lambda sock, hello: arrived.put((hello.process, sock)))
    command = [sys.executable, "-m", "benchmarks.edges", *words, "--second", plane, listener.address]
    with subprocess.Popen(command) as child:
        try:
            yield [sock for _, sock in sorted((arrived.get(timeout=60) for _ in range(2)), key=lambda pair: pair[0])]
        except BaseException:
            child.kill()
            raise
        finally:
            listener.close()


def text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def table(plane: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    title = f"{plane}: ms, median (least); load {os.getloadavg()[0]:.1f}"
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("kind", "size", "what", *WAYS, "link : plain", "edge : plain", "link GB/s"):
        found.add_column(column, justify="left" if column in ("kind", "what") else "right", no_wrap=True)
    for row in rows:
        middle = {w: statistics.median(row[w]) for w in WAYS}
        least = {w: min(row[w]) for w in WAYS}
        found.add_row(
            row["kind"],
            text(row["size"]),
            row["what"],
            *(f"{1e3 * middle[w]:.3f} ({1e3 * least[w]:.3f})" for w in WAYS),
            *(f"{middle[w] / middle['plain']:.2f} ({least[w] / least['plain']:.2f})" for w in WAYS[1:]),
            f"{row['size'] / middle['link'] / 1e9:.2f} ({row['size'] / least['link'] / 1e9:.2f})",
        )
    return found


def main(words: Sequence[str]) -> None:
    """Measures all planes and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1 << 10, 1 << 20, 1 << 26], help="bytes, multiples of 4"
    )
    parser.add_argument("--planes", nargs="+", default=PLANES, choices=PLANES)
    parser.add_argument("--kinds", nargs="+", default=["numpy", "jax"], choices=["numpy", "jax"])
    parser.add_argument("--second", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.second:
        plane, address = args.second
        measure(args, plane, [wire.dial(address, SECRET, wire.Hello(i), 30.0) for i in range(2)], first=False)
        return
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as folder:
        for plane in args.planes:
            address = f"unix:{Path(folder) / 'edges'}" if plane == "unix" else "127.0.0.1:0"
            with second_process(words, plane, address) as sockets:
                console.print(table(plane, measure(args, plane, sockets, first=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
