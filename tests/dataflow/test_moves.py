"""Moves of leaves between any two places: the value stays, and lies where it is taken."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardc
from shardc import B, P, S
from shardc.dataflow.moves import copied, on_host, to_place
from shardc.dataflow.work import LeafPlace
from shardc.sbp.placement import Placement

PLACEMENTS = [{"data": B}, {"data": S(0)}, {"data": S(1)}, {"data": P}]
MESHES = [(0, 2), (2, 2), (1, 4), (5, 3)]


def mesh(first, count):
    return Mesh(np.array(jax.devices()[first : first + count]), ("data",))


@pytest.mark.parametrize("shape", [(6, 4), (7, 5)])
@pytest.mark.parametrize("kind", ["float32", "int8", "key"])
def test_from_any_placement_to_any_other(shape, kind):
    x = jnp.arange(np.prod(shape)).reshape(shape)
    x = jax.random.split(jax.random.key(0), shape) if kind == "key" else x.astype(kind)
    plain = np.asarray(jax.random.key_data(x) if kind == "key" else x)
    placements = PLACEMENTS[:3] if kind == "key" else PLACEMENTS
    ways = itertools.product(MESHES[:2], placements, MESHES[1:], placements)
    for here, at, there, to in ways:
        given = shardc.put(x, mesh(*here), at)
        place = LeafPlace(mesh(*there), Placement(to))
        found = to_place(place, jax.ShapeDtypeStruct(x.shape, x.dtype))(given)
        assert found.dtype == x.dtype
        assert found.devices() == set(place.mesh.devices.flat)
        if isinstance(found, shardc.PlacedArray):
            assert found.placement == place.placement
        else:
            assert found.sharding.is_equivalent_to(place.sharding(found), found.ndim)
        logical = jax.random.key_data(found) if kind == "key" else found
        np.testing.assert_array_equal(np.asarray(logical), plain)


def test_from_the_host():
    place = LeafPlace(mesh(2, 4), Placement({"data": S(0)}))
    found = to_place(place, jax.ShapeDtypeStruct((8,), jnp.float32))(np.arange(8, dtype=np.float32))
    assert [s.data.tolist() for s in found.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_copies_are_not_the_array():
    x, n = jnp.arange(3.0), np.arange(3.0)
    one, two = copied(x), copied(n)
    x.delete()
    n[:] = 9
    assert one.tolist() == two.tolist() == [0, 1, 2]
    assert copied(5) == 5


def test_leaves_on_the_host_are_numpy_arrays_but_for_random_keys():
    key = jax.random.key(1)
    uneven = shardc.put(jnp.arange(7), mesh(0, 4), {"data": S(0)})
    a, b, c = on_host([uneven, key, 3])
    assert isinstance(a, np.ndarray)
    np.testing.assert_array_equal(a, np.arange(7))
    assert (b is key, c) == (True, 3)
