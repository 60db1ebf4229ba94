"""The digest of a plan: equal for equal plans, whatever the process, and another one for whatever is run otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import AUTO, B, S

MESH = shardc.make_mesh(data=4, model=2)
X, W = np.ones((16, 8), np.float32), np.ones((8, 12), np.float32)


def step(x, w):
    return jnp.tanh(x @ w).sum(0)


def digest(fn=step, x=X, **options):
    return shardc.function(fn, mesh=MESH, **options).plan(x, W).digest


BASE = {"in_placements": {"x": {"data": S(0)}, "w": {}}}


def test_equal_plans_have_equal_digests():
    assert digest(**BASE) == digest(**BASE)


@pytest.mark.parametrize(
    "other",
    [
        lambda: digest(lambda x, w: jnp.sinh(x @ w).sum(0), **BASE),
        lambda: digest(lambda x, w: jnp.tanh(x @ w * 2).sum(0), **BASE),
        lambda: digest(lambda x, w: jnp.tanh(x @ w * 3).sum(0), **BASE),
        lambda: digest(x=np.ones((8, 8), np.float32), **BASE),
        lambda: digest(in_placements={"x": {"data": S(0)}, "w": {"model": S(1)}}),
        lambda: digest(out_placements={"model": S(0)}, **BASE),
        lambda: digest(donate_argnames=("x",), fn=lambda x, w: (step(x, w), x + 1), **BASE),
        lambda: digest(fn=lambda x, w: (step(x, w), x + 1), **BASE),
    ],
)
def test_what_is_run_otherwise_has_another_digest(other):
    assert other() != digest(**BASE)


def test_literals_count():
    assert digest(lambda x, w: step(x, w) * 2, **BASE) != digest(lambda x, w: step(x, w) * 3, **BASE)


def test_donation_counts():
    def fn(x, w):
        return step(x, w), x + 1

    assert digest(fn, **BASE) != digest(fn, donate_argnames=("x",), **BASE)


def pipeline(schedule):
    def loss(w, x):
        for k in range(2):
            x = jnp.tanh(x @ w[k])
            x = shardc.stage_boundary(x) if k == 0 else x
        return (x**2).sum()

    def train(w, x):
        return shardc.accumulate(jax.value_and_grad(loss), microbatches=4, in_axes=(None, 0))(w, x)

    mesh = shardc.make_mesh(pipe=2, data=2)
    f = shardc.function(train, mesh=mesh, pipeline=shardc.Pipeline(schedule=schedule))
    return f.plan([np.ones((4, 4), np.float32)] * 2, np.ones((8, 4), np.float32)).digest


def test_of_pipelines_the_schedule_counts():
    assert pipeline("1f1b") == pipeline("1f1b") != pipeline("gpipe")


def partly_pinned():
    """The digest of a plan with a value that has pins on two of three axes."""
    mesh = shardc.make_mesh(data=2, model=2, other=2)
    pin = {"data": S(0), "model": B, ...: AUTO}
    return shardc.function(lambda x, w: step(shardc.constrain(x, pin), w), mesh=mesh).plan(X, W).digest


@pytest.mark.parametrize("seed", ["1", "3"])
def test_hash_seeds_do_not_count(seed):
    made = "digest(**BASE), pipeline('1f1b'), partly_pinned()"
    code = f"import tests.conftest; from tests.plan.test_digest import *; print({made})"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == f"{digest(**BASE)} {pipeline('1f1b')} {partly_pinned()}\n"
