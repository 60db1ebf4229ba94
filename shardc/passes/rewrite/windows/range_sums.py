"""Sums of ranges: values that are made of ranges of other arrays, along some of their dimensions.

concatenate u[-1:] u[:-1]        -->  u, ranges (0, n - 1, n), (1, 0, n - 1)
pad v (2, 0) + pad v (0, 2)      -->  v, range (2, 0, n), and v, range (0, 0, n)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax import lax

from shardc.compat import Atom, Var
from shardc.ir.ranges import join_ranges_p
from shardc.sbp.signature import Ranges

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A view of a value: begin and end along each dimension. Both may lie outside of the value."""


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(int(n) for n in atom.aval.shape)


def full(atom: Atom) -> Box:
    """The view that is the whole value."""
    return tuple((0, n) for n in shape_of(atom))


def cut_dims(atom: Atom, box: Box) -> list[int]:
    """The dimensions along which a view is not the whole value."""
    return [d for d, (n, side) in enumerate(zip(shape_of(atom), box, strict=True)) if side != (0, n)]


class Term(NamedTuple):
    """Ranges of an array along each of its dimensions. All other elements are zeros."""

    source: Var
    along: tuple[Ranges, ...]


class Moved(NamedTuple):
    """A value that is a sum of terms.

    Attributes:
      shape: of the value.
      terms: the terms.
      joins: whether a padding, a concatenation or a sum is among the operations that made it, and not slices alone.
    """

    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    joins: bool

    @property
    def dims(self) -> list[int]:
        """The dimensions along which a term is not the whole array."""
        whole = [(t.along, tuple(((0, 0, n),) for n in shape_of(t.source))) for t in self.terms]
        return [d for d, n in enumerate(self.shape) if any(r[d] != w[d] or n != w[d][0][2] for r, w in whole)]

    def seen(self, box: Box) -> Moved:
        """The sum of which a view consists."""
        found: list[Term] = []
        for source, along in self.terms:
            cut = tuple(
                r if side == (0, n) else _within(r, *side) for r, side, n in zip(along, box, self.shape, strict=True)
            )
            if all(cut):
                found.append(Term(source, cut))
        return Moved(tuple(hi - lo for lo, hi in box), tuple(found), self.joins)

    def placed(self, dim: int, at: int) -> list[Term]:
        """The terms, moved by `at` elements along a dimension."""
        return [
            t._replace(along=with_ranges(t.along, dim, tuple((a + at, start, stop) for a, start, stop in t.along[dim])))
            for t in self.terms
        ]


def _within(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The parts of ranges that stand between `begin` and `end`, counted from `begin`."""
    inside: list[tuple[int, int, int]] = []
    for at, start, stop in ranges:
        low, high = max(at, begin), min(at + stop - start, end)
        if low < high:
            inside.append((low - begin, start + low - at, start + high - at))
    return merged(inside)


def with_ranges(along: Sequence[Ranges], dim: int, ranges: Ranges) -> tuple[Ranges, ...]:
    return (*along[:dim], ranges, *along[dim + 1 :])


def sum_of(shape: tuple[int, ...], terms: Sequence[Term]) -> Moved:
    """The sum of terms. Terms that differ along one dimension, and do not overlap there, become one, so that there are
    few."""
    for d in range(len(shape)):
        alike: dict[Term, list[tuple[int, int, int]]] = {}
        for t in terms:
            alike.setdefault(t._replace(along=with_ranges(t.along, d, ())), []).extend(t.along[d])
        packed = ((rest, _packed(ranges)) for rest, ranges in alike.items())
        terms = [t._replace(along=with_ranges(t.along, d, r)) for t, parts in packed for r in parts]
    return Moved(shape, tuple(terms), True)


def _packed(ranges: Sequence[tuple[int, int, int]]) -> list[Ranges]:
    """Ranges in sets in which none overlap."""
    found: list[list[tuple[int, int, int]]] = []
    for one in sorted(ranges, key=lambda r: r[1] - r[2]):
        free = next((f for f in found if not any(_meet(one, r) for r in f)), None)
        if free is None:
            found.append([one])
        else:
            free.append(one)
    return [merged(f) for f in found]


def _meet(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] < b[0] + b[2] - b[1] and b[0] < a[0] + a[2] - a[1]


def merged(ranges: Sequence[tuple[int, int, int]]) -> Ranges:
    found: list[tuple[int, int, int]] = []
    for at, start, stop in sorted(ranges):
        if found and found[-1][2] == start and found[-1][0] + start - found[-1][1] == at:
            found[-1] = (*found[-1][:2], stop)
        elif stop > start:
            found.append((at, start, stop))
    return tuple(found)


def padded(x: Any, fill: Any, widths: Sequence[tuple[int, int, int]]) -> Any:
    """A padded array, dimension by dimension: views that are alike along the first ones share what is sent there."""
    for d, width in enumerate(widths):
        if width != (0, 0, 0):
            x = lax.pad(x, fill, [width if k == d else (0, 0, 0) for k in range(x.ndim)])
    return x


def from_ranges(x: Any, dim: int, size: int, ranges: Ranges) -> Any:
    """An array of zeros and of ranges of `x`, by the simplest operation that makes it."""
    if len(ranges) == 1 and (edge := edges_of(ranges[0], size, x.shape[dim])) is not None:
        return padded(x, np.zeros((), x.dtype), [(*edge, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
    return join_ranges_p.bind(x, dim=dim, size=size, ranges=ranges)


def edges_of(one: tuple[int, int, int], size: int, n: int) -> tuple[int, int] | None:
    """The padding of an array of `n` elements that gives one range and zeros. None if no padding does."""
    at, start, stop = one
    end = at + stop - start
    return (at - start, size - end - (n - stop)) if (not start or not at) and (stop == n or end == size) else None
