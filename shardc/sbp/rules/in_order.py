"""Operations whose results are the same to the bit however their operands are split (`deterministic=True`).

`in_order[of=f]` computes what `f` does. Its dimensions are cut in chunks, as many on every mesh:

    elementwise    XLA may contract a product and a sum into one rounding if it fuses them: each result is sealed
    reduce_sum     a tree of additions, first within a chunk, then over the chunks
    other          one chunk of each factor at a time, so that a kernel has one shape on every mesh; chunks of a
                   summed factor are added in the tree

A device holds whole chunks. Sums that are not whole change places in an all-to-all, are added in the tree's order, and
are gathered. So no value is a partial sum of several terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardc import compat
from shardc.sbp.placement import REPLICATED, Placement, S
from shardc.sbp.signature import (
    Aval,
    Factors,
    Operation,
    Rule,
    Setting,
    Site,
    Turned,
    family_of,
    find_rule,
    rule,
)

in_order_p: Final = Primitive("in_order")
"""`of`: the primitive; `grain`: chunks of a dimension, at most; the other parameters are those of `of`."""
in_order_p.multiple_results = True

LEVELS: Final = 3
"""Levels of a tree of additions that XLA may fuse: what it fuses it writes out, 2^3 terms for each element."""


def _run(*operands: Any, of: Any, grain: int, **params: Any) -> list[Any]:
    return compat.bind_with(of, params)(*operands)


in_order_p.def_impl(_run)
in_order_p.def_abstract_eval(
    lambda *avals, **params: [
        compat.shaped_array(s.shape, s.dtype) for s in jax.eval_shape(functools.partial(_run, **params), *avals)
    ]
)
mlir.register_lowering(in_order_p, mlir.lower_fun(_run, multiple_results=True))


def operation_in(op: Operation) -> Operation:
    """The operation that `in_order` computes."""
    params = {k: v for k, v in op.params.items() if k not in ("of", "grain")}
    return Operation(op.params["of"].name, op.operands, op.results, params)


@rule("in_order")
def in_order(op: Operation) -> Rule:
    """The rule of the operation without sums in parts: maxima and minima pass, as they are exact."""
    inner = operation_in(op)
    found = find_rule(inner)
    partials = tuple(p for p in found.partials if p[1] != "sum")
    if family_of(inner.name) == "elementwise":
        return replace(found, partials=partials, local=_sealed)
    if family_of(inner.name) == "scatter":  # each device applies all updates of its elements, in their order
        parts = {f for f, to in found.reduced.items() if to == "sum"}
        kept = {f: to for f, to in found.reduced.items() if f not in parts}
        return replace(_only(found, set(_factors(found)) - parts), reduced=kept, partials=partials, local=_scattered)
    if inner.name == "reduce_sum":
        grid = dict(_chunks(found, inner, [f for f in found.reduced], op.params["grain"]))
        summed = next(iter(grid), None)
        local: Callable[..., Sequence[Any]] = _added
        rest = {f for f in _factors(found) if f not in found.reduced}
    else:
        grid = grid_of(inner, op.params["grain"])
        summed = next((f for f in grid if f in found.reduced), None)
        local, rest = _in_pieces, set(grid)
    return replace(
        _only(found, rest | ({summed} if summed else set())),
        reduced={summed: None} if summed else {},
        exchanged={summed: functools.partial(_sent, _sum_dtype(found, inner))} if summed else {},
        granule=grid, partials=(), neutral={}, windows=(), local=local, across=local, terms=None,
        passes=_passes(found, inner, grid) if found.is_heavy else 0.0,
    )  # fmt: skip


def _factors(found: Rule) -> Iterator[str]:
    return (f for fs in (*found.operands, *found.results) for f in fs if f)


def _only(found: Rule, factors: set[str]) -> Rule:
    """The rule with only these factors."""

    def kept(fs: Factors) -> Factors:
        return tuple(f if f in factors else None for f in fs)

    return replace(found, operands=tuple(map(kept, found.operands)), results=tuple(map(kept, found.results)))


def grid_of(inner: Operation, grain: int) -> dict[str, int]:
    """The number of chunks of each factor of an operation that has more than one: at most `grain`, and at most its
    third power in all.

    Batch dimensions come first, then the first one of each operand that no other has, then the first summed one.
    """
    found = find_rule(inner)
    sums = [f for f in found.factors() if found.reduced.get(f) == "sum"]
    kept = [f for f in found.factors() if f not in found.reduced and f not in found.crossing]
    kept = [f for f in kept if all(f in fs for fs in found.results)]
    shared = [f for f in kept if all(f in fs for fs in found.operands if len(fs))]
    firsts = [next((f for f in kept if f in fs and f not in shared), None) for fs in found.operands]
    first_sum = next((f for f, _ in _chunks(found, inner, sums, grain)), None)
    wanted = dict.fromkeys(f for f in (*shared, *firsts, first_sum, *kept) if f)
    grid: dict[str, int] = {}
    for f, n in _chunks(found, inner, list(wanted), grain):
        if math.prod(grid.values()) * n <= grain**3:
            grid[f] = n
    return grid


def _chunks(found: Rule, inner: Operation, factors: Sequence[str], grain: int) -> Iterator[tuple[str, int]]:
    """The factors that can be cut in equal chunks, and in how many: a power of two."""
    sizes = found.sizes(inner)
    for f in factors:
        n = math.gcd(sizes[f], found.granule.get(f, 0) or sizes[f], grain)
        if n > 1:
            yield f, n


def _passes(found: Rule, inner: Operation, grid: Mapping[str, int]) -> float:
    """How often one device alone reads and writes the memory of the operation: a port once for each chunk of the
    factors that it does not have."""
    ports = zip((*found.operands, *found.results), (*inner.operands, *inner.results), strict=True)
    held = [(math.prod(a.shape) or 1, math.prod(n for f, n in grid.items() if f not in fs)) for fs, a in ports]
    return max(found.passes, 1.0) * sum(size * times for size, times in held) / sum(size for size, _ in held)


def _sum_dtype(found: Rule, inner: Operation) -> Any:
    return found.terms.dtype if found.terms is not None else inner.results[0].dtype


# --- elements


def seal(x: Any) -> Any:
    """`x`, behind an exclusive or with a zero that XLA does not know: no rewriting looks through it, fusion does."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.optimization_barrier(x)
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    zero = lax.optimization_barrier(np.zeros((), bits))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) ^ zero, x.dtype)


def _within(site: Site) -> Site:
    """The place of the inner operation."""
    of, inner = site.op.params["of"], operation_in(site.op)
    return replace(site, op=inner, bind=compat.bind_with(of, inner.params))


def _sealed(site: Site, *operands: Any) -> Sequence[Any]:
    within = _within(site)
    return [seal(y) for y in find_rule(within.op).local(within, *operands)]


def _scattered(site: Site, *operands: Any) -> Sequence[Any]:
    within = _within(site)
    made = find_rule(within.op).local(within, *lax.optimization_barrier(operands))
    return lax.optimization_barrier(made)


# --- sums


def _tree(x: Any, axis: int) -> Any:
    """The sum along a dimension, of neighbours first: n elements that start at a multiple of n are one subtree, if n is
    a power of two."""
    level = 0
    while (n := x.shape[axis]) > 1:
        even = n - n % 2
        y = lax.slice_in_dim(x, 0, even, 2, axis) + lax.slice_in_dim(x, 1, even, 2, axis)
        x = y if even == n else lax.concatenate([y, lax.slice_in_dim(x, even, n, 1, axis)], axis)
        level += 1
        if level % LEVELS == 0:
            x = lax.optimization_barrier(x)
    return lax.squeeze(x, (axis,)) if x.shape[axis] else jnp.zeros([n for d, n in enumerate(x.shape) if d != axis], x.dtype)


def _summed_factor(site: Setting) -> tuple[str | None, tuple[str, ...]]:
    """The summed factor that may be split, and the axes that split it."""
    found = in_order(site.op)
    summed = next(iter(found.reduced), None)
    if summed is None or summed in _kept_reduced(found):
        return None, ()
    return summed, found.crossed(site).get(summed, ())


def _kept_reduced(found: Rule) -> set[str]:
    return {f for f, to in found.reduced.items() if to is not None}


def _added(site: Site, x: Any) -> Sequence[Any]:
    """A sum: first along the dimensions that are whole, within a chunk, then over the chunks."""
    found, (summed, axes) = in_order(site.op), _summed_factor(site)
    dims = site.op.params["axes"]
    at = found.operands[0].index(summed) if summed else None
    here = 1 if summed is None else found.granule[summed] // math.prod(site.sizes[a] for a in axes)
    x = lax.optimization_barrier(x)
    for d in sorted((d for d in dims if d != at), reverse=True):
        x = _tree(x, d)
        at = at - 1 if at is not None and d < at else at
    if at is not None:
        x = x.reshape(*x.shape[:at], here, x.shape[at] // here, *x.shape[at + 1 :])
        x = _tree(_tree(x, at + 1), at)
    return [_over_devices(site, seal(x), axes)]


def _sent(dtype: Any, setting: Setting) -> Sequence[Aval]:
    """The arrays that the devices send for a sum over split chunks."""
    _, axes = _summed_factor(setting)
    sent: list[Aval] = []
    for i in range(len(setting.results)):
        n, size = math.prod(setting.sizes[a] for a in axes), math.prod(setting.result_shape(i))
        if size < n:
            sent.append(jax.ShapeDtypeStruct((size,), dtype))
        else:
            part = (-(-size // n),)
            sent += [Turned(part, dtype), jax.ShapeDtypeStruct(part, dtype)]
    return sent


def _over_devices(site: Site, x: Any, axes: tuple[str, ...]) -> Any:
    """The sum of the devices' parts, in the order of their chunks."""
    n = math.prod(site.sizes[a] for a in axes)
    if n == 1:
        return x
    flat = x.reshape(-1)
    if flat.size < n:
        return seal(_tree(site.wire.all_gather(flat, axes), 0)).reshape(x.shape)
    part = -(-flat.size // n)
    padded = lax.pad(flat, np.zeros((), x.dtype), [(0, n * part - flat.size, 0)])
    parts = site.wire.all_to_all(padded.reshape(n, part), axes)
    return site.wire.all_gather(seal(_tree(parts, 0)), axes).reshape(-1)[: flat.size].reshape(x.shape)


# --- pieces


def _in_pieces(site: Site, *operands: Any) -> Sequence[Any]:
    """One chunk of each factor at a time, whichever of them this device holds."""
    within = _within(site)
    found, pieces = find_rule(within.op), _Pieces(site, within)
    summed, axes = _summed_factor(site)
    wide = found.terms is not None and summed is not None
    local = found.terms.local if wide and found.terms is not None else found.local

    def piece(at: Mapping[str, Any]) -> list[Any]:
        made = local(pieces.site(at), *lax.optimization_barrier(pieces.cut(operands, at)))
        return list(lax.optimization_barrier(tuple(map(jnp.asarray, made))))

    def total(at: Mapping[str, Any]) -> list[Any]:
        if summed is None or pieces.here[summed] == 1:
            return piece(at)
        terms = lax.map(lambda k: piece({**at, summed: k}), np.arange(pieces.here[summed], dtype=np.int32))
        return [seal(_tree(y, 0)) for y in lax.optimization_barrier(terms)]

    made = pieces.joined(total, [f for f in pieces.here if f != summed])
    made = [_over_devices(site, y, axes) for y in made]
    return [y.astype(a.dtype) if wide else y for y, a in zip(made, within.op.results, strict=True)]


class _Pieces:
    """The chunks of an operation that one device holds.

    Attributes:
      here: the number of them along each factor.
    """

    def __init__(self, site: Site, within: Site) -> None:
        found = find_rule(within.op)
        self.within, self.factors = within, (found.operands, found.results)
        self.grid = in_order(site.op).granule
        axes: dict[str, tuple[str, ...]] = {}
        for i, factors in enumerate((*found.operands, *found.results)):
            axes |= {f: a for d, a in site.port(i)[1].splits.items() if (f := factors[d]) is not None}
        self.here = {f: n // math.prod(site.sizes[a] for a in axes.get(f, ())) for f, n in self.grid.items()}
        self.first = {f: site.linear_index(axes.get(f, ())) * n for f, n in self.here.items()}

    def _placement(self, factors: Factors) -> Placement:
        held = [(f, S(d)) for d, f in enumerate(factors) if f in self.grid]
        return Placement(held) if held else REPLICATED

    def site(self, at: Mapping[str, Any]) -> Site:
        """The place of one piece: as if each factor were an axis of a mesh with a device for each chunk."""
        operands, results = (tuple(map(self._placement, side)) for side in self.factors)
        return replace(
            self.within, operands=operands, results=results, sizes=self.grid,
            index=lambda f: self.first[f] + at.get(f, 0),
        )  # fmt: skip

    def cut(self, operands: Sequence[Any], at: Mapping[str, Any]) -> tuple[Any, ...]:
        """The chunks of the operands."""
        found: list[Any] = []
        for x, factors in zip(operands, self.factors[0], strict=True):
            for d, f in enumerate(factors):
                if f in self.grid and self.here[f] > 1:
                    size = x.shape[d] // self.here[f]
                    x = lax.dynamic_slice_in_dim(x, at[f] * size, size, d)  # noqa: PLW2901
            found.append(x)
        return tuple(found)

    def joined(self, make: Callable[[Mapping[str, Any]], list[Any]], factors: Sequence[str]) -> list[Any]:
        """The results of `make` for every chunk of these factors, put together."""
        factors = [f for f in factors if self.here[f] > 1]
        if not factors:
            return make({})
        counts = [self.here[f] for f in factors]
        rows = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), -1).reshape(-1, len(factors))
        made = lax.map(lambda row: make(dict(zip(factors, row, strict=True))), jnp.asarray(rows.astype(np.int32)))
        return [
            _merged(y.reshape(*counts, *y.shape[1:]), [factors.index(f) if f in factors else None for f in fs])
            for y, fs in zip(made, self.factors[1], strict=True)
        ]


def _merged(x: Any, counted: Sequence[int | None]) -> Any:
    """`x`, whose leading dimensions number the chunks, with each merged into the dimension that it is of."""
    lead = x.ndim - len(counted)
    order = [k for d, c in enumerate(counted) for k in ((lead + d,) if c is None else (c, lead + d))]
    shape = [x.shape[lead + d] * (1 if c is None else x.shape[c]) for d, c in enumerate(counted)]
    return x.transpose(order).reshape(shape)
