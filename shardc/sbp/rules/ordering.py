"""Operations that compare along a dimension: each device tells its best candidates; what sorts it keeps it whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.piece import masked
from shardc.sbp.rules.rearrange import without
from shardc.sbp.rules.reduction import kept_only
from shardc.sbp.signature import Aval, Operation, Rule, Setting, Site, dims, neutral_value, rule


@rule("argmax", "argmin")
def arg_extremum(op: Operation) -> Rule:
    """An index of each row. Along a split dimension each device tells its extremum and where it is; ties and NaN fall
    to the first device, as they fall to the first element."""
    (x,), (axis,), index = op.operands, op.params["axes"], op.params["index_dtype"]
    if np.dtype(x.dtype).kind == "c" or jnp.iinfo(index).max < x.shape[axis] - 1:  # no extremum; indices that wrap
        return kept_only(op)
    names = dims(len(x.shape))
    return Rule(
        (names,), (tuple(f for i, f in enumerate(names) if i != axis),),
        reduced={names[axis]: None},
        neutral={0: "lowest" if op.name == "argmax" else "highest"},
        told={names[axis]: _extremum_here},
        across=_arg_across,
    )  # fmt: skip


def _extremum_here(setting: Setting) -> Sequence[Aval]:
    shape, op = setting.result_shape(), setting.op
    return [jax.ShapeDtypeStruct(shape, a.dtype) for a in (op.operands[0], op.results[0])]


def _arg_across(site: Site, x: Any) -> Sequence[Any]:
    (axis,) = site.op.params["axes"]
    axes = site.operands[0].axes_of(axis)
    (at,) = site.bind(x)
    best = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis).squeeze(axis)
    at = at + jnp.asarray(site.operand_extent(0, axis)[0], at.dtype)
    some = np.asarray([k for k, (_, valid) in enumerate(site.extents(0, axis)) if valid])
    values, places = (site.wire.all_gather(y, axes)[some] for y in (best, at))
    (which,) = site.bind(values, axes=(0,))
    return [jnp.take_along_axis(places, which[None], 0)[0]]


@rule("sort")
def sort(op: Operation) -> Rule:
    """Each row is sorted for itself, all operands alike. Along the sorted dimension every device may need any element
    of any other, and finds out only by comparing: gathering is the least that one collective can do."""
    dim, shape = op.params["dimension"], op.operands[0].shape
    names = without(dims(len(shape)), [dim])
    return Rule((names,) * len(op.operands), (names,) * len(op.results), passes=_merges(shape[dim]))


def _merges(size: int) -> float:
    """Passes of a sort that merges pairs of sorted runs until one is left."""
    return float(max(1, math.ceil(math.log2(max(size, 1)))))


ORDERED = ("bfloat16", "float16", "float32", "float64")
"""Floats whose elements top_k orders by their bits, from -NaN to NaN."""


@rule("top_k")
def top_k(op: Operation) -> Rule:
    """Values and indices of the k largest of each row. Along the dimension each device tells the k largest that it has,
    in their order, and ties keep the order of the devices."""
    x, k = op.operands[0], op.params["k"]
    names, axis = dims(len(x.shape)), op.params["axis"] % len(x.shape)
    kept = without(names, [axis])
    if k == 0 or not (jnp.issubdtype(x.dtype, np.integer) or np.dtype(x.dtype).name in ORDERED):
        return Rule((kept,), (kept, kept), passes=1.0 + _merges(k))
    return Rule(
        (names,), (kept, kept),
        reduced={names[axis]: None},
        told={names[axis]: _candidates},
        across=_top_across,
        passes=1.0 + _merges(k),
    )  # fmt: skip


def _candidates(setting: Setting) -> Sequence[Aval]:
    op, shape = setting.op, list(setting.operand_shape(0))
    axis = op.params["axis"] % len(shape)
    shape[axis] = min(op.params["k"], shape[axis])
    return [jax.ShapeDtypeStruct(shape, a.dtype) for a in op.results]


def _top_across(site: Site, x: Any) -> Sequence[Any]:
    k, axis = site.op.params["k"], site.op.params["axis"] % x.ndim
    axes, few = site.operands[0].axes_of(axis), min(k, x.shape[axis])
    values, places = site.bind(_with_last(site, axis, x), k=few)
    places = places + jnp.asarray(site.operand_extent(0, axis)[0], places.dtype)
    count = [min(few, valid) for _, valid in site.extents(0, axis)]
    real = np.concatenate([few * j + np.arange(n) for j, n in enumerate(count)])  # the others are of padding

    def told(y: Any) -> Any:
        together = jnp.moveaxis(site.wire.all_gather(y, axes), 0, axis)
        return lax.collapse(together, axis, axis + 2).take(real, axis)

    values, places = told(values), told(places)
    values, which = site.bind(values)
    return [values, jnp.take_along_axis(places, which, axis)]


def _with_last(site: Site, axis: int, x: Any) -> Any:
    """The piece with what top_k takes last in its padding: -inf, and if there is a NaN with a sign, which is less, the
    least of these. Not always that one: a kernel that is in no order with NaN is in order without."""
    x = masked(site, 0, axis, x, neutral_value("lowest", x.dtype))
    if jnp.issubdtype(x.dtype, np.integer):
        return x
    bits = np.dtype(f"uint{8 * np.dtype(x.dtype).itemsize}")
    least = np.asarray(np.iinfo(bits).max, bits).view(x.dtype)
    negative = jnp.any(jnp.isnan(x) & jnp.signbit(x))
    return masked(site, 0, axis, x, jnp.where(negative, least, neutral_value("lowest", x.dtype)))


@rule("approx_top_k")
def approx_top_k(op: Operation) -> Rule:
    """Of each row. Which elements it misses depends on how many it looks at, so the dimension stays whole."""
    rank = len(op.operands[0].shape)
    names = without(dims(rank), [op.params["reduction_dimension"] % rank])
    return Rule((names,), (names, names), passes=1.0)
