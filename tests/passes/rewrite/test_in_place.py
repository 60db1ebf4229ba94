"""Rows that are changed in place: the numbers of one device, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import S
from tests.passes.rewrite.test_compose_windows import both, numbers

pytestmark = pytest.mark.usefixtures("compiled_fast")

CHANGES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "stack": ((2, 4, 6), lambda s: jnp.stack([s[0], s[1][::-1]])),
    "stack of four": ((4, 5), lambda s: jnp.stack([s[0], 2 * s[1], jnp.sin(s[2]), -s[3]])),
    "stack of the second dimension": ((5, 2, 3), lambda s: jnp.stack([s[:, 0] ** 2, s[:, 1]], axis=1)),
    "stack of transposed": ((2, 4, 4), lambda s: jnp.stack([s[0], s[1].T])),
    "stack with a table": ((2, 3, 4), lambda s: jnp.stack([s[0], s[1] * jnp.arange(4.0) + 1])),
    "half written": ((2, 4, 6), lambda s: s.at[1].set(s[1][::-1])),
    "half added": ((2, 4, 6), lambda s: s.at[0].add(jnp.exp(s[0]))),
    "halves": ((8, 3), lambda s: jnp.concatenate([jnp.sin(s[:4]), jnp.cos(s[4:]) * 2])),
    "uneven parts": ((13, 3), lambda s: jnp.concatenate([jnp.sin(s[:4]), s[4:8], jnp.cos(s[8:]) * 2])),
    "zeros beside": ((2, 6), lambda s: jnp.pad(s[1:] * 2, ((1, 0), (0, 0)))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values(name: str) -> None:
    shape, change = CHANGES[name]
    before, after = both(change, numbers(*shape))
    assert after is not before
    both(jax.grad(lambda s: (change(s) ** 2).sum()), numbers(*shape))


KEPT: dict[str, Callable[[Any], Any]] = {
    "halves that change places": lambda s: jnp.stack([jnp.sin(s[1]), s[0]]),
    "a half twice": lambda s: jnp.stack([s[1], jnp.sin(s[1])]),
    "reversed along them": lambda s: jnp.concatenate([jnp.sin(s[1:2]), s[:1][::-1]]),
    "nothing of it": lambda s: jnp.stack([jnp.ones((3, 4)), jnp.zeros((3, 4))]) + s,
}


@pytest.mark.parametrize("name", KEPT)
def test_other_rows_stay(name: str) -> None:
    before, after = both(KEPT[name], numbers(2, 3, 4))
    assert after is before


@pytest.mark.parametrize("name", ["stack", "half written", "halves"])
@pytest.mark.parametrize("mesh", [{"a": 2}, {"a": 2, "b": 4}], ids=str)
def test_nothing_is_sent(name: str, mesh: dict[str, int]) -> None:
    s, rows = jax.ShapeDtypeStruct((2, 2048, 2048), "float32"), {"a": S(0)}
    on = shardc.make_mesh(topology="v5p:2x4x1" if len(mesh) == 2 else "v5p:2x1x1", **mesh)
    for fn in (change := CHANGES[name][1], jax.grad(lambda s: (change(s) ** 2).sum())):
        given = s if name != "halves" else jax.ShapeDtypeStruct((8, 2048, 2048), "float32")
        plan = shardc.function(fn, mesh=on, in_placements=(rows,), out_placements=rows).plan(given)
        assert plan.bytes_per_device == 0


def test_a_half_is_exchanged_where_both_are_split() -> None:
    s, pin = jax.ShapeDtypeStruct((2, 2, 2**22), "float32"), {"a": S(0), "b": S(1)}
    mesh = shardc.make_mesh(topology="v5p:2x2x1", a=2, b=2)
    plan = shardc.function(CHANGES["stack"][1], mesh=mesh, in_placements=(pin,), out_placements=pin).plan(s)
    assert plan.bytes_per_device <= 4 * 2**22


@pytest.mark.parametrize("axes", [{"a": 2, "b": 4}, {"a": 8}], ids=str)
def test_on_a_mesh(axes: dict[str, int]) -> None:
    s = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
    change = CHANGES["uneven parts"][1]
    both_of = lambda s: (change(s), jax.grad(lambda s: (change(s) ** 2).sum())(s))  # noqa: E731
    fn = shardc.function(both_of, mesh=shardc.make_mesh(**axes), in_placements=({"a": S(0)},))
    for got, want in zip(fn(s), both_of(s), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)
