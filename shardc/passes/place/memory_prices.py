"""Prices on memory: what is there while it is too full is charged to the choices that put it there.

When a value is in memory the program says alone (`passes/estimate/live_ranges.py`), how many bytes it has there is a function of
its placement: where it is made, or where its readers want it held. A boxing makes a copy for what reads it, whose bytes
are those of the reader's choice where the maker's is another one. A value or copy, with the times at which it is there,
is a *holding*. They add up to about what a made plan has in memory; which is asked itself whether it fits.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardc.compat import Jaxpr, bodies_of
from shardc.ir.box import Boxed, box_p
from shardc.passes.estimate.backend import Habits
from shardc.passes.estimate.live_ranges import Lifetimes, lifetimes
from shardc.passes.estimate.memory import GAPS
from shardc.passes.estimate.sizes import piece_bytes
from shardc.passes.place.place import Tables
from shardc.passes.place.problem import Nested, Node, Problem, Reader, Scope, Value
from shardc.sbp.boxing import BoxingTable
from shardc.solver.cost_tables import Table, whole

ROUNDING: Final = 0.25
"""Step of the logarithm of prices."""
PENNY: Final = 1e-4
"""Prices below this part of the highest are none."""


class Holding(NamedTuple):
    """Something that may be in memory.

    Attributes:
      first, second: the nodes whose choices decide how many bytes it has; one node twice, or both ends of an edge.
      amounts: bytes for each choice, or for each pair of choices.
      begin, end: points of the program: it is there from `begin` until before `end`.
    """

    first: int
    second: int
    amounts: Table
    begin: int
    end: int


class Charges:
    """What may be in the memory of a device, and prices on it in a problem's tables.

    Attributes:
      holdings: all of them, those of the arguments first.
      arguments: how many of them are arguments.
      points: points of time of the program.
    """

    def __init__(self, problem: Problem, tables: Tables, ties: Mapping[int, int], habits: Habits) -> None:
        self.problem, self.tables, self.domains, self.habits = problem, tables, tables.domains, habits
        self.memo = tables.memo
        self.holdings: list[Holding] = []
        self._pieces_at: dict[tuple[int, float], Table] = {}
        found = lifetimes(problem.scope.jaxpr, ties, habits)
        self.arguments, self.points = found.arguments, found.points
        self._add_values(found)
        self._add_copies(found)
        self._begin, self._end = (
            np.minimum(np.asarray([getattr(h, at) for h in self.holdings], np.int64), self.points)
            for at in ("begin", "end")
        )
        self._open = np.ones(len(self.holdings), np.bool_)

    def used(self, boxed: Boxed, bytes_at: NDArray[np.float64]) -> NDArray[np.float64]:
        """(points,) the most that a program with its boxings has in use, at the points of the one without.

        Args:
          boxed: that program.
          bytes_at: (its points,) what is in use.
        """
        used = np.zeros(self.points)
        np.maximum.at(used, points_without_boxings(boxed.jaxpr)[: bytes_at.size], bytes_at)
        return used

    def prices(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        """(holdings,) prices a byte, from those at each point of the program; rounded, so that layers share tables."""
        total = np.concatenate(([0.0], np.cumsum(at)))
        found = total[self._end] - total[self._begin]
        some = found > PENNY * found.max(initial=0.0)
        found[~some] = 0.0
        found[some] = np.exp(np.round(np.log(found[some]) / ROUNDING) * ROUNDING)
        return found

    def priced(self, prices: NDArray[np.float64]) -> Tables:
        """The problem's tables with a price a byte on each holding."""
        do, unary, pairwise = self.memo.do, list(self.tables.unary), dict(self.tables.pairwise)
        for k in np.flatnonzero(prices * self._open):
            h, price = self.holdings[k], float(prices[k])
            dear = do(("price", id(h.amounts), price), h.amounts, lambda a=h.amounts, p=price: p * a)
            before = unary[h.first] if h.first == h.second else pairwise[h.first, h.second]
            after = do(("sum", id(before), id(dear)), (before, dear), lambda b=before, d=dear: whole(b) + d)
            if h.first == h.second:
                unary[h.first] = after
            else:
                pairwise[h.first, h.second] = after
        return replace(self.tables, unary=unary, pairwise=pairwise, unpriced=self.tables)

    def least_arguments(self) -> float:
        """Bytes of all arguments, each where it takes least."""
        return sum(float(h.amounts.min()) for h in self.holdings[: self.arguments])

    def least(self) -> float:
        """Bytes at the fullest point, were everything where it takes least: about what no choices fall below."""
        change = np.zeros(self.points + 1)
        amounts = [float(h.amounts.min()) for h in self.holdings]
        np.add.at(change, self._begin, amounts)
        np.subtract.at(change, self._end, amounts)
        return float(change.cumsum().max(initial=0.0))

    def among(self, offered: Sequence[NDArray[np.intp]]) -> Charges:
        """The same with only some choices offered to each node, by number; without what nodes of one choice hold."""
        do, found = self.memo.do, copy.copy(self)
        keys = [f.tobytes() for f in offered]

        def some(table: Table, i: int, j: int) -> Table:
            key = ("some", id(table), keys[i], keys[j])
            if table.ndim == 1:
                return do(key, table, lambda: self.memo.one(table[offered[i]]))
            return do(key, table, lambda: self.memo.one(np.ascontiguousarray(table[np.ix_(offered[i], offered[j])])))

        found.tables = self.tables.among(offered)
        ends = np.asarray([(h.first, h.second) for h in self.holdings], np.intp).reshape(-1, 2)
        found._open = np.any(np.asarray([f.size for f in offered], np.intp)[ends] > 1, axis=1)
        found.holdings = [
            Holding(h.first, h.second, some(h.amounts, h.first, h.second), h.begin, h.end) if is_open else h
            for h, is_open in zip(self.holdings, found._open.tolist(), strict=True)
        ]
        return found

    # --- what may be there ------------------------------------------------------------------------------------------

    def _add_values(self, found: Lifetimes) -> None:
        """Arguments where they come in; all else where its readers want it held."""
        for k, (var, begin, end) in enumerate(zip(found.values, found.begin.tolist(), found.end.tolist(), strict=True)):
            value = self.problem.values[var]
            hold = self.problem.holds.get(id(value)) if k >= found.arguments else None
            node = hold or value.maker
            share = 1.0 if k < found.arguments else GAPS
            amounts = self._made(value, share) if hold is None else self._held(value, hold)
            self.holdings.append(Holding(node.number, node.number, amounts, begin, end))

    def _add_copies(self, found: Lifetimes) -> None:
        """For each edge what its boxing makes, and what it is made from, so far as neither has been counted."""
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
                    self._add_edge(value, reader, moved[1], made if self.habits.eager else first, last + 1)
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
            self.holdings.append(Holding(i, j, amounts, begin, end))

    def _pieces(self, table: BoxingTable, value: Value, share: float) -> Table:
        key = id(table), share
        if key not in self._pieces_at:
            sizes = self.domains.view.sizes
            pieces = [piece_bytes(value.aval, p, sizes, self.habits) for p in table.placements]
            self._pieces_at[key] = share * np.asarray(pieces, np.float64)
        return self._pieces_at[key]

    def _made(self, value: Value, share: float) -> Table:
        """Bytes of a value at the choices of its maker."""
        domain, port = self.domains.of[value.maker.number], len(value.maker.operands) + value.port
        table, rows = domain.tables[port], domain.rows[port]
        assert table is not None and rows is not None
        pieces = self._pieces(table, value, share)
        return self.memo.do(("at", id(pieces), id(rows)), (pieces, rows), lambda: pieces[rows])

    def _held(self, value: Value, hold: Node) -> Table:
        """Bytes of a value at the choices of its hold."""
        domain = self.domains.of[hold.number]
        table, rows, also = domain.tables[0], domain.rows[0], domain.also
        assert table is not None and rows is not None
        pieces = self._pieces(table, value, GAPS)
        return self.memo.do(("held", id(pieces), id(rows), id(also)), (pieces, rows, also), lambda: (
            pieces[rows] if also is None else pieces[rows] + np.where(rows == also, 0.0, pieces[also])
        ))  # fmt: skip

    def _copies(self, table: BoxingTable, value: Value) -> Table:
        """How often what is boxed is in memory: twice where it is copied into another layout (`lifetimes`)."""
        if not self.habits.one_layout:
            return np.ones_like(table.seconds)
        splits = [tuple(p.axes_of(d) for d in range(1, value.rank)) for p in table.placements]
        known = {s: i for i, s in enumerate(dict.fromkeys(splits))}
        number = np.asarray([known[s] for s in splits])
        return np.where(number[:, None] != number[None, :], 2.0, 1.0)

    def _moved(self, value: Value, reader: Reader) -> tuple[Table, Table]:
        """What is boxed on the way from a maker to a reader, before and after; nothing where nothing moves."""
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
    """For each point of a program with boxings (`lifetimes`) that of the program without."""
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
    """The last point at which what a node reads has to be there: that of the node, or, where its results never are in
    memory, of what reads these.

    Args:
      at: the points of nodes.
      counted: the identities of values that are in memory.
    """
    found: dict[Node, int] = {}
    for node in reversed(problem.nodes):
        last = at.get(node, (0, 0))[1]
        if node.kind == "hold" or not any(id(v) in counted for v in node.results):
            last = max((found.get(r.node, 0) for v in node.results for r in v.readers), default=last)
        found[node] = max(last, at.get(node, (0, 0))[1])
    return found


def _points_of(problem: Problem) -> dict[Node, tuple[int, int]]:
    """The points of the equations that nodes stand for: of arguments the first, of results the last."""
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
