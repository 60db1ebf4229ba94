"""Which values to keep and which operations to run again, at prices on memory: a minimum cut (Picard 1976, closures).

A needed value is either kept, which costs its size times the price, or its maker runs again, which costs seconds and
needs the values it reads. These are edges of a network: a value on the source's side is needed, an operation there runs
again.

    source -- inf --> value -- size x price --> its maker, or the sink -- seconds --> sink
                      maker -- inf --> what it reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import scipy
from numpy.typing import NDArray

SOURCE: Final = 0
SINK: Final = 1
CAPACITY: Final = 2**29
"""The capacity of all edges that can be cut, together: scipy's flows are 32-bit integers."""
UNCUT: Final = 2**30
"""The capacity of an edge that cannot be cut."""


@dataclass(frozen=True, eq=False)
class Repeatable:
    """Values, and the operations that make them.

    Attributes:
      needed: the values that must be available.
      sizes: (values,) the cost of keeping each; inf: it is not kept. A value without a maker can be kept.
      makers: (values,) the operation that computes it again; -1: none.
      seconds: (operations,) the time to run each again.
      reads: (operations,) the values that each reads.
      after: (operations,) an operation that runs again if this one does; -1: none.
    """

    needed: Sequence[int]
    sizes: NDArray[np.float64]
    makers: NDArray[np.int64]
    seconds: NDArray[np.float64]
    reads: Sequence[Sequence[int]]
    after: NDArray[np.int64]

    @cached_property
    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(edges,) tails and heads, of the edges to needed values, from values, to the sink, to values read, to
        `after`."""
        values, operations = 2 + np.arange(len(self.sizes)), 2 + len(self.sizes) + np.arange(len(self.seconds))
        readers = np.repeat(operations, [len(r) for r in self.reads])
        read = np.asarray([v for r in self.reads for v in r], np.int64)
        followed = self.after >= 0
        tails = [np.full(len(self.needed), SOURCE), values, operations, readers, operations[followed]]
        made = np.where(self.makers >= 0, 2 + len(self.sizes) + self.makers, SINK)
        heads = [2 + np.asarray(self.needed, np.int64), made, np.full(len(operations), SINK), 2 + read,
                 2 + len(self.sizes) + self.after[followed]]  # fmt: skip
        return np.concatenate(tails), np.concatenate(heads)

    def solve(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """The values to keep and the operations to run again, at the least total cost.

        Args:
          prices: (values,) seconds per unit of size.
        """
        tails, _ = self._edges
        first = len(self.needed)
        costs = np.full(len(tails), np.inf)
        costs[first : first + len(self.sizes)] = self.sizes * prices
        costs[first + len(self.sizes) :][: len(self.seconds)] = self.seconds
        finite = np.isfinite(costs)
        scale = (CAPACITY - finite.sum()) / max(costs[finite].sum(), 1e-300)
        capacity = np.full(len(tails), UNCUT, np.int32)
        capacity[finite] = np.ceil(costs[finite] * scale)
        network = self._network(capacity)
        side = self._side(network - scipy.sparse.csgraph.maximum_flow(network, SOURCE, SINK).flow)
        needed, again = side[2 : 2 + len(self.sizes)], side[2 + len(self.sizes) :]
        return needed & ~((self.makers >= 0) & again[self.makers]), again

    def _network(self, capacity: NDArray[np.int32]) -> scipy.sparse.csr_array:
        size = 2 + len(self.sizes) + len(self.seconds)
        return scipy.sparse.csr_array((capacity, self._edges), shape=(size, size))

    def _side(self, network: scipy.sparse.csr_array) -> NDArray[np.bool_]:
        network.eliminate_zeros()
        found = np.zeros(2 + len(self.sizes) + len(self.seconds), np.bool_)
        found[scipy.sparse.csgraph.breadth_first_order(network, SOURCE, return_predecessors=False)] = True
        return found
