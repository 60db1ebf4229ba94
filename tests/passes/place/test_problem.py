"""What P means for a value: sums and maxima do not mix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import P, Placement, S

LINE = shardc.make_mesh(data=8)


def test_a_constant_that_starts_a_sum_is_partial_by_sum():
    def f(x):
        total, _ = jax.lax.scan(lambda c, row: (c + row.sum(0), None), jnp.zeros(3), x)
        return total

    x = np.arange(5 * 16 * 3, dtype=np.float32).reshape(5, 16, 3)
    g = shardc.function(f, mesh=LINE, in_placements={"x": {"data": S(1)}})
    np.testing.assert_array_equal(g(x), x.sum((0, 1)))
    assert [c.count for c in g.plan(x).collectives] == [1]
    assert not any(p.partial_op in ("max", "min") for p in g.plan(x).boxed.placements.values())


def test_a_maximum_that_enters_a_loop_or_leaves_as_a_partial_sum():
    def f(x):
        top = x.max(0)
        last, _ = jax.lax.scan(lambda c, _: (c * 0.5, None), top, None, length=3)
        return last, top, jax.lax.cond(x[0, 0] > 0, lambda t: t, lambda t: -t, top)

    x = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    sums = ({}, {"data": P}, {"data": P})
    g = shardc.function(f, mesh=LINE, in_placements={"x": {"data": S(0)}}, out_placements=sums)
    plan = g.plan(x)
    assert plan.outputs[1] == Placement({"data": P()})
    last, top, other = g(x)
    np.testing.assert_array_equal(last, x.max(0) / 8)
    np.testing.assert_array_equal(np.asarray(top), x.max(0))
    np.testing.assert_array_equal(np.asarray(other), -x.max(0))
    assert g.compile(x).audit().ok
