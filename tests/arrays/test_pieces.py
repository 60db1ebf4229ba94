"""Sharded arrays as bytes and back: every placement, replicated pieces once, types that NumPy does not have."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardc
from shardc import compat
from shardc.arrays.pieces import (
    assemble,
    from_bytes,
    on_host,
    pack,
    pack_array,
    piece_numbers,
    pieces_of_process,
    unpack_array,
    words,
)

SPECS = [(), ("a",), (None, "b"), ("b", "a"), (("a", "b"),), (("b", "a"), None)]


@pytest.fixture
def mesh():
    return shardc.make_mesh(a=2, b=4)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16, np.complex64])
def test_there_and_back(mesh, spec, dtype):
    x = np.random.default_rng(0).integers(0, 2, (8, 16)).astype(dtype)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    index, held = piece_numbers(sharding, x.shape)
    assert len(held) == 8 and set(held) == set(range(len(index)))
    numbers, buffers = pack(jax.device_put(x, sharding), sharding, pieces_of_process(sharding, x.shape, 0))
    assert sorted(numbers) == list(range(len(index)))
    assert sum(b.nbytes for b in buffers) == x.nbytes  # copies of a piece are sent once
    pieces = dict(zip(numbers, buffers, strict=True))
    back = assemble(pieces, sharding, x.shape, x.dtype)
    assert back.sharding == sharding and back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back), x)
    np.testing.assert_array_equal(on_host(pieces, sharding, x.shape, x.dtype), x)


def test_only_what_is_wanted(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("b"))
    numbers, buffers = pack(jax.device_put(np.arange(8), sharding), sharding, {1, 3})
    assert sorted(numbers) == [1, 3]
    got = {n: from_bytes(b, (2,), jnp.arange(8).dtype).tolist() for n, b in zip(numbers, buffers, strict=True)}
    assert got == {1: [2, 3], 3: [6, 7]}


@pytest.mark.parametrize("shape", [(), (0, 4), (8, 0)])
def test_scalars_and_empty_arrays(mesh, shape):
    sharding = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(np.ones(shape, np.float32), sharding)
    numbers, buffers = pack(x, sharding, {0})
    back = assemble(dict(zip(numbers, buffers, strict=True)), sharding, shape, np.dtype(np.float32))
    np.testing.assert_array_equal(np.asarray(back), np.ones(shape, np.float32))


def test_random_keys(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("b"))
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), sharding)
    shape = (8, *compat.words_of_keys(keys.dtype))
    numbers, buffers = pack(keys, sharding, set(range(4)))
    back = assemble(dict(zip(numbers, buffers, strict=True)), sharding, shape, np.dtype(np.uint32))
    again = compat.keys_of_words(back, keys.dtype)
    assert again.dtype == keys.dtype
    np.testing.assert_array_equal(np.asarray(words(again)), np.asarray(words(keys)))


@pytest.mark.parametrize("x", [np.float32(3), np.arange(6).reshape(2, 3).T, np.zeros((0, 2), ml_dtypes.bfloat16)])
def test_letters(x):
    about, buffers = pack_array(x)
    back = unpack_array((about, buffers))
    assert back.dtype == x.dtype and back.shape == x.shape
    np.testing.assert_array_equal(back, x)
