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
from shardc.compat import Eqn, Var
from shardc.passes.fusion import IN_LOOPS, kind_of

LOOK: Final = 256
"""Values looked at for whether one is computed from another; with so many between them, it mostly is."""


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


def reads_of(starts: Mapping[Var, int], maker: Mapping[Var, Eqn]) -> dict[Var, list[Var]]:
    """For each value that a loop makes in memory, those of its size that the loop reads from memory.

    Args:
      starts: what loops make in memory, and the points at which they run.
      maker: of each value the equation that makes it.
    """
    found: dict[Var, list[Var]] = {}
    for v in starts:
        aval, size = v.aval, compat.size_of(v.aval)
        todo, seen, read = [v], {v}, list[Var]()
        while todo:
            for a in maker[todo.pop()].invars:
                if compat.is_literal(a) or a in seen or not (a.aval is aval or compat.size_of(a.aval) == size):
                    continue
                seen.add(a)
                inside = a in maker and a not in starts and kind_of(maker[a]) in IN_LOOPS
                (todo if inside else read).append(a)
        found[v] = read
    return found


def joined_loops(
    starts: Mapping[Var, int], reads: Mapping[Var, Sequence[Var]], maker: Mapping[Var, Eqn], home: Mapping[Var, int],
    made: Mapping[Var, int],
) -> dict[Var, dict[Var, int]]:  # fmt: skip
    """For what loops make that are one with a later loop, by what both read, the point behind that.

    Args:
      starts, reads, maker: as for `reads_of`, and what that has found.
      home: the body in which a value is made.
      made: the point at which it is.
    """
    over: dict[tuple[Var, int, int], list[Var]] = defaultdict(list)
    for v in sorted(reads, key=starts.__getitem__):
        for a in reads[v]:
            over[a, home[v], compat.size_of(v.aval)].append(v)
    pairs = dict.fromkeys(pair for loops in over.values() for pair in pairwise(loops))
    far: dict[Var, int] = {}
    for v, later in reversed(pairs):  # the innermost of a forward and a backward pass first: others follow from these
        pairs[v, later] = _follows(later, v, maker, made, far)
    found: dict[Var, dict[Var, int]] = defaultdict(dict)
    for (a, *_), loops in over.items():
        for v, later in pairwise(loops):
            if not pairs[v, later]:
                found[v][a] = starts[later] + 1
    return found


def _follows(
    later: Var, v: Var, maker: Mapping[Var, Eqn], made: Mapping[Var, int], far: dict[Var, int]
) -> bool:
    """Whether a value is computed from another, or from at least `LOOK` values made since, itself one of them.

    Args:
      far: points since when values are known to be computed from so many.
    """
    todo, seen, start = [later], {later}, made[v]
    while todo:
        if len(seen) >= LOOK:
            far[later] = max(start, far.get(later, start))
            return True
        for a in maker[todo.pop()].invars:
            if a is v:
                return True
            if compat.is_literal(a) or a in seen or made.get(a, -1) <= start:
                continue
            if far.get(a, -1) >= start:
                far[later] = max(start, far.get(later, start))
                return True
            seen.add(a)
            todo.append(a)
    return False
