"""The loops that take most of the time, compiled by numba: each table entry is read once, without a NumPy call per
table.

numba is an extra (`shardc[fast]`); only `kernels_for` imports this module. The first plan of a large problem on a
machine compiles the code, which is then kept in `__pycache__`, or in the user's cache folder if `__pycache__` is
read-only. Sums are added in the same order as in `numpy_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar, cast

import numpy as np
from numba import carray, njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from shardc.solver.cost_tables import Index, Table
from shardc.solver.graph import Graph, Members
from shardc.solver.kernels.numpy_messages import NumpyPasses

F = TypeVar("F", bound=Callable[..., Any])
Int: TypeAlias = Any
"""Python's, or an entry of an array."""
LONG: Final = 64
"""Rows of at least this many entries are read one by one: memory gives one stream faster than four (0.3 ns an
entry from memory, docs/design/solver.md)."""

# numba imports most of itself with the first function that is called, which takes 0.17 s. Now it is part of the import.
_cpu = cast(Any, cpu_target)
_cpu.typing_context.refresh()
_cpu.target_context.refresh()


def compiled(function: F) -> F:
    """Compiles a function at its first call. Integers have 64 bits, a division by zero is infinite, and indices are not
    checked."""
    made = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # there is no folder for it: each process compiles it
        made.enable_caching()
    return cast(F, made)


def _pointer(typingctx: Any, address: Any) -> Any:
    """Makes a pointer to numbers in double precision from an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float64)(address), generate


_at = intrinsic(cast(Any, _pointer))


class CompiledPasses(NumpyPasses):
    """Passes whose loops over edges are compiled."""

    def __init__(self, graph: Graph, tables: Sequence[Table]) -> None:
        super().__init__(graph, tables)
        self._compiled = graph._replace(table=_addresses(tables))

    def send(self, own: Table, messages: Table, forward: bool, read: bool, values: Index) -> float:
        return _send(self._compiled, own, messages, forward, read, values)

    def handed(self, own: Table, messages: Table) -> tuple[Table, Table]:
        return _handed(self._compiled, own, messages)

    def excess(self, own: Table, messages: Table) -> Table:
        return _excess(self._compiled, own, messages)

    def improve(self, own: Table, values: Index, passes: int) -> float:
        return _improve(self._compiled, own, values, passes)


passes = CompiledPasses


def _addresses(tables: Sequence[Table]) -> Index:
    """The address of the first entry of each table."""
    known = {id(t): t.ctypes.data for t in {id(t): t for t in tables}.values()}
    return np.fromiter((known[id(t)] for t in tables), np.intp, len(tables))


@compiled
def _table(g: Graph, e: Int) -> Table:
    """The entries of the table of an edge, row by row."""
    return carray(_at(g.table[e]), (_size(g, g.other[g.twin[e]]) * _size(g, g.other[e]),))


@compiled
def _size(g: Graph, v: Int) -> Int:
    return g.first[v + 1] - g.first[v]


@compiled
def least_sums(table: Table, here: Table, out: Table) -> None:
    """out[b] = min over a of here[a] + entry (a, b) of a table, given row by row."""
    rows, columns = here.size, out.size
    out[:] = np.inf
    a = 0
    while a + 4 <= rows and columns < LONG:  # four at a time: `out` is read and written a quarter as often
        x0, x1, x2, x3 = here[a], here[a + 1], here[a + 2], here[a + 3]
        k = a * columns
        t0, t1 = table[k : k + columns], table[k + columns : k + 2 * columns]
        t2, t3 = table[k + 2 * columns : k + 3 * columns], table[k + 3 * columns : k + 4 * columns]
        for b in range(columns):
            y0, y1, y2, y3 = x0 + t0[b], x1 + t1[b], x2 + t2[b], x3 + t3[b]
            y0 = y0 if y0 < y1 else y1
            y2 = y2 if y2 < y3 else y3
            y0 = y0 if y0 < y2 else y2
            out[b] = y0 if y0 < out[b] else out[b]
        a += 4
    while a < rows:
        x, k = here[a], a * columns
        t = table[k : k + columns]
        for b in range(columns):
            y = x + t[b]
            out[b] = y if y < out[b] else out[b]
        a += 1


@compiled
def _costs(g: Graph, own: Table, messages: Table, v: Int, costs: Table) -> None:
    """The costs of the values of a variable, plus all messages to it."""
    k = g.first[v]
    for a in range(costs.size):
        costs[a] = own[k + a]
    for e in range(g.start[v], g.start[v + 1]):
        k = g.at[g.twin[e]]
        for a in range(costs.size):
            costs[a] += messages[k + a]


@compiled
def _add_column(g: Graph, e: Int, value: Int, costs: Table) -> None:
    """costs += the costs of this end's values where the other end has that value."""
    row = _table(g, g.twin[e])[value * costs.size : (value + 1) * costs.size]
    for a in range(costs.size):
        costs[a] += row[a]


@compiled
def _best_value(g: Graph, messages: Table, edges: tuple[Int, Int], costs: Table, values: Index) -> Int:
    """The best value of a variable, given the values already read at the other ends of some edges. Overwrites
    `costs`."""
    for e in range(edges[0], edges[1]):
        k = g.at[g.twin[e]]
        for a in range(costs.size):
            costs[a] -= messages[k + a]
        _add_column(g, e, values[g.other[e]], costs)
    return costs.argmin()


@compiled
def _send(g: Graph, own: Table, messages: Table, forward: bool, read: bool, values: Index) -> float:
    """A pass, as `Passes.send`."""
    all_costs, all_given, bound = np.empty(own.size), np.empty(own.size), 0.0
    for place in range(g.order.size):
        v = g.order[place] if forward else g.order[g.order.size - 1 - place]
        costs, given = all_costs[: _size(g, v)], all_given[: _size(g, v)]
        _costs(g, own, messages, v, costs)
        behind, ahead = (g.start[v], g.split[v]), (g.split[v], g.start[v + 1])
        if not forward:
            behind, ahead = ahead, behind
            bound += float(g.left[v] * costs.min())
        if read:
            given[:] = costs
            values[v] = _best_value(g, messages, behind, given, values)
        costs *= g.share[v]
        for e in range(ahead[0], ahead[1]):
            k = g.at[g.twin[e]]
            for a in range(costs.size):
                given[a] = costs[a] - messages[k + a]
            message = messages[g.at[e] : g.at[e] + _size(g, g.other[e])]
            least_sums(_table(g, e), given, message)
            least = message.min()
            if not forward:
                bound += least
            message -= least
    return bound


@compiled
def _handed(g: Graph, own: Table, messages: Table) -> tuple[Table, Table]:
    """As `NumpyPasses.handed`."""
    left, given, all_costs = np.empty(own.size), np.zeros(messages.size), np.empty(own.size)
    for v in range(g.order.size):
        costs = all_costs[: _size(g, v)]
        _costs(g, own, messages, v, costs)
        for e in range(g.start[v], g.split[v]):
            k, share = g.at[g.twin[e]], g.share[v]
            for a in range(costs.size):
                given[k + a] = costs[a] * share - messages[k + a]
        k = g.first[v]
        for a in range(costs.size):
            left[k + a] = costs[a] * g.left[v]
    return left, given


@compiled
def _excess(g: Graph, own: Table, messages: Table) -> Table:
    """As `NumpyPasses.excess`."""
    left, given = _handed(g, own, messages)
    found = np.empty(own.size)
    for v in range(g.order.size):
        mine = left[g.first[v] : g.first[v + 1]]
        found[g.first[v] : g.first[v + 1]] = mine - mine.min()
    for v in range(g.order.size):
        for e in range(g.start[v], g.split[v]):
            j, back = g.other[e], g.twin[e]
            mine = given[g.at[back] : g.at[back] + _size(g, v)]
            theirs = messages[g.at[e] : g.at[e] + _size(g, j)]
            here, there = np.empty(mine.size), np.empty(theirs.size)
            least_sums(_table(g, back), -theirs, here)
            least_sums(_table(g, e), mine, there)
            here += mine
            there -= theirs
            found[g.first[v] : g.first[v + 1]] += here - here.min()
            found[g.first[j] : g.first[j + 1]] += there - there.min()
    return found


@compiled
def _improve(g: Graph, own: Table, values: Index, passes: Int) -> float:
    """As `NumpyPasses.improve`."""
    all_costs = np.empty(own.size)
    for _ in range(passes):
        changed = False
        for v in g.order:
            costs, k = all_costs[: _size(g, v)], g.first[v]
            for a in range(costs.size):
                costs[a] = own[k + a]
            for e in range(g.start[v], g.start[v + 1]):
                _add_column(g, e, values[g.other[e]], costs)
            best = costs.argmin()
            if costs[best] < costs[values[v]]:
                values[v], changed = best, True
        if not changed:
            break
    total = 0.0
    for v in g.order:
        total += float(own[g.first[v] + values[v]])
        for e in range(g.split[v], g.start[v + 1]):
            total += float(_table(g, e)[values[v] * _size(g, g.other[e]) + values[g.other[e]]])
    return total


@compiled
def least_of_sum(entries: Table, begins: Index, strides: Index, sizes: Index) -> Table:
    """As `numpy_kernels.least_of_sum`: the terms are added in its order."""
    count, last = sizes.size - 2, sizes[sizes.size - 1]
    found = np.empty((sizes[:count].prod(), last))
    offset, at, row = begins.copy(), np.zeros(count, np.int64), np.empty(last)
    for out in found:
        out[:] = np.inf
        for m in range(sizes[count]):
            _add_terms(entries, offset + m * strides[:, count], strides[:, count:], row)
            for b in range(last):
                out[b] = row[b] if row[b] < out[b] else out[b]
        for t in range(begins.size):
            if not strides[t, count]:
                _add_row(entries, offset[t], strides[t, count + 1], out)
        for d in range(count - 1, -1, -1):  # the next entry of the dimensions before
            at[d] += 1
            offset += strides[:, d]
            if at[d] < sizes[d]:
                break
            offset -= sizes[d] * strides[:, d]
            at[d] = 0
    return found.reshape(-1)


@compiled
def _add_terms(entries: Table, offset: Index, strides: Index, row: Table) -> None:
    """row = the sum of the terms that have the dimension of the minimum: those without the last dimension, then the
    others, the first of them last. `strides`: (terms, 2) of both dimensions."""
    total, first = 0.0, -1
    for t in range(offset.size):
        if strides[t, 0] and not strides[t, 1]:
            total += entries[offset[t]]
    row[:] = total
    for t in range(offset.size):
        if strides[t, 0] and strides[t, 1]:
            if first < 0:
                first = t
            else:
                _add_row(entries, offset[t], 1, row)
    if first >= 0:
        _add_row(entries, offset[first], 1, row)


@compiled
def _add_row(entries: Table, offset: Int, step: Int, row: Table) -> None:
    for b in range(row.size):
        row[b] += entries[offset + b * step]


@compiled
def least_product(left: Table, right: Table) -> Table:
    """The minimum over k of left[k, a] + right[k, b], for all a, b."""
    found = np.empty((left.shape[1], right.shape[1]))
    entries, here = right.reshape(-1), np.ascontiguousarray(left.T)
    for a in range(len(found)):
        least_sums(entries, here[a], found[a])
    return found


@compiled
def least_of_groups(matrix: Table, rows: Members, columns: Members) -> Table:
    """The least entry for each pair of groups, as `Kernels.least_of_groups`."""
    some, found = np.full((rows.groups, matrix.shape[1]), np.inf), np.full((rows.groups, columns.groups), np.inf)
    for a in range(rows.row.size):
        row, least = matrix[rows.row[a]], some[rows.group[a]]
        for c in range(row.size):
            least[c] = row[c] if row[c] < least[c] else least[c]
    for g in range(rows.groups):
        row, least = some[g], found[g]
        for b in range(columns.row.size):
            least[columns.group[b]] = min(least[columns.group[b]], row[columns.row[b]])
    return found
