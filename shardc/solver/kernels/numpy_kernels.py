"""The loops over tables in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardc.solver.cost_tables import CHUNK, Index, Table
from shardc.solver.graph import Members
from shardc.solver.kernels.numpy_messages import NumpyPasses

passes = NumpyPasses


def least_product(left: Table, right: Table) -> Table:
    count, rows, columns = len(left), left.shape[1], right.shape[1]
    found = np.full((rows, columns), np.inf)
    if not count * rows * columns:
        return found
    if count * rows * columns <= CHUNK:
        return np.minimum.reduce(left[:, :, None] + right[:, None], 0)
    step = max(1, CHUNK // columns)
    space = np.empty((min(step, rows), columns))
    for a in range(0, rows, step):
        out = found[a : a + step]
        sums = space[: len(out)]
        for mine, theirs in zip(left[:, a : a + step, None], right, strict=True):
            np.add(mine, theirs, out=sums)
            np.minimum(out, sums, out=out)
    return found


def block(table: Table, rows: Index, columns: Index) -> Table:
    """table[rows, :][:, columns]"""
    return table.take(rows, 0).take(columns, 1)


def affordable(table: Table, rows: Table, columns: Table, most: float) -> NDArray[np.bool_]:
    """Whether rows[a] + columns[b] + entry (a, b) of a table is at most `most`."""
    sums = rows[:, None] + columns
    sums += table
    return sums <= most


def block_of_allowed(
    table: Table, allowed: NDArray[np.bool_], rows: Index, columns: Index
) -> tuple[Table, bool]:  # fmt: skip
    found, forbidden = block(table, rows, columns), ~allowed.take(rows, 0).take(columns, 1)
    fewer = bool((forbidden & (found < np.inf)).any())
    found[forbidden] = np.inf
    return found, fewer


def kinds(bits: NDArray[np.uint64]) -> tuple[Index, Index]:
    """The first row of each group of equal rows, and the group of each row. Groups are numbered by first appearance."""
    """table[rows, :][:, columns], infinite where not allowed; and whether a forbidden entry was finite."""
    rows, columns = bits.shape
    if not rows:
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    odds = np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED02) * np.arange(columns, dtype=np.uint64)
    codes = (bits * odds).sum(1, dtype=np.uint64)
    _, first, number = np.unique(codes, return_index=True, return_inverse=True)
    if not np.array_equal(bits[first][number], bits):  # two that differ have the same code
        _, first, number = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(order.size, np.intp)
    place[order] = np.arange(order.size)
    return first[order], place[number.reshape(-1)]


def least_gain(columns: Table) -> Table:
    """For a, b the minimum over c of columns[c, a] - columns[c, b]; infinite where neither is allowed."""
    size = columns.shape[1]
    with np.errstate(invalid="ignore"):  # of two infinities: no number, which is not the least
        if columns.size * size <= CHUNK:
            return np.fmin.reduce(columns[:, :, None] - columns[:, None], 0, initial=np.inf)
        found, step = np.full((size, size), np.inf), max(1, CHUNK // size)
        space = np.empty((min(step, size), size))
        for a in range(0, size, step):
            out = found[a : a + step]
            more = space[: len(out)]
            for some in columns:
                np.subtract(some[a : a + step, None], some, out=more)
                np.fmin(out, more, out=out)
    return found


def is_plain(table: Table, error: float) -> bool:
    """Whether a table says nothing about one of its variables alone: each row has an allowed entry, some row has more
    than one, some column has, and it is not the sum of two vectors up to a relative error."""
    high = table.max(0)
    if high.max() < np.inf:
        return not _is_sum(table, error * max(float(high.max()), -float(table.min())))
    allowed = table < np.inf
    rows, columns = allowed.sum(1), allowed.sum(0)
    return bool(rows.min() > 0 and rows.max() > 1 and (columns.min() != 1 or columns.max() != 1))


def _is_sum(table: Table, error: float) -> bool:
    """Whether a table is the sum of two vectors, up to an absolute error."""
    if len(table) > 1:
        change = table[1] - table[0]  # the same everywhere in a sum
        if change.max() - change.min() > 4 * error:
            return False
    rest = table - table.min(1, keepdims=True)
    rest -= rest.min(0)
    return not (rest > error).any()


def unbeaten(gain: Table) -> Index:
    """The values that no other value beats: b beats a if gain[a, b] >= 0. Of values that beat each other, as few as
    possible stay; each dropped value is beaten by one that stays."""
    beaten = gain >= 0
    np.fill_diagonal(beaten, False)
    # of those that beat each other the last one stays
    gone = (beaten & (~beaten.T | np.triu(np.ones(gain.shape, np.bool_)))).any(1)
    alive: NDArray[np.bool_] = np.logical_not(gone)
    if (alive | beaten[:, alive].any(1)).all():
        return np.flatnonzero(alive)
    alive[:] = True  # by rounding, what is beaten twice may not be
    for a, by in enumerate(beaten):
        alive[a] = not (by & alive).any()
    return np.flatnonzero(alive)


def least_of_sum(entries: Table, begins: Index, strides: Index, sizes: Index) -> Table:
    shape: list[int] = sizes.tolist()
    columns, wide, rest = list[Table](), list[Table](), list[Table]()
    for begin, some in zip(begins.tolist(), strides.tolist(), strict=True):
        size = [n if step else 1 for n, step in zip(shape, some, strict=True)]
        term = as_strided(entries[begin:], size, [step * entries.itemsize for step in some], writeable=False)
        if not some[-2]:
            rest.append(term[..., 0, :])
        elif some[-1]:
            wide.append(term)
        else:
            columns.append(term)
    found = np.empty((*shape[:-2], shape[-1]))
    _add_up([*columns, *wide[1:], *wide[:1]], rest, found, shape[-2])
    return found.reshape(-1)


def _add_up(terms: Sequence[Table], rest: Sequence[Table], found: Table, inner: int) -> None:
    """found = min(sum of `terms`) + sum of `rest`, the minimum over the second to last dimension, of `inner` entries.
    It is computed in parts whose sums stay in a core's cache."""
    if found.ndim > 1 and found.size * inner > CHUNK:
        step = CHUNK // (found[0].size * inner)
        for k in range(0, len(found), max(step, 1)):
            part = slice(k, k + step) if step else k
            some, more = ([t[part if len(t) > 1 else slice(None) if step else 0] for t in ts] for ts in (terms, rest))
            _add_up(some, more, found[part], inner)
        return
    step = max(1, CHUNK // found.size)
    found[...] = np.inf
    for m in range(0, inner, step):
        sums = np.zeros((1,) * (found.ndim + 1))
        for term in terms:
            sums = sums + term[..., m : m + step, :]
        np.minimum(found, np.minimum.reduce(sums, -2), out=found)
    for term in rest:
        found += term


def least_of_groups(matrix: Table, rows: Members, columns: Members) -> Table:
    some = np.ascontiguousarray(_least_of_members(matrix, rows).T)
    return np.ascontiguousarray(_least_of_members(some, columns).T)


def _least_of_members(matrix: Table, members: Members) -> Table:
    """The minimum over the rows of each group."""
    place = np.unique(members.group * len(matrix) + members.row)
    group, rows = place // len(matrix), place % len(matrix)
    counts = np.bincount(group, minlength=members.groups)
    begins, found = np.cumsum(counts) - counts, np.full((members.groups, matrix.shape[1]), np.inf)
    for k in range(int(counts.max(initial=0))):  # the next row of each group that has one
        some = np.flatnonzero(counts > k)
        if some.size == members.groups:
            np.minimum(found, matrix[rows[begins + k]], out=found)
        else:
            found[some] = np.minimum(found[some], matrix[rows[begins[some] + k]])
    return found
