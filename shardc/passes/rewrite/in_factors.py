"""Operations on values in factors: how each of them does its work where merged dimensions are held as their factors.

`lookup(eqn, given)` has what is known of the operands, None for one that is not in factors, and gives the same
operation on factors; None if it needs the merged dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn
from shardc.ir.walk import bytes_of, itemsize_of
from shardc.passes.rewrite.factors import Factors, common, common_of, plain, shape_of, spans_of, spread, with_whole
from shardc.sbp.signature import family_of


@dataclass(frozen=True, slots=True)
class InFactors:
    """An operation on values in factors.

    Attributes:
      operands: with the factors that it reads each in.
      results: the factors of each result.
      params: of the primitive.
      computed: a function of the operands, in place of the primitive.
      cost: bytes that it merges all the same.
    """

    operands: tuple[tuple[Atom, Factors], ...]
    results: tuple[Factors, ...]
    params: dict[str, Any]
    computed: Callable[..., Any] | None = None
    cost: int = 0


START: Final = 2**22
"""Bytes of a whole value that move in the time of one more collective. In less no index is sought in two steps."""


Given: TypeAlias = Sequence[Factors | None]
Way: TypeAlias = Callable[[Eqn, Given], InFactors | None]


def way_of(eqn: Eqn) -> Way | None:
    """How an operation is done in factors; None if it is not."""
    name = eqn.primitive.name
    return pointwise if is_pointwise(name) else _WAYS.get(name)


def is_pointwise(name: str) -> bool:
    return (family_of(name) == "elementwise" and name != "bitcast_convert_type") or name in _POINTWISE_ON_KEYS


_POINTWISE_ON_KEYS: Final = ("random_clone", "random_fold_in", "random_seed")


def pointwise(eqn: Eqn, given: Given) -> InFactors | None:
    """All operands in the same factors; scalars as they are, a dimension of one element has as many factors of one."""
    shape = eqn.outvars[0].aval.shape
    known = [(a.aval.shape, f) for a, f in zip(eqn.invars, given, strict=True) if f is not None]
    groups = [common((n,), *(f[d] for sizes, f in known if sizes[d] == n)) for d, n in enumerate(shape)]
    if None in groups:
        return None
    factors = tuple(g or () for g in groups)
    return InFactors(tuple((a, _stretched(a, factors)) for a in eqn.invars), (factors,) * len(eqn.outvars), eqn.params)


def _stretched(atom: Atom, factors: Factors) -> Factors:
    """The factors of an operand of a result in `factors`."""
    sizes = atom.aval.shape
    return (
        tuple(g if n == math.prod(g) else (1,) * len(g) for n, g in zip(sizes, factors, strict=True)) if sizes else ()
    )


def _filled(eqn: Eqn, given: Given) -> list[Factors]:
    return [f or plain(a.aval.shape) for a, f in zip(eqn.invars, given, strict=True)]


def _broadcast(eqn: Eqn, given: Given) -> InFactors | None:
    factors, shape, to = _filled(eqn, given), eqn.params["shape"], eqn.params["broadcast_dimensions"]
    result = list(plain(shape))
    for group, d in zip(factors[0], to, strict=True):
        if math.prod(group) == shape[d]:
            result[d] = group
    return broadcast_to(eqn, tuple(result), factors)


def broadcast_to(eqn: Eqn, result: Factors, factors: Sequence[Factors] | None = None) -> InFactors:
    """A broadcast whose result is in these factors."""
    shape, to, spans = eqn.params["shape"], eqn.params["broadcast_dimensions"], spans_of(result)
    x = eqn.invars[0]
    operand = tuple(result[d] if n == shape[d] else (n,) for n, d in zip(x.aval.shape, to, strict=True))
    kept = [spans[d] if n == shape[d] else spans[d][:1] for n, d in zip(x.aval.shape, to, strict=True)]
    params = {**eqn.params, "shape": shape_of(result), "broadcast_dimensions": tuple(d for s in kept for d in s)}
    rest = tuple(zip(eqn.invars[1:], (factors or [()])[1:], strict=True))
    return InFactors(((x, operand), *rest), (result,), params)


def _transpose(eqn: Eqn, given: Given) -> InFactors | None:
    (factors,), order = _filled(eqn, given), eqn.params["permutation"]
    params = {**eqn.params, "permutation": spread(spans_of(factors), order)}
    return InFactors(((eqn.invars[0], factors),), (tuple(factors[d] for d in order),), params)


def _along(name: str) -> Way:
    """Dimensions of which a parameter names one or several that are worked along: these are merged."""

    def way(eqn: Eqn, given: Given) -> InFactors | None:
        factors, named = common_of([f for f in given if f is not None]), eqn.params[name]
        dims = named if isinstance(named, tuple) else (named,)
        if factors is None:
            return None
        factors = with_whole(factors, dims)
        at = spread(spans_of(factors), dims)
        params = {**eqn.params, name: at if isinstance(named, tuple) else at[0]}
        return InFactors(tuple((a, factors) for a in eqn.invars), (factors,) * len(eqn.outvars), params)

    return way


def _rev(eqn: Eqn, given: Given) -> InFactors | None:
    (factors,) = _filled(eqn, given)
    params = {**eqn.params, "dimensions": spread(spans_of(factors), eqn.params["dimensions"])}
    return InFactors(((eqn.invars[0], factors),), (factors,), params)


def _reduction(name: str) -> Way:
    """All factors of a reduced dimension are reduced; further operands are initial values."""

    def way(eqn: Eqn, given: Given) -> InFactors | None:
        n, axes = len(eqn.outvars), eqn.params[name]
        factors = common_of([f for f in given[:n] if f is not None])
        if factors is None:
            return None
        kept = tuple(f for d, f in enumerate(factors) if d not in axes)
        params = {**eqn.params, name: spread(spans_of(factors), axes)}
        if params.get("out_sharding") is not None:
            return None
        operands = (*((a, factors) for a in eqn.invars[:n]), *((a, ()) for a in eqn.invars[n:]))
        return InFactors(operands, (kept,) * n, params)

    return way


def _arg_extremum(eqn: Eqn, given: Given) -> InFactors | None:
    """Of a merged dimension: the least number of all elements that equal the extremum, or are NaN."""
    (factors,), (axis,), (x,) = _filled(eqn, given), eqn.params["axes"], eqn.invars
    at = spread(spans_of(factors), (axis,))
    kept = tuple(f for d, f in enumerate(factors) if d != axis)
    operands = ((x, factors),)
    if len(at) == 1:
        return InFactors(operands, (kept,), {**eqn.params, "axes": at})
    if bytes_of(x) < START:
        return None
    dtype, largest = eqn.params["index_dtype"], eqn.primitive.name == "argmax"

    def run(u: Any) -> Any:
        best = (jnp.max if largest else jnp.min)(u, at, keepdims=True)
        found = (u == best) | (u != u)
        last = np.asarray(math.prod(factors[axis]) - 1, dtype)
        return lax.reduce_min(jnp.where(found, _number(u.shape, at, dtype), last), at)

    return InFactors(operands, (kept,), eqn.params, run)


def _number(shape: Sequence[int], dims: Sequence[int], dtype: Any) -> Any:
    """The number of each element along the merged dimensions `dims`."""
    number: Any = None
    for d in dims:
        here = lax.broadcasted_iota(dtype, shape, d)
        number = here if number is None else number * np.asarray(shape[d], dtype) + here
    return number


def _top_k(eqn: Eqn, given: Given) -> InFactors | None:
    """Of a merged dimension: the largest along its last factor, then of these along the factors before."""
    (factors,), (x,), k = _filled(eqn, given), eqn.invars, eqn.params["k"]
    rank = len(factors)
    axis = eqn.params.get("axis", rank - 1) % rank
    *outer, last = spread(spans_of(factors), (axis,))
    results = (tuple((k,) if d == axis else f for d, f in enumerate(factors)),) * 2
    if not outer:
        axes = {"axis": last} if "axis" in eqn.params else {}
        return InFactors(((x, factors),), results, {**eqn.params, **axes})
    row = factors[axis][-1]
    cost = compat.size_of(x.aval) // row * min(k, row) * (itemsize_of(x.aval) + 4)
    if axis != rank - 1 or cost + START > bytes_of(x):
        return None
    index = eqn.outvars[1].aval.dtype

    def run(u: Any) -> Any:
        values, found = lax.top_k(u, min(k, u.shape[-1]))
        inner = u.shape[-1]
        for _ in outer:
            number = lax.broadcasted_iota(index, found.shape, found.ndim - 2) * np.asarray(inner, index)
            inner *= found.shape[-2]
            found = (found.astype(index) + number).reshape(*found.shape[:-2], -1)
            values, of = lax.top_k(values.reshape(found.shape), min(k, found.shape[-1]))
            found = jnp.take_along_axis(found, of, -1)
        return values, found

    return InFactors(((x, factors),), results, eqn.params, run, cost)


def _dot_general(eqn: Eqn, given: Given) -> InFactors | None:
    """Free dimensions of either side, batch dimensions alike, contracted ones if both sides are in factors."""
    sides = [list(f) for f in _filled(eqn, given)]
    contracted, batch = eqn.params["dimension_numbers"]
    if eqn.params.get("out_sharding") is not None:
        return None
    for left, right in (contracted, batch):
        for i, j in zip(left, right, strict=True):
            group = common(sides[0][i], sides[1][j])
            if group is None or (None in given and i in contracted[0]):
                group = (math.prod(sides[0][i]),)
            sides[0][i] = sides[1][j] = group
    spans = [spans_of(tuple(f)) for f in sides]
    pairs = [tuple(spread(s, dims) for s, dims in zip(spans, both, strict=True)) for both in (contracted, batch)]
    result = [sides[0][d] for d in batch[0]]
    for n, side in enumerate(sides):
        result += [group for d, group in enumerate(side) if d not in contracted[n] and d not in batch[n]]
    operands = tuple((a, tuple(f)) for a, f in zip(eqn.invars, sides, strict=True))
    return InFactors(operands, (tuple(result),), {**eqn.params, "dimension_numbers": tuple(pairs)})


def _gather(eqn: Eqn, given: Given) -> InFactors | None:
    """Dimensions of the indices, those of the operand that go with them, and those that every slice takes whole."""
    numbers, sizes, (x, at) = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.invars
    operand, indices = map(list, _filled(eqn, given))
    paired = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    whole = [d for d in range(len(sizes)) if sizes[d] == x.aval.shape[d] and d not in numbers.start_index_map]
    links = [(operand, d, indices, j) for d, j in paired]
    links += [(operand, d, operand, d) for d in whole] + [(indices, j, indices, j) for j in range(len(indices) - 1)]
    if not _linked(links, operand, indices):
        return None
    spans, of_indices = spans_of(tuple(operand)), spans_of(tuple(indices))
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    taken = tuple(
        (1,) * len(group) if sizes[d] == 1 else group if len(group) > 1 else (sizes[d],)
        for d, group in enumerate(operand)
    )
    offsets, rows = (taken[d] for d in range(len(sizes)) if d not in dropped), iter(indices[:-1])
    result = tuple(
        next(offsets) if d in numbers.offset_dims else next(rows) for d in range(len(eqn.outvars[0].aval.shape))
    )
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(
            offset_dims=spread(spans_of(result), numbers.offset_dims),
            collapsed_slice_dims=spread(spans, numbers.collapsed_slice_dims),
            start_index_map=spread(spans, numbers.start_index_map),
            operand_batching_dims=spread(spans, (d for d, _ in paired)),
            start_indices_batching_dims=spread(of_indices, (j for _, j in paired)),
        ),
        "slice_sizes": shape_of(taken),
    }
    return InFactors(((x, tuple(operand)), (at, tuple(indices))), (result,), params)


def _scatter(eqn: Eqn, given: Given) -> InFactors | None:
    """As in a gather: dimensions of the indices, those that go with them, and those that every update takes whole."""
    numbers, (x, at, updates) = eqn.params["dimension_numbers"], eqn.invars
    operand, indices, update = map(list, _filled(eqn, given))
    paired = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = zip((d for d in range(len(operand)) if d not in gone), numbers.update_window_dims, strict=True)
    rows = (d for d in range(len(update)) if d not in numbers.update_window_dims)
    links = [(indices, j, update, w) for j, w in enumerate(rows)]
    links += [(operand, d, indices, j) for d, j in paired]
    links += [
        (operand, d, update, w)
        for d, w in windows
        if x.aval.shape[d] == updates.aval.shape[w] and d not in numbers.scatter_dims_to_operand_dims
    ]
    if not _linked(links, operand, indices, update):
        return None
    spans, of_indices = spans_of(tuple(operand)), spans_of(tuple(indices))
    numbers = numbers._replace(
        update_window_dims=spread(spans_of(tuple(update)), numbers.update_window_dims),
        inserted_window_dims=spread(spans, numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=spread(spans, numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=spread(spans, (d for d, _ in paired)),
        scatter_indices_batching_dims=spread(of_indices, (j for _, j in paired)),
    )
    operands = ((x, tuple(operand)), (at, tuple(indices)), (updates, tuple(update)))
    return InFactors(operands, (tuple(operand),), {**eqn.params, "dimension_numbers": numbers})


_Side: TypeAlias = list[tuple[int, ...]]
"""The factors of an operand, while those of its dimensions are sought."""


def _linked(links: Sequence[tuple[_Side, int, _Side, int]], *sides: _Side) -> bool:
    """Gives linked dimensions common factors; False if there are none, or if a dimension has factors that is linked to
    no other."""
    for _ in sides:  # what two sides have in common reaches the third
        for a, i, b, j in links:
            if (group := common(a[i], b[j])) is None:
                return False
            a[i] = b[j] = group
    ends = {(id(side), d) for a, i, b, j in links for side, d in ((a, i), (b, j))}
    return all(len(group) == 1 or (id(side), d) in ends for side in sides for d, group in enumerate(side))


def _cut(eqn: Eqn, factors: Factors) -> tuple[Factors, Factors]:
    """The factors of an operand and of what is cut out of it: dimensions that are not taken whole are merged."""
    sizes = list(zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True))
    factors = with_whole(factors, (d for d, (n, m) in enumerate(sizes) if n != m))
    return factors, tuple(f if n == m else (m,) for f, (n, m) in zip(factors, sizes, strict=True))


def _slice(eqn: Eqn, given: Given) -> InFactors | None:
    p, (factors, result) = eqn.params, _cut(eqn, _filled(eqn, given)[0])
    starts = tuple(start for f, start in zip(factors, p["start_indices"], strict=True) for _ in f)
    limits = tuple(n for f, m in zip(factors, p["limit_indices"], strict=True) for n in (f if len(f) > 1 else (m,)))
    strides = tuple(step for f, step in zip(factors, p["strides"] or starts, strict=False) for _ in f)
    params = {**p, "start_indices": starts, "limit_indices": limits, "strides": p["strides"] and strides}
    return InFactors(((eqn.invars[0], factors),), (result,), params)


def _with_starts(eqn: Eqn, factors: Factors, starts: Sequence[Atom]) -> list[tuple[Atom, Factors]]:
    """The start of each factor of a dynamic slice: a merged dimension, which is taken whole, starts at 0."""
    found: list[tuple[Atom, Factors]] = []
    for start, group in zip(starts, factors, strict=True):
        zero = compat.literal(np.asarray(0, start.aval.dtype), compat.shaped_array((), start.aval.dtype))
        found += [(start, ())] if len(group) == 1 else [(zero, ())] * len(group)
    return found


def _dynamic_slice(eqn: Eqn, given: Given) -> InFactors | None:
    (x, *starts), (factors, result) = eqn.invars, _cut(eqn, _filled(eqn, given)[0])
    if len(starts) != len(factors):
        return None
    operands = ((x, factors), *_with_starts(eqn, factors, starts))
    return InFactors(operands, (result,), {**eqn.params, "slice_sizes": shape_of(result)})


def _dynamic_update_slice(eqn: Eqn, given: Given) -> InFactors | None:
    (x, update, *starts), (of_x, of_update, *_) = eqn.invars, _filled(eqn, given)
    if len(starts) != len(of_x):
        return None
    new: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for a, b, n, m in zip(of_x, of_update, x.aval.shape, update.aval.shape, strict=True):
        group = common(a, b) if n == m else None
        new.append(((n,), (m,)) if group is None else (group, group))
    factors, rows = (tuple(side) for side in zip(*new, strict=True))
    operands = ((x, factors), (update, rows), *_with_starts(eqn, factors, starts))
    return InFactors(operands, (factors,), eqn.params)


def _pad(eqn: Eqn, given: Given) -> InFactors | None:
    factors, config = _filled(eqn, given)[0], eqn.params["padding_config"]
    none = (0, 0, 0)
    factors = with_whole(factors, (d for d, c in enumerate(config) if c != none))
    result = tuple(f if len(f) > 1 else (n,) for f, n in zip(factors, eqn.outvars[0].aval.shape, strict=True))
    config = tuple(c for f, c in zip(factors, config, strict=True) for _ in f)
    operands = ((eqn.invars[0], factors), (eqn.invars[1], ()))
    return InFactors(operands, (result,), {**eqn.params, "padding_config": config})


def _concatenate(eqn: Eqn, given: Given) -> InFactors | None:
    dim, sides = eqn.params["dimension"], _filled(eqn, given)
    rest = common_of([(*f[:dim], *f[dim + 1 :]) for f in sides])
    if rest is None:
        return None
    before, after = rest[:dim], rest[dim:]
    operands = tuple((a, (*before, (a.aval.shape[dim],), *after)) for a in eqn.invars)
    result = (*before, (eqn.outvars[0].aval.shape[dim],), *after)
    return InFactors(operands, (result,), {**eqn.params, "dimension": len(shape_of(before))})


def _stack(eqn: Eqn, given: Given) -> InFactors | None:
    factors, axis = common_of([f for f in given if f is not None]), eqn.params["axis"]
    if factors is None:
        return None
    before, after = factors[:axis], factors[axis:]
    operands = tuple((a, factors) for a in eqn.invars)
    result = (*before, (len(operands),), *after)
    return InFactors(operands, (result,), {**eqn.params, "axis": len(shape_of(before))})


def _unstack(eqn: Eqn, given: Given) -> InFactors | None:
    (factors,), axis = _filled(eqn, given), eqn.params["axis"]
    factors = with_whole(factors, (axis,))
    before, after = factors[:axis], factors[axis + 1 :]
    results = ((*before, *after),) * len(eqn.outvars)
    return InFactors(((eqn.invars[0], factors),), results, {**eqn.params, "axis": len(shape_of(before))})


_WAYS: Final[dict[str, Way]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "sort": _along("dimension"),
    "rev": _rev,
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"),
        _reduction("axes"),
    ),
    "reduce": _reduction("dimensions"),
    **dict.fromkeys(("argmax", "argmin"), _arg_extremum),
    "top_k": _top_k,
    "dot_general": _dot_general,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"), _scatter),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
}
