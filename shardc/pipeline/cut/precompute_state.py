"""Moves state of a microbatch loop that does not depend on data to a loop of its own before it.

    scan over j: k, c = split(key, c); x = f(rows[j], k); carry c
        -->  scan over j: _, c' = split(key, c); give c, carry c'      (small: keys and counters alone)
             scan over j: k, _ = split(key, cs[j]); x = f(rows[j], k)

Random streams, counters and step schedules are such state. As rows of the batch, every stage of a pipeline reads its
own, forward and backward, in any order of microbatches. State that never changes becomes a constant of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.boundary import microbatches_p
from shardc.ir.loop import Carry, Loop
from shardc.ir.program import Program
from shardc.ir.walk import ADDITIONS, bytes_of, reads_of, renamed, with_atoms
from shardc.passes import Context
from shardc.passes.trace.canonicalize import with_own_bodies
from shardc.pipeline.cut.cut_loop import find_loops

SMALL: Final = 1 << 12
"""The most bytes of a value that is computed for all microbatches before the loop."""


def precompute_state(program: Program, _: Context) -> Program:
    """The program in which state that depends on no data is computed before the loop and read as rows of the batch. A
    program without exactly one loop over microbatches is unchanged."""
    loops = find_loops(program.jaxpr)
    if len(loops) != 1 or loops[0].reverse:
        return program
    (loop,), jaxpr = loops, program.jaxpr
    fixed = [c for c in loop.carries if c.after is c.before]
    loop = replace(
        loop, consts={**loop.consts, **{c.before: c.start for c in fixed}},
        carries=[c for c in loop.carries if c not in fixed],
    )  # fmt: skip
    ahead, eqns = _ahead(loop)
    if not fixed and not ahead:
        return program
    first, rows = _first_loop(loop, ahead, eqns) if ahead else ([], {})
    rest = replace(loop, carries=[c for c in loop.carries if c not in ahead], rows={**loop.rows, **rows})
    new = [*first, rest.live().equation()]
    names: dict[Var, Atom] = {c.end: c.start for c in fixed}
    eqns = [with_atoms(e, names) for old in jaxpr.eqns for e in (new if old is loop.eqn else [old])]
    outvars = renamed(jaxpr.outvars, names)
    return program.after("precompute_state", compat.new_jaxpr(jaxpr.invars, outvars, eqns, jaxpr))


def _ahead(loop: Loop) -> tuple[list[Carry], list[Eqn]]:
    """The carries that can be computed before the loop, and the equations that compute them."""
    made = {v: e for e in loop.eqns for v in e.outvars}
    reads = reads_of(loop.eqns, loop.results.values())
    befores = {c.before for c in loop.carries}
    slices: dict[Var, tuple[set[Eqn], set[Var]]] = {}
    for c in loop.carries:
        if bytes_of(c.before) > SMALL or _is_sum(c, made, reads):
            continue
        found = _slice(c.after, made, befores, loop.consts)
        if found is not None:
            slices[c.before] = found
    while dropped := [v for v, (_, needed) in slices.items() if not needed <= slices.keys()]:
        for v in dropped:
            del slices[v]
    wanted = set[Eqn]().union(*(eqns for eqns, _ in slices.values()))
    return [c for c in loop.carries if c.before in slices], [e for e in loop.eqns if e in wanted]


def _is_sum(c: Carry, made: Mapping[Var, Eqn], reads: Mapping[Var, int]) -> bool:
    """Whether a carry is a sum over microbatches: each stage makes its own part of it."""
    eqn = None if compat.is_literal(c.after) else made.get(c.after)
    if eqn is None:
        return False
    return eqn.primitive.name in ADDITIONS and reads[c.before] == 1 and any(a is c.before for a in eqn.invars)


def _slice(
    after: Atom, made: Mapping[Var, Eqn], befores: Collection[Var], constant: Collection[Var]
) -> tuple[set[Eqn], set[Var]] | None:
    """The equations that compute a value, and the carries that they read; None if they read data or are heavy."""
    eqns, carries, pending = set[Eqn](), set[Var](), [after]
    while pending:
        v = pending.pop()
        if compat.is_literal(v) or v in constant:
            continue
        if v in befores:
            carries.add(v)
        elif (eqn := made.get(v)) is None:
            return None
        elif eqn not in eqns:
            if eqn.effects or any(bytes_of(o) > SMALL for o in eqn.outvars):
                return None
            eqns.add(eqn)
            pending += eqn.invars
    return eqns, carries


def _first_loop(loop: Loop, ahead: Sequence[Carry], eqns: Sequence[Eqn]) -> tuple[list[Eqn], dict[Var, Var]]:
    """The equations that compute the state before the main loop, and the stacked values that the main loop reads as
    rows."""
    stacks = {loop.stack_of(c.before): c.before for c in ahead}
    first = replace(loop, carries=ahead, rows={}, stacks=stacks).reading(eqns)
    rows = {before: compat.fresh_var(stack.aval) for stack, before in stacks.items()}
    marks = [compat.new_eqn([stack], [rows[v]], microbatches_p, {}, loop.eqn) for stack, v in stacks.items()]
    return [with_own_bodies(first.equation()), *marks], rows  # the two loops share no variables
