"""Operations that work element by element.

`P(max)` and `P(min)` pass a map only if it is monotone on everything that a device may hold. The parts of a P(max) are
any numbers up to the value, down to the lowest of the dtype: so `sqrt` and `log` pass only P(min), and integer
negation, which wraps, passes neither.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import Operation, Partials, Rule, dims, linear, passes, rule

EXTREMA: Final[tuple[ReduceOp, ...]] = ("max", "min")
FLIPPED: Final[tuple[Partials, ...]] = ((("max",), "min"), (("min",), "max"))
"""Decreasing maps swap max and min."""


SPECIAL: Final = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "cos", "cosh",
    "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma", "igamma_grad_a", "igammac", "lgamma", "log",
    "log1p", "log2", "logistic", "polygamma", "pow", "regularized_incomplete_beta", "rsqrt", "sin", "sinh", "sqrt",
    "tan", "tanh", "threefry2x32", "zeta",
))  # fmt: skip
"""Functions of which each element takes as long as several additions (`Topology.special`)."""


def pointwise(op: Operation, partials: tuple[Partials, ...] = ()) -> Rule:
    """The rule of an elementwise operation: every dimension is a factor; scalars and sizes of 1 are read whole."""
    shape = op.results[0].shape
    names = dims(len(shape))
    return Rule(
        tuple(
            tuple(f if d == full else None for f, d, full in zip(names, a.shape, shape, strict=True)) if a.shape else ()
            for a in op.operands
        ),
        tuple(names for _ in op.results),
        partials=partials,
        kind="special" if op.name in SPECIAL else "elementwise",
    )


def _is_a(dtype: Any, kind: type) -> bool:
    return jnp.issubdtype(dtype, kind)


@rule(
    "abs", "acos", "acosh", "asin", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "clz", "cos", "cosh", "digamma",
    "eq", "eq_to", "erf_inv", "erfc", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "is_finite", "le", "le_to",
    "lgamma", "lt", "lt_to", "mulhi", "ne", "nextafter", "one_minus_square", "polygamma", "population_count", "pow",
    "reduce_precision", "regularized_incomplete_beta", "rem", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sin", "square", "tan", "threefry2x32", "xor", "zeta",
)  # fmt: skip
def elementwise(op: Operation) -> Rule:
    """Split any dimension; nothing passes a partial value."""
    return pointwise(op)


@rule("copy", "layout_constraint", "name", "stop_gradient")
def identity(op: Operation) -> Rule:
    """An identity: passes every partial value."""
    return pointwise(op, passes(1, (0,)))


@rule("add", "add_any", "sub", "complex")
def sums(op: Operation) -> Rule:
    """Linear in both operands together: P, P -> P."""
    return pointwise(op, linear(2, (0, 1)))


@rule("real", "imag", "conj")
def parts(op: Operation) -> Rule:
    """Linear over the reals."""
    return pointwise(op, linear(1, (0,)))


@rule("mul")
def product(op: Operation) -> Rule:
    """Linear in each operand: P, B -> P and B, P -> P."""
    return pointwise(op, linear(2, (0,), (1,)))


@rule("div")
def quotient(op: Operation) -> Rule:
    """Linear in the dividend where division is exact arithmetic: integer division truncates, so it is not."""
    return pointwise(op, linear(2, (0,)) if _is_a(op.results[0].dtype, np.inexact) else ())


@rule("neg")
def negation(op: Operation) -> Rule:
    """Linear; max(-x) = -min(x), except that the lowest integer is its own negative."""
    return pointwise(op, (*linear(1, (0,)), *(FLIPPED if _is_a(op.results[0].dtype, np.floating) else ())))


@rule("max", "min")
def extremum(op: Operation) -> Rule:
    """Associative and idempotent: max(max_d x_d, y) = max_d max(x_d, y)."""
    return pointwise(op, passes(2, (0, 1), (0,), (1,), ops=("max" if op.name == "max" else "min",)))


@rule("or", "and")
def logical(op: Operation) -> Rule:
    """On booleans `or` is max and `and` is min; on integers they are neither."""
    ops: tuple[ReduceOp, ...] = ("max" if op.name == "or" else "min",)
    return pointwise(op, passes(2, (0, 1), (0,), (1,), ops=ops) if _is_a(op.results[0].dtype, np.bool_) else ())


@rule("not")
def complement(op: Operation) -> Rule:
    """Decreasing on booleans, and on integers too: not x = -1 - x, which does not wrap."""
    return pointwise(op, FLIPPED)


@rule(
    "asinh", "atan", "cbrt", "ceil", "erf", "exp", "exp2", "expm1", "floor", "logistic", "round", "sign", "sinh", "tanh"
)
def increasing(op: Operation) -> Rule:
    """Monotone on the whole line: they commute with max and min."""
    return pointwise(op, passes(1, (0,), ops=EXTREMA) if _is_a(op.results[0].dtype, np.floating) else ())


@rule("log", "log1p", "log2", "sqrt")
def increasing_above(op: Operation) -> Rule:
    """Monotone above a bound: the parts of a P(min) are in the domain if the value is; of a P(max) they need not be."""
    return pointwise(op, passes(1, (0,), ops=("min",)) if _is_a(op.results[0].dtype, np.floating) else ())


@rule("polynomial")
def polynomial(op: Operation) -> Rule:
    """a0 + x (a1 + x (a2 + ...)): linear in all coefficients together, with x whole or split."""
    n = len(op.operands)
    return pointwise(op, linear(n, range(1, n)))


@rule("integer_pow")
def power(op: Operation) -> Rule:
    """The first power is the identity; other odd powers are increasing, where they do not wrap."""
    y = op.params["y"]
    if y == 1:
        return identity(op)
    return increasing(op) if y > 0 and y % 2 else pointwise(op)


@rule("clamp")
def clamp(op: Operation) -> Rule:
    """min(max(x, low), high) is monotone in x."""
    return pointwise(op, passes(3, (1,), ops=EXTREMA))


@rule("select_n")
def select(op: Operation) -> Rule:
    """Under one predicate a choice between cases is linear and monotone in all cases together."""
    n = len(op.operands)
    return pointwise(op, passes(n, range(1, n)))


@rule("convert_element_type")
def conversion(op: Operation) -> Rule:
    """A conversion: reductions that commute with its rounding pass."""
    return pointwise(op, passes(1, (0,), ops=conversion_ops(op.operands[0].dtype, op.results[0].dtype)))


@rule("bitcast_convert_type")
def bitcast(op: Operation) -> Rule:
    """`bitcast_convert_type`: split along the dimensions that operand and result share. The last dimension that a
    change of width adds or removes stays whole."""
    names = dims(min(len(op.operands[0].shape), len(op.results[0].shape)))
    operands, results = ((*names, None)[: len(a.shape)] for a in (op.operands[0], op.results[0]))
    return Rule((operands,), (results,))


def conversion_ops(old: Any, new: Any) -> tuple[ReduceOp, ...]:
    """The reductions that commute with a conversion from dtype `old` to `new`.

    Sums do if every value of `old` is one of `new` (floats), or if both wrap alike (integers of one width: the parts of
    an int8 sum may wrap where a wider sum would not). Maxima do if the conversion is monotone over the whole range: not
    if integers wrap, not to a float without infinities, not from a float to an integer.
    """
    if old == new:
        return ("sum", *EXTREMA)
    if _is_a(new, np.inexact) and _is_a(old, np.inexact):
        into_real = _is_a(new, np.floating)
        exact = _covers(new, old) and (_is_a(old, np.floating) or not into_real)
        ordered = into_real and _is_a(old, np.floating) and np.dtype(new).itemsize > 1
        return (*(("sum",) if exact else ()), *(EXTREMA if ordered else ()))
    if _is_a(new, np.floating) and _is_a(old, np.integer):
        return EXTREMA if np.dtype(new).itemsize > 1 else ()
    if _is_a(old, np.bool_):
        return EXTREMA if _is_a(new, np.integer) or _is_a(new, np.floating) else ()
    if _is_a(new, np.integer) and _is_a(old, np.integer):
        n, o = jnp.iinfo(new), jnp.iinfo(old)
        return (*(("sum",) if n.bits == o.bits else ()), *(EXTREMA if n.min <= o.min and n.max >= o.max else ()))
    return ()


def _covers(new: Any, old: Any) -> bool:
    n, o = jnp.finfo(new), jnp.finfo(old)
    return bool(n.nmant >= o.nmant and n.maxexp >= o.maxexp and n.minexp <= o.minexp)
