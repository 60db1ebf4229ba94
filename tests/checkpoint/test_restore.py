"""A checkpoint of another program: all differences at once. Leaves of the types that are asked for."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardc import PlacedArray, Placement, StackedArray, make_mesh
from shardc.arrays.place import put_leaf
from shardc.checkpoint import orbax
from shardc.checkpoint.leaves import blocks_of, described, encode, named_leaves
from shardc.checkpoint.manifest import DamagedError, Manifest, RowBlock
from shardc.checkpoint.orbax import OwnersPart, Writer
from shardc.checkpoint.restore import check_fits, restore
from shardc.checkpoint.steps import Checkpoint, parts_by_path
from shardc.errors import CheckpointError


def saved(folder, tree):
    """A checkpoint of a tree."""
    leaves, arrays = [], {}
    for n, (path, x) in enumerate(named_leaves(tree)):
        blocks = blocks_of(n, x)
        leaves.append(described(path, x, [b for b, _ in blocks]))
        arrays.update((b.name, encode(v)) for b, v in blocks)
    if arrays:
        writer = Writer(60)
        writer.start(3, [OwnersPart(folder / "0", arrays)], lambda: None)
        writer.wait()
        writer.check()
        writer.close()
    manifests = (Manifest(3, 0, 1, tuple(leaves), {}, "", "1", "2"),)
    return Checkpoint(3, folder, manifests, parts=parts_by_path(manifests))


def test_all_differences_at_once(tmp_path):
    tree = {"w": np.zeros((4, 3), np.float32), "b": np.zeros(3, np.float32), "n": 3, "mu": np.zeros(2), "o": len}
    asked = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(3, jnp.bfloat16), "n": "three", "mus": np.zeros(2), "o": 1.0}
    with pytest.raises(CheckpointError) as error:
        check_fits(saved(tmp_path, tree), asked)
    assert str(error.value) == (
        f"The checkpoint {tmp_path} is of another program. Give `or_else` the tree that was saved, or another "
        "directory:\n"
        "  b: float32[3] in the checkpoint, bfloat16[3] asked for\n"
        '  mus: float64[2] asked for, not in the checkpoint. Did you mean "mu"?\n'
        "  n: a Python int in the checkpoint, a Python str asked for\n"
        "  o: a Python builtin_function_or_method in the checkpoint, a Python float asked for\n"
        "  w: float32[4,3] in the checkpoint, float32[4,2] asked for\n"
        "  mu: float64[2] in the checkpoint, not asked for"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, jnp.int32(5)),  # a step made an array of it
        (0.0, jnp.float32(5)),
        (False, jnp.bool_(True)),
        (np.zeros(3), jnp.ones(3)),  # float64 is float32 to JAX
        (np.int64(0), jnp.int32(3)),
        (jnp.int32(0), 5),
    ],
)
def test_what_a_step_makes_of_the_first_state_fits_it(tmp_path, before, after):
    checkpoint = saved(tmp_path, {"x": after})
    check_fits(checkpoint, {"x": before})
    np.testing.assert_array_equal(restore(checkpoint, {"x": before})["x"], after)


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        (0, jnp.float32(5)),
        (0.0, jnp.int32(5)),
        (0, jnp.bool_(True)),
        (0, jnp.zeros(1, int)),
        (np.zeros(3), np.zeros(3, np.float16)),
        (jax.random.key(0), jnp.zeros((), np.uint32)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (0, jax.random.key(0)),
        (0, True),
        (0, 0.0),
    ],
)
def test_another_type_does_not_fit(tmp_path, asked, there):
    with pytest.raises(CheckpointError, match=r"x: .* in the checkpoint, .* asked for"):
        check_fits(saved(tmp_path, {"x": there}), {"x": asked})


def test_x64_of_the_calling_thread_counts(tmp_path):
    with jax.enable_x64(True):
        tree = {"x": jnp.arange(3.0) / 3}
        checkpoint = saved(tmp_path, tree)
        got = restore(checkpoint, tree)["x"]
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, tree["x"])


def test_empty_arrays_have_their_types(tmp_path):
    tree = {"a": jnp.zeros((0, 3), jnp.bfloat16), "k": jax.random.split(jax.random.key(0), 0), "n": np.zeros((2, 0))}
    got = restore(saved(tmp_path, tree), tree)
    assert {k: (v.shape, v.dtype) for k, v in got.items()} == {k: (v.shape, v.dtype) for k, v in tree.items()}


def test_a_leaf_of_several_blocks_is_put_together(tmp_path):
    value = np.arange(24, dtype=np.float32).reshape(6, 4)
    writer = Writer(60)
    for owner, rows in ((0, slice(0, 4)), (1, slice(2, 6))):  # rows 2 and 3 are in both
        writer.start(3, [OwnersPart(tmp_path / str(owner), {"0": value[rows] + 100 * owner})], lambda: None)
        writer.wait()
    writer.close()
    leaf = described("w", value)
    blocks = [RowBlock("0", 0, 4)], [RowBlock("0", 2, 6)]
    manifests = tuple(
        Manifest(3, o, 2, (replace(leaf, blocks=tuple(b)),), {}, "", "1", "2") for o, b in enumerate(blocks)
    )
    checkpoint = Checkpoint(3, tmp_path, manifests, parts=parts_by_path(manifests))
    got = restore(checkpoint, {"w": value})["w"]
    np.testing.assert_array_equal(got[:4], value[:4])
    np.testing.assert_array_equal(got[4:], value[4:] + 100)


@pytest.mark.parametrize("other", [np.zeros(3, np.int32), np.zeros((3, 2), np.float32), np.zeros(2, np.float32), None])
def test_a_stored_array_of_another_type_is_damage(tmp_path, other):
    """As of a writer that has a bug; None: there is no array of that name."""
    tree = {"a": np.zeros(3, np.float32), "b": other}
    found = saved(tmp_path, tree)
    a, b = found.parts["a"][0], found.parts.get("b")
    changed = replace(found, parts={**found.parts, "a": (replace(a, name=b[0].name if b else "9"),)})
    with pytest.raises(DamagedError, match=r"of another type than a: float32\[3\]|cannot be read"):
        restore(changed, tree)


def test_each_element_that_is_needed_is_read_once(tmp_path, monkeypatch):
    """At any placement one process reads the whole value once, without padding, copies and zeros."""
    value, mesh = np.arange(26, dtype=np.float32).reshape(13, 2), make_mesh(a=4, b=2)
    like = {
        text: put_leaf(value, mesh, Placement.parse(text))
        for text in ("{}", "{a: S(0)}", "{a: S(0), b: S(1)}", "{a: P(sum), b: S(1)}", "{b: P(sum)}")
    }
    like |= {"sharded": jax.device_put(value, jax.NamedSharding(mesh, jax.P(None, "b"))), "host": value}
    rows = [
        put_leaf(r, mesh, Placement.parse("{a: S(0)}")) for r in (value[:8], value[8:])
    ]  # of plain and of uneven ones
    rows = [
        r if isinstance(r, PlacedArray) else PlacedArray(r, r.shape, Placement.parse("{a: S(0)}"), mesh) for r in rows
    ]
    like |= {"stacked": StackedArray(rows), "none": put_leaf(value[:0], mesh, Placement.parse("{a: S(0)}"))}
    checkpoint = saved(tmp_path, {name: np.asarray(x) for name, x in like.items()})
    read, real = Counter(), orbax.read

    def counted(folder, name, index):
        found = real(folder, name, index)
        read[name] += found.size
        return found

    monkeypatch.setattr(orbax, "read", counted)
    got = restore(checkpoint, like)
    for n, (name, x) in enumerate(named_leaves(like)):
        assert read[str(n)] == x.size and type(got[name]) is type(x)
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(x))
