"""The part of an array that a process holds; processes are faked by devices that say which one they are of."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import shardc
from shardc import P, Placement, S
from shardc.arrays.place import Place
from shardc.arrays.process_rows import process_rows, whole_shape
from shardc.errors import ArgumentError


def mesh_of(processes, **axes):
    """A mesh as `process_rows` sees it: its devices are of so many processes, in order."""
    n = math.prod(axes.values())
    devices = np.empty(n, object)
    devices[:] = [SimpleNamespace(process_index=i * processes // n) for i in range(n)]
    return FakeMesh(devices.reshape(tuple(axes.values())), tuple(axes))


class FakeMesh:
    def __init__(self, devices, names):
        self.devices, self.axis_names, self.shape = devices, names, dict(zip(names, devices.shape, strict=True))


MESH = mesh_of(2, data=4, model=2)


def parts(placement, rank, mesh=MESH, processes=2):
    return {k: process_rows(mesh, Placement(placement), rank, k) for k in range(processes)}


@pytest.mark.parametrize(
    ("placement", "pieces"),
    [
        ({"data": S(0)}, [((0, 1), (0,)), ((2, 3), (0,))]),
        ({"model": S(0)}, [((0, 1), (0,))] * 2),
        ({"data": S(0), "model": S(0)}, [((0, 1, 2, 3), (0,)), ((4, 5, 6, 7), (0,))]),
        ({"model": S(0), "data": S(0)}, [((0, 1, 4, 5), (0,)), ((2, 3, 6, 7), (0,))]),
        ({"data": S(1), "model": S(0)}, [((0, 1), (0, 1)), ((0, 1), (2, 3))]),
        ({"data": P("sum"), "model": S(1)}, [((0,), (0, 1))] * 2),
    ],
)
def test_pieces(placement, pieces):
    assert [p.pieces for p in parts(placement, 2).values()] == pieces


def test_shapes_and_slices_of_an_uneven_split():
    found = parts({"data": S(0)}, 2)
    assert [p.shape((7, 3)) for p in found.values()] == [(4, 3), (3, 3)]
    assert [p.slices((7, 3)) for p in found.values()] == [(slice(0, 4), slice(0, 3)), (slice(4, 7), slice(0, 3))]
    assert [p.shape((1, 3)) for p in found.values()] == [(1, 3), (0, 3)]
    apart = process_rows(MESH, Placement({"model": S(0), "data": S(0)}), 1, 0)
    assert apart.slices((16,)) is None
    assert apart.shape((16,)) == (8,)
    assert apart.slices((2,)) == (slice(0, 2),)
    assert apart.slices((1,)) == (slice(0, 1),)


@pytest.mark.parametrize("size", range(20))
@pytest.mark.parametrize(
    "placement", [{"data": S(0)}, {"data": S(0), "model": S(0)}, {"model": S(0), "data": S(0)}, {}]
)
def test_the_whole_is_found_from_the_parts(size, placement):
    found = parts(placement, 1)
    assert whole_shape(found, {k: p.shape((size,)) for k, p in found.items()}) == ((size,), [])


def test_parts_that_make_no_whole():
    found = parts({"data": S(0)}, 2)
    assert whole_shape(found, {0: (4, 2), 1: (5, 2)})[1] == [
        "dimension 0: process 0 has 4, process 1 has 5; of 9 elements in 4 pieces process 0 must have 6, process 1 "
        "must have 3"
    ]
    assert whole_shape(found, {0: (4, 2), 1: (4, 3)})[1] == [
        "dimension 1: process 0 has 2, process 1 has 3; processes that hold the same pieces must have equally many "
        "elements"
    ]
    assert whole_shape(found, {0: (4, 2), 1: (4,)})[1] == [
        "the parts differ in rank: process 0: (4, 2), process 1: (4,)"
    ]


def test_three_processes_of_which_two_hold_the_same():
    mesh = mesh_of(4, data=2, copy=2)
    found = parts({"data": S(0)}, 1, mesh, 4)
    assert [p.pieces for p in found.values()] == [((0,),), ((0,),), ((1,),), ((1,),)]
    assert whole_shape(found, {0: (3,), 1: (3,), 2: (2,), 3: (2,)}) == ((5,), [])


def test_a_part_that_is_no_rectangle():
    mesh = mesh_of(2, data=2, model=2)
    mesh.devices.flat[:] = [SimpleNamespace(process_index=k) for k in (0, 1, 1, 0)]
    with pytest.raises(ArgumentError, match="the devices of process 0 hold no rectangular part of an array at"):
        process_rows(mesh, Placement({"data": S(0), "model": S(1)}), 2, 0)


def test_one_process_puts_its_part_as_the_whole():
    mesh, x = shardc.make_mesh(data=4, model=2), np.arange(26.0, dtype=np.float32).reshape(13, 2)
    for placement in ({"data": S(0)}, {"data": S(0), "model": S(1)}, {"data": P("sum"), "model": S(0)}, {}):
        place = Place(jax.typeof(x), mesh, Placement(placement))
        got = place.made_of(process_rows(mesh, Placement(placement), 2, 0).cut(x, place))
        want = shardc.put(x, mesh, placement)
        got, want = (getattr(a, "physical", a) for a in (got, want))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
