"""A pytest plugin for one of several processes that run the same tests on one global mesh.

It joins the run before anything of JAX starts, meets the other processes before each test, and makes reads of arrays
that lie in several processes a gather: the tests were written for one process.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import settings
from jax._src.array import ArrayImpl

from shardc.arrays import place, placed
from shardc.arrays.fetch import values
from shardc.machine import mesh
from shardc.runtime import cluster
from shardc.runtime.cluster import RunConfig
from tests.processes.exclusions import reason

LONGEST = 150.0
"""Seconds that a test may take."""
BARRIER = 60.0
"""Seconds that the processes wait for each other before a test."""


def join() -> cluster.Cluster:
    """Make this process one of the run that `SEAT` in the environment tells of."""
    said = json.loads(os.environ["SEAT"])
    at = said.pop("jax")
    config = RunConfig(**{**said, "secret": bytes.fromhex(said["secret"])}, deadline=BARRIER)
    made = cluster.join(config, lambda n: memoryview(np.empty(n, np.uint8)))
    jax.distributed.initialize(
        at, config.processes, config.me, coordinator_bind_address=at, cluster_detection_method="deactivate"
    )
    assert len(jax.devices()) % config.processes == 0  # starts the backend, before conftest changes the environment
    return made


class Reads:
    """Reads of arrays whose pieces lie in several processes: a gather while `gather` is set, which all must make."""

    gather = True

    @classmethod
    def install(cls) -> None:
        known, has_every_piece = ArrayImpl._value.fget, placed.has_every_piece

        def value(self):
            try:
                return known(self)
            except RuntimeError as error:
                if not cls.gather or "addressable" not in str(error):
                    raise
            return values(self)

        ArrayImpl._value = property(value)
        placed.has_every_piece = lambda x: cls.gather or has_every_piece(x)


def allow_small_meshes() -> None:
    """From now on a mesh of fewer places than processes is one of this process's own devices."""
    known = mesh.choose_devices

    def choose(devices, axes):
        need = math.prod(axes.values())
        return jax.local_devices()[:need] if need < jax.process_count() and Reads.gather else known(devices, axes)

    mesh.choose_devices = choose


def put_nan_too() -> None:
    """From now on `jax.device_put` of tests takes NumPy arrays as `shardc.put` does: JAX's own compares them in all
    processes, and NaN, which is in padding, differs from itself."""
    known = jax.device_put

    def device_put(x, device=None, **more):
        if not isinstance(device, jax.sharding.NamedSharding) or device.is_fully_addressable:
            return known(x, device, **more)
        return jax.tree.map(
            lambda leaf: place.put_whole(leaf, device) if isinstance(leaf, np.ndarray) else known(leaf, device, **more),
            x,
        )

    jax.device_put = device_put


def leave(code: int) -> None:
    """End the process without waiting for others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


RUN = join() if "SEAT" in os.environ else None
if RUN is not None:
    Reads.install()
    allow_small_meshes()
    put_nan_too()


def pytest_addoption(parser):
    parser.addoption("--results", help="the folder of the outcomes")
    parser.addoption("--stride", type=int, default=1, help="of so many tests that follow each other one is run")


def pytest_configure(config):
    settings.register_profile("processes", derandomize=True, database=None, deadline=None)
    settings.load_profile("processes")
    config.stash_results = Results(Path(config.getoption("--results")))
    config.pluginmanager.register(config.stash_results)


class Results:
    """Writes the outcome of each test, and meets the other processes before it."""

    def __init__(self, folder):
        self.folder = folder
        done = folder / "done.json"
        self.done = set(json.loads(done.read_text())) if done.exists() else set()
        self.found = {}
        self.status = 0

    def write(self, test, outcome, text=""):
        with (self.folder / f"results{RUN.me}.jsonl").open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        some = items[:: config.getoption("--stride")]
        left = [i for i in some if i.nodeid not in self.done and reason(i.nodeid) is None]
        config.hook.pytest_deselected(items=[i for i in items if i not in left])
        items[:] = left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        try:
            RUN.gather(item.nodeid, "")
        except Exception as error:  # noqa: BLE001  # whatever it is, this process cannot go on
            print(f"process {RUN.me}, before {item.nodeid}: {error}", file=sys.stderr)
            leave(3)
        timer = threading.Timer(LONGEST, self.stop, [item.nodeid])
        timer.daemon = True
        timer.start()
        Reads.gather = not item.nodeid.startswith("tests/processes/")
        self.write(item.nodeid, "ended", "the process ended in this test")
        try:
            return (yield)
        finally:
            timer.cancel()

    def stop(self, test):
        faulthandler.dump_traceback(sys.stderr)
        self.write(test, "ended", f"not done after {LONGEST:g} s")
        leave(4)

    def pytest_runtest_logreport(self, report):
        was = self.found.get(report.nodeid, "passed")
        now = report.outcome if report.when == "call" or report.outcome != "passed" else was
        self.found[report.nodeid] = now if was == "passed" else was
        if report.when == "teardown" or report.outcome == "failed":
            text = str(report.longrepr) if report.outcome == "failed" else ""
            self.write(report.nodeid, self.found[report.nodeid], text)

    def pytest_collectreport(self, report):
        if report.failed and report.nodeid not in self.done:
            self.write(report.nodeid, "error", str(report.longrepr))

    def pytest_sessionfinish(self, exitstatus):
        self.status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config):
        try:
            RUN.gather("the end", "")
        except Exception as error:  # noqa: BLE001
            print(f"process {RUN.me}, at the end: {error}", file=sys.stderr)
        leave(self.status)
