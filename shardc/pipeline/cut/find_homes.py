"""Finds the stage that each value outside of the loop over microbatches belongs to, before anything is cut.

A parameter belongs to the stage that reads it in the loop, its gradient to the one that makes it. What stands beside
such a value in an equation belongs there too: an optimizer's moments, and what is made of them, also in the branches of
conditions and in the bodies of loops. Scalars, and what is made of scalars alone, belong to no stage.
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
    """The stage of the largest of the values whose stage is known, of equal ones the lowest."""
    return min(((-bytes_of(v), at[v]) for v in compat.variables(values) if v in at), default=(0, None))[1]


@dataclass(frozen=True)
class Loop:
    """A scan or while loop.

    Attributes:
      eqn: it.
      bodies: the jaxprs that it runs: of a while loop the condition too, the first one.
      inputs: for each body the numbers of the operands that it takes.
      carried: the first operand that is carried, and the one behind the last.
    """

    eqn: Eqn
    bodies: list[Jaxpr]
    inputs: list[list[int]]
    carried: tuple[int, int]

    @classmethod
    def of(cls, eqn: Eqn) -> Loop:
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
    """The stage of each value of more than one element, as far as it stands beside others.

    Args:
      eqns: outside of the loop, in order.
      known: the stages of arguments that the loop reads, and of what it makes.
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
    """The values of each equation; of one that nests others, and of these, those that are one and the same outside and
    inside."""
    found: list[Sequence[Atom]] = []
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            found += zip(eqn.invars, eqn.outvars, strict=True)
        elif eqn.primitive.name in ("scan", "while"):
            loop = Loop.of(eqn)
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
