"""Puts the boxings into the program: `y = f x --> x' = box[src dst] x; y = f x'`.

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
from shardc.compat import NESTED, Atom, Eqn, Jaxpr, Var, with_bodies
from shardc.ir.box import Boxed, box_p
from shardc.ir.host_callback import runs_once
from shardc.ir.walk import itemsize_of
from shardc.machine.mesh import MeshView
from shardc.passes.place.place import Placed
from shardc.passes.place.problem import Nested, Node, Problem, Scope
from shardc.sbp.boxing import Boxing, find_boxing
from shardc.sbp.placement import REPLICATED, Placement
from shardc.sbp.signature import Rule


@dataclass
class _Held:
    """A value in one scope: the placements that it is there in, and those it is held in for its readers.

    `age` says between which partings a copy for one reader was made, `again` which copies were there before one.
    """

    at: dict[Placement, Atom]
    source: str
    made_by: Eqn | None
    holds: Sequence[Placement]
    age: dict[Placement, int] = field(default_factory=dict[Placement, int])
    again: set[Placement] = field(default_factory=set[Placement])

    def part(self, age: int) -> None:
        """Forgets the copies of another age."""
        for p in [p for p, a in self.age.items() if a != age]:
            del self.at[p], self.age[p]
            self.again.add(p)


class Sources:
    """The line of the user's that made each value of a jaxpr. What an equation without a line makes has that of its
    first operand.

    Args:
      jaxpr: canonical.
      inputs: what its inputs have.

    Attributes:
      maker: of each value the equation that makes it.
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
    problem: Problem
    placed: Placed
    mesh: MeshView
    partings: Sequence[int] = ()
    placements: dict[Var, Placement] = field(default_factory=dict[Var, Placement])
    rules: dict[int, Rule] = field(default_factory=dict[int, Rule])
    now: int = 0
    _boxings: dict[tuple[Any, Placement, Placement, int], Boxing] = field(
        default_factory=dict[tuple[Any, Placement, Placement, int], Boxing]
    )

    def scope(
        self, scope: Scope, inputs: Sequence[Placement], sources: Sequence[str], returns: Sequence[Placement]
    ) -> Jaxpr:
        """The jaxpr of a scope with boxings; its inputs come and its outputs leave at the given placements."""
        elsewhere: dict[Var, _Held] = {}  # what is read where it is not born: few are
        source_of = Sources(scope.jaxpr, sources)
        eqns: list[Eqn] = []

        def is_there(atom: Atom, want: Placement) -> bool:
            """Whether a value is born where it is read."""
            at = REPLICATED if compat.is_literal(atom) else self.placements[atom]
            return at is want or at == want

        def held_of(atom: Atom) -> _Held:
            if compat.is_literal(atom):
                return _Held({REPLICATED: atom}, "", None, ())
            if atom not in elsewhere:
                born, hold = self.placements[atom], self.problem.holds.get(id(self.problem.values[atom]))
                places = self._in_order(atom, born, self.placed.ports[hold]) if hold else ()
                elsewhere[atom] = _Held({born: atom}, source_of(atom), source_of.maker.get(atom), places)
            return elsewhere[atom]

        def read(atom: Atom, want: Placement) -> Atom:
            if is_there(atom, want):
                return atom
            held = held_of(atom)
            held.part(bisect.bisect_right(self.partings, self.now))
            return reach(atom, held, want, held.holds)

        def reach(atom: Atom, held: _Held, want: Placement, through: Sequence[Placement]) -> Atom:
            """The value at `want`, boxed from the nearest place that it is in or is to be held in."""
            if want in held.at:
                return held.at[want]
            src = min((*held.at, *through), key=lambda p: self._boxing(atom, p, want).seconds)
            start = reach(atom, held, src, through[: through.index(src)] if src in through else ())
            if want == src:
                return start
            var = compat.fresh_var(atom.aval)
            params = {"src": src, "dst": want, "source": held.source, "shared": self._view(atom).shared}
            after = latest(eqns) if want in held.again else []
            eqns.append(compat.new_eqn([start, *after], [var], box_p, params, held.made_by))
            held.at[want] = var
            if want not in held.holds:
                held.age[want] = bisect.bisect_right(self.partings, self.now)
            self.placements[var] = want
            return var

        self.placements.update(zip(scope.jaxpr.invars, inputs, strict=True))
        for eqn, node in zip(scope.jaxpr.eqns, scope.nodes, strict=True):
            if isinstance(node, Nested):
                entered = [read(a, self._port(n, 0)) for a, n in zip(eqn.invars, node.entries, strict=True)]
                params = self._nested(eqn, node, compat.source_line(eqn))
                eqns.append(eqn.replace(invars=entered, params=params))
                self.placements.update(zip(eqn.outvars, [self._port(n, -1) for n in node.exits], strict=True))
            else:
                ports, split = self.placed.ports[node], len(node.operands)
                if not all(map(is_there, eqn.invars, ports)):
                    eqn = eqn.replace(invars=[read(a, p) for a, p in zip(eqn.invars, ports[:split], strict=True)])
                eqns.append(eqn)
                if node.rule is not None and not runs_once(eqn):
                    self.rules[id(eqn)] = node.rule
                for var, placement in zip(eqn.outvars, ports[split:], strict=True):
                    self.placements[var] = placement
            self.now += 1
        outvars = [read(a, p) for a, p in zip(scope.jaxpr.outvars, returns, strict=True)]
        return compat.new_jaxpr(scope.jaxpr.invars, outvars, eqns, scope.jaxpr)

    def _port(self, node: Node, port: int) -> Placement:
        return self.placed.ports[node][port]

    def _nested(self, eqn: Eqn, nested: Nested, source: str) -> dict[str, Any]:
        """Parameters of a nested equation with its bodies boxed."""
        bodies: list[Jaxpr] = []
        for k, (scope, returns) in enumerate(zip(nested.scopes, nested.returns, strict=True)):
            entries = entries_of(eqn, nested, k)
            inputs = [self._port(n, len(n.operands)) for n in entries]
            back = [self._port(n, port) for n, port in returns] or [REPLICATED] * len(scope.outputs)
            self.now += 1
            bodies.append(self.scope(scope, inputs, [source] * len(inputs), back))
        return with_bodies(eqn, bodies)

    def _in_order(self, atom: Atom, born: Placement, holds: Sequence[Placement]) -> Sequence[Placement]:
        """The places that a value is held in, each to be boxed from where it is born or from one before."""

        def cost(order: Sequence[Placement]) -> float:
            return sum(min(self._boxing(atom, p, q).seconds for p in (born, *order[:k])) for k, q in enumerate(order))

        places = tuple(dict.fromkeys(holds))
        return places if len(places) < 2 else min(itertools.permutations(places), key=cost)

    def _boxing(self, atom: Atom, src: Placement, dst: Placement) -> Boxing:
        view = self._view(atom)
        alike = aval, *_ = atom.aval, src, dst, view.shared
        if alike not in self._boxings:
            self._boxings[alike] = find_boxing(tuple(aval.shape), itemsize_of(aval), src, dst, view)
        return self._boxings[alike]

    def _view(self, atom: Atom) -> MeshView:
        return self.problem.view_for(None if compat.is_literal(atom) else self.problem.values[atom], self.mesh)


def latest(eqns: Sequence[Eqn]) -> list[Var]:
    """What was made last: what waits for it begins no earlier."""
    made = (v for e in reversed(eqns) for v in e.outvars if v.aval.size and isinstance(v.aval.dtype, np.dtype))
    return list(itertools.islice(made, 1))


def entries_of(eqn: Eqn, nested: Nested, k: int) -> list[Node]:
    """The carriers that scope `k` of a nested equation takes its inputs from."""
    if eqn.primitive.name == "while":
        loop = compat.while_of(eqn)
        nc, first = loop.cond_consts, loop.carries_at
        consts = nested.entries[:nc] if k == 0 else nested.entries[nc:first]
        return [*consts, *nested.entries[first:]]
    return nested.entries[1:] if eqn.primitive.name == "cond" else nested.entries


def insert_boxing(problem: Problem, placed: Placed, mesh: MeshView, partings: Sequence[int] = ()) -> Boxed:
    """The problem's program with the boxings that its placement needs.

    Args:
      problem, placed, mesh: the problem and its solution.
      partings: points of the program (`lifetimes`), in order. What is boxed for one reader serves later ones too, but
        none behind a parting: it is boxed anew for these, as the solution has paid for, and is not in memory between.
    """
    ins = _Inserter(problem, placed, mesh, partings)
    inputs = [placed.ports[n][-1] for n in problem.sources]
    returns = [placed.ports[n][0] for n in problem.sinks]
    sources = [f"argument {n.path}" for n in problem.sources]
    return Boxed(ins.scope(problem.scope, inputs, sources, returns), ins.placements, ins.rules)
