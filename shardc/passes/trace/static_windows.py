"""Static forms of what reads and writes a window at constants.

    gather x [1], dynamic_slice x 1      -->  slice x
    reshape (broadcast x), of x's shape  -->  x
    conv (pad x 0)                       -->  conv x, with more padding
    scatter x [1] u, dynamic_update_slice x u 1: a `Write`; if x is constant: pad u
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from shardc import compat
from shardc.compat import Atom, Eqn, Var

_COMBINES: Final[Mapping[str, Any]] = {
    "scatter": None, "scatter-add": lax.add, "scatter-sub": lax.sub, "scatter-mul": lax.mul, "scatter-max": lax.max,
    "scatter-min": lax.min,
}  # fmt: skip


class Write(NamedTuple):
    """A window of `x` that is combined with `update`, from `starts` on. `combine` None: overwritten."""

    x: Atom
    update: Atom
    starts: tuple[int, ...]
    combine: Any


def constant(atom: Atom, made: Mapping[Var, Eqn]) -> Any:
    """The value of a few numbers that depend on nothing; None if unknown."""
    if compat.is_literal(atom):
        return np.asarray(atom.val)
    eqn = made.get(atom)
    if eqn is None or math.prod(atom.aval.shape) > 16 or eqn.primitive.name not in _SHAPED:
        return None
    values = [constant(a, made) for a in eqn.invars]
    if any(v is None for v in values):
        return None
    if eqn.primitive.name == "concatenate":
        return np.concatenate(values, eqn.params["dimension"])
    if eqn.primitive.name == "convert_element_type":
        return np.asarray(values[0]).astype(atom.aval.dtype)
    return np.broadcast_to(values[0], atom.aval.shape) if values[0].size == 1 else None


_SHAPED: Final = ("broadcast_in_dim", "concatenate", "convert_element_type", "reshape")


def fill_of(atom: Atom, made: Mapping[Var, Eqn]) -> Atom | None:
    """The scalar that all elements of an array are; None if unknown."""
    eqn = None if compat.is_literal(atom) else made.get(atom)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or eqn.invars[0].aval.shape:
        return None
    return eqn.invars[0]


def is_zero(atom: Atom, made: Mapping[Var, Eqn]) -> bool:
    """Whether a scalar is zero."""
    value = constant(atom, made)
    return value is not None and not np.any(value)


def same_as(eqn: Eqn, made: Mapping[Var, Eqn]) -> Atom | None:
    """The value that an equation only copies; None if it does not."""
    if eqn.primitive.name == "concatenate":
        parts = [a for a in eqn.invars if a.aval.shape[eqn.params["dimension"]]]
        return parts[0] if len(parts) == 1 and not compat.is_literal(parts[0]) else None
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is not None or compat.is_literal(eqn.invars[0]):
        return None
    before = made.get(eqn.invars[0])
    if before is None or before.primitive.name != "broadcast_in_dim" or compat.is_literal(before.invars[0]):
        return None
    x = before.invars[0]
    copies = math.prod(eqn.invars[0].aval.shape) == math.prod(x.aval.shape) > 0
    return x if copies and x.aval.shape == eqn.outvars[0].aval.shape else None


def static_form(eqn: Eqn, made: Mapping[Var, Eqn]) -> Eqn:
    """The equation, or its static form."""
    name = eqn.primitive.name
    if name == "gather":
        return _slice(eqn, _gathered(eqn, made), eqn.params["slice_sizes"])
    if name == "dynamic_slice":
        return _slice(eqn, _clamped(eqn, eqn.invars[1:], made, eqn.outvars[0].aval.shape), eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        return _padded_convolution(eqn, made)
    return eqn


def write_of(eqn: Eqn, made: Mapping[Var, Eqn]) -> Write | None:
    """The write that an equation is; None if its place is not known, or it is none."""
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        x, update, *at = eqn.invars
        starts = _clamped(eqn, at, made, update.aval.shape)
        return None if starts is None else Write(x, update, starts, None)
    if name not in _COMBINES or (name == "scatter" and eqn.params["update_jaxpr"] is not None):
        return None
    x, indices, update = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    plain = not (numbers.inserted_window_dims or numbers.operand_batching_dims)
    starts = _starts(indices, numbers.scatter_dims_to_operand_dims, x, update.aval.shape, made) if plain else None
    if starts is None or eqn.params["mode"] == GatherScatterMode.ONE_HOT:
        return None
    return Write(x, update, starts, _COMBINES[name])


def padded_form(eqn: Eqn, write: Write, made: Mapping[Var, Eqn]) -> Eqn | None:
    """A write into a constant as padding; None if it is none."""
    fill = fill_of(write.x, made)
    adds = eqn.primitive.name == "scatter-add"
    if fill is None or not (write.combine is None or (adds and is_zero(fill, made))):
        return None
    sizes = zip(write.x.aval.shape, write.update.aval.shape, write.starts, strict=True)
    config = tuple((start, n - start - k, 0) for n, k, start in sizes)
    return compat.new_eqn([write.update, fill], eqn.outvars, lax.pad_p, {"padding_config": config}, eqn)


def _slice(eqn: Eqn, starts: Sequence[int] | None, sizes: Sequence[int]) -> Eqn:
    if starts is None:
        return eqn
    limits = tuple(s + n for s, n in zip(starts, sizes, strict=True))
    params = {"start_indices": tuple(starts), "limit_indices": limits, "strides": None}
    return compat.new_eqn(eqn.invars[:1], eqn.outvars, lax.slice_p, params, eqn)


def _gathered(eqn: Eqn, made: Mapping[Var, Eqn]) -> tuple[int, ...] | None:
    numbers = eqn.params["dimension_numbers"]
    if numbers.collapsed_slice_dims or numbers.operand_batching_dims:
        return None
    x, indices = eqn.invars
    return _starts(indices, numbers.start_index_map, x, eqn.params["slice_sizes"], made)


def _starts(
    indices: Atom, mapped: Sequence[int], x: Atom, sizes: Sequence[int], made: Mapping[Var, Eqn]
) -> tuple[int, ...] | None:
    """The corner of one window at a constant index; None if there are several, or it lies outside."""
    at = constant(indices, made) if len(indices.aval.shape) == 1 else None
    if at is None:
        return None
    found = dict(zip(mapped, at.tolist(), strict=True))
    starts = tuple(found.get(d, 0) for d in range(len(sizes)))
    inside = all(0 <= s <= n - k for s, n, k in zip(starts, x.aval.shape, sizes, strict=True))
    return starts if inside else None


def _clamped(eqn: Eqn, at: Sequence[Atom], made: Mapping[Var, Eqn], sizes: Sequence[int]) -> tuple[int, ...] | None:
    starts = [constant(a, made) for a in at]
    if any(s is None for s in starts):
        return None
    shape = eqn.invars[0].aval.shape
    return tuple(min(max(int(s), 0), n - k) for s, n, k in zip(starts, shape, sizes, strict=True))


def _padded_convolution(eqn: Eqn, made: Mapping[Var, Eqn]) -> Eqn:
    x, kernel = eqn.invars
    pad = None if compat.is_literal(x) else made.get(x)
    p = compat.params_of(eqn)
    if pad is None or pad.primitive.name != "pad" or any(n != 1 for n in p["lhs_dilation"]):
        return eqn
    config, spatial = pad.params["padding_config"], p["dimension_numbers"].lhs_spec[2:]
    fits = all(inside == 0 and low >= 0 and high >= 0 for low, high, inside in config)
    if not fits or not is_zero(pad.invars[1], made) or any(config[d][:2] != (0, 0) for d in p["dimension_numbers"].lhs_spec[:2]):
        return eqn
    padding = tuple((int(a + config[d][0]), int(b + config[d][1])) for d, (a, b) in zip(spatial, p["padding"], strict=True))
    return eqn.replace(invars=[pad.invars[0], kernel], params={**eqn.params, "padding": padding})
