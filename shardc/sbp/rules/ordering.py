"""Operations that compare along a dimension. Each device sends its best candidates; a sorted dimension stays whole."""

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
    """The index of the extremum of each row. Along a split dimension each device sends its extremum and the index; ties
    and NaN go to the first device, as they go to the first element."""
    (x,), (axis,), index = op.operands, op.params["axes"], op.params["index_dtype"]
    if np.dtype(x.dtype).kind == "c" or jnp.iinfo(index).max < x.shape[axis] - 1:  # no order, or indices that wrap
        return kept_only(op)
    names = dims(len(x.shape))
    return Rule(
        (names,), (tuple(f for i, f in enumerate(names) if i != axis),),
        reduced={names[axis]: None},
        neutral={0: "lowest" if op.name == "argmax" else "highest"},
        exchanged={names[axis]: _extremum_here},
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
    """Each row is sorted by itself, all operands alike. The sorted dimension stays whole: a device may need any element
    of any other device, and a gather is the least that one collective can do."""
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
    """Values and indices of the k largest of each row. Along a split dimension each device sends the k largest that it
    holds, in order; ties keep the order of the devices."""
    x, k = op.operands[0], op.params["k"]
    names, axis = dims(len(x.shape)), op.params["axis"] % len(x.shape)
    kept = without(names, [axis])
    if k == 0 or not (jnp.issubdtype(x.dtype, np.integer) or np.dtype(x.dtype).name in ORDERED):
        return Rule((kept,), (kept, kept), passes=1.0 + _merges(k))
    return Rule(
        (names,), (kept, kept),
        reduced={names[axis]: None},
        exchanged={names[axis]: _candidates},
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
    real = np.concatenate([few * j + np.arange(n) for j, n in enumerate(count)])  # the others are padding

    def from_all(y: Any) -> Any:
        together = jnp.moveaxis(site.wire.all_gather(y, axes), 0, axis)
        return lax.collapse(together, axis, axis + 2).take(real, axis)

    values, places = from_all(values), from_all(places)
    values, which = site.bind(values)
    return [values, jnp.take_along_axis(places, which, axis)]


def _with_last(site: Site, axis: int, x: Any) -> Any:
    """The piece with a padding that top_k takes last: -inf, or the least negative-signed NaN if the piece has a NaN
    with a sign, which is less than -inf. That NaN is not always used: a kernel may order only data without NaN."""
    x = masked(site, 0, axis, x, neutral_value("lowest", x.dtype))
    if jnp.issubdtype(x.dtype, np.integer):
        return x
    bits = np.dtype(f"uint{8 * np.dtype(x.dtype).itemsize}")
    least = np.asarray(np.iinfo(bits).max, bits).view(x.dtype)
    negative = jnp.any(jnp.isnan(x) & jnp.signbit(x))
    return masked(site, 0, axis, x, jnp.where(negative, least, neutral_value("lowest", x.dtype)))


@rule("approx_top_k")
def approx_top_k(op: Operation) -> Rule:
    """The dimension stays whole: which elements are missed depends on how many are looked at."""
    rank = len(op.operands[0].shape)
    names = without(dims(rank), [op.params["reduction_dimension"] % rank])
    return Rule((names,), (names, names), passes=1.0)
