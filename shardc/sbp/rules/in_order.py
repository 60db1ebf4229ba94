"""Operations whose results are the same to the bit however their operands are split (`deterministic=True`).

`in_order[of=f]` computes what `f` computes. Dimensions are cut in chunks, in as many on every mesh:

    elementwise    each result is sealed: XLA rounds a product and a sum that it fuses once, and does not see these two;
                   exponentials and the like are computed on CPUs in rows of one size
    reduce_sum     additions in a tree, within a chunk first, then over the chunks
    other          one chunk of each factor at a time, so that a kernel has the same shape on every mesh; chunks of a
                   summed factor are added in the tree

A device holds whole chunks, and so whole subtrees. The sums of devices change places in an all-to-all, are added in the
tree's order, and are gathered. No value is a partial sum of several terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardc import compat
from shardc.sbp.placement import Placement, S
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

ROW: Final = 512
"""Elements of a row, in which CPUs compute what they approximate."""
_ROUNDED_ONCE: Final = frozenset(
    ("add", "add_any", "convert_element_type", "div", "integer_pow", "mul", "reduce_precision", "rem", "sqrt", "square",
     "sub")
)  # fmt: skip
"""Elementwise operations on real numbers of which each step is exact but for its rounding, in whatever loop."""
LEVELS: Final = 3
"""Levels of the tree that XLA may fuse: fused levels are written out, with 2^3 terms for each element."""


def _run(*operands: Any, of: Any, grain: int, **params: Any) -> list[Any]:
    return compat.bind_with(of, params)(*operands)


def _abstract(*avals: Any, **params: Any) -> list[Any]:
    shapes = jax.eval_shape(functools.partial(_run, **params), *avals)
    return [compat.shaped_array(s.shape, s.dtype) for s in shapes]


in_order_p.def_impl(_run)
in_order_p.def_abstract_eval(_abstract)
mlir.register_lowering(in_order_p, mlir.lower_fun(_run, multiple_results=True))


@rule("in_order")
def in_order(op: Operation) -> Rule:
    """The rule of the operation with no sums in parts: maxima and minima pass, as they are exact."""
    inner, grain = _inner(op), op.params["grain"]
    found = find_rule(inner)
    exact = replace(found, partials=tuple(p for p in found.partials if p[1] != "sum"))
    sums = _summed(found)
    if family_of(inner.name) == "elementwise":
        return replace(exact, local=_sealed)
    if family_of(inner.name) == "scatter":  # each device adds all updates of its elements, in their order
        return _without(replace(exact, local=_alone), sums)
    grid = dict(_chunks(found, inner, sums, grain)) if inner.name == "reduce_sum" else grid_of(inner, grain)
    summed = next((f for f in grid if f in sums), None)
    ordered = _Ordered(found, {f: n for f, n in grid.items() if f == summed or f not in sums}, summed)
    if inner.name == "reduce_sum":
        local, whole = ordered.added, [f for f in sums if f != summed]
    else:
        local, whole = ordered.in_pieces, [f for f in found.sizes(inner) if f not in ordered.grid]
    return replace(
        _without(found, whole),
        reduced={f: None for f in sums if f == summed},
        exchanged={f: ordered.sent for f in sums if f == summed},
        granule=ordered.grid, partials=(), neutral={}, windows=(), around={}, local=local, across=local, held=None,
        terms=None,
        passes=_passes(found, inner, ordered.grid) if found.is_heavy else 0.0,
    )  # fmt: skip


def _inner(op: Operation) -> Operation:
    """The operation that `in_order` computes."""
    params = {k: v for k, v in op.params.items() if k not in ("of", "grain")}
    return Operation(op.params["of"].name, op.operands, op.results, params)


def _summed(found: Rule) -> list[str]:
    """The factors that are summed, if their pieces do not communicate."""
    return [f for f in found.factors() if found.reduced.get(f) == "sum" and f not in found.crossing]


def _within(site: Site) -> Site:
    """The place of the inner operation."""
    inner = _inner(site.op)
    return replace(site, op=inner, bind=compat.bind_with(site.op.params["of"], inner.params))


def _without(found: Rule, factors: Collection[str]) -> Rule:
    """The rule without some factors: their dimensions are never split."""

    def left(fs: Factors) -> Factors:
        return tuple(None if f in factors else f for f in fs)

    reduced = {f: to for f, to in found.reduced.items() if f not in factors}
    operands, results = (tuple(map(left, side)) for side in (found.operands, found.results))
    return replace(found, operands=operands, results=results, reduced=reduced)


def grid_of(inner: Operation, grain: int) -> dict[str, int]:
    """The factors of an operation that are cut, and in how many chunks: at most `grain`, in all at most its third
    power, as a product has three kinds of dimensions.

    Batch dimensions come first, then the first other one of each operand, then the first summed one.
    """
    found = find_rule(inner)
    sums = _summed(found)
    kept = [f for f in found.factors() if f not in found.crossing and all(f in fs for fs in found.results)]
    shared = [f for f in kept if all(f in fs for fs in found.operands if fs)]
    firsts = [next((f for f in kept if f in fs and f not in shared), "") for fs in found.operands]
    summed = [f for f, _ in _chunks(found, inner, sums, grain)][:1]
    grid: dict[str, int] = {}
    for f, n in _chunks(found, inner, dict.fromkeys((*shared, *filter(None, firsts), *summed, *kept)), grain):
        if math.prod(grid.values()) * n <= grain**3:
            grid[f] = n
    return grid


def _chunks(found: Rule, inner: Operation, factors: Collection[str], grain: int) -> Iterator[tuple[str, int]]:
    """The factors that can be cut in equal chunks, and in how many: a power of two, as `grain` is one."""
    sizes = found.sizes(inner)
    for f in factors:
        if (n := math.gcd(sizes[f], found.granule.get(f, 0), grain)) > 1:
            yield f, n


def _passes(found: Rule, inner: Operation, grid: Mapping[str, int]) -> float:
    """How often one device alone goes through the memory of the operation: through each operand and result once for
    every chunk of the factors that it does not have."""
    ports = zip((*found.operands, *found.results), (*inner.operands, *inner.results), strict=True)
    held = [(math.prod(a.shape), math.prod(n for f, n in grid.items() if f not in fs)) for fs, a in ports]
    return max(found.passes, 1.0) * sum(size * times for size, times in held) / max(1, sum(size for size, _ in held))


# --- elements


def seal(x: Any) -> Any:
    """`x` in an exclusive or with a zero that no compiler knows. Fusion goes through it, no rewriting does."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.optimization_barrier(x)
    return lax.bitcast_convert_type(_bits(x) ^ _zero(_bits(x)), x.dtype)


def _bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _zero(bits: Any) -> Any:
    """Zero: a square is 0, 1 or 4 modulo 8, so its bits 0 and 2 are never both set."""
    square = bits * bits
    return square & (square >> np.asarray(2, bits.dtype)) & np.asarray(1, bits.dtype)


def _sealed(site: Site, *operands: Any) -> Sequence[Any]:
    within = _within(site)
    operands = _division(*operands) if within.op.name == "div" else operands

    def whole(*xs: Any) -> list[Any]:
        return [seal(y) for y in find_rule(within.op).local(within, *xs)]

    if within.op.name in _ROUNDED_ONCE and not any(jnp.issubdtype(x.dtype, np.complexfloating) for x in operands):
        return whole(*operands)
    return lax.platform_dependent(*operands, cpu=functools.partial(_in_rows, whole), default=whole)


def _in_rows(fn: Callable[..., list[Any]], *operands: Any) -> list[Any]:
    """The elementwise results of `fn`, computed in a loop over rows of `ROW` elements. In vectors, in the elements that
    are left behind them, and in a loop that is unrolled, XLA:CPU computes an exponential with other instructions."""
    operands = jnp.broadcast_arrays(*operands)
    shape, size = operands[0].shape, operands[0].size
    count = max(2, -(-size // ROW))  # XLA unrolls a loop of one row
    rows = [jnp.pad(x.reshape(-1), (0, count * ROW - size)).reshape(count, ROW) for x in operands]
    made = lax.map(lambda row: _apart(fn(*_apart(row))), rows)
    return [y.reshape(-1)[:size].reshape(shape) for y in made]


def _division(x: Any, y: Any) -> tuple[Any, Any]:
    """The operands of a division, with a divisor that is not seen to be constant or to repeat: where XLA sees that, it
    multiplies by the rounded inverse."""
    x, y = jnp.broadcast_arrays(x, y)
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return x, lax.optimization_barrier(y)
    unlike = _bits(x) ^ lax.iota(_bits(x).dtype, x.size).reshape(x.shape)
    return x, lax.bitcast_convert_type(_bits(y) ^ _zero(unlike), y.dtype)


def _alone(site: Site, *operands: Any) -> Sequence[Any]:
    """The local piece, which nothing is fused with."""
    within = _within(site)
    made = find_rule(within.op).local(within, *_apart(operands))
    return _apart([jnp.asarray(y) for y in made])


def _apart(values: Sequence[Any]) -> list[Any]:
    """Values that nothing is fused across, in the layout that kernels get on every mesh."""
    return [compat.row_major(x) for x in lax.optimization_barrier(tuple(values))]


# --- sums


def tree_sum(x: Any, axis: int) -> Any:
    """The sum along a dimension, of neighbours first: 2^n elements that begin at a multiple of 2^n are a subtree."""
    level = 0
    while (n := x.shape[axis]) > 1:
        even = n - n % 2
        y = lax.slice_in_dim(x, 0, even, 2, axis) + lax.slice_in_dim(x, 1, even, 2, axis)
        x = y if even == n else lax.concatenate([y, lax.slice_in_dim(x, even, n, 1, axis)], axis)
        level += 1
        if level % LEVELS == 0:
            x = lax.optimization_barrier(x)
    return x.sum(axis, dtype=x.dtype) if not x.shape[axis] else lax.squeeze(x, (axis,))


@dataclass(frozen=True)
class _Ordered:
    """The computation of an operation in chunks.

    Attributes:
      found: the rule of the operation.
      grid: the factors that are cut, and in how many chunks.
      summed: the one of them that is summed, if any.
    """

    found: Rule
    grid: Mapping[str, int]
    summed: str | None

    def axes(self, setting: Setting, factor: str | None) -> tuple[str, ...]:
        """The axes that split a factor."""
        for i, factors in enumerate((*self.found.operands, *self.found.results)):
            if factor in factors and factor is not None and (axes := setting.port(i)[1].axes_of(factors.index(factor))):
                return axes
        return ()

    def here(self, setting: Setting, factor: str) -> int:
        """The number of chunks of a factor that a device holds."""
        return self.grid[factor] // math.prod(setting.sizes[a] for a in self.axes(setting, factor))

    def added(self, site: Site, x: Any) -> Sequence[Any]:
        """The sum of an array: along the dimensions that are whole, within each chunk, then over the chunks."""
        x, at = lax.optimization_barrier(x), None
        if self.summed is not None:
            at = self.found.operands[0].index(self.summed)
        for d in sorted((d for d in site.op.params["axes"] if d != at), reverse=True):
            x = tree_sum(x, d)
            at = at - 1 if at is not None and d < at else at
        if at is not None and self.summed is not None:
            n = self.here(site, self.summed)
            x = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
            x = tree_sum(tree_sum(x, at + 1), at)
        return [self.over_devices(site, seal(x))]

    def sent(self, setting: Setting) -> Sequence[Aval]:
        """The arrays that devices send for a sum over chunks of several devices."""
        n, sent = math.prod(setting.sizes[a] for a in self.axes(setting, self.summed)), list[Aval]()
        for i, result in enumerate(setting.op.results):
            dtype = result.dtype if self.found.terms is None else self.found.terms.dtype
            part = (-(-math.prod(setting.result_shape(i)) // n),)
            few = math.prod(setting.result_shape(i)) < n
            sent += [jax.ShapeDtypeStruct(setting.result_shape(i), dtype)] if few else [Turned(part, dtype)]
            sent += [] if few else [jax.ShapeDtypeStruct(part, dtype)]
        return sent

    def over_devices(self, site: Site, x: Any) -> Any:
        """The sum of the devices' parts, in the order of their chunks: each device adds a part of it up."""
        axes = self.axes(site, self.summed)
        n, size = math.prod(site.sizes[a] for a in axes), x.size
        if n == 1:
            return x
        if size < n:
            return seal(tree_sum(site.wire.all_gather(x, axes), 0))
        part = -(-size // n)
        rows = lax.pad(x.reshape(-1), np.zeros((), x.dtype), [(0, n * part - size, 0)]).reshape(n, part)
        mine = seal(tree_sum(site.wire.all_to_all(rows, axes), 0))
        return site.wire.all_gather(mine, axes).reshape(-1)[:size].reshape(x.shape)

    def in_pieces(self, site: Site, *operands: Any) -> Sequence[Any]:
        """One chunk of each factor at a time, of those that this device holds."""
        within, here, summed = _within(site), {f: self.here(site, f) for f in self.grid}, self.summed
        first = {f: site.linear_index(self.axes(site, f)) * n for f, n in here.items()}
        terms = self.found.terms if summed is not None else None
        local = self.found.local if terms is None else terms.local

        def piece(at: Mapping[str, Any]) -> list[Any]:
            place = self._piece_site(within, {f: first[f] + at.get(f, 0) for f in here})
            made = local(place, *_apart(self._cut(operands, at, here)))
            return _apart(tuple(map(jnp.asarray, made)))

        def total(at: Mapping[str, Any]) -> list[Any]:
            if summed is None or here[summed] == 1:
                return piece(at)
            parts = lax.map(lambda k: piece({**at, str(summed): k}), np.arange(here[summed], dtype=np.int32))
            return [seal(tree_sum(y, 0)) for y in lax.optimization_barrier(parts)]

        made = self._joined(total, {f: n for f, n in here.items() if f != summed and n > 1})
        made = [self.over_devices(site, y) for y in made]
        return [y.astype(a.dtype) for y, a in zip(made, site.op.results, strict=True)] if terms else made

    def _piece_site(self, within: Site, index: Mapping[str, Any]) -> Site:
        """The place of one piece: as if each factor were an axis of a mesh, with a device for each chunk."""

        def at(factors: Factors) -> Placement:
            return Placement([(f, S(d)) for d, f in enumerate(factors) if f in self.grid and f is not None])

        operands, results = tuple(map(at, self.found.operands)), tuple(map(at, self.found.results))
        return replace(within, operands=operands, results=results, sizes=self.grid, index=lambda f: index[f])

    def _cut(self, operands: Sequence[Any], at: Mapping[str, Any], here: Mapping[str, int]) -> tuple[Any, ...]:
        """The chunks of the operands."""
        found: list[Any] = []
        for operand, factors in zip(operands, self.found.operands, strict=True):
            x = operand
            for d, f in enumerate(factors):
                if f is not None and here.get(f, 1) > 1:
                    size = x.shape[d] // here[f]
                    x = lax.dynamic_slice_in_dim(x, at[f] * size, size, d)
            found.append(x)
        return tuple(found)

    def _joined(self, make: Callable[[Mapping[str, Any]], list[Any]], counts: Mapping[str, int]) -> list[Any]:
        """The results of `make` for every chunk of these factors, put together."""
        if not counts:
            return make({})
        factors = list(counts)
        numbers = np.stack(np.meshgrid(*map(np.arange, counts.values()), indexing="ij"), -1).reshape(-1, len(counts))
        rows = jnp.asarray(numbers.astype(np.int32))
        made = lax.map(lambda row: make(dict(zip(factors, row, strict=True))), rows)
        return [
            _merged(y.reshape(*counts.values(), *y.shape[1:]), [factors.index(f) if f in factors else None for f in fs])
            for y, fs in zip(made, self.found.results, strict=True)
        ]


def _merged(x: Any, numbers: Sequence[int | None]) -> Any:
    """`x`, whose leading dimensions number chunks, with each of these merged into the dimension that is cut."""
    lead = x.ndim - len(numbers)
    order = [k for d, c in enumerate(numbers) for k in ((lead + d,) if c is None else (c, lead + d))]
    shape = [x.shape[lead + d] * (1 if c is None else x.shape[c]) for d, c in enumerate(numbers)]
    return x.transpose(order).reshape(shape)
