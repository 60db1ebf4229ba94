"""Sockets: who holds the secret gets in, and nobody waits for who does not."""

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from shardc.errors import ClusterError
from shardc.runtime.transport import wire
from shardc.runtime.transport.tls import TlsSocket
from tests.runtime.peers import until
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")

SECRET = wire.new_secret()
HAS_IPV6 = socket.has_ipv6 and os.path.exists("/proc/net/if_inet6")


@contextmanager
def listening(address):
    arrived = SimpleQueue()
    found = wire.Listener(wire.listen(address), SECRET, lambda sock, hello: arrived.put((sock, hello)))
    found.arrived = arrived
    yield found
    found.close()


@pytest.fixture(
    params=["unix", "127.0.0.1:0", pytest.param("[::1]:0", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6"))]
)
def listener(request, tmp_path):
    with listening(f"unix:{tmp_path / 'x'}" if request.param == "unix" else request.param) as found:
        yield found


@pytest.fixture
def tcp_listener():
    with listening("127.0.0.1:0") as found:
        yield found


def dial(address, secret=SECRET, hello=None, seconds=5.0, **options):
    return within(10, lambda: wire.dial(address, secret, hello or wire.Hello(1), seconds, **options))


def test_both_ends_get_a_connection(listener):
    here = dial(listener.address, hello=wire.Hello(-3, 1 << 40))
    there, hello = listener.arrived.get(timeout=5)
    assert hello == wire.Hello(-3, 1 << 40) == (-3, 1 << 40)
    wire.write_all(here, memoryview(b"to and fro"))
    assert wire.read(there, 10) == b"to and fro"
    assert here.gettimeout() is None and there.gettimeout() is None
    here.close()
    with pytest.raises(OSError, match="closed"):
        wire.read(there, 1)
    there.close()


def test_a_wrong_secret_is_an_error_at_once_and_one_line(tcp_listener, log_lines):
    listener = tcp_listener
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="belongs to another run: it does not hold this run's secret"):
        dial(listener.address, secret=wire.new_secret(), seconds=60.0)
    assert time.monotonic() - begin < 5
    until(log_lines)
    time.sleep(0.1)
    (line,) = log_lines()
    assert line.startswith(f"{listener.address}: dropped a connection of ")
    assert line.endswith("it does not hold this run's secret")
    assert listener.arrived.empty()
    dial(listener.address).close()  # others still get in
    listener.arrived.get(timeout=5)[0].close()


def connect(listener):
    sock = wire._socket(listener.address)
    sock.settimeout(5)
    sock.connect(wire._place(listener.address))
    return sock


def test_a_process_of_another_user_is_refused(tmp_path, log_lines, monkeypatch):
    """A UNIX socket needs no secret: the kernel says whose process is at the other end."""
    with listening(f"unix:{tmp_path / 'x'}") as listener:
        monkeypatch.setattr(wire.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ClusterError, match="belongs to another run: it runs as another user"):
            dial(listener.address, seconds=60.0)
        with connect(listener) as sock:
            assert sock.recv(1) == b""
        until(lambda: len(log_lines()) == 2)
        assert log_lines()[0].endswith("it runs as another user") and listener.arrived.empty()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 200, b"{}" * 12, b"shardc 1" + bytes(16)])
def test_garbage_is_dropped_with_one_line(listener, log_lines, said):
    with connect(listener) as sock:
        sock.sendall(said)
        with pytest.raises(OSError):
            while sock.recv(1000):
                pass
            raise ConnectionResetError
    until(log_lines)
    time.sleep(0.05)
    assert len(log_lines()) == 1 and "dropped a connection" in log_lines()[0]
    assert listener.arrived.empty()


def test_one_that_connects_and_ends_is_dropped_with_one_line(listener, log_lines):
    connect(listener).close()
    until(log_lines)
    time.sleep(0.05)
    assert len(log_lines()) == 1 and "dropped a connection" in log_lines()[0]


def test_the_silent_are_dropped_and_keep_nobody_waiting(listener, log_lines, monkeypatch):
    monkeypatch.setattr(wire, "_HANDSHAKE_SECONDS", 0.4)
    silent = [connect(listener) for _ in range(3)]
    slow = connect(listener)
    begin = time.monotonic()
    dial(listener.address).close()
    assert time.monotonic() - begin < 0.35
    listener.arrived.get(timeout=5)[0].close()
    while len(log_lines()) < 4 and time.monotonic() < begin + 3:  # a byte now and then does not help
        with suppress(OSError):
            slow.send(b"x")
        time.sleep(0.1)
    assert len(log_lines()) == 4
    for sock in (*silent, slow):
        sock.close()


def test_closing_drops_who_is_not_welcome_yet(tmp_path, log_lines):
    arrived = []
    listener = wire.Listener(wire.listen(f"unix:{tmp_path / 'x'}"), SECRET, lambda *a: arrived.append(a))
    with connect(listener) as sock:
        until(lambda: listener._meeting)
        within(2, listener.close)
        assert sock.recv(100) == b""
    assert not arrived and not log_lines()
    assert not (tmp_path / "x").exists()


def test_a_dialer_without_the_ready_byte_is_not_welcome(listener, log_lines):
    """Both ends hold a connection or neither does: who does not finish the handshake has none."""
    real = wire.write_all

    def cut(sock, data):
        if bytes(data) == wire._READY and sock not in listener._meeting:
            sock.shutdown(socket.SHUT_RDWR)
        real(sock, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "write_all", cut)
        with pytest.raises(ClusterError, match="no answer"):
            dial(listener.address, seconds=0.2)
    until(log_lines)
    assert listener.arrived.empty()


def test_a_port_in_use(listener):
    with pytest.raises(ClusterError, match="the address is in use; choose another p"):
        wire.listen(listener.address)
    dial(listener.address).close()  # the first one still listens
    listener.arrived.get(timeout=5)[0].close()


def test_the_file_of_a_killed_process_is_replaced(tmp_path):
    address = f"unix:{tmp_path / 'x'}"
    wire.listen(address).close()  # as SIGKILL leaves it
    assert (tmp_path / "x").is_socket()
    wire.close_listener(wire.listen(address))
    assert not (tmp_path / "x").exists()


def test_a_file_that_is_no_socket_is_kept(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ClusterError, match="in use"):
        wire.listen(f"unix:{tmp_path / 'x'}")
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize("address", ["x", "127.0.0.1", ":1", "127.0.0.1:", "127.0.0.1:99999", "host:-1"])
def test_what_is_no_address(address):
    with pytest.raises(ClusterError, match="is no address; write host:port"):
        wire.listen(address)
    with pytest.raises(ClusterError, match="is no address"):
        wire.dial(address, SECRET, {}, 1.0)


@pytest.mark.parametrize("address", ["203.0.113.7:0", f"unix:/{'long' * 40}/x"])
def test_an_address_that_this_machine_does_not_have(address):
    with pytest.raises(ClusterError, match=r"cannot listen at .*\w\.$"):
        wire.listen(address)


def test_a_dialer_waits_for_its_listener(tmp_path):
    address, arrived = f"unix:{tmp_path / 'x'}", SimpleQueue()
    found = []
    thread = threading.Thread(target=lambda: found.append(dial(address)), daemon=True)
    thread.start()
    time.sleep(0.2)
    listener = wire.Listener(wire.listen(address), SECRET, lambda sock, hello: arrived.put(sock))
    thread.join(5)
    arrived.get(timeout=5).close()
    found[0].close()
    listener.close()


def test_nobody_answers(tmp_path):
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=r"no answer at unix:.* for 0\.3 s"):
        dial(f"unix:{tmp_path / 'x'}", seconds=0.3)
    assert time.monotonic() - begin < 2


def test_a_dialer_gives_up_when_it_is_told_to(tmp_path):
    def check():
        raise ClusterError("the other process is lost.")

    begin = time.monotonic()
    with pytest.raises(ClusterError, match="is lost"):
        dial(f"unix:{tmp_path / 'x'}", seconds=60.0, check=check)
    assert time.monotonic() - begin < 2


def answers(address, answer):
    """A thread that accepts one connection and answers it; and where it listens."""
    listener = wire.listen(address)

    def run():
        with listener, listener.accept()[0] as sock, suppress(OSError):
            answer(sock)

    thread = threading.Thread(target=run)
    thread.start()
    return wire.address_of(listener), thread


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_who_answers_is_no_process_of_shardc(tmp_path, transport):
    address, thread = answers(
        f"unix:{tmp_path / 'x'}" if transport == "unix" else "127.0.0.1:0",
        lambda sock: (sock.sendall(b"SSH-2.0-OpenSSH_9.9" + bytes(100)), sock.recv(1000)),
    )
    with pytest.raises(ClusterError, match="no process of shardc, or of another version"):
        dial(address)
    thread.join(5)


def test_an_impostor_that_does_not_hold_the_secret_is_refused():
    """The listener too has to prove that it holds the secret."""

    def answer(sock):
        with TlsSocket(sock, wire.new_secret(), listens=True) as secured:
            secured.shake_hands(time.monotonic() + 5)

    address, thread = answers("127.0.0.1:0", answer)
    with pytest.raises(ClusterError, match="does not hold this run's secret"):
        dial(address, seconds=60.0)
    thread.join(5)


def test_a_listener_that_ends_is_no_stranger():
    """The dialer tries again, and finds its successor."""
    address, thread = answers("127.0.0.1:0", lambda sock: sock.recv(1))
    found = SimpleQueue()
    dialing = threading.Thread(target=lambda: found.put(dial(address, seconds=20.0)))
    dialing.start()
    thread.join(5)
    with listening(address) as listener:
        listener.arrived.get(timeout=5)[0].close()
        found.get(timeout=5).close()
    dialing.join(5)


def test_many_strangers_keep_nobody_waiting(tcp_listener, log_lines, monkeypatch):
    """A full house takes one more when its oldest guest is a second old."""
    monkeypatch.setattr(wire, "_HURRY", 0.3)
    silent = [connect(tcp_listener) for _ in range(2 * wire._MOST)]
    begin = time.monotonic()
    dial(tcp_listener.address, seconds=20.0).close()
    assert time.monotonic() - begin < 3 and len(tcp_listener._meeting) <= wire._MOST
    assert sum(t.name == "shardc handshake" for t in threading.enumerate()) <= wire._MOST + 1
    tcp_listener.arrived.get(timeout=5)[0].close()
    for sock in silent:
        sock.close()
    until(lambda: len(log_lines()) == 2 * wire._MOST)


def test_too_many_open_files_do_not_end_a_listener(listener, log_lines):
    real = listener._listener
    failed = threading.Event()

    class Failing:
        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            if not failed.is_set():
                failed.set()
                raise OSError(24, "Too many open files")
            return real.accept()

    listener._listener = Failing()
    for _ in range(2):  # the first wakes the thread out of the old one's accept
        dial(listener.address).close()
        listener.arrived.get(timeout=5)[0].close()
    assert failed.is_set() and any("cannot accept" in line for line in log_lines())


def test_a_secret_is_for_its_owner_and_written_once(tmp_path):
    path = tmp_path / "secret"
    wire.write_secret(path, SECRET)
    assert path.read_bytes() == SECRET and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        wire.write_secret(path, SECRET)
