"""A script in which one process makes a mistake: `python -m shardc run ... mistakes.py MISTAKE WHEN SHAPE FILE`.

Each round makes three steps, reads their losses, and evaluates. The mistake is made in the first round, in which all is
compiled, or in a later one. Its time is written to FILE.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import S
from shardc.runtime.cluster import current

MISTAKE, WHEN, SHAPE, FILE = sys.argv[1:]
ME, NUMBER = current().me, len(shardc.devices())


def loss_of(w, x):
    return jnp.sum((jnp.tanh(shardc.stage_boundary(jnp.tanh(x @ w["a"])) @ w["b"])) ** 2)


def train(w, x):
    loss, grads = shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2, reduce="sum")(w, x)
    return jax.tree.map(lambda a, g: a - 0.01 * g, w, grads), loss


def evaluate(w, x):
    return shardc.accumulate(loss_of, microbatches=2, reduce="sum")(w, x)


if SHAPE == "pipeline":
    mesh, pipeline = shardc.make_mesh(pipe=2, data=NUMBER // 2), shardc.Pipeline()
else:
    mesh, pipeline = shardc.make_mesh(data=NUMBER), None
decorate = shardc.function(mesh=mesh, in_placements={"x": {"data": S(0)}}, pipeline=pipeline)
train, evaluate = decorate(train), decorate(evaluate)
w = {k: np.full((8, 8), 0.1, np.float32) for k in "ab"}
x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
if SHAPE == "spmd" and MISTAKE != "other data":
    x = shardc.put(x, mesh, {"data": S(0)})


def one_round(mistake):
    """One round of calls, with a mistake of process 1, but for `alone`, evaluation in process 0 alone."""
    global w
    if mistake and ME == 1:
        Path(FILE).write_text(str(time.time()))
    mistake = mistake if ME == 1 or mistake == "alone" else ""
    if mistake == "order":
        print(float(evaluate(w, x)))
    for _ in range(3 + (mistake == "additional") - (mistake == "missing")):
        w, loss = train(w, x + 1 if mistake == "other data" else x)
        float(loss)
        if mistake == "end":
            sys.exit()
    if mistake != "order" and (mistake != "alone" or ME == 0):
        float(evaluate(w, x))


for i in range(8):
    one_round(MISTAKE if i == (0 if WHEN == "first" else 3) else "")
