"""Checkpoints of several real processes: of one JAX runtime, and of two that are independent of each other."""

import random
import secrets
import socket
import time
from contextlib import ExitStack, suppress
from queue import SimpleQueue

import jax
import numpy as np
import pytest

import shardc
from shardc import Placement, S, make_mesh
from shardc.arrays.place import put_leaf
from shardc.runtime.store import StoreServer
from tests.checkpoint.worker import DEADLINE, Worker, value_at

W = np.arange(13 * 8, dtype=np.float32).reshape(13, 8)


def free_address():
    """Below the ports of outgoing connections, one of which could take it before the process that is told does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"


@pytest.mark.sampled(0)
def test_one_runtime_of_two_processes(tmp_path):
    """They check what they restore onto another mesh; then one process with all devices takes it."""
    address = free_address()
    with Worker("spmd", tmp_path, address, 0) as first, Worker("spmd", tmp_path, address, 1) as second:
        said = first.end(), second.end()
    text = "more: a Python int asked for, not in the checkpoint."
    assert [s.splitlines()[-1].strip() for s in said] == [text, text]
    mesh = make_mesh(c=8)
    like = {
        "uneven": put_leaf(W * 0, mesh, Placement({"c": S(0)})),
        "even": np.zeros_like(W),
        "host": jax.numpy.zeros((3, 8)),
        "local": jax.numpy.arange(3),
        "key": jax.random.key(0),
        "n": 0,
    }
    with shardc.checkpoints(tmp_path) as saved:
        got, start = saved.last(or_else=like)
    assert start == 2 and got["n"] == 3
    for name, wanted in {"uneven": W, "even": 2 * W, "host": W[:3], "local": np.arange(3)}.items():
        np.testing.assert_array_equal(np.asarray(got[name]), wanted)


class Launcher:
    """As much of a launcher as a loss takes: it tells who is lost, and starts that process again."""

    def __init__(self, directory, steps):
        self.directory, self.steps = directory, steps
        self.secret = secrets.token_bytes(32)
        self.epoch, self.workers, self.left = 0, {}, ExitStack()
        self.ended = SimpleQueue()
        self.store = StoreServer("127.0.0.1:0", self.secret, self.ended.put)

    def start(self, p):
        arguments = self.directory, self.store.address, self.secret.hex(), p, self.epoch, self.steps
        self.workers[p] = self.left.enter_context(Worker("island", *arguments, devices=2))

    def kill_and_start_again(self, p):
        until = time.monotonic() + DEADLINE
        while len(self.store.statuses()) < len(self.workers):  # one that is not connected would not hear of the loss
            assert time.monotonic() < until
            time.sleep(0.01)
        self.workers[p].kill()
        assert self.ended.get(timeout=DEADLINE) == p
        self.store.notify_all({"event": "lost", "process": p, "why": "killed"})
        self.epoch += 1
        self.start(p)
        self.store.notify_all({"event": "epoch", "epoch": self.epoch, "restarts": 0})

    def close(self):
        self.left.close()
        self.store.close()


def wanted(steps):
    """What stage s holds at the end, without an interruption."""
    found = []
    for s in (0, 1):
        w = np.zeros((512, 256), np.float32)
        for i in range(steps):
            w = w * 0.5 + value_at(2 * i + s)["w"]
        found.append(w)
    return found


def check_islands(directory, steps, kills):
    """Two stages, one of which is killed after some step, at a random time of it."""
    launcher = Launcher(directory, steps)
    try:
        for p in (0, 1):
            launcher.start(p)
        for step, p, seed in kills:
            while int(launcher.workers[0].line()) < step:
                pass
            time.sleep(random.Random(seed).uniform(0.0, 0.05))
            launcher.kill_and_start_again(p)
        ends = [launcher.workers[p].end().splitlines()[-1] for p in (0, 1)]
    finally:
        launcher.close()
    stages = wanted(steps)
    sums = [float(w.sum(dtype=np.float64)) for w in stages]
    assert ends == [f"end {sum(range(steps))} {total}" for total in sums]
    with shardc.checkpoints(directory) as saved:  # one process takes both stages
        got, start = saved.last(or_else={"stages": [np.zeros((512, 256), np.float32)] * 2, "n": 0})
    assert start == steps and got["n"] == sum(range(steps))
    np.testing.assert_array_equal(got["stages"], stages)


@pytest.mark.sampled(0)
def test_two_runtimes_one_of_which_is_killed(tmp_path):
    check_islands(tmp_path, 16, [(5, 1, 0)])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(3))
def test_two_runtimes_of_which_one_after_the_other_is_killed(tmp_path, seed):
    k = random.Random(seed)
    steps = sorted(k.sample(range(1, 20), 3))
    check_islands(tmp_path, 60, [(step, k.choice((0, 1)), seed) for step in steps])
