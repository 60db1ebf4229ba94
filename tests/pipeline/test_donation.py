"""Donated arguments of a pipeline: what several stages of one rank read is there until the last has read it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc


def loss(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        x = shardc.stage_boundary(x) if i < len(params) - 1 else x
    return jnp.mean(x**2)


def step(params, count, x):
    loss_, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(params, x)
    count = count + 1
    return jax.tree.map(lambda p, g: p - g / count, params, grads), count, loss_


def run(step, steps=3):
    x = jnp.ones((16, 8))
    state, losses = ([jnp.eye(8) + i for i in range(4)], jnp.float32(0)), []
    for _ in range(steps):
        *state, loss_ = step(*state, x)
        losses.append(float(loss_))
    return losses


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_what_two_stages_of_a_rank_read_is_not_taken_by_the_first(schedule):
    pipeline = shardc.Pipeline(schedule=schedule, chunks=2)
    pipelined = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2), pipeline=pipeline, donate_argnames=("params", "count")
    )
    np.testing.assert_allclose(run(pipelined), run(jax.jit(step)), rtol=1e-6)
