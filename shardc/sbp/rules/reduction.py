"""Reductions and running reductions along dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.piece import masked
from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import (
    Aval,
    Neutral,
    Operation,
    Partials,
    Rule,
    Setting,
    Site,
    dims,
    linear,
    neutral_value,
    passes,
    rule,
)

NEUTRAL: Mapping[ReduceOp, Neutral] = {"sum": "zero", "max": "lowest", "min": "highest"}


def kept_only(op: Operation, partials: tuple[Partials, ...] = ()) -> Rule:
    """A rule whose factors are the dimensions that stay; those in `axes` are never split."""
    names = dims(len(op.operands[0].shape))
    kept = tuple(f for i, f in enumerate(names) if i not in op.params["axes"])
    return Rule((names,), (kept,) * len(op.results), partials=partials)


def reduction(op: Operation, to: ReduceOp) -> Rule:
    """A rule in which a split of a reduced dimension leaves P(to), and P(to) passes."""
    names = dims(len(op.operands[0].shape))
    kept = tuple(f for i, f in enumerate(names) if i not in op.params["axes"])
    return Rule(
        (names,), (kept,),
        reduced={names[a]: to for a in op.params["axes"]},
        partials=passes(1, (0,), ops=(to,)),
        neutral={0: NEUTRAL[to]},
        kind="reduction",
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
    """On booleans max and min; on integers (bitwise) each device sends its result."""
    if not jnp.issubdtype(op.operands[0].dtype, np.bool_):
        return _exchanged_reduction(op)
    return reduction(op, "max" if op.name == "reduce_or" else "min")


@rule("reduce_prod", "reduce_xor")
def reduce_exchanged(op: Operation) -> Rule:
    """Products and xors leave no partial value that a placement can express: each device sends its result."""
    return _exchanged_reduction(op)


def _exchanged_reduction(op: Operation) -> Rule:
    names, axes = dims(len(op.operands[0].shape)), op.params["axes"]
    kept = tuple(f for i, f in enumerate(names) if i not in axes)
    gone = [names[a] for a in axes]
    return Rule(
        (names,), (kept,),
        reduced=dict.fromkeys(gone),
        exchanged=dict.fromkeys(gone, _reduced_here),
        across=_reduce_across,
    )  # fmt: skip


def _reduced_here(setting: Setting) -> Sequence[Aval]:
    return [jax.ShapeDtypeStruct(setting.result_shape(), setting.op.results[0].dtype)]


def _reduce_across(site: Site, x: Any) -> Sequence[Any]:
    axes, kind = site.op.params["axes"], site.op.name
    none = neutral_value("one" if kind == "reduce_prod" else "zero", x.dtype)
    if kind == "reduce_and":  # all bits
        none = np.asarray(-1 if jnp.issubdtype(x.dtype, np.signedinteger) else jnp.iinfo(x.dtype).max, x.dtype)
    for dim in axes:
        x = masked(site, 0, dim, x, none)
    (y,) = site.bind(x)
    for dim in axes:
        if split := site.operands[0].axes_of(dim):
            (y,) = site.bind(site.wire.all_gather(y, split), axes=(0,))
    return [y]


@rule("reduce")
def reduce_any(op: Operation) -> Rule:
    """Any monoid: only the dimensions that stay are split. Initial values are scalars and need not be neutral: parts
    would count them more than once. XLA would do so too, because it reduces the parts of a concatenation separately: a
    barrier hides the origin of the operands."""
    n = len(op.results)
    names = dims(len(op.operands[0].shape))
    kept = tuple(f for i, f in enumerate(names) if i not in op.params["dimensions"])

    def local(site: Site, *operands: Any) -> Any:
        return site.bind(*lax.optimization_barrier(operands))

    return Rule((names,) * n + ((),) * n, (kept,) * n, local=local)


_RUNNING: Final[Mapping[str, tuple[Neutral, Callable[[Any, Any], Any]]]] = {
    "cumsum": ("zero", lax.add), "cumprod": ("one", lax.mul), "cummax": ("lowest", lax.max),
    "cummin": ("highest", lax.min), "cumlogsumexp": ("lowest", jnp.logaddexp),
}  # fmt: skip


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Operation) -> Rule:
    """Every dimension. Along the running one each device sends the total of its piece, and continues from the totals of
    the pieces before it. A running sum is linear, a running max passes P(max)."""
    names, axis = dims(len(op.operands[0].shape)), op.params["axis"]
    ops: Mapping[str, tuple[Partials, ...]] = {
        "cumsum": linear(1, (0,)),
        "cummax": passes(1, (0,), ops=("max",)),
        "cummin": passes(1, (0,), ops=("min",)),
    }
    unordered = op.name in ("cummax", "cummin", "cumlogsumexp") and np.dtype(op.operands[0].dtype).kind == "c"
    if unordered:  # no element is neutral
        names = tuple(None if i == axis else f for i, f in enumerate(names))
    running = names[axis] if op.operands[0].shape[axis] else None
    return Rule(
        (names,), (names,),
        partials=ops.get(op.name, ()),
        exchanged={running: _running_total} if running else {},
        across=_run_on,
        passes=2.0,
    )  # fmt: skip


def _running_total(setting: Setting) -> Sequence[Aval]:
    shape = list(setting.operand_shape(0))
    shape[setting.op.params["axis"]] = 1
    return [jax.ShapeDtypeStruct(shape, setting.op.operands[0].dtype)]


def _run_on(site: Site, x: Any) -> Sequence[Any]:
    axis, reverse = site.op.params["axis"], site.op.params["reverse"]
    axes = site.operands[0].axes_of(axis)
    kind, combine = _RUNNING[site.op.name]
    neutral = neutral_value(kind, x.dtype)
    (here,) = site.bind(masked(site, 0, axis, x, neutral))
    total = lax.slice_in_dim(here, 0, 1, axis=axis) if reverse else lax.slice_in_dim(here, -1, None, axis=axis)
    totals = jnp.squeeze(jnp.moveaxis(site.wire.all_gather(total, axes), 0, axis), axis + 1)
    (others,) = site.bind(totals)
    none = jnp.full(total.shape, neutral, x.dtype)
    others = jnp.concatenate([others, none] if reverse else [none, others], axis)
    before = lax.dynamic_slice_in_dim(others, site.linear_index(axes) + (1 if reverse else 0), 1, axis)
    return [combine(before, here)]
