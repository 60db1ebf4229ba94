"""A link: the connection of two processes of a run, over which messages, credits and letters go in frames.

    any thread --frame--> [socket, at once if it takes it; else the writer thread] --> reader thread of the other end

A frame that the socket takes at once costs no change of threads. A frame whose buffers are still being computed waits
in a thread of its own kind, so that credits and signs of life overtake it. Each end says every second that it is alive.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Final, Protocol, TypeAlias

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.store import BEAT
from shardc.runtime.wire import read, read_into

Allocate: TypeAlias = Callable[[int], memoryview]
"""Gives a fresh buffer of so many bytes. It is never used again by the link, so its taker may keep it."""

Packed: TypeAlias = tuple[bytes, Sequence[memoryview]]
"""A description of a value, and the buffers that hold it."""

MESSAGE: Final = 0
CREDIT: Final = 1
STOP: Final = 2
OPEN: Final = 3
LETTER: Final = 4
ALIVE: Final = 5
LEAVE: Final = 6

_HEAD: Final = struct.Struct("<BxHIQqqq")
"""Kind, number of buffers, bytes of the description, network, run, channel, key."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What goes over a link at once.

    Attributes:
      kind: MESSAGE, CREDIT, ...
      network: number of the network that it belongs to.
      run: of that network.
      channel, key: of a message; of a credit its channel.
      about, buffers: the value.
    """

    kind: int
    network: int = 0
    run: int = 0
    channel: int = 0
    key: int = 0
    about: bytes = b""
    buffers: Sequence[memoryview] = ()

    def pieces(self) -> list[memoryview]:
        head = _HEAD.pack(
            self.kind, len(self.buffers), len(self.about), self.network, self.run, self.channel, self.key
        ) + struct.pack(f"<{len(self.buffers)}Q", *(b.nbytes for b in self.buffers))
        return [memoryview(head + self.about), *(b for b in self.buffers if b.nbytes)]


class Receiver(Protocol):
    """A network that takes the frames of its number."""

    def receive(self, peer: int, frame: Frame) -> None: ...
    def lose(self, error: PeerLostError) -> None:
        """Take notice that a peer is lost."""
        ...


class Link:
    """One end of the connection of two processes.

    Args:
      sock: a connection whose other end is known (`wire`).
      me, peer: numbers of the processes.
      silence: seconds without a sign of life after which the peer counts as lost.
      allocate: gives the buffers that values are received into.
    """

    def __init__(self, sock: socket.socket, me: int, peer: int, silence: float, allocate: Allocate) -> None:
        self.me, self.peer, self.silence = me, peer, silence
        self.lost: PeerLostError | None = None
        self.status = ""
        """The text of the peer's last sign of life."""
        self.say_status: Callable[[], str] = str
        self.sent = 0
        """Bytes of values sent."""
        self.control = 0
        """All other bytes sent."""
        self._allocate = allocate
        self._changed = threading.Condition()
        self._unsent: deque[memoryview] = deque()
        self._receivers: dict[int, Receiver] = {}
        self._letters: dict[str, deque[Packed]] = {}
        self._to_pack: SimpleQueue[Callable[[], Frame] | None] | None = None
        self._left = False
        self._closed = False
        self._in = sock
        self._in.settimeout(silence)
        self._out = sock.dup()
        self._out.setblocking(False)
        for body, name in ((self._read, "reads"), (self._write, "writes")):
            threading.Thread(target=body, name=f"shardc link {me}-{peer} {name}", daemon=True).start()

    # -- sending

    def send(self, frame: Frame) -> None:
        """Send a frame. Never waits for the peer. Nothing is sent to a lost peer."""
        pieces = frame.pieces()
        values = sum(b.nbytes for b in frame.buffers)
        with self._changed:
            if self.lost is not None or self._closed:
                return
            self.sent += values
            self.control += sum(p.nbytes for p in pieces) - values
            if not self._unsent:
                try:
                    pieces = _send_some(self._out, pieces)
                except OSError as error:
                    self._lose(f"{error}")
                    return
            if pieces:
                self._unsent.extend(pieces)
                self._changed.notify_all()

    def send_when_packed(self, make: Callable[[], Frame]) -> None:
        """Send a frame that takes a while to make: the maker waits for a device. Its error is sent in its place."""
        with self._changed:
            if self._to_pack is None:
                self._to_pack = SimpleQueue()
                name = f"shardc link {self.me}-{self.peer} packs"
                threading.Thread(target=self._pack, args=(self._to_pack,), name=name, daemon=True).start()
        self._to_pack.put(make)

    def _pack(self, queue: SimpleQueue[Callable[[], Frame] | None]) -> None:
        while (make := queue.get()) is not None:
            self.send(make())
            del make

    def _write(self) -> None:
        """Sends what the socket did not take at once, and signs of life."""
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        last = monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed, BEAT)
                if self._closed or self.lost is not None:
                    return
                waiting = bool(self._unsent)
            if not waiting:
                last = monotonic()
                self.send(Frame(ALIVE, about=self.say_status().encode()))
                continue
            ready = poll.poll(1000 * BEAT)
            with self._changed:
                try:
                    if ready:
                        self._unsent = deque(_send_some(self._out, list(self._unsent)))
                        last = monotonic()
                    elif monotonic() - last > self.silence:
                        raise TimeoutError(f"it took nothing for {self.silence:g} s")
                except OSError as error:
                    self._lose(f"{error}")
                    return

    # -- receiving

    def _read(self) -> None:
        try:
            while True:
                self._take(self._read_frame())
        except TimeoutError:
            self._lose(f"it gave no sign of life for {self.silence:g} s")
        except OSError as error:
            self._lose("it has left the run" if self._left else f"{error}")

    def _read_frame(self) -> Frame:
        kind, count, about, network, run, channel, key = _HEAD.unpack(read(self._in, _HEAD.size))
        sizes = struct.unpack(f"<{count}Q", read(self._in, 8 * count)) if count else ()
        said = read(self._in, about) if about else b""
        buffers: list[memoryview] = []
        for size in sizes:
            buffer = self._allocate(size)
            read_into(self._in, buffer)
            buffers.append(buffer)
        return Frame(kind, network, run, channel, key, said, buffers)

    def _take(self, frame: Frame) -> None:
        if frame.kind == ALIVE:
            self.status = frame.about.decode()
        elif frame.kind == LEAVE:
            self._left = True
        elif frame.kind == LETTER:
            tag, about = json.loads(frame.about)
            with self._changed:
                self._letters.setdefault(tag, deque()).append((about.encode(), frame.buffers))
                self._changed.notify_all()
        else:
            with self._changed:
                receiver = self._receivers.get(frame.network)
            if receiver is not None:  # else it is late: its network is closed
                receiver.receive(self.peer, frame)

    def _lose(self, why: str) -> None:
        with self._changed:
            if self.lost is not None or self._closed:
                return
            self.lost = PeerLostError(f"process {self.peer} is lost: {why}.", self.peer)
            self._unsent.clear()
            receivers = list(self._receivers.values())
            self._changed.notify_all()
        for receiver in receivers:
            receiver.lose(self.lost)

    # -- networks

    def add(self, network: int, receiver: Receiver) -> None:
        """From now on frames of this network go to `receiver`."""
        with self._changed:
            self._receivers[network] = receiver
            lost = self.lost
        if lost is not None:
            receiver.lose(lost)

    def remove(self, network: int) -> None:
        with self._changed:
            self._receivers.pop(network, None)

    # -- letters: values by name, outside of networks

    def post(self, tag: str, packed: Packed = (b"", ())) -> None:
        """Send a letter. Letters of one name arrive in their order."""
        about, buffers = packed
        self.send(Frame(LETTER, about=json.dumps([tag, about.decode()]).encode(), buffers=buffers))

    def collect(self, tag: str, seconds: float) -> Packed:
        """Wait for a letter.

        Raises:
          PeerLostError: the peer is lost.
          ClusterError: it did not come in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._letters.get(tag) or self.lost is not None or self._closed, seconds)
            letters = self._letters.get(tag)
            if letters:
                found = letters.popleft()
                if not letters:
                    del self._letters[tag]
                return found
            if self.lost is not None:
                raise PeerLostError(str(self.lost), self.peer)
            if self._closed:
                raise ClusterError(f"the link of process {self.me} to process {self.peer} is closed.")
        raise ClusterError(f"process {self.me} waited {seconds:g} s for process {self.peer}, {tag}.")

    def close(self) -> None:
        """Say goodbye and end the threads. What was sent before arrives."""
        self.send(Frame(LEAVE))
        with self._changed:
            until = monotonic() + 1.0
            while self._unsent and self.lost is None and monotonic() < until:
                self._changed.wait(0.02)
            self._closed = True
            self._changed.notify_all()
        if self._to_pack is not None:
            self._to_pack.put(None)
        for sock in (self._in, self._out):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _send_some(sock: socket.socket, pieces: list[memoryview]) -> list[memoryview]:
    """Send as much as the socket takes at once. Returns the rest."""
    while pieces:
        try:
            sent = sock.sendmsg(pieces[:64])
        except BlockingIOError:
            return pieces
        while sent and sent >= pieces[0].nbytes:
            sent -= pieces.pop(0).nbytes
        if sent:
            pieces[0] = pieces[0].cast("B")[sent:]
    return pieces


__all__ = ["ALIVE", "CREDIT", "LETTER", "MESSAGE", "OPEN", "STOP", "Allocate", "Frame", "Link", "Packed", "Receiver"]
