"""Exchanges of texts between processes: here clusters of one process, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.cluster import Cluster, Seat
from shardc.runtime.exchange import Exchange
from shardc.runtime.store import StoreServer
from tests.runtime.peers import links_of, together
from tests.runtime.watchdog import within


@contextmanager
def run_of(n, deadline=10.0):
    """Clusters of n processes that share a store."""
    server = StoreServer("127.0.0.1:0", b"secret")
    seats = [Seat(i, n, 1, server.address, b"secret", "127.0.0.1:0", deadline=deadline) for i in range(n)]
    clusters = [Cluster(s, lambda size: memoryview(bytearray(size))) for s in seats]
    for c in clusters:
        c.on_orphaned = lambda: None
    try:
        yield clusters
    finally:
        for c in clusters:
            if c is not None:
                c.close()
        server.close()


def in_all(clusters, body):
    """The result of `body(cluster)` of each, all at the same time."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        return [f.result(20) for f in [pool.submit(body, c) for c in clusters]]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8])
def test_all_get_the_texts_of_all(n):
    def body(cluster):
        made = Exchange(cluster, range(n))
        numbers = [made.begin(f"{cluster.me}.{k}") for k in range(5)]  # none waits for another
        return [made.finish(k, "test") for k in numbers]

    with run_of(n) as clusters:
        want = [[f"{p}.{k}" for p in range(n)] for k in range(5)]
        assert within(30, in_all, clusters, body) == [want] * n


def test_only_some_processes_take_part():
    def body(cluster):
        if cluster.me == 1:
            return None
        made = Exchange(cluster, (0, 2, 3))
        return made.finish(made.begin(f"text {cluster.me}"), "test")

    with run_of(4) as clusters:
        got = within(30, in_all, clusters, body)
    assert got == [["text 0", "text 2", "text 3"] if p != 1 else None for p in range(4)]


def test_who_does_not_come_is_named():
    barrier = threading.Barrier(3)

    def body(cluster):
        made = Exchange(cluster, range(3))
        if cluster.me == 2:
            barrier.wait(20)
            return ""
        number = made.begin("here")
        with pytest.raises(ClusterError) as error:
            made.finish(number, "f, call 3")
        barrier.wait(20)
        return str(error.value)

    with run_of(3, deadline=1.0) as clusters:
        texts = within(40, in_all, clusters, body)
    assert texts[0].startswith("process 0 waited 1 s for process") and "2 at f, call 3." in texts[0]
    assert "2 at f, call 3." in texts[1]


def test_a_lost_process_ends_the_wait():
    def body(cluster):
        made = Exchange(cluster, range(2))
        if cluster.me == 1:
            cluster.close()
            clusters[1] = None
            return 0.0
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="process 1 is lost"):
            made.finish(made.begin("here"), "test")
        return time.monotonic() - start

    with run_of(2) as clusters:
        assert within(30, in_all, clusters, body)[0] < 3


class Pair:
    """What an exchange needs of a cluster: process 0 of three, with a link to each other one."""

    me, epoch = 0, 0

    def __init__(self, links):
        self._links = links

    def link(self, peer):
        return self._links[peer]

    def gather(self, name, text, among):
        """Nobody has to be waited for."""


def test_links_that_break_in_two_exchanges_at_once():
    """Each breaks as its exchange sends, and tells both exchanges."""
    with links_of(3) as links:
        cluster, meet = Pair(links[0]), threading.Barrier(2)
        exchanges = Exchange(cluster, (0, 1, 2)), Exchange(cluster, (0, 2, 1))  # the first sends to 1, the other to 2
        for link in links[0].values():

            def send(frame, link=link):
                meet.wait(5)
                link._lose("broken pipe")

            link.send = send
        together(*(lambda e=e: e.begin("text") for e in exchanges), seconds=10)
        assert {e._lost.process for e in exchanges} <= {1, 2}
        for link in links[0].values():
            del link.send
