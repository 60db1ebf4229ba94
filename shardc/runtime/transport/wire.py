"""Sockets between the processes of a run. Only processes of this user and this run are let in.

    listener                        dialer
       <-- TLS, if it is TCP (`tls`) -->           both hold the run's secret
       <-- hello ------------------------
       -- ready ------------------------>
       <-- ready ------------------------          both hold the connection, or neither does

A UNIX socket lies in a directory of its user's own; each end asks the kernel who the other one is. An address is text:
`127.0.0.1:4711`, `[::1]:4711`, `unix:/tmp/x/0`.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, NamedTuple

from shardc.errors import ClusterError
from shardc.runtime.transport import tls
from shardc.runtime.transport.tls import TlsSocket

_READY: Final = b"shardc 3"
_HELLO: Final = struct.Struct("!8sqq")
_HANDSHAKE_SECONDS: Final = 10.0
"""Time limit of a handshake for the listener; a dialer starts again after half of it."""
_MOST: Final = 64
"""The most handshakes of a listener at once. Others wait for one to end, or to be older than _HURRY."""
_HURRY: Final = 1.0
_NO_SECRET: Final = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV1_ALERT_UNKNOWN_CA")
"""OpenSSL's names of what happens with a process that does not hold the secret."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of the other end of a UNIX socket."""
_BUFFER: Final = 4 << 20
"""Bytes of a socket's buffers: with the default of Linux a message of 64 MB takes four times as long."""

_log: Final = logging.getLogger("shardc")


class Hello(NamedTuple):
    """The first message of a dialer: its number (`store` has those of agents), and its epoch."""

    process: int
    epoch: int = 0


def is_unix(address: str) -> bool:
    return address.startswith("unix:")


def _place(address: str) -> Any:
    """An address in the form that `socket` takes."""
    if is_unix(address):
        return address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ClusterError(f'"{address}" is no address; write host:port, [host]:port or unix:/path.')
    return host.strip("[]"), int(port)


def _socket(address: str) -> socket.socket:
    if is_unix(address):
        return socket.socket(socket.AF_UNIX)
    return socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET)


def listen(address: str) -> socket.socket:
    """Open a listening socket. Port 0 takes a free port; `address_of` gives it.

    Raises:
      ClusterError: the address is in use, or not one of this machine, or the library for TLS is not installed.
    """
    place = _place(address)
    if is_unix(address):
        _remove_if_dead(address)
    else:
        tls.check()
    listener = _socket(address)
    try:
        if not is_unix(address):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        other = "another path" if is_unix(address) else "another port, or 0 for a free one"
        raise ClusterError(
            f"cannot listen at {address}: "
            + (f"the address is in use; choose {other}." if taken else f"{error.strerror or error}.")
        ) from error
    return listener


def _remove_if_dead(address: str) -> None:
    """Remove the file of a UNIX socket that a killed process has left: its successor could not bind."""
    path = Path(_place(address))
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # somebody listens, or it is not ours: `bind` says so


def address_of(listener: socket.socket) -> str:
    """The address that a listening socket is reached at."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{host}:{name[1]}"


def close_listener(listener: socket.socket) -> None:
    """Close a listening socket, and remove its file if it has one."""
    address = address_of(listener)
    _shut_down(listener)
    listener.close()
    if is_unix(address):
        Path(_place(address)).unlink(missing_ok=True)


def read(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    """Read exactly `count` bytes. Raises TimeoutError if they have not arrived at `until`, a time of `monotonic`."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        if until is not None:
            sock.settimeout(max(0.001, until - monotonic()))
        got = sock.recv_into(view)
        if not got:
            raise ConnectionResetError("the connection was closed")
        view = view[got:]
    return bytes(buffer)


def write_all(sock: socket.socket, data: memoryview) -> None:
    """Send all bytes. The timeout of the socket is for each part, not for the whole."""
    while data:
        data = data[sock.send(data) :]


_FOREIGN: Final = "what answers at {} is no process of shardc, or of another version."


def _secured(sock: socket.socket, secret: bytes, listens: bool) -> socket.socket:
    return sock if sock.family == socket.AF_UNIX else TlsSocket(sock, secret, listens)


class _Stranger(ValueError):
    """The other end is no process of this run."""


def _shake_hands(sock: socket.socket, until: float) -> None:
    """Find out whether the other end is of this run.

    Raises:
      _Stranger: it is not.
      OSError: it does not speak TLS, the connection ended, or it was not done at `until`.
    """
    if isinstance(sock, TlsSocket):
        try:
            sock.shake_hands(until)
        except ssl.SSLError as error:
            if error.reason in _NO_SECRET:
                raise _Stranger("it does not hold this run's secret") from error
            raise
    elif hasattr(socket, "SO_PEERCRED"):
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            raise _Stranger("it runs as another user")


def dial(
    address: str, secret: bytes, hello: Hello, seconds: float, check: Callable[[], None] | None = None
) -> socket.socket:
    """Connect to a listener, which may start to listen during the wait.

    Args:
      check: called between two tries; it raises to give up.

    Raises:
      ClusterError: nobody listened in time, or the other side does not hold the secret.
    """
    place, until = _place(address), monotonic() + seconds
    while True:
        sock = _secured(_socket(address), secret, listens=False)
        try:
            now = min(max(until, monotonic() + 0.1), monotonic() + _HANDSHAKE_SECONDS / 2)
            sock.settimeout(now - monotonic())
            sock.connect(place)
            _introduce(sock, hello, now)
            return _ready(sock)
        except OSError as error:
            sock.close()
            if monotonic() >= until:
                raise ClusterError(f"no answer at {address} for {seconds:g} s: {error}.") from error
            if check is not None:
                check()
            sleep(0.02)
        except BaseException:
            sock.close()
            raise


def _introduce(sock: socket.socket, hello: Hello, until: float) -> None:
    """The dialer's side of the handshake."""
    who = sock.getpeername()
    try:
        _shake_hands(sock, until)
    except _Stranger as error:
        raise ClusterError(
            f"the process at {who} belongs to another run: {error}. Start all processes of a run with the same secret."
        ) from error
    except ssl.SSLError as error:
        raise ClusterError(_FOREIGN.format(who)) from error
    write_all(sock, memoryview(_HELLO.pack(_READY, *hello)))
    if read(sock, len(_READY), until) != _READY:
        raise ClusterError(_FOREIGN.format(who))
    write_all(sock, memoryview(_READY))


def _ready(sock: socket.socket) -> socket.socket:
    """Set up a connection for what follows the handshake."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return sock


class Listener:
    """A thread that accepts connections of processes with the secret. Others are dropped, with one line in the log.

    Args:
      listener: a listening socket, which is closed with this object.
      secret: of the run.
      welcome: called with each new connection and its hello, in a thread of the connection's own; it may keep both.
    """

    def __init__(self, listener: socket.socket, secret: bytes, welcome: Callable[[socket.socket, Hello], None]) -> None:
        self.address = address_of(listener)
        self._listener, self._secret, self._welcome = listener, secret, welcome
        self._changed = threading.Condition()
        self._meeting: dict[socket.socket, float] = {}
        """The connections whose handshakes are not done, and when they began."""
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="shardc listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while self._wait_for_room():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("%s: cannot accept a connection: %s", self.address, error)  # too many files are open
                sleep(0.1)
                continue
            sock = _secured(sock, self._secret, listens=True)
            with self._changed:
                if self._closed:
                    sock.close()
                    return
                self._meeting[sock] = monotonic()
            threading.Thread(target=self._meet, args=(sock,), name="shardc handshake", daemon=True).start()

    def _wait_for_room(self) -> bool:
        """Wait until one more handshake may begin; the slow ones are dropped for it. False: the listener is closed."""
        with self._changed:
            while len(self._meeting) >= _MOST and not self._closed:
                oldest, began = next(iter(self._meeting.items()))
                if not self._changed.wait(max(0.0, began + _HURRY - monotonic())):
                    self._meeting.pop(oldest, None)
                    _shut_down(oldest)  # its thread closes it
            return not self._closed

    def _meet(self, sock: socket.socket) -> None:
        who = "a socket of this machine"
        hello = None
        try:
            if sock.family != socket.AF_UNIX:
                who = str(sock.getpeername())
            hello = self._examine(sock, monotonic() + _HANDSHAKE_SECONDS)
            _ready(sock)
        except (OSError, ValueError) as error:
            if not self._closed:
                _log.warning("%s: dropped a connection of %s: %s", self.address, who, error)
        with self._changed:
            dropped = self._meeting.pop(sock, None) is None
            self._changed.notify()
            if hello is None or dropped or self._closed:
                sock.close()
                return
        self._welcome(sock, hello)

    def _examine(self, sock: socket.socket, until: float) -> Hello:
        """The listener's side of the handshake."""
        sock.settimeout(_HANDSHAKE_SECONDS)
        _shake_hands(sock, until)
        greeting, *hello = _HELLO.unpack(read(sock, _HELLO.size, until))
        write_all(sock, memoryview(_READY))
        if greeting != _READY or read(sock, len(_READY), until) != _READY:
            raise ValueError("it does not speak this protocol")
        return Hello(*hello)

    def close(self) -> None:
        """Close the listening socket, end the thread and drop unfinished handshakes. Accepted connections stay."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
            for sock in self._meeting:
                _shut_down(sock)
        close_listener(self._listener)
        self._thread.join()


def _shut_down(sock: socket.socket) -> None:
    """End a connection, and wake the thread that waits for it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def write_secret(path: Path, secret: bytes) -> None:
    """Write a secret to a file that only this user can read. Never overwrites a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
