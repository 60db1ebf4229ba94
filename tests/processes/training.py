"""A small training that faults interrupt: `python -m shardc run ... training.py OPTIONS DIRECTORY FACTS`.

The options are JSON. Each process appends to FACTS/<its number> what it has done: lines `seconds pid what`, of which
`step 3 0x1.8p+0` is a step and its loss, and `compiled loss` a program.
"""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc.runtime.cluster import current

LAYERS, WIDTH, ROWS = 4, 16, 8
COMPILED = "/jax/core/compile/backend_compile_duration"


def init():
    k = np.random.default_rng(0)
    params = {f"w{i}": k.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for i in range(LAYERS)}
    return params, {name: np.zeros_like(w) for name, w in params.items()}


def batch(i):
    k = np.random.default_rng(100 + i)
    return {name: k.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def train_step(options):
    """The step, as a function of shardc: momentum, and gradients clipped by a norm over all stages."""
    stages = options["stages"]
    cuts = {LAYERS * s // stages for s in range(1, stages)}

    def loss(params, batch):
        x = batch["x"]
        for i in range(LAYERS):
            x = jnp.tanh((shardc.stage_boundary(x) if i in cuts else x) @ params[f"w{i}"])
        return ((x - batch["y"]) ** 2).mean()

    def step(params, momentum, batch):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(params, batch)
        norm = jnp.sqrt(sum((g**2).sum() for g in grads.values()))
        momentum = {n: 0.9 * momentum[n] + g / jnp.maximum(1, 4 * norm) for n, g in grads.items()}
        return {n: p - 0.3 * momentum[n] for n, p in params.items()}, momentum, value

    pipeline = options["pipeline"]
    return shardc.function(
        step,
        mesh=shardc.make_mesh(**options["mesh"]),
        in_placements={"batch": {"data": shardc.S(0)}} if "data" in options["mesh"] else None,
        pipeline=None if pipeline is None else shardc.Pipeline(axis="pipe", **pipeline),
        donate_argnames=("params", "momentum"),
    )


def fail(*_):
    raise OSError("a fault of the test")


class Facts:
    """The file of this process."""

    def __init__(self, folder):
        run = current()
        self.me = 0 if run is None else run.me
        self._file = (Path(folder) / str(self.me)).open("ab", buffering=0)
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event, seconds, fun_name="", **_):
        if event == COMPILED:
            self.say(f"compiled {fun_name}")

    def say(self, what):
        self._file.write(f"{time.time()} {os.getpid()} {what}\n".encode())  # at once, whatever happens to this process


@contextmanager
def watched(facts, state):
    """Say of a lost peer what the error says, and whether the state is as it was before the step."""
    before = [(x, np.array(x)) for x in here(state)]
    try:
        yield
    except shardc.PeerLostError as error:
        facts.say(f"lost {error.process} {json.dumps(str(error))}")
        same = all(not x.is_deleted() and np.array_equal(np.asarray(x), was) for x, was in before)
        facts.say(f"state {'unchanged' if same and before else 'changed'}")
        raise


def here(state):
    """The arrays of a state that this process can read."""
    return [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.is_fully_addressable]


def main(options, directory, folder):
    facts = Facts(folder)
    signal.signal(signal.SIGUSR2, fail)
    facts.say("begin")
    step = train_step(options)

    def one(i, state):
        facts.say(f"at {i}")
        if options["pause"] == [facts.me, i]:
            time.sleep(60)
        if not options["watch"]:
            *state, value = step(*state, batch(i))
        else:
            with watched(facts, state):
                *state, value = step(*state, batch(i))
                jax.block_until_ready(here(state))
        loss = float(value)
        print(i, repr(loss), flush=True)
        facts.say(f"step {i} {loss.hex()}")
        time.sleep(options["sleep"])
        return tuple(state), value

    with shardc.checkpoints(directory, every=options["every"], keep=2) as saved:
        if options["form"] == "run":
            saved.run(one, init, steps=options["steps"])
        else:
            state, start = saved.last(or_else=init)
            for i in range(start, options["steps"]):
                state, loss = one(i, state)
                saved.step(i, state, loss=loss)
    facts.say("end")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
