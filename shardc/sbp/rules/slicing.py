"""Operations that cut out or join ranges of dimensions that may be split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.piece import along, placed_at
from shardc.sbp.placement import ReduceOp
from shardc.sbp.rules.rearrange import without
from shardc.sbp.signature import Aval, Factors, OperandWindow, Operation, Rule, Site, dims, is_extended, passes, rule


def _unchanged(old: Sequence[int], new: Sequence[int]) -> Factors:
    return tuple(f if a == b else None for f, a, b in zip(dims(len(old)), old, new, strict=True))


FEW: Final = 8
"""A slice that takes less than one in FEW elements of a dimension leaves a partial result: to reduce it is cheaper than
to split the result again."""


@rule("slice")
def slice_(op: Operation) -> Rule:
    """Every dimension. A device reads the range of its part of the result. Along a dimension of which little is taken
    it gives the elements that it holds, and zeros for the others."""
    (x,), (y,), p = op.operands, op.results, op.params
    names = whole = _unchanged(x.shape, y.shape)
    few: list[str] = []
    if not is_extended(x.dtype):
        names = dims(len(x.shape))
        few = [f for f, n, k in zip(names, x.shape, y.shape, strict=True) if f and k * FEW < n]
    windows = tuple(
        OperandWindow(0, f, 1, start, stride)
        for f, w, start, stride in zip(names, whole, p["start_indices"], _strides(op), strict=True)
        if f and not w and f not in few
    )
    return Rule(
        (names,), (tuple(None if f in few else f for f in names),),
        reduced=dict.fromkeys(few, _partial_op(x)),
        partials=passes(1, (0,)),
        local=_slice_piece, windows=windows, across=_slice_piece,
    )  # fmt: skip


def _strides(op: Operation) -> Sequence[int]:
    return op.params["strides"] or (1,) * len(op.operands[0].shape)


def _partial_op(x: Aval) -> ReduceOp:
    """The partial op of results in which a device has zeros for the elements that it does not hold."""
    return "max" if x.dtype == np.bool_ else "sum"


def _slice_piece(site: Site, x: Any) -> Sequence[Any]:
    p, strides = site.op.params, _strides(site.op)
    starts, limits = list(p["start_indices"]), list(p["limit_indices"])
    for d in site.operands[0].splits:
        if d not in site.results[0].splits:  # little of it is taken
            span = limits[d] - starts[d]
            x = _own_range(site, x, d, np.int32(starts[d]), span)
            starts[d], limits[d] = 0, span
        else:
            starts[d], limits[d] = 0, x.shape[d]
    return site.bind(x, start_indices=tuple(starts), limit_indices=tuple(limits), strides=tuple(strides))


def _own_range(site: Site, x: Any, d: int, begin: Any, size: int) -> Any:
    """`size` elements of a split dimension of operand 0 from `begin` on; zeros for those that others hold."""
    offset, valid = site.operand_extent(0, d)
    at = jnp.clip(jnp.asarray(offset, np.int32) - begin, -x.shape[d], size)
    zero = np.zeros((), x.dtype)
    x = placed_at(x, d, at, size, zero)
    position = lax.broadcasted_iota(np.int32, x.shape, d) - at
    return jnp.where((position >= 0) & (position < valid), x, zero)


@rule("dynamic_slice")
def dynamic_slice(op: Operation) -> Rule:
    """Dimensions that are taken whole, whose start can only be 0, are kept. Along the others each device gives the
    elements that it holds, and zeros for the others."""
    shape = op.operands[0].shape
    kept = _unchanged(shape, op.results[0].shape)
    names = kept if is_extended(op.operands[0].dtype) else dims(len(shape))
    starts = ((),) * (len(op.operands) - 1)
    return Rule(
        (names, *starts), (kept,),
        reduced={f: _partial_op(op.operands[0]) for f in names if f and f not in kept},
        partials=passes(1 + len(starts), (0,)),
        local=_dynamic_piece,
    )  # fmt: skip


def _dynamic_piece(site: Site, x: Any, *starts: Any) -> Sequence[Any]:
    """The local slice, with the clamp of the operation written out: XLA drops it from a slice of a slice
    (openxla/xla#49121), which a boxing to S makes."""
    sizes, whole = list(site.result_shape()), site.op.operands[0].shape
    given = site.op.results[0].shape
    split = [d for d in site.operands[0].splits if given[d] != whole[d]]
    shape = x.shape
    begins = [_clamped(start, n - k) for start, n, k in zip(starts, whole, given, strict=True)]
    inside = [np.zeros((), np.dtype(s.dtype)) if d in split else s for d, s in enumerate(begins)]
    rest = [shape[d] if d in split else n for d, n in enumerate(sizes)]
    (x,) = site.bind(x, *inside, slice_sizes=tuple(rest))
    for d in split:
        x = _own_range(site, x, d, begins[d].astype(np.int32), given[d])
    return [x]


def _clamped(start: Any, limit: int) -> Any:
    dtype = np.dtype(start.dtype)
    return lax.clamp(np.zeros((), dtype), start, np.asarray(min(limit, np.iinfo(dtype).max), dtype))


@rule("dynamic_update_slice")
def dynamic_update_slice(op: Operation) -> Rule:
    """Every dimension. Where the update is smaller it stays whole, and each device writes the part that falls into its
    piece. Operand and update are partial together."""
    shape, update = op.operands[0].shape, op.operands[1].shape
    covered = _unchanged(shape, update)
    names = covered if is_extended(op.operands[0].dtype) else dims(len(shape))
    starts = ((),) * (len(op.operands) - 2)
    return Rule(
        (names, covered, *starts), (names,), partials=passes(2 + len(starts), (0, 1)), local=_update_piece
    )  # fmt: skip


def _update_piece(site: Site, x: Any, update: Any, *starts: Any) -> Sequence[Any]:
    whole, given = (a.shape for a in site.op.operands[:2])
    split = [d for d in site.operands[0].splits if given[d] != whole[d]]
    if not split:
        return site.bind(x, update, *starts)
    begins = [_clamped(s, n - k).astype(np.int32) for s, n, k in zip(starts, whole, given, strict=True)]
    inside: Any = True
    for d in split:
        offset, _ = site.operand_extent(0, d)
        block, size = x.shape[d], min(given[d], x.shape[d])
        begin = begins[d] - jnp.asarray(offset, np.int32)  # in this piece; may be outside
        here = jnp.clip(begin, 0, block - size)
        update = placed_at(update, d, jnp.clip(begin - here, -given[d], size), size, np.zeros((), update.dtype))
        position = here + lax.broadcasted_iota(np.int32, update.shape, d) - begin
        inside = along(inside, update.shape) & (position >= 0) & (position < given[d])
        begins[d] = here
    old = lax.dynamic_slice(x, begins, update.shape)
    return [lax.dynamic_update_slice(x, jnp.where(along(inside, update.shape), update, old), begins)]


@rule("concatenate")
def concatenate(op: Operation) -> Rule:
    """Every dimension. Along the joined one a device reads from each operand what belongs to its part of the result;
    operands that are small beside the result stay whole. The operands are partial together."""
    names, n, grown = dims(len(op.operands[0].shape)), len(op.operands), op.params["dimension"]
    whole = without(names, [grown])
    long = [a.shape[grown] * FEW >= op.results[0].shape[grown] for a in op.operands]
    if is_extended(op.operands[0].dtype):
        names, long = whole, [False] * n
    windows = tuple(OperandWindow(i, str(names[grown]), n, -begin) for i, begin in enumerate(_begins(op)) if long[i])
    return Rule(
        tuple(names if l else whole for l in long), (names,), partials=passes(n, range(n)), windows=windows,
        across=_join_windows,
    )  # fmt: skip


def _begins(op: Operation) -> list[int]:
    """Where each operand begins in the result."""
    dim = op.params["dimension"]
    return list(itertools.accumulate((a.shape[dim] for a in op.operands[:-1]), initial=0))


def _join_windows(site: Site, *windows: Any) -> Sequence[Any]:
    dim, joined = site.op.params["dimension"], None
    offset, size = jnp.asarray(site.result_extent(0, dim)[0], np.int32), site.result_shape()[dim]
    for x, placement, begin in zip(windows, site.operands, _begins(site.op), strict=True):
        if dim not in placement.splits:  # whole: no window
            at = jnp.clip(begin - offset, -x.shape[dim], size)
            x = placed_at(x, dim, at, size, np.zeros((), x.dtype))
        position = lax.broadcasted_iota(np.int32, x.shape, dim) + offset
        joined = x if joined is None else jnp.where(position >= begin, x, joined)
    return [joined]


@rule("pad")
def pad(op: Operation) -> Rule:
    """Every dimension. Along a padded one a device reads the elements of its part of the result. Operand and padding
    value are partial together."""
    config, names = op.params["padding_config"], dims(len(op.params["padding_config"]))
    padded = [i for i, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if is_extended(op.operands[0].dtype):
        names = without(names, padded)
    windows = tuple(
        OperandWindow(0, f, 2, -config[i][0], dilation=config[i][2] + 1, fill=1) for i in padded if (f := names[i])
    )
    return Rule((names, ()), (names,), partials=passes(2, (0, 1)), windows=windows, across=_pad_window)


def _pad_window(site: Site, x: Any, value: Any) -> Sequence[Any]:
    config, split = site.op.params["padding_config"], site.operands[0].splits
    return site.bind(x, value, padding_config=tuple((0, 0, 0) if d in split else c for d, c in enumerate(config)))


@rule("join_ranges")
def join_ranges(op: Operation) -> Rule:
    """Every dimension. A device reads, range by range, what falls into its part of the result; ranges that travel
    equally far around the devices go in one permute."""
    names, dim = dims(len(op.operands[0].shape)), op.params["dim"]
    window = OperandWindow(0, names[dim], 1, ranges=op.params["ranges"])
    return Rule((names,), (names,), partials=passes(1, (0,)), windows=(window,), across=lambda site, x: [x])
