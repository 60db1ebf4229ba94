"""A link: the connection of two processes of a run, over which messages, credits and tagged values go.

A frame whose buffers are still being computed waits in a thread of its own kind, so that credits and signs of life
overtake it.
"""

from __future__ import annotations

import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Protocol, TypeAlias

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.transport.connection import Allocate, Connection, Frame, FrameKind, join

Packed: TypeAlias = tuple[bytes, Sequence[memoryview]]
"""A description of a value, and the buffers that hold it."""


class Receiver(Protocol):
    """A network that takes the frames of its number."""

    def receive(self, peer: int, frame: Frame) -> None: ...
    def lose(self, error: PeerLostError) -> None:
        """Handle the loss of a peer."""
        ...


class Link(Connection):
    """One end of the link between two processes.

    Args:
      sock: a connection whose other end is known (`wire`).
      me, peer: numbers of the processes.
      silence: seconds without a sign of life after which the peer counts as lost.
      allocate: gives the buffers that values are received into.
      record: called with each frame that goes `to` the peer or comes `from` it.
    """

    def __init__(  # a connection, and who it joins
        self, sock: socket.socket, me: int, peer: int, silence: float, allocate: Allocate,
        record: Callable[[str, int, Frame], object] = lambda way, peer, frame: None,
    ) -> None:  # fmt: skip
        super().__init__(sock, f"shardc link {me}-{peer}", silence, silence, allocate)
        self.me, self.peer, self._record = me, peer, record
        self.lost: PeerLostError | None = None
        self._changed = threading.RLock()
        """Guards what is received: tagged values, receivers, and the loss of the peer. A thread that holds it may
        collect garbage at any line, and so run the finalizer of a network, which removes the network."""
        self._receivers: dict[int, Receiver] = {}
        self._early: dict[int, list[Frame]] = {}
        """Frames of networks that this process has not opened yet."""
        self._over: set[int] = set()
        """Networks that this process has closed. A number never comes again."""
        self._inboxes: dict[str, _Inbox] = {}
        self._clocks = count()
        self._to_pack: SimpleQueue[tuple[Callable[[], Frame], Hashable] | None] | None = None
        self._unpacked = Counter[Hashable]()
        self._packer = threading.Thread()
        self.start()

    def drop(self, why: str) -> None:
        """Count the peer as lost."""
        self._lose(why)

    # -- sending

    def send(self, frame: Frame) -> None:
        self._record("to", self.peer, frame)
        super().send(frame)

    def send_when_packed(self, make: Callable[[], Frame], name: Hashable = None) -> None:
        """Send a frame that is not computed yet. `make` waits for a device, in a thread of the link; if that fails,
        it returns a frame that says so. `name`: for `is_packing`."""
        with self._sending:
            if self._leaving:
                return
            if self._to_pack is None:
                self._to_pack = SimpleQueue()
                thread = f"shardc link {self.me}-{self.peer} packs"
                self._packer = threading.Thread(target=self._pack, args=(self._to_pack,), name=thread, daemon=True)
                self._packer.start()
            self._unpacked[name] += 1
            self._to_pack.put((make, name))

    def is_packing(self, name: Hashable) -> bool:
        """Whether a frame of this name has not been sent yet: one that is sent now would overtake it."""
        return name in self._unpacked

    def _pack(self, queue: SimpleQueue[tuple[Callable[[], Frame], Hashable] | None]) -> None:
        while (asked := queue.get()) is not None:
            make, name = asked
            if self.lost is None:
                try:
                    self.send(make())
                except Exception as error:  # noqa: BLE001 - without this frame the peer would wait for ever
                    self._lose(f"a value for it cannot be sent: {type(error).__name__}: {error}")
            del make, asked
            with self._sending:
                self._unpacked[name] -= 1
                if not self._unpacked[name]:
                    del self._unpacked[name]

    def _finish_sending(self) -> None:
        if self._to_pack is not None:
            self._to_pack.put(None)
        join(self._packer, self.silence)

    # -- receiving

    def _take(self, frame: Frame) -> None:
        self._record("from", self.peer, frame)
        match frame.kind:
            case FrameKind.ALIVE:
                pass
            case FrameKind.CLOCK:
                self.send_tagged(f"clock {frame.key}", (repr(perf_counter()).encode(), ()))
            case FrameKind.TAGGED:
                tag, _, about = frame.about.partition(b"\0")
                with self._changed:  # put inside: empty inboxes are dropped
                    self._inbox(tag.decode()).values.put((about, frame.buffers))
            case _:
                self.deliver(frame)

    def deliver(self, frame: Frame) -> None:
        """Pass a frame of the peer to the network of its number, whatever has carried its buffers."""
        with self._changed:
            receiver = self._receivers.get(frame.network)
            if receiver is None:
                if frame.network not in self._over:
                    self._early.setdefault(frame.network, []).append(frame)
                return
        receiver.receive(self.peer, frame)

    def _on_lost(self) -> None:
        with self._changed:
            self.lost = PeerLostError(f"process {self.peer} is lost: {self.why_lost}.", self.peer)
            receivers = list(self._receivers.values())
            self._wake_waiting()
        for receiver in receivers:
            receiver.lose(self.lost)

    def _on_closed(self) -> None:
        with self._changed:
            self._wake_waiting()
            self._inboxes.clear()
            self._early.clear()

    def _wake_waiting(self) -> None:
        for box in self._inboxes.values():
            for _ in range(box.waiting):
                box.values.put(None)

    # -- networks

    def add(self, network: int, receiver: Receiver) -> None:
        """Pass all frames of this network to `receiver`, first those that came early."""
        while True:
            with self._changed:
                early = self._early.pop(network, None)
                if early is None:
                    self._receivers[network] = receiver
                    lost = self.lost
                    break
            for frame in early:
                receiver.receive(self.peer, frame)
        if lost is not None:
            receiver.lose(lost)

    def remove(self, network: int) -> None:
        """Drop all further frames of this network. Its number may not be used again."""
        with self._changed:
            self._receivers.pop(network, None)
            self._early.pop(network, None)
            self._over.add(network)

    # -- values by tag, outside of networks

    def send_tagged(self, tag: str, packed: Packed = (b"", ())) -> None:
        """Send a value under a tag. Values of one tag arrive in their order."""
        about, buffers = packed
        self.send(Frame(FrameKind.TAGGED, about=tag.encode() + b"\0" + about, buffers=buffers))

    def _inbox(self, tag: str) -> _Inbox:
        box = self._inboxes.get(tag)
        if box is None:
            box = self._inboxes[tag] = _Inbox()
        return box

    def receive_tagged(self, tag: str, seconds: float) -> Packed:
        """Wait for the next value that the peer sends under a tag.

        Raises:
          PeerLostError: the peer is lost.
          ClusterError: it did not come in time.
        """
        with self._changed:
            box = self._inbox(tag)
            box.waiting += 1
            ended = self.lost is not None or self._closed
        try:
            found = box.values.get(not ended, None if seconds == math.inf else max(0.0, seconds))
        except Empty:
            found = None
        with self._changed:
            box.waiting -= 1
            if not box.waiting and box.values.empty():
                self._inboxes.pop(tag, None)
        if found is not None:
            return found
        if self.lost is not None:
            raise PeerLostError(f"{self.lost} Process {self.me} waited for its {tag}.", self.peer)
        if self._closed:
            raise ClusterError(f"process {self.me} waited for process {self.peer}, {tag}, and closed the link.")
        raise ClusterError(f"process {self.me} waited {seconds:g} s for process {self.peer}, {tag}.")

    def clock_offset(self, rounds: int = 9) -> float:
        """Seconds that the peer's `perf_counter` is ahead of that of this process.

        Measured in the quickest of some round trips, so exact to half of it; 0 if that is within this error, as on one
        host, whose processes share the clock.

        Raises:
          PeerLostError: the peer is lost.
        """
        took, ahead = min(self._clock() for _ in range(rounds))
        return 0.0 if abs(ahead) <= took / 2 else ahead

    def speed(self) -> tuple[float, float]:
        """Bytes a second to the peer, and seconds until the first one arrives: of the quickest of some round trips of 1
        MiB, and of nothing, which on a busy host may take as long: at most half of a trip counts as the way alone. The
        peer's script takes no part.

        Raises:
          PeerLostError: the peer is lost.
        """
        data = memoryview(bytearray(1 << 20))
        nothing, whole = (min(self._clock(buffers)[0] for _ in range(5)) for buffers in ((), (data,)))
        return data.nbytes / max(whole - nothing, whole / 2), nothing / 2

    def _clock(self, buffers: Sequence[memoryview] = ()) -> tuple[float, float]:
        """Seconds of a round trip, and how far the peer's clock is ahead of the middle of it."""
        number = next(self._clocks)
        begin = perf_counter()
        self.send(Frame(FrameKind.CLOCK, key=number, buffers=buffers))
        there, _ = self.receive_tagged(f"clock {number}", self.silence)
        end = perf_counter()
        return end - begin, float(there) - (begin + end) / 2


class _Inbox:
    """The values of one tag that nobody has received yet; None wakes a waiting thread when nothing more comes."""

    def __init__(self) -> None:
        self.values: SimpleQueue[Packed | None] = SimpleQueue()
        self.waiting = 0
