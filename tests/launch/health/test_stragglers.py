"""The slowest process is found by when each comes to the same calls, whatever its clock says."""

import copy
import random

import pytest

from shardc.launch.health import stragglers as stragglers_module
from shardc.launch.health.stragglers import Slowest, Stragglers
from shardc.runtime.status import arrivals
from shardc.runtime.status.arrivals import Arrivals

NAME = "calls of 0-3"


def look(loop, statuses, ages=None, epoch=0, stragglers=None):
    loop.clock = loop.now
    return (stragglers or Stragglers()).look(statuses, ages or dict.fromkeys(statuses, 0.0), epoch)


class Loop:
    """A loop of processes that wait for one another at each call; process p computes for `work[p]` seconds before."""

    def __init__(self, monkeypatch, work, skew=None):
        self.work, self.skew = work, skew or [0.0] * len(work)
        self.now, self.calls = 1000.0, [Arrivals() for _ in work]
        self.clock = 0.0
        for module in (arrivals, stragglers_module):
            monkeypatch.setattr(module, "time", lambda: self.clock)

    def call(self, number):
        came = [self.now + seconds for seconds in self.work]
        for at, skew, calls in zip(came, self.skew, self.calls, strict=True):
            self.clock = at + skew
            calls.add(NAME, number)
        self.now = max(came)

    def statuses(self, delays=None, epoch=0):
        delays = delays or [0.0] * len(self.work)
        return {
            p: {"epoch": epoch, "now": self.now - delay + skew, "arrived": copy.deepcopy(calls.newest())}
            for p, (calls, skew, delay) in enumerate(zip(self.calls, self.skew, delays, strict=True))
        }


@pytest.mark.parametrize("seconds", [0.004, 0.3, 20.0])
def test_who_comes_last_and_what_the_others_would_gain(monkeypatch, seconds):
    work = [seconds, 2 * seconds, 4 * seconds, seconds]
    loop, chance = Loop(monkeypatch, work, [0.0, 5.0, -3.0, 100.0]), random.Random(0)
    stragglers, found = Stragglers(), None
    for number in range(5000 if seconds < 0.1 else 60):
        loop.call(number)
        if number % 10 == 9:
            found = look(loop, loop.statuses([chance.uniform(0, 1e-4) for _ in range(4)]), stragglers=stragglers)
    assert found is not None and found.process == 2
    assert found.share == pytest.approx(0.5, abs=0.03)


def test_the_signs_of_life_need_not_be_of_one_time(monkeypatch):
    """Windows of quick calls overlap though processes say them up to a second apart."""
    loop, early, heard = Loop(monkeypatch, [0.001, 0.003]), None, 0.0
    for number in range(3000):
        loop.call(number)
        if number == 2700:
            early, heard = loop.statuses()[0], loop.now
    ages = {0: loop.now - heard, 1: 0.0}
    assert look(loop, {0: early, 1: loop.statuses()[1]}, ages).process == 1


def test_calls_that_become_slow_are_seen_again(monkeypatch):
    loop = Loop(monkeypatch, [0.001, 0.001])
    for number in range(5000):
        loop.call(number)
    loop.work = [30.0, 10.0]
    for number in range(5000, 5000 + 600):
        loop.call(number)
    assert look(loop, loop.statuses()) == Slowest(0, pytest.approx(2 / 3))


def test_hosts_that_run_ahead_say_nothing(monkeypatch):
    """Process 0 launches calls long before process 1 does, and waits for none."""
    loop = Loop(monkeypatch, [0.1, 0.1])
    for number in range(20):
        loop.call(number)
    statuses = loop.statuses()
    name, came = statuses[1]["arrived"]
    statuses[1]["arrived"] = name, [(number, at + 0.5) for number, at in came]
    assert look(loop, statuses) is None


def test_too_little_is_known(monkeypatch):
    loop = Loop(monkeypatch, [0.1, 0.3])
    loop.call(0)
    assert look(loop, loop.statuses()) is None
    for number in range(1, 9):
        loop.call(number)
    assert look(loop, {0: loop.statuses()[0]}) is None
    assert look(loop, loop.statuses(epoch=1)) is None
    assert look(loop, {0: {"fault": "x"}, 1: {}}) is None
    assert look(loop, loop.statuses()).process == 1
