"""Computes equal expressions once.

    a = reduce_sum x; b = reduce_sum x; y = f a b   -->   a = reduce_sum x; y = f a a

XLA merges what each device computes twice, but no collectives, so each of two equal sums would be sent. Elementwise
operations, broadcasts and random bits stay, where no equal sum or product hangs on them: each reader may have its own
at a placement of its own, and it costs less than moving one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import in_bodies
from shardc.ir.walk import renamed, with_atoms
from shardc.sbp.signature import family_of

_STAY: Final = ("", "elementwise", "random", "rearrange")
"""Families of operations that are computed for each reader; operations without a rule may do something besides."""


def share_equal(jaxpr: Jaxpr) -> Jaxpr:
    """The canonical jaxpr with one of equal sums, products, slices and so on, in each body for itself."""
    made = _shared_in(jaxpr)
    return made if made is jaxpr else compat.remove_dead(made, [True] * len(made.outvars))


def _shared_in(jaxpr: Jaxpr) -> Jaxpr:
    first: dict[Hashable, Eqn] = {}
    equal: dict[Var, Var] = {}  # results of all equations that are equal to an earlier one
    names: dict[Var, Atom] = {}  # those of them that are left out
    eqns: list[Eqn] = []
    for old in jaxpr.eqns:
        eqn = in_bodies(with_atoms(old, names), _shared_in)
        key = _key(eqn, equal)
        same = eqn if key is None else first.setdefault(key, eqn)
        if same is not eqn:
            equal |= zip(eqn.outvars, same.outvars, strict=True)
            if _is_shared(eqn):
                names |= zip(eqn.outvars, same.outvars, strict=True)
                continue
        eqns.append(eqn)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=False)) and len(eqns) == len(jaxpr.eqns):
        return jaxpr
    return compat.new_jaxpr(jaxpr.invars, renamed(jaxpr.outvars, names), eqns, jaxpr)


def _is_shared(eqn: Eqn) -> bool:
    return eqn.primitive.name == "rev" or family_of(eqn.primitive.name) not in _STAY


def _key(eqn: Eqn, equal: Mapping[Var, Var]) -> Hashable | None:
    """The same for equal equations of equal operands; None if an equation may not be replaced by another one."""
    if eqn.effects or not family_of(eqn.primitive.name):
        return None
    try:
        params = frozenset(eqn.params.items())
        hash(params)
    except TypeError:  # an array among the parameters
        return None
    return eqn.primitive.name, params, tuple(_of(a, equal) for a in eqn.invars)


def _of(atom: Atom, equal: Mapping[Var, Var]) -> Any:
    if compat.is_literal(atom):
        value = np.asarray(atom.val)
        return value.dtype, value.shape, value.tobytes(), atom.aval.weak_type
    return equal.get(atom, atom)
