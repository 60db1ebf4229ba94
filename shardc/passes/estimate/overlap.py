"""What of a program's reductions hides behind computing. Enters `Plan.seconds` alone, never the choice of placements.

A reduction is late if nothing heavy depends on it, directly or by way of others: only the optimizer and the results
read it. It can start when its operand is there, and run while what follows in the program computes; all late reductions
share the links, one after the other. What has not been sent when the program has computed its last is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from shardc import compat
from shardc.compat import Jaxpr, Var


def late_values(jaxpr: Jaxpr, late_results: Sequence[bool], heavy: Set[int]) -> set[Var]:
    """The values that nothing heavy in a jaxpr, and no result that is not late itself, depends on.

    Args:
      late_results: of each result whether it is late.
      heavy: ids of the equations that are heavy.
    """
    busy = {v for v, late in zip(jaxpr.outvars, late_results, strict=True) if not late and not compat.is_literal(v)}
    late: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) in heavy or not busy.isdisjoint(eqn.outvars):
            busy.update([v for v in eqn.invars if not compat.is_literal(v)])
            late.update([v for v in eqn.outvars if v not in busy])
        else:
            late.update(eqn.outvars)
    return late


def hidden_seconds(
    jaxpr: Jaxpr, late: Set[Var], reducing: Mapping[int, float], computing: Mapping[int, float]
) -> float:
    """How much of the late reductions of a jaxpr hides behind what it computes after their operands.

    Args:
      late: values, of `late_values`.
      reducing: by id of an equation, seconds of the reduction that it is.
      computing: by id of an equation, seconds that it computes.
    """
    found = [eqn for eqn in jaxpr.eqns if reducing.get(id(eqn)) and all(v in late for v in eqn.outvars)]
    if not found:
        return 0.0
    operands = {v for eqn in found for v in compat.variables(eqn.invars)}
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars if v in operands}
    ready = [0.0] * (len(jaxpr.eqns) + 1)
    for eqn in found:
        behind = max((made.get(v, -1) for v in compat.variables(eqn.invars)), default=-1)
        ready[1 + behind] += reducing[id(eqn)]
    waiting, hidden = ready[0], 0.0
    for eqn, more in zip(jaxpr.eqns, ready[1:], strict=True):
        if more or id(eqn) in computing:
            sent = min(waiting, computing.get(id(eqn), 0.0))
            hidden, waiting = hidden + sent, waiting - sent + more
    return hidden
