"""Reassociates sums over values of several stages: each stage sums its own terms, then the partial sums are added.

convert(add(a0, add(b3, c0)))   -->   stage 0: convert a0 + convert c0;  stage 3: convert b3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax.numpy as jnp

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.eqns import add_eqn
from shardc.ir.walk import ADDITIONS, LINEAR

StageSum: TypeAlias = tuple[int, Atom, list[Eqn]]
"""A stage, the sum of its terms, and the equations that compute it."""


def reassociate(
    atom: Atom,
    base: Callable[[Atom], Atom],
    made: Mapping[Var, Eqn],
    readers: Mapping[Var, int],
    stage_of: Callable[[Atom], int | None],
) -> list[StageSum]:
    """The partial sums of each stage, lowest stage first.

    Args:
      atom: the sum.
      base: resolves aliases of a variable.
      made: the equation of each variable.
      readers: how often each variable is read; only values that nothing else reads are reassociated.
      stage_of: the stage of a term; None: it is available everywhere, and is added on the first stage.
    """
    terms = sum_terms(atom, base, made, readers)
    stages = [stage_of(t) for t, _ in terms]
    known = sorted({s for s in stages if s is not None})
    if len(known) < 2:
        return [(known[0] if known else 0, atom, [])]
    found = base(atom)
    like = None if compat.is_literal(found) else made.get(found)  # its line is that of the sums of its parts
    groups: list[StageSum] = []
    for stage in known:
        eqns: list[Eqn] = []
        total: Atom | None = None
        for (term, chain), at in zip(terms, stages, strict=True):
            if at == stage or (at is None and stage == known[0]):
                value = _apply(term, chain, eqns)
                total = value if total is None else _add(total, value, eqns, like)
        assert total is not None
        groups.append((stage, total, eqns))
    return groups


def sum_terms(
    atom: Atom, base: Callable[[Atom], Atom], made: Mapping[Var, Eqn], readers: Mapping[Var, int]
) -> list[tuple[Atom, list[Eqn]]]:
    """The terms of a sum, each with the linear operations that remain to be applied to it; arguments as above."""
    found = base(atom)
    eqn = None if compat.is_literal(found) else made.get(found)
    if eqn is None or readers.get(found, 0) > 1:
        return [(atom, [])]
    if eqn.primitive.name in ADDITIONS:
        return [t for a in eqn.invars for t in sum_terms(a, base, made, readers)]
    if eqn.primitive.name in LINEAR and len(eqn.invars) == 1 and _keeps_kind(eqn):
        inner = sum_terms(eqn.invars[0], base, made, readers)
        if len(inner) > 1:
            return [(t, [*chain, eqn]) for t, chain in inner]
    return [(atom, [])]


def terms_of(eqn: Eqn, name: str, made: Mapping[Var, Eqn], readers: Mapping[Var, int]) -> list[Atom]:
    """The operands of a nested binary operation, in order; `readers` as above."""
    found: list[Atom] = []
    pending = [*reversed(eqn.invars)]
    while pending:
        a = pending.pop()
        inner = None if compat.is_literal(a) or readers[a] > 1 else made.get(a)
        if inner is not None and inner.primitive.name == name:
            pending += reversed(inner.invars)
        else:
            found.append(a)
    return found


def _keeps_kind(eqn: Eqn) -> bool:
    """Whether operand and result are both floats: other conversions are not linear."""
    return all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (eqn.invars[0], eqn.outvars[0]))


def _apply(term: Atom, chain: list[Eqn], eqns: list[Eqn]) -> Atom:
    for eqn in chain:
        var = compat.fresh_var(eqn.outvars[0].aval)
        eqns.append(eqn.replace(invars=[term], outvars=[var]))
        term = var
    return term


def _add(a: Atom, b: Atom, eqns: list[Eqn], like: Eqn | None) -> Atom:
    var = compat.fresh_var(a.aval)
    eqns.append(add_eqn(a, b, var, like))
    return var
