"""A training run and an evaluation share the devices 3:1.

    python -m examples.two_jobs --devices 8
    python -m shardc run --processes 2 --devices 4 -m examples.two_jobs

The evaluation scores the parameters of every other step on all unseen digits, while training goes on. Each job is a
loop in a thread of its own, as if it had the devices alone; the gang decides whose program begins next. The losses are
those of a run without evaluation.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp

import shardc
from examples import mlp
from examples.data import Batch, digit_batches, digits
from examples.plans.mlp import data
from examples.train import fake_cpu_devices, positive
from shardc import S
from shardc.runtime.cluster import current

ROWS = 256
SCORED = 27
"""Rows that one program of the evaluation scores: 11 programs for 297 digits."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.two_jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=positive, help="fake so many CPU devices; shardc run has its own --devices")
    add("--steps", type=positive, default=200)
    add("--every", type=positive, default=2, help="steps from one evaluation to the next")
    add("--weights", type=positive, nargs=2, default=(3, 1), help="of the training and of the evaluation")
    add("--config", choices=mlp.CONFIGS, default="tiny")
    return parser.parse_args(argv)


def correct(params: Any, batch: Batch) -> jax.Array:
    """How many images of a batch are read correctly."""
    return jnp.sum(mlp.forward(params, batch["image"]).argmax(-1) == batch["label"])


def train(step: Callable, state: tuple, batches: Iterable[Batch], every: int, snapshots: SimpleQueue) -> list[float]:
    """The losses of all steps. The first parameters go to the evaluation, then those of each `every` steps; None at the
    end.

    A loss is read when the next step is launched: whoever waits for each result is never there when the next program
    is chosen.
    """
    losses: list[Any] = []
    snapshots.put(state[0])
    try:
        for i, batch in enumerate(batches, 1):
            *state, loss = step(*state, batch)
            losses[-1:] = [*map(float, losses[-1:]), loss]
            if i % every == 0:
                snapshots.put(state[0])
    finally:
        snapshots.put(None)
    return [*map(float, losses)]


def evaluate(score: Callable, parts: Sequence[Batch], snapshots: SimpleQueue) -> list[float]:
    """The part of the digits that each snapshot of the parameters reads correctly. Results are read at the end."""
    found: list[list[Any]] = []
    while (params := snapshots.get()) is not None:
        found.append([score(params, part) for part in parts])
    rows = sum(len(part["label"]) for part in parts)
    return [sum(map(int, each)) / rows for each in found]


def two_jobs(options: argparse.Namespace) -> tuple[list[float], list[float], str]:
    """The losses, the scores, and how the devices were shared while training went on."""
    mesh = shardc.make_mesh(data=len(shardc.devices()))
    init_fn, step_fn = mlp.make_step(mlp.CONFIGS[options.config])
    places = data()["in_placements"]  # nothing is donated: the evaluation reads the parameters of earlier steps
    out = places["params"], places["opt_state"], {}
    step = shardc.function(step_fn, mesh=mesh, in_placements=places, out_placements=out)
    score = shardc.function(correct, mesh=mesh, in_placements={"params": places["params"], "batch": {"data": S(0)}})

    seen, unseen = digits()
    batches = list(islice(digit_batches(seen, ROWS), options.steps))
    parts = [{n: x[i : i + SCORED] for n, x in unseen.items()} for i in range(0, len(unseen["label"]), SCORED)]
    state = init_fn(jax.random.key(0))
    step.compile(*state, batches[0])
    score.compile(state[0], parts[0])

    gang = shardc.Gang(in_flight=2)
    step = gang.share(step, weight=options.weights[0], name="train")
    score = gang.share(score, weight=options.weights[1], name="evaluate")

    snapshots: SimpleQueue = SimpleQueue()
    with ThreadPoolExecutor() as jobs:
        training = jobs.submit(train, step, state, batches, options.every, snapshots)
        evaluation = jobs.submit(evaluate, score, parts, snapshots)
        losses, shared = training.result(), gang.explain()
        return losses, evaluation.result(), shared


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.devices and current() is None and os.environ.get("JAX_PLATFORMS", "cpu") in ("", "cpu"):
        fake_cpu_devices(options.devices)
    losses, scores, shared = two_jobs(options)
    print(f"while training went on\n{shared}\n")
    for i, score in enumerate(scores):
        if i % max(1, len(scores) // 10) == 0 or i == len(scores) - 1:
            step = i * options.every
            loss = f"loss {losses[step - 1]:.4f}" if step else "untrained  "
            print(f"step {step:4}  {loss}  {score:6.1%} of the unseen digits are read correctly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
