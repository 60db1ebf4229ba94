"""Collectives that the compiler combines into one. This enters `Plan.seconds`; the search counts those of late values
as combined (`Problem.view_for`).

XLA combines collectives of one kind, group, type and reduction that do not depend on each other, up to a number of
bytes; those of a loop's body among themselves. A combination pays the latency of one start.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.sbp.cost import CollectiveKind


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """A collective of an equation.

    Attributes:
      alike: its groups, type and reduction; collectives are combined only where these agree.
      size: bytes on a device of its result, or of its operand if that is larger and no reduce-scatter's.
      seconds: latency before its first byte moves.
    """

    eqn: Eqn
    kind: CollectiveKind
    alike: Hashable
    size: int
    seconds: float


def combinations(jaxpr: Jaxpr, started: Iterable[Started], most: Mapping[str, float]) -> Iterator[Sequence[Started]]:
    """The combinations of collectives, each in the order in which their operands are made.

    Args:
      started: collectives of the jaxpr's own equations, in order.
      most: the largest combination of each kind, in bytes.
    """
    alike: dict[Hashable, list[Started]] = {}
    for s in started:
        alike.setdefault((s.kind, s.alike), []).append(s)
    made = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars} if alike else {}

    def ready(s: Started) -> int:
        return max((made.get(v, -1) for v in compat.variables(s.eqn.invars)), default=-1)

    for group in alike.values():
        depths = _depths(jaxpr, {s.eqn for s in group})
        waiting: dict[int, tuple[list[Started], int]] = {}  # by depth a combination, and its bytes
        for s in group:
            depth = depths[s.eqn]
            before, size = waiting.get(depth, ([], 0))
            if before and size + s.size > most[s.kind]:
                yield sorted(before, key=ready)
                before, size = [], 0
            waiting[depth] = [*before, s], size + s.size
        for found, _ in waiting.values():
            yield sorted(found, key=ready)


def _depths(jaxpr: Jaxpr, some: set[Eqn]) -> dict[Eqn, int]:
    """For some equations, the longest chain of others of them that each depends on. Equations of one depth do
    not depend on each other."""
    behind: dict[Var, int] = {}
    found: dict[Eqn, int] = {}
    for eqn in jaxpr.eqns:
        depth = max((behind.get(v, 0) for v in compat.variables(eqn.invars)), default=0) if behind else 0
        if eqn in some:
            found[eqn] = depth
            depth += 1
        if depth:
            behind.update(dict.fromkeys(eqn.outvars, depth))
    return found
