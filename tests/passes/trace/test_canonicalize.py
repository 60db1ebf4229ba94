"""Canonical programs: what stays of calls, dead equations and captured arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

import shardc
from shardc import compat
from shardc.ir.nested import bodies_of, while_of
from shardc.ir.walk import all_eqns
from shardc.passes.trace.canonicalize import canonicalize, with_own_bodies
from tests.passes.programs import before_after

X = jax.ShapeDtypeStruct((4, 6), jnp.float32)


def test_the_text(golden):
    twice = jax.jit(lambda x: lax.mul(x, x))

    def fn(x):
        lax.sin(x)  # dead
        left, right = lax.split(twice(x), (2, 4), axis=1)
        return lax.add(twice(left), left), right

    closed = jax.make_jaxpr(fn)(X)
    golden("canonicalize", before_after(closed.jaxpr, canonicalize(closed)[0]))


def test_calls_are_inlined_and_every_variable_is_unique():
    @jax.custom_jvp
    def inner(x):
        return jnp.sin(x) + 1.0

    inner.defjvp(lambda x, t: (inner(*x), t[0]))

    def fn(x):
        step = jax.checkpoint(lambda c, row: (inner(c) * row, inner(c)))
        return lax.scan(step, x[0], x)

    jaxpr, _ = canonicalize(jax.make_jaxpr(fn)(X))
    check_jaxpr(jaxpr)
    assert {e.primitive.name for e in all_eqns(jaxpr)} & {"jit", "pjit", "custom_jvp_call"} == set()
    made = [v for e in all_eqns(jaxpr) for v in e.outvars]
    assert len(made) == len(set(made))
    x = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(4, 6)
    for got, want in zip(jaxpr_as_fun(compat.close(jaxpr))(x), jax.tree.leaves(fn(x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_captured_arrays_are_inputs_and_captured_scalars_literals():
    table, one = jnp.arange(6.0), jnp.float32(2.0)
    jaxpr, captured = canonicalize(jax.make_jaxpr(lambda x: x * table + one)(X))
    assert len(captured) == 1 and np.array_equal(captured[0], table)
    assert [v.aval.shape for v in jaxpr.invars] == [(4, 6), (6,)]


def test_a_while_with_a_condition_for_each_row_gets_one_condition():
    def rounds(n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, 1))[1]

    jaxpr, _ = canonicalize(jax.make_jaxpr(jax.vmap(rounds))(jnp.arange(4)))
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "while")
    assert while_of(loop).cond.outvars[0].aval.shape == ()
    np.testing.assert_array_equal(jaxpr_as_fun(compat.close(jaxpr))(jnp.arange(4))[0], [1, 2, 4, 8])


def test_a_copy_of_a_loop_has_variables_of_its_own():
    jaxpr, _ = canonicalize(jax.make_jaxpr(lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x)[0])(X))
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    ours, theirs = (bodies_of(e)[0] for e in (loop, with_own_bodies(loop)))
    assert not {*ours.invars, *ours.eqns[0].outvars} & {*theirs.invars, *theirs.eqns[0].outvars}


def test_collectives_of_a_mapped_axis_are_reductions():
    """Batch norm as it is written for pmap. No signatures are looked for, and nothing is replicated."""
    over = ("batch", "copies")

    def norm(x, scale):
        mean = jax.lax.pmean(x.mean(0), over)
        var = jax.lax.pmean((x**2).mean(0), over) - mean**2
        return (
            (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale,
            jax.lax.pmax(jax.lax.stop_gradient(x), over),
            jax.lax.psum(1, over),
        )

    def loss(x, scale):
        y, top, count = jax.vmap(jax.vmap(norm, (0, None), axis_name="batch"), (0, None), axis_name="copies")(x, scale)
        low = jax.vmap(lambda x: jax.lax.pmin(jax.lax.stop_gradient(x), "rows"), axis_name="rows")(x[0, 0])
        return (y**3).sum() / count.sum() + (top * low).sum()

    x, scale = np.random.default_rng(0).normal(size=(2, 6, 4, 3)).astype("f"), np.ones(3, "f")
    step = jax.value_and_grad(loss, (0, 1))
    f = shardc.function(step, mesh=shardc.make_mesh(data=4), in_placements=({"data": shardc.S(1)}, {}))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), f(x, scale), step(x, scale))
    names = {e.primitive.name for e in f.plan(x, scale).program.jaxpr.eqns}
    assert {"reduce_sum", "reduce_max"} <= names
    assert not names & {"psum", "pmax", "pmin"}
    assert f.compile(x, scale).audit().ok
