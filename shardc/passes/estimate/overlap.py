"""Collectives that overlap with computation. This enters `Plan.seconds` alone, never the choice of placements.

A collective can go on from when its operand is made until the first computing equation that depends on its result. It
overlaps with what the device computes in between: the gather of a layer's weights with the products before those that
read them, the reduction of a gradient with the rest of the backward pass. Each body is looked at by itself: nothing of
the next round of a loop begins in this one, and nothing of this one is left for the next. Collectives share the links,
one after the other, that which is needed first before the others. What is not sent in time adds to the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TypeAlias

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var

Reads: TypeAlias = Sequence[tuple[Eqn, Sequence[Var]]]
"""Equations in order, each with the values that it reads."""


def overlapped_seconds(
    jaxpr: Jaxpr, sending: Sequence[tuple[Collection[Eqn], float]], computing: Mapping[Eqn, float]
) -> list[float]:
    """Seconds of each collective that overlap with what a jaxpr computes.

    Args:
      sending: for each collective its equations, more than one if they are combined, and its seconds.
      computing: seconds that equations compute while the links are idle.
    """
    computing = {eqn: seconds for eqn in jaxpr.eqns if (seconds := computing.get(eqn, 0.0)) > 0}
    if not sending or not computing:
        return [0.0] * len(sending)
    wanted = {eqn for eqns, _ in sending for eqn in eqns}
    reads = [(eqn, [a for a in eqn.invars if not compat.is_literal(a)]) for eqn in jaxpr.eqns]
    begins, ends = _begins(reads, wanted, computing), _ends(reads, wanted, computing)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(len(computing) + 1)]
    for k, (eqns, _) in enumerate(sending):
        ready[max(begins[eqn] for eqn in eqns)].append((min(ends[eqn] for eqn in eqns), k))
    left, waiting = [seconds for _, seconds in sending], list[tuple[int, int]]()
    for now, (seconds, more) in enumerate(zip(computing.values(), ready, strict=False)):
        for one in more:
            heapq.heappush(waiting, one)
        while waiting and seconds:
            end, k = waiting[0]
            sent = min(left[k], seconds) if end > now else 0.0
            left[k], seconds = left[k] - sent, seconds - sent
            if end <= now or not left[k]:
                heapq.heappop(waiting)
    return [seconds - rest for (_, seconds), rest in zip(sending, left, strict=True)]


def _begins(reads: Reads, wanted: Set[Eqn], computing: Mapping[Eqn, float]) -> dict[Eqn, int]:
    """For each wanted equation the number of computing equations up to the last that it depends on."""
    made: dict[Var, int] = {}
    found: dict[Eqn, int] = {}
    step = 0
    for eqn, operands in reads:
        if eqn in computing:
            at = step = step + 1
        else:
            at = max([made[v] for v in operands if v in made], default=0)
            if eqn in wanted:
                found[eqn] = at
        if at:
            for v in eqn.outvars:
                made[v] = at
    return found


def _ends(reads: Reads, wanted: Set[Eqn], computing: Mapping[Eqn, float]) -> dict[Eqn, int]:
    """For each wanted equation the number of computing equations before the first that depends on it."""
    step = last = len(computing)
    needed: dict[Var, int] = {}
    found: dict[Eqn, int] = {}
    for eqn, operands in reversed(reads):
        if eqn in computing:
            at = step = step - 1
        else:
            at = min([needed[v] for v in eqn.outvars if v in needed], default=last)
            if eqn in wanted:
                found[eqn] = at
        if at < last:
            for v in operands:
                if needed.get(v, last) > at:
                    needed[v] = at
    return found
