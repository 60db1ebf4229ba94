"""Random networks: run without time, by brute force and in threads, they stop at the same steps and never hang."""

import random
import threading
import time

import numpy as np
import pytest

from shardc.errors import PipelineError
from shardc.runtime import executor as executor_module
from shardc.runtime.deadlock import find_deadlock
from shardc.runtime.executor import Executor, Task, Threads
from tests.runtime.networks import random_network, where_it_stops
from tests.runtime.watchdog import actor_threads, within


def expected(net):
    """The result of each step, computed in sequence: the sum of the taken values plus the position of the step."""
    values, done = {}, {}
    rows = [list(enumerate(steps)) for steps in net.actors]
    while any(rows):
        row = next(r for r in rows if r and all(m in values for m in r[0][1].takes))
        i, step = row.pop(0)
        done[step.label] = sum((values[m] for m in step.takes), np.zeros(2)) + i
        values.update({m: done[step.label] * (k + 1) for k, m in enumerate(step.gives)})
    return done


def executor_of(net, log, delays):
    """An executor that appends each step and its result to `log`."""
    tasks = {}
    for steps in net.actors:
        for i, step in enumerate(steps):

            def run(values, i=i, step=step):
                time.sleep(delays.choice((0, 0, 0.0002)))
                result = sum(values, np.zeros(2)) + i
                log.append((step.label, result))
                return [result * (k + 1) for k in range(len(step.gives))]

            tasks[step.label] = Task(run)
    return Executor(net, tasks, threads=Threads(delays.choice((None, 1, 2))))


def check_threads(seed, monkeypatch):
    """Check that the threads end, or stop where brute force does. Returns whether they deadlock."""
    rng = random.Random(seed)
    net = random_network(rng, actors=5, steps=12)
    deadlock = find_deadlock(net)
    log = []
    if deadlock is None:
        with executor_of(net, log, rng) as executor:
            within(20, executor.run)
            within(20, executor.run)
        right = expected(net)
        assert len(log) == 2 * len(right)
        for label, result in log:
            np.testing.assert_array_equal(result, right[label])
        return False
    with pytest.raises(PipelineError, match="The pipeline deadlocks"):
        executor_of(net, log, rng)
    assert where_it_stops(net) == {deadlock.positions}
    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "find_deadlock", lambda net: None)
        executor = executor_of(net, log, rng)
    possible = {s.label for steps, n in zip(net.actors, deadlock.positions, strict=True) for s in steps[:n]}

    def run():
        with pytest.raises(PipelineError, match="closed while it ran"):
            executor.run()

    def close_when_stuck():
        deadline = time.monotonic() + 10
        # where nothing can run, it is closed before it began, unless that is waited for
        while (len(log) < len(possible) or not executor.runs) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        executor.close()

    within(20, lambda: _together(run, close_when_stuck))
    assert {label for label, _ in log} == possible and len(log) == len(possible)
    return True


def _together(first, second):
    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    first()
    thread.join()


def test_threads_stop_where_the_machine_does(monkeypatch):
    verdicts = [check_threads(seed, monkeypatch) for seed in range(40)]
    assert 5 < sum(verdicts) < 35
    assert not actor_threads()


@pytest.mark.sampled(0)
def test_threads_stop_where_the_machine_does_on_many(monkeypatch):
    verdicts = [check_threads(seed, monkeypatch) for seed in range(1000, 1400)]
    assert 50 < sum(verdicts) < 350
    assert not actor_threads()
