"""PipeDream-2BW: gradients at weights that are one step old, as the user's own step says it on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.errors import PipelineError


def loss(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        x = shardc.stage_boundary(x) if i < len(params) - 1 else x
    return jnp.mean(x**2)


def delayed(params, older, x):
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(older, x)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), params, value


def fresh(params, x):
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=4)(params, x)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value


def test_delayed_weights_are_those_of_one_device():
    mesh = shardc.make_mesh(pipe=3, data=2)
    pipeline = shardc.Pipeline(schedule="pipedream-2bw")
    step = shardc.function(
        delayed, mesh=mesh, in_placements={"x": {"data": shardc.S(0)}}, pipeline=pipeline,
        donate_argnames=("params", "older"),
    )  # fmt: skip
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        start = [rng.normal(size=(8, 8)) for _ in range(3)]
        one = (start, start, None)
        many = (start, [w.copy() for w in start], None)
        plain = jax.jit(delayed)
        for _ in range(4):
            x = rng.normal(size=(16, 8))
            one, many = plain(*one[:2], x), step(*many[:2], x)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-10, atol=1e-13)
        assert not np.allclose(np.asarray(one[0][0]), np.asarray(one[1][0])), "there are two versions"


def test_a_step_that_reads_the_weights_it_replaces_is_refused():
    step = shardc.function(fresh, mesh=shardc.make_mesh(pipe=3), pipeline=shardc.Pipeline(schedule="pipedream-2bw"))
    with pytest.raises(PipelineError, match=r"one step old.*\n  params/0\n  params/1\n  params/2"):
        step.plan([np.ones((8, 8), np.float32)] * 3, np.ones((16, 8), np.float32))
