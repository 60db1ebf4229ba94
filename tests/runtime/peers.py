"""Ends of links in one process: pairs, and networks over several links."""

import logging
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import combinations

import pytest

from shardc.errors import ShardcError
from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare
from shardc.runtime.transport.link import Link
from tests.runtime.codec import Codec, allocate
from tests.runtime.watchdog import actor_threads


def until(what, seconds=20.0):
    """Wait until `what()` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.002)


def others(cluster):
    """The numbers of the other processes of a run."""
    return [p for p in range(cluster.processes) if p != cluster.me]


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("shardc ")]


@pytest.fixture
def no_leftovers():
    """No thread of a link, a store, a listener or an executor outlives a test."""
    before = {*our_threads(), *actor_threads()}
    yield
    until(lambda: {*our_threads(), *actor_threads()} <= before)


@pytest.fixture
def log_lines(caplog):
    caplog.set_level(logging.DEBUG, "shardc")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "shardc"]


@contextmanager
def link_pair(silence=10.0, sockets=None):
    """The two ends of a link, of processes 0 and 1."""
    a, b = sockets or socket.socketpair()
    links = Link(a, 0, 1, silence, allocate), Link(b, 1, 0, silence, allocate)
    try:
        yield links
    finally:
        for link in links:
            threading.Thread(target=link.close, name="shardc closing", daemon=True).start()
        until(lambda: not any(t.name == "shardc closing" for t in our_threads()), 20)


@contextmanager
def links_of(processes, silence=10.0, without=()):
    """For each process the links to all others, but for the pairs of `without`."""
    links = [{} for _ in range(processes)]
    with ExitStack() as stack:
        for a, b in combinations(range(processes), 2):
            if (a, b) in without:
                continue
            x, y = socket.socketpair()
            links[a][b], links[b][a] = Link(x, a, b, silence, allocate), Link(y, b, a, silence, allocate)
            for link in (links[a][b], links[b][a]):
                stack.callback(link.close)
        yield links


class Side:
    """What one process has of a network: its network, its executor."""

    def __init__(self, net, number, places, links, tasks, **options):
        codec, patience = options.get("codec", Codec()), options.get("patience", 30.0)
        self.spread = spread = DistributedNetwork(net, number, places, links, codec, options.get("crossing", ()))
        share = ProcessShare(spread.mine, spread.ports, patience, None, spread.channels, spread.others)
        self.executor = Executor(net, tasks, share=share)
        self.error = None

    def open(self, seconds=5.0):
        self.spread.open(self.executor.mailboxes, seconds)

    def run(self, runs=1):
        """Run; the error is kept."""
        self.error = None
        try:
            for _ in range(runs):
                self.executor.run()
        except ShardcError as error:
            self.error = error

    def close(self):
        self.executor.close()
        self.spread.close()


def together(*calls, seconds=20.0):
    """Call all at once, each in a thread. Fails if one does not return in time; raises the first error."""
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(c,), daemon=True) for c in calls]
    for t in threads:
        t.start()
    end = time.monotonic() + seconds
    for t in threads:
        t.join(max(0.0, end - time.monotonic()))
    assert not any(t.is_alive() for t in threads), f"still running after {seconds} s"
    if errors:
        raise errors[0]


@contextmanager
def sides_of(net, places, tasks, **options):
    """A side of each process, opened. `tasks(process)` gives the tasks of its executor."""
    processes = 1 + max(p for ps in places for p in ps)
    with links_of(processes, options.get("silence", 10.0), options.get("without", ())) as links:
        sides = [Side(net, options.get("number", 7), places, links[p], tasks(p), **options) for p in range(processes)]
        together(*(s.open for s in sides))
        try:
            yield sides
        finally:
            for s in sides:
                s.close()
