"""Windowed reductions (pooling) and their transposes: a device reads the windows of its part of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import primitives

from shardc.sbp.signature import (
    Factors,
    Neutral,
    OperandWindow,
    Operation,
    Partials,
    Rule,
    Site,
    dims,
    linear,
    passes,
    rule,
)


class Pool(NamedTuple):
    """The windows along one dimension. `untouched`: each element of the result is one of the operand."""

    size: int
    stride: int
    low: int
    high: int
    base: int
    dilation: int

    @property
    def untouched(self) -> bool:
        return (self.size, self.stride, self.low, self.high, self.base) == (1, 1, 0, 0, 1)


def pools(op: Operation) -> tuple[Pool, ...]:
    """The windows of each dimension."""
    p, rank = op.params, len(op.params["window_dimensions"])
    base, dilation = (p.get(name) or (1,) * rank for name in ("base_dilation", "window_dilation"))
    seen = zip(p["window_dimensions"], p["window_strides"], p["padding"], base, dilation, strict=True)
    return tuple(Pool(size, stride, low, high, b, d) for size, stride, (low, high), b, d in seen)


def _windowed(op: Operation, fills: Sequence[Neutral | None], partials: tuple[Partials, ...]) -> Rule:
    """A rule of windows. `fills`: the value outside of each windowed operand; None: windows that reach outside stay
    whole."""
    found, result = pools(op), len(op.operands)
    splits = None not in fills or all(p.low <= 0 and p.high <= 0 and p.base == 1 for p in found)
    names: Factors = tuple(
        f if p.untouched or (splits and x and y) else None
        for f, p, x, y in zip(dims(len(found)), found, op.operands[0].shape, op.results[0].shape, strict=True)
    )
    windows = tuple(
        OperandWindow(
            i, f, result, -pool.low, pool.stride, (pool.size - 1) * pool.dilation + 1, pool.base, fill or "zero"
        )
        for i, fill in enumerate(fills)
        for f, pool in zip(names, found, strict=True)
        if f and not pool.untouched
    )
    operands = (names,) * len(fills) + ((),) * (len(op.operands) - len(fills))
    return Rule(
        operands, (names,) * len(op.results), partials=partials,
        local=_pool_window, windows=windows, across=_pool_window, passes=1.0,
    )  # fmt: skip


def _pool_window(site: Site, *operands: Any) -> Sequence[Any]:
    """The local pooling. A window already has its padding and dilation."""
    p, split = site.op.params, site.operands[0].splits
    return site.bind(
        *operands,
        padding=tuple((0, 0) if d in split else tuple(pair) for d, pair in enumerate(p["padding"])),
        base_dilation=tuple(1 if d in split else n for d, n in enumerate(p["base_dilation"])),
    )


@rule("reduce_window_sum")
def sum_window(op: Operation) -> Rule:
    """A sum of sums."""
    return _windowed(op, ["zero"], linear(1, (0,)))


@rule("reduce_window_max")
def max_window(op: Operation) -> Rule:
    """A max of maxima."""
    return _windowed(op, ["lowest"], passes(1, (0,), ops=("max",)))


@rule("reduce_window_min")
def min_window(op: Operation) -> Rule:
    """A min of minima."""
    return _windowed(op, ["highest"], passes(1, (0,), ops=("min",)))


@rule("reduce_window")
def any_window(op: Operation) -> Rule:
    """Any monoid; initial values are scalars. Windows with padding stay whole: an initial value need not be neutral,
    XLA skips positions outside, and its order within such a window depends on the shapes."""
    return _windowed(op, [None] * (len(op.operands) // 2), ())


@rule("select_and_gather_add")
def gather_window(op: Operation) -> Rule:
    """The first operand where the second is largest, or smallest, in each window: linear in the first. Windows with
    padding stay whole, because XLA breaks ties there in an order of its own."""
    return _windowed(op, [None, None], linear(2, (0,)))


def _last_choice(op: Operation) -> Neutral:
    """The value that the selection takes only if there is no other."""
    assert op.params["select_prim"] in (primitives.ge_p, primitives.le_p)
    return "lowest" if op.params["select_prim"] is primitives.ge_p else "highest"


@rule("select_and_scatter_add")
def scatter_window(op: Operation) -> Rule:
    """Add the source to the element that is selected in each window of the operand: linear in the source. A device
    looks at all windows that touch its part."""
    (source, operand), found, windows = (a.shape for a in op.operands), pools(op), list[OperandWindow]()
    names: Factors = tuple(
        f if p.untouched or (x and y) else None
        for f, p, x, y in zip(dims(len(found)), found, source, operand, strict=True)
    )
    for f, p in zip(names, found, strict=True):
        if f and not p.untouched:
            reach = p.size - 1
            windows.append(OperandWindow(0, f, 2, p.low - reach, width=p.size, dilation=p.stride))
            windows.append(OperandWindow(1, f, 2, -reach, width=2 * reach + 1, fill=_last_choice(op)))
    return Rule(
        (names, names), (names,), partials=linear(2, (0,)), windows=tuple(windows), across=_scatter_piece, passes=1.0,
    )  # fmt: skip


def _scatter_piece(site: Site, source: Any, operand: Any) -> Sequence[Any]:
    """The scatter-add on one device's part.

    If the windows begin at the same offset on all devices, only existing windows are visited, at the original stride.
    Otherwise windows are at every position (stride 1), and the source is zero at those that do not exist.
    """
    strides, padding = list(site.op.params["window_strides"]), [tuple(pair) for pair in site.op.params["padding"]]
    cut: list[tuple[int, int, int]] = [(0, 0, 0)] * len(strides)
    for d in site.results[0].splits:
        p, size = pools(site.op)[d], site.result_shape()[d]
        if p.untouched:
            continue
        first, reach = 0, p.size - 1
        phases = {(reach - p.low - offset) % p.stride for offset, _ in site.extents(2, d)}
        if len(phases) == 1 and (phase := min(phases)) < source.shape[d]:
            source, first = lax.slice_in_dim(source, phase, None, p.stride, d), phase
        else:
            strides[d] = 1
        covered = (source.shape[d] - 1) * strides[d] + p.size
        operand = lax.slice_in_dim(operand, first, first + covered, axis=d)
        padding[d], cut[d] = (0, 0), (first - reach, size + reach - first - covered, 0)
    (result,) = site.bind(source, operand, window_strides=tuple(strides), padding=tuple(padding))
    return [lax.pad(result, result.dtype.type(0), cut)]
