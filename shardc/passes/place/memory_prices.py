"""A model of memory as a sum over choices, and the problem's tables with a price on memory.

The program alone decides when a value is in memory (`passes/estimate/live_ranges.py`). The value's placement decides
its bytes: the placement in which it is made, or in which it is held for its readers. A boxing makes a copy in the
placement of its reader, if that differs. Each value or copy, with its live range, is a *term*. The sum of the terms
approximates the memory of the plan; whether a plan fits is checked on the plan itself.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.compat import Jaxpr
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import bodies_of
from shardc.passes.estimate.backend import Backend
from shardc.passes.estimate.live_ranges import LiveRanges, live_ranges
from shardc.passes.estimate.memory import GAPS
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.place.place import Tables
from shardc.passes.place.problem import Nested, Node, Problem, Reader, Scope, Value
from shardc.sbp.boxing import BoxingTable
from shardc.solver.cost_tables import Table, whole

PRICE_STEP: Final = 0.25
"""Step of the logarithm of prices."""
LEAST_PRICE_SHARE: Final = 1e-4
"""Prices below this share of the highest count as zero."""


class MemoryTerm(NamedTuple):
    """A value or copy that may be in memory.

    Attributes:
      first, second: the nodes whose choices decide its bytes; one node twice, or both ends of an edge.
      amounts: bytes for each choice, or for each pair of choices.
      begin, end: points of the program: it is live from `begin` until before `end`.
    """

    first: int
    second: int
    amounts: Table
    begin: int
    end: int


class MemoryModel:
    """The memory of a device as a sum of terms, and prices on them in a problem's tables.

    Attributes:
      terms: all of them, those of the arguments first.
      arguments: number of arguments among them.
      points: number of points of time of the program.
    """

    def __init__(self, problem: Problem, tables: Tables, ties: Mapping[int, int], backend: Backend) -> None:
        self.problem, self.tables, self.domains, self.backend = problem, tables, tables.domains, backend
        self.memo = tables.memo
        self.terms: list[MemoryTerm] = []
        self._pieces_at: dict[tuple[int, float], Table] = {}
        found = live_ranges(problem.scope.jaxpr, ties, backend)
        self.arguments, self.points = found.arguments, found.points
        self._add_values(found)
        self._add_copies(found)
        self._begin, self._end = (
            np.minimum(np.asarray([getattr(h, at) for h in self.terms], np.int64), self.points)
            for at in ("begin", "end")
        )
        self._open = np.ones(len(self.terms), np.bool_)

    def used(self, boxed: Boxed, bytes_at: NDArray[np.float64]) -> NDArray[np.float64]:
        """(points,) bytes in use at each point of the program without boxings, as the maximum over the corresponding
        points of the program with boxings.

        Args:
          boxed: the program with boxings.
          bytes_at: bytes in use at each point of the program with boxings.
        """
        used = np.zeros(self.points)
        np.maximum.at(used, points_without_boxings(boxed.jaxpr)[: bytes_at.size], bytes_at)
        return used

    def prices(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        """(terms,) the price of a byte of each term: the sum of the prices `at` the points of its live range. Prices
        are rounded, so that layers share tables."""
        total = np.concatenate(([0.0], np.cumsum(at)))
        found = total[self._end] - total[self._begin]
        some = found > LEAST_PRICE_SHARE * found.max(initial=0.0)
        found[~some] = 0.0
        found[some] = np.exp(np.round(np.log(found[some]) / PRICE_STEP) * PRICE_STEP)
        return found

    def priced(self, prices: NDArray[np.float64]) -> Tables:
        """The problem's tables, with the bytes of each term at its price added to the costs."""
        do, unary, pairwise = self.memo.do, list(self.tables.unary), dict(self.tables.pairwise)
        for k in np.flatnonzero(prices * self._open):
            h, price = self.terms[k], float(prices[k])
            cost = do(("price", id(h.amounts), price), h.amounts, lambda a=h.amounts, p=price: p * a)
            before = unary[h.first] if h.first == h.second else pairwise[h.first, h.second]
            after = do(("sum", id(before), id(cost)), (before, cost), lambda b=before, c=cost: whole(b) + c)
            if h.first == h.second:
                unary[h.first] = after
            else:
                pairwise[h.first, h.second] = after
        return replace(self.tables, unary=unary, pairwise=pairwise, unpriced=self.tables)

    def least_arguments(self) -> float:
        """Bytes of all arguments, each in its smallest placement."""
        return sum(float(h.amounts.min()) for h in self.terms[: self.arguments])

    def least(self) -> float:
        """Bytes at the peak with every term at its smallest: an approximate lower bound for all choices."""
        change = np.zeros(self.points + 1)
        amounts = [float(h.amounts.min()) for h in self.terms]
        np.add.at(change, self._begin, amounts)
        np.subtract.at(change, self._end, amounts)
        return float(change.cumsum().max(initial=0.0))

    def among(self, offered: Sequence[NDArray[np.intp]]) -> MemoryModel:
        """This model restricted to `offered` choices per node, by number. Terms of nodes with one choice left stay as
        they are, without a price."""
        do, found = self.memo.do, copy.copy(self)
        keys = [f.tobytes() for f in offered]

        def some(table: Table, i: int, j: int) -> Table:
            key = ("some", id(table), keys[i], keys[j])
            if table.ndim == 1:
                return do(key, table, lambda: self.memo.one(table[offered[i]]))
            return do(key, table, lambda: self.memo.one(np.ascontiguousarray(table[np.ix_(offered[i], offered[j])])))

        found.tables = self.tables.among(offered)
        ends = np.asarray([(h.first, h.second) for h in self.terms], np.intp).reshape(-1, 2)
        found._open = np.any(np.asarray([f.size for f in offered], np.intp)[ends] > 1, axis=1)
        found.terms = [
            MemoryTerm(h.first, h.second, some(h.amounts, h.first, h.second), h.begin, h.end) if is_open else h
            for h, is_open in zip(self.terms, found._open.tolist(), strict=True)
        ]
        return found

    # --- what may be there ------------------------------------------------------------------------------------------

    def _add_values(self, found: LiveRanges) -> None:
        """Add a term for each argument, with the bytes of its own placement, and for each other value, with those of
        its hold."""
        for k, (var, begin, end) in enumerate(zip(found.values, found.begin.tolist(), found.end.tolist(), strict=True)):
            value = self.problem.values[var]
            hold = self.problem.holds.get(id(value)) if k >= found.arguments else None
            node = hold or value.maker
            share = 1.0 if k < found.arguments else GAPS
            amounts = self._made(value, share) if hold is None else self._held(value, hold)
            self.terms.append(MemoryTerm(node.number, node.number, amounts, begin, end))

    def _add_copies(self, found: LiveRanges) -> None:
        """For each edge add a term for the copy that its boxing makes, and for the value that it reads, unless they are
        counted already."""
        at = _points_of(self.problem)
        arguments = {id(self.problem.values[v]) for v in found.values[: found.arguments]}
        counted = {id(self.problem.values[v]) for v in found.values[found.arguments :]}
        until = _read_until(self.problem, at, arguments | counted)
        for value in (v for n in self.problem.nodes for v in n.results):
            whole = value.maker.operands[0] if value.maker.kind == "hold" else value
            assert whole is not None
            made = at.get(whole.maker, (0, 0))[1]
            for reader in value.readers:
                held = reader.node.kind == "hold"
                nodes = [r.node for r in (reader.node.results[0].readers if held else (reader,)) if r.node in at]
                if not nodes:
                    continue
                first, last = min(at[n][0] for n in nodes), max(until[n] for n in nodes)
                moved = self._moved(value, reader)
                if not (held and id(value) in counted):
                    self._add_edge(value, reader, moved[1], made if self.backend.eager else first, last + 1)
                if whole is value and id(value) not in arguments and (held or id(value) not in counted):
                    self._add_edge(value, reader, moved[0], made, first + 1)

    def _add_edge(self, value: Value, reader: Reader, amounts: Table, begin: int, end: int) -> None:
        i, j = value.maker.number, reader.node.number
        if i > j:
            i, j = j, i
            amounts = self.memo.do(("T", id(amounts)), amounts, lambda a=amounts: np.ascontiguousarray(a.T))
        if i == j:
            amounts = self.memo.do(("loop", id(amounts)), amounts, lambda a=amounts: np.diagonal(a).copy())
        if begin < end:
            self.terms.append(MemoryTerm(i, j, amounts, begin, end))

    def _pieces(self, table: BoxingTable, value: Value, share: float) -> Table:
        key = id(table), share
        if key not in self._pieces_at:
            sizes = self.domains.view.sizes
            pieces = [piece_bytes(value.aval, p, sizes, self.backend) for p in table.placements]
            self._pieces_at[key] = share * np.asarray(pieces, np.float64)
        return self._pieces_at[key]

    def _made(self, value: Value, share: float) -> Table:
        """(choices of the maker,) `share` times the bytes of a value."""
        domain, port = self.domains.of[value.maker.number], len(value.maker.operands) + value.port
        table, rows = domain.tables[port], domain.rows[port]
        assert table is not None and rows is not None
        pieces = self._pieces(table, value, share)
        return self.memo.do(("at", id(pieces), id(rows)), (pieces, rows), lambda: pieces[rows])

    def _held(self, value: Value, hold: Node) -> Table:
        """(choices of the hold,) bytes of a value."""
        domain = self.domains.of[hold.number]
        table, rows, also = domain.tables[0], domain.rows[0], domain.also
        assert table is not None and rows is not None
        pieces = self._pieces(table, value, GAPS)
        return self.memo.do(("held", id(pieces), id(rows), id(also)), (pieces, rows, also), lambda: (
            pieces[rows] if also is None else pieces[rows] + np.where(rows == also, 0.0, pieces[also])
        ))  # fmt: skip

    def _copies(self, table: BoxingTable, value: Value) -> Table:
        """(rows, rows) the number of buffers of a boxed value: two if the boxing also copies it to another layout
        (`live_ranges`), else one."""
        if not self.backend.one_layout:
            return np.ones_like(table.seconds)
        splits = [tuple(p.axes_of(d) for d in range(1, value.rank)) for p in table.placements]
        known = {s: i for i, s in enumerate(dict.fromkeys(splits))}
        number = np.asarray([known[s] for s in splits])
        return np.where(number[:, None] != number[None, :], 2.0, 1.0)

    def _moved(self, value: Value, reader: Reader) -> tuple[Table, Table]:
        """(choices of the maker, choices of the reader) bytes before a boxing, and after it; zero where nothing is
        boxed."""
        maker, into = self.domains.of[value.maker.number], self.domains.of[reader.node.number]
        port = len(value.maker.operands) + value.port
        table, rows, columns = maker.tables[port], maker.rows[port], into.rows[reader.port]
        assert table is not None and rows is not None and columns is not None
        pieces = self._pieces(table, value, GAPS)

        def make() -> tuple[Table, Table]:
            moves = table.seconds > 0
            one = moves[rows[:, None], columns[None, :]]
            times = self._copies(table, value)
            before, after = pieces[rows][:, None] * one, times[rows[:, None], columns] * pieces[columns] * one
            if into.also is not None:
                two = moves[rows[:, None], into.also[None, :]] & (columns != into.also)
                before = np.maximum(before, pieces[rows][:, None] * two)
                after = after + times[rows[:, None], into.also] * pieces[into.also] * two
            if maker.also is not None:
                other = times[maker.also[:, None], columns] * moves[maker.also[:, None], columns]
                after = np.minimum(after, other * pieces[columns])
            return before, after

        key = ("moved", id(pieces), id(rows), id(maker.also), id(columns), id(into.also))
        return self.memo.do(key, (pieces, table, maker, into), make)


def points_without_boxings(jaxpr: Jaxpr) -> NDArray[np.int64]:
    """For each point of a program with boxings (`live_ranges`), the corresponding point of the program without."""
    found: list[int] = []
    now = 0

    def walk(body: Jaxpr) -> None:
        nonlocal now
        for eqn in body.eqns:
            for inner in bodies_of(eqn):
                found.append(now)
                now += 1
                walk(inner)
            found.append(now)
            now += eqn.primitive is not box_p

    walk(jaxpr)
    return np.asarray([*found, now], np.int64)


def _read_until(problem: Problem, at: Mapping[Node, tuple[int, int]], counted: Container[int]) -> dict[Node, int]:
    """The last point at which a node's operands have to be live: that of the node, or, if its results are never
    materialized, of their readers.

    Args:
      at: the points of nodes.
      counted: ids of values that are materialized.
    """
    found: dict[Node, int] = {}
    for node in reversed(problem.nodes):
        last = at.get(node, (0, 0))[1]
        if node.kind == "hold" or not any(id(v) in counted for v in node.results):
            last = max((found.get(r.node, 0) for v in node.results for r in v.readers), default=last)
        found[node] = max(last, at.get(node, (0, 0))[1])
    return found


def _points_of(problem: Problem) -> dict[Node, tuple[int, int]]:
    """The points of the equations of nodes: the first for arguments, the last for results."""
    found: dict[Node, tuple[int, int]] = {}
    now = 0

    def walk(scope: Scope) -> None:
        nonlocal now
        for node in scope.nodes:
            start = now
            if isinstance(node, Nested):
                for inner in node.scopes:
                    now += 1
                    walk(inner)
                for n in (*node.entries, *node.exits):
                    found[n] = start, now
            else:
                found[node] = now, now
            now += 1

    walk(problem.scope)
    found |= dict.fromkeys(problem.sinks, (now, now))
    return found
