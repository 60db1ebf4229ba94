"""Sockets between the processes of a run: only who holds the run's secret gets in.

    listener                                    dialer
       -- greeting, nonce A -------------------->
       <-- nonce B, HMAC(A, B, hello), hello ----     the listener knows the dialer
       -- HMAC(B, A) --------------------------->     the dialer knows the listener

The hello is JSON and says who dials and why. An address is text: `127.0.0.1:4711`, `[::1]:4711`, `unix:/tmp/x/0`.
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
_TRY_SECONDS: Final = 5.0
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
    if not host or not port.isdecimal():
        raise ClusterError(f'"{address}" is no address; write host:port, [host]:port or unix:/path.')
    return host.strip("[]"), int(port)


def _socket(address: str) -> socket.socket:
    if is_unix(address):
        return socket.socket(socket.AF_UNIX)
    return socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET)


def listen(address: str) -> socket.socket:
    """A listening socket. Port 0 takes a free port, which `address_of` tells.

    Raises:
      ClusterError: the address is in use, or not one of this machine.
    """
    listener = _socket(address)
    try:
        if not is_unix(address):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(_place(address))
        listener.listen(128)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise ClusterError(
            f"cannot listen at {address}: "
            + ("the address is in use; choose another port, or 0 for a free one." if taken else f"{error.strerror}.")
        ) from error
    return listener


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


def read_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer of bytes.

    Raises:
      OSError: the connection ended, or nothing came for the socket's timeout.
    """
    while buffer:
        got = sock.recv_into(buffer)
        if not got:
            raise ConnectionResetError("the connection was closed")
        buffer = buffer[got:]


def read(sock: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    read_into(sock, memoryview(buffer))
    return bytes(buffer)


def write_all(sock: socket.socket, data: memoryview) -> None:
    """Send all bytes. The socket's timeout is for each part, not for the whole."""
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
    address: str, secret: bytes, hello: Hello, seconds: float, check: Callable[[], None] = lambda: None
) -> socket.socket:
    """A connection to a listener, which may come up during the wait.

    Args:
      check: called before each try; its error ends the wait.

    Raises:
      ClusterError: nobody listened in time, or the other side does not hold the secret.
    """
    until = monotonic() + seconds
    while True:
        check()
        sock = _socket(address)
        try:
            _tune(sock)
            sock.settimeout(min(_TRY_SECONDS, max(0.1, until - monotonic())))
            sock.connect(_place(address))
            return _introduce(sock, secret, hello)
        except OSError as error:
            sock.close()
            if monotonic() >= until:
                raise ClusterError(f"no answer at {address} for {seconds:g} s: {error}.") from error
            sleep(0.02)
        except BaseException:
            sock.close()
            raise


def _introduce(sock: socket.socket, secret: bytes, hello: Hello) -> socket.socket:
    """The dialer's side of the handshake."""
    greeting = read(sock, len(_GREETING) + _NONCE)
    if not greeting.startswith(_GREETING):
        raise ClusterError(f"what answers at {sock.getpeername()} is no process of shardc, or of another version.")
    theirs, mine = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
    said = json.dumps(hello).encode()
    write_all(sock, memoryview(_HELLO.pack(mine, _mac(secret, b"dial", theirs, mine, said), len(said)) + said))
    try:
        proof = read(sock, 32)
    except ConnectionResetError:
        proof = b""
    if not hmac.compare_digest(proof, _mac(secret, b"listen", mine, theirs)):
        raise ClusterError(
            f"the process at {sock.getpeername()} belongs to another run: it does not hold this run's secret. Start "
            "all processes of a run with the same secret."
        )
    sock.settimeout(None)
    return sock


class Listener:
    """A thread that welcomes dialers who hold the secret. Others are dropped, with one line in the log.

    Args:
      listener: a listening socket, which is closed with this object.
      secret: of the run.
      welcome: called with each new connection and its hello, in a thread of the connection's own; it may keep both.
    """

    def __init__(self, listener: socket.socket, secret: bytes, welcome: Callable[[socket.socket, Hello], None]) -> None:
        self.address = address_of(listener)
        self._listener, self._secret, self._welcome = listener, secret, welcome
        self._thread = threading.Thread(target=self._accept, name="shardc listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._meet, args=(sock,), name="shardc handshake", daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            _tune(sock)
            sock.settimeout(_HANDSHAKE_SECONDS)
            hello = self._examine(sock)
        except (OSError, ValueError, struct.error) as error:
            who = sock.getpeername() if sock.family != socket.AF_UNIX else "a socket of this machine"
            _log.warning("%s: dropped a connection of %s: %s", self.address, who, error)
            sock.close()
            return
        sock.settimeout(None)
        self._welcome(sock, hello)

    def _examine(self, sock: socket.socket) -> Hello:
        """The listener's side of the handshake."""
        mine = secrets.token_bytes(_NONCE)
        write_all(sock, memoryview(_GREETING + mine))
        theirs, proof, count = _HELLO.unpack(read(sock, _HELLO.size))
        if count > _LONGEST_HELLO:
            raise ValueError("it does not speak this protocol")
        said = read(sock, count)
        if not hmac.compare_digest(proof, _mac(self._secret, b"dial", mine, theirs, said)):
            raise ValueError("it does not hold this run's secret")
        write_all(sock, memoryview(_mac(self._secret, b"listen", theirs, mine)))
        return json.loads(said)

    def close(self) -> None:
        """Close the listening socket and end the thread. Connections stay."""
        close_listener(self._listener)
        self._thread.join()


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def write_secret(path: Path, secret: bytes) -> None:
    """Write a secret for the user's own eyes. Never overwrites."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
