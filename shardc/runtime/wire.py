"""Sockets between the processes of a run, with a handshake: only processes that hold the run's secret are accepted.

    listener                                    dialer
       -- greeting, nonce A -------------------->
       <-- nonce B, HMAC(A, B, hello), hello ----     the listener knows the dialer
       -- HMAC(B, A) --------------------------->     the dialer knows the listener
       <-- ready ---------------------------------    both hold the connection, or neither does

The hello is JSON and says who dials and why. A dialer without the secret gets a refusal in place of the HMAC: so it can
tell a refusal from a listener that has just ended, where it tries again. An address is text:
`127.0.0.1:4711`, `[::1]:4711`, `unix:/tmp/x/0`.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, TypeAlias

from shardc.errors import ClusterError

Hello: TypeAlias = Mapping[str, Any]

_GREETING: Final = b"shardc 1"
_NONCE: Final = 32
_HELLO: Final = struct.Struct("!32s32sI")
_LONGEST_HELLO: Final = 1 << 16
_HANDSHAKE_SECONDS: Final = 10.0
"""Time limit of a handshake for the listener; a dialer starts again after half of it."""
_REFUSED: Final = bytes(32)
_READY: Final = b"!"
_BUFFER: Final = 4 << 20
"""Bytes of a socket's buffers: with the default of Linux a message of 64 MB takes four times as long."""

_log: Final = logging.getLogger("shardc")


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
      ClusterError: the address is in use, or not one of this machine.
    """
    place = _place(address)
    if is_unix(address):
        _remove_if_dead(address)
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
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
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


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(len(p).to_bytes(4) + p for p in parts), hashlib.sha256)


def _tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)


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
        sock = _socket(address)
        try:
            _tune(sock)
            now = min(max(until, monotonic() + 0.1), monotonic() + _HANDSHAKE_SECONDS / 2)
            sock.settimeout(now - monotonic())
            sock.connect(place)
            return _introduce(sock, secret, hello, now)
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


def _introduce(sock: socket.socket, secret: bytes, hello: Hello, until: float) -> socket.socket:
    """The dialer's side of the handshake."""
    greeting = read(sock, len(_GREETING) + _NONCE, until)
    if not greeting.startswith(_GREETING):
        raise ClusterError(f"what answers at {sock.getpeername()} is no process of shardc, or of another version.")
    theirs, mine = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
    said = json.dumps(hello).encode()
    write_all(sock, memoryview(_HELLO.pack(mine, _mac(secret, b"dial", theirs, mine, said), len(said)) + said))
    if not hmac.compare_digest(read(sock, 32, until), _mac(secret, b"listen", mine, theirs)):
        raise ClusterError(
            f"the process at {sock.getpeername()} belongs to another run: it does not hold this run's secret. Start "
            "all processes of a run with the same secret."
        )
    write_all(sock, memoryview(_READY))
    sock.settimeout(None)
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
        self._lock = threading.Lock()
        self._meeting: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="shardc listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("%s: cannot accept a connection: %s", self.address, error)  # too many files are open
                sleep(0.1)
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._meeting.add(sock)
            threading.Thread(target=self._meet, args=(sock,), name="shardc handshake", daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        who = "a socket of this machine"
        try:
            if sock.family != socket.AF_UNIX:
                who = str(sock.getpeername())
            _tune(sock)
            hello = self._examine(sock, monotonic() + _HANDSHAKE_SECONDS)
            sock.settimeout(None)
        except (OSError, ValueError) as error:
            if not self._closed:
                _log.warning("%s: dropped a connection of %s: %s", self.address, who, error)
            hello = None
        with self._lock:
            self._meeting.discard(sock)
            if hello is None or self._closed:
                sock.close()
                return
        self._welcome(sock, hello)

    def _examine(self, sock: socket.socket, until: float) -> Hello:
        """The listener's side of the handshake."""
        mine = secrets.token_bytes(_NONCE)
        sock.settimeout(_HANDSHAKE_SECONDS)
        write_all(sock, memoryview(_GREETING + mine))
        theirs, proof, count = _HELLO.unpack(read(sock, _HELLO.size, until))
        if count > _LONGEST_HELLO:
            raise ValueError("it does not speak this protocol")
        said = read(sock, count, until)
        if not hmac.compare_digest(proof, _mac(self._secret, b"dial", mine, theirs, said)):
            write_all(sock, memoryview(_REFUSED))
            raise ValueError("it does not hold this run's secret")
        write_all(sock, memoryview(_mac(self._secret, b"listen", theirs, mine)))
        if read(sock, len(_READY), until) != _READY:
            raise ValueError("it does not speak this protocol")
        return json.loads(said)

    def close(self) -> None:
        """Close the listening socket, end the thread and drop unfinished handshakes. Accepted connections stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sock in self._meeting:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        close_listener(self._listener)
        self._thread.join()


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def write_secret(path: Path, secret: bytes) -> None:
    """Write a secret to a file that only this user can read. Never overwrites a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
