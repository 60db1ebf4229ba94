"""Conditions, loops and barriers over values of several stages, before and after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardc.compat import close, new_jaxpr
from shardc.pipeline.cut.split_nested import split_nested

P, X, Y = np.float32(1), np.ones(2, np.float32), np.full(3, 2, np.float32)
CASES = {
    "results of two stages": (
        lambda p, x, y: lax.cond(p > 0, lambda: (2 * x, 2 * y), lambda: (x, y)), [("cond", 0, 1), ("cond", 1, 1)],
    ),
    "a norm over both": (
        lambda p, x, y: lax.cond(p > 0, lambda: (s := x.sum() + y.sum(), s * x, s * y)[1:], lambda: (x, y)),
        [("cond", 1, 1), ("cond", 0, 2), ("cond", 1, 1)],
    ),
    "one stage": (lambda p, x, y: lax.cond(p > 0, lambda: (2 * x, x + 1), lambda: (x, 3 * x)), [("cond", 0, 2)]),
    "carries of two stages": (
        lambda p, x, y: lax.fori_loop(0, 3, lambda _, c: (2 * c[0], c[1] + 1), (x, y)),
        [("scan", None, 1), ("scan", 0, 1), ("scan", 1, 1)],
    ),
    "a barrier": (
        lambda p, x, y: lax.optimization_barrier((x, y)),
        [("optimization_barrier", 0, 1), ("optimization_barrier", 1, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_equation_for_each_stage(case):
    fn, after = CASES[case]
    jaxpr = jax.make_jaxpr(fn)(P, X, Y).jaxpr
    anchors = {jaxpr.invars[1]: 0, jaxpr.invars[2]: 1}
    eqns = split_nested(jaxpr.eqns, anchors, {})
    nested = [(e.primitive.name, anchors.get(e.outvars[-1]), len(e.outvars)) for e in eqns]
    assert [n for n in nested if n[0] in ("cond", "scan", "optimization_barrier")] == after
    got = jaxpr_as_fun(close(new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)))
    for p in (P, -P):
        for a, b in zip(got(p, X, Y), jax.tree.leaves(fn(jnp.asarray(p), X, Y)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
