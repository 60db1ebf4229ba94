"""A training in which one process does not come: `python -m shardc run ... hangs.py SHAPE FAULT DIRECTORY FILE`.

The fault is made once, in the first start: by process 1, or `fetch` by process 0 alone. Its time is written to FILE.
Process 0 prints the loss of each step. `curve` is what all shapes have to print.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardc
from shardc import S
from shardc.runtime.cluster import current

STEPS, AT = 8, 3
X = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


def init():
    return {name: np.full((8, 8), 0.1, np.float32) for name in "ab"}


def loss_of(w, x):
    return jnp.sum((jnp.tanh(shardc.stage_boundary(jnp.tanh(x @ w["a"])) @ w["b"])) ** 2)


def update(w, found):
    loss, grads = found
    return jax.tree.map(lambda a, g: a - 0.01 * g, w, grads), loss


def step(w, x):
    return update(w, shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2, reduce="sum")(w, x))


def curve():
    """The losses of a plain loop."""
    w, losses = init(), []
    for _ in range(STEPS):
        w, loss = update(w, jax.value_and_grad(loss_of)(w, X))
        losses.append(float(loss))
    return losses


class Fault:
    """The fault of this process, if it makes one."""

    def __init__(self, what, file):
        run = current()
        mine = run.me == (0 if what == "fetch" else 1) and run.epoch == 0
        self.what, self._file = what if mine else "", file
        if self.what == "stop":
            self._say()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _say(self):
        Path(self._file).write_text(str(time.time()))

    def at(self, i, state, where="script"):
        """Before step `i` in the script; in a reader of a flow; or in a second client of a gang."""
        if i != AT or (self.what in ("reader", "client")) != (where != "script"):
            return
        if self.what in ("sleep", "reader", "client"):
            self._say()
            time.sleep(1e6)
        if self.what == "lock":
            self._say()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if self.what == "fetch":
            self._say()
            shardc.fetch(state)

    @property
    def every(self):
        if self.what == "every":
            self._say()
        return 2 if self.what == "every" else 1


def one_of(shape, fault):
    """A function that makes one step."""
    devices = shardc.devices()
    if shape == "flow":
        first, last = (Mesh(np.array([d]), ("data",)) for d in (devices[0], devices[-1]))

        def read(k):
            fault.at(k, None, "reader")
            return X

        data = shardc.host(read, gives=jax.ShapeDtypeStruct(X.shape, X.dtype), process=1)
        grad = shardc.function(jax.value_and_grad(loss_of), mesh=last)
        apply = shardc.function(update, mesh=first)

        @shardc.flow
        def train(w, k):
            return apply(w, grad(w, data(k)))

        def one(i, w):
            w, losses = train.run(w, [i])
            return w, losses[0]

        return one
    x = X
    if shape == "pipeline":
        mesh, pipeline = shardc.make_mesh(pipe=2, data=len(devices) // 2), shardc.Pipeline()
    else:
        mesh, pipeline = shardc.make_mesh(data=len(devices)), None
        x = shardc.put(X, mesh, {"data": S(0)})
    pins = {"x": {"data": S(0)}}
    train = shardc.function(step, mesh=mesh, in_placements=pins, pipeline=pipeline)
    if shape == "gang":
        gang = shardc.Gang()
        train, evaluate = gang.share(train), gang.share(shardc.function(loss_of, mesh=mesh, in_placements=pins))

        def evaluations():
            for i in range(STEPS):
                fault.at(i, None, "client")
                float(evaluate(init(), X))

        threading.Thread(target=evaluations, name="evaluation", daemon=True).start()
    return lambda i, w: train(w, x)


def main(shape, what, directory, file):
    fault = Fault(what, file)

    def one(i, w):
        fault.at(i, w)
        w, loss = make(i, w)
        print(i, repr(float(loss)), flush=True)
        return w

    if shape == "gang":  # no checkpoints beside it: only their beginning
        with shardc.checkpoints(directory, every=fault.every):
            pass
        if what == "fetch":
            mesh = shardc.make_mesh(data=len(shardc.devices()))
            fault.at(AT, shardc.put(X, mesh, {"data": S(0)}))
    make = one_of(shape, fault)
    if shape == "gang":
        w = init()
        for i in range(STEPS):
            w = one(i, w)
        return
    with shardc.checkpoints(directory, every=fault.every) as saved:
        saved.run(one, init, steps=STEPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
