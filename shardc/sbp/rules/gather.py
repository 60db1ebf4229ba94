"""Gather: result[batch, offset] = operand[indices[batch] + offset].

Factors: `i*` dimensions of the indices (shared with the operand where it is batched), `o*` dimensions that every slice
takes whole, `v*` dimensions of which every slice takes one element, and `w*` those of which it takes several. If a `v`
or `w` is split, each device gives the elements that it holds, and zero for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from shardc.sbp.piece import masked
from shardc.sbp.signature import Operation, Rule, Site, dims, passes, rule

_LARGEST: Final = 2**31 - 1


@rule("gather")
def gather(op: Operation) -> Rule | None:
    """Batched, whole and looked-up dimensions; linear and monotone in the operand."""
    if op.params["mode"] == GatherScatterMode.ONE_HOT:
        return None
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    batch = dims(len(op.operands[1].shape) - 1, "i")
    found = {d: f"v{d}" for d in _looked_up(op)} | {d: f"w{d}" for d in _windowed(op)}
    operand: list[str | None] = [None] * len(sizes)
    for d, (size, whole) in enumerate(zip(sizes, op.operands[0].shape, strict=True)):
        operand[d] = found.get(d, f"o{d}" if size == whole else None)
    for d, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[d] = batch[j]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = iter([None if d in found else f for d, f in enumerate(operand) if d not in dropped])
    rows = iter(batch)
    result = tuple(next(offsets) if d in numbers.offset_dims else next(rows) for d in range(len(op.results[0].shape)))
    return Rule(
        (tuple(operand), (*batch, None)), (result,),
        reduced=dict.fromkeys(found.values(), "max" if op.operands[0].dtype == np.bool_ else "sum"),
        partials=passes(2, (0,)),
        local=_gather_here,
    )  # fmt: skip


def _looked_up(op: Operation) -> tuple[int, ...]:
    """Dimensions of the operand that one index component addresses, one element at a time."""
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    shape, collapsed = op.operands[0].shape, numbers.collapsed_slice_dims
    return tuple(d for d in numbers.start_index_map if sizes[d] == 1 and (shape[d] > 1 or d in collapsed))


def _windowed(op: Operation) -> tuple[int, ...]:
    """Dimensions of the operand that one index component addresses, some elements at a time."""
    sizes, shape = op.params["slice_sizes"], op.operands[0].shape
    return tuple(d for d in op.params["dimension_numbers"].start_index_map if 1 < sizes[d] < shape[d])


def as_int32(indices: Any) -> Any:
    """Indices in one signed type; an index out of bounds stays out of bounds, on the same side."""
    if np.dtype(indices.dtype).itemsize >= 4 and indices.dtype != np.int32:
        low = -_LARGEST if jnp.issubdtype(indices.dtype, np.signedinteger) else 0
        indices = jnp.clip(indices, low, _LARGEST)
    return indices.astype(np.int32)


def is_first(site: Site, axes: Sequence[str]) -> Any:
    """Whether this device is the first along all `axes`: it contributes values that must count once."""
    first: Any = True
    for axis in axes:
        first = jnp.logical_and(first, site.index(axis) == 0)
    return first


def ranges_here(site: Site, mapped: Sequence[int], split: Sequence[int], limits: Any) -> tuple[Any, Any]:
    """For each index component the first position of this device, and the number of its positions."""
    extents = {d: site.operand_extent(0, d) for d in split}
    starts = [jnp.asarray(extents[d][0] if d in split else 0, np.int32) for d in mapped]
    whole = [jnp.asarray(n + 1, np.int32) for n in limits]
    counts = [jnp.asarray(extents[d][1], np.int32) if d in split else n for d, n in zip(mapped, whole, strict=True)]
    return jnp.stack(starts), jnp.stack(counts)


def _gather_whole(site: Site, x: Any, indices: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """The gather from an operand that is not split along an indexed dimension."""
    p, mapped = site.op.params, site.op.params["dimension_numbers"].start_index_map
    in_order = p["indices_are_sorted"] and not site.operands[1].splits  # padding has no order
    if mapped and p["mode"] != GatherScatterMode.FILL_OR_DROP and np.prod(indices.shape[:-1]) == 1:
        # XLA turns it into a slice: see _dynamic_piece
        indices = jnp.clip(as_int32(indices), 0, np.asarray([x.shape[d] - sizes[d] for d in mapped], np.int32))
    return site.bind(x, indices, slice_sizes=sizes, indices_are_sorted=in_order, unique_indices=False)


def _gather_here(site: Site, x: Any, indices: Any) -> Sequence[Any]:
    p, shape = site.op.params, site.op.operands[0].shape
    numbers, mapped = p["dimension_numbers"], p["dimension_numbers"].start_index_map
    sizes = tuple(n if s == whole else s for s, whole, n in zip(p["slice_sizes"], shape, x.shape, strict=True))
    split = [d for d in _looked_up(site.op) if site.operands[0].axes_of(d)]
    windows = [d for d in _windowed(site.op) if site.operands[0].axes_of(d)]
    fills = p["mode"] == GatherScatterMode.FILL_OR_DROP
    if not mapped or not (split or windows or (fills and site.results[0].partial_op == "sum")):
        return _gather_whole(site, x, indices, sizes)
    limits = np.asarray([shape[d] - p["slice_sizes"][d] for d in mapped], np.int32)
    positions = as_int32(indices)
    within = jnp.all((positions >= 0) & (positions <= limits), axis=-1)
    if not fills:
        positions = jnp.clip(positions, 0, limits)  # XLA does this also with indices promised to be in bounds
    starts, counts = ranges_here(site, mapped, split, limits)
    here = positions - starts
    mine = jnp.all((here >= 0) & (here < counts), axis=-1)
    for d in windows:
        x = masked(site, 0, d, x, np.zeros((), x.dtype))
    x, here = with_margins(site, x, here, mapped, windows, sizes)
    rows = site.bind(
        x, here, slice_sizes=sizes, indices_are_sorted=False, unique_indices=False,
        mode=GatherScatterMode.CLIP, fill_value=None,
    )[0]  # fmt: skip

    def over_rows(mask: Any) -> Any:
        return jnp.expand_dims(mask, numbers.offset_dims)

    found = jnp.where(over_rows(mine), rows, jnp.zeros((), rows.dtype))
    if not fills:
        return [found]
    missing = ~within & is_first(site, site.results[0].partial_axes)
    return [jnp.where(over_rows(missing), jnp.asarray(p["fill_value"], rows.dtype), found)]


def with_margins(
    site: Site, x: Any, starts: Any, mapped: Sequence[int], windows: Sequence[int], sizes: Sequence[int]
) -> tuple[Any, Any]:
    """Operand 0 with zeros around its `windows` dimensions, as many as a window takes, and the starts of the windows in
    it. Elements of a window that are not in this piece fall into the zeros."""
    if not windows:
        return x, starts
    margins = [(sizes[d] if d in windows else 0,) * 2 for d in range(x.ndim)]
    moved: list[Any] = []
    for j, d in enumerate(mapped):
        at = starts[..., j]
        if d in windows:
            offset = jnp.asarray(site.operand_extent(0, d)[0], np.int32)
            at = jnp.clip(at - offset, -sizes[d], x.shape[d]) + sizes[d]
        moved.append(at)
    return jnp.pad(x, margins), jnp.stack(moved, -1)
