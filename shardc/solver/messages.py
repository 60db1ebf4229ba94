"""Messages between variables, and passes that send them.

Variables lie on levels, and those of one level have no edges among themselves: they are visited together, and messages
lie in rows, by the size of the variables that they are for, so that a step reads and writes slices. Nearly all that a
pass does is to read tables. Rough messages have them in single precision, half of the bytes: they lead where exact ones
do, and what they say of the bound is not quite true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardc.solver.edges import SHARED, Costs, Rows, Stack, add_at, least_sums, rows_of
from shardc.solver.tables import Index, Pair, Table


@dataclass(eq=False)
class Edges:
    """Edges of one shape out of the variables of one level.

    Attributes:
      position: of their variables in the level.
      other: the variables at their other ends.
      back: rows of the messages from there, among those to variables of this size.
      into, rows: messages to variables of the size there, and the rows of those along these edges.
      tables: their values here being those of the level's variables.
      least: where the least of each message is written.
    """

    position: Rows
    other: Index
    back: Rows
    into: Costs
    rows: Rows
    tables: Stack
    least: Costs


@dataclass(eq=False)
class Level:
    """Variables of one size that have no edges among themselves.

    Attributes:
      messages: those to variables of this size; incoming: to these.
      starts: where those of each variable begin.
      own: costs of the values.
      share: of the costs for each edge ahead.
      left: of the costs for none of the edges ahead, on the way there and back.
      least: where the least costs are written.
    """

    variables: Index
    own: Costs
    messages: Costs
    incoming: Costs
    starts: Index
    ahead: list[Edges]
    behind: list[Edges]
    share: Costs
    left: tuple[Costs, Costs]
    least: Costs

    def costs(self) -> Costs:
        """Of the values, with all messages."""
        if self.starts.size == 1:
            return self.own + np.add.reduce(self.incoming, 0)
        return self.own + np.add.reduceat(self.incoming, self.starts, 0)


class Messages:
    """The messages of a problem of finite costs, in which each variable and each row of a table has an allowed entry.

    Attributes:
      all: them, one after the other; two of the same problem have them in the same order.
      levels: the variables.
    """

    def __init__(
        self, own: Sequence[Table], near: Sequence[Mapping[int, Table]], level: Sequence[int], free: bool = False,
        rough: bool = False,
    ) -> None:  # fmt: skip
        """Where it is `free`, tables say only what is allowed."""
        kind = np.float32 if rough else np.float64
        as_kind = {id(t): t.astype(kind, copy=False) for t in {id(t): t for n in near for t in n.values()}.values()}
        sizes = [u.size for u in own]
        groups: dict[Pair, list[int]] = {}
        for v, u in enumerate(own):
            groups.setdefault((level[v], u.size), []).append(v)
        members = [group for _, group in sorted(groups.items())]
        first = dict.fromkeys(sizes, 0)  # of a variable's rows among the messages to variables of its size
        row: dict[Pair, int] = {}
        begin = [0] * len(own)
        for v in (v for group in members for v in group):
            begin[v] = first[sizes[v]]
            row |= {(j, v): begin[v] + k for k, j in enumerate(near[v])}
            first[sizes[v]] += max(len(near[v]), 1)  # where no message comes in, a row of zeros
        self.all: Costs = np.zeros(sum(size * rows for size, rows in first.items()), kind)
        blocks: dict[int, Costs] = {}
        for size, rows in first.items():
            taken = sum(b.size for b in blocks.values())
            blocks[size] = self.all[taken : taken + size * rows].reshape(rows, size)
        self.levels: list[Level] = []
        self._left = np.zeros(len(own))
        self._least = np.zeros(len(own), kind), np.zeros(len(row) // 2, kind)  # of costs; of messages on the way back
        variables = edges = 0
        for group in members:
            size, position = sizes[group[0]], {v: k for k, v in enumerate(group)}
            sides: list[list[Edges]] = []
            for ahead in (True, False):
                side: list[Edges] = []
                for there, pairs in _bundles(group, own, near, level, ahead):
                    least = np.zeros(0, kind) if ahead else self._least[1][edges : edges + len(pairs)]
                    edges += least.size
                    place, back, rows = (
                        rows_of(numbers)
                        for numbers in zip(*((position[v], row[j, v], row[v, j]) for v, j in pairs), strict=True)
                    )
                    other = np.asarray([j for _, j in pairs])
                    tables = Stack.of([as_kind[id(near[v][j])] for v, j in pairs], free)
                    side.append(Edges(place, other, back, blocks[there], rows, tables, least))
                sides.append(side)
            degree = np.asarray([len(near[v]) for v in group], np.float64)
            here = np.asarray([sum(level[j] > level[v] for j in near[v]) for v in group], np.float64)
            share = 1.0 / np.maximum(np.maximum(here, degree - here), 1.0)
            left = 1.0 - here * share, 1.0 - (degree - here) * share
            some, costs = slice(variables, variables + len(group)), np.stack([own[v] for v in group])
            self._left[some] = left[1]
            last = group[-1]
            incoming = blocks[size][begin[group[0]] : begin[last] + max(len(near[last]), 1)]
            starts = np.asarray([begin[v] - begin[group[0]] for v in group])
            self.levels.append(
                Level(
                    np.asarray(group), costs.astype(kind), blocks[size], incoming, starts, sides[0], sides[1],
                    share[:, None].astype(kind), left, self._least[0][some],
                )
            )  # fmt: skip
            variables += len(group)

    def set_own(self, own: Sequence[Table]) -> None:
        """Other costs of the values."""
        for level in self.levels:
            level.own = np.stack([own[v] for v in level.variables]).astype(self.all.dtype)

    def run(self, forward: bool, values: Index | None = None) -> None:
        """A pass: messages along all edges in one direction. An assignment is read on the way, into `values`."""
        for level in self.levels if forward else reversed(self.levels):
            ahead, behind = (level.ahead, level.behind) if forward else (level.behind, level.ahead)
            costs = level.costs()
            if not forward:
                np.minimum.reduce(costs, 1, out=level.least)
            if values is not None:
                _read(level, costs, behind, values)
            costs *= level.share
            for edges in ahead:
                message = least_sums(costs[edges.position] - level.messages[edges.back], edges.tables.table)
                least = np.minimum.reduce(message, 1, keepdims=True)
                if not forward:
                    edges.least[:] = least[:, 0]
                message -= least
                edges.into[edges.rows] = message

    @property
    def bound(self) -> float:
        """As the messages are after a pass back."""
        costs, least = self._least
        return float((self._left * costs).sum()) + float(least.sum(dtype=np.float64))


def _read(level: Level, costs: Costs, behind: Sequence[Edges], values: Index) -> None:
    """The best values as those behind have been read."""
    costs = costs.copy() if behind else costs
    for edges in behind:
        known = edges.tables.column(values[edges.other])
        add_at(costs, edges.position, known - level.messages[edges.back])
    values[level.variables] = costs.argmin(1)


def _bundles(
    group: Sequence[int], own: Sequence[Table], near: Sequence[Mapping[int, Table]], level: Sequence[int], ahead: bool
) -> list[tuple[int, list[Pair]]]:
    """The edges out of some variables to higher levels, or to lower ones, that are handled together, and the size of
    the variables there."""
    found: dict[Pair, list[Pair]] = {}
    for v in group:
        for j, table in near[v].items():
            if (level[j] > level[v]) == ahead:
                key = (own[j].size, id(table) if table.size > SHARED else 0)
                found.setdefault(key, []).append((v, j))
    return [(size, pairs) for (size, _), pairs in found.items()]
