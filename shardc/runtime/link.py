"""A link: the connection of two processes of a run, over which messages, credits and letters go in frames.

    any thread --frame--> [socket, at once if it takes it; else the writer thread] --> reader thread of the other end

A frame that the socket takes at once costs one system call and no change of threads; a small one costs one at the
other end too, where the reader thread hands it on. A frame whose buffers are still being computed waits in a thread of
its own kind, so that credits and signs of life overtake it. Each end says every second that it is alive.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Final, NamedTuple, Protocol, TypeAlias

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.store import BEAT

Allocate: TypeAlias = Callable[[int], memoryview]
"""Gives a fresh buffer of so many bytes. It is never used again by the link, so its taker may keep it."""

Packed: TypeAlias = tuple[bytes, Sequence[memoryview]]
"""A description of a value, and the buffers that hold it."""


class FrameKind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 0
    CREDIT = 1
    STOP = 2
    OPEN = 3
    VALUE = 4
    LETTER = 5
    ALIVE = 6
    LEAVE = 7
    CLOCK = 8


_KINDS: Final = tuple(FrameKind)
_HEAD: Final = struct.Struct("<BxHIQqqq")
"""Kind, number of buffers, bytes of the description, network, run, channel, key."""
_AHEAD: Final = 1 << 13
"""Bytes that the reader thread asks for at once, where it does not know yet how many come."""
_FAREWELL: Final = 1.0
"""Seconds that `Link.close` waits for the peer to read the goodbye."""


class Frame(NamedTuple):
    """What goes over a link at once.

    Attributes:
      network: number of the network that it belongs to.
      run: of that network.
      channel, key: of a message; of a credit its channel.
      about, buffers: the value.
    """

    kind: FrameKind
    network: int = 0
    run: int = 0
    channel: int = 0
    key: int = 0
    about: bytes = b""
    buffers: Sequence[memoryview] = ()

    def pieces(self) -> list[memoryview]:
        kind, network, run, channel, key, about, buffers = self
        head = _HEAD.pack(kind, len(buffers), len(about), network, run, channel, key) + about
        if not buffers:
            return [memoryview(head)]
        sizes = struct.pack(f"<{len(buffers)}Q", *(b.nbytes for b in buffers))
        return [memoryview(head + sizes), *(b for b in buffers if b.nbytes)]


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
        self.left = False
        """Whether the peer has said that it ends. All that it sent before has come."""
        self.sent = 0
        """Bytes of values sent."""
        self.control = 0
        """All other bytes sent."""
        self._sock = sock
        self._beat = min(BEAT, silence / 4)
        self._stream = _Stream(sock, silence, self._beat)
        self._allocate = allocate
        self._changed = threading.RLock()
        """Guards what is received: letters, receivers, and the loss of the peer. A thread that holds it may collect
        garbage at any line, and so run the finalizer of a network, which removes the network."""
        self._receivers: dict[int, Receiver] = {}
        self._early: dict[int, list[Frame]] = {}
        """Frames of networks that this process has not opened yet."""
        self._over: set[int] = set()
        """Networks that this process has closed. A number never comes again."""
        self._letters: dict[str, _Letterbox] = {}
        self._clocks = count()
        self._sending = threading.Condition()
        """Guards what is sent. Taken last: who holds it takes no other lock."""
        self._unsent: deque[memoryview] = deque()
        self._closed = False
        self._leaving = False
        self._to_pack: SimpleQueue[Callable[[], Frame] | None] | None = None
        self._reader, self._writer = (
            threading.Thread(target=body, name=f"shardc link {me}-{peer} {name}", daemon=True)
            for body, name in ((self._read, "reads"), (self._write, "writes"))
        )
        self._packer = threading.Thread()
        self._reader.start()
        self._writer.start()

    # -- sending

    def send(self, frame: Frame) -> None:
        """Send a frame. Never waits for the peer. Nothing is sent to a lost peer."""
        pieces = frame.pieces()
        values = sum(b.nbytes for b in frame.buffers)
        with self._sending:
            if self.lost is not None or self._closed:
                return
            self.sent += values
            self.control += sum(p.nbytes for p in pieces) - values
            if self._unsent:  # the writer is at work
                self._unsent.extend(pieces)
                return
            try:
                rest = _send_some(self._sock, pieces, socket.MSG_DONTWAIT)
            except OSError as error:
                why = error.strerror or str(error)
            else:
                if rest:
                    self._unsent.extend(rest)
                    self._sending.notify_all()
                return
        self._lose(why)

    def send_when_packed(self, make: Callable[[], Frame]) -> None:
        """Send a frame that takes a while to make: `make` waits for a device, and makes a frame of its errors too."""
        with self._sending:
            if self._leaving:
                return
            if self._to_pack is None:
                self._to_pack = SimpleQueue()
                name = f"shardc link {self.me}-{self.peer} packs"
                self._packer = threading.Thread(target=self._pack, args=(self._to_pack,), name=name, daemon=True)
                self._packer.start()
            self._to_pack.put(make)

    def _pack(self, queue: SimpleQueue[Callable[[], Frame] | None]) -> None:
        while (make := queue.get()) is not None:
            if self.lost is None:
                try:
                    self.send(make())
                except Exception as error:  # noqa: BLE001 - without this frame the peer would wait for ever
                    self._lose(f"a value for it cannot be sent: {type(error).__name__}: {error}")
            del make

    def _write(self) -> None:
        """Sends what the socket did not take at once, and signs of life. Blocks in the socket without the lock: while
        something is unsent, nobody else writes."""
        while True:
            with self._sending:
                due = self._sending.wait_for(lambda: self._unsent or self._closed or self.lost is not None, self._beat)
                if self._closed or self.lost is not None:
                    return
                pieces = list(self._unsent)
            if not due:
                self.send(Frame(FrameKind.ALIVE))
                continue
            number = len(pieces)
            try:
                _send_some(self._sock, pieces)
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            with self._sending:
                for _ in range(min(number, len(self._unsent))):  # fewer if the peer was lost meanwhile
                    self._unsent.popleft()
                self._sending.notify_all()

    # -- receiving

    def _read(self) -> None:
        try:
            while True:
                self._take(self._read_frame())
        except TimeoutError:
            self._lose(f"it gave no sign of life for {self.silence:g} s")
        except OSError as error:
            self._lose("it has left the run" if self.left else error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - whoever waits for this thread has to know
            self._lose(f"what it sent cannot be read: {type(error).__name__}: {error}")

    def _read_frame(self) -> Frame:
        stream = self._stream
        kind, number, about, network, run, channel, key = _HEAD.unpack(stream.take(_HEAD.size))
        known = _KINDS[kind]  # first of all: what is no frame has no size either
        if not number and not about:
            return Frame(known, network, run, channel, key)
        said = bytes(stream.take(about))
        sizes = struct.unpack(f"<{number}Q", stream.take(8 * number))
        buffers = [self._allocate(size) for size in sizes]
        for buffer in buffers:
            stream.fill(buffer)
        return Frame(known, network, run, channel, key, said, buffers)

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.ALIVE:
                pass
            case FrameKind.LEAVE:
                self.left = True
            case FrameKind.CLOCK:
                self.post(f"clock {frame.key}", (repr(perf_counter()).encode(), ()))
            case FrameKind.LETTER:
                tag, _, about = frame.about.partition(b"\0")
                with self._changed:
                    self._box(tag.decode()).letters.put((about, frame.buffers))  # in the lock: empty boxes are dropped
            case _:
                with self._changed:
                    receiver = self._receivers.get(frame.network)
                    if receiver is None:
                        if frame.network not in self._over:
                            self._early.setdefault(frame.network, []).append(frame)
                        return
                receiver.receive(self.peer, frame)

    def _lose(self, why: str) -> None:
        with self._changed:
            if self.lost is not None or self._closed:
                return
            self.lost = PeerLostError(f"process {self.peer} is lost: {why}.", self.peer)
            receivers = list(self._receivers.values())
            self._wake_collectors()
        with self._sending:
            self._unsent.clear()
            self._sending.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the other thread, and tells a peer that was only silent
        for receiver in receivers:
            receiver.lose(self.lost)

    def _wake_collectors(self) -> None:
        for box in self._letters.values():
            for _ in range(box.waiting):
                box.letters.put(None)

    # -- networks

    def add(self, network: int, receiver: Receiver) -> None:
        """From now on frames of this network go to `receiver`, first those that came early."""
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
        """Drop what still comes for this network. Its number may not be used again."""
        with self._changed:
            self._receivers.pop(network, None)
            self._early.pop(network, None)
            self._over.add(network)

    # -- letters: values by name, outside of networks

    def post(self, tag: str, packed: Packed = (b"", ())) -> None:
        """Send a letter. Letters of one name arrive in their order."""
        about, buffers = packed
        self.send(Frame(FrameKind.LETTER, about=tag.encode() + b"\0" + about, buffers=buffers))

    def _box(self, tag: str) -> _Letterbox:
        box = self._letters.get(tag)
        if box is None:
            box = self._letters[tag] = _Letterbox()
        return box

    def collect(self, tag: str, seconds: float) -> Packed:
        """Wait for a letter.

        Raises:
          PeerLostError: the peer is lost.
          ClusterError: it did not come in time.
        """
        with self._changed:
            box = self._box(tag)
            box.waiting += 1
            ended = self.lost is not None or self._closed
        try:
            found = box.letters.get(not ended, None if seconds == math.inf else max(0.0, seconds))
        except Empty:
            found = None
        with self._changed:
            box.waiting -= 1
            if not box.waiting and box.letters.empty():
                self._letters.pop(tag, None)
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

    def _clock(self) -> tuple[float, float]:
        """Seconds of a round trip, and how far the peer's clock is ahead of the middle of it."""
        number = next(self._clocks)
        begin = perf_counter()
        self.send(Frame(FrameKind.CLOCK, key=number))
        there, _ = self.collect(f"clock {number}", self.silence)
        end = perf_counter()
        return end - begin, float(there) - (begin + end) / 2

    # -- the end

    def close(self) -> None:
        """Say goodbye and end the threads. What was sent before arrives, unless the peer does not read it in `silence`
        seconds."""
        with self._sending:
            if self._leaving:
                return
            self._leaving = True
            if self._to_pack is not None:
                self._to_pack.put(None)
        self._join(self._packer, self.silence)
        self.send(Frame(FrameKind.LEAVE))
        with self._sending:
            self._sending.wait_for(lambda: not self._unsent or self.lost is not None, self.silence)
        with self._changed:
            self._closed = True
            self._wake_collectors()
            self._letters.clear()
            self._early.clear()
        with self._sending:
            self._sending.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._join(self._reader, _FAREWELL)  # it ends as soon as the peer has read the goodbye
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._reader, self._writer):
            self._join(thread, None)
        self._sock.close()

    def _join(self, thread: threading.Thread, seconds: float | None) -> None:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(seconds)


class _Letterbox:
    """The letters of one name that nobody has collected yet; None wakes a collector when nothing comes any more."""

    def __init__(self) -> None:
        self.letters: SimpleQueue[Packed | None] = SimpleQueue()
        self.waiting = 0


class _Stream:
    """The receiving end of a connection. It reads ahead, so that a small frame costs one system call.

    Args:
      silence: seconds without a byte after which it raises TimeoutError.
      look: seconds of one wait. Waits without a byte are counted, not the time: if this process was stopped itself, the
        peer is not silent.
    """

    def __init__(self, sock: socket.socket, silence: float, look: float) -> None:
        self._sock = sock
        self._waits = -int(-silence // look)
        sock.settimeout(None)
        timeout = struct.pack("@ll", int(look), int(look % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._ahead = memoryview(bytearray(_AHEAD))
        self._begin = self._end = 0

    def take(self, size: int) -> memoryview:
        """The next bytes. They are valid until the next call."""
        if size > _AHEAD:
            whole = memoryview(bytearray(size))
            self.fill(whole)
            return whole
        if self._end - self._begin < size:
            rest = bytes(self._ahead[self._begin : self._end])
            self._ahead[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
            while self._end < size:
                self._end += self._receive(self._ahead[self._end :])
        self._begin += size
        return self._ahead[self._begin - size : self._begin]

    def fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes."""
        known = min(buffer.nbytes, self._end - self._begin)
        buffer[:known] = self._ahead[self._begin : self._begin + known]
        self._begin += known
        while known < buffer.nbytes:
            known += self._receive(buffer[known:], socket.MSG_WAITALL)

    def _receive(self, buffer: memoryview, flags: int = 0) -> int:
        for _ in range(self._waits):
            try:
                got = self._sock.recv_into(buffer, 0, flags)
            except BlockingIOError:
                continue
            if not got:
                raise ConnectionResetError("the connection was closed")
            return got
        raise TimeoutError


def _send_some(sock: socket.socket, pieces: list[memoryview], flags: int = 0) -> list[memoryview]:
    """Send pieces; with MSG_DONTWAIT only as much as the socket takes at once. Returns the rest."""
    while pieces:
        try:
            sent = sock.sendmsg(pieces[:64], (), flags)
        except BlockingIOError:
            return pieces
        while pieces and sent >= pieces[0].nbytes:
            sent -= pieces.pop(0).nbytes
        if sent:
            pieces[0] = pieces[0].cast("B")[sent:]
    return pieces
