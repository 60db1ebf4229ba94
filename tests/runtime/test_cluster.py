"""Processes of a run: links, agreements, losses, and the next epoch. Several clusters in one process, and real ones."""

import json
import signal
import sys
import threading
import time

import pytest

from shardc.errors import ClusterError, DisagreementError, PeerLostError
from shardc.runtime import cluster as cluster_module
from shardc.runtime.calls import refuse_unlike
from shardc.runtime.cluster import Cluster, RunConfig
from shardc.runtime.gathering import Gathering, Repeats
from shardc.runtime.status.waits import Wait
from shardc.runtime.transport import connection as connection_module
from shardc.runtime.transport import wire
from shardc.runtime.transport.connection import Frame, FrameKind
from shardc.runtime.transport.link import Link
from tests.runtime.codec import allocate
from tests.runtime.launcher import SECRET, Run, hear_until, member
from tests.runtime.peers import others, together, until
from tests.runtime.processes import children
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")


def test_islands_of_a_seat():
    config = RunConfig(3, 6, 3, "", b"", "")
    assert config.per_island == 2 and [list(config.island(p)) for p in (0, 3, 5)] == [[0, 1], [2, 3], [4, 5]]


# ---- links


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_links_between_all(a_run, transport):
    clusters = a_run(3, transport).all()
    together(*(lambda c=c, p=p: c.link(p) for c in clusters for p in others(c)))
    for c in clusters:
        for p in others(c):
            assert c.link(p) is c.link(p) and (c.link(p).me, c.link(p).peer) == (c.me, p)
            c.link(p).send_tagged("hello", (str(c.me).encode(), ()))
    for c in clusters:
        for p in others(c):
            assert c.link(p).receive_tagged("hello", 5.0)[0] == str(p).encode()


def test_many_threads_open_one_link(a_run):
    """There is one connection, and all get it: the last caller too."""
    a, b = a_run().all()
    found = []
    together(*(lambda c=c: found.append(c.link(1 - c.me)) for c in [a, b] * 8))
    assert len(found) == 16 and len(set(found)) == 2
    a.link(1).send_tagged("x")
    b.link(0).receive_tagged("x", 5.0)


def test_who_comes_first_waits(a_run):
    run = a_run()
    first = run.join(1)
    found = []
    dialing = threading.Thread(target=lambda: found.append(first.link(0)))
    dialing.start()
    time.sleep(0.3)
    second = run.join(0)
    together(lambda: second.link(1))
    dialing.join(5)
    found[0].send_tagged("x")
    second.link(1).receive_tagged("x", 5.0)


@pytest.mark.parametrize("me", [0, 1])
def test_a_process_that_never_comes(a_run, me):
    cluster = a_run().join(me, deadline=0.4)
    text = (
        rf"^process {me} waited 0\.4 s for process {1 - me} to .*\. Each process has to make the same calls in the same"
    )
    with pytest.raises(ClusterError, match=text):
        within(5, cluster.link, 1 - me)


@pytest.mark.parametrize("me", [0, 1])
def test_a_process_that_dies_before_it_opens_its_link(a_run, me):
    run = a_run()
    cluster = run.join(me, deadline=60.0)
    threading.Timer(0.2, run.lose, [1 - me]).start()
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=f"process {1 - me} is lost: it was killed by signal 9") as error:
        within(5, cluster.link, 1 - me)
    assert time.monotonic() - begin < 1.2 and error.value.process == 1 - me


def test_a_process_that_dies_after_it_told_its_address(a_run, tmp_path):
    run = a_run()
    run.server.set("0/address/0", f"unix:{tmp_path / 'nobody'}")
    cluster = run.join(1, deadline=60.0)
    threading.Timer(0.3, run.lose, [0]).start()
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="process 0 is lost"):
        within(5, cluster.link, 0)
    assert time.monotonic() - begin < 1.3


def test_a_stranger_gets_no_link(a_run, log_lines):
    cluster = a_run(transport="tcp").join(0)
    with pytest.raises(ClusterError, match="does not hold this run's secret"):
        within(5, wire.dial, cluster._listener.address, wire.new_secret(), wire.Hello(1, 0), 5.0)
    until(log_lines)
    assert len(log_lines()) == 1 and not cluster._links


def test_a_second_link_of_the_same_process_is_dropped(a_run, log_lines):
    a, b = a_run().all()
    together(lambda: a.link(1), lambda: b.link(0))
    sock = wire.dial(a._listener.address, SECRET, wire.Hello(1, 0), 5.0)
    assert sock.recv(1) == b""
    sock.close()
    assert log_lines() == ["process 0: dropped a link of process 1, of epoch 0"]
    a.link(1).send_tagged("x")
    b.link(0).receive_tagged("x", 5.0)


@pytest.mark.parametrize("number", [-1, 0, 1, 3, 1 << 62])
def test_a_link_of_a_process_that_does_not_dial_here_is_dropped(a_run, log_lines, number):
    """The process with the higher number dials, and there are three."""
    cluster = a_run(3).join(1)
    sock = wire.dial(cluster._listener.address, SECRET, wire.Hello(number), 5.0)
    assert sock.recv(1) == b""
    sock.close()
    assert log_lines() == [f"process 1: dropped a link of process {number}, of epoch 0"]


def test_a_link_of_an_earlier_epoch_is_dropped(a_run, log_lines):
    cluster = a_run().join(0, epoch=2)
    sock = wire.dial(cluster._listener.address, SECRET, wire.Hello(1, 1), 5.0)
    assert sock.recv(1) == b""
    sock.close()
    assert log_lines() == ["process 0: dropped a link of process 1, of epoch 1"]


@pytest.mark.parametrize("plain_data", [False, True])
def test_only_links_between_hosts_may_send_large_values_in_clear(a_run, plain_data):
    a, b = a_run(transport="tcp").all(plain_data=plain_data)
    together(lambda: a.link(1), lambda: b.link(0))
    assert a.link(1)._sock.clear is b.link(0)._sock.clear is plain_data
    assert not a.store._sock.clear


def test_an_address_in_use(a_run):
    run = a_run()
    listener = wire.listen("127.0.0.1:0")
    with pytest.raises(ClusterError, match="the address is in use"):
        Cluster(RunConfig(0, 2, 2, run.server.address, SECRET, wire.address_of(listener)), allocate)
    listener.close()


# ---- agreements


def test_gather(a_run):
    clusters = a_run(3).all()
    found = {}

    def go(c):
        for i in range(3):
            found[c.me, i] = c.gather("names", f"{c.me}.{i}")
            found[c.me, -i - 1] = c.gather("other", str(i))

    together(*(lambda c=c: go(c) for c in clusters))
    assert found == {(p, i): [f"{q}.{i}" for q in range(3)] for p in range(3) for i in range(3)} | {
        (p, -i - 1): [str(i)] * 3 for p in range(3) for i in range(3)
    }


@pytest.mark.parametrize("n", [1, 2, 5])
def test_gatherings_that_nobody_waits_for(a_run, n):
    """A process begins several, and finishes them in any order. Nothing of them is left."""
    found = {}

    def go(c):
        calls = [c.begin_gather("calls", f"{c.me}.{k}\0ü", range(n), "test") for k in range(4)]
        found[c.me] = [c.finish_gather(call) for call in reversed(calls)][::-1]

    clusters = a_run(n).all()
    together(*(lambda c=c: go(c) for c in clusters))
    assert found == {p: [[f"{q}.{k}\0ü" for q in range(n)] for k in range(4)] for p in range(n)}
    assert not any(c._early or c._gathering for c in clusters)


def test_only_some_gather(a_run):
    clusters = a_run(4).all()
    found = {}
    together(*(lambda p=p: found.update({p: clusters[p].gather("x", str(p), (0, 2, 3))}) for p in (0, 2, 3)))
    assert found == {p: ["0", "2", "3"] for p in (0, 2, 3)} and not clusters[1]._links


def test_whether_all_have_come(a_run):
    a, b = a_run().all()
    together(lambda: a.link(1), lambda: b.link(0))
    call = a.begin_gather("calls", "a", range(2), "test")
    assert not call.is_complete
    b.begin_gather("calls", "b", range(2), "test")
    until(lambda: call.is_complete)


def test_who_breaks_off_while_others_wait_is_named(a_run):
    """The launcher need not know of it: the link tells."""
    a, b = a_run().all(deadline=60.0)
    together(lambda: a.link(1), lambda: b.link(0))
    call = a.begin_gather("calls", "a", range(2), "at step, call 3")
    threading.Timer(0.2, b.link(0).close).start()
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=r"process 1 is lost: .*\. Process 0 waited for it at step, call 3\."):
        within(5, a.finish_gather, call)
    assert time.monotonic() - begin < 2


def test_who_came_and_broke_off_counts(a_run):
    a, b = a_run().all()
    together(lambda: a.link(1), lambda: b.link(0))
    b.begin_gather("calls", "b", range(2), "test")
    b.link(0).close()
    until(lambda: a.link(1).lost)
    assert within(5, a.finish_gather, a.begin_gather("calls", "a", range(2), "test")) == ["a", "b"]


def test_64_processes_agree_in_six_messages_of_each(a_run, monkeypatch):
    sent, send = [], Link.send
    monkeypatch.setattr(Link, "send", lambda link, frame: (sent.append(frame.kind), send(link, frame)))
    monkeypatch.setattr(
        Cluster, "_look", lambda _: None
    )  # if it takes long, each beat tells who is late in more messages
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.1)  # threads that wait for the interpreter wake less often
    try:
        clusters = a_run(64).all(deadline=60.0)
        found = {}
        together(*(lambda c=c: found.update({c.me: c.gather("x", str(c.me))}) for c in clusters), seconds=60)
    finally:
        sys.setswitchinterval(interval)
    assert found == {p: [*map(str, range(64))] for p in range(64)}
    assert sent.count(FrameKind.MESSAGE) == 64 * 6
    assert {len(c._links) for c in clusters} == {11}


def test_gathers_of_another_kind_meet(a_run):
    """A checkpoint of one process alone, and a call of the other."""
    a, b = a_run().all(deadline=60.0)
    errors = []

    def go(c):
        with pytest.raises(DisagreementError) as error:
            c.gather("step 3" if c.me else "save", "")
        errors.append(str(error.value).partition("\n")[2])

    together(lambda: go(a), lambda: go(b))
    assert errors == ["  the call: process 0: save; process 1: step 3"] * 2


def test_one_that_does_not_come(a_run):
    clusters = a_run(3).all(deadline=0.5)
    errors = []

    def go(c):
        with pytest.raises(ClusterError) as error:
            c.gather("train_step", "")
        errors.append(str(error.value).partition(".  ")[0][:55])

    together(*(lambda c=c: go(c) for c in clusters[:2]))
    assert sorted(errors) == [f"process {p} waited 0.5 s for process 2 at train_step. Each"[:55] for p in (0, 1)]


def test_one_that_dies_before_it_comes(a_run):
    run = a_run(3)
    clusters = run.all(deadline=60.0)
    threading.Timer(0.2, run.lose, [2]).start()
    begin = time.monotonic()
    raised = []

    def go(c):
        with pytest.raises(PeerLostError) as error:
            c.gather("step", "")
        raised.append(error.value.process)

    together(*(lambda c=c: go(c) for c in clusters[:2]))
    assert raised == [2, 2] and time.monotonic() - begin < 1.2
    with pytest.raises(PeerLostError, match="process 2 is lost"):
        clusters[0].check()


# ---- scripts that have ended

VAIN = (
    r"^process 1's script has ended; process 0 waits for it {}\. Each process has to make the same calls in the same "
)


def refuses(call, why, seconds=1.5):
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=VAIN.format(why)):
        within(5, call)
    assert time.monotonic() - begin < seconds


def test_a_process_that_has_ended_is_not_waited_for(a_run):
    run = a_run()
    a, b = run.all(deadline=60.0)
    threading.Thread(target=b.gather, args=("step", "b")).start()
    b.publish("colour", "red")
    threading.Timer(0.3, run.end, [1]).start()
    assert within(5, a.gather, "step", "a") == ["a", "b"]  # it told this before its end
    refuses(lambda: a.gather("step", "a"), "at step")
    assert a.published("colour", 1) == "red"
    refuses(lambda: a.published("size", 1), "to tell its size")
    refuses(lambda: a.wait_for_text("any", 1, "to start JAX"), "to start JAX")


def test_a_link_of_a_process_that_has_ended(a_run):
    """It is not waited for, unless the process has opened it; one that this process dials is taken."""
    run = a_run(3)
    a, b, c = run.all(deadline=60.0)
    opened = wire.dial(a._listener.address, SECRET, wire.Hello(2), 5.0)
    run.end(2)
    run.end(1)
    until(lambda: a.has_ended(1))
    refuses(lambda: a.link(1), "to open a link")
    assert within(5, a.link, 2).peer == 2
    opened.close()
    assert within(5, b.link, 0).peer == 0
    assert within(5, c.link, 1).peer == 1


def test_who_has_made_the_same_calls_is_waited_for(a_run):
    run = a_run(3)
    a, b, _ = run.all(deadline=60.0)
    for cluster in (a, b):
        cluster.count("calls")
    run.end(1)
    run.end(2)
    until(lambda: a.has_ended(1) and a.has_ended(2))
    a.refuse_ended([0, 1], "calls", "at call 0")
    with pytest.raises(ClusterError, match=r"^process 2's script has ended; process 0 waits for it at call 0\. "):
        a.refuse_ended([1, 2], "calls", "at call 0")
    a.count("calls")
    with pytest.raises(ClusterError, match=r"^the scripts of processes 1, 2 have ended; process 0 waits for them at "):
        a.refuse_ended([1, 2], "calls", "at call 1")


def test_a_call_in_jax_that_waits_in_vain_is_reported_once(a_run, log_lines):
    run = a_run()
    a = run.join(0)
    b = run.join(1)
    together(lambda: a.link(1), lambda: b.link(0))
    a.begin_gather("calls", "", range(2), "at call 0")
    a._status()
    run.end(1, counts={})
    until(lambda: a.has_ended(1))
    assert log_lines() == []
    for _ in range(5):
        a._status()
    until(log_lines)
    (line,) = log_lines()
    assert line.startswith("process 1's script has ended; process 0 waits for it at call 0. ")


def unlike(texts):
    refuse_unlike("step", list(texts), [{"the call": text} for text in texts.values()])


def test_calls_that_differ_are_reported_though_nobody_looks_at_them(a_run, monkeypatch):
    """Their main threads hang in a collective of JAX: the signs of life find it, also before all have come."""
    monkeypatch.setattr(connection_module, "BEAT", 0.1)
    clusters = a_run(5).all()
    errors = {}
    for c in clusters:
        c.on_wrong = lambda error, me=c.me: errors.setdefault(me, []).append(error)
    begun = clusters[:4]
    together(*(lambda c=c, p=p: c.link(p) for c in clusters for p in others(c)))
    together(*(lambda c=c: c.begin_gather("calls", "ab"[c.me == 2], range(5), "at x", unlike) for c in begun))
    until(lambda: len(errors) == 4, 15)
    (line,) = {str(error) for (error,) in errors.values()}
    assert line == "step: the processes of this run differ in\n  the call: processes 0, 1, 3: a; process 2: b"


def test_calls_that_differ_are_an_error_of_who_waits_for_a_third(a_run):
    a, b, c = a_run(3).all(deadline=60.0)
    together(*(lambda x=x, p=p: x.link(p) for x in (a, b, c) for p in others(x)))
    a.begin_gather("calls", "a", range(3), "at x", unlike)
    call = b.begin_gather("calls", "b", range(3), "at x", unlike)
    with pytest.raises(DisagreementError, match="the call: process 0: a; process 1: b"):
        within(5, b.finish_gather, call)
    assert not b._gathering and a.error_within(1.0) is not None


def repeats_of(cluster, text):
    """Calls of a cluster that repeat one which was gathered."""
    call = cluster.begin_gather("calls", text, range(cluster.processes), "at x", unlike)
    return Repeats("calls", call.key[1], lambda number: Gathering(
        ("calls", number), range(cluster.processes), cluster.me, f"{text} {number}", f"at {text} {number}", unlike
    ))  # fmt: skip


@pytest.mark.parametrize("first", ["repeats", "gathers"])
def test_a_call_that_only_one_repeats(a_run, first):
    """It is gathered after all, by both: who has launched it knows, and who comes later does not repeat."""
    a, b = a_run().all(deadline=60.0)
    together(lambda: a.link(1), lambda: b.link(0))
    sent, send = [], a.link(1).send
    a.link(1).send = lambda frame: (sent.append(frame.kind), send(frame))
    calls = repeats_of(a, "a"), repeats_of(b, "a")
    before = sent.count(FrameKind.MESSAGE)
    assert all(c.repeat(r) for c, r in zip((a, b), calls, strict=True) for _ in range(5))
    assert sent.count(FrameKind.MESSAGE) == before
    if first == "repeats":
        assert a.repeat(calls[0]) and a.repeat(calls[0])
    other = b.begin_gather("calls", "b", range(2), "at b", unlike)
    if first == "repeats":
        until(lambda: a.error_within(0.0) and b.error_of([other]))
        assert "process 0: a 6; process 1: b" in str(a.error_within(0.0))
    else:
        until(lambda: a._early)
        assert not a.repeat(calls[0])


def test_a_repeated_call_that_others_never_make(a_run):
    run = a_run()
    a, b = run.all(deadline=60.0)
    together(lambda: a.link(1), lambda: b.link(0))
    calls, _ = repeats_of(a, "a"), repeats_of(b, "a")
    until(lambda: all(call.is_complete for call in a._gathering.values()))
    assert a.repeat(calls)
    run.end(1)
    until(lambda: a.error_within(0.0))
    assert "process 1's script has ended; process 0 waits for it at a 1." in str(a.error_within(0.0))
    assert not a.repeat(calls)


@pytest.mark.parametrize("late", [0, 3, 4])
def test_who_is_late_is_named_by_all(a_run, late, monkeypatch):
    """Also by those that get no message of it."""
    monkeypatch.setattr(connection_module, "BEAT", 0.1)
    clusters = a_run(6).all(deadline=1.5)
    together(*(lambda c=c, p=p: c.link(p) for c in clusters for p in others(c)))
    errors = []

    def go(c):
        with pytest.raises(ClusterError) as error:
            c.gather("step", "")
        errors.append(str(error.value).partition(". ")[0])

    together(*(lambda c=c: go(c) for c in clusters if c.me != late))
    assert sorted(errors) == [f"process {p} waited 1.5 s for process {late} at step" for p in range(6) if p != late]


def test_an_end_in_an_earlier_epoch_does_not_count(a_run):
    run = a_run()
    a = run.join(0, epoch=1)
    run.end(1, epoch=0)
    run.server.notify_all({"event": "leave"})
    until(lambda: 1 in a._ended)
    assert not a.has_ended(1)


# ---- losses, and the next epoch


def test_a_run_that_ends(a_run):
    run = a_run()
    cluster = run.join(0, deadline=60.0)
    run.server.notify_all({"event": "over", "why": "process 1 failed"})
    with pytest.raises(ClusterError, match="the run ends: process 1 failed"):
        within(5, cluster.gather, "x", "")


def test_the_end_of_the_launcher(a_run):
    run = a_run()
    cluster, orphaned = run.join(0), threading.Event()
    cluster.on_orphaned = orphaned.set
    run.server.close()
    assert orphaned.wait(5)
    with pytest.raises(ClusterError, match="the launcher has ended"):
        cluster.check()


def test_rejoining(a_run):
    """One of three is replaced: links of the next epoch work, and what was sent on those of the last one is gone."""
    run = a_run(3)
    clusters = run.all()
    together(*(lambda c=c, p=p: c.link(p) for c in clusters for p in others(c)))
    old = {(c.me, p): c.link(p) for c in clusters for p in others(c)}
    together(*(lambda c=c: c.gather("steps", "old") for c in clusters))
    clusters[0].link(1).send_tagged("state", (b"old", ()))
    clusters[0].link(1).send(Frame(FrameKind.MESSAGE, 7))
    until(lambda: clusters[1].link(0)._early)
    clusters[2].close()
    clusters[0].loop.step(7)
    said = json.loads(clusters[0]._status())
    assert (said["step"], said["epoch"]) == (7, 0)
    run.lose(2)
    for c in clusters[:2]:
        with pytest.raises(PeerLostError, match="process 2 is lost"):
            for _ in range(500):
                c.check()
                time.sleep(0.01)
    run.server.notify_all({"event": "epoch", "epoch": 1, "restarts": 0})
    together(clusters[0].rejoin, clusters[1].rejoin)
    assert "step" not in json.loads(clusters[0]._status())  # step 7 was of the epoch before
    new = run.join(2, epoch=1)
    clusters = [*clusters[:2], new]
    together(*(lambda c=c, p=p: c.link(p) for c in clusters for p in others(c)))
    assert [c.epoch for c in clusters] == [1, 1, 1] and clusters[0].config.restarts == 0
    assert all(link._sock.fileno() == -1 for (me, _), link in old.items() if me < 2)
    found = {}
    together(*(lambda c=c: found.update({c.me: c.gather("steps", f"new {c.me}")}) for c in clusters))
    assert found == {p: ["new 0", "new 1", "new 2"] for p in range(3)}
    clusters[0].link(1).send_tagged("state", (b"new", ()))
    assert clusters[1].link(0).receive_tagged("state", 5.0)[0] == b"new" and not clusters[1].link(0)._early
    clusters[2].link(0).send_tagged("x")
    clusters[0].link(2).receive_tagged("x", 5.0)
    for c in clusters:
        c.check()


def test_a_link_that_comes_while_a_loss_is_mended(a_run):
    """It is of the epoch that is over: the link of the next epoch takes its place."""
    run = a_run(3)
    a, b, _ = run.all()
    together(lambda: a.link(1), lambda: b.link(0))
    run.lose(2)
    waiting = threading.Thread(target=a.rejoin)
    waiting.start()
    until(lambda: not a._links)
    hello = wire.Hello(1, 0)
    late = wire.dial(a._listener.address, SECRET, hello, 5.0)
    until(lambda: 1 in a._links)
    stale = a._links[1]
    run.server.notify_all({"event": "epoch", "epoch": 1, "restarts": 0})
    within(5, b.rejoin)
    waiting.join(5)
    assert a.epoch == 1
    together(lambda: a.link(1), lambda: b.link(0))
    assert a.link(1) is not stale and stale._sock.fileno() == -1
    b.link(0).send_tagged("x", (b"new", ()))
    assert a.link(1).receive_tagged("x", 5.0)[0] == b"new"
    late.close()


def test_a_link_breaks_and_nobody_is_lost(a_run, monkeypatch):
    monkeypatch.setattr(cluster_module, "_UNKNOWN", 0.3)
    run = a_run()
    a, b = run.all(silence=0.5, deadline=60.0)
    together(lambda: a.link(1), lambda: b.link(0))
    b.link(0).close()
    with pytest.raises(PeerLostError, match=r"the launcher knows of no loss after 0\.8 s"):
        within(5, a.rejoin)


def test_nobody_starts_it_again(a_run):
    run = a_run()
    cluster = run.join(0, deadline=0.4)
    run.lose(1)
    until(lambda: cluster._lost)
    with pytest.raises(
        PeerLostError, match=r"process 1 is lost: .* It stays lost: nobody started it again within 0\.4 s"
    ):
        within(5, cluster.rejoin)


def test_a_run_that_ends_while_it_is_rejoined(a_run):
    run = a_run()
    cluster = run.join(0, deadline=60.0)
    run.lose(1)
    threading.Timer(0.2, run.server.notify_all, [{"event": "over", "why": "no restarts are left"}]).start()
    with pytest.raises(PeerLostError, match="It stays lost: no restarts are left"):
        within(5, cluster.rejoin)


def test_a_new_start_that_this_process_has_not_noticed(a_run):
    run = a_run()
    cluster = run.join(0, deadline=60.0)
    threading.Timer(0.1, run.server.notify_all, [{"event": "epoch", "epoch": 1, "restarts": 2}]).start()
    with pytest.raises(PeerLostError, match="other processes of this run were started again"):
        within(5, cluster.link, 1)


def test_a_link_that_comes_before_the_newest_start_is_adopted(a_run):
    run = a_run()
    cluster = run.join(0)
    late = wire.dial(cluster._listener.address, SECRET, wire.Hello(1, 0), 5.0)
    until(lambda: 1 in cluster._links)
    run.server.notify_all({"event": "epoch", "epoch": 1, "restarts": 2})
    until(lambda: cluster._next)
    cluster.adopt()
    assert (cluster.epoch, cluster._links) == (1, {})
    late.close()


def test_closing_leaves_nothing(a_run, tmp_path):
    run = a_run()
    clusters = run.all()
    together(*(lambda c=c: c.link(1 - c.me) for c in clusters))
    begin = time.monotonic()
    together(*(c.close for c in clusters))
    assert time.monotonic() - begin < 2
    assert not [f.name for f in tmp_path.iterdir() if f.name != "store"]
    until(lambda: not run.server.statuses())


def test_joining_and_leaving(a_run, monkeypatch):
    monkeypatch.setattr(cluster_module, "_current", [])
    run = a_run()
    assert cluster_module.current() is None
    joined = cluster_module.join(run.config(0), allocate)
    joined.on_orphaned = lambda: None
    assert cluster_module.current() is joined
    with pytest.raises(ClusterError, match="this process is process 0 of a run already"):
        cluster_module.join(run.config(1), allocate)
    within(5, cluster_module.leave)
    assert cluster_module.current() is None


# ---- real processes


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_processes_run_a_network_and_end(a_run, transport):
    run = a_run(3, transport)
    with children() as start:
        members = [member(start, run, p, runs=30, meet=True) for p in range(3)]
        for m in members:
            assert hear_until(m, "done")["done"] == 30
            assert hear_until(m, "closed")["threads"] == []
            assert m.end() == 0


def test_processes_that_end_one_after_the_other(a_run):
    """Who has made all its steps leaves; the others still make theirs."""
    run = a_run(3)
    with children() as start:
        for m in [member(start, run, p, runs=5) for p in range(3)]:
            assert hear_until(m, "done")["done"] == 5
            assert m.end() == 0


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_process_is_an_error_in_all_within_a_second(a_run, killed):
    """In its neighbours, by their links; in a process without a link to it, by a neighbour."""
    run = a_run(3)
    with children() as start:
        members = [member(start, run, p, seed=killed, neighbours=True) for p in range(3)]
        for m in members:
            hear_until(m, "run")
        time.sleep(0.2)
        at = members[killed].signal(signal.SIGKILL)
        for p in {0, 1, 2} - {killed}:
            said = hear_until(members[p], "error")
            assert said["error"] == "PeerLostError" and said["lost"] == killed, said
            assert said["at"] - at < 1 and f"waited: rank {p} at {p}" in said["text"], said
            assert members[p].end() == 0


def test_a_killed_process_is_replaced(a_run):
    run = a_run(3)
    with children() as start:
        members = [member(start, run, p, rejoin=True) for p in range(3)]
        for m in members:
            hear_until(m, "run")
        members[1].signal(signal.SIGKILL)
        for p in (0, 2):
            assert hear_until(members[p], "error")["lost"] == 1
        run.server.notify_all({"event": "epoch", "epoch": 1, "restarts": 0})
        members[1].end()
        members[1] = member(start, run, 1, config={"epoch": 1})  # at the address of the killed one
        for m in members:
            hear_until(m, "run")
        members[0].signal(signal.SIGKILL)
        for p in (1, 2):
            assert json.dumps(hear_until(members[p], "error")["lost"]) == "0"


def test_a_task_that_fails_in_one_process(a_run):
    run = a_run(3)
    with children() as start:
        members = [member(start, run, p, runs=6, fails=["1F2", 3], meet=True) for p in range(3)]
        for p, m in enumerate(members):
            said = hear_until(m, "failed")
            assert said["failed"] in ((3,) if p == 1 else (3, 4)) and "actor 1 failed in 1F2" in said["text"], said
            assert hear_until(m, "done")["done"] == 6
            assert m.end() == 0


def test_the_launcher_is_stopped_and_a_running_network_goes_on(tmp_path):
    """Nothing central is on the way of the data."""
    with children() as start:
        launcher = start("server", f"unix:{tmp_path / 'store'}", SECRET.hex())
        address = launcher.hear()["address"]
        run = Run(tmp_path, address=address)
        members = [member(start, run, p, speak=True, config={"silence": 1.0}) for p in range(2)]
        for m in members:
            hear_until(m, "run")
        launcher.stop()
        time.sleep(2.5)
        for m in members:
            last = [0]
            while not m._lines.empty():
                last.append(m.hear().get("run", 0))
            assert last[-1] > 20 and hear_until(m, "run")["run"] > last[-1]


def test_orphans_end(tmp_path):
    """Processes of a run that nobody watches end too."""
    with children() as start:
        launcher = start("server", f"unix:{tmp_path / 'store'}", SECRET.hex())
        address = launcher.hear()["address"]
        run = Run(tmp_path, address=address)
        members = [member(start, run, p) for p in range(2)]
        for m in members:
            hear_until(m, "run")
        launcher.signal(signal.SIGKILL)
        assert [m.end(5) for m in members] == [3, 3]


def test_what_a_process_says_goes_with_its_signs_of_life(a_run):
    made = a_run(1)
    cluster = made.join(0)
    cluster.loop.step(3, loss=1.5)
    with pytest.raises(TypeError):
        cluster.loop.step(4, loss=object())  # what cannot be sent fails here, not in a thread
    cluster.loop.step(4)
    wait = Wait(((1, "8/1"),), "rank 0 before 2B3", 4.25, "8/0")
    cluster.waits.networks[7] = list
    cluster.waits.networks[8] = lambda: [wait]
    want = {"step": 4, "loss": 1.5, "epoch": 0, "waits": "process 1 (rank 0 before 2B3, 4 s)"}
    want["run"] = {"calls": {}, "waits": [["8/0", [[1, "8/1"]], "rank 0 before 2B3", 4.25]]}

    def said():
        facts = json.loads(made.server.statuses().get(0) or "{}")
        return {name: fact for name, fact in facts.items() if name not in ("now", "steps", "arrived")}

    until(lambda: said() == want)
    assert json.loads(made.server.statuses()[0])["steps"][-1][0] == 4
    assert Wait.from_json(want["run"]["waits"][0]) == wait
    cluster.waits.networks.clear()
    del want["waits"], want["run"]["waits"][0]
    until(lambda: said() == want)


def test_a_process_says_its_newest_calls_and_for_whom_it_waits(a_run):
    def said(cluster):
        return json.loads(cluster._status())["run"]

    a, b = a_run().all(deadline=60.0)
    together(lambda: a.link(1), lambda: b.link(0))
    repeats = Repeats("calls of 0,1", 0, lambda n: Gathering(("", n), [0, 1], 0, "", f"at step, call {n}"))
    a.begin_gather("calls of 0,1", "", [0, 1], "at step, call 0")
    assert said(a)["calls"] == {"calls of 0,1": ["0,1", 0, "at step, call 0"]}
    assert a.repeat(repeats) and a.repeat(repeats)
    a.begin_gather("calls of 0", "", [0], "at evaluate")
    assert list(said(a)["calls"].items()) == [
        ("calls of 0,1", ["0,1", 2, "at step, call 2"]), ("calls of 0", ["0", 0, "at evaluate"])
    ]  # fmt: skip
    with a.waits.during([1], "to say x"):
        [[who, awaited, why, seconds]] = said(a)["waits"]
        assert (who, awaited, why) == ("", [[1, ""]], "to say x") and seconds >= 0
    assert said(a)["waits"] == []


def test_a_value_of_another_process_is_waited_for_beyond_the_deadline(a_run):
    """The launcher has that time to find who is late."""
    a, b = a_run().all(deadline=0.2, judging=0.3)
    assert a.config.patience == 0.5
    b.publish("x", "y")
    together(lambda: a.link(1), lambda: b.link(0).send_tagged("t", (b"z", ())))
    assert a.receive_tagged(1, "t", "for t")[0] == b"z"
    with pytest.raises(ClusterError, match=r"^process 0 waited 0\.5 s for process 1, u\.$"):
        a.receive_tagged(1, "u", "for u")
    with pytest.raises(
        ClusterError, match=r"^process 0 waited 0\.5 s for process 1 at all\. Each process has to make "
    ):
        a.gather("all", "")
    assert a.waits.now() == []


def test_a_process_shows_what_it_does_if_it_is_asked(a_run):
    made = a_run(1)
    cluster = made.join(0)
    cluster.on_show = lambda: "it sleeps"
    made.server.notify(0, {"event": "show", "key": "a"})
    until(lambda: made.server.text("a") == "it sleeps")
    cluster.check()  # nothing else follows from it
