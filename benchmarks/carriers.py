"""Carriers between processes of one JAX runtime: a prototype of one that is JAX's own, beside links.

    python -m shardc run --processes 2 --devices 4 benchmarks/carriers.py [--rounds 10] [--sizes 1024 1048576 67108864]

Process 0 gives a value at a placement on its devices, process 1 takes it at one on its own. All values are checked.

- put: the parcels of the way (`sbp/way.py`) are cut on the giver's devices, go by `jax.device_put` with one call for
  each pair of devices (JAX gives the values of a list of several pairs to the wrong arrays), and are joined on the
  taker's. Both processes make all calls, in one order: JAX pairs transfers by a counter in each process.
- link: the same way over a UNIX socket, by `pack` and `unpack`.
- whole: one `jax.device_put` of the whole array, where JAX takes the pair of shardings.

ms from the call in process 0 to the value on the devices of process 1, by the clock that both share: median (least);
then how long the call in process 0 takes.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from shardc.arrays.place import Place
from shardc.execute.ways import Crossing, Way, Ways
from shardc.machine.mesh import border
from shardc.runtime.cluster import current
from shardc.runtime.transport.link import Link
from shardc.sbp.placement import B, Placement, S

CASES: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...], Any]] = {
    "S(0) -> S(0)": ((4,), {"a": S(0)}, (4,), {"a": S(0)}),
    "S(0) -> S(1)": ((4,), {"a": S(0)}, (4,), {"a": S(1)}),
    "B -> S(0)": ((4,), {"a": B}, (4,), {"a": S(0)}),
    "S(0) -> B": ((4,), {"a": S(0)}, (4,), {"a": B}),
    "4 -> 2": ((4,), {"a": S(0)}, (2,), {"a": S(0)}),
    "2x2 -> 4": ((2, 2), {"a": S(0), "b": S(1)}, (4,), {"a": S(0)}),
}
PROCESSES = 0, 1
Carry = Callable[[Any], Any]
"""From what is given, None in the taker, to the physical array that is taken, None in the giver."""


class Put(Crossing):
    """Carries a value from a mesh of one process to one of another, by JAX."""

    def __init__(self, way: Way, gives: bool) -> None:
        super().__init__([way])
        self._way, self._gives = way, gives

    def _copy_all(self, cut: dict[tuple[int, int, int], dict[Any, Any]]) -> dict[tuple[int, int, int, int], Any]:
        """Send each parcel to the first device that takes it, and copy it from there."""
        came: dict[tuple[int, int, int, int], Any] = {}
        first: dict[tuple[int, int, int], Any] = {}
        order = sorted(self._copies, key=lambda c: (c[3], c[5]))  # by pairs of devices: equal in both processes
        for (source, target), copies in groupby(order, key=lambda c: (c[3], c[5])):
            sent = [c for c in copies if c[1:4] not in first]
            ends = [SingleDeviceSharding(d) for d in (self._sources[source], self._targets[target])]
            pieces = [
                cut[0, c[1], c[2]][self._sources[source]] if self._gives else self._far(c[1], ends[0]) for c in sent
            ]
            for c, piece in zip(sent, jax.device_put(pieces, [ends[1]] * len(pieces)) if pieces else (), strict=True):
                first[c[1:4]] = came[0, c[1], c[4], c[5]] = piece
        if not self._gives:
            for _, c, slot, source, there, target in self._copies:
                if (0, c, there, target) not in came:
                    came[0, c, there, target] = jax.device_put(first[c, slot, source], self._targets[target])
        return came

    def _far(self, cut: int, sharding: Any) -> Any:
        """A parcel on a device of the giver, as the taker knows it."""
        shape = self._cuts[0][cut].shape
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=self._way.moved_dtype)

    def carry(self, x: Any) -> Any:
        cut: dict[tuple[int, int, int], dict[Any, Any]] = {}
        if self._gives:
            slots = iter(self._cutter(x)) if self._parted else iter([x])
            for c, of in enumerate(self._cuts[0]):
                for slot in range(len(of.cut)):
                    cut[0, c, slot] = {shard.device: shard.data for shard in next(slots).addressable_shards}
        came = self._copy_all(cut)
        if self._gives:
            return None
        return self._joiner(*self._slots(came))[0] if self._joined else self._put_together(0, came)


def way_of(case: str, size: int) -> Way:
    """The way of a case, for a matrix of so many bytes."""
    devices = [[d for d in jax.devices() if d.process_index == p] for p in PROCESSES]
    aval = jax.ShapeDtypeStruct((size // 4 // 16, 16) if size < 1 << 16 else (size // 4 // 1024, 1024), np.float32)
    places: list[Place] = []
    for p, (shape, placement) in zip(PROCESSES, (CASES[case][:2], CASES[case][2:]), strict=True):
        count = int(np.prod(shape))
        mesh = Mesh(np.asarray(devices[p][:count]).reshape(shape), ("a", "b")[: len(shape)])
        places.append(Place(aval, mesh, Placement(placement)))
    return Way(places[0], places[1], border(places[0].mesh, places[1].mesh))


def carriers(way: Way, link: Link, gives: bool) -> dict[str, Carry]:
    """Each carrier's part in this process."""
    ways, put = Ways([way], False), Put(way, gives)

    def by_put(x: Any) -> Any:
        got = put.carry(*ways.leave([x])) if gives else put.carry(None)
        return None if gives else ways.arrive([got])[0]

    def by_link(x: Any) -> Any:
        if gives:
            return link.send_tagged("value", ways.pack(1, ways.leave([x])))
        return ways.arrive(ways.unpack({0: link.receive_tagged("value", 60.0)}))[0]

    def whole(x: Any) -> Any:
        given = way.given
        x = x if gives else jax.make_array_from_single_device_arrays(given.shape, given.sharding, [], dtype=given.dtype)
        got = jax.device_put(x, way.taken.sharding)
        return None if gives else got

    alike = way.given.placement == way.taken.placement and way.given.sizes == way.taken.sizes
    return {"put": by_put, "link": by_link, **({"whole": whole} if alike else {})}


def measure(way: Way, carry: Carry, link: Link, gives: bool, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round, and of the giver's calls."""
    value = np.random.default_rng(0).normal(size=way.given.shape).astype(np.float32)
    x = way.given.enter(value) if gives else None
    took: list[float] = []
    calls: list[float] = []
    for turn in range(rounds + 1):
        link.send_tagged("ready")
        link.receive_tagged("ready", 60.0)
        begin = perf_counter()
        got = carry(jax.block_until_ready(x))
        called = perf_counter()
        if gives:
            end = float(link.receive_tagged("end", 60.0)[0])
            took += [end - begin] if turn else []
            calls += [called - begin] if turn else []
        else:
            jax.block_until_ready(got)
            link.send_tagged("end", (repr(perf_counter()).encode(), ()))
            assert (way.taken.value(got) == value).all()
    return took, calls


def text(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} ({1e3 * min(seconds):.2f})"


def rows(args: argparse.Namespace, link: Link, gives: bool) -> Table:
    """Measure all cases. Both processes call this."""
    found = Table(title="ms, median (least)", title_justify="left", box=None, pad_edge=False)
    for column in ("size", "way", "parcels", "sent", "put", "link", "whole", "put: call", "link: call"):
        found.add_column(column, justify="right", no_wrap=True)
    for size in args.sizes:
        for case in args.cases:
            way = way_of(case, size)
            took: Mapping[str, tuple[list[float], list[float]]] = {
                name: measure(way, carry, link, gives, args.rounds)
                for name, carry in carriers(way, link, gives).items()
            }
            if gives:
                times = [text(took[name][0]) if name in took else "-" for name in ("put", "link", "whole")]
                calls = [text(took[name][1]) for name in ("put", "link")]
                sent = way.plan.border_bytes / size
                found.add_row(f"{size:,}", case, str(len(way.plan.parcels)), f"{sent:.1f}", *times, *calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 20, 1 << 26], help="bytes")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{port}")  # with port 0 the taker hangs
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0,127.0.0.1:0")
    jax.config.update("jax_cross_host_transfer_transfer_size", 1 << 20)
    cluster = current()
    assert cluster is not None and cluster.processes == 2, "start it by: shardc run --processes 2 --devices 4"
    gives = cluster.me == 0
    table = rows(args, cluster.link(1 - cluster.me), gives)
    if gives:
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
