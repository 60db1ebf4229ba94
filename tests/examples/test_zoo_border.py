"""What comes back of models of the zoo whose state is split unevenly: each reader gets the logical arrays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import NamedSharding

import shardc
from examples.zoo import MODELS
from shardc import S

pytestmark = pytest.mark.usefixtures("compiled_fast")

DEVICES, ROWS = 7, 16
"""Hardly a size divides by it."""


def split_last(tree):
    return jax.tree.map(lambda x: {"data": S(-1)} if x.ndim else {}, tree)


def after_a_step(model):
    """The state after a step of fully sharded data parallelism, the step for one device, and a batch."""
    zoo = MODELS[model]
    cfg = zoo.configs["test"]
    init_fn, step_fn = zoo.make_step(cfg, lambda fn: fn)
    batch = next(zoo.batches(cfg, ROWS, 0))
    start = jax.jit(init_fn)(jax.random.key(0))
    mesh = shardc.make_mesh(data=DEVICES)
    rows = jax.tree.map(lambda x: {"data": S(0)} if np.ndim(x) else {}, batch)
    step = shardc.function(
        step_fn, mesh=mesh, in_placements=(*split_last(start), rows), donate_argnums=tuple(range(len(start)))
    )
    *state, _ = step(*jax.tree.map(np.asarray, start), batch)
    return tuple(state), step_fn, batch


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # orbax, of a checkpoint without a target
def test_what_comes_back_is_the_logical_state(model, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    state, step_fn, batch = after_a_step(model)
    leaves, want = jax.tree.leaves(state), jax.tree.map(np.asarray, state)
    placed = [x for x in leaves if isinstance(x, shardc.PlacedArray)]
    assert len(placed) > len(leaves) / 2
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(np.shape, want)
    assert sum(x.size for x in leaves) == sum(x.size for x in jax.tree.leaves(want))
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    norm = math.sqrt(sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in floats))
    np.testing.assert_allclose(optax.tree.norm(floats), norm, rtol=1e-5)
    written = serialization.to_bytes(leaves)  # flax writes no modules of equinox
    assert written == serialization.to_bytes(jax.tree.leaves(want))
    again = serialization.from_bytes(leaves, written)
    assert all(np.array_equal(x, y) for x, y in zip(again, jax.tree.leaves(want), strict=True))

    loss = jax.jit(lambda *args: step_fn(*args)[-1])
    np.testing.assert_allclose(loss(*state, batch), loss(*want, batch), rtol=2e-4)

    other = NamedSharding(jax.make_mesh((2,), ("rows",)), jax.P())
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other), state)
        found = saver.restore(tmp_path / "state", target)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert x.sharding == other
        np.testing.assert_array_equal(x, y)
