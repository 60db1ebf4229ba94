"""The choices of each node of a placement problem on all axes of the mesh at once, and their costs.

A choice is one of the node's one-axis signatures for each axis. All costs are those of `shardc.sbp.cost`: of an
operation its compute time and its internal collectives, of an edge the boxing between the placements of its two ends.
Equal nodes share one domain, so that the repeated layers of a model are priced once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardc.ir.transfer import FarEnd, far_end, is_transfer
from shardc.ir.walk import itemsize_of, operation_of, work_dtype
from shardc.machine.mesh import MeshView
from shardc.passes.place.chains import Chains, offer_chains
from shardc.passes.place.problem import Node, Problem, Reader, Value, digits, first_of_alike
from shardc.passes.place.rings import Rings, offer_rings
from shardc.passes.place.value_tables import ValueTables
from shardc.sbp.boxing import BoxingTable
from shardc.sbp.cost import FEMTO, LIGHT, avoided_cost, element_seconds, heavy_seconds, memory_seconds
from shardc.sbp.piece import around_time, internal_steps, sent_seconds
from shardc.sbp.placement import P, Placement, ReduceOp, S, is_even
from shardc.sbp.signature import Setting
from shardc.sbp.sub_axes import is_whole
from shardc.solver.cost_tables import Given, Lookup, whole

GROWTH_PENALTY: Final = 1e3
"""Factor on a boxing that makes a value larger before a loop over it or a remat of it: the boxing belongs inside."""
MOST_CHOICES: Final = 192
"""Choices of a hold, at most. If the pairs of placements would be more, as on three axes, the hold keeps its value in
one placement (docs/design/all-axes-together.md)."""
CARRIED: Final = 1e-3
"""Share of the memory traffic of a value that a node only carries: it decides between placements that move the same
bytes."""


@dataclass(frozen=True, eq=False)
class Domain:
    """The choices of a node.

    Attributes:
      options: (choices, axes) the number of the one-axis signature on each axis; signatures of rings are numbered after
        the node's own.
      orders: (choices,) the order in which axes split a common dimension, as an index into `Domains.all_orders`.
      seconds: (choices,) the cost of each choice.
      tables: for each port the boxing table of its value; None for a literal.
      rows: for each port (choices,) the row of its table, that is its placement.
      also: for a hold with two placements, the row of the second one; equal to the first where there is one. None for
        other nodes.
    """

    options: NDArray[np.int64]
    orders: NDArray[np.intp]
    seconds: NDArray[np.float64]
    tables: tuple[BoxingTable | None, ...]
    rows: tuple[NDArray[np.int64] | None, ...]
    also: NDArray[np.int64] | None = None

    def choices_at(self, ports: Mapping[int, Placement]) -> NDArray[np.bool_]:
        """A mask of the choices that have these placements at these ports; a literal matches any placement."""
        found = np.ones(len(self.options), np.bool_)
        for port, placement in ports.items():
            table, rows = self.tables[port], self.rows[port]
            if table is not None and rows is not None:
                found &= rows == table.index.get(placement, -1)
        return found


@dataclass(frozen=True, eq=False)
class _Form:
    """The choices of all nodes with the same signatures and ranks, for any sizes. Fields are as in `Domain`; `splits`
    has the number of devices that split each factor at each choice."""

    options: NDArray[np.int64]
    orders: NDArray[np.intp]
    rows: tuple[NDArray[np.int64] | None, ...]
    splits: dict[str, NDArray[np.int64]]

    def of(self, some: NDArray[np.intp]) -> _Form:
        """The form restricted to the choices `some`."""
        rows = tuple(None if r is None else r[some] for r in self.rows)
        return _Form(self.options[some], self.orders[some], rows, {f: c[some] for f, c in self.splits.items()})


def _partial_by(p: Placement, op: ReduceOp) -> Placement:
    """The placement with partial axes partial by `op`: becoming partial costs the same for all ops."""
    return Placement([(axis, P(op) if isinstance(sbp, P) else sbp) for axis, sbp in p.items_])


class Domains(ValueTables):
    """The domains of all nodes of a problem on a mesh, and the costs of its edges.

    Attributes:
      of: the domain of each node.
    """

    def __init__(self, problem: Problem, mesh: MeshView, axes: Sequence[str]) -> None:
        super().__init__(problem, mesh, axes)
        self._known: dict[Hashable, tuple[Domain, Node]] = {}
        self._forms: dict[Hashable, tuple[_Form, Any]] = {}
        self._matrices: dict[Hashable, NDArray[np.float64]] = {}
        self._edges: dict[Hashable, Given] = {}
        self._computing = _computing_groups(problem, mesh)
        self.of = [self._domain(n) for n in problem.nodes]

    def rings(self, n: Node) -> NDArray[np.bool_]:
        """(choices, axes) whether a choice has a ring there."""
        around = np.asarray([*(s.around is not None for s in n.options), True], np.bool_)  # of a product they come last
        return around[np.minimum(self.of[n.number].options, len(n.options))]

    def _domain(self, n: Node) -> Domain:
        tables = tuple([None if v is None else self.table(v) for v in (*n.operands, *n.results)])
        said = (n.pin, far_end(n.eqn), id(n.fixed) if n.fixed is not None else None)
        several = n.kind == "hold" and len(n.results[0].readers) > 2
        kind = n.kind, n.weight, n.plain, n.uneven, n.group in self._computing
        key = (*kind, said, several, id(n.options), id(n.rule), n.traffic, *map(id, tables))
        if key not in self._known:
            made = self._make(n, tables)
            self._known[key] = _in_pairs(made) if several else made, n  # keeps the node alive: its ids are in the key
        return self._known[key][0]

    def _make(self, n: Node, tables: tuple[BoxingTable | None, ...]) -> Domain:
        form = self._form(n, tables)
        allowed = np.ones(len(form.options), np.bool_)
        for factor, granule in (n.rule.granule if n.rule else {}).items():
            if granule and factor in form.splits:
                allowed &= granule % form.splits[factor] == 0
        if n.rule is not None and n.rule.around:
            for factor, count in self.splits([s.around for s in n.options], form.options).items():
                alone = (count == form.splits[n.rule.around[factor]]) & (form.splits.get(factor, 1) == 1)
                allowed &= (count == 1) | alone & (n.rule.granule[factor] % count == 0)
        if n.plain or n.kind in ("source", "sink"):
            for value, table, row in zip((*n.operands, *n.results), tables, form.rows, strict=True):
                if value is not None and table is not None and row is not None:
                    allowed &= self._at_border(n, value, table)[row]
        if not allowed.all():
            form = form.of(np.flatnonzero(allowed))
        options, orders, rows = form.options, form.orders, form.rows
        seconds = self._seconds(n, options, orders, form.splits, tables, rows)
        cheapest = np.lexsort((np.arange(len(seconds)), seconds))
        best = np.sort(_first(cheapest, [r for r in rows if r is not None]))
        rows = tuple(None if r is None else r[best] for r in rows)
        plain = Domain(options[best], orders[best], seconds[best], tables, rows)
        if (chains := offer_chains(self, n)) is not None:
            return self._with_chains(n, plain, chains)
        rings = offer_rings(self, n)
        return plain if rings is None else _with_rings(plain, rings)

    def _with_chains(self, n: Node, d: Domain, c: Chains) -> Domain:
        """The choices of a reshape, followed by its chains."""
        seconds = self._seconds(n, c.options, c.orders, {}, d.tables, c.rows)
        rows = tuple(
            None if a is None or b is None else np.concatenate([a, b]) for a, b in zip(d.rows, c.rows, strict=True)
        )
        return Domain(
            np.concatenate([d.options, c.options]), np.concatenate([d.orders, c.orders]),
            np.concatenate([d.seconds, seconds]), d.tables, rows,
        )  # fmt: skip

    def _form(self, n: Node, tables: Sequence[BoxingTable | None]) -> _Form:
        """All choices of a node, as if all sizes were divisible, without duplicates."""
        columns, values = digits(n.options, len(tables)), (*n.operands, *n.results)
        ranks = tuple(None if v is None else (v.rank, v.op, v.unsplit) for v in values)
        key = columns.tobytes(), ranks, tuple(s.split for s in n.options), n.pin, id(n.fixed)
        if key not in self._forms:
            options, orders = self._options(n, columns)
            rows = self._rows(n, columns, options, orders, tables)
            form = _Form(options, orders, rows, self.splits([s.split for s in n.options], options))
            keep = _first(np.arange(len(options)), [*options.T, *(r for r in rows if r is not None)])
            self._forms[key] = form.of(keep), n.fixed  # keeps it alive: its id is in the key
        return self._forms[key][0]

    def _options(self, n: Node, columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """All combinations of one-axis signatures that agree with the node's pin, in all orders of the axes."""
        if n.fixed is not None:
            options = [[n.fixed[0].get(a, 0) for a in self.axes]]
            return np.asarray(options, np.int64).reshape(1, len(self.axes)), np.zeros(1, np.intp)
        choices: list[Sequence[int] | range] = []
        for axis in self.axes:
            if n.pin is not None and (n.pin.fixed is None or axis in n.pin.fixed):
                sbp = n.pin.placement[axis]
                want = sbp.dim + 2 if isinstance(sbp, S) else 1 if isinstance(sbp, P) else 0
                hits = np.flatnonzero(columns[:, 0] == want)
                assert hits.size, (n.path, n.pin, axis)
                choices.append([int(hits[0])])
            else:
                choices.append(range(len(n.options)))
        return self.in_all_orders(choices)

    def _rows(
        self, n: Node, columns: NDArray[np.int64], options: NDArray[np.int64], orders: NDArray[np.intp],
        tables: Sequence[BoxingTable | None],
    ) -> tuple[NDArray[np.int64] | None, ...]:  # fmt: skip
        found: list[NDArray[np.int64] | None] = []
        for i, (value, table) in enumerate(zip((*n.operands, *n.results), tables, strict=True)):
            if value is None or table is None:
                found.append(None)
            elif n.pin is not None and n.pin.fixed is None:
                found.append(np.full(len(options), table.index[_partial_by(n.pin.placement, value.op)], np.int64))
            elif n.fixed is not None:
                found.append(np.asarray([table.index[n.fixed[1][i]]], np.int64))
            else:
                found.append(self.rows_of(value, columns[options, i], orders))
        return tuple(found)

    def _at_border(self, n: Node, value: Value, table: BoxingTable) -> NDArray[np.bool_]:
        """For each row of the table of an argument's or result's value, whether it can have this placement: one on the
        user's mesh, and if the node is plain one of a jax.Array, or of a PlacedArray that is split."""
        found = np.ones(len(table.index), np.bool_)
        if n.plain:
            sizes = self.view.sizes
            found &= [not p.partial_axes and (n.uneven or is_even(value.shape, p, sizes)) for p in table.index]
        if self.view.cuts:
            found &= [is_whole(p, value.shape, self.view) for p in table.index]
        return found

    def _seconds(
        self, n: Node, options: NDArray[np.int64], orders: NDArray[np.intp], splits: dict[str, NDArray[np.int64]],
        tables: Sequence[BoxingTable | None], rows: Sequence[NDArray[np.int64] | None],
    ) -> NDArray[np.float64]:  # fmt: skip
        held = [t.local_bytes[r] for t, r in zip(tables, rows, strict=True) if t is not None and r is not None]
        memory = np.zeros(len(options))
        for some in held:
            memory += some
        if n.kind != "operation":
            cost = (0.0 if n.kind == "hold" else CARRIED) * memory / self.mesh.topology.memory_rate
            if n.eqn is not None and is_transfer(n.eqn):
                far = far_end(n.eqn)
                sent = (
                    memory / len(held) / self.mesh.topology.link.bandwidth
                )  # pieces, sent from mesh to mesh as they are
                cost = cost + n.weight * (sent if far is None else self._from_afar(n, far, tables, rows))
            return cost
        if n.rule is not None and n.rule.is_heavy:
            flops = np.full(len(options), n.rule.flops)
            for factor, size in n.rule.sizes(operation_of(n.equation)).items():
                if factor in splits and size:
                    margin = n.rule.margin.get(factor, 0) * (splits[factor] > 1)
                    flops = flops / (size / (-(-size // splits[factor]) + margin))
            memory += self._moved(n, tables, rows)
            cost = heavy_seconds(flops, memory, self.mesh, work_dtype(n.equation), n.rule.passes, n.rule.kind)
        else:
            cost = LIGHT * (memory / self.mesh.topology.memory_rate) + self._light_seconds(n, tables, rows)
        if n.rule is not None and n.rule.crossing:
            cost = cost + self._inside(n, options, orders, tables, rows, cost)
        return n.weight * cost

    def _light_seconds(
        self, n: Node, tables: Sequence[BoxingTable | None], rows: Sequence[NDArray[np.int64] | None],
    ) -> NDArray[np.float64] | float:  # fmt: skip
        """For each choice of a light operation its part of what takes longer in its group: vector arithmetic, or
        reading and writing memory."""
        if n.group not in self._computing:
            return self._moved(n, tables, rows) / self.mesh.topology.memory_rate
        held = [None if t is None or r is None else t.local_bytes[r] for t, r in zip(tables, rows, strict=True)]
        each = element_seconds(n.rule.kind, self.mesh.topology) if n.rule is not None else 0.0
        elements = [h / itemsize_of(a) for h, a in zip(held, n.avals, strict=True) if h is not None]
        return each * np.max(elements, 0) if each and elements else 0.0

    def _moved(
        self, n: Node, tables: Sequence[BoxingTable | None], rows: Sequence[NDArray[np.int64] | None],
    ) -> NDArray[np.float64]:  # fmt: skip
        """For each choice the bytes of `n.traffic`."""
        ports = ((tables[port], rows[port], share) for port, share in n.traffic)
        moved = (share * t.local_bytes[r] for t, r, share in ports if t is not None and r is not None)
        return np.asarray(sum(moved), np.float64)

    def _from_afar(
        self, n: Node, far: FarEnd, tables: Sequence[BoxingTable | None], rows: Sequence[NDArray[np.int64] | None],
    ) -> NDArray[np.float64]:  # fmt: skip
        """For each choice of a transfer the time of the way between its ends."""
        value, table, row = n.results[0], tables[-1], rows[-1]
        assert table is not None and row is not None
        size, used = itemsize_of(value.aval), set(row.tolist())
        seconds = {i: far.seconds(value.shape, size, p, self.mesh) for p, i in table.index.items() if i in used}
        return np.asarray([seconds[i] for i in row.tolist()])

    def _inside(
        self, n: Node, options: NDArray[np.int64], orders: NDArray[np.intp],
        tables: Sequence[BoxingTable | None], rows: Sequence[NDArray[np.int64] | None],
        computing: NDArray[np.float64],
    ) -> NDArray[np.float64]:  # fmt: skip
        """For each choice the time of the operation's internal collectives, without what overlaps with `computing`, its
        own seconds, and of what its pieces read and write besides."""
        assert n.rule is not None
        op, count = operation_of(n.equation), len(n.operands)
        crosses = np.asarray([o.split in n.rule.crossing for o in n.options])[options].any(-1)
        cost = np.zeros(len(options))
        for i in np.flatnonzero(crosses):
            ports = tuple(
                self.literal(n, k, options[i], orders[i]) if t is None or r is None else t.placements[r[i]]
                for k, (t, r) in enumerate(zip(tables, rows, strict=True))
            )
            setting = Setting(op, ports[:count], ports[count:], self.view.sizes)
            sent, moved = internal_steps(n.rule, setting), 0.0 if n.rule.moved is None else n.rule.moved(setting)
            avoided = sum(avoided_cost(s.kind, s.axes, self.view) for s in sent)
            beside = float(memory_seconds(moved, self.mesh))
            cost[i] = sent_seconds(sent, self.view) + avoided / FEMTO + beside
            if (time := around_time(sent, computing[i] + beside, self.view)) is not None:
                cost[i] += time.total - time.computing
        return cost

    def literal(self, n: Node, port: int, options: NDArray[np.int64], number: int) -> Placement:
        """The placement of a literal operand: a literal may have to be partial, and a literal array may be split."""
        chosen = [n.options[o] for o in options]
        order = self.all_orders[number]
        return Placement([(self.axes[k], (*chosen[k].operands, *chosen[k].results)[port]) for k in order])

    def placements(self, n: Node, choice: int) -> tuple[Placement, ...]:
        """The placement at each port of a node."""
        if n.pin is not None and n.pin.fixed is None:
            return (n.pin.placement,) * (len(n.operands) + len(n.results))
        if n.fixed is not None:
            return n.fixed[1]
        d = self.of[n.number]
        if d.also is not None and d.tables[0] is not None and d.rows[0] is not None:
            return tuple(d.tables[0].placements[r[choice]] for r in (d.rows[0], d.also))
        options, order = d.options[choice], d.orders[choice]
        return tuple(
            self.literal(n, i, options, order) if t is None or r is None else t.placements[r[choice]]
            for i, (t, r) in enumerate(zip(d.tables, d.rows, strict=True))
        )

    def edge(self, value: Value, reader: Reader) -> Given:
        """The cost of the boxing between maker and reader, for each pair of their choices."""
        maker, into = self.of[value.maker.number], self.of[reader.node.number]
        port = len(value.maker.operands) + value.port
        table, rows, columns = maker.tables[port], maker.rows[port], into.rows[reader.port]
        assert table is not None and rows is not None and columns is not None
        key = (id(table), id(rows), id(columns), reader.weight, reader.small, value.stacked)
        if key not in self._edges:
            matrix = self._priced(table, reader, value)
            found = Lookup(matrix, rows, columns)
            if into.also is not None:  # a tree to two placements
                one, other = found.whole(), Lookup(matrix, rows, into.also).whole()
                both = one + other
                one += matrix[columns, into.also]
                other += matrix[into.also, columns]
                found = np.minimum(np.minimum(one, other, out=one), both, out=one)
            if maker.also is not None:  # from the cheaper of two
                found = np.minimum(whole(found), Lookup(matrix, maker.also, columns).whole())
            self._edges[key] = found
        return self._edges[key]

    def _priced(self, table: BoxingTable, reader: Reader, value: Value) -> NDArray[np.float64]:
        """(rows, rows) the cost of boxing a value for a reader, in seconds over all executions."""
        key = (id(table), reader.weight, reader.small, value.stacked)
        if key not in self._matrices:
            cost = reader.weight * table.seconds
            if reader.small or value.stacked:
                before, after = table.local_bytes[:, None], table.local_bytes
                wrong = (after > before) if reader.small else (after < before)
                cost = np.where(wrong, cost * GROWTH_PENALTY + 1e-6, cost)
            self._matrices[key] = cost
        return self._matrices[key]


def _computing_groups(problem: Problem, mesh: MeshView) -> set[int]:
    """The groups of light operations that the vector units compute for longer than the memory moves their bytes. Only
    the longer of both counts when placements are chosen, for the values as they are before they are split."""
    excess: dict[int, float] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for n in problem.nodes:
        if n.group < 0 or n.rule is None:
            continue
        atoms = n.avals
        for a in atoms:
            if id(a) not in sizes and a is not None:
                sizes[id(a)] = math.prod(a.shape), itemsize_of(a)
        moved = sum(share * math.prod(sizes[id(atoms[p])]) for p, share in n.traffic if atoms[p] is not None)
        each = element_seconds(n.rule.kind, mesh.topology)
        computed = each * max((sizes[id(a)][0] for a in atoms if a is not None), default=0) if each else 0.0
        excess[n.group] = excess.get(n.group, 0.0) + n.weight * (computed - memory_seconds(moved, mesh))
    return {group for group, seconds in excess.items() if seconds > 0}


def _with_rings(d: Domain, r: Rings) -> Domain:
    """The choices of a node, followed by those of its rings."""
    rows = tuple(
        None if mine is None else np.concatenate([mine, theirs]) for mine, theirs in zip(d.rows, r.rows, strict=True)
    )
    return Domain(
        np.concatenate([d.options, r.options]), np.concatenate([d.orders, r.orders]),
        np.concatenate([d.seconds, r.seconds]), d.tables, rows,
    )  # fmt: skip


def _in_pairs(d: Domain) -> Domain:
    """The domain of a hold, extended by pairs of placements between which boxing costs something: a value with three
    readers may want two boxings, one of which serves two readers."""
    table, rows = d.tables[0], d.rows[0]
    assert table is not None and rows is not None
    cost = table.seconds[rows[:, None], rows[None, :]]
    one, two = np.nonzero(np.triu(np.minimum(cost, cost.T) > 0, 1))
    if len(rows) + len(one) > MOST_CHOICES:
        return d
    first = np.concatenate([np.arange(len(rows)), one])
    second = np.concatenate([np.arange(len(rows)), two])
    held = rows[first]
    return Domain(d.options[first], d.orders[first], d.seconds[first], d.tables, (held, held), rows[second])


def _first(choices: NDArray[np.intp], columns: Sequence[NDArray[np.int64]]) -> NDArray[np.intp]:
    """The choices without duplicates: of those that are equal in all columns the first one stays."""
    return choices[first_of_alike([c[choices] for c in columns])] if columns else choices[:1]
