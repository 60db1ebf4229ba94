"""Finds the stage of each value outside of the loop over microbatches, before the program is cut.

A parameter belongs to the stage that reads it in the loop, its gradient to the stage that makes it. The other values of
an equation with such a value belong to the same stage: an optimizer's moments, and the values computed from them, also
in the branches of conditions and in the bodies of loops. Scalars, and values computed from scalars only, belong to no
stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc import compat
from shardc.compat import REMAT, Atom, Eqn, Jaxpr, Var, bodies_of
from shardc.ir.walk import bytes_of


def is_large(v: Var) -> bool:
    """Whether a value has more than one element."""
    return math.prod(v.aval.shape) > 1


def largest(values: Sequence[Atom], at: Mapping[Var, int]) -> int | None:
    """The stage of the largest value whose stage is known; the lowest stage for values of equal size."""
    return min(((-bytes_of(v), at[v]) for v in compat.variables(values) if v in at), default=(0, None))[1]


@dataclass(frozen=True)
class NestedLoop:
    """A scan or while loop outside of the loop over microbatches.

    Attributes:
      eqn: its equation.
      bodies: its jaxprs; for a while loop the condition, then the body.
      inputs: for each jaxpr the numbers of the operands that it takes.
      carried: the numbers of the first carried operand and of the one after the last.
    """

    eqn: Eqn
    bodies: list[Jaxpr]
    inputs: list[list[int]]
    carried: tuple[int, int]

    @classmethod
    def of(cls, eqn: Eqn) -> NestedLoop:
        count = len(eqn.invars)
        if eqn.primitive.name == "scan":
            scan = compat.scan_of(eqn)
            return cls(eqn, [scan.body], [[*range(count)]], (scan.consts, scan.rows_at))
        loop = compat.while_of(eqn)
        rest = range(loop.carries_at, count)
        return cls(
            eqn, [loop.cond, loop.body],
            [[*range(loop.cond_consts), *rest], [*range(loop.cond_consts, count)]], (loop.carries_at, count),
        )  # fmt: skip


def find_homes(eqns: Sequence[Eqn], known: Mapping[Var, int]) -> dict[Var, int]:
    """The stage of each value of more than one element that is connected with others by equations.

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
    """Groups of values that belong to one stage.

    They are the operands and results of an equation. For an equation with bodies they are the pairs of equal values
    outside and inside, and the groups of the bodies.
    """
    found: list[Sequence[Atom]] = []
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            found += zip(eqn.invars, eqn.outvars, strict=True)
        elif eqn.primitive.name in ("scan", "while"):
            loop = NestedLoop.of(eqn)
            begin, end = loop.carried
            for body, inputs in zip(loop.bodies, loop.inputs, strict=True):
                found += [(v, eqn.invars[n]) for v, n in zip(body.invars, inputs, strict=True)]
                found += _beside(body.eqns)
            *_, body = loop.bodies
            found += zip(body.outvars, eqn.outvars, strict=True)
            found += zip(eqn.invars[begin:end], eqn.outvars, strict=False)
        elif eqn.primitive.name == "cond" or eqn.primitive.name in REMAT:
            operands = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
            for body in bodies_of(eqn):
                found += [*zip(body.invars, operands, strict=True), *zip(body.outvars, eqn.outvars, strict=True)]
                found += _beside(body.eqns)
        else:
            found.append((*eqn.invars, *eqn.outvars))
    return found
