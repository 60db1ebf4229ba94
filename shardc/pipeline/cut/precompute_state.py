"""Moves state of a microbatch loop that does not depend on data to a loop of its own before it.

    scan over j: k, c = split(key, c); x = f(rows[j], k); carry c
        -->  scan over j: _, c' = split(key, c); give c, carry c'      (small: keys and counters alone)
             scan over j: k, _ = split(key, cs[j]); x = f(rows[j], k)

Random streams, counters and step schedules are such state. As rows of the batch, every stage of a pipeline reads its
own, forward and backward, in any order of microbatches. State that never changes becomes a constant of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.boundary import microbatches_p
from shardc.ir.nested import scan_of, scan_params
from shardc.ir.program import Program
from shardc.ir.walk import ADDITIONS, bytes_of, reads_of, renamed, with_atoms
from shardc.passes import Context
from shardc.passes.trace.canonicalize import canonical_jaxpr
from shardc.pipeline.cut.cut_loop import MicrobatchLoop, find_loops

SMALL: Final = 1 << 12
"""The most bytes of a value that is computed for all microbatches before the loop."""


def precompute_state(program: Program, _: Context) -> Program:
    """The program in which state that depends on no data is computed before the loop and read as rows of the batch. A
    program without exactly one loop over microbatches is unchanged."""
    loops = find_loops(program.jaxpr)
    if len(loops) != 1 or scan_of(loops[0].eqn).reverse:
        return program
    (loop,) = loops
    body, jaxpr = loop.body, program.jaxpr
    befores = body.invars[loop.consts : loop.consts + loop.carries]
    afters = body.outvars[: loop.carries]
    fixed = [j for j, (a, b) in enumerate(zip(afters, befores, strict=True)) if a is b]
    ahead, eqns = _ahead(loop, befores, afters, fixed)
    if not fixed and not ahead:
        return program
    starts = loop.eqn.invars[loop.consts : loop.consts + loop.carries]
    first, rows = _first_loop(loop, ahead, eqns, befores, afters, starts) if ahead else ([], [])
    outer = [*jaxpr.eqns[: loop.index], *first, _rest(loop, fixed, ahead, rows), *jaxpr.eqns[loop.index + 1 :]]
    names: dict[Var, Atom] = {loop.eqn.outvars[j]: starts[j] for j in fixed}
    outvars = renamed(jaxpr.outvars, names)
    eqns = [with_atoms(e, names) for e in outer]
    return program.after("precompute_state", compat.new_jaxpr(jaxpr.invars, outvars, eqns, jaxpr))


def _ahead(
    loop: MicrobatchLoop, befores: Sequence[Var], afters: Sequence[Atom], fixed: Sequence[int]
) -> tuple[list[int], list[Eqn]]:
    """The numbers of the carries that can be computed before the loop, and the equations that compute them."""
    body = loop.body
    made = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}
    reads = reads_of(body.eqns, body.outvars)
    number = {v: j for j, v in enumerate(befores)}
    constant = {*body.invars[: loop.consts], *(befores[j] for j in fixed)}
    slices: dict[int, tuple[set[int], set[int]]] = {}
    for j, (before, after) in enumerate(zip(befores, afters, strict=True)):
        if j in fixed or bytes_of(before) > SMALL or _is_sum(before, after, made, body, reads):
            continue
        found = _slice(after, made, body, number, constant)
        if found is not None:
            slices[j] = found
    while dropped := [j for j, (_, needed) in slices.items() if not needed <= set(slices)]:
        for j in dropped:
            del slices[j]
    wanted = set[int]().union(*(eqns for eqns, _ in slices.values()))
    return sorted(slices), [body.eqns[i] for i in sorted(wanted)]


def _is_sum(before: Var, after: Atom, made: Mapping[Var, int], body: Jaxpr, reads: Mapping[Var, int]) -> bool:
    """Whether a carry is a sum over microbatches: each stage makes its own part of it."""
    if compat.is_literal(after) or after not in made:
        return False
    eqn = body.eqns[made[after]]
    return eqn.primitive.name in ADDITIONS and reads[before] == 1 and any(a is before for a in eqn.invars)


def _slice(
    after: Atom, made: Mapping[Var, int], body: Jaxpr, number: Mapping[Var, int], constant: set[Var]
) -> tuple[set[int], set[int]] | None:
    """The equations that compute a value, and the carries that they read; None if they read data or are heavy."""
    eqns, carries, pending = set[int](), set[int](), [after]
    while pending:
        v = pending.pop()
        if compat.is_literal(v) or v in constant:
            continue
        if v in number:
            carries.add(number[v])
        elif v not in made:
            return None
        elif made[v] not in eqns:
            eqn = body.eqns[made[v]]
            if eqn.effects or any(bytes_of(o) > SMALL for o in eqn.outvars):
                return None
            eqns.add(made[v])
            pending += eqn.invars
    return eqns, carries


def _first_loop(
    loop: MicrobatchLoop, ahead: Sequence[int], eqns: Sequence[Eqn], befores: Sequence[Var], afters: Sequence[Atom],
    starts: Sequence[Atom],
) -> tuple[list[Eqn], list[Var]]:  # fmt: skip
    """The equations that compute the state before the main loop, and the stacked values that the main loop reads as
    rows."""
    body, operand = loop.body, dict(zip(loop.body.invars, loop.eqn.invars, strict=True))
    mine = [befores[j] for j in ahead]
    read = {a for e in eqns for a in compat.variables(e.invars)} | {afters[j] for j in ahead}
    consts = [v for v in body.invars[: loop.consts + loop.carries] if v in read and v not in mine]
    inner = compat.new_jaxpr([*consts, *mine], [*(afters[j] for j in ahead), *mine], eqns, body)
    inner = canonical_jaxpr(inner, ())  # the two loops share no variables
    stacks = [compat.fresh_var(v.aval.update(shape=(loop.microbatches, *v.aval.shape))) for v in mine]
    scan = loop.eqn.replace(
        invars=[*(operand[v] for v in consts), *(starts[j] for j in ahead)],
        outvars=[*(loop.eqn.outvars[j] for j in ahead), *stacks],
        params=scan_params(loop.eqn, inner, len(consts), len(mine)), effects=inner.effects,
    )  # fmt: skip
    rows = [compat.fresh_var(v.aval) for v in stacks]
    marks = [compat.new_eqn([v], [r], microbatches_p, {}, loop.eqn) for v, r in zip(stacks, rows, strict=True)]
    return [scan, *marks], rows


def _rest(loop: MicrobatchLoop, fixed: Sequence[int], ahead: Sequence[int], rows: Sequence[Var]) -> Eqn:
    """The main loop, without the carries that have become constants or rows."""
    body, eqn, nc, nk = loop.body, loop.eqn, loop.consts, loop.carries
    left = [j for j in range(nk) if j not in fixed and j not in ahead]
    order = [*range(nc), *(nc + j for j in fixed), *(nc + j for j in left), *range(nc + nk, len(body.invars))]
    outs = [*left, *range(nk, len(body.outvars))]
    inner = compat.new_jaxpr(
        [*(body.invars[i] for i in order), *(body.invars[nc + j] for j in ahead)],
        [body.outvars[i] for i in outs], body.eqns, body,
    )  # fmt: skip
    inner = compat.remove_dead(inner, [True] * len(outs))
    return eqn.replace(
        invars=[*(eqn.invars[i] for i in order), *rows], outvars=[eqn.outvars[i] for i in outs],
        params=scan_params(eqn, inner, nc + len(fixed), len(left)), effects=inner.effects,
    )  # fmt: skip
