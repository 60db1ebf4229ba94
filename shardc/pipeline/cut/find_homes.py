"""Finds the stage of each value outside of the loop over microbatches, before the program is cut.

A parameter belongs to the stage that reads it in the loop, its gradient to the stage that makes it. The other values of
an equation with such a value belong to the same stage: an optimizer's moments, and the values computed from them, also
in the branches of conditions and in the bodies of loops. Scalars, and values computed from scalars only, belong to no
stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.nested import NESTED, nested_bodies
from shardc.ir.walk import bytes_of


def is_large(v: Var) -> bool:
    """Whether a value has more than one element."""
    return math.prod(v.aval.shape) > 1


def largest(values: Sequence[Atom], at: Mapping[Var, int]) -> int | None:
    """The stage of the largest value whose stage is known; the lowest stage for values of equal size."""
    return min(((-bytes_of(v), at[v]) for v in compat.variables(values) if v in at), default=(0, None))[1]


def find_homes(eqns: Sequence[Eqn], known: Mapping[Var, int]) -> dict[Var, int]:
    """The stage of each value with more than one element, found through the equations that connect it to known values.

    Args:
      eqns: the equations outside of the loop, in order.
      known: the stages of arguments that the loop reads, and of its results.
    """
    at = {v: s for v, s in known.items() if is_large(v)}
    together = [
        large for values in _beside(eqns) if len(large := [v for v in compat.variables(values) if is_large(v)]) > 1
    ]
    before = -1
    while before < len(at):
        before = len(at)
        for values in (*together, *reversed(together)):
            left = [v for v in values if v not in at]
            if left and (top := largest(values, at)) is not None:
                at |= dict.fromkeys(left, top)
    return at


def _beside(eqns: Sequence[Eqn]) -> list[Sequence[Atom]]:
    """Groups of values that must have the same stage.

    The operands and results of an equation are one group. An equation with bodies gives a pair for each value outside
    and the equal value inside, and the groups of its bodies.
    """
    found: list[Sequence[Atom]] = []
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            found += zip(eqn.invars, eqn.outvars, strict=True)
        elif eqn.primitive.name not in NESTED:
            found.append((*eqn.invars, *eqn.outvars))
        for body in nested_bodies(eqn):
            found += [*body.given(eqn), *_beside(body.jaxpr.eqns)]
            if not body.decides:
                found += zip(body.jaxpr.outvars, eqn.outvars, strict=True)
                found += zip((eqn.invars[n] for n in body.carried), eqn.outvars, strict=False)
    return found
