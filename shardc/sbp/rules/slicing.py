"""Operations that cut out and put together ranges: what they take whole may be split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from shardc.sbp.rules.layout import without
from shardc.sbp.signature import Factors, Operation, Rule, Site, dims, passes, rule


def _unchanged(old: Sequence[int], new: Sequence[int]) -> Factors:
    return tuple(f if a == b else None for f, a, b in zip(dims(len(old)), old, new, strict=True))


@rule("slice")
def slice_(op: Operation) -> Rule:
    """Dimensions that are taken whole are factors."""
    names = _unchanged(op.operands[0].shape, op.results[0].shape)
    return Rule((names,), (names,), partials=passes(1, (0,)), local=_slice_piece)


def _slice_piece(site: Site, x: Any) -> Sequence[Any]:
    whole = _unchanged(site.op.operands[0].shape, site.op.results[0].shape)
    limits = tuple(n if f else l for f, n, l in zip(whole, x.shape, site.op.params["limit_indices"], strict=True))
    return site.bind(x, limit_indices=limits)


@rule("dynamic_slice")
def dynamic_slice(op: Operation) -> Rule:
    """Dimensions that are taken whole are factors: their start can only be 0."""
    names = _unchanged(op.operands[0].shape, op.results[0].shape)
    starts = ((),) * (len(op.operands) - 1)
    return Rule((names, *starts), (names,), partials=passes(1 + len(starts), (0,)), local=_dynamic_piece)


def _dynamic_piece(site: Site, x: Any, *starts: Any) -> Sequence[Any]:
    """The clamp that is part of the operation, written out: XLA drops it from a slice of a slice (openxla/xla#49121),
    and a boxing to S makes one."""
    sizes = site.result_shape()
    inside = [_clamped(start, n - k) for start, n, k in zip(starts, x.shape, sizes, strict=True)]
    return site.bind(x, *inside, slice_sizes=sizes)


def _clamped(start: Any, limit: int) -> Any:
    dtype = np.dtype(start.dtype)
    return lax.clamp(np.zeros((), dtype), start, np.asarray(min(limit, np.iinfo(dtype).max), dtype))


@rule("dynamic_update_slice")
def dynamic_update_slice(op: Operation) -> Rule:
    """Dimensions that the update covers are factors; operand and update are partial together."""
    names = _unchanged(op.operands[0].shape, op.operands[1].shape)
    starts = ((),) * (len(op.operands) - 2)
    return Rule((names, names, *starts), (names,), partials=passes(2 + len(starts), (0, 1)))


@rule("split")
def split(op: Operation) -> Rule:
    """One result for each range of `axis`."""
    names = without(dims(len(op.operands[0].shape)), [op.params["axis"]])
    return Rule((names,), (names,) * len(op.results), partials=passes(1, (0,)))


@rule("concatenate")
def concatenate(op: Operation) -> Rule:
    """Every dimension but the one that grows; the operands are partial together."""
    names, n = without(dims(len(op.operands[0].shape)), [op.params["dimension"]]), len(op.operands)
    return Rule((names,) * n, (names,), partials=passes(n, range(n)))


@rule("pad")
def pad(op: Operation) -> Rule:
    """Dimensions without padding are factors; operand and padding value are partial together."""
    config = op.params["padding_config"]
    names = without(dims(len(config)), [i for i, c in enumerate(config) if tuple(c) != (0, 0, 0)])
    return Rule((names, ()), (names,), partials=passes(2, (0, 1)))
