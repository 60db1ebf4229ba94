"""The store of a run: texts by key, which any process sets and any process waits for; and who is still there.

The server lives in the launcher, or in process 0 if something else started the processes. It is used at the start of a
run, after a loss, and for agreements before the first call; no step of a running program waits for it. A process says
every second that it is alive.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, TypeAlias

from shardc.errors import ClusterError
from shardc.runtime.wire import Hello, Listener, dial, listen, read, write_all

Event: TypeAlias = Mapping[str, Any]
"""What the server tells all processes: `{"event": "lost", "process": 1, "why": "..."}`."""

BEAT: Final = 1.0
"""Seconds between two signs of life."""
_SOON: Final = 0.01
"""Seconds after which a client tries again to send what the server has not taken."""
_PATIENCE: Final = 5
"""Seconds that the server waits for a client whose buffers are full, before it drops it."""


def _packed(data: Mapping[str, Any]) -> bytes:
    text = json.dumps(data).encode()
    return len(text).to_bytes(4) + text


def _read(sock: socket.socket) -> dict[str, Any]:
    return json.loads(read(sock, int.from_bytes(read(sock, 4))))


@dataclass(eq=False)
class _Client:
    """A process that is connected to the server."""

    process: int
    """Its number; -1 - i for what starts process i on another host."""
    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: float = field(default_factory=monotonic)
    status: str = ""
    left: bool = False
    """Whether it said that it ends."""


class StoreServer:
    """The server of a store.

    Args:
      address: where it listens; `wire.listen` says how an address is written.
      secret: of the run.
      on_end: called with the number of a process whose connection ends, and whether it had said that it would.
      on_report: called with the number of a process and what it reports, before the process gets its answer.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        on_end: Callable[[int, bool], None] | None = None,
        on_report: Callable[[int, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._texts: dict[str, str] = {}
        self._waits: dict[str, list[tuple[_Client, int]]] = {}
        self._clients: dict[int, _Client] = {}
        self._lock = threading.Lock()
        self._greeting: Event | None = None
        self._on_end, self._on_report = on_end, on_report
        self._looked = monotonic()
        self._listener = Listener(listen(address), secret, self._serve)

    @property
    def address(self) -> str:
        return self._listener.address

    def _serve(self, sock: socket.socket, hello: Hello) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _PATIENCE, 0))
        client = _Client(int(hello["process"]), sock)
        with self._lock:
            self._clients[client.process] = client
            greeting = self._greeting
        try:
            if greeting is not None and client.process >= 0:
                self._tell(client, greeting)
            while True:
                self._answer(client, _read(sock))
        except (OSError, ValueError):
            pass  # the connection ended
        finally:
            with self._lock:
                ours = self._clients.get(client.process) is client
                if ours:
                    del self._clients[client.process]
                self._forget(client)
            with suppress(OSError):
                sock.close()
        if ours and self._on_end is not None:
            self._on_end(client.process, client.left)

    def _answer(self, client: _Client, said: Mapping[str, Any]) -> None:
        client.seen = monotonic()
        match said["do"]:
            case "set":
                self.set(said["key"], said["text"])
            case "get":
                with self._lock:
                    text = self._texts.get(said["key"])
                    if text is None:
                        self._waits.setdefault(said["key"], []).append((client, said["number"]))
                        return
                self._tell(client, {"number": said["number"], "text": text})
            case "has":
                self._tell(client, {"number": said["number"], "text": "" if self.text(said["key"]) is None else "yes"})
            case "forget":
                with self._lock:
                    self._forget(client, said["number"])
            case "report":
                if self._on_report is not None:
                    self._on_report(client.process, said["data"])
                self._tell(client, {"number": said["number"], "text": ""})
            case "leave":
                client.left = True
            case _:
                client.status = said.get("status", client.status)

    def _forget(self, client: _Client, number: int | None = None) -> None:
        """Drop what a client waits for: one number, or all."""
        for key, waits in list(self._waits.items()):
            left = [(c, n) for c, n in waits if c is not client or number not in (None, n)]
            if left:
                self._waits[key] = left
            else:
                del self._waits[key]

    def _tell(self, client: _Client, data: Mapping[str, Any]) -> None:
        try:
            with client.lock:
                write_all(client.sock, memoryview(_packed(data)))
        except OSError:  # its buffers are full and it reads nothing, or its connection ended: its own thread sees it
            with suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)

    def set(self, key: str, text: str) -> None:
        """Set a text, and give it to all who wait for it."""
        with self._lock:
            self._texts[key] = text
            waits = self._waits.pop(key, [])
        for client, number in waits:
            self._tell(client, {"number": number, "text": text})

    def text(self, key: str) -> str | None:
        """The text of a key, if it is set."""
        with self._lock:
            return self._texts.get(key)

    def tell(self, process: int, event: Event) -> bool:
        """Tell one process of an event. False: it is not connected."""
        with self._lock:
            client = self._clients.get(process)
        if client is not None:
            self._tell(client, event)
        return client is not None

    def tell_all(self, event: Event, newcomers: bool = False) -> None:
        """Tell all connected processes of an event; with `newcomers` also each that connects later, first of all."""
        with self._lock:
            if newcomers:
                self._greeting = event
            clients = [c for c in self._clients.values() if c.process >= 0]
        for client in clients:
            self._tell(client, event)

    def silent(self, seconds: float) -> list[int]:
        """Processes that have given no sign of life for so long. To be called about every second: a pause of the
        caller itself counts for nobody."""
        now = monotonic()
        paused, self._looked = now - self._looked > 3 * BEAT, now
        with self._lock:
            clients = list(self._clients.values())
        if paused:
            for client in clients:
                client.seen = now
        return sorted(c.process for c in clients if now - c.seen > seconds)

    def drop(self, process: int) -> None:
        """End the connection of a process, if it is connected, and tell of its end."""
        with self._lock:
            client = self._clients.pop(process, None)
        if client is None:
            return
        with suppress(OSError):
            client.sock.shutdown(socket.SHUT_RDWR)
        if self._on_end is not None:
            self._on_end(process, client.left)

    def statuses(self) -> dict[int, str]:
        """The last status text of each connected process."""
        with self._lock:
            return {c.process: c.status for c in self._clients.values()}

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            with suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)


class Store:
    """The connection of a process to the store.

    Args:
      on_event: called, in a thread of the store, with what the server tells; with `{"event": "gone"}` if the server
        ends.
    """

    def __init__(
        self, address: str, secret: bytes, process: int, on_event: Callable[[Event], None], seconds: float = 60.0
    ) -> None:
        self.address = address
        self.status: Callable[[], str] = str
        """Gives the text that is sent with each sign of life."""
        self._sock = dial(address, secret, {"process": process, "why": "store"}, seconds)
        self._lock = threading.Lock()
        self._answers: dict[int, SimpleQueue[str | None]] = {}
        self._count = 0
        self._unsent = bytearray()
        self._gone = False
        self._ended = threading.Event()
        self._on_event = on_event
        self._threads = [
            threading.Thread(target=body, name=name, daemon=True)
            for body, name in ((self._read_all, "shardc store"), (self._beat, "shardc sign of life"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def host(self) -> str:
        """The address of this host by which it reaches the server; empty with a UNIX socket."""
        name = self._sock.getsockname()
        if self._sock.family == socket.AF_UNIX:
            return ""
        return f"[{name[0]}]" if self._sock.family == socket.AF_INET6 else name[0]

    def set(self, key: str, text: str) -> None:
        self._say({"do": "set", "key": key, "text": text})

    def get(self, key: str, seconds: float) -> str | None:
        """Wait for the text of a key. None if it did not come in time.

        Raises:
          ClusterError: the server is gone.
        """
        return self._ask({"do": "get", "key": key}, seconds)

    def has(self, key: str, seconds: float) -> bool | None:
        """Whether a key has a text by now. None: the server did not answer in time.

        Raises:
          ClusterError: the server is gone.
        """
        answer = self._ask({"do": "has", "key": key}, seconds)
        return None if answer is None else bool(answer)

    def report(self, data: Mapping[str, Any], seconds: float = 60.0) -> bool:
        """Tell the launcher something. True: it has taken notice.

        Raises:
          ClusterError: the server is gone.
        """
        return self._ask({"do": "report", "data": data}, seconds) is not None

    def _ask(self, question: Mapping[str, Any], seconds: float) -> str | None:
        answer: SimpleQueue[str | None] = SimpleQueue()
        with self._lock:
            if self._gone:
                raise ClusterError(_GONE.format(self.address))
            self._count += 1
            number = self._count
            self._answers[number] = answer
        try:
            self._say({**question, "number": number})
            text = answer.get(timeout=seconds)
        except Empty:
            self._say({"do": "forget", "number": number})
            return None
        finally:
            self._answers.pop(number, None)
        if text is None:
            raise ClusterError(_GONE.format(self.address))
        return text

    def leave(self) -> None:
        """Say that this process ends on purpose."""
        with suppress(ClusterError):
            self._say({"do": "leave"})

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    def _say(self, data: Mapping[str, Any]) -> None:
        try:
            with self._lock:
                self._unsent += _packed(data)
                self._flush()
        except OSError as error:
            raise ClusterError(_GONE.format(self.address)) from error

    def _flush(self) -> None:
        """Send what the server takes. The rest waits: a stopped server stops no client."""
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent, socket.MSG_DONTWAIT)]

    def _read_all(self) -> None:
        try:
            while True:
                said = _read(self._sock)
                if "event" in said:
                    self._on_event(said)
                elif (answer := self._answers.get(said["number"])) is not None:
                    answer.put(said["text"])
        except (OSError, ValueError):
            with self._lock:
                self._gone = True
                waiting = list(self._answers.values())
            for answer in waiting:
                answer.put(None)
            if not self._ended.is_set():
                self._on_event({"event": "gone"})
        finally:
            self._sock.close()

    def _beat(self) -> None:
        last = monotonic()
        while not self._ended.wait(_SOON if self._unsent else BEAT):
            with self._lock, suppress(OSError):  # the reading thread sees the end of the connection
                self._flush()
            if not self._unsent and monotonic() - last >= BEAT / 2:
                last = monotonic()
                with suppress(ClusterError):
                    self._say({"do": "beat", "status": self._status_text()})

    def _status_text(self) -> str:
        try:
            return self.status()
        except Exception as error:  # noqa: BLE001 - a process that cannot say its status is alive all the same
            return f"{type(error).__name__}: {error}"


_GONE: Final = "the store of this run, at {}, is gone: the launcher, or the process that held it, has ended."
