"""Static forms of operations that read or write a window at a constant position.

gather x [1], dynamic_slice x 1      -->  slice x
reshape (broadcast x), of x's shape  -->  x
conv (pad x 0)                       -->  conv x, with more padding
scatter x [1] u, dynamic_update_slice x u 1  -->  a `Write`; pad u if x is constant
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
from shardc.ir.walk import ADDITIONS, LINEAR

_COMBINES: Final[Mapping[str, Any]] = {
    "scatter": None, "scatter-add": lax.add, "scatter-sub": lax.sub, "scatter-mul": lax.mul, "scatter-max": lax.max,
    "scatter-min": lax.min,
}  # fmt: skip


class Write(NamedTuple):
    """A write of `update` into `x` at `starts`.

    `combine` joins old and new elements; None if the new ones replace the old.
    """

    x: Atom
    update: Atom
    starts: tuple[int, ...]
    combine: Any


def constant(atom: Atom, made: Mapping[Var, Eqn]) -> Any:
    """The value of an array of at most 16 elements that depends on no input. None if it is unknown."""
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
    """The scalar that every element of an array is equal to. None if it is unknown."""
    eqn = None if compat.is_literal(atom) else made.get(atom)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or eqn.invars[0].aval.shape:
        return None
    return eqn.invars[0]


def is_zero(atom: Atom, made: Mapping[Var, Eqn]) -> bool:
    """Whether a scalar is zero."""
    value = constant(atom, made)
    return value is not None and not np.any(value)


def is_zeros(atom: Atom, made: Mapping[Var, Eqn]) -> bool:
    """Whether all elements of a value are known to be zeros; it may have none."""
    if compat.is_literal(atom):
        return not np.any(np.asarray(atom.val))
    if not math.prod(atom.aval.shape):
        return True
    eqn = made.get(atom)
    if eqn is None:
        return False
    if eqn.primitive.name == "reduce_sum":
        return not math.prod(eqn.invars[0].aval.shape)
    return (eqn.primitive.name in LINEAR or eqn.primitive.name in ("pad", "slice")) and all(
        is_zeros(a, made) for a in eqn.invars
    )


def same_as(eqn: Eqn, made: Mapping[Var, Eqn]) -> Atom | None:
    """The operand that an equation returns unchanged. None if it changes it."""
    if eqn.primitive.name == "concatenate":
        parts = [a for a in eqn.invars if a.aval.shape[eqn.params["dimension"]]]
        return parts[0] if len(parts) == 1 and not compat.is_literal(parts[0]) else None
    if eqn.primitive.name in ("slice", "pad") and not compat.is_literal(eqn.invars[0]):
        p, whole = eqn.params, eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
        inner = not any(any(c) for c in p["padding_config"]) if "padding_config" in p else not any(p["start_indices"])
        return eqn.invars[0] if whole and inner else None
    if eqn.primitive.name in ADDITIONS:
        same = [a for a in eqn.invars if not compat.is_literal(a) and a.aval.shape == eqn.outvars[0].aval.shape]
        return next(
            (a for a, b in zip(same, eqn.invars[::-1], strict=False) if len(same) == 2 and is_zeros(b, made)), None
        )
    before: Eqn | None = eqn
    while before is not None and adds_ones(before) and not compat.is_literal(before.invars[0]):
        x = before.invars[0]
        if x.aval.shape == eqn.outvars[0].aval.shape:
            return x
        before = made.get(x)
    return None


def adds_ones(eqn: Eqn) -> bool:
    """Whether an operation only adds or removes dimensions of size 1."""
    if eqn.primitive.name not in _OF_ONES or (eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None):
        return False
    old, new = ([n for n in v.aval.shape if n != 1] for v in (eqn.invars[0], eqn.outvars[0]))
    return old == new and 0 not in old


_OF_ONES: Final = ("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "reduce_sum", "reduce_max", "reduce_min")


def static_form(eqn: Eqn, made: Mapping[Var, Eqn]) -> list[Eqn]:
    """The equations of the static form; the equation alone if it has none."""
    name = eqn.primitive.name
    if name == "gather":
        return _slice(eqn, _gathered(eqn, made), eqn.params["slice_sizes"])
    if name == "dynamic_slice":
        return _slice(eqn, _clamped(eqn, eqn.invars[1:], made, eqn.outvars[0].aval.shape), eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        return _padded_convolution(eqn, made)
    if name in _COMBINES:
        return _with_all_dimensions(eqn)
    return [eqn]


def _with_all_dimensions(eqn: Eqn) -> list[Eqn]:
    """A scatter of rows, such as `x.at[1].set(u)`, as a scatter of a window that has the rank of `x`."""
    numbers = eqn.params["dimension_numbers"]
    inserted = numbers.inserted_window_dims
    x, indices, update = eqn.invars
    if not inserted or numbers.operand_batching_dims or len(indices.aval.shape) != 1 or compat.is_literal(update):
        return [eqn]
    rest = iter(update.aval.shape)
    shape = tuple(1 if d in inserted else next(rest) for d in range(len(x.aval.shape)))
    wide = compat.fresh_var(compat.shaped_array(shape, update.aval.dtype))
    dims = tuple(d for d in range(len(shape)) if d not in inserted)
    params = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
    numbers = numbers._replace(inserted_window_dims=(), update_window_dims=tuple(range(len(shape))))
    return [
        compat.new_eqn([update], [wide], lax.broadcast_in_dim_p, params, eqn),
        eqn.replace(invars=[x, indices, wide], params={**eqn.params, "dimension_numbers": numbers}),
    ]


def write_of(eqn: Eqn, made: Mapping[Var, Eqn]) -> Write | None:
    """The write that an equation performs. None if it writes nothing, or at an unknown position."""
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
    """A write into a constant array as padding of the update. None if the array is not constant."""
    fill = fill_of(write.x, made)
    adds = eqn.primitive.name == "scatter-add"
    if fill is None or not (write.combine is None or (adds and is_zero(fill, made))):
        return None
    sizes = zip(write.x.aval.shape, write.update.aval.shape, write.starts, strict=True)
    config = tuple((start, n - start - k, 0) for n, k, start in sizes)
    return compat.new_eqn([write.update, fill], eqn.outvars, lax.pad_p, {"padding_config": config}, eqn)


def _slice(eqn: Eqn, starts: Sequence[int] | None, sizes: Sequence[int]) -> list[Eqn]:
    if starts is None:
        return [eqn]
    outs: Sequence[Var] = eqn.outvars
    if tuple(sizes) != tuple(outs[0].aval.shape):  # dimensions of size 1 are left out
        outs = [compat.fresh_var(compat.shaped_array(tuple(sizes), outs[0].aval.dtype))]
    limits = tuple(s + n for s, n in zip(starts, sizes, strict=True))
    params = {"start_indices": tuple(starts), "limit_indices": limits, "strides": None}
    made = [compat.new_eqn(eqn.invars[:1], outs, lax.slice_p, params, eqn)]
    if outs is not eqn.outvars:
        params = {"dimensions": tuple(eqn.params["dimension_numbers"].collapsed_slice_dims)}
        made.append(compat.new_eqn(outs, eqn.outvars, lax.squeeze_p, params, eqn))
    return made


def _gathered(eqn: Eqn, made: Mapping[Var, Eqn]) -> tuple[int, ...] | None:
    numbers = eqn.params["dimension_numbers"]
    if numbers.operand_batching_dims:
        return None
    x, indices = eqn.invars
    return _starts(indices, numbers.start_index_map, x, eqn.params["slice_sizes"], made)


def _starts(
    indices: Atom, mapped: Sequence[int], x: Atom, sizes: Sequence[int], made: Mapping[Var, Eqn]
) -> tuple[int, ...] | None:
    """The first element of the window at a constant index. None for several windows, or one that is partly outside."""
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


def _padded_convolution(eqn: Eqn, made: Mapping[Var, Eqn]) -> list[Eqn]:
    """A convolution of an array padded with zeros as a convolution of the array with more padding."""
    (x, kernel), p = eqn.invars, compat.params_of(eqn)
    above = None if compat.is_literal(x) else made.get(x)
    wider = above if above is not None and adds_ones(above) and above.primitive.name == "broadcast_in_dim" else None
    if wider is not None:
        above = None if compat.is_literal(wider.invars[0]) else made.get(wider.invars[0])
    if above is None or above.primitive.name != "pad" or any(n != 1 for n in p["lhs_dilation"]):
        return [eqn]
    config = [tuple(map(int, c)) for c in above.params["padding_config"]]
    rank = len(x.aval.shape)
    dims = range(rank) if wider is None else wider.params["broadcast_dimensions"]
    widths = {d: c for d, c in zip(dims, config, strict=True) if c != (0, 0, 0)}
    spatial = p["dimension_numbers"].lhs_spec[2:]
    fits = all(d in spatial and inside == 0 and low >= 0 and high >= 0 for d, (low, high, inside) in widths.items())
    if not fits or not is_zero(above.invars[1], made):
        return [eqn]
    shape = tuple(n - sum(widths.get(d, ())) for d, n in enumerate(x.aval.shape))
    inner = compat.fresh_var(compat.shaped_array(shape, x.aval.dtype))
    params = {"shape": shape, "broadcast_dimensions": tuple(dims), "sharding": None}
    padding = tuple(
        (int(low + widths.get(d, (0, 0))[0]), int(high + widths.get(d, (0, 0))[1]))
        for d, (low, high) in zip(spatial, p["padding"], strict=True)
    )
    return [
        compat.new_eqn(above.invars[:1], [inner], lax.broadcast_in_dim_p, params, eqn),
        eqn.replace(invars=[inner, kernel], params={**eqn.params, "padding": padding}),
    ]
