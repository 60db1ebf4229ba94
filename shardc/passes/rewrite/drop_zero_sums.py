"""Removes sums of zeros from scans: the gradients of frozen parameters.

    c = scan (f: c' = c + zeros) c0 xs   -->   scan f' xs; c = c0

JAX makes zeros for the gradient of a value that no gradient flows to, and `accumulate` adds them up over microbatches:
a buffer as large as the frozen parameter, and a sum in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import scan_of, scan_params
from shardc.ir.walk import ADDITIONS, LINEAR

_OF_ZEROS: Final = LINEAR | ADDITIONS
"""Operations that return zeros if all operands are zeros."""


def drop_zero_sums(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without carries of scans that only add zeros.

    Args:
      jaxpr: canonical.
    """
    zeros, names, eqns = set[Var](), dict[Var, Atom](), list[Eqn]()
    for old in jaxpr.eqns:
        eqn = old.replace(invars=[_named(a, names) for a in old.invars])
        if eqn.primitive.name in _OF_ZEROS and all(is_zero(a, zeros) for a in eqn.invars):
            zeros.update(eqn.outvars)
        elif eqn.primitive.name == "scan":
            eqn, left_out = _without_zero_sums(eqn, zeros)
            names |= left_out
        eqns.append(eqn)
    if not names:
        return jaxpr
    made = compat.new_jaxpr(jaxpr.invars, [_named(a, names) for a in jaxpr.outvars], eqns, jaxpr)
    return compat.remove_dead(made, [True] * len(made.outvars))


def is_zero(atom: Atom, zeros: Collection[Var]) -> bool:
    """Whether a value is zeros: one of `zeros`, or a literal."""
    return not np.any(np.asarray(atom.val)) if compat.is_literal(atom) else atom in zeros


def _named(atom: Atom, names: Mapping[Var, Atom]) -> Atom:
    return atom if compat.is_literal(atom) else names.get(atom, atom)


def _without_zero_sums(eqn: Eqn, outer: Collection[Var]) -> tuple[Eqn, dict[Var, Atom]]:
    """A scan without the carries that do not change, and for each of their results its initial value."""
    scan = scan_of(eqn)
    body, ends = scan.body, scan.rows_at
    carried, starts = body.invars[scan.consts : ends], eqn.invars[scan.consts : ends]
    zeros = {v for v, a in zip(body.invars, eqn.invars[: scan.consts], strict=False) if is_zero(a, outer)}
    names: dict[Var, Atom] = {}  # sums with zeros: the other operand
    for inner in body.eqns:
        rest = [a for a in inner.invars if not is_zero(a, zeros)]
        if inner.primitive.name in _OF_ZEROS and not rest:
            zeros.update(inner.outvars)
        elif inner.primitive.name in ADDITIONS and len(rest) == 1:
            (out,) = inner.outvars
            names |= {out: _named(rest[0], names)} if rest[0].aval.shape == out.aval.shape else {}
    same = [_named(out, names) is v for out, v in zip(body.outvars, carried, strict=False)]
    if not any(same):
        return eqn, {}
    pick = lambda atoms, which: [a for a, s in zip(atoms, same, strict=False) if s is which]  # noqa: E731
    inner = compat.new_jaxpr(
        [*body.invars[: scan.consts], *pick(carried, True), *pick(carried, False), *body.invars[ends:]],
        [*pick(body.outvars, False), *body.outvars[scan.carries :]],
        [e.replace(invars=[_named(a, names) for a in e.invars]) for e in body.eqns], body,
    )  # fmt: skip
    left = eqn.replace(
        invars=[*eqn.invars[: scan.consts], *pick(starts, True), *pick(starts, False), *eqn.invars[ends:]],
        outvars=[*pick(eqn.outvars, False), *eqn.outvars[scan.carries :]],
        params=scan_params(eqn, inner, scan.consts + sum(same), scan.carries - sum(same)),
    )
    return left, dict(zip(pick(eqn.outvars, True), pick(starts, True), strict=True))
