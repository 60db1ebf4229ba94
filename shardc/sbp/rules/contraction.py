"""Contractions: c[b, m, n] = sum over k of a[b, m, k] · b[b, n, k], of whole dimensions or by groups of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc.sbp.placement import ReduceOp
from shardc.sbp.signature import Operation, Partials, Rule, Site, Terms, bind_same, dims, linear, rule

THIN: Final = 16
"""A product with so few rows, columns or contracted elements is thin, as are those of attention (`Topology.shares`)."""


def bilinear(op: Operation) -> tuple[Partials, ...]:
    """The partials of a product: linear in each operand whose sums wrap as those of the result do."""
    result = op.results[0].dtype
    wraps = [jnp.issubdtype(a.dtype, np.integer) and a.dtype != result for a in op.operands]
    return linear(len(op.operands), *((i,) for i in (0, 1) if not wraps[i]))


def _names(op: Operation, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> list[list[str]]:
    """Factors of the first two operands: `b*` batch, `k*` contracted, `m*` and `n*` the others."""
    names = [list(dims(len(a.shape), side)) for side, a in zip("mn", op.operands, strict=False)]
    for kind, pairs in (("k", contract), ("b", batch)):
        for j, (left, right) in enumerate(zip(*pairs, strict=True)):
            names[0][left] = names[1][right] = f"{kind}{j}"
    return names


@rule("dot_general")
def dot_general(op: Operation) -> Rule:
    """Batch, left, right and contracted dimensions; a split contraction leaves P(sum)."""
    contract, batch = op.params["dimension_numbers"]
    names = _names(op, contract, batch)
    free = [f for side, kind in zip(names, "mn", strict=True) for f in side if f[0] == kind]
    sizes = {f: d for side, a in zip(names, op.operands, strict=True) for f, d in zip(side, a.shape, strict=True)}
    return Rule(
        (tuple(names[0]), tuple(names[1])),
        ((*(f"b{j}" for j in range(len(batch[0]))), *free),),
        reduced={f"k{j}": "sum" for j in range(len(contract[0]))},
        partials=bilinear(op),
        neutral={0: "zero", 1: "zero"},
        terms=_terms(op),
        flops=2.0 * math.prod(sizes.values()),
        kind="thin" if _is_thin(sizes) else "",
    )


def _is_thin(sizes: Mapping[str, int]) -> bool:
    return min(math.prod(n for f, n in sizes.items() if f[0] == kind) for kind in "mnk") <= THIN


def _terms(op: Operation) -> Terms:
    """The terms of a product. Those of narrow floats are float32: they are not rounded before they are added up."""
    precision, dtype = op.params.get("precision"), op.results[0].dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    if not narrow or isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return Terms(dtype, bind_same)
    wide = np.dtype(np.float32)
    return Terms(wide, lambda site, x, w: site.bind(x, w, preferred_element_type=wide))


@rule("scaled_dot")
def scaled_dot(op: Operation) -> Rule:
    """A contraction in blocks with one scale each: contracted dimensions are cut only between blocks. The operands are
    rounded before they are multiplied, so it is linear in none."""
    contract, batch = op.params["dimension_numbers"]
    names = [tuple(side) for side in _names(op, contract, batch)]
    free = [f for side, kind in zip(names, "mn", strict=True) for f in side if f[0] == kind]
    a, b, *scales = op.operands
    blocks = [math.gcd(scales[0].shape[i], scales[1].shape[j]) for i, j in zip(*contract, strict=True)]
    sizes = dict(zip((*names[0], *names[1]), (*a.shape, *b.shape), strict=True))
    return Rule(
        (*names, *names), ((*(f"b{j}" for j in range(len(batch[0]))), *free),),
        reduced={f"k{j}": "sum" for j in range(len(blocks))},
        granule={f"k{j}": n for j, n in enumerate(blocks)},
        flops=2.0 * math.prod(sizes.values()),
    )  # fmt: skip


@rule("ragged_dot_general")
def ragged_dot_general(op: Operation) -> Rule | None:
    """A contraction in which each group of rows has its own right operand (rows along `m`) or its own result (rows
    along `k`). Rows may be split: every device knows from the sizes which groups its rows belong to. A device that
    holds only some groups gives zeros for the rows of the others, or only the results of its own."""
    numbers, sizes = op.params["ragged_dot_dimension_numbers"], op.operands[2]
    if op.params["group_offset"] is not None:
        return None
    (contract, batch), ragged = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions[0]
    names = _ragged_names(op)
    free = [f for side, (over, along) in zip(names, zip(contract, batch, strict=True), strict=True)
            for d, f in enumerate(side) if f != "g" and d not in (*over, *along)]  # fmt: skip
    result = [*(names[0][d] for d in batch[0]), *free]
    reduced: dict[str, ReduceOp | None] = {f: "sum" for d in contract[0] if (f := names[0][d])}
    if ragged in contract[0]:
        result.insert(0, "g")
    elif numbers.rhs_group_dimensions:
        reduced["g"] = "sum"
    before = [names[0][d] for d in _before(ragged, contract[0], batch[0], len(names[0]))]
    shapes = {f: n for side, a in zip(names, op.operands, strict=False) for f, n in zip(side, a.shape, strict=True)}
    return Rule(
        (tuple(names[0]), tuple(names[1]), (*(before if len(sizes.shape) > 1 else ()), None)), (tuple(result),),
        reduced=reduced,
        partials=bilinear(op),
        neutral={0: "zero", 1: "zero", 2: "zero"},
        local=_groups_here,
        flops=2.0 * math.prod(n for f, n in shapes.items() if f != "g"),
    )  # fmt: skip


def _ragged_names(op: Operation) -> list[list[str | None]]:
    """Factors of the first two operands; `g` are the groups of the right one."""
    numbers, sizes = op.params["ragged_dot_dimension_numbers"], op.operands[2]
    (contract, batch), ragged = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions[0]
    names = _names(op, contract, batch)
    for d in numbers.rhs_group_dimensions:
        names[1][d] = "g"
    # Rows that are a batch dimension stay whole; so do rows whose sizes have a narrow type, as their sums wrap.
    whole = names[0][ragged] if ragged in batch[0] or np.dtype(sizes.dtype).itemsize < 4 else None
    return [[None if f == whole else f for f in side] for side in names]


def _before(ragged: int, contract: Sequence[int], batch: Sequence[int], rank: int) -> list[int]:
    """Dimensions of the left operand that have group sizes of their own."""
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    outer = contract if ragged in contract else [d for d in range(rank) if d not in (*contract, *batch)]
    return [*batch, *outer[: outer.index(ragged)]]


def _sizes_of_rows(site: Site, ragged: int, sizes: Any) -> Any:
    """The sizes of the groups within this device's rows."""
    offset, valid = (jnp.asarray(n, sizes.dtype) for n in site.operand_extent(0, ragged))
    ends = jnp.cumsum(sizes, -1, sizes.dtype)
    return jnp.clip(ends, offset, offset + valid) - jnp.clip(ends - sizes, offset, offset + valid)


def _sizes_of_groups(sizes: Any, offset: Any, count: int) -> tuple[Any, Any]:
    """The total of the groups before this device's own, which stand for one group, and the sizes of its own."""
    earlier = lax.broadcasted_iota(np.int32, sizes.shape, sizes.ndim - 1) < offset
    skipped = jnp.where(earlier, sizes, 0).sum(-1, keepdims=True, dtype=sizes.dtype)
    padded = jnp.pad(sizes, [(0, 0)] * (sizes.ndim - 1) + [(0, count)])
    return skipped, lax.dynamic_slice_in_dim(padded, jnp.asarray(offset, np.int32), count, padded.ndim - 1)


def _without_batch(site: Site, x: Any, w: Any, sizes: Any) -> Sequence[Any]:
    """The product without the batch dimensions that have one element here: kernels take none."""
    numbers = site.op.params["ragged_dot_dimension_numbers"]
    (contract, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    one = [k for k, d in enumerate(batch[0]) if x.shape[d] == 1 and d != ragged]
    if not one or len(one) < len(batch[0]) or sizes.ndim != len(one) + 1:
        return site.bind(x, w, sizes)
    gone = batch
    left, right = (lambda d: d - sum(b < d for b in gone[0])), (lambda d: d - sum(b < d for b in gone[1]))
    plain = type(numbers)(
        ((tuple(map(left, contract[0])), tuple(map(right, contract[1]))), ((), ())),
        (left(ragged),), tuple(map(right, numbers.rhs_group_dimensions)),
    )  # fmt: skip
    (y,) = site.bind(
        lax.squeeze(x, batch[0]), lax.squeeze(w, batch[1]), lax.squeeze(sizes, range(len(one))),
        ragged_dot_dimension_numbers=plain,
    )  # fmt: skip
    at = 1 if ragged in contract[0] else 0
    return [lax.expand_dims(y, range(at, at + len(one)))]


def _groups_here(site: Site, x: Any, w: Any, sizes: Any) -> Sequence[Any]:
    numbers = site.op.params["ragged_dot_dimension_numbers"]
    ragged, group = numbers.lhs_ragged_dimensions[0], numbers.rhs_group_dimensions
    result_groups = not group and ragged in numbers.dot_dimension_numbers[0][0]
    by_group = site.operands[1].axes_of(group[0]) if group else site.results[0].axes_of(0) if result_groups else ()
    if site.operands[0].axes_of(ragged):
        sizes = _sizes_of_rows(site, ragged, sizes)
    if not by_group:
        return _without_batch(site, x, w, sizes)
    offset, _ = site.operand_extent(1, group[0]) if group else site.result_extent(0, 0)
    skipped, own = _sizes_of_groups(sizes, offset, w.shape[group[0]] if group else site.result_shape()[0])
    if group:
        w = jnp.pad(w, [(int(d == group[0]), 0) for d in range(w.ndim)])
    (y,) = site.bind(x, w, jnp.concatenate([skipped, own], -1))
    if not group:
        return [y[1:]]
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    row = len(batch) + sum(d not in (*contract, *batch) for d in range(ragged))
    if skipped.ndim > 1:  # one number for each batch and each dimension before the rows, as in the result
        skipped = lax.expand_dims(skipped, range(skipped.ndim, y.ndim))
    others = lax.broadcasted_iota(skipped.dtype, y.shape, row) < skipped
    return [jnp.where(others, jnp.zeros((), y.dtype), y)]  # infinity times zero would be NaN
