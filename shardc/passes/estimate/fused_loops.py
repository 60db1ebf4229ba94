"""Sibling fusion on XLA:TPU: loops that read the same memory and do not depend on each other become one loop.

Example: a loop recomputes an activation for the gradient of weights, and another computes the gradient of its operand
from the same operand. They become one loop with two results, which runs when everything that both read is ready. So the
result of the earlier loop stays live until then, even if its own reader ran before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from shardc import compat
from shardc.compat import Jaxpr, Var
from shardc.passes.estimate.backend import IN_LOOPS, ScheduledEqn

DEPENDENCY_LIMIT: Final = 256
"""Values that the search for a dependency visits. With this many values between two, one mostly depends on the
other."""
DEPENDENCY_MARGIN: Final = 64
"""Values visited besides, so that values on the way are known to depend on as many, too."""


@dataclass(frozen=True, slots=True)
class ExtendedRange:
    """A value whose live range is longer because its loop is fused with a later one.

    Attributes:
      begin: the point at which it would be gone otherwise.
      ends: for each value that both loops read from memory, the point behind the later loop.
    """

    value: Var
    begin: int
    ends: Mapping[Var, int]


def reads_of(starts: Mapping[Var, int], maker: Mapping[Var, ScheduledEqn]) -> dict[Var, list[Var]]:
    """For each value that a loop materializes, the values of its size that the loop reads from memory.

    Args:
      starts: values that loops materialize, and the points at which the loops run.
      maker: the equation that makes each value.
    """
    found: dict[Var, list[Var]] = {}
    for v in starts:
        aval, size = v.aval, compat.size_of(v.aval)
        todo, seen = [v], {v}
        read: list[Var] = []
        while todo:
            for a in maker[todo.pop()].operands:
                if a in seen or not (a.aval is aval or compat.size_of(a.aval) == size):
                    continue
                seen.add(a)
                inside = a not in starts and a in maker and maker[a].kind in IN_LOOPS
                (todo if inside else read).append(a)
        found[v] = read
    return found


def fused_siblings(
    starts: Mapping[Var, int], reads: Mapping[Var, Sequence[Var]], maker: Mapping[Var, ScheduledEqn]
) -> dict[Var, dict[Var, int]]:
    """For each value that a loop makes which is fused with a later loop: the point behind that, by the value that both
    read.

    Args:
      starts, reads, maker: as for `reads_of`, and its result.
    """
    over: dict[tuple[Var, Jaxpr, int], list[Var]] = defaultdict(list)
    for v in sorted(reads, key=starts.__getitem__):
        for a in reads[v]:
            over[a, maker[v].home, compat.size_of(v.aval)].append(v)
    follows = dict.fromkeys((pair for loops in over.values() for pair in pairwise(loops)), False)
    far: dict[Var, int] = {}
    for v, later in reversed(follows):  # innermost pairs of forward and backward first: outer ones follow from them
        follows[v, later] = _follows(later, v, maker, far)
    found: dict[Var, dict[Var, int]] = defaultdict(dict)
    for (a, *_), loops in over.items():
        for v, later in pairwise(loops):
            if not follows[v, later]:
                found[v][a] = starts[later] + 1
    return found


def _follows(later: Var, v: Var, maker: Mapping[Var, ScheduledEqn], far: dict[Var, int]) -> bool:
    """Whether `later` depends on `v`, or on at least `DEPENDENCY_LIMIT` values made since, itself included.

    Args:
      far: points since which a value is known to depend on that many.
    """
    todo, seen, start = [later], {later}, maker[v].at
    above: list[tuple[Var, int, int]] = []  # the path to here: a value, and the sizes of `seen` and `todo` before it
    while todo and len(seen) < DEPENDENCY_LIMIT + DEPENDENCY_MARGIN:
        x = todo.pop()
        while above and above[-1][2] > len(todo):
            above.pop()
        above.append((x, len(seen), len(todo)))
        for a in maker[x].operands:
            if a is v:
                return True
            if a in seen or a not in maker or maker[a].at <= start:
                continue
            if far.get(a, -1) >= start:
                far.update([(y, start) for y, *_ in above if far.get(y, -1) < start])
                return True
            seen.add(a)
            todo.append(a)
    many = [y for y, before, _ in above if len(seen) - before >= DEPENDENCY_LIMIT]
    far.update([(y, start) for y in many if far.get(y, -1) < start])
    return len(seen) >= DEPENDENCY_LIMIT
