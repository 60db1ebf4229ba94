"""The store of a run: a table of texts that any process sets and each may ask for, and the signs of life.

The server lives in the launcher, or in process 0 if something else started the processes. It is used at the start of a
run, after a loss and at its end; no step of a running program waits for it. A process says every second that it is
alive.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, TypeAlias

from shardc.errors import ClusterError
from shardc.runtime.transport.connection import BEAT, Connection, Frame, FrameKind
from shardc.runtime.transport.wire import Hello, Listener, dial, listen

_log: Final = logging.getLogger("shardc")

Event: TypeAlias = Mapping[str, Any]
"""A notification of the server to processes: `{"event": "lost", "process": 1, "why": "..."}`."""

_PATIENCE: Final = 5
"""Seconds that the server waits for a client whose buffers are full, before it drops it."""


def _frame(data: Mapping[str, Any]) -> Frame:
    return Frame(FrameKind.MESSAGE, about=json.dumps(data).encode())


def _text_event(key: str, text: str | None) -> Event:
    return {"event": "text", "key": key, "text": text}


class _ServedProcess(Connection):
    """The server's end of the connection of a process.

    Args:
      process: its number; -1 - i for what starts process i on another host.
    """

    def __init__(self, server: StoreServer, sock: socket.socket, process: int) -> None:
        super().__init__(sock, f"shardc store of {process}")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _PATIENCE, 0))
        self.server, self.process = server, process
        self.seen = self.said = monotonic()
        """When the last frame came, and the last sign of life."""
        self.status = ""

    def _take(self, frame: Frame) -> None:
        self.seen = monotonic()
        if frame.kind is FrameKind.ALIVE:
            self.status, self.said = frame.about.decode(), self.seen
        else:
            self.server.answer(self, json.loads(frame.about))

    def _on_lost(self) -> None:
        self.server.lose(self)

    def notify(self, data: Mapping[str, Any]) -> None:
        self.send(_frame(data))

    def drop(self) -> None:
        """End the connection at once."""
        self._lose("it was dropped")


class StoreServer:
    """The server of a store.

    Args:
      address: where it listens; `wire.listen` says how an address is written.
      secret: of the run.
      on_end: called with the number of a process whose connection ends.
      on_report: called with the number of a process and what it reports, before the process gets its answer.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        on_end: Callable[[int], None] | None = None,
        on_report: Callable[[int, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._texts: dict[str, str | None] = {}
        self._asked: dict[str, set[int]] = {}
        """The processes that have asked for a text, by its key."""
        self._clients: dict[int, _ServedProcess] = {}
        self._lock = threading.RLock()
        self._greeting: Event | None = None
        self._on_end, self._on_report = on_end, on_report
        self._looked = monotonic()
        self._listener = Listener(listen(address), secret, self._serve)

    @property
    def address(self) -> str:
        return self._listener.address

    def _serve(self, sock: socket.socket, hello: Hello) -> None:
        known = self._clients.get(hello.process)
        if known is not None and monotonic() - known.seen > 3 * BEAT:
            known.drop()  # the network broke, and its process has noticed that first
        with self._lock:
            if hello.process in self._clients:
                _log.warning("%s: dropped a second connection of process %d", self.address, hello.process)
                sock.close()
                return
            client = self._clients[hello.process] = _ServedProcess(self, sock, hello.process)
            if client.process >= 0 and self._greeting is not None:
                client.notify(self._greeting)
            client.start()

    def lose(self, client: _ServedProcess) -> None:
        """Handle the end of a client's connection."""
        with self._lock:
            known = self._clients.get(client.process) is client
            if known:
                del self._clients[client.process]
        if known and self._on_end is not None:
            self._on_end(client.process)

    def answer(self, client: _ServedProcess, said: Mapping[str, Any]) -> None:
        """Handle a request of a client. Runs in the thread that reads from it."""
        if "key" in said:
            self.set(said["key"], said["text"])
            return
        if "ask" in said:
            with self._lock:
                self._asked.setdefault(said["ask"], set()).add(client.process)
                client.notify(_text_event(said["ask"], self._texts.get(said["ask"])))
            return
        if self._on_report is not None:
            self._on_report(client.process, said["data"])
        client.notify({"number": said["number"]})

    def set(self, key: str, text: str | None) -> None:
        """Set a text, and send it to the processes that have asked for it. None: it is not set any more."""
        with self._lock:
            self._texts[key] = text
            for process in self._asked.get(key, ()):
                self.notify(process, _text_event(key, text))

    def text(self, key: str) -> str | None:
        """The text of a key, if it is set."""
        with self._lock:
            return self._texts.get(key)

    def notify(self, process: int, event: Event) -> bool:
        """Notify one process of an event. Returns whether it is connected."""
        with self._lock:
            client = self._clients.get(process)
        if client is not None:
            client.notify(event)
        return client is not None

    def notify_all(self, event: Event, newcomers: bool = False) -> None:
        """Notify all connected processes of an event; with `newcomers` also each that connects later, first of all."""
        with self._lock:
            if newcomers:
                self._greeting = event
            for client in list(self._clients.values()):
                if client.process >= 0:
                    client.notify(event)

    def silent(self, seconds: float) -> list[int]:
        """The processes without a sign of life for `seconds`. To be called about every second: if the caller itself was
        paused, that time does not count."""
        now = monotonic()
        paused, self._looked = now - self._looked > 3 * BEAT, now
        with self._lock:
            clients = list(self._clients.values())
        if paused:
            for client in clients:
                client.seen = now
        return sorted(c.process for c in clients if now - c.seen > seconds)

    def drop(self, process: int) -> None:
        """End the connection of a process, if it is connected, and report its end to `on_end`."""
        with self._lock:
            client = self._clients.get(process)
        if client is not None:
            client.drop()

    def status(self, process: int, seconds: float) -> str:
        """The status text of a process, unless it has been silent for `seconds`."""
        with self._lock:
            client = self._clients.get(process)
        return client.status if client is not None and monotonic() - client.seen < seconds else ""

    def statuses(self) -> dict[int, str]:
        """The last status text of each connected process."""
        with self._lock:
            return {c.process: c.status for c in self._clients.values()}

    def ages(self) -> dict[int, float]:
        """How many seconds ago the last status text of each connected process came."""
        with self._lock:
            return {c.process: monotonic() - c.said for c in self._clients.values()}

    def heard(self) -> tuple[float, dict[int, str]]:
        """The last time, of `monotonic`, of which all connected processes have given a sign of life, and their status
        texts."""
        with self._lock:
            clients = [c for c in self._clients.values() if c.process >= 0]
            return min((c.said for c in clients), default=monotonic()), {c.process: c.status for c in clients}

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.drop()


class Store(Connection):
    """The connection of a process to the store.

    Args:
      on_event: called, in a thread of the store, with each notification of the server: `{"event": "text"}` when a text
        comes that was asked for, `{"event": "gone"}` if the server ends.
      silence: seconds for which the server's host may leave signs of life unacknowledged; None: as long as TCP tries. A
        server that is only stopped is not silent.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        process: int,
        on_event: Callable[[Event], None],
        seconds: float = 60.0,
        silence: float | None = None,
    ) -> None:
        self.address = address
        self.status: Callable[[], str] = str
        """Gives the text that is sent with each sign of life."""
        self.texts: dict[str, str | None] = {}
        """The answers to what was asked for, by key; None: it is not set yet."""
        self._asked: set[str] = set()
        self._acknowledged: dict[int, SimpleQueue[bool]] = {}
        """For each unanswered report, by its number, the queue that its caller waits at. False: the server is gone."""
        self._reports = count()
        self._gone = False
        self._on_event = on_event
        super().__init__(dial(address, secret, Hello(process), seconds), "shardc store")
        if silence is not None and self._sock.family != socket.AF_UNIX:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
        self.start()

    @property
    def host(self) -> str:
        """The address from which this host connects to the server; empty for a UNIX socket."""
        name = self._sock.getsockname()
        if self._sock.family == socket.AF_UNIX:
            return ""
        return f"[{name[0]}]" if self._sock.family == socket.AF_INET6 else name[0]

    def set(self, key: str, text: str) -> None:
        """Set the text of a key.

        Raises:
          ClusterError: the server is gone.
        """
        self._say({"key": key, "text": text})

    def ask(self, key: str) -> None:
        """Ask for the text of a key, if this is the first time. It comes into `texts`, now or when it is set.

        Raises:
          ClusterError: the server is gone.
        """
        if key not in self._asked:
            self._asked.add(key)
            self._say({"ask": key})

    def report(self, data: Mapping[str, Any], seconds: float = 60.0) -> bool:
        """Send `data` to the launcher and wait for its acknowledgement. False: none came in `seconds`.

        Raises:
          ClusterError: the server is gone.
        """
        number = next(self._reports)
        queue = self._acknowledged[number] = SimpleQueue[bool]()
        try:
            self._say({"number": number, "data": data})
            if not queue.get(timeout=seconds):
                raise ClusterError(_GONE.format(self.address))
        except Empty:
            return False
        finally:
            self._acknowledged.pop(number, None)
        return True

    def _say(self, data: Mapping[str, Any]) -> None:
        if self._gone:
            raise ClusterError(_GONE.format(self.address))
        self.send(_frame(data))

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ALIVE:
            return
        said = json.loads(frame.about)
        if "event" in said:
            if said["event"] == "text":
                self.texts[said["key"]] = said["text"]
            self._on_event(said)
        elif (queue := self._acknowledged.get(said["number"])) is not None:
            queue.put(True)

    def _on_lost(self) -> None:
        self._on_closed()
        self._on_event({"event": "gone"})

    def _on_closed(self) -> None:
        self._gone = True
        for queue in list(self._acknowledged.values()):
            queue.put(False)

    def _sign_of_life(self) -> Frame:
        try:
            status = self.status()
        except Exception as error:  # noqa: BLE001 - a process that cannot say its status is alive all the same
            status = f"{type(error).__name__}: {error}"
        return Frame(FrameKind.ALIVE, about=status.encode())


_GONE: Final = "the store of this run, at {}, is gone: the launcher, or the process that held it, has ended."
