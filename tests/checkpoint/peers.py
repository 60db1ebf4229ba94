"""Processes of a run as threads of one: fake clusters that gather, lose each other and rejoin."""

import threading
from types import SimpleNamespace

from shardc.checkpoint import checkpoints as face
from shardc.errors import PeerLostError
from shardc.runtime.last_step import LastStep
from shardc.runtime.status.loop import LoopStatus
from tests.runtime.watchdog import within

DEADLINE = 60.0


class Run:
    """The processes of a run, and what they have told each other."""

    def __init__(self, processes, islands):
        self.processes, self.islands = processes, islands
        self.told = {}
        self.lost = None
        self.epoch = 0
        self.changed = threading.Condition()

    def lose(self, process):
        """Kill a process: all who wait, or come to wait, get to know."""
        with self.changed:
            self.lost = process
            self.changed.notify_all()

    def start_again(self):
        with self.changed:
            self.lost = None
            self.epoch += 1
            self.changed.notify_all()


class Fake:
    """A process of such a run, as `Cluster` is one of a real run."""

    def __init__(self, run, me):
        self.run, self.me = run, me
        self.processes = run.processes
        self.config = SimpleNamespace(islands=run.islands)
        self.epoch, self.counts, self.names = run.epoch, {}, []
        self.loop = LoopStatus()
        self.last_step = LastStep()

    def _check(self):
        if self.run.lost is not None or self.run.epoch != self.epoch:
            raise PeerLostError(f"process {self.run.lost} is lost: killed.", self.run.lost)

    def gather(self, name, text):
        number = self.counts[name] = self.counts.get(name, -1) + 1
        self.names.append(name)
        with self.run.changed:
            key = self.epoch, name, number
            there = self.run.told.setdefault(key, {})
            there[self.me] = text
            self.run.changed.notify_all()
            ok = self.run.changed.wait_for(
                lambda: len(there) == self.processes or self.run.lost is not None or self.run.epoch != self.epoch,
                DEADLINE,
            )
            assert ok, f"process {self.me} waits for others at {name}"
            if len(there) < self.processes:
                self._check()
            return [there[p] for p in range(self.processes)]

    def rejoin(self):
        with self.run.changed:
            assert self.run.changed.wait_for(lambda: self.run.epoch > self.epoch, DEADLINE)
            self.epoch, self.counts = self.run.epoch, {}


_mine = threading.local()


def use_fakes(monkeypatch):
    """Make `shardc.checkpoints` see the fake cluster of its thread."""
    monkeypatch.setattr(face, "_peers", lambda: getattr(_mine, "cluster", None))


def as_process(cluster, body):
    """What a body gives, or the error that it raises, in a thread that is this process."""
    _mine.cluster = cluster
    try:
        return body(cluster)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error


def all_processes(bodies, islands=None, run=None):
    """What each process gives, or its error. `bodies`: one for each, or one function and how many."""
    run = run or Run(len(bodies), islands or len(bodies))
    results = [None] * len(bodies)

    def call(p):
        results[p] = as_process(Fake(run, p), bodies[p])

    threads = [threading.Thread(target=call, args=(p,), daemon=True) for p in range(len(bodies))]

    def join():
        for t in threads:
            t.start()
        for t in threads:
            t.join(DEADLINE)
        assert not any(t.is_alive() for t in threads)

    within(2 * DEADLINE, join)
    return results
