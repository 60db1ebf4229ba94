"""Leaves as they are stored: paths, types, blocks of rows."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

from shardc import PlacedArray, Placement, S, StackedArray, make_mesh
from shardc.arrays.place import put_leaf
from shardc.arrays.remote_array import RemoteArray
from shardc.checkpoint.leaves import (
    blocks_of,
    check_savable,
    decode,
    described,
    dtype_text,
    encode,
    homes_beside,
    is_remote,
    named_leaves,
    stored_dtype,
    value_of,
)
from shardc.checkpoint.manifest import RowBlock, StoredLeaf
from shardc.errors import CheckpointError
from shardc.machine.devices import RemoteDevice

DTYPES = [
    *(np.dtype(t) for t in ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", ">f4")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.float4_e2m1fn)),
    *map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)),
]


def elsewhere(process):
    """A mesh of another JAX runtime."""
    return Mesh(np.array([RemoteDevice(process, i, "cpu", "cpu") for i in range(4)]), ("a",))


def far(shape, mesh):
    return RemoteArray(jax.ShapeDtypeStruct(shape, np.float32), Placement({}), mesh)


def bits(x):
    return np.asarray(x).astype(np.asarray(x).dtype.newbyteorder("=")).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_host_arrays_come_back_to_the_bit(dtype):
    x = np.array([0, 1, 1, 0]).astype(dtype)
    stored = encode(x)
    back = decode(np.asarray(stored), dtype_text(dtype))
    assert stored is not x and stored.dtype == stored_dtype(dtype.newbyteorder("="))
    assert back.dtype == dtype.newbyteorder("=") and bits(back) == bits(x)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.bool_, np.int32])
def test_device_arrays_stay_on_their_devices(dtype):
    mesh = make_mesh(a=4)
    x = jax.device_put(np.array([0, 1, 1, 0]).astype(dtype), jax.NamedSharding(mesh, jax.P("a")))
    stored = encode(x)
    assert isinstance(stored, jax.Array) and stored.sharding.is_equivalent_to(x.sharding, 1)
    assert bits(decode(np.asarray(stored), dtype_text(x.dtype))) == bits(x)


def test_nan_and_the_sign_of_zero_stay():
    x = np.array([np.nan, -0.0, np.inf]).astype(ml_dtypes.float8_e5m2)
    assert bits(decode(encode(jnp.asarray(x)), "float8_e5m2")) == bits(x)


def test_keys_are_stored_as_words():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    assert encode(keys).dtype == np.uint32 and encode(keys).shape == (3, 4)
    assert described("k", keys) == StoredLeaf("k", "array", "key<rbg>", (3,))


@pytest.mark.parametrize("placement", [Placement({"a": S(0)}), Placement.parse("{a: P(sum)}"), Placement({"a": S(1)})])
def test_placed_arrays_are_stored_as_their_value(placement):
    value = np.arange(35, dtype=np.float32).reshape(5, 7)
    placed = put_leaf(value, make_mesh(a=4), placement)
    assert isinstance(placed, PlacedArray)
    stored = encode(placed)
    assert type(stored) is not PlacedArray
    np.testing.assert_array_equal(np.asarray(stored), value)


def test_pieces_of_a_stack_are_blocks_of_rows():
    meshes = [jax.sharding.Mesh(jax.devices()[i : i + 2], ("a",)) for i in (0, 2)]
    value = np.arange(15, dtype=np.float32).reshape(5, 3)
    here, there = (put_leaf(v, m, Placement({"a": S(0)})) for v, m in zip((value[:3], value[3:]), meshes, strict=True))
    there = there if isinstance(there, PlacedArray) else PlacedArray(there, (2, 3), Placement({"a": S(0)}), meshes[1])
    found = blocks_of(7, StackedArray([here, there]))
    assert [b for b, _ in found] == [RowBlock("7.0", 0, 3), RowBlock("7.1", 3, 5)]
    np.testing.assert_array_equal(np.concatenate([encode(x) for _, x in found]), value)
    (block, _), *rest = blocks_of(7, StackedArray([far((3, 3), meshes[0]), there]))
    assert block == RowBlock("7.1", 3, 5) and rest == []


def test_what_lives_elsewhere_has_no_blocks():
    x = far((2, 2), make_mesh(a=2))
    assert is_remote(x) and blocks_of(0, x) == []
    assert not is_remote(put_leaf(np.zeros(5), make_mesh(a=2), Placement({"a": S(0)}))) and not is_remote(np.zeros(5))
    assert described("x", x) == StoredLeaf("x", "array", "float32", (2, 2))


@pytest.mark.parametrize("x", [np.zeros((0, 3)), jnp.zeros((3, 0)), 3, "text", object()])
def test_what_is_empty_or_no_array_has_no_blocks(x):
    assert blocks_of(0, x) == []


@pytest.mark.parametrize("x", [True, 3, -(10**30), 0.1, float("inf"), 1 - 2j, "text"])
def test_numbers_and_texts_stand_in_the_manifest(x):
    leaf = described("x", x)
    back = value_of(leaf)
    assert leaf.kind == "value" and type(back) is type(x) and back == x


def test_nan_stands_in_the_manifest():
    assert np.isnan(value_of(described("x", float("nan"))))


def test_other_leaves_are_static():
    assert described("f", len) == StoredLeaf("f", "static", "builtin_function_or_method")


def test_paths():
    tree = {"a": [np.zeros(2), {"b": 1}], "flax": linen.Partitioned(jnp.zeros(2), ("x",)), "none": None}
    assert [p for p, _ in named_leaves(tree)] == ["a/0", "a/1/b", "flax"]
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert [p for p, _ in named_leaves(nnx.state(module))] == ["bias", "kernel"]


def test_equal_paths_are_told_apart():
    assert [p for p, _ in named_leaves({"a": {"b": 1}, "a/b": 2})] == ["a/b", "a/b#2"]


def test_arrays_that_cannot_be_saved_are_all_named():
    pairs = [("a", np.array(["x"])), ("b", np.zeros(2)), ("c/d", np.array([None])), ("e", np.zeros(2, "M8[s]"))]
    with pytest.raises(CheckpointError) as error:
        check_savable([*pairs, ("f", np.zeros(1, np.longdouble)), ("k", jax.random.key(0))])
    assert str(error.value) == (
        "Arrays of these types cannot be saved; keep them as numbers, or out of the state:\n"
        "  a: ndarray of <U1\n  c/d: ndarray of object\n  e: ndarray of datetime64[s]\n  f: ndarray of float128"
    )


def test_leaves_that_other_processes_of_an_island_have():
    x = far((2, 2), elsewhere(1))
    assert homes_beside([("w", x), ("n", 3)], [0]) == {}
    assert homes_beside([("v", np.zeros(2)), ("w", x)], [0, 1]) == {"1": [1]}
