"""Leaves of a call's arguments: what is known of them, and copies of them on one device."""

from __future__ import annotations

from typing import Any

import jax

from shardc import compat
from shardc.arrays.fetch import values
from shardc.arrays.placed import is_placed, leaf_aval
from shardc.passes.trace.pins import Leaf
from shardc.passes.trace.trace import is_array
from shardc.sbp.signature import is_extended


def leaf_of(path: str, inner: str, x: Any) -> Leaf | None:
    if not is_array(x):
        return None
    aval = leaf_aval(x)
    return Leaf(path, inner, tuple(aval.shape), aval.dtype)


def abstract(x: Any) -> Any:
    """An array's shape, dtype and weak type in its place; what is no array as it is."""
    if not is_array(x):
        return x
    aval = leaf_aval(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def on_one_device(x: Any) -> Any:
    """An array of several devices, as JAX puts it on one."""
    if not isinstance(x, jax.Array) or isinstance(x, compat.Tracer):
        return x
    if not is_placed(x) and len(x.sharding.device_set) == 1:
        return x
    return jax.numpy.asarray(values(x)) if not is_extended(x.dtype) else values(x)
