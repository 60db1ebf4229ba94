"""Sinks broadcasts into the loops that read them: the loop gets the small operand, and its body computes the broadcast.

    c = broadcast x; y = scan f c z    -->    y = scan f' x z, where f' x z = (c = broadcast x; f c z)

When JAX differentiates a loop it moves what is the same in every step out of it: a causal mask is then computed before
the loop, at full size, and every step reads it whole. So is a mask of the user's own. Light operations cost only what
they read. So they sink into each body that reads their result, if the result takes more bytes than what it follows
from, and if nothing there reads it from memory: for a product it would be materialized in every step. A few known
numbers, such as the position of a window, always sink: rewrites of the body read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import (
    NESTED,
    nested_bodies,
    with_nested,
)
from shardc.ir.walk import bytes_of, with_atoms
from shardc.passes.estimate.backend import FusionKind, kind_of
from shardc.passes.estimate.traffic import PARTLY_READ
from shardc.passes.recompute.choose_residuals import FUSED
from shardc.passes.recompute.recompute_residuals import may_recompute
from shardc.passes.rewrite.windows.static_windows import constant

SINKING: Final = frozenset((FusionKind.CHEAP, FusionKind.VIEW))
"""Kinds of operations that sink: XLA fuses them into every loop that reads their result."""


def sink_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr whose nested bodies compute their constants from smaller values.

    Args:
      jaxpr: canonical.
    """
    follows = _what_follows(jaxpr)
    eqns = [_sunk_into(e, follows) if e.primitive.name in NESTED else e for e in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    read = set(compat.variables(jaxpr.outvars))
    kept: list[Eqn] = []
    for eqn in reversed(eqns):
        if eqn.outvars and eqn.outvars[0] in follows and eqn.outvars[0] not in read:
            continue
        read.update(compat.variables(eqn.invars))
        kept.append(eqn)
    return compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, kept[::-1], jaxpr)


def _what_follows(jaxpr: Jaxpr) -> dict[Var, Eqn]:
    """The operands of nested bodies, and what these are made of, as far as light operations make them of fewer bytes
    than they take; with their equations, in the order of the program."""
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    sinks = lambda eqn: kind_of(eqn) in SINKING or constant(eqn.outvars[0], made) is not None  # noqa: E731
    wanted, light = set[Var](), list[Eqn]()
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in NESTED:
            wanted.update(v for _, given in _entries(eqn) for v in compat.variables(given))
        elif wanted and not wanted.isdisjoint(eqn.outvars) and may_recompute(eqn) and sinks(eqn):
            light.append(eqn)
            wanted.update(compat.variables(eqn.invars))
    least, found = dict[Var, int](), dict[Var, Eqn]()
    for eqn in reversed(light):
        (v,) = eqn.outvars
        whole, less = bytes_of(v), sum(least.get(a, bytes_of(a)) for a in compat.variables(eqn.invars))
        least[v] = min(whole, less)
        if less < whole:
            found[v] = eqn
    return found


def _entries(eqn: Eqn) -> Iterator[tuple[Jaxpr, Sequence[Atom]]]:
    """The bodies of an equation, and for each its first operands, those that are the same in every step; branches share
    their operands, and none of them is given."""
    for body in nested_bodies(eqn):
        yield body.jaxpr, [] if eqn.primitive.name == "cond" else [a for _, a in body.unchanged(eqn)]


def _sunk_into(eqn: Eqn, follows: Mapping[Var, Eqn]) -> Eqn:
    """A nested equation whose bodies compute their constants as far as possible."""
    entries = list(_entries(eqn))
    sunk = [_sunk(body, given, follows) for body, given in entries]
    bodies = [sink_constants(body) for body, _ in sunk]
    if all(new is old for new, (old, _) in zip(bodies, entries, strict=True)):
        return eqn
    counts = [len(given) for _, given in sunk]
    rest = eqn.invars[sum(len(given) for _, given in entries) :]
    params = with_nested(eqn, bodies, counts, nested_bodies(eqn)[-1].carries)
    return eqn.replace(invars=[*(a for _, given in sunk for a in given), *rest], params=params)


def _sunk(body: Jaxpr, given: Sequence[Atom], follows: Mapping[Var, Eqn]) -> tuple[Jaxpr, Sequence[Atom]]:
    """A body that computes its first inputs as far as possible, and the operands that it then needs instead of
    `given`."""
    inputs = list(zip(body.invars, given, strict=False))
    found = {v: a for v, a in inputs if not compat.is_literal(a) and a in follows}
    fused = {*_fused(body, found), *(v for v, a in found.items() if constant(a, follows) is not None)}
    names = {a: v for v, a in inputs if v not in fused and not compat.is_literal(a)}
    less = {v: a for v, a in inputs if v in fused and a not in names}
    if not less:
        return body, given
    kept = [(v, a) for v, a in inputs if v not in less]
    needed, pending = set[Var](), list(less.values())
    while pending:
        a = pending.pop()
        if a in follows and a not in names and a not in needed:
            needed.add(a)
            pending += compat.variables(follows[a].invars)
    eqns: list[Eqn] = []
    for made, eqn in follows.items():
        if made not in needed:
            continue
        for a in compat.variables(eqn.invars):
            if a not in names:
                names[a] = compat.fresh_var(a.aval)
                kept.append((names[a], a))
        outvars = [v for v, a in less.items() if a is made] or [compat.fresh_var(made.aval)]
        names[made] = outvars[0]
        eqns += [with_atoms(eqn, names).replace(outvars=[v]) for v in outvars]
    invars = [*(v for v, _ in kept), *body.invars[len(given) :]]
    return compat.new_jaxpr(invars, body.outvars, [*eqns, *body.eqns], body), [a for _, a in kept]


def _fused(body: Jaxpr, values: Collection[Var]) -> list[Var]:
    """The inputs `values` of a body that only operations read which fuse them."""
    if not values:
        return []
    source, read = {v: v for v in values}, set[Var]()
    whole = set(compat.variables(body.outvars))
    for eqn in body.eqns:
        mine = [a for a in compat.variables(eqn.invars) if a in source]
        if not mine:
            continue
        read.update(source[a] for a in mine)
        if eqn.primitive.name in NESTED:
            whole.update(set(mine) - _fused_inside(eqn, mine))
        elif not may_recompute(eqn) or kind_of(eqn) not in FUSED or eqn.primitive.name in PARTLY_READ:
            whole.update(mine)
        elif kind_of(eqn) is FusionKind.VIEW:
            source |= dict.fromkeys(eqn.outvars, source[mine[0]])
    whole = {source[a] for a in whole if a in source}
    return [v for v in values if v in read and v not in whole]


def _fused_inside(eqn: Eqn, values: Collection[Var]) -> set[Var]:
    """The operands `values` of a nested equation that, in its bodies, only operations read which fuse them."""
    entries = list(_entries(eqn))
    whole = set(compat.variables(eqn.invars[sum(len(given) for _, given in entries) :]))
    found = set[Var]()
    for body, given in entries:
        inside = {v: a for v, a in zip(body.invars, given, strict=False) if not compat.is_literal(a) and a in values}
        fused = set(_fused(body, inside))
        found.update(inside[v] for v in fused)
        whole.update(inside[v] for v in inside.keys() - fused)
    return found - whole
