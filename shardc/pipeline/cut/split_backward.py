"""Splits each stage's backward in two tasks: I, for which the stage before it waits, and W, the rest.

    B: dx = f(dy); dw = g(x, dy); total' = total + dw   -->   I: dx = f(dy)     W: dw = g(x, dy); total' = total + dw

I computes the gradient of the stage's input, W everything else, mostly the gradients of weights (Qi et al. 2023, "Zero
Bubble Pipeline Parallelism"). A rematerialised block is inlined, so that values that both need are recomputed once, in
I. A scan over layers is split into two scans: the first one keeps the values that the second one reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.eqns import copy_eqn
from shardc.ir.loop import Loop
from shardc.ir.nested import REMAT, bodies_of
from shardc.ir.walk import reads_of, with_atoms
from shardc.passes.trace.canonicalize import with_own_bodies
from shardc.pipeline.cut.cut_loop import PlacedBody
from shardc.pipeline.schedule.action import TaskId


def split_backward(body: PlacedBody) -> PlacedBody:
    """The body with the weight gradients of every stage in a task of their own."""
    if not body.backward and body.stages > 1:
        return body
    made = {v: p for p, e in body.eqns for v in e.outvars}
    awaited: set[Var] = set()
    for p, eqn in body.eqns:
        awaited |= {v for v in compat.variables(eqn.invars) if v in made and made[v].stage != p.stage}
    awaited |= {c.after for c in body.carries if c.state}  # the next microbatch does not wait for weight gradients
    results = [v for v in (*(c.after for c in body.carries), *(y for y, _ in body.ys)) if not compat.is_literal(v)]
    found: list[tuple[TaskId, Eqn]] = []
    done: set[TaskId] = set()
    for p, eqn in body.eqns:
        if p.kind != "B":
            found.append((p, eqn))
        elif p not in done:
            done.add(p)
            first, second = part([e for q, e in body.eqns if q == p], awaited, results)
            found += [(p, e) for e in first]
            found += [(replace(p, kind="W"), e) for e in second]
    found = _in_order(found)
    where = {v: p for p, e in found for v in e.outvars}
    carries = tuple(replace(c, task=where.get(c.after, c.task)) for c in body.carries)
    ys = tuple((y, p if compat.is_literal(y) else where.get(y, p)) for y, p in body.ys)
    return replace(body, eqns=tuple(found), carries=carries, ys=ys)


def _in_order(placed: Sequence[tuple[TaskId, Eqn]]) -> list[tuple[TaskId, Eqn]]:
    """The equations in the order in which a microbatch passes them, each W directly behind its B."""

    def key(item: tuple[TaskId, Eqn]) -> tuple[TaskId, bool]:
        p = item[0]
        return (replace(p, kind="B"), True) if p.kind == "W" else (p, False)

    return sorted(placed, key=key)


def part(eqns: Sequence[Eqn], awaited: Iterable[Var], results: Iterable[Var] = ()) -> tuple[list[Eqn], list[Eqn]]:
    """The equations that the awaited values need, and the other equations. A nested equation that is needed for both is
    split.

    Args:
      eqns: the equations.
      awaited: values that another stage waits for.
      results: values that are also read later, but that no stage waits for.
    """
    awaited, used = set(awaited), set(results)
    whole: set[Eqn] = set()  # nested equations that stay as they are
    while True:
        needed = _needed(eqns, awaited)
        open_ = [e for e in eqns if e in needed and e not in whole]
        mixed = next((e for e in open_ if _mixed(e, eqns, needed, awaited, used)), None)
        if mixed is None:
            break
        opened = _open(mixed) if mixed.primitive.name in REMAT else _fission(mixed, eqns, needed, awaited)
        if opened is None:
            whole.add(mixed)
            continue
        if mixed.primitive.name not in REMAT:
            whole |= set(opened)
        at = next(i for i, e in enumerate(eqns) if e is mixed)
        eqns = [*eqns[:at], *opened, *eqns[at + 1 :]]
    first = [e for e in eqns if e in needed]
    there = {v for e in first for v in e.outvars}
    second: list[Eqn] = []
    late: set[Var] = set()
    own = {v for e in eqns for v in e.outvars}
    for eqn in eqns:
        if eqn in needed:
            continue
        reads = [v for v in compat.variables(eqn.invars) if v in own]
        if reads and eqn.primitive.name in ("add", "add_any") and all(v in there and v not in late for v in reads):
            first.append(eqn)  # a sum of values of the first part: added at once instead of kept
        else:
            second.append(eqn)
            late |= set(eqn.outvars)
    return first, second


def _needed(eqns: Sequence[Eqn], awaited: set[Var]) -> set[Eqn]:
    wanted = set(awaited)
    found: set[Eqn] = set()
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars) or eqn.effects:
            found.add(eqn)
            wanted |= set(compat.variables(eqn.invars))
    return found


def _wanted(eqn: Eqn, eqns: Sequence[Eqn], needed: set[Eqn], awaited: set[Var]) -> set[Var]:
    """The results of an equation that the awaited values need."""
    read = {v for e in eqns if e in needed and e is not eqn for v in compat.variables(e.invars)} | awaited
    return read.intersection(eqn.outvars)


def _mixed(eqn: Eqn, eqns: Sequence[Eqn], needed: set[Eqn], awaited: set[Var], results: set[Var]) -> bool:
    if eqn.primitive.name not in (*REMAT, "scan"):
        return False
    used = {v for e in eqns for v in compat.variables(e.invars)} | results
    wanted = _wanted(eqn, eqns, needed, awaited)
    return any(v in used and v not in wanted for v in eqn.outvars)


def _open(eqn: Eqn) -> list[Eqn]:
    """The equations of a rematerialised block, inlined."""
    (body,) = bodies_of(eqn)
    names: dict[Var, Atom] = dict(zip(body.invars, eqn.invars, strict=True))
    outs = {a: v for a, v in zip(body.outvars, eqn.outvars, strict=True) if not compat.is_literal(a)}
    found: list[Eqn] = []
    for inner in body.eqns:
        made = [outs.get(v) or compat.fresh_var(v.aval) for v in inner.outvars]
        found.append(with_atoms(inner, names).replace(outvars=made))
        names |= dict(zip(inner.outvars, made, strict=True))
    given = {v for e in found for v in e.outvars}
    for a, v in zip(body.outvars, eqn.outvars, strict=True):  # results that no equation makes, or duplicates
        if v not in given:
            source = a if compat.is_literal(a) else names[a]
            found.append(copy_eqn(source, v))
    return found


def _fission(eqn: Eqn, eqns: Sequence[Eqn], needed: set[Eqn], awaited: set[Var]) -> list[Eqn] | None:
    """A scan as two scans: the first makes the wanted results, the second the rest. None if the first needs all."""
    loop, early = Loop.of(eqn), _wanted(eqn, eqns, needed, awaited)
    made, inner = loop.results, loop.eqns
    while True:  # carries that the first part reads are the first part's
        roots = set(compat.variables(a for v, a in made.items() if v in early))
        first, second = part(inner, roots, compat.variables(made.values()))
        inner = [*first, *second]
        read = {v for e in first for v in compat.variables(e.invars)} | roots
        more = early | {c.end for c in loop.carries if c.before in read}
        if more == early:
            break
        early = more
    late = made.keys() - early
    if not late or not second:
        return None
    steps = reads_of(second, (made[v] for v in late))
    there = dict.fromkeys((*(v for e in first for v in e.outvars), *(c.before for c in loop.carries if c.end in early)))
    kept = {v: loop.stack_of(v) for v in there if v in steps}
    return [
        _scan(loop, first, early, gives={stack: v for v, stack in kept.items()}, takes={}),
        _scan(loop, second, late, gives={}, takes=kept),
    ]


def _scan(
    loop: Loop, eqns: Sequence[Eqn], results: Collection[Var], gives: Mapping[Var, Var], takes: Mapping[Var, Var]
) -> Eqn:
    """The scan of a part of another one's body.

    Args:
      loop: the other one.
      eqns, results: the equations, and the results of the loop that they make.
      gives: values that it stacks for the other part, by their stacks.
      takes: values that it reads from the other part, with their stacks.
    """
    mine = replace(
        loop, carries=[c for c in loop.carries if c.end in results], rows={**loop.rows, **takes},
        stacks={**{v: row for v, row in loop.stacks.items() if v in results}, **gives},
    )  # fmt: skip
    return with_own_bodies(mine.reading(eqns).equation())  # the two scans share no variables
