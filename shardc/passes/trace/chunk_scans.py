"""Associative scans over split time: each device scans its own steps, and the totals of all devices are scanned.

`jax.lax.associative_scan` is a tree of strided slices when a program is traced, and no signature of these slices is
cheap. So it is caught while it is traced. If pins split its dimension over n devices, the function is traced again,
with n chunks:

    y = scan f x   -->   t[c] = the total of chunk c; p = scan f t; y in chunk c = scan f x, begun with p[c - 1]

The chunks are computed side by side in a dimension of their own, so that every operation but the scan of the totals is
local. Work and differentiation are those of JAX's own scan: it is the same tree, cut at the height of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Eqn, Var
from shardc.ir.program import Program
from shardc.ir.walk import all_eqns

Chunks: TypeAlias = tuple[tuple[str, int], ...]
"""For each kind of scan (shapes, dimension) the number of its chunks. Kinds that are not listed have one."""


DevicesOf: TypeAlias = Callable[[Var, int, set[tuple[Var, int]]], int]


@dataclass(frozen=True)
class ScanMaker:
    """Makes the associative scans of a function that is traced: in chunks, or as JAX does, under a name by which
    `split_scans` finds them. Equal makers are one: JAX keeps what it traces by them."""

    chunks: Chunks = ()

    def __call__(self, scan: Callable[..., Any], fn: Any, elems: Any, reverse: bool, axis: int) -> Any:
        leaves = jax.tree.leaves(elems)
        kind = f"{' '.join(compat.short_text(jnp.shape(x), jnp.result_type(x)) for x in leaves)} along {axis}"
        n = dict(self.chunks).get(kind, 1)
        if n > 1:
            return _in_chunks(scan, fn, elems, reverse, axis, n)
        with jax.named_scope(compat.scope_of_scan(kind)):
            return scan(fn, elems, reverse, axis)


def scans_of(program: Program) -> list[tuple[str, Eqn]]:
    """The slices that JAX makes of associative scans, with the kind of each."""
    slices = [e for e in all_eqns(program.jaxpr) if e.primitive is lax.slice_p and e.params["strides"]]
    return [
        (kind, e) for e in slices if (kind := compat.scan_named(e)) is not None and not compat.is_literal(e.invars[0])
    ]


def split_scans(scans: Sequence[tuple[str, Eqn]], devices_of: DevicesOf) -> Chunks:
    """The kinds of scans along dimensions that are split by pins, and by how many devices.

    Args:
      scans: of `scans_of`.
      devices_of: the number of devices that split a dimension of a value, as `devices_along` gives it.
    """
    found: dict[str, int] = {}
    seen: set[tuple[Var, int]] = set()
    for kind, eqn in scans:
        if kind in found:
            continue
        for dim, stride in enumerate(eqn.params["strides"]):
            if stride > 1 and (n := devices_of(eqn.invars[0], dim, seen)) > 1:
                found[kind] = n
                seen.clear()  # that walk ended before it had seen all origins
                break
    return tuple(found.items())


def _in_chunks(scan: Callable[..., Any], fn: Any, elems: Any, reverse: bool, axis: int, n: int) -> Any:
    """An associative scan in `n` chunks, the last ones shorter: like the pieces of a dimension on `n` devices."""
    leaves, tree = jax.tree.flatten(elems)
    leaves, axis = list(map(jnp.asarray, leaves)), axis % jnp.ndim(leaves[0])
    length = leaves[0].shape[axis]
    steps = -(-length // n)
    if steps < 2:
        return scan(fn, elems, reverse, axis)

    def combined(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(fn(tree.unflatten(a), tree.unflatten(b)))

    if n * steps > length:
        first = [
            lax.stop_gradient(
                lax.slice_in_dim(x, *((length - 1 - i, length - i) if reverse else (i, i + 1)), axis=axis)
            )
            for i in (0, 1)
            for x in leaves
        ]
        pair = first[: len(leaves)], first[len(leaves) :]
        real = jnp.ones((1,) * axis + (length,), bool)
        leaves = [_filled(x, n * steps - length, axis) for x in (real, *leaves)]
        ys = _Chunked(scan, _skipping(combined, pair, axis), reverse, axis, n).run(leaves)[1:]
    else:
        ys = _Chunked(scan, combined, reverse, axis, n).run(leaves)
    return tree.unflatten([lax.slice_in_dim(y, 0, length, axis=axis) for y in ys])


_Combine: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def _filled(x: Any, more: int, axis: int) -> Any:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, more if d == axis else 0, 0) for d in range(x.ndim)])


def _skipping(combined: _Combine, pair: tuple[Sequence[Any], Sequence[Any]], axis: int) -> _Combine:
    """`combined` of elements with a flag in front, which returns the other one where one is not real. It computes with
    `pair` there, whose combination is finite if that of all elements is, and so is its derivative."""

    def both(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        (real, *xs), (also, *ys) = a, b

        def where(flags: Any, x: Any, y: Any) -> Any:
            return jnp.where(flags[(...,) + (None,) * (x.ndim - axis - 1)], x, y)

        safe = [
            [where(real & also, x, y) for x, y in zip(*side, strict=True)] for side in ((xs, pair[0]), (ys, pair[1]))
        ]
        found = [where(real & also, z, where(real, x, y)) for x, y, z in zip(xs, ys, combined(*safe), strict=True)]
        return [real | also, *found]

    return both


@dataclass(frozen=True)
class _Chunked:
    """A scan in `n` chunks of equal size: each value has dimension `axis` for the chunks and the next for their
    steps."""

    scan: Callable[..., Any]
    combined: _Combine
    reverse: bool
    axis: int
    n: int

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The scanned leaves, like `leaves` without a dimension for the chunks."""
        xs = [x.reshape((*x.shape[: self.axis], self.n, -1, *x.shape[self.axis + 1 :])) for x in leaves]
        xs = self._turned(xs)
        levels = [xs]
        while self._steps(levels[-1]) > 1:
            x = levels[-1]
            levels.append(self._both(self._cut(x, 0, -1, 2), self._cut(x, 1, None, 2)))
        return [y.reshape(x.shape) for x, y in zip(leaves, self._turned(self._down(levels)), strict=True)]

    def _down(self, levels: Sequence[list[Any]]) -> list[Any]:
        """The scan of level 0, from the sums of pairs of each level, that of 1 step last."""
        before = self._before(self._totals(levels))
        # nothing is before the first chunk; there the first two steps are combined again, which is finite as they are
        one, two = (list(map(lax.stop_gradient, self._cut(levels[0], i, i + 1))) for i in (0, 1))
        before = self._in_first(one, before)
        done: list[Any] = []
        for x in reversed(levels):
            begin, size = self._cut(x, 0, 1), self._steps(x)
            even = self._in_first(begin, self._both(before, self._in_first(two, begin)))
            if size > 2:
                rest = self._both(self._cut(done, 0, (size - 1) // 2), self._cut(x, 2, None, 2))
                even = [jnp.concatenate(pair, self.axis + 1) for pair in zip(even, rest, strict=True)]
            done = [self._interleaved(*pair) for pair in zip(even, done, strict=True)] if size > 1 else even
        return done

    def _totals(self, levels: Sequence[list[Any]]) -> list[Any]:
        """The total of each chunk: that of the pairs, and the steps without a partner."""
        total = levels[-1]
        for x in reversed(levels[:-1]):
            if self._steps(x) % 2:
                total = self._both(total, self._cut(x, -1, None))
        return total

    def _before(self, totals: Sequence[Any]) -> list[Any]:
        """For each chunk the combination of all chunks before it; for the first one some total."""
        axis, n = self.axis, self.n
        flat = [x.squeeze(axis + 1) for x in totals]
        given = [lax.slice_in_dim(x, *((1, n) if self.reverse else (0, n - 1)), axis=axis) for x in flat]
        scans = self.scan(self.combined, given, self.reverse, axis)
        if self.reverse:
            pairs = [(y, lax.slice_in_dim(x, n - 1, n, axis=axis)) for x, y in zip(flat, scans, strict=True)]
        else:
            pairs = [(lax.slice_in_dim(x, 0, 1, axis=axis), y) for x, y in zip(flat, scans, strict=True)]
        return [jnp.expand_dims(jnp.concatenate(pair, axis), axis + 1) for pair in pairs]

    def _in_first(self, xs: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """`xs` in the first chunk, `others` in all that follow."""
        found: list[Any] = []
        for x, other in zip(xs, others, strict=True):
            at = lax.broadcasted_iota(np.int32, x.shape, self.axis)
            found.append(lax.select(at == (self.n - 1 if self.reverse else 0), x, other))
        return found

    def _both(self, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        """The user's function of all steps of all chunks, in one dimension."""
        before, after = slice(None, self.axis), slice(self.axis + 2, None)
        flat = [[x.reshape((*x.shape[before], -1, *x.shape[after])) for x in side] for side in (a, b)]
        return [y.reshape(x.shape) for x, y in zip(a, self.combined(*flat), strict=True)]

    def _interleaved(self, even: Any, odd: Any) -> Any:
        at, size = self.axis + 1, odd.shape[self.axis + 1]
        pairs = jnp.stack([lax.slice_in_dim(even, 0, size, axis=at), odd], at + 1)
        joined = pairs.reshape((*odd.shape[:at], 2 * size, *odd.shape[at + 1 :]))
        rest = lax.slice_in_dim(even, size, None, axis=at)
        return jnp.concatenate([joined, rest], at) if rest.shape[at] else joined

    def _turned(self, xs: Sequence[Any]) -> list[Any]:
        return [lax.rev(x, (self.axis + 1,)) for x in xs] if self.reverse else list(xs)

    def _cut(self, xs: Sequence[Any], start: int, stop: int | None, stride: int = 1) -> list[Any]:
        return [lax.slice_in_dim(x, start, stop, stride, self.axis + 1) for x in xs]

    def _steps(self, xs: Sequence[Any]) -> int:
        return xs[0].shape[self.axis + 1]
