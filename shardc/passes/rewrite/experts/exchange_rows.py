"""Exchanges rows that are sorted by group between the devices that hold the groups: experts that drop no token.

    y = x.at[order].set(ragged_dot(x[order], w, sizes))
    -->  y = cond fits (rows to the devices of their groups, their products there, and back) (y as written)

Products of sorted rows with weights of groups that are split either gather the rows or add up partial results, as
nothing says beforehand which device needs which row. Here each device sends each other one the rows for its groups, in
a buffer of a fixed size. The buffers have dimensions for both devices, so the planner exchanges them as any value. If
some buffer is too small, the program runs as it was written: no row is dropped, and memory is bounded. Whether they
suffice is computed from the numbers of rows, by every device alike. Values that the backward pass reads are kept in
blocks of one size in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import bodies_of, with_bodies
from shardc.ir.program import Program
from shardc.ir.transfer import is_transfer
from shardc.ir.walk import operation_of, renamed
from shardc.passes import Context
from shardc.passes.rewrite.experts import routes
from shardc.passes.rewrite.experts.find_region import CROSSING, Inside, Region, find_regions
from shardc.passes.rewrite.experts.routes import Ends, Grid, Places, Route
from shardc.passes.rewrite.share_loops import AxesOf, axes_along
from shardc.passes.trace.canonicalize import inlined_eqns
from shardc.sbp.placement import Placement
from shardc.sbp.signature import Signature, Site, find_rule, signatures

ROWS = "rows"
"""The axis along which the blocks of a region are pieces."""


def exchange_rows(program: Program, context: Context) -> Program:
    """The program with its sorted rows exchanged; itself if it has none."""
    if not any(e.primitive.name == "ragged_dot_general" for e in _all(program.jaxpr)):
        return program
    axes_of = axes_along(program, context.pins, context.view)
    jaxpr = _exchanged(program.jaxpr, axes_of, context)
    if jaxpr is program.jaxpr:
        return program
    jaxpr = compat.remove_dead(jaxpr, [True] * len(jaxpr.outvars))
    return program.after("exchange_rows", jaxpr)


def _all(jaxpr: Jaxpr) -> Iterator[Eqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn):
            yield from _all(body)


def _exchanged(jaxpr: Jaxpr, axes_of: AxesOf, context: Context) -> Jaxpr:
    """The jaxpr and its bodies with exchanged rows."""
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        if bodies := bodies_of(eqn):
            new = [_exchanged(b, axes_of, context) for b in bodies]
            if any(a is not b for a, b in zip(new, bodies, strict=True)):
                eqn = eqn.replace(params=with_bodies(eqn, new))
        eqns.append(eqn)
    if any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)
    seen: set[Var] = set()
    while (region := next((r for r in find_regions(jaxpr) if r.sizes not in seen), None)) is not None:
        seen.add(region.sizes)
        if (grid := _grid_of(region, axes_of, context)) is not None:
            jaxpr = _Exchange(jaxpr, region, grid, context.replicate).run()
    return jaxpr


def _grid_of(region: Region, axes_of: AxesOf, context: Context) -> Grid | None:
    """The devices that exchange the rows of a region: those that split the groups by their pins, else those that split
    the rows outside, else all."""
    mesh = context.view
    sources = [e.invars[0] for e, i in region.eqns.items() if i.kind == "look up"]
    rows = next((axes for x in sources if not compat.is_literal(x) and (axes := axes_of(x, 0))), ())
    owners = next((axes for w, dim in region.weights if (axes := axes_of(w, dim))), ())
    if not owners and any(axes_of(w, d) for w, dim in region.weights for d in range(len(w.aval.shape)) if d != dim):
        return None
    owners = owners or rows or tuple(a for a, n in mesh.sizes.items() if n > 1)
    n = math.prod(mesh.sizes[a] for a in owners)
    replicas = math.prod(mesh.sizes[a] for a in rows if a not in owners)
    if n < 2 or n > region.groups or region.rows < n * replicas:
        return None
    return Grid(replicas, n, region.groups, region.rows, context.imbalance)


@dataclass(frozen=True)
class _Way:
    """The facts that the route of a crossing depends on.

    Attributes:
      index: the index of rows.
      count: rows outside.
      by_row: whether the index has an entry for each sorted row, with the row outside; else it has one for each row
        outside, with the sorted row.
      drops: entries out of bounds write nothing.
      alone: no two entries may be equal.
    """

    index: Var
    count: int
    by_row: bool
    drops: bool
    alone: bool


def _way_of(eqn: Eqn, inside: Inside) -> _Way:
    i = eqn.invars[1]
    assert not compat.is_literal(i)
    by_row = inside.kind in ("look up", "put")
    count = eqn.invars[0].aval.shape[0] if by_row else compat.size_of(i.aval)
    drops = eqn.primitive.name != "gather" and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    alone = eqn.primitive.name == "scatter" and not eqn.params["unique_indices"]
    return _Way(i, count, by_row, drops, alone)


class _Exchange:
    """The rewriting of one region of a jaxpr.

    Attributes:
      level: of each operation of the region; those of one level become one condition.
      ways: of crossings, each with the number of its route.
    """

    def __init__(self, jaxpr: Jaxpr, region: Region, grid: Grid, replicate: Iterable[str]) -> None:
        self.jaxpr, self.region, self.grid = jaxpr, region, grid
        self.replicate = tuple(replicate)
        self.level: dict[Eqn, int] = {}
        self.outer: dict[Var, int] = {}
        self.ways: dict[_Way, int] = {}
        self.eqns: list[Eqn] = []
        self.names: dict[Var, Atom] = {}
        self.routing: list[Atom] = []
        self.blocks: dict[Var, Atom] = {}
        self.done: set[Any] = set()
        self.results = set(compat.variables(jaxpr.outvars))
        self.readers: dict[Var, list[Eqn]] = {}
        for eqn in jaxpr.eqns:
            for v in dict.fromkeys(compat.variables(eqn.invars)):
                self.readers.setdefault(v, []).append(eqn)
        self.maker = {v: e for e in jaxpr.eqns for v in e.outvars}

    def run(self) -> Jaxpr:
        """The jaxpr with the exchange; the old one if the order of rows depends on the products."""
        self.find_levels()
        for eqn, inside in self.region.eqns.items():
            if inside.kind in CROSSING:
                way = _way_of(eqn, inside)
                self.ways.setdefault(way, len(self.ways))
        needed = [self.region.sizes, *(w.index for w in self.ways)]
        if any(v in self.region.dims or self.outer.get(v, 0) for v in needed):
            return self.jaxpr
        last = {self.level[e]: e for e in self.jaxpr.eqns if e in self.level}
        for eqn in self.jaxpr.eqns:
            if eqn not in self.level:
                self.emit(eqn)
            elif last[self.level[eqn]] is eqn:
                self.emit(self.level[eqn])
        return compat.new_jaxpr(self.jaxpr.invars, renamed(self.jaxpr.outvars, self.names), self.eqns, self.jaxpr)

    def find_levels(self) -> None:
        """Numbers the parts of the region: a value that leaves one part and comes back is read by a later one, as is
        what follows a send to another stage."""
        sent = 0
        for eqn in self.jaxpr.eqns:
            if is_transfer(eqn):
                sent = max(self.level.values(), default=-1) + 1
            operands = compat.variables(eqn.invars)
            if (inside := self.region.eqns.get(eqn)) is None:
                level = max((self.after(v) for v in operands), default=0)
                self.outer |= dict.fromkeys(eqn.outvars, level)
                continue
            read = (self.level[self.maker[v]] if v in self.region.dims else self.after(v) for v in operands)
            level = max((sent, *read))
            self.level[eqn] = level
            self.outer |= {v: level + 1 for v, d in zip(eqn.outvars, inside.results, strict=True) if d is None}

    def after(self, v: Var) -> int:
        return self.level[self.maker[v]] + 1 if v in self.region.dims else self.outer.get(v, 0)

    def emit(self, unit: Eqn | int) -> None:
        """Adds an equation outside, or the condition of a level, after what it reads."""
        if unit in self.done:
            return
        self.done.add(unit)
        mine = [e for e in self.jaxpr.eqns if self.level.get(e) == unit] if isinstance(unit, int) else [unit]
        made = {v for e in mine for v in e.outvars}
        for v in (v for e in mine for v in compat.variables(e.invars)):
            if v not in made and (maker := self.maker.get(v)) is not None:
                self.emit(self.level.get(maker, maker))
        if isinstance(unit, int):
            self.emit_routes()
            self.emit_level(mine)
        else:
            self.eqns.append(unit.replace(invars=renamed(unit.invars, self.names)))

    def emit_routes(self) -> None:
        """Adds the computation of places and routes, once."""
        if self.routing:
            return
        needed = [self.region.sizes, *(w.index for w in self.ways)]
        for v in needed:
            if (maker := self.maker.get(v)) is not None:
                self.emit(self.level.get(maker, maker))
        ways, grid = list(self.ways), self.grid

        def way_there(way: _Way, index: Any, where: Places) -> Route:
            ends = lax.iota(routes.Row, grid.rows if way.by_row else way.count)
            outside, inside = (index, ends) if way.by_row else (ends, index)
            return routes.route(grid, where, Ends(way.count, outside, inside), way.drops, way.alone)

        def run(sizes: Any, *indices: Any) -> list[Any]:
            items = [i.reshape(-1).astype(routes.Row) for i in indices]
            where = routes.places(grid, sizes, _replica(grid, ways, items))
            made = [way_there(w, i, where) for w, i in zip(ways, items, strict=True)]
            fits = jnp.all(jnp.stack([where.fits, *(r.fits for r in made)]))
            return [fits, *where[:4], *(a for r in made for a in r[:2])]

        self.routing = self.added(run, renamed(needed, self.names), self.region.seed)

    def added(self, run: Callable[..., Any], operands: Sequence[Atom], caller: Eqn) -> list[Atom]:
        """Adds the equations of a function of some values; gives its results."""
        closed = jax.make_jaxpr(run)(*(_like(a.aval) for a in operands))
        eqns, results = inlined_eqns(closed, operands, caller, self.replicate)
        self.eqns += eqns
        return results

    def emit_level(self, mine: Sequence[Eqn]) -> None:
        """Adds the condition that computes the operations of a level in one way or the other."""
        region, grid = self.region, self.grid
        made = {v for e in mine for v in e.outvars}
        given = list(dict.fromkeys(v for e in mine for v in compat.variables(e.invars) if v not in made))
        out = [v for e in mine for v in e.outvars if v not in region.dims or self.leaves(v)]
        kept = [v for e in mine for v in e.outvars if v in region.dims and self.is_kept(v, mine)]
        count = len(self.routing) - 1

        def as_written(*xs: Any) -> list[Any]:
            env: dict[Var, Any] = {}
            for v, x in zip(given, xs[count:], strict=True):
                env[v] = routes.unfolded(grid, x, region.dims[v]) if v in region.dims else x
            for eqn in mine:
                with compat.with_source(eqn):
                    operands = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
                    env |= zip(eqn.outvars, compat.bind_with(eqn.primitive, eqn.params)(*operands), strict=True)
            found = [compat.as_aval(env[v], v.aval) for v in out]
            return [*found, *(routes.folded(grid, env[v], region.dims[v]) for v in kept)]

        def exchanged(*xs: Any) -> list[Any]:
            work = _Blocks(grid, region, self.ways, xs[:count], dict(zip(given, xs[count:], strict=True)))
            for eqn in mine:
                with compat.with_source(eqn):
                    work.do(eqn)
            found = [compat.as_aval(work.outside(v), v.aval) for v in out]
            return [*found, *(compat.as_aval(work.env[v], v.aval) for v in kept)]

        def run(fits: Any, *xs: Any) -> Any:
            with jax.named_scope(compat.EXPECTED):
                return lax.cond(fits, exchanged, as_written, *xs)

        values = [self.blocks[v] if v in region.dims else self.names.get(v, v) for v in given]
        results = self.added(run, [*self.routing, *values], mine[0])
        self.names |= dict(zip(out, results[: len(out)], strict=True))
        self.blocks |= dict(zip(kept, results[len(out) :], strict=True))

    def leaves(self, v: Var) -> bool:
        """Whether a value inside is read outside, in the order of rows."""
        return v in self.results or any(
            e not in self.level or self.region.eqns[e].operands[n] is None
            for e in self.readers.get(v, ())
            for n, a in enumerate(e.invars)
            if a is v and self.level.get(e) != self.level[self.maker[v]]
        )

    def is_kept(self, v: Var, mine: Sequence[Eqn]) -> bool:
        """Whether a later level reads a value inside."""
        return any(e in self.level and e not in mine for e in self.readers.get(v, ()))


class _Blocks:
    """Computes the operations of a level on blocks.

    Attributes:
      env: the values; those inside as blocks.
    """

    def __init__(
        self, grid: Grid, region: Region, ways: Mapping[_Way, int], tables: Sequence[Any], env: dict[Var, Any]
    ) -> None:
        self.grid, self.region, self.ways, self.env = grid, region, ways, env
        device, at, rows, sizes, *rest = tables
        self.where = Places(device, at, rows, sizes, fits=True)
        self.routes = [Route(a, b, fits=True) for a, b in zip(rest[::2], rest[1::2], strict=True)]

    def outside(self, v: Var) -> Any:
        """A value in the order of rows."""
        if v not in self.region.dims:
            return self.env[v]
        return routes.in_order(self.grid, self.where, self.env[v], self.region.dims[v])

    def operand(self, a: Atom, dim: int | None) -> Any:
        """An operand as blocks, if it has sorted rows along `dim`; else as it is."""
        if compat.is_literal(a):
            return jnp.asarray(a.val, a.aval.dtype)
        if dim is None:
            return self.outside(a)
        return self.env[a] if a in self.region.dims else routes.by_position(self.where, self.env[a], dim)

    def do(self, eqn: Eqn) -> None:
        inside = self.region.eqns[eqn]
        xs = [self.operand(a, d) for a, d in zip(eqn.invars, inside.operands, strict=True)]
        if inside.kind in CROSSING:
            made = [self.across(eqn, inside, xs)]
        elif inside.kind in ("by group", "sum by group"):
            made = self.product(eqn, inside, *xs[:2])
        else:
            made = self.each_row(eqn, inside, xs)
        self.env |= zip(eqn.outvars, made, strict=True)

    def across(self, eqn: Eqn, inside: Inside, xs: Sequence[Any]) -> Any:
        """Rows that come inside, or leave."""
        grid, way = self.grid, self.routes[self.ways[_way_of(eqn, inside)]]
        match inside.kind:
            case "look up":
                return routes.send(grid, way, xs[0])
            case "write":
                return routes.send(grid, way, xs[2].reshape(-1, *xs[0].shape[3:]), xs[0])
            case "put":
                return routes.bring_back(grid, way, xs[2], xs[0], adds=eqn.primitive.name == "scatter-add")
            case _:
                empty = jnp.zeros((compat.size_of(eqn.invars[1].aval), *xs[0].shape[3:]), xs[0].dtype)
                return routes.bring_back(grid, way, xs[0], empty, adds=False).reshape(eqn.outvars[0].aval.shape)

    def product(self, eqn: Eqn, inside: Inside, x: Any, w: Any) -> list[Any]:
        """A product by groups in each block, with the groups of its device."""
        grid, numbers = self.grid, eqn.params["ragged_dot_dimension_numbers"]
        (contract, _), blocks = numbers.dot_dimension_numbers, (0, 1)
        lhs, rhs = (tuple(int(d) + 2 for d in dims) for dims in contract)
        groups = tuple(d + 2 for d in numbers.rhs_group_dimensions)
        if groups:
            w = self.by_owner(w, groups[0] - 2)
        rows = tuple(d + 2 for d in numbers.lhs_ragged_dimensions)
        blockwise = lax.RaggedDotDimensionNumbers(((lhs, rhs), (blocks, blocks)), rows, groups)
        bind = compat.bind_with(eqn.primitive, eqn.params)
        (y,) = bind(x, w, self.where.sizes, ragged_dot_dimension_numbers=blockwise)
        if inside.kind == "by group":
            return [y]
        y = jnp.moveaxis(y, 0, 2)  # groups, replicas, owners, ...
        y = y[0] if grid.replicas == 1 else jnp.sum(y, 0, dtype=y.dtype)
        return [y.reshape(-1, *y.shape[2:])[: grid.groups]]

    def by_owner(self, w: Any, dim: int) -> Any:
        """[replicas, owners, ...]: the groups of each device; those after the last one are zeros."""
        grid, own = self.grid, self.grid.own_groups
        w = jnp.pad(w, [(0, own * grid.owners - n if d == dim else 0) for d, n in enumerate(w.shape)])
        w = w.reshape(*w.shape[:dim], grid.owners, own, *w.shape[dim + 1 :])
        return jnp.broadcast_to(jnp.moveaxis(w, dim, 0), (grid.replicas, grid.owners, *_without(w.shape, dim)))

    def each_row(self, eqn: Eqn, inside: Inside, xs: Sequence[Any]) -> list[Any]:
        """An operation on each row for itself, or a sum over rows: its local piece, with blocks as pieces."""
        grid, op = self.grid, operation_of(eqn)
        rule = find_rule(op)
        port = next(k for k, d in enumerate((*inside.operands, *inside.results)) if d is not None)
        dim = (*inside.operands, *inside.results)[port]
        assert dim is not None
        factor = (*rule.operands, *rule.results)[port][dim]
        split = next(s for s in signatures(rule, op) if s.split == factor)
        sums = inside.kind == "sum of rows"
        if sums:
            xs = [
                x if d is None else routes.rows_that_count(self.where, x, d)
                for x, d in zip(xs, inside.operands, strict=True)
            ]

        def local(number: Any, *pieces: Any) -> list[Any]:
            site = _block_site(op, split, grid, number, compat.bind_with(eqn.primitive, eqn.params))
            return list(rule.local(site, *pieces))

        axes = [None if d is None else 0 for d in inside.operands]
        shape = grid.replicas, grid.owners
        number = lax.iota(routes.Row, grid.devices).reshape(shape)
        made = jax.vmap(jax.vmap(local, (0, *axes)), (0, *axes))(number, *xs)
        return [jnp.sum(y, (0, 1), dtype=y.dtype) for y in made] if sums else made


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


@dataclass(frozen=True)
class _BlockSite(Site):
    """The place of a block: a piece of `rows` sorted rows, whatever the number of all rows.

    Attributes:
      rows: of a block.
    """

    rows: int = 0

    def operand_shape(self, i: int) -> tuple[int, ...]:
        return self._shape(i)

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        return self._shape(len(self.operands) + i)

    def _shape(self, port: int) -> tuple[int, ...]:
        aval, placement = self.port(port)
        return tuple(self.rows if placement.axes_of(d) else n for d, n in enumerate(aval.shape))

    def _extent(self, size: int, axes: Sequence[str]) -> tuple[Any, Any]:
        return (0, self.rows) if axes else (0, size)


def _block_site(op: Any, split: Signature, grid: Grid, number: Any, bind: Callable[..., list[Any]]) -> _BlockSite:
    operands, results = (tuple(Placement([(ROWS, s)]) for s in side) for side in (split.operands, split.results))
    wire: Any = None  # no rule of a row by itself has its pieces communicate
    return _BlockSite(op, operands, results, {ROWS: grid.devices}, lambda _: number, bind, wire, rows=grid.capacity)


def _replica(grid: Grid, ways: Sequence[_Way], indices: Sequence[Any]) -> Any:
    """For each sorted row the number of the replicas that compute it: those of the device where it is outside."""
    if grid.replicas == 1 or not ways:
        return lax.full((grid.rows,), 0, routes.Row)
    k = next((k for k, w in enumerate(ways) if w.by_row), 0)
    way, i = ways[k], indices[k]
    per = grid.block(way.count) * grid.owners
    if way.by_row:
        return jnp.clip(i // per, 0, grid.replicas - 1)
    home = lax.iota(routes.Row, way.count) // per
    return jnp.zeros(grid.rows, routes.Row).at[i].set(home, mode="drop")


def _like(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
