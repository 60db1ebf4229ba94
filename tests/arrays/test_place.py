"""Places: an array goes there and comes back with its value, and is made of just the boxes that a process needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from shardc import PlacedArray, Placement, S, StackedArray, make_mesh
from shardc.arrays.place import Place, place_of, put_leaf
from shardc.arrays.placed import leaf_aval
from shardc.compat import shaped_array

PLACEMENTS = [
    "{}", "{a: S(0)}", "{a: S(1), b: S(0)}", "{a: S(0), b: S(0)}", "{b: S(0), a: S(0)}", "{a: P(sum)}",
    "{a: S(0), b: P(sum)}", "{a: P(sum), b: P(sum)}", "{a: P(max), b: S(1)}", "{b: P(min)}",
]  # fmt: skip
WORDS = {"threefry2x32": 2, "rbg": 4}
DTYPES = ["float32", "bfloat16", "int4", "bool", *WORDS]


def array(shape, dtype):
    """Numbers of both signs, or keys."""
    if dtype in WORDS:
        numbers = np.arange(np.prod(shape) * WORDS[dtype], dtype=np.uint32)
        return jax.random.wrap_key_data(numbers.reshape(*shape, WORDS[dtype]), impl=dtype)
    numbers = np.arange(np.prod(shape)).reshape(shape) % 7 - 3
    return jnp.asarray(numbers.astype(jnp.dtype(dtype)))


def words(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def cut(value, needs):
    return {box: words(value)[tuple(slice(*pair) for pair in box)] for box in needs}


def at_home(physical, place):
    return physical.sharding.is_equivalent_to(place.sharding, physical.ndim)


def fits(placement, dtype):
    """Sums of keys and maxima of bools and keys have no meaning, beyond that zeros change nothing."""
    return not ("max" in placement or "min" in placement) or dtype in ("float32", "bfloat16", "int4")


@given(st.sampled_from(PLACEMENTS), st.sampled_from(DTYPES), st.tuples(st.integers(0, 9), st.integers(0, 5)))
@settings(max_examples=40, deadline=None)
def test_there_and_back(placement, dtype, shape):
    if fits(placement, dtype):
        check_there_and_back(placement, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", ["{}", "{a: P(sum)}", "{a: P(sum), b: P(sum)}"])
def test_a_scalar_there_and_back(placement, dtype):
    check_there_and_back(placement, dtype, ())


def check_there_and_back(placement, dtype, shape):
    value = array(shape, dtype)
    place = Place(leaf_aval(value), make_mesh(a=4, b=2), Placement.parse(placement))
    physical = place.enter(value)
    assert physical.shape == place.physical_shape and at_home(physical, place)
    np.testing.assert_array_equal(words(place.value(physical)), words(value))
    there = place.leave(physical)
    assert isinstance(there, PlacedArray) is not place.is_plain
    assert (place_of(there), there.dtype, there.shape) == (place, value.dtype, value.shape)
    assert dtype in WORDS or np.array_equal(np.asarray(there), value)
    assert dtype in WORDS or place.enter(there) is physical  # JAX writes the specs of keys in another way
    made = place.made_of(cut(value, place.needs()))
    assert type(made) is type(there) and made.dtype == value.dtype and at_home(place.enter(made), place)
    np.testing.assert_array_equal(words(place.enter(made)), words(physical))


@pytest.mark.parametrize("placement", ["{}", "{a: S(0)}", "{a: P(sum)}", "{a: P(max)}"])
@pytest.mark.parametrize("shape", [(8,), (13,)])
def test_weak_types_are_restored(placement, shape):
    place = Place(shaped_array(shape, np.dtype(np.float32), True), make_mesh(a=4), Placement.parse(placement))
    made = place.made_of(cut(np.ones(shape, np.float32), place.needs()))
    assert made.weak_type and place.enter(made).sharding == place.sharding
    assert place_of(made) == place


@pytest.mark.parametrize(
    ("shape", "placement", "needed"),
    [
        ((10, 2), "{a: S(0)}", [((0, 3), (0, 2)), ((3, 6), (0, 2)), ((6, 9), (0, 2)), ((9, 10), (0, 2))]),
        ((3,), "{a: S(0), b: S(0)}", [((0, 1),), ((1, 2),), ((2, 3),)]),
        ((4, 6), "{a: P(sum), b: S(1)}", [((0, 4), (0, 3)), ((0, 4), (3, 6))]),
        ((4, 6), "{a: P(max), b: S(1)}", [((0, 4), (0, 3)), ((0, 4), (3, 6))]),
        ((5,), "{}", [((0, 5),)]),
        ((), "{b: P(sum)}", [()]),
        ((0, 3), "{a: S(0)}", []),
    ],
)
def test_each_box_is_needed_once_and_without_padding(shape, placement, needed):
    place = Place(shaped_array(shape, np.dtype(np.float32)), make_mesh(a=4, b=2), Placement.parse(placement))
    assert place.needs() == needed


@pytest.mark.parametrize(
    ("placement", "needed"),
    [("{a: S(0)}", [((4, 6),), ((6, 7),)]), ("{}", [((0, 7),)]), ("{a: P(sum)}", []), ("{a: P(min)}", [((0, 7),)])],
)
def test_the_second_of_two_processes(placement, needed):
    """The first device of a partial sum is of the first process."""
    place = Place(shaped_array((7,), np.dtype(np.float32)), make_mesh(a=4), Placement.parse(placement))
    vars(place)["processes"] = (1, 1, 0, 0)  # this one is process 0
    assert place.needs() == needed


def test_a_place_on_the_host():
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    for place in (Place(leaf_aval(value)), Place(leaf_aval(value), make_mesh(a=4))):  # of a pipeline, on no stage yet
        (box,) = place.needs()
        assert place.on_host and place.made_of({box: value}) is value
    empty = Place(shaped_array((0, 3), np.dtype(np.int8)))
    assert empty.needs() == [] and empty.made_of({}).shape == (0, 3) and empty.made_of({}).dtype == np.int8
    keys = array((2,), "rbg")
    made = Place(leaf_aval(keys)).made_of({((0, 2),): words(keys)})
    assert made.dtype == keys.dtype and (made == keys).all()


@pytest.mark.parametrize("given", PLACEMENTS)
@pytest.mark.parametrize("taken", ["{}", "{a: S(0)}", "{a: P(sum)}"])
def test_from_another_placement_and_mesh(given, taken):
    value = array((6, 3), "float32")
    x = put_leaf(value, make_mesh(a=4, b=2), Placement.parse(given))
    place = Place(x.aval, make_mesh(a=3), Placement.parse(taken))
    np.testing.assert_array_equal(place.value(place.enter(x)), value)


def test_a_stacked_array_is_not_where_its_first_piece_is():
    meshes = [jax.sharding.Mesh(jax.devices()[i : i + 2], ("a",)) for i in (0, 2)]
    split = Placement.parse("{a: S(0)}")
    rows = [put_leaf(np.full((3, 2), i, np.float32), mesh, split) for i, mesh in enumerate(meshes)]
    x = StackedArray(rows)
    place = Place(x.aval, meshes[0], split)
    np.testing.assert_array_equal(place.value(place.enter(x)), np.asarray(x))


@pytest.mark.parametrize("placement", ["{}", "{a: S(0)}", "{a: P(sum)}"])
def test_the_giver_may_write_to_its_memory(placement):
    value = np.ones(9, np.float32)
    place = Place(leaf_aval(value), make_mesh(a=4), Placement.parse(placement))
    there = place.enter(value)
    value[:] = 2
    np.testing.assert_array_equal(place.value(there), np.ones(9))


def test_places_in_words():
    aval, four = jax.ShapeDtypeStruct((8, 3), np.float32), Mesh(np.array(jax.devices()[:4]), ("data",))
    split = Place(aval, four, Placement({"data": S(1)}))
    assert [str(p) for p in (Place(aval), Place(aval, four), split)] == ["host", "its stages", "{data: S(1)}"]


def test_only_what_a_jax_array_can_be_has_a_plain_sharding():
    aval, four = jax.ShapeDtypeStruct((8, 3), np.float32), Mesh(np.array(jax.devices()[:4]), ("data",))
    even, uneven = (Place(aval, four, Placement({"data": S(d)})) for d in (0, 1))
    assert even.plain_sharding.spec == PartitionSpec("data")
    assert [p.plain_sharding for p in (uneven, Place(aval), Place(aval, four))] == [None] * 3
