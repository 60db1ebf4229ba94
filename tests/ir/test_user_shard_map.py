"""A user's own shard_map in a function: bound as it is, on the pieces that its specs give."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

import shardc
from shardc import S

MESH = shardc.make_mesh(a=4, b=2)
LINE = shardc.make_mesh(a=8)


def unit(fn, ins, outs, mesh=MESH, **more):
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, **more)


def matmul(x, w):
    """A row-parallel product with its sum."""
    f = unit(lambda x, w: lax.psum(x @ w, "b"), (Spec("a", "b"), Spec("b")), Spec("a"))
    return jnp.tanh(f(x * 2, w)) @ w.T


def every_collective(x, w):
    def body(x):
        i = lax.axis_index("a")
        shifted = lax.ppermute(x, "a", [(k, (k + 1) % 4) for k in range(4)]) + i
        scattered = lax.psum_scatter(jnp.tile(x, (4, 1)), "a", tiled=True)
        turned = lax.all_to_all(jnp.tile(x, (2, 1)), "b", 0, 0, tiled=True)
        whole = lax.all_gather(x, "b", axis=1, tiled=True)
        return shifted, scattered, turned, whole.sum(), lax.pmax(x, ("a", "b")), lax.pmean(x, "a")

    outs = (Spec("a", "b"), Spec("a", "b"), Spec("a", "b"), Spec("a"), Spec(), Spec(None, "b"))
    outs = (*outs[:3], Spec(), *outs[4:])
    return unit(lambda x: (*(y := body(x))[:3], lax.psum(y[3], ("a", "b")) / 2, *y[4:]), Spec("a", "b"), outs)(x + 1)


def loop_inside(x, w):
    def body(x):
        def step(c, row):
            return c + lax.psum(row, "a"), lax.pmax(c.sum(), ("a", "b"))

        return lax.scan(step, jnp.zeros_like(x[0]), jnp.tile(x[:1], (3, 1)))

    return unit(body, Spec("a", "b"), (Spec("b"), Spec()), check_vma=False)(x)


def inside_a_loop(x, w):
    def body(c):
        return lax.all_gather(c, "a", tiled=True)[: c.shape[0]] + lax.axis_index("b")

    f = unit(body, Spec("a"), Spec("a", "b"), check_vma=False)
    return lax.scan(lambda c, _: (f(c)[:, :4] * 0.5 + c, c.sum()), x[:, :4], None, length=3)


def gradient(x, w):
    f = unit(lambda x, w: lax.psum(jnp.sin(x) @ w, "b"), (Spec("a", "b"), Spec("b")), Spec("a"))
    return jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))(x, w)


def axes_in_another_order(x, w):
    f = unit(lambda x: x * (lax.axis_index("a") + 2 * lax.axis_index("b")), Spec(("b", "a")), Spec(("b", "a")))
    return f(x) + unit(lambda x: x + lax.axis_index(("a", "b")), Spec(("a", "b")), Spec(("a", "b")))(x)


def unchecked(x, w):
    f = unit(lambda x: lax.psum(x, ("a", "b")), Spec("a", "b"), Spec(), check_vma=False)
    return f(x) + f(x + 1).sum()


PROGRAMS = [
    matmul, every_collective, loop_inside, inside_a_loop, gradient, axes_in_another_order, unchecked,
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("where", [{}, {"a": S(0)}, {"a": S(1), "b": S(0)}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_it_equals_jit(program, where):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(8, 8)), rng.normal(size=(8, 6))
        want = jax.jit(program)(x, w)
        exe = shardc.function(program, mesh=MESH, in_placements={"x": where}).compile(x, w)
        same = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(lambda g, w: same(np.asarray(g), np.asarray(w)), exe(x, w), want)
        assert exe.audit().ok, str(exe.audit())
        assert not exe.plan.gathered


def test_its_specs_are_its_signature():
    f = unit(lambda x, w: lax.psum(x @ w, "b"), (Spec("a", "b"), Spec("b")), Spec("a"))
    g = shardc.function(f, mesh=MESH, out_placements={"a": S(0)})
    plan = g.plan(np.ones((8, 8), np.float32), np.ones((8, 6), np.float32))
    assert [str(p) for p in (*plan.inputs, *plan.outputs)] == ["{a: S(0), b: S(1)}", "{b: S(0)}", "{a: S(0)}"]
    (sent,) = plan.collectives
    assert (sent.kind, sent.axes, sent.value, sent.bytes) == ("all_reduce", ("b",), "f32[2,6]", 48)
    assert "test_user_shard_map.py" in sent.source


def test_another_mesh():
    f = unit(lambda x: x, Spec("a"), Spec("a"), mesh=LINE)
    with pytest.raises(shardc.PlacementError) as error:
        shardc.function(lambda x: f(x), mesh=MESH)(np.ones((8, 8), np.float32))
    text = str(error.value)
    assert "shard_map at test_user_shard_map.py:" in text
    assert "its mesh (a=8) differs from that of the function; give it the function's mesh." in text


@pytest.mark.parametrize("names", [{"a"}, {"b"}])
def test_axes_that_it_leaves_out(names):
    """Each device along them runs the body on the same piece; constraints over them inside say nothing."""
    (axis,) = names
    other = "b" if axis == "a" else "a"

    def body(x, w):
        free = NamedSharding(jax.sharding.get_abstract_mesh(), Spec(None, other))
        y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), free)
        return y - lax.pmean(y.sum(0), axis)

    f = unit(body, (Spec(axis), Spec()), Spec(axis), axis_names=names)
    x, w = np.arange(64, dtype=np.float32).reshape(8, 8) / 64, np.eye(8, 6, dtype=np.float32)
    for grad in (False, True):
        fn = jax.grad(lambda x, w: (f(x, w) ** 2).sum()) if grad else f
        g = shardc.function(fn, mesh=MESH, in_placements={"x": {other: S(0)}, "w": {other: S(1)}})
        np.testing.assert_allclose(g(x, w), jax.jit(fn)(x, w), rtol=1e-5, atol=1e-6)
        assert g.compile(x, w).audit().ok


@pytest.mark.parametrize("send", [lax.psum, lax.pmax, lax.all_gather, lax.psum_scatter], ids=lambda f: f.__name__)
def test_groups_of_indices(send):
    """They would run, but a plan could not tell over which axes they send."""

    def body(x):
        return lax.scan(lambda c, _: (c, send(c, "a", axis_index_groups=[[0, 1], [2, 3]])), x, None, length=2)[1].sum()

    f = unit(body, Spec(None, "b"), Spec(), check_vma=False)
    with pytest.raises(shardc.PlacementError) as error:
        shardc.function(f, mesh=MESH).plan(np.ones((2, 8), np.float32))
    name = {"psum_scatter": "reduce_scatter"}.get(send.__name__, send.__name__)
    assert f"axis_index_groups of {name} at test_user_shard_map.py:" in str(error.value)
    assert "give the mesh an axis for the groups and one for the devices of a group" in str(error.value)


def test_a_dimension_that_does_not_divide():
    f = unit(lambda x: x, Spec("a"), Spec("a"))
    with pytest.raises(ValueError, match=r"axis sizes|evenly divisible|divisible"):
        shardc.function(f, mesh=MESH)(np.ones((7, 8), np.float32))


def test_a_callback_inside_is_the_users():
    seen = []

    def body(x):
        jax.debug.callback(lambda v: seen.append(float(v.sum())), x)
        return x

    f = shardc.function(unit(body, Spec("a"), Spec("a"), mesh=LINE), mesh=LINE)
    jax.block_until_ready(f(np.arange(8.0, dtype=np.float32)))
    jax.effects_barrier()
    assert sorted(seen) == list(range(8))
