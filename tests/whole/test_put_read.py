"""`shardc.put(read=)`: each piece is read once, goes to its devices, and is gone before the next one is read."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import ArgumentError, P, PlacementError, S

PLACEMENTS = [
    {}, {"data": S(0)}, {"data": S(0), "model": S(1)}, {"model": S(0), "data": S(0)}, {"data": S(1)},
    {"data": P("sum")}, {"data": S(1), "model": P("sum")},
]  # fmt: skip


def mesh():
    return shardc.make_mesh(data=4, model=2)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(shardc.Placement(p)))
@pytest.mark.parametrize("shape", [(8, 8), (13, 3), (1, 9), (0, 4)], ids=str)
def test_pieces_make_up_the_array_and_each_is_read_once(shape, placement):
    x, asked = np.random.default_rng(0).normal(size=shape).astype(np.float32), []

    def read(path, at):
        asked.append((path, *((s.start, s.stop) for s in at)))
        return x[at]

    made = shardc.put({"w": [like(x)]}, mesh(), placement, read=read)["w"][0]
    np.testing.assert_array_equal(shardc.fetch(made), x)
    assert made.sharding == shardc.put(x, mesh(), placement).sharding
    assert len(asked) == len(set(asked)) and {path for path, *_ in asked} <= {"w/0"}
    assert sum(np.prod([b - a for a, b in box]) for _, *box in asked) == x.size  # no element twice, and none too many


@pytest.mark.sampled(0)
def test_the_host_has_one_piece_at_a_time():
    given = []

    def read(path, at):
        gc.collect()
        assert not any(ref() is not None for ref in given)
        piece = np.full([s.stop - s.start for s in at], len(given), np.float32)
        given.append(weakref.ref(piece))
        return piece

    tree = {"a": jax.ShapeDtypeStruct((16, 4), jnp.float32), "b": jax.ShapeDtypeStruct((13,), jnp.float32)}
    made = shardc.put(tree, mesh(), {"a": {"data": S(0), "model": S(1)}, "b": {"data": S(0)}}, read=read)
    assert len(given) == 12
    assert shardc.fetch(made["a"])[::4, ::2].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_reader_may_use_its_buffer_again():
    buffer = np.empty((4, 1 << 14), np.float32)  # large enough for JAX to take it as it is, if it may

    def read(path, at):
        buffer[:] = at[0].start
        return buffer

    made = shardc.put(jax.ShapeDtypeStruct((16, 1 << 14), jnp.float32), mesh(), {"data": S(0)}, read=read)
    assert np.asarray(made)[:, 0].tolist() == [r // 4 * 4 for r in range(16)]


def test_keys_are_read_as_their_words():
    keys = jax.random.split(jax.random.key(0), 8)
    words = np.asarray(jax.random.key_data(keys))
    made = shardc.put(keys, mesh(), {"data": S(0)}, read=lambda path, at: words[at])
    np.testing.assert_array_equal(jax.random.key_data(made), words)


def test_what_is_no_array_stays_and_types_are_those_of_jax():
    tree = {"name": "w", "w": np.zeros(4)}  # float64, of which JAX makes float32
    made = shardc.put(tree, mesh(), {}, read=lambda path, at: np.ones(4, np.float32))
    assert made["name"] == "w" and made["w"].dtype == np.float32 and float(made["w"].sum()) == 4


def test_mistakes():
    w = jax.ShapeDtypeStruct((8, 2), jnp.float32)

    def fails(error, match, *args, **keywords):
        with pytest.raises(error, match=match):
            shardc.put({"w": w}, mesh(), *args, **keywords)

    fails(ArgumentError, r"w\[0:2, 0:2\] has to be float32\[2, 2\], and read gave float32\[8, 2\]",
          {"data": S(0)}, read=lambda path, at: np.zeros((8, 2), np.float32))  # fmt: skip
    fails(ArgumentError, r"w\[0:8, 0:2\] has to be float32\[8, 2\], and read gave float16\[8, 2\]",
          {}, read=lambda path, at: np.zeros((8, 2), np.float16))  # fmt: skip
    fails(PlacementError, r"w: no placement; say \{\} for a copy on each device", None, read=lambda path, at: 0)
    fails(ArgumentError, "two ways to give a process's part", {}, read=lambda path, at: 0, here=True)
    fails(ArgumentError, "w is a jax.ShapeDtypeStruct, which has no elements; give an array, or read=", {})
    with pytest.raises(KeyError, match="no such tensor"):
        shardc.put({"w": w}, mesh(), {}, read=lambda path, at: {}["no such tensor"])
