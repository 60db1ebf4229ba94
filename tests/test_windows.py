"""Operations whose pieces read what other devices hold, on a mesh: one device's numbers, and no move unplanned."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardc
from shardc import S

MESH = shardc.make_mesh(a=4, b=2)
WIDE = 64
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "next": lambda x: x[1:],
    "differences": lambda x: x[1:] - x[:-1],
    "roll": lambda x: jnp.roll(x, 3, 0),
    "every_third": lambda x: x[2::3],
    "flip": lambda x: jnp.flip(x, 0),
    "pad": lambda x: jnp.pad(x, ((2, 3), (0, 0)), constant_values=7),
    "spread": lambda x: lax.pad(x, jnp.float32(1), ((1, 0, 2), (0, 0, 0))),
    "join": lambda x: jnp.concatenate([x, 2 * x, x[:3]], 0),
    "parts": lambda x: jnp.split(x, [3, 11]),
    "update": lambda x: lax.dynamic_update_slice(x, -x[:5], (jnp.int32(x.shape[0] - 7), 0)),
}  # fmt: skip


@pytest.mark.parametrize("axes", [("a",), ("b", "a")])
@pytest.mark.parametrize("rows", [32, 29])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_along_the_dimension(name: str, rows: int, axes: tuple[str, ...]) -> None:
    fn = FUNCTIONS[name]
    x = np.arange(rows * WIDE, dtype=np.float32).reshape(rows, WIDE)
    rows_split = dict.fromkeys(axes, S(0))
    want = fn(jnp.asarray(x))
    placed = shardc.function(
        fn, mesh=MESH, in_placements=(rows_split,), out_placements=jax.tree.map(lambda _: rows_split, want)
    )
    jax.tree.map(lambda whole, got: np.testing.assert_array_equal(np.asarray(got), whole), want, placed(x))
    audit = placed.compile(x).audit()
    assert audit.ok, audit
    assert not audit.missing, audit


def test_a_shift_sends_its_border_alone() -> None:
    x = jax.ShapeDtypeStruct((1024, 64), np.float32)
    rows = {"a": S(0)}
    plan = shardc.function(FUNCTIONS["roll"], mesh=MESH, in_placements=(rows,), out_placements=rows).plan(x)
    border = 3 * WIDE * 4
    assert sum(c.bytes for c in plan.collectives if c.kind == "permute") == border
    assert plan.bytes_per_device <= 3 * border  # the rows that wrap around go to all
    row = next(line for line in plan.explain().splitlines() if " permute " in line)
    assert re.search(r"f32\[3,64\] +\{a: S\(0\)\} +concatenate's window", row), row


def test_a_dynamic_slice_of_a_split_dimension_is_summed_up() -> None:
    x, at = np.arange(4000.0).reshape(2000, 2), np.int32(498)
    fn = shardc.function(
        lambda x, at: lax.dynamic_slice_in_dim(x, at, 4), mesh=MESH, in_placements=({"a": S(0)}, {}), out_placements={}
    )
    np.testing.assert_array_equal(fn(x, at), x[498:502])
    assert fn.plan(x, at).bytes_per_device < 4 * 2 * 4 * 2
