"""What to keep and what to do again, at a price on what is kept: a minimum cut (Picard 1976, closures of a graph).

A needed value is kept, for its size, or its maker runs again, for its seconds, and needs what it reads. All three are
edges of a network: a value on the source's side is needed, an operation there runs again.

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
"""Of all edges that can be cut, together: scipy's flows are numbers of 32 bits."""
UNCUT: Final = 2**30
"""Of an edge that can not."""


@dataclass(frozen=True, eq=False)
class Repeatable:
    """Values, and the operations that make them.

    Attributes:
      needed: values that have to be there.
      sizes: (values,) what keeping each takes; inf: it is not kept. What has no maker can be.
      makers: (values,) the operation that makes it again; -1: none does.
      seconds: (operations,) that running each again takes.
      reads: (operations,) the values that each needs.
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
        """(edges,) tails and heads: those to needed values, from values, to the sink, to what is read, to `after`."""
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
        """The values that are kept, and the operations that run again, so that all of it costs least.

        Args:
          prices: (values,) seconds for each of a size.
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
