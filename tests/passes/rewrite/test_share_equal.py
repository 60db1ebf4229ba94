"""Equal expressions computed once: the same numbers, and one collective for equal sums."""

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
from shardc.passes.rewrite.share_equal import share_equal
from shardc.passes.trace.canonicalize import canonicalize

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(6, 5)), RNG.normal(size=(5, 5))
SHARED: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "sums": ("reduce_sum", lambda x, w: x / x.sum() + x * x.sum()),
    "products": ("dot_general", lambda x, w: jnp.tanh(x @ w).sum() + jnp.sin(x @ w).max()),
    "sums of equal expressions": ("reduce_sum", lambda x, w: jnp.exp(x).sum(0) + jnp.sin(jnp.exp(x).sum(0))),
    "rolled": ("concatenate", lambda x, w: jnp.roll(x, 1, 0) * 2 + jnp.sin(jnp.roll(x, 1, 0))),
    "sorted": ("sort", lambda x, w: jnp.sort(x, 0) * jnp.sort(x, 0)[::-1]),
    "in a loop": ("dot_general", lambda x, w: lax.map(lambda row: row @ w + jnp.tanh(row @ w), x)),
}
LEFT: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "other dimensions": ("reduce_sum", lambda x, w: x.sum(0).sum() + x.sum(1).sum()),
    "other operands": ("dot_general", lambda x, w: (x @ w).sum() + (x @ w.T).sum()),
    "elementwise": ("sin", lambda x, w: jnp.sin(x) * jnp.sin(x)),
    "other literals": ("reduce_sum", lambda x, w: (x * 2.0).sum() + (x * 3.0).sum()),
    "behind barriers": (
        "reduce_sum", lambda x, w: lax.optimization_barrier(x).sum() + lax.optimization_barrier(x).sum()
    ),
    "random bits": ("random_bits", lambda x, w: _bits() + _bits()),
}  # fmt: skip


def _bits() -> Any:
    return jax.random.bits(jax.random.key(0), (3,), jnp.uint32)


def counted(fn: Callable[..., Any], name: str) -> tuple[int, int]:
    """How often an operation is in a program before and after the pass."""
    before = canonicalize(jax.make_jaxpr(fn)(X, W))[0]
    after = share_equal(before)
    for got, want in zip(jex.jaxpr_as_fun(compat.close(after))(X, W), jax.tree.leaves(fn(X, W)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    return tuple(sum(e.primitive.name == name for e in all_eqns(j)) for j in (before, after))  # type: ignore[return-value]


@pytest.mark.parametrize("name", SHARED)
def test_equal_ones_are_computed_once(name: str) -> None:
    primitive, fn = SHARED[name]
    before, after = counted(fn, primitive)
    assert before > after


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    primitive, fn = LEFT[name]
    before, after = counted(fn, primitive)
    assert before == after >= 2


def test_equal_sums_are_sent_once() -> None:
    mesh = shardc.make_mesh(data=4)
    fn = shardc.function(SHARED["sums"][1], mesh=mesh, in_placements=({"data": S(0)}, {}))
    exe = fn.compile(X, W)
    assert len(exe.plan.collectives) == 1
    assert exe.audit().ok
    np.testing.assert_allclose(fn(X, W), SHARED["sums"][1](X, W), rtol=1e-6)
