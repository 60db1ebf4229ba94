"""Running and ranking operations along a split dimension, on a mesh: one device's numbers, and little is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(a=4, b=2)
WIDE = 3
RUNNING: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: lax.cumsum(x, 0),
    "cumsum_reverse": lambda x: lax.cumsum(x, 0, reverse=True),
    "cumprod": lambda x: lax.cumprod(x, 0),
    "cummax": lambda x: lax.cummax(x, 0),
    "cummin_reverse": lambda x: lax.cummin(x, 0, reverse=True),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 0),
}
REDUCED: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: lax.argmax(x, 0, np.int32),
    "argmin": lambda x: lax.argmin(x, 0, np.int32),
    "argmax_ties": lambda x: lax.argmax(jnp.round(x), 0, np.int32),
    "top_k": lambda x: lax.top_k(x, 5, axis=0),
    "top_k_ties": lambda x: lax.top_k(jnp.round(x), 3, axis=0),
    "reduce_prod": lambda x: lax.reduce_prod(x, (0, 1)),
    "reduce_xor": lambda x: lax.reduce_xor(lax.bitcast_convert_type(x, np.int32), (0,)),
}


def _same(whole: Any, got: Any) -> None:
    assert np.asarray(got).dtype == whole.dtype
    np.testing.assert_allclose(np.asarray(got), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(by=lambda name, rows, axes: {name, (rows, axes)})
@pytest.mark.parametrize("axes", [("a",), ("b", "a")])
@pytest.mark.parametrize("rows", [64, 61, 9])
@pytest.mark.parametrize("name", [*RUNNING, *REDUCED])
def test_along_a_split_dimension(name: str, rows: int, axes: tuple[str, ...]) -> None:
    fn = {**RUNNING, **REDUCED}[name]
    x = np.random.default_rng(rows).normal(size=(rows, WIDE)).astype(np.float32)
    split = dict.fromkeys(axes, S(0))
    want = fn(jnp.asarray(x))
    placed = shardc.function(
        fn, mesh=MESH, in_placements=(split,),
        out_placements=jax.tree.map(lambda _: split if name in RUNNING else {}, want),
    )  # fmt: skip
    jax.tree.map(_same, want, placed(x))
    audit = placed.compile(x).audit()
    assert audit.ok, audit
    assert not audit.missing, audit


@pytest.mark.plans_eagerly
@pytest.mark.parametrize("name", [*RUNNING, *REDUCED])
def test_little_is_told(name: str) -> None:
    fn = {**RUNNING, **REDUCED}[name]
    x = jax.ShapeDtypeStruct((4096, WIDE), np.float32)
    rows = {"b": S(0), "a": S(0)}
    outs = jax.tree.map(lambda _: rows if name in RUNNING else {}, jax.eval_shape(fn, x))
    plan = shardc.function(fn, mesh=MESH, in_placements=(rows,), out_placements=outs).plan(x)
    assert not plan.gathered
    assert {c.kind for c in plan.collectives} == {"all_gather"}
    assert plan.bytes_per_device <= 7 * 2 * 5 * WIDE * 4  # values and indices of five candidates to seven others
