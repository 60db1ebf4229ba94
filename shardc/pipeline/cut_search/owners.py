"""Groups each parameter of a training step with the sum of its gradients and its optimizer state.

They are connected after the loop by operations on values of one shape, as in `p + rate * mu / sqrt(nu)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Var
from shardc.ir.loop import Loop
from shardc.ir.nested import NESTED
from shardc.ir.program import Program


@dataclass(frozen=True)
class Owned:
    """The values that are kept with one input of a loop's body.

    Attributes:
      arguments: numbers of the program's inputs: the input itself, and those that are updated together with it.
      sums: numbers of the loop's sums over microbatches that update it.
    """

    arguments: tuple[int, ...]
    sums: tuple[int, ...]


def find_owned(program: Program, loop: Loop) -> Mapping[Var, Owned]:
    """The values that are kept with each input of the loop's body."""
    group = _groups(program, loop)
    inputs = {v: a for v, a in loop.operands.items() if not compat.is_literal(a)}
    carried = {c.before for c in loop.carries}
    by_group: dict[Var, list[int]] = {}
    for i, v in enumerate(program.jaxpr.invars):
        by_group.setdefault(group(v), []).append(i)
    sums: dict[Var, list[int]] = {}
    for j, c in enumerate(loop.carries):
        sums.setdefault(group(c.end), []).append(j)
    own = {i for a in inputs.values() for i, v in enumerate(program.jaxpr.invars) if v is a}
    found: dict[Var, Owned] = {}
    taken: set[int] = set()
    for v, a in inputs.items():
        if v not in carried:
            mine = [i for i in by_group.get(group(a), ()) if program.jaxpr.invars[i] is a or i not in own | taken]
            taken |= set(mine)
            found[v] = Owned(tuple(mine), tuple(sums.get(group(a), ())))
    return found


def _groups(program: Program, loop: Loop) -> Callable[[Var], Var]:
    """A function from a variable to the representative of its group.

    Operations outside of the loop on values of one shape connect these values to a group.
    """
    parent: dict[Var, Var] = {}

    def top(v: Var) -> Var:
        while (up := parent.get(v, v)) is not v:
            parent[v] = v = parent.get(up, up)
        return v

    for eqn in program.jaxpr.eqns:
        if eqn is loop.eqn or eqn.primitive.name in NESTED:
            continue
        same: dict[tuple[int, ...], Var] = {}
        for v in (*eqn.outvars, *eqn.invars):
            if not compat.is_literal(v) and math.prod(v.aval.shape) > 1:
                parent[top(v)] = top(same.setdefault(v.aval.shape, v))
    return top
