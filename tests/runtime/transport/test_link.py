"""Links: frames and letters arrive whole and in order, a silent or dead peer is lost, nothing is left over."""

import gc
import os
import random
import signal
import socket
import struct
import threading
import time
import weakref
from queue import SimpleQueue

import numpy as np
import pytest

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.transport import link as link_module
from shardc.runtime.transport import wire
from shardc.runtime.transport.connection import Frame, FrameKind
from shardc.runtime.transport.link import Link
from tests.runtime.codec import allocate
from tests.runtime.peers import link_pair, together, until
from tests.runtime.processes import children
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")
SECRET = wire.new_secret()


class Receiver:
    """A network that keeps what comes."""

    def __init__(self, on_frame=lambda frame: None):
        self.frames, self.lost, self._on_frame = [], [], on_frame

    def receive(self, peer, frame):
        self._on_frame(frame)
        self.frames.append((peer, frame))

    def lose(self, error):
        self.lost.append(error)


def filled(size, value):
    return memoryview(np.full(size, value, np.uint8))


def of_transport(transport, tmp_path):
    """Two ends of a connection of a kind; `clear` is TCP whose large buffers are not encrypted."""
    if transport == "pair":
        return socket.socketpair()
    arrived = SimpleQueue()
    address = f"unix:{tmp_path / 'x'}" if transport == "unix" else "127.0.0.1:0"
    listener = wire.Listener(wire.listen(address), SECRET, lambda sock, hello: arrived.put(sock))
    found = wire.dial(listener.address, SECRET, wire.Hello(1), 5.0), arrived.get(timeout=5)
    listener.close()
    if transport == "clear":
        for sock in found:
            sock.clear = True
    return found


# ---- what arrives


@pytest.mark.parametrize("transport", ["pair", "unix", "tcp", "clear"])
@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1,),
        (1000, 0, 3),
        (8192, 8152, 8151),
        (1 << 20, 5, 1 << 23),
        tuple(range(100)),
        (40_000, 60_000, 1 << 16),
        ((1 << 16) - 1, 1 << 16, 1 << 16, (1 << 16) + 1, 1),
    ],
)
def test_letters_arrive_whole(transport, sizes, tmp_path):
    with link_pair(sockets=of_transport(transport, tmp_path)) as (a, b):
        for value in range(3):
            a.send_tagged("tag", (bytes([value]) * 100, [filled(size, value) for size in sizes]))
        for value in range(3):
            about, buffers = within(10, b.receive_tagged, "tag", 10.0)
            assert about == bytes([value]) * 100
            assert [np.asarray(x).tobytes() for x in buffers] == [bytes([value]) * size for size in sizes]


def test_letters_of_a_name_keep_their_order_and_names_do_not_wait_for_each_other():
    with link_pair() as (a, b):
        for i in range(50):
            a.send_tagged("even" if i % 2 == 0 else "ödd", (str(i).encode(), ()))
        assert [int(b.receive_tagged("ödd", 5.0)[0]) for _ in range(25)] == list(range(1, 50, 2))
        assert [int(b.receive_tagged("even", 5.0)[0]) for _ in range(25)] == list(range(0, 50, 2))
        assert not b._inboxes


def test_about_may_be_any_bytes_and_long():
    with link_pair() as (a, b):
        about = os.urandom(100_000)
        a.send_tagged("x", (about, [filled(10, 1)]))
        assert b.receive_tagged("x", 5.0)[0] == about


def test_frames_carry_all_their_numbers():
    with link_pair() as (a, b):
        got = Receiver()
        b.add(2**64 - 1, got)
        sent = Frame(FrameKind.MESSAGE, 2**64 - 1, 2**63 - 1, -5, 2**62, b"about", [filled(3, 9)])
        a.send(sent)
        until(lambda: got.frames)
        ((peer, frame),) = got.frames
        assert peer == 0 and frame[:6] == sent[:6] and bytes(frame.buffers[0]) == b"\x09" * 3


@pytest.mark.parametrize("transport", ["unix", "tcp", "clear"])
def test_many_threads_send_at_once(transport, tmp_path):
    """Frames of many threads, small and large, both ways, never mix."""
    with link_pair(sockets=of_transport(transport, tmp_path)) as (a, b):

        def post(link, sender):
            rng = random.Random(sender)
            for i in range(40):
                size = rng.choice([0, 10, 5000, 100_000, 3_000_000 if i % 10 == 0 else 7])
                link.send_tagged(str(sender), (str(size).encode(), [filled(size, sender), filled(3, i)]))

        def collect(link, sender):
            for i in range(40):
                about, (x, y) = link.receive_tagged(str(sender), 20.0)
                assert x.nbytes == int(about) and bytes(y) == bytes([i]) * 3
                assert (np.asarray(x) == sender).all()

        calls = [(link, other, s) for link, other, who in ((a, b, 0), (b, a, 4)) for s in range(who, who + 4)]
        together(
            *(lambda link=link, s=s: post(link, s) for link, _, s in calls),
            *(lambda link=other, s=s: collect(link, s) for _, other, s in calls),
            seconds=60,
        )


def test_sending_does_not_wait_for_the_peer():
    """A peer that takes long to take a frame keeps nobody waiting, and does not count as silent."""
    with link_pair(silence=1.0) as (a, b):
        open_ = threading.Event()
        b.add(1, Receiver(lambda frame: open_.wait(10)))
        begin = time.monotonic()
        for _ in range(3):
            a.send(Frame(FrameKind.MESSAGE, 1, buffers=[filled(1 << 24, 1)]))
        assert time.monotonic() - begin < 1
        time.sleep(2.5)
        assert a.lost is None and b.lost is None
        open_.set()
        a.send_tagged("end")
        within(10, b.receive_tagged, "end", 10.0)


def test_received_buffers_are_never_used_again():
    with link_pair() as (a, b):
        for value in range(5):
            a.send_tagged("x", (b"", [filled(1000, value)]))
        found = [b.receive_tagged("x", 5.0)[1][0] for _ in range(5)]
        assert [set(bytes(x)) for x in found] == [{v} for v in range(5)]
        refs = [weakref.ref(x.obj) for x in found]
        del found
        gc.collect()
        assert all(r() is None for r in refs)


def test_what_is_sent_is_let_go():
    with link_pair() as (a, b):
        x = np.zeros(1 << 22, np.uint8)
        ref = weakref.ref(x)
        a.send_tagged("x", (b"", [memoryview(x)]))
        del x
        b.receive_tagged("x", 5.0)
        until(lambda: ref() is None)


def test_what_is_packed_later_does_not_hold_back_the_rest():
    with link_pair() as (a, b):
        there = threading.Event()

        def make():
            there.wait(10)
            return Frame(FrameKind.TAGGED, about=b"slow\0", buffers=[filled(5, 1)])

        a.send_when_packed(make)
        a.send_tagged("quick")
        b.receive_tagged("quick", 5.0)
        there.set()
        assert bytes(b.receive_tagged("slow", 5.0)[1][0]) == b"\x01" * 5


def test_a_frame_that_cannot_be_made_loses_the_link():
    with link_pair() as (a, b):
        a.send_when_packed(lambda: 1 / 0)
        until(lambda: a.lost and b.lost)
        assert str(a.lost) == "process 1 is lost: a value for it cannot be sent: ZeroDivisionError: division by zero."


def test_bytes_are_counted():
    with link_pair() as (a, b):
        a.send_tagged("x", (b"", [filled(1000, 1), filled(24, 1)]))
        b.receive_tagged("x", 5.0)
        assert a.sent == 1024 and 40 < a.control < 200 and b.sent == 0


# ---- networks: early, late


def test_frames_that_come_early_wait_in_their_order():
    with link_pair() as (a, b):
        for run in range(20):
            a.send(Frame(FrameKind.MESSAGE, 5, run))
        a.send_tagged("sent")
        b.receive_tagged("sent", 5.0)
        got = Receiver(lambda frame: time.sleep(0.002))
        adding = threading.Thread(target=b.add, args=(5, got))
        adding.start()
        for run in range(20, 40):
            a.send(Frame(FrameKind.MESSAGE, 5, run))
        until(lambda: len(got.frames) == 40)
        adding.join(5)
        assert [f.run for _, f in got.frames] == list(range(40)) and not b._early


def test_frames_that_come_late_are_dropped():
    with link_pair() as (a, b):
        got, other = Receiver(), Receiver()
        b.add(5, got)
        b.add(6, other)
        b.remove(5)
        b.remove(8)  # never opened here
        for network in (5, 8, 6):
            a.send(Frame(FrameKind.MESSAGE, network))
        until(lambda: other.frames)
        assert not got.frames and not b._early


# ---- losses


def test_a_network_that_is_dropped_while_its_link_is_locked():
    """Garbage is collected in any thread at any line, and the finalizer of a network removes it."""

    class Owner:
        pass

    with link_pair() as (a, b):
        b.add(5, Receiver())
        owner = Owner()
        owner.itself = owner
        weakref.finalize(owner, b.remove, 5)
        del owner
        box = b._inbox
        b._inbox = lambda tag: (gc.collect(), box(tag))[1]
        a.send_tagged("tag")
        assert within(5, b.receive_tagged, "tag", 2.0) == (b"", [])
        assert not b._receivers


def test_a_letter_that_does_not_come():
    with link_pair() as (a, _):
        begin = time.monotonic()
        with pytest.raises(ClusterError, match="^process 0 waited 0.2 s for process 1, step 3$"[:-1] + r"\.$"):
            within(5, a.receive_tagged, "step 3", 0.2)
        assert 0.2 <= time.monotonic() - begin < 2 and not a._inboxes


def test_a_peer_that_leaves():
    with link_pair() as (a, b):
        got = Receiver()
        a.add(1, got)
        b.send_tagged("last", (b"", [filled(1 << 23, 4)]))
        within(5, b.close)
        until(lambda: got.lost)
        assert a.left and got.lost == [a.lost] and str(a.lost) == "process 1 is lost: it has left the run."
        assert set(bytes(a.receive_tagged("last", 5.0)[1][0])) == {4}  # what came before is there
        with pytest.raises(PeerLostError, match=r"it has left the run\. Process 0 waited for its next\."):
            within(5, a.receive_tagged, "next", 60.0)
        late = Receiver()
        a.add(2, late)
        assert late.lost == [a.lost]
        a.send_tagged("x")  # nothing is sent to a lost peer, and that is no error


def test_both_close_at_once_and_twice():
    with link_pair() as (a, b):
        begin = time.monotonic()
        together(a.close, b.close, a.close)
        within(5, a.close)
        assert time.monotonic() - begin < 0.9
        assert all(link.lost is None or link.left for link in (a, b))
        assert a._sock.fileno() == b._sock.fileno() == -1
        with pytest.raises(ClusterError, match=r"closed the link|it has left the run"):  # whichever came first
            a.receive_tagged("x", 60.0)


def test_closing_wakes_who_collects():
    with link_pair() as (a, _):
        raised = []

        def collect():
            with pytest.raises(ClusterError) as error:
                a.receive_tagged("x", 60.0)
            raised.append(str(error.value))

        threads = [threading.Thread(target=collect) for _ in range(3)]
        for t in threads:
            t.start()
        until(lambda: "x" in a._inboxes and a._inboxes["x"].waiting == 3)
        within(5, a.close)
        for t in threads:
            t.join(5)
        assert raised == ["process 0 waited for process 1, x, and closed the link."] * 3


def test_a_receiver_may_close_its_link():
    with link_pair() as (a, b):
        done = threading.Event()

        class Closing(Receiver):
            def lose(self, error):
                a.close()
                done.set()

        a.add(1, Closing())
        within(5, b.close)
        assert done.wait(5)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 40,
        struct.pack("<BxHIQqqq", 0, 1, 0, 1, 0, 0, 0) + struct.pack("<Q", 1 << 62),
        struct.pack("<BxHIQqqq", 5, 0, 3, 0, 0, 0, 0) + b"\xff\xff\0",
    ],
    ids=["kind", "size", "text"],
)
def test_what_cannot_be_read_loses_the_peer(said):
    """A thread that cannot go on says so: nobody waits for it."""
    mine, other = socket.socketpair()
    link = Link(mine, 0, 1, 5.0, allocate)
    other.sendall(said)
    with pytest.raises(PeerLostError, match="process 1 is lost: what it sent cannot be read: "):
        within(5, link.receive_tagged, "x", 60.0)
    assert within(5, read_to_the_end, other) is None  # the peer learns it too
    within(5, link.close)
    other.close()


def read_to_the_end(sock):
    while sock.recv(1 << 16):
        pass


def test_an_error_of_a_receiver_loses_the_peer():
    with link_pair() as (a, b):
        b.add(1, Receiver(lambda frame: 1 / 0))
        a.send(Frame(FrameKind.MESSAGE, 1))
        until(lambda: a.lost and b.lost)
        assert "ZeroDivisionError" in str(b.lost)


def test_a_silent_peer_is_lost_after_the_deadline_and_not_before():
    mine, other = socket.socketpair()
    link = Link(mine, 0, 1, 1.2, allocate)
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=r"process 1 is lost: it gave no sign of life for 1\.2 s"):
        within(5, link.receive_tagged, "x", 60.0)
    assert 1.2 <= time.monotonic() - begin < 2
    within(5, link.close)
    other.close()


def test_a_silent_peer_that_the_launcher_vouches_for_is_not_lost():
    mine, other = socket.socketpair()
    link = Link(mine, 0, 1, 1.0, allocate)
    for _ in range(6):
        time.sleep(0.5)
        link.vouch()
    assert link.lost is None
    begin = time.monotonic()
    until(lambda: link.lost, 5)
    assert 0.7 < time.monotonic() - begin < 2
    within(5, link.close)
    other.close()


def test_silence_in_the_middle_of_a_frame():
    mine, other = socket.socketpair()
    link = Link(mine, 0, 1, 0.8, allocate)
    other.sendall(Frame(FrameKind.MESSAGE, 1, buffers=[filled(1000, 1)]).pieces()[0])
    other.sendall(bytes(500))
    begin = time.monotonic()
    until(lambda: link.lost, 5)
    assert time.monotonic() - begin < 1.5 and "no sign of life" in str(link.lost)
    within(5, link.close)
    other.close()


def test_a_large_frame_on_its_way_slowly_is_no_silence():
    """64 MB at some 16 MB a second: far longer than the deadline, and never silent. Nor is the end that sends it."""
    mine, middle = socket.socketpair()
    far, end = socket.socketpair()

    def trickle(source, target, pause):
        while data := source.recv(1 << 20):
            target.sendall(data)
            time.sleep(pause)

    def forward(*args):
        try:
            trickle(*args)
        except OSError:
            return

    for args in ((middle, far, 0.01), (far, middle, 0.0)):
        threading.Thread(target=forward, args=args, daemon=True).start()
    with link_pair(silence=0.5, sockets=(mine, end)) as (a, b):
        a.send_tagged("x", (b"", [filled(1 << 26, 3)]))
        ((buffer,),) = [within(30, b.receive_tagged, "x", 30.0)[1]]
        assert buffer.nbytes == 1 << 26 and set(bytes(buffer[:: 1 << 12])) == {3}
        assert a.lost is None and b.lost is None
    for sock in (middle, far):
        sock.close()


def test_a_lost_peer_sets_its_own_link_free():
    """Who was only silent learns that it was given up."""
    with link_pair() as (a, b):
        a._lose("it gave no sign of life for 10 s")
        until(lambda: b.lost)


# ---- real processes


@pytest.fixture
def far(tmp_path, request):
    """A function that starts a process and gives this end of its link."""
    links = []
    with children() as start:

        def connect(transport="unix", silence=2.0):
            arrived = SimpleQueue()
            address = f"unix:{tmp_path / 'x'}" if transport == "unix" else "127.0.0.1:0"
            listener = wire.Listener(wire.listen(address), SECRET, lambda sock, hello: arrived.put(sock))
            child = start("peer", listener.address, SECRET.hex(), silence, transport == "clear")
            child.hear()
            sock = arrived.get(timeout=5)
            if transport == "clear":
                sock.clear = True
            links.append(Link(sock, 0, 1, silence, allocate))
            listener.close()
            return child, links[-1]

        yield connect
    for link in links:
        within(10, link.close)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_killed_peer_is_lost_at_once(far, transport):
    child, link = far(transport)
    raised = []

    def collect():
        with pytest.raises(PeerLostError) as error:
            link.receive_tagged("loss of step 7", 60.0)
        raised.append((time.monotonic(), error.value))

    waiting = threading.Thread(target=collect)
    waiting.start()
    time.sleep(0.05)
    killed = child.signal(signal.SIGKILL)
    waiting.join(5)
    ((at, error),) = raised
    assert at - killed < 1 and error.process == 1
    assert str(error).endswith("Process 0 waited for its loss of step 7.")


@pytest.mark.parametrize("transport", ["tcp", "clear"])
def test_a_peer_that_is_killed_in_the_middle_of_a_value(far, transport):
    """Half a value is none, and whoever sends one hears of the loss."""
    child, link = far(transport)
    begun, gone = threading.Event(), threading.Event()
    link._allocate = lambda size: (begun.set(), gone.wait(20), allocate(size))[-1]
    link.send_tagged("large", (b"", [filled(1 << 25, 7)]))
    child.say("post", "large", 1 << 25)
    assert begun.wait(10)
    child.signal(signal.SIGKILL)
    assert child.end() == -signal.SIGKILL  # a process that is not blocked sends on for a while
    gone.set()
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="process 1 is lost"):
        within(5, link.receive_tagged, "large", 60.0)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("transport", ["unix", "clear"])
def test_a_stopped_peer_is_lost_after_the_deadline_and_learns_it(far, transport):
    child, link = far(transport, silence=1.5)
    child.say("post", "large", 1 << 26)
    child.hear()
    stopped = child.stop()
    until(lambda: link.lost, 10)
    assert 1.0 < time.monotonic() - stopped < 3 and "no sign of life for 1.5 s" in str(link.lost)
    child.signal(signal.SIGCONT)
    child.say("lost")
    assert "process 0 is lost" in child.hear()["text"]


@pytest.mark.parametrize("transport", ["unix", "clear"])
def test_a_peer_that_was_stopped_for_a_while_is_not_lost(far, transport):
    child, link = far(transport, silence=3.0)
    child.say("post", "early", 1 << 24)
    child.hear()
    child.stop()
    link.send_tagged("large", (b"", [filled(1 << 26, 7)]))
    time.sleep(1.5)
    child.signal(signal.SIGCONT)
    child.say("collect", "large", 20.0)
    assert child.hear() == {"sizes": [1 << 26], "right": True}
    assert link.receive_tagged("early", 5.0)[1][0].nbytes == 1 << 24 and link.lost is None


@pytest.mark.parametrize("transport", ["unix", "clear"])
def test_a_peer_that_closes_while_it_is_sent_to(far, transport):
    """It reads what came before it left, or its end is an error: never a hang, never half a value."""
    child, link = far(transport)
    for _ in range(8):
        link.send_tagged("large", (b"", [filled(1 << 24, 7)]))
    child.say("close")
    child.hear()
    assert child.end() == 0
    until(lambda: link.lost, 10)
    within(10, link.close)


def test_closing_does_not_wait_for_a_stopped_peer_for_ever(far):
    child, link = far(silence=1.0)
    child.stop()
    link.send_tagged("large", (b"", [filled(1 << 26, 7)]))
    begin = time.monotonic()
    within(10, link.close)
    assert time.monotonic() - begin < 4


def test_threads_and_files_of_many_links_go(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with link_pair() as (a, b):
            a.send_tagged("x")
            b.receive_tagged("x", 5.0)
    assert len(os.listdir("/proc/self/fd")) <= before


# ---- clocks


def test_clocks_of_one_host_are_one(far):
    _, link = far()
    assert within(5, link.clock_offset) == 0.0 and not link._inboxes
    with link_pair() as (a, b):
        assert a.clock_offset() == b.clock_offset(3) == 0.0


def test_the_speed_of_a_link():
    with link_pair() as (a, b):
        for link in (a, b):
            rate, latency = within(5, link.speed)
            assert 1e6 < rate < 1e12 and 0 < latency < 1


@pytest.mark.parametrize("ahead", [1234.5, -0.25])
def test_clocks_of_two_hosts(monkeypatch, ahead):
    here = threading.current_thread()
    monkeypatch.setattr(
        link_module, "perf_counter", lambda: time.perf_counter() + ahead * (threading.current_thread() is not here)
    )
    with link_pair() as (a, _):  # the reader threads, which answer, have another clock than this one
        assert a.clock_offset() == pytest.approx(ahead, abs=0.02)


def test_a_clock_of_a_lost_peer():
    with link_pair() as (a, b):
        b.close()
        with pytest.raises(PeerLostError, match="has left"):
            within(5, a.clock_offset)
