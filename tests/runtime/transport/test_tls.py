"""TLS between processes: who holds the secret is let in, and nothing that is changed on its way is believed."""

import importlib
import os
import socket
import ssl
import struct
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.transport import tls, wire
from tests.runtime.peers import link_pair, until
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")
SECRET = wire.new_secret()


def shake_hands(sock):
    sock.shake_hands(time.monotonic() + 5)


@contextmanager
def pair(secret=SECRET, sockets=None):
    """The two ends of a connection, before their handshake."""
    a, b = sockets or socket.socketpair()
    with tls.TlsSocket(a, secret, listens=False) as dialer, tls.TlsSocket(b, SECRET, listens=True) as listener:
        yield dialer, listener


@contextmanager
def connected(**options):
    with pair(**options) as (dialer, listener):
        other = threading.Thread(target=shake_hands, args=(listener,))
        other.start()
        shake_hands(dialer)
        other.join(5)
        for sock in (dialer, listener):
            sock.settimeout(None)
        yield dialer, listener


def read(sock, size):
    got = bytearray()
    buffer = bytearray(1 << 20)
    while len(got) < size and (count := sock.recv_into(buffer)):
        got += buffer[:count]
    return bytes(got)


def test_all_processes_make_the_same_certificate():
    path = tls.identity(SECRET)
    made = Path(path).read_text()
    tls.identity.cache_clear()
    assert Path(tls.identity(SECRET)).read_text() == made
    assert Path(tls.identity(wire.new_secret())).read_text() != made
    assert "memfd" in os.readlink(path)


def test_only_the_newest_protocol_and_both_ends_are_known():
    with connected() as ends:
        for sock in ends:
            assert sock._tls.version() == "TLSv1.3" and sock._tls.getpeercert(binary_form=True)
        assert not ends[0]._tls.session_reused


def test_who_holds_another_secret_is_refused_by_both():
    with pair(wire.new_secret()) as (dialer, listener):
        errors = []

        def accept():
            with pytest.raises(ssl.SSLError) as error:
                shake_hands(listener)
            errors.append(error.value.reason)

        other = threading.Thread(target=accept)
        other.start()
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            shake_hands(dialer)
        other.join(5)
        assert errors == ["TLSV1_ALERT_UNKNOWN_CA"]


@pytest.mark.parametrize("certificate", [False, True], ids=["none", "another"])
def test_a_dialer_that_trusts_everybody_is_refused(certificate):
    """It has to prove itself, whatever it believes of the listener."""
    a, b = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(tls.identity(wire.new_secret()))
    with a, tls.TlsSocket(b, SECRET, listens=True) as listener:
        other = threading.Thread(target=lambda: context.wrap_socket(a).close())
        other.start()
        with pytest.raises(ssl.SSLError) as error:
            shake_hands(listener)
        other.join(5)
    assert error.value.reason == ("CERTIFICATE_VERIFY_FAILED" if certificate else "PEER_DID_NOT_RETURN_A_CERTIFICATE")


@pytest.mark.parametrize("sizes", [(0,), (1,), (0, 5, 0), (1 << 14, 1), (1 << 16, 1 << 16), (3 << 20, 7, 1 << 20)])
def test_bytes_arrive_whole_both_ways_at_once(sizes):
    """Sent from two threads, of which one does not wait, as connections do."""
    pieces = [memoryview(np.random.default_rng(i).integers(0, 256, n, np.uint8)).cast("B") for i, n in enumerate(sizes)]
    whole = b"".join(pieces)

    def send(sock):
        rest, flags = list(pieces), socket.MSG_DONTWAIT
        while rest:
            try:
                sent = sock.sendmsg(rest, (), flags)
            except BlockingIOError:
                flags = 0
                continue
            while rest and sent >= rest[0].nbytes:
                sent -= rest.pop(0).nbytes
            if sent:
                rest[0] = rest[0][sent:]

    with connected() as ends:
        threads = [threading.Thread(target=send, args=(sock,), daemon=True) for sock in ends]
        for t in threads:
            t.start()
        got = [within(20, read, sock, len(whole)) for sock in ends] if len(whole) < 1 << 18 else both(ends, len(whole))
        for t in threads:
            t.join(5)
        assert got == [whole, whole]


def both(ends, size):
    got = [b"", b""]

    def take(i):
        got[i] = read(ends[i], size)

    threads = [threading.Thread(target=take, args=(i,), daemon=True) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    return got


def test_a_reader_hears_the_end_and_its_own_patience():
    with connected() as (a, b):
        b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 100_000))
        with pytest.raises(BlockingIOError):
            b.recv_into(bytearray(10))
        a.send(b"x")
        assert b.recv_into(bytearray(10)) == 1
        a.shutdown(socket.SHUT_RDWR)
        assert b.recv_into(bytearray(10)) == 0


def test_a_machine_without_the_library(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ClusterError, match=r'pip install "shardc\[hosts\]" \(No module named'):
        wire.listen("127.0.0.1:0")
    tls.identity.cache_clear()
    with pytest.raises(ClusterError, match="which needs cryptography"):
        tls.identity(SECRET)


# ---- a man in the middle


class Middle:
    """Stands between two ends, and passes on what comes, by `change(bytes)`."""

    def __init__(self):
        self.change = lambda data: data
        (self.left, x), (self.right, y) = socket.socketpair(), socket.socketpair()
        self._ends = x, y
        self._threads = [threading.Thread(target=self._pass, args=ends) for ends in ((x, y), (y, x))]
        for t in self._threads:
            t.start()

    def _pass(self, source, to):
        with suppress(OSError):  # an end that closes with bytes unread resets its connection
            while data := source.recv(1 << 16):
                to.sendall(self.change(data) if source is self._ends[0] else data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for t in self._threads:
            t.join(5)
        for sock in self._ends:
            sock.close()


def flip(at):
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if len(data) > at else data


CHANGES = {
    "a flipped bit of a head": flip(0),
    "a flipped bit of a length": flip(4),
    "a flipped bit": flip(20),
    "a frame of its own": lambda data: b"\x17\x03\x03\x00\x20" + bytes(32) + data,
    "a frame of the old protocol": lambda data: bytes(40) + data,
    "a replay": lambda data: data + data,
    "a part": lambda data: data[:10] + data[11:],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_on_its_way_loses_the_peer_and_is_not_believed(change):
    with (
        Middle() as middle,
        connected(sockets=(middle.left, middle.right)) as ends,
        link_pair(sockets=ends) as (a, b),
    ):
        a.send_tagged("x", (b"first", ()))
        assert b.receive_tagged("x", 5.0)[0] == b"first"
        middle.change = change
        a.send_tagged("x", (b"second", [memoryview(bytearray(100))]))
        a.send_tagged("y")
        got = []
        with pytest.raises(PeerLostError, match=r"process 0 is lost: what came was changed on its way \([A-Z_]+\)\."):
            while True:
                got.append(b.receive_tagged("x", 5.0)[0])
        assert got in ([], [b"second"][: change is CHANGES["a replay"]])
        until(lambda: a.lost)


# ---- large buffers that are not encrypted


@pytest.mark.parametrize("clear", [False, True])
def test_only_large_buffers_of_an_end_that_says_so_can_be_read_on_their_way(clear):
    heard = bytearray()
    with (
        Middle() as middle,
        connected(sockets=(middle.left, middle.right)) as ends,
        link_pair(sockets=ends) as (a, b),
    ):
        middle.change = lambda data: (heard.extend(data), data)[1]
        ends[0].clear = clear
        large, small = bytes(range(256)) * 512, bytes(range(255, -1, -1)) * 200
        text = bytes(range(0, 256, 2)) * 2048
        for _ in range(2):
            a.send_tagged("tag", (text, [memoryview(small), memoryview(large), memoryview(small)]))
            assert within(5, b.receive_tagged, "tag", 5.0) == (text, [small, large, small])
            b.send_tagged("back", (b"", [memoryview(large)]))  # what the other end does is its own choice
            within(5, a.receive_tagged, "back", 5.0)
        assert (heard.count(large) == 2) is clear
        assert clear or large[:64] not in heard
        assert not any(x in heard for x in (small[:64], text[:64], b"tag\0"))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"], ids=["shorter", "longer"])
def test_bytes_that_are_left_out_or_added_between_lose_the_peer(change):
    with (
        Middle() as middle,
        connected(sockets=(middle.left, middle.right)) as ends,
        link_pair(sockets=ends) as (a, b),
    ):
        ends[0].clear = True
        middle.change = lambda data: change(data) if set(data[-99:]) == {7} else data
        for _ in range(2):
            a.send_tagged("x", (b"", [memoryview(bytes([7]) * (1 << 17))]))
        with pytest.raises(PeerLostError, match="process 0 is lost: what came was changed on its way"):
            for _ in range(9):
                a.send_tagged("x")
                b.receive_tagged("x", 5.0)
        until(lambda: a.lost)


@pytest.mark.parametrize("at", [0, 5, 60, 200])
def test_a_handshake_that_is_changed_is_none(at):
    with Middle() as middle, pair(sockets=(middle.left, middle.right)) as (dialer, listener):
        middle.change = flip(at)

        def end(sock):
            with pytest.raises(OSError):
                shake_hands(sock)
                read(sock, 1)
                raise ConnectionResetError
            sock.shutdown(socket.SHUT_RDWR)

        threads = [threading.Thread(target=end, args=(sock,)) for sock in (dialer, listener)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
            assert not t.is_alive()
