"""Flows whose workers are killed while they run: the others go on, and each change counts once.

    python -m shardc run --processes 4 --islands 4 --devices 1 --restarts 3 -m tests.processes.replaced NAME

Workers are in all processes but the last one, which has the parameter server. Numbers are whole, so that they can be
counted. The run of the flow is the first call that processes make together.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardc
from shardc.runtime.cluster import current

MESHES = [Mesh(np.array([d]), ("data",)) for d in shardc.devices()]
WORKERS, SERVER = MESHES[:-1], MESHES[-1]
ROUNDS = 30
INT = jax.ShapeDtypeStruct((), jnp.int32)
CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def die_once(who, delay):
    """Kill this process, if it is this one and lives for the first time, some seconds from now."""
    life = Path(tempfile.gettempdir()) / f"replaced-{os.getppid()}-{who}"
    if current().me == who and not life.exists():
        life.touch()
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0 if delay else 60)


def counted(stale, killed, at, delay, rounds=ROUNDS):
    """Workers add 1 to a table, at their row and round; some are killed."""

    def read(k, i):
        time.sleep(0.01)
        if int(k) == at and int(i) in killed:
            die_once(int(i), delay)
        return np.int32(2 * k)

    def work(seen, x):
        return seen * 0 + 1, x // 2

    def add(table, one, i, k):
        return table.at[i, k].add(one)

    read = shardc.host(read, gives=INT)
    works = [shardc.function(work, mesh=m) for m in WORKERS]
    held = shardc.shared(jnp.zeros((len(WORKERS), rounds), jnp.int32), on=SERVER)
    pull = shardc.function(lambda table: table.sum(), mesh=SERVER)

    @shardc.flow
    def train(state, k):
        given = []
        for i, w in enumerate(works):
            one, x = w(held.read(pull, stale=stale), read(k, np.int32(i)))
            held.change(add, one, np.int32(i), x, stale=stale)
            given.append(x)
        return state, given

    _, given = train.run(jnp.zeros(()), range(rounds))
    assert current().epoch == 0  # nobody began anew
    assert len(given) == rounds
    for i in range(len(WORKERS)):
        known = [g[i] is not None for g in given]
        assert known == sorted(known), known
        assert all(known) or i in killed
        assert all(int(g[i]) == k for k, g in enumerate(given) if g[i] is not None)
    if current().me == len(WORKERS):
        np.testing.assert_array_equal(held.value, np.ones((len(WORKERS), rounds)))
    train.close()


@case
def asynchronous():
    counted(None, killed=[1], at=12, delay=0)


@case
def stale():
    counted(2, killed=[2], at=9, delay=0.02)


@case
def bulk_synchronous():
    counted(0, killed=[1], at=14, delay=0)


@case
def two_at_once():
    counted(0, killed=[1, 2], at=11, delay=0.01)


@case
def in_the_first_round():
    counted(None, killed=[1], at=0, delay=0)


@case
def after_the_last_round():
    counted(1, killed=[2], at=ROUNDS - 1, delay=0.05)


@case
def simulators():
    """A learner waits for a simulator in another process, and has the numbers of a run without a loss."""

    def play(w, i):
        if int(w) == 10:
            die_once(1, 0)
        return np.int32(int(w) + i)

    def learn(w, x, y):
        return w + x - y + 2

    play_in = [shardc.host(play, gives=INT, process=p) for p in (1, 2)]
    learn = shardc.function(learn, mesh=SERVER, donate_argnames="w")

    @shardc.flow
    def train(w, k):
        w = learn(w, play_in[0](w, np.int32(1)), play_in[1](w, np.int32(2)))
        return w, w

    w, given = train.run(jnp.zeros((), jnp.int32), range(ROUNDS))
    assert current().epoch == 0
    assert list(map(int, given)) == list(range(1, ROUNDS + 1))
    assert int(shardc.fetch(w)) == ROUNDS
    train.close()


def main(name):
    CASES[name]()
    current().gather("done", name)
    print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
