"""Composed windows: the numbers of one device, and arrays of another length never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr, jaxpr_as_fun

from shardc import compat
from shardc.ir.walk import all_eqns
from shardc.passes.trace.canonicalize import canonicalize
from shardc.passes.trace.compose_windows import composed
from tests.passes.programs import before_after


def both(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The canonical program of `fn`, and the one with composed windows, after their results were compared."""
    before, captured = canonicalize(jax.make_jaxpr(fn)(*args))
    after = composed(before)
    check_jaxpr(after)
    want = jaxpr_as_fun(compat.close(before))(*jax.tree.leaves(args), *captured)
    got = jaxpr_as_fun(compat.close(after))(*jax.tree.leaves(args), *captured)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
    return before, after


def sizes(jaxpr: Any) -> set[int]:
    """The sizes of dimension 0 of all values of rank 2."""
    return {v.aval.shape[0] for e in all_eqns(jaxpr) for v in e.outvars if len(v.aval.shape) == 2}


def numbers(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def second(q: Any) -> Any:
    return q[2:] + q[:-2] - 2 * q[1:-1]


def padded(mode: str) -> Callable[[Any], Any]:
    return lambda u: second(jnp.pad(u, ((1, 1), (0, 0)), mode=mode))


def walls(u: Any) -> Any:
    return jnp.concatenate([jnp.ones((1, 3)), u, 2 * jnp.ones((1, 3))])


STEPS: dict[str, Callable[[Any], Any]] = {
    "set": lambda u: u.at[1:-1].set(0.5 * (u[2:] + u[:-2])),
    "set in two dimensions": lambda u: u.at[1:-1, 1:].set(jnp.exp(u[2:, 1:] + u[:-2, :-1])),
    "set another array": lambda u: u.at[2:].set(jnp.cumsum(u[2:], 0)),
    "add": lambda u: u.at[1:-1].add(u[2:] * u[:-2]),
    "multiply": lambda u: u.at[1:-1].multiply(u[2:]),
    "max": lambda u: u.at[:-1].max(u[1:]),
    "dynamic_update_slice": lambda u: lax.dynamic_update_slice(u, u[2:] + u[:-2], (1, 0)),
    "clamped": lambda u: lax.dynamic_update_slice(u, u[2:] + u[:-2], (7, 0)),
    "dynamic_slice": lambda u: jnp.pad(lax.dynamic_slice(u, (9, 0), (len(u) - 1, 3)), ((0, 1), (0, 0))),
    "zeros around": lambda u: jnp.pad(jnp.cos(u[2:] + u[:-2]), ((1, 1), (0, 0))),
    "zeros around a write": lambda u: second(jnp.zeros((len(u) + 2, 3)).at[1:-1].set(u)),
    "padding": padded("constant"),
    "padding by ones": lambda u: second(jnp.pad(u, ((1, 1), (0, 0)), constant_values=1.0)),
    "edges": padded("edge"),
    "around": padded("wrap"),
    "walls": lambda u: second(walls(u)),
    "walls, then a function": lambda u: second(jnp.exp(walls(u))),
    "walls of it": lambda u: jnp.concatenate([u[:1], u[1:-1] + u[2:] * u[:-2], u[-1:]]),
    "Neumann walls": lambda u: (lambda v: jnp.concatenate([v[:1], v, v[-1:]]))(u[2:] - u[:-2]),
    "thick walls": lambda u: (lambda q: q[4:] + q[:-4])(jnp.concatenate([u[:2], jnp.tanh(u), u[3:5]])),
    "difference": lambda u: jnp.diff(u, axis=0, append=0),
    "difference of differences": lambda u: jnp.diff(jnp.diff(u, axis=0, append=1), axis=0, prepend=2),
    "roll": lambda u: jnp.roll(u, 3, 0),
    "roll in two dimensions": lambda u: jnp.roll(u, (1, -1), (0, 1)),
    "rolls": lambda u: jnp.roll(jnp.roll(u, 1, 0), 2, 0) * u,
    "transposed": lambda u: jnp.pad((u[2:] + u[:-2]).T[None], ((0, 0), (0, 0), (1, 1)))[0].T,
    "strided": lambda u: jnp.pad(u, ((1, 1), (0, 0)))[2:, ::2],
    "reversed": lambda u: jnp.pad(u, ((1, 1), (0, 0)))[:1:-1] + u,
    "integers": lambda u: second(jnp.pad(jnp.round(u).astype(jnp.int8), ((1, 1), (0, 0)))),
    "booleans": lambda u: (lambda q: q[2:] & q[:-2])(jnp.pad(u > 0, ((1, 1), (0, 0)))),
    "logarithm": lambda u: u.at[1:-1].set(jnp.log(u[2:] ** 2 + u[:-2] ** 2)),
}  # fmt: skip


@pytest.mark.parametrize("rows", [13, 16])
@pytest.mark.parametrize("name", STEPS)
def test_values(name: str, rows: int) -> None:
    u = numbers(rows, 3)
    before, after = both(STEPS[name], u)
    assert after is not before
    if name != "reversed":
        assert not {rows + 1, rows + 2, rows + 4} & sizes(after)
    if jnp.issubdtype(STEPS[name](u).dtype, jnp.floating):
        both(jax.grad(lambda u: (STEPS[name](u) ** 2).sum()), u)
