"""Rows that come from the same rows of an array as long as the result: a stack whose halves are changed in place.

    concatenate s[:1] (rev[1] s[1:])  -->  select (i < 1) s (rev[1] s)
    s.at[1].set(f(s[1]))              -->  select (i == 1) (f s) s

What is done to some rows is done to all of them, and each row takes what belongs to it. Then a device that holds some
of the rows needs no others, and XLA fuses the choice with what makes its operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.passes.rewrite.windows.static_windows import Write
from shardc.sbp.signature import family_of, is_extended

Step: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Any]
"""A value, of those that are read and of those that were made before."""
MOST_TERMS: Final = 4
"""Parts of a result, at most: all of them are made of all rows."""
MOST_STEPS: Final = 64
"""Operations on some rows that are looked at."""


@dataclass
class AllRows:
    """What is done to rows `begin` to `begin + count` of arrays, done to all of their `size` rows.

    A value with these rows has a dimension of `count` elements for them; a single row may have none.

    Attributes:
      made: the equation that computes each variable.
      reads: the values that it is made of.
      steps: the values that are made of them, one after the other.
      known: the number of the step that makes a value with all rows along a dimension; None if none does.
      found: whether rows of an array are among `reads`.
    """

    begin: int
    count: int
    size: int
    made: Mapping[Var, Eqn]
    reads: list[Atom] = field(default_factory=list[Atom])
    steps: list[Step] = field(default_factory=list[Step])
    known: dict[tuple[Var, int, bool], int | None] = field(default_factory=dict[tuple[Var, int, bool], "int | None"])
    found: bool = False

    def of(self, atom: Atom, dim: int, kept: bool = True) -> int | None:
        """The step that makes a value with all rows along dimension `dim`, which `atom` itself has if it is `kept`.
        None if it is not made of the same rows of an array."""
        if compat.is_literal(atom):
            return self._made(atom, dim, kept)
        key = atom, dim, kept
        if key not in self.known:
            self.known[key] = None
            if len(self.known) <= MOST_STEPS:
                self.known[key] = self._made(atom, dim, kept)
        return self.known[key]

    def values(self, reads: Sequence[Any]) -> list[Any]:
        """The results of all steps."""
        done = list[Any]()
        for step in self.steps:
            done.append(step(reads, done))
        return done

    def _made(self, atom: Atom, dim: int, kept: bool) -> int | None:
        if compat.is_literal(atom) or not atom.aval.shape:
            return None if atom.aval.shape else self._read(atom)
        eqn = self.made.get(atom)
        if eqn is None or not eqn.invars:
            return None if kept else self._repeated(atom, dim)
        if is_extended(atom.aval.dtype) or eqn.effects:
            return None
        match eqn.primitive.name:
            case "slice":
                return self._sliced(eqn, dim, kept)
            case "squeeze":
                return self._squeezed(eqn, dim, kept)
            case "unstack":
                return self._unstacked(eqn, eqn.outvars.index(atom), dim, kept)
            case "broadcast_in_dim":
                return self._broadcast(eqn, dim, kept)
            case "rev" | "transpose":
                return self._turned(eqn, dim, kept)
            case name if family_of(name) == "elementwise" and name != "bitcast_convert_type":
                return self._elementwise(eqn, dim, kept)
            case _:
                return None

    def _step(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def _then(self, made: int | None, change: Callable[[Any], Any]) -> int | None:
        return None if made is None else self._step(lambda _, done: change(done[made]))

    def _read(self, atom: Atom) -> int:
        if compat.is_literal(atom):
            return self._step(lambda reads, done: np.asarray(atom.val, atom.aval.dtype))
        k = len(self.reads)
        self.reads.append(atom)
        return self._step(lambda reads, done: reads[k])

    def _repeated(self, atom: Atom, dim: int) -> int | None:
        shape = (*atom.aval.shape[:dim], self.size, *atom.aval.shape[dim:])
        dims = [d + (d >= dim) for d in range(len(atom.aval.shape))]
        return self._then(self._read(atom), lambda x: lax.broadcast_in_dim(x, shape, dims))

    def _sliced(self, eqn: Eqn, dim: int, kept: bool) -> int | None:
        (x,), p = eqn.invars, eqn.params
        rank = len(x.aval.shape)
        cuts = list(zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * rank, strict=True))
        here = kept and cuts[dim] == (self.begin, self.begin + self.count, 1) and x.aval.shape[dim] == self.size
        if kept and not here and cuts[dim] != (0, x.aval.shape[dim], 1):
            return None
        whole = (0, self.size, 1)
        cuts = [*cuts[:dim], whole, *cuts[dim + kept :]]
        self.found |= here
        made = self._read(x) if here else self.of(x, dim, kept)
        return self._then(made, lambda x: lax.slice(x, *([c[i] for c in cuts] for i in range(3))))

    def _squeezed(self, eqn: Eqn, dim: int, kept: bool) -> int | None:
        (x,), gone = eqn.invars, set(eqn.params["dimensions"])
        left = [d for d in range(len(x.aval.shape)) if d not in gone]
        if kept:
            return self._then(self.of(x, left[dim]), lambda x: lax.squeeze(x, sorted(gone)))
        rows = [row for row in sorted(gone) if self.count == 1 and sum(d < row for d in left) == dim]
        found = ((row, made) for row in rows if (made := self.of(x, row)) is not None)
        row, made = next(found, (0, None))
        return self._then(made, lambda x: lax.squeeze(x, sorted(gone - {row})))

    def _unstacked(self, eqn: Eqn, number: int, dim: int, kept: bool) -> int | None:
        here = not kept and (eqn.params["axis"], number, len(eqn.outvars)) == (dim, self.begin, self.size)
        self.found |= here
        return self._read(eqn.invars[0]) if here else None

    def _turned(self, eqn: Eqn, dim: int, kept: bool) -> int | None:
        (x,), p = eqn.invars, eqn.params
        if eqn.primitive is lax.rev_p:
            dims = tuple(d + (not kept and d >= dim) for d in p["dimensions"])
            return None if kept and dim in dims else self._then(self.of(x, dim, kept), lambda x: lax.rev(x, dims))
        order = p["permutation"]
        if kept:
            return self._then(self.of(x, order[dim]), lambda x: lax.transpose(x, order))
        order = [d + (d >= dim) for d in order]
        order.insert(dim, dim)
        return self._then(self.of(x, dim, kept), lambda x: lax.transpose(x, order))

    def _broadcast(self, eqn: Eqn, dim: int, kept: bool) -> int | None:
        x, into = eqn.invars[0], list(eqn.params["broadcast_dimensions"])
        shape = list(eqn.outvars[0].aval.shape)
        inside = kept and dim in into and bool(x.aval.shape[into.index(dim)] == self.count)
        shape = [*shape[:dim], self.size, *shape[dim + kept :]]
        if not kept:
            into = [d + (d >= dim) for d in into]
        if inside:
            return self._then(self.of(x, into.index(dim)), lambda x: lax.broadcast_in_dim(x, shape, into))
        if not x.aval.shape:
            return self._then(self._read(x), lambda x: lax.broadcast_in_dim(x, shape, into))
        if dim in into or (kept and self.count != 1):
            return None
        at = sum(d < dim for d in into)
        into = [*into[:at], dim, *into[at:]]
        return self._then(self.of(x, at, kept=False), lambda x: lax.broadcast_in_dim(x, shape, into))

    def _elementwise(self, eqn: Eqn, dim: int, kept: bool) -> int | None:
        shape = eqn.outvars[0].aval.shape
        one = [kept and self.count != 1 and bool(a.aval.shape) and a.aval.shape[dim] == 1 for a in eqn.invars]
        made = [self._read(a) if same else self.of(a, dim, kept) for a, same in zip(eqn.invars, one, strict=True)]
        parts = [m for m in made if m is not None]
        if len(parts) < len(made):
            return None
        shape = (*shape[:dim], self.size, *shape[dim + kept :])

        def work(_: Sequence[Any], done: Sequence[Any]) -> Any:
            operands = [lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in (done[m] for m in parts)]
            return eqn.primitive.bind(*operands, **eqn.params)

        return self._step(work)


class Parts(NamedTuple):
    """Parts of a result that lie one beside the other along a dimension.

    Attributes:
      rows: the parts, and where each begins.
      size: rows of the result.
      old: what is between them, a scalar or an array. None: nothing.
      combine: how old and new elements are joined, as in `Write`.
      kept: whether the parts have the dimension; a row of a stack has not.
    """

    dim: int
    rows: Sequence[tuple[Atom, int]]
    size: int
    old: Atom | None = None
    combine: Any = None
    kept: bool = True

    def count(self, part: Atom) -> int:
        return part.aval.shape[self.dim] if self.kept else 1


def parts_of(eqn: Eqn, write: Write | None) -> Parts | None:
    """The parts of a concatenation, a stack, a padded value, and of an array that `eqn` writes into, along one
    dimension. None for all else."""
    shape, p = eqn.outvars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case _ if write is not None:
            dims = [d for d, (n, k) in enumerate(zip(shape, write.update.aval.shape, strict=True)) if n != k]
            rows = [(write.update, write.starts[d]) for d in dims]
            return Parts(dims[0], rows, shape[dims[0]], write.x, write.combine) if len(dims) == 1 else None
        case "pad":
            config = [tuple(map(int, c)) for c in p["padding_config"]]
            dims = [d for d, c in enumerate(config) if any(c)]
            if len(dims) != 1 or min(config[dims[0]]) < 0 or config[dims[0]][2]:
                return None
            return Parts(dims[0], [(eqn.invars[0], config[dims[0]][0])], shape[dims[0]], eqn.invars[1])
        case "concatenate":
            d = p["dimension"]
            begins = itertools.accumulate((a.aval.shape[d] for a in eqn.invars[:-1]), initial=0)
            return Parts(d, list(zip(eqn.invars, begins, strict=True)), shape[d])
        case "stack":
            rows = [(a, k) for k, a in enumerate(eqn.invars)]
            return Parts(p["axis"], rows, shape[p["axis"]], kept=False)
        case _:
            return None


def in_place(atom: Atom, begin: int, parts: Parts, made: Mapping[Var, Eqn]) -> AllRows | None:
    """What a part that begins at `begin`, and all rows around it, are made of: the last step makes them. None if it is
    not made of the same rows of arrays as long as the result, or has few of them."""
    rows = AllRows(begin, parts.count(atom), parts.size, made)
    if parts.size > MOST_TERMS * rows.count:
        return None
    return rows if rows.of(atom, parts.dim, parts.kept) is not None and rows.found else None
