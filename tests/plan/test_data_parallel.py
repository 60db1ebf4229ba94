"""`shardc.data_parallel`: one sum of each gradient after the backward pass, or an error that says what else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardc

MESH = shardc.make_mesh(data=8)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 64)).astype("float32"), RNG.normal(size=(16, 8)).astype("float32")
PARAMS = {
    "up": RNG.normal(size=(64, 256)).astype("float32") / 8,
    "b": np.zeros(256, np.float32),
    "down": RNG.normal(size=(256, 8)).astype("float32") / 16,
}
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
FINITE = optax.apply_if_finite(optax.sgd(0.1), 3)
STRICT = shardc.data_parallel("data", batch=("x", "y"))


def loss_of(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["up"] + p["b"]) @ p["down"] - y) ** 2)


def recurrent(p, x, y):
    def cell(c, row):
        c = jnp.tanh(row @ p["up"][:8, :64] + c @ p["up"][:, :64])
        return c, c

    steps = x.reshape(-1, 8, 8).swapaxes(0, 1)
    return jnp.mean(jax.lax.scan(cell, jnp.zeros((x.shape[0], 64)), steps)[1] ** 2)


def trained(gradient, opt):
    def step(params, state, x, y):
        loss, grads = gradient(params, x, y)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


STEPS = {
    "adamw, clipped": (jax.value_and_grad(loss_of), ADAM),
    "accumulated": (shardc.accumulate(jax.value_and_grad(loss_of), microbatches=2), ADAM),
    "recomputed": (jax.value_and_grad(jax.checkpoint(loss_of)), optax.sgd(0.1)),
    "under a condition": (jax.value_and_grad(loss_of), FINITE),
    "recurrent": (jax.value_and_grad(recurrent), optax.sgd(0.1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("donated", [(), ("params", "state")], ids=["kept", "donated"])
def test_one_sum_of_each_gradient(name, donated):
    gradient, opt = STEPS[name]
    step, state = trained(gradient, opt), opt.init(PARAMS)
    f = shardc.function(step, mesh=MESH, in_placements=STRICT, donate_argnames=donated)
    exe = f.compile(PARAMS, state, X, Y)
    moved = [c.value for c in exe.plan.collectives]
    assert {(c.kind, c.count) for c in exe.plan.collectives} == {("all_reduce", 1)}
    assert len(moved) == (2 if name == "recurrent" else 4), "the loss, and the weights that it depends on"
    assert exe.audit().ok
    assert not any(exe.plan.outputs), "whole"
    want = jax.jit(step)(PARAMS, state, X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), exe(PARAMS, state, X, Y), want)


def normalized(p, x, y):
    h = x @ p["up"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean((h @ p["down"] - y) ** 2)


def shuffled(p, x, y):
    return loss_of(p, x[jax.random.permutation(jax.random.key(0), x.shape[0])], y)


def masked(p, x, y):
    known = (y[:, 0] > 0).astype(jnp.float32)
    return (((x @ p["up"] @ p["down"] - y) ** 2).mean(1) * known).sum() / known.sum()


def ranked(p, x, y):
    each = ((x @ p["up"] @ p["down"] - y) ** 2).mean(1)
    return jnp.mean(jax.lax.top_k(each, 4)[0])


@pytest.mark.parametrize(
    ("loss", "sends"),
    [
        (normalized, r"all_reduce of f32\[256\] at test_data_parallel.py:\d+ \(normalized\), before the backward pass"),
        (shuffled, r"of f32\[16,64\] at test_data_parallel.py:\d+ \(shuffled\)"),
        (masked, r"all_reduce of f32\[\] at test_data_parallel.py:\d+ \(masked\), before the backward pass has ended"),
        (ranked, r"at test_data_parallel.py:\d+ \(ranked\)"),
    ],
)
def test_what_else_would_be_sent_is_an_error(loss, sends):
    step = trained(jax.value_and_grad(loss), optax.sgd(0.1))
    f = shardc.function(step, mesh=MESH, in_placements=STRICT)
    state = optax.sgd(0.1).init(PARAMS)
    with pytest.raises(shardc.PlacementError, match=sends) as error:
        f.plan(PARAMS, state, X, Y)
    said = str(error.value)
    assert "sums each gradient once, after the backward pass; this step sends besides" in said
    fix = said.partition("Let it: ")[2].partition(" says")[0]
    assert fix == "in_placements={'params': {}, 'state': {}, 'x': {'data': S(0)}, 'y': {'data': S(0)}}"
    loose = shardc.function(step, mesh=MESH, in_placements=eval(fix.partition("=")[2], {"S": shardc.S}))
    assert loose.plan(PARAMS, state, X, Y).collectives


def test_results_of_rows_stay_with_their_rows():
    def evaluate(params, batch):
        x, y = batch
        out = x @ params["up"] @ params["down"]
        return out, jnp.mean((out - y) ** 2)

    for mesh, axis in ((MESH, "data"), (shardc.make_mesh(data=2, model=4), ("data", "model"))):
        f = shardc.function(evaluate, mesh=mesh, in_placements=shardc.data_parallel(axis))  # `batch` by its name
        plan = f.plan(PARAMS, (X, Y))
        assert [c.value for c in plan.collectives] == ["f32[]"]
        assert plan.outputs[0].axes_of(0) and not plan.outputs[1]
        np.testing.assert_allclose(f(PARAMS, (X, Y))[1], evaluate(PARAMS, (X, Y))[1], rtol=1e-5)


def test_it_asks_what_it_does_not_know():
    step = trained(jax.value_and_grad(loss_of), ADAM)
    with pytest.raises(shardc.ArgumentError, match=r"does not say which arguments are the batch; its arguments are"):
        shardc.function(step, mesh=MESH, in_placements=shardc.data_parallel("data"))
    with pytest.raises(shardc.ArgumentError, match="names 'z'"):
        shardc.function(step, mesh=MESH, in_placements=shardc.data_parallel("data", batch="z"))
    with pytest.raises(shardc.PipelineError, match="is for one mesh, and a pipeline has several"):
        shardc.function(step, mesh=shardc.make_mesh(pipe=2, data=2), in_placements=STRICT, pipeline=shardc.Pipeline())
    with pytest.raises(shardc.PlacementError, match="is no placement"):
        shardc.function(step, mesh=MESH, in_placements={"x": shardc.data_parallel("data")}).plan(
            PARAMS, ADAM.init(PARAMS), X, Y
        )
