"""Scatter: operand with operand[indices[batch] + window] combined with updates[batch, window].

Factors: `o*` dimensions that every window covers, `i*` dimensions of indices and updates (shared with the operand where
it is batched, else reduced if updates may come in any number of parts), `v*` dimensions of which every window touches
one element, and `w*` those of which it touches several. If a `v` or `w` is split, each device applies the updates of
its own elements. Overwriting and products cannot come in parts: no device knows which elements others have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from shardc.sbp.placement import ReduceOp
from shardc.sbp.rules.gather import as_int32, is_first, ranges_here, with_margins
from shardc.sbp.rules.reduction import NEUTRAL
from shardc.sbp.signature import Factors, Operation, Partials, Rule, Site, dims, is_extended, linear, passes, rule

_COMBINES: Mapping[str, ReduceOp] = {
    "scatter-add": "sum", "scatter-sub": "sum", "scatter-max": "max", "scatter-min": "min",
}  # fmt: skip


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min")
def scatter(op: Operation) -> Rule | None:
    """Batched, covered and looked-up dimensions; parts of the updates if the combination is a sum, max or min."""
    if op.params["mode"] == GatherScatterMode.ONE_HOT:
        return None
    operand, batch, updates = _factors(op)
    combine = _COMBINES.get(op.name)
    loose = [f for f in batch if f and f not in operand]
    return Rule(
        (operand, (*batch, None), updates), (operand,),
        reduced={f: combine for f in loose} if combine else {},  # noqa: C420  (fromkeys widens the type)
        partials=_partials(op, combine),
        neutral={2: NEUTRAL[combine]} if combine else {},
        local=_scatter_here,
    )  # fmt: skip


def _partials(op: Operation, combine: ReduceOp | None) -> tuple[Partials, ...]:
    """Sums pass operand and updates together; max and min also either one; overwriting both, if no updates meet."""
    if combine == "sum":
        return linear(3, (0, 2))
    if combine:
        return passes(3, (0, 2), (0,), (2,), ops=(combine,))
    if op.name == "scatter-mul":
        return linear(3, (0,))
    alone = op.params["unique_indices"] or np.prod(op.operands[1].shape[:-1]) == 1
    return passes(3, (0, 2)) if op.name == "scatter" and op.params["update_jaxpr"] is None and alone else ()


def _windows(op: Operation) -> dict[int, int | None]:
    """Dimension of the updates that runs along each dimension of the operand; None where it is a single element."""
    numbers = op.params["dimension_numbers"]
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    along = iter(numbers.update_window_dims)
    return {d: None if d in single else next(along) for d in range(len(op.operands[0].shape))}


def _sizes(op: Operation) -> list[int]:
    return [1 if u is None else op.operands[2].shape[u] for u in _windows(op).values()]


def _looked_up(op: Operation) -> tuple[int, ...]:
    numbers, sizes, shape = op.params["dimension_numbers"], _sizes(op), op.operands[0].shape
    single = numbers.inserted_window_dims
    return tuple(d for d in numbers.scatter_dims_to_operand_dims if sizes[d] == 1 and (shape[d] > 1 or d in single))


def _windowed(op: Operation) -> tuple[int, ...]:
    """Dimensions of the operand that one index component addresses, some elements at a time."""
    mapped, sizes = op.params["dimension_numbers"].scatter_dims_to_operand_dims, _sizes(op)
    if is_extended(op.operands[0].dtype):  # no zeros for the margins
        return ()
    return tuple(d for d in mapped if 1 < sizes[d] < op.operands[0].shape[d])


def _factors(op: Operation) -> tuple[Factors, Factors, Factors]:
    """Factors of the operand, of the batch of indices, of the updates."""
    numbers, shape = op.params["dimension_numbers"], op.operands[0].shape
    batch = dims(len(op.operands[1].shape) - 1, "i")
    updates: list[str | None] = [None] * len(op.operands[2].shape)
    for f, u in zip(batch, (u for u in range(len(updates)) if u not in numbers.update_window_dims), strict=True):
        updates[u] = f
    found = {d: f"v{d}" for d in _looked_up(op)} | {d: f"w{d}" for d in _windowed(op)}
    operand: list[str | None] = [found.get(d) for d in range(len(shape))]
    for d, u in _windows(op).items():
        if u is not None and operand[d] is None and op.operands[2].shape[u] == shape[d]:
            operand[d] = updates[u] = f"o{d}"
    for d, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        operand[d] = batch[j]
    return tuple(operand), batch, tuple(updates)


def _scatter_whole(site: Site, x: Any, indices: Any, updates: Any) -> Sequence[Any]:
    """The scatter into an operand that is not split along an indexed dimension."""
    p, ordered = site.op.params, not site.operands[1].splits  # padding has no order and is not unique
    return site.bind(
        x, indices, updates,
        indices_are_sorted=p["indices_are_sorted"] and ordered, unique_indices=p["unique_indices"] and ordered,
    )  # fmt: skip


def _scatter_here(site: Site, x: Any, indices: Any, updates: Any) -> Sequence[Any]:
    op, p = site.op, site.op.params
    mapped = p["dimension_numbers"].scatter_dims_to_operand_dims
    operand, _, names = _factors(op)
    loose = [a for u, f in enumerate(names) if f and f not in operand for a in site.operands[2].axes_of(u)]
    if loose and _COMBINES[op.name] == "sum":
        x = jnp.where(is_first(site, loose), x, jnp.zeros((), x.dtype))  # the operand counts once
    split = [d for d in _looked_up(op) if site.operands[0].axes_of(d)]
    if np.prod(indices.shape[:-1]) == 1 and any(site.operands[0].axes_of(d) for d in mapped):
        x = lax.optimization_barrier(x)  # else XLA slices a slice, and wrongly (openxla/xla#49121)
    windows = [d for d in _windowed(op) if site.operands[0].axes_of(d)]
    if not split and not windows:
        return _scatter_whole(site, x, indices, updates)
    limits = np.asarray([op.operands[0].shape[d] - _sizes(op)[d] for d in mapped], np.int32)
    positions = as_int32(indices)
    if p["mode"] == GatherScatterMode.CLIP:
        positions = jnp.clip(positions, 0, limits)
    starts, counts = ranges_here(site, mapped, split, limits)
    here = positions - starts
    mine = jnp.all((here >= 0) & (here < counts), axis=-1, keepdims=True)
    whole = x.shape
    x, here = with_margins(site, x, here, mapped, windows, _sizes(op))
    (x,) = site.bind(
        x, jnp.where(mine, here, -1), updates,
        indices_are_sorted=False, unique_indices=False, mode=GatherScatterMode.FILL_OR_DROP,
    )  # fmt: skip
    begins = [_sizes(op)[d] if d in windows else 0 for d in range(x.ndim)]
    return [lax.slice(x, begins, [b + n for b, n in zip(begins, whole, strict=True)])]
