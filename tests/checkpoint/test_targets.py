"""Targets: each placement is made of just the pieces that it needs, as `put` makes it of the whole array."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc import PlacedArray, Placement, S, StackedArray, make_mesh
from shardc.arrays.place import put_leaf
from shardc.arrays.remote_array import Arrival, RemoteArray
from shardc.checkpoint.leaves import described
from shardc.checkpoint.targets import Given, placed_like, target_of
from shardc.errors import ArgumentError, PlacementError
from tests.checkpoint.test_leaves import far


def words(x):
    x = np.asarray(x) if isinstance(x, int) else x
    return np.asarray(jax.random.key_data(x)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def made(target, value):
    """The leaf of a target, given just the pieces that it asks for."""
    value = words(value)
    return target.made_of({at: np.asarray(value[tuple(slice(*pair) for pair in at)]) for at in target.needs()})


def check_placed(value, placement, mesh):
    like = put_leaf(value, mesh, placement)
    got = made(target_of(like, described("x", like)), value)
    assert type(got) is type(like) and got.sharding == like.sharding and got.dtype == like.dtype
    if isinstance(like, PlacedArray):
        assert (got.placement, got.mesh, got.shape) == (like.placement, like.mesh, like.shape)
        like, got = like.physical, got.physical
    np.testing.assert_array_equal(words(got), words(like))


SBPS = [None, S(0), S(1), "P"]


def placement_of(a, b):
    said = {axis: sbp for axis, sbp in (("a", a), ("b", b)) if sbp is not None}
    return Placement.parse("{" + ", ".join(f"{k}: {'P(sum)' if v == 'P' else v}" for k, v in said.items()) + "}")


@given(st.sampled_from(list(product(SBPS, SBPS))), st.tuples(st.integers(0, 9), st.integers(0, 9)))
@settings(max_examples=60, deadline=None)
def test_every_placement_of_every_shape(sbps, shape):
    value = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape) + 1
    check_placed(value, placement_of(*sbps), make_mesh(a=4, b=2))


@pytest.mark.parametrize("size", [1, 5, 8])
def test_keys(size):
    check_placed(jax.random.split(jax.random.key(1, impl="rbg"), size), Placement({"a": S(0)}), make_mesh(a=4))


def test_a_partial_scalar():
    check_placed(np.float32(3), Placement.parse("{a: P(sum)}"), make_mesh(a=4))


def test_a_shard_asks_for_its_own_rows_only():
    mesh = make_mesh(a=4)
    like = put_leaf(np.zeros((10, 2)), mesh, Placement({"a": S(0)}))
    assert target_of(like, described("x", like)).needs() == [((i, min(10, i + 3)), (0, 2)) for i in (0, 3, 6, 9)]
    even = put_leaf(np.zeros((8, 2)), mesh, Placement({}))
    assert target_of(even, described("x", even)).needs() == [((0, 8), (0, 2))]


def test_a_stack_asks_for_the_rows_of_its_pieces():
    meshes = [jax.sharding.Mesh(jax.devices()[i : i + 2], ("a",)) for i in (0, 2)]
    value = np.arange(18, dtype=np.float32).reshape(6, 3)
    placement = Placement({"a": S(0)})
    first = put_leaf(value[:3], meshes[0], placement)
    second = put_leaf(value[3:], meshes[1], placement)
    like = StackedArray([first, second])
    target = target_of(like, described("x", like))
    assert [rows for rows, _ in target.needs()] == [(0, 2), (2, 3), (3, 5), (5, 6)]
    got = made(target, value)
    assert isinstance(got, StackedArray) and got.pieces[1].mesh == meshes[1]
    np.testing.assert_array_equal(np.asarray(got), value)
    elsewhere = far((3, 3), meshes[0])
    target = target_of(StackedArray([elsewhere, second]), described("x", like))
    assert [rows for rows, _ in target.needs()] == [(3, 5), (5, 6)]
    assert made(target, value).pieces[0] is elsewhere


def test_what_lives_elsewhere_is_not_read():
    x = far((2,), make_mesh(a=2))
    target = target_of(x, described("x", x))
    assert isinstance(target, Given) and target.needs() == [] and target.made_of({}) is x


def test_a_small_array_that_lives_elsewhere_has_the_saved_value():
    x = RemoteArray(jax.typeof(jnp.zeros(2)), Placement({}), make_mesh(a=2), Arrival(lambda: np.zeros(2)))
    value = np.array([1, 2], np.float32)
    got = made(target_of(x, described("x", x)), value)
    assert type(got) is RemoteArray and got.mesh == x.mesh
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), np.float32(2), np.array(3, np.int8)])
def test_arrays_of_the_host_stay_there(value):
    got = made(target_of(value, described("x", value)), value)
    assert type(got) is type(value) and got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)
    if isinstance(got, np.ndarray):
        assert got.flags.writeable


def test_uncommitted_arrays_stay_uncommitted():
    x = jnp.arange(3)
    got = made(target_of(x, described("x", x)), x)
    assert not got.committed and got.weak_type is False
    put = jax.device_put(x, jax.devices()[3])
    got = made(target_of(put, described("x", put)), x)
    assert got.committed and got.devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
    "place", [lambda x: x, lambda x: jax.device_put(x, jax.NamedSharding(make_mesh(a=4), jax.P()))]
)
def test_weak_types_stay(place):
    """The next call of a jitted function is no other call."""
    f = jax.jit(lambda x: x + 1)
    x = f(place(jnp.asarray(1.0)))
    f(x)
    assert x.weak_type
    size = f._cache_size()
    got = made(target_of(x, described("x", x)), x)
    assert got.weak_type and got.sharding == x.sharding and got.committed == x.committed
    f(got)
    assert f._cache_size() == size


def test_numbers_of_the_manifest():
    assert made(target_of(0, described("x", 7)), 0) == 7
    got = made(target_of(np.float32(0), described("x", 2.5)), 0)
    assert type(got) is np.float32 and got == 2.5
    mesh = make_mesh(a=4)
    got = made(target_of(jax.device_put(jnp.int32(0), jax.NamedSharding(mesh, jax.P())), described("x", 7)), 0)
    assert int(got) == 7 and got.sharding.mesh == mesh


def test_an_array_in_place_of_a_number():
    x = jax.jit(lambda n: n + 1)(6)
    got = made(target_of(0, described("x", x)), x)
    assert isinstance(got, jax.Array) and got.weak_type and int(got) == 7 and not got.committed


def test_placements_of_what_is_only_described():
    mesh = make_mesh(a=4)
    shapes = {"w": jax.ShapeDtypeStruct((10, 2), np.float32), "n": jax.ShapeDtypeStruct((8,), np.int32), "k": 3}
    like = placed_like(shapes, mesh, {"w": {"a": S(0)}, "n": {"a": S(0)}, "k": None})
    value = np.arange(20, dtype=np.float32).reshape(10, 2)
    got = made(target_of(like["w"], described("w", value)), value)
    assert isinstance(got, PlacedArray) and got.placement == Placement({"a": S(0)})
    n = made(target_of(like["n"], described("n", np.arange(8, dtype=np.int32))), np.arange(8, dtype=np.int32))
    assert n.sharding == jax.NamedSharding(mesh, jax.P("a")) and like["k"] == 3


def test_bad_placements():
    shapes = {"w": jax.ShapeDtypeStruct((), np.float32)}
    with pytest.raises(PlacementError, match="placements, mesh"):
        placed_like(shapes, make_mesh(a=4), {"w": {"a": S(0)}})
    with pytest.raises(ArgumentError, match="needs a mesh with devices"):
        placed_like(shapes, make_mesh(a=4, topology="v5p:2x2x1"), {"w": {}})
