"""Where values cross from stage to stage: as small as they can be had there."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import shardc
from shardc import S


def loss(params, x):
    first, last = params
    x = shardc.stage_boundary(x @ first["w"] + first["b"])
    return jnp.mean((x @ last["w"] + last["b"]) ** 2)


def step(params, x):
    return shardc.accumulate(jax.value_and_grad(loss), microbatches=8)(params, x)


def test_rows_that_are_split_cross_split_both_ways():
    """A bias would like to see the whole gradient, and a receive of all of it looked like a gift."""
    params = [{"w": jnp.ones((128, 128)), "b": jnp.ones(128)}] * 2
    places = {"params": {}, "x": {"data": S(0)}}
    piped = shardc.function(
        step, mesh=shardc.make_mesh(pipe=2, data=2), in_placements=places, pipeline=shardc.Pipeline()
    )
    plan = piped.plan(params, jnp.ones((2048, 128)))
    whole = 256 * 128 * 4
    assert [(t.source, t.target, t.bytes // t.count) for t in plan.transfers] == [
        (0, 1, whole // 2),
        (1, 0, whole // 2),
    ]
    assert not [c for c in plan.collectives if c.count > 1]


def clipped(params, x):
    value, grads = step(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - g / norm, params, grads), value


def test_a_sum_over_stages_has_the_line_that_it_comes_from():
    params = [{"w": jnp.ones((8, 8)), "b": jnp.ones(8)}] * 2
    plan = shardc.function(clipped, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline()).plan(
        params, jnp.ones((16, 8))
    )
    (norm,) = [t for t in plan.transfers if t.value == "f32[]" and t.source == 1]
    assert norm.line.startswith("test_transfers.py:")
