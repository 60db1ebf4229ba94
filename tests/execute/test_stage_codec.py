"""Values of a stage, packed and unpacked for another one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from shardc.execute.stage_codec import StageCodec, StageEdge, copies_of
from shardc.execute.stage_io import StageArray
from shardc.sbp.placement import Placement, S

ROWS, COLUMNS = {"data": S(0)}, {"data": S(1)}


def edge(aval, given, taken, sizes=(4, 4)):
    ends = (jax.devices()[:4][: sizes[0]], jax.devices()[4:][: sizes[1]])
    arrays = [
        StageArray(aval.shape, Placement(p), Mesh(np.array(d), ("data",)))
        for p, d in zip((given, taken), ends, strict=True)
    ]
    return StageEdge(*arrays, aval)


@pytest.mark.parametrize(
    ("given", "taken", "sizes", "is_copy"),
    [(ROWS, ROWS, (4, 4), True), (ROWS, COLUMNS, (4, 4), False), ({}, {}, (4, 4), True), (ROWS, ROWS, (4, 2), False)],
)
def test_there(given, taken, sizes, is_copy):
    x = jnp.arange(24, dtype=jnp.float32).reshape(6, 4)
    on = edge(jax.typeof(x), given, taken, sizes)
    assert on.is_copy == is_copy
    codec = StageCodec([[on]], wide=False)
    packed = codec.pack(0, 0, (on.given.enter(x),))
    (got,) = codec.unpack(0, {0: packed})
    assert got.sharding == on.taken.sharding
    np.testing.assert_array_equal(on.taken.value(got), np.asarray(x))


def test_keys_go_as_their_words():
    keys = jax.random.split(jax.random.key(3), 4)
    on = edge(jax.typeof(keys), ROWS, ROWS)
    codec = StageCodec([[on]], wide=False)
    (got,) = codec.unpack(0, {0: codec.pack(0, 0, (jax.device_put(keys, on.given.sharding),))})
    assert got.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))


def test_what_a_later_step_overwrites_is_copied():
    values = jnp.ones(2), jnp.zeros(2)
    first, second = copies_of([1])(values)
    assert first is values[0] and second is not values[1]
