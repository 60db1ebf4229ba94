"""Chooses a signature for every node on every axis, so that what moves and what is computed twice costs least.

One axis at a time, with the others as they are, and exactly: the problem on one axis has a handful of options a node,
and a training step's graph is almost a tree (`eliminate`). The sweep over the axes is repeated until nothing improves,
from several orders of axes. All costs are those of `shardc.sbp.cost`, boxings by their shortest paths on all axes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardc.mesh import MeshView
from shardc.passes.eliminate import FORBIDDEN, Memo, elimination_order, minimize
from shardc.passes.problem import Node, Problem, Reader, Value, digits, itemsize_of, operation_of
from shardc.passes.transfer import is_transfer
from shardc.sbp.boxing import BoxingTable, all_placements, boxing_table
from shardc.sbp.cost import compute_seconds
from shardc.sbp.piece import internal_steps, sent_cost
from shardc.sbp.placement import P, Placement, ReduceOp, S, is_even
from shardc.sbp.signature import Setting, shared_by

log = logging.getLogger("shardc")

SWEEPS: Final = 4
"""Sweeps over the axes from one start, at most; they end when nothing improves."""
SETTLED: Final = 1e-5
"""An axis is settled if solving it anew gains no more than this part of the cost."""
SMALL: Final = 500
"""Problems of at most so many nodes are solved from two orders of axes."""
GROWTH_PENALTY: Final = 1e3
"""Factor on a boxing that makes a value larger before a loop over it or a remat of it: it belongs inside."""
NEVER: Final = 2 * FORBIDDEN


@dataclass(frozen=True, eq=False)
class Placed:
    """A solution: the placement at each port of each node, its cost, and the relative gap to a lower bound (None: no
    bound is known)."""

    ports: Mapping[Node, tuple[Placement, ...]]
    seconds: float
    gap: float | None


@lru_cache(maxsize=512)
def _by_code(rank: int, axes: tuple[str, ...], op: ReduceOp) -> tuple[tuple[Placement, ...], NDArray[np.int64]]:
    """Placements by code: sum over axes of digit·(rank+2)^position; and the row of each in a boxing table."""
    index = {p: i for i, p in enumerate(all_placements(rank, axes, op))}
    placements: list[Placement] = []
    for code in range((rank + 2) ** len(axes)):
        pairs: list[tuple[str, object]] = []
        for axis in axes:
            code, digit = divmod(code, rank + 2)
            pairs += [(axis, P(op))] if digit == 1 else [(axis, S(digit - 2))] if digit else []
        placements.append(Placement(pairs))
    return tuple(placements), np.asarray([index[p] for p in placements])


class _Port:
    """One port of a node: its value's table and the digits of the node's options at it."""

    def __init__(self, value: Value, column: NDArray[np.int64], solver: Solver) -> None:
        self.value, self.column = value, column
        self.radix = value.rank + 2
        self.placements, self.rows = _by_code(value.rank, solver.axes, value.op)
        self.table = solver.table(value)


class Solver:
    """The problem as numbers, and the state of the search: the option of each node on each axis."""

    def __init__(self, problem: Problem, mesh: MeshView, axes: Sequence[str]) -> None:
        self.problem, self.mesh = problem, mesh
        self.axes = tuple(axes)
        self.sizes = [mesh.sizes[a] for a in self.axes]
        self.view = MeshView(tuple(zip(self.axes, self.sizes, strict=True)), mesh.topology)
        self.nodes = problem.nodes
        self.tables: dict[tuple[tuple[int, ...], int, ReduceOp], BoxingTable] = {}
        self.even: dict[tuple[tuple[int, ...], tuple[str, ...]], NDArray[np.bool_]] = {}
        self.digits = [digits(n.options, len(n.operands) + len(n.results)) for n in self.nodes]
        self.ports = [self._ports(n) for n in self.nodes]
        self.factors = [self._factors(n) for n in self.nodes]
        self.state = [[0] * len(self.axes) for _ in self.nodes]
        self.memo = Memo()
        self.inside: dict[tuple[int, tuple[int, ...]], float] = {}
        self.edges = self._edges()
        self.order = elimination_order(
            len(self.nodes), [(v.maker.number, r.node.number) for v, r in self.edges if v.maker is not r.node]
        )
        for n in self.nodes:
            if n.pin is not None:
                self._start_at_pin(n)
            if n.fixed is not None:
                self.state[n.number] = [n.fixed[0].get(a, 0) for a in self.axes]

    def table(self, value: Value) -> BoxingTable:
        key = (value.shape, itemsize_of(value.aval), value.op)
        if key not in self.tables:
            self.tables[key] = boxing_table(key[0], key[1], self.view, key[2])
        return self.tables[key]

    def _ports(self, n: Node) -> list[_Port | None]:
        columns = self.digits[n.number].T
        return [
            None if v is None else _Port(v, columns[i], self) for i, v in enumerate((*n.operands, *n.results))
        ]

    def _factors(self, n: Node) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each option the number of the factor it splits (-1: none), and the granule of that factor (0: none)."""
        names = {f: i for i, f in enumerate(dict.fromkeys(o.split for o in n.options if o.split))}
        granules = n.rule.granule if n.rule else {}
        return (
            np.asarray([names[o.split] if o.split else -1 for o in n.options]),
            np.asarray([granules.get(o.split, 0) if o.split else 0 for o in n.options]),
        )

    def _edges(self) -> list[tuple[Value, Reader]]:
        return [(v, r) for n in self.nodes for v in n.results for r in v.readers]

    def _start_at_pin(self, n: Node) -> None:
        assert n.pin is not None
        for k, axis in enumerate(self.axes):
            if n.pin.fixed is None or axis in n.pin.fixed:
                column = self.digits[n.number][:, 0]
                sbp = n.pin.placement[axis]
                want = sbp.dim + 2 if isinstance(sbp, S) else 0 if not isinstance(sbp, P) else 1
                hits = np.flatnonzero(column == want)
                assert hits.size, (n.path, n.pin, axis)
                self.state[n.number][k] = int(hits[0])

    def codes(self, n: Node, port: int, axis: int) -> NDArray[np.int64]:
        """Codes of the placements at a port for each option on `axis`, the other axes as they are."""
        p = self.ports[n.number][port]
        assert p is not None
        code = p.column * p.radix**axis
        for k, option in enumerate(self.state[n.number]):
            if k != axis:
                code = code + p.column[option] * p.radix**k
        return code

    def unary(self, n: Node, axis: int) -> NDArray[np.float64]:
        """Cost of each option of a node on `axis`; NEVER where it is not allowed."""
        count = len(n.options)
        cost = np.zeros(count)
        state = self.state[n.number]
        if n.fixed is not None or (n.pin is not None and (n.pin.fixed is None or self.axes[axis] in n.pin.fixed)):
            cost[:] = NEVER
            cost[state[axis]] = 0.0
        ports = [p for p in self.ports[n.number] if p is not None]
        memory = np.zeros(count)
        for i, p in enumerate(self.ports[n.number]):
            if p is None:
                continue
            rows = p.rows[self.codes(n, i, axis)]
            memory += p.table.local_bytes[rows]
            if n.plain:
                cost += NEVER * ~self._plain(p)[rows]
        factor, granule = self.factors[n.number]
        if n.kind == "operation":
            flops = n.rule.flops if n.rule else 0.0
            shares = self._shares(n, axis) if flops else np.ones(count)
            work = zip(shares, memory, strict=True)
            cost += n.weight * np.asarray([compute_seconds(flops / s, m, self.mesh) for s, m in work])
            if n.rule is not None and n.rule.crossing:
                cost += n.weight * self._inside(n, axis)
            if granule.any():
                cost += NEVER * self._off_granule(factor, granule, state, axis)
        elif ports:
            cost += 1e-3 * memory / self.mesh.topology.memory_bandwidth
            if n.eqn is not None and is_transfer(n.eqn):  # its bytes travel from mesh to mesh, as they lie
                cost += n.weight * memory / len(ports) / self.mesh.topology.link.bandwidth
        return cost

    def _shares(self, n: Node, axis: int) -> list[float]:
        """For each option on `axis` how many devices share the node's work."""
        assert n.rule is not None
        sizes = n.rule.sizes(operation_of(n.eqn))
        shares: list[float] = []
        for option in range(len(n.options)):
            counts: dict[str, int] = {}
            for k, chosen in enumerate(self.state[n.number]):
                split = n.options[option if k == axis else chosen].split
                if split:
                    counts[split] = counts.get(split, 1) * self.sizes[k]
            shares.append(shared_by(sizes, counts))
        return shares

    def _inside(self, n: Node, axis: int) -> NDArray[np.float64]:
        """For each option on `axis` the time of the collectives that the operation needs itself."""
        assert n.rule is not None
        op, state, count = operation_of(n.eqn), self.state[n.number], len(n.operands)
        cost = np.zeros(len(n.options))
        for option in range(len(n.options)):
            chosen = tuple(option if k == axis else o for k, o in enumerate(state))
            key = (n.number, chosen)
            if key not in self.inside:
                ports = self.placements(n, chosen)
                sent = internal_steps(n.rule, Setting(op, ports[:count], ports[count:], self.view.sizes))
                self.inside[key] = sum(sent_cost(s, self.view).seconds for s in sent)
            cost[option] = self.inside[key]
        return cost

    def _off_granule(
        self, factor: NDArray[np.int64], granule: NDArray[np.int64], state: Sequence[int], axis: int
    ) -> NDArray[np.bool_]:
        total = np.full(len(factor), self.sizes[axis])
        for k, option in enumerate(state):
            if k != axis:
                total = np.where((factor >= 0) & (factor == factor[option]), total * self.sizes[k], total)
        return (granule > 0) & (np.maximum(granule, 1) % total != 0)

    def _plain(self, p: _Port) -> NDArray[np.bool_]:
        """For each row of the port's table: whether a jax.Array can be placed so."""
        key = (p.value.shape, (p.value.op,))
        if key not in self.even:
            self.even[key] = np.asarray(
                [not q.partial_axes and is_even(p.value.shape, q, self.view.sizes) for q in p.table.index]
            )
        return self.even[key]

    def edge(self, value: Value, reader: Reader, axis: int) -> NDArray[np.float64]:
        """Cost of the boxing between maker and reader, for each pair of their options on `axis`."""
        maker = value.maker
        out_port = len(maker.operands) + value.port
        out, into = self.ports[maker.number][out_port], self.ports[reader.node.number][reader.port]
        assert out is not None and into is not None
        rows, columns = (
            out.rows[self.codes(maker, out_port, axis)], into.rows[self.codes(reader.node, reader.port, axis)]
        )  # fmt: skip
        key = ("edge", id(out.table), rows.tobytes(), columns.tobytes(), reader.weight, reader.small, value.stacked)
        return self.memo.do(key, out.table, lambda: self.memo.one(self._edge_cost(out, rows, columns, value, reader)))

    @staticmethod
    def _edge_cost(
        out: _Port, rows: NDArray[np.int64], columns: NDArray[np.int64], value: Value, reader: Reader
    ) -> NDArray[np.float64]:
        cost = reader.weight * out.table.seconds[rows[:, None], columns[None, :]]
        if reader.small or value.stacked:
            before, after = out.table.local_bytes[rows][:, None], out.table.local_bytes[columns][None, :]
            wrong = (after > before) if reader.small else (after < before)
            cost = np.where(wrong, cost * GROWTH_PENALTY + 1e-6, cost)
        return cost

    def improve(self, axis: int) -> tuple[float, float]:
        """Sets the best options found on one axis, the others as they are. Returns the cost and its lower bound."""
        unary = [self.unary(n, axis) for n in self.nodes]
        pairwise: dict[tuple[int, int], NDArray[np.float64]] = {}
        for value, reader in self.edges:
            i, j = value.maker.number, reader.node.number
            cost = self.edge(value, reader, axis)
            if i == j:
                unary[i] = unary[i] + np.diagonal(cost)
                continue
            key, cost = ((i, j), cost) if i < j else ((j, i), np.array(cost.T))
            pairwise[key] = pairwise[key] + cost if key in pairwise else cost
        found = minimize(unary, pairwise, [s[axis] for s in self.state], self.order, self.memo)
        for s, value in zip(self.state, found.values, strict=True):
            s[axis] = value
        return found.cost, found.bound

    def placements(self, n: Node, state: Sequence[int] | None = None) -> tuple[Placement, ...]:
        """The placement at each port in a state of the node; by default the present one."""
        state = self.state[n.number] if state is None else state
        if n.pin is not None and n.pin.fixed is None:  # its own order of axes may be another than the plan's
            return (n.pin.placement,) * (len(n.operands) + len(n.results))
        if n.fixed is not None:
            idle = [a for a in self.mesh.sizes if a not in self.axes]
            return tuple(p.without(idle) for p in n.fixed[1])
        found: list[Placement] = []
        for i, p in enumerate(self.ports[n.number]):
            if p is None:
                found.append(Placement(self._literal(n, i, state)))
            else:
                code = sum(int(p.column[o]) * p.radix**k for k, o in enumerate(state))
                found.append(p.placements[code])
        return tuple(found)

    def _literal(self, n: Node, port: int, state: Sequence[int]) -> list[tuple[str, object]]:
        """A literal operand may have to be partial, or split if it is an array."""
        sbps: list[tuple[str, object]] = []
        for k, axis in enumerate(self.axes):
            option = n.options[state[k]]
            sbps.append((axis, (*option.operands, *option.results)[port]))
        return sbps


def axis_order(problem: Problem, mesh: MeshView) -> tuple[str, ...]:
    """Axes of more than one device, in the order in which they cut a dimension: that of the pins, else the mesh's."""
    axes = [a for a, n in mesh.axes if n > 1]
    before: set[tuple[str, str]] = set()
    for n in problem.nodes:
        said = (n.pin.placement,) if n.pin is not None else n.fixed[1] if n.fixed is not None else ()
        for names in (names for p in said for names in p.splits.values()):
            before |= set(itertools.combinations(names, 2))
    for order in itertools.permutations(axes):
        if all(order.index(a) < order.index(b) for a, b in before if a in order and b in order):
            return order
    return tuple(axes)


def place(problem: Problem, mesh: MeshView) -> Placed:
    """The best placement found for a problem on a mesh."""
    axes = axis_order(problem, mesh)
    solver = Solver(problem, mesh, axes)
    start = [list(s) for s in solver.state]
    best, state, bound = math.inf, start, 0.0
    turns = [tuple(range(len(axes)))]
    if len(axes) > 1 and len(problem.nodes) <= SMALL:
        turns.append(turns[0][::-1])
    for turn in turns if axes else []:
        solver.state = [list(s) for s in start]
        cost, settled = math.inf, 0
        for axis in itertools.islice(itertools.cycle(turn), SWEEPS * len(axes)):
            before = cost
            cost, bound = solver.improve(axis)
            settled = settled + 1 if cost >= before * (1 - SETTLED) else 1
            if settled == len(axes):  # each axis is best as the others are
                break
        log.debug("axes %s: cost %.3e", [axes[i] for i in turn], cost)
        if cost < best * (1 - 1e-9):
            best, state = cost, [list(s) for s in solver.state]
    solver.state = state
    gap = None if len(axes) > 1 else 0.0 if not axes else max(best - bound, 0.0) / best if best else 0.0
    return Placed({n: solver.placements(n) for n in problem.nodes}, 0.0 if not axes else best, gap)
