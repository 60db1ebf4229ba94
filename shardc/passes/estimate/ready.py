"""The earliest point at which each value can be ready, on devices that start operations early (`Backend.eager`).

Collectives and fused operations start as soon as their operands are ready. But all-reduces wait for each other: those
that do not depend on each other's results are one operation, which starts with the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.nested import REMAT, bodies_of, nested_bodies
from shardc.passes.estimate.backend import IN_LOOPS, PRODUCTS, FusionKind, kind_of


@dataclass
class Ready:
    """Readiness of a program's values, in the points of time of `live_ranges`.

    Attributes:
      at: the first point at which each value can be ready.
      operands: for a product, by equation, the first points of its operands.
      together: for the result of an all-reduce, the last point at which one of the same combined operation is made.
    """

    at: dict[Var, int] = field(default_factory=dict[Var, int])
    operands: dict[Eqn, tuple[int, ...]] = field(default_factory=dict[Eqn, tuple[int, ...]])
    together: dict[Var, int] = field(default_factory=dict[Var, int])


def find_ready(jaxpr: Jaxpr) -> Ready:
    """The earliest readiness of each value of a program, nested bodies included."""
    walk = _Walk()
    walk.body(jaxpr, jaxpr)
    walk.found.together = {v: walk.last[group] for v, group in walk.group.items()}
    return walk.found


class _Walk:
    """The walk from the first equation to the last.

    Attributes:
      round: the number of combined all-reduces that a value depends on.
      group: the combined operation of an all-reduce: its loop or branch, and the round. `last`: the point of the last
        one of a group; `latest`: the last round in a loop or branch.
    """

    def __init__(self) -> None:
        self.found, self.now = Ready(), 0
        self.round: dict[Var, int] = {}
        self.group: dict[Var, tuple[Jaxpr, int]] = {}
        self.last: dict[tuple[Jaxpr, int], int] = {}
        self.latest: dict[Jaxpr, int] = {}

    def body(self, jaxpr: Jaxpr, scope: Jaxpr) -> None:
        """`scope`: the loop or branch that the jaxpr is in."""
        at = self.found.at
        for eqn in jaxpr.eqns:
            kind = kind_of(eqn)
            ready = [0 if compat.is_literal(a) else at.get(a, 0) for a in eqn.invars]
            for body in nested_bodies(eqn):
                self.now += 1  # values that a loop does not change are ready before it
                at |= {v: ready[n] if i < body.fixed else self.now for i, (v, n) in enumerate(body.inputs)}
                if eqn.primitive.name in REMAT:
                    self.round |= {v: self.round_of(a) for v, a in body.given(eqn)}
                self.body(body.jaxpr, scope if eqn.primitive.name in REMAT else body.jaxpr)
            early = kind in IN_LOOPS or kind is FusionKind.MOVED
            if eqn.primitive.name in PRODUCTS:
                self.found.operands[eqn] = tuple(ready)
            at.update(dict.fromkeys(eqn.outvars, max(ready, default=0) if early else self.now + 1))
            self.rounds(eqn, scope)
            self.now += 1

    def round_of(self, a: Atom) -> int:
        return 0 if compat.is_literal(a) else self.round.get(a, 0)

    def rounds(self, eqn: Eqn, scope: Jaxpr) -> None:
        """Sets the number of combined all-reduces that each result depends on."""
        if eqn.primitive.name in REMAT:
            self.round |= {v: self.round_of(a) for v, a in zip(eqn.outvars, bodies_of(eqn)[0].outvars, strict=True)}
            return
        turn = max(map(self.round_of, eqn.invars), default=0)
        if eqn.primitive.name == "box" and eqn.params["src"].partial_axes:
            turn = self.latest[scope] = max(self.latest.get(scope, 0), turn)
            self.group[eqn.outvars[0]] = scope, turn
            self.last[scope, turn] = self.now
            turn += 1
        self.round |= dict.fromkeys(eqn.outvars, turn)
