"""`shardc.fetch`: the values of arrays, wherever they live."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardc.arrays.placed import is_placed


def fetch(tree: Any) -> Any:
    """The values of a pytree's arrays on the host, wherever they live: on a mesh, or on the stages of a pipeline.

    Args:
      tree: pytree of arrays; what is no array is left as it is.

    Returns:
      The tree with NumPy arrays; random keys, which NumPy has no type for, as jax.Arrays on one device.

    Example:
      >>> fetch({"w": jax.numpy.arange(3), "name": "w"})
      {'w': array([0, 1, 2], dtype=int32), 'name': 'w'}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_placed)
    for x in leaves:
        if isinstance(x, jax.Array) and not _is_key(x):
            x.copy_to_host_async()  # start all copies before waiting for the first
    return jax.tree.unflatten(structure, [_value(x) for x in leaves])


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _value(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if _is_key(x):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=jax.random.key_impl(x))
    return np.asarray(x)
