"""Scans over layers are split between stages, nothing unrolled: the numbers of one device, whatever the layers hold."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import shardc
from shardc import S, StackedArray, make_mesh
from shardc.ir.walk import all_eqns
from tests.pipeline.pipelines import assert_same, check, on_host

pytestmark = pytest.mark.usefixtures("compiled_fast")

WIDTH = 8


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def layers(count, seed=0):
    k = np.random.default_rng(seed)
    return {
        "up": 0.3 * k.normal(size=(count, WIDTH, 2 * WIDTH)),
        "bias": k.normal(size=(count, 2 * WIDTH)),
        "down": 0.3 * k.normal(size=(count, 2 * WIDTH, WIDTH)),
    }


def model(count):
    k = np.random.default_rng(1)
    return {"first": k.normal(size=(WIDTH, WIDTH)), "layers": layers(count), "last": k.normal(size=(WIDTH, WIDTH))}


def batch(rows):
    k = np.random.default_rng(2)
    return {"x": k.normal(size=(rows, WIDTH)), "y": k.normal(size=(rows, WIDTH))}


def block(x, layer):
    return x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"], None


def loss(params, batch, block=block):
    x, _ = lax.scan(block, batch["x"] @ params["first"], params["layers"])
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def momentum_step(loss, microbatches):
    """Clips by the norm over all layers, and updates with momentum."""

    def step(params, momentum, batch):
        value, grads = shardc.accumulate(jax.value_and_grad(loss), microbatches=microbatches)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        momentum = jax.tree.map(lambda a, g: 0.9 * a + g / jnp.maximum(norm, 1.0), momentum, grads)
        return jax.tree.map(lambda p, a: p - 0.1 * a, params, momentum), momentum, value, norm

    return step


def automatic(schedule="1f1b", **options):
    return shardc.Pipeline(schedule=schedule, stages="auto", **options)


def start(count):
    params = model(count)
    return params, jax.tree.map(np.zeros_like, params)


def lengths(plan):
    """For each stage the trips of the scans that it runs for one microbatch."""
    return [
        [
            e.params["length"]
            for task in stage.tasks.all.values() if task.id.in_loop and task.plan is not None
            for e in all_eqns(task.plan.boxed.jaxpr) if e.primitive.name == "scan"
        ]
        for stage in plan.stages
    ]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("count", "schedule", "inner", "m"),
    [
        (4, "1f1b", {}, 4), (5, "gpipe", {"data": 2}, 3), (8, "interleaved", {}, 4), (7, "zb-h1", {"data": 2}, 2),
        (8, "zb-v", {}, 4), (3, "eager-1f1b", {}, 1), (2, "auto", {}, 2),
    ],
)  # fmt: skip
def test_layers_of_a_scan_are_shared_out(count, schedule, inner, m):
    step, state, data = momentum_step(loss, m), start(count), batch(4 * m)
    placements = {"batch": {"data": S(0)}} if "data" in inner else {}
    function = check(
        step, (*state, data), make_mesh(pipe=2, **inner), pipeline=automatic(schedule), in_placements=placements,
        donate_argnames=("params", "momentum"),
    )  # fmt: skip
    plan = function.plan(*state, data)
    assert all(sum(trips) > 0 for trips in lengths(plan)), f"each stage has layers: {lengths(plan)}\n{plan.explain()}"
    assert not any(1 < count == trip for trips in lengths(plan) for trip in trips)
    want = state
    for _ in range(3):
        *state, _, _ = function(*state, data)
        *want, _, _ = jax.jit(step)(*want, data)
    assert_same(state, want)


def test_nothing_is_unrolled():
    step, args = momentum_step(loss, 2), (*start(12), batch(8))
    plan = shardc.function(step, mesh=make_mesh(pipe=3), pipeline=automatic()).plan(*args)
    trips = [set(of_stage) for of_stage in lengths(plan)]
    assert all(len(found) == 1 for found in trips) and sum(map(max, trips)) == 12
    assert plan.schedule.stages == 3


def test_the_result_is_a_jax_array_over_all_ranks_where_these_hold_as_many_layers():
    step, args = momentum_step(loss, 4), (*start(4), batch(64))
    mesh = make_mesh(data=2, pipe=2)
    function = shardc.function(step, mesh=mesh, pipeline=automatic(), in_placements={"batch": {"data": S(0)}})
    params = function(*args)[0]
    assert isinstance(params["layers"]["up"], jax.Array)
    sharding = params["layers"]["up"].sharding
    assert sharding.mesh == mesh
    assert sharding.spec[0] == "pipe" or sharding.spec[0][0] == "pipe"
    again, want = function(params, *args[1:]), jax.jit(step)(on_host(params), *args[1:])
    assert_same(again, want)


def test_uneven_layers_are_a_stacked_array_that_knows_its_pieces():
    step, args = momentum_step(loss, 2), (*start(5), batch(8))
    function = shardc.function(step, mesh=make_mesh(pipe=2), pipeline=automatic(), donate_argnames=("params",))
    params, momentum, *_ = function(*args)
    up = params["layers"]["up"]
    assert isinstance(up, StackedArray)
    assert [p.shape[0] for p in up.pieces] in ([3, 2], [2, 3])
    assert (up.shape, up.ndim, up.dtype) == ((5, WIDTH, 2 * WIDTH), 3, args[0]["layers"]["up"].dtype)
    assert repr(up).startswith(f"StackedArray({up.dtype}[5,8,16], rows ")
    want = jax.jit(step)(*args)[0]
    assert_same(params, want)
    np.testing.assert_allclose(np.asarray(up.to_jax()), np.asarray(want["layers"]["up"]), rtol=1e-5)
    doubled = jax.tree.map(lambda x: 2 * x, up)
    np.testing.assert_array_equal(np.asarray(doubled), 2 * np.asarray(up))
    again = function(params, momentum, args[2])
    assert_same(again[0], jax.jit(step)(*on_host((want, momentum)), args[2])[0], 1e-6)


def test_a_stacked_array_is_refused_by_a_plain_function():
    step, args = momentum_step(loss, 2), (*start(5), batch(8))
    up = shardc.function(step, mesh=make_mesh(pipe=2), pipeline=automatic())(*args)[0]["layers"]["up"]
    double = shardc.function(lambda x: 2 * x, mesh=make_mesh(data=2))
    with pytest.raises(shardc.errors.ArgumentError, match="in pieces on devices 0, 1"):
        double(up)
    np.testing.assert_array_equal(np.asarray(double(np.asarray(up))), 2 * np.asarray(up))


def test_state_goes_from_one_pipeline_to_another():
    step, args = momentum_step(loss, 4), (*start(6), batch(16))
    two = shardc.function(step, mesh=make_mesh(pipe=2), pipeline=automatic())
    three = shardc.function(step, mesh=make_mesh(pipe=3), pipeline=automatic("zb-h1"))
    state = three(*two(*args)[:2], args[2])[:2]
    with pytest.raises(shardc.ArgumentError, match=r"\d+ arrays live on other devices, or on another mesh"):
        two(*state, args[2])  # of three devices it has two
    state = two(*shardc.fetch(state), args[2])[:2]
    want = args[:2]
    for _ in range(3):
        want = jax.jit(step)(*want, args[2])[:2]
    assert_same(state, want, 1e-6)


def test_repeated_calls_plan_once_and_take_the_short_way():
    step, data = momentum_step(loss, 2), batch(8)
    for count in (4, 5):
        function = shardc.function(step, mesh=make_mesh(pipe=2), pipeline=automatic())
        compiled = function.compile(*start(count), data)
        state = start(count)
        for _ in range(3):
            *state, _, _ = compiled(*state, data)
        leaves, tree = jax.tree.flatten(((*state, data), {}))
        assert compiled._cached_calls.run(tree, leaves) is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["remat", "keys", "shared", "outputs", "reverse", "twice"])
def test_what_layers_may_hold(kind):
    count, m = 5, 3

    def with_keys(x, layer):
        layer, key = layer
        kept = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.where(kept, block(x, layer)[0], x), None

    def special(params, batch):
        x = batch["x"] @ params["first"]
        extra = 0.0
        if kind == "remat":
            x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
        elif kind == "keys":
            x, _ = lax.scan(with_keys, x, (params["layers"], jax.random.split(jax.random.key(0), count)))
        elif kind == "shared":
            x, _ = lax.scan(lambda x, layer: (block(x, layer)[0] @ params["first"], None), x, params["layers"])
        elif kind == "outputs":
            x, norms = lax.scan(lambda x, layer: (block(x, layer)[0], jnp.mean(x**2)), x, params["layers"])
            extra = 0.1 * norms.sum()
        elif kind == "reverse":
            x, _ = lax.scan(block, x, params["layers"], reverse=True)
        else:
            x, _ = lax.scan(block, x, params["layers"])
            x, _ = lax.scan(block, jnp.sin(x), params["layers"])
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2) + extra

    for schedule in ("1f1b", "zb-h1"):
        check(momentum_step(special, m), (*start(count), batch(4 * m)), make_mesh(pipe=2), pipeline=automatic(schedule))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm(param_dtype=x.dtype)(x)
        h = nn.Dense(2 * WIDTH, param_dtype=x.dtype)(h)
        return x + nn.Dense(WIDTH, param_dtype=x.dtype)(nn.gelu(h)), None


class Net(nn.Module):
    count: int

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.count)
        x, _ = stack()(x, None)
        return nn.Dense(3, param_dtype=x.dtype)(x)


OPTIMIZERS = {"adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), "lamb": optax.lamb(1e-2)}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flax_and_optax(name):
    optimizer = OPTIMIZERS[name]
    net, data = Net(5), batch(12)
    params = net.init(jax.random.key(0), data["x"])

    def error(params, batch):
        return jnp.mean((net.apply(params, batch["x"]) - batch["y"][:, :3]) ** 2)

    def step(params, state, batch):
        value, grads = shardc.accumulate(jax.value_and_grad(error), microbatches=3)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, optimizer.init(params), data
    plan = check(step, args, make_mesh(pipe=2, data=2), pipeline=automatic("zb-h2")).plan(*args)
    assert sum(map(sum, lengths(plan))) >= 10, "layers are in scans"
    assert all(sum(trips) for trips in lengths(plan))


def test_two_scans_as_encoder_and_decoder():
    def seq2seq(params, batch):
        memory, _ = lax.scan(block, batch["x"], params["encoder"])
        x, _ = lax.scan(lambda x, layer: (block(x + memory, layer)[0], None), batch["y"], params["decoder"])
        return jnp.mean(x**2)

    params = {"encoder": layers(3), "decoder": layers(5, seed=3)}
    args = params, jax.tree.map(np.zeros_like, params), batch(12)
    check(momentum_step(seq2seq, 3), args, make_mesh(pipe=4), pipeline=automatic())
