"""Folds reversals into what runs along a dimension: running sums and scans.

    r = rev[0] x; s = cumsum[0] r; y = rev[0] s   -->   y = cumsum[0, reverse] x
    r = rev[0] x; c, s = scan c0 r; y = rev[0] s  -->   c, y = scan[reverse] c0 x

A sum from the end is written so in NumPy's words. A reversal along a split dimension sends every piece to another
device, and the running sum itself has a direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from jax import lax

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.loop import Loop
from shardc.ir.nested import in_bodies
from shardc.ir.walk import reads_of, renamed, with_atoms
from shardc.sbp.signature import family_of

_RUNNING: Final = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def fold_reversals(jaxpr: Jaxpr) -> Jaxpr:
    """The canonical jaxpr without pairs of reversals around running sums, elementwise operations and scans."""
    made = _folded_in(jaxpr)
    return made if made is jaxpr else compat.remove_dead(made, [True] * len(made.outvars))


def _folded_in(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without these pairs; equations that nobody reads any more are still in it."""
    eqns = [in_bodies(e, _folded_in) for e in jaxpr.eqns]
    names = dict[Var, Atom]()
    if any(e.primitive.name == "rev" for e in eqns):
        eqns = _scans_turned(eqns, jaxpr.outvars)
        eqns = _without_pairs(eqns, jaxpr.outvars, names)
    if not names and len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return compat.new_jaxpr(jaxpr.invars, renamed(jaxpr.outvars, names), eqns, jaxpr)


def _without_pairs(eqns: list[Eqn], results: Sequence[Atom], names: dict[Var, Atom]) -> list[Eqn]:
    """The equations, where a reversal of what is made of reversed values is made of these values themselves. `names`
    gets the new names of the reversals."""
    made_by = {v: e for e in eqns for v in e.outvars}
    reads = reads_of(eqns, results)
    left: list[Eqn] = []
    for old in eqns:
        eqn = with_atoms(old, names)
        if eqn.primitive.name == "rev" and not compat.is_literal(eqn.invars[0]):
            turned = _Reversal(tuple(eqn.params["dimensions"]), made_by, reads)
            found = turned.of(eqn.invars[0])
            if found is not None and turned.saved:
                left += [with_atoms(e, names) for e in turned.eqns]
                names[eqn.outvars[0]] = renamed([found], names)[0]
                continue
        left.append(eqn)
    return left


@dataclass
class _Reversal:
    """The reversal of a value along some dimensions, made without reversing.

    Attributes:
      dims: the dimensions.
      made_by, reads: of each value its equation, and how often it is read.
      eqns: those that make the reversed values.
      saved: whether a reversal was left out.
    """

    dims: tuple[int, ...]
    made_by: Mapping[Var, Eqn]
    reads: Mapping[Var, int]
    eqns: list[Eqn] = field(default_factory=list[Eqn])
    saved: bool = False

    def of(self, atom: Atom) -> Atom | None:
        """The reversed value; None if it has to be reversed."""
        if all(d >= len(atom.aval.shape) or atom.aval.shape[d] == 1 for d in self.dims):
            return atom
        eqn = None if compat.is_literal(atom) else self.made_by.get(atom)
        if eqn is None or compat.is_literal(atom):
            return None
        name = eqn.primitive.name
        if name == "rev":
            self.saved |= tuple(eqn.params["dimensions"]) == self.dims
            return eqn.invars[0] if tuple(eqn.params["dimensions"]) == self.dims else None
        if name == "broadcast_in_dim" and self._repeats(eqn):
            return atom
        if self.reads[atom] != 1 or len(eqn.outvars) != 1:
            return None
        params = eqn.params
        if name in _RUNNING:
            params = {**params, "reverse": params["reverse"] != (params["axis"] in self.dims)}
        elif family_of(name) != "elementwise" or name == "bitcast_convert_type":
            return None
        operands = [self.of(a) for a in eqn.invars]
        if any(a is None for a in operands):
            return None
        new = compat.fresh_var(atom.aval)
        self.eqns.append(eqn.replace(invars=[a for a in operands if a is not None], outvars=[new], params=params))
        return new

    def _repeats(self, eqn: Eqn) -> bool:
        """Whether a broadcast repeats its operand along the dimensions."""
        (x,), into = eqn.invars[:1], eqn.params["broadcast_dimensions"]
        return all(d not in into or x.aval.shape[into.index(d)] == 1 for d in self.dims)


def _scans_turned(eqns: list[Eqn], results: Sequence[Atom]) -> list[Eqn]:
    """The equations, where a scan over reversed rows, whose rows of results are reversed again, runs from the end."""
    made_by = {v: e for e in eqns for v in e.outvars}
    readers: dict[Var, list[Eqn]] = {}
    for eqn in eqns:
        for v in compat.variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    kept = set(compat.variables(results))
    return [new for e in eqns for new in _turned(e, made_by, readers, kept)]


def _turned(eqn: Eqn, made_by: Mapping[Var, Eqn], readers: Mapping[Var, list[Eqn]], kept: set[Var]) -> list[Eqn]:
    """A scan in the other direction with its rows of results reversed, if all of that is undone; else `eqn`."""
    if eqn.primitive.name != "scan":
        return [eqn]
    loop = Loop.of(eqn)
    sources = {v: None if compat.is_literal(a) else made_by.get(a) for v, a in loop.rows.items()}
    given = {v: e.invars[0] for v, e in sources.items() if e is not None and _turns_rows(e)}
    if not given or len(given) < len(sources):
        return [eqn]
    if any(v in kept or not all(map(_turns_rows, readers.get(v, ()))) for v in loop.stacks):
        return [eqn]
    fresh = {compat.fresh_var(v.aval): row for v, row in loop.stacks.items()}
    new = replace(loop, rows=given, stacks=fresh).equation()
    new = new.replace(params={**new.params, "reverse": not loop.reverse})
    return [new, *(_reversed(v, old, eqn) for v, old in zip(fresh, loop.stacks, strict=True))]


def _turns_rows(eqn: Eqn) -> bool:
    return eqn.primitive.name == "rev" and tuple(eqn.params["dimensions"]) == (0,)


def _reversed(x: Var, out: Var, like: Eqn) -> Eqn:
    return compat.new_eqn([x], [out], lax.rev_p, {"dimensions": (0,)}, like)
