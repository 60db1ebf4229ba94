"""Reductions and running reductions along dimensions."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import Neutral, Operation, Partials, Rule, dims, linear, passes, rule

NEUTRAL: Mapping[ReduceOp, Neutral] = {"sum": "zero", "max": "lowest", "min": "highest"}


def kept_only(op: Operation, partials: tuple[Partials, ...] = ()) -> Rule:
    """The dimensions that stay are factors; those in `axes` are never split."""
    names = dims(len(op.operands[0].shape))
    kept = tuple(f for i, f in enumerate(names) if i not in op.params["axes"])
    return Rule((names,), (kept,) * len(op.results), partials=partials)


def reduction(op: Operation, to: ReduceOp) -> Rule:
    """A split of a reduced dimension leaves P(to), and P(to) passes."""
    names = dims(len(op.operands[0].shape))
    kept = tuple(f for i, f in enumerate(names) if i not in op.params["axes"])
    return Rule(
        (names,), (kept,),
        reduced={names[a]: to for a in op.params["axes"]},
        partials=passes(1, (0,), ops=(to,)),
        neutral={0: NEUTRAL[to]},
    )  # fmt: skip


@rule("reduce_sum")
def reduce_sum(op: Operation) -> Rule:
    """A sum of sums."""
    return reduction(op, "sum")


@rule("reduce_max")
def reduce_max(op: Operation) -> Rule:
    """A max of maxima."""
    return reduction(op, "max")


@rule("reduce_min")
def reduce_min(op: Operation) -> Rule:
    """A min of minima."""
    return reduction(op, "min")


@rule("reduce_or", "reduce_and")
def reduce_logical(op: Operation) -> Rule:
    """On booleans max and min; bitwise on integers they are neither."""
    if not jnp.issubdtype(op.operands[0].dtype, np.bool_):
        return kept_only(op)
    return reduction(op, "max" if op.name == "reduce_or" else "min")


@rule("reduce_prod", "reduce_xor")
def reduce_kept(op: Operation) -> Rule:
    """Products and xors leave no partial value that a placement could name."""
    return kept_only(op)


@rule("reduce")
def reduce_any(op: Operation) -> Rule:
    """Any monoid: only the dimensions that stay; initial values are scalars."""
    n = len(op.results)
    names = dims(len(op.operands[0].shape))
    kept = tuple(f for i, f in enumerate(names) if i not in op.params["dimensions"])
    return Rule((names,) * n + ((),) * n, (kept,) * n)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Operation) -> Rule:
    """The running dimension stays whole; a running sum is linear, a running max passes P(max)."""
    names = tuple(None if i == op.params["axis"] else f for i, f in enumerate(dims(len(op.operands[0].shape))))
    ops: Mapping[str, tuple[Partials, ...]] = {
        "cumsum": linear(1, (0,)),
        "cummax": passes(1, (0,), ops=("max",)),
        "cummin": passes(1, (0,), ops=("min",)),
    }
    return Rule((names,), (names,), partials=ops.get(op.name, ()))
