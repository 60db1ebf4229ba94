"""Carriers between two processes of one JAX runtime: what a value takes from device to device.

    python -m shardc run --processes 2 --islands 1 --devices 4 --carrier put -m benchmarks.carriers [rounds] [bytes ...]

A value split over four devices of the first process goes to four devices of the second one. Three ways take turns:

- put: a way that JAX carries, `machine/puts.py`: cut, ticket, one `jax.device_put` for each pair of devices, join;
- links: the same way as bytes over the link of the two processes;
- plain: one `jax.device_put` of the array, which both processes call; it takes equal placements only.

One way: from the call that gives a value that is there to the value on the taker's devices, by the clock that both
processes share; the next message waits for an answer. In brackets, before the giver's call returns.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import shardc
from shardc import S
from shardc.arrays.place import Place
from shardc.errors import PeerLostError
from shardc.execute.ways import Way, Ways
from shardc.machine.mesh import border
from shardc.machine.puts import open_puts
from shardc.runtime.cluster import Cluster, current
from shardc.runtime.transport.connection import Frame, FrameKind
from shardc.sbp.placement import Placement

NETWORK = 2
PLACEMENTS = {"S(0) -> S(0)": ({"x": S(0)}, {"x": S(0)}), "S(0) -> S(1)": ({"x": S(0)}, {"x": S(1)}),
              "S(0) -> B": ({"x": S(0)}, {})}  # fmt: skip


@dataclass
class Inbox:
    """What comes for the benchmark."""

    frames: SimpleQueue[Frame] = field(default_factory=SimpleQueue)

    def receive(self, peer: int, frame: Frame) -> None:
        self.frames.put(frame)

    def lose(self, error: PeerLostError) -> None:
        """Handle the loss of the other process: who waits for it raises."""


class Pair:
    """The two processes, as one of them sees them.

    Args:
      cluster: of this process.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.first = cluster.me == 0
        self.link, self.inbox, self.puts = cluster.link(1 - cluster.me), Inbox(), open_puts(cluster)
        self.link.add(NETWORK, self.inbox)
        devices = [[d for d in shardc.devices() if d.process_index == p] for p in (0, 1)]
        self.meshes = [Mesh(np.array(ds), ("x",)) for ds in devices]

    def by_ways(self, ways: Ways, x: jax.Array, send: Callable[[Frame], None]) -> float:
        """Give or take a message. Returns when the call has returned, or the value is there."""
        if self.first:
            about, buffers = ways.pack(1, ways.leave([x]))
            send(Frame(FrameKind.MESSAGE, NETWORK, about=about, buffers=buffers))
        else:
            frame = self.inbox.frames.get(timeout=60)
            jax.block_until_ready(ways.arrive(ways.unpack({0: (frame.about, frame.buffers)})))
        return perf_counter()

    def plain(self, x: jax.Array, spec: PartitionSpec) -> float:
        there = jax.device_put(x, NamedSharding(self.meshes[1], spec))
        if not self.first:
            jax.block_until_ready(there)
        return perf_counter()

    def measure(self, once: Callable[[], float]) -> tuple[float, float]:
        """Seconds until the value is there and until the call returns. In the second process nothing of use."""
        if not self.first:
            self.link.receive_tagged("go", 60.0)
            self.link.send_tagged("there", (repr(once()).encode(), ()))
            return 0.0, 0.0
        self.link.send_tagged("go")
        begin = perf_counter()
        returned = once()
        there, _ = self.link.receive_tagged("there", 60.0)
        return float(there) - begin, returned - begin


def main(words: Sequence[str]) -> None:
    """Measures and prints a table."""
    cluster = current()
    assert cluster is not None and cluster.processes == 2
    pair, rounds, *sizes = Pair(cluster), *([int(w) for w in words] or [7, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26])
    table = Table(title=f"ms, least of {rounds}; load {os.getloadavg()[0]:.1f}", box=None, title_justify="left")
    for column in ("", "bytes", "put", "links", "plain device_put"):
        table.add_column(column, justify="right", no_wrap=True)
    for (name, (given, taken)), size in ((p, s) for p in PLACEMENTS.items() for s in sizes):
        shape = (16, size // 64)
        here, there = (
            Place(jax.ShapeDtypeStruct(shape, np.float32), m, Placement(p))
            for m, p in zip(pair.meshes, (given, taken), strict=True)
        )
        x: Any = jax.make_array_from_callback(
            shape, here.sharding, lambda at, n=shape: np.ones(n, np.float32)[at], dtype=np.float32
        )
        put, links = (Ways([Way(here, there, border(here.mesh, there.mesh))], False, by) for by in (False, True))
        assert (put.carrier, links.carrier) == ("put", "links")
        runs = {
            "put": partial(pair.by_ways, put, x, partial(pair.puts.send, 1)),
            "links": partial(pair.by_ways, links, x, pair.link.send),
            **({"plain": partial(pair.plain, x, here.sharding.spec)} if given == taken else {}),
        }
        found: dict[str, list[tuple[float, float]]] = {n: [] for n in runs}
        for turn in range(rounds + 1):
            for n, once in runs.items():
                jax.block_until_ready(x)
                took = pair.measure(once)
                found[n] += [took] if turn else []
        least = {n: tuple(1e3 * min(t) for t in zip(*each, strict=True)) for n, each in found.items()}
        middle = {n: 1e3 * statistics.median(t for t, _ in each) for n, each in found.items()}
        cells = {n: f"{a:.2f} ({b:.2f}), {middle[n]:.2f}" for n, (a, b) in least.items()}
        table.add_row(name, str(size), cells["put"], cells["links"], cells.get("plain", "-"))
    if pair.first:
        Console(width=160).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
