"""Composes windows: slices, padding, concatenations and writes of one array become one window of it.

    q = pad u (1, 1); q[2:] + q[:-2]         -->  pad u (-1, 1) + pad u (1, -1)
    u.at[1:-1].set(f(u[2:], u[:-2]))         -->  select (1 <= i < n - 1) (f (pad u (-1, 1)) (pad u (1, -1))) u
    u.at[1:-1].set(0)                        -->  select (1 <= i < n - 1) 0 u
    concatenate u[-1:] u[:-1]                -->  join_ranges u

Arrays of length n, n + 2 and n - 2 that are split over the same devices are cut at different places, and every device
sends the elements between these places. To avoid this, values are read as *views*. A view is the elements lo ... hi - 1
of a value along each dimension; lo may be negative and hi beyond the end of the value, and the elements outside are
undefined. A view of an elementwise result is the same view of its operands; a view of a slice or of a padded array is
another view of the operand.

There are two sweeps. The forward sweep finds for each dimension of a value its *home*: the size of the array that the
value comes from, and the position of its elements there. A dimension whose size is not that of its home is *odd*. The
backward sweep finds the views that are read of each value. A view along odd dimensions is replaced by views of the
operands; for any other view the whole value is computed and then shifted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import in_bodies
from shardc.ir.program import Program
from shardc.ir.walk import renamed
from shardc.passes import Context
from shardc.passes.rewrite.windows.in_place import in_place, parts_of
from shardc.passes.rewrite.windows.range_sums import Box, Moved, cut_dims, edges_of, full, shape_of
from shardc.passes.rewrite.windows.static_windows import Write, constant, fill_of
from shardc.passes.rewrite.windows.window_ways import (
    ELEMENTWISE,
    WAYS,
    Facts,
    Recipe,
    convolved,
    reads_of,
    shifted,
    terms_of,
    way_of,
    within,
)
from shardc.sbp.rules.slicing import FEW
from shardc.sbp.signature import is_extended


def compose_windows(program: Program, _: Context) -> Program:
    """The program after composition; the same object if nothing changes."""
    jaxpr = composed(program.jaxpr)
    return program if jaxpr is program.jaxpr else program.after("compose_windows", jaxpr)


def composed(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr and its nested bodies after composition; the same object if nothing changes."""
    eqns = [in_bodies(e, composed) for e in jaxpr.eqns]
    facts = Facts()
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


@dataclass
class _Views:
    """The views that a jaxpr reads, and their recipes.

    Attributes:
      facts: the facts about the values of the jaxpr.
      wanted: the views that are read of each variable, in the order in which the backward sweep found them.
      recipes: the recipe of each view. A view without one is the whole value, computed by its own equation.
      composes: whether at least one recipe composes windows.
      made: the atom that holds each view which the new equations compute.
      eqns: the new equations.
    """

    facts: Facts
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
        """Find all views that are read: the backward sweep."""
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
        """Choose a recipe for each view that is read of a variable."""
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
        """The recipe of a view. None if the equation itself computes it."""
        seen = cut_dims(out, box)
        if not seen:
            found = None if eqn is None or len(eqn.outvars) > 1 else self._begun(eqn, out)
            self.composes |= found is not None
            return found
        if (out, box) in self.recipes:
            return self.recipes[out, box]
        if any(hi <= 0 or lo >= n for (lo, hi), n in zip(box, shape_of(out), strict=True)):  # it lies outside
            shape = tuple(hi - lo for lo, hi in box)
            return Recipe([], lambda: lax.full(shape, 0, out.aval.dtype), like=eqn)
        moved = self.facts.moved.get(out)
        odd = [d for d in seen if self.facts.odd(out, d)]
        if moved is not None and set(seen) <= {*odd, *moved.dims} and (found := self._of_ranges(moved, box, eqn)):
            return found
        if odd == seen and eqn is not None and (way := way_of(eqn)) is not None:
            return way.up(self.facts, eqn, box)
        inner = tuple(side if d in odd else (0, n) for d, (side, n) in enumerate(zip(box, shape_of(out), strict=True)))
        return shifted(out, inner if odd != seen else full(out), box, eqn)

    def _begun(self, eqn: Eqn, out: Var) -> Recipe | None:
        """The recipe of a whole result at which a composition begins. None if none begins there."""
        if (moved := self.facts.moved.get(out)) is not None and self._joins(moved, eqn, out):
            return terms_of(self.facts, moved, full(out), eqn)
        if (found := self._in_place(eqn, out)) is not None:
            return found
        if out in self.facts.writes:
            return self._written(self.facts.writes[out], eqn)
        way = WAYS.get(eqn.primitive.name)
        if eqn.primitive.name == "conv_general_dilated":
            return convolved(self.facts, eqn)
        if (
            way is None
            or not math.prod(shape_of(out))
            or is_extended(out.aval.dtype)
            or not way.begins(self.facts, eqn)
        ):
            return None
        return way.up(self.facts, eqn, full(out))

    def _joins(self, moved: Moved, eqn: Eqn, out: Var) -> bool:
        """Whether composing the terms of a whole result saves terms or operations."""
        sources = [zip(moved.shape, shape_of(t.source), strict=True) for t in moved.terms]
        if not moved.joins or any(n * FEW < size for pairs in sources for n, size in pairs):
            return False
        match eqn.primitive.name:
            case "concatenate":
                return True
            case "pad":
                return self.facts.moves_of(eqn.invars[0]) is not None
            case "slice":
                return True
            case _:
                known = [self.facts.moved.get(a) for a in eqn.invars if not compat.is_literal(a)]
                return len(moved.terms) < sum(len(m.terms) for m in known if m is not None)

    def _in_place(self, eqn: Eqn, out: Var) -> Recipe | None:
        """A result whose rows are made of the same rows of arrays as long, as a choice by position. None if it is not
        made so."""
        if not math.prod(shape_of(out)) or is_extended(out.aval.dtype):
            return None
        parts = parts_of(eqn, self.facts.writes.get(out))
        if parts is None:
            return None
        found = [in_place(part, begin, parts, self.facts.made) for part, begin in parts.rows]
        ways = [f for f in found if f is not None]
        if len(ways) < len(found):
            return None
        shape, olds = shape_of(out), [] if parts.old is None else [parts.old]

        def chosen(*values: Any) -> Any:
            old, rest = (
                (lax.broadcast(values[0], shape[: len(shape) - values[0].ndim]), values[1:]) if olds else (None, values)
            )
            for (part, begin), way in zip(parts.rows, ways, strict=True):
                new, rest = way.values(rest[: len(way.reads)])[-1], rest[len(way.reads) :]
                new = new if parts.combine is None else parts.combine(old, new)
                inside = within(shape, [(parts.dim, begin, begin + parts.count(part))])
                old = new if old is None else lax.select(inside, new, old)
            return old

        return Recipe([(a, full(a)) for a in (*olds, *(a for way in ways for a in way.reads))], chosen, like=eqn)

    def _written(self, write: Write, eqn: Eqn) -> Recipe | None:
        """A write as a select between the array and the update. None if the update is small."""
        x, update, starts, combine = write
        shape, size = shape_of(x), shape_of(update)
        parts = [d for d, (n, k) in enumerate(zip(shape, size, strict=True)) if n != k]
        if not parts or is_extended(x.aval.dtype):
            return None
        if any(size[d] * FEW < shape[d] for d in parts):
            return self._few_written(write, parts, eqn)
        if constant(update, self.facts.made) is not None:
            return None
        inside = [(d, starts[d], starts[d] + size[d]) for d in parts]
        fill = fill_of(update, self.facts.made)
        box = tuple((-s, n - s) for s, n in zip(starts, shape, strict=True))

        def written(old: Any, new: Any) -> Any:
            new = lax.broadcast(new, shape[: len(shape) - new.ndim])
            return lax.select(within(shape, inside), new if combine is None else combine(old, new), old)

        return Recipe([(x, full(x)), (update, box) if fill is None else (fill, ())], written, like=eqn)

    def _few_written(self, write: Write, parts: Sequence[int], eqn: Eqn) -> Recipe | None:
        """A write of a few rows that come from another array. None if they do not."""
        x, update, starts, combine = write
        moved = None if compat.is_literal(update) else self.facts.moved.get(update)
        if moved is None or moved.dims != parts:
            return None
        reads = reads_of(self.facts, moved, tuple((-s, n - s) for s, n in zip(starts, shape_of(x), strict=True)))
        if len(reads) > 1:
            return None
        inside = [(d, starts[d], starts[d] + shape_of(update)[d]) for d in parts]

        def written(old: Any, rows: Any) -> Any:
            new = reads[0].of(rows)
            return lax.select(within(old.shape, inside), new if combine is None else combine(old, new), old)

        return Recipe([(x, full(x)), (reads[0].source, reads[0].box)], written, like=eqn)

    def _of_ranges(self, moved: Moved, box: Box, eqn: Eqn | None) -> Recipe | None:
        """A view as a sum of terms, if along some dimension they are several ranges, or have few elements. None if it
        is one part in the middle of an array."""
        seen = moved.seen(box)
        for source, along in seen.terms:
            for d in moved.dims:
                n = shape_of(source)[d]
                if len(along[d]) == 1 and not self.facts.odd(source, d):
                    _, start, stop = along[d][0]
                    if edges_of(along[d][0], seen.shape[d], n) is None and (stop - start) * FEW >= n:
                        return None
        return terms_of(self.facts, moved, box, eqn) if seen.terms else None

    def _share(self, out: Var, eqn: Eqn) -> None:
        """Compute a value of which several views are read once, at the position of its home, and shift it for each."""
        if way_of(eqn) is not ELEMENTWISE or out in self.facts.moved:
            return
        homes, shape = self.facts.homes_of(out), shape_of(out)
        views = [
            b
            for b in self.wanted[out]
            if (seen := cut_dims(out, b))
            and all(self.facts.odd(out, d) and b[d][1] - b[d][0] == homes[d].size for d in seen)
        ]
        if len(views) < 2:
            return
        seen = sorted({d for b in views for d in cut_dims(out, b)})
        at = {d: (homes[d].first + homes[d].last) // 2 for d in seen}
        middle = tuple((-at[d], homes[d].size - at[d]) if d in at else (0, n) for d, n in enumerate(shape))
        for b in views:
            needed = [(max(lo, 0), min(hi, n)) for (lo, hi), n in zip(b, shape, strict=True)]
            holds = all(low <= lo and hi <= high for (lo, hi), (low, high) in zip(needed, middle, strict=True))
            if b != middle and holds:
                self.recipes[out, b] = shifted(out, middle, b, eqn)

    # forwards

    def write(self, eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
        """The new equations, and the results: the forward sweep that makes the views."""
        for eqn in eqns:
            plain = [v for v in eqn.outvars if (v, full(v)) in self.recipes]
            for v in plain:
                self.view(v, full(v), eqn)
            if not plain and (eqn.effects or any(full(v) in self.wanted.get(v, ()) for v in eqn.outvars)):
                invars = [self.view(a, full(a), eqn) for a in eqn.invars]
                self.eqns.append(eqn.replace(invars=invars))
        return self.eqns, [self.view(a, full(a), None) for a in outvars]

    def view(self, atom: Atom, box: Box, reader: Eqn | None) -> Atom:
        """The atom of a view. Its equations come before the first equation that reads it. Works without recursion."""
        todo = [(atom, box, reader)]
        while todo:
            a, b, like = todo[-1]
            if self._is_there(a, b):
                todo.pop()
                continue
            recipe = self.recipes[a, b]
            like = recipe.like if recipe.like is not None else like
            missing = [(x, seen, like) for x, seen in recipe.reads if not self._is_there(x, seen)]
            if missing:
                todo += reversed(missing)
                continue
            args = [x if compat.is_literal(x) else self.made.get((x, seen), x) for x, seen in recipe.reads]
            self.made[a, b] = self._emit(recipe, args, a, b, like)
        return atom if compat.is_literal(atom) else self.made.get((atom, box), atom)

    def _is_there(self, atom: Atom, box: Box) -> bool:
        """Whether a view exists already: it is the value itself, or was made before."""
        if compat.is_literal(atom) or (atom, box) in self.made:
            return True
        return (atom, box) not in self.recipes and not cut_dims(atom, box)

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
            invars = renamed(inner.invars, names)
            names |= zip(inner.outvars, outs, strict=True)
            self.eqns.append(compat.new_eqn(invars, outs, inner.primitive, inner.params, like))
        (out,) = closed.jaxpr.outvars
        return out if compat.is_literal(out) else names[out]
