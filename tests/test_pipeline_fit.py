"""A pipeline that does not fit is an error before anything runs, unless recompute may make it fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.errors import PipelineError


def loss(params, x):
    for i, (up, down) in enumerate(params):
        x = jnp.sin(jnp.cos(jnp.tanh(x @ up)) ** 2) @ down
        x = shardc.stage_boundary(x) if i < len(params) - 1 else x
    return jnp.mean(x**2)


def step(params, x):
    value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=8)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


PARAMS = [(np.ones((16, 512), np.float32), np.ones((512, 16), np.float32)) for _ in range(4)]
ROWS = np.ones((2048, 16), np.float32)


def plan(hbm, **options):
    mesh = shardc.make_mesh(topology="v5p", pipe=4, hbm=hbm)
    step_ = shardc.function(step, mesh=mesh, donate_argnames=("params",), pipeline=shardc.Pipeline(**options))
    return step_.plan(PARAMS, ROWS)


def test_stages_recompute_where_they_would_not_fit():
    free = plan("1GB")
    assert set(free.pipeline.recompute) == {"none"}
    least = plan("1GB", recompute="full").memory.peak
    assert least < free.memory.peak
    tight = plan((least + free.memory.peak) // 2)
    assert "full" in tight.pipeline.recompute
    assert tight.memory.peak <= (least + free.memory.peak) // 2


def test_what_does_not_fit_is_named():
    with pytest.raises(PipelineError, match=r"does not fit") as caught:
        plan("100KB")
    text = str(caught.value)
    assert "rank 0: " in text and "its devices have 97.7 KiB" in text and "What would help" in text
    with pytest.raises(PipelineError, match=r"recompute"):
        plan((plan("1GB", recompute="full").memory.peak + plan("1GB").memory.peak) // 2, recompute="none")
