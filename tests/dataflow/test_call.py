"""Calls in a round: of functions, modules, and what a loop leaves on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardc
import shardc.equinox
import shardc.flax
from shardc import S
from shardc.errors import ArgumentError

ITEMS = [np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32) for i in range(4)]


def test_what_a_loop_leaves_at_another_placement_is_boxed_by_the_plan():
    mesh = shardc.make_mesh(data=4)

    def step(c, x):
        return 0.01 * ((x.T @ x) @ c.T).T

    fn = shardc.function(step, mesh=mesh, in_placements={"x": {"data": S(0)}}, out_placements={"data": S(1)})

    @shardc.flow
    def train(c, x):
        c = fn(c, x)
        return c, {"c": c}

    start, items = jnp.ones((16, 64)), [np.full((512, 64), i / 8, np.float32) for i in range(4)]
    plan = train.plan(start, items[0])
    edge = next(e for e in plan.edges if e.delay)
    assert edge.stays(edge.moves[0])
    assert "all_gather" in [c.kind for c in plan.nodes[1].work.plan.collectives]
    last, given = train.run(start, items)
    for x, g in zip(items, given, strict=True):
        start = step(start, x)
        np.testing.assert_allclose(g["c"], start, rtol=1e-5)
    np.testing.assert_allclose(last, start, rtol=1e-5)


def test_a_module_of_equinox_is_a_state():
    def step(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    fn = shardc.equinox.function(step, mesh=shardc.make_mesh(data=2), in_placements={"x": {"data": S(0)}})

    @shardc.flow
    def train(model, x):
        model, loss = fn(model, x)
        return model, {"loss": loss}

    last, given = train.run(model, ITEMS)
    for x, g in zip(ITEMS, given, strict=True):
        model, loss = step(model, x)
        np.testing.assert_allclose(g["loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(last.layers[0].weight, model.layers[0].weight, rtol=1e-4)
    assert last.activation is model.activation


def nnx_step(module, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(module)
    nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(module), grads))
    return loss


def test_a_module_of_nnx_is_made_from_the_state():
    fn = shardc.flax.function(nnx_step, mesh=shardc.make_mesh(data=2), in_placements={"x": {"data": S(0)}})
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)

    @shardc.flow
    def train(state, x):
        module = nnx.merge(graph, state)
        loss = fn(module, x)
        return nnx.state(module), {"loss": loss}

    last, given = train.run(state, ITEMS)
    np.testing.assert_allclose([g["loss"] for g in given], [nnx_step(module, x) for x in ITEMS], rtol=1e-4)
    np.testing.assert_allclose(last["kernel"][...], module.kernel[...], rtol=1e-4)


def test_a_module_that_no_round_hands_on():
    fn = shardc.flax.function(nnx_step, mesh=shardc.make_mesh(data=2))
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    @shardc.flow
    def train(state, x):
        return state, {"loss": fn(module, x)}

    with pytest.raises(ArgumentError, match=r"is called with the module module, which is not a part of the state"):
        train.run(jnp.zeros(()), ITEMS)


def test_flows_and_functions_of_a_gang():
    mesh = shardc.make_mesh(data=4)
    add = shardc.function(lambda s, x: s + x, mesh=mesh)
    gang = shardc.Gang(in_flight=2)

    @shardc.flow
    def train(s, x):
        s = add(s, x)
        return s, None

    job, other = gang.share(train, name="train"), gang.share(add, name="other")
    assert float(job.run(jnp.zeros(()), range(5))[0]) == 10
    assert float(other(1.0, 2.0)) == 3
    assert list(gang.log) == ["train"] * 5 + ["other"]
