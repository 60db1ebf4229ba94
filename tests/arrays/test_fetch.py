"""`shardc.fetch`: the values of a pytree's arrays on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import shardc
from shardc import P, S


def test_values_of_arrays_wherever_they_are():
    mesh = shardc.make_mesh(a=8)
    x = np.arange(13.0, dtype=np.float32)
    tree = {
        "sharded": shardc.put(np.arange(16), mesh, {"a": S(0)}),
        "uneven": shardc.put(x, mesh, {"a": S(0)}),
        "partial": shardc.put(x, mesh, {"a": P("sum")}),
        "device": jnp.arange(3),
    }
    got = shardc.fetch(tree)
    assert all(type(v) is np.ndarray for v in got.values())
    np.testing.assert_array_equal(got["sharded"], np.arange(16))
    np.testing.assert_array_equal(got["uneven"], x)
    np.testing.assert_array_equal(got["partial"], x)
    np.testing.assert_array_equal(got["device"], np.arange(3))


def test_other_leaves_stay():
    host = np.ones(2)
    got = shardc.fetch({"name": "w", "count": 3, "host": host, "none": None})
    assert (got["name"], got["count"], got["none"]) == ("w", 3, None)
    assert got["host"] is host


def test_keys_come_on_one_device():
    keys = jax.random.split(jax.random.key(1), 8)
    placed = shardc.put(keys, shardc.make_mesh(a=8), {"a": S(0)})
    got = shardc.fetch(placed)
    assert len(got.devices()) == 1
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))


def test_keys_with_padding():
    mesh = shardc.make_mesh(data=8)
    keys = jax.random.split(jax.random.key(1), 11)
    placed = shardc.put(keys, mesh, {"data": shardc.S(0)})
    assert isinstance(placed, shardc.PlacedArray)
    found = shardc.fetch(placed)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))
