"""Collectives that overlap with computation. This enters `Plan.seconds`; the search
counts rings alone as hidden.

A collective can go on from when its operand is made until the first computing equation that depends on its result. It
overlaps with what the device computes in between: the gather of a layer's weights with the products before those that
read them, the reduction of a gradient with the rest of the backward pass. Each body is looked at by itself: nothing of
the next round of a loop begins in this one, and nothing of this one is left for the next. Collectives share the links,
one after the other, that which is needed first before the others. What is not sent in time adds to the time.

This is what could be hidden. What XLA hides of it on a kind of machine is a share (`shardc/machine/overlaps.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from shardc import compat
from shardc.compat import Eqn, Jaxpr, Var

Reads: TypeAlias = Sequence[tuple[Eqn, Sequence[Var]]]
"""Equations in order, each with the values that it reads."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective that a plan counts on to be hidden, in part or as a whole. Numbers are of one call.

    Attributes:
      kind: of collective; "ring": permutes of pieces that go around beside what their own operation computes.
      axes: mesh axes that it goes along.
      value: what it sends: dtype and logical shape, as `bf16[8,128]`. Of collectives that the compiler combines the
        largest, and the number of the others.
      source: the line of user code that it comes from.
      beside: the work that hides most of it: a primitive and its line of user code.
      bytes: sent per device.
      seconds: that it takes by itself.
      could: seconds of it that could be hidden.
      share: the part of these that the compiler of the machine hides.
    """

    kind: str
    axes: tuple[str, ...]
    value: str
    source: str
    beside: str
    bytes: float
    seconds: float
    could: float
    share: float

    @property
    def hidden(self) -> float:
        """Seconds that the plan counts as hidden."""
        return self.could * self.share


def hidden_beside(
    jaxpr: Jaxpr, sending: Sequence[tuple[Collection[Eqn], float]], computing: Mapping[Eqn, float]
) -> list[dict[Eqn, float]]:
    """Seconds of each collective that can overlap with what a jaxpr computes, by the equation that computes meanwhile.

    Args:
      sending: for each collective its equations, more than one if they are combined, and its seconds.
      computing: seconds that equations compute while the links are idle.
    """
    computing = {eqn: seconds for eqn in jaxpr.eqns if (seconds := computing.get(eqn, 0.0)) > 0}
    if not sending or not computing:
        return [{} for _ in sending]
    wanted = {eqn for eqns, _ in sending for eqn in eqns}
    reads = [(eqn, [a for a in eqn.invars if not compat.is_literal(a)]) for eqn in jaxpr.eqns]
    begins, ends = _begins(reads, wanted, computing), _ends(reads, wanted, computing)
    spans = [(max(begins[e] for e in eqns), min(ends[e] for e in eqns), seconds) for eqns, seconds in sending]
    steps, sent = list(computing), _sent_beside(spans, list(computing.values()))
    return [{steps[at]: seconds for at, seconds in some.items()} for some in sent]


def _sent_beside(spans: Sequence[tuple[int, int, float]], computed: Sequence[float]) -> list[dict[int, float]]:
    """The use of the links while a device computes, if that which is needed first is sent first.

    Args:
      spans: of each collective the first step beside which it can run, the one behind the last, and its seconds.
      computed: the seconds of each step.

    Returns:
      For each collective the seconds that are sent beside each step.
    """
    ready: list[list[tuple[int, int]]] = [[] for _ in range(len(computed) + 1)]
    for k, (begin, end, seconds) in enumerate(spans):
        if seconds > 0 and begin < end:
            ready[begin].append((end, k))
    left, waiting = [seconds for _, _, seconds in spans], list[tuple[int, int]]()
    found: list[dict[int, float]] = [{} for _ in spans]
    for now, (seconds, more) in enumerate(zip(computed, ready, strict=False)):
        for one in more:
            heapq.heappush(waiting, one)
        while waiting and seconds > 0:
            end, k = waiting[0]
            if end > now:
                found[k][now] = sent = min(left[k], seconds)
                left[k], seconds = left[k] - sent, seconds - sent
            if end <= now or not left[k]:
                heapq.heappop(waiting)
    return found


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
