"""Inserts the boxings into the program: `y = f x --> x' = box[src dst] x; y = f x'`.

After this pass every variable has one placement. `box` is the identity on the logical value, so the program still runs
on one device and gives the same numbers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr, Var
from shardc.errors import PlacementError
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
    """The copies of a value in one scope, by placement.

    Attributes:
      at: the variable of each copy.
      source: the user's source line of the value.
      made_by: the equation that makes the value, if any.
      holds: the placements of the value's hold, which serve several readers.
      age: for each copy that is not in `holds`, the number of partings before it was made.
      forgotten: the placements whose copies were dropped at a parting.
    """

    at: dict[Placement, Atom]
    source: str
    made_by: Eqn | None
    holds: Sequence[Placement]
    age: dict[Placement, int] = field(default_factory=dict[Placement, int])
    forgotten: set[Placement] = field(default_factory=set[Placement])

    def part(self, age: int) -> None:
        """Drop the copies that were made before the last parting; `age` is the number of partings so far."""
        for p in [p for p, a in self.age.items() if a != age]:
            del self.at[p], self.age[p]
            self.forgotten.add(p)


class Sources:
    """The user's source line of each value of a jaxpr. Results of an equation without a source line have the line of
    its first operand.

    Args:
      jaxpr: a canonical jaxpr.
      inputs: the source lines of its inputs.

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
    """The walk that inserts boxings. `now`: the present point of the program; `partings`, `paths`: as for
    `insert_boxing`."""

    problem: Problem
    placed: Placed
    mesh: MeshView
    partings: Sequence[int] = ()
    paths: Iterator[Sequence[Placement]] | None = None
    placements: dict[Var, Placement] = field(default_factory=dict[Var, Placement])
    rules: dict[Eqn, Rule] = field(default_factory=dict[Eqn, Rule])
    now: int = 0
    _boxings: dict[tuple[Any, Placement, Placement, int], Boxing] = field(
        default_factory=dict[tuple[Any, Placement, Placement, int], Boxing]
    )

    def scope(
        self, scope: Scope, inputs: Sequence[Placement], sources: Sequence[str], returns: Sequence[Placement]
    ) -> Jaxpr:
        """The jaxpr of a scope with boxings, whose inputs have the placements `inputs` and whose outputs have the
        placements `returns`. `sources`: the source lines of the inputs."""
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
                if self.paths is not None or not all(map(boxed.is_there, eqn.invars, ports)):
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
        """The parameters of a nested equation, with boxings in its bodies."""
        bodies: list[Jaxpr] = []
        for k, (scope, returns) in enumerate(zip(nested.scopes, nested.returns, strict=True)):
            entries = nested.entries_into(k)
            inputs = [self._port(n, len(n.operands)) for n in entries]
            back = [self._port(n, port) for n, port in returns] or [REPLICATED] * len(scope.outputs)
            self.now += 1
            bodies.append(self.scope(scope, inputs, [source] * len(inputs), back))
        return with_bodies(eqn, bodies)

    def in_order(self, atom: Atom, born: Placement, holds: Sequence[Placement]) -> Sequence[Placement]:
        """The placements of a hold in the order that boxes cheapest: each is boxed from `born` or from one before
        it."""

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
    """The equations of one scope with boxings, while they are built.

    Attributes:
      eqns: the equations so far.
      copies: the copies of each value that some reader needs in another placement.
    """

    def __init__(self, inserter: _Inserter, source_of: Sources) -> None:
        self.inserter, self.source_of = inserter, source_of
        self.eqns: list[Eqn] = []
        self.copies: dict[Var, _Copies] = {}

    def is_there(self, atom: Atom, want: Placement) -> bool:
        """Whether the value's own placement is the one that is wanted."""
        at = REPLICATED if compat.is_literal(atom) else self.inserter.placements[atom]
        return at is want or at == want

    def read(self, atom: Atom, want: Placement) -> Atom:
        """The value in the placement `want`, boxed if necessary."""
        if self.inserter.paths is not None:
            return self.follow(atom, next(self.inserter.paths))
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
            places = ins.in_order(atom, born, ins.placed.ports[hold]) if hold and ins.paths is None else ()
            self.copies[atom] = _Copies({born: atom}, self.source_of(atom), self.source_of.maker.get(atom), places)
        return self.copies[atom]

    def reach(self, atom: Atom, copies: _Copies, want: Placement, through: Sequence[Placement]) -> Atom:
        """The value in the placement `want`, boxed from the cheapest source: a copy, or a placement of `through` that
        is boxed first."""
        if want in copies.at:
            return copies.at[want]
        ins = self.inserter
        src = min((*copies.at, *through), key=lambda p: ins.boxing(atom, p, want).seconds)
        start = self.reach(atom, copies, src, through[: through.index(src)] if src in through else ())
        if want != src:
            copies.at[want] = self.box(atom, copies, (src, start), want, again=want in copies.forgotten)
            if want not in copies.holds:
                copies.age[want] = self.age
        return copies.at[want]

    def follow(self, atom: Atom, path: Sequence[Placement]) -> Atom:
        """The value in the last placement of a path, boxed from each placement on it to the next.

        Raises:
          PlacementError: the value has no copy in the first placement of the path.
        """
        copies = self.copies_of(atom)
        if path[0] not in copies.at:
            there = ", ".join(map(str, copies.at))
            raise PlacementError(f"a value of {copies.source or 'a literal'} is read at {path[0]}, and is at {there}.")
        for src, want in itertools.pairwise(path):
            copies.at[want] = self.box(atom, copies, (src, copies.at[src]), want, again=want in copies.at)
        return copies.at[path[-1]]

    def box(self, atom: Atom, copies: _Copies, copy: tuple[Placement, Atom], want: Placement, *, again: bool) -> Var:
        """A boxing of a copy (placement, variable) to the placement `want`. `again`: an earlier boxing to `want` exists
        or was dropped; the new one starts after the last equation so far."""
        (src, start), var = copy, compat.fresh_var(atom.aval)
        shared = self.inserter.view(atom).shared
        params = {"src": src, "dst": want, "source": copies.source, "shared": shared}
        after = latest(self.eqns) if again else []
        self.eqns.append(compat.new_eqn([start, *after], [var], box_p, params, copies.made_by))
        self.inserter.placements[var] = want
        return var


def latest(eqns: Sequence[Eqn]) -> list[Var]:
    """The value that was made last: an equation that reads it starts no earlier."""
    made = (v for e in reversed(eqns) for v in e.outvars if v.aval.size and isinstance(v.aval.dtype, np.dtype))
    return list(itertools.islice(made, 1))


def insert_boxing(
    problem: Problem, placed: Placed, mesh: MeshView, partings: Sequence[int] = (),
    paths: Iterable[Sequence[Placement]] | None = None,
) -> Boxed:  # fmt: skip
    """The problem's program with the boxings of a solution.

    Args:
      problem, placed, mesh: the problem and its solution.
      partings: points of the program (`live_ranges`), in increasing order. A boxed copy that no hold has is shared by
        later readers only up to the next parting. Later readers get a boxing of their own, whose cost the solution has
        counted, and the copy is not in memory between.
      paths: for each operand, in the order of the program, the placements that it goes through; the first is one that
        its value already has. None: the cheapest way through the placements of the value's hold.
    """
    ins = _Inserter(problem, placed, mesh, partings, None if paths is None else iter(paths))
    inputs = [placed.ports[n][-1] for n in problem.sources]
    returns = [placed.ports[n][0] for n in problem.sinks]
    sources = [f"argument {n.path}" for n in problem.sources]
    return Boxed(ins.scope(problem.scope, inputs, sources, returns), ins.placements, ins.rules)
