"""Windowed reductions (pooling) and their transposes: dimensions that the window does not see may be split."""

from __future__ import annotations

from shardc.sbp.signature import Factors, Operation, Partials, Rule, dims, linear, passes, rule


def untouched(op: Operation) -> Factors:
    """Factors of the dimensions with window 1, stride 1, no padding and no dilation of the base."""
    p = op.params
    rank = len(p["window_dimensions"])
    base = p.get("base_dilation") or (1,) * rank
    padding = [tuple(pair) for pair in p["padding"]]
    seen = zip(p["window_dimensions"], p["window_strides"], padding, base, strict=True)
    return tuple(f if s == (1, 1, (0, 0), 1) else None for f, s in zip(dims(rank), seen, strict=True))


def _windowed(op: Operation, partials: tuple[Partials, ...]) -> Rule:
    names = untouched(op)
    return Rule(tuple(names if a.shape else () for a in op.operands), (names,) * len(op.results), partials=partials)


@rule("reduce_window_sum", "select_and_gather_add", "select_and_scatter_add")
def linear_window(op: Operation) -> Rule:
    """Sums over windows, or at the places that the second operand selects: linear in the first operand."""
    return _windowed(op, linear(len(op.operands), (0,)))


@rule("reduce_window_max")
def max_window(op: Operation) -> Rule:
    """A max of maxima."""
    return _windowed(op, passes(1, (0,), ops=("max",)))


@rule("reduce_window_min")
def min_window(op: Operation) -> Rule:
    """A min of minima."""
    return _windowed(op, passes(1, (0,), ops=("min",)))


@rule("reduce_window")
def any_window(op: Operation) -> Rule:
    """Any monoid; initial values are scalars."""
    return _windowed(op, ())
