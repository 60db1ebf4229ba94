"""What is added to a sum is added as soon as it is there, and all else stays in its order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardc.pipeline.cut.advance_sums import advance_sums


def moved(fn, count):
    """The primitives of a function's equations, its last `count` results advanced."""
    jaxpr = jax.make_jaxpr(fn)(*[jnp.ones((2, 2))] * 3).jaxpr
    eqns = advance_sums(jaxpr.eqns, set(jaxpr.outvars[-count:]))
    made = set(jaxpr.invars)
    for e in eqns:
        assert made.issuperset(v for v in e.invars if hasattr(v, "count")), "made before it is read"
        made |= set(e.outvars)
    assert {id(e) for e in eqns} == {id(e) for e in jaxpr.eqns}
    return [e.primitive.name for e in eqns]


def test_an_addition_stands_behind_its_term():
    def fn(x, s, t):
        g, h = jnp.sin(x), jnp.cos(x)
        return s + g, t - h

    assert moved(fn, 2) == ["sin", "add", "cos", "sub"]


def test_what_only_turns_a_term_moves_with_it():
    def fn(x, s, t):
        g, h = jnp.sin(x), jnp.cos(x)
        return t - h * g, s + h.T

    assert moved(fn, 1) == ["sin", "cos", "transpose", "add", "mul", "sub"]


def test_a_term_that_others_read_stays_where_it_is():
    def fn(x, s, t):
        g, h = jnp.sin(x), jnp.cos(x)
        turned = g.T
        return turned @ h, jnp.tanh(h), s + turned

    assert moved(fn, 1) == ["sin", "cos", "transpose", "add", "dot_general", "tanh"]
