"""The ways of views through operations, for `compose_windows`: the views of operands that a view of a result reads.

`Facts` is the forward sweep: it finds the home of each dimension of a value (`compose_windows` defines it), and the
values that are sums of ranges of one array.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.ranges import conv_of_ranges_p
from shardc.ir.walk import with_atoms
from shardc.passes.rewrite.windows.range_sums import (
    Box,
    Moved,
    Term,
    cut_dims,
    from_ranges,
    full,
    merged,
    padded,
    shape_of,
    sum_of,
    with_ranges,
)
from shardc.passes.rewrite.windows.static_windows import (
    Write,
    adds_ones,
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

MOST_RANGES: Final = 8
MOST_TERMS: Final = 32
"""Terms of a sum, at most: a box of three dimensions has 27 neighbours."""
MOST_ROWS: Final = 4
"""Rows of a boundary that are broadcast one by one."""


class Home(NamedTuple):
    """The home of one dimension of a value.

    Attributes:
      size: of the array that the value comes from.
      first, last: the least and the greatest position there of the value's element 0: operands may have several.
    """

    size: int
    first: int = 0
    last: int = 0

    def moved(self, by: int) -> Home:
        return Home(self.size, self.first + by, self.last + by)


class Scaled(NamedTuple):
    """An array times a number, or divided by it.

    Attributes:
      source: the array.
      number: the number.
      fn: lax.mul or lax.div.
      keeps_zeros: whether the number is known, and zeros stay zeros: it is finite, and none divides by zero.
    """

    source: Var
    number: Atom
    fn: Callable[..., Any]
    keeps_zeros: bool


class Facts:
    """Facts about values, from the equations that compute them.

    Attributes:
      made: the equation that computes each variable.
      homes: the homes of variables with an odd dimension. Every other variable is its own home.
      moved: the sums of ranges that variables are.
      writes: the writes that make variables.
      same: the variables that are copies, and the atoms that they copy.
      scaled: the moved arrays that are another array times a number.
      copies: how many of these there are of each array.
      folded: whether the padding of some array became padding of a convolution.
    """

    def __init__(self) -> None:
        self.made: dict[Var, Eqn] = {}
        self.homes: dict[Var, tuple[Home, ...]] = {}
        self.moved: dict[Var, Moved] = {}
        self.writes: dict[Var, Write] = {}
        self.same: dict[Var, Atom] = {}
        self.scaled: dict[Var, Scaled] = {}
        self.copies: Counter[Var] = Counter()
        self.folded = False

    def named(self, atom: Atom) -> Atom:
        return atom if compat.is_literal(atom) else self.same.get(atom, atom)

    def add(self, eqn: Eqn) -> list[Eqn]:
        """Learn from an equation. Returns its static form: no equation if it only copies a value."""
        eqn = with_atoms(eqn, self.same)
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
        if len(eqn.outvars) == 1 and not is_extended(eqn.outvars[0].aval.dtype) and math.prod(shape_of(eqn.outvars[0])):
            self._learn(eqn, eqn.outvars[0])
        return [*found, eqn]

    def _learn(self, eqn: Eqn, out: Var) -> None:
        name = eqn.primitive.name
        mover = _MOVERS.get(name)
        if mover is not None and (found := mover(self, eqn)) is not None and found.dims:
            fits = all(
                len(r) <= MOST_RANGES and 2 * size <= 3 * max(n, MOST_RANGES)
                for t in found.terms
                for r, size, n in zip(t.along, found.shape, shape_of(t.source), strict=True)
            )
            if fits and 0 < len(found.terms) <= MOST_TERMS:
                self.moved[out] = found
                for t in found.terms:
                    if t.source not in self.scaled and (scaled := self._scaled(t.source)) is not None:
                        self.scaled[t.source] = scaled
                        self.copies[scaled.source] += 1
        way = way_of(eqn)
        if way is not None:
            homes = way.homes(self, eqn)
            kept = tuple(
                h if 3 * abs(n - h.size) <= h.size else Home(n) for h, n in zip(homes, shape_of(out), strict=True)
            )
            if any(h.size != n for h, n in zip(kept, shape_of(out), strict=True)):
                self.homes[out] = tuple(Home(n) if h.size == n else h for h, n in zip(kept, shape_of(out), strict=True))

    def _scaled(self, out: Var) -> Scaled | None:
        """The array that a value is a scaled copy of, and the number. None if it is none, or has not the size of its
        home."""
        eqn = self.made.get(out)
        if (
            eqn is None
            or eqn.primitive.name not in ("mul", "div")
            or any(map(functools.partial(self.odd, out), range(len(shape_of(out)))))
        ):
            return None
        fn = lax.mul if eqn.primitive.name == "mul" else lax.div
        for x, number in (eqn.invars, eqn.invars[::-1])[: 1 + (fn is lax.mul)]:
            fill = fill_of(number, self.made) if shape_of(number) else number
            if fill is not None and not compat.is_literal(x) and shape_of(x) == shape_of(out):
                value = constant(fill, self.made)
                keeps_zeros = value is not None and np.isfinite(value) and (fn is lax.mul or value != 0)
                return Scaled(x, fill, fn, bool(keeps_zeros))
        return None

    def homes_of(self, atom: Atom) -> tuple[Home, ...]:
        found = None if compat.is_literal(atom) else self.homes.get(atom)
        return found or tuple(Home(n) for n in shape_of(atom))

    def odd(self, atom: Atom, d: int) -> bool:
        return self.homes_of(atom)[d].size != shape_of(atom)[d]

    def moves_of(self, atom: Atom) -> Moved | None:
        """A value as a sum of terms, for its readers. None if it is one of its own: nobody moves the terms of a sum
        again that has the size of its home."""
        found = None if compat.is_literal(atom) else self.moved.get(atom)
        if found is None or (len(found.terms) > 1 and not any(self.odd(atom, d) for d in range(len(found.shape)))):
            return None
        return found

    def terms_of(self, atom: Atom) -> Moved | None:
        """A value as a sum of terms; if none are known, one term that is the value. None if it is a literal."""
        if compat.is_literal(atom):
            return None
        shape = shape_of(atom)
        return self.moves_of(atom) or Moved(shape, (Term(atom, tuple(((0, 0, n),) for n in shape)),), False)


# --- ranges of one array ----------------------------------------------------------------------------------------------


def _sliced(facts: Facts, eqn: Eqn) -> Moved | None:
    (x,), starts, limits = eqn.invars, eqn.params["start_indices"], eqn.params["limit_indices"]
    if any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    found = facts.terms_of(x)
    return found and found.seen(tuple(zip(starts, limits, strict=True)))


def _padded(facts: Facts, eqn: Eqn) -> Moved | None:
    x, config = eqn.invars[0], eqn.params["padding_config"]
    if any(c[2] for c in config) or not is_zero(eqn.invars[1], facts.made):
        return None
    found = facts.terms_of(x)
    box = tuple((-int(low), n + int(high)) for (low, high, _), n in zip(config, shape_of(x), strict=True))
    return found and found.seen(box)._replace(joins=True)


def _joined(facts: Facts, eqn: Eqn) -> Moved | None:
    d, begin = eqn.params["dimension"], 0
    terms: list[Term] = []
    for a in eqn.invars:
        part = facts.terms_of(a)
        if part is None:
            return None
        terms += part.placed(d, begin)
        begin += shape_of(a)[d]
    return sum_of(shape_of(eqn.outvars[0]), terms) if len({t.source for t in terms}) == 1 else None


def _reversed(facts: Facts, eqn: Eqn) -> Moved | None:
    """A few rows in opposite order, as reflecting padding has them: one range for each row."""
    found = facts.terms_of(eqn.invars[0])
    if found is None or any(found.shape[d] > MOST_RANGES for d in eqn.params["dimensions"]):
        return None
    for d in eqn.params["dimensions"]:
        last, terms = found.shape[d] - 1, list[Term]()
        for t in found.terms:
            rows = [(last - at - i, start + i) for at, start, stop in t.along[d] for i in range(stop - start)]
            terms.append(t._replace(along=with_ranges(t.along, d, merged([(at, i, i + 1) for at, i in rows]))))
        found = found._replace(terms=tuple(terms))
    return found


def _repeated(facts: Facts, eqn: Eqn) -> Moved | None:
    """A row that is repeated, as padding does: reshape[3, 9] broadcast[1, 3, 9] row[1, 9]."""
    above = None if compat.is_literal(eqn.invars[0]) else facts.made.get(eqn.invars[0])
    if above is None or above.primitive.name != "broadcast_in_dim":
        return None
    row, wide, shape = shape_of(above.invars[0]), shape_of(above.outvars[0]), shape_of(eqn.outvars[0])
    added = [d for d in range(len(wide)) if d not in above.params["broadcast_dimensions"]]
    grown = [d for d, (k, n) in enumerate(zip(row, shape, strict=False)) if k != n]
    if len(shape) != len(row) or len(added) != 1 or len(grown) != 1 or added[0] - grown[0] not in (0, 1):
        return None
    (d,), found = grown, facts.terms_of(above.invars[0])
    if found is None or row[d] != 1 or shape[d] > MOST_RANGES or wide[added[0]] != shape[d]:
        return None
    terms = [
        t._replace(along=with_ranges(t.along, d, tuple((i, r[1], r[2]) for i in range(shape[d]) for r in t.along[d])))
        for t in found.terms
    ]
    return Moved(shape, tuple(terms), True)


def _added(facts: Facts, eqn: Eqn) -> Moved | None:
    """The sum of two values that are sums of terms, as in gradients of slices, rotations and repeating padding."""
    known = [m for a in eqn.invars if not compat.is_literal(a) and (m := facts.moved.get(a)) is not None]
    if len(known) != 2:
        return None
    return sum_of(known[0].shape, (*known[0].terms, *known[1].terms))


_MOVERS: Final[Mapping[str, Callable[[Facts, Eqn], Moved | None]]] = {
    "slice": _sliced, "pad": _padded, "concatenate": _joined, "add": _added, "add_any": _added,
    "rev": _reversed, "reshape": _repeated,
}  # fmt: skip


# --- ways up ----------------------------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """A recipe: the computation of a view from views of other values.

    Attributes:
      reads: the values that it reads, and the view of each.
      fn: a JAX function of these views. None if the only view is the result itself.
      eqn: the equation that is applied to these views instead of `fn`.
      like: the equation whose source line the new equations get.
    """

    reads: list[tuple[Atom, Box]]
    fn: Callable[..., Any] | None = None
    eqn: Eqn | None = None
    like: Eqn | None = None


class ViewWay(NamedTuple):
    """The way of views through an operation.

    Attributes:
      homes: the homes of its result.
      up: the recipe of a view of its result.
      begins: whether a composition begins at its whole result.
    """

    homes: Callable[[Facts, Eqn], Sequence[Home]]
    up: Callable[[Facts, Eqn, Box], Recipe]
    begins: Callable[[Facts, Eqn], bool] = lambda facts, eqn: False


def way_of(eqn: Eqn) -> ViewWay | None:
    """The way through an operation. None if views do not pass it."""
    found = WAYS.get(eqn.primitive.name)
    if found is not None or len(eqn.outvars) != 1 or eqn.effects or not eqn.invars:
        return found
    return ELEMENTWISE if family_of(eqn.primitive.name) == "elementwise" else None


def _same_homes(facts: Facts, eqn: Eqn) -> Sequence[Home]:
    """The homes of an elementwise result: those of its odd operands."""
    out = shape_of(eqn.outvars[0])
    found = [Home(n) for n in out]
    for a in eqn.invars:
        if shape_of(a) == out:
            for d, (old, new) in enumerate(zip(found, facts.homes_of(a), strict=True)):
                if old.size == out[d]:
                    found[d] = new
                elif old.size == new.size:
                    found[d] = Home(old.size, min(old.first, new.first), max(old.last, new.last))
    return found


def _same_views(facts: Facts, eqn: Eqn, box: Box) -> Recipe:
    out = shape_of(eqn.outvars[0])
    reads = [(a, box if shape_of(a) == out else full(a)) for a in eqn.invars]
    return Recipe(reads, eqn=eqn, like=eqn)


ELEMENTWISE: Final = ViewWay(_same_homes, _same_views)


def _strides(eqn: Eqn) -> Sequence[int]:
    return eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])


def _slice_homes(facts: Facts, eqn: Eqn) -> Sequence[Home]:
    cuts = zip(
        facts.homes_of(eqn.invars[0]), eqn.params["start_indices"], _strides(eqn), shape_of(eqn.outvars[0]), strict=True
    )
    return [h.moved(start) if step == 1 else Home(n) for h, start, step, n in cuts]


def _slice_up(facts: Facts, eqn: Eqn, box: Box) -> Recipe:
    """The recipe of a view of a slice. Dimensions with a stride are sliced after the view is read."""
    (x,), out = eqn.invars, eqn.outvars[0]
    starts, limits, steps = eqn.params["start_indices"], eqn.params["limit_indices"], _strides(eqn)
    above = tuple(
        (low + start, high + start) if step == 1 else (0, size)
        for (low, high), start, step, size in zip(box, starts, steps, shape_of(x), strict=True)
    )
    if all(s == 1 for s in steps):
        return Recipe([(x, above)], like=eqn)
    assert all(steps[d] == 1 for d in cut_dims(out, box))
    cut = [
        (0, hi - lo, 1) if k == 1 else (s, e, k) for (lo, hi), s, e, k in zip(above, starts, limits, steps, strict=True)
    ]
    return Recipe([(x, above)], lambda v: lax.slice(v, *([c[i] for c in cut] for i in range(3))), like=eqn)


def _slice_begins(facts: Facts, eqn: Eqn) -> bool:
    """Whether a slice is of an array longer than its home, or has the size of the home again."""
    x, out = eqn.invars[0], shape_of(eqn.outvars[0])
    for d, (h, n) in enumerate(zip(facts.homes_of(x), shape_of(x), strict=True)):
        if h.size != n != out[d] and (n > h.size or out[d] == h.size) and _strides(eqn)[d] == 1:
            return True
    return False


def _pad_homes(facts: Facts, eqn: Eqn) -> Sequence[Home]:
    pairs = zip(facts.homes_of(eqn.invars[0]), eqn.params["padding_config"], shape_of(eqn.outvars[0]), strict=True)
    return [Home(n) if inner else h.moved(-int(low)) for h, (low, _, inner), n in pairs]


def _pad_up(facts: Facts, eqn: Eqn, box: Box) -> Recipe:
    x, value = eqn.invars
    size = shape_of(x)
    config: list[tuple[int, int, int]] = [(int(a), int(b), int(c)) for a, b, c in eqn.params["padding_config"]]
    above = tuple(
        (lo, hi) if inner else (lo - low, hi - low) for (lo, hi), (low, _, inner) in zip(box, config, strict=True)
    )
    if not any(facts.odd(x, d) for d in range(len(box)) if above[d] != (0, size[d])):
        widths = [c if c[2] else (-lo, hi - n, 0) for c, (lo, hi), n in zip(config, above, size, strict=True)]
        return Recipe([(x, full(x)), (value, ())], lambda v, fill: padded(v, fill, widths), like=eqn)
    assert not any(c[2] for c in config)
    outside = [(d, -lo, n - lo) for d, ((lo, hi), n) in enumerate(zip(above, size, strict=True)) if lo < 0 or hi > n]

    def filled(v: Any, fill: Any) -> Any:
        return lax.select(within(v.shape, outside), v, lax.broadcast(fill, v.shape)) if outside else v

    return Recipe([(x, above), (value, ())], filled, like=eqn)


def _pad_begins(facts: Facts, eqn: Eqn) -> bool:
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


def _join_homes(facts: Facts, eqn: Eqn) -> Sequence[Home]:
    """The homes of a concatenation: those of its longest operand."""
    d = eqn.params["dimension"]
    sizes = [shape_of(a)[d] for a in eqn.invars]
    i = int(np.argmax(sizes))
    return [h.moved(-sum(sizes[:i])) if k == d else h for k, h in enumerate(facts.homes_of(eqn.invars[i]))]


def _join_up(facts: Facts, eqn: Eqn, box: Box) -> Recipe:
    """The recipe of a view of a concatenation: a select between views of the operands."""
    d, begin = eqn.params["dimension"], 0
    (lo, hi), reads, made, ends = box[d], [], [], []
    for a in eqn.invars:
        n = shape_of(a)[d]
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


def _part(facts: Facts, a: Atom, box: Box, d: int, begin: int) -> tuple[tuple[Atom, Box], Any]:
    """The view that is read of an operand of a concatenation that begins at `begin`, and how it becomes the result."""
    (lo, hi), n = box[d], shape_of(a)[d]
    if n * FEW < hi - lo and not compat.is_literal(a):
        found = facts.moved.get(a)
        if found is not None and set(cut_dims(a, box)) <= {d, *found.dims}:
            at = tuple((lo - begin, hi - begin) if k == d else side for k, side in enumerate(box))
            if len(reads := reads_of(facts, found, at)) == 1:
                return (reads[0].source, reads[0].box), reads[0].of
        if n <= MOST_ROWS:
            view = tuple((0, n) if k == d else side for k, side in enumerate(box))
            return (a, view), lambda x: _rows_at(x, d, begin - lo, hi - lo)
    return (a, tuple((lo - begin, hi - begin) if k == d else side for k, side in enumerate(box))), None


def _rows_at(x: Any, d: int, at: int, size: int) -> Any:
    """A few rows at their positions in a larger array, whose other elements are undefined. Rows that every device holds
    whole are not sent."""
    shape = (*x.shape[:d], size, *x.shape[d + 1 :])
    rows = [
        lax.broadcast_in_dim(lax.slice_in_dim(x, i, i + 1, axis=d), shape, range(len(shape))) for i in range(x.shape[d])
    ]
    whole = rows[-1]
    for i in reversed(range(len(rows) - 1)):
        if at + i + 1 > 0:
            whole = lax.select(within(shape, [(d, 0, at + i + 1)]), rows[i], whole)
    return whole


def _join_begins(facts: Facts, eqn: Eqn) -> bool:
    d = eqn.params["dimension"]
    return any(facts.odd(a, d) for a in eqn.invars)


def _dims_way(along: Callable[[Eqn], Sequence[int | None]], made: Callable[..., Any]) -> ViewWay:
    """The way through an operation whose dimension d is dimension `along(eqn)[d]` of its operand."""

    def homes(facts: Facts, eqn: Eqn) -> Sequence[Home]:
        above = facts.homes_of(eqn.invars[0])
        return [Home(n) if k is None else above[k] for k, n in zip(along(eqn), shape_of(eqn.outvars[0]), strict=True)]

    def up(facts: Facts, eqn: Eqn, box: Box) -> Recipe:
        view = list(full(eqn.invars[0]))
        for side, k in zip(box, along(eqn), strict=True):
            if k is not None:
                view[k] = side
        shape = tuple(hi - lo for lo, hi in box)
        return Recipe([(eqn.invars[0], tuple(view))], lambda x: made(eqn, x, shape), like=eqn)

    return ViewWay(homes, up)


def _of_broadcast(eqn: Eqn) -> Sequence[int | None]:
    found: list[int | None] = [None] * len(shape_of(eqn.outvars[0]))
    for k, d in enumerate(eqn.params["broadcast_dimensions"]):
        if shape_of(eqn.invars[0])[k] == shape_of(eqn.outvars[0])[d]:
            found[d] = k
    return found


def _of_ones(eqn: Eqn) -> Sequence[int | None]:
    """The operand's dimensions of a reshape that only adds and removes dimensions of size 1; all None for any other."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
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


def _convolution_homes(facts: Facts, eqn: Eqn) -> Sequence[Home]:
    x, kernel = eqn.invars
    p, found = compat.params_of(eqn), [Home(n) for n in shape_of(eqn.outvars[0])]
    sides = zip(_space(eqn).items(), p["padding"], p["rhs_dilation"], strict=False)
    for (d, (out, k)), (low, _), dilation in sides:
        home = facts.homes_of(x)[d]
        found[out] = home.moved((shape_of(kernel)[k] - 1) * dilation // 2 - int(low))
    return found


def _convolution_up(facts: Facts, eqn: Eqn, box: Box) -> Recipe:
    """The recipe of a view of a convolution: the convolution with other padding."""
    out, p = eqn.outvars[0], compat.params_of(eqn)
    padding = [tuple(map(int, side)) for side in p["padding"]]
    for i, (d, _) in enumerate(_space(eqn).values()):
        padding[i] = (padding[i][0] - box[d][0], padding[i][1] + box[d][1] - shape_of(out)[d])
    if any(side < 0 for pair in padding for side in pair):
        return shifted(out, full(out), box, eqn)
    other = eqn.replace(params={**eqn.params, "padding": tuple(padding)})
    return Recipe([(a, full(a)) for a in eqn.invars], eqn=other, like=eqn)


def convolved(facts: Facts, eqn: Eqn) -> Recipe | None:
    """The recipe of a convolution of an array with wrapped or repeated padding: it reads ranges of the array. None for
    any other."""
    (x, kernel), p = eqn.invars, compat.params_of(eqn)
    spatial = p["dimension_numbers"].lhs_spec[2:]
    above = None if compat.is_literal(x) else facts.made.get(x)
    wider = above is not None and above.primitive.name == "broadcast_in_dim" and adds_ones(above)
    inner = above.invars[0] if above is not None and wider else x
    at = above.params["broadcast_dimensions"] if above is not None and wider else range(len(shape_of(x)))
    moved = facts.moves_of(inner)
    if moved is None or not moved.joins or len(moved.terms) != 1 or any(n != 1 for n in p["lhs_dilation"]):
        return None
    source, along = moved.terms[0]
    joined = {at[d]: (moved.shape[d], along[d]) for d in moved.dims}
    if not set(joined) <= set(spatial) or any(facts.odd(source, d) for d in moved.dims):
        return None
    shape = list(shape_of(x))
    for d in moved.dims:
        shape[at[d]] = shape_of(source)[d]
    params = {**eqn.params, "joined": tuple(joined.get(d) for d in spatial)}

    def made(value: Any, kernel: Any) -> Any:
        return conv_of_ranges_p.bind(lax.broadcast_in_dim(value, shape, at) if wider else value, kernel, **params)

    return Recipe([(source, full(source)), (kernel, full(kernel))], made, like=eqn)


WAYS: Final[Mapping[str, ViewWay]] = {
    "slice": ViewWay(_slice_homes, _slice_up, _slice_begins),
    "pad": ViewWay(_pad_homes, _pad_up, _pad_begins),
    "concatenate": ViewWay(_join_homes, _join_up, _join_begins),
    "transpose": _dims_way(
        lambda eqn: eqn.params["permutation"], lambda eqn, x, shape: lax.transpose(x, eqn.params["permutation"])
    ),
    "broadcast_in_dim": _dims_way(
        _of_broadcast, lambda eqn, x, shape: lax.broadcast_in_dim(x, shape, eqn.params["broadcast_dimensions"])
    ),
    "reshape": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
    "squeeze": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
    "conv_general_dilated": ViewWay(_convolution_homes, _convolution_up),
    "reduce_sum": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
    "expand_dims": _dims_way(_of_ones, lambda eqn, x, shape: lax.reshape(x, shape)),
}


def shifted(out: Var, held: Box, box: Box, eqn: Eqn | None) -> Recipe:
    """The recipe that shifts the view `held` of a value to the view `box`."""
    widths = [(h[0] - lo, hi - h[1], 0) for h, (lo, hi) in zip(held, box, strict=True)]
    return Recipe([(out, held)], lambda x: padded(x, np.zeros((), x.dtype), widths), like=None)


class Read(NamedTuple):
    """A view that is read of the array of a term, the ranges of it, as (dimension, size, ranges), and what these are
    scaled by."""

    source: Var
    box: Box
    ranges: tuple[tuple[int, int, Ranges], ...]
    scaled: Scaled | None = None

    @property
    def views(self) -> list[tuple[Atom, Box]]:
        return [(self.source, self.box), *([] if self.scaled is None else [(self.scaled.number, ())])]

    def of(self, x: Any, number: Any = None) -> Any:
        for dim, size, ranges in self.ranges:
            x = from_ranges(x, dim, size, ranges)
        if self.scaled is None:
            return x
        value = self.scaled.fn(x, lax.broadcast(number, x.shape))
        if self.scaled.keeps_zeros:
            return value
        covered = [(d, r[0][0], r[-1][0] + r[-1][2] - r[-1][1]) for d, _, r in self.ranges]
        return lax.select(within(x.shape, covered), value, lax.full_like(x, 0))

    def of_copies(self, facts: Facts) -> Read:
        """The read of another array, if this one is one of several scaled copies of it: what is sent of it serves all.
        Else this read."""
        scaled = facts.scaled.get(self.source)
        if scaled is None or facts.copies[scaled.source] < 2:
            return self
        whole = all(a[0] + a[2] - a[1] == b[0] for _, _, ranges in self.ranges for a, b in pairwise(ranges))
        return self._replace(source=scaled.source, scaled=scaled) if scaled.keeps_zeros or whole else self


def reads_of(facts: Facts, moved: Moved, box: Box) -> list[Read]:
    """The views that a view of a sum of terms reads. Of an elementwise result that has not the size of its home, ranges
    are read in views that have: each computes it again."""
    dims, found = moved.dims, list[Read]()
    light = lambda x: (eqn := facts.made.get(x)) is not None and way_of(eqn) is ELEMENTWISE  # noqa: E731
    for source, along in moved.seen(box).terms:
        reads = [Read(source, (), ())]
        for d, (ranges, (lo, hi), n) in enumerate(zip(along, box, shape_of(source), strict=True)):
            home = facts.homes_of(source)[d] if light(source) else Home(n)
            views = _by_views(ranges, n, home) if d in dims else {}
            parts = {side: ((d, hi - lo, r),) for side, r in views.items()} or {(lo, hi): ()}
            reads = [Read(source, (*r.box, side), (*r.ranges, *more)) for r in reads for side, more in parts.items()]
        found += reads
    return found


def _by_views(ranges: Ranges, n: int, home: Home) -> dict[tuple[int, int], Ranges]:
    """Ranges of a dimension of `n` elements by views of the size of its home, as near as can be to where they stand."""
    size, low, high = home.size, min(0, n - home.size), max(0, n - home.size)
    if any(stop - start > size for _, start, stop in ranges):
        return {(0, n): ranges}
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for at, start, stop in ranges:
        lo = min(max(start - at, low, stop - size), high, start) if size < n else min(max(start - at, low), high)
        found.setdefault((lo, lo + size), []).append((at, start - lo, stop - lo))
    return {side: tuple(r) for side, r in found.items()}


def terms_of(facts: Facts, moved: Moved, box: Box, eqn: Eqn | None) -> Recipe:
    """The recipe of a view of a sum of terms."""
    reads = [r.of_copies(facts) for r in reads_of(facts, moved, box)]

    def added(*values: Any) -> Any:
        left = iter(values)
        return functools.reduce(lax.add, [r.of(*(next(left) for _ in r.views)) for r in reads])

    return Recipe([view for r in reads for view in r.views], added, like=eqn)
