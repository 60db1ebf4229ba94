"""Removes sums of zeros from scans: the gradients of frozen parameters.

    c = scan (f: c' = c + zeros) c0 xs   -->   scan f' xs; c = c0

JAX makes zeros for the gradient of a value that no gradient flows to, and `accumulate` adds them up over microbatches:
a buffer as large as the frozen parameter, and a sum in each step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.loop import Loop
from shardc.ir.walk import ADDITIONS, LINEAR, renamed, with_atoms

_OF_ZEROS: Final = LINEAR | ADDITIONS
"""Operations that return zeros if all operands are zeros."""


def drop_zero_sums(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without carries of scans that only add zeros.

    Args:
      jaxpr: canonical.
    """
    zeros, names, eqns = set[Var](), dict[Var, Atom](), list[Eqn]()
    for old in jaxpr.eqns:
        eqn = with_atoms(old, names)
        if eqn.primitive.name in _OF_ZEROS and all(is_zero(a, zeros) for a in eqn.invars):
            zeros.update(eqn.outvars)
        elif eqn.primitive.name == "scan":
            eqn, left_out = _without_zero_sums(eqn, zeros)
            names |= left_out
        eqns.append(eqn)
    if not names:
        return jaxpr
    made = compat.new_jaxpr(jaxpr.invars, renamed(jaxpr.outvars, names), eqns, jaxpr)
    return compat.remove_dead(made, [True] * len(made.outvars))


def is_zero(atom: Atom, zeros: Collection[Var]) -> bool:
    """Whether a value is zeros: one of `zeros`, or a literal."""
    return not np.any(np.asarray(atom.val)) if compat.is_literal(atom) else atom in zeros


def _without_zero_sums(eqn: Eqn, outer: Collection[Var]) -> tuple[Eqn, dict[Var, Atom]]:
    """A scan without the carries that do not change, and for each of their results its initial value."""
    loop = Loop.of(eqn)
    zeros = {v for v, a in loop.consts.items() if is_zero(a, outer)}
    names: dict[Var, Atom] = {}  # sums with zeros: the other operand
    for inner in loop.eqns:
        rest = [a for a in inner.invars if not is_zero(a, zeros)]
        if inner.primitive.name in _OF_ZEROS and not rest:
            zeros.update(inner.outvars)
        elif inner.primitive.name in ADDITIONS and len(rest) == 1:
            (out,) = inner.outvars
            names |= zip([out], renamed(rest, names), strict=True) if rest[0].aval.shape == out.aval.shape else ()
    afters = renamed((c.after for c in loop.carries), names)
    same = [c for c, after in zip(loop.carries, afters, strict=True) if after is c.before]
    if not same:
        return eqn, {}
    left = replace(
        loop, consts={**loop.consts, **{c.before: c.start for c in same}},
        carries=[c for c in loop.carries if c not in same], eqns=[with_atoms(e, names) for e in loop.eqns],
    )  # fmt: skip
    return left.equation(), {c.end: c.start for c in same}
