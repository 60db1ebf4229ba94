"""Which of a program's collectives the compiler combines into one. Enters `Plan.seconds`; the search counts those of
late values as combined (`Problem.view_for`).

XLA combines collectives of one kind, over the same groups, of one type and by one reduction, that do not wait for each
other, up to so many bytes; those of a loop's body among themselves. Together they start once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var
from shardc.passes.collective import Kind


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """A collective of an equation.

    Attributes:
      alike: its groups, type and reduction: those of others that it is combined with are the same.
      size: bytes that a device holds of its operand and its result.
      seconds: before its first byte moves.
    """

    eqn: Eqn
    kind: Kind
    alike: Hashable
    size: int
    seconds: float


def combined_starts(
    jaxpr: Jaxpr, started: Iterable[Started], most: Mapping[str, float]
) -> Iterator[tuple[Eqn, Kind, float]]:
    """The seconds that equations do not wait for: they start with another of the same combination, the last of it.

    Args:
      started: collectives of the jaxpr's own equations, in order.
      most: by kind, bytes that one combination holds.
    """
    groups: dict[Hashable, list[Started]] = {}
    for s in started:
        groups.setdefault((s.kind, s.alike), []).append(s)
    for group in groups.values():
        if len(group) == 1:
            continue
        depths = _depths(jaxpr, {id(s.eqn) for s in group})
        waiting: dict[int, tuple[Started, int]] = {}  # by depth the last of a combination, and its bytes
        for s in group:
            depth = depths[id(s.eqn)]
            before, size = waiting.get(depth, (None, 0))
            if before is not None and size + s.size <= most[s.kind]:
                yield before.eqn, before.kind, before.seconds
            else:
                size = 0
            waiting[depth] = s, size + s.size


def _depths(jaxpr: Jaxpr, some: set[int]) -> dict[int, int]:
    """Of some equations, by id, how many of them follow one another before each. None of two of one depth waits for the
    other."""
    behind: dict[Var, int] = {}
    found: dict[int, int] = {}
    for eqn in jaxpr.eqns:
        depth = max((behind.get(v, 0) for v in compat.variables(eqn.invars)), default=0) if behind else 0
        if id(eqn) in some:
            found[id(eqn)] = depth
            depth += 1
        if depth:
            behind.update(dict.fromkeys(eqn.outvars, depth))
    return found
