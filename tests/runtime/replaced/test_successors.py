"""Successors of lost processes join a run: here threads with real sockets. `tests.processes.replaced` has processes."""

import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare, Task
from shardc.runtime.replaced.replay import Replaceable
from shardc.runtime.transport.link import Link
from tests.runtime.codec import Codec, allocate
from tests.runtime.peers import together, until
from tests.runtime.replaced.test_replay import DOWN, ITEMS, network

pytestmark = pytest.mark.usefixtures("no_leftovers")
PLACES = [(0,), (1,), (0,)]
"""The server and the inputs run in process 0, the worker in process 1."""
ROUNDS = 60


class Life:
    """One of the two processes, until it dies."""

    def __init__(self, me, links, run, begin=True):
        net = network()
        self.network = spread = DistributedNetwork(net, 5, PLACES, links, Codec())
        counted = [ITEMS] if me else []
        share = ProcessShare(spread.mine, spread.ports, 30.0, None, spread.channels, spread.others, counted)
        self.executor = Executor(net, lambda label: Task(lambda values: run(label[0], values)), share=share)
        if begin:
            spread.successors.begin(1, Replaceable(frozenset({1})))
        self.error = None

    def open(self):
        self.network.open(self.executor.mailboxes, 5.0)

    def join(self):
        return self.network.join(self.executor.mailboxes, lambda: None, 5.0)

    def run(self, begin=0):
        try:
            self.executor.run(rounds=ROUNDS, first={(DOWN, 0): [np.asarray(1)]}, begin=begin)
        except PeerLostError as error:
            self.error = error

    def close(self):
        self.executor.close()
        self.network.close()


@contextmanager
def server_and_worker(server, worker):
    """The two processes with a link, and a function that replaces the worker. Gives the server's life, the first
    worker's, and that function, which gives the link of a new one."""
    lives, links = [], []

    def pair():
        made = [Link(s, me, 1 - me, 10.0, allocate) for me, s in enumerate(socket.socketpair())]
        links.extend(made)
        return made

    def born(me, link, run, begin=True):
        lives.append(Life(me, {1 - me: link}, run, begin))
        return lives[-1]

    here, there = pair()
    first = born(0, here, server), born(1, there, worker)

    def again():
        links[-1].drop("killed")
        until(lambda: links[-2].lost is not None)
        here, there = pair()
        first[0].network.successors.welcome(here)
        return born(1, there, worker)

    together(*(life.open for life in first))
    try:
        yield *first, again
    finally:
        for life in lives:
            life.close()
        for link in links:
            link.close()


@pytest.mark.parametrize("deaths", [(0,), (7,), (7, 7, 30), (ROUNDS - 1,)])
def test_a_successor_goes_on_where_nothing_has_come(deaths):
    seen, given, left = [], iter(range(ROUNDS)), list(deaths)
    dies = threading.Event()

    def server(label, values):
        if label == "inputs":
            return [np.asarray(next(given))]
        seen.append(int(values[0]))
        return [values[0]]

    def worker(label, values):
        item, down = map(int, values)
        if left and item >= left[0]:
            dies.set()
            time.sleep(0.01 * len(left))  # it may have sent its result by then, or not
        return [np.asarray((3 * down + item) % 1009)]

    with server_and_worker(server, worker) as (other, first, again):
        runs = [threading.Thread(target=life.run) for life in (other, first)]
        for thread in runs:
            thread.start()
        while left:
            assert dies.wait(10)
            dies.clear()
            left.pop(0)
            new = again()
            begin = new.join()
            assert begin <= len(seen) + 2
            runs.append(threading.Thread(target=new.run, args=(begin,)))
            runs[-1].start()
        for thread in runs:
            thread.join(20)
        assert other.error is None
    wanted, down = [], 1
    for item in range(ROUNDS):
        down = (3 * down + item) % 1009
        wanted.append(down)
    assert seen == wanted


def test_a_run_that_is_over_cannot_be_joined():
    def nothing(label, values):
        raise AssertionError

    with server_and_worker(nothing, nothing) as (other, _, again):
        other.network.successors.end()
        other.network.successors.begin(2, Replaceable(frozenset({1})))
        with pytest.raises(
            ClusterError, match="process 1 was started again and cannot join the run: it is over in process 0"
        ):
            again().join()


def test_a_run_does_not_end_well_without_a_successor():
    def nothing(label, values):
        raise AssertionError

    with server_and_worker(nothing, nothing) as (other, first, _):
        first.network.links[0].drop("killed")
        until(lambda: other.network.links[1].lost is not None)
        with pytest.raises(PeerLostError, match="process 1 is lost, and all others have ended the run"):
            other.network.successors.end()
