"""The body of a microbatch loop as a sequence folded at the loss: forward equations, then backward ones.

JAX's gradient has its equations in the reverse order of the forward's. So the equations between two points of the
forward and the same two points of the backward form a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.loop import Loop
from shardc.ir.walk import ADDITIONS, LINEAR, bytes_of, reads_of
from shardc.pipeline.cut.cut_loop import CHEAP, CHEAP_DEPTH
from shardc.pipeline.cut.reassociate import sum_terms


@dataclass(frozen=True)
class FoldedBody:
    """The equations of a loop's body in the order of a microbatch.

    Attributes:
      loop: the loop.
      eqns: its equations; an equation that depends only on inputs comes right before its first reader.
      fold: the number of forward equations.
      sums: equations that only sum results of the loop: they do not count as readers, as each stage sums its
        own part.
      cheap: values that are recomputed wherever they are read, with the inputs that each needs for it.
      terms: for each sum over microbatches, the values that are added to it.
    """

    loop: Loop
    eqns: tuple[Eqn, ...]
    fold: int
    sums: frozenset[Eqn]
    cheap: Mapping[Var, frozenset[Var]]
    terms: tuple[tuple[Var, ...], ...]

    @cached_property
    def made(self) -> dict[Var, int]:
        """The place at which each value is made."""
        return {v: t for t, e in enumerate(self.eqns) for v in e.outvars}

    @cached_property
    def worked(self) -> list[int]:
        """The place to whose stage the work of each equation belongs: of a sum, where the last of its terms is made; of
        a cheap value, where it is first read."""
        found, first = list(range(len(self.eqns))), dict[Var, int]()
        for t, eqn in reversed([*enumerate(self.eqns)]):
            if eqn not in self.sums:
                if all(v in self.cheap for v in eqn.outvars):
                    found[t] = min((first[v] for v in eqn.outvars if v in first), default=t)
                first |= {v: min(found[t], first.get(v, found[t])) for v in compat.variables(eqn.invars)}
        for t, eqn in enumerate(self.eqns):
            if eqn in self.sums:
                found[t] = max((found[self.made[v]] for v in compat.variables(eqn.invars) if v in self.made), default=t)
        return found

    @cached_property
    def state(self) -> list[tuple[int, int]]:
        """The first read and the replacement of each state that is not a sum. Both have to be on one stage."""
        found: list[tuple[int, int]] = []
        for c in self.loop.carries:
            times = [t for t, e in enumerate(self.eqns) if e not in self.sums and c.before in e.invars]
            if times and not compat.is_literal(c.after) and c.after in self.made:
                found.append((min(times), self.made[c.after]))
        return found

    @cached_property
    def reads(self) -> dict[Var, list[int]]:
        """The places at which each value is read, in order. Reads of a cheap value count as reads of its inputs too."""
        found: dict[Var, list[int]] = {}
        for t, eqn in enumerate(self.eqns):
            if eqn in self.sums or any(v in self.cheap for v in eqn.outvars):
                continue
            atoms = set(compat.variables(eqn.invars))
            for v in atoms | {root for a in atoms for root in self.cheap.get(a, ())}:
                found.setdefault(v, []).append(t)
        return found


def fold_body(loop: Loop) -> FoldedBody:
    """Fold the body of a loop."""
    eqns = loop.eqns
    fold = next((i for i, e in enumerate(eqns) if is_transposed(e)), len(eqns))
    sums, terms = _sums(loop)
    cheap = _cheap(loop)
    forward = _as_late_as_useful(eqns[:fold], cheap)
    backward = _as_early_as_useful(eqns[fold:], cheap, sums)
    return FoldedBody(loop, (*forward, *backward), fold, sums, cheap, terms)


def is_transposed(eqn: Eqn) -> bool:
    """Whether an equation belongs to the outermost backward pass: JAX marks transposed equations in the name stack."""
    return "transpose(" in str(eqn.source_info.name_stack).partition("jvp(")[0]


def _sums(loop: Loop) -> tuple[frozenset[Eqn], tuple[tuple[Var, ...], ...]]:
    """The equations that only sum into carries, and the terms of each carry."""
    made = {v: e for e in loop.eqns for v in e.outvars}
    readers = reads_of(loop.eqns, loop.results.values())
    inner: set[Eqn] = set()
    terms: list[tuple[Var, ...]] = []
    for c in loop.carries:
        found: list[Var] = []
        add = None if compat.is_literal(c.after) else made.get(c.after)
        if add is not None and add.primitive.name in ADDITIONS and c.before in add.invars and readers[c.before] == 1:
            inner.add(add)
            for a in add.invars:
                if a is not c.before:
                    leaves = sum_terms(a, lambda x: x, made, readers)
                    ends = [_behind_linear(t, made, readers) for t, _ in leaves if not compat.is_literal(t)]
                    found += ends
                    inner |= _between(a, set(ends), made)
        terms.append(tuple(found))
    return frozenset(inner), tuple(terms)


def _behind_linear(v: Var, made: Mapping[Var, Eqn], readers: Mapping[Var, int]) -> Var:
    """The value that a term is a transpose, reshape or conversion of, if nothing else reads it."""
    while (eqn := made.get(v)) is not None and eqn.primitive.name in LINEAR and len(eqn.invars) == 1:
        (operand,) = eqn.invars
        if compat.is_literal(operand) or operand not in made or readers[operand] > 1:
            break
        v = operand
    return v


def _between(atom: Atom, leaves: set[Var], made: Mapping[Var, Eqn]) -> set[Eqn]:
    """Ids of the equations from the terms of a sum to the sum."""
    if compat.is_literal(atom) or atom in leaves or atom not in made:
        return set()
    return {made[atom]}.union(*(_between(a, leaves, made) for a in made[atom].invars))


def _cheap(loop: Loop) -> dict[Var, frozenset[Var]]:
    """The values that are recomputed wherever they are read, as in `cut_loop`, and the inputs that they depend on."""
    roots = {v: frozenset((v,)) for v in (*loop.consts, *loop.rows)}
    depth = dict.fromkeys(roots, 0)
    cheap: dict[Var, frozenset[Var]] = {}
    for eqn in loop.eqns:
        operands = [a for a in eqn.invars if not compat.is_literal(a)]
        if eqn.primitive.name not in CHEAP or eqn.effects or any(a not in depth for a in operands):
            continue
        deep = 1 + sum(depth[a] for a in operands)
        if deep <= CHEAP_DEPTH:
            behind = frozenset[Var]().union(*(roots[a] for a in operands))
            for v in eqn.outvars:
                depth[v], roots[v], cheap[v] = deep, behind, behind
    return cheap


def _as_late_as_useful(eqns: Sequence[Eqn], cheap: Mapping[Var, Any]) -> list[Eqn]:
    """The equations, each moved to its first reader if this does not increase the live bytes.

    For example, the embedding of a decoder's input moves to the decoder, even if it was traced with the encoder's.
    """
    first: dict[Var, int] = {}
    last: dict[Var, int] = {}
    made = {v: e for e in eqns for v in e.outvars}
    for t, eqn in enumerate(eqns):
        last |= {a: t for a in eqn.invars if not compat.is_literal(a)}
    at = list(range(len(eqns)))
    for t in range(len(eqns) - 1, -1, -1):
        eqn = eqns[t]
        goal = min((first[v] for v in eqn.outvars if v in first), default=None)
        if goal is not None and not eqn.effects:
            held = {a for a in eqn.invars if not compat.is_literal(a) and a in made and a not in cheap}
            longer = sum(bytes_of(a) for a in held if last[a] == t)
            if longer <= sum(bytes_of(v) for v in eqn.outvars if v in first):
                at[t] = goal
        for a in eqn.invars:
            if not compat.is_literal(a):
                first[a] = min(at[t], first.get(a, at[t]))
    return [eqns[t] for t in sorted(range(len(eqns)), key=lambda t: (at[t], t))]


def _as_early_as_useful(eqns: Sequence[Eqn], cheap: Mapping[Var, Any], sums: frozenset[Eqn]) -> list[Eqn]:
    """The equations of the backward, each moved to the maker of its operands if its results are not larger.

    Then all readers of a cotangent stand together: JAX emits them when it transposes the equation that made the value.
    """
    maker = {v: t for t, e in enumerate(eqns) for v in e.outvars}
    read = {a for e in eqns if e not in sums for a in e.invars if not compat.is_literal(a)}
    at: list[int] = []
    for t, eqn in enumerate(eqns):
        held = {a for a in eqn.invars if not compat.is_literal(a) and a in maker and a not in cheap}
        free = all(v in cheap for v in eqn.outvars)
        makers = [at[maker[a]] for a in eqn.invars if not compat.is_literal(a) and a in maker]
        ready = max(makers, default=0 if free else t)
        smaller = sum(bytes_of(v) for v in eqn.outvars if v in read) <= sum(map(bytes_of, held))
        useful = (free or smaller) and eqn not in sums and not eqn.effects
        at.append(ready if useful else t)
    return [eqns[t] for t in sorted(range(len(eqns)), key=lambda t: (at[t], t))]
