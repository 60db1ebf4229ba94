"""Functions of equinox modules on a mesh."""

from __future__ import annotations

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc
import shardc.equinox
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
OPTIMIZER = optax.adam(1e-2)


def test_shardc_does_without_equinox():
    code = "import sys, shardc; sys.exit('equinox' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Net(eqx.Module):
    """A module with an activation, a number, a name and a missing bias as leaves and fields."""

    layers: list
    act: object
    scale: float
    name: str
    drop: eqx.nn.Dropout

    def __init__(self, key, act=jax.nn.gelu):
        first, last = jax.random.split(key)
        self.layers = [eqx.nn.Linear(8, 32, key=first, use_bias=False), eqx.nn.Linear(32, 4, key=last)]
        self.act, self.scale, self.name, self.drop = act, 2.0, "net", eqx.nn.Dropout(0.25)

    def __call__(self, x, key):
        x = self.act(self.layers[0](x))
        return self.layers[1](self.drop(shardc.stage_boundary(x), key=key)) * self.scale


def loss_of(model, x, key):
    y = jax.vmap(model)(x, jax.random.split(key, len(x)))
    return jnp.mean((y - 1) ** 2)


def train(model, opt_state, x, key, microbatches=1):
    run = eqx.filter_value_and_grad(loss_of)
    if microbatches > 1:
        run = shardc.accumulate(run, microbatches=microbatches, keys="key")
    loss, grads = run(model, x, key)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def start():
    model = Net(jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if eqx.is_array_like(w):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)
        else:
            assert g is w


KEY = jax.random.key(5)


def test_a_step_is_that_of_filter_jit():
    mesh = shardc.make_mesh(data=4, model=2)
    columns = shardc.rules({"*layers/0/weight": {"model": S(0)}})
    step = shardc.equinox.function(
        train, mesh=mesh, in_placements={"model": columns, "opt_state": columns, "x": {"data": S(0)}},
        donate_argnames=("model", "opt_state"),
    )  # fmt: skip
    plan = step.plan(*start(), ROWS, KEY)
    assert str(plan.in_placements.model.layers[0].weight) == "{model: S(0)}"
    assert plan.in_placements.model.act is None
    assert step.compile(*start(), ROWS, KEY).audit().ok
    (got, opt_state), (want, other) = start(), start()
    reference = eqx.filter_jit(train)
    for i in range(2):
        key = jax.random.fold_in(KEY, i)
        got, opt_state, loss = step(got, opt_state, ROWS, key)
        want, other, wanted = reference(want, other, ROWS, key)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_same((got, opt_state), (want, other))
    assert isinstance(got, Net)


def by_hand(model, opt_state, x, key):
    keys = jax.random.split(key, 4)
    pairs = [eqx.filter_value_and_grad(loss_of)(model, x[j::4], keys[j]) for j in range(4)]
    grads = jax.tree.map(lambda *gs: sum(gs) / 4, *[g for _, g in pairs])
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, sum(loss for loss, _ in pairs) / 4


def test_microbatches_of_a_module_in_stages():
    step = shardc.equinox.function(
        train, mesh=shardc.make_mesh(pipe=2), pipeline=shardc.Pipeline(), donate_argnames=("model", "opt_state")
    )
    assert_same(step(*start(), ROWS, KEY, microbatches=4), eqx.filter_jit(by_hand)(*start(), ROWS, KEY))


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, axis_name="rows", mode="ema")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def test_the_state_of_modules_is_carried():
    def loss_of(model, state, x):
        y, state = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(y**2), state

    def run(model, state, x):
        once = eqx.filter_value_and_grad(loss_of, has_aux=True)
        return shardc.accumulate(
            once, microbatches=4, in_axes={"x": 0}, reduce=((None, "carry:state"), None)
        )(model, state, x)  # fmt: skip

    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    step = shardc.equinox.function(run, mesh=shardc.make_mesh(data=2), in_placements={"x": {"data": S(0)}})
    (loss, got), _ = step(model, state, ROWS)
    total, want = 0.0, state
    for j in range(4):
        part, want = eqx.filter_jit(loss_of)(model, want, ROWS[j::4])
        total += part / 4
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


def test_other_constants_are_other_plans_and_results_may_hold_some():
    traces = []

    @shardc.equinox.function(mesh=shardc.make_mesh(data=2))
    def run(model, x, double: bool = False):
        traces.append(model.act)
        return {"y": model.act(x) * (2 if double else 1), "act": model.act, "n": 3, "none": None}

    for act, double in ((jnp.tanh, False), (jnp.tanh, True), (jnp.sin, True), (jnp.tanh, True)):
        out = run(Net(jax.random.key(0), act), ROWS, double)
        np.testing.assert_allclose(out["y"], act(ROWS) * (1 + double), rtol=1e-6)
        assert out["act"] is act and out["n"] == 3 and isinstance(out["n"], int) and out["none"] is None
    assert len(traces) == 3
    assert shardc.equinox.function(train, mesh=None) is train


def test_errors():
    mesh = shardc.make_mesh(data=2)
    with pytest.raises(shardc.ArgumentError, match="in_placements names 'modle', which is no argument of train"):
        shardc.equinox.function(train, mesh=mesh, in_placements={"modle": shardc.rules({"*": {}})})
    with pytest.raises(shardc.ArgumentError, match="model/act: a bytearray is neither an array nor a hashable"):
        shardc.equinox.function(lambda model: model.act, mesh=mesh)(Net(jax.random.key(0), bytearray(b"x")))


def test_what_is_no_array_outside_of_a_module_is_no_result_of_shardc_function():
    def step(model, x):
        return {"model": model, "act": model.act}, x

    model, _ = start()
    with pytest.raises(shardc.ArgumentError) as caught:
        shardc.function(step, mesh=shardc.make_mesh(data=8))(model, jnp.ones(8))
    assert str(caught.value) == (
        f"step (test_equinox.py:{step.__code__.co_firstlineno}): results that are no arrays\n"
        f"  result 0/act is {model.act!r}, a {type(model.act).__name__}; return an array, or leave it out."
    )
