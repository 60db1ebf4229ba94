"""A shardc function with pins that is called inside another one, whose mesh is another one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import P, S

WIDE = shardc.make_mesh(data=4, model=2)
LINE = shardc.make_mesh(data=8)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)


def layer(x, w):
    return jnp.tanh(x @ w)


def gradient_of(f):
    return lambda w, x: jax.value_and_grad(lambda w: (f(x, w) ** 2).sum())(w)


def same(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


def pins_in(plan):
    return [str(e.params["pin"].placement) for e in plan.program.jaxpr.eqns if e.primitive.name == "constrain"]


ROWS = {"in_placements": {"x": {"data": S(0)}}, "out_placements": {"data": S(0)}}
SUMS = {"in_placements": {"x": {"data": S(1)}, "w": {"data": S(0)}}, "out_placements": {"data": P}}


@pytest.mark.parametrize(("size", "cached"), [(3, False), (8, True)])
@pytest.mark.parametrize(("fn", "pins"), [(layer, ROWS), (jnp.matmul, SUMS)], ids=["rows", "sums"])
def test_pins_are_by_axis_name(fn, pins, size, cached):
    """Also where JAX has kept the trace of a call outside, and for partial sums, which JAX's constraints cannot say."""
    mesh = shardc.make_mesh(data=size)
    if fn is jnp.matmul:
        fn = lambda x, w: x @ w  # noqa: E731
    inner = shardc.function(fn, mesh=WIDE, **pins)
    step = gradient_of(jax.jit(inner) if cached else inner)
    if cached and pins is ROWS:
        same(step(W, X), gradient_of(fn)(W, X))
    outer = shardc.function(step, mesh=mesh)
    same(outer(W, X), gradient_of(fn)(W, X))
    assert outer.compile(W, X).audit().ok
    want = ["{data: S(0)}"] * 2 if pins is ROWS else ["{data: S(1)}", "{data: S(0)}", "{data: P(sum)}"]
    assert pins_in(outer.plan(W, X)) == want


def test_vmap_and_loops_keep_the_pins():
    inner = shardc.function(layer, mesh=WIDE, **ROWS)

    def many(w, x):
        y = jax.vmap(inner, (0, None))(jnp.stack([x, x]), w)
        return jax.lax.scan(lambda c, _: (inner(c, w), None), y[0], None, length=2)[0], y

    outer, plain = shardc.function(many, mesh=LINE), lambda w, x: (layer(layer(layer(x, w), w), w), layer(x, w))
    got, want = outer(W, X), plain(W, X)
    same(got, (want[0], jnp.stack([want[1]] * 2)))
    assert pins_in(outer.plan(W, X)) == ["{data: S(1)}"] * 2


def test_axes_that_the_outer_mesh_has_not():
    inner = shardc.function(layer, mesh=WIDE, in_placements={"x": {"data": S(0)}, "w": {"model": S(1)}})

    def middle(x, w):
        return shardc.constrain(inner(x, w), {"model": S(0)})

    def step(w, x):
        return shardc.function(middle, mesh=WIDE)(x, w)

    with pytest.raises(shardc.PlacementError) as error:
        shardc.function(step, mesh=LINE).plan(W, X)
    assert re.sub(r":\d+", ":0", str(error.value)) == (
        "step (test_inside_functions.py:0), mesh data=8 on cpu:\n"
        "  w of layer (test_inside_functions.py:0), called at test_inside_functions.py:0 (step), pins f32[6,6]: "
        "{'model': S(1)}: the mesh has no axis 'model'; its axes are 'data'. Make this mesh with model=1 too, or leave "
        "it out of that pin.\n"
        "  shardc.constrain in middle (test_inside_functions.py:0), called at test_inside_functions.py:0 (step), pins "
        "f32[16,6]: {'model': S(0)}: the mesh has no axis 'model'; its axes are 'data'. Make this mesh with model=1 "
        "too, or leave it out of that pin."
    )
    same(shardc.function(step, mesh=shardc.make_mesh(data=2, model=1))(W, X), layer(X, W))


@pytest.mark.parametrize("sizes", [{"pipe": 2, "data": 2, "model": 2}, {"pipe": 2, "data": 1, "model": 3}], ids=str)
def test_stages_of_a_pipeline(sizes):
    mesh = shardc.make_mesh(**sizes)
    block = shardc.function(layer, mesh=mesh, in_placements={"w": {"model": S(1)}})

    def step_with(block):
        loss = lambda p, x: jnp.mean(block(shardc.stage_boundary(block(x, p[0])), p[1]) ** 2)  # noqa: E731
        return lambda p, x: shardc.accumulate(jax.grad(loss), microbatches=2)(p, x)

    step = shardc.function(step_with(block), mesh=mesh, pipeline=shardc.Pipeline())
    same(step([W, W], X), step_with(layer)([W, W], X))


def test_in_plain_jax_pins_are_constraints_on_their_own_mesh():
    inner = shardc.function(layer, mesh=WIDE, **ROWS)
    for f in (jax.jit(inner), lambda x, w: jax.vmap(inner, (0, None))(x[None], w)[0]):
        y = f(X, W)
        assert y.sharding.mesh == WIDE
        assert y.sharding.spec[0] == "data"
        same(y, layer(X, W))
    text = jax.jit(gradient_of(inner)).lower(W, X).as_text()
    assert text.count("sdy.sharding_constraint") == 3  # argument, result, its cotangent
    summed = shardc.function(lambda x, w: x @ w, mesh=WIDE, **SUMS)
    refused = r"result of <lambda> \(.*\) is pinned at \{data: P\(sum\)\}, but the function is called in an outer jit"
    for run in (jax.jit(summed), lambda x, w: jax.grad(lambda x: summed(x, w).sum())(x)):
        with pytest.raises(shardc.PlacementError, match=refused):
            run(X, W)
