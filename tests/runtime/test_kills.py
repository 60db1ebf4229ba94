"""Processes of a running network that are killed or stopped at any time: the others raise, all end, none is left."""

import random
import signal
import time

import pytest

from tests.runtime.launcher import hear_until, member
from tests.runtime.peers import until
from tests.runtime.processes import children

pytestmark = pytest.mark.usefixtures("no_leftovers")
SILENCE = 1.5


def begin(start, a_run, seed, rng):
    """A run with a random network over two or three processes; the first call makes its links."""
    count = rng.choice([2, 3, 3])
    run = a_run(count, rng.choice(["unix", "unix", "tcp"]))
    options = {
        "microbatches": rng.randint(1, 6),
        "size": rng.choice([16, 256, 300_000]),
        "neighbours": rng.random() < 0.5,
        "delays": rng.choice([(0,), (0, 0.0005, 0.002), (0, 0.02)]),
        "config": {"silence": SILENCE, "deadline": 20.0, "plain_data": seed % 2 == 0},
    }
    return run, [member(start, run, p, seed, **options) for p in range(count)]


def check_kill(a_run, seed):
    """Kill one at a random time, also while all start and open their links."""
    rng = random.Random(seed)
    with children() as start:
        run, members = begin(start, a_run, seed, rng)
        victim = rng.randrange(len(members))
        until(lambda: len(run.server.statuses()) == len(members), 20)  # those who come later hear it from a launcher
        running = rng.random() < 0.75
        if running:
            for m in members:
                hear_until(m, "run")
        time.sleep(rng.random() * 0.6)
        at = members[victim].signal(signal.SIGKILL)
        members[victim].end()
        run.lose(victim)  # as a launcher does
        for p, m in enumerate(members):
            if p != victim:
                said = hear_until(m, "error")
                assert said["error"] == "PeerLostError", said
                assert said["lost"] == victim or not running, said  # or a neighbour that gave up opening its links
                assert said["at"] - at < 1.5, said
                assert hear_until(m, "closed")["threads"] == [], said
                assert m.end() == 0


def check_stop(a_run, seed):
    """Stop one at a random time. Once it goes on, it too learns that it was given up."""
    rng = random.Random(seed)
    with children() as start:
        _, members = begin(start, a_run, seed, rng)
        victim = rng.randrange(len(members))
        for m in members:
            hear_until(m, "run")
        time.sleep(rng.random() * 0.6)
        at = members[victim].stop()
        for p, m in enumerate(members):
            if p != victim:
                said = hear_until(m, "error")
                assert said["error"] == "PeerLostError" and said["lost"] == victim, said
                assert SILENCE / 2 < said["at"] - at < SILENCE + 2, said
        members[victim].signal(signal.SIGCONT)
        said = hear_until(members[victim], "error")
        assert said["error"] == "PeerLostError" and said["lost"] != victim, said
        for m in members:
            assert m.end() == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_kill(a_run, seed):
    check_kill(a_run, seed)


def test_a_stop(a_run):
    check_stop(a_run, 0)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(100, 120))
def test_kills(a_run, seed):
    check_kill(a_run, seed)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(100, 105))
def test_stops(a_run, seed):
    check_stop(a_run, seed)


def test_all_but_one_are_killed(a_run):
    with children() as start:
        run = a_run(3)
        members = [member(start, run, p) for p in range(3)]
        for m in members:
            hear_until(m, "run")
        for victim in (0, 2):
            members[victim].signal(signal.SIGKILL)
        said = hear_until(members[1], "error")
        assert said["error"] == "PeerLostError" and said["lost"] in (0, 2)
        assert hear_until(members[1], "closed")["threads"] == [] and members[1].end() == 0
        until(lambda: not run.server.statuses())
