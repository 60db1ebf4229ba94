"""Loops of a program that XLA:TPU makes one: those over the same memory of which none waits for another.

An activation is computed again for the gradient of weights, and the gradient of its operand is computed from the same
operand: one loop with two results, as soon as there is all that it reads. What the earlier of the two makes is there
until then, whoever read it before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from shardc import compat
from shardc.compat import Var
from shardc.passes.estimate.backend import IN_LOOPS, Step

LOOK: Final = 256
"""Values looked at for whether one is computed from another; with so many between them, it mostly is."""
MORE: Final = 64
"""Values looked at besides: what is read on the way is known to be computed from as many, too."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A value that stays because the loop that makes it is one with a later one.

    Attributes:
      begin: the point at which it would be gone.
      ends: for each value that both loops read from memory, the point behind the later loop.
    """

    value: Var
    begin: int
    ends: Mapping[Var, int]


def reads_of(starts: Mapping[Var, int], maker: Mapping[Var, Step]) -> dict[Var, list[Var]]:
    """For each value that a loop makes in memory, those of its size that the loop reads from memory.

    Args:
      starts: what loops make in memory, and the points at which they run.
      maker: of each value the equation that makes it.
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


def joined_loops(
    starts: Mapping[Var, int], reads: Mapping[Var, Sequence[Var]], maker: Mapping[Var, Step]
) -> dict[Var, dict[Var, int]]:
    """For what loops make that are one with a later loop, by what both read, the point behind that.

    Args:
      starts, reads, maker: as for `reads_of`, and what that has found.
    """
    over: dict[tuple[Var, int, int], list[Var]] = defaultdict(list)
    for v in sorted(reads, key=starts.__getitem__):
        for a in reads[v]:
            over[a, maker[v].home, compat.size_of(v.aval)].append(v)
    follows = dict.fromkeys((pair for loops in over.values() for pair in pairwise(loops)), False)
    far: dict[Var, int] = {}
    for v, later in reversed(follows):  # the innermost of a forward and a backward pass first: others follow from these
        follows[v, later] = _follows(later, v, maker, far)
    found: dict[Var, dict[Var, int]] = defaultdict(dict)
    for (a, *_), loops in over.items():
        for v, later in pairwise(loops):
            if not follows[v, later]:
                found[v][a] = starts[later] + 1
    return found


def _follows(later: Var, v: Var, maker: Mapping[Var, Step], far: dict[Var, int]) -> bool:
    """Whether a value is computed from another, or from at least `LOOK` values made since, itself one of them.

    Args:
      far: points since when values are known to be computed from so many.
    """
    todo, seen, start = [later], {later}, maker[v].at
    above: list[tuple[Var, int, int]] = []  # what is looked into, what was seen before, and what was to do besides
    while todo and len(seen) < LOOK + MORE:
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
    many = [y for y, before, _ in above if len(seen) - before >= LOOK]
    far.update([(y, start) for y in many if far.get(y, -1) < start])
    return len(seen) >= LOOK
