"""Cost tables as NumPy arrays, and the memo of the operations on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
A = TypeVar("A", bound=NDArray[Any])
Table: TypeAlias = NDArray[np.float64]
Index: TypeAlias = NDArray[np.intp]
Pair: TypeAlias = tuple[int, int]

FORBIDDEN: Final = 1e15
"""Costs of this size and above are not allowed."""
CHUNK: Final = 1 << 16
"""Entries of a temporary array that stay in a core's cache."""
LARGE: Final = 4096
"""Tables with more entries are looked up by sums of their bits, not by all bytes."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """A table that is stored as indices into a smaller matrix: entry (a, b) is matrix[rows[a], columns[b]].

    The cost of boxing a value depends on two placements, and many choices of a node have the same one.
    """

    matrix: Table
    rows: Index
    columns: Index

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.columns.size

    @property
    def size(self) -> int:
        return self.rows.size * self.columns.size

    @cached_property
    def T(self) -> Lookup:
        return Lookup(self.matrix.T, self.columns, self.rows)

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        """The entries at integers, or at integer arrays that NumPy broadcasts together."""
        rows, columns = index
        return self.matrix[self.rows[rows], self.columns[columns]]

    def whole(self) -> Table:
        """The table as a dense array."""
        return self.matrix.take(self.rows, 0).take(self.columns, 1)


Given: TypeAlias = Table | Lookup
"""A table, written out or not."""


def double(array: NDArray[Any]) -> Table:
    """The array in float64; the same object if it already is. NumPy would copy the result of a compiled loop, whose
    dtype is equal but not identical, and the memo compares arrays by identity."""
    return array if array.dtype == np.float64 else np.asarray(array, np.float64)


def whole(table: Given) -> Table:
    """A table as a dense array."""
    return table.whole() if isinstance(table, Lookup) else double(table)


class Memo:
    """Results of array operations, keyed by the identity of their operands.

    A model repeats its layers: there are few different tables, and few different results of operations on them. `one`
    makes equal arrays one object, and `do` computes an operation on the same objects once.

    Attributes:
      held: bytes of the arrays that it keeps.
      done: for each key the operands, which are kept alive, and the result.
    """

    def __init__(self) -> None:
        self._small: dict[Hashable, Any] = {}
        self._large: dict[Hashable, list[Any]] = {}
        self.done: dict[Hashable, tuple[Any, Any]] = {}
        self._known: set[int] = set()
        self.held = 0

    def one(self, array: A) -> A:
        """The first array that equals `array`: equal arrays are one object."""
        if id(array) in self._known:
            return array
        kind = array.shape, array.dtype.char
        if array.size > LARGE and array.itemsize == 8:
            bits = array.reshape(-1).view(np.uint64)
            alike = self._large.setdefault((*kind, int(bits.sum()), int(np.bitwise_xor.reduce(bits))), [])
            found = next((other for other in alike if np.array_equal(other, array)), array)
            if found is array:
                alike.append(array)
        else:
            found = self._small.setdefault((*kind, array.tobytes()), array)
        if found is array:
            self.held += array.nbytes
        self._known.add(id(found))  # it is kept, so no other array will have its identity
        return found

    def has(self, array: NDArray[Any]) -> bool:
        """Whether `one` returned this array."""
        return id(array) in self._known

    def do(self, key: Hashable, operands: Any, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for `key`. The key names `operands` by identity, so they are kept
        alive."""
        found = self.done.get(key)
        return found[1] if found is not None else self.keep(key, operands, make())

    def keep(self, key: Hashable, operands: Any, made: T) -> T:
        """Stores the result of an operation."""
        self.done[key] = (operands, made)
        array: Any = made
        if isinstance(array, np.ndarray) and id(array) not in self._known:
            self.held += array.nbytes
        return made

    def forget(self, most: int = 1 << 31) -> None:
        """Clear the memo if it holds more than about `most` bytes."""
        if self.held > most:
            self._small.clear()
            self._large.clear()
            self.done.clear()
            self._known.clear()
            self.held = 0
