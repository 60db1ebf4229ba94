"""The stages of values outside of the loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardc.pipeline.cut.find_homes import find_homes

X = jnp.ones(3)


def homes(fn, *args, known):
    """The stages of the results of a function, some of whose arguments have a known stage."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    found = find_homes(jaxpr.eqns, {jaxpr.invars[i]: s for i, s in known.items()})
    return [found.get(v) for v in (*jaxpr.invars, *jaxpr.outvars)]


def test_moments_belong_to_their_parameter():
    def update(w, v, m, n, count):
        return w - m * count, v - n * count, 0.9 * m, 0.9 * n

    assert homes(update, X, X, X, X, 1.0, known={0: 0, 1: 2}) == [0, 2, 0, 2, None, 0, 2, 0, 2]


def test_the_largest_known_value_decides():
    assert homes(lambda a, b, c: jnp.concatenate([a, b, c]), X, jnp.ones(4), X, known={0: 1, 1: 2}) == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "nested",
    [
        lambda p, w, m: lax.cond(p > 0, lambda: (w, 0.9 * m), lambda: (w + 1, m)),
        lambda p, w, m: lax.fori_loop(0, 3, lambda _, c: (c[0] + 1, c[1] * 0.9), (w, m)),
        lambda p, w, m: lax.optimization_barrier((w, m)),
    ],
)
def test_each_value_of_a_nested_equation_has_its_own_stage(nested):
    assert homes(lambda p, w, m: nested(p, w, m), 1.0, X, X, known={1: 0, 2: 1}) == [None, 0, 1, 0, 1]
