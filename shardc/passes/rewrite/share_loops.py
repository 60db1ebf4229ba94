"""Shares the iterations of a loop among the devices that hold its rows.

    c, ys = scan f c0 xs[n·m]    -->    cs, ys = scan (vmap f) zeros[n] xs[m, n]; c = c0 + sum cs

A loop over examples saves memory. A scan takes its rows one after the other: if they are split over n devices, the
planner has to exchange them for another split. If no iteration reads a result of another, each device can loop over its
own rows. The loop then has m rounds of n rows each, one of each device; the rows of a round are a dimension like any
other, which the planner splits as the rows were. Each device has its own part of a carry that iterations only add to,
or take the maximum or minimum with. Rows that pad the last devices contribute nothing, and their results are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.boundary import MARKS
from shardc.ir.constrain import pin_of
from shardc.ir.host_callback import runs_once
from shardc.ir.loop import Loop
from shardc.ir.nested import NESTED, bodies_of, in_bodies, nested_bodies, parted
from shardc.ir.program import Program
from shardc.ir.transfer import is_transfer
from shardc.ir.user_shard_map import is_unit
from shardc.ir.walk import operation_of, reads_of, renamed, with_atoms
from shardc.machine.mesh import MeshView
from shardc.passes import Context
from shardc.passes.trace.canonicalize import inlined_eqns
from shardc.passes.trace.chunk_scans import DevicesOf
from shardc.sbp.placement import Pin
from shardc.sbp.signature import Neutral, find_rule, is_extended, neutral_value

COUNTS: Final = "threefry"
"""Generators whose bits for many keys at once equal those for each key."""


@dataclass(frozen=True, slots=True)
class Combination:
    """How a carry is combined with the result of an iteration: its neutral element, and the reduction over devices."""

    neutral: Neutral
    reduce: Callable[[Any], Any]
    both: Callable[[Any, Any], Any]


_SUM: Final = Combination("zero", lambda x: lax.reduce(x, neutral_value("zero", x.dtype), lax.add, (0,)), lax.add)
_COMBINATIONS: Final[Mapping[str, Combination]] = {
    "add": _SUM, "add_any": _SUM, "sub": _SUM,
    "max": Combination("lowest", lambda x: lax.reduce(x, neutral_value("lowest", x.dtype), lax.max, (0,)), lax.max),
    "min": Combination("highest", lambda x: lax.reduce(x, neutral_value("highest", x.dtype), lax.min, (0,)), lax.min),
}  # fmt: skip


def share_loops(program: Program, context: Context) -> Iterator[Program]:
    """The program with loops over split rows that are shared among the devices of these rows, and the one whose loops
    are shared among all devices."""
    if context.known is not None:
        yield _shared_among(program, context, context.known.shared)
        return
    yield (made := _shared_among(program, context, None))
    everywhere = [context.view.size if n > 1 else 1 for n in made.shared]
    if made is not program and everywhere != list(made.shared):
        yield _shared_among(program, context, everywhere)


def _shared_among(program: Program, context: Context, known: Sequence[int] | None) -> Program:
    """The program with shared loops; itself if there are none.

    Args:
      known: the number of devices that share each loop (`Program.shared`); None: it follows from pins.
    """
    pins = dict(zip(program.jaxpr.invars, context.pins, strict=False))
    sharer = _Sharer(pins, context.view, context.replicate, known)
    jaxpr = sharer.run(program.jaxpr)
    if jaxpr is program.jaxpr:
        return program
    jaxpr = compat.remove_dead(jaxpr, [True] * len(jaxpr.outvars))
    return replace(program.after("share_loops", jaxpr), shared=tuple(sharer.found))


AxesOf: TypeAlias = Callable[[Var, int], tuple[str, ...]]
"""The axes that split a dimension of a value, by the pins of the values that it comes from; the first is the outer."""


def axes_along(program: Program, pins: Sequence[Pin | None], mesh: MeshView) -> AxesOf:
    """`_Sharer.axes_of` for the values of a whole program, nested ones too."""
    sharer = _Sharer(dict(zip(program.jaxpr.invars, pins, strict=False)), mesh, (), None)
    sharer.note(program.jaxpr.eqns)
    return sharer.axes_of


def devices_along(program: Program, pins: Sequence[Pin | None], mesh: MeshView) -> DevicesOf:
    """`_Sharer.devices_of` for the values of a whole program, nested ones too."""
    sharer = _Sharer(dict(zip(program.jaxpr.invars, pins, strict=False)), mesh, (), None)
    sharer.note(program.jaxpr.eqns)
    return sharer.devices_of


class _Sharer:
    """The walk that shares loops.

    Attributes:
      pins: of arguments.
      made: for each variable seen so far the equation that makes it, and the number of the result.
      outer: for each variable of a body the value outside, and the number of dimensions that this has in front.
      found: for each loop that can be shared the number of devices that share it.
    """

    def __init__(
        self, pins: Mapping[Var, Pin | None], mesh: MeshView, replicate: Collection[str], known: Sequence[int] | None
    ) -> None:
        self.pins, self.sizes, self.replicate, self.known = pins, mesh.sizes, replicate, known
        self.found: list[int] = []
        self.made: dict[Var, tuple[Eqn, int]] = {}
        self.outer: dict[Var, tuple[Atom, int]] = {}

    def run(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[Eqn] = []
        names: dict[Var, Atom] = {}
        changed = False
        for old in jaxpr.eqns:
            outer = with_atoms(old, names)
            self.outer |= _seen_inside(outer) if bodies_of(outer) else {}
            eqn = in_bodies(outer, self.run)
            changed |= eqn is not outer
            shared = self.shared(eqn)
            if shared is None:
                self.made |= {v: (eqn, i) for i, v in enumerate(eqn.outvars)}
                eqns.append(eqn)
                continue
            changed = True
            found, results = shared
            self.note(found)
            names |= dict(zip(eqn.outvars, results, strict=True))
            eqns += found
        if not changed:
            return jaxpr
        outvars = renamed(jaxpr.outvars, names)
        return compat.new_jaxpr(jaxpr.invars, outvars, eqns, jaxpr)

    def note(self, eqns: Sequence[Eqn]) -> None:
        """Records the results of new equations and their bodies."""
        for eqn in eqns:
            self.made |= {v: (eqn, i) for i, v in enumerate(eqn.outvars)}
            self.outer |= _seen_inside(eqn)
            for body in bodies_of(eqn):
                self.note(body.eqns)

    def shared(self, eqn: Eqn) -> tuple[list[Eqn], list[Atom]] | None:
        """A shared loop: its equations, and its results; None if it stays as it is."""
        if eqn.primitive.name != "scan" or eqn.effects:
            return None
        loop = Loop.of(eqn)
        if loop.length < 2 or not loop.rows or not all(map(_may_be_batched, loop.eqns)):
            return None
        if (carries := _carries(loop)) is None:
            return None
        if self.known is None:
            n = max(map(self.devices_of, compat.variables(loop.rows.values())), default=1)
        else:
            n = self.known[len(self.found)] if len(self.found) < len(self.known) else 1
        self.found.append(n)
        return None if n == 1 else inlined_eqns(_shared(loop, carries, n), eqn.invars, eqn, self.replicate)

    def devices_of(self, rows: Var, along: int = 0, seen: set[tuple[Var, int]] | None = None) -> int:
        """The number of devices that split a dimension of a value: those of `axes_of`."""
        return math.prod(self.sizes[a] for a in self.axes_of(rows, along, seen))

    def axes_of(self, rows: Var, along: int = 0, seen: set[tuple[Var, int]] | None = None) -> tuple[str, ...]:
        """The axes that split a dimension of a value, by the pins of the values that it comes from.

        `seen` has dimensions of values that no pin splits, and gets those that this walk looks at.
        """
        seen = set() if seen is None else seen
        if (rows, along) in seen:
            return ()
        todo = [(rows, along)]
        seen.add((rows, along))
        while todo:
            v, dim = todo.pop()
            if v in self.outer:
                atom, more = self.outer[v]
                origins: Iterable[tuple[Atom, int]] = [(atom, dim + more)]
            else:
                eqn, port = self.made.get(v, (None, 0))
                pin = self.pins.get(v) if eqn is None else pin_of(eqn)
                if pin is not None and (axes := self.axes_by(pin, dim)):
                    return axes
                origins = () if eqn is None or pin is not None else _origins(eqn, port, dim)
            for atom, d in origins:
                if not compat.is_literal(atom) and (atom, d) not in seen:
                    seen.add((atom, d))
                    todo.append((atom, d))
        return ()

    def axes_by(self, pin: Pin, dim: int) -> tuple[str, ...]:
        """The axes of several devices that split a dimension, by a pin."""
        fixed = (a for a in pin.placement.axes_of(dim) if pin.fixed is None or a in pin.fixed)
        return tuple(a for a in fixed if self.sizes[a] > 1)


def _origins(eqn: Eqn, port: int, dim: int) -> Iterator[tuple[Atom, int]]:
    """The dimensions of operands, or of bodies' results, that a dimension of a result of an equation comes from; of
    stacked rows all that the loop takes row by row."""
    if eqn.primitive.name in NESTED:
        if eqn.primitive.name == "scan" and eqn.outvars[port] in (loop := Loop.of(eqn)).stacks:
            if dim == 0:
                yield from ((a, 0) for a in loop.rows.values())
                return
            dim -= 1
        yield from ((b.outvars[port], dim) for b in bodies_of(eqn) if len(b.outvars) == len(eqn.outvars))
    elif eqn.primitive in MARKS:
        yield eqn.invars[0], dim
    elif not (is_unit(eqn) or is_transfer(eqn) or runs_once(eqn)):
        rule = find_rule(operation_of(eqn))
        factor = rule.results[port][dim]
        for a, factors in zip(eqn.invars, rule.operands, strict=True):
            if factor and factor in factors:
                yield a, factors.index(factor)


def _seen_inside(eqn: Eqn) -> dict[Var, tuple[Atom, int]]:
    """For the variables of bodies the value outside, and the number of dimensions that this has in front."""
    return {v: (a, int(i >= b.rows_at)) for b in nested_bodies(eqn) for i, (v, a) in enumerate(b.given(eqn))}


def _may_be_batched(eqn: Eqn) -> bool:
    """Whether iterations batched together give the same results as one by one, without waiting for each other."""
    if eqn.effects or eqn.primitive.name in ("while", "in_order") or is_unit(eqn) or runs_once(eqn):
        return False
    for atom in eqn.invars:
        if is_extended(atom.aval.dtype) and not compat.generator_of(atom.aval.dtype).startswith(COUNTS):
            return False
    return all(_may_be_batched(e) for body in bodies_of(eqn) for e in body.eqns)


def _carries(loop: Loop) -> list[Combination | None] | None:
    """For each carry how iterations are combined (None: it does not change); None if an iteration reads a result of
    another."""
    reads = reads_of(loop.eqns, loop.results.values())
    maker = {v: e for e in loop.eqns for v in e.outvars}
    found: list[Combination | None] = []
    for c in loop.carries:
        if c.after is c.before:
            found.append(None)
            continue
        names = _way(c.before, c.after, maker, reads)
        kinds = {_COMBINATIONS[n] for n in names or ()}
        if len(kinds) != 1:
            return None
        found += kinds
    return found


def _way(before: Var, after: Atom, maker: Mapping[Var, Eqn], reads: Mapping[Var, int]) -> list[str] | None:
    """The names of the operations from a carry to its next value, if nothing else reads the values between; else
    None."""
    if reads.get(before) != 1:
        return None
    now, names, step = before, list[str](), _readers(maker)
    while now is not after:
        eqn = step.get(now)
        if eqn is None or eqn.primitive.name not in _COMBINATIONS or reads.get(eqn.outvars[0]) != 1:
            return None
        if eqn.primitive.name == "sub" and eqn.invars[0] is not now:
            return None
        names.append(eqn.primitive.name)
        (now,) = eqn.outvars
    return names


def _readers(maker: Mapping[Var, Eqn]) -> dict[Var, Eqn]:
    """For each value an equation that reads it."""
    return {a: e for e in maker.values() for a in e.invars if not compat.is_literal(a)}


@dataclass(frozen=True)
class _LoopRounds:
    """The rows of a loop, in `rounds` rounds of one row for each of `n` devices; padding follows the last row."""

    n: int
    length: int

    @property
    def rounds(self) -> int:
        return -(-self.length // self.n)

    @property
    def missing(self) -> int:
        return self.n * self.rounds - self.length

    @property
    def valid(self) -> Any:
        """[rounds, n]: whether a row is one of the loop's."""
        shape = self.rounds, self.n
        at = lax.broadcasted_iota(jnp.int32, shape, 1) * self.rounds + lax.broadcasted_iota(jnp.int32, shape, 0)
        return at < self.length

    def by_round(self, x: Any) -> Any:
        """[length, ...] --> [rounds, n, ...]"""
        if self.missing and is_extended(x.dtype):
            x = jax.random.wrap_key_data(self._filled(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        elif self.missing:
            x = self._filled(x)
        return jnp.swapaxes(lax.reshape(x, (self.n, self.rounds, *x.shape[1:])), 0, 1)

    def by_row(self, y: Any) -> Any:
        """[rounds, n, ...] --> [length, ...]"""
        y = jnp.swapaxes(y, 0, 1)
        y = lax.reshape(y, (self.n * self.rounds, *y.shape[2:]))
        return lax.slice_in_dim(y, 0, self.length) if self.missing else y

    def _filled(self, x: Any) -> Any:
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, self.missing, 0), *[(0, 0, 0)] * (x.ndim - 1)])


def _neutral(start: Any, c: Combination) -> Any:
    """The neutral element of a combination, of the type of a carry."""
    return jnp.full(start.shape, neutral_value(c.neutral, start.dtype), start.dtype)


def _shared(loop: Loop, carries: Sequence[Combination | None], n: int) -> Any:
    """The closed jaxpr of a scan whose rounds take a row of each of `n` devices."""
    body, by = compat.close(loop.body), _LoopRounds(n, loop.length)
    combined = [c for c in carries if c is not None]

    def run(*operands: Any) -> list[Any]:
        consts, starts, rows = parted(operands, loop.consts, loop.carries, loop.rows)

        def once(*row: Any) -> list[Any]:
            given = [s if c is None else _neutral(s, c) for s, c in zip(starts, carries, strict=True)]
            given = [compat.as_aval(g, c.before.aval) for g, c in zip(given, loop.carries, strict=True)]
            return jex.jaxpr_as_fun(body)(*consts, *given, *row)

        def step(sums: list[Any], given: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            valid, row = given
            out = jax.vmap(once)(*row)
            terms = [x for x, c in zip(out, carries, strict=False) if c is not None]
            after: list[Any] = []
            for s, x, c in zip(sums, terms, combined, strict=True):
                if by.missing:
                    real = lax.broadcast_in_dim(valid, x.shape, (0,))
                    x = lax.select(real, x, lax.full_like(x, neutral_value(c.neutral, x.dtype)))
                after.append(c.both(s, x))
            return after, parted(out, carries, loop.stacks)[1]

        zeros = [_neutral(s, c) for s, c in zip(starts, carries, strict=True) if c is not None]
        zeros = [lax.broadcast(z, (n,)) for z in zeros]
        sums, ys = lax.scan(
            step, zeros, (by.valid, list(map(by.by_round, rows))),
            length=by.rounds, reverse=loop.reverse, unroll=loop.eqn.params["unroll"],
        )  # fmt: skip
        parts = iter(sums)
        ends = [s if c is None else c.both(s, c.reduce(next(parts))) for s, c in zip(starts, carries, strict=True)]
        results = [*ends, *map(by.by_row, ys)]
        return [compat.as_aval(x, v.aval) for x, v in zip(results, loop.results, strict=True)]

    avals = (a.aval for a in loop.eqn.invars)
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))
