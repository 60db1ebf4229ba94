"""Where an array is: what its devices hold, and how it gets there and leaves."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shardc.arrays.place import Place, place_of
from shardc.arrays.placed import PlacedArray, StackedArray
from shardc.sbp.placement import Placement, S

X = np.arange(24, dtype=np.float32).reshape(6, 4)


def mesh(first, count=4):
    return Mesh(np.array(jax.devices()[first : first + count]), ("data",))


@pytest.mark.parametrize("placement", [{}, {"data": S(1)}, {"data": S(0)}])
def test_an_array_enters_and_leaves(placement):
    at = Place(jax.typeof(X), mesh(4), Placement(placement))
    physical = at.enter(X)
    assert (physical.sharding == at.sharding and at.enter(physical) is physical) or not at.is_plain
    np.testing.assert_array_equal(at.value(physical), X)
    left = at.leave(physical)
    assert isinstance(left, PlacedArray) == (placement == {"data": S(0)}), "6 rows over 4 devices"
    np.testing.assert_array_equal(np.asarray(left), X)


def test_rows_on_two_meshes_enter_a_third():
    ends = [Place(jax.typeof(x), mesh(i, 2), Placement({"data": S(0)})) for i, x in ((0, X[:3]), (2, X[3:]))]
    rows = StackedArray([at.leave(at.enter(x)) for at, x in zip(ends, (X[:3], X[3:]), strict=True)])
    first = Place(jax.typeof(X), rows.mesh, rows.placement)
    for there in (first, Place(jax.typeof(X), mesh(4), Placement({"data": S(0)}))):
        np.testing.assert_array_equal(there.value(there.enter(rows)), X)


def test_the_place_of_an_array():
    there = Place(jax.typeof(X), mesh(4), Placement({"data": S(0)}))
    assert place_of(there.leave(there.enter(X))) == there
    assert place_of(X).on_host and place_of(X).processes == (None,)
