"""The loops that take most of the time, and the choice of their implementation.

There are two implementations with the same results, bit for bit: `numpy_kernels`, and `numba_kernels`, which is faster
once it is compiled. Only this module chooses. All other loops over tables are in `numpy_kernels`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, Protocol

from shardc.solver.cost_tables import Given, Index, Table
from shardc.solver.graph import Graph, Members
from shardc.solver.kernels import numpy_kernels
from shardc.solver.kernels.numpy_messages import NumpyPasses

MESSAGE: Final = 2 << 10
"""Entries that NumPy could touch in the time of its two calls for each message (`NumpyPasses`)."""

log = logging.getLogger("shardc")


class Kernels(Protocol):
    """One implementation: a module with these functions."""

    def passes(self, graph: Graph, tables: Sequence[Table]) -> NumpyPasses:
        """Passes over a graph.

        Args:
          tables: of each edge, the values of its variable in rows; C-contiguous.
        """
        ...

    def least_product(self, left: Table, right: Table) -> Table:
        """The minimum over k of left[k, a] + right[k, b], for all a, b."""
        ...

    def least_of_groups(self, matrix: Table, rows: Members, columns: Members) -> Table:
        """For each pair of groups the minimum of matrix[row of a, column of b] over their members a, b. No group is
        empty."""
        ...

    def least_of_sum(self, entries: Table, begins: Index, strides: Index, sizes: Index) -> Table:
        """The minimum, over the second to last dimension, of a sum of broadcast arrays; flat.

        Args:
          entries: the entries of all arrays, one array after the other.
          begins: (arrays,) offset of each array in `entries`.
          strides: (arrays, dimensions) strides in entries; 0: the array does not depend on the dimension. Last stride:
            0 or 1.
          sizes: (dimensions,) the shape of the sum; at least two dimensions.
        """
        ...


def kernels_for(tables: Iterable[Given], compiled: float = 5e7) -> Kernels:
    """The implementation for a problem of these tables: compiled from `compiled` entries on, and wherever the compiled
    loops are loaded. It never depends on measured time.

    On a new machine numba takes seconds to compile the loops, and 0.5 s in each process to load them. GPT-3, scanned,
    on three axes has 4.2e7 entries. NumPy plans it in 3.3 s of processor time, compiled loops in 2.9 s, which does not
    pay for compiling. T5-11B has 8.9e7 entries and takes 19 s and 9 s: the second plan has paid for compiling.
    (`benchmarks.large_step`)
    """
    loaded = _compiled.cache_info().currsize
    return _compiled() if loaded or sum(t.size for t in tables) >= compiled else numpy_kernels


def kernels_after(work: float, messages: int, kernels: Kernels, much: float = 5e8) -> Kernels:
    """The implementation to go on with after so many entries were touched and messages were sent: compiled from `much`
    entries on, which take NumPy about as long as loading the compiled loops."""
    few = work + MESSAGE * messages < much
    return kernels if few or kernels is not numpy_kernels else _compiled()


@cache
def _compiled() -> Kernels:
    try:
        from shardc.solver.kernels import numba_kernels  # noqa: PLC0415 - takes 0.5 s, and numba is an extra
    except ImportError as error:
        log.info("a large problem is solved without compiled loops (pip install 'shardc[fast]'): %s", error)
        return numpy_kernels
    return numba_kernels
