"""Inserts stage boundaries into a program that has none.

    a = f x; b = g a; ...; ct_a = g' ct_b; ct_x = f' ct_a
        -->  a = f x; a1 = stage_boundary[cut 0] a; b = g a1; ...; ct_a = g' ct_b; ct1 = stage_boundary[cut 0, backward]
             ct_a; ct_x = f' ct1

All values that cross a point of the folded body pass the boundary there, as if the user had written
`stage_boundary((x, skip, ...))`. Values that are recomputed wherever they are read need no boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc import compat
from shardc.compat import Atom, Eqn, Var
from shardc.ir.boundary import stage_boundary_p
from shardc.ir.program import Program
from shardc.pipeline.cut_search.cut_points import Points
from shardc.pipeline.cut_search.fold_body import FoldedBody


def mark_stages(program: Program, body: FoldedBody, points: Points, cuts: Sequence[int]) -> Program:
    """The program with a boundary at each of the points `cuts`, in ascending order."""
    eqns = _Marker(body, points, cuts).run()
    loop, jaxpr = replace(body.loop, eqns=eqns).equation(), program.jaxpr
    outer = [loop if e is body.loop.eqn else e for e in jaxpr.eqns]
    return program.after("mark_stages", compat.new_jaxpr(jaxpr.invars, jaxpr.outvars, outer, jaxpr))


class _Marker:
    def __init__(self, body: FoldedBody, points: Points, cuts: Sequence[int]) -> None:
        self.body = body
        self.ahead = [int(points.ahead[i]) for i in cuts]
        self.back = [int(points.back[i]) for i in cuts]
        self.names: dict[Var, list[tuple[int, Var]]] = {}  # the name of a value after each cut that it crosses
        self.found: list[Eqn] = []

    def run(self) -> list[Eqn]:
        body, fold = self.body, self.body.fold
        for t, eqn in enumerate(body.eqns):
            if t < fold:
                for k in [k for k, c in enumerate(self.ahead) if c == t]:
                    self._mark_forward(k)
            else:
                for k in [k for k, c in reversed(list(enumerate(self.back))) if c == t]:
                    self._mark_backward(k)
            self.found.append(eqn if eqn in body.sums else self._renamed(eqn, t))
        return self.found

    def _renamed(self, eqn: Eqn, t: int) -> Eqn:
        """`eqn` with its operands renamed to their names on its stage."""
        stage = sum(c <= t for c in self.ahead) if t < self.body.fold else sum(c > t for c in self.back)
        return eqn.replace(invars=[self._name(a, stage) for a in eqn.invars])

    def _name(self, atom: Atom, stage: int) -> Atom:
        if compat.is_literal(atom) or atom not in self.names:
            return atom
        if self.body.made[atom] >= self.body.fold:  # a cotangent: the last boundary that it passed
            return self.names[atom][-1][1]
        passed = [name for k, name in self.names[atom] if k < stage]
        return passed[-1] if passed else atom

    def _mark_forward(self, k: int) -> None:
        body, c = self.body, self.ahead[k]
        crossing = [
            v for v, t in body.made.items()
            if t < c and v not in body.cheap and any(c <= r < body.fold for r in body.reads.get(v, ()))
        ]  # fmt: skip
        self._mark(k, crossing, backward=False)

    def _mark_backward(self, k: int) -> None:
        body, c = self.body, self.back[k]
        crossing = [v for v, t in body.made.items() if body.fold <= t < c and body.reads.get(v, (-1,))[-1] >= c]
        self._mark(k, crossing, backward=True)

    def _mark(self, k: int, crossing: Sequence[Var], backward: bool) -> None:
        for leaf, v in enumerate(crossing):
            last = self.names[v][-1][1] if v in self.names else v
            name = compat.fresh_var(v.aval)
            params = {"cut": k, "leaf": leaf, "backward": backward}
            self.found.append(compat.new_eqn([last], [name], stage_boundary_p, params, body_line(self.body, v)))
            self.names.setdefault(v, []).append((k, name))


def body_line(body: FoldedBody, v: Var) -> Eqn:
    """The equation that makes a value, for its source line."""
    return body.eqns[body.made[v]]
