"""The store: texts that are waited for, signs of life, and a server that stops or ends."""

import json
import resource
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import pytest

from shardc.errors import ClusterError
from shardc.runtime import store as store_module
from shardc.runtime.store import Store, StoreServer
from shardc.runtime.transport import connection as connection_module
from shardc.runtime.transport import wire
from shardc.runtime.transport.connection import Frame, FrameKind
from tests.runtime.peers import together, until
from tests.runtime.processes import children
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")
SECRET = wire.new_secret()


@pytest.fixture
def server(tmp_path):
    ended = []
    found = StoreServer(f"unix:{tmp_path / 'store'}", SECRET, ended.append)
    found.ended = ended
    yield found
    found.close()


@pytest.fixture
def connect(server):
    clients = []

    def client(process=0, on_event=lambda event: None, address=None):
        clients.append(Store(address or server.address, SECRET, process, on_event, 5.0))
        return clients[-1]

    yield client
    for c in clients:
        c.close()


def test_texts_reach_those_that_ask(connect, server):
    """Also those that ask before it is set, and nobody else."""
    heard = [[], []]
    a, b = (connect(p, heard[p].append) for p in (0, 1))
    a.ask("key")
    until(lambda: a.texts == {"key": None})
    b.set("key", "tëxt")
    until(lambda: a.texts == {"key": "tëxt"})
    a.ask("key")  # once is enough
    server.set("key", "other")
    a.set("next", "")
    a.ask("next")
    until(lambda: a.texts == {"key": "other", "next": ""})
    assert server.text("key") == "other" and server.text("no") is None
    assert not b.texts and not heard[1] and [e["text"] for e in heard[0]] == [None, "tëxt", "other", ""]


def test_a_text_comes_before_what_its_process_reports_later(tmp_path):
    """Whoever hears of an end has all texts that were set before it."""
    server = StoreServer(
        f"unix:{tmp_path / 'x'}", SECRET, on_report=lambda p, said: server.notify_all({"event": "done"})
    )
    heard = []
    a, b = (Store(server.address, SECRET, p, heard.append if p else lambda event: None, 5.0) for p in (0, 1))
    for i in range(20):
        b.ask(str(i))
    until(lambda: len(heard) == 20)
    for i in range(20):
        a.set(str(i), "")
    assert a.report({})
    until(lambda: heard[-1]["event"] == "done")
    assert [e.get("key") for e in heard[20:]] == [*map(str, range(20)), None]
    for end in (a, b, server):
        end.close()


def test_a_report_that_nobody_notices(connect, server, monkeypatch):
    a = connect()
    monkeypatch.setattr(server, "answer", lambda client, said: None)
    begin = time.monotonic()
    assert within(5, a.report, {}, 0.2) is False
    assert 0.2 <= time.monotonic() - begin < 2 and not a._acknowledged


def test_a_client_that_ends_is_reported_and_leaves_nothing(connect, server):
    a, b = connect(4), connect(5)
    raised = []

    def ask():
        with pytest.raises(ClusterError, match="is gone") as error:
            a.report({}, 30.0)
        raised.append(error.value)

    server.answer = lambda client, said: None
    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: a._acknowledged)
    b.close()
    a.close()
    asking.join(5)
    assert len(raised) == 1
    until(lambda: len(server.ended) == 2)
    assert sorted(server.ended) == [4, 5]
    assert not a._acknowledged and not server.statuses()


def test_events_reach_all(connect, server):
    events = [[], []]
    for p in (0, 1):
        connect(p, events[p].append)
    until(lambda: len(server.statuses()) == 2)
    server.notify_all({"event": "lost", "process": 1, "why": "killed"})
    until(lambda: all(events))
    assert events == [[{"event": "lost", "process": 1, "why": "killed"}]] * 2


def test_signs_of_life_carry_a_status(connect, server, monkeypatch):
    monkeypatch.setattr(connection_module, "BEAT", 0.02)
    a, b = connect(0), connect(1)
    a.status = lambda: "step 7"

    def broken():
        raise KeyError("step")

    b.status = broken  # alive all the same
    until(lambda: server.statuses() == {0: "step 7", 1: "KeyError: 'step'"})


def test_who_is_silent(connect, server, monkeypatch):
    monkeypatch.setattr(connection_module, "BEAT", 0.05)
    connect(0), connect(1)
    until(lambda: len(server.statuses()) == 2)
    assert server.silent(10.0) == []
    server._clients[1].seen -= 11
    assert server.silent(10.0) in ([1], [])  # a sign of life may have come between
    server._clients[1].seen += 1000  # and none is missed from now on
    server._looked -= 100  # the caller itself was stopped: that counts for nobody
    server._clients[0].seen -= 100
    assert server.silent(10.0) == []


def test_a_process_that_is_dropped(connect, server):
    """It counts as gone at once, and its end is told once."""
    heard = []
    connect(1, heard.append)
    until(lambda: server.statuses())
    server.drop(1)
    assert server.statuses() == {} and server.ended == [1]
    until(lambda: heard == [{"event": "gone"}])
    server.drop(1)
    assert server.ended == [1]


def test_the_last_time_at_which_all_were_heard(connect, server):
    stores = [connect(p) for p in (0, 1, -3)]
    for i, store in enumerate(stores):
        store.status = lambda i=i: f"status {i}"
    until(lambda: sorted(server.statuses().values()) == ["status 0", "status 1", "status 2"])
    at, said = server.heard()
    assert said == {0: "status 0", 1: "status 1"}  # who starts processes says nothing of calls
    assert at <= time.monotonic() and at == min(server._clients[p].said for p in (0, 1))
    until(lambda: server.heard()[0] > at)
    server._clients[1].said = at - 50
    assert server.heard()[0] in (at - 50, min(server._clients[p].said for p in (0, 1)))  # it may just have said it


def test_a_stopped_process_is_silent(server):
    with children() as start:
        child = start("client", server.address, SECRET.hex(), 3)
        child.hear()
        until(lambda: server.statuses() == {3: "step 3"})
        child.stop()
        begin = time.monotonic()
        silent = []
        while not silent and time.monotonic() < begin + 5:
            silent = server.silent(1.5)
            time.sleep(0.1)
        assert silent == [3] and time.monotonic() - begin < 2.5
        child.signal(signal.SIGCONT)
        until(lambda: server.silent(1.5) == [])
        child.signal(signal.SIGKILL)
        until(lambda: server.ended)
        assert server.ended == [3]


def test_a_stopped_client_that_reads_nothing_does_not_stop_the_server(server, connect, monkeypatch):
    monkeypatch.setattr(store_module, "_PATIENCE", 1)
    with children() as start:
        child = start("client", server.address, SECRET.hex(), 3)
        child.hear()
        child.stop()
        other = connect(0)
        long = {"event": "lost", "process": 1, "why": "x" * (1 << 20)}
        begin = time.monotonic()
        for _ in range(24):  # 24 MB, more than the buffers of a socket
            server.notify_all(long)
        assert time.monotonic() - begin < 10
        until(lambda: server.ended == [3])
        other.set("key", "text")
        other.ask("key")
        until(lambda: other.texts)


def test_a_stopped_server_stops_no_client(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "BEAT", 0.01)
    with children() as start:
        child = start("server", f"unix:{tmp_path / 'far'}", SECRET.hex())
        address = child.hear()["address"]
        client = Store(address, SECRET, 0, lambda event: None, 5.0)
        client.status = lambda: "x" * 40_000  # fills the buffers of the socket
        client.set("a", "1")
        for key in "abc":
            client.ask(key)
        until(lambda: client.texts == {"a": "1", "b": None, "c": None})
        child.stop()
        time.sleep(3.5)
        begin = time.monotonic()
        assert within(5, client.report, {}, 0.3) is False
        client.set("c", "3")
        assert time.monotonic() - begin < 2
        client.status = str
        child.signal(signal.SIGCONT)
        client.set("b", "2")
        until(lambda: client.texts == {"a": "1", "b": "2", "c": "3"}, 10)  # nothing is out of step
        within(5, client.close)


def test_a_server_that_ends(server, connect):
    events = []
    a = connect(0, events.append)
    raised = []

    def ask():
        try:
            a.report({}, 60.0)
        except ClusterError as error:
            raised.append(str(error))

    server.answer = lambda client, said: None
    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: a._acknowledged)
    server.close()
    asking.join(5)
    assert raised == [f"the store of this run, at {server.address}, is gone: the launcher, or the process that held "
                      "it, has ended."]  # fmt: skip
    until(lambda: events == [{"event": "gone"}])
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="is gone"):
        a.report({}, 60.0)
    with pytest.raises(ClusterError, match="is gone"):
        for _ in range(100):
            a.set("key", "text")
            time.sleep(0.01)
    within(5, a.close)
    assert time.monotonic() - begin < 5


def test_closing_is_no_event(server, connect):
    events = []
    a = connect(0, events.append)
    a.close()
    a.close()
    time.sleep(0.1)
    assert events == []


def test_a_server_drops_who_speaks_nonsense(server, connect):
    sock = wire.dial(server.address, SECRET, wire.Hello(9), 5.0)
    wire.write_all(sock, Frame(FrameKind.MESSAGE, about=b"abc").pieces()[0])
    while sock.recv(100):
        pass
    sock.close()
    a = connect(0)
    a.set("key", "text")
    a.ask("key")
    until(lambda: a.texts)


@pytest.mark.parametrize(
    "head", [(0, 0, 0xFFFFFFFF), (0, 1, 0), (0, 0xFFFF, 0)], ids=["4 GiB of text", "a value", "many values"]
)
def test_what_a_frame_says_of_its_size_is_not_believed(server, log_lines, head):
    kind, buffers, about = head
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with wire.dial(server.address, SECRET, wire.Hello(9), 5.0) as sock:
        sizes = struct.pack(f"<{buffers}Q", *[1 << 40] * buffers)
        wire.write_all(sock, memoryview(struct.pack("<BxHIQqqq", kind, buffers, about, 0, 0, 0, 0) + sizes))
        with suppress(ConnectionResetError):
            while sock.recv(100):
                pass
    until(lambda: server.ended == [9])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_a_text_that_is_too_long_is_an_error_of_its_sender(connect, monkeypatch):
    monkeypatch.setattr(connection_module, "_LONGEST", 1000)
    a = connect(0)
    with pytest.raises(ClusterError, match=r"a text of 10\d\d bytes is too long to be sent: at most 1000\."):
        a.set("key", "x" * 1000)
    a.set("key", "x" * 900)
    a.ask("key")
    until(lambda: a.texts)


def test_a_second_connection_of_a_process_is_dropped(server, connect, log_lines):
    a, gone = connect(1), SimpleQueue()
    until(lambda: server.statuses())
    second = connect(1, gone.put)
    assert gone.get(timeout=5) == {"event": "gone"}
    assert log_lines() == [f"{server.address}: dropped a second connection of process 1"]
    a.set("key", "text")
    a.ask("key")
    until(lambda: a.texts)
    server.drop(1)
    server.ended.clear()
    third = connect(1)
    third.ask("key")
    until(lambda: third.texts == {"key": "text"} and not second.texts)
    server._clients[1].seen -= 10  # the network broke: it has not said a word since
    fourth = connect(1)
    fourth.ask("key")
    until(lambda: fourth.texts and server.ended == [1])


def test_many_at_once(connect):
    """Texts of all go to all that ask, and each client's own threads do not mix them up."""
    clients = [connect(p) for p in range(4)]

    def tell(p, i):
        for client in clients:
            client.ask(f"{p}/{i}")
        clients[p].set(f"{p}/{i}", json.dumps([p, i]))
        assert clients[p].report({"of": i}, 10.0)

    together(*(lambda p=p, i=i: tell(p, i) for p in range(4) for i in range(10)))
    want = {f"{p}/{i}": json.dumps([p, i]) for p in range(4) for i in range(10)}
    until(lambda: all(c.texts == want for c in clients))


def test_sockets_are_closed(server, connect):
    a = connect(0)
    a.close()
    assert a._sock.fileno() == -1
    until(lambda: server.ended)
    assert isinstance(a._sock, socket.socket)
