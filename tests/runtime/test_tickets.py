"""Turns in several processes: the order of process 0, and what ends the wait for it."""

import random
import time

import pytest

from shardc.errors import ClusterError, PeerLostError
from shardc.runtime import tickets as tickets_module
from shardc.runtime.gang import Scheduler
from tests.runtime.peers import together
from tests.runtime.test_gang import call
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")


def schedulers(run, monkeypatch, count=2, in_flight=2):
    made = []
    for cluster in run(count).all():
        monkeypatch.setattr(tickets_module.clusters, "current", lambda cluster=cluster: cluster)
        made.append(Scheduler(in_flight))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_all_processes_launch_in_the_order_of_process_0(a_run, monkeypatch, seed):
    """Programs of all processes, of some, and of one, from threads that come in any order."""
    gangs = schedulers(a_run, monkeypatch, 3)
    weights = {"all": 1, "some": 3, "other": 2}
    members = {"all": (0, 1, 2), "some": (0, 1), "other": (0, 1, 2)}

    def loop(gang, name, count):
        rng = random.Random(f"{seed} {name} {gangs.index(gang)}")
        client = gang.client(name, weights.get(name, 1))
        for _ in range(count):
            if rng.random() < 0.3:
                time.sleep(rng.random() * 1e-3)
            call(client, 1e-3, wait=lambda: True, members=members.get(name, ()))

    calls = [(gang, name) for p, gang in enumerate(gangs) for name in members if p in members[name]]
    calls += [(gang, "local") for gang in gangs]
    together(*(lambda g=g, n=n: loop(g, n, 60) for g, n in calls), seconds=60)
    orders = [[name for name in gang.log if name != "local"] for gang in gangs]
    assert orders[0] == orders[1] and len(orders[0]) == 180
    assert orders[2] == [name for name in orders[0] if name != "some"]
    assert [gang.clients["local"].programs for gang in gangs] == [60] * 3


def test_processes_that_cannot_take_turns(a_run, monkeypatch):
    gangs = schedulers(a_run, monkeypatch)
    with pytest.raises(ClusterError, match=r"Gang: a runs in processes 1, 2\. Process 0 decides the order"):
        call(gangs[1].client("a"), members=(1, 2))
    monkeypatch.setattr(tickets_module.clusters, "current", lambda: None)
    with pytest.raises(ClusterError, match=r"has no links to; start them with python -m shardc run --processes 2"):
        call(Scheduler().client("a"), members=(0, 1))


def test_process_0_is_lost_or_ends(a_run, monkeypatch):
    run = a_run(2)
    monkeypatch.setattr(tickets_module, "_LOOK", 0.05)
    gangs = schedulers(lambda _: run, monkeypatch)
    a, b = (gang.client("a") for gang in gangs)
    together(lambda: call(a, members=(0, 1)), lambda: call(b, members=(0, 1)))
    run.end(0)
    with pytest.raises(ClusterError, match="process 0's script has ended; process 1 waits for it to give a ticket"):
        within(10, call, b, 1.0, lambda: None, None, (0, 1))
    run.lose(0)
    with pytest.raises(PeerLostError, match="process 0 is lost: it was killed by signal 9"):
        within(10, call, b, 1.0, lambda: None, None, (0, 1))
    call(b)  # its own devices are there
    assert list(gangs[1].log) == ["a", "a"]
