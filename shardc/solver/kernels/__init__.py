"""The loops that read every entry of the tables, and the choice of their implementation.

There are two implementations with the same results, bit for bit: `kernels_numpy`, which tests take for the truth, and
`kernels_numba`, which is faster once it is compiled. `kernels_for` alone chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardc.solver.cost_tables import Given, Index, Single, Table
from shardc.solver.graph import Graph
from shardc.solver.kernels import numpy_kernels

log = logging.getLogger("shardc")

COMPILED: Final = 50_000_000
"""Table entries of a problem from which on compiled loops are used.

On a new machine numba takes 11 s to compile them, and 0.5 s in each process to load them. GPT-3, scanned, on three axes
has 4.2e7 entries and is planned in 3.3 s of processor time by NumPy, in 2.9 s by compiled loops: too little to compile
for. T5-11B has 8.9e7 and takes 19 s and 9 s: the second plan has paid for compiling. (`benchmarks.large_step`)
"""


class Passes(Protocol):
    """Passes over the edges of a problem. `own` holds the costs of all values, `messages` all messages."""

    def send(self, own: Table, messages: Table, forward: bool, exact: bool, read: bool, values: Index) -> float:
        """A pass: messages along all edges in one direction.

        With `read` an assignment is read on the way, into `values`. Returns a bound, on the way back, if `exact`;
        otherwise tables are read in single precision, in half the time.
        """
        ...

    def handed(self, own: Table, messages: Table) -> tuple[Table, Table]:
        """After a pass back: for each value what is left of its costs for no edge; and for each edge back what its
        values hand to the table, less what came from there, where that message lies."""
        ...

    def excess(self, own: Table, messages: Table) -> Table:
        """For each value by how much at least an assignment that has it costs more than the bound, after a pass
        back."""
        ...

    def around(self, values: Index, found: Table) -> None:
        """found += for each value of each variable what its tables cost, the other variables unchanged."""
        ...

    def improve(self, own: Table, values: Index, passes: int) -> float:
        """Sets each variable in turn to its best value, the others unchanged. Returns the cost of the assignment."""
        ...

    def better_of(self, own: Table, best: Index, other: Index) -> Index:
        """The better one of two assignments in each part of the graph in which they differ."""
        ...


class Kernels(Protocol):
    """One implementation: a module with these functions."""

    def passes(self, graph: Graph, tables: Sequence[Table], singles: Sequence[Single]) -> Passes:
        """Passes over a graph.

        Args:
          tables: of each edge, the values of its variable in rows; C-contiguous.
          singles: the same in single precision, or nothing: then every pass is to be exact.
        """
        ...

    def further(self, after: Table, change: Table, before: Table, last: Table) -> Table:
        """Where messages lead to that were `before`, changed by `last`, and are `after` a change: the combination of
        the two whose change is least."""
        ...

    def least_product(self, left: Table, right: Table) -> Table:
        """Least over k of left[k, a] + right[k, b], for all a, b."""
        ...

    def block(self, table: Table, rows: Index, columns: Index) -> Table:
        """table[rows, :][:, columns]"""
        ...

    def affordable(self, table: Table, rows: Table, columns: Table, most: float) -> NDArray[np.bool_]:
        """Whether rows[a] + columns[b] + entry (a, b) of a table is at most `most`."""
        ...

    def block_of_allowed(
        self, table: Table, allowed: NDArray[np.bool_], rows: Index, columns: Index
    ) -> tuple[Table, bool]:
        """table[rows, :][:, columns], infinite where not allowed; and whether an entry that is not allowed is
        finite."""
        ...

    def kinds(self, bits: NDArray[np.uint64]) -> tuple[Index, Index]:
        """The first of each kind of equal rows, and each row's kind. Kinds are numbered as they come."""
        ...

    def least_gain(self, columns: Table) -> Table:
        """For a, b the least over c of columns[c, a] - columns[c, b]; infinite where neither is allowed."""
        ...

    def is_plain(self, table: Table, error: float) -> bool:
        """Whether a table says nothing of one of its variables alone: each row has an allowed entry, some row has more
        than one, so has some column; and it is not the sum of two vectors up to a relative error."""
        ...

    def unbeaten(self, gain: Table) -> Index:
        """The values a that no other value b beats, which is gain[a, b] >= 0. Of values that beat each other as few
        stay as possible; each value that is dropped is beaten by one that stays."""
        ...

    def least_of_sum(self, entries: Table, begins: Index, strides: Index, sizes: Index) -> Table:
        """The minimum of a sum of arrays over the last dimension but one, flat.

        Args:
          entries: of all arrays; begins: (arrays,) where each begins.
          strides: (arrays, dimensions) entries from one index to the next; 0: the array does not depend on it. 1 or 0
            in the last.
          sizes: (dimensions,) of the sum, two at least.
        """
        ...

    def least_of_groups(
        self, matrix: Table, rows: Index, columns: Index, group: Index, other: Index, groups: int, others: int
    ) -> Table:
        """The least of matrix[rows[a], columns[b]] over the a of each group and the b of each other group, none of
        which is empty."""
        ...


def kernels_for(tables: Iterable[Given]) -> Kernels:
    """The implementation for a problem of these tables: by their number of entries alone, never by time."""
    if sum(t.size for t in tables) < COMPILED:
        return numpy_kernels
    try:
        from shardc.solver.kernels import numba_kernels  # noqa: PLC0415 - takes 0.5 s, and numba is an extra
    except ImportError as error:
        log.info("a large problem is solved without compiled loops (pip install 'shardc[fast]'): %s", error)
        return numpy_kernels
    return numba_kernels
