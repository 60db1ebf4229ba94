"""Inserts the boxings into the program: `y = f x --> x' = box[src dst] x; y = f x'`.

After this pass every variable has one placement. `box` is the identity on the logical value, so the program still runs
on one device and gives the same numbers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.ir.box import Boxed, box_p
from shardc.ir.host_callback import runs_once
from shardc.ir.nested import NESTED, with_bodies
from shardc.ir.walk import itemsize_of
from shardc.machine.mesh import MeshView
from shardc.passes.place.place import Placed
from shardc.passes.place.problem import Nested, Node, Problem, Scope
from shardc.sbp.boxing import Boxing, find_boxing
from shardc.sbp.placement import REPLICATED, Placement
from shardc.sbp.signature import Rule


@dataclass
class _Copies:
    """A value in one scope: the placements that it has there, and those that it is held in for its readers.

    Attributes:
      at: the value in each placement.
      holds: the placements of its hold.
      age: for a copy for one reader, the number of partings before it.
      forgotten: placements that had a copy before a parting.
    """

    at: dict[Placement, Atom]
    source: str
    made_by: Eqn | None
    holds: Sequence[Placement]
    age: dict[Placement, int] = field(default_factory=dict[Placement, int])
    forgotten: set[Placement] = field(default_factory=set[Placement])

    def part(self, age: int) -> None:
        """Forgets the copies of another age."""
        for p in [p for p, a in self.age.items() if a != age]:
            del self.at[p], self.age[p]
            self.forgotten.add(p)


class Sources:
    """The user's source line of each value of a jaxpr. The result of an equation without a line has that of its first
    operand.

    Args:
      jaxpr: canonical.
      inputs: the lines of its inputs.

    Attributes:
      maker: the equation that makes each value.
    """

    def __init__(self, jaxpr: Jaxpr, inputs: Sequence[str]) -> None:
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._known = dict(zip(jaxpr.invars, inputs, strict=True))

    def __call__(self, v: Var) -> str:
        without: list[Var] = []
        while v not in self._known:
            eqn = self.maker[v]
            line = compat.source_line(eqn)
            first = None if line or eqn.primitive.name in NESTED else next(iter(compat.variables(eqn.invars)), None)
            if first is None:
                self._known[v] = line
            else:
                without.append(v)
                v = first
        self._known |= dict.fromkeys(without, self._known[v])
        return self._known[v]


@dataclass
class _Inserter:
    """The walk that inserts boxings. `now`: the point of the program, `partings` as for `insert_boxing`."""

    problem: Problem
    placed: Placed
    mesh: MeshView
    partings: Sequence[int] = ()
    placements: dict[Var, Placement] = field(default_factory=dict[Var, Placement])
    rules: dict[Eqn, Rule] = field(default_factory=dict[Eqn, Rule])
    now: int = 0
    _boxings: dict[tuple[Any, Placement, Placement, int], Boxing] = field(
        default_factory=dict[tuple[Any, Placement, Placement, int], Boxing]
    )

    def scope(
        self, scope: Scope, inputs: Sequence[Placement], sources: Sequence[str], returns: Sequence[Placement]
    ) -> Jaxpr:
        """The jaxpr of a scope with boxings; its inputs come and its outputs leave at the given placements."""
        jaxpr, boxed = scope.jaxpr, _BoxedScope(self, Sources(scope.jaxpr, sources))
        self.placements.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn, node in zip(jaxpr.eqns, scope.nodes, strict=True):
            if isinstance(node, Nested):
                entered = [boxed.read(a, self._port(n, 0)) for a, n in zip(eqn.invars, node.entries, strict=True)]
                params = self._nested(eqn, node, compat.source_line(eqn))
                boxed.eqns.append(eqn.replace(invars=entered, params=params))
                self.placements.update(zip(eqn.outvars, [self._port(n, -1) for n in node.exits], strict=True))
            else:
                ports, split = self.placed.ports[node], len(node.operands)
                if not all(map(boxed.is_there, eqn.invars, ports)):
                    eqn = eqn.replace(invars=[boxed.read(a, p) for a, p in zip(eqn.invars, ports[:split], strict=True)])
                boxed.eqns.append(eqn)
                if node.rule is not None and not runs_once(eqn):
                    self.rules[eqn] = node.rule
                for var, placement in zip(eqn.outvars, ports[split:], strict=True):
                    self.placements[var] = placement
            self.now += 1
        outvars = [boxed.read(a, p) for a, p in zip(jaxpr.outvars, returns, strict=True)]
        return compat.new_jaxpr(jaxpr.invars, outvars, boxed.eqns, jaxpr)

    def _port(self, node: Node, port: int) -> Placement:
        return self.placed.ports[node][port]

    def _nested(self, eqn: Eqn, nested: Nested, source: str) -> dict[str, Any]:
        """Parameters of a nested equation with boxings in its bodies."""
        bodies: list[Jaxpr] = []
        for k, (scope, returns) in enumerate(zip(nested.scopes, nested.returns, strict=True)):
            entries = nested.entries_into(k)
            inputs = [self._port(n, len(n.operands)) for n in entries]
            back = [self._port(n, port) for n, port in returns] or [REPLICATED] * len(scope.outputs)
            self.now += 1
            bodies.append(self.scope(scope, inputs, [source] * len(inputs), back))
        return with_bodies(eqn, bodies)

    def in_order(self, atom: Atom, born: Placement, holds: Sequence[Placement]) -> Sequence[Placement]:
        """The placements that a value is held in, in the order of boxing: each from the value itself or from one
        before."""

        def cost(order: Sequence[Placement]) -> float:
            return sum(min(self.boxing(atom, p, q).seconds for p in (born, *order[:k])) for k, q in enumerate(order))

        places = tuple(dict.fromkeys(holds))
        return places if len(places) < 2 else min(itertools.permutations(places), key=cost)

    def boxing(self, atom: Atom, src: Placement, dst: Placement) -> Boxing:
        view = self.view(atom)
        alike = aval, *_ = atom.aval, src, dst, view.shared
        if alike not in self._boxings:
            self._boxings[alike] = find_boxing(tuple(aval.shape), itemsize_of(aval), src, dst, view)
        return self._boxings[alike]

    def view(self, atom: Atom) -> MeshView:
        return self.problem.view_for(None if compat.is_literal(atom) else self.problem.values[atom], self.mesh)


class _BoxedScope:
    """The equations of one scope with boxings, as far as they are built.

    Attributes:
      eqns: the equations so far.
      copies: of the values that are read in another placement than they are made in: few are.
    """

    def __init__(self, inserter: _Inserter, source_of: Sources) -> None:
        self.inserter, self.source_of = inserter, source_of
        self.eqns: list[Eqn] = []
        self.copies: dict[Var, _Copies] = {}

    def is_there(self, atom: Atom, want: Placement) -> bool:
        """Whether a value is made in the placement in which it is read."""
        at = REPLICATED if compat.is_literal(atom) else self.inserter.placements[atom]
        return at is want or at == want

    def read(self, atom: Atom, want: Placement) -> Atom:
        """The value at `want`, boxed if it is not there."""
        if self.is_there(atom, want):
            return atom
        copies = self.copies_of(atom)
        copies.part(self.age)
        return self.reach(atom, copies, want, copies.holds)

    @property
    def age(self) -> int:
        """The number of partings before this point."""
        return bisect.bisect_right(self.inserter.partings, self.inserter.now)

    def copies_of(self, atom: Atom) -> _Copies:
        if compat.is_literal(atom):
            return _Copies({REPLICATED: atom}, "", None, ())
        if atom not in self.copies:
            ins = self.inserter
            born, hold = ins.placements[atom], ins.problem.holds.get(id(ins.problem.values[atom]))
            places = ins.in_order(atom, born, ins.placed.ports[hold]) if hold else ()
            self.copies[atom] = _Copies({born: atom}, self.source_of(atom), self.source_of.maker.get(atom), places)
        return self.copies[atom]

    def reach(self, atom: Atom, copies: _Copies, want: Placement, through: Sequence[Placement]) -> Atom:
        """The value at `want`, boxed from the cheapest placement that it has or is to be held in."""
        if want in copies.at:
            return copies.at[want]
        ins = self.inserter
        src = min((*copies.at, *through), key=lambda p: ins.boxing(atom, p, want).seconds)
        start = self.reach(atom, copies, src, through[: through.index(src)] if src in through else ())
        if want == src:
            return start
        var = compat.fresh_var(atom.aval)
        params = {"src": src, "dst": want, "source": copies.source, "shared": ins.view(atom).shared}
        after = latest(self.eqns) if want in copies.forgotten else []
        self.eqns.append(compat.new_eqn([start, *after], [var], box_p, params, copies.made_by))
        copies.at[want] = var
        if want not in copies.holds:
            copies.age[want] = self.age
        ins.placements[var] = want
        return var


def latest(eqns: Sequence[Eqn]) -> list[Var]:
    """The value that was made last: an equation that reads it starts no earlier."""
    made = (v for e in reversed(eqns) for v in e.outvars if v.aval.size and isinstance(v.aval.dtype, np.dtype))
    return list(itertools.islice(made, 1))


def insert_boxing(problem: Problem, placed: Placed, mesh: MeshView, partings: Sequence[int] = ()) -> Boxed:
    """The problem's program with the boxings of a solution.

    Args:
      problem, placed, mesh: the problem and its solution.
      partings: points of the program (`live_ranges`), in order. A boxing for one reader serves later ones too, but none
        behind a parting. These get a boxing of their own, whose cost the solution has counted, and the copy is not in
        memory between.
    """
    ins = _Inserter(problem, placed, mesh, partings)
    inputs = [placed.ports[n][-1] for n in problem.sources]
    returns = [placed.ports[n][0] for n in problem.sinks]
    sources = [f"argument {n.path}" for n in problem.sources]
    return Boxed(ins.scope(problem.scope, inputs, sources, returns), ins.placements, ins.rules)
