"""A problem's variables and edges in arrays, in the order in which messages visit them."""

from __future__ import annotations

from typing import NamedTuple

from shardc.solver.cost_tables import Index, Table


class Graph(NamedTuple):
    """Variables and edges, each edge once from either end. Costs and messages lie in one array each.

    Attributes:
      order: the variables as they are visited.
      first: (variables + 1,) where the values of each begin.
      start: (variables + 1,) where the edges out of each begin; split: where those do that lead to later variables.
      other: (edges,) the variable at the other end; twin: the edge that comes back.
      at: (edges,) where its message begins, for the values of the other end. Those to one variable follow each other,
        in the order of its edges.
      share: of a variable's costs for each edge ahead.
      left: of its costs for none of them, on the way back.
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
