"""Equations that passes add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from shardc.compat import Atom, Eqn, Var, literal, new_eqn, shaped_array


def add_eqn(a: Atom, b: Atom, out: Var, like: Eqn | None) -> Eqn:
    """`out = add a b`, with the source line of `like`."""
    return new_eqn([a, b], [out], jax.lax.add_p, {}, like)


def full_eqn(value: Any, out: Var) -> Eqn:
    """`out = full value`."""
    shape = tuple(out.aval.shape)
    start = literal(np.asarray(value, out.aval.dtype), shaped_array((), out.aval.dtype))
    params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
    return new_eqn([start], [out], jax.lax.broadcast_in_dim_p, params, None)


def copy_eqn(x: Var, out: Var) -> Eqn:
    """`out = copy x`."""
    return new_eqn([x], [out], jax.lax.copy_p, {}, None)


def slice_at_eqn(stack: Var, index: Var, out: Var) -> Eqn:
    """`out = stack[index:index + 1]`."""
    zero = literal(np.int32(0), shaped_array((), np.dtype("int32")))
    starts = [index, *([zero] * (len(stack.aval.shape) - 1))]
    return new_eqn([stack, *starts], [out], jax.lax.dynamic_slice_p, {"slice_sizes": tuple(out.aval.shape)}, None)


def put_at_eqn(stack: Var, row: Var, index: Var, out: Var) -> Eqn:
    """`out = stack with stack[index:index + 1] = row`."""
    zero = literal(np.int32(0), shaped_array((), np.dtype("int32")))
    starts = [index, *([zero] * (len(stack.aval.shape) - 1))]
    return new_eqn([stack, row, *starts], [out], jax.lax.dynamic_update_slice_p, {}, None)


def squeeze_eqn(x: Var, out: Var) -> Eqn:
    """`out = x[0]`; `x` has one row."""
    return new_eqn([x], [out], jax.lax.squeeze_p, {"dimensions": (0,)}, None)


def unsqueeze_eqn(x: Atom, out: Var) -> Eqn:
    """`out = x[None]`."""
    dims = tuple(range(1, len(out.aval.shape)))
    params = {"shape": tuple(out.aval.shape), "broadcast_dimensions": dims, "sharding": None}
    return new_eqn([x], [out], jax.lax.broadcast_in_dim_p, params, None)


def rows_eqn(x: Var, start: int, stop: int, out: Var) -> Eqn:
    """`out = x[start:stop]`."""
    rest = tuple(x.aval.shape[1:])
    params = {"start_indices": (start, *(0 for _ in rest)), "limit_indices": (stop, *rest), "strides": None}
    return new_eqn([x], [out], jax.lax.slice_p, params, None)


def concat_eqn(parts: Sequence[Atom], out: Var) -> Eqn:
    """`out = concatenate parts`, of rows."""
    return new_eqn(parts, [out], jax.lax.concatenate_p, {"dimension": 0}, None)


_JOINS: Final = {"sum": jax.lax.add_p, "max": jax.lax.max_p, "min": jax.lax.min_p}


def join_eqn(op: str, a: Atom, b: Atom, out: Var) -> Eqn:
    """`out = a + b`, or the maximum or minimum of both."""
    return new_eqn([a, b], [out], _JOINS[op], {}, None)
