"""Operations that work element by element."""

from __future__ import annotations

import numpy as np
from jax import dtypes

from shardc.sbp.signature import Operation, Partials, Rule, linear, rule


def pointwise(op: Operation, partials: tuple[Partials, ...] = ()) -> Rule:
    """Every dimension is a factor; scalars beside arrays are read whole."""
    rank = max((len(a.shape) for a in (*op.operands, *op.results)), default=0)
    names = tuple(f"d{i}" for i in range(rank))
    return Rule(
        tuple(names if a.shape else () for a in op.operands),
        tuple(names for _ in op.results),
        partials=partials,
    )


@rule(
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp", "clz", "cos",
    "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv", "erfc", "floor", "ge", "gt", "is_finite",
    "le", "le_to", "lgamma", "lt", "lt_to", "ne", "nextafter", "not", "or", "population_count",
    "pow", "rem", "round", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
    "square", "tan", "xor",
)  # fmt: skip
def elementwise(op: Operation) -> Rule:
    """Split any dimension; nothing passes a partial value."""
    return pointwise(op)


@rule("add", "add_any", "sub")
def sums(op: Operation) -> Rule:
    """Linear in both operands together: P, P -> P."""
    return pointwise(op, linear(2, (0, 1)))


@rule("mul")
def product(op: Operation) -> Rule:
    """Linear in each operand: P, B -> P and B, P -> P."""
    return pointwise(op, linear(2, (0,), (1,)))


@rule("div")
def quotient(op: Operation) -> Rule:
    """Linear in the dividend where division is exact arithmetic: integer division truncates, so it is not."""
    inexact = dtypes.issubdtype(op.results[0].dtype, np.inexact)
    return pointwise(op, linear(2, (0,)) if inexact else ())


@rule("exp", "exp2", "expm1", "log", "log1p", "logistic", "sqrt", "tanh")
def increasing(op: Operation) -> Rule:
    """Monotone maps: they commute with max and min."""
    if not dtypes.issubdtype(op.results[0].dtype, np.floating):
        return pointwise(op)
    return pointwise(op, ((("max",), "max"), (("min",), "min")))
