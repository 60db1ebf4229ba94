"""Warnings that matter, once each."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
from shardc import S

MESH = shardc.make_mesh(data=4, model=2)
ROWS = {"data": S(0)}


def said(call, *args):
    """The texts of a call's warnings, which are all of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    assert all(w.category is shardc.ShardcWarning and w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def step_of(opt):
    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def test_a_state_that_is_not_donated():
    opt = optax.adam(1e-3)
    step = step_of(opt)

    def state_of(n):
        params = {"w": np.ones((256, n), np.float32), "b": np.ones(n, np.float32)}
        return params, opt.init(params), np.ones((16, 256), np.float32)

    large, small = state_of(512), state_of(16)
    places = {"params": {}, "state": {}, "x": ROWS}
    f = shardc.function(step, mesh=MESH, in_placements=places)
    assert said(f.plan, *large) == []  # nothing runs
    assert said(f, *small) == []
    (text,) = said(f, *large)
    assert text == (
        f"step (test_warnings.py:{step.__code__.co_firstlineno}): params and state are returned as results but not "
        "donated: during a call each device holds their 1.5 MiB twice. With donate_argnames=('params', 'state') the "
        "results reuse the buffers."
    )
    assert said(f, *large) == [] and said(f.compile, *large) == []  # once
    donated = shardc.function(step, mesh=MESH, in_placements=places, donate_argnames=("params", "state"))
    assert said(donated.compile, *large) == []
    spread = {**places, **dict.fromkeys(("params", "state"), shardc.fsdp("data"))}
    assert said(shardc.function(step, mesh=MESH, in_placements=spread), *large) == []  # each device has little of it


def test_what_is_no_new_state():
    """Rows that come back, parameters that come back as they were, one array of the shape of another."""
    params = {"w": np.ones((512, 1024), np.float32), "b": np.ones(1024, np.float32)}
    f = shardc.function(lambda params, x: (params, x @ params["w"]), mesh=MESH, in_placements={"params": {}, "x": ROWS})
    assert said(f, params, np.ones((16, 512), np.float32)) == []
    g = shardc.function(lambda x: jnp.tanh(x), mesh=MESH, in_placements=({},), out_placements={})
    assert said(g, params["w"]) == []


def test_what_has_no_rule():
    def f(x):
        bits = jax.lax.rng_bit_generator(np.zeros(4, np.uint32), (1024, 1024))[1]
        return x + bits.astype(jnp.float32)

    x = np.ones((1024, 1024), np.float32)
    (text,) = said(shardc.function(f, mesh=MESH, in_placements=(ROWS,)), x)
    assert "rng_bit_generator at test_warnings.py" in text and "(f)" in text and "has no sharding rule" in text
    assert "4.0 MiB" in text
    meant = shardc.function(f, mesh=MESH, in_placements=(ROWS,), replicate="rng_bit_generator")
    assert said(meant, x) == []


def test_it_can_be_silenced_by_its_category():
    opt = optax.sgd(1e-3, momentum=0.9)
    params = {"w": np.ones((512, 512), np.float32), "b": np.ones(512, np.float32)}
    args = params, opt.init(params), np.ones((16, 512), np.float32)
    f = shardc.function(step_of(opt), mesh=MESH, in_placements={"params": {}, "state": {}})
    with pytest.warns(shardc.ShardcWarning, match="not donated"):
        f(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardc.ShardcWarning)
        shardc.function(step_of(opt), mesh=MESH, in_placements={"params": {}, "state": {}})(*args)
