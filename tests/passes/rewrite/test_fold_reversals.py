"""Reversals folded into running sums and scans: the same numbers, and nothing is reversed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import shardc
import shardc.sbp.rules  # registers them
from shardc import S, compat
from shardc.ir.walk import all_eqns
from shardc.passes.rewrite.fold_reversals import fold_reversals
from shardc.passes.trace.canonicalize import canonicalize

X = np.random.default_rng(0).normal(size=(7, 4))


def running(c: Any, row: Any) -> tuple[Any, Any]:
    return c * 0.5 + row, c * row


def from_the_end(x: Any) -> Any:
    c, ys = lax.scan(running, jnp.zeros(4), x[::-1])
    return c, ys[::-1]


FOLDED: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: jnp.cumsum(x[::-1], 0)[::-1],
    "cumprod of the columns": lambda x: jnp.flip(jnp.cumprod(jnp.flip(x, 1), 1), 1),
    "cummax": lambda x: lax.cummax(x[::-1])[::-1],
    "cumlogsumexp along another dimension": lambda x: lax.cumlogsumexp(x[::-1], 1)[::-1],
    "already reversed": lambda x: lax.cumsum(x[::-1], reverse=True)[::-1],
    "both dimensions": lambda x: jnp.flip(jnp.cumsum(jnp.flip(x, (0, 1)), 1), (0, 1)),
    "elementwise between": lambda x: (jnp.exp(jnp.cumsum(x[::-1] * jnp.sin(x[::-1]), 0)) + jnp.arange(4.0) * 2)[::-1],
    "twice": lambda x: jnp.cumsum(jnp.cumsum(x[::-1], 0)[::-1][::-1], 0)[::-1],
    "a gradient": jax.grad(lambda x: (jnp.cumsum(x[::-1], 0)[::-1] ** 2).sum()),
    "a scan": from_the_end,
    "a scan without rows of results": lambda x: lax.scan(running, jnp.zeros(4), x[::-1])[0],
    "in a loop": lambda x: lax.map(lambda row: jnp.cumsum(row[::-1])[::-1], x),
}
LEFT: dict[str, Callable[[Any], Any]] = {
    "one side": lambda x: jnp.cumsum(x[::-1], 0),
    "other dimensions": lambda x: jnp.cumsum(x[::-1], 0)[:, ::-1],
    "added to what is not reversed": lambda x: (jnp.cumsum(x[::-1], 0) + x)[::-1],
    "read twice": lambda x: jnp.cumsum(x[::-1], 0)[::-1] + jnp.cumsum(x[::-1], 0),
    "a scan whose rows stay": lambda x: lax.scan(running, jnp.zeros(4), x[::-1])[1],
}


def reversals(fn: Callable[..., Any]) -> int:
    """How many reversals are left, after the results were compared."""
    jaxpr = fold_reversals(canonicalize(jax.make_jaxpr(fn)(X))[0])
    for got, want in zip(jex.jaxpr_as_fun(compat.close(jaxpr))(X), jax.tree.leaves(fn(X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    return sum(e.primitive.name == "rev" for e in all_eqns(jaxpr))


@pytest.mark.parametrize("name", FOLDED)
def test_nothing_is_reversed(name: str) -> None:
    assert reversals(FOLDED[name]) == 0


@pytest.mark.parametrize("name", LEFT)
def test_others_are_reversed_as_written(name: str) -> None:
    assert reversals(LEFT[name]) > 0


@pytest.mark.parametrize("name", ["cumsum", "elementwise between", "a scan"])
def test_a_sum_from_the_end_of_split_rows_sends_totals(name: str) -> None:
    mesh = shardc.make_mesh(data=4)
    fn = shardc.function(FOLDED[name], mesh=mesh, in_placements=({"data": S(0)},))
    exe = fn.compile(X)
    assert exe.audit().ok
    assert all(c.kind != "permute" for c in exe.plan.collectives)
    for got, want in zip(jax.tree.leaves(fn(X)), jax.tree.leaves(FOLDED[name](X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
