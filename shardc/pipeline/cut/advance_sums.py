"""Moves each addition to a sum up to its term, so that the term is not live until the end of its task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from shardc import compat
from shardc.compat import Eqn, Var


def advance_sums(eqns: Sequence[Eqn], sums: Collection[Var]) -> list[Eqn]:
    """The equations, in which each equation that makes one of `sums` comes directly after the equations that it reads.

        g = f x; h = f y; s' = s + g; t' = t + h   -->   g = f x; s' = s + g; h = f y; t' = t + h

    An equation that only turns one value into a term (a cast, a reshape, a boxing) moves with its addition.
    """
    made = {v for e in eqns for v in e.outvars}
    readers = Counter(v for e in eqns for v in _read(e, made))
    moving, terms = set[Var](), set(sums)
    for e in reversed(eqns):
        operands = _read(e, made)
        if not terms.isdisjoint(e.outvars) and (len(operands) == 1 or any(v in sums for v in e.outvars)):
            moving |= set(e.outvars)
            terms |= {v for v in operands if readers[v] == 1}
    place: dict[Var, int] = {}
    order: list[int] = []
    for i, e in enumerate(eqns):
        ready = max((place[v] for v in _read(e, made)), default=i)
        order.append(i if moving.isdisjoint(e.outvars) else ready)
        place |= dict.fromkeys(e.outvars, order[i])
    return [eqns[i] for i in sorted(range(len(eqns)), key=order.__getitem__)]


def _read(eqn: Eqn, made: Collection[Var]) -> list[Var]:
    return list(dict.fromkeys(a for a in eqn.invars if not compat.is_literal(a) and a in made))
