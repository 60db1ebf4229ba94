"""The placement problem of a plan, solved again under other conditions: what another placement of a value, or a pin,
costs.

The problem is built anew from what the plan was made of, with its pins released: a pin is then a restriction of the
choices of one node, so that every question is answered on the same tables, and most of the work is done once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardc.passes.place.domain import Domains
from shardc.passes.place.insert_boxing import insert_boxing
from shardc.passes.place.place import Placed, Tables
from shardc.passes.place.problem import Node
from shardc.plan.borders import problem_of
from shardc.plan.plan import SpmdPlan
from shardc.plan.rows import ports_in, rows_of
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
        boxed = self.plan.all_on_device
        rows = rows_of(boxed.jaxpr.eqns, boxed.jaxpr.outvars, boxed.placements)
        ports = ports_in(self.problem, self.plan.inputs, rows)
        masks = {n: self._domains.of[n.number].choices_at(at) for n, at in ports.items()}
        return self._solve({n: mask for n, mask in masks.items() if mask.any()}, None).values

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

    def _cheapest(self, unary: Table, number: int, state: Sequence[int]) -> int:
        """The best choice of a node beside neighbours that stay."""
        return int(self._costs(unary, number, state).argmin())

    def _costs(self, unary: Table, number: int, state: Sequence[int]) -> Table:
        """The cost of each choice of a node beside neighbours that stay."""
        return unary + sum(table[:, state[j]] for j, table in self._near.get(number, ()))

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

    def moved(self, places: Mapping[Node, Placement]) -> SpmdPlan | None:
        """A plan with the values of some nodes elsewhere, found without a search: the nodes beside a node that changes
        take what is then cheapest, each once. None: one of the values cannot be there.
        """
        values = list(self._state)
        for node, place in places.items():
            choices = np.flatnonzero(self._where(node, lambda p, at=place: p == at) & self._plain(node))
            if not choices.size:
                return None
            values[node.number] = int(choices[0])
        self._settle(values, [n.number for n in places])
        return self._plan_of(values)

    def _settle(self, values: list[int], changed: Iterable[int]) -> None:
        """Let nodes beside those that changed choose anew, and so on."""
        waiting = deque(changed)
        pinned, seen = {n.number: mask for n, mask in self._pinned.items()}, set(waiting)
        while waiting:
            for j, _ in self._near.get(waiting.popleft(), ()):
                if j in seen:
                    continue
                seen.add(j)
                costs = self._costs(self._tables.unary[j], j, values)
                costs = np.where(pinned[j], costs, FORBIDDEN) if j in pinned else costs
                if costs.min() < costs[values[j]]:
                    values[j] = int(costs.argmin())
                    waiting.append(j)

    def _plan_of(self, values: Sequence[int]) -> SpmdPlan:
        """The plan of a choice for each node."""
        plan, problem = self.plan, self.problem
        ports = {n: self._domains.placements(n, values[n.number]) for n in problem.nodes}
        boxed = insert_boxing(problem, Placed(ports, 0.0, 0.0), self.mesh)
        return SpmdPlan(
            plan.program, self.mesh, boxed, tuple(ports[n][-1] for n in problem.sources),
            tuple(ports[n][0] for n in problem.sinks), plan.ties, request=replace(plan.request, notes=()),
        )  # fmt: skip

    def _other(self, nodes: Collection[Node], port: int, found: Assignment) -> Other:
        places = tuple(self._domains.placements(n, found.values[n.number])[port] for n in nodes)
        return Other(places, self._plan_of(found.values), found.exact)
