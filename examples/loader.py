"""Training with a loader, as a dataflow: a reader reads ahead by credits, a mesh trains, an evaluation runs beside it.

    python -m examples.loader                 # ten epochs of digits; a batch read ahead, and in a second run four
    python -m examples.loader --rounds 100    # at most so many batches

The reader ends the run: it raises StopIteration after its epochs. The model is that of examples/mlp.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import shardc
from examples import data, mlp
from examples.train import fake_cpu_devices, positive

ROWS = 50
"""Of a batch."""


class Reader:
    """The digits of some epochs, batch by batch. Every fourth batch takes `seconds` to read: a file is opened."""

    def __init__(self, epochs: int, seconds: float = 0.0) -> None:
        train, _ = data.digits()
        self.rounds = len(train["label"]) // ROWS * epochs
        self.batches = itertools.islice(data.digit_batches(train, ROWS), self.rounds)
        self.seconds, self.count = seconds, 0

    def read(self) -> data.Batch:
        batch = next(self.batches)  # StopIteration ends the run
        self.count += 1
        if self.count % 4 == 0:
            time.sleep(self.seconds)
        return batch


def make_flow(
    cfg: mlp.Config, mesh: Any, reader: Reader, credits: int, every: int, tell: Callable[[str], None] = print
) -> tuple[Any, Any]:
    """The flow, and the state that it begins with: `state, given = flow.run(state)`, until the reader has no more."""
    init_fn, step_fn = mlp.make_step(cfg)
    _, test = data.digits()
    image, label = jax.ShapeDtypeStruct((ROWS, 8, 8, 1), np.float32), jax.ShapeDtypeStruct((ROWS,), np.int32)
    read = shardc.host(reader.read, gives={"image": image, "label": label}, credits=credits)

    def step(state, batch):
        *state, loss = step_fn(*state, batch)
        return tuple(state), loss

    split = {"data": shardc.S(0)}
    train_step = shardc.function(step, mesh=mesh, in_placements={"batch": split}, donate_argnames="state")
    forward = jax.jit(mlp.forward)

    def evaluate(params):
        right = np.float32(np.mean(np.argmax(forward(params, test["image"]), -1) == test["label"]))
        tell(f"{100 * right:.1f}% of {len(test['label'])} test digits are right")
        return right

    report = shardc.every(every, shardc.host(evaluate, gives=jax.ShapeDtypeStruct((), np.float32)))

    @shardc.flow
    def train(state):
        state, loss = train_step(state, read())
        return state, {"loss": loss, "right": report(state[0])}

    return train, jax.jit(init_fn)(jax.random.key(0))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=positive, help="the most batches; default: until the reader has no more")
    add("--epochs", type=positive, default=10)
    add("--devices", type=positive, default=4)
    add("--credits", type=positive, nargs="*", default=[1, 4], help="batches that may lie ready; a run for each")
    add("--seconds", type=float, default=0.03, help="that every fourth batch takes to read")
    add("--draw", metavar="FILE", help="an .svg or .png of the last run, planned above measured")
    options = parser.parse_args(argv)
    fake_cpu_devices(options.devices)
    mesh = shardc.make_mesh(data=options.devices)
    for credits in options.credits:
        reader = Reader(options.epochs, options.seconds)
        train, state = make_flow(mlp.CONFIGS["tiny"], mesh, reader, credits, every=50)
        print(train.plan(state).explain())
        state, first = train.run(state, rounds=4)  # compiles
        begin = time.perf_counter()
        state, given = train.run(state, rounds=options.rounds, record=bool(options.draw))
        took = (time.perf_counter() - begin) / len(given)
        reached = f"loss {float(first[0]['loss']):.2f} -> {float(given[-1]['loss']):.4f}"
        print(f"{credits} read ahead: {len(first) + len(given)} rounds, {1e3 * took:.1f} ms each, {reached}\n")
        if options.draw:
            given.draw(options.draw)
        train.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
