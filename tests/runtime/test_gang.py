"""Turns of clients: order, shares, places, failures. Programs are Python functions here."""

import random
import re
import signal
import threading
import time
from collections import Counter

import pytest

from shardc.errors import ArgumentError
from shardc.runtime import gang as gang_module
from shardc.runtime.gang import Scheduler, calling_client
from tests.runtime.peers import together, until
from tests.runtime.watchdog import within

pytestmark = pytest.mark.usefixtures("no_leftovers")


def call(client, seconds=1.0, launch=lambda: None, wait=None, members=()):
    with client.gang.turn(client, seconds, members) as turn:
        launch()
        if wait is not None:
            turn.launched(wait)


def in_thread(fn, *args):
    thread = threading.Thread(target=fn, args=args, daemon=True)
    thread.start()
    return thread


def waiting(gang, count):
    until(lambda: len(gang._waiting) == count)


def leave(gang):
    """No client calls again: nobody waits for that."""
    with gang._changed:
        for c in gang.clients.values():
            c.returns = False
        gang._changed.notify_all()


@pytest.fixture
def steady(monkeypatch):
    """Clients that call in a loop are waited for, however long a loaded machine keeps them away."""
    monkeypatch.setattr(gang_module, "_PATIENCE", (1e6, 1e6))


# --- order and shares


def stride(clients, prices, count):
    """The order of `count` programs of clients that always have a next one; their prices in order, by name."""
    passed = dict.fromkeys(clients, 0.0)
    order = []
    for _ in range(count):
        name = min(passed, key=passed.get)
        passed[name] += max(next(prices[name]), 1e-6) / clients[name]
        order.append(name)
    return order


@pytest.mark.parametrize("seed", range(12))
def test_fuzz_against_stride_scheduling(seed, steady):
    """The order is that of stride scheduling whatever programs take, and no more than `in_flight` are unfinished."""
    rng = random.Random(seed)
    gang = Scheduler(rng.randint(1, 4))
    clients = {f"c{i}": rng.choice([0.5, 1, 2, 3.7, 8]) for i in range(rng.randint(1, 6))}
    prices = {name: [rng.uniform(0, 2) for _ in range(200)] for name in clients}
    flying, most = set(), []
    until_full = threading.Event()

    def finish(number):
        if rng.random() < 0.3:
            time.sleep(rng.random() * 1e-3)
        flying.discard(number)
        return True

    def loop(client):
        for i, price in enumerate(prices[client.name]):
            if until_full.is_set():
                return
            number = client.name, i
            with gang.turn(client, price) as turn:
                flying.add(number)
                most.append(len(flying))
                if rng.random() < 0.5:
                    turn.launched(lambda number=number: finish(number))
                else:
                    finish(number)

    first = gang.client("first")
    release = threading.Event()
    threads = [in_thread(call, first, 0, release.wait)]
    until(lambda: gang._launching is not None)
    for i, (name, weight) in enumerate(clients.items()):
        client = gang.client(name, weight)
        client.left = time.perf_counter()
        threads.append(in_thread(loop, client))
        waiting(gang, i + 1)
    release.set()
    until(lambda: len(gang.log) > 150)
    until_full.set()
    leave(gang)
    for thread in threads:
        within(20, thread.join)
    _, *order = list(gang.log)[:150]
    assert order == stride(clients, {name: iter(p) for name, p in prices.items()}, 149)
    assert max(most) <= gang.in_flight


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
def test_shares(weights, monkeypatch):
    """Also of clients that are away for a moment between their calls."""
    monkeypatch.setattr(gang_module, "_PATIENCE", (0.1, 0.1))  # this machine may be loaded
    gang = Scheduler(2)
    clients = [gang.client(f"c{w}{i}", w) for i, w in enumerate(weights)]

    def loop(client):
        while len(gang.log) < 1000:
            call(client, 1.0, lambda: time.sleep(1e-4), lambda: time.sleep(1e-4) or True)

    with gang.turn(gang.client("starts them")):
        threads = [in_thread(loop, c) for c in clients]
        waiting(gang, 4)
    for thread in threads:
        within(60, thread.join)
    counts = Counter(list(gang.log)[:1000])
    for client in clients:
        assert counts[client.name] == pytest.approx(1000 * client.weight / sum(weights), rel=0.1)


def test_an_idle_client_saves_nothing_up():
    gang = Scheduler(1)
    busy, idle = gang.client("busy"), gang.client("idle")
    for _ in range(100):
        call(busy)
    release = threading.Event()
    holder = in_thread(call, busy, 1.0, release.wait)
    until(lambda: gang._launching is not None)
    threads = [in_thread(call, c) for c in [idle] * 5 + [busy] * 5]
    waiting(gang, 10)
    release.set()
    for thread in [holder, *threads]:
        within(5, thread.join)
    assert Counter(list(gang.log)[101:107])["busy"] >= 2  # it begins where the busy one is: they take turns
    assert idle.passed > 99


def test_a_client_that_leaves_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(gang_module, "_PATIENCE", (0.05, 0.05))
    gang = Scheduler(1)
    leaves, stays = gang.client("leaves", 100), gang.client("stays")
    call(leaves)
    call(leaves)
    assert leaves.returns
    call(stays, 5)
    begin = time.perf_counter()
    for _ in range(50):
        call(stays)
    assert time.perf_counter() - begin < 0.5  # 0.05 once
    assert stays.programs == 51


def test_of_equal_clients_the_first_one_that_waits_goes_next():
    gang = Scheduler(1)
    release = threading.Event()
    threads = [in_thread(call, gang.client("first"), 1.0, release.wait)]
    until(lambda: gang._launching is not None)
    for i, name in enumerate("dacb"):
        threads.append(in_thread(call, gang.client(name)))
        waiting(gang, i + 1)
    release.set()
    for thread in threads:
        within(5, thread.join)
    assert list(gang.log) == ["first", *"dacb"]


def test_a_price_of_zero_counts():
    gang = Scheduler()
    client = gang.client("a")
    call(client, 0.0)
    assert client.seconds == client.passed == 1e-6


# --- places


def test_a_program_that_runs_on_holds_its_place():
    gang = Scheduler(2)
    client, other = gang.client("a"), gang.client("b")
    done = [threading.Event() for _ in range(2)]
    for event in done:
        call(client, wait=event.wait)
    third = in_thread(call, other)
    waiting(gang, 1)
    time.sleep(0.01)
    assert third.is_alive() and list(gang.log) == ["a", "a"]
    done[0].set()
    within(5, third.join)
    assert list(gang.log) == ["a", "a", "b"]
    done[1].set()
    until(lambda: not gang._unfinished)


def test_a_program_whose_results_are_taken_finishes_with_the_one_that_took_them():
    gang = Scheduler(2)
    client = gang.client("a")
    asked, done = threading.Event(), threading.Event()
    call(client, wait=lambda: asked.wait() and False)
    call(client, wait=done.wait)
    asked.set()
    third = in_thread(call, client)
    waiting(gang, 1)
    time.sleep(0.01)
    assert third.is_alive()
    done.set()
    within(5, third.join)
    call(client, wait=lambda: False)  # nobody of the gang took them
    until(lambda: not gang._unfinished)


def test_a_measured_price_is_the_time_of_the_program_itself():
    """Not that of the programs before it on the same devices."""
    gang = Scheduler(2)
    other, measured, given = gang.client("other"), gang.client("measured"), gang.client("given", seconds=0.25)
    first, second = threading.Event(), threading.Event()
    call(other, wait=first.wait)
    call(measured, None, wait=second.wait)
    assert measured.seconds == 0
    time.sleep(0.05)
    first.set()
    until(lambda: len(gang._unfinished) == 1)
    second.set()
    until(lambda: not gang._unfinished)
    assert 0 < measured.seconds < 0.04 and measured.seconds == measured.ran
    assert other.ran > 0.04 and other.seconds == 1.0
    call(given, None)
    assert given.seconds == 0.25


# --- failures


def failing():
    raise OSError("the disk is full")


def test_an_exception_gives_the_place_back_and_reaches_the_caller():
    gang = Scheduler(1)
    client = gang.client("a")
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is full"):
            call(client, 1e9, failing)
    call(client)
    assert list(gang.log) == ["a"] and client.programs == 1
    assert 1 < client.seconds < 2  # a launch that fails costs the time that it took


def test_an_error_while_a_program_runs_gives_the_place_back():
    gang = Scheduler(1)
    client = gang.client("a")
    call(client, wait=failing)
    within(5, call, client)
    assert client.programs == 2


def test_an_interrupt_while_waiting_leaves_the_queue():
    gang = Scheduler(1)
    client, other = gang.client("a"), gang.client("b", 100)
    release = threading.Event()
    holder = in_thread(call, client, 1.0, release.wait)
    until(lambda: gang._launching is not None)
    later = in_thread(call, client)
    waiting(gang, 1)

    def interrupt():
        waiting(gang, 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(other)
    assert len(gang._waiting) == 1
    release.set()
    within(5, holder.join)
    within(5, later.join)
    assert list(gang.log) == ["a", "a"]
    call(other)


# --- turns inside turns


def test_a_turn_inside_a_turn_is_part_of_it():
    gang = Scheduler(1)
    outer, inner = gang.client("outer"), gang.client("inner")
    within(5, call, outer, 1.0, lambda: call(inner))
    assert list(gang.log) == ["outer"]


def test_calls_of_a_client_are_those_of_its_thread_outside_of_turns():
    gang = Scheduler(1)
    client = gang.client("a")
    found = []
    assert calling_client() is None
    with client.calling():
        found.append(calling_client())
        together(lambda: found.append(calling_client()))
        call(client, 1.0, lambda: found.append(calling_client()))
    assert found == [client, None, None] and calling_client() is None


# --- bad input


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, True, None, "2"])
def test_a_wrong_number_of_programs(in_flight):
    with pytest.raises(ArgumentError, match=re.escape(f"Gang: in_flight={in_flight!r}; write a number of programs")):
        Scheduler(in_flight)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "2"])
def test_a_wrong_weight(weight):
    with pytest.raises(ArgumentError, match=re.escape(f"Gang: a: weight={weight!r}; write a positive number.")):
        Scheduler().client("a", weight)


def test_a_wrong_price_and_a_name_twice():
    gang = Scheduler()
    with pytest.raises(ArgumentError, match=r"Gang: a: seconds=0; write a positive number\."):
        gang.client("a", seconds=0)
    gang.client("a")
    with pytest.raises(ArgumentError, match=r"there is a client 'a' already; give .* as name='a_2'\."):
        gang.client("a")
