"""The loops over tables compiled by numba: each entry is read once, and going to the next table takes no time.

`shardc.solver.kernels.Kernels` says what each computes. Sums are added in the order in which `kernels_numpy` adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from shardc.solver.cost_tables import Index, Single, Table
from shardc.solver.graph import Graph
from shardc.solver.kernels.numba_jit import compiled
from shardc.solver.kernels.numpy_messages import FAR

Int: TypeAlias = Any
"""Python's, or an entry of an array."""
Real = TypeVar("Real", np.float32, np.float64)
LONG: Final = 64
"""Entries of a row from which on rows are read one by one: as fast as memory gives them, which four at once are not."""


def _pointer_to(kind: Any) -> Any:
    """Of an address, the pointer to numbers of that kind that begin there."""

    def pointer(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), generate

    return intrinsic(cast(Any, pointer))


_at, _at_single = _pointer_to(types.float64), _pointer_to(types.float32)


class _Graph(NamedTuple):
    """`shardc.solver.graph.Graph`, with the tables.

    Attributes:
      table: (edges,) the address of its table's entries, the values here being the rows; single: of those entries in
        single precision. Somebody is to hold them.
    """

    order: Index
    first: Index
    start: Index
    split: Index
    other: Index
    twin: Index
    at: Index
    share: Table
    left: Table
    table: Index
    single: Index


class CompiledPasses:
    """`shardc.solver.kernels.Passes`, compiled."""

    def __init__(self, graph: Graph, tables: Sequence[Table], singles: Sequence[Single]) -> None:
        self._held = tables, singles
        self._graph = _Graph(*graph, _addresses(tables), _addresses(singles or tables))

    def send(self, own: Table, messages: Table, forward: bool, exact: bool, read: bool, values: Index) -> float:
        return _send(self._graph, own, messages, forward, exact, read, values)

    def handed(self, own: Table, messages: Table) -> tuple[Table, Table]:
        return _handed(self._graph, own, messages)

    def excess(self, own: Table, messages: Table) -> Table:
        return _excess(self._graph, own, messages)

    def around(self, values: Index, found: Table) -> None:
        _around(self._graph, values, found)

    def improve(self, own: Table, values: Index, passes: int) -> float:
        return _improve(self._graph, own, values, passes)

    def better_of(self, own: Table, best: Index, other: Index) -> Index:
        return _better_of(self._graph, own, best, other)


def passes(graph: Graph, tables: Sequence[Table], singles: Sequence[Single]) -> CompiledPasses:
    return CompiledPasses(graph, tables, singles)


def _addresses(tables: Sequence[NDArray[Any]]) -> Index:
    """Where the entries of each begin."""
    known = {id(t): t.ctypes.data for t in {id(t): t for t in tables}.values()}
    return np.fromiter((known[id(t)] for t in tables), np.intp, len(tables))


@compiled
def _table(g: _Graph, e: Int) -> Table:
    """Its entries, row by row."""
    return carray(_at(g.table[e]), (_size(g, g.other[g.twin[e]]) * _size(g, g.other[e]),))


@compiled
def _single(g: _Graph, e: Int) -> Single:
    """Entries of its table in single precision, row by row."""
    return carray(_at_single(g.single[e]), (_size(g, g.other[g.twin[e]]) * _size(g, g.other[e]),))


@compiled
def _size(g: _Graph, v: Int) -> Int:
    return g.first[v + 1] - g.first[v]


@compiled
def least_sums(table: NDArray[Real], here: NDArray[Real], out: NDArray[Real]) -> None:
    """out[b] = least over a of here[a] + entry (a, b) of a table, row by row."""
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
def _costs(g: _Graph, own: Table, messages: Table, v: Int, costs: Table) -> None:
    """Of the values of a variable, with all messages to it."""
    k = g.first[v]
    for a in range(costs.size):
        costs[a] = own[k + a]
    for e in range(g.start[v], g.start[v + 1]):
        k = g.at[g.twin[e]]
        for a in range(costs.size):
            costs[a] += messages[k + a]


@compiled
def _add_column(g: _Graph, e: Int, value: Int, costs: Table) -> None:
    """costs += what those of this end cost where the other end has that value."""
    row = _table(g, g.twin[e])[value * costs.size : (value + 1) * costs.size]
    for a in range(costs.size):
        costs[a] += row[a]


@compiled
def _send(g: _Graph, own: Table, messages: Table, forward: bool, exact: bool, read: bool, values: Index) -> float:
    """A pass: messages along all edges in one direction. With `read` an assignment is read on the way, into `values`.
    Gives the bound, on the way back: one if `exact`, else tables are read in single precision, in half the time."""
    all_costs, all_given, bound = np.empty(own.size), np.empty(own.size), 0.0
    here, there = np.empty(own.size, np.float32), np.empty(own.size, np.float32)
    for place in range(g.order.size):
        v = g.order[place] if forward else g.order[g.order.size - 1 - place]
        size = _size(g, v)
        costs, given = all_costs[:size], all_given[:size]
        _costs(g, own, messages, v, costs)
        ahead = (g.split[v], g.start[v + 1]) if forward else (g.start[v], g.split[v])
        if read:
            behind = (g.start[v], g.split[v]) if forward else (g.split[v], g.start[v + 1])
            for a in range(size):
                given[a] = costs[a]
            for e in range(behind[0], behind[1]):
                k = g.at[g.twin[e]]
                for a in range(size):
                    given[a] -= messages[k + a]
                _add_column(g, e, values[g.other[e]], given)
            values[v] = given.argmin()
        if not forward:
            bound += float(g.left[v] * costs.min())
        for a in range(size):
            costs[a] *= g.share[v]
        for e in range(ahead[0], ahead[1]):
            k = g.at[g.twin[e]]
            for a in range(size):
                given[a] = costs[a] - messages[k + a]
            message = messages[g.at[e] : g.at[e] + _size(g, g.other[e])]
            if exact:
                least_sums(_table(g, e), given, message)
            else:
                offset = given.min()  # the rest is small where it matters, and small numbers are precise
                for a in range(size):
                    here[a] = given[a] - offset
                least_sums(_single(g, e), here[:size], there[: message.size])
                for b in range(message.size):
                    message[b] = there[b] + offset
            least = message.min()
            if not forward:
                bound += least
            for b in range(message.size):
                message[b] -= least
    return bound


@compiled
def further(after: Table, change: Table, before: Table, last: Table) -> Table:
    """Where messages lead to that were `before`, changed by `last`, and are `after` a change: to the combination of the
    two of which the change is least."""
    along, square = 0.0, 0.0
    for k in range(after.size):
        turn = change[k] - last[k]
        along += change[k] * turn
        square += turn * turn
    found, part = np.empty(after.size), along / square if square > 0 else 0.0
    for k in range(after.size):
        found[k] = after[k] - part * (after[k] - before[k])
    return found


@compiled
def _handed(g: _Graph, own: Table, messages: Table) -> tuple[Table, Table]:
    """After a pass back: for each value what is left of its costs for no edge; and for each edge back what its values
    hand to the table, less what came from there, where that message lies."""
    left, given = np.empty(own.size), np.zeros(messages.size)
    for v in range(g.order.size):
        costs = left[g.first[v] : g.first[v + 1]]
        _costs(g, own, messages, v, costs)
        for e in range(g.start[v], g.split[v]):
            k = g.at[g.twin[e]]
            for a in range(costs.size):
                given[k + a] = costs[a] * g.share[v] - messages[k + a]
        for a in range(costs.size):
            costs[a] *= g.left[v]
    return left, given


@compiled
def _excess(g: _Graph, own: Table, messages: Table) -> Table:
    """For each value by how much at least an assignment that has it costs more than the bound, after a pass back."""
    left, given = _handed(g, own, messages)
    found = np.empty(left.size)
    for v in range(g.order.size):
        _over_least(left[g.first[v] : g.first[v + 1]], found[g.first[v] : g.first[v + 1]], False)
    all_here, all_there, all_given = np.empty(left.size), np.empty(left.size), np.empty(left.size)
    for v in range(g.order.size):
        for e in range(g.start[v], g.split[v]):
            j, back = g.other[e], g.twin[e]
            mine = given[g.at[back] : g.at[back] + _size(g, v)]
            theirs = messages[g.at[e] : g.at[e] + _size(g, j)]
            here, there, handed_back = all_here[: mine.size], all_there[: theirs.size], all_given[: theirs.size]
            for b in range(theirs.size):
                handed_back[b] = -theirs[b]
            least_sums(_table(g, back), handed_back, here)
            least_sums(_table(g, e), mine, there)
            for a in range(mine.size):
                here[a] += mine[a]
            for b in range(theirs.size):
                there[b] -= theirs[b]
            _over_least(here, found[g.first[v] : g.first[v + 1]], True)
            _over_least(there, found[g.first[j] : g.first[j + 1]], True)
    return found


@compiled
def _over_least(costs: Table, out: Table, add: bool) -> None:
    """By how much each is above the least of them: written, or added."""
    least = costs.min()
    for a in range(costs.size):
        out[a] = (out[a] if add else 0.0) + (costs[a] - least)


@compiled
def _around(g: _Graph, values: Index, found: Table) -> None:
    """found += for each value of each variable what its tables cost, the others as they are."""
    for v in range(g.order.size):
        costs = found[g.first[v] : g.first[v + 1]]
        for e in range(g.start[v], g.start[v + 1]):
            _add_column(g, e, values[g.other[e]], costs)


@compiled
def _improve(g: _Graph, own: Table, values: Index, passes: int) -> float:
    """Each variable in turn takes what is best, the others as they are. Gives the cost of the assignment."""
    space = np.empty(own.size)
    for _ in range(passes):
        changed = False
        for v in g.order:
            costs, first = space[: _size(g, v)], g.first[v]
            for a in range(costs.size):
                costs[a] = own[first + a]
            for e in range(g.start[v], g.start[v + 1]):
                _add_column(g, e, values[g.other[e]], costs)
            best = costs.argmin()
            if costs[best] < costs[values[v]]:
                values[v], changed = best, True
        if not changed:
            break
    total = 0.0
    for v in g.order:
        total += own[g.first[v] + values[v]]
        for e in range(g.split[v], g.start[v + 1]):
            j = g.other[e]
            total += _table(g, e)[values[v] * _size(g, j) + values[j]]
    return float(total)


@compiled
def _better_of(g: _Graph, own: Table, best: Index, other: Index) -> Index:
    """The better one in each part of the graph in which two assignments differ."""
    leader = np.arange(g.order.size)
    change = np.zeros(g.order.size)  # cost of `other` less that of `best`: of a variable, of some edges of it
    for v in range(g.order.size):
        change[v] += own[g.first[v] + other[v]] - own[g.first[v] + best[v]]
        for e in range(g.split[v], g.start[v + 1]):
            j = g.other[e]
            if best[v] == other[v] and best[j] == other[j]:
                continue
            table, size = _table(g, e), _size(g, j)
            after, before = table[other[v] * size + other[j]], table[best[v] * size + best[j]]
            # where but one end differs, the other one stays at a value that both have
            change[v if best[v] != other[v] else j] += min(after, FAR) - min(before, FAR)
            if best[v] != other[v] and best[j] != other[j]:
                leader[_root(leader, v)] = _root(leader, j)
    gain = np.zeros(g.order.size)
    for v in range(g.order.size):
        if best[v] != other[v]:
            gain[_root(leader, v)] += change[v]
    found = best.copy()
    for v in range(g.order.size):
        if best[v] != other[v] and gain[_root(leader, v)] < 0:
            found[v] = other[v]
    return found


@compiled
def _root(leader: Index, v: Int) -> int:
    while leader[v] != v:
        leader[v] = leader[leader[v]]
        v = leader[v]
    return v


@compiled
def least_product(left: Table, right: Table) -> Table:
    """Least over k of left[k, a] + right[k, b], for all a, b."""
    found = np.empty((left.shape[1], right.shape[1]))
    entries, here = right.reshape(-1), np.ascontiguousarray(left.T)
    for a in range(len(found)):
        least_sums(entries, here[a], found[a])
    return found


@compiled
def block(table: Table, rows: Index, columns: Index) -> Table:
    """table[rows, :][:, columns]"""
    found = np.empty((rows.size, columns.size))
    for a in range(rows.size):
        row, here = table[rows[a]], found[a]
        for b in range(columns.size):
            here[b] = row[columns[b]]
    return found


@compiled
def affordable(table: Table, rows: Table, columns: Table, most: float) -> NDArray[np.bool_]:
    """Whether rows[a] + columns[b] + entry (a, b) of a table is no more than that."""
    found = np.empty(table.shape, np.bool_)
    for a in range(rows.size):
        some, out, x = table[a], found[a], rows[a]
        for b in range(columns.size):
            out[b] = x + columns[b] + some[b] <= most
    return found


@compiled
def block_of_allowed(table: Table, allowed: NDArray[np.bool_], rows: Index, columns: Index) -> tuple[Table, bool]:
    """table[rows, :][:, columns], infinite where it is not allowed; and whether it is finite somewhere there."""
    found, fewer = np.empty((rows.size, columns.size)), False
    for a in range(rows.size):
        row, some, here = table[rows[a]], allowed[rows[a]], found[a]
        for b in range(columns.size):
            x, ok = row[columns[b]], some[columns[b]]
            here[b] = x if ok else np.inf
            fewer |= not ok and x < np.inf
    return found, bool(fewer)


@compiled
def kinds(bits: NDArray[np.uint64]) -> tuple[Index, Index]:
    """The first of each kind of equal rows, and each row's kind."""
    rows, columns = bits.shape
    first, number, codes = np.empty(rows, np.intp), np.empty(rows, np.intp), np.empty(rows, np.uint64)
    slots, count = np.full(2 * rows + 1, -1), 0  # by the remainder of their codes, or the next that is free
    for a in range(rows):
        row, code, odd = bits[a], np.uint64(0), np.uint64(0x9E3779B97F4A7C15)
        for b in range(columns):
            code += row[b] * odd
            odd += np.uint64(0xD1B54A32D192ED02)
        code ^= code >> np.uint64(29)
        codes[a], slot = code, np.intp(code % np.uint64(slots.size))
        while slots[slot] >= 0 and (codes[slots[slot]] != code or _differ(bits[slots[slot]], row)):
            slot = slot + 1 if slot + 1 < slots.size else 0
        if slots[slot] < 0:
            slots[slot], first[count], number[a] = a, a, count
            count += 1
        else:
            number[a] = number[slots[slot]]
    return first[:count].copy(), number


@compiled
def _differ(row: NDArray[np.uint64], other: NDArray[np.uint64]) -> bool:
    found = False
    for b in range(row.size):
        found |= row[b] != other[b]
    return found


@compiled
def least_gain(columns: Table) -> Table:
    """For a, b the least over c of columns[c, a] - columns[c, b]; infinite where neither is allowed."""
    count, size = columns.shape
    found = np.full((size, size), np.inf)
    for a in range(size):
        row = found[a]
        for c in range(count):
            some, x = columns[c], columns[c, a]
            for b in range(size):
                y = x - some[b]  # of two infinities: no number, and less than none
                row[b] = y if y < row[b] else row[b]
    return found


@compiled
def is_plain(table: Table, error: float) -> bool:
    """Whether a table says nothing of one of its variables alone: each row has an allowed entry, some row has more than
    one, so has some column; and it is no sum of two vectors, but for so large a relative error."""
    low, high = table[0].copy(), table[0].copy()
    for row in table:
        for b in range(row.size):
            low[b] = row[b] if row[b] < low[b] else low[b]
            high[b] = row[b] if row[b] > high[b] else high[b]
    if high.max() < np.inf:
        return not _is_sum(table, error * max(high.max(), -low.min()))
    counts, single = np.zeros(high.size, np.intp), True
    for row in table:
        allowed = 0
        for b in range(row.size):
            some = row[b] < np.inf
            counts[b] += some
            allowed += some
        if allowed == 0:
            return False
        single &= allowed == 1
    return not single and (counts.min() != 1 or counts.max() != 1)


@compiled
def _is_sum(table: Table, error: float) -> bool:
    """Whether it is one of two vectors, nowhere off by more than that."""
    columns = np.full(table.shape[1], np.inf)
    if len(table) > 1:
        change = table[1] - table[0]  # the same everywhere in a sum
        if change.max() - change.min() > 4 * error:
            return False
    for row in table:
        least = row.min()
        for b in range(row.size):
            columns[b] = min(columns[b], row[b] - least)
    for row in table:
        least = row.min()
        for b in range(row.size):
            if row[b] - least - columns[b] > error:
                return False
    return True


@compiled
def unbeaten(gain: Table) -> Index:
    """The values a that no other value b beats, which is gain[a, b] >= 0. Of those that beat each other as few as will
    do: each other one is beaten by one of these."""
    size = len(gain)
    alive = np.ones(size, np.bool_)
    for a in range(size):  # of those that beat each other the last one stays
        for b in range(size):
            if a != b and gain[a, b] >= 0 and (b > a or not gain[b, a] >= 0):
                alive[a] = False
                break
    for a in range(size):
        beaten = alive[a]
        for b in range(size):
            beaten |= alive[b] and gain[a, b] >= 0
        if not beaten:  # by rounding, what is beaten twice may not be
            break
    else:
        return np.flatnonzero(alive)
    alive[:] = True
    for a in range(size):
        for b in range(size):
            if a != b and alive[b] and gain[a, b] >= 0:
                alive[a] = False
                break
    return np.flatnonzero(alive)


@compiled
def least_of_sum(entries: Table, begins: Index, strides: Index, sizes: Index) -> Table:
    """The minimum of a sum of arrays over the last dimension but one; the others follow each other in what it gives.

    Args:
      entries: of all arrays; begins: (arrays,) where each begins.
      strides: (arrays, dimensions) entries from one index to the next; 0: it is the same for all. 1 or 0 in the last.
      sizes: (dimensions,) of the sum, two at least.
    """
    outer, inner, width, rows = sizes[:-2], sizes[-2], sizes[-1], 1
    for size in outer:
        rows *= size
    found, total = np.full(rows * width, np.inf), np.empty(width)
    index, at = np.zeros(outer.size, np.intp), begins.copy()
    first = -1  # array that is neither the same for all that the minimum is taken of nor for all places of a row
    for t in range(at.size):
        if strides[t, -2] != 0 and strides[t, -1] != 0:
            first = t
            break
    for row in range(rows):
        out = found[row * width : (row + 1) * width]
        for m in range(inner):
            x = 0.0
            for t in range(at.size):
                if strides[t, -2] != 0 and strides[t, -1] == 0:
                    x += entries[at[t] + m * strides[t, -2]]
            for b in range(width):
                total[b] = x
            for t in range(first + 1, at.size):
                if strides[t, -2] != 0 and strides[t, -1] != 0:
                    some = entries[at[t] + m * strides[t, -2] :]
                    for b in range(width):
                        total[b] += some[b]
            if first < 0:
                for b in range(width):
                    out[b] = x if x < out[b] else out[b]
            else:
                some = entries[at[first] + m * strides[first, -2] :]
                for b in range(width):
                    y = total[b] + some[b]
                    out[b] = y if y < out[b] else out[b]
        for t in range(at.size):
            if strides[t, -2] == 0:
                for b in range(width):
                    out[b] += entries[at[t] + b * strides[t, -1]]
        for d in range(outer.size - 1, -1, -1):
            index[d] += 1
            for t in range(at.size):
                at[t] += strides[t, d]
            if index[d] < outer[d]:
                break
            for t in range(at.size):
                at[t] -= index[d] * strides[t, d]
            index[d] = 0
    return found


@compiled
def least_of_groups(
    matrix: Table, rows: Index, columns: Index, group: Index, other: Index, groups: int, others: int
) -> Table:
    """The least of matrix[rows[a], columns[b]] over the a of each group and the b of each other one."""
    some, found = np.full((groups, matrix.shape[1]), np.inf), np.full((groups, others), np.inf)
    for a in range(rows.size):
        row, least = matrix[rows[a]], some[group[a]]
        for c in range(row.size):
            least[c] = row[c] if row[c] < least[c] else least[c]
    for g in range(groups):
        row, least = some[g], found[g]
        for b in range(columns.size):
            least[other[b]] = min(least[other[b]], row[columns[b]])
    return found
