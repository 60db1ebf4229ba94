"""Random networks over several processes: the verdict before the run is what happens, and what arrives is right."""

import random
import time
from contextlib import ExitStack

import numpy as np
import pytest

from shardc.errors import PipelineError
from shardc.runtime import executor as executor_module
from shardc.runtime.deadlock import find_deadlock
from tests.runtime.fuzzing import FuzzSide, case_of
from tests.runtime.networks import where_it_stops
from tests.runtime.peers import links_of, together, until
from tests.runtime.processes import children
from tests.runtime.test_fuzz import expected

pytestmark = pytest.mark.usefixtures("no_leftovers")


def possible_steps(case, positions):
    """For each process the labels that it reaches."""
    net, places = case
    return {
        p: sorted(s.label for a, n in enumerate(positions) if p in places[a] for s in net.actors[a][:n])
        for p in {p for ps in places for p in ps}
    }


def check_results(net, places, logs, runs):
    """Check that each process has made the steps of its actors so many times, with the right results."""
    right = expected(net)
    for p, log in enumerate(logs):
        mine = sorted(s.label for a, steps in enumerate(net.actors) if p in places[a] for s in steps)
        assert sorted(label for label, _ in log) == sorted(mine * runs)
        for label, result in log:
            np.testing.assert_array_equal(result, right[label])


def check_sockets(seed, links, monkeypatch):
    """Check a case with threads as processes. Returns whether it deadlocks."""
    case = net, places = case_of(seed, len(links))
    deadlock = find_deadlock(net)

    def sides():
        return [FuzzSide(case, seed, links[p], random.Random(seed * 10 + p)) for p in range(len(links))]

    if deadlock is None:
        made = sides()
        together(*(s.open for s in made))
        together(*(lambda s=s: (s.executor.run(), s.executor.run()) for s in made))
        for s in made:
            s.close()
        check_results(net, places, [s.log for s in made], 2)
        return False
    with pytest.raises(PipelineError, match="The pipeline deadlocks"):
        sides()
    assert where_it_stops(net) == {deadlock.positions}
    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "find_deadlock", lambda net: None)
        made = sides()
    possible = possible_steps(case, deadlock.positions)
    together(*(s.open for s in made))

    def logs():
        return {p: sorted(label for label, _ in made[p].log) for p in possible}

    def run(side):
        if side.spread.mine:
            with pytest.raises(PipelineError, match="closed while it ran"):
                side.executor.run()

    def close_when_stuck():
        until(lambda: all(s.executor.runs or not s.spread.mine for s in made), 10)
        until(lambda: sum(map(len, logs().values())) >= sum(map(len, possible.values())), 10)
        time.sleep(0.02)
        for s in made:
            s.executor.close()

    # a process that has ended its part before the others are closed has no error: run only who is stuck at the end
    stuck = [s for p, s in enumerate(made) if possible.get(p) != everything(case, p)]
    rest = [s for s in made if s not in stuck]
    together(*(lambda s=s: run(s) for s in stuck), *(s.executor.run for s in rest), close_when_stuck)
    for s in made:
        s.spread.close()
    assert logs() == possible
    return True


def everything(case, process):
    """The labels of all steps of a process."""
    net, places = case
    return sorted(s.label for a, steps in enumerate(net.actors) if process in places[a] for s in steps)


@pytest.mark.parametrize("processes", [2, 3])
def test_over_sockets(processes, monkeypatch):
    with links_of(processes) as links:
        verdicts = [check_sockets(seed, links, monkeypatch) for seed in range(50)]
    assert 8 < sum(verdicts) < 42


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seeds", range(1000, 2000, 200))
@pytest.mark.parametrize("processes", [2, 3])
def test_over_sockets_on_many(processes, seeds, monkeypatch):
    with links_of(processes) as links:
        verdicts = [check_sockets(seed, links, monkeypatch) for seed in range(seeds, seeds + 200)]
    assert 40 < sum(verdicts) < 160


# ---- real processes


def all_say(members, *what):
    for m in members:
        m.say(*what)
    return [m.hear() for m in members]


def check_processes(seed, members):
    case = net, places = case_of(seed, len(members))
    deadlock = find_deadlock(net)
    if deadlock is None:
        all_say(members, "open", seed, True)
        said = all_say(members, "run", 2)
        assert [s["error"] for s in said] == [None] * len(members), said
        check_results(net, places, [s["log"] for s in said], 2)
        all_say(members, "close")
        return False
    for said in all_say(members, "open", seed, True):
        assert said["error"] and "The pipeline deadlocks" in said["error"]
    all_say(members, "open", seed, False)
    all_say(members, "begin")
    possible = possible_steps(case, deadlock.positions)

    def reached():
        logs = [s["labels"] for s in all_say(members, "labels")]
        return {p: sorted(logs[p]) for p in possible}

    until(lambda: reached() == possible, 20)
    time.sleep(0.05)
    assert reached() == possible
    all_say(members, "close")
    return True


def check_seeds(a_run, processes, seeds):
    run = a_run(processes)
    with ExitStack() as stack:
        start = stack.enter_context(children())
        configs = [run.config(p) for p in range(processes)]
        members = [start("fuzz", {**{f: getattr(s, f) for f in s.__dataclass_fields__}, "secret": s.secret.hex()})
                   for s in configs]  # fmt: skip
        for m in members:
            m.hear()
        verdicts = [check_processes(seed, members) for seed in seeds]
        for m in members:
            m.say("end")
        assert [m.end() for m in members] == [0] * processes
    return verdicts


@pytest.mark.parametrize("processes", [2, 3])
def test_over_processes(a_run, processes):
    assert 2 < sum(check_seeds(a_run, processes, range(200, 220))) < 18


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seeds", range(3000, 3300, 100))
@pytest.mark.parametrize("processes", [2, 3])
def test_over_processes_on_many(a_run, processes, seeds):
    assert 20 < sum(check_seeds(a_run, processes, range(seeds, seeds + 100))) < 80
