"""Lookups by the row's own number: one device's numbers at any placement, and nothing sent where the rows are split."""

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
from shardc.passes.rewrite.batch_lookups import batched
from tests.passes.programs import before_after

pytestmark = pytest.mark.usefixtures("compiled_fast")

MESH = shardc.make_mesh(a=4, b=2)
ROWS, TIMES, WIDE = 10, 6, 3


def own(k: int) -> Any:
    """`iota[:, None, ...]` with `k` dimensions."""
    return jnp.arange(ROWS).reshape(ROWS, *[1] * (k - 1))


def in_a_scan(x: Any, i: Any) -> Any:
    rows = own(2)
    return jax.lax.scan(lambda c, _: (c + x[rows, i], None), jnp.zeros((*i.shape, WIDE), x.dtype), None, length=2)[0]


def in_a_while(x: Any, i: Any) -> Any:
    rows = own(2)
    start = 0, jnp.zeros((*i.shape, WIDE), x.dtype)
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + x[rows, i]), start)[1]


def in_a_condition(x: Any, i: Any) -> Any:
    rows = own(2)
    both = jax.checkpoint(lambda x: x[rows, i]), lambda x: 2 * x[rows, i]
    return jax.lax.cond(i[0, 0] > 100, *both, x)


def flax_beams(x: Any, i: Any) -> Any:
    k = i.shape[1]
    return x[jnp.reshape(jnp.arange(ROWS * k) // k, (ROWS, k)), i]


LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "beams": lambda x, i: x[own(2), i],
    "beams of flax": flax_beams,
    "captured": lambda x, i: x[np.arange(ROWS)[:, None], i],
    "last": lambda x, i: x[jnp.arange(ROWS), i[:, 0] - 1],
    "value": lambda x, i: x[jnp.arange(ROWS), i[:, 0], 1],
    "columns": lambda x, i: x[own(2), :, jnp.minimum(i, WIDE - 1)],
    "rows alone": lambda x, i: x[jnp.arange(ROWS)] * i[0, 0],
    "diagonal": lambda x, i: x[:, : i.shape[1], 0][jnp.arange(ROWS), jnp.arange(ROWS) % 2],
    "clipped": lambda x, i: x.at[own(2), i].get(mode="clip"),
    "filled": lambda x, i: x.at[own(2), i + 4].get(mode="fill", fill_value=7.0),
    "gradient": lambda x, i: jax.grad(lambda x: jnp.sum(x[own(2), i] ** 3))(x),
    "set": lambda x, i: x.at[jnp.arange(ROWS), i[:, 0]].set(-1.0),
    "rows set": lambda x, i: x.at[jnp.arange(ROWS)].add(2.0) + i[0, 0],
    "largest": lambda x, i: x.at[own(2), i].max(0.5),
    "scan": in_a_scan,
    "while": in_a_while,
    "condition": in_a_condition,
}


def operands() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, TIMES, WIDE)), rng.integers(0, TIMES, (ROWS, 4)).astype(np.int32)


def test_the_text(golden: Callable[[str, str], None]) -> None:
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))

    def fn(x: Any, i: Any) -> Any:
        rows = lax.broadcasted_iota(np.int32, (4, 1), 0)
        at = lax.concatenate([rows, lax.reshape(i, (4, 1))], 1)
        return lax.gather(x, at, numbers, (1, 1), mode="clip")

    shapes = jax.ShapeDtypeStruct((4, 3), np.float32), jax.ShapeDtypeStruct((4,), np.int32)
    before = jax.make_jaxpr(fn)(*shapes).jaxpr
    after = batched(before, {})
    golden("batch_lookups", before_after(before, after))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_are_split_and_nothing_moves(name: str) -> None:
    with jax.enable_x64(True):
        x, i = operands()
        fn, rows = LOOKUPS[name], {"a": S(0), "b": S(0)}
        placed = shardc.function(fn, mesh=MESH, in_placements=(rows, rows), out_placements=rows)
        np.testing.assert_allclose(np.asarray(placed(x, i)), jax.jit(fn)(x, i), rtol=1e-12)
        assert placed.compile(x, i).audit().ok
        large = [c for c in placed.plan(x, i).collectives if c.value[:3] == "f64"]
        assert not large, large


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LOOKUPS)
def test_at_other_placements(name: str) -> None:
    rng = np.random.default_rng(len(name))
    with jax.enable_x64(True):
        x, i = operands()
        fn = LOOKUPS[name]
        placements = [{a: S(int(rng.integers(n))) for a in ("a", "b")} for n in (3, 2)]
        placed = shardc.function(fn, mesh=MESH, in_placements=tuple(placements))
        np.testing.assert_allclose(np.asarray(placed(x, i)), jax.jit(fn)(x, i), rtol=1e-12)
        assert placed.compile(x, i).audit().ok


def test_what_does_not_count_its_row_stays_a_lookup() -> None:
    x, i = operands()
    shifted = (jnp.arange(ROWS) + 1) % ROWS
    for rows in (shifted[:, None], i[:, :1], jnp.zeros((ROWS, 1), np.int32), own(2)[::-1]):
        closed = shardc.function(lambda x, i, r=rows: x[r, i], mesh=MESH, in_placements=({"a": S(0)}, {}))
        gathers = [e for e in closed.plan(x, i).boxed.jaxpr.eqns if e.primitive.name == "gather"]
        assert [e.params["dimension_numbers"].operand_batching_dims for e in gathers] == [()]
        np.testing.assert_allclose(np.asarray(closed(x, i)), x[rows, i].astype(np.float32), rtol=1e-6)
