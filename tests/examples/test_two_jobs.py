"""A training run and an evaluation share the devices: the numbers are those of each alone."""

from __future__ import annotations

import re
from itertools import islice
from queue import SimpleQueue

import jax
import numpy as np
import pytest

from examples import mlp, two_jobs
from examples.data import digit_batches, digits
from shardc.runtime import gang

STEPS, EVERY = 40, 4


def reference():
    """Losses and scores of one device."""
    init_fn, step_fn = mlp.make_step(mlp.CONFIGS["test"])
    train, unseen = digits()
    state, losses, scores = init_fn(jax.random.key(0)), [], []
    step, score = jax.jit(step_fn), jax.jit(two_jobs.correct)
    for i, batch in enumerate(islice(digit_batches(train, two_jobs.ROWS), STEPS), 1):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
        if i % EVERY == 0:
            scores.append(int(score(state[0], unseen)) / len(unseen["label"]))
    return losses, scores


@pytest.mark.sampled(0)
def test_two_jobs(capsys, monkeypatch):
    monkeypatch.setattr(gang, "_PATIENCE", (0.1, 0.1))  # this machine may be loaded
    assert two_jobs.main(["--steps", str(STEPS), "--every", str(EVERY), "--config", "test"]) == 0
    out = capsys.readouterr().out
    assert "\n\nstep    0  untrained " in out
    shown = re.findall(r"step +(\d+)  loss ([\d.]+) +([\d.]+)%", out)
    losses, scores = reference()
    assert [int(step) for step, _, _ in shown] == [*range(EVERY, STEPS + 1, EVERY)]
    np.testing.assert_allclose([float(x) for _, x, _ in shown], losses[EVERY - 1 :: EVERY], atol=2e-4)
    np.testing.assert_allclose([float(x) / 100 for _, _, x in shown], scores, atol=4e-3)  # one of 297 digits
    train = next(line.split() for line in out.splitlines() if line.strip().startswith("train "))
    assert train[1] == "3" and train[2] == str(STEPS) and 70 <= int(train[-1].rstrip("%")) <= 80


def test_an_evaluation_ends_if_the_training_fails():
    snapshots = SimpleQueue()

    def step(*_):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        two_jobs.train(step, (1, 2), [{}], 1, snapshots)
    assert two_jobs.evaluate(lambda *_: 3, [{"label": [1] * 4}], snapshots) == [0.75]  # of the first parameters
