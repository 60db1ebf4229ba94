"""The earliest points at which values can be ready, by hand."""

import jax
import jax.numpy as jnp

from shardc.passes.estimate.ready import find_ready

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def points(f, *args):
    """For each equation its primitive, and the first point of its result."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    found = find_ready(jaxpr)
    return [(e.primitive.name, found.at[e.outvars[0]]) for e in jaxpr.eqns]


def test_a_loop_is_ready_with_its_operands_and_a_product_when_it_has_run():
    def f(x, w):
        return jnp.sin(x) @ w + jnp.cos(w)

    assert points(f, X, X) == [("sin", 0), ("dot_general", 2), ("cos", 0), ("add", 2)]


def test_the_operands_of_a_product_have_their_own_points():
    jaxpr = jax.make_jaxpr(lambda x, w: (x @ w) @ w)(X, X).jaxpr
    found = find_ready(jaxpr)
    assert [found.operands[e] for e in jaxpr.eqns] == [(0, 0), (1, 0)]


def test_what_a_loop_does_not_change_is_ready_before_it():
    def f(w, xs):
        return jax.lax.scan(lambda c, x: (c + x, jnp.sin(w)), w, xs)

    jaxpr = jax.make_jaxpr(f)(X, jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)).jaxpr
    found = find_ready(jaxpr)
    (body,) = (e.params["jaxpr"].jaxpr for e in jaxpr.eqns)
    assert {e.primitive.name: found.at[e.outvars[0]] for e in body.eqns} == {"sin": 0, "add": 1}
