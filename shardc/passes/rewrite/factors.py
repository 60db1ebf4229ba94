"""Factors of dimensions: a merged dimension of 12 with the factors (3, 4) is held as two dimensions of 3 and 4."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from shardc import compat
from shardc.compat import Eqn

Factors: TypeAlias = tuple[tuple[int, ...], ...]
"""For each dimension of a value its factors, outermost first. A value in factors has them as its dimensions."""


def plain(shape: Sequence[int]) -> Factors:
    """Every dimension is its only factor."""
    return tuple((n,) for n in shape)


def is_plain(factors: Factors) -> bool:
    return all(len(group) == 1 for group in factors)


def merges_of(factors: Factors) -> int:
    """How many factors have no placement in the merged value: all but the outermost of each dimension, without ones."""
    return sum(max(sum(n != 1 for n in group) - 1, 0) for group in factors)


def with_whole(factors: Factors, dims: Iterable[int]) -> Factors:
    """The factors with these dimensions merged."""
    whole = set(dims)
    return tuple((math.prod(group),) if d in whole else group for d, group in enumerate(factors))


def shape_of(factors: Factors) -> tuple[int, ...]:
    """The shape of a value in factors."""
    return tuple(itertools.chain.from_iterable(factors))


def spans_of(factors: Factors) -> list[range]:
    """For each dimension the dimensions of a value in factors that hold it."""
    ends = list(itertools.accumulate(map(len, factors), initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def spread(spans: Sequence[range], dims: Iterable[int]) -> tuple[int, ...]:
    """The factors' dimensions of some dimensions, in their order."""
    return tuple(itertools.chain.from_iterable(spans[d] for d in dims))


def common(*groups: tuple[int, ...]) -> tuple[int, ...] | None:
    """The coarsest factors of one dimension that refine all of these; None if there are none: (2, 3) and (3, 2)."""
    if len(set(groups)) == 1:
        return groups[0]
    strides = sorted({1, *(s for group in groups for s in _strides(group))})
    if any(b % a for a, b in itertools.pairwise(strides)):
        return None
    return tuple(b // a for a, b in itertools.pairwise(strides))[::-1] or (1,)


def common_of(values: Sequence[Factors]) -> Factors | None:
    """The coarsest factors that refine those of values of one shape."""
    found: list[tuple[int, ...]] = []
    for groups in zip(*values, strict=True):
        if (group := common(*groups)) is None:
            return None
        found.append(group)
    return tuple(found)


def reshaped(old: Sequence[int], new: Sequence[int]) -> Factors | None:
    """The factors of shape `new` of which each is part of one dimension of shape `old` as well; None if the shapes have
    no such factors."""
    if 0 in old:
        return None
    every = common(tuple(old) or (1,), tuple(new) or (1,))
    if every is None:
        return None
    strides = set(_strides(every))
    found: list[tuple[int, ...]] = []
    inner = 1
    for n in reversed(new):
        ends = sorted(s for s in strides | {inner, inner * n} if inner <= s <= inner * n)
        found.append(tuple(b // a for a, b in itertools.pairwise(ends))[::-1] or (1,))
        inner *= n
    return tuple(reversed(found))


def merged_by(eqn: Eqn) -> Factors | None:
    """The factors of the result of a reshape of a plain value; None if it is no reshape, or has none."""
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is not None or compat.is_literal(eqn.invars[0]):
        return None
    return reshaped(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)


def _strides(sizes: Sequence[int]) -> Iterator[int]:
    """The products of the innermost sizes."""
    return itertools.accumulate(reversed(sizes), lambda a, b: a * b)
