"""Activation recompute as a choice of the plan: a stage keeps only its input and recomputes its forward.

    F: y = f x; z = g y     B: dx = h(y, z, dz)
        -->   F: y = f x; z = g y     B: y' = f x; z' = g y'; dx = h(y', z', dz)

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The backward of the stage recomputes the values of
the forward that it reads. Random bits come from keys, so they are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.walk import with_atoms
from shardc.passes.trace.canonicalize import with_own_bodies
from shardc.pipeline.cut.cut_loop import PlacedBody
from shardc.pipeline.schedule.action import TaskId


def recompute_forward(body: PlacedBody, stages: Collection[int]) -> PlacedBody:
    """The body in which the backward of each of `stages` repeats the forward."""
    for stage in sorted(stages):
        if body.backward and not (body.fused and stage == body.stages - 1):
            body = replace(body, eqns=_repeated(body, stage))
    return body


def _repeated(body: PlacedBody, stage: int) -> tuple[tuple[TaskId, Eqn], ...]:
    ahead, back = TaskId(stage, "F"), TaskId(stage, "B")
    made = {v: i for i, (p, e) in enumerate(body.eqns) if p == ahead for v in e.outvars}
    own = {v for p, e in body.eqns if p == back for v in e.outvars}
    wanted = {v for p, e in body.eqns if p == back for v in compat.variables(e.invars) if v in made and v not in own}
    repeated: set[int] = set()
    pending = list(wanted)
    while pending:
        i = made[pending.pop()]
        if i not in repeated and not body.eqns[i][1].effects:
            repeated.add(i)
            pending += [v for v in compat.variables(body.eqns[i][1].invars) if v in made]
    names: dict[Var, Atom] = {}
    found: list[tuple[TaskId, Eqn]] = []
    begun = False
    for p, eqn in body.eqns:
        if p == back and not begun:
            begun = True
            for i in sorted(repeated):
                copy = with_own_bodies(with_atoms(body.eqns[i][1], names))
                fresh = [compat.fresh_var(v.aval) for v in copy.outvars]
                names |= dict(zip(body.eqns[i][1].outvars, fresh, strict=True))
                found.append((back, compat.as_recomputed(copy.replace(outvars=fresh))))
        mine = {v: a for v, a in names.items() if v not in own} if p == back else {}
        found.append((p, with_atoms(eqn, mine)))
    return tuple(found)
