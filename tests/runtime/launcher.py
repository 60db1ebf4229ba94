"""A launcher for tests: the store of a run, its clusters in this process, its members in others."""

import time

import pytest

from shardc.runtime.cluster import Cluster, RunConfig
from shardc.runtime.store import StoreServer
from shardc.runtime.transport import wire
from tests.runtime.codec import allocate
from tests.runtime.peers import together, until

SECRET = wire.new_secret()


class Run:
    """The processes of a run, and their store, if another process does not hold it at `address`."""

    def __init__(self, folder, processes=2, transport="unix", address=None):
        self.folder, self.transport, self.processes = folder, transport, processes
        self.server = None
        if address is None:
            self.server = StoreServer(f"unix:{folder / 'store'}" if transport == "unix" else "127.0.0.1:0", SECRET)
        self.address = address or self.server.address
        self.clusters = {}

    def config(self, me, **options):
        links = f"unix:{self.folder / str(me)}" if self.transport == "unix" else "127.0.0.1:0"
        known = {"islands": self.processes, "silence": 10.0, "deadline": 10.0}
        return RunConfig(
            me=me,
            processes=self.processes,
            store=self.address,
            secret=SECRET,
            links=links,
            **{**known, **options},
        )

    def join(self, me, **options):
        self.clusters[me] = Cluster(self.config(me, **options), allocate)
        self.clusters[me].on_orphaned = lambda: None
        if self.server is not None:
            until(lambda: me in self.server.statuses())  # from now on it hears all events
        return self.clusters[me]

    def all(self, **options):
        return [self.join(p, **options) for p in range(self.processes)]

    def lose(self, process, why="it was killed by signal 9"):
        self.server.notify_all({"event": "lost", "process": process, "why": why})

    def end(self, process, epoch=0, **calls):
        """Tell all that the script of a process has ended."""
        known = self.clusters[process].calls() if process in self.clusters else {}
        event = {"event": "done", "processes": [process], "epoch": epoch, "calls": {**known, **calls}}
        self.server.notify_all(event)

    def close(self):
        together(*(c.close for c in self.clusters.values()))
        self.server.close()


@pytest.fixture
def a_run(tmp_path):
    """A function that begins a run."""
    runs = []

    def begin(processes=2, transport="unix"):
        runs.append(Run(tmp_path, processes, transport))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def member(start, run, me, seed=0, **options):
    """A process of a run that makes steps of a network (`roles.member`)."""
    known = {"seed": seed, "microbatches": 4, "runs": 10_000}
    config = {"silence": 2.0, "deadline": 20.0, **options.pop("config", {})}
    told = run.config(me, **config)
    said = {**{f: getattr(told, f) for f in told.__dataclass_fields__}, "secret": SECRET.hex()}
    return start("member", said, {**known, **options})


def hear_until(child, key, seconds=20.0):
    """The next thing with this key that a member says."""
    end = time.monotonic() + seconds
    while key not in (said := child.hear(max(0.1, end - time.monotonic()))):
        assert "error" not in said or "failed" in said, said
    return said
