"""Pieces of arrays before and after a border, compared on the host.

After a collective each device has elements of others, or sums of them. Elements are equal to the bit but for the sign
of zero; a NaN equals a NaN. A sum of n terms t, added up in any order, is within gamma sum |t| of the exact one, where
gamma = n u / (1 - n u) and u is the unit roundoff of its type (Higham 2002, "Accuracy and Stability of Numerical
Algorithms", section 4.2). So much is expected of the collective alone; a check adds one rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardc.passes.lower.lower_borders import Passage
from shardc.sbp.boxing import Shape
from shardc.sbp.placement import AxisSizes, Placement, local_extent

Array: TypeAlias = NDArray[Any]
Coordinates: TypeAlias = tuple[int, ...]
"""The coordinates of a device along each axis of the mesh."""
Pieces: TypeAlias = Mapping[Coordinates, Array]


def coordinates(sizes: AxisSizes) -> list[Coordinates]:
    """Those of all devices, in the order of the mesh."""
    return list(itertools.product(*map(range, sizes.values())))


def valid(shape: Shape, placement: Placement, sizes: AxisSizes, at: Coordinates, loops: int) -> tuple[Any, Any]:
    """The elements of a logical array that a device holds, and where they stand in its piece."""
    here = dict(zip(sizes, at, strict=True))
    logical, local = [slice(None)] * loops, [slice(None)] * loops
    for dim, n in enumerate(shape):
        start, count = local_extent(n, placement.axes_of(dim), sizes, here)
        logical.append(slice(start, start + count))
        local.append(slice(0, count))
    return tuple(logical), tuple(local)


def expected(passage: Passage, before: Pieces, sizes: AxisSizes) -> dict[Coordinates, tuple[Any, Array, Any]]:
    """The elements of each device after a collective: where in its piece, their values, and how far they may be off."""
    groups: dict[Coordinates, list[Coordinates]] = {}
    names = list(sizes)
    for at in before:
        rest = tuple(i for a, i in zip(names, at, strict=True) if a not in passage.axes)
        groups.setdefault(rest, []).append(at)
    found: dict[Coordinates, tuple[Any, Array, Any]] = {}
    for group in groups.values():
        find = _of_operation if passage.step is None else _of_step
        found |= find(passage, {at: before[at] for at in group}, sizes)
    return found


def _of_operation(p: Passage, before: Pieces, sizes: AxisSizes) -> dict[Coordinates, tuple[Any, Array, Any]]:
    """Inside an operation: the arrays of a group stacked, or that of the device that is paired with each."""
    names = list(sizes)
    order = sorted(before, key=lambda at: tuple(at[names.index(a)] for a in p.axes))
    if p.kind == "all_gather":
        whole = np.stack([before[at] for at in order], p.loops)
        return dict.fromkeys(order, ((), whole, 0.0))
    if p.kind == "all_to_all":
        return {
            at: ((), np.stack([np.take(before[source], k, p.loops) for source in order], p.loops), 0.0)
            for k, at in enumerate(order)
        }
    sources = {target: source for source, target in p.pairs}
    return {
        at: ((), before[order[sources[k]]] if k in sources else np.zeros_like(before[at]), 0.0)
        for k, at in enumerate(order)
    }


def _of_step(p: Passage, before: Pieces, sizes: AxisSizes) -> dict[Coordinates, tuple[Any, Array, Any]]:
    assert p.step is not None
    src, dst = p.step.src, p.step.dst
    op = src.partial_op if set(src.partial_axes) - set(dst.partial_axes) else None
    sample = next(iter(before.values()))
    dtype, shape = sample.dtype, (*sample.shape[: p.loops], *p.shape)
    places = {at: valid(p.shape, src, sizes, at, p.loops) for at in before}
    if op is None or op in ("max", "min"):
        whole = np.zeros(shape, dtype)
        seen = np.zeros(shape, bool)
        for at, (logical, local) in places.items():
            new, old = before[at][local], whole[logical]
            if op is not None:
                if p.kind == "all_reduce" and dtype.itemsize < 4 and jnp.issubdtype(dtype, np.inexact):
                    new = np.where(np.isnan(new), np.asarray(np.inf if op == "max" else -np.inf, dtype), new)
                new = np.where(seen[logical], _extreme(op, old, new), new)
            whole[logical], seen[logical] = new, True
        bound: Any = 0.0
    else:
        is_float = jnp.issubdtype(dtype, np.inexact)
        wide = _wide(dtype) if is_float else dtype
        whole, size = np.zeros(shape, wide), np.zeros(shape)
        with np.errstate(all="ignore"):
            for at, (logical, local) in places.items():
                new = before[at][local].astype(wide)
                whole[logical] += new
                size[logical] += np.abs(new).astype(float) if is_float else 0.0
            bound = sum_bound(len(before), dtype, size) if is_float else 0.0
    found: dict[Coordinates, tuple[Any, Array, Any]] = {}
    for at in before:
        logical, local = valid(p.shape, dst, sizes, at, p.loops)
        found[at] = local, whole[logical], bound[logical] if isinstance(bound, np.ndarray) else bound
    return found


def _extreme(op: str, a: Array, b: Array) -> Array:
    """The greater or the lesser; NaN if one is."""
    return np.maximum(a, b) if op == "max" else np.minimum(a, b)


def sum_bound(n: int, dtype: Any, size: Array) -> Array:
    """By how much a sum of n terms, of these absolute values together, may differ from the exact one."""
    info = jnp.finfo(dtype)
    u = float(info.eps) / 2
    gamma = n * u / (1 - n * u) if n * u < 0.5 else 2 * n * u
    bound = gamma * size + n * float(info.tiny)
    return np.where(size >= 0.99 * float(info.max), np.inf, bound)  # in some order it overflows


def _wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, np.complexfloating):
        return np.clongdouble
    return np.longdouble if np.dtype(dtype) == np.float64 else np.float64


def unlike(got: Array, want: Array, bound: Any) -> tuple[Array, Array]:
    """The elements that differ by more than the bound, and by how much all do."""
    if not jnp.issubdtype(got.dtype, np.inexact):
        a, b = (x.astype(np.int64) if x.dtype.kind == "V" else x for x in (got, want))
        differ = a != b
        return differ & ~np.isinf(bound), differ.astype(float)
    wide = _wide(got.dtype)
    with np.errstate(all="ignore"):
        a, b = got.astype(wide), want.astype(wide)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        off = np.where(same, 0.0, np.abs(a - b))
        wrong = ~same & ~(off <= bound)
        wrong &= ~(np.isinf(bound) & ~np.isfinite(a))  # nothing is known of these, so they may be NaN too
    return wrong, np.where(np.isnan(off), np.inf, off).astype(float)


def rounding(got: Array, want: Array) -> Any:
    """One rounding of each element, and of one of the array's middle size."""
    if not jnp.issubdtype(want.dtype, np.inexact):
        return 0.0
    size = np.abs(np.where(np.isfinite(want), want, 0).astype(_wide(want.dtype))).astype(float)
    info = jnp.finfo(want.dtype)
    return float(info.eps) * (size + np.sqrt(np.mean(size**2) if size.size else 0.0)) + float(info.tiny)


def spread(exact: Array, moved: Sequence[Array]) -> Any:
    """By how much rounding may move an array: four times the largest that it did, or its middle size in the array."""
    if not jnp.issubdtype(exact.dtype, np.inexact):
        changed = max((int((m != exact).sum()) for m in moved), default=0)
        return np.inf if changed else 0.0
    most = np.zeros(exact.shape)
    with np.errstate(all="ignore"):
        for m in moved:
            by = np.abs(m.astype(_wide(m.dtype)) - exact.astype(_wide(m.dtype))).astype(float)
            by = np.where(np.isfinite(exact) & ~np.isfinite(m), np.inf, np.where(np.isfinite(by), by, 0.0))
            middle = by[np.isfinite(by)]
            most = np.maximum(most, np.maximum(by, np.sqrt(np.mean(middle**2)) if middle.size else 0.0))
    return 4 * most
