"""A connection of two processes of a run, over which frames go both ways.

    any thread --frame--> [socket, at once if it takes it; else the writer thread] --> reader thread of the other end

A frame that the socket takes at once costs one system call and no change of threads; a small one costs one system call
at the other end too, where the reader thread handles it. Each end says every second that it is alive.
"""

from __future__ import annotations

import io
import math
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

from shardc.errors import ClusterError
from shardc.runtime.transport import tls

Allocate: TypeAlias = Callable[[int], memoryview]
"""Gives a fresh buffer of so many bytes. A connection never uses it again, so its taker may keep it."""

BEAT: Final = 1.0
"""Seconds between two signs of life."""
_AHEAD: Final = 1 << 13
"""Bytes that the reader thread asks for at once, where it does not know yet how many come: so a small frame costs one
system call."""
_LONGEST: Final = 1 << 26
"""The most bytes of a description. It is allocated before it has come, whatever the other end says of its length."""
_FAREWELL: Final = 1.0
"""Seconds that `Connection.close` waits for the peer to read the goodbye."""


class FrameKind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 0
    CREDIT = 1
    STOP = 2
    OPEN = 3
    VALUE = 4
    TAGGED = 5
    ALIVE = 6
    LEAVE = 7
    CLOCK = 8
    END = 9


_KINDS: Final = tuple(FrameKind)
_HEAD: Final = struct.Struct("<BxHIQqqq")
"""Kind, number of buffers, bytes of the description, network, run, channel, key."""


class Frame(NamedTuple):
    """The unit that a connection sends.

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
        """The bytes to send, without a copy of the buffers. Only buffers are pieces so long that they may go in clear
        (`tls`)."""
        kind, network, run, channel, key, about, buffers = self
        if len(about) > _LONGEST:
            raise ClusterError(f"a text of {len(about)} bytes is too long to be sent: at most {_LONGEST}.")
        head = _HEAD.pack(kind, len(buffers), len(about), network, run, channel, key) + about
        if not buffers:
            return _short(head)
        sizes = struct.pack(f"<{len(buffers)}Q", *(b.nbytes for b in buffers))
        return [*_short(head + sizes), *(b for b in buffers if b.nbytes)]


def _short(text: bytes) -> list[memoryview]:
    if len(text) < tls.SMALL:
        return [memoryview(text)]
    return [memoryview(text)[i : i + tls.SMALL - 1] for i in range(0, len(text), tls.SMALL - 1)]


def _no_buffer(size: int) -> memoryview:
    raise ValueError(f"a value of {size} bytes, where only texts belong")


class Connection:
    """One end of a connection. A subclass says in `_take` what it does with frames, and in `_on_lost` with a loss.

    Args:
      sock: a connection whose other end is known (`wire`).
      name: of its threads.
      silence: seconds without a sign of life after which the other end counts as lost.
      patience: seconds that `close` waits for the other end to read what was sent.
      allocate: gives the buffers that values are received into; without it, values are refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        silence: float = math.inf,
        patience: float = 5.0,
        allocate: Allocate = _no_buffer,
    ) -> None:
        self.silence = silence
        self.why_lost = ""
        """Why the connection is lost; empty if it is not."""
        self.left = False
        """Whether the other end has said that it closes. All that it sent before has come."""
        self.sent = 0
        """Bytes of values sent."""
        self.control = 0
        """All other bytes sent."""
        self._sock, self._patience, self._allocate = sock, patience, allocate
        self._beat = min(BEAT, silence / 4)
        self._bytes = _Arriving(sock, silence, self._beat)
        self._arriving = io.BufferedReader(self._bytes, _AHEAD)
        self._sending = threading.Condition()
        """Guards what is sent. Taken last: who holds it takes no other lock."""
        self._unsent: deque[memoryview] = deque()
        self._leaving = self._closed = False
        self._running = 2
        self._reader, self._writer = (
            threading.Thread(target=self._run, args=(body,), name=f"{name} {what}", daemon=True)
            for body, what in ((self._read, "reads"), (self._write, "writes"))
        )

    def start(self) -> None:
        """Start the threads: from now on frames come and go."""
        self._reader.start()
        self._writer.start()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        finally:
            with self._sending:
                self._running -= 1
                if not self._running:
                    self._sock.close()

    # -- for subclasses

    def _take(self, frame: Frame) -> None:
        """Handle a frame of the other end. Runs in the reader thread; an error loses the connection."""

    def _on_lost(self) -> None:
        """Handle the loss of the connection, in any thread."""

    def _on_closed(self) -> None:
        """Handle that this end was closed, and nothing is sent any more."""

    def _sign_of_life(self) -> Frame:
        return Frame(FrameKind.ALIVE)

    # -- sending

    def send(self, frame: Frame) -> None:
        """Send a frame. Never waits for the other end. Nothing is sent if that is lost."""
        pieces = frame.pieces()
        values = sum(b.nbytes for b in frame.buffers)
        with self._sending:
            if self.why_lost or self._closed:
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

    def _write(self) -> None:
        """Sends what the socket did not take at once, and signs of life. Blocks in the socket without the lock: while
        something is unsent, nobody else writes."""
        while True:
            with self._sending:
                due = self._sending.wait_for(lambda: self._unsent or self._closed or self.why_lost, self._beat)
                if self._closed or self.why_lost:
                    return
                pieces = list(self._unsent)
            if not due:
                self.send(self._sign_of_life())
                continue
            number = len(pieces)
            try:
                if _send_some(self._sock, pieces):
                    raise TimeoutError("it reads nothing")
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            with self._sending:
                for _ in range(min(number, len(self._unsent))):  # fewer if the peer was lost meanwhile
                    self._unsent.popleft()
                self._sending.notify_all()

    # -- receiving

    def vouch(self) -> None:
        """Count the other end as alive at this time: the launcher knows that it computes and cannot say so itself."""
        self._bytes.left = self._bytes.waits

    def _read(self) -> None:
        try:
            while True:
                self._sort(self._read_frame())  # no variable: it would keep the last buffers alive
        except TimeoutError:
            self._lose(f"it gave no sign of life for {self.silence:g} s")
        except OSError as error:
            self._lose("it has left the run" if self.left else error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - whoever waits for this thread has to know
            self._lose(f"what it sent cannot be read: {type(error).__name__}: {error}")

    def _sort(self, frame: Frame) -> None:
        if frame.kind is FrameKind.LEAVE:
            self.left = True
        else:
            self._take(frame)

    def _read_frame(self) -> Frame:
        stream = self._arriving
        kind, number, about, network, run, channel, key = _HEAD.unpack(stream.read(_HEAD.size))
        known = _KINDS[kind]  # first of all: what is no frame has no size either
        if not number and not about:
            return Frame(known, network, run, channel, key)
        if about > _LONGEST:
            raise ValueError(f"a text of {about} bytes")
        said = stream.read(about)
        sizes = struct.unpack(f"<{number}Q", stream.read(8 * number))
        buffers = [self._allocate(size) for size in sizes]
        for buffer in buffers:
            stream.readinto(buffer)
        return Frame(known, network, run, channel, key, said, buffers)

    # -- the end

    def _lose(self, why: str) -> None:
        with self._sending:
            if self.why_lost or self._closed:
                return
            self.why_lost = why
            self._unsent.clear()
            self._sending.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the other thread, and a peer that was only silent sees it
        self._on_lost()

    def close(self) -> None:
        """Say goodbye and end the threads. What was sent before arrives, unless the other end does not read it in
        `patience` seconds."""
        with self._sending:
            if self._leaving:
                return
            self._leaving = True
        self._finish_sending()
        self.send(Frame(FrameKind.LEAVE))
        with self._sending:
            self._sending.wait_for(lambda: not self._unsent or self.why_lost, self._patience)
            self._closed = True
            self._sending.notify_all()
        self._on_closed()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        join(self._reader, _FAREWELL)  # it ends as soon as the peer has read the goodbye
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._reader, self._writer):
            join(thread, None)

    def _finish_sending(self) -> None:
        """Send what is not ready to be sent yet, before the connection is closed."""


def join(thread: threading.Thread, seconds: float | None) -> None:
    """Wait for the end of a thread, unless it has not begun or is this one."""
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(seconds)


class _Arriving(io.RawIOBase):
    """The bytes that arrive over a socket. An end or a long silence is an error.

    Args:
      silence: seconds without a byte after which it raises TimeoutError.
      look: seconds of one wait. Waits without a byte are counted, not the time: if this process was stopped itself, the
        peer is not silent.
    """

    def __init__(self, sock: socket.socket, silence: float, look: float) -> None:
        self._sock = sock
        self.waits = sys.maxsize if silence == math.inf else -int(-silence // look)
        self.left = self.waits
        """How many more waits without a byte are a silence."""
        sock.settimeout(None)
        timeout = struct.pack("@ll", int(look), int(look % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        flags = socket.MSG_WAITALL if len(buffer) > _AHEAD else 0
        self.left = self.waits
        while self.left > 0:
            try:
                got = self._sock.recv_into(buffer, 0, flags)
            except BlockingIOError:
                self.left -= 1
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
