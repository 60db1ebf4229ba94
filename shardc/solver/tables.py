"""Cost tables as numpy arrays, and a memory of what was computed from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
A = TypeVar("A", bound=NDArray[Any])
Table: TypeAlias = NDArray[np.float64]
Index: TypeAlias = NDArray[np.intp]
Pair: TypeAlias = tuple[int, int]

FORBIDDEN: Final = 1e15
"""Costs from here on mean: not allowed."""
LARGE: Final = 4096
"""Entries from which on a table is known by its digest, not by its bytes."""
MOST: Final = 1 << 31
"""Bytes of arrays that are remembered, roughly, before all is forgotten."""


class Memo:
    """Results of array operations by the identity of their operands.

    A model repeats its layers: most tables are one of a few, and so are the results of eliminating them. Equal arrays
    are one object (`one`), and an operation on the same objects is done once (`do`).

    Attributes:
      held: bytes of the arrays that it keeps.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], str, bytes], Any] = {}
        self._done: dict[Hashable, tuple[Any, Any]] = {}
        self._known: set[int] = set()
        self.held = 0

    def one(self, array: A) -> A:
        """The one array that equals `array`."""
        if id(array) in self._known:
            return array
        data = array.tobytes()
        if array.size > LARGE:
            data = hashlib.blake2b(data, digest_size=16).digest()
        found = self._arrays.setdefault((array.shape, array.dtype.char, data), array)
        if found is array:
            self.held += array.nbytes
        self._known.add(id(found))  # it is kept, so no other array will have its identity
        return found

    def do(self, key: Hashable, operands: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made once for `key`; the key names `operands` by identity, so they are kept."""
        found = self._done.get(key)
        if found is not None:
            return found[1]
        made = make()
        self._done[key] = (operands, made)
        array: Any = made
        if isinstance(array, np.ndarray) and id(array) not in self._known:
            self.held += array.nbytes
        return made

    def forget(self, most: int = MOST) -> None:
        """Lets go of everything if that is more than `most` bytes. What others still hold is computed with anew."""
        if self.held > most:
            self._arrays.clear()
            self._done.clear()
            self._known.clear()
            self.held = 0
