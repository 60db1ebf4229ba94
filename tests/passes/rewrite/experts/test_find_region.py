"""Which operations are inside a region of sorted rows, and where rows come in and leave."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardc.sbp.rules  # noqa: F401  (registers them)
from shardc.passes.rewrite.experts.find_region import Region, find_regions
from shardc.passes.trace.canonicalize import canonicalize

X, ORDER, SIZES, W = (
    np.ones((12, 4), np.float32),
    np.arange(12),
    np.full(3, 4, np.int32),
    np.ones((3, 4, 4), np.float32),
)


def regions(fn: Any, *args: Any) -> list[Region]:
    jaxpr, _ = canonicalize(jax.make_jaxpr(fn)(*args))
    return list(find_regions(jaxpr))


def kinds(fn: Any, *args: Any) -> Counter[str]:
    (region,) = regions(fn, *args)
    return Counter(inside.kind for inside in region.eqns.values())


def test_a_layer_is_inside_from_its_lookup_to_its_write():
    def layer(x: Any, order: Any, sizes: Any, w: Any) -> Any:
        h = jnp.tanh(lax.ragged_dot(x[order], w, sizes))
        return jnp.zeros_like(x).at[order].add(2 * h)

    assert kinds(layer, X, ORDER, SIZES, W) == {"look up": 1, "by group": 1, "each row": 2, "put": 1}
    (region,) = regions(layer, X, ORDER, SIZES, W)
    assert (region.rows, region.groups, [dim for _, dim in region.weights]) == (12, 3, [0])


def test_gradients_are_inside_too():
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(lax.ragged_dot(x[ORDER], w, jnp.asarray(SIZES) * 1)[ORDER] ** 2)

    found = kinds(jax.grad(loss, (0, 1)), X, W)
    assert found["sum by group"] == found["read"] == found["write"] == 1
    assert found["by group"] == 2


def test_a_table_of_the_groups_is_looked_up_where_it_is():
    def layer(x: Any, order: Any, sizes: Any, w: Any, group: Any, bias: Any) -> Any:
        return jnp.sum(lax.ragged_dot(x[order], w, sizes) + bias[group], 0)

    found = kinds(layer, X, ORDER, SIZES, W, ORDER // 4, W[:, 0])
    assert found == {"look up": 1, "by group": 1, "each row": 2, "sum of rows": 1}


def test_what_numbers_the_rows_or_sorts_them_again_is_outside():
    def layer(x: Any, order: Any, sizes: Any, w: Any) -> Any:
        y = lax.ragged_dot(x[order], w, sizes)
        return jnp.sort(y, 0) + lax.broadcasted_iota(np.float32, y.shape, 0), jnp.cumsum(y, 0)

    assert kinds(layer, X, ORDER, SIZES, W) == {"look up": 1, "by group": 1}


def test_rows_that_come_from_nowhere_are_no_region():
    assert regions(lambda x, sizes, w: lax.ragged_dot(x, w, sizes), X, SIZES, W) == []
    assert regions(lambda x: x @ x.T, X) == []
