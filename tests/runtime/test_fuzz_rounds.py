"""Random periodic networks: the verdict on one period is what happens in many rounds, simulated and in threads."""

import random
import time
from collections import Counter

import numpy as np
import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.simulate import seconds_of_rounds, simulate
from shardc.runtime.actor import check_network
from shardc.runtime.deadlock import find_deadlock, run_without_time
from shardc.runtime.distributed_network import DistributedNetwork
from shardc.runtime.executor import Executor, ProcessShare, RoundsEnded, Task, Threads
from tests.runtime.fuzzing import Same
from tests.runtime.networks import first_of, interpret, random_periodic, runs_until, unrolled
from tests.runtime.peers import links_of, together
from tests.runtime.watchdog import actor_threads

PRIME = 1_000_003


def work(label, at, values):
    """The result of a step: it tells apart which values a step had, and in which order."""
    return (sum((i + 2) * v for i, v in enumerate(values)) * 31 + 7 * int(label[1:].split("r")[0]) + at) % PRIME


def first_values(net):
    counts = Counter(net.first_messages())
    return {m: [m[1] + 1000 * i for i in range(n)] for m, n in counts.items()}


def verdict_of(net, rng):
    """ "invalid", "deadlock" or "ends", checked against the definition."""
    if check_network(net):
        with pytest.raises(PipelineError, match="Invalid network"):
            find_deadlock(net)
        return "invalid"
    deadlock = find_deadlock(net)
    lengths = tuple(map(len, net.actors))
    for rounds in {0, net.period, rng.randrange(1, 5 * net.period + 4), rng.randrange(1, 5 * net.period + 4)}:
        fired = [a.fired for a in run_without_time(net, rounds)]
        assert fired == runs_until(net, rounds)
        if deadlock is None:
            assert fired == [len(row) for row in unrolled(net, rounds)]
        elif rounds >= net.period:
            stuck = [a for a, n in enumerate(deadlock.positions) if n < lengths[a]]
            assert stuck and all(fired[a] == deadlock.positions[a] for a in stuck)
    if deadlock is not None:
        assert str(deadlock).startswith("The pipeline deadlocks: ")
    return "ends" if deadlock is None else "deadlock"


def check_simulation(net, rng):
    """Check that the simulator obeys order, data and registers, and that rounds are counted as they run."""
    costs = {s.label: rng.choice((0.0, rng.random(), rng.random())) for row in net.actors for s in row}
    scale = rng.choice((0.0, 0.25, 2.0))
    links = {c.name: (rng.random(), scale * rng.random()) for c in net.channels}
    rounds = rng.randint(0, 3 * net.period + 2)
    timeline = simulate(net, costs.__getitem__, lambda c: links[c.name], rounds)
    rows = unrolled(net, rounds)
    assert timeline.order() == tuple(tuple(s.label[0] for s in row) for row in rows)
    assert [[s.round for s in spans] for spans in timeline.spans] == [[s.label[1] for s in row] for row in rows]
    there = dict.fromkeys(first_of(net), 0.0)
    there |= {m: span.end for row, spans in zip(rows, timeline.spans, strict=True)
              for s, span in zip(row, spans, strict=True) for m in s.gives}  # fmt: skip
    for row, spans in zip(rows, timeline.spans, strict=True):
        before = 0.0
        for step, span in zip(row, spans, strict=True):
            assert span.start >= max([before, *(there[m] for m in step.takes)])
            before = span.end
    assert all(c.registers is None or n <= c.registers for c, n in zip(net.channels, timeline.peaks, strict=True))
    many = rng.randint(0, 300)
    exact = simulate(net, costs.__getitem__, lambda c: links[c.name], many).makespan
    assert seconds_of_rounds(net, costs.__getitem__, lambda c: links[c.name], many) == pytest.approx(exact, rel=1e-9)


def tasks_of(net, log, delays, ends=None):
    """Tasks that log label, round and result. `ends`: (label, round) of the step that finds its source empty."""
    steps = {s.label: s for row in net.actors for s in row}
    counts = Counter()  # of one process

    def task(label):
        step = steps[label]

        def run(values):
            at = counts[label] * net.period + step.round
            if ends is not None and (label, at) >= ends and label == ends[0]:
                raise RoundsEnded(at)
            counts[label] += 1
            time.sleep(delays.choice((0, 0, 0, 0.0001)))
            result = work(label, at, [int(v[0]) for v in values])
            log.append(((label, at), result))
            return [np.array([result * (k + 1)]) for k in range(len(step.gives))]

        return Task(run)

    return task


class Runner:
    """Runs a network in some processes, which are threads here: one of them, or several with links."""

    def __init__(self, net, places, links, rng):
        self.net, self.places, self.links, self.rng = net, places, links, rng
        self.number = rng.randrange(1, 1 << 40)

    def run(self, runs, ends=None):
        """The logs of the processes, what they have left after each run, and the rounds that they have run.

        Each run has so many rounds, and goes on from the one before it.
        """
        self.number += 1
        spreads = [
            DistributedNetwork(self.net, self.number, self.places, links, Same(ready=self.rng.random() < 0.5))
            for links in self.links
        ]
        logs, lefts = [[] for _ in spreads], []
        executors = [
            Executor(
                self.net, tasks_of(self.net, log, self.rng, ends), threads=Threads(self.rng.choice((None, 1, 2))),
                share=ProcessShare(s.mine, s.ports),
            )
            for s, log in zip(spreads, logs, strict=True)
        ]  # fmt: skip
        together(*(lambda s=s, e=e: s.open(e.mailboxes, 20.0) for s, e in zip(spreads, executors, strict=True)))
        left = [{m: [np.array([v]) for v in values] for m, values in first_values(self.net).items()}] * len(spreads)
        for rounds in runs:
            go = [lambda e=e, f=f, n=rounds: e.run(rounds=n, first=f) for e, f in zip(executors, left, strict=True)]
            together(*go)
            left = [e.left for e in executors]
            lefts.append([{m: [int(v[0]) for v in values] for m, values in of_one.items()} for of_one in left])
        for side in (*executors, *spreads):
            side.close()
        return logs, lefts, [e.rounds for e in executors]

    def share_of(self, process, results, left):
        """What one process has of results and of what is left."""
        mine = {a for a, places in enumerate(self.places) if process in places}
        labels = {s.label for a in mine for s in self.net.actors[a]}
        return (
            {at: value for at, value in results.items() if at[0] in labels},
            {m: values for m, values in left.items() if self.net.channels[m[0]].target in mine},
        )

    def check(self):
        """Check a run against plain Python, then two that go on from each other, and one that a source ends."""
        net, period, first = self.net, self.net.period, first_values(self.net)
        for runs in ([self.rng.randint(0, 4 * period + 3)], [2 * period, period]):
            logs, lefts, rounds = self.run(runs)
            assert rounds == runs[-1:] * len(self.links)
            for p, (log, left) in enumerate(zip(logs, lefts[-1], strict=True)):
                assert len(dict(log)) == len(log)
                assert (dict(log), left) == self.share_of(p, *interpret(net, sum(runs), work, first))
        ends = self.rng.choice([s for row in unrolled(net, 3 * period) for s in row]).label
        logs, lefts, rounds = self.run([5 * period], ends)
        exact, least = interpret(net, 5 * period, work, first)[0], interpret(net, ends[1], work, first)
        assert min(rounds) == ends[1]
        nobody_ahead = all(dict(log).keys() <= least[0].keys() for log in logs)
        for p, (log, left) in enumerate(zip(logs, lefts[-1], strict=True)):
            needed, kept = self.share_of(p, *least)
            assert needed.keys() <= dict(log).keys() and {at: exact[at] for at, _ in log} == dict(log)
            if nobody_ahead and rounds[p] == ends[1]:
                assert left == kept
            if rounds[p] == ends[1]:
                assert all(len(values) <= len(kept[m]) for m, values in left.items())


def test_verdicts_and_times():
    verdicts = Counter()
    for seed in range(600):
        rng = random.Random(seed)
        net = random_periodic(rng)
        verdicts[verdict := verdict_of(net, rng)] += 1
        if verdict == "ends" and seed % 4 == 0:
            check_simulation(net, rng)
    assert verdicts["ends"] > 200 and verdicts["deadlock"] > 60 and verdicts["invalid"] > 20, verdicts


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seeds", range(10_000, 20_000, 1000))
def test_verdicts_and_times_of_many(seeds):
    for seed in range(seeds, seeds + 1000):
        rng = random.Random(seed)
        net = random_periodic(rng, nodes=rng.choice((3, 6, 8)), actors=rng.choice((2, 4)))
        if verdict_of(net, rng) == "ends":
            check_simulation(net, rng)


def run_in_threads(seeds, count, links=({},)):
    """Run so many networks without a deadlock, in one process or in several."""
    done = 0
    for seed in seeds:
        rng = random.Random(seed)
        net = random_periodic(rng, actors=4)
        groups = [[p] for p in range(len(links))]
        if len(links) > 2 and rng.random() < 0.4:
            groups = [list(range(len(links) - 1)), [len(links) - 1]]
        places = [rng.choice(groups) for _ in net.actors]
        if any(net.actors) and verdict_of(net, rng) == "ends":
            Runner(net, places, links, rng).check()
            done += 1
            if done == count:
                break
    assert done == count
    assert not actor_threads()


def test_threads_do_what_plain_python_does():
    run_in_threads(range(1000), 40)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_do_what_plain_python_does(processes):
    with links_of(processes) as links:
        run_in_threads(range(1000, 2000), 20, links)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_they_do_what_plain_python_does_on_many(processes):
    with links_of(processes) as links:
        run_in_threads(range(2000, 6000), 300, links)
