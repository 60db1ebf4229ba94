"""Operations on cost tables, each memoized by the identity of its operands. Infinite entries are not allowed.

A table of a pair is held in both directions; its rows are the values of the variable that holds it. Vectors and tables
are never changed in place: equal ones are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from shardc.solver.cost_tables import CHUNK, FORBIDDEN, A, Given, Index, Lookup, Memo, Table, double
from shardc.solver.kernels import Kernels, numpy_kernels
from shardc.solver.kernels.numpy_kernels import block, is_plain, kinds, least_gain, unbeaten

COPY: Final = 4
"""Entries that could be touched in the time that it takes to make, keep and compare one."""
SUM: Final = 1e-13
"""Relative error up to which a table counts as a sum of two vectors."""


P = ParamSpec("P")
T = TypeVar("T")


def _once(operation: Callable[Concatenate[Operations, P], T]) -> Callable[Concatenate[Operations, P], T]:
    """Memoizes an operation by the identity of its arrays."""
    name = operation.__name__

    def remembered(self: Operations, *arrays: Any) -> T:
        key = (name, *map(id, arrays))
        found = self.memo.done.get(key)
        return found[1] if found is not None else self.memo.keep(key, arrays, cast(Any, operation)(self, *arrays))

    return cast(Any, remembered)


class Operations:
    """Operations on tables. `work` counts the entries that were touched, `messages` the messages that were sent."""

    def __init__(self, memo: Memo, kernels: Kernels = numpy_kernels) -> None:
        self.memo, self.kernels = memo, kernels
        self.work, self.messages = 0.0, 0

    def one(self, table: A) -> A:
        return self.memo.one(table)

    def whole(self, table: Given) -> Table:
        """The table as a dense array, computed once."""
        return self._whole(table) if isinstance(table, Lookup) else table

    @_once
    def _whole(self, table: Lookup) -> Table:
        return table.whole()

    def given(self, table: Given) -> Given:
        """The table as `clean` returns it; a `Lookup` stays a `Lookup`."""
        return self._given(table) if isinstance(table, Lookup) else self.clean(double(table))

    @_once
    def _given(self, table: Lookup) -> Lookup:
        matrix = self.clean(table.matrix)
        return table if matrix is table.matrix else Lookup(matrix, table.rows, table.columns)

    @_once
    def clean(self, table: Table) -> Table:
        """The table with infinite entries in place of forbidden ones; equal tables become one object."""
        array = np.ascontiguousarray(table)
        over = array >= FORBIDDEN
        return self.one(np.where(over, np.inf, array) if over.any() else array)

    @_once
    def turned(self, table: Table) -> Table:
        """The transpose; the transpose of the transpose is the table itself, as an object."""
        other = np.ascontiguousarray(table.T)
        other = self.memo.one(other) if self.memo.has(table) else other
        self.memo.do(("turned", id(other)), (other,), lambda: table)
        return other

    @_once
    def sum(self, a: Table, b: Table) -> Table:
        return self._one(a + b)

    @_once
    def normal(self, table: Table) -> tuple[float, Table]:
        """The least entry, and the table minus it."""
        least = float(table.min())
        return (least, self._one(table - least)) if least and np.isfinite(least) else (0.0, table)

    @_once
    def rows(self, table: Table, index: Index) -> Table:
        """table[index]"""
        return self._one(table[index])

    def block(self, table: Given, rows: Index, columns: Index) -> Table:
        """table[rows, :][:, columns]"""
        if rows.size == table.shape[0] and columns.size == table.shape[1]:
            return self.whole(table)
        return self._block(table, rows, columns)

    @_once
    def _block(self, table: Given, rows: Index, columns: Index) -> Table:
        if isinstance(table, Lookup):
            return self._one(block(table.matrix, table.rows[rows], table.columns[columns]))
        return self._one(block(table, rows, columns))

    def where(self, mask: NDArray[np.bool_]) -> Index:
        return self.memo.one(np.flatnonzero(mask))

    @_once
    def finite(self, own: Table) -> Index:
        """The values that are allowed."""
        return self.where(np.isfinite(own))

    @_once
    def supported(self, table: Table) -> Index | None:
        """The rows with an allowed entry; None: all rows."""
        self.work += table.size
        some = np.isfinite(table).any(1)
        return None if some.all() else self.where(np.asarray(some))

    @_once
    def follower(self, table: Table) -> Index | None:
        """For each row its only allowed column; None unless every row has exactly one."""
        self.work += table.size
        finite = np.isfinite(table)
        return self.memo.one(finite.argmax(1)) if (finite.sum(1) == 1).all() else None

    @_once
    def entries(self, table: Table, columns: Index) -> Table:
        """table[a, columns[a]]"""
        return self._one(table[np.arange(columns.size), columns])

    @_once
    def apart(self, table: Table) -> tuple[Table, Table] | None:
        """Two vectors whose outer sum is the table; None if there are none."""
        self.work += table.size
        if not np.isfinite(table).all():
            return None
        rows = table.min(1)
        columns = (table - rows[:, None]).min(0)
        rest = table - rows[:, None] - columns
        if rest.max(initial=0.0) > SUM * np.abs(table).max(initial=0.0):
            return None
        return self.memo.one(rows), self.memo.one(columns)

    @_once
    def plain(self, table: Table) -> bool:
        """Whether `supported`, `follower` and `apart` have nothing to do, in either direction."""
        self.work += table.size
        return is_plain(table, SUM)

    @_once
    def classes(self, table: Table) -> tuple[Index, Index]:
        """(first, number): the first row of each group of equal rows, and the group of each row."""
        self.work += table.size
        first, number = kinds(np.ascontiguousarray(table).view(np.uint64))
        return self.memo.one(first), self.memo.one(number)

    @_once
    def least_gain(self, table: Table) -> Table:
        """For rows a, b the minimum over the columns of table[a] - table[b]."""
        if table.size * len(table) <= CHUNK:
            self.work += table.size * len(table)
            return least_gain(np.ascontiguousarray(table.T))
        first, number = self.classes(table)
        small = table[first]
        columns, _ = self.classes(np.ascontiguousarray(small.T))
        small = small[:, columns]
        self.work += small.size * len(small)
        return block(least_gain(np.ascontiguousarray(small.T)), number, number)

    def needed(self, own: Table, tables: Sequence[Table]) -> Index | None:
        """The values that no other value beats, whatever the neighbours take; None: all values.

        b beats a if own[a] - own[b] + the sum of the tables' `least_gain` is not negative.
        """

        def make() -> Index | None:
            self.work += own.size * own.size * (len(tables) + 1)
            gain = own[:, None] - own
            with np.errstate(invalid="ignore"):  # opposite infinities: not comparable
                for table in tables:
                    gain = gain + self.least_gain(table)
            index = unbeaten(gain)
            return self.memo.one(index) if index.size < own.size else None

        return self.memo.do(("needed", id(own), *map(id, tables)), (own, tables), make)

    @_once
    def out_of_one(self, own: Table, table: Table) -> Table:
        """The minimum over the rows of own[row] + table[row]."""
        self.work += table.size
        return self._one((table + own[:, None]).min(0))

    @_once
    def out_of_two(self, own: Table, left: Table, right: Table) -> Table:
        """The minimum over the rows of own[row] + left[row, a] + right[row, b], for all a, b."""
        if left.size * right.shape[1] < CHUNK:
            return self._one(self._least_sum(left + own[:, None], right))
        first, number = self.classes(self.turned(left))
        last, name = self.classes(self.turned(right))
        small = self._least_sum(left[:, first] + own[:, None], right[:, last])
        return self._one(block(small, number, name))

    def _least_sum(self, left: Table, right: Table) -> Table:
        self.work += left.size * right.shape[1]
        return self.kernels.least_product(np.ascontiguousarray(left), np.ascontiguousarray(right))

    def _one(self, table: Table) -> Table:
        self.work += COPY * table.size
        return self.memo.one(np.ascontiguousarray(table))
