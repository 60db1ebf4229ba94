"""The factor graph of a problem in arrays, in the order in which messages visit it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardc.solver.cost_tables import Index, Table


class Graph(NamedTuple):
    """Factor graph in CSR form: each edge is stored in both directions. The costs of all variables are concatenated in
    one array, and so are all messages.

    Attributes:
      order: the variables in the order of the visits.
      first: (variables + 1,) offset of each variable's values in arrays of all values.
      start: (variables + 1,) index of the first edge out of each variable, those to earlier variables first; split:
        index of its first edge to a later variable.
      other: (edges,) the target of each edge; twin: the index of the same edge in the other direction.
      at: (edges,) offset of the message along the edge, which has one entry for each value of the target. The messages
        to one variable are contiguous, in the order of its edges.
      share: (variables,) the share of a variable's costs that each edge ahead gets.
      left: (variables,) the share that no edge gets on the way back.
      table: (edges,) in compiled kernels the address of the table of each edge, whose rows are the values here. The
        caller keeps the arrays alive.
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
    table: Index = np.empty(0, np.intp)


class Members(NamedTuple):
    """A partition of a variable's values into groups.

    Attributes:
      row: for each value the matrix row that has its costs.
      group: for each value the number of its group; groups: the number of groups.
    """

    row: Index
    group: Index
    groups: int


def outwards(near: Sequence[Mapping[int, Table]]) -> list[int]:
    """All variables in breadth-first order."""
    found: list[int] = []
    seen = [False] * len(near)
    for root in range(len(near)):
        queue = deque([root])
        while queue:
            v = queue.popleft()
            if not seen[v]:
                seen[v] = True
                found.append(v)
                queue.extend(j for j in sorted(near[v]) if not seen[j])
    return found


def graph_of(
    sizes: Sequence[int], near: Sequence[Mapping[int, Table]], order: Sequence[int]
) -> tuple[Graph, list[Table]]:  # fmt: skip
    """The graph of a problem whose variables are visited in this order, and the table of each edge."""
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    where = place.tolist()
    start, split, other, tables = [0], list[int](), list[int](), list[Table]()
    number: dict[tuple[int, int], int] = {}
    for v, some in enumerate(near):
        ends = sorted(some, key=lambda j: where[j] > where[v])
        split.append(len(other) + sum(where[j] < where[v] for j in ends))
        for j in ends:
            number[v, j] = len(other)
            other.append(j)
            tables.append(some[j])
        start.append(len(other))
    twin = np.asarray([number[j, v] for v, j in number], np.intp)
    first = np.cumsum([0, *sizes])
    starts, splits = np.asarray(start), np.asarray(split, np.intp)
    degree = np.diff(starts)
    lengths = np.repeat(np.asarray(sizes, np.intp), degree)  # of the messages that come back along each edge
    at = np.empty(len(other), np.intp)
    at[twin] = np.cumsum(lengths) - lengths
    behind = splits - starts[:-1]
    share = 1.0 / np.maximum(np.maximum(behind, degree - behind), 1)
    graph = Graph(
        np.asarray(order, np.intp), first, starts, splits, np.asarray(other, np.intp), twin, at, share,
        1.0 - behind * share,
    )  # fmt: skip
    return graph, tables
