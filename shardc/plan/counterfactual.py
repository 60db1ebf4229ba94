"""A plan's problem, solved again with other things said: what another placement of one value costs, or a pin.

The problem is built anew from what the plan was made of, with its pins released: a pin is then a restriction of the
choices of one node, so that every question is answered on the same tables, and most of the work is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc import compat
from shardc.compat import Atom, Eqn, Jaxpr
from shardc.ir.box import Boxed, box_p
from shardc.ir.nested import bodies_of
from shardc.passes.place.domain import Domains
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.place import Placed, Tables
from shardc.passes.place.problem import Nested, Node, Problem, Scope
from shardc.plan.borders import problem_of
from shardc.plan.plan import SpmdPlan
from shardc.sbp.placement import Pin, Placement, is_even
from shardc.solver import FORBIDDEN, ROUNDING, Assignment, AssignmentCost
from shardc.solver.cost_tables import Table, whole

_Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Other:
    """Another plan of the same program.

    Attributes:
      placements: of the values in question.
      plan: the best whole plan found that has them there.
      proved: whether none that has them there is better.
    """

    placements: tuple[Placement, ...]
    plan: SpmdPlan
    proved: bool

    @property
    def placement(self) -> Placement:
        """The placement of the first value."""
        return self.placements[0]


class Counterfactual:
    """The problem of a plan, to be solved again."""

    def __init__(self, plan: SpmdPlan) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.problem = problem_of(plan.request, plan.ties)
        self.pins = self._release()
        self._domains = Domains(self.problem, plan.mesh, [a for a, n in plan.mesh.axes if n > 1])
        self._tables = Tables.of(self.problem, self._domains)
        self._near: dict[int, list[tuple[int, Table]]] = {}
        for (i, j), given in self._tables.pairwise.items():
            table = whole(given)
            self._near.setdefault(i, []).append((j, table))
            self._near.setdefault(j, []).append((i, table.T))
        self._pinned = {n: self._where(n, pin.allows) for n, pin in self.pins.items()}
        self._state = self._known_state()

    def _release(self) -> dict[Node, Pin]:
        """Takes the pins of arguments, results and constraints off their nodes."""
        found: dict[Node, Pin] = {}
        for n in self.problem.nodes:
            if n.pin is None or (n.kind == "carrier" and n.path != "constrain"):
                continue
            found[n], n.pin = n.pin, None
        return found

    def _known_state(self) -> list[int]:
        """The choice of each node in the plan; where the plan does not tell, as for holds, the cheapest."""
        known: dict[Node, _Mask] = {}
        for node, ports in ports_in(self.problem, self.plan.boxed).items():
            d = self._domains.of[node.number]
            mask = np.ones(len(d.options), np.bool_)
            for port, placement in ports.items():
                table, rows = d.tables[port], d.rows[port]
                if table is not None and rows is not None:
                    mask &= rows == table.index.get(placement, -1)
            if mask.any():
                known[node] = mask
        return self._solve(known, None).values

    def _where(self, node: Node, allows: Callable[[Placement], bool], port: int = -1) -> _Mask:
        """The choices of a node that have a value where `allows` says."""
        d = self._domains.of[node.number]
        table, rows = d.tables[port], d.rows[port]
        assert table is not None and rows is not None
        return np.asarray([allows(p) for p in table.placements], np.bool_)[rows]

    def _plain(self, node: Node) -> _Mask:
        """The choices of an argument or result that a jax.Array can have."""
        if node.kind == "carrier":
            return np.ones(len(self._domains.of[node.number].options), np.bool_)
        value = node.results[0] if node.results else node.operands[0]

        def plain(p: Placement) -> bool:
            return value is None or (not p.partial_axes and is_even(value.shape, p, self.mesh.sizes))

        return self._where(node, plain)

    def _solve(self, masks: Mapping[Node, _Mask], start: list[int] | None) -> Assignment:
        """The best choices of all nodes, those in `masks` restricted."""
        unary = list(self._tables.unary)
        for node, mask in masks.items():
            unary[node.number] = np.where(mask, unary[node.number], FORBIDDEN * 2)
        if start is not None:
            start = list(start)
            for node in masks:
                if not masks[node][start[node.number]]:
                    start[node.number] = self._cheapest(unary[node.number], node.number, start)
        tables = replace(self._tables, unary=unary)
        found = tables.minimize(start)
        if found.exact or start is None:
            return found
        # what is not proved best is then no worse where the question does not reach
        values = tables.merge([found.values, start], start, tables.work, ROUNDING)
        return replace(found, values=values, cost=AssignmentCost(unary, tables.pairwise).cost(values))

    def _cheapest(self, unary: Table, number: int, state: list[int]) -> int:
        """The best choice of a node beside neighbours that stay."""
        return int(np.argmin(unary + sum(table[:, state[j]] for j, table in self._near.get(number, ()))))

    def placement(self, node: Node, port: int = -1) -> Placement:
        """Where the plan has the value at a port of a node."""
        return self._domains.placements(node, self._state[node.number])[port]

    def others(self, node: Node, port: int, most: int) -> Iterator[Other]:
        """The best plans that have a value elsewhere than the plan, the best first; pins of the value do not bind."""
        masks = dict(self._pinned)
        free = self._plain(node) if node in self.pins else np.ones(len(self._domains.of[node.number].options), np.bool_)
        seen = {self.placement(node, port)}
        for _ in range(most):
            masks[node] = free & self._where(node, lambda p: p not in seen, port)
            if not masks[node].any():
                return
            found = self._solve(masks, self._state)
            other = self._other([node], port, found)
            seen.add(other.placement)
            yield other

    def without(self, nodes: Collection[Node]) -> Other:
        """The best plan without the pins of some nodes, and where it has them."""
        masks = {**self._pinned, **{n: self._plain(n) for n in nodes}}
        return self._other(nodes, -1, self._solve(masks, self._state))

    def _other(self, nodes: Collection[Node], port: int, found: Assignment) -> Other:
        plan, problem = self.plan, self.problem
        ports = {n: self._domains.placements(n, found.values[n.number]) for n in problem.nodes}
        placed = Placed(ports, found.cost, 1 - found.bound / found.cost if found.cost else 0.0)
        boxed = insert_boxing(problem, placed, self.mesh)
        other = SpmdPlan(
            plan.program, self.mesh, boxed, tuple(ports[n][-1] for n in problem.sources),
            tuple(ports[n][0] for n in problem.sinks), plan.ties, request=replace(plan.request, notes=()),
        )  # fmt: skip
        return Other(tuple(ports[n][port] for n in nodes), other, found.exact)


def ports_in(problem: Problem, boxed: Boxed) -> dict[Node, dict[int, Placement]]:
    """The placement at each port of each node of a problem, read off its boxed program."""
    ports = _Ports(boxed)
    for node, var in zip(problem.sources, boxed.jaxpr.invars, strict=True):
        ports.note(node, -1, var)
    for node, atom in zip(problem.sinks, boxed.jaxpr.outvars, strict=True):
        ports.note(node, 0, atom)
    ports.walk(problem.scope, boxed.jaxpr)
    return ports.found


class _Ports:
    def __init__(self, boxed: Boxed) -> None:
        self.boxed = boxed
        self.found: dict[Node, dict[int, Placement]] = {}

    def note(self, node: Node, port: int, atom: Atom) -> None:
        if not compat.is_literal(atom):
            self.found.setdefault(node, {})[port] = self.boxed.placements[atom]

    def walk(self, scope: Scope, jaxpr: Jaxpr) -> None:
        for node, eqn in zip(scope.nodes, (e for e in jaxpr.eqns if e.primitive is not box_p), strict=True):
            if isinstance(node, Nested):
                self.nested(node, eqn)
                continue
            for port, atom in enumerate((*eqn.invars, *eqn.outvars)):
                self.note(node, port, atom)

    def nested(self, node: Nested, eqn: Eqn) -> None:
        for n, atom in zip(node.entries, eqn.invars, strict=True):
            self.note(n, 0, atom)
        for n, var in zip(node.exits, eqn.outvars, strict=True):
            self.note(n, -1, var)
        for k, (inner, body) in enumerate(zip(node.scopes, bodies_of(eqn), strict=True)):
            for n, var in zip(node.entries_into(k), body.invars, strict=True):
                self.note(n, len(n.operands), var)
            for (n, port), atom in zip(node.returns[k], body.outvars, strict=False):
                self.note(n, port, atom)
            self.walk(inner, body)
