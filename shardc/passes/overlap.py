"""What of a program's reductions hides behind computing. Enters `Plan.seconds` alone, never the choice of placements.

A reduction is late if nothing heavy depends on it, directly or by way of others: only the optimizer and the results
read it. It can start when its operand is there, and run while what follows in the program computes; all late reductions
share the links, one after the other. What has not been sent when the program has computed its last is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var


def late_values(jaxpr: Jaxpr, late_results: Sequence[bool], heavy: Callable[[Eqn], bool]) -> set[Var]:
    """The values that nothing heavy in a jaxpr, and no result that is not late itself, depends on."""
    busy = {v for v, late in zip(jaxpr.outvars, late_results, strict=True) if not late and not compat.is_literal(v)}
    late: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if heavy(eqn) or not busy.isdisjoint(eqn.outvars):
            busy |= {v for v in eqn.invars if not compat.is_literal(v)}
        late |= set(eqn.outvars) - busy
    return late


def hidden_seconds(
    jaxpr: Jaxpr, late: Collection[Var], reducing: Callable[[Eqn], float], computing: Callable[[Eqn], float]
) -> float:
    """How much of the late reductions of a jaxpr hides behind what it computes after their operands.

    Args:
      late: values, of `late_values`.
      reducing: seconds of an equation's reduction, 0 if it is none.
      computing: seconds that an equation computes.
    """
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    ready = [0.0] * (len(jaxpr.eqns) + 1)
    for eqn in jaxpr.eqns:
        if all(v in late for v in eqn.outvars) and (seconds := reducing(eqn)):
            ready[1 + max((made.get(v, -1) for v in eqn.invars if not compat.is_literal(v)), default=-1)] += seconds
    waiting, hidden = ready[0], 0.0
    for eqn, more in zip(jaxpr.eqns, ready[1:], strict=True):
        sent = min(waiting, computing(eqn))
        hidden, waiting = hidden + sent, waiting - sent + more
    return hidden
