"""Bytes of a checkpoint that flip, go or are cut off: the one before is taken, whichever file it is."""

import re
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc import Placement, S, make_mesh
from shardc.arrays.place import put_leaf
from tests.checkpoint.test_targets import words

PARTS = 10
KINDS = {
    "0.json", "0/_METADATA", "0/_sharding", "0/manifest.ocdbt", "0/array_metadatas/process_0",
    "0/ocdbt.process_0/manifest.ocdbt", "0/ocdbt.process_0/d/*", "0/d/*",
}  # fmt: skip
"""Files of a checkpoint; newer releases of orbax have more."""


def state(i):
    """Arrays large and small, on a mesh and on the host, whose values say of which step they are."""
    k = np.random.default_rng(i)
    table = k.normal(size=(13, 6)).astype(np.float32)
    return {
        "small": [k.normal(size=(64, 8)).astype(np.float32) for _ in range(2)],
        "large": k.normal(size=(512, 256)).astype(np.float32),
        "zeros": np.full(1000, i, np.int32),
        "uneven": put_leaf(table, make_mesh(a=4), Placement({"a": S(0)})),
        "bfloat16": jnp.arange(9, dtype=jnp.bfloat16) + i,
        "keys": jax.random.split(jax.random.key(i), 3),
        "n": i,
    }


def is_same(a, b):
    return all(np.array_equal(words(x), words(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def changed(data, random):
    """The bytes with a bit that has flipped, without one of them, or cut."""
    at = random.randrange(len(data))
    flipped = bytes([data[at] ^ 1 << random.randrange(8)])
    return random.choice([data[:at] + flipped + data[at + 1 :], data[:at] + data[at + 1 :], data[:at]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_flips_and_cuts(tmp_path, part):
    """Never a wrong value, never an error: the checkpoint before is taken, and the note names the file."""
    with shardc.checkpoints(tmp_path) as saved:
        for i in range(2):
            saved.step(i, state(i))
    folder, first, random = tmp_path / "1", state(0), Random(part)
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    assert {re.sub("[0-9a-f]{32}", "*", n) for n in files} >= KINDS
    for n in range(1000 // PARTS):
        name = list(files)[n % len(files)]
        data = files[name].read_bytes()
        files[name].write_bytes(changed(data, random))
        with shardc.checkpoints(tmp_path) as saved:
            got, start = saved.last(or_else=first)
        assert start == 1 and is_same(got, first), name
        assert saved.note.startswith(f"The checkpoint of step 1 is not complete: {name} ")
        files[name].write_bytes(data)
    with shardc.checkpoints(tmp_path) as saved:
        got, start = saved.last(or_else=first)
    assert (start, saved.note) == (2, "") and is_same(got, state(1))
