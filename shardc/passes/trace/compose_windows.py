"""Composes windows: what slices, padding, concatenation and writes do to an array becomes one window of it.

    q = pad u (1, 1); q[2:] + q[:-2]         -->  pad u (-1, 1) + pad u (1, -1)
    u.at[1:-1].set(f(u[2:], u[:-2]))         -->  select (1 <= i < n - 1) (f (pad u (-1, 1)) (pad u (1, -1))) u
    concatenate u[-1:] u[:-1]                -->  join_ranges u

Arrays of another length (n + 2, n - 2) are cut at other places than their neighbours, and every device sends what lies
between. Here they are read as *views*: the elements lo ... hi - 1 of a value along each dimension, where lo may be
negative and hi beyond its end; what lies outside is any number. A view of what is elementwise is the same of its
operands; a view of a slice or of padding is another view of the operand.

Two sweeps. Forwards: for each dimension of a value the size of the array that it comes from, its *home*, and where
its elements are there; a value of another size is *odd*. Backwards: which views are read of each value. Only views
along odd dimensions move up; of the others the value is made, and shifted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var, bodies_of
from shardc.ir.program import Program
from shardc.ir.ranges import join_ranges_p
from shardc.passes.trace.static_windows import (
    Write,
    constant,
    fill_of,
    is_zero,
    padded_form,
    same_as,
    static_form,
    write_of,
)
from shardc.sbp.rules.slicing import FEW
from shardc.sbp.signature import Ranges, family_of, is_extended

Box: TypeAlias = tuple[tuple[int, int], ...]
"""The view of a value: begin and end along each dimension; both may lie outside."""

MOST_RANGES: Final = 8
MOST_TERMS: Final = 4
MOST_ROWS: Final = 4
"""Rows of a wall that are broadcast one by one."""


def compose_windows(program: Program) -> Program:
    """The program with composed windows; the same object if there is nothing to compose."""
    jaxpr = composed(program.jaxpr)
    return program if jaxpr is program.jaxpr else program.after("compose_windows", jaxpr)


def composed(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with composed windows, nested bodies too; the same object if there is nothing to compose."""
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        bodies = bodies_of(eqn)
        changed = [composed(b) for b in bodies]
        if any(new is not old for new, old in zip(changed, bodies, strict=True)):
            eqn = eqn.replace(params=compat.with_bodies(eqn, changed))
        eqns.append(eqn)
    facts = _Facts()
    found = [made for e in eqns for made in facts.add(e)]
    outvars = [facts.named(a) for a in jaxpr.outvars]
    views = _Views(facts)
    views.read(found, outvars)
    if views.composes or facts.folded:
        eqns, outvars = views.write(found, outvars)
        jaxpr = compat.new_jaxpr(jaxpr.invars, outvars, eqns, jaxpr)
        return compat.remove_dead(jaxpr, [True] * len(outvars))
    if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, eqns, jaxpr)


class Home(NamedTuple):
    """Where the elements of a value are along one dimension: element 0 is element `first` ... `last` of an array of
    `size` (operands may differ)."""

    size: int
    first: int = 0
    last: int = 0

    def moved(self, by: int) -> Home:
        return Home(self.size, self.first + by, self.last + by)


class Moved(NamedTuple):
    """A value that is a sum of terms: each consists of ranges of one array along `dim`, with zeros elsewhere. `joins`:
    not slices alone."""

    dim: int
    terms: tuple[tuple[Var, Ranges], ...]
    joins: bool

    def seen(self, begin: int, end: int) -> Moved:
        """The terms of a view."""
        found: list[tuple[Var, Ranges]] = []
        for source, ranges in self.terms:
            inside: list[tuple[int, int, int]] = []
            for at, start, stop in ranges:
                low, high = max(at, begin), min(at + stop - start, end)
                if low < high:
                    inside.append((low - begin, start + low - at, start + high - at))
            if inside:
                found.append((source, _merged(inside)))
        return self._replace(terms=tuple(found))

    def placed(self, at: int) -> Moved:
        """The same further on."""
        terms = tuple((x, tuple((a + at, start, stop) for a, start, stop in ranges)) for x, ranges in self.terms)
        return self._replace(terms=terms)


def _sum_of(dim: int, terms: Sequence[tuple[Var, Ranges]]) -> Moved:
    """The sum of terms, in as few as possible: ranges of one array that do not meet are in one."""
    packed: dict[Var, list[list[tuple[int, int, int]]]] = {}
    for source, ranges in terms:
        packed.setdefault(source, []).append(list(ranges))
    for source, lists in packed.items():
        found: list[list[tuple[int, int, int]]] = []
        for one in sorted((r for ranges in lists for r in ranges), key=lambda r: r[1] - r[2]):
            free = next((f for f in found if not any(_meet(one, r) for r in f)), None)
            if free is None:
                found.append([one])
            else:
                free.append(one)
        packed[source] = found
    return Moved(dim, tuple((x, _merged(r)) for x, lists in packed.items() for r in lists), True)


def _meet(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] < b[0] + b[2] - b[1] and b[0] < a[0] + a[2] - a[1]


def _merged(ranges: Sequence[tuple[int, int, int]]) -> Ranges:
    found: list[tuple[int, int, int]] = []
    for at, start, stop in sorted(ranges):
        if found and found[-1][2] == start and found[-1][0] + start - found[-1][1] == at:
            found[-1] = (*found[-1][:2], stop)
        elif stop > start:
            found.append((at, start, stop))
    return tuple(found)


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(int(n) for n in atom.aval.shape)


def full(atom: Atom) -> Box:
    """The view of the value itself."""
    return tuple((0, n) for n in _shape(atom))


def _seen(atom: Atom, box: Box) -> list[int]:
    """The dimensions along which a view is not the whole value."""
    return [d for d, (n, side) in enumerate(zip(_shape(atom), box, strict=True)) if side != (0, n)]


class _Facts:
    """What is known of values, from the equations that make them.

    Attributes:
      made: the equation of each variable.
      homes: where variables come from; others are at home.
      moved: variables that consist of ranges of one array.
      writes: variables that are an array with a window written.
      folded: whether padding became part of a convolution.
    """

    def __init__(self) -> None:
        self.made: dict[Var, Eqn] = {}
        self.homes: dict[Var, tuple[Home, ...]] = {}
        self.moved: dict[Var, Moved] = {}
        self.writes: dict[Var, Write] = {}
        self.same: dict[Var, Atom] = {}
        self.folded = False

    def named(self, atom: Atom) -> Atom:
        return atom if compat.is_literal(atom) else self.same.get(atom, atom)

    def add(self, eqn: Eqn) -> list[Eqn]:
        """The static form of an equation; none if it only copies a value."""
        if any(a in self.same for a in eqn.invars if not compat.is_literal(a)):
            eqn = eqn.replace(invars=[self.named(a) for a in eqn.invars])
        copied = same_as(eqn, self.made)
        if copied is not None:
            self.same[eqn.outvars[0]] = self.named(copied)
            return []
        *before, eqn = static_form(eqn, self.made)
        found = [made for e in before for made in self.add(e)]
        if before:
            eqn = eqn.replace(invars=[self.named(a) for a in eqn.invars])
        self.folded |= bool(before) and eqn.primitive.name == "conv_general_dilated"
        write = write_of(eqn, self.made)
        if write is not None:
            eqn = padded_form(eqn, write, self.made) or eqn
            if eqn.primitive is not lax.pad_p:
                self.writes[eqn.outvars[0]] = write
        self.made |= dict.fromkeys(eqn.outvars, eqn)
        if len(eqn.outvars) == 1 and not is_extended(eqn.outvars[0].aval.dtype) and math.prod(_shape(eqn.outvars[0])):
            self._learn(eqn, eqn.outvars[0])
        return [*found, eqn]

    def _learn(self, eqn: Eqn, out: Var) -> None:
        name = eqn.primitive.name
        mover = _MOVERS.get(name)
        if mover is not None and (found := mover(self, eqn)) is not None:
            size = _shape(out)[found.dim]
            fits = all(len(r) <= MOST_RANGES and 2 * size <= 3 * _shape(x)[found.dim] for x, r in found.terms)
            if fits and 0 < len(found.terms) <= MOST_TERMS:
                self.moved[out] = found
        way = way_of(eqn)
        if way is not None:
            homes = way.homes(self, eqn)
            kept = tuple(
                h if 3 * abs(n - h.size) <= h.size else Home(n) for h, n in zip(homes, _shape(out), strict=True)
            )
            if any(h.size != n for h, n in zip(kept, _shape(out), strict=True)):
                self.homes[out] = tuple(Home(n) if h.size == n else h for h, n in zip(kept, _shape(out), strict=True))

    def homes_of(self, atom: Atom) -> tuple[Home, ...]:
        found = None if compat.is_literal(atom) else self.homes.get(atom)
        return found or tuple(Home(n) for n in _shape(atom))

    def odd(self, atom: Atom, d: int) -> bool:
        return self.homes_of(atom)[d].size != _shape(atom)[d]

    def moves_of(self, atom: Atom, dim: int) -> Moved | None:
        """An array as ranges along a dimension: of its source, or all of itself."""
        if compat.is_literal(atom):
            return None
        found = self.moved.get(atom)
        if found is not None and found.dim == dim:
            return found
        return Moved(dim, ((atom, ((0, 0, _shape(atom)[dim]),)),), False)


# --- ranges of one array ----------------------------------------------------------------------------------------------


def _sliced(facts: _Facts, eqn: Eqn) -> Moved | None:
    (x,), starts, limits = eqn.invars, eqn.params["start_indices"], eqn.params["limit_indices"]
    cut = _seen(x, tuple(zip(starts, limits, strict=True)))
    if len(cut) != 1 or any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    (d,) = cut
    found = facts.moves_of(x, d)
    return found and found.seen(starts[d], limits[d])


def _padded(facts: _Facts, eqn: Eqn) -> Moved | None:
    config = eqn.params["padding_config"]
    dims = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if len(dims) != 1 or any(c[2] for c in config) or not is_zero(eqn.invars[1], facts.made):
        return None
    (d,) = dims
    found = facts.moves_of(eqn.invars[0], d)
    n = _shape(eqn.invars[0])[d]
    return found and found.seen(-int(config[d][0]), n + int(config[d][1]))._replace(joins=True)


def _joined(facts: _Facts, eqn: Eqn) -> Moved | None:
    d, begin = eqn.params["dimension"], 0
    terms: list[tuple[Var, Ranges]] = []
    for a in eqn.invars:
        part = facts.moves_of(a, d)
        if part is None:
            return None
        terms += part.placed(begin).terms
        begin += _shape(a)[d]
    return _sum_of(d, terms) if len({id(x) for x, _ in terms}) == 1 else None


def _added(facts: _Facts, eqn: Eqn) -> Moved | None:
    """A sum of sums: gradients of slices, of rotations, of padding that repeats elements."""
    known = [m for a in eqn.invars if not compat.is_literal(a) and (m := facts.moved.get(a)) is not None]
    if len(known) != 2 or known[0].dim != known[1].dim:
        return None
    return _sum_of(known[0].dim, (*known[0].terms, *known[1].terms))


_MOVERS: Final[Mapping[str, Callable[[_Facts, Eqn], Moved | None]]] = {
    "slice": _sliced, "pad": _padded, "concatenate": _joined, "add": _added, "add_any": _added,
}  # fmt: skip


# --- ways up ----------------------------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """How a view is made: `fn` of views of other values. `eqn`: the equation itself, of other operands.

    Attributes:
      reads: the values that it reads, and their views.
      fn: what it does with them; None: nothing.
      like: the equation that gives its source line.
    """

    reads: list[tuple[Atom, Box]]
    fn: Callable[..., Any] | None = None
    eqn: Eqn | None = None
    like: Eqn | None = None


class Way(NamedTuple):
    """How views pass an operation.

    Attributes:
      homes: where its result comes from.
      up: the recipe of a view of the result.
      begins: whether the view of its whole result is composed.
    """

    homes: Callable[[_Facts, Eqn], Sequence[Home]]
    up: Callable[[_Facts, Eqn, Box], Recipe]
    begins: Callable[[_Facts, Eqn], bool] = lambda facts, eqn: False


def way_of(eqn: Eqn) -> Way | None:
    """The way of an operation; None: it stays as it is."""
    found = _WAYS.get(eqn.primitive.name)
    if found is not None or len(eqn.outvars) != 1 or eqn.effects or not eqn.invars:
        return found
    return _ELEMENTWISE if family_of(eqn.primitive.name) == "elementwise" else None


def _same_homes(facts: _Facts, eqn: Eqn) -> Sequence[Home]:
    """Homes of an elementwise result: those of its odd operands."""
    out = _shape(eqn.outvars[0])
    found = [Home(n) for n in out]
    for a in eqn.invars:
        if _shape(a) == out:
            for d, (old, new) in enumerate(zip(found, facts.homes_of(a), strict=True)):
                if old.size == out[d]:
                    found[d] = new
                elif old.size == new.size:
                    found[d] = Home(old.size, min(old.first, new.first), max(old.last, new.last))
    return found


def _same_views(facts: _Facts, eqn: Eqn, box: Box) -> Recipe:
    out = _shape(eqn.outvars[0])
    reads = [(a, box if _shape(a) == out else full(a)) for a in eqn.invars]
    return Recipe(reads, eqn=eqn, like=eqn)


_ELEMENTWISE: Final = Way(_same_homes, _same_views)


def _strides(eqn: Eqn) -> Sequence[int]:
    return eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])


def _slice_homes(facts: _Facts, eqn: Eqn) -> Sequence[Home]:
    cuts = zip(
        facts.homes_of(eqn.invars[0]), eqn.params["start_indices"], _strides(eqn), _shape(eqn.outvars[0]), strict=True
    )
    return [h.moved(start) if step == 1 else Home(n) for h, start, step, n in cuts]


def _slice_up(facts: _Facts, eqn: Eqn, box: Box) -> Recipe:
    """A view of a slice; strided dimensions are sliced after it."""
    (x,), out, n = eqn.invars, eqn.outvars[0], len(box)
    starts, limits, steps = eqn.params["start_indices"], eqn.params["limit_indices"], _strides(eqn)
    above = tuple(
        (low + start, high + start) if step == 1 else (0, size)
        for (low, high), start, step, size in zip(box, starts, steps, _shape(x), strict=True)
    )
    if all(s == 1 for s in steps):
        return Recipe([(x, above)], like=eqn)
    assert all(steps[d] == 1 for d in _seen(out, box))
    cut = [
        (0, hi - lo, 1) if k == 1 else (s, e, k) for (lo, hi), s, e, k in zip(above, starts, limits, steps, strict=True)
    ]
    return Recipe([(x, above)], lambda v: lax.slice(v, *([c[i] for c in cut] for i in range(3))), like=eqn)


def _slice_begins(facts: _Facts, eqn: Eqn) -> bool:
    """A slice of something longer than its home, or one that is home again."""
    x, out = eqn.invars[0], _shape(eqn.outvars[0])
    for d, (h, n) in enumerate(zip(facts.homes_of(x), _shape(x), strict=True)):
        if h.size != n != out[d] and (n > h.size or out[d] == h.size) and _strides(eqn)[d] == 1:
            return True
    return False


def _pad_homes(facts: _Facts, eqn: Eqn) -> Sequence[Home]:
    pairs = zip(facts.homes_of(eqn.invars[0]), eqn.params["padding_config"], _shape(eqn.outvars[0]), strict=True)
    return [Home(n) if inner else h.moved(-int(low)) for h, (low, _, inner), n in pairs]


def _pad_up(facts: _Facts, eqn: Eqn, box: Box) -> Recipe:
    x, value = eqn.invars
    config, size = [tuple(map(int, c)) for c in eqn.params["padding_config"]], _shape(x)
    above = tuple(
        (lo, hi) if inner else (lo - low, hi - low) for (lo, hi), (low, _, inner) in zip(box, config, strict=True)
    )
    if not any(facts.odd(x, d) for d in range(len(box)) if above[d] != (0, size[d])):
        widths = [c if c[2] else (-lo, hi - n, 0) for c, (lo, hi), n in zip(config, above, size, strict=True)]
        return Recipe([(x, full(x)), (value, ())], lambda v, fill: lax.pad(v, fill, widths), like=eqn)
    assert not any(c[2] for c in config)
    outside = [(d, -lo, n - lo) for d, ((lo, hi), n) in enumerate(zip(above, size, strict=True)) if lo < 0 or hi > n]

    def filled(v: Any, fill: Any) -> Any:
        return lax.select(within(v.shape, outside), v, lax.broadcast(fill, v.shape)) if outside else v

    return Recipe([(x, above), (value, ())], filled, like=eqn)


def _pad_begins(facts: _Facts, eqn: Eqn) -> bool:
    config = eqn.params["padding_config"]
    odd = any(facts.odd(eqn.invars[0], d) for d, c in enumerate(config) if tuple(c) != (0, 0, 0))
    return odd and not any(c[2] for c in config)


def within(shape: Sequence[int], sides: Sequence[tuple[int, int, int]]) -> Any:
    """A mask: begin <= position < end along each dimension of `sides`."""
    mask = None
    for d, begin, end in sides:
        at = lax.broadcasted_iota(np.int32, shape, d)
        if begin > 0:
            mask = _both(mask, lax.ge(at, np.int32(begin)))
        if end < shape[d]:
            mask = _both(mask, lax.lt(at, np.int32(end)))
    return lax.full(shape, True) if mask is None else mask


def _both(a: Any, b: Any) -> Any:
    return b if a is None else lax.bitwise_and(a, b)


def _join_homes(facts: _Facts, eqn: Eqn) -> Sequence[Home]:
    """Homes of the longest operand."""
    d = eqn.params["dimension"]
    sizes = [_shape(a)[d] for a in eqn.invars]
    i = int(np.argmax(sizes))
    return [h.moved(-sum(sizes[:i])) if k == d else h for k, h in enumerate(facts.homes_of(eqn.invars[i]))]


def _join_up(facts: _Facts, eqn: Eqn, box: Box) -> Recipe:
    """A view of joined parts: each where it is."""
    d, begin = eqn.params["dimension"], 0
    (lo, hi), reads, made, ends = box[d], [], [], []
    for a in eqn.invars:
        n = _shape(a)[d]
        if max(lo, begin) < min(hi, begin + n):
            read, fn = _part(facts, a, box, d, begin)
            reads.append(read)
            made.append(fn)
            ends.append(begin + n - lo)
        begin += n

    def joined(*parts: Any) -> Any:
        views = [v if fn is None else fn(v) for fn, v in zip(made, parts, strict=True)]
        whole = views[-1]
        for v, end in zip(reversed(views[:-1]), reversed(ends[:-1]), strict=True):
            whole = lax.select(within(v.shape, [(d, 0, end)]), v, whole)
        return whole

    return Recipe(reads, joined, like=eqn)


def _part(facts: _Facts, a: Atom, box: Box, d: int, begin: int) -> tuple[tuple[Atom, Box], Any]:
    """What is read of an operand of a concatenation that begins at `begin`, and how it becomes the view."""
    (lo, hi), n = box[d], _shape(a)[d]
    if n * FEW < hi - lo and not compat.is_literal(a):
        found = facts.moved.get(a)
        if found is not None and found.dim == d and len(found.terms) == 1 and all(k == d for k in _seen(a, box)):
            ((source, ranges),) = found.seen(lo - begin, hi - begin).terms
            return (source, full(source)), lambda x: _from_ranges(x, d, hi - lo, ranges)
        if n <= MOST_ROWS:
            view = tuple((0, n) if k == d else side for k, side in enumerate(box))
            return (a, view), lambda x: _rows_at(x, d, begin - lo, hi - lo)
    return (a, tuple((lo - begin, hi - begin) if k == d else side for k, side in enumerate(box))), None


def _rows_at(x: Any, d: int, at: int, size: int) -> Any:
    """A few rows where they belong; elsewhere any of them. Nothing of a row that is whole on each device moves."""
    shape = (*x.shape[:d], size, *x.shape[d + 1 :])
    rows = [
        lax.broadcast_in_dim(lax.slice_in_dim(x, i, i + 1, axis=d), shape, range(len(shape))) for i in range(x.shape[d])
    ]
    whole = rows[-1]
    for i in reversed(range(len(rows) - 1)):
        if at + i + 1 > 0:
            whole = lax.select(within(shape, [(d, 0, at + i + 1)]), rows[i], whole)
    return whole


def _join_begins(facts: _Facts, eqn: Eqn) -> bool:
    d = eqn.params["dimension"]
    return any(facts.odd(a, d) for a in eqn.invars)


def _dims_way(along: Callable[[Eqn], Sequence[int | None]], made: Callable[..., Any]) -> Way:
    """The way of an operation whose dimension d is dimension `along[d]` of its operand."""

    def homes(facts: _Facts, eqn: Eqn) -> Sequence[Home]:
        above = facts.homes_of(eqn.invars[0])
        return [Home(n) if k is None else above[k] for k, n in zip(along(eqn), _shape(eqn.outvars[0]), strict=True)]

    def up(facts: _Facts, eqn: Eqn, box: Box) -> Recipe:
        view = list(full(eqn.invars[0]))
        for side, k in zip(box, along(eqn), strict=True):
            if k is not None:
                view[k] = side
        shape = tuple(hi - lo for lo, hi in box)
        return Recipe([(eqn.invars[0], tuple(view))], lambda x: made(eqn, x, shape), like=eqn)

    return Way(homes, up)


def _of_broadcast(eqn: Eqn) -> Sequence[int | None]:
    found: list[int | None] = [None] * len(_shape(eqn.outvars[0]))
    for k, d in enumerate(eqn.params["broadcast_dimensions"]):
        if _shape(eqn.invars[0])[k] == _shape(eqn.outvars[0])[d]:
            found[d] = k
    return found


def _of_ones(eqn: Eqn) -> Sequence[int | None]:
    """Dimensions of a reshape that only adds and removes sizes of 1; none pass any other."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    left = [k for k, n in enumerate(old) if n != 1]
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return [None] * len(new)
    if [old[k] for k in left] != [n for n in new if n != 1]:
        return [None] * len(new)
    rest = iter(left)
    return [next(rest) if n != 1 else None for n in new]


def _space(eqn: Eqn) -> Mapping[int, tuple[int, int]]:
    """For each dimension of space of the operand, its number in the result and in the kernel; empty if a convolution
    has strides or dilated operands."""
    p = compat.params_of(eqn)
    if any(n != 1 for n in (*p["window_strides"], *p["lhs_dilation"])):
        return {}
    numbers = p["dimension_numbers"]
    return dict(zip(numbers.lhs_spec[2:], zip(numbers.out_spec[2:], numbers.rhs_spec[2:], strict=True), strict=True))


def _convolution_homes(facts: _Facts, eqn: Eqn) -> Sequence[Home]:
    x, kernel = eqn.invars
    p, found = compat.params_of(eqn), [Home(n) for n in _shape(eqn.outvars[0])]
    sides = zip(_space(eqn).items(), p["padding"], p["rhs_dilation"], strict=False)
    for (d, (out, k)), (low, _), dilation in sides:
        home = facts.homes_of(x)[d]
        found[out] = home.moved((_shape(kernel)[k] - 1) * dilation // 2 - int(low))
    return found


def _convolution_up(facts: _Facts, eqn: Eqn, box: Box) -> Recipe:
    """A view of a convolution is one with other padding."""
    out, p = eqn.outvars[0], compat.params_of(eqn)
    padding = [tuple(map(int, side)) for side in p["padding"]]
    for i, (d, _) in enumerate(_space(eqn).values()):
        padding[i] = (padding[i][0] - box[d][0], padding[i][1] + box[d][1] - _shape(out)[d])
    if any(side < 0 for pair in padding for side in pair):
        return _shifted(out, full(out), box, eqn)
    other = eqn.replace(params={**eqn.params, "padding": tuple(padding)})
    return Recipe([(a, full(a)) for a in eqn.invars], eqn=other, like=eqn)


_WAYS: Final[Mapping[str, Way]] = {
    "slice": Way(_slice_homes, _slice_up, _slice_begins),
    "pad": Way(_pad_homes, _pad_up, _pad_begins),
    "concatenate": Way(_join_homes, _join_up, _join_begins),
    "transpose": _dims_way(
        lambda eqn: eqn.params["permutation"], lambda eqn, x, shape: lax.transpose(x, eqn.params["permutation"])
    ),
    "broadcast_in_dim": _dims_way(
        _of_broadcast, lambda eqn, x, shape: lax.broadcast_in_dim(x, shape, eqn.params["broadcast_dimensions"])
    ),
    "reshape": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
    "squeeze": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
    "conv_general_dilated": Way(_convolution_homes, _convolution_up),
    "reduce_sum": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
    "expand_dims": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
}


def _from_ranges(x: Any, dim: int, size: int, ranges: Ranges) -> Any:
    """Ranges of an array and zeros, by the simplest operation."""
    n = x.shape[dim]
    if len(ranges) == 1 and (edge := _edges(ranges[0], size, n)) is not None:
        return (
            x
            if edge == (0, 0)
            else lax.pad(x, np.zeros((), x.dtype), [(*edge, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])
        )
    return join_ranges_p.bind(x, dim=dim, size=size, ranges=ranges)


def _edges(one: tuple[int, int, int], size: int, n: int) -> tuple[int, int] | None:
    """The padding that is one range and zeros; None if elements beside the range lie inside the result."""
    at, start, stop = one
    end = at + stop - start
    return (at - start, size - end - (n - stop)) if (not start or not at) and (stop == n or end == size) else None


# --- views ------------------------------------------------------------------------------------------------------------


@dataclass
class _Views:
    """The views that a jaxpr reads, and how they are made.

    Attributes:
      facts: what is known of its values.
      wanted: the views that are read of each variable, in the order in which they were found.
      recipes: how each is made; the plain equation if there is none.
      composes: whether anything is composed.
      made: the atoms of views that are made.
      eqns: the new equations.
    """

    facts: _Facts
    wanted: dict[Var, dict[Box, None]] = field(default_factory=dict[Var, "dict[Box, None]"])
    recipes: dict[tuple[Var, Box], Recipe] = field(default_factory=dict[tuple[Var, Box], Recipe])
    composes: bool = False
    made: dict[tuple[Var, Box], Atom] = field(default_factory=dict[tuple[Var, Box], Atom])
    eqns: list[Eqn] = field(default_factory=list[Eqn])

    # backwards

    def ask(self, atom: Atom, box: Box | None = None) -> None:
        if not compat.is_literal(atom):
            self.wanted.setdefault(atom, {})[full(atom) if box is None else box] = None

    def read(self, eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> None:
        """Find the views, from the results back."""
        for a in outvars:
            self.ask(a)
        for eqn in reversed(eqns):
            for out in eqn.outvars:
                self._choose(out, eqn)
            whole = any(full(v) in self.wanted.get(v, ()) and (v, full(v)) not in self.recipes for v in eqn.outvars)
            if whole or eqn.effects:
                for a in eqn.invars:
                    self.ask(a)
        for v in [v for v in self.wanted if v not in self.facts.made]:
            self._choose(v, None)

    def _choose(self, out: Var, eqn: Eqn | None) -> None:
        """A recipe for each view of a variable."""
        if eqn is not None and len(self.wanted.get(out, ())) > 1:
            self._share(out, eqn)
        done = set[Box]()
        while left := [b for b in self.wanted.get(out, ()) if b not in done]:
            for box in left:
                done.add(box)
                recipe = self._recipe(out, box, eqn)
                if recipe is not None:
                    self.recipes[out, box] = recipe
                    for a, b in recipe.reads:
                        self.ask(a, b)

    def _recipe(self, out: Var, box: Box, eqn: Eqn | None) -> Recipe | None:
        """The recipe of a view; None: the equation itself."""
        seen = _seen(out, box)
        if not seen:
            found = None if eqn is None or len(eqn.outvars) > 1 else self._begun(eqn, out)
            self.composes |= found is not None
            return found
        if (out, box) in self.recipes:
            return self.recipes[out, box]
        if any(hi <= 0 or lo >= n for (lo, hi), n in zip(box, _shape(out), strict=True)):  # nothing of it
            shape = tuple(hi - lo for lo, hi in box)
            return Recipe([], lambda: lax.full(shape, 0, out.aval.dtype), like=eqn)
        moved = self.facts.moved.get(out)
        if moved is not None and seen == [moved.dim] and (found := self._of_ranges(moved, box, eqn)) is not None:
            return found
        odd = [d for d in seen if self.facts.odd(out, d)]
        if odd == seen and eqn is not None and (way := way_of(eqn)) is not None:
            return way.up(self.facts, eqn, box)
        inner = tuple(side if d in odd else (0, n) for d, (side, n) in enumerate(zip(box, _shape(out), strict=True)))
        return _shifted(out, inner if odd != seen else full(out), box, eqn)

    def _begun(self, eqn: Eqn, out: Var) -> Recipe | None:
        """The recipe of a whole result, if it begins a composition."""
        if (moved := self.facts.moved.get(out)) is not None and self._joins(moved, eqn, out):
            return _terms(moved, _shape(out)[moved.dim], eqn)
        if out in self.facts.writes:
            return self._written(self.facts.writes[out], eqn)
        way = _WAYS.get(eqn.primitive.name)
        if way is None or not math.prod(_shape(out)) or is_extended(out.aval.dtype) or not way.begins(self.facts, eqn):
            return None
        return way.up(self.facts, eqn, full(out))

    def _joins(self, moved: Moved, eqn: Eqn, out: Var) -> bool:
        """Whether the ranges of a whole result are composed: there are fewer terms than before, or operations."""
        few = any(_shape(out)[moved.dim] * FEW < _shape(x)[moved.dim] for x, _ in moved.terms)
        if few or not moved.joins:
            return False
        above = [self.facts.moved.get(a) for a in eqn.invars if not compat.is_literal(a)]
        known = [m for m in above if m is not None and m.dim == moved.dim]
        match eqn.primitive.name:
            case "concatenate":
                return True
            case "pad":
                return bool(known)
            case "slice":
                return any(m.joins for m in known)
            case _:
                return len(moved.terms) < sum(len(m.terms) for m in known)

    def _written(self, write: Write, eqn: Eqn) -> Recipe | None:
        """A window that is written as a select; None for small ones, and constants."""
        x, update, starts, combine = write
        shape, size = _shape(x), _shape(update)
        parts = [d for d, (n, k) in enumerate(zip(shape, size, strict=True)) if n != k]
        if not parts or is_extended(x.aval.dtype) or fill_of(update, self.facts.made) is not None:
            return None
        if any(size[d] * FEW < shape[d] for d in parts):
            return self._few_written(write, parts, eqn)
        if constant(update, self.facts.made) is not None:
            return None
        inside = [(d, starts[d], starts[d] + size[d]) for d in parts]
        box = tuple((-s, n - s) for s, n in zip(starts, shape, strict=True))

        def written(old: Any, new: Any) -> Any:
            return lax.select(within(shape, inside), new if combine is None else combine(old, new), old)

        return Recipe([(x, full(x)), (update, box)], written, like=eqn)

    def _few_written(self, write: Write, parts: Sequence[int], eqn: Eqn) -> Recipe | None:
        """A few rows that are written, if they are rows of an array."""
        x, update, starts, combine = write
        moved = None if compat.is_literal(update) else self.facts.moved.get(update)
        if len(parts) > 1 or moved is None or moved.dim != parts[0] or len(moved.terms) != 1:
            return None
        (d,), (lo, hi) = parts, (starts[parts[0]], _shape(update)[parts[0]] + starts[parts[0]])
        ((source, ranges),) = moved.seen(-lo, _shape(x)[d] - lo).terms

        def written(old: Any, rows: Any) -> Any:
            new = _from_ranges(rows, d, old.shape[d], ranges)
            return lax.select(within(old.shape, [(d, lo, hi)]), new if combine is None else combine(old, new), old)

        return Recipe([(x, full(x)), (source, full(source))], written, like=eqn)

    def _of_ranges(self, moved: Moved, box: Box, eqn: Eqn | None) -> Recipe | None:
        """A view as ranges, where there are several or few elements are read; None: it moves up otherwise."""
        begin, end = box[moved.dim]
        seen = moved.seen(begin, end)
        for x, ranges in seen.terms:
            if len(ranges) == 1:
                _, start, stop = ranges[0]
                n = _shape(x)[moved.dim]
                if _edges(ranges[0], end - begin, n) is None and (stop - start) * FEW >= n:
                    return None
        return _terms(seen, end - begin, eqn) if seen.terms else None

    def _share(self, out: Var, eqn: Eqn) -> None:
        """Several views of one computation: it is made once, where it is at home, and shifted."""
        if way_of(eqn) is not _ELEMENTWISE or out in self.facts.moved:
            return
        homes, shape = self.facts.homes_of(out), _shape(out)
        views = [
            b for b in self.wanted[out]
            if (seen := _seen(out, b)) and all(self.facts.odd(out, d) and b[d][1] - b[d][0] == homes[d].size for d in seen)
        ]  # fmt: skip
        if len(views) < 2:
            return
        seen = sorted({d for b in views for d in _seen(out, b)})
        at = {d: (homes[d].first + homes[d].last) // 2 for d in seen}
        middle = tuple((-at[d], homes[d].size - at[d]) if d in at else (0, n) for d, n in enumerate(shape))
        for b in views:
            needed = [(max(lo, 0), min(hi, n)) for (lo, hi), n in zip(b, shape, strict=True)]
            holds = all(low <= lo and hi <= high for (lo, hi), (low, high) in zip(needed, middle, strict=True))
            if b != middle and holds:
                self.recipes[out, b] = _shifted(out, middle, b, eqn)

    # forwards

    def write(self, eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
        """The equations with composed windows, and the results."""
        for eqn in eqns:
            plain = [v for v in eqn.outvars if (v, full(v)) in self.recipes]
            for v in plain:
                self.view(v, full(v), eqn)
            if not plain and (eqn.effects or any(full(v) in self.wanted.get(v, ()) for v in eqn.outvars)):
                invars = [self.view(a, full(a), eqn) for a in eqn.invars]
                self.eqns.append(eqn.replace(invars=invars))
        return self.eqns, [self.view(a, full(a), None) for a in outvars]

    def view(self, atom: Atom, box: Box, reader: Eqn | None) -> Atom:
        """A view of a value, made where it is read first."""
        if compat.is_literal(atom) or ((atom, box) not in self.recipes and not _seen(atom, box)):
            return atom
        if (atom, box) not in self.made:
            recipe = self.recipes[atom, box]
            like = recipe.like if recipe.like is not None else reader
            args = [self.view(a, b, like) for a, b in recipe.reads]
            self.made[atom, box] = self._emit(recipe, args, atom, box, like)
        return self.made[atom, box]

    def _emit(self, recipe: Recipe, args: list[Atom], atom: Var, box: Box, like: Eqn | None) -> Atom:
        if recipe.eqn is not None:
            aval = compat.shaped_array(tuple(hi - lo for lo, hi in box), atom.aval.dtype, atom.aval.weak_type)
            self.eqns.append(recipe.eqn.replace(invars=args, outvars=[out := compat.fresh_var(aval)]))
            return out
        if recipe.fn is None:
            return args[0]
        closed = jax.make_jaxpr(recipe.fn)(*(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in args))
        names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, args, strict=True))
        assert not closed.consts
        for inner in closed.jaxpr.eqns:
            outs = [compat.fresh_var(v.aval) for v in inner.outvars]
            invars = [a if compat.is_literal(a) else names[a] for a in inner.invars]
            names |= zip(inner.outvars, outs, strict=True)
            self.eqns.append(compat.new_eqn(invars, outs, inner.primitive, inner.params, like))
        (out,) = closed.jaxpr.outvars
        return out if compat.is_literal(out) else names[out]


def _shifted(out: Var, held: Box, box: Box, eqn: Eqn | None) -> Recipe:
    """A view from another one, shifted."""
    widths = [(h[0] - lo, hi - h[1], 0) for h, (lo, hi) in zip(held, box, strict=True)]
    return Recipe([(out, held)], lambda x: lax.pad(x, np.zeros((), x.dtype), widths), like=None)


def _terms(moved: Moved, size: int, eqn: Eqn | None) -> Recipe:
    """The recipe of a sum of ranges."""

    def added(*sources: Any) -> Any:
        parts = [_from_ranges(x, moved.dim, size, r) for x, (_, r) in zip(sources, moved.terms, strict=True)]
        return functools.reduce(lax.add, parts)

    return Recipe([(x, full(x)) for x, _ in moved.terms], added, like=eqn)
