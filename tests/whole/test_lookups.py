"""Gather, scatter and dots by groups of a split dimension, on a mesh: one device's numbers, and the table stays put."""

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
ROWS, WIDE = 1257, 64
STARTS = np.array([0, 5, 156, 157, 158, 313, 629, 943, 1100, 1255, 1256, 4000, -3], np.int32)
WINDOWS = lax.GatherDimensionNumbers((1, 2), (), (0,))
INTO = lax.ScatterDimensionNumbers((1, 2), (), (0,))
MODES = ("clip", "fill", "promise_in_bounds")


def taken(mode: str, starts: Any) -> Callable[[Any], Any]:
    return lambda x: lax.gather(x, starts[:, None], WINDOWS, (3, WIDE), mode=mode, fill_value=7)


def put(fn: Any, mode: str, starts: Any) -> Callable[[Any], Any]:
    new = np.arange(len(starts) * 3.0 * WIDE, dtype=np.float32).reshape(len(starts), 3, WIDE)
    return lambda x: fn(x, starts[:, None], new, INTO, mode=mode)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{f"gather_{mode}": taken(mode, STARTS) for mode in MODES},
    **{f"gather_{start}_{mode}": taken(mode, np.array([start], np.int32)) for start in (157, 4000) for mode in MODES},
    "gather_bool": lambda x: taken("fill", STARTS)(x > 0),
    "rows_bool": lambda x: (x > 0)[STARTS],
    "dynamic_slices": lambda x: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 5))(STARTS),
    **{f"scatter_add_{mode}": put(lax.scatter_add, mode, STARTS) for mode in MODES},
    **{f"scatter_{start}_{mode}": put(lax.scatter, mode, np.array([start], np.int32))
       for start in (157, 1255, 4000) for mode in MODES},
    "scatter_max": put(lax.scatter_max, "clip", STARTS),
}  # fmt: skip


def facts_of(name: str, axes: tuple[str, ...]) -> set[object]:
    """The axes, and the function together with each of what its name says besides: a start, a mode."""
    first, *more = name.split("_", 2)
    return {axes, first, *((first, word) for word in more)}


@pytest.mark.sampled(by=facts_of)
@pytest.mark.parametrize("axes", [("a",), ("b", "a")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_a_split_table(name: str, axes: tuple[str, ...]) -> None:
    fn, split = FUNCTIONS[name], dict.fromkeys(axes, S(0))
    x = np.random.default_rng(0).normal(size=(ROWS, WIDE)).astype(np.float32)
    out = split if name.startswith("scatter") else {}
    placed = shardc.function(fn, mesh=MESH, in_placements=(split,), out_placements=out)
    np.testing.assert_array_equal(np.asarray(placed(x)), jax.jit(fn)(x))
    audit = placed.compile(x).audit()
    assert audit.ok, audit
    assert not audit.missing, audit
    plan = placed.plan(x)
    assert not plan.gathered
    assert all(c.source != "argument x" for c in plan.collectives), plan.collectives
    if name.startswith("scatter"):
        assert not plan.collectives


GROUPS = 6
SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rows": ({"a": S(0)}, {}, {"a": S(0)}),
    "groups": ({}, {"a": S(0)}, {}),
    "rows and groups": ({"b": S(0)}, {"a": S(0)}, {"b": S(0)}),
    "contracted": ({"b": S(1)}, {"b": S(1)}, {}),
    "rows and columns": ({"b": S(0), "a": S(0)}, {}, {"b": S(0), "a": S(0)}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sizes", [(5, 0, 11, 9, 1, 3), (0, 0, 4, 0, 20, 1), (29, 0, 0, 0, 0, 0)])
@pytest.mark.parametrize("split", SPLITS)
def test_of_groups_of_rows(split: str, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((29, 16), (GROUPS, 16, 8)))
    left, right, out = SPLITS[split]
    placed = shardc.function(lax.ragged_dot, mesh=MESH, in_placements=(left, right, {}), out_placements=out)
    n = np.asarray(sizes, np.int32)
    np.testing.assert_allclose(np.asarray(placed(x, w, n)), lax.ragged_dot(x, w, n), rtol=1e-4, atol=1e-4)
    assert placed.compile(x, w, n).audit().ok


def test_an_infinite_row_stays_among_its_group() -> None:
    x, w = np.ones((29, 16), np.float32), np.ones((GROUPS, 16, 8), np.float32)
    x[4] = np.inf
    n = np.asarray((5, 0, 11, 9, 1, 3), np.int32)
    placed = shardc.function(lax.ragged_dot, mesh=MESH, in_placements=({}, {"a": S(0)}, {}), out_placements={})
    np.testing.assert_array_equal(placed(x, w, n), lax.ragged_dot(x, w, n))
    assert np.isfinite(np.asarray(placed(x, w, n))).all(1).sum() == 28


def test_gradients_of_groups_of_rows() -> None:
    rng = np.random.default_rng(2)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((29, 16), (GROUPS, 16, 8)))
    n = np.asarray((5, 0, 11, 9, 1, 3), np.int32)

    def loss(x: Any, w: Any) -> Any:
        return jnp.square(lax.ragged_dot(x, w, n)).sum()

    grad = jax.grad(loss, (0, 1))
    rows = {"a": S(0)}
    placed = shardc.function(grad, mesh=MESH, in_placements=(rows, {}), out_placements=(rows, {}))
    for got, want in zip(placed(x, w), grad(x, w), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-3)
    assert not placed.plan(x, w).gathered
