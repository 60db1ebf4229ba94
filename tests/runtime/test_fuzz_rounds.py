"""Random periodic networks: the verdict on one period is what happens in many rounds, simulated and in threads."""

import random
import time
from collections import Counter

import pytest

from shardc.errors import PipelineError
from shardc.pipeline.schedule.simulate import seconds_of_rounds, simulate
from shardc.runtime.actor import check_network
from shardc.runtime.deadlock import find_deadlock, run_without_time
from shardc.runtime.executor import Executor, RoundsEnded, Task, Threads
from tests.runtime.networks import first_of, interpret, random_periodic, runs_until, unrolled
from tests.runtime.watchdog import actor_threads, within

PRIME = 1_000_003


def work(label, at, values):
    """The result of a step: it tells apart which values a step had, and in which order."""
    return (sum((i + 2) * v for i, v in enumerate(values)) * 31 + hash((at, len(label), label[1])) % 97 + at) % PRIME


def first_values(net):
    counts = Counter(net.first_messages())
    return {m: [hash(m) % 1000 + i for i in range(n)] for m, n in counts.items()}


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
    counts = Counter()

    def task(label):
        step = steps[label]

        def run(values):
            at = counts[label] * net.period + step.round
            if ends is not None and (label, at) >= ends and label == ends[0]:
                raise RoundsEnded(at)
            counts[label] += 1
            time.sleep(delays.choice((0, 0, 0, 0.0001)))
            result = work(label, at, values)
            log.append(((label, at), result))
            return [result * (k + 1) for k in range(len(step.gives))]

        return Task(run)

    return task


def check_threads(net, rng):
    """Check a run in threads against plain Python, then one that goes on, and one that a source ends."""
    first, log = first_values(net), []
    threads = Threads(rng.choice((None, 1, 2)))
    rounds = rng.randint(0, 4 * net.period + 3)
    with Executor(net, tasks_of(net, log, rng), threads=threads) as executor:
        within(20, lambda: executor.run(rounds=rounds, first=first))
        results, left = interpret(net, rounds, work, first)
        assert dict(log) == results and len(log) == len(results)
        assert executor.left == left and executor.rounds == rounds
    both = []
    with Executor(net, tasks_of(net, both, rng), threads=threads) as executor:
        within(20, lambda: executor.run(rounds=2 * net.period, first=first))
        within(20, lambda: executor.run(rounds=net.period, first=executor.left))
        assert dict(both) == interpret(net, 3 * net.period, work, first)[0]
        assert executor.left == interpret(net, 3 * net.period, work, first)[1]
    ends = rng.choice([s for row in unrolled(net, 3 * net.period) for s in row]).label
    early = []
    with Executor(net, tasks_of(net, early, rng, ends), threads=threads) as executor:
        within(20, lambda: executor.run(rounds=5 * net.period, first=first))
        exact = interpret(net, 5 * net.period, work, first)[0]
        assert {at: exact[at] for at, _ in early} == dict(early)
        least = interpret(net, ends[1], work, first)
        assert least[0].keys() <= dict(early).keys() and executor.rounds == ends[1]
        if len(early) == len(least[0]):
            assert executor.left == least[1]
        counts = {m: len(values) for m, values in least[1].items()}
        assert all(len(values) <= counts[m] for m, values in executor.left.items())


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


def run_in_threads(seeds, count):
    done = 0
    for seed in seeds:
        rng = random.Random(seed)
        net = random_periodic(rng)
        if net.actors != ((),) and verdict_of(net, rng) == "ends":
            check_threads(net, rng)
            done += 1
            if done == count:
                break
    assert done == count
    assert not actor_threads()


def test_threads_do_what_plain_python_does():
    run_in_threads(range(1000), 25)


@pytest.mark.sampled(0)
def test_threads_do_what_plain_python_does_on_many():
    run_in_threads(range(2000, 4000), 400)
