"""A mesh in context (`jax.set_mesh`): the user's function is traced with it, and nothing else uses it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import shardc
from shardc import S

AXES = ("data", "model")
EXPLICIT = jax.make_mesh((4, 2), AXES)
AUTO = shardc.make_mesh(data=4, model=2)
ROWS = {"data": S(0)}
X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
CONTEXTS = {
    "none": None,
    "explicit": EXPLICIT,
    "automatic": AUTO,
    "other axes": jax.make_mesh((2, 4), ("x", "y")),
    "some devices": Mesh(np.array(jax.devices()[:4]), ("data",), (AxisType.Explicit,)),
}
OURS = ("explicit", "automatic")


@pytest.fixture(params=CONTEXTS)
def context(request: pytest.FixtureRequest) -> Iterator[str]:
    with jax.set_mesh(CONTEXTS[request.param]):
        yield request.param


def given(context: str) -> Mesh:
    return EXPLICIT if context == "explicit" else AUTO


@pytest.mark.sampled(2)
def test_a_call(context):
    """Regression: each raised `The context mesh ... should match the mesh passed to shard_map`."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), x.sum()

    f = shardc.function(step, mesh=given(context), in_placements=({}, ROWS), donate_argnums=0)
    w = np.eye(4, dtype=np.float32)
    exe = f.compile(w, X)
    assert exe.audit().ok
    want = w - np.asarray(jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.asarray(X) @ w) ** 2))(jnp.asarray(w)))
    for call in (f, f, exe):
        got, total = call(w, X)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert float(total) == X.sum()
    rows = shardc.put(X, given(context), {"data": S(0)})
    np.testing.assert_allclose(f(f(w, rows)[0], rows)[1], X.sum())


@pytest.mark.parametrize("context", OURS, indirect=True)
def test_a_pipeline(context):
    def loss(p, x):
        return jnp.mean((shardc.stage_boundary(jnp.tanh(x @ p[0])) @ p[1]) ** 2)

    def step(p, x):
        value, g = shardc.accumulate(jax.value_and_grad(loss), microbatches=2)(p, x)
        return value, jax.tree.map(jnp.subtract, p, g)

    mesh = shardc.make_mesh(pipe=2, data=2)
    f = shardc.function(step, mesh=mesh, in_placements={"x": ROWS}, pipeline=shardc.Pipeline())
    p = [np.eye(4, dtype=np.float32)] * 2
    want = np.mean((np.tanh(X)) ** 2)
    for _ in range(2):
        np.testing.assert_allclose(f(p, X)[0], want, rtol=1e-6)


@pytest.mark.sampled(2)
def test_uneven_empty_and_failing(context):
    f = shardc.function(lambda x: 2 * x, mesh=given(context), in_placements=(ROWS,), out_placements=ROWS)
    for shape in ((13, 2), (0, 2)):
        np.testing.assert_array_equal(f(f(np.ones(shape, np.float32))), 4 * np.ones(shape))
    log = shardc.function(jnp.log, mesh=given(context), in_placements=(ROWS,))
    with jax.debug_nans(True):
        np.testing.assert_allclose(log(X + 1), np.log(X + 1), rtol=1e-6)
        with pytest.raises(FloatingPointError):
            log(X - 1)


@pytest.mark.sampled(2)
def test_what_is_closed_over_and_made_outside(context):
    """A key, and constants that lie on the mesh in context with its types."""
    key, row = jax.random.key(0), jnp.arange(4.0)

    def noisy(x):
        return x * jax.random.bernoulli(key, 0.5, x.shape) + row

    there = shardc.make_mesh(data=4) if context == "some devices" else given(context)  # where the key lives
    f = shardc.function(noisy, mesh=there, in_placements=(ROWS,))
    np.testing.assert_allclose(f(X), X * np.asarray(jax.random.bernoulli(key, 0.5, X.shape)) + np.arange(4), rtol=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_specs_are_read_with_the_mesh_in_context(name):
    def specs(x):
        x = jax.lax.with_sharding_constraint(2 * x, Spec("data"))
        total = jax.shard_map(lambda a: jax.lax.psum(a.sum(), "data"), in_specs=Spec("data"), out_specs=Spec())(x)
        return x, total

    with jax.set_mesh(CONTEXTS[name]):
        f = shardc.function(specs, mesh=CONTEXTS[name], in_placements=({},), out_placements={})
        assert [c.kind for c in f.plan(X).collectives].count("all_gather") == 1
        doubled, total = f(X)
        np.testing.assert_array_equal(doubled, 2 * X)
        np.testing.assert_allclose(total, 2 * X.sum(), rtol=1e-6)


def test_shardings_of_explicit_axes():
    """A `reshard` is a pin; under the mesh in context, results can be used in computations as those of jax.jit."""
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, NamedSharding(EXPLICIT, Spec("data")))
        f = shardc.function(lambda x: jnp.tanh(jax.sharding.reshard(x, Spec("data"))), mesh=EXPLICIT, out_placements={})
        plan = f.plan(jax.device_put(X, NamedSharding(EXPLICIT, Spec())))
        assert [c.kind for c in plan.collectives] == ["all_gather"]
        assert "@" not in plan.explain()
        y = f(x)
        np.testing.assert_allclose(jnp.sum(y), np.tanh(X).sum(), rtol=1e-6)
        assert y.sharding.mesh == EXPLICIT
        assert f.compile(x).check(x).ok
    twice = shardc.function(lambda x: 2 * x, mesh=EXPLICIT)
    assert "Auto" in str(twice(x).sharding.mesh.axis_types)  # outside of the context as before


@pytest.mark.parametrize("name", ["none", *OURS])
def test_inside_jit(name):
    with jax.set_mesh(CONTEXTS[name]):
        f = shardc.function(lambda x: jnp.sin(x), mesh=given(name), in_placements=(ROWS,))
        np.testing.assert_allclose(jax.jit(lambda x: f(x).sum())(X), np.sin(X).sum(), rtol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(jnp.asarray(X)), np.cos(X), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(f)(X[None]), np.sin(X)[None], rtol=1e-6)


def test_inside_jit_on_another_mesh():
    f = shardc.function(lambda x: 2 * x, mesh=AUTO, in_placements=(ROWS,))
    with (
        jax.set_mesh(CONTEXTS["other axes"]),
        pytest.raises(shardc.MeshError, match=r"whose mesh in context \(x=2, y=4\) is another than its own"),
    ):
        jax.jit(f)(X)


def test_a_function_that_asks_for_the_mesh_is_traced_anew():
    def f(x):
        mesh = jax.sharding.get_abstract_mesh()
        return 2 * x if mesh.empty else jax.lax.with_sharding_constraint(2 * x, Spec(None, "model"))

    f = shardc.function(f, mesh=AUTO, in_placements=({},), out_placements={})
    for _ in range(2):
        assert not f.plan(X).collectives
        np.testing.assert_array_equal(f(X), 2 * X)
        with jax.set_mesh(AUTO):
            assert len(f.plan(X).collectives) == 1
            np.testing.assert_array_equal(f(X), 2 * X)
