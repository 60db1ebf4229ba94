"""TLS between the processes of a run. All of them make the same certificate from the run's secret and trust no other.

    secret -> private key -> certificate

So each end proves that it holds the secret, and what goes over the connection can neither be read nor changed. An end
that sends large buffers in `clear` sends those as they are, for networks that are trusted. What is sent are parts:

    encrypted (how many clear bytes follow, and before them how many encrypted ones), encrypted bytes, clear bytes
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import importlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from time import monotonic
from typing import Any, Final

from shardc.errors import ClusterError

URI: Final = "shardc://run/"
"""The name in the certificate of each run."""
_PIECE: Final = 1 << 16
"""Bytes that are encrypted or read at once."""
SMALL: Final = 1 << 16
"""A buffer of fewer bytes is always encrypted."""
_HEAD: Final = struct.Struct("!QI")
"""Of a part: the numbers of its clear and of its encrypted bytes."""
_KEY_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the curve P-256. gRPC takes no certificates of Ed25519."""


def _library(name: str) -> Any:
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        raise ClusterError(
            f'connections between hosts are encrypted, which needs cryptography: pip install "shardc[hosts]" ({error}).'
        ) from error


def check() -> None:
    """Raise ClusterError if the library `cryptography` is not installed, or this is not Linux."""
    if not hasattr(os, "memfd_create"):
        raise ClusterError("connections between hosts are encrypted, which needs Linux.")
    _library("x509")


@lru_cache
def identity(secret: bytes) -> str:
    """The path of the private key and the certificate of a run, as PEM. The file is in this process's memory only.

    Raises:
      ClusterError: as `check`.
    """
    check()
    x509, serialization, hashes, ec = map(
        _library,
        ("x509", "hazmat.primitives.serialization", "hazmat.primitives.hashes", "hazmat.primitives.asymmetric.ec"),
    )
    number = int.from_bytes(hmac.digest(secret, b"shardc: key of the run", hashlib.sha512))
    key = ec.derive_private_key(1 + number % (_KEY_ORDER - 1), ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "shardc")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), serial_number=1)
        .not_valid_before(datetime.datetime(2000, 1, 1))  # clocks of hosts may be wrong
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(URI)]), critical=False)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    pem = serialization.Encoding.PEM
    file = os.memfd_create("shardc")
    os.write(file, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    os.write(file, certificate.public_bytes(pem))
    return f"/proc/self/fd/{file}"


@lru_cache
def _context(secret: bytes, listens: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(identity(secret))
    context.load_verify_locations(identity(secret))
    if listens:
        context.num_tickets = 0
    return context


class TlsSocket(socket.socket):
    """A TCP connection under TLS: `send`, `sendmsg` and `recv_into` encrypt and decrypt.

    One thread may read while another one writes. OpenSSL is for one thread at a time, so a lock is held while bytes are
    encrypted or decrypted, but never during a system call.

    Args:
      sock: the connection, which this object takes over.
      secret: of the run.
      listens: whether this end has accepted the connection.
    """

    def __init__(self, sock: socket.socket, secret: bytes, listens: bool) -> None:
        context = _context(secret, listens)
        super().__init__(fileno=sock.detach())
        self._came, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaving, server_side=listens)
        self._using = threading.Lock()
        """Guards `_tls` and its two buffers."""
        self._arrived = memoryview(bytearray(_PIECE))
        self._sealed = memoryview(b"")
        """Encrypted bytes that are not sent yet."""
        self._taken = 0
        """How many bytes they were."""
        self.clear = False
        """Whether this end sends buffers of SMALL bytes or more as they are. The other end need not know."""
        self._clear_leaving = self._clear_coming = self._encrypted_coming = 0
        """How many bytes of the part that is being sent, or read, are left."""

    def shake_hands(self, until: float) -> None:
        """Find out whether the other end holds the secret.

        Raises:
          ssl.SSLError: it does not, or it speaks no TLS.
          OSError: the connection ended, or it was not done at `until`, a time of `monotonic`.
        """
        while True:
            self.settimeout(max(0.001, until - monotonic()))
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                with suppress(OSError):  # if the other end is gone, reading says so
                    super().sendall(self._leaving.read())  # also the reason of a refusal
            if not self._receive():
                raise ConnectionResetError("the connection was closed")

    def _receive(self) -> int:
        got = super().recv_into(self._arrived)
        with self._using:
            self._came.write(self._arrived[:got])
        return got

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer)[: nbytes or None]
        while True:
            with self._using:
                got = self._open(view)
            if got:
                return got
            if self._clear_coming and not self._encrypted_coming:
                got = super().recv_into(view[: self._clear_coming], 0, flags)
                self._clear_coming -= got
                return got
            if not self._receive():
                return 0

    def _open(self, view: memoryview) -> int:
        """Fill a buffer from what has come, and decrypt that. Returns how many bytes that gave."""
        got = 0
        try:
            while got < len(view) and (self._came.pending or self._tls.pending()):
                if not self._encrypted_coming and not self._clear_coming:
                    self._clear_coming, self._encrypted_coming = _HEAD.unpack(self._tls.read(_HEAD.size))
                elif (count := self._open_some(view[got:])) == 0:
                    break
                else:
                    got += count
        except ssl.SSLWantReadError:
            pass  # a part of a record
        except ssl.SSLError as error:
            raise ConnectionAbortedError(f"what came was changed on its way ({error.reason})") from error
        return got

    def _open_some(self, view: memoryview) -> int:
        """Fill a buffer from the part that is being read: its encrypted bytes come first."""
        if self._encrypted_coming:
            view = view[: self._encrypted_coming]
            got = int(self._tls.read(len(view), view))  # pyright: ignore[reportArgumentType]
            self._encrypted_coming -= got
        else:
            data = self._came.read(min(self._clear_coming, len(view)))
            got = len(data)
            view[:got] = data
            self._clear_coming -= got
        return got

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, address: Any = None, /) -> int:
        """Send some bytes of the buffers. If it raises BlockingIOError, the next call has to begin with the same bytes:
        some of them may be sent already."""
        if not self._sealed:
            if self._clear_leaving:
                return self._send_clear(next(iter(buffers)), flags)
            self._seal(buffers)
        while self._sealed:
            self._sealed = self._sealed[super().send(self._sealed, flags) :]
        return self._taken

    def _send_clear(self, buffer: Any, flags: int) -> int:
        sent = super().send(buffer, flags)
        self._clear_leaving -= sent
        return sent

    def _seal(self, buffers: Iterable[Any]) -> None:
        """Encrypt the next bytes to send, up to a buffer that goes as it is."""
        views, self._taken = list[memoryview](), 0
        for buffer in buffers:
            if self._taken == _PIECE:
                break
            view = memoryview(buffer).cast("B")
            if self.clear and len(view) >= SMALL:
                self._clear_leaving = len(view)
                break
            views.append(view[: _PIECE - self._taken])
            self._taken += len(views[-1])
        data = memoryview(b"".join([_HEAD.pack(self._clear_leaving, self._taken), *views]))
        with self._using:
            while data:
                data = data[self._tls.write(data) :]
            self._sealed = memoryview(self._leaving.read())

    def send(self, data: Any, flags: int = 0, /) -> int:
        return self.sendmsg([data], (), flags)
