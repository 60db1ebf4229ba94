"""Transfers from device to device between the processes of one JAX runtime, in one order in all of them.

    giver --what it sends--> first process of the runtime --ticket--> all processes: the same calls of jax.device_put

`jax.device_put` pairs what one process sends with what another one takes by a counter in each process of the runtime:
two transfers in unlike orders are swapped without an error, and a process that does not take part has to count too. So
the first process of the runtime gives each transfer a ticket, and every process makes the calls of the tickets in their
order, in one thread: with its own arrays where it sends, with arrays of which it has no piece where it does not. A
ticket says devices, shapes, dtypes and the count that JAX has to stand at; it brings the frame that tells the taker
what has come. One call has the arrays of one pair of devices: JAX gives those of several to the wrong ones.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import count, groupby
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from shardc import compat
from shardc.errors import ClusterError, PeerLostError
from shardc.machine.devices import RemoteDevice, runtimes_of
from shardc.runtime.cluster import Cluster, current
from shardc.runtime.transport.connection import Frame, FrameKind

HERE: Final = "here"
PUT: Final = "put"
LINKS: Final = "links"
_NETWORK: Final = 1
"""The network number of tickets on links. Numbers of pipelines are digests, never 1 in practice."""
_REQUEST: Final = -1
"""The key of a frame that asks for a ticket."""

_log: Final = logging.getLogger("shardc")


class Outgoing(NamedTuple):
    """An array on one device of this process, and the device of another one that it goes to."""

    array: jax.Array
    device: Any

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


@dataclass(frozen=True)
class Ticket:
    """A part of a message that goes from one process to another.

    Attributes:
      giver, taker: the processes.
      number: of the giver's parts.
      calls: for each call of `jax.device_put` the numbers of both devices, and shape and dtype of each array.
      frame: what the taker gets with the arrays: network, run, channel, key and description.
      at: transfers before it, as JAX counts them; -1 in a request.
    """

    giver: int
    taker: int
    number: int
    calls: Sequence[tuple[int, int, Sequence[tuple[Sequence[int], str]]]]
    frame: tuple[int, int, int, int, str]
    at: int = -1

    def to_frame(self, key: int) -> Frame:
        return Frame(FrameKind.MESSAGE, _NETWORK, key=key, about=json.dumps(asdict(self)).encode())

    @property
    def transfers(self) -> int:
        """How far JAX counts: a backend that has transfers of its own counts arrays, the one over sockets calls."""
        return sum(len(types) for *_, types in self.calls) if _by_backend() else len(self.calls)


def carrier_between(devices: Sequence[Any]) -> str:
    """What carries values between these devices of several processes: `put`, if they are of one JAX runtime and its
    backend sends from device to device, or the run asks for it; else `links`."""
    cluster = current()
    asked = "" if cluster is None else cluster.config.carrier
    if asked == LINKS or any(isinstance(d, RemoteDevice) for d in devices) or len(runtimes_of(devices)) > 1:
        return LINKS
    return PUT if asked == PUT or _by_backend() else LINKS


@lru_cache(maxsize=1)
def _by_backend() -> bool:
    """Whether the backend sends from device to device by itself. JAX's CPUs do not."""
    return bool(getattr(jax.devices()[0].client, "supports_cross_host_transfers", False))


class Puts:
    """The transfers of this process's JAX runtime. One per process: `open_puts` makes it.

    Attributes:
      made: transfers that were made here, as JAX counts them.
    """

    def __init__(self) -> None:
        self.made = 0
        self._cluster: Cluster | None = None
        self._epoch = -1
        self._given = 0
        """Transfers that tickets were given for, in the first process of the runtime."""
        self._lock = threading.Lock()
        self._numbers = count()
        self._held: dict[int, Sequence[Outgoing]] = {}
        """What this process sends and has no ticket for."""
        self._tickets: SimpleQueue[Ticket] = SimpleQueue()
        self._devices = {d.id: d for d in jax.devices()}
        threading.Thread(target=self._issue_all, name="shardc puts", daemon=True).start()

    def attend(self, cluster: Cluster) -> None:
        """Take tickets from the links of this epoch. All processes of the runtime call this."""
        with self._lock:
            if self._epoch == cluster.epoch:
                return
            self._cluster, self._epoch = cluster, cluster.epoch
            self._held.clear()
        for p in cluster.config.island(cluster.me):
            if p != cluster.me:
                cluster.link(p).add(_NETWORK, self)

    def send(self, peer: int, frame: Frame) -> None:
        """Send a part of a message, whose buffers are `Outgoing`, to another process of the runtime. Waits for nothing;
        the arrays stay as they are until they are sent."""
        cluster = self._cluster
        assert cluster is not None
        outgoing: list[Any] = list(frame.buffers)
        pairs = groupby(outgoing, lambda o: (_device_of(o.array).id, o.device.id))
        calls = [(a, b, [(o.array.shape, o.array.dtype.name) for o in each]) for (a, b), each in pairs]
        to = frame.network, frame.run, frame.channel, frame.key, frame.about.decode()
        with self._lock:
            number = next(self._numbers)
            self._held[number] = outgoing
        ticket, first = Ticket(cluster.me, peer, number, calls, to), cluster.config.island(cluster.me)[0]
        if cluster.me == first:
            self._give(ticket)
        else:
            cluster.link(first).send(ticket.to_frame(_REQUEST))

    def _give(self, ticket: Ticket) -> None:
        """Give a ticket to all processes of the runtime. In the first one."""
        cluster = self._cluster
        assert cluster is not None
        with self._lock:  # one order on all links
            given = replace(ticket, at=self._given)
            self._given += ticket.transfers
            for p in cluster.config.island(cluster.me)[1:]:
                cluster.link(p).send(given.to_frame(0))
            self._tickets.put(given)

    def receive(self, peer: int, frame: Frame) -> None:
        """Take a ticket, or a request for one. Runs in the reader thread of the link."""
        ticket = Ticket(**json.loads(frame.about))
        if frame.key == _REQUEST:
            self._give(ticket)
        else:
            self._tickets.put(ticket)

    def lose(self, error: PeerLostError) -> None:
        """Handle the loss of a process: the networks whose values these are do."""

    def _issue_all(self) -> None:
        with jax.enable_x64(True):  # arrays have the dtypes that the ticket says
            while True:
                ticket = self._tickets.get()
                try:
                    self._issue(ticket)
                except Exception as error:  # noqa: BLE001 - the thread must survive, and the run must not
                    self._fail(ticket, error)

    def _issue(self, ticket: Ticket) -> None:
        """Make the calls of a ticket, and hand what has come to its network."""
        cluster = self._cluster
        assert cluster is not None
        if self.made != ticket.at:
            raise ClusterError(
                f"JAX has made {self.made} transfers in this process, and {ticket.at} come before this one. It would "
                "be taken for another. Start the processes of this JAX runtime again."
            )
        self.made += ticket.transfers
        with self._lock:
            own = iter(self._held.pop(ticket.number) if ticket.giver == cluster.me else ())
        came: list[Any] = []
        for source, target, types in ticket.calls:
            device, given = self._devices[source], ticket.giver == cluster.me
            arrays = [next(own).array if given else _absent(device, tuple(shape), t) for shape, t in types]
            put = _put_onto(self._devices[target], len(arrays))(arrays)
            came += put if ticket.taker == cluster.me else ()
        if ticket.taker == cluster.me:
            network, run, channel, key, about = ticket.frame
            message = Frame(FrameKind.MESSAGE, network, run, channel, key, about.encode(), came)
            cluster.link(ticket.giver).deliver(message)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """Stop the run of a part that cannot be put, where it is given or taken."""
        cluster = self._cluster
        assert cluster is not None
        text = f"a value could not be put from process {ticket.giver} to process {ticket.taker}: {error}"
        _log.error("%s", text)
        if cluster.me in (ticket.giver, ticket.taker):
            other = ticket.taker if cluster.me == ticket.giver else ticket.giver
            about = json.dumps({"text": f"process {cluster.me}: {text}", "process": cluster.me}).encode()
            cluster.link(other).deliver(Frame(FrameKind.STOP, *ticket.frame[:2], about=about))


def _device_of(x: jax.Array) -> Any:
    (device,) = x.sharding.device_set
    return device


@lru_cache(maxsize=4096)
def _put_onto(device: Any, arrays: int) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """`jax.device_put` of so many arrays of one device onto another one."""
    return compat.copies_to([SingleDeviceSharding(device)] * arrays)


@lru_cache(maxsize=4096)
def _absent(device: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """An array on a device of another process: there is no piece of it here."""
    return jax.make_array_from_single_device_arrays(
        shape, SingleDeviceSharding(device), [], dtype=jax.numpy.dtype(dtype)
    )


_puts: list[Puts] = []


def open_puts(cluster: Cluster) -> Puts:
    """The transfers of this process's JAX runtime, over the links of this epoch."""
    if not _puts:
        _puts.append(Puts())
    _puts[0].attend(cluster)
    return _puts[0]
