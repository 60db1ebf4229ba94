"""Bytes that light operations read and write together, counted by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardc.passes.estimate.traffic import fused_groups

N = 1024
ONE = 4 * N * N
"""Bytes of an (N, N) of float32."""
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def traffic(f: Any, *args: Any) -> list[float]:
    """Bytes of each group on one device; products are heavy."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    light = {e for e in jaxpr.eqns if e.primitive.name != "dot_general"}
    same = {e for e in jaxpr.eqns if e.primitive.name == "copy"}
    held = {v: 4 * v.aval.size for v in (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))}
    return [group.bytes for group in fused_groups(jaxpr, light, same, held)]


@pytest.mark.parametrize(
    ("f", "arguments", "expected"),
    [
        (lambda x: jnp.exp(jnp.sin(x) + 1) * 2, 1, 2 * ONE),  # a chain: read once, written once
        (lambda x, y: x * y + x, 2, 3 * ONE),  # a value read twice is read once
        (lambda x: (jnp.sin(x), jnp.cos(x)), 1, 3 * ONE),
        (lambda x, y: x @ y, 2, 0),  # heavy alone
        (lambda x, y: jnp.sin(x @ y), 2, 2 * ONE),  # its result is read, and a light one written
        (lambda x, y: jnp.sin(x) @ y, 2, 2 * ONE),  # what a heavy one reads is written; its reading is its own
        (lambda x: x.sum(), 1, ONE + 4),
        (lambda x: x[:2] * 2, 1, 2 * 4 * 2 * N),  # of what is sliced a part is read
        (lambda x: jax.lax.dynamic_update_slice(x, jnp.sin(x[:2]), (0, 0)), 1, 2 * 4 * 2 * N),  # in place
        (lambda x: jnp.sin(x.at[:2].add(x[2:4])).sum(), 1, 2 * 4 * 2 * N + 4),  # no part of what reads it
        (lambda x, y: jnp.copy(x) @ y, 2, 0),  # the same value by another name
    ],
)
def test_what_fused_operations_read_and_write(f: Any, arguments: int, expected: int) -> None:
    assert sum(traffic(f, *(X,) * arguments)) == expected


def test_operations_that_read_no_results_of_each_other_are_groups() -> None:
    """They share what both read."""
    found = traffic(lambda x, y: (jnp.sin(x + y), jnp.cos(x) * 2, y @ y), X, X)
    assert found == [2.5 * ONE, 1.5 * ONE]
