"""A mesh axis of one device places nothing, wherever a placement names it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardc
import shardc.flax
from shardc import AUTO, P, Placement, S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(data=2, model=1)
FAKE = shardc.make_mesh(topology="v5p:2x1x1", data=2, model=1)
X = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)
IDLE = {"data": S(0), "model": S(1)}


def step(x, w):
    return jnp.tanh(x @ w).sum(0)


def matches(f, plain, *args):
    """The values of one device, and what the plan lists is what is sent."""
    got, want = f(*args), plain(*args)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)
    assert f.compile(*args).audit().ok


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    "pin",
    [
        {"model": S(1)}, IDLE, {"data": S(0), "model": P}, {"model": S(0), ...: AUTO}, Placement({"model": S(0)}),
        PartitionSpec("data", "model"), PartitionSpec(None, ("model", "data")),
        NamedSharding(MESH, PartitionSpec("model")),
    ],
    ids=str,
)  # fmt: skip
def test_constraints(pin, fake):
    def f(x, w):
        y = shardc.constrain(x @ w, pin)
        y, _ = jax.lax.scan(lambda c, r: (shardc.constrain(c + r, pin), r.sum()), y, jnp.stack([y, y]))
        return jax.lax.cond(y.sum() > 0, lambda y: shardc.constrain(y, pin) * 2, lambda y: y, y)

    made = shardc.function(f, mesh=FAKE if fake else MESH, in_placements=({"data": S(0)}, {}))
    if fake:
        assert all("model" not in c.axes for c in made.plan(X, W).collectives)
    else:
        matches(made, f, X, W)


def test_sharding_constraints_of_jax():
    def f(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, PartitionSpec(("data", "model"))))
        open_ = PartitionSpec("model", PartitionSpec.UNCONSTRAINED)
        return jax.lax.with_sharding_constraint(y * 2, NamedSharding(MESH, open_))

    matches(shardc.function(f, mesh=MESH), lambda x, w: x @ w * 2, X[:6], W)


@pytest.mark.parametrize(
    "pins",
    [
        {"in_placements": (IDLE, {"model": S(0)})},
        {"in_placements": {"x": PartitionSpec("data", "model")}, "out_placements": PartitionSpec("model")},
        {"in_placements": {"x": NamedSharding(MESH, PartitionSpec("data", "model"))}},
        {"in_placements": {"x": (S(0), S(1))}, "out_placements": {"model": S(0), ...: AUTO}},
        {"in_placements": {"w": shardc.rules({"*": {"model": S(1)}})}, "out_placements": {"data": P, "model": P}},
        {"in_placements": {"w": shardc.fsdp("model", min_size=1)}},
        {"in_placements": shardc.data_parallel("model", batch="x")},
    ],
    ids=str,
)
def test_borders(pins):
    matches(shardc.function(step, mesh=MESH, **pins), step, X, W)


def test_arrivals_and_donation():
    def update(w, x):
        return w - shardc.constrain(x.T @ x, {"model": S(1)}), x.sum()

    f = shardc.function(update, mesh=MESH, in_placements=({"model": S(1)}, IDLE), donate_argnames="w")
    w = jax.device_put(W, NamedSharding(MESH, PartitionSpec(None, "model")))
    x = shardc.put(X[:6], MESH, IDLE)
    np.testing.assert_allclose(f(w, x)[0], update(W, X[:6])[0], rtol=1e-5)
    moved = shardc.put(W, MESH, {"data": S(0), "model": S(1)})  # elsewhere than it is pinned
    np.testing.assert_allclose(f(moved, X)[0], update(W, X)[0], rtol=1e-5)


def test_saved(tmp_path):
    def f(x, w):
        return shardc.constrain(x @ w, {"model": S(1)}).sum()

    made = shardc.function(f, mesh=MESH, in_placements=(IDLE, {"model": P}))
    made.plan(X, W).save(tmp_path / "plan.json")
    again = shardc.function(f, mesh=MESH, in_placements=(IDLE, {"model": P}), plan=tmp_path / "plan.json")
    matches(again, lambda x, w: (x @ w).sum(), X, W)
    assert again.plan(X, W).bytes_per_device == made.plan(X, W).bytes_per_device


def test_users_operations_and_shard_maps(tmp_path):
    @shardc.signature("b d, d f -> b f", linear=(0, 1))
    def product(x, w):
        return x @ w

    def body(x, w):
        return jax.lax.psum(x @ w, "model")

    def f(x, w):
        specs = (PartitionSpec("data", "model"), PartitionSpec("model"))
        mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=PartitionSpec("data"))
        return product(shardc.constrain(mapped(x, w), {"model": S(1)}), w)

    made = shardc.function(f, mesh=MESH, in_placements=({"data": S(0)}, {"model": S(1)}))
    matches(made, lambda x, w: x @ w @ w, X[:6], W)
    made.plan(X[:6], W).save(tmp_path / "plan.json")
    again = shardc.function(f, mesh=MESH, plan=tmp_path / "plan.json")
    assert again.plan(X[:6], W).bytes_per_device == made.plan(X[:6], W).bytes_per_device


def loss(w, x):
    h = shardc.stage_boundary(jnp.tanh(shardc.constrain(x @ w[0], {"data": S(0), "model": S(1)})))
    return jnp.mean(shardc.constrain(h @ w[1], {"model": S(1)}) ** 2)


def train(w, x):
    return shardc.accumulate(jax.value_and_grad(loss), microbatches=2)(w, x)


BATCH = np.random.default_rng(2).normal(size=(8, 5)).astype(np.float32)


def test_accumulate():
    f = shardc.function(train, mesh=MESH, in_placements={"w": {"model": S(1)}, "x": IDLE})
    matches(f, train, [W, W], BATCH)


@pytest.mark.parametrize(
    ("sizes", "pipeline"),
    [
        ({"pipe": 2, "data": 2, "model": 1}, shardc.Pipeline()),
        ({"pipe": 2, "data": 1, "model": 1}, shardc.Pipeline()),
        ({"pipe": 1, "data": 2, "model": 1}, shardc.Pipeline(schedule="interleaved", chunks=2)),
    ],
    ids=str,
)
def test_pipelines(sizes, pipeline):
    mesh = shardc.make_mesh(**sizes)
    f = shardc.function(train, mesh=mesh, pipeline=pipeline, in_placements={"w": {"model": S(1)}, "x": IDLE})
    got, want = f([W, W], BATCH), train([W, W], BATCH)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_pipelines_of_unequal_meshes():
    """An axis that is idle in one rank alone is kept in the other."""
    devices = np.array(jax.devices())
    meshes = [
        jax.sharding.Mesh(devices[:1].reshape(1, 1), ("data", "model")),
        jax.sharding.Mesh(devices[2:4].reshape(2, 1), ("data", "model")),
    ]
    f = shardc.function(train, pipeline=shardc.Pipeline(meshes=meshes), in_placements={"w": {"data": S(0)}, "x": IDLE})
    got, want = f([W, W], BATCH), train([W, W], BATCH)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_tune():
    found = shardc.tune(
        train, [W, W], BATCH, devices=2, in_placements={"w": {"model": S(1)}, "x": {"data": S(0)}}, tries=100
    )
    assert {c.mesh.shape["model"] for c in found.candidates} == {1, 2}


def test_flax_modules():
    model = nnx.Linear(5, 5, rngs=nnx.Rngs(0))

    def f(model, x):
        return shardc.constrain(model(x), {"model": S(1)}).sum(0)

    made = shardc.flax.function(f, mesh=MESH, in_placements={"model": shardc.rules({"kernel": {"model": S(1)}})})
    np.testing.assert_allclose(made(model, X), f(model, X), rtol=1e-5)
