"""Splits each stage's backward in two tasks: I, for which the stage before it waits, and W, the rest.

    B: dx = f(dy); dw = g(x, dy); total' = total + dw   -->   I: dx = f(dy)     W: dw = g(x, dy); total' = total + dw

I computes the gradient of the stage's input, W everything else, mostly the gradients of weights (Qi et al. 2023, "Zero
Bubble Pipeline Parallelism"). A rematerialised block is inlined, so that values that both need are recomputed once, in
I. A scan over layers is split into two scans: the first one keeps the values that the second one reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.eqns import copy_eqn
from shardc.ir.nested import REMAT, bodies_of, scan_of, scan_params
from shardc.ir.walk import with_atoms
from shardc.passes.trace.canonicalize import canonical_jaxpr
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


def _wanted(eqn: Eqn, eqns: Sequence[Eqn], needed: set[Eqn], awaited: set[Var]) -> list[bool]:
    """For each result of an equation, whether the awaited values need it."""
    read = {v for e in eqns if e in needed and e is not eqn for v in compat.variables(e.invars)} | awaited
    return [v in read for v in eqn.outvars]


def _mixed(eqn: Eqn, eqns: Sequence[Eqn], needed: set[Eqn], awaited: set[Var], results: set[Var]) -> bool:
    if eqn.primitive.name not in (*REMAT, "scan"):
        return False
    used = {v for e in eqns for v in compat.variables(e.invars)} | results
    wanted = _wanted(eqn, eqns, needed, awaited)
    return any(not w and v in used for v, w in zip(eqn.outvars, wanted, strict=True))


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
    scan = scan_of(eqn)
    body, nc, nk = scan.body, scan.consts, scan.carries
    wanted = _wanted(eqn, eqns, needed, awaited)
    carried = body.invars[nc : nc + nk]
    inner = list(body.eqns)
    early = {i for i in range(len(wanted)) if wanted[i]}
    while True:  # carries that the first part reads are the first part's
        roots = {a for i, a in enumerate(body.outvars) if i in early and not compat.is_literal(a)}
        first, second = part(inner, roots, [a for a in body.outvars if not compat.is_literal(a)])
        inner = [*first, *second]
        read = {v for e in first for v in compat.variables(e.invars)} | roots
        more = early | {i for i, v in enumerate(carried) if v in read}
        if more == early:
            break
        early = more
    late = [i for i in range(len(body.outvars)) if i not in early]
    if not late or not second:
        return None
    steps = {v for e in second for v in compat.variables(e.invars)} | {
        body.outvars[i] for i in late if not compat.is_literal(body.outvars[i])
    }
    there = dict.fromkeys([*(v for e in first for v in e.outvars), *(carried[i] for i in range(nk) if i in early)])
    kept = [v for v in there if v in steps]
    kept_outer = [compat.fresh_var(_stacked(v.aval, scan.length)) for v in kept]
    stacks = dict(zip(kept, kept_outer, strict=True))
    one = _ScanPart(first, [i for i in range(len(body.outvars)) if i in early], stacks, {})
    return [_scan(eqn, one), _scan(eqn, _ScanPart(second, late, {}, stacks))]


@dataclass(frozen=True)
class _ScanPart:
    """A part of a scan's body that becomes a scan of its own.

    Attributes:
      eqns: the equations.
      results: the numbers of the scan's results that they make, carries first.
      gives: values that it stacks for the other part, with the variables of the stacks.
      takes: values that it reads from the other part, with the variables of the stacks.
    """

    eqns: Sequence[Eqn]
    results: Sequence[int]
    gives: Mapping[Var, Var]
    takes: Mapping[Var, Var]


def _scan(eqn: Eqn, part: _ScanPart) -> Eqn:
    """The scan of a part of another scan's body."""
    scan = scan_of(eqn)
    body, nc, nk = scan.body, scan.consts, scan.carries
    befores = [body.invars[nc + i] for i in part.results if i < nk]
    outs = [*(body.outvars[i] for i in part.results), *part.gives]
    read = {v for e in part.eqns for v in compat.variables(e.invars)} | set(compat.variables(outs))
    consts = [v for v in body.invars[:nc] if v in read]
    xs = [*(v for v in body.invars[nc + nk :] if v in read), *part.takes]
    inner = compat.new_jaxpr([*consts, *befores, *xs], outs, part.eqns, body)
    operand: dict[Var, Atom] = {**dict(zip(body.invars, eqn.invars, strict=True)), **part.takes}
    invars = [operand[v] for v in (*consts, *befores, *xs)]
    inner = canonical_jaxpr(inner, ())  # the two scans share no variables
    params = scan_params(eqn, inner, len(consts), len(befores))
    outvars = [*(eqn.outvars[i] for i in part.results), *part.gives.values()]
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=inner.effects)


def _stacked(aval: object, length: int) -> object:
    return aval.update(shape=(length, *aval.shape))  # type: ignore[attr-defined]
