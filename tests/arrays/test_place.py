"""Places: an array enters one as its physical array, and leaves it as what JAX or shardc calls it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import shardc
from shardc import S
from shardc.arrays.place import Place
from shardc.arrays.placed import PlacedArray, StackedArray
from shardc.sbp.placement import Placement

AVAL = jax.ShapeDtypeStruct((8, 3), np.float32)


def mesh(first=0, count=4):
    return Mesh(np.array(jax.devices()[first : first + count]), ("data",))


def test_places_in_words():
    split = Place(AVAL, mesh(), Placement({"data": S(1)}))
    assert [str(p) for p in (Place(AVAL), Place(AVAL, mesh()), split)] == ["host", "its stages", "{data: S(1)}"]


def test_only_what_a_jax_array_can_be_has_a_plain_sharding():
    even, uneven = (Place(AVAL, mesh(), Placement({"data": S(d)})) for d in (0, 1))
    assert even.plain_sharding.spec == PartitionSpec("data")
    assert [p.plain_sharding for p in (uneven, Place(AVAL), Place(AVAL, mesh()))] == [None] * 3


def test_what_lies_there_enters_as_it_is():
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    for place in (Place(AVAL, mesh(), Placement({"data": S(d)})) for d in (0, 1)):
        physical = place.enter(x)
        leaf = place.leave(physical)
        assert place.enter(leaf) is physical
        assert isinstance(leaf, PlacedArray) is not place.is_plain
        np.testing.assert_array_equal(place.value(physical), x)


def test_an_array_in_rows_on_several_meshes_enters_whole():
    place = Place(AVAL, mesh(), Placement({"data": S(1)}))
    rows = [shardc.put(jnp.full((4, 3), k, np.float32), mesh(), {"data": S(1)}) for k in (1, 2)]
    stacked = StackedArray(rows)
    assert (stacked.placement, stacked.mesh) == (place.placement, place.mesh)
    np.testing.assert_array_equal(place.value(place.enter(stacked)), np.repeat([1, 2], 4)[:, None] * np.ones(3))
