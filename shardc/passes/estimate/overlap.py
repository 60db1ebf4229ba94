"""Reductions that overlap with computation. This enters `Plan.seconds` alone, never the choice of placements.

A reduction is late if no heavy operation depends on it, directly or not: only the optimizer and the results read it. It
can start when its operand is ready, and overlaps with what the program computes after that. Late reductions share the
links, one after the other. What is not sent when the program has computed everything adds to its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var


def late_values(jaxpr: Jaxpr, late_results: Sequence[bool], heavy: Set[Eqn]) -> set[Var]:
    """The values of a jaxpr that no heavy operation depends on, and no result that is not late itself.

    Args:
      late_results: for each result whether it is late.
      heavy: the heavy equations.
    """
    busy = {v for v, late in zip(jaxpr.outvars, late_results, strict=True) if not late and not compat.is_literal(v)}
    late: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn in heavy or not busy.isdisjoint(eqn.outvars):
            busy.update([v for v in eqn.invars if not compat.is_literal(v)])
            late.update([v for v in eqn.outvars if v not in busy])
        else:
            late.update(eqn.outvars)
    return late


def overlapped_seconds(
    jaxpr: Jaxpr, late: Set[Var], reducing: Mapping[Eqn, float], computing: Mapping[Eqn, float]
) -> float:
    """Seconds of the late reductions of a jaxpr that overlap with what it computes after their operands.

    Args:
      late: the late values (`late_values`).
      reducing: seconds of each equation that is a reduction.
      computing: seconds that each equation computes.
    """
    found = [eqn for eqn in jaxpr.eqns if reducing.get(eqn) and all(v in late for v in eqn.outvars)]
    if not found:
        return 0.0
    operands = {v for eqn in found for v in compat.variables(eqn.invars)}
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars if v in operands}
    ready = [0.0] * (len(jaxpr.eqns) + 1)
    for eqn in found:
        last = max((made.get(v, -1) for v in compat.variables(eqn.invars)), default=-1)
        ready[1 + last] += reducing[eqn]
    waiting, overlapped = ready[0], 0.0
    for eqn, more in zip(jaxpr.eqns, ready[1:], strict=True):
        if more or eqn in computing:
            sent = min(waiting, computing.get(eqn, 0.0))
            overlapped, waiting = overlapped + sent, waiting - sent + more
    return overlapped
